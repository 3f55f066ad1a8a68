"""The folder that is shown: its tree, and the readers that are open in it."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any, Final

from granular._support.lru import LRU
from granular.aio.datasources import detect
from granular.aio.datasources.discovery.names import format_of
from granular.aio.datasources.lerobot import INFO
from granular.aio.paths.path import Path, expand_braces, has_optional, is_pattern
from granular.config import MiB
from granular.errors import InvalidArgumentError, ObjectChangedError, UnknownKeyError
from granular.formats.layout import shard_numbers
from granular.view.names import Names
from granular.view.sources import Source, source_of

ENTRIES: Final = 1000
"""Entries of a folder that are shown."""

_CLASSES: Final = 1000  # names that are sent
_OPEN: Final = 4  # readers that stay open
_TAIL: Final = 2048
_IN_FLIGHT: Final = 64 * MiB  # bytes of replies


class _Holder:
    """A reader, opened by its first user."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.source: Source | None = None
        self.users = 0

    async def close(self) -> None:
        if self.source is not None:
            await self.source.close()


class Library:
    """Folders and datasets under one path, outside of which nothing is read, except what links on a disk lead to."""

    def __init__(self, root: Path, names: Names) -> None:
        self._names = names
        store = root.store
        # Tables of limits are not kept, so of a bag's end only its version and length are read.
        config = dataclasses.replace(store.config, tail=min(_TAIL, store.config.tail), memory=_IN_FLIGHT)
        self.root = Path.of(store.with_config(config), root.key)
        self._holders: LRU[str, _Holder] = LRU(
            _OPEN, in_use=lambda _, holder: holder.users > 0, evicted=lambda _, holder: self._unused.append(holder)
        )
        self._unused: list[_Holder] = []  # evicted, and not closed yet

    def path(self, relative: str) -> Path:
        """Return the path of a name under the root; raise ``InvalidArgumentError`` if it leads out of the root."""
        parts = [part for name in expand_braces(relative) for part in name.split('/')] if relative else []
        if any(part in ('', '.', '..') or '\0' in part or '\\' in part for part in parts):
            raise InvalidArgumentError(f'expected a path below {self.root}, got {relative!r:.200}')
        return self.root / relative

    async def check(self) -> None:
        """Raise an error if there is nothing at the root, or a dataset or file that lacks a key with names."""
        keys = self._names.classes.keys() | self._names.tokenizers.keys()
        if (await self.folder(''))['kind'] == 'folder' or not keys:  # a folder may hold datasets with these keys
            return
        async with self.use('') as source:
            if unknown := sorted(keys - source.spec.keys()):
                raise UnknownKeyError(f'{self.root}: names were given for {unknown}, the keys are {list(source.spec)}')

    async def folder(self, relative: str) -> dict[str, Any]:
        """List a folder: its first entries by name, and whether it is a dataset."""
        path = self.path(relative)
        names: list[dict[str, Any]] = []
        more = False
        if await is_pattern(path) or await _is_file(path):
            return {'path': relative, 'entries': [], 'more': False, 'kind': 'data'}
        async with contextlib.aclosing(path.store.scan(path.key)) as entries:
            async for entry in entries:
                if more := len(names) == ENTRIES:
                    break
                name = entry.name
                names.append({'name': name, 'folder': entry.is_dir, 'size': entry.size, 'format': _format(name)})
        folders = [entry['name'] for entry in names if entry['folder']]
        dataset = any(entry['name'] == 'spec.json' for entry in names) or bool(shard_numbers(folders))
        dataset = dataset or ('meta' in folders and await has_optional(path / INFO))
        names.sort(key=lambda entry: (not entry['folder'], entry['name']))
        return {'path': relative, 'entries': names, 'more': more, 'kind': 'data' if dataset else 'folder'}

    @contextlib.asynccontextmanager
    async def use(self, relative: str) -> AsyncIterator[Source]:
        """Hold the open reader of a path. The readers that were used last stay open."""
        holder = self._holders.get(relative) or _Holder()
        holder.users += 1
        self._holders.put(relative, holder)
        try:
            async with holder.lock:
                if holder.source is None:
                    holder.source = await source_of(await _open(self.path(relative)))
            yield holder.source
        except ObjectChangedError:
            if self._holders.get(relative) is holder:  # the next use opens the data that is there now
                self._holders.pop(relative)
            raise
        finally:
            holder.users -= 1
            if not holder.users and self._holders.get(relative) is not holder:
                await holder.close()
            elif not holder.users and holder.source is None:
                self._holders.pop(relative)
            self._holders.trim(_OPEN)
            while self._unused:
                await self._unused.pop().close()

    async def describe(self, relative: str) -> dict[str, Any]:
        async with self.use(relative) as source:
            facts = source.describe()
            for row in facts['keys']:
                key, kind = row['key'], row['type']
                own = kind in ('references', 'value')
                row['family'] = kind if own else self._names.family(key, kind.removesuffix('[]'))
                if names := self._names.classes.get(key):
                    row['classes'] = names[:_CLASSES]
                row['many'] = kind.endswith('[]')
            return {'path': relative, 'url': f'{self.path(relative)}', 'length': source.length, **facts}

    async def aclose(self) -> None:
        holders = [holder for _, holder in self._holders.items()]
        self._holders.clear()
        for holder in holders:
            await holder.close()


def _format(name: str) -> str:
    return 'bag' if name.endswith('.bag') else format_of(name)


async def _is_file(path: Path) -> bool:
    """Return whether a path is a file that has a reader; raise ``NotFoundError`` if it only has the name of one."""
    return bool(_format(path.name)) and not (await path.stat()).is_dir


async def _open(path: Path) -> Any:
    # Records are read as bytes, so that one that is damaged spoils only its own picture. The limits are not kept in
    # memory, where those of ten million datapoints would take hundreds of megabytes.
    try:
        return await detect.open(path, None, cache_index=False)
    except InvalidArgumentError:  # foreign files have no such option
        return await detect.open(path, None)
