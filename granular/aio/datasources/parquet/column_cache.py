"""What is kept of row groups: decoded columns, and those that are on their way."""

import asyncio
import collections
from collections.abc import Mapping
from typing import Any

Key = tuple[int, str]
"""A row group, counted over all files, and a column."""


class Load:
    """Columns that are being read, and then what was read."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.found: dict[Key, Any] = {}


class Cache:
    """Decoded columns, under one event loop: those used last, and those that are expected to be used.

    Args:
      limit: bytes that are kept at most, beyond what is expected.

    Attributes:
      kept: the columns, those used last behind the others.
      loads: what is being read.
      expected: what is kept, whatever its size.
      damaged: why columns cannot be decoded, as another try would not help: the files are pinned to their versions.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self.kept: collections.OrderedDict[Key, Any] = collections.OrderedDict()
        self.loads: dict[Key, Load] = {}
        self.expected: set[Key] = set()
        self.damaged: dict[Key, str] = {}

    def has(self, key: Key) -> bool:
        """Whether it is there, or on its way."""
        return key in self.kept or ((load := self.loads.get(key)) is not None and not load.task.cancelling())

    def take(self, key: Key) -> Any:
        """The column, if it is there."""
        column = self.kept.get(key)
        if column is not None:
            self.kept.move_to_end(key)
        return column

    def keep(self, found: Mapping[Key, Any]) -> None:
        """Keep columns, and drop what was not used for longest."""
        for key, column in found.items():
            if key not in self.kept:
                self.kept[key] = column
                self._size += column.nbytes
        for key in list(self.kept):
            if self._size <= self._limit:
                return
            if key not in self.expected:
                self._size -= self.kept.pop(key).nbytes

    def clear(self) -> None:
        """Let go of all that is there."""
        self.kept.clear()
        self.expected, self._size = set(), 0
