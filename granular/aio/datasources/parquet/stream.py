"""Streams Parquet files: row groups in order, prefetched by range requests, with several files interleaved."""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import Ints, check_integer
from granular._support.other_names import answering
from granular.aio.datasources.arguments import Paths
from granular.aio.datasources.discovery.discover import Files
from granular.aio.datasources.parquet.interleave import RowOrder
from granular.aio.datasources.parquet.row_groups import distinct
from granular.aio.datasources.parquet.source import ParquetDataSource, is_found, part_of, row_groups_of, stored_columns
from granular.aio.pipeline.describe import check_size
from granular.aio.pipeline.execution.failures import Failure, OnError
from granular.aio.pipeline.execution.prefetch import Crew
from granular.aio.pipeline.iter_dataset import IterDataset
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.pipeline.nodes.source import Node, Source
from granular.aio.pipeline.position import FREE, RestoreRules
from granular.aio.pipeline.shards import ShardOptions
from granular.aio.pipeline.streams.flow import Flow, of_reading
from granular.aio.pipeline.streams.read import Read, Reading
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.pipeline.transforms import ReadOptions
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.lifecycle import ensure_open
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import InvalidArgumentError, StateError

CYCLE: Final = 16
READ_AHEAD: Final = 64 * MiB
_MAX_ROWS: Final = 4096  # limit on the rows of one fetch
_CHUNK_BYTES: Final = 2 * MiB  # estimated bytes of the rows of one fetch
_VALUE: Final = 64  # bytes of a small value and its entry in a row
_MAX_GROUPS: Final = 256  # limit on the row groups prefetched, however small they are


class _FileLayout(NamedTuple):
    """The layout of the files, known once their footers are read."""

    order: RowOrder
    stops: list[list[int]]  # for each file, the cumulative number of rows up to the end of each row group
    firsts: Ints  # the first row of each file, counted over all files
    groups: list[int]  # the first row group of each file, counted over all files
    size: int  # bytes of all files


class ParquetRows(Source):
    """The rows of Parquet files in the order of a stream; the arguments are those of ``ParquetIterDataset``."""

    data: ParquetDataSource[dict[str, Any]]
    cycle: int
    options: ReadOptions | None

    def __init__(
        self, data: ParquetDataSource, cycle: int, read_ahead: int, options: ReadOptions | None = None
    ) -> None:
        self.data = data
        self._read_ahead = read_ahead
        self.options = options
        self.cycle = min(cycle, len(data.paths)) if is_found(data) else cycle
        self._source = convert(data)
        self._layout: _FileLayout | None = None
        self._current: list[int] = []  # the row groups that the last fetch needed
        self._weights: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_layout': None, '_current': [], '_weights': {}}

    def renewed(self) -> 'ParquetRows':
        """Return a copy that shares the footers, for an independent reader."""
        copy = ParquetRows(self.data.copy(), self.cycle, self._read_ahead, self.options)
        copy._layout = self._layout
        return copy

    def of_files(self, part: slice) -> 'ParquetRows':
        return ParquetRows(part_of(self.data, part), self.cycle, self._read_ahead, self.options)

    async def open(self) -> _FileLayout:
        """Read the footers, once."""
        if self._layout is None:
            await ensure_open(self.data)
            stops = [footer.stops.tolist() for footer in row_groups_of(self.data).footers]
            lengths = [rows[-1] if rows else 0 for rows in stops]
            groups = np.cumsum([0, *map(len, stops)]).tolist()
            firsts = np.cumsum([0, *lengths], dtype=np.int64)
            self._layout = _FileLayout(RowOrder(lengths, self.cycle), stops, firsts, groups, self.data.size)
        return self._layout

    def __len__(self) -> int:
        return len(self.data)

    def chunk(self) -> int:
        """Return the number of rows to fetch at once: many if they are small, as a fetch has a fixed cost by column."""
        groups, columns = row_groups_of(self.data), stored_columns(self.data)
        group = next((i for i, stop in enumerate(groups.stops.tolist()) if stop), None)
        if group is None:
            return _MAX_ROWS
        row_bytes = groups.nbytes(group, columns) // int(groups.stops[group]) + _VALUE * len(columns)
        return max(1, min(_MAX_ROWS, _CHUNK_BYTES // max(1, row_bytes)))

    async def nullable_keys(self) -> frozenset[str]:
        return await self._source.nullable_keys()

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        layout = await self.open()
        steps = np.asarray(indices, np.int64)
        if not len(steps):
            return []
        files, rows = layout.order.lookup(steps)
        positions = layout.firsts[files] + rows
        groups = distinct(row_groups_of(self.data).of_rows(positions))
        if groups != self._current:
            self._current = groups
            wanted = await offload(self._plan, layout, groups, int(steps[-1]))
            await row_groups_of(self.data).expect(wanted, stored_columns(self.data))
        values = await self._source.fetch(positions)
        if Failure in set(map(type, values)):
            for step, value in zip(steps.tolist(), values, strict=True):
                if type(value) is Failure:
                    value.index = step
        return values

    def _plan(self, layout: _FileLayout, groups: list[int], step: int) -> list[int]:
        """Return the row groups to read: those needed now, of all open files, and the next ones."""
        wanted = dict.fromkeys(groups)
        taken, _ = layout.order.consumed(step)
        for number, row in taken.items():
            inner = bisect.bisect_right(layout.stops[number], row)
            if inner < len(layout.stops[number]):
                wanted[layout.groups[number] + inner] = None
        limit = len(wanted) + _MAX_GROUPS
        remaining = self._read_ahead
        for number, inner in layout.order.upcoming(step, layout.stops):
            group = layout.groups[number] + inner
            if group not in wanted:
                wanted[group] = None
                if group not in self._weights:
                    self._weights[group] = row_groups_of(self.data).nbytes(group, stored_columns(self.data))
                remaining -= self._weights[group]
                if remaining <= 0 or len(wanted) >= limit:
                    break
        return list(wanted)

    async def release(self) -> None:
        self._current = []
        await row_groups_of(self.data).release()

    def line(self) -> Line:
        return Line('source', source=repr(self.data), part=f', {self.cycle} at a time')

    def describe(self) -> str:
        return str(self.line())

    def start(self) -> dict[str, Any]:
        if len(self.data.paths) == 1:  # or files that are not found yet
            return _file_state(0, 0)
        count = min(self.cycle, len(self.data.paths))
        return {'files': {str(number): _file_state(0, 0) for number in range(count)}, 'next_file': count}

    def state_of(self, layout: _FileLayout, state: Any) -> Any:
        """Return the state of a ``Reading`` with the position in each file in place of the row."""
        if isinstance(state, Mapping):
            return {**state, 'at': self.state_of(layout, state['at'])}
        return {**self._place_of(layout, state), 'bytes': layout.size}

    def _place_of(self, layout: _FileLayout, position: int) -> dict[str, Any]:
        if not position:
            return self.start()
        taken, unopened = layout.order.consumed(position)
        if len(layout.stops) == 1:
            return _position_in_file(layout.stops[0], min(position, layout.order.lengths[0]))
        files = {str(number): _position_in_file(layout.stops[number], row) for number, row in taken.items()}
        return {'files': files, 'next_file': unopened}

    def position_of(self, layout: _FileLayout, state: Any) -> int:
        """Return the row after a state; raise ``StateError`` for other files, or files of other sizes."""
        if isinstance(state, Mapping):
            check_size(state.get('bytes'), layout.size, self.describe())
            state = {key: value for key, value in state.items() if key != 'bytes'}
        if state in (self.start(), _file_state(0, 0)):
            return 0
        if len(layout.stops) == 1:
            return self._row_of(layout, 0, state)
        if not isinstance(state, Mapping) or not isinstance(state.get('files'), Mapping):
            raise StateError(f'expected a state such as {self.start()}, got {state!r:.200}')
        rows = {int(number): self._row_of(layout, int(number), place) for number, place in state['files'].items()}
        unopened = state.get('next_file')
        if type(unopened) is not int or not 0 <= unopened <= len(layout.stops):
            raise StateError(f'next_file: expected an integer from 0 to {len(layout.stops)}, got {unopened!r}')
        position = sum(rows.get(number, layout.order.lengths[number]) for number in range(unopened))
        taken, first_unopened = layout.order.consumed(position)
        if not rows.items() <= taken.items() or first_unopened != unopened:
            raise StateError(
                f'the state is of other files, or of another cycle_length: expected '
                f'{self.state_of(layout, position)!r:.200} at this row, got {dict(state)!r:.200}'
            )
        return position

    def _row_of(self, layout: _FileLayout, number: int, file_state: Any) -> int:
        stops, path = layout.stops[number], self.data.paths[number]
        if not isinstance(file_state, Mapping) or not {'row_group', 'index_within_row_group'} <= file_state.keys():
            raise StateError(f'{path}: expected a state such as {_file_state(0, 0)}, got {file_state!r:.200}')
        group, index = file_state['row_group'], file_state['index_within_row_group']
        if group == index == 0 and type(group) is type(index) is int:
            return 0
        if type(group) is not int or type(index) is not int or not 0 <= group < len(stops):
            raise StateError(
                f'{path}: the state has row group {group!r}, row {index!r}: the file has {len(stops)} groups'
            )
        first = stops[group - 1] if group else 0
        if not 0 <= index <= stops[group] - first:
            raise StateError(
                f'{path}: the state has row {index} of row group {group}, which has {stops[group] - first}'
            )
        return int(first) + index


def _file_state(group: int, index: int) -> dict[str, int]:
    return {'row_group': group, 'index_within_row_group': index}


def _position_in_file(stops: list[int], row: int) -> dict[str, int]:
    """Return the row group of a row and its index there; for a row past the end, the end of the last row group."""
    group = min(bisect.bisect_right(stops, row), max(0, len(stops) - 1))
    return _file_state(group, row - (stops[group - 1] if group else 0))


class ReadRows(Read):
    """Reads the rows of Parquet files, through the stages fused into the read."""

    unlisted = True

    def flow(self) -> Flow:
        return ReadingRows(self)

    def sliced(self, part: slice) -> Stream:
        # As in Grain, whole files are selected: their rows are not counted before they are read.
        return self.over([_replace_rows(self.source, rows_of(self.source).of_files(part))])

    def in_part(self, part: ShardOptions) -> Stream:
        return self.sliced(slice(part.shard_index, None, part.shard_count))

    def at_epoch(self, epoch: int) -> Stream:
        return self  # the rows have the same order in each

    def outline(self) -> dict[str, Any]:
        return {'stage': self.describe(), 'drops': self.drops}  # its state is a position in each file

    def length(self) -> int:
        raise InvalidArgumentError(f'{self.describe()}: rows of a stream have no index: use a ParquetDataSource')

    def line(self) -> Line:
        return rows_of(self.source).line()

    def describe(self) -> str:
        return str(self.line())


def rows_of(source: Source) -> ParquetRows:
    """Return the rows that a source reads from, beneath the stages fused into it."""
    while source.parents:
        source = source.parents[0]
    return cast(ParquetRows, source)


def _replace_rows(source: Source, rows: ParquetRows) -> Source:
    """Return the same nodes over other rows, so that concurrent iterations do not share read data."""
    return source.copy_over(_replace_rows(source.parents[0], rows)) if isinstance(source, Node) else rows


class _Mark(NamedTuple):
    """A state of the inner reading, converted on demand: it is requested before every row, and files take longer."""

    state: Any


class ReadingRows(Flow):
    """Reads the rows. The first ``next`` reads the footers. The state is the position in each file."""

    def __init__(self, read: Read) -> None:
        self._read, self._rows = read, rows_of(read.source)
        self._inner: tuple[_FileLayout, Reading] | None = None
        self.turns, self.keeps_host = read.turns, read.drops
        self._binding: tuple[object, Crew] = None, Crew()
        self.calls_functions: bool = callable(read.on_error)

    @property
    def _start(self) -> Any:
        return self.turns.state(self._rows.start(), self.keeps_host)

    @property
    def hosts(self) -> int:
        return self.turns.count

    @property
    def host(self) -> int:
        return self.turns.index

    @property
    def apart(self) -> bool:
        return self._read.drops and self.hosts > 1

    @property
    def even(self) -> bool:
        return self.hosts == 1 if self._inner is None else super().even

    def bind(self, token: object, crew: Crew) -> None:
        self._binding = token, crew

    async def _ready(self) -> tuple[_FileLayout, Reading]:
        if self._inner is None:
            await to_loop()
            layout = await self._rows.open()
            read = self._read.replaced(parents=(_replace_rows(self._read.source, self._rows.renewed()),))
            chunk = self._rows.chunk()
            if self._rows.options is None:
                read = read.replaced(options=ReadOptions(prefetch_buffer_size=8 * chunk))
            reading = Reading(read, chunk)
            reading.bind(*self._binding)
            if self.keeps_host:
                reading.keep_host()
            self._inner, self.parents = (layout, reading), (reading,)
        return self._inner

    async def nullable_keys(self) -> frozenset[str]:
        return await (self._inner or await self._ready())[1].nullable_keys()

    async def next(self) -> Any:
        return await (self._inner or await self._ready())[1].next()

    def ready(self) -> list[Any]:
        return [] if self._inner is None else self._inner[1].ready()

    def state(self) -> Any:
        if self._inner is None:
            return self._start
        layout, reading = self._inner
        return self._rows.state_of(layout, reading.state())

    def mark(self) -> Any:
        return self._start if self._inner is None else _Mark(self._inner[1].state())

    def unmark(self, mark: Any) -> Any:
        if type(mark) is not _Mark or self._inner is None:
            return mark
        return self._rows.state_of(self._inner[0], mark.state)

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        if self._inner is None and state == self._start:
            return
        with of_reading():
            layout, rows = await self._ready()
        if type(state) is _Mark:
            state = state.state
        elif isinstance(state, Mapping) and 'at' in state:
            state = {**state, 'at': self._rows.position_of(layout, state['at'])}
        else:
            state = self._rows.position_of(layout, state)
        await rows.restore(state, rules)

    async def begin(self) -> None:
        await (await self._ready())[1].begin()


class ParquetIterDataset(IterDataset[dict[str, Any]]):
    """A stream of the rows of Parquet files, on a disk or in buckets, for ``for`` or ``async for``.

    ::

        stream = granular.grain.experimental.ParquetIterDataset('s3://bucket/*.parquet', columns=['label'])
        for row in stream:  # or: async for row in stream
            print(row['label'])

    Row groups are read in order, each with range requests for the chosen columns, and the next ones are prefetched.
    Several files are interleaved row by row, ``cycle_length`` of them at a time, in the order of
    ``grain.experimental.ParquetIterDataset``. Rows are as in ``ParquetDataSource``. Nothing is read until the stream is
    iterated; then all footers are read.

    A state is ``{'row_group': r, 'index_within_row_group': i}`` of the next row; for several files ``{'files': {'0':
    state of the first, ...}, 'next_file': n}``, for the files that are open. Once their footers are
    read, it also has the ``bytes`` of all files, which must be the same when it is restored.

    With ``mp_prefetch``, each worker reads the row groups of the rows that it produces: all row groups, if there are
    several workers.

    Memory: the decoded row groups of ``cycle_length`` files, twice ``read_ahead``, and the rows that ``read_options``
    allow.

    Args:
      path: a file, a folder, a pattern, or a sequence of files.
      columns: the names of the columns to read, in the order wanted; all by default.
      cycle_length: number of files that are read at a time.
      read_ahead: bytes of row groups to prefetch, by the sizes in the footers; at least one row group is prefetched.
      read_options: the threads, and the number of rows to prepare ahead; by default about 16 MiB of rows, by the first
        row group.
      on_error: policy for a row that fails to be read, as in ``MapDataset.to_iter_dataset``.
      hive, split: as for ``ParquetDataSource``.
    """

    @answering(batch_size='nothing, and call batch(64)')
    def __init__(
        self,
        path: Paths | Files,
        columns: Sequence[str] | None = None,
        *,
        cycle_length: int = CYCLE,
        read_ahead: int = READ_AHEAD,
        read_options: ReadOptions | None = None,
        on_error: OnError = 'raise',
        hive: bool = True,
        split: str | None = None,
    ) -> None:
        cycle_length = check_integer('cycle_length', cycle_length, 1)
        read_ahead = check_integer('read_ahead', read_ahead, 0)
        data = ParquetDataSource(path, columns, read_ahead, hive=hive, split=split)
        rows = ParquetRows(data, cycle_length, read_ahead, read_options)
        super().__init__(ReadRows(rows, read_options, on_error=on_error))
