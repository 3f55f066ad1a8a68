"""Arguments that several data sources have: files, and masks of columns or fields."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from granular.aio.paths.path import Path
from granular.aio.paths.pure import PurePath
from granular.errors import InvalidArgumentError, UnknownKeyError

Paths = PurePath | str | os.PathLike[str] | Sequence[Any]
Mask = Iterable[str] | Mapping[str, bool] | None


def as_paths(paths: Any) -> tuple[Path, ...]:
    """Return one path or several as a tuple.

    Raises:
      InvalidArgumentError: if there is none.
    """
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
    """Return the names that a mask selects, without repeats.

    Args:
      mask: names, or a mapping that is True for the names wanted.
      available: the names of the source.
      kind: what is named, for errors: ``'columns'`` or ``'fields'``.
      source: name of the source, for errors.

    Raises:
      UnknownKeyError: for a name that is not available.
    """
    if isinstance(mask, Mapping):
        names = [name for name, selected in mask.items() if selected]
    else:
        names = [mask] if isinstance(mask, str) else list(mask)
    if unknown := [name for name in names if name not in available]:
        raise UnknownKeyError(f'{source}: unknown {kind} {unknown}: expected some of {list(available)}')
    return tuple(dict.fromkeys(names))
