"""Parquet files: their footers, which byte ranges have which columns, and decoding what came of them, by pyarrow.

The layout is that of https://parquet.apache.org/docs/file-format: row groups, each of which has a chunk of bytes for
each column, and behind them a footer that says where. Nothing here reads from a store.
"""

import bisect
import io
import re
from typing import Any, Final, NamedTuple

import numpy as np

from granular._lazy import need
from granular.aio.paths.path import Path
from granular.errors import CorruptError, GranularError, UnsupportedError
from granular.indexing import Ints

MAGIC: Final = b'PAR1'
TAIL: Final = 8  # bytes behind the footer: its length and the magic
_ENCRYPTED: Final = b'PARE'
# Whose chunks are longer than they say, by the header of their dictionary (PARQUET-816).
_OLD: Final = re.compile(r'parquet-mr version (0|1\.[01]|1\.2\.[0-8])\b')
_MORE: Final = 100


class Footer(NamedTuple):
    """A Parquet file, opened.

    Attributes:
      path: the file.
      size: its bytes.
      version: the ETag or generation that it had.
      metadata: pyarrow's ``FileMetaData``.
      names: of its columns.
      leaves: of each column, the numbers of its chunks in a row group.
      stops: rows of all row groups up to each, shape (row groups,).
    """

    path: Path
    size: int
    version: str | None
    metadata: Any
    names: tuple[str, ...]
    leaves: dict[str, list[int]]
    stops: Ints


def footer_length(path: Path, size: int, tail: bytes) -> int:
    """Bytes of the footer and what is behind it, by the last bytes of the file.

    Raises:
      CorruptError: if it is no Parquet file.
      UnsupportedError: if its footer is encrypted.
    """
    if tail[-4:] == _ENCRYPTED:
        raise UnsupportedError(f'{path}: its footer is encrypted, which is not supported')
    if size < TAIL + len(MAGIC) or tail[-4:] != MAGIC:
        raise CorruptError(
            f'{path}: is no Parquet file, or cut off: it has {size} bytes, which end with {tail[-4:]!r}, not {MAGIC!r}'
        )
    length = int.from_bytes(tail[-TAIL:-4], 'little') + TAIL
    if length + len(MAGIC) > size:
        raise CorruptError(f'{path}: is damaged: its footer is to have {length} bytes, the file has {size}')
    return length


def parse_footer(path: Path, size: int, version: str | None, tail: bytes) -> Footer:
    """A file, of its footer and what is behind it.

    Raises:
      CorruptError: if that is damaged.
      UnsupportedError: if two of its columns have one name.
    """
    pa, parquet = need('pyarrow', 'parquet'), need('pyarrow.parquet', 'parquet')
    try:
        metadata = parquet.read_metadata(pa.BufferReader(tail))
        names = tuple(metadata.schema.to_arrow_schema().names)
        paths = [metadata.schema.column(i).path.split('.') for i in range(metadata.num_columns)]
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    except (pa.ArrowException, ValueError, OSError) as error:
        raise CorruptError(f'{path}: its footer of {len(tail)} bytes is not read: {error}') from error
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise CorruptError(f'{path}: is damaged: row groups of {sum(rows)} rows in all, of {metadata.num_rows}')
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise UnsupportedError(f'{path}: has several columns named {", ".join(map(repr, twice))}')
    # A column has the chunks whose paths begin with its name, as pyarrow chooses them; it may have dots itself.
    leaves: dict[str, list[int]] = {name: [] for name in names}
    for number, parts in enumerate(paths):
        for count in range(1, len(parts) + 1):
            if (name := '.'.join(parts[:count])) in leaves:
                leaves[name].append(number)
    return Footer(path, size, version, metadata, names, leaves, np.cumsum(rows, dtype=np.int64))


def chunks(footer: Footer, group: int, names: tuple[str, ...]) -> list[tuple[int, int]]:
    """The byte ranges that have some columns of a row group.

    Raises:
      CorruptError: if the file is too short for one.
    """
    found = []
    row_group = footer.metadata.row_group(group)
    more = _MORE if _OLD.match(footer.metadata.created_by or '') else 0
    for i in sorted({i for name in names for i in footer.leaves[name]}):
        chunk = row_group.column(i)
        start, dictionary = chunk.data_page_offset, chunk.dictionary_page_offset
        if dictionary is not None and 0 < dictionary < start:
            start = dictionary
        stop, end = start + chunk.total_compressed_size, footer.size - TAIL
        if not len(MAGIC) <= start <= stop <= end:
            raise CorruptError(
                f'{footer.path}: row group {group}, column {chunk.path_in_schema!r}: is to lie at bytes {start} to '
                f'{stop}, of {footer.size}: the footer is damaged, or of another file'
            )
        found.append((start, min(stop + more, end)))
    return found


def weight(footer: Footer, group: int, names: tuple[str, ...]) -> int:
    """About how many bytes some columns of a row group are, decoded."""
    row_group = footer.metadata.row_group(group)
    if len(names) == len(footer.names):
        return int(row_group.total_byte_size)
    leaves = {i for name in names for i in footer.leaves[name]}
    return sum(row_group.column(i).total_uncompressed_size for i in leaves)


def decode(footer: Footer, group: int, names: tuple[str, ...], pieces: list[tuple[int, bytes]]) -> dict[str, Any]:
    """Columns of a row group, as Arrow's chunked arrays by name.

    Args:
      pieces: what was read of the file, as (start, bytes).

    Raises:
      CorruptError: if it cannot be decoded, is of another length, or fails a checksum that the file has.
      UnsupportedError: if this pyarrow does not know a compression or an encoding.
    """
    pa, parquet = need('pyarrow', 'parquet'), need('pyarrow.parquet', 'parquet')
    try:
        file = parquet.ParquetFile(
            _Pieces(footer.size, pieces), metadata=footer.metadata, pre_buffer=False, page_checksum_verification=True
        )
        table = file.read_row_group(group, columns=list(names), use_threads=False)
        found = {name: table.column(table.schema.get_field_index(name)) for name in names}
    except GranularError:
        raise
    except (NotImplementedError, pa.ArrowNotImplementedError) as error:
        raise UnsupportedError(f'{footer.path}: row group {group}, {", ".join(names)}: {error}') from error
    except Exception as error:  # of whatever kind: what a parser runs into in damaged bytes
        raise CorruptError(f'{footer.path}: row group {group}, {", ".join(names)}: not decoded: {error}') from error
    rows = int(footer.stops[group]) - (int(footer.stops[group - 1]) if group else 0)
    for name, column in found.items():
        if len(column) != rows:
            raise CorruptError(
                f'{footer.path}: row group {group}, column {name!r}: has {len(column)} values for {rows} rows'
            )
    return found


class _Pieces(io.RawIOBase):
    """A file of which some byte ranges are there."""

    def __init__(self, size: int, pieces: list[tuple[int, bytes]]) -> None:
        super().__init__()
        self._size, self._at = size, 0
        self._pieces = sorted(pieces)
        self._starts = [start for start, _ in self._pieces]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        i = bisect.bisect_right(self._starts, self._at) - 1
        start, data = self._pieces[i] if i >= 0 else (0, b'')
        inner = self._at - start
        if size < 0 or i < 0 or inner + size > len(data):
            raise OSError(f'bytes {self._at} to {self._at + size} lie in none of its chunks')
        self._at += size
        return data[inner : inner + size]
