"""Lines: the stages of a pipeline as states have them, of which declared changes alter single arguments."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from granular.aio.pipeline.changes import AugmentationSeed, BatchSize, Excluded, Grown, Moved, Renamed, RowLength

_ALTERED: Final = (
    'source',
    'elements',
    'excluded',
    'function',
    'functions',
    'batch_fn',
    'batch_size',
    'seed',
    'length',
)
"""Arguments that a declared change alters."""
_MEASURES: Final = ('elements', 'bytes')  # of a source, which are not known before it is open
_UNNAMED: Final = frozenset(('batch_size', 'bins', 'excluded', 'function', 'length', 'options'))
_HIDDEN: Final = 'features'  # of rows, in their order, which the length names


class Line:
    """A stage of a pipeline: an operation and its arguments, which are shown as one line of text.

    Args:
      operation: the name of the operation, indented by its depth in the pipeline; without arguments, all of the text.
      arguments: plain JSON by name, in the order in which they are shown; None for those that are not. A declared
        change alters those in ``_ALTERED``: a stage that cannot continue with another value has it in the operation.
    """

    def __init__(self, operation: str, /, **arguments: Any) -> None:
        self.operation = operation
        self.arguments: Mapping[str, Any] = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in arguments.items()
            if value is not None
        }

    @classmethod
    def of(cls, saved: Any) -> 'Line':
        """Return the line that a state has."""
        if isinstance(saved, Mapping) and isinstance(saved.get('stage'), str):
            return cls(saved['stage'], **{str(name): value for name, value in saved.items() if name != 'stage'})
        return cls(str(saved))

    def saved(self) -> Any:
        """Return the line as states have it: plain JSON."""
        return {'stage': self.operation, **self.arguments} if self.arguments else self.operation

    def changed(self, **arguments: Any) -> 'Line':
        """Return the line with other arguments."""
        return Line(self.operation, **{**self.arguments, **arguments})

    def indented(self, depth: int) -> 'Line':
        """Return the line at a depth in a pipeline."""
        return Line('  ' * depth + self.operation, **self.arguments)

    def __str__(self) -> str:
        own = self.arguments
        if not own:
            return self.operation
        name = self.operation.lstrip()
        indent = self.operation.removesuffix(name)
        if isinstance(own.get('functions'), list):  # one of each of several operations
            pairs = zip(name.split(', '), own['functions'], strict=False)
            return indent + ', '.join(f'{operation}({function})' for operation, function in pairs)
        if 'source' in own:
            elements = f' of {own["elements"]}' if 'elements' in own else ''
            size = f', {own["bytes"]} bytes' if 'bytes' in own else ''
            return f'{indent}{own["source"]}{own.get("part", "")}{elements}{size}'
        values = {name: _shown(value) for name, value in own.items() if name != _HIDDEN}
        shown = [value if name in _UNNAMED else f'{name}={value}' for name, value in values.items()]
        return f'{self.operation}({", ".join(shown)})'

    @property
    def text(self) -> str:
        """The text without its indentation."""
        return str(self).strip()

    def key(self) -> str:
        """Return what no declared change alters, as a text."""
        fixed = {name: value for name, value in self.arguments.items() if name not in (*_ALTERED, 'bytes')}
        return _json([self.operation, fixed])


class Applied(NamedTuple):
    """A declared change, and the lines before and after it; None for a stage that there is not."""

    change: Any
    was: Line | None
    now: Line | None


def changes_between(was: Line | None, now: Line | None) -> Sequence[Any] | None:
    """Return the declarations of the change from one line to another, None for none; None if one has no declaration."""
    if was is None or now is None:
        line = was or now
        if line is None or 'excluded' not in line.arguments:
            return None
        return [] if str(line.arguments['excluded']).startswith('0 ') else [Excluded()]  # none of earlier releases
    if was.key() != now.key():
        return None
    names = [name for name in {**was.arguments, **now.arguments} if _differ(was, now, name)]
    if 'elements' in names and 'bytes' in names:
        names.remove('bytes')
    found = [_declaration(name, was, now) for name in names]
    return None if None in found else found


def is_declared(change: Any, now: Line | None, changes: Sequence[Any]) -> bool:
    """Return whether a change to a line is among those that are declared, which may name a source as its description
    does: with the part of it that is read, such as ``, keys tokens``.
    """
    if change in changes or now is None or not isinstance(change, Moved | Grown):
        return change in changes
    return dataclasses.replace(change, source=f'{change.source}{now.arguments.get("part", "")}') in changes


def only_bytes_differ(was: Line, now: Line) -> bool:
    """Return whether two lines are of sources of which the read keys have other bytes, and as many datapoints."""
    names = {name for name in {**was.arguments, **now.arguments} if _differ(was, now, name)}
    return was.key() == now.key() and names - {'source'} == {'bytes'}


def _differ(was: Line, now: Line, name: str) -> bool:
    values = [line.arguments.get(name) for line in (was, now)]
    return not (name in _MEASURES and None in values) and _json(values[0]) != _json(values[1])


def _json(value: Any) -> str:
    """Return plain JSON as a text: unlike values, texts differ by True and 1, and can be hashed."""
    return json.dumps(value, sort_keys=True, default=str)


def _declaration(name: str, was: Line, now: Line) -> Any:
    """Return the declaration of the change of an argument; None if there is none."""
    if name not in was.arguments or name not in now.arguments:
        return None
    before, after = was.arguments[name], now.arguments[name]
    match name:
        case 'source':
            return Moved(after)
        case 'elements':
            return Grown(now.arguments['source'], after) if type(before) is int and 0 <= before < after else None
        case 'excluded':
            return Excluded()
        case 'function' | 'functions' | 'batch_fn':
            return Renamed(now.text)
        case 'batch_size':
            return BatchSize(after) if type(before) is int and before > 0 else None
        case 'seed':
            return AugmentationSeed(_seed(after))
        case 'length':
            return RowLength(after)
    return None


def _seed(seed: Any) -> Any:
    return tuple(seed) if isinstance(seed, list) else seed


def _shown(value: Any) -> str:
    return str(_seed(value))
