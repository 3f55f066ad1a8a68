"""Arguments that several data sources have: files, and masks of columns or fields."""

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Final

from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath, PurePath, glob_regex
from granular.errors import InvalidArgumentError, NotFoundError, UnknownKeyError

Paths = AnyPath | Sequence[AnyPath]
Mask = Iterable[str] | Mapping[str, bool] | None

# A file of several, as tfds, Beam and Hugging Face name them: the rest may be a suffix, a hash, or both.
_NUMBERED: Final = re.compile(r'(.*)-([0-9]{1,6})-of-([0-9]{1,6})(?:-[0-9a-f]+)?(\..*)?', re.DOTALL)


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


def refuse_gaps(paths: Iterable[Path], name: str, pattern: str = '*') -> None:
    """Raise ``NotFoundError`` if files that were found are named ``...-00000-of-00003``, and others of these are
    missing in their folder, unless they do not match the pattern by which they were found; errors begin with the name.
    """
    groups: dict[tuple[Any, ...], dict[int, re.Match[str]]] = {}
    for path in paths:
        if match := _NUMBERED.fullmatch(path.name):
            groups.setdefault((path.parent, *match.group(1, 3, 4)), {})[int(match[2])] = match
    regex = glob_regex(pattern)
    for files in groups.values():
        match = next(iter(files.values()))
        count, width = int(match[3]), len(match[2])
        first = 1 if count in files and 0 not in files else 0
        others = (number for number in range(first, first + count) if number not in files)
        names = (f'{match.string[: match.start(2)]}{n:0{width}}{match.string[match.end(2) :]}' for n in others)
        # The first few only, as there may be a million.
        if missing := list(itertools.islice(filter(regex.fullmatch, names), 4)):
            more = ' and more' if len(missing) > 3 else ''
            raise NotFoundError(
                f'{name}: has {len(files)} of {count} files: {", ".join(missing[:3])}{more} missing: copy all of them, '
                f'or pass a list of the files to read'
            )


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
