"""Parquet files: parses footers, maps columns to byte ranges, and decodes them with pyarrow.

The layout is that of https://parquet.apache.org/docs/file-format: row groups, each with a chunk of bytes per column,
followed by a footer with their positions. This module does no I/O.
"""

import bisect
import dataclasses
import operator
import re
from typing import Any, Final

import numpy as np

from granular._support.indexing import Ints
from granular._support.lazy import import_extra
from granular.aio.datasources.scanning import FileIndex
from granular.aio.paths.path import Path
from granular.aio.paths.seekable import SeekableFile
from granular.errors import CorruptError, GranularError, StoreError, UnsupportedError

MAGIC: Final = b'PAR1'
TAIL: Final = 8  # bytes after the footer: its length and the magic
_ENCRYPTED: Final = b'PARE'
_DECRYPT: Final = 'write it again without encryption, by pyarrow.parquet and its decryption_properties'
# The beginning of a footer: the field of the schema, a list, and the fields of the version and of the schema.
_SCHEMA: Final = b'\x29'
_VERSION: Final = b'\x15\x02\x19'
# Writers whose chunks exceed their declared length by the dictionary header (PARQUET-816).
_OLD: Final = re.compile(r'parquet-mr version (0|1\.[01]|1\.2\.[0-8])\b')
_EXCESS: Final = 100  # bytes
_LEAST: Final = 4  # bytes that a decoded value takes at least: in the file, a million nulls take a few


@dataclasses.dataclass(frozen=True, eq=False)
class Footer(FileIndex):
    path: Path
    metadata: Any  # pyarrow's ``FileMetaData``
    names: tuple[str, ...]  # of the columns
    leaves: dict[str, list[int]]  # for each column, the numbers of its chunks in a row group
    excess: int  # bytes that a chunk may have beyond its declared length
    stops: Ints  # cumulative number of rows up to the end of each row group

    @property
    def length(self) -> int:
        return int(self.stops[-1]) if len(self.stops) else 0

    def rows(self, group: int) -> int:
        return int(self.stops[group]) - (int(self.stops[group - 1]) if group else 0)


def footer_length(path: Path, size: int, tail: bytes) -> int:
    """Return the length of the footer and the bytes after it, from the last bytes of the file; raise ``CorruptError``
    if it is not a Parquet file, and ``UnsupportedError`` if it is encrypted.
    """
    if tail[-4:] == _ENCRYPTED:
        raise UnsupportedError(f'{path}: is encrypted, which is not supported: {_DECRYPT}')
    if size < TAIL + len(MAGIC) or tail[-4:] != MAGIC:
        raise CorruptError(
            f'{path}: is not a Parquet file, or is truncated: its {size} bytes end with {tail[-4:]!r}, not {MAGIC!r}'
        )
    length = int.from_bytes(tail[-TAIL:-4], 'little') + TAIL
    if length + len(MAGIC) > size:
        raise CorruptError(f'{path}: is damaged: expected a footer of {length} bytes, but the file has {size}')
    return length


def parse_footer(path: Path, size: int, version: str | None, tail: bytes) -> Footer:
    """Parse a file's footer and the bytes after it; raise ``CorruptError`` if they are damaged, and
    ``UnsupportedError`` if two columns have the same name, or some are encrypted.
    """
    pa, parquet = import_extra('pyarrow', 'parquet'), import_extra('pyarrow.parquet', 'parquet')
    tail = _with_version(tail)
    try:
        metadata = parquet.read_metadata(pa.BufferReader(tail))
        names = tuple(metadata.schema.to_arrow_schema().names)
        paths = [metadata.schema.column(i).path.split('.') for i in range(metadata.num_columns)]
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        excess = _EXCESS if _OLD.match(metadata.created_by or '') else 0
    except (pa.ArrowException, ValueError, OSError, IndexError, KeyError, TypeError) as error:
        raise CorruptError(f'{path}: its footer of {len(tail)} bytes cannot be parsed: {error}') from error
    if metadata.serialized_size != len(tail) - TAIL:  # a plain footer is followed by its signature
        raise UnsupportedError(f'{path}: has encrypted columns, which are not supported: {_DECRYPT}')
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise CorruptError(f'{path}: is damaged: expected {metadata.num_rows} rows in all row groups, got {sum(rows)}')
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UnsupportedError(f'{path}: has several columns named {", ".join(map(repr, twice))}')
    # A column consists of the chunks whose paths begin with its name, as in pyarrow; a name may contain dots.
    leaves: dict[str, list[int]] = {name: [] for name in names}
    for number, parts in enumerate(paths):
        for count in range(1, len(parts) + 1):
            if (name := '.'.join(parts[:count])) in leaves:
                leaves[name].append(number)
    footer = Footer(size, version, path, metadata, names, leaves, excess, np.cumsum(rows, dtype=np.int64))
    _check_chunks(footer)
    return footer


def _with_version(tail: bytes) -> bytes:
    """Return a footer with a version, which pyarrow requires, and some writers leave out."""
    if not tail.startswith(_SCHEMA):
        return tail
    footer = _VERSION + tail[len(_SCHEMA) : -TAIL]
    return footer + len(footer).to_bytes(TAIL - len(MAGIC), 'little') + tail[-len(MAGIC) :]


def _check_chunks(footer: Footer) -> None:
    """Raise ``CorruptError`` if pyarrow cannot return the metadata of a chunk: it would end the process.

    It reports an error only where it prepares to read the chunks, so it gets a file without bytes.
    """
    parquet = import_extra('pyarrow.parquet', 'parquet')
    nothing = _Nothing(footer.size)
    file = parquet.ParquetFile(nothing, metadata=footer.metadata, pre_buffer=True)
    try:
        next(file.iter_batches(1, columns=list(footer.names), use_threads=False), None)
    except Exception as error:  # it has no bytes, and perhaps columns of unsupported types, which reading refuses
        if not nothing.was_read and isinstance(error, OSError):
            raise CorruptError(f'{footer.path}: is damaged: its footer describes no valid columns: {error}') from error


def _chunks(footer: Footer, group: int, names: tuple[str, ...]) -> list[tuple[int, Any]]:
    """Return numbers and metadata of the chunks of some columns."""
    row_group = footer.metadata.row_group(group)
    numbers = sorted({i for name in names for i in footer.leaves[name]})
    if numbers and numbers[-1] >= row_group.num_columns:
        raise CorruptError(
            f'{footer.path}: row group {group}: expected {footer.metadata.num_columns} columns, got '
            f'{row_group.num_columns}: the footer is damaged'
        )
    return [(i, row_group.column(i)) for i in numbers]


def chunk_ranges(footer: Footer, group: int, names: tuple[str, ...]) -> tuple[Ints, Ints]:
    """Return where the chunks of some columns of a row group begin and end; raise ``CorruptError`` if the file is too
    short for one.
    """
    ranges = []
    for number, chunk in _chunks(footer, group, names):
        start, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
        if dictionary is not None and 0 < dictionary < start:
            start = dictionary
        stop, end = start + chunk.total_compressed_size, footer.size - TAIL
        if not len(MAGIC) <= start <= stop <= end:
            name = footer.metadata.schema.column(number).path
            raise CorruptError(
                f'{footer.path}: row group {group}, column {name!r}: bytes {start} to {stop} '
                f'are outside of the {footer.size} of the file: the footer is damaged, or of another file'
            )
        ranges.append((start, min(stop + footer.excess, end)))
    starts, stops = np.array(ranges, np.int64).reshape(-1, 2).T
    return starts, stops


def weight(footer: Footer, group: int, names: tuple[str, ...]) -> int:
    """Estimate the decoded bytes of some columns of a row group."""
    if len(names) == len(footer.names):
        size = int(footer.metadata.row_group(group).total_byte_size)
    else:
        size = sum(chunk.total_uncompressed_size for _, chunk in _chunks(footer, group, names))
    return max(size, _LEAST * footer.rows(group) * len(names))


def null_count(footer: Footer, group: int, name: str) -> int | None:
    """Return how many values of a column are missing in a row group; None if its statistics do not tell."""
    counts = []
    if not footer.rows(group):
        return 0
    for number, chunk in _chunks(footer, group, (name,)):
        statistics = chunk.statistics
        if statistics is None or not statistics.has_null_count:
            return None if footer.metadata.schema.column(number).max_definition_level else 0
        counts.append(statistics.null_count)
    if not sum(counts):
        return 0
    is_flat = len(counts) == 1 and '.' not in footer.metadata.schema.column(footer.leaves[name][0]).path.removeprefix(
        name
    )
    return counts[0] if is_flat else None


def decode(footer: Footer, group: int, names: tuple[str, ...], starts: Ints, chunks: list[bytes]) -> dict[str, Any]:
    """Decode columns of a row group into Arrow chunked arrays, by name, from their chunks and where these begin.

    Raises:
      CorruptError: if a column cannot be decoded, has the wrong length, or fails a checksum in the file.
      UnsupportedError: if this version of pyarrow does not support a compression or an encoding.
      StoreError: if the memory does not suffice.
    """
    pa, parquet = import_extra('pyarrow', 'parquet'), import_extra('pyarrow.parquet', 'parquet')
    try:
        file = parquet.ParquetFile(
            _Chunks(footer.size, starts, chunks),
            metadata=footer.metadata,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        table = file.read_row_group(group, columns=list(names), use_threads=False)
        columns = {name: table.column(table.schema.get_field_index(name)) for name in names}
    except GranularError:
        raise
    except (NotImplementedError, pa.ArrowNotImplementedError) as error:
        raise UnsupportedError(f'{footer.path}: row group {group}, {", ".join(names)}: {error}') from error
    except MemoryError as error:
        raise StoreError(
            f'{footer.path}: row group {group}, {", ".join(names)}: no memory for its {footer.rows(group)} rows '
            f'({error}): read fewer columns, or write smaller row groups'
        ) from error
    except Exception as error:  # a parser can raise any error on damaged bytes
        raise CorruptError(
            f'{footer.path}: row group {group}, {", ".join(names)}: cannot be decoded: {error}'
        ) from error
    rows = footer.rows(group)
    for name, column in columns.items():
        if len(column) != rows:
            raise CorruptError(
                f'{footer.path}: row group {group}, column {name!r}: expected {rows} values, got {len(column)}'
            )
    return columns


class _Chunks(SeekableFile):
    """A file object of which only some chunks are available."""

    def __init__(self, size: int, starts: Ints, chunks: list[bytes]) -> None:
        super().__init__(size)
        self._chunks = sorted(zip(starts.tolist(), chunks, strict=True))

    def _bytes_at(self, start: int, size: int) -> bytes:
        i = bisect.bisect_right(self._chunks, start, key=operator.itemgetter(0)) - 1
        first, data = self._chunks[i] if i >= 0 else (0, b'')
        offset = start - first
        if i < 0 or offset + size > len(data):
            raise OSError(f'bytes {start} to {start + size} are in none of the column chunks')
        return data[offset : offset + size]


class _Nothing(SeekableFile):
    """A file object of a size, of which no bytes are available."""

    was_read = False

    def _bytes_at(self, start: int, size: int) -> bytes:
        self.was_read = True
        raise OSError('a file without bytes')
