"""Values of datapoints as bytes, for every kind of reader: where they are, and any part of them.

Values are located first, which takes their sizes from the tables of limits, and read second: so a page shows a thousand
datapoints without their images, and then reads those that are seen in one fan-out.
"""

import abc
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from granular._support.indexing import Ints, cut_into
from granular._support.redact import hidden
from granular.aio.bags.bag import Bag
from granular.aio.bags.reader import BagReader, bag_of
from granular.aio.bags.records import Bags, Rows, read_limits, read_parts
from granular.aio.datasets.column_reads import join_rows, read_references, record_rows
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.picks import Datasets, Picks
from granular.aio.datasets.reader import DatasetReader
from granular.aio.datasets.sharded_reader import ShardedDatasetReader, columns_of_shards, compare_shards, open_listed
from granular.aio.datasources.detect import Opened
from granular.aio.datasources.indexed_files import MaskedFiles, fields_of
from granular.aio.datasources.lerobot import LeRobotDataSource, fetch_stored, kinds_of
from granular.aio.runtime.threads import offload
from granular.aio.stores.fanout import retry_if_corrupt
from granular.config import MiB
from granular.errors import CorruptError, DatapointError, EncodeError, GranularError, OutOfRangeError, UnknownKeyError
from granular.formats import encode_array, encode_float, encode_int, encode_tree
from granular.formats.layout import Spec, element, is_sequence

BUDGET: Final = 12 * MiB
"""Bytes of values that are read at a time."""

_FEW: Final = 16  # rows of a foreign file that are read before their sizes are known


class Value(NamedTuple):
    """One value: a record of a bag, or the bytes of a value of another file."""

    size: int  # its bytes
    bag: Bag | None  # that holds it; None if ``data`` holds it
    start: int  # its first byte in the bag
    kind: str  # its type
    data: bytes = b''  # its bytes, if they are in memory, or the first of them that ``locate`` was asked to keep
    error: str = ''  # why it cannot be read


class Located(NamedTuple):
    """The values of a datapoint under one key."""

    length: int | None  # of the sequence; None if the key has a single value
    values: list[Value]  # those that were asked for


Part = tuple[Value, int, int]
"""A value, and the first byte of the part of it and the one after the last."""


class Source(abc.ABC):
    """Datapoints of an open reader. Memory is that of its reader."""

    spec: Spec
    length: int
    portion: int = 1 << 20
    """Datapoints that are located at a time where their values are needed whole."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the facts that the page shows."""

    @abc.abstractmethod
    async def _locate(
        self, keys: Sequence[str], indices: Ints, first: int, count: int, head: int | None
    ) -> dict[str, list[Located]]: ...

    async def read(self, parts: Sequence[Part]) -> list[bytes]:
        """Return parts of values, read in one fan-out over any number of bags."""
        bags: dict[int, tuple[Bag, list[int]]] = {}  # with the positions of their parts
        for i, (value, _, _) in enumerate(parts):
            if value.bag is not None:
                bags.setdefault(id(value.bag), (value.bag, []))[1].append(i)
        out = [value.data[start:stop] for value, start, stop in parts]
        if bags:
            order = [i for _, positions in bags.values() for i in positions]
            limits = [(value.start + start, value.start + stop) for value, start, stop in (parts[i] for i in order)]
            counts = np.array([len(positions) for _, positions in bags.values()])
            own = Bags.of([bag for bag, _ in bags.values()])
            data = await read_parts(own, np.arange(len(bags)), counts, *np.array(limits, np.int64).T)
            for i, part in zip(order, data, strict=True):
                out[i] = part
        return out

    async def locate(
        self, keys: Sequence[str], indices: Iterable[int], first: int = 0, count: int = 1, *, head: int | None = None
    ) -> dict[str, list[Located]]:
        """Return, by key, where the values at ascending indices are; of sequences, ``count`` values from ``first`` on.

        Args:
          head: first bytes of a value that are to be read later, which bounds the memory for values that are read
            whole to be located; by default, all.
        """
        if unknown := [key for key in keys if key not in self.spec]:
            raise UnknownKeyError(f'{self.reader!r}: expected keys of {list(self.spec)}, got {unknown}')
        array = np.fromiter(indices, np.int64)
        if len(array) and not 0 <= array[0] <= array[-1] < self.length:
            raise OutOfRangeError(
                f'{self.reader!r}: expected indices from 0 to {self.length - 1}, got {array[0]} to {array[-1]}'
            )
        return await self._locate(keys, array, first, count, head)

    async def value(self, key: str, index: int, position: int = 0) -> Value:
        values = (await self.locate([key], [index], position))[key][0].values
        if not values:
            raise OutOfRangeError(f'{self.reader!r}: datapoint {index}, key {key!r}: has no value {position}')
        if values[0].error:
            raise CorruptError(values[0].error)
        return values[0]

    async def read_batches(
        self, values: Sequence[Value], budget: int = BUDGET
    ) -> AsyncIterator[list[tuple[int, bytes]]]:
        """Yield whole values with their positions, in as few fan-outs as ``budget`` bytes, or one value, allow."""
        start = 0
        while start < len(values):
            stop, size = start, 0
            while stop < len(values) and (stop == start or size + values[stop].size <= budget):
                size += values[stop].size
                stop += 1
            # No name holds a batch while the next one is read.
            yield list(enumerate(await self.read([(value, 0, value.size) for value in values[start:stop]]), start))
            start = stop

    async def close(self) -> None:
        await self.reader.aclose()


class DatasetSource(Source):
    def __init__(self, reader: DatasetReader | ShardedDatasetReader) -> None:
        super().__init__(reader)
        self._shards: list[Columns] = columns_of_shards(reader)
        self._stops = np.cumsum([columns.length for columns in self._shards])
        self.spec, self.length = reader.spec, len(reader)

    def describe(self) -> dict[str, Any]:
        bags = [columns.all_bags for columns in self._shards]
        return {
            'kind': 'dataset' if isinstance(self.reader, DatasetReader) else 'sharded dataset',
            'layout': self.reader.layout,
            'versions': sorted({bag.version for shard in bags for bag in shard.values()}),
            'shards': len(bags) if isinstance(self.reader, ShardedDatasetReader) else None,
            'lengths': [columns.length for columns in self._shards],
            'sizes': [columns.size_of() for columns in self._shards],
            'bytes': self.reader.size,
            'keys': [
                {
                    'key': key,
                    'type': self.spec.get(key, 'references'),
                    'records': sum(shard[key].length for shard in bags),
                    'bytes': sum(shard[key].size for shard in bags),
                }
                for key in bags[0]
            ],
        }

    async def _locate(
        self, keys: Sequence[str], indices: Ints, first: int, count: int, head: int | None
    ) -> dict[str, list[Located]]:
        picks = await self._pick(indices)
        # A range that begins beyond the end of a sequence is an error for the readers, here it is empty.
        sequences = self._shards[0].refs is not None
        selection = {
            key: slice(first, first + count) if sequences and is_sequence(self.spec[key]) else True for key in keys
        }

        async def locate() -> dict[str, list[Located]]:
            references = await read_references(picks)
            choices = self._shards[0].choose(selection)
            parts = [record_rows(picks, choice, references) for choice in choices]
            rows, _ = join_rows(parts)
            limits = zip(*(bounds.tolist() for bounds in await read_limits(rows)), strict=True)
            out: dict[str, list[Located]] = {}
            for choice, (own, chosen) in zip(choices, parts, strict=True):
                kind = element(choice.field.kind)
                owners = (bag for bag, indices in own.each() for _ in indices)
                values = [
                    Value(stop - start, bag, start, kind) for bag, (start, stop) in zip(owners, limits, strict=False)
                ]
                if chosen is None:
                    out[choice.field.key] = [Located(None, [value]) for value in values]
                else:
                    totals = references[1][:, choice.number].tolist()
                    found = cut_into(values, chosen.tolist())
                    out[choice.field.key] = [Located(*pair) for pair in zip(totals, found, strict=True)]
            return {key: out[key] for key in keys}

        if not len(indices):
            return {key: [] for key in keys}
        return await retry_if_corrupt(self._shards[0].is_remote, locate)

    async def _pick(self, indices: Ints) -> Picks:
        shards = np.searchsorted(self._stops, indices, side='right')
        used, counts = np.unique(shards, return_counts=True)
        if await compare_shards(self.reader, used.tolist()):  # which replaces shards that are not those in the index
            self._shards = columns_of_shards(self.reader)
        starts = self._stops - [columns.length for columns in self._shards]
        datasets = Datasets.of([self._shards[shard] for shard in used.tolist()] or self._shards[:1])
        return Picks(datasets, np.arange(len(used)), counts, indices - starts[shards])


class RecordSource(Source):
    def __init__(self, reader: BagReader) -> None:
        super().__init__(reader)
        self._bag = bag_of(reader)
        self.spec, self.length = {'record': 'bytes'}, len(reader)

    def describe(self) -> dict[str, Any]:
        size = self.reader.size
        return {
            'kind': 'bag',
            'versions': [self.reader.version],
            'bytes': size,
            'keys': [{'key': 'record', 'type': 'bytes', 'records': self.length, 'bytes': size}],
        }

    async def _locate(
        self, keys: Sequence[str], indices: Ints, first: int, count: int, head: int | None
    ) -> dict[str, list[Located]]:
        bag = self._bag
        starts, stops = await retry_if_corrupt(bag.is_remote, lambda: read_limits(Rows.of(bag, indices)))
        values = [
            Located(None, [Value(stop - start, bag, start, 'bytes')])
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        return dict.fromkeys(keys, values)


class ForeignSource(Source):
    """Rows of Parquet, ArrayRecord, TFRecord, WebDataset and Megatron files, whose values are read whole."""

    portion = _FEW

    def __init__(self, reader: Any) -> None:
        super().__init__(reader)
        self.length = len(reader)
        self._format = type(reader).__name__.removesuffix('DataSource')
        self._records = not isinstance(reader, MaskedFiles)
        names: tuple[str, ...] = ('record',) if self._records else fields_of(reader)
        # Members of tar files have the ending of a type; the types of other values are known when they are read.
        tar = self._format == 'WebDataset'
        self.spec = {name: name.rpartition('.')[2].lower() if tar else 'value' for name in names}

    def describe(self) -> dict[str, Any]:
        return {
            'kind': self._format,
            'bytes': getattr(self.reader, 'size', None),
            'keys': [{'key': key, 'type': kind} for key, kind in self.spec.items()],
        }

    async def _locate(
        self, keys: Sequence[str], indices: Ints, first: int, count: int, head: int | None
    ) -> dict[str, list[Located]]:
        out: dict[str, list[Located]] = {key: [] for key in keys}
        rest, step = indices, self.portion
        while len(rest):
            wanted, rest = rest[:step], rest[step:]
            size = await offload(self._add, await self._fetch(wanted, keys), out, slice(first, first + count), head)
            step = max(1, min(1024, BUDGET * len(wanted) // max(size, 1)))
        return out

    async def _fetch(self, indices: Ints, keys: Sequence[str]) -> list[Any]:
        """Return rows; an error takes the place of a value that is damaged."""
        try:
            rows = await self._fetch_rows(indices, keys)
        except (CorruptError, DatapointError) as error:
            if len(keys) > 1:
                columns = [await self._fetch(indices, [key]) for key in keys]
                return [
                    {key: value for part in row for key, value in part.items()} for row in zip(*columns, strict=True)
                ]
            if len(indices) > 1:
                middle = len(indices) // 2
                return [*await self._fetch(indices[:middle], keys), *await self._fetch(indices[middle:], keys)]
            return [error if self._records else {keys[0]: error}]
        return rows

    async def _fetch_rows(self, indices: Ints, keys: Sequence[str]) -> list[Any]:
        rows: list[Any] = await self.reader.fetch(indices, *(() if self._records else (list(keys),)))
        return rows

    def _add(self, rows: Sequence[Any], out: dict[str, list[Located]], part: slice, head: int | None) -> int:
        """Append the values of rows, by key, with their first bytes; of sequences, a part. Returns their bytes."""
        size = 0
        for row in rows:
            for key, located in out.items():
                value = row if self._records else row.get(key)
                kind = element(self.spec[key])
                if isinstance(value, Exception):
                    located.append(Located(None, [Value(0, None, 0, kind, error=reason(value))]))
                    continue
                many = is_sequence(self.spec[key])
                values = [self._value(kind, *as_record(own), head) for own in (value[part] if many else [value])]
                located.append(Located(len(value) if many else None, values))
                size += sum(own.size for own in values)
        return size

    @staticmethod
    def _value(expected: str, kind: str, data: bytes, head: int | None) -> Value:
        kind = expected if kind == 'bytes' and expected != 'value' else kind
        return Value(len(data), None, 0, kind, data[:head])


class EpisodeSource(ForeignSource):
    """Episodes of LeRobot: a video for each camera, and an array, or a sequence of images or texts, with the steps."""

    portion = 1

    def __init__(self, reader: LeRobotDataSource[Any]) -> None:
        super().__init__(reader)
        self._records = False
        types = {'video': 'mp4', 'image': 'png[]', 'string': 'utf8[]'}
        self.spec = {key: types.get(kind, 'array') for key, kind in kinds_of(reader).items()}

    async def _fetch_rows(self, indices: Ints, keys: Sequence[str]) -> list[Any]:
        return await fetch_stored(self.reader, indices, keys)


async def source_of(reader: Opened) -> Source:
    if isinstance(reader, DatasetReader | ShardedDatasetReader):
        await open_listed(reader)
        return DatasetSource(reader)
    if isinstance(reader, BagReader):
        return RecordSource(reader)
    if isinstance(reader, LeRobotDataSource):
        return EpisodeSource(reader)
    return ForeignSource(reader)


def reason(error: Exception) -> str:
    """Return what is wrong with a value: the message of an error, with its type unless it is of granular."""
    text = hidden(str(error))
    if isinstance(error, GranularError) and text:
        return text
    return f'{type(error).__name__}: {text}' if text else type(error).__name__


def as_record(value: Any) -> tuple[str, bytes]:
    try:
        match value:
            case bytes():
                return 'bytes', value
            case str():
                return 'utf8', value.encode(errors='backslashreplace')
            case bool():
                return 'bool', bytes([value])
            case int():
                return 'int', encode_int(value)
            case float():
                return 'float', encode_float(value)
            case np.generic():  # of a Parquet column
                return as_record(value.item() if value.dtype.kind in 'biuf' else str(value))
            case np.ndarray():
                return 'array', encode_array(value)
            case Mapping() | list() | tuple() | None:
                return 'tree', encode_tree(value)
            case _:
                return 'utf8', str(value).encode(errors='backslashreplace')
    except EncodeError:  # no encoder takes an integer of 200 bits, or a date in a list
        return 'utf8', repr(value).encode(errors='backslashreplace')
