"""List a folder or the matches of a pattern, and choose the files that are data."""

import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from granular._support.text import counted, logger
from granular.aio.datasources.arguments import Paths, as_paths, name_of
from granular.aio.datasources.discovery.hive import partitions_of
from granular.aio.datasources.discovery.image_table import ImageTable, read_tables, tables_among
from granular.aio.datasources.discovery.names import (
    FORMATS,
    check_split,
    hidden_part,
    is_document,
    kind_of,
    pair_of,
    refuse_gaps,
    refuse_generations,
    split_in,
    split_of,
    splits_of_classes,
)
from granular.aio.paths.path import Path, expand_braces, is_pattern, matches_of
from granular.aio.paths.pure import relative_name
from granular.aio.stores import Entry
from granular.errors import InvalidArgumentError, NotFoundError

MOST: Final = 1_000_000
"""Files and folders that are listed at most."""

_SHOWN: Final = 3  # names in an error or a warning

_MEGATRON: Final = 'megatron'

LeftOut = Mapping[str, str]


class _Candidate(NamedTuple):
    relative: str  # to the folder that is opened
    entry: Entry
    kind: str


@dataclasses.dataclass(frozen=True)
class Discovery:
    """The data files of a folder or pattern.

    Attributes:
      path: the folder or pattern.
      base: the folder below which names are relative.
      format: the format of the files; empty if there are none, unless it was given.
      entries: the files, sorted.
      left_out: why other files are left out, by their names relative to the folder.
      quiet: those of them that need no warning.
      classes: the folder of the folders of classes of images, relative, with a slash at its end; or empty.
      table: the records of images, if tables beside them list these.
      split: the split that was chosen; or empty.
    """

    path: Path
    base: Path
    format: str
    entries: tuple[Entry, ...]
    left_out: LeftOut
    quiet: frozenset[str]
    classes: str = ''
    table: ImageTable | None = None
    split: str = ''

    @property
    def name(self) -> str:
        return f'{self.path} ({self.split})' if self.split else f'{self.path}'

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(Path.of(self.base.store, entry.key) for entry in self.entries)

    @property
    def relatives(self) -> list[str]:
        """The names of the files, relative to the folder."""
        return [relative_name(self.base, entry.key) for entry in self.entries]

    def warn(self) -> None:
        """Log one warning that names what is left out, if it needs one."""
        if self.entries and (others := self.others()):
            logger.warning('%s: %s', self.name, others)

    def others(self) -> str:
        """Return which files are left out, and why; empty if there are none but those that need no warning."""
        reasons = collections.defaultdict[str, list[str]](list)
        for relative, reason in self.left_out.items():
            if relative not in self.quiet:
                reasons[reason].append(relative)
        if not reasons:
            return ''
        parts = [f'{_listed(names)} ({reason})' for reason, names in reasons.items()]
        return f'left out {counted(len(self.left_out) - len(self.quiet), "file")}: {"; ".join(parts)}'

    def nothing(self, format: str = '') -> NotFoundError:
        """Return the error for a folder or pattern without files to read."""
        others = f', {self.others()}: pass a list of files to read those' if self.others() else ''
        return NotFoundError(f'{self.name}: has no files of {format or self.format or "a format that is read"}{others}')


def _data_key(entry: Entry) -> str:
    """Return the key of the data of an index of Megatron."""
    return entry.key[: len(entry.key) - len(entry.name)] + pair_of(entry.name)[1]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ', '.join(names[:_SHOWN]) + (f' and {more:,} more' if more > 0 else '')


async def in_folder(folder: Path, format: str = '', split: Any = None) -> Discovery:
    """Return the data files in a folder, at any depth.

    Args:
      folder: the folder.
      format: their format; by default that of all files of which one is known.
      split: the split to read, if the files are of several.

    Raises:
      NotFoundError: if there is no such folder, the split is not there, or numbered files are missing.
      InvalidArgumentError: if files are of several formats, splits or generations, or of too many.
    """
    async with contextlib.aclosing(folder.store.scan_tree(folder.key)) as tree:
        files = await _files_in(tree, f'{folder}')
    chosen = _Chosen(folder, folder, files, format, split)
    chosen.refuse_folders()
    found = chosen.result()
    if not chosen.tables:
        return found
    table = await read_tables(folder, chosen.tables, chosen.files_of_tables(), found.name)
    if split is not None:
        table = table.among({entry.key for entry in found.entries})
    return _of_table(found, table)


def _of_table(found: Discovery, table: ImageTable) -> Discovery:
    """Return what was found, with the images that a table lists, and others left out."""
    entries = table.entries()
    keys = {entry.key for entry in entries}
    others = [entry.key for entry in found.entries if entry.key not in keys]
    reason = f'not in {table.names[0]}' if len(table.names) == 1 else 'in no table of images'
    left_out = {**found.left_out, **{relative_name(found.base, key): reason for key in others}}
    for entry in entries:  # also those of names that are otherwise left out
        left_out.pop(relative_name(found.base, entry.key), None)
    return dataclasses.replace(found, entries=tuple(entries), left_out=left_out, table=table)


async def of_pattern(pattern: Path, format: str = '', split: Any = None) -> Discovery:
    """Return the data files that match a pattern, or are in folders that do, likewise."""
    base, matches = await matches_of(pattern)
    files = {entry.key: entry for entry in matches if not entry.is_dir}
    names = relative_name(base, pattern.key)
    parts = names.split('/')
    for folder in matches:
        if folder.is_dir and not hidden_part(f'{relative_name(base, folder.key)}/x', parts):
            async with contextlib.aclosing(base.store.scan_tree(folder.key)) as tree:
                files.update((entry.key, entry) for entry in await _files_in(tree, f'{pattern}', len(files)))
    return _Chosen(pattern, base, list(files.values()), format, split, names).result()


async def _files_in(tree: AsyncIterable[Entry], name: str, count: int = 0) -> list[Entry]:
    files = []
    async for entry in tree:
        count += 1
        if count > MOST:
            raise InvalidArgumentError(
                f'{name}: has more than {MOST:,} files and folders, of which that many are listed at most: pass a '
                f'pattern or a list of the files to read'
            )
        if not entry.is_dir:
            files.append(entry)
    return files


class _Chosen:
    """The files that are chosen among those that were listed."""

    def __init__(
        self, path: Path, base: Path, files: Sequence[Entry], format: str, split: Any, pattern: str = ''
    ) -> None:
        self._path = path
        self._name = f'{path}'
        self._base = base
        self._pattern = pattern
        self._names = [relative_name(base, entry.key) for entry in files]
        self._left_out: dict[str, str] = {}
        self._quiet: set[str] = set()
        self._classes = ''
        self._files = files
        self.tables: list[Entry] = []  # of images
        known = self._known(files, format)
        if format in ('', 'images') and not pattern:
            known = self._take_tables(known)
        self._format = format or self._format_of(known)
        self._taken = self._of_format(known)
        self._split = '' if split is None else check_split(split)
        self._choose_split(self._split or None)

    def result(self) -> Discovery:
        entries = tuple(sorted((candidate.entry for candidate in self._taken), key=lambda entry: entry.key))
        paths = [Path.of(self._base.store, entry.key) for entry in entries]
        if self._format != 'images':
            refuse_generations(paths, self._name)
            refuse_gaps(paths, self._name, self._pattern.rpartition('/')[2] or '*')
        quiet = frozenset(self._quiet)
        return Discovery(
            self._path, self._base, self._format, entries, self._left_out, quiet, self._classes, split=self._split
        )

    def _leave_out(self, relative: str, reason: str, quiet: bool = False) -> None:
        self._left_out[relative] = reason
        if quiet:
            self._quiet.add(relative)

    def _known(self, files: Sequence[Entry], format: str) -> list[_Candidate]:
        """Return the files of known formats that are not hidden, or those of unknown ones that a pattern names."""
        parts = self._pattern.split('/') if self._pattern else []
        named = [name for part in parts for name in (expand_braces(part) if part.startswith('{') else (part,))]
        known: list[_Candidate] = []
        unknown: list[_Candidate] = []
        alone: list[_Candidate] = []  # indices of Megatron without their data, as those of tar files
        keys = {entry.key for entry in files}
        data = {_data_key(entry) for entry in files if kind_of(entry.name) == _MEGATRON} & keys
        for entry in sorted(files, key=lambda entry: entry.key):
            relative, kind = relative_name(self._base, entry.key), kind_of(entry.name)
            if entry.key in data:
                continue  # is read with its index
            if is_document(entry.name):
                self._leave_out(relative, 'describes the data', quiet=True)
            elif part := hidden_part(relative, named):
                reason = 'hidden' if part == entry.name else f'in the hidden folder {part}'
                self._leave_out(relative, reason, quiet=not kind)
            elif kind == _MEGATRON and _data_key(entry) not in data:
                alone.append(_Candidate(relative, entry, kind))
            else:
                (known if kind else unknown).append(_Candidate(relative, entry, kind))
        if format == _MEGATRON or not any(kind != _MEGATRON for _, _, kind in known):
            known += alone  # a pattern may leave out the data, and if it does not exist, opening is an error
        else:
            unknown += alone
        if self._pattern and format and not any(kind == format for _, _, kind in known):
            known, unknown = [*known, *(candidate._replace(kind=format) for candidate in unknown)], []
        for relative, entry, _ in unknown:
            index = pair_of(entry.name)[0] if data and entry.name.lower().endswith('.bin') else ''
            self._leave_out(relative, f'without {index}, its index' if index else 'of no format that is read')
        return known

    def _take_tables(self, known: list[_Candidate]) -> list[_Candidate]:
        """Take the tables of images out of the files, and of those that are left out."""
        images = [candidate.entry for candidate in known if candidate.kind == 'images']
        self.tables = tables_among(self._files, images) if images else []
        names = {relative_name(self._base, entry.key) for entry in self.tables}
        for name in names:
            self._left_out.pop(name, None)
        return [candidate for candidate in known if candidate.relative not in names]

    def files_of_tables(self) -> dict[str, Entry]:
        """Return the files that tables of images may name, by their keys."""
        return {entry.key: entry for entry in self._files}

    def _format_of(self, files: Sequence[_Candidate]) -> str:
        """Return the one format of files; raise ``InvalidArgumentError`` if there are several."""
        examples: dict[str, str] = {}
        for relative, _, kind in files:
            examples.setdefault(kind, relative)
        if len(examples) < 2:
            return next(iter(examples), '')
        listed = ', '.join(f'{kind} ({example})' for kind, example in sorted(examples.items()))
        remedy = f'pass format={min(examples)!r}, or another one, or a pattern of the files to read'
        raise InvalidArgumentError(f'{self._name}: expected files of one format, got {listed}: {remedy}')

    def _of_format(self, files: Sequence[_Candidate]) -> list[_Candidate]:
        taken = []
        for candidate in files:
            if candidate.kind == self._format:
                taken.append(candidate)
            else:
                self._leave_out(candidate.relative, f'of the format {candidate.kind}, not {self._format}')
        return taken

    def _choose_split(self, wanted: str | None) -> None:
        relatives = [candidate.relative for candidate in self._taken]
        depth, splits = 0, [split_of(relative) for relative in relatives]
        if self._format == 'images':
            depth, splits = splits_of_classes(relatives)
            splits = splits or [''] * len(relatives)
        found = sorted(set(splits) - {''})
        if wanted is None and len(found) > 1 and len(split_in(self._pattern)) < 2:
            examples = [f'{split!r} ({relatives[splits.index(split)]})' for split in found]
            others = ', to convert' if self._format == 'images' else ', or a pattern or a list of the files to read'
            raise InvalidArgumentError(
                f'{self._name}: has files of the splits {", ".join(examples)}: pass one of them, as in '
                f'split={found[-1]!r}{others}'
            )
        if wanted is not None:
            if wanted not in found:
                others = f'only of {", ".join(map(repr, found))}' if found else 'and none that is named as a split'
                raise NotFoundError(f'{self._name}: has no files of the split {wanted!r}, {others}')
            for candidate, split in zip(self._taken, splits, strict=True):
                if split != wanted:
                    reason = f'of the split {split!r}, not {wanted!r}' if split else f'not named as {wanted!r}'
                    self._leave_out(candidate.relative, reason)
            pairs = zip(self._taken, splits, strict=True)
            self._taken = [candidate for candidate, split in pairs if split == wanted]
        if self.tables:
            self._choose_tables(wanted)
        elif self._format == 'images':
            self._find_classes(depth)

    def _choose_tables(self, wanted: str | None) -> None:
        """Leave out the tables of which no image is of the split."""
        kept = tables_among(self.tables, [candidate.entry for candidate in self._taken])
        for table in self.tables:
            if table not in kept:
                self._leave_out(relative_name(self._base, table.key), f'of another split than {wanted!r}')
        self.tables = kept

    def _find_classes(self, depth: int) -> None:
        """Find the folder that holds those of the classes, and leave out images that are in none of them."""
        parents = {'/'.join(candidate.relative.split('/')[:depth]) for candidate in self._taken}
        inside = f'{parents.pop()}/' if depth and len(parents) == 1 else ''
        # The images of the only split may have no classes: then its folder is one.
        if any('/' in candidate.relative[len(inside) :] for candidate in self._taken):
            self._classes = inside
        base = len(self._classes)
        others = [candidate for candidate in self._taken if '/' not in candidate.relative[base:]]
        if 0 < len(others) < len(self._taken):
            for candidate in others:
                self._leave_out(candidate.relative, 'in no folder of a class: move them into one')
            self._taken = [candidate for candidate in self._taken if '/' in candidate.relative[base:]]

    def refuse_folders(self) -> None:
        """Raise ``InvalidArgumentError`` for record files in several folders, which have no schema to compare, and for
        a Delta table, of which files that were deleted or replaced are still there.
        """
        if self._format == 'parquet' and any('_delta_log' in name.split('/') for name in self._names):
            raise InvalidArgumentError(
                f'{self._name}: is a Delta table, whose folder also has files that were deleted or replaced: pass the '
                f'list of its files, such as deltalake.DeltaTable(...).file_uris()'
            )
        if self._format not in FORMATS or not FORMATS[self._format].one_folder:
            return
        folders = sorted({candidate.relative.rpartition('/')[0] for candidate in self._taken})
        if len(folders) > 1:
            shown = _listed([folder or '.' for folder in folders])
            raise InvalidArgumentError(
                f'{self._name}: has {self._format} files in several folders, {shown}, which may be of different '
                f'datasets: open one of the folders, or pass a pattern or a list of the files to read'
            )


def no_split(name: str) -> InvalidArgumentError:
    """Return the error for a split of something else than a folder or a pattern."""
    return InvalidArgumentError(f'split: expected a folder or a pattern of files to choose from, got {name}')


@dataclasses.dataclass(frozen=True)
class Files:
    """The files of a source: those that were given, or those that are found when it is opened.

    Attributes:
      name: their name in errors.
      paths: the files, or before they are found the folder or pattern.
      found: what was found; None for files that were given.
      is_final: False until they are found.
      parts: the slices of them to take once they are found.
      split: the split to choose; empty for that of all files.
    """

    name: str
    paths: tuple[Path, ...]
    found: Discovery | None = None
    is_final: bool = True
    parts: tuple[slice, ...] = ()
    split: str = ''

    @classmethod
    def of(cls, paths: 'Paths | Files', split: Any = None) -> 'Files':
        """Return the files that a user passed: of one path, it is not known yet whether it is a file."""
        if isinstance(paths, Files):
            return paths
        given = as_paths(paths)
        is_final = isinstance(paths, list | tuple) or len(given) > 1
        if split is not None and is_final:
            raise no_split(counted(len(given), 'file'))
        return cls(name_of(given), given, is_final=is_final, split='' if split is None else check_split(split))

    @classmethod
    def from_discovery(cls, found: Discovery) -> 'Files':
        return cls(found.name, found.paths, found)

    async def resolved(self, format: str) -> 'Files':
        """Return the files, those of a pattern found. A path without wildcards is taken for that of a file, so that
        opening one costs no further request: ``in_folder`` looks again once it could not be read.
        """
        if self.is_final:
            return self
        await self.paths[0].store.ready()
        if await is_pattern(self.paths[0]):
            return self._found(await of_pattern(self.paths[0], format, self.split or None))
        if self.split:
            if (files := await self.in_folder(format)) is None:
                raise no_split(self.name)
            return files
        return self._sliced(dataclasses.replace(self, is_final=True, parts=()))

    async def in_folder(self, format: str) -> 'Files | None':
        """Return the files of a folder, found; None if they were given, or the path is not that of a folder."""
        if self.is_final:
            return None
        stat = await self.paths[0].store.find(self.paths[0].key)
        if stat is None or not stat.is_dir:
            return None
        return self._found(await in_folder(self.paths[0], format, self.split or None))

    def _found(self, found: Discovery) -> 'Files':
        if not found.entries:
            raise found.nothing()
        found.warn()
        return self._sliced(Files(self.name, found.paths, found))

    def partitions(self) -> dict[str, list[Any]]:
        """Return the columns in the names of folders below the one that was opened, with a value for each file."""
        if self.found is None:
            return {}
        numbers = {path: number for number, path in enumerate(self.found.paths)}
        chosen = [numbers[path] for path in self.paths]
        columns = partitions_of(self.found.relatives)  # of all files, so that a part has the same types
        return {name: [values[number] for number in chosen] for name, values in columns.items()}

    def _sliced(self, files: 'Files') -> 'Files':
        for part in self.parts:
            files = files.of_part(part)
        return files

    def of_part(self, part: slice) -> 'Files':
        """Return some of the files, now or once they are found."""
        if not self.is_final:
            return dataclasses.replace(self, parts=(*self.parts, part))
        if not (paths := self.paths[part]):
            count = counted(len(self.paths), 'file')
            raise InvalidArgumentError(f'{self.name}: has {count}, of which {part} selects none')
        return dataclasses.replace(self, name=self.name if self.found else name_of(paths), paths=paths)
