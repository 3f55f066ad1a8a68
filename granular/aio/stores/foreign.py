"""Path objects of other libraries."""

import io
from collections.abc import Mapping
from typing import Any

from granular.aio.http.reply import Reply, check_same, stand_in
from granular.aio.stores.base import Entry, Stat
from granular.aio.stores.threaded import ThreadedStore
from granular.config import IOConfig
from granular.errors import NotFoundError


class ForeignStore(ThreadedStore):
    """A path object of another library, with the methods that ``PurePath`` names: keys are joined to it with ``/``."""

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        super().__init__(root, config, options)
        self._base = options['path']

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root, self.config, self.options)

    def _path(self, key: str) -> Any:
        return self._base / key if key else self._base

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        def call_now() -> Reply:
            with self._path(key).open('rb') as file:
                size = file.seek(0, io.SEEK_END)
                size = file.tell() if size is None else size
                current = self._version(key, size)
                check_same(self.url(key), [version or current, current])
                first, end = self.check_range(key, start, stop, size)
                file.seek(first)
                data = file.read(end - first)
            check_same(self.url(key), [current, self._version(key, size)])
            return self.reply_of(key, data, first, end, size, current)

        return await self.call(key, call_now)

    def _version(self, key: str, size: int) -> str:
        """Return the version of a file: its size, and the time of its last change if its path has ``stat``."""
        path = self._path(key)
        info = path.stat() if hasattr(path, 'stat') else None
        fields = [f'{name} {getattr(info, name)}' for name in ('st_mtime_ns', 'st_mtime') if hasattr(info, name)]
        return stand_in(size, *fields)

    def stat_now(self, key: str) -> Stat:
        path = self._path(key)
        if not path.exists():
            raise NotFoundError(f'{self.url(key)}: no such file or folder', path=self.url(key))
        if _is_dir(path):
            return Stat(0, is_dir=True)
        with path.open('rb') as file:
            file.seek(0, io.SEEK_END)
            return Stat(file.tell())

    def list_now(self, key: str) -> list[Entry]:
        children = list(self._path(key).glob('*'))
        if not children and not self.exists_now(key):
            raise NotFoundError(f'{self.url(key)}: no such folder', path=self.url(key))
        return [Entry(f'{key}/{child.name}'.strip('/'), _is_dir(child)) for child in children]

    def exists_now(self, key: str) -> bool:
        return bool(self._path(key).exists())

    def open_now(self, key: str) -> Any:
        return self._path(key).open('wb')

    def mkdir_now(self, key: str, parents: bool) -> None:
        self._path(key).mkdir()

    def remove_now(self, key: str) -> None:
        path = self._path(key)
        if path.exists():
            (path.remove if hasattr(path, 'remove') else path.unlink)()


def _is_dir(path: Any) -> bool:
    for name in ('is_dir', 'isdir'):
        if hasattr(path, name):
            return bool(getattr(path, name)())
    try:  # without these methods, a folder is a path that cannot be opened
        path.open('rb').close()
    except OSError:
        return True
    return False
