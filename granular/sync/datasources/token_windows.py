"""The sync API of :mod:`granular.aio.datasources.token_windows`."""

from collections.abc import Iterator
from typing import Any, SupportsIndex, overload

import numpy as np

from granular.aio.datasources import token_windows as core
from granular.aio.runtime.bridge import run
from granular.sync.base import Batched, Reader, sync_doc
from granular.sync.datasets import DatasetReader, ShardedDatasetReader
from granular.sync.iteration import Iteration


class TokenWindows(Reader[core.TokenWindows, core.Window], Batched):
    __doc__ = sync_doc(core.TokenWindows)

    aio: core.TokenWindows

    def __init__(
        self, reader: DatasetReader | ShardedDatasetReader | Any, key: str, length: int, stride: int | None = None
    ) -> None:
        self._open(core.TokenWindows(reader, key, length, stride))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the windows."""
        return self.aio.dtype

    @overload
    def get(self, index: SupportsIndex) -> core.Window: ...
    @overload
    def get(self, index: slice | range) -> list[core.Window]: ...
    def get(self, index: SupportsIndex | slice | range) -> Any:
        """Return the window at an index, negative from the end, or the windows of a slice; like ``windows[index]``.

        Raises:
          OutOfRangeError: an ``IndexError``.
        """
        return run(self.aio.get(index))

    __getitem__ = get

    def fetch(self, indices: Any) -> list[core.Window]:
        """Return many windows, read in one fan-out.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.

        Returns:
          The windows, in the order requested: dicts with ``key`` and a read-only array of shape (length,).
        """
        return run(self.aio.fetch(indices))

    def __iter__(self) -> Iterator[core.Window]:
        return Iteration(self.aio.__aiter__)
