"""Parses TFRecord files: their headers into an index, and their bytes, compressed or not, into records. No I/O."""

import dataclasses
import re
import zlib
from typing import Final

import numpy as np

from granular._support.indexing import Ints
from granular.aio.datasources.scanning import FileIndex, HeaderScanner
from granular.config import GiB, KiB, MiB
from granular.errors import CorruptError, CorruptRecordError, UnsupportedError
from granular.formats.tfrecord import HEADER, OVERHEAD, check_data, parse_length

_PIECE: Final = 8 * MiB  # decompressed bytes at a time
# Compressed bytes at a time, from the beginning of a member on, doubling: zlib copies those that are left.
_FIRST_STEP: Final = KiB
_LAST_STEP: Final = MiB
_NO_PADDING: Final = re.compile(rb'[^\0]')
_GZIP_OR_ZLIB: Final = 47  # by the header
_MAX_COMPRESSED_RECORD: Final = 2 * GiB  # of a compressed file, whose size does not bound its records


@dataclasses.dataclass(frozen=True, eq=False)
class Index(FileIndex):
    stops: Ints  # position after each record with its checksum

    def __post_init__(self) -> None:
        if (np.diff(self.stops, prepend=0) < OVERHEAD).any() or (self.stops[-1] if len(self.stops) else 0) != self.size:
            raise ValueError('expected increasing positions up to the end of the file')

    @property
    def length(self) -> int:
        return len(self.stops)

    def limits(self, records: Ints) -> tuple[Ints, Ints]:
        """Return where the data of some records begin, and where their checksums end."""
        starts = np.where(records > 0, self.stops[records - 1], 0) + HEADER
        return starts, self.stops[records]


def compression_of(data: bytes) -> str:
    """Return the compression of a file by its first bytes: ``'gzip'``, ``'zlib'``, or empty for none.

    The length of a first record may have the bytes of a compressed file, but not its checksum as well.
    """
    if len(data) >= HEADER:
        try:
            parse_length(data, 0, 0, '')
        except CorruptRecordError:
            pass
        else:
            return ''
    if data.startswith(b'\x1f\x8b\x08'):
        return 'gzip'
    return 'zlib' if data[:1] == b'\x78' and len(data) > 1 and int.from_bytes(data[:2], 'big') % 31 == 0 else ''


class Scanner(HeaderScanner[Index]):
    kind = 'TFRecord'

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._stops: list[int] = []

    def feed(self, start: int, data: bytes, size: int) -> None:
        if start == 0 and (kind := compression_of(data)):
            raise UnsupportedError(
                f'{self._name}: is compressed by {kind}: its records have no positions: read it in order, by '
                f'granular.grain.experimental.TFRecordIterDataset, or decompress it'
            )
        at, stop, stops, name = self.at, start + len(data), self._stops, self._name
        while at + HEADER <= stop:
            length = parse_length(data[at - start : at - start + HEADER], at, len(stops), name)
            after = at + length + OVERHEAD
            if after > size:
                raise _truncated(name, len(stops), length, at, size)
            stops.append(after)
            at = after
        self.at = at
        self.done = at == size
        self.count = len(stops)
        if size - HEADER < at < size:
            raise CorruptRecordError(
                f'{name}: is truncated: expected {HEADER} bytes for the header of record {len(stops)} at byte {at}, '
                f'got {size - at}'
            )

    def index(self, size: int, version: str | None) -> Index:
        return Index(size, version, np.array(self._stops, np.int64))


def _truncated(name: str, record: int, length: int, at: int, size: int) -> CorruptRecordError:
    return CorruptRecordError(
        f'{name}: is truncated: record {record} at byte {at} has {length} bytes and ends at byte '
        f'{at + length + OVERHEAD}, the file has {size}'
    )


class Records:
    """Parses consecutive bytes of a file into records, checked, with memory for about 8 MiB of them.

    A file without a size is one of gzip or zlib, which is parsed from its beginning; ``at`` is the position of the
    first record in the decompressed file.
    """

    def __init__(self, name: str, size: int | None, record: int = 0, at: int = 0) -> None:
        self._name, self._size = name, size
        self.record, self.at = record, at  # of the next record to be returned
        self._inflater = _Inflater(name, at) if size is None else None
        self._buffer = bytearray()

    @property
    def hungry(self) -> bool:
        """True if the next call needs more bytes of the file."""
        return self._inflater is None or not self._inflater.pending

    def feed(self, data: bytes) -> list[bytes]:
        """Return the records that end in some more bytes, or if there are none, in the rest of earlier ones; raise
        ``CorruptRecordError`` if a record is damaged.
        """
        self._buffer += data if self._inflater is None else self._inflater.feed(data)
        records: list[bytes] = []
        at = 0
        with memoryview(self._buffer) as view:
            while True:
                try:
                    record = self._parse(view[at:], self.record + len(records), self.at + at)
                except CorruptRecordError:
                    if records:
                        break  # the next call raises it again, after these
                    raise
                if record is None:
                    break
                records.append(record)
                at += len(record) + OVERHEAD
        del self._buffer[:at]
        self.at += at
        self.record += len(records)
        return records

    def _parse(self, view: memoryview, number: int, at: int) -> bytes | None:
        """Return the record that some bytes begin with; None if they end before it."""
        with view:
            if len(view) < HEADER:
                return None
            length = parse_length(view[:HEADER], at, number, self._name)
            if self._size is not None and at + length + OVERHEAD > self._size:
                raise _truncated(self._name, number, length, at, self._size)
            if self._size is None and length > _MAX_COMPRESSED_RECORD:
                raise CorruptRecordError(
                    f'{self._name}: record {number} at byte {at}: expected at most {_MAX_COMPRESSED_RECORD} bytes in a '
                    f'compressed file, got {length}'
                )
            stop = HEADER + length
            if len(view) < length + OVERHEAD:
                return None
            return check_data(bytes(view[HEADER:stop]), bytes(view[stop : length + OVERHEAD]), number, self._name)

    def finish(self) -> None:
        """Check that the file ended after a record; raise ``CorruptError`` if it did not."""
        if self._inflater is not None:
            self._inflater.finish(self.record)
        if self._buffer:
            self.feed(b'')  # raises the error of a damaged record that followed intact ones
            raise CorruptRecordError(
                f'{self._name}: is truncated: record {self.record} at byte {self.at} is cut off after '
                f'{len(self._buffer)} bytes'
            )


class _Inflater:
    """Decompresses gzip, with any number of members, or zlib, about 8 MiB at a time, without the first bytes."""

    def __init__(self, name: str, skip: int) -> None:
        self._name, self._skip = name, skip
        self._inner = zlib.decompressobj(_GZIP_OR_ZLIB)
        # the input from the position on is left
        self._input = b''
        self._at = 0
        self._step = _FIRST_STEP
        self._full = False  # True if the output was limited, so that there may be more without further input

    @property
    def pending(self) -> bool:
        """True if there may be more output without more input."""
        return self._at < len(self._input) or self._full

    def feed(self, data: bytes) -> bytes:
        self._input, self._at = self._input[self._at :] + data, 0
        pieces: list[bytes] = []
        size = 0
        while self.pending and size < _PIECE:
            if self._inner.eof:
                member = _NO_PADDING.search(self._input, self._at)
                self._at = member.start() if member else len(self._input)
                if member is None:
                    break
                self._inner, self._step = zlib.decompressobj(_GZIP_OR_ZLIB), _FIRST_STEP
            part = self._input[self._at : self._at + self._step]
            try:
                piece = self._inner.decompress(part, _PIECE)
            except zlib.error as error:
                raise CorruptError(f'{self._name}: its compressed data are damaged: {error}') from error
            self._at += len(part) - len(self._inner.unconsumed_tail or self._inner.unused_data)
            self._step = min(2 * self._step, _LAST_STEP)
            self._full = len(piece) == _PIECE and not self._inner.eof
            size += len(piece)
            skipped = min(self._skip, len(piece))
            self._skip -= skipped
            pieces.append(piece[skipped:])
        return b''.join(pieces)

    def finish(self, record: int) -> None:
        if not self._inner.eof:
            raise CorruptError(f'{self._name}: is truncated: its compressed data end in or after record {record}')
        if self._skip:
            raise CorruptError(f'{self._name}: expected {self._skip} more decompressed bytes before record {record}')
