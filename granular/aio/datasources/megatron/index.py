"""The index of a dataset of Megatron: where its documents are in the data. No I/O.

=============  ========  =====================================================================
magic          9 bytes
version        uint64    1
code           uint8     of the dtype of the tokens
sequences      uint64    n
documents      uint64    d: the documents and 1
lengths        int32[n]  tokens of each sequence
pointers       int64[n]  its first byte in the data
document ends  int64[d]  0, and the number of sequences up to the end of each document
modes          int8[n]   if the dataset has modes
=============  ========  =====================================================================

All integers are little-endian. The data has the tokens of the sequences, one behind the other.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular.aio.bags.identity import FileIdentity
from granular.aio.datasources.scanning import FileIndex
from granular.errors import CorruptError, UnsupportedError
from granular.formats.dataset_index import DIGEST

MAGIC: Final = b'MMIDIDX\0\0'
VERSION: Final = 1
HEAD: Final = struct.Struct('<9sQBQQ')
CODES: Final[Mapping[int, np.dtype[Any]]] = {
    code: np.dtype(name) for code, name in enumerate(('u1', 'i1', '<i2', '<i4', '<i8', '<f8', '<f4', '<u2'), start=1)
}
"""The dtypes of tokens by their codes."""


class Head(NamedTuple):
    """Contents of an index, by its first bytes."""

    dtype: np.dtype[Any]
    sequences: int
    ends: int  # of documents, and 1
    modes: bool

    @classmethod
    def parse(cls, data: bytes, size: int, name: str) -> Self:
        """Return the head of an index of ``size`` bytes.

        Raises:
          CorruptError: if it is no index of Megatron, or has not the size that its head tells.
          UnsupportedError: if it is of another version, or of an unknown dtype.
        """
        if data[: len(MAGIC)] != MAGIC:
            raise CorruptError(
                f'{name}: is no index of Megatron: expected it to begin with {MAGIC!r}, got {data[: len(MAGIC)]!r}',
                path=name,
            )
        if len(data) < HEAD.size:
            raise CorruptError(f'{name}: is truncated: expected a head of {HEAD.size} bytes, got {size}', path=name)
        _, version, code, sequences, ends = HEAD.unpack(data[: HEAD.size])
        if version != VERSION:
            raise UnsupportedError(f'{name}: expected version {VERSION} of the index, got {version}', path=name)
        if code not in CODES:
            raise UnsupportedError(
                f'{name}: expected a code of a dtype from {min(CODES)} to {max(CODES)}, got {code}', path=name
            )
        expected = HEAD.size + 12 * sequences + 8 * ends
        if size not in (expected, expected + sequences):
            raise CorruptError(
                f'{name}: is truncated or damaged: expected {expected} bytes, or {expected + sequences} with modes, '
                f'for {sequences} sequences and {ends} ends of documents, got {size}',
                path=name,
            )
        return cls(CODES[code], sequences, ends, size > expected)


@dataclasses.dataclass(frozen=True, eq=False)
class Index(FileIndex):
    """Positions of the documents, or the sequences, in the data; ``size`` and ``version`` are those of the data."""

    digest: str  # of the index
    dtype: np.dtype[Any]
    stops: Ints  # the byte after each element
    ends: Ints | None  # the number of sequences up to the end of each element; None if each is one sequence
    lengths: NDArray[np.int32] | None  # tokens of each sequence; None likewise
    modes: NDArray[np.int8] | None  # of each sequence

    @property
    def length(self) -> int:
        return len(self.stops)

    @property
    def identity(self) -> FileIdentity:
        return FileIdentity(self.size, self.version, self.digest)

    @property
    def sequence_count(self) -> int:
        return self.length if self.ends is None else int(self.ends[-1]) if self.length else 0

    def limits(self, items: Ints) -> tuple[Ints, Ints]:
        """Return where the tokens of some elements begin and end."""
        return np.where(items > 0, self.stops[items - 1], 0), self.stops[items]

    def tokens(self) -> Ints:
        """Return the number of tokens of each element."""
        counts: Ints = np.diff(self.stops, prepend=0) // self.dtype.itemsize
        return counts

    def sequences(self) -> Ints:
        """Return the number of sequences of each element."""
        counts: Ints = np.ones(self.length, np.int64) if self.ends is None else np.diff(self.ends, prepend=0)
        return counts

    def sequences_of(self, item: int) -> slice:
        if self.ends is None:
            return slice(item, item + 1)
        return slice(int(self.ends[item - 1]) if item else 0, int(self.ends[item]))

    def lengths_of(self, item: int) -> NDArray[np.int32]:
        """Return the number of tokens of each sequence of an element."""
        if self.lengths is not None:
            return self.lengths[self.sequences_of(item)]
        start = int(self.stops[item - 1]) if item else 0
        return np.array([(int(self.stops[item]) - start) // self.dtype.itemsize], np.int32)


def parse(data: bytes, name: str, file: FileIdentity, data_name: str, by_sequence: bool) -> Index:
    """Return an index, of which the data is a file with this identity.

    Args:
      data: the bytes of the index.
      name: of the index, for errors.
      file: the size and version of the data.
      data_name: its name, for errors.
      by_sequence: True if each sequence is an element, False if each document is one.

    Raises:
      CorruptError: if the index contradicts itself, or the data has another size.
      UnsupportedError: if it is of another version, or of an unknown dtype.
    """
    head = Head.parse(data, len(data), name)
    n, item = head.sequences, head.dtype.itemsize
    lengths = np.frombuffer(data, '<i4', n, HEAD.size)
    pointers = np.frombuffer(data, '<i8', n, HEAD.size + 4 * n)
    stops = np.cumsum(lengths, dtype=np.int64) * item
    _check_each(lengths >= 0, name, lambda i: f'expected a length of 0 or more, got {lengths[i]}')
    starts = stops - lengths.astype(np.int64) * item
    _check_each(
        pointers == starts,
        name,
        lambda i: f'expected it to begin at byte {starts[i]}, behind those before it, got {pointers[i]}',
    )
    total = int(stops[-1]) if n else 0
    if file.size != total:
        problem = 'is truncated' if file.size < total else 'is longer than its index tells'
        raise CorruptError(
            f'{data_name}: {problem}: {name} has {total // item} tokens of {head.dtype}, expected {total} bytes, got '
            f'{file.size}: copy both files of one dataset',
            path=data_name,
        )
    at = HEAD.size + 12 * n
    modes = np.frombuffer(data, np.int8, n, at + 8 * head.ends).copy() if head.modes else None
    digest = DIGEST + hashlib.sha256(data).hexdigest()
    ends = None if by_sequence else _ends_of_documents(np.frombuffer(data, '<i8', head.ends, at), n, name)
    if ends is None:
        return Index(file.size, file.version, digest, head.dtype, stops, None, None, modes)
    kept = lengths.astype(np.int32)  # not a view of all of the index
    return Index(file.size, file.version, digest, head.dtype, np.append(0, stops)[ends], ends, kept, modes)


def _check_each(good: NDArray[np.bool_], name: str, problem: Callable[[int], str]) -> None:
    if not good.all():
        first = int(np.argmin(good))
        raise CorruptError(f'{name}: sequence {first}: {problem(first)}', path=name, index=first)


def _ends_of_documents(table: NDArray[np.int64], sequences: int, name: str) -> Ints | None:
    """Return the number of sequences up to the end of each document; None if each document is one sequence."""
    remedy = 'pass sequences=True to read sequences, which need no documents'
    if not len(table) or table[0] != 0 or table[-1] != sequences:
        got = f'from {table[0]} to {table[-1]}' if len(table) else 'none'
        raise CorruptError(
            f'{name}: expected ends of documents from 0 to {sequences}, the number of sequences, got {got}: {remedy}',
            path=name,
        )
    ends = table[1:].astype(np.int64)
    steps = np.diff(ends, prepend=0)
    if (steps < 0).any():
        first = int(np.argmax(steps < 0))
        raise CorruptError(
            f'{name}: document {first}: expected it to end at sequence {ends[first - 1]} or later, got {ends[first]}: '
            f'{remedy}',
            path=name,
            index=first,
        )
    return None if len(ends) == sequences and (steps == 1).all() else ends


def dump(dtype: np.dtype[Any], lengths: Ints, ends: Ints, modes: NDArray[np.int8] | None = None) -> Iterator[bytes]:
    """Yield the parts of an index.

    Args:
      dtype: of the tokens, one of ``CODES``.
      lengths: tokens of each sequence.
      ends: the number of sequences up to the end of each document.
      modes: of each sequence.
    """
    code = next(code for code, known in CODES.items() if known == dtype)
    yield HEAD.pack(MAGIC, VERSION, code, len(lengths), len(ends) + 1)
    yield lengths.astype('<i4').tobytes()
    yield ((np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize).astype('<i8').tobytes()
    yield np.append(0, ends).astype('<i8').tobytes()
    if modes is not None:
        yield modes.tobytes()
