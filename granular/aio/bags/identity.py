"""Identities of opened readers, pickled with them so that the copy opens the same data."""

import abc
import platform
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from granular._support.redact import hidden
from granular._support.typing import Datapoint_co
from granular.aio.http.reply import changed, stand_in, stands_in
from granular.aio.paths.path import Path
from granular.aio.pipeline.data_source import OpenedDataSource, restored
from granular.aio.runtime.tasks import gather
from granular.aio.stores import Store
from granular.aio.stores.base import Entry, Stat
from granular.errors import ObjectChangedError
from granular.formats.dataset_index import DIGEST


class FileIdentity(NamedTuple):
    """The size and the version of a file of a reader: what states, pickles, caches and indices compare.

    S3 gives the same bytes the same version, however they are divided into records. So a bag whose limits are in
    another file has a digest of them, too, or the version of that file if they are not in memory.
    """

    size: int
    version: str | None  # None if unknown, and for an empty file if the store gives empty files no version
    table: str = ''

    @classmethod
    def of(cls, found: Stat | Entry) -> Self:
        """Return the identity of a file as a disk or a listing tells it."""
        return cls(found.size, found.version or None)

    @property
    def is_proof(self) -> bool:
        """True if the version identifies the content of the file."""
        return self.version is not None and not stands_in(self.version)

    @property
    def has_digest(self) -> bool:
        return self.table.startswith(DIGEST)

    def is_same(self, now: 'FileIdentity') -> bool:
        """Return whether a file is still the one that was noted, as far as both tell."""
        if self.size != now.size or len({self.table, now.table} - {''}) == 2:
            return False
        return None in (self.version, now.version) or self.version == now.version

    @property
    def told(self) -> tuple[int, str, str]:
        """The identity for caches: the size, the version, a substitute for one, or nothing for an empty file without,
        and the digest.
        """
        return self.size, self.version or (stand_in(self.size) if self.size else ''), self.table


async def check_files(files: Iterable[tuple[Path, FileIdentity]]) -> None:
    """Check that files are still those that were opened; raise ``ObjectChangedError`` if one was replaced, and
    ``NotFoundError`` if one was removed.
    """

    async def check(path: Path, identity: FileIdentity) -> None:
        if identity.size and identity.version is not None:  # an empty file has no first byte to request
            await path.store.check_version(path.key, identity.version)
        elif (size := (await path.store.read(path.key, -path.store.config.tail)).size) != identity.size:
            raise changed(f'{path}', f'of {identity.size} bytes', f'of {size} bytes')

    await gather([check(path, identity) for path, identity in files])


class Identity(NamedTuple):
    """The files that a reader has opened, by name."""

    host: str  # the machine, if versions are valid only there, as for local files; otherwise empty
    files: Mapping[str, FileIdentity]  # by name, or by address with its query, which may select the file

    @classmethod
    def of(cls, stores: Iterable[Store], files: Mapping[str, FileIdentity]) -> 'Identity':
        return cls(platform.node() if any(store.local for store in stores) else '', files)

    def updated(self, opened: 'Identity') -> 'Identity':
        """Return the identity of these files of which some were opened since; on another machine, by size alone."""
        host = self.host if self.host == opened.host else f'{self.host}, {opened.host}'
        return Identity(host, {**self.files, **opened.files})

    def check(self, opened: 'Identity', name: str, partly: bool = False) -> None:
        """Check that a reader opened the same files as before; with ``partly``, one of the two may have further files.

        On another machine, local files are compared by size alone, because a copy has other versions. Raise
        ``ObjectChangedError`` for the first file that differs.
        """
        before_files, now_files = self.files.keys(), opened.files.keys()
        for file in sorted(before_files & now_files if partly else before_files | now_files):
            before, now = self.files.get(file), opened.files.get(file)
            if before is not None and now is not None and self.host != opened.host:
                before, now = FileIdentity(before.size, None), FileIdentity(now.size, None)
            if before is None or now is None or not before.is_same(now):
                raise ObjectChangedError(
                    f'{name}: was replaced since the reader was pickled: {hidden(file)} {describe_file(before)} '
                    f'then, and {describe_file(now)} now: open a new reader'
                )


def describe_file(file: FileIdentity | None) -> str:
    """Return what a file was, as a clause of an error."""
    if file is None:
        return 'did not exist'
    return f'had {file.size} bytes and version {file.version}' + (file.table and f', divided by {file.table:.40}')


class PinnedSource(OpenedDataSource[Datapoint_co]):
    """A data source over files, pickled with the identities of those that it has opened: its copy refuses others."""

    _name: str  # for errors

    def __init__(self) -> None:
        super().__init__()
        self._expected: Identity | None = None  # of the source that this one was unpickled from

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    @abc.abstractmethod
    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the constructor, from which the source is unpickled."""

    @abc.abstractmethod
    def _opened_files(self) -> Identity | None:
        """Return the files that the open source has opened; None if it has none to compare."""

    def _pickled(self) -> dict[str, Any]:
        """Return the attributes that the source is pickled with."""
        return {'_expected': self._opened_files() if self._state == 'open' else self._expected}

    def __reduce__(self) -> tuple[Any, ...]:
        return restored, (type(self), *self._arguments(), self._pickled())

    def _check_files(self, opened: Identity | None = None, partly: bool = False) -> None:
        """Raise ``ObjectChangedError`` unless what was opened, by default all, is what the source was pickled with."""
        if self._expected is not None and (opened := opened or self._opened_files()) is not None:
            self._expected.check(opened, self._name, partly)
