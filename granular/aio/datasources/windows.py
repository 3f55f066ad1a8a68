"""Windows over the steps of episodes: of states, actions, sequences of images and frames of videos."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import MOST, Ints, check_integer, indices_of, integers_of
from granular._support.text import counted
from granular.aio.datasources.indexed_files import SequenceSource
from granular.aio.datasources.step_sources import StepSource, step_source
from granular.aio.datasources.window_values import values_of
from granular.aio.pipeline.data_source import OpenedDataSource, as_data_source, file_bytes
from granular.aio.pipeline.nodes.source import length_of
from granular.aio.runtime.lifecycle import check_open, ensure_open
from granular.aio.runtime.threads import map_threads
from granular.errors import (
    ClosedError,
    InvalidArgumentError,
)
from granular.formats.checksums import crc32c

Window = dict[str, Any]
Offsets = int | tuple[int, int] | Sequence[int] | Sequence[float] | Literal[True]
Border = Literal['pad', 'drop']

_INEXACT: Final = 1e-4  # seconds between an offset and its step
_SECONDS: Final = 'seconds need a list, such as [-0.5, 0.0]'
_FARTHEST: Final = 1 << 30  # steps between a window and its values
_MOST: Final = 1 << 26  # values of a key in a window
_WHOLE: Final = None  # in place of offsets


class Windows(SequenceSource[Window]):
    """Random access to windows over the steps of episodes: a few consecutive states with the images of their times.

    ::

        async with granular.aio.open('s3://bucket/robots') as reader:
            windows = granular.aio.Windows(reader, {'state': (-1, 1), 'action': 16, 'camera': [-10, 0], 'task': True})
            window = await windows.get(7)  # {'state': shape (2, 7), 'action': (16, 7), 'camera': (2, 240, 320, 3), ...}

    An episode is a datapoint whose values have a step each: an array, by its first axis; a sequence such as ``jpg[]``;
    or a video. There is a window at each step, or at every ``stride``-th, with the values at some offsets from it. None
    has values of two episodes. Windows are numbered in the order of the episodes.

    Numbers and arrays are stacked along a new first axis, other values are in a list. A fetch of many windows is one
    fan-out. What windows share is read and decoded once, and of arrays, sequences and MP4 files in a dataset of
    granular only the parts that they have.

    Args:
      reader: a reader of episodes, or any other source of dicts, which is read whole.
      windows: the offsets of each key: a number ``n`` for those from 0 to ``n - 1``; a pair ``(start, stop)``; or a
        list. With ``fps``, a list can have seconds, as floats. True is for a value that all steps share.
      stride: distance between the steps that have a window, from the first one of an episode on.
      border: ``'pad'`` repeats the first and the last value of an episode beyond it, and adds ``<key>_is_pad``, a mask
        of shape ``(offsets,)``; ``'drop'`` has no windows that reach beyond an episode.
      fps: steps in a second. The frames of videos are then those that are shown at the times of the steps, from 0 on.
        Without it, frame i of a video is that of step i.
      episodes: indices of the episodes that have windows, in this order; by default all.
      lengths: the number of steps of each episode of the reader, where no key tells it, such as of videos alone.

    Raises:
      UnknownKeyError: if the reader has no such key.
      InvalidArgumentError: if an argument is invalid, or the keys of an episode differ in their number of steps, or
        that is not known; it names the episode.
      DatapointError: of a read, if a value has another number of steps, or a video no frame at a time.
    """

    def __init__(
        self,
        reader: Any,
        windows: Mapping[str, Offsets],
        stride: int = 1,
        border: Border = 'pad',
        *,
        fps: float | None = None,
        episodes: Any = None,
        lengths: Any = None,
    ) -> None:
        super().__init__()
        self._reader = getattr(reader, 'aio', reader)
        if not isinstance(windows, Mapping) or not windows:
            raise InvalidArgumentError(f'windows: expected a mapping from keys to offsets, got {windows!r:.100}')
        if border not in ('pad', 'drop'):
            raise InvalidArgumentError(f"border: expected 'pad' or 'drop', got {border!r:.100}")
        if fps is not None and (
            not isinstance(fps, int | float | np.integer | np.floating) or isinstance(fps, bool) or not 0 < fps < MOST
        ):
            raise InvalidArgumentError(f'fps: expected a number > 0, or None, got {fps!r:.100}')
        # Of its own, and without arrays, which repr shortens: states and pickles have it.
        self._given = {k: own.tolist() if isinstance(own, np.ndarray) else copy.copy(own) for k, own in windows.items()}
        self._offsets = {key: _offsets_of(key, offsets, fps) for key, offsets in windows.items()}
        stepped = [_ends_of(offsets) for offsets in self._offsets.values() if offsets is not _WHOLE]
        if not stepped:
            raise InvalidArgumentError('windows: expected the offsets of a key, got True for all of them')
        self._least = min(0, *(least for least, _ in stepped))
        self._most = max(0, *(most for _, most in stepped))
        if border == 'pad' and (taken := [key for key in windows if f'{key}_is_pad' in windows]):
            raise InvalidArgumentError(f"windows: {taken[0]}_is_pad is the mask of {taken[0]!r}: pass border='drop'")
        self._stride = check_integer('stride', stride, 1, MOST)
        self._border, self._fps = border, fps.item() if isinstance(fps, np.generic) else fps
        self._episodes = None if episodes is None else integers_of(episodes, 'episodes')
        self._chosen: Ints | None = None  # the episodes as positions, once they are known
        self._told = None if lengths is None else integers_of(lengths, 'lengths')
        self._source: StepSource | None = None
        self._starts: Ints = np.zeros(1, np.int64)  # steps before each episode of the reader
        self._stops: Ints = np.zeros(0, np.int64)  # windows up to the end of each chosen episode
        self._name = repr(self)

    def _options(self) -> dict[str, Any]:
        options = {'fps': self._fps, 'episodes': self._episodes, 'lengths': self._told}
        return {name: value for name, value in options.items() if value is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self._reader, self._given, self._stride, self._border, self._options())

    def __repr__(self) -> str:
        options = ''.join(
            f', {name}={_described(value) if isinstance(value, np.ndarray) else value}'
            for name, value in self._options().items()
        )
        told = isinstance(self._reader, OpenedDataSource)
        reader = repr(self._reader) if told else type(self._reader).__name__  # the repr of a list has all data
        return (
            f'{type(self).__name__}({reader}, {self._given!r}, stride={self._stride}, border={self._border!r}{options})'
        )

    def identity(self) -> tuple[Any, ...]:
        chosen = [None if values is None else values.tolist() for values in (self._episodes, self._told)]
        return (
            repr(self._given),
            self._stride,
            self._border,
            self._fps,
            *chosen,
            as_data_source(self._reader).identity(),
        )

    def nbytes(self, mask: Any = None) -> int | None:
        return as_data_source(self._reader).nbytes(list(self._offsets))  # neighbours share what they read

    def _file_bytes(self, mask: Any) -> int | None:
        return file_bytes(as_data_source(self._reader), list(self._offsets))

    async def _open(self) -> None:
        if isinstance(self._reader, OpenedDataSource):
            await ensure_open(self._reader)
        source = step_source(self._reader, {key: own is _WHOLE for key, own in self._offsets.items()})
        await source.open()
        lengths = self._lengths_of(source)
        if self._episodes is not None:
            self._chosen = indices_of(self._episodes, len(lengths), 'episodes')
        usable = lengths if self._chosen is None else lengths[self._chosen]
        if self._border == 'drop':
            usable = usable + self._least - self._most
        self._starts = np.append(0, np.cumsum(lengths))
        self._stops = np.cumsum(np.maximum(0, -(-usable // self._stride)))
        self._source = source

    def _lengths_of(self, source: StepSource) -> Ints:
        """Return the number of steps of each episode, which all keys tell that know it."""
        count = length_of(self._reader)
        known: dict[str, Ints] = {} if self._told is None else {'lengths': self._told}
        for key, offsets in self._offsets.items():
            if offsets is not _WHOLE and (lengths := source.lengths(key)) is not None:
                known[key] = lengths
        if not known:
            raise InvalidArgumentError(
                f'{self._name}: the number of steps of an episode is not known: add a key of arrays or of a sequence, '
                f'or pass lengths='
            )
        (first, lengths), *others = known.items()
        if len(lengths) != count or (lengths < 0).any():
            raise InvalidArgumentError(
                f'{first}: expected {count} numbers >= 0, one for each episode, got {len(lengths)}'
            )
        for key, own in others:
            if (differ := own != lengths).any():
                episode = int(np.argmax(differ))
                raise InvalidArgumentError(
                    f'{self._name}: episode {episode} has {lengths[episode]} steps of {first!r}, and {own[episode]} of '
                    f'{key!r}: all keys of windows need as many, but those with True'
                )
        return lengths

    async def _close(self) -> None:
        self._source = None

    def __len__(self) -> int:
        self._check_open()
        return int(self._stops[-1]) if len(self._stops) else 0

    async def _reading(self) -> tuple[int, bool]:
        size = file_bytes(as_data_source(self._reader), list(self._offsets)) or 0
        longest = max(1, *(len(offsets) for offsets in self._offsets.values() if offsets is not _WHOLE))
        return size * len(self) * longest // max(1, int(self._starts[-1])), False

    async def _read_all(self, indices: Ints) -> list[Window]:
        if isinstance(self._reader, OpenedDataSource):
            check_open(self._reader)
        if (source := self._source) is None:
            self._check_open()  # another thread has closed them
            raise ClosedError(f'{self._name} is closed')
        if not len(indices):
            return []
        owners = np.searchsorted(self._stops, indices, side='right')
        within = indices - np.where(owners > 0, self._stops[owners - 1], 0)
        episodes = owners if self._chosen is None else self._chosen[owners]
        steps = within * self._stride - (self._least if self._border == 'drop' else 0)
        views = {
            key: values_of(key, offsets, self._starts, episodes, steps, self._fps)
            for key, offsets in self._offsets.items()
        }
        values = await source.read([view.wanted for view in views.values()])
        parts = dict(zip(views, values, strict=True))

        def window(i: int) -> Window:
            out: Window = {}
            for key, view in views.items():
                out[key] = view.values(i, parts[key], f'{self._name}: window {indices[i]}, key {key!r}')
                if self._border == 'pad' and (pads := view.pads(i)) is not None:
                    out[f'{key}_is_pad'] = pads
            return out

        return await map_threads(window, len(indices))


def _described(values: Ints) -> str:
    """Return the number of values, and what tells them from others: states compare the description of a source."""
    return f'{counted(len(values), "value")} {crc32c(values.tobytes()):08x}'


def _unpickled(reader: Any, windows: Any, stride: int, border: Border, options: Mapping[str, Any]) -> Windows:
    return Windows(reader, windows, stride, border, **options)


def _offsets_of(key: str, given: Any, fps: float | None) -> range | Ints | None:
    """Return the offsets of a key in steps, as a range if they are consecutive; None if its value is read whole."""
    if given is True:
        return _WHOLE
    offsets: range | Ints
    if isinstance(given, tuple):
        if len(given) != 2:
            raise InvalidArgumentError(f'windows: {key!r}: expected a pair (start, stop), got {given!r:.100}')
        if any(isinstance(limit, float | np.floating) for limit in given):
            raise InvalidArgumentError(f'windows: {key!r}: expected steps, got {given!r:.100}: {_SECONDS}')
        start, stop = (check_integer(f'windows: {key!r}', limit, -_FARTHEST, _FARTHEST) for limit in given)
        offsets = range(start, stop)
    elif isinstance(given, float | np.floating):
        raise InvalidArgumentError(f'windows: {key!r}: expected a number of steps, got {given!r:.100}: {_SECONDS}')
    elif isinstance(given, int | np.integer) or not hasattr(given, '__len__'):
        offsets = range(check_integer(f'windows: {key!r}', given, 1, _FARTHEST))
    elif len(given) > _MOST:
        offsets = range(len(given))
    elif len(given) and np.asarray(given).dtype.kind == 'f':
        offsets = _steps_at(key, np.asarray(given, np.float64), fps)
    else:
        offsets = integers_of(given, f'windows: {key!r}')
    if not 1 <= len(offsets) <= _MOST or max(map(abs, _ends_of(offsets))) > _FARTHEST:
        raise InvalidArgumentError(
            f'windows: {key!r}: expected 1 to {_MOST} offsets from {-_FARTHEST} to {_FARTHEST}, got {given!r:.100}'
        )
    least, most = _ends_of(offsets)
    if not isinstance(offsets, range) and most - least == len(offsets) - 1 and (np.diff(offsets) == 1).all():
        return range(least, most + 1)
    return offsets


def _ends_of(offsets: range | Ints) -> tuple[int, int]:
    return (offsets[0], offsets[-1]) if isinstance(offsets, range) else (int(offsets.min()), int(offsets.max()))


def _steps_at(key: str, seconds: NDArray[np.float64], fps: float | None) -> Ints:
    if fps is None:
        raise InvalidArgumentError(f'windows: {key!r}: seconds need fps=, the steps in a second; steps are integers')
    if seconds.ndim != 1 or not np.isfinite(seconds).all():
        raise InvalidArgumentError(f'windows: {key!r}: expected a list of seconds, got {seconds!s:.100}')
    steps = np.round(seconds * fps)
    if (wrong := np.abs(steps / fps - seconds) > _INEXACT).any():
        second = seconds[np.argmax(wrong)]
        raise InvalidArgumentError(
            f'windows: {key!r}: {second:g} seconds are {second * fps:.4g} steps at {fps:g} in a second: expected a '
            f'whole number of steps'
        )
    return steps.astype(np.int64)
