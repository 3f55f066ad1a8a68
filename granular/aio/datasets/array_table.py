"""Positions and lengths of the arrays of a key, by the limits of their records and the head of the first one."""

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, cut_into, grouped, placed
from granular.aio.bags.records import Bags, read_limits, read_parts
from granular.aio.datasets.column_reads import read_references, record_rows
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.picks import Datasets, Picks
from granular.aio.stores.fanout import retry_if_corrupt
from granular.errors import CorruptDatasetError, InvalidArgumentError
from granular.formats.codecs.arrays import UNPACKING, array_counts, array_head, parse_array_head

_HEAD: Final = 64  # bytes; at least those before the data of an array


async def record_sizes(shards: Sequence[Columns], key: str) -> tuple[Ints, Ints]:
    """Return where the records of a key begin, and their bytes; of a sequence 0, and the number of its records."""
    lengths = np.array([columns.length for columns in shards], np.int64)
    indices = np.concatenate([np.arange(length) for length in lengths.tolist()])
    picks = Picks(Datasets.of(shards), np.arange(len(lengths)), lengths, indices)
    (choice,) = shards[0].choose((key,))
    references = await read_references(picks)
    rows, counts = record_rows(picks, choice, references)
    if counts is not None:
        return np.zeros_like(counts), counts
    starts, stops = await read_limits(rows)
    return starts, stops - starts


class Spans(NamedTuple):
    """Byte ranges of the bags of some datapoints: of parts of their arrays, and behind them of heads."""

    datapoints: Ints
    starts: Ints
    stops: Ints
    unchecked: Ints  # the datapoints of the heads


class ArrayTable:
    """The arrays of a key that all have one dtype, and one shape beside their length.

    Attributes:
      dtype: that of the arrays.
      shape: the shape of a value: of the axes after the first one.
      counts: the lengths of the arrays.
    """

    def __init__(self, shards: Sequence[Columns], key: str, starts: Ints, sizes: Ints) -> None:
        self._shards = shards
        self._key = key
        self._starts = starts
        self._firsts = np.cumsum([0, *(columns.length for columns in shards)])
        self._remote = any(columns.is_remote for columns in shards)
        self._checked = np.zeros(len(starts), np.bool_)  # datapoints whose head was compared
        self.dtype: np.dtype[Any] = np.dtype(np.int64)
        self.shape: tuple[int, ...] = ()
        self.counts: Ints = sizes

    @classmethod
    async def read(cls, shards: Sequence[Columns], key: str) -> Self:
        """Compute where each array is, and how long.

        Raises:
          InvalidArgumentError: if an array has another dtype or shape than the first one; it names the datapoint.
          CorruptDatasetError: if a record is no array.
        """
        return await retry_if_corrupt(any(columns.is_remote for columns in shards), lambda: cls._read(shards, key))

    @classmethod
    async def _read(cls, shards: Sequence[Columns], key: str) -> Self:
        starts, sizes = await record_sizes(shards, key)
        table = cls(shards, key, starts, sizes)
        if not len(starts):
            return table
        table.dtype, shape = await table._read_head(0, starts[0], sizes[0])
        if not shape or not math.prod(shape[1:]) * table.dtype.itemsize:
            raise table.refused(0, f'dtype {table.dtype} and shape {shape}')
        table.shape = shape[1:]
        counts = array_counts(sizes, table.dtype, table.shape)
        if (counts < 0).any():
            bad = int(np.argmax(counts < 0))
            await table._check_array(bad, starts[bad], sizes[bad])
            raise CorruptDatasetError(
                f'{table.describe(bad)}: expected an array {table._expected()} as in datapoint 0, got {sizes[bad]} '
                f'bytes, which no such array has'
            )
        table.counts, table._starts = counts, starts + sizes - counts * table._step
        return table

    @property
    def _step(self) -> int:
        """Bytes of a value."""
        return math.prod(self.shape) * self.dtype.itemsize

    def _expected(self) -> str:
        shape = ''.join(f', {length}' for length in self.shape)
        return f'of dtype {self.dtype} and {f"shape (n{shape})" if shape else "one dimension"}'

    def describe(self, datapoint: int) -> str:
        """Return the name of the dataset or shard of a datapoint, its index there and the key."""
        shard = int(np.searchsorted(self._firsts, datapoint, side='right')) - 1
        return f'{self._shards[shard].name}: datapoint {datapoint - int(self._firsts[shard])}, key {self._key!r}'

    def refused(self, datapoint: int, got: str) -> InvalidArgumentError:
        """Return the error for an array that is not like the others."""
        return InvalidArgumentError(
            f'{self.describe(datapoint)}: expected arrays of one dtype, and of one shape beside their length, got '
            f'{got}: write such arrays'
        )

    async def parts(self, datapoints: Ints, begins: Ints, stops: Ints) -> list[NDArray[Any]]:
        """Return parts of arrays, in one fan-out; with the first part of an array, its head is read and compared."""
        filled = np.flatnonzero(stops > begins)
        if len(filled) < len(datapoints):
            read = await self.parts(datapoints[filled], begins[filled], stops[filled]) if len(filled) else []
            out = [np.zeros((0, *self.shape), self.dtype)] * len(datapoints)
            for i, part in zip(filled.tolist(), read, strict=True):
                out[i] = part
            return out
        spans = self.spans(datapoints, begins, stops)

        async def read_all() -> list[NDArray[Any]]:
            return await self.cut(spans, await self._read_bytes(*spans[:3]))

        return await retry_if_corrupt(self._remote, read_all)

    def spans(self, datapoints: Ints, begins: Ints, stops: Ints) -> Spans:
        """Return where the bytes of parts of arrays are, and the heads of arrays that were not compared yet."""
        starts, ends = (self._starts[datapoints] + limits * self._step for limits in (begins, stops))
        unchecked = np.unique(datapoints[~self._checked[datapoints]])
        if not len(unchecked):
            return Spans(datapoints, starts, ends, unchecked)
        counts = self.counts[unchecked].tolist()
        heads = np.array([len(array_head(self.dtype, count, self.shape)) for count in counts])
        begun = self._starts[unchecked]
        return Spans(
            np.append(datapoints, unchecked), np.append(starts, begun - heads), np.append(ends, begun), unchecked
        )

    async def cut(self, spans: Spans, parts: Sequence[bytes]) -> list[NDArray[Any]]:
        """Return parts of arrays for the bytes of their spans, after their heads were compared."""
        count = len(parts) - len(spans.unchecked)
        for datapoint, head in zip(spans.unchecked.tolist(), parts[count:], strict=True):
            await self._check_head(datapoint, head)
        self._checked[spans.unchecked] = True
        return [np.frombuffer(part, self.dtype).reshape(-1, *self.shape) for part in parts[:count]]

    async def _read_head(self, datapoint: int, start: Any, size: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
        (head,) = await self._read_bytes(np.array([datapoint]), np.array([start]), np.array([start + min(_HEAD, size)]))
        try:
            return parse_array_head(head)[:2]
        except UNPACKING as error:
            problem = f'{head!r:.100} does not begin an array: {type(error).__name__}'
            raise CorruptDatasetError(f'{self.describe(datapoint)}: {problem}') from error

    async def check_last(self) -> None:
        """Raise ``InvalidArgumentError`` if the last array has another dtype than the first, or another shape."""
        if (last := len(self.counts) - 1) > 0:
            head = len(array_head(self.dtype, int(self.counts[last]), self.shape))
            size = head + int(self.counts[last]) * self._step
            await self._check_array(last, self._starts[last] - head, size)

    async def _check_array(self, datapoint: int, start: Any, size: Any) -> None:
        """Raise ``InvalidArgumentError`` if a record is an array of another dtype, or of other dimensions."""
        dtype, shape = await self._read_head(datapoint, start, size)
        fills = 0 < size - math.prod(shape) * dtype.itemsize <= _HEAD
        if fills and (dtype != self.dtype or shape[1:] != self.shape or not shape):
            raise self.refused(datapoint, f'dtype {dtype} and shape {shape}, and dtype {self.dtype} before')

    async def _check_head(self, datapoint: int, head: bytes) -> None:
        count = int(self.counts[datapoint])
        if head != (expected := array_head(self.dtype, count, self.shape)):
            size = len(expected) + count * self._step
            await self._check_array(datapoint, self._starts[datapoint] - len(expected), size)
            raise CorruptDatasetError(
                f'{self.describe(datapoint)}: expected an array of dtype {self.dtype} and shape '
                f'{(count, *self.shape)}, got one that begins with {head!r}'
            )

    async def _read_bytes(self, owners: Ints, starts: Ints, stops: Ints) -> list[bytes]:
        """Return byte ranges of the bags of some datapoints, in order."""
        groups = grouped(np.searchsorted(self._firsts, owners, side='right') - 1)
        counts = [len(own) for _, own in groups]
        order = np.concatenate([own for _, own in groups])
        bags = Bags.of([self._shards[number].bags[self._key] for number, _ in groups])
        parts = await read_parts(bags, np.arange(len(groups)), np.array(counts), starts[order], stops[order])
        return placed(groups, cut_into(parts, counts), len(owners))
