"""Decodes chunks of Riegeli/records files into records, with pure functions.

As specified in doc/riegeli_records_file_format.md of google/riegeli. A chunk is a header of 40 bytes and its data,
interrupted by a block header of 24 bytes wherever the file's offset is a multiple of 64 KiB. Simple chunks are
supported, uncompressed or compressed with brotli or zstd. All sizes and counts are checked against each other and
against the available bytes. The hashes of headers and data (HighwayHash) are checked by ``check_hashes`` alone, because
computing them in Python takes longer than everything else.
"""

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, ParamSpec, TypeVar

import numpy as np

from granular._support.indexing import Ints
from granular._support.lazy import import_extra
from granular.aio.runtime.buffers import blank
from granular.config import MiB
from granular.errors import CorruptRecordError, UnsupportedError
from granular.formats.base import Buffer
from granular.formats.highwayhash import highwayhash64
from granular.formats.protobuf import varint, varints

BLOCK: Final = 1 << 16
BLOCK_HEADER: Final = 24
CHUNK_HEADER: Final = 40

_HEADER: Final = struct.Struct('<8xQ8xQQ')  # skips the two hashes; the type and the number of records share a word
_SIMPLE, _TRANSPOSED = ord('r'), ord('t')
_KINDS: Final = {'s': 'a file signature', 'm': 'file metadata', 'p': 'padding', 't': 'a transposed chunk'}
_PLAIN, _BROTLI, _ZSTD = 0, ord('b'), ord('z')
_COMPRESSIONS: Final = {'s': 'snappy'}
MAX_BYTES: Final = 4 << 30
# The smallest zstd block has 4 bytes and decompresses to 128 KiB.
_PART: Final = MiB  # bytes that brotli decompresses at a time
_ZSTD_RATIO: Final = 1 << 15
_SIZE: Final = 9  # bytes of the size of a record
_HASH: Final = 8
_KEY: Final = np.frombuffer(b'Riegeli/records\n' * 2, '<u8').astype(np.uint64)

_per_thread = threading.local()

P = ParamSpec('P')
T = TypeVar('T')


class Chunk(NamedTuple):
    """A chunk without block headers."""

    header: Buffer  # its first 40 bytes
    kind: int
    records: int
    decoded: int  # bytes of its records, decompressed
    data: Buffer  # what follows the header, without trailing padding


def parse_chunk(raw: bytes, at: int, name: str) -> Chunk:
    """Parse a chunk from bytes of the file, from a position on, that start with it and its block headers."""
    plain = memoryview(_without_block_headers(raw, at))
    if len(plain) < CHUNK_HEADER:
        raise CorruptRecordError(f'{name}: expected a header of {CHUNK_HEADER} bytes, got {len(plain)} bytes')
    size, word, decoded = _HEADER.unpack_from(plain)
    if size > len(plain) - CHUNK_HEADER:
        raise CorruptRecordError(f'{name}: expected {size} bytes of data, got {len(plain) - CHUNK_HEADER}')
    header, data = plain[:CHUNK_HEADER], plain[CHUNK_HEADER : CHUNK_HEADER + size]
    return Chunk(header, word & 255, word >> 8, decoded, data)


def check_hashes(chunks: Sequence[tuple[bytes, int, str]]) -> None:
    """Check the hashes of chunks, given as to ``parse_chunk``; raise ``CorruptRecordError`` if one is wrong."""
    parts: list[Buffer] = []
    expected: list[int] = []
    for raw, at, name in chunks:
        chunk = parse_chunk(raw, at, name)
        parts += [chunk.header[_HASH:], chunk.data]
        expected += [int.from_bytes(chunk.header[start : start + _HASH], 'little') for start in (0, 2 * _HASH)]
    for i, computed in enumerate(highwayhash64(parts, _KEY).tolist()):
        if computed != expected[i]:
            part = 'data' if i % 2 else 'header'
            raise CorruptRecordError(
                f'{chunks[i // 2][2]}: expected hash {expected[i]:016x} of its {part}, got {computed:016x}'
            )


def _without_block_headers(raw: bytes, at: int) -> Buffer:
    first = -at % BLOCK
    if first >= len(raw):
        return raw
    view, pieces, begin = memoryview(raw), [], 0
    for position in range(first, len(raw), BLOCK):
        pieces.append(view[begin:position])
        begin = position + BLOCK_HEADER
    pieces.append(view[begin:])
    return b''.join(pieces)


def read_records(raw: bytes, at: int, count: int, wanted: Sequence[int], name: str) -> list[bytes]:
    """Return the wanted records of a chunk, which has ``count`` of them according to the file's index; raise
    ``CorruptRecordError`` if its sizes and counts contradict each other, and ``UnsupportedError`` if it is transposed,
    or compressed with snappy.
    """
    ends, values = read_values(parse_chunk(raw, at, name), count, name)
    if count == 1:
        return [bytes(values)] * len(wanted)
    stops = ends.tolist()
    return [bytes(values[stops[i - 1] if i else 0 : stops[i]]) for i in wanted]


def read_values(chunk: Chunk, count: int | None, name: str, max_bytes: int = MAX_BYTES) -> tuple[Ints, Buffer]:
    """Return the end of each record of a simple chunk, and the concatenated records.

    It must have ``count`` records, unless this is None, and at most ``max_bytes`` bytes of them.
    """
    _, kind, records, decoded, data = chunk
    if kind != _SIMPLE:
        if chr(kind) not in _KINDS:
            raise CorruptRecordError(f'{name}: unknown chunk type {kind:#x}')
        problem = f'{name}: is {_KINDS[chr(kind)]}, not a simple chunk'
        if kind == _TRANSPOSED:
            raise UnsupportedError(f'{problem}: write it with transpose:false')
        raise CorruptRecordError(problem)
    if count is not None and records != count:
        raise CorruptRecordError(f"{name}: has {records} records, but the file's index says {count}")
    if not data:
        raise CorruptRecordError(f'{name}: has no data')
    compression = data[0]
    length, begin = named(name, varint, data, 1, len(data))
    if length > len(data) - begin:
        raise CorruptRecordError(f'{name}: the sizes of its records take {length} of {len(data) - begin} bytes')
    if decoded > MAX_BYTES:
        raise UnsupportedError(f'{name}: has {decoded} bytes of records: at most {MAX_BYTES} are read')
    if decoded > max_bytes:
        raise CorruptRecordError(f'{name}: expected at most {max_bytes} bytes of records, got {decoded}')
    sizes = _decompress(
        compression, data[begin : begin + length], None, min(_SIZE * records, max_bytes), f'{name}, sizes'
    )
    values = _decompress(compression, data[begin + length :], decoded, decoded, f'{name}, values')
    if records == 1:
        size, end = named(name, varint, sizes, 0, len(sizes))
        if size != decoded or end != len(sizes):
            raise CorruptRecordError(f'{name}: expected a record of {size} bytes, got {decoded}')
        return np.array([size]), values
    each = named(name, varints, sizes, 0, len(sizes))
    if len(each) != records:
        raise CorruptRecordError(f'{name}: has {records} records, but {len(each)} sizes')
    # Checked first, so that the sum cannot overflow.
    if (bad := (each < 0) | (each > decoded)).any():
        raise CorruptRecordError(f'{name}: a record has {each[bad][0]} bytes, all together {decoded}')
    ends = np.cumsum(each)
    if int(each.sum()) != decoded:
        raise CorruptRecordError(f'{name}: expected records of {each.sum()} bytes, got {decoded}')
    return ends, values


def _decompress(kind: int, data: Buffer, expected: int | None, max_bytes: int, name: str) -> Buffer:
    """Decompress a buffer to ``expected`` bytes, or to at most ``max_bytes``."""
    if kind == _PLAIN:
        size = len(data)
    elif kind in (_BROTLI, _ZSTD):
        size, begin = named(name, varint, data, 0, len(data))
        data = data[begin:]
    else:
        compression_name = _COMPRESSIONS.get(chr(kind), f'{kind:#x}')
        raise UnsupportedError(f'{name}: compressed by {compression_name}: expected none, brotli or zstd')
    if size > max_bytes or (expected is not None and size != expected):
        raise CorruptRecordError(
            f'{name}: expected {"at most " if expected is None else ""}{max_bytes} bytes, got {size}'
        )
    if kind == _PLAIN:
        return data
    return _brotli(data, size, name) if kind == _BROTLI else _zstd(data, size, name)


def _brotli(data: Buffer, size: int, name: str) -> bytes:
    brotli = import_extra('brotli', 'arrayrecord')
    stream = brotli.Decompressor()
    space, at = blank(size, name), 0
    try:
        # In parts, as brotli would need the memory twice. The declared size bounds it, and it is taken as it is filled.
        part = stream.process(data, output_buffer_limit=_PART)
        while at + len(part) <= size:
            space.view[at : at + len(part)] = part
            at += len(part)
            if stream.is_finished() or not (part := stream.process(b'', output_buffer_limit=_PART)):
                break
        else:
            raise CorruptRecordError(f'{name}: expected {size} bytes after decompression, got more')
    except brotli.error as error:
        raise CorruptRecordError(f'{name}: {len(data)} bytes are not valid brotli: {error}') from error
    if at < size or not stream.is_finished():
        raise CorruptRecordError(
            f'{name}: {len(data)} bytes are not a complete brotli stream of {size} bytes: got {at}'
        )
    owner: bytes = space.owner
    return owner


def _zstd(data: Buffer, size: int, name: str) -> bytes:
    zstandard = import_extra('zstandard', 'arrayrecord')
    if size > len(data) * _ZSTD_RATIO:
        raise CorruptRecordError(f'{name}: {len(data)} bytes of zstd cannot decompress to {size}')
    # Creating a decompressor takes longer than most chunks, and one is not thread-safe: keep one per thread.
    decompressor = getattr(_per_thread, 'zstd', None)
    if decompressor is None:
        decompressor = _per_thread.zstd = zstandard.ZstdDecompressor()
    try:
        if (declared := zstandard.frame_content_size(data)) not in (-1, size):
            raise CorruptRecordError(f'{name}: expected {size} bytes, but its zstd frame declares {declared}')
        if not size:
            return b''
        decompressed: bytes = decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptRecordError(f'{name}: {len(data)} bytes are not valid zstd: {error}') from error
    if len(decompressed) != size:
        raise CorruptRecordError(f'{name}: expected {size} bytes after decompression, got {len(decompressed)}')
    return decompressed


def named(name: str, parse: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
    """Return what a parser of protobuf returns; raise ``CorruptRecordError``, which begins with a name, if it fails."""
    try:
        return parse(*args, **options)
    except ValueError as error:
        raise CorruptRecordError(f'{name}: {error}') from error
