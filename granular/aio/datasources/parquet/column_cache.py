"""A cache of decoded row group columns, and of the loads in flight."""

import asyncio
import collections
from collections.abc import Mapping
from typing import Any

Key = tuple[int, str]
"""A row group, counted over all files, and a column."""


class Load:
    """A load of columns, and its results."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.columns: dict[Key, Any] = {}


class ColumnCache:
    """LRU cache of decoded columns for one event loop; expected columns are not evicted.

    Args:
      limit: limit on the bytes cached, not counting expected columns.

    Attributes:
      columns: the columns, least recently used first.
      loads: the loads in flight, by column.
      expected: columns that are not evicted, whatever their size.
      damaged: errors of columns that cannot be decoded; another try would not help, as files are pinned to their
        versions.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self.columns: collections.OrderedDict[Key, Any] = collections.OrderedDict()
        self.loads: dict[Key, Load] = {}
        self.expected: set[Key] = set()
        self.damaged: dict[Key, str] = {}

    def has(self, key: Key) -> bool:
        """Return whether the column is cached or being loaded."""
        return key in self.columns or ((load := self.loads.get(key)) is not None and not load.task.cancelling())

    def get(self, key: Key) -> Any:
        """Return the column if it is cached, and mark it as used."""
        column = self.columns.get(key)
        if column is not None:
            self.columns.move_to_end(key)
        return column

    def add(self, columns: Mapping[Key, Any]) -> None:
        """Cache columns, and evict the least recently used ones."""
        for key, column in columns.items():
            if key not in self.columns:
                self.columns[key] = column
                self._size += column.nbytes
        for key in list(self.columns):
            if self._size <= self._limit:
                return
            if key not in self.expected:
                self._size -= self.columns.pop(key).nbytes

    def clear(self) -> None:
        """Drop all columns."""
        self.columns.clear()
        self.expected, self._size = set(), 0
