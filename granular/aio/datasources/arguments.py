"""Arguments that several data sources have: files, and masks of columns or fields."""

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath, PurePath
from granular.errors import InvalidArgumentError, UnknownKeyError

Paths = AnyPath | Sequence[AnyPath]


def as_paths(paths: Any) -> tuple[Path, ...]:
    """Return one path or several as a tuple; raise ``InvalidArgumentError`` if there is none, or no order."""
    if isinstance(paths, Set):
        raise InvalidArgumentError(
            f'expected a sequence of paths, got a {type(paths).__name__}, which has another order in each process: '
            f'pass sorted(...)'
        )
    if isinstance(paths, str | os.PathLike | PurePath) or not isinstance(paths, Iterable):
        paths = [paths]
    as_tuple = tuple(map(Path, paths))
    if not as_tuple:
        raise InvalidArgumentError('expected one path or more, got none')
    return as_tuple


def name_of(paths: Sequence[Path]) -> str:
    """Return the name of a source of these files, for errors."""
    return f'{paths[0]}' if len(paths) == 1 else f'{paths[0]} and {len(paths) - 1} more'


def names_in(
    mask: Iterable[str] | Mapping[str, bool], available: Sequence[str], kind: str, source: str
) -> tuple[str, ...]:
    """Return the names that a mask selects, without repeats; raise ``UnknownKeyError`` for a name that is not
    available, and ``InvalidArgumentError`` for a range, which only sequences of datasets have.

    Errors call the names by their kind, ``'columns'`` or ``'fields'``, of a source.
    """
    if not isinstance(mask, Iterable):
        raise InvalidArgumentError(f'{source}: expected {kind}, or a mapping of {kind}, as mask, got {mask!r:.100}')
    names = [mask] if isinstance(mask, str) else list(mask)
    if unknown := [name for name in names if name not in available]:
        raise UnknownKeyError(f'{source}: unknown {kind} {unknown}: expected some of {list(available)}')
    if isinstance(mask, Mapping):
        if parts := {name: part for name, part in mask.items() if part is not True and part is not False}:
            raise InvalidArgumentError(f'{source}: expected True or False for {kind}, got {parts!r:.100}')
        names = [name for name in names if mask[name]]
    return tuple(dict.fromkeys(names))
