"""The arguments of packing."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np

from granular._support.indexing import check_integer
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.shards import ShardOptions, as_shard
from granular.errors import InvalidArgumentError

Strategy = Literal['first_fit', 'best_fit', 'concat_then_split']


PlannedStrategy = Literal['best_fit', 'concat_then_split']
Longer = Literal['raise', 'cut', 'drop', 'divide']


_LONGEST: Final = (1 << 30) - 1  # positions of a planned row, which are numbered by 32 bits


class Feature(NamedTuple):
    path: tuple[str, ...]  # the keys that lead to it in an element
    length: int  # positions in a row
    meta: bool  # True if it has no segment ids and positions, and is never split
    alignment: int  # segments start at multiples of it
    padding: Any  # the value of the positions without a segment
    bos: Any  # the value that replaces the first of each segment; None to keep it

    @property
    def name(self) -> str:
        return '.'.join(self.path)


class Recipe:
    """The arguments of ``IterDataset.pack``, checked."""

    def __init__(
        self,
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
        bos_parts: bool,
        shard_options: ShardOptions | None,
    ) -> None:
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
        self.shard = as_shard(shard_options)  # the rows that this stream yields
        self.features = tuple(
            Feature(
                path,
                check_integer(f'length of {".".join(path)!r}', size, 1),
                path[0] in meta,
                check_integer('alignment', value_for(path, alignment, 1, 'alignment'), 1),
                value_for(path, padding, 0, 'padding'),
                None if path[0] in meta and not isinstance(bos, Mapping) else value_for(path, bos, None, 'bos'),
            )
            for path, size in _leaves(length)
        )
        _check_paths(self.features, {'alignment': alignment, 'padding': padding, 'bos': bos})
        options = {
            'strategy': (strategy, 'first_fit'), 'meta_features': (list(meta), []),
            'max_segments': (max_segments, None), 'split_long': (split_long, False),
            'shuffle_bins': (shuffle_bins, False), 'seed': (seed if shuffle_bins else 0, 0),
            'alignment': (alignment, None), 'padding': (padding, None), 'bos': (bos, None),
            'bos_parts': (bos_parts, True),
        }  # fmt: skip
        changed = [f'{name}={value!r}' for name, (value, default) in options.items() if value != default]
        self.strategy = strategy
        self.split_long = split_long
        self.bos_parts = bos_parts
        self.bins = check_integer('num_packing_bins', bins, 1)
        self.max_segments = None if max_segments is None else check_integer('max_segments', max_segments, 1)
        self.listed = tuple(key for key in meta if key not in length)  # meta features, as a list per row
        self.seed = check_integer('seed', seed, 0) if shuffle_bins else None  # that shuffles the rows of a pack
        features = [list(feature.path) for feature in self.features]
        self.line = Line(
            'pack', length=_plain(length), features=features, bins=self.bins, options=', '.join(changed) or None
        )


class PlannedRecipe:
    """The arguments of ``MapDataset.pack``, checked."""

    def __init__(
        self,
        length: Any,
        strategy: PlannedStrategy,
        classes: int | None,
        bos: Any,
        alignment: Any,
        padding: Any,
        max_segments: int | None,
        separator: Any,
        extra: int,
        documents: bool,
        cu_seqlens: bool,
        longer: Longer,
    ) -> None:
        for name, value, kinds in (
            ('strategy', strategy, get_args(PlannedStrategy)),
            ('longer', longer, get_args(Longer)),
        ):
            if value not in kinds:
                raise InvalidArgumentError(f'{name}: expected one of {list(kinds)}, got {value!r:.100}')
        if not isinstance(length, Mapping) or not length:
            raise InvalidArgumentError(
                f"length: expected a mapping from features to lengths such as {{'tokens': 2048}}, got {length!r:.100}"
            )
        self.features = tuple(
            Feature(
                path,
                check_integer(f'length of {".".join(path)!r}', size, 1, _LONGEST),
                False,
                check_integer('alignment', value_for(path, alignment, 1, 'alignment'), 1),
                value_for(path, padding, 0, 'padding'),
                value_for(path, bos, None, 'bos'),
            )
            for path, size in _leaves(length)
        )
        options = {'alignment': alignment, 'padding': padding, 'bos': bos, 'separator': separator}
        self.separators = [value_for(feature.path, separator, None, 'separator') for feature in self.features]
        self.documents, self.cu_seqlens = bool(documents), bool(cu_seqlens)
        _check_paths(self.features, options, ('_documents',) if documents else ())
        for feature, own in zip(self.features, self.separators, strict=True):
            for name, value in (('padding', feature.padding), ('bos', feature.bos), ('separator', own)):
                if not isinstance(value, int | float | complex | np.generic | None):
                    raise InvalidArgumentError(f'{name} of {feature.name!r}: expected a number, got {value!r:.100}')
        self.strategy, self.longer = strategy, longer
        self.classes = None if classes is None else check_integer('classes', classes, 1, 1 << 16)
        self.max_segments = None if max_segments is None else check_integer('max_segments', max_segments, 1)
        self.extra = check_integer('extra', extra, 0, _LONGEST)
        self._check_strategy()
        shown = {
            'strategy': (strategy, 'best_fit'), 'classes': (classes, None), 'max_segments': (max_segments, None),
            **{name: (value, None) for name, value in options.items()},
            'extra': (extra, 0), 'documents': (documents, False), 'cu_seqlens': (cu_seqlens, False),
            'longer': (longer, 'raise'),
        }  # fmt: skip
        changed = [f', {name}={value!r}' for name, (value, default) in shown.items() if value != default]
        self.description = f'pack({dict(length)}{"".join(changed)}'

    def check_option(self, name: str, value: Any) -> None:
        """Refuse an option by feature that names others than those that are packed."""
        _check_paths(self.features, {name: value})

    @property
    def lengths(self) -> list[int]:
        """Positions of a row, by feature."""
        return [feature.length + self.extra for feature in self.features]

    def _check_strategy(self) -> None:
        if self.cu_seqlens and len(self.features) > 1:
            raise InvalidArgumentError(
                f'cu_seqlens: expected one feature, got {[feature.name for feature in self.features]}'
            )
        if self.longer == 'divide' and len(self.features) > 1:
            raise InvalidArgumentError("longer='divide': expected one feature: pass longer='cut' or 'drop'")
        if self.strategy == 'best_fit':
            return
        for name, value, default in (('max_segments', self.max_segments, None), ('classes', self.classes, None)):
            if value != default:
                raise InvalidArgumentError(f"{name}: concat_then_split has none: pass strategy='best_fit'")
        if self.longer not in ('raise', 'divide'):
            raise InvalidArgumentError(f'longer={self.longer!r}: concat_then_split divides all documents')
        for feature in self.features:
            if feature.length % feature.alignment:
                raise InvalidArgumentError(
                    f'alignment: concat_then_split needs rows of a multiple of {feature.alignment}, got '
                    f'{feature.length} of {feature.name!r}'
                )


def _plain(length: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(size) if isinstance(size, Mapping) else int(size) for key, size in length.items()}


def _leaves(length: Mapping[Any, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in length.items():
        if not isinstance(key, str):
            raise InvalidArgumentError(f'length: expected text as keys, got {key!r:.100}')
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def value_for(path: tuple[str, ...], value: Any, default: Any, name: str) -> Any:
    """Return the value of an option for a feature: that of its path, if the option is a mapping as nested as it."""
    for key in path:
        if not isinstance(value, Mapping):
            break
        value = value.get(key)
    if isinstance(value, Mapping):
        raise InvalidArgumentError(f'{name}: expected a value for {".".join(path)!r}, got {value!r:.100}')
    return default if value is None else value


def _check_paths(features: Sequence[Feature], options: Mapping[str, Any], more: tuple[str, ...] = ()) -> None:
    """Check that options name packed features alone, and that no name of an output is taken."""
    paths = {feature.path for feature in features}
    for name, option in options.items():
        if isinstance(option, Mapping) and (unknown := [path for path, _ in _leaves(option) if path not in paths]):
            raise InvalidArgumentError(
                f'{name}: {".".join(unknown[0])!r} is not packed: expected some of {[f.name for f in features]}'
            )
    for feature in features:
        for suffix in () if feature.meta else ('_segment_ids', '_positions', *more):
            if (path := (*feature.path[:-1], feature.path[-1] + suffix)) in paths:
                raise InvalidArgumentError(
                    f'length: {".".join(path)!r} is also the name of what is added for {feature.name!r}'
                )
