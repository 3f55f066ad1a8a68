"""The base of the scanners of formats whose files have no index. No I/O."""

import abc
from collections.abc import Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from granular.config import MiB
from granular.indexing import Ints

SCAN: Final = 16 * MiB  # bytes that are read at a time of a file with many headers
_PEEK: Final = 4096
_SPARSE: Final = 4 * MiB  # average bytes between headers above which what is between them is skipped


class FileIndex(Protocol):
    """The index of a file, of a size and a version, and the number of its datapoints (``length``)."""

    @property
    def length(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def version(self) -> str | None: ...


Index = TypeVar('Index', bound=FileIndex)


class HeaderScanner(abc.ABC, Generic[Index]):
    """Parses headers from parts of a file that it requests.

    Args:
      name: the file's name in errors.

    Attributes:
      kind: the format, for errors.
      at: position of the next header.
      done: True if there are no more headers.
      count: number of headers parsed so far.
    """

    kind: str

    def __init__(self, name: str) -> None:
        self._name = name
        self.at, self.done, self.count = 0, False, 0

    def reach(self) -> int:
        """Return the number of bytes to read from ``at``: many headers at once, or one if they are far apart."""
        return _PEEK if self.count and self.at // self.count > _SPARSE else SCAN

    @abc.abstractmethod
    def feed(self, start: int, data: bytes, size: int) -> None:
        """Parse the headers in a part of the file, which has ``size`` bytes, that begins at ``at``."""

    @abc.abstractmethod
    def index(self, size: int, version: str | None) -> Index:
        """Return the index of the headers parsed so far."""

    @staticmethod
    @abc.abstractmethod
    def to_tables(index: Index) -> tuple[Any, Sequence[Ints]]:
        """Convert an index into a head, for msgpack, and tables of numbers."""

    @staticmethod
    @abc.abstractmethod
    def from_tables(head: Any, tables: Sequence[Ints]) -> Index:
        """Convert the output of ``to_tables`` back into an index, or raise any exception."""
