"""The steps of episodes, of any source."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from granular._support.indexing import Ints
from granular.aio.datasets.reader import DatasetReader
from granular.aio.datasets.sharded_reader import (
    AnyReader,
    ShardedDatasetReader,
    columns_of_shards,
    compare_shards,
    indexed_shards_of,
)
from granular.aio.datasets.steps import Steps, StoredSteps, Values, joined, values_at
from granular.aio.datasources.lerobot import LeRobotDataSource
from granular.aio.pipeline.execution.failures import without_failures
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.pipeline.nodes.source import Source
from granular.errors import InvalidArgumentError, NotFoundError, ObjectChangedError, UnknownKeyError

T = TypeVar('T')


class StepSource(Protocol):
    """Episodes whose values are read by their steps."""

    async def open(self) -> None:
        """Read where the values are."""

    def lengths(self, key: str) -> Ints | None:
        """Return how many steps each episode has of a key; None if that is not known before it is read."""

    async def read(self, wanted: Sequence[Steps]) -> list[Values]:
        """Return the values of keys, in the order of the steps, or of the episodes."""


def step_source(reader: Any, keys: Mapping[str, bool]) -> StepSource:
    """Return the steps of a reader's episodes. ``keys`` is True for those whose values are read whole."""
    if isinstance(reader, DatasetReader | ShardedDatasetReader):
        return _Stored(reader, keys)
    if isinstance(reader, LeRobotDataSource):
        return _Told(reader, keys)
    return _Fetched(convert(reader), keys)


class _Stored:
    """The steps of a dataset of granular."""

    def __init__(self, reader: AnyReader, keys: Mapping[str, bool]) -> None:
        self._reader = reader
        self._keys = keys

    async def open(self) -> None:
        await compare_shards(self._reader)
        self._steps = StoredSteps(columns_of_shards(self._reader), self._keys)
        await self._retried(self._steps.open)

    def lengths(self, key: str) -> Ints | None:
        return self._steps.lengths(key)

    async def read(self, wanted: Sequence[Steps]) -> list[Values]:
        return await self._retried(lambda: self._steps.read(wanted))

    async def _retried(self, read: Callable[[], Awaitable[T]]) -> T:
        """Read. If a shard is not the one in the index, the error says so."""
        try:
            return await read()
        except (ObjectChangedError, NotFoundError) as error:
            if (indexed := indexed_shards_of(self._reader)) is None:
                raise
            raise indexed.outdated(error) from error


class _Told:
    """The steps of a source that reads them itself."""

    def __init__(self, source: LeRobotDataSource[Any], keys: Mapping[str, bool]) -> None:
        self._source = source
        self._keys = keys

    async def open(self) -> None:
        for key in self._keys:
            self._lengths = await self._source.sizes(key)

    def lengths(self, key: str) -> Ints:
        return self._lengths

    async def read(self, wanted: Sequence[Steps]) -> list[Values]:
        return await self._source.read(wanted)


class _Fetched:
    """The steps of any other source, whose elements are read whole."""

    def __init__(self, source: Source, keys: Mapping[str, bool]) -> None:
        if source.endless or source.sparse:
            raise InvalidArgumentError(
                f'{source.describe()}: expected episodes that are known by their number: windows come before repeat, '
                f'filter and the like'
            )
        self._whole = source
        self._source = source.select(list(keys)) or source
        self._keys = [key for key, is_whole in keys.items() if not is_whole]
        self._lengths: dict[str, Ints] = {}

    async def open(self) -> None:
        for key in self._keys:
            if (sizes := await self._whole.measure((key,))) is not None:
                self._lengths[key] = sizes

    def lengths(self, key: str) -> Ints | None:
        return self._lengths.get(key)

    async def read(self, wanted: Sequence[Steps]) -> list[Values]:
        episodes = np.unique(np.concatenate([own.datapoints for own in wanted]))
        datapoints = without_failures(await self._source.fetch(episodes))
        by_episode = dict(zip(episodes.tolist(), datapoints, strict=True))
        return [self._values(own, by_episode) for own in wanted]

    def _values(self, wanted: Steps, datapoints: Mapping[int, Any]) -> Values:
        key = wanted.key
        out = []
        for episode, steps, length in zip(*wanted.once(), strict=True):
            name = f'{self._whole.describe()}: datapoint {episode}, key {key!r}'
            try:
                value = datapoints[int(episode)][key]
            except (KeyError, TypeError, IndexError):
                raise UnknownKeyError(f'{name}: has no such key') from None
            out.append(value if wanted.begins is None else values_at(value, steps, length, name))
        return out if wanted.begins is None else joined(out)
