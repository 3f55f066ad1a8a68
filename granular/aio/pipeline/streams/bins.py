"""Rows of fixed lengths that are filled with sequences."""

import abc
import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular.aio.pipeline.streams.packing_options import Feature, Recipe
from granular.formats.checksums import crc32c

Array = NDArray[Any]
_CLOSED: Final = 1 << 62  # used positions of a row that takes no more segments


class Segment(NamedTuple):
    """A sequence in a row, or a part of one: by feature, its values, and True if it is their beginning."""

    parts: list[Array]
    begins: list[bool]
    listed: list[Any]


class Document:
    """A sequence to pack: an array for each feature, and its listed meta features."""

    def __init__(self, arrays: list[Array], listed: list[Any]) -> None:
        self.arrays, self._listed = arrays, listed
        self.sizes: list[int] = [len(array) for array in arrays]
        self.offsets: list[int] = [0] * len(arrays)  # the numbers of values that are packed

    def take(self, features: Sequence[Feature], counts: Sequence[int]) -> Segment:
        """Return the next values of each feature as a segment; meta features are never split, and repeat."""
        parts, begins = [], []
        untaken = not any(self.offsets)
        for i, (feature, array, count) in enumerate(zip(features, self.arrays, counts, strict=True)):
            begins.append(untaken if feature.meta else not self.offsets[i])
            if count == self.sizes[i]:  # as of each meta feature
                parts.append(array)
            else:
                parts.append(array[self.offsets[i] : self.offsets[i] + count])
            if not feature.meta:
                self.offsets[i] += count
        return Segment(parts, begins, self._listed)

    @functools.cached_property
    def checksum(self) -> int:
        """The CRC32C of the lengths, types and values."""
        checksum = 0
        for array in self.arrays:
            checksum = crc32c(f'{array.dtype.str if len(array) else ""}{array.shape}'.encode(), checksum)
            if array.size:
                checksum = crc32c(np.ascontiguousarray(array).reshape(-1).view(np.uint8), checksum)
        return checksum

    def rest(self, features: Sequence[Feature]) -> list[int]:
        """Return the number of values that are left, by feature."""
        return [
            size if feature.meta else size - offset
            for feature, size, offset in zip(features, self.sizes, self.offsets, strict=True)
        ]


class Pack(abc.ABC):
    """Rows that are filled together."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.features = recipe, recipe.features

    @abc.abstractmethod
    def add(self, document: Document) -> bool:
        """Add as much of a document as possible. Returns True if all of it was added."""

    @abc.abstractmethod
    def rows(self) -> list[list[Segment]]:
        """Return the segments of the rows, those without segments omitted."""


class Bins(Pack):
    """Rows of which the first, or the fullest, that has enough space takes the next segment."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._used = np.zeros((len(self.features), recipe.bins), np.int64)
        self._lengths = [feature.length for feature in self.features]
        self._aligned = any(feature.alignment > 1 for feature in self.features)
        self._fullness: Ints | None = np.zeros(recipe.bins, np.int64) if recipe.strategy == 'best_fit' else None
        self._segments: list[list[Segment]] = [[] for _ in range(recipe.bins)]
        self._opened = 0  # rows with a segment: these, and the next one, are considered

    def add(self, document: Document) -> bool:
        features, lengths = self.features, self._lengths
        while True:
            counts = document.rest(features)
            whole = True
            for i, length in enumerate(lengths):
                if counts[i] > length:
                    counts[i], whole = length, False
            row = self._find(counts)
            if row is None:
                return False
            self._put(row, document.take(features, counts), counts)
            if whole:
                return True

    def _find(self, counts: list[int]) -> int | None:
        """Return the row that a segment goes into, or None if it fits into none of them."""
        considered = min(self._opened + 1, self.recipe.bins)
        used = self._used
        fits = used[0, :considered] <= self._lengths[0] - counts[0]
        for i in range(1, len(counts)):
            fits &= used[i, :considered] <= self._lengths[i] - counts[i]
        row = int((fits if self._fullness is None else np.where(fits, self._fullness[:considered], -1)).argmax())
        return row if fits[row] else None

    def _put(self, row: int, segment: Segment, counts: list[int]) -> None:
        segments = self._segments[row]
        segments.append(segment)
        self._opened = max(self._opened, row + 1)
        for i, count in enumerate(counts):
            if not self._aligned:
                self._used[i, row] += count
            else:
                self._used[i, row] = aligned(int(self._used[i, row]) + count, self.features[i].alignment)
        if self._fullness is not None:
            self._fullness[row] = self._used[:, row].sum()
        if len(segments) == self.recipe.max_segments:
            self._used[:, row] = _CLOSED

    def rows(self) -> list[list[Segment]]:
        return self._segments[: self._opened]


class Concatenated(Pack):
    """One row, which takes the beginning of the first document that has too little space."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._used = [0] * len(self.features)
        self._segments: list[Segment] = []

    def add(self, document: Document) -> bool:
        if len(self._segments) == self.recipe.max_segments:
            return False
        counts, rest = [], document.rest(self.features)
        for feature, used, left in zip(self.features, self._used, rest, strict=True):
            room = max(0, feature.length - used)
            if feature.meta and left > room:
                return False
            counts.append(min(left, room))
        moving = [count for feature, count in zip(self.features, counts, strict=True) if not feature.meta]
        if counts != rest and not any(moving):
            return False  # a row without space
        self._segments.append(document.take(self.features, counts))
        for i, (feature, count) in enumerate(zip(self.features, counts, strict=True)):
            self._used[i] = aligned(self._used[i] + count, feature.alignment)
        return counts == rest

    def rows(self) -> list[list[Segment]]:
        return [self._segments] if self._segments else []


def aligned(position: int, alignment: int) -> int:
    """Return the first multiple of the alignment from a position on."""
    return -(-position // alignment) * alignment
