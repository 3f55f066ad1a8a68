"""The base of the writers of datapoints."""

import abc
from collections.abc import Mapping
from typing import Any

from granular._support.other_names import OF_WRITERS, OtherNames
from granular.aio.datasets.appending import warn_of_found
from granular.aio.paths.path import Path
from granular.aio.runtime.lifecycle import Publishing
from granular.formats.layout import Layout, check_spec


class DatapointWriter(OtherNames, Publishing):
    """Base of the writers of a single dataset and of a sharded one."""

    _answers = OF_WRITERS

    def __init__(self, directory: Path, spec: Mapping[str, str], layout: Layout) -> None:
        super().__init__()
        self.directory = directory
        self._name = f'{directory}'
        self._layout = layout
        self._spec = check_spec(spec, layout)
        self._found, self._untold = 0, False  # datapoints that existed; if they are a dataset, unknown to the caller

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        return dict(self._spec)

    @property
    def found(self) -> int:
        """Datapoints that existed when it was opened, of a sharded dataset in its shards: continue after them."""
        self._untold = False
        return self._found

    async def append(self, datapoint: Mapping[str, Any], flush: bool = True) -> int:
        """Append a datapoint and return its index. All values are encoded before any is written.

        The index is that in the dataset; of a sharded one, that among the datapoints which this writer has appended.

        Concurrent calls take turns, in the order of the calls.

        Args:
          datapoint: a value for each key of the spec; for a sequence any iterable of values.
          flush: write to the file now. To a bucket, bytes are uploaded in parts, each as soon as it is full.

        Raises:
          DatapointError: if its keys differ from those of the spec.
          EncodeError: if an encoder rejects a value.
        """
        if self._state != 'open':
            await self._ensure_open()
        async with self._turns.turn():
            if self._untold:
                self._untold = False
                warn_of_found(self._name, self._found)
            return await self._append(datapoint, flush)

    async def flush(self) -> None:
        """Write the appended datapoints to the files, or to the part of each upload that is being filled."""
        if self._state != 'open':
            await self._ensure_open()
        async with self._turns.turn():
            await self._flush()

    @abc.abstractmethod
    async def _append(self, datapoint: Mapping[str, Any], flush: bool) -> int:
        """Append a datapoint, while no other call does."""

    @abc.abstractmethod
    async def _flush(self) -> None:
        """Write the appended datapoints, while no other call appends."""
