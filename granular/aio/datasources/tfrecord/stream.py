"""Streams TFRecord files, also compressed ones, from their beginning."""

import contextlib
import itertools
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

from granular._support.other_names import answering
from granular._support.text import counted
from granular.aio.datasources.arguments import Paths
from granular.aio.datasources.discovery.discover import Files
from granular.aio.datasources.scanning import read_measured
from granular.aio.datasources.tfrecord.index import Records, compression_of
from granular.aio.paths.path import Path
from granular.aio.pipeline.describe import check_size
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.iter_dataset import IterDataset
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.position import FREE, RestoreRules, Turns
from granular.aio.pipeline.shards import ShardOptions
from granular.aio.pipeline.streams.flow import Flow, number_of
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import GranularError, InvalidArgumentError, StateError
from granular.formats.tfrecord import HEADER, OVERHEAD

_PIECE: Final = 4 * MiB
_AHEAD: Final = 16  # files of which a state has the bytes, after the one that is open
_SIZES: Final = ('bytes', 'next_bytes')
_START: Final = {'file': 0, 'offset': 0, 'record': 0, 'position': 0}


class TFRecordIterDataset(IterDataset[bytes]):
    """A stream of the records of TFRecord files, on a disk or in buckets, for ``for`` or ``async for``.

    ::

        stream = granular.grain.experimental.TFRecordIterDataset('s3://bucket/train.tfrecord.gz')
        for features in stream.map(granular.formats.decode_example):
            print(features.keys())

    Records are bytes, of one file after the other. Files are read from the beginning, without an index, and may be
    compressed by gzip or zlib; the next 32 MiB are prefetched. Both checksums of each record are checked. Shuffle a
    stream with ``window_shuffle``; a ``TFRecordDataSource`` reads files that are not compressed at random.

    A state is ``{'file': f, 'offset': o, 'record': r, 'position': p, 'bytes': b, 'next_bytes': [...]}``: of the next
    record, its file, its first byte there, decompressed, the numbers of records before it in that file and in all, and
    if the file is open, its bytes and those of the next 16 files, for stages that hold records of several. Resuming
    reads from that byte on, or decompresses the file up to it; the first record of a file that has other bytes now is a
    ``StateError``. A shard takes every ``shard_count``-th record, but reads them all;
    its state is ``{'at': state, 'hosts': shard_count, 'turn': t}``, with the number of records from which shards take
    turns.

    Memory: 64 MiB of read-ahead and records, or the largest record.

    Args:
      path: a file, a folder, a pattern, or a sequence of files.
      split: the split to read, such as ``'train'``, of a folder or pattern that has files of several.

    Raises:
      CorruptError: if a checksum is wrong, or a file is truncated or is not a TFRecord file; it names the file and the
        number of the record in it.
    """

    @answering()
    def __init__(self, path: Paths | Files, *, split: str | None = None) -> None:
        super().__init__(_Records(Files.of(path, split)))


class _Records(Stream):
    """The records of files, or a shard of them."""

    def __init__(self, files: Files, shard: ShardOptions | None = None) -> None:
        self.files, self.shard = files, shard or ShardOptions(0, 1)

    @property
    def hosts(self) -> int:
        return self.shard.shard_count

    def expecting(self, parts: int) -> Stream:
        return self

    def sharded(self, part: ShardOptions) -> Stream:
        if part.drop_remainder:
            raise InvalidArgumentError(
                f'{self.describe()}: drop_remainder needs the number of records, which is unknown: use a '
                f'TFRecordDataSource'
            )
        own = self.shard
        index = own.shard_index + own.shard_count * part.shard_index
        return _Records(self.files, ShardOptions(index, own.shard_count * part.shard_count))

    def at_epoch(self, epoch: int) -> Stream:
        return self

    def flow(self) -> Flow:
        return _Reading(self)

    def line(self) -> Line:
        # Omits the shard: a state fits any number of them.
        return Line('source', source=f'TFRecordIterDataset({self.files.name!r})')

    def describe(self) -> str:
        return str(self.line())


class _Reading(Flow):
    """Reads the records. The state is the position of the next record."""

    _position: int

    def __init__(self, records: _Records) -> None:
        self._given = self._files = records.files
        self.turns = Turns.of(records.shard)
        self._pieces: AsyncGenerator[bytes, None] | None = None
        self._seek(_START, 0)

    @property
    def even(self) -> bool:
        return self.hosts == 1  # the number of records is not known

    def _seek(self, state: Mapping[str, Any], turn: int) -> None:
        self._parser: Records | None = None
        self._rest: list[bytes] = []  # parsed records that are left, in reverse; the fields below are of the last one
        self._known: dict[str, Any] = {key: state[key] for key in _SIZES if key in state}  # for states
        sizes = [self._known.get('bytes'), *self._known.get('next_bytes', ())]
        self._expected: dict[int, int | None] = dict(enumerate(sizes, state['file']))  # bytes by the number of the file
        self._measured: dict[int, int] = {}  # likewise, of the next files
        self._turn = turn  # the position from which the hosts take the next turn
        self._own: Any = END  # the record of this host in that turn, from when it was read until it is returned
        self._file = state['file']
        self._offset = state['offset']
        self._record = state['record']
        self._position = state['position']

    @property
    def _paths(self) -> tuple[Path, ...]:
        return self._files.paths

    async def _find(self) -> None:
        """Find the files of a pattern, once; those of a folder are found when it is opened."""
        if not self._files.is_final:
            await to_loop()
            self._files = await self._files.resolved('tfrecord')

    @property
    def in_step(self) -> bool:
        return self._position <= self._turn  # otherwise the files ended within a round

    async def next(self) -> Any:
        turns = self.turns
        while await self._has_record():
            record = self._rest[-1]
            size = len(record) + OVERHEAD
            if self._position == self._turn + turns.offset:
                self._own = record
            del self._rest[-1]
            self._position += 1
            self._record += 1
            self._offset += size
            if self._position == self._turn + turns.stride:  # to here, so that states of all hosts are of one position
                self._turn = self._position
                if self._own is not END:
                    break
        own, self._own = self._own, END
        return own

    async def _has_record(self) -> bool:
        """Return whether there is a parsed record; False also where reading fails behind the record of this host."""
        try:
            await self._find()
            while not self._rest and self._file < len(self._paths):
                await self._read()
        except Exception:
            if self._own is END:
                raise
            return False  # the error is that of the next call
        return bool(self._rest)

    async def _read(self) -> None:
        """Parse some more bytes of the file, or open the next one."""
        try:
            if self._parser is None:
                await self._open()
                return
            data = b''
            if self._parser.hungry:
                piece = await anext(self._pieces, None) if self._pieces is not None else None
                if piece is None:
                    self._parser.finish()
                    await self._stop()
                    self._file = self._file + 1
                    self._offset = 0
                    self._record = 0
                    self._known = {}
                    return
                data = piece
            self._rest = (await offload(self._parser.feed, data))[::-1]
        except BaseException:
            # The next call begins at the record that follows the last one returned.
            await self._stop()
            raise

    async def _open(self) -> None:
        number = self._file
        path = self._paths[number]
        await path.store.ready()
        following = range(number + 1, min(number + 1 + _AHEAD, len(self._paths)))
        self._measured = {i: size for i, size in self._measured.items() if i in following}
        stat, *_ = await gather([path.stat(), *(self._measure(i) for i in following if i not in self._measured)])
        if stat.is_dir:
            if self._files.found is not None or (files := await self._given.in_folder('tfrecord')) is None:
                raise InvalidArgumentError(f'{path}: expected TFRecord files, got a folder')
            self._files = files
            return
        head, size, version = b'', stat.size, None
        if size:
            reply = await read_measured(path, 0, min(size, HEADER))
            head, size, version = reply.data, reply.size, reply.version
        check_size(self._expected.get(number), size, f'{path}')
        self._expected[number] = size
        following_sizes = [self._measured[i] for i in itertools.takewhile(self._measured.__contains__, following)]
        self._known = {'bytes': size, 'next_bytes': following_sizes}
        compressed = bool(compression_of(head))
        start = 0 if compressed else self._offset
        if start > size:
            raise StateError(f'{path}: the state is of byte {start}, the file has {size}')
        self._pieces = _pieces(path, start, size, version)
        self._parser = Records(f'{path}', None if compressed else size, self._record, self._offset)

    async def _measure(self, number: int) -> None:
        """Note the bytes of a file, if it exists by now: opening it raises the error."""
        path = self._paths[number]
        with contextlib.suppress(GranularError):
            await path.store.ready()
            self._measured[number] = (await path.stat()).size

    async def _stop(self) -> None:
        pieces, self._pieces, self._parser = self._pieces, None, None
        if pieces is not None and not getattr(pieces, 'ag_running', False):  # as after an interrupt, before Python 3.13
            await pieces.aclose()

    async def begin(self) -> None:
        await self._find()
        if self._parser is None and not self._rest and self._file < len(self._paths):
            await self._read()

    def state(self) -> Any:
        at: dict[str, Any] = dict(zip(_START, (self._file, self._offset, self._record, self._position), strict=True))
        at.update(self._known)
        state = self.turns.state(at, self.keeps_host)
        return state if state is at else {**state, 'turn': self._turn}

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        at = self.turns.at(state, rules)
        valid = isinstance(at, Mapping) and at.keys() - set(_SIZES) == _START.keys()
        numbers = [*({**at, 'next_bytes': 0}).values(), *at.get('next_bytes', ())] if valid else []
        if not valid or not all(type(value) is int and value >= 0 for value in numbers):
            raise StateError(f'expected a state such as {_START}, got {at!r:.200}')
        await self._find()
        if at['file'] > len(self._paths):
            raise StateError(f'the state is of file {at["file"]}, of {counted(len(self._paths), "file")}')
        turn = at['position'] if at is state else number_of(state, 'turn')
        if turn != self._turn or at != self.turns.at(self.state(), FREE):
            await self._stop()
            self._seek(at, turn)

    async def aclose(self) -> None:
        await self._stop()
        self._rest = []


async def _pieces(path: Path, start: int, size: int, version: str | None) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a file from a position on, 4 MiB at a time, and the next ones prefetched."""

    async def fetch(numbers: range) -> list[bytes]:
        return [
            (await path.store.read(path.key, at, min(size, at + _PIECE), version)).data
            for at in (start + number * _PIECE for number in numbers)
        ]

    await to_loop()
    count = -(-(size - start) // _PIECE)
    async with contextlib.aclosing(pages(fetch, count, size - start, path.store.local)) as pieces:
        async for piece in pieces:
            yield piece
