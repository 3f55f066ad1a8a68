"""The base of the scanners of formats whose files have no index. No I/O."""

import abc
from typing import Any, Final

from granular.config import MiB

SCAN: Final = 16 * MiB  # bytes of a window with many headers
_PEEK: Final = 4096
_SPARSE: Final = 4 * MiB  # average bytes between headers above which what is between them is skipped


class HeaderScanner(abc.ABC):
    """Parses headers from windows of a file that it requests.

    Args:
      name: the file's name in errors.

    Attributes:
      at: position of the next header.
      done: True if there are no more headers.
      count: number of headers parsed so far.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.at, self.done, self.count = 0, False, 0

    def window(self) -> int:
        """Return the number of bytes to read from ``at``: many headers at once, or one if they are far apart."""
        return _PEEK if self.count and self.at // self.count > _SPARSE else SCAN

    @abc.abstractmethod
    def feed(self, start: int, data: bytes, size: int) -> None:
        """Parse the headers in a part of the file, which has ``size`` bytes, that begins at ``at``."""

    @abc.abstractmethod
    def index(self, size: int, version: str | None) -> Any:
        """Return the index of the headers parsed so far."""
