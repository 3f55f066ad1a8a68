"""Values at steps of datapoints: rows of arrays, values of sequences and frames of videos, read in one fan-out."""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular import formats
from granular._support.indexing import Ints, cut_into, grouped, placed
from granular.aio.bags.records import Rows, read_limits, read_parts
from granular.aio.datasets.array_table import ArrayTable
from granular.aio.datasets.clips import Clips, FrameTables, frames_of
from granular.aio.datasets.codec import Field, decode_records, is_video
from granular.aio.datasets.column_reads import read_references
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.picks import Datasets, Picks
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import map_threads, offload
from granular.aio.stores.fanout import retry_if_corrupt
from granular.errors import DatapointError, DecodeError
from granular.formats.checksums import check
from granular.formats.frames import FrameTable

T = TypeVar('T')
Values = list[Any] | NDArray[Any]
"""A value for each step."""

_NONE: Final = np.zeros(0, np.int64)


class Steps(NamedTuple):
    """Values of a key that are wanted: those at some steps of datapoints, or whole values.

    Attributes:
      key: the key.
      datapoints: the datapoint of each run of steps, in ascending order; of whole values each once.
      lengths: the number of steps that each of these datapoints has.
      begins: the first step of each run, in ascending order in a datapoint; None for whole values.
      stops: the step behind each run, at most the first one of the next run.
      fps: steps in a second, by which frames of a video are found; None to find them by their number.
    """

    key: str
    datapoints: Ints
    lengths: Ints
    begins: Ints | None = None
    stops: Ints | None = None
    fps: float | None = None

    def each(self) -> tuple[Ints, Ints]:
        """Return the datapoint of each step, and the step."""
        if self.begins is None or self.stops is None:
            return self.datapoints, _NONE
        counts = self.stops - self.begins
        before = np.cumsum(counts) - counts
        return self.datapoints.repeat(counts), np.arange(counts.sum()) + (self.begins - before).repeat(counts)

    def once(self) -> tuple[Ints, list[Ints], list[int]]:
        """Return each datapoint once, its steps, and the number of steps that it has."""
        datapoints, steps = self.each()
        once, firsts = np.unique(self.datapoints, return_index=True)
        edges = np.flatnonzero(np.diff(datapoints)) + 1
        return once, np.split(steps, edges), self.lengths[firsts].tolist()


def values_at(value: Any, steps: Ints, length: int, name: str) -> Values:
    """Return the values at steps of a sequence that was read whole; raise ``DatapointError`` for another length."""
    if not isinstance(value, np.ndarray | list | tuple) or getattr(value, 'shape', None) == ():
        raise DatapointError(
            f'{name}: expected {length} values, one for each step, got {type(value).__name__}: pass True for a value '
            f'that all steps share'
        )
    if len(value) != length:
        raise DatapointError(f'{name}: expected {length} values, one for each step, got {len(value)}')
    return value[steps] if isinstance(value, np.ndarray) else [value[step] for step in steps.tolist()]


def joined(parts: Sequence[Values]) -> Values:
    """Return the values of several datapoints in one."""
    alike = {(part.dtype, part.shape[1:]) if isinstance(part, np.ndarray) else None for part in parts}
    if len(alike) == 1 and None not in alike:
        return np.concatenate(parts)
    return [value for part in parts for value in part]


class StoredSteps:
    """The values of the keys of a dataset by their steps.

    Args:
      shards: the dataset, or its shards.
      keys: the keys, and True for those whose values are read whole.
    """

    def __init__(self, shards: Sequence[Columns], keys: Mapping[str, bool]) -> None:
        self.datasets = Datasets.of(shards)
        self.arrays: dict[str, ArrayTable] = {}  # of keys whose arrays are read in parts
        self.tables = FrameTables()
        self.records: dict[str, tuple[Ints, Ints]] = {}  # the first record, and the number of records
        self.choices = {choice.field.key: choice for choice in shards[0].choose(tuple(keys))}
        self._keys = keys
        self._shards = shards
        self._firsts = np.cumsum([0, *(columns.length for columns in shards)])
        self._remote = any(columns.is_remote for columns in shards)

    async def open(self) -> None:
        """Read where the values of the keys are."""
        await retry_if_corrupt(self._remote, self._open)
        for key, is_whole in self._keys.items():
            field = self.choices[key].field
            if field.kind == 'array' and not is_whole:
                self.arrays[key] = await ArrayTable.read(self._shards, key)

    async def _open(self) -> None:
        lengths = np.array([columns.length for columns in self._shards], np.int64)
        indices = np.concatenate([np.arange(length) for length in lengths.tolist()])
        picks = Picks(self.datasets, np.arange(len(lengths)), lengths, indices)
        references = await read_references(picks)
        for key, choice in self.choices.items():
            if self._shards[0].refs is None:
                self.records[key] = indices, np.ones(1, np.int64)
                continue
            first, count = (numbers[:, choice.number].copy() for numbers in references)
            limits = self.datasets.bags.lengths[picks.record_owners(choice.number)].repeat(lengths)
            bad = (first < 0) | (count < 0) | (first > limits - count)
            if bad.any():
                columns, index = picks.locate(int(np.argmax(bad)))
                columns.check_reference(key, index, int(first[bad][0]), int(count[bad][0]))
            self.records[key] = first, count

    def lengths(self, key: str) -> Ints | None:
        """Return how many steps each datapoint has of a key; None if that is not known before it is read."""
        if key in self.arrays:
            return self.arrays[key].counts
        return self.records[key][1] if self.choices[key].field.many else None

    async def read(self, wanted: Sequence[Steps]) -> list[Values]:
        """Return values of keys, read in one fan-out, in the order of the steps, or of the datapoints.

        The heads of videos are read before, and kept.

        Raises:
          DatapointError: for a datapoint that has another number of steps.
          DecodeError: for a value that is not decoded.
        """
        return await retry_if_corrupt(self._remote, lambda: self._read(wanted))

    async def _read(self, wanted: Sequence[Steps]) -> list[Values]:
        reads = [self._kind(own)(self, own) for own in wanted]
        located = [read.located() for read in reads]
        owners, indices = (np.concatenate([own[i] for own in located]) for i in (0, 1))
        starts, stops = await self._limits(owners, indices)
        edges = np.cumsum([len(own) for own, _ in located])[:-1]
        for read, *own in zip(reads, np.split(starts, edges), np.split(stops, edges), strict=True):
            read.starts, read.stops = own
        spans = await gather([read.spans() for read in reads])
        parts = await self.fetch(*(np.concatenate([own[i] for own in spans]) for i in range(3)))
        cut = cut_into(parts, [len(own[0]) for own in spans])
        return await gather([read.values(own) for read, own in zip(reads, cut, strict=True)])

    def _kind(self, steps: Steps) -> 'type[_Read]':
        key, field = steps.key, self.choices[steps.key].field
        if steps.begins is None or field.many:
            return _RecordsRead
        checked = any(columns.bags[key].sums is not None for columns in self._shards)
        if is_video(field):
            return _CheckedFramesRead if checked else _FramesRead
        in_parts = field.kind == 'array' and field.fn is formats.decoders['array'] and not checked
        return _RowsRead if in_parts else _DecodedRead

    def shards_of(self, datapoints: Ints) -> Ints:
        return np.searchsorted(self._firsts, datapoints, side='right') - 1

    def owners(self, key: str, datapoints: Ints) -> Ints:
        """Return the number of the bag that has the values of each datapoint."""
        return self.datasets.owners(self.choices[key].number, self.shards_of(datapoints))

    def locate(self, datapoint: int) -> tuple[str, int]:
        """Return the name of the dataset or shard of a datapoint, and its index there."""
        shard = int(self.shards_of(np.array([datapoint]))[0])
        return self._shards[shard].name, datapoint - int(self._firsts[shard])

    def describe(self, key: str, datapoint: int) -> str:
        name, index = self.locate(datapoint)
        return f'{name}: datapoint {index}, key {key!r}'

    async def _limits(self, owners: Ints, indices: Ints) -> tuple[Ints, Ints]:
        """Return where records of bags begin and end, in order."""
        if not len(owners):
            return _NONE, _NONE
        groups = grouped(owners)
        order = np.concatenate([own for _, own in groups])
        out = np.empty((2, len(owners)), np.int64)
        out[:, order] = await read_limits(
            Rows(
                self.datasets.bags,
                np.array([owner for owner, _ in groups]),
                np.array([len(own) for _, own in groups]),
                indices[order],
            )
        )
        return out[0], out[1]

    async def fetch(self, owners: Ints, starts: Ints, stops: Ints) -> list[bytes]:
        """Return byte ranges of bags, in order."""
        if not len(owners):
            return []
        groups = grouped(owners)
        order = np.concatenate([own for _, own in groups])
        counts = [len(own) for _, own in groups]
        bags = np.array([owner for owner, _ in groups])
        parts = await read_parts(self.datasets.bags, bags, np.array(counts), starts[order], stops[order])
        return placed(groups, cut_into(parts, counts), len(owners))

    async def check(self, owners: Ints, indices: Ints, records: Sequence[bytes]) -> None:
        """Compare records with their checksums, where there are some."""
        for owner, own in grouped(owners):
            (bag,) = self.datasets.bags.some(np.array([owner]))
            if bag.sums is not None:
                await offload(check, bag.sums, indices[own], [records[i] for i in own.tolist()], bag.name)


class _Read(abc.ABC):
    """The read of values of one key."""

    starts: Ints  # of the records, in their bags
    stops: Ints

    def __init__(self, source: StoredSteps, wanted: Steps) -> None:
        self._source = source
        self._wanted = wanted
        self._key = wanted.key
        self._field: Field = source.choices[wanted.key].field
        self._owners, self._records = self._find()

    @functools.cached_property
    def _once(self) -> tuple[Ints, list[Ints], list[int]]:
        return self._wanted.once()

    @property
    def _datapoints(self) -> Ints:
        return self._once[0]

    def _find(self) -> tuple[Ints, Ints]:
        """Return the bag and the index of each record that is read."""
        first, _ = self._source.records[self._key]
        return self._source.owners(self._key, self._datapoints), first[self._datapoints]

    def located(self) -> tuple[Ints, Ints]:
        return self._owners, self._records

    async def spans(self) -> tuple[Ints, Ints, Ints]:
        """Return the bags of byte ranges, where they begin, and where they end."""
        return self._owners, self.starts, self.stops

    @abc.abstractmethod
    async def values(self, parts: list[bytes]) -> Values:
        """Return the values for the bytes of the spans."""

    async def _decoded(self, records: list[bytes], datapoints: Ints) -> list[Any]:
        await self._source.check(self._owners, self._records, records)
        [values] = await decode_records([self._field], [records], lambda _, i: self._source.locate(int(datapoints[i])))
        return values


class _RecordsRead(_Read):
    """Whole values, and values of sequences: each is a record."""

    def _find(self) -> tuple[Ints, Ints]:
        first, count = self._source.records[self._key]
        wanted = self._wanted
        if wanted.begins is None and self._field.many:
            wanted = wanted._replace(begins=np.zeros_like(wanted.datapoints), stops=count[wanted.datapoints])
        self._each, steps = wanted.each()
        records = first[self._each] if wanted.begins is None else first[self._each] + steps
        return self._source.owners(self._key, self._each), records

    async def values(self, parts: list[bytes]) -> Values:
        values = await self._decoded(parts, self._each)
        if self._wanted.begins is None and self._field.many:
            counts = self._source.records[self._key][1][self._datapoints]
            return cut_into(values, counts.tolist())
        return values


class _DecodedRead(_Read):
    """Values at steps of what is read and decoded whole."""

    async def values(self, parts: list[bytes]) -> Values:
        whole = await self._decoded(parts, self._datapoints)
        return joined(
            [
                values_at(value, steps, length, self._source.describe(self._key, int(datapoint)))
                for value, datapoint, steps, length in zip(whole, *self._once, strict=True)
            ]
        )


class _RowsRead(_Read):
    """Rows of arrays, of which only these are read."""

    def _find(self) -> tuple[Ints, Ints]:
        begins: Any = self._wanted.begins
        stops: Any = self._wanted.stops
        self._table = self._source.arrays[self._key]
        self._spans = self._table.spans(self._wanted.datapoints, begins, stops)
        return _NONE, _NONE

    async def spans(self) -> tuple[Ints, Ints, Ints]:
        datapoints, starts, stops, _ = self._spans
        return self._source.owners(self._key, datapoints), starts, stops

    async def values(self, parts: list[bytes]) -> Values:
        return joined(await self._table.cut(self._spans, parts))


class _FramesRead(_Read):
    """Frames of videos, of which only those are read that are decoded."""

    _clips: Clips

    async def spans(self) -> tuple[Ints, Ints, Ints]:
        names = [(self._key, datapoint) for datapoint in self._datapoints.tolist()]
        sizes = (self.stops - self.starts).tolist()
        tables = await self._source.tables.of(names, sizes, self._read_parts, self._in_threads)
        self._clips = Clips(tables, [self._frames(i, table) for i, table in enumerate(tables)])
        videos, begins, ends = self._clips.spans
        return self._owners[videos], self.starts[videos] + begins, self.starts[videos] + ends

    def _frames(self, i: int, table: FrameTable) -> Ints:
        name = self._source.describe(self._key, int(self._datapoints[i]))
        return frames_of(table, self._once[1][i], self._once[2][i], self._wanted.fps, name)

    async def _read_parts(self, videos: Ints, begins: Ints, ends: Ints) -> list[bytes]:
        return await self._source.fetch(self._owners[videos], self.starts[videos] + begins, self.starts[videos] + ends)

    async def values(self, parts: list[bytes]) -> Values:
        clips = await self._in_threads(lambda i: self._clips.decode(i, parts), range(len(self._datapoints)))
        return [frame for clip in clips for frame in clip]

    async def _in_threads(self, call: Callable[[int], T], videos: Sequence[int]) -> list[T]:
        def named(number: int) -> T:
            try:
                return call(videos[number])
            except DecodeError as error:
                path, index = self._source.locate(int(self._datapoints[videos[number]]))
                name = f'{path}: datapoint {index}, key {self._key!r}'
                raise DecodeError(f'{name}: {error}', path=path, key=self._key, index=index) from error

        return await map_threads(named, len(videos))


class _CheckedFramesRead(_FramesRead):
    """Frames of videos that are read whole, and compared with their checksums."""

    async def spans(self) -> tuple[Ints, Ints, Ints]:
        return self._owners, self.starts, self.stops

    async def values(self, parts: list[bytes]) -> Values:
        await self._source.check(self._owners, self._records, parts)

        def decode(i: int) -> NDArray[np.uint8]:
            table = FrameTable(len(parts[i]), [(0, parts[i])])
            return Clips([table], [self._frames(i, table)]).decode(0, [])

        return [frame for clip in await self._in_threads(decode, range(len(parts))) for frame in clip]
