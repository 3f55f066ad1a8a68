"""Datasets that pipelines read."""

import pytest

from granular import aio


@pytest.fixture
def fetches(monkeypatch):
    """The number of indices of each ``fetch`` of a dataset's reader."""
    numbers = []
    fetch = aio.DatasetReader.fetch

    async def counted(self, indices, mask=None):
        numbers.append(len(indices))
        return await fetch(self, indices, mask)

    monkeypatch.setattr(aio.DatasetReader, 'fetch', counted)
    return numbers
