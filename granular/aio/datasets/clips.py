"""Frames of many videos, of which only the parts are read that are decoded."""

import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Final, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular._support.lru import LRU
from granular.config import KiB, MiB
from granular.errors import DatapointError, OutOfRangeError
from granular.formats.frames import FrameTable, Part, missing_head

T = TypeVar('T')
_SMALL: Final = 256 * KiB  # bytes of a video up to which all of it is read for its table
_FIRST: Final = 4 * KiB  # bytes of a larger one that are read at first: those at the beginning,
_LAST: Final = 64 * KiB  # and at the end, where most programs write the table of the frames
_KEPT: Final = 128 * MiB  # memory of the tables that are kept

ReadParts = Callable[[Ints, Ints, Ints], Awaitable[list[bytes]]]
"""Returns byte ranges of videos, by the number of each video, and where they begin and end in it."""


class InThreads(Protocol):
    """Calls a function for the number of each of some videos, in threads, with errors that name the video."""

    async def __call__(self, call: Callable[[int], T], videos: Sequence[int]) -> list[T]: ...


class FrameTables:
    """The tables of the frames of videos; those that were used last are kept."""

    def __init__(self) -> None:
        self._tables: LRU[Hashable, FrameTable] = LRU(_KEPT, lambda table: table.nbytes)
        self._lock = threading.Lock()

    async def of(
        self, names: Sequence[Hashable], sizes: Sequence[int], read: ReadParts, in_threads: InThreads
    ) -> list[FrameTable]:
        """Return the tables of videos with some names and bytes; those that are not known are read."""
        with self._lock:
            tables = {i: table for i, name in enumerate(names) if (table := self._tables.get(name)) is not None}
        missing = [i for i in range(len(names)) if i not in tables]
        spans = [span for i in missing for span in _first_spans(i, sizes[i])]
        parts: dict[int, list[Part]] = {i: [] for i in missing}
        while spans:
            data = await read(*np.array(spans, np.int64).T)
            for (i, begin, end), part in zip(spans, data, strict=True):
                parts[i] = [(0, part)] if end - begin == sizes[i] else [*parts[i], (begin, part)]
            spans = [(i, *gap) for i in missing if (gap := missing_head(sizes[i], parts[i])) is not None]
            if not spans and missing:
                built = await in_threads(lambda i: FrameTable(sizes[i], parts[i]), missing)
                tables.update(zip(missing, built, strict=True))
                missing = [i for i in missing if tables[i].needs_all]
                spans = [(i, 0, sizes[i]) for i in missing]
        with self._lock:
            for i, name in enumerate(names):
                self._tables.put(name, tables[i])
        return [tables[i] for i in range(len(names))]


def _first_spans(video: int, size: int) -> list[tuple[int, int, int]]:
    if size <= _SMALL:
        return [(video, 0, size)]
    return [(video, 0, _FIRST), (video, size - _LAST, size)]


class Clips:
    """Frames of some videos, in any order.

    Attributes:
      spans: the byte ranges of which they are decoded: the number of the video of each, where it begins, and where it
        ends.
    """

    def __init__(self, tables: Sequence[FrameTable], frames: Sequence[Ints]) -> None:
        self._tables = tables
        self._distinct = [np.unique(own, return_inverse=True) for own in frames]
        spans = [table.spans(once) for table, (once, _) in zip(tables, self._distinct, strict=True)]
        self._counts = [len(begins) for begins, _ in spans]
        begins, ends = (np.concatenate([own[i] for own in spans]) for i in (0, 1))
        self.spans: tuple[Ints, Ints, Ints] = np.arange(len(tables)).repeat(self._counts), begins, ends

    def decode(self, video: int, parts: Sequence[bytes]) -> NDArray[np.uint8]:
        """Return the frames of a video, uint8 of shape (frames, height, width, 3), for the bytes of all spans."""
        once, again = self._distinct[video]
        first = sum(self._counts[:video])
        return self._tables[video].decode(once, parts[first : first + self._counts[video]])[again]


def frames_of(table: FrameTable, steps: Ints, length: int, fps: float | None, name: str) -> Ints:
    """Return the frames at some of as many steps: those that are shown at their times, or those of their numbers.

    Raises:
      DatapointError: for another number of frames than of steps, or a time at which the video has no frame.
    """
    if fps is None:
        if len(table) != length:
            raise DatapointError(f'{name}: expected {length} frames, one for each step, got {len(table)}: pass fps=')
        return steps
    try:
        return table.frames_at(steps / fps)
    except OutOfRangeError as error:
        raise DatapointError(f'{name}: {error}') from error
