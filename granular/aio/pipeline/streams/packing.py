"""Packing: sequences of various lengths combined into rows of fixed lengths."""

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from granular.aio.execution.prefetch import END
from granular.aio.pipeline.streams.flow import Flow
from granular.aio.pipeline.transforms import ShardOptions
from granular.errors import DatapointError, InvalidArgumentError, StateError
from granular.indexing import Ints, check_integer

Strategy = Literal['first_fit', 'best_fit', 'concat_then_split']
Array = NDArray[Any]

_CLOSED: Final = 1 << 62  # used positions of a row that takes no more segments
_TEXT: Final = 'OSU'  # kinds of dtypes that are no numbers


class Feature(NamedTuple):
    """A packed feature.

    Attributes:
      path: the keys that lead to it in an element.
      length: positions in a row.
      meta: True if it has no segment ids and positions, and is never split.
      alignment: segments start at multiples of it.
      padding: the value of the positions without a segment.
      bos: the value that replaces the first of each segment; None to keep it.
    """

    path: tuple[str, ...]
    length: int
    meta: bool
    alignment: int
    padding: Any
    bos: Any

    @property
    def name(self) -> str:
        """The path, for errors."""
        return '.'.join(self.path)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The arguments of a packing stage, checked.

    Attributes:
      features: the packed features.
      listed: the meta features that are collected in a list per row.
      seed: the seed by which the rows of a pack are shuffled; None to keep their order.
      shard: the rows that this stream yields.
    """

    features: tuple[Feature, ...]
    listed: tuple[str, ...]
    strategy: Strategy
    bins: int
    max_segments: int | None
    split_long: bool
    seed: int | None
    shard: ShardOptions
    description: str

    @classmethod
    def of(
        cls,
        length: Any,
        strategy: Strategy,
        bins: int,
        meta: Sequence[str],
        max_segments: int | None,
        split_long: bool,
        shuffle_bins: bool,
        seed: int,
        alignment: Any,
        padding: Any,
        bos: Any,
        shard: ShardOptions | None,
    ) -> 'Recipe':
        """Check the arguments of ``IterDataset.pack``.

        Raises:
          InvalidArgumentError: if one is invalid.
        """
        if strategy not in get_args(Strategy):
            raise InvalidArgumentError(f'strategy: expected one of {list(get_args(Strategy))}, got {strategy!r:.100}')
        if not isinstance(length, Mapping) or not length:
            raise InvalidArgumentError(
                f"length: expected a mapping from features to lengths such as {{'tokens': 2048}}, got {length!r:.100}"
            )
        if isinstance(meta, str) or not all(isinstance(key, str) for key in meta):
            raise InvalidArgumentError(f'meta_features: expected a sequence of keys, got {meta!r:.100}')
        if strategy == 'concat_then_split' and shuffle_bins:
            raise InvalidArgumentError('shuffle_bins: concat_then_split fills one row after the other: it has no bins')
        if shard is not None and shard.drop_remainder:
            raise InvalidArgumentError(
                'shard_options: the number of packed rows is not known before the end: expected drop_remainder=False; '
                'repeat the documents for streams that end at the same time'
            )
        features = [
            Feature(
                path,
                check_integer(f'length of {".".join(path)!r}', size, 1),
                path[0] in meta,
                check_integer('alignment', _value_for(path, alignment, 1, 'alignment'), 1),
                _value_for(path, padding, 0, 'padding'),
                None if path[0] in meta and not isinstance(bos, Mapping) else _value_for(path, bos, None, 'bos'),
            )
            for path, size in _leaves(length)
        ]
        _check_paths(features, {'alignment': alignment, 'padding': padding, 'bos': bos})
        # Begins as in earlier releases: their states are then refused for their content, with a clearer message.
        options = {
            'strategy': (strategy, 'first_fit'), 'meta_features': (list(meta), []),
            'max_segments': (max_segments, None), 'split_long': (split_long, False),
            'shuffle_bins': (shuffle_bins, False), 'seed': (seed, 0),
            'alignment': (alignment, None), 'padding': (padding, None), 'bos': (bos, None),
        }  # fmt: skip
        changed = [f', {name}={value!r}' for name, (value, default) in options.items() if value != default]
        bins = check_integer('num_packing_bins', bins, 1)
        return cls(
            tuple(features),
            tuple(key for key in meta if key not in length),
            strategy,
            bins,
            None if max_segments is None else check_integer('max_segments', max_segments, 1),
            split_long,
            check_integer('seed', seed, 0) if shuffle_bins else None,
            shard or ShardOptions(0, 1),
            f'pack({dict(length)}, {bins}{"".join(changed)})',
        )


def _leaves(length: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in length.items():
        if not isinstance(key, str):
            raise InvalidArgumentError(f'length: expected text as keys, got {key!r:.100}')
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def _value_for(path: tuple[str, ...], value: Any, default: Any, name: str) -> Any:
    """Return the value of an option for a feature: that of its path, if the option is a mapping as nested as it."""
    for key in path:
        if not isinstance(value, Mapping):
            break
        value = value.get(key)
    if isinstance(value, Mapping):
        raise InvalidArgumentError(f'{name}: expected a value for {".".join(path)!r}, got {value!r:.100}')
    return default if value is None else value


def _check_paths(features: Sequence[Feature], options: Mapping[str, Any]) -> None:
    """Check that options name packed features alone, and that no name of an output is taken."""
    paths = {feature.path for feature in features}
    for name, option in options.items():
        if isinstance(option, Mapping) and (unknown := [path for path, _ in _leaves(option) if path not in paths]):
            raise InvalidArgumentError(
                f'{name}: {".".join(unknown[0])!r} is not packed: expected some of {[f.name for f in features]}'
            )
    for feature in features:
        for suffix in () if feature.meta else ('_segment_ids', '_positions'):
            if (path := (*feature.path[:-1], feature.path[-1] + suffix)) in paths:
                raise InvalidArgumentError(
                    f'length: {".".join(path)!r} is also the name of what is added for {feature.name!r}'
                )


class Segment(NamedTuple):
    """A sequence in a row.

    Attributes:
      parts: its values, by feature.
      listed: its listed meta features.
    """

    parts: list[Array]
    listed: list[Any]


class Document:
    """A sequence to pack.

    Attributes:
      arrays: its values, by feature.
      sizes: their lengths.
      offsets: the numbers of values that are packed.
    """

    arrays: list[Array]

    def __init__(self, arrays: list[Array], listed: list[Any]) -> None:
        self.arrays, self._listed = arrays, listed
        self.sizes: list[int] = [len(array) for array in arrays]
        self.offsets: list[int] = [0] * len(arrays)

    def take(self, features: Sequence[Feature], counts: Sequence[int]) -> Segment:
        """Return the next values of each feature as a segment; meta features are never split, and repeat."""
        parts = []
        for i, (feature, array, count) in enumerate(zip(features, self.arrays, counts, strict=True)):
            if feature.meta or count == self.sizes[i]:
                parts.append(array)
            else:
                parts.append(array[self.offsets[i] : self.offsets[i] + count])
            if not feature.meta:
                self.offsets[i] += count
        return Segment(parts, self._listed)

    def rest(self, features: Sequence[Feature]) -> list[int]:
        """Return the number of values that are left, by feature."""
        return [
            size if feature.meta else size - offset
            for feature, size, offset in zip(features, self.sizes, self.offsets, strict=True)
        ]


class Pack(abc.ABC):
    """Rows that are filled together."""

    recipe: Recipe
    features: tuple[Feature, ...]

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
                self._used[i, row] = _aligned(int(self._used[i, row]) + count, self.features[i].alignment)
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
            self._used[i] = _aligned(self._used[i] + count, feature.alignment)
        return counts == rest

    def rows(self) -> list[list[Segment]]:
        return [self._segments] if self._segments else []


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


class Packing(Flow):
    """Sequences packed into rows of fixed lengths.

    A pack is computed as a whole, and its rows are built one by one. The state is the state before the pack, and the
    next row: its number counts all rows of the stream, so that a state fits any number of shards.
    """

    def __init__(self, parents: Sequence[Flow], recipe: Recipe) -> None:
        self.parents: tuple[Flow, ...] = tuple(parents)
        self._parent, self._recipe, self._features = parents[0], recipe, recipe.features
        # The state before the pack. The document that the pack begins with is that after the state of the parent,
        # from these offsets on.
        self._base: dict[str, Any] = {
            'parent': self._parent.state(), 'offsets': [0] * len(self._features), 'document': 0, 'rows': 0,
        }  # fmt: skip
        self._row = 0  # the next row of all shards
        self._rows: list[list[Segment]] | None = None  # of the pack; None until it is computed
        self._after = self._base
        self._pending: Document | None = None  # the document that the next pack begins with
        self._dtypes: list[tuple[Any, tuple[int, ...]] | None] = []
        self._positions = np.arange(max(feature.length for feature in self._features), dtype=np.int32)

    async def next(self) -> Any:
        row = self._row + self._recipe.shard.shard_index
        while True:
            if self._rows is None:
                await self._compute()
            if not self._rows:
                return END
            at = row - self._base['rows']
            if at < len(self._rows):
                break
            self._base, self._rows = self._after, None
        element = self._build(self._rows[at])
        self._rows[at] = []  # free its documents
        self._row += self._recipe.shard.shard_count
        return element

    async def _compute(self) -> None:
        """Compute the rows of the pack that begins at the base."""
        recipe, features, base = self._recipe, self._features, self._base
        pack = Concatenated(recipe) if recipe.strategy == 'concat_then_split' else Bins(recipe)
        document, number = self._pending, base['document']
        before: Any = base['parent']
        self._pending, self._dtypes = None, [None] * len(features)
        if document is not None:
            self._check_dtypes(document, number)
        first = document is None
        while True:
            if document is None:
                before = self._parent.state()
                element = await self._parent.next()
                if element is END:
                    break
                document = self._document(element, number)
                if first:
                    self._skip(document, base['offsets'])
                first = False
            if not pack.add(document):
                break
            document, number = None, number + 1
        if first and any(base['offsets']):
            raise StateError(f'pack: the state is in the middle of element {number}, and there is none')
        rows = pack.rows()
        if recipe.seed is not None:
            order = np.random.default_rng(recipe.seed + base['rows']).permuted(range(len(rows)))
            rows = [rows[i] for i in order.tolist()]
        self._after = {
            'parent': before,
            'offsets': [0] * len(features) if document is None else list(document.offsets),
            'document': number,
            'rows': base['rows'] + len(rows),
        }
        self._pending, self._rows = document, rows

    def _skip(self, document: Document, offsets: Sequence[int]) -> None:
        """Continue a document in the middle, after a state was restored."""
        if any(offset > size for offset, size in zip(offsets, document.sizes, strict=True)):
            raise StateError(f'pack: the state is at {list(offsets)} of a document of {document.sizes} values')
        document.offsets = list(offsets)

    # --- elements

    def _document(self, element: Any, number: int) -> Document:
        """Return an element as a document.

        Raises:
          DatapointError: if it lacks a feature, or has one that does not fit the others, or is too long.
        """
        arrays = []
        recipe = self._recipe
        split = recipe.split_long or recipe.strategy == 'concat_then_split'
        for feature in self._features:
            value = element
            try:
                for key in feature.path:
                    value = value[key]
            except (KeyError, TypeError, IndexError):
                keys = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                raise DatapointError(f'pack: element {number} has no {feature.name!r}, only {keys!s:.200}') from None
            if not isinstance(value, np.ndarray):
                value = _array(value, number, feature)
            if value.ndim == 0:
                value = value.reshape(1)
            if len(value) > feature.length and (feature.meta or not split):
                remedy = 'which is a meta feature and cannot be split' if split else 'split it, or pass split_long=True'
                raise _too_long(number, feature, len(value), remedy)
            arrays.append(value)
        try:
            listed = [element[key] for key in recipe.listed]
        except KeyError as error:
            raise DatapointError(f'pack: element {number} has no {error}, only {sorted(map(str, element))}') from None
        document = Document(arrays, listed)
        self._check_dtypes(document, number)
        return document

    def _check_dtypes(self, document: Document, number: int) -> None:
        """Check that a feature has one dtype and shape within a pack: a conversion could change values."""
        for i, array in enumerate(document.arrays):
            expected = self._dtypes[i]
            if expected is not None and array.dtype is expected[0] and array.shape[1:] == expected[1]:
                continue
            if not len(array):  # an empty list has no dtype of its own
                continue
            feature = self._features[i]
            if expected is None:
                if array.dtype.kind in _TEXT:
                    raise DatapointError(
                        f'pack: element {number}: {feature.name!r}: expected numbers, got dtype {array.dtype}'
                    )
                for name, value in (('padding', feature.padding), ('bos', feature.bos)):
                    _check_value(value, array.dtype, f'{name} of {feature.name!r}')
                self._dtypes[i] = array.dtype, array.shape[1:]
            elif array.dtype != expected[0] or array.shape[1:] != expected[1]:
                raise DatapointError(
                    f'pack: element {number}: {feature.name!r}: expected {expected[0]} of shape '
                    f'{_shape(expected[1])} as in the elements before, got {array.dtype} of {_shape(array.shape[1:])}'
                )

    # --- rows

    def _build(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """Return a row."""
        row: dict[str, Any] = {}
        for i, feature in enumerate(self._features):
            out, length = row, feature.length
            for key in feature.path[:-1]:
                out = out.setdefault(key, {})
            parts = [segment.parts[i] for segment in segments]
            dtype, shape = self._dtypes[i] or (parts[0].dtype, parts[0].shape[1:])
            values = np.zeros((length, *shape), dtype)
            if feature.padding:
                values[...] = feature.padding
            ids, positions = np.zeros(length, np.int32), np.zeros(length, np.int32)
            start = 0
            for number, part in enumerate(parts, 1):
                if not (size := len(part)):
                    continue
                stop = start + size
                values[start:stop] = part
                if feature.bos is not None:
                    values[start] = feature.bos
                if not feature.meta:
                    ids[start:stop] = number
                    positions[start:stop] = self._positions[:size]
                start = stop if feature.alignment == 1 else _aligned(stop, feature.alignment)
            name = feature.path[-1]
            out[name] = values
            if not feature.meta:
                out[f'{name}_segment_ids'], out[f'{name}_positions'] = ids, positions
        for i, key in enumerate(self._recipe.listed):
            row[key] = [segment.listed[i] for segment in segments]
        return row

    # --- states

    def state(self) -> Any:
        done = self._rows is not None and self._row >= self._base['rows'] + len(self._rows)
        return {**(self._after if done else self._base), 'row': self._row}

    async def restore(self, state: Any) -> None:
        expected = {*self._base, 'row'}
        if not isinstance(state, Mapping) or set(state) != expected:
            keys = sorted(state) if isinstance(state, Mapping) else state
            raise StateError(
                f'pack: expected a state with {sorted(expected)}, got {keys!s:.200}: states saved by earlier '
                f'versions of granular cannot be continued: start again at the beginning of an epoch'
            )
        offsets, numbers = state['offsets'], [state[key] for key in ('document', 'rows', 'row')]
        if len(offsets) != len(self._features):
            raise StateError(f'pack: expected {len(self._features)} offsets, got {offsets!r:.200}')
        if not all(type(number) is int and number >= 0 for number in [*offsets, *numbers]):
            raise StateError(f'pack: expected integers >= 0, got offsets {offsets!r:.200} and {numbers}')
        if state['row'] < state['rows']:
            raise StateError(f'pack: expected a row >= {state["rows"]}, got {state["row"]}')
        await self._parent.restore(state['parent'])
        self._base = {key: state[key] for key in self._base}
        self._after, self._row, self._rows, self._pending = self._base, state['row'], None, None


def _array(value: Any, number: int, feature: Feature) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise DatapointError(f'pack: element {number}: {feature.name!r} is not an array: {error}') from error


def _too_long(number: int, feature: Feature, size: int, remedy: str) -> DatapointError:
    return DatapointError(
        f'pack: element {number}: a sequence of {size} in {feature.name!r} is longer than a row of {feature.length}: '
        f'{remedy}'
    )


def _shape(trailing: tuple[int, ...]) -> str:
    return f'({", ".join(["n", *map(str, trailing)])})'


def _check_value(value: Any, dtype: np.dtype[Any], name: str) -> None:
    """Check that a dtype can hold a value."""
    if value is None:
        return
    try:
        with np.errstate(all='ignore'):
            held = np.full((), value, dtype)
        same = bool(held == value) or bool(np.isnan(held) and np.isnan(value))
    except (OverflowError, TypeError, ValueError):
        same = False
    if not same:
        raise DatapointError(f'pack: {name}: {value!r:.100} is not a value of dtype {dtype}')
