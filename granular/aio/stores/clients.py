"""Base classes of stores on a network: one client per event loop, and what all buckets have in common."""

import abc
import os
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Generic, TypeVar, cast

from granular.aio.runtime.loop_resources import Scope, peek_scope, scope
from granular.aio.stores.base import Entry, Stat, Store
from granular.aio.stores.listing import Listing, Page
from granular.config import IOConfig
from granular.errors import AlreadyExistsError, NotFoundError, StoreError

C = TypeVar('C')


class ClientStore(Store, Generic[C]):
    """A store that is accessed through one client per event loop."""

    conditional = True
    variables: tuple[str, ...] = ()
    """Environment variables from which a client takes what the options do not give: their names, or how all of them
    begin, with an underscore at the end."""
    naming: tuple[str, ...] = ('endpoint_url',)
    """Options that only select the endpoint."""

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        super().__init__(root, config, options)
        # Part of the identity: a client that was created under another environment must not be reused.
        self._environment = hash(_values_of(self.variables))
        self.endpoint: Any = self._find_endpoint()

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle the endpoint, so that it stays the same under another environment.
        kind, (root, config, options) = super().__reduce__()
        return kind, (root, config, {**options, **self._endpoint_options()})

    def _identity(self) -> tuple[Any, ...]:
        options = {name: value for name, value in self.options.items() if name not in self.naming}
        return self.root, self.config, options, self.endpoint, self._environment

    @property
    def server(self) -> str:
        return str(self._endpoint_options().get('endpoint_url', '')).rstrip('/')

    def _space(self) -> str:
        return str(self.endpoint).rstrip('/')

    def _find_endpoint(self) -> Any:
        """Return the server that the options and the current environment select."""
        return self.root

    def _endpoint_options(self) -> dict[str, Any]:
        """Return the options that select the same server in any environment."""
        return {}

    @abc.abstractmethod
    async def _open_client(self, opened: Scope) -> C:
        """Create a client for the running event loop."""

    async def client(self) -> C:
        """Return the running event loop's client, created at first use."""
        opened = peek_scope()
        if opened is not None and (client := opened.peek(self)) is not None:
            return cast(C, client)
        opened = await scope()
        return await opened.get(self, self._open_client)


def _values_of(variables: tuple[str, ...]) -> tuple[tuple[str, str | None], ...]:
    beginnings = tuple(name for name in variables if name.endswith('_'))
    names = sorted(name for name in os.environ if name.startswith(beginnings)) if beginnings else ()
    return tuple((name, os.environ.get(name)) for name in (*names, *variables))


class Bucket(Store):
    """A store without folders: there, a folder is a common beginning of keys."""

    has_folders = False
    passes: int = 10
    """Passes of listing a folder and deleting what it contains."""
    noun = 'objects'

    @property
    def ordered(self) -> bool:
        """True if listings are in the order of the bytes of their names."""
        return True

    @abc.abstractmethod
    async def page(self, listing: Listing, limit: int = 0) -> Page:
        """Request the next page of a listing, of at most ``limit`` names unless that is 0."""

    def _listing(self, key: str, prefix: str = '', delimiter: str = '') -> Listing:
        return Listing(self.url(key), f'{key}/{prefix}' if key else prefix, delimiter, self.ordered)

    async def pages(
        self, key: str, prefix: str = '', delimiter: str = '', must_exist: bool = True
    ) -> AsyncGenerator[Page, None]:
        """Yield the pages of a listing; raise NotFoundError if the folder must exist and is empty."""
        listing = self._listing(key, prefix, delimiter)
        missing = must_exist and bool(key) and not prefix
        while not listing.ended:
            page = await self.page(listing)
            missing = missing and not page.items and not page.folders
            yield page
        if missing:
            raise NotFoundError(f'{self.url(key)}: no such folder', path=self.url(key))

    async def stat_folder(self, key: str) -> Stat:
        """Return the metadata of a folder, or of the bucket, which must exist."""
        listing = self._listing(key)
        while not listing.ended:
            page = await self.page(listing, 1)
            if not key or page.items:
                return Stat(0, is_dir=True)
        raise NotFoundError(f'{self.url(key)}: no such {self.noun.removesuffix("s")} or folder', path=self.url(key))

    async def scan(self, key: str, prefix: str = '') -> AsyncGenerator[Entry, None]:
        marked: set[str] = set()  # folders that an object marks, which are listed with what is in them as well
        async for page in self.pages(key, prefix, '/'):
            marks = [item.key.removesuffix('/') for item in page.items if item.is_dir]
            marks = [mark for mark in marks if mark != key]
            for folder in dict.fromkeys([*(folder[:-1] for folder in page.folders), *marks]):
                if folder not in marked:
                    yield Entry(folder, True)
            marked.update(marks)
            for item in page.items:
                if not item.is_dir:
                    yield item

    async def scan_tree(self, key: str) -> AsyncGenerator[Entry, None]:
        last, base = '', len(key) + 1 if key else 0
        async for page in self.pages(key):
            for item in page.items:
                # The folders above it that contain no earlier key, which lists them.
                path = f'{item.key.removesuffix("/")}/' if item.is_dir else item.key
                for end, char in enumerate(path):
                    if char == '/' and end >= base and not last.startswith(path[: end + 1]):
                        yield Entry(path[:end], True, item.size if item.is_dir and end == len(path) - 1 else 0)
                last = path
                if not item.is_dir:
                    yield item

    @abc.abstractmethod
    async def create_root(self) -> bool:
        """Create the bucket. Return False if it exists."""

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        if not key:
            if await self.find('') is None and await self.create_root():
                return
        elif exist_ok or await self.find(key) is None:
            return
        if not exist_ok:
            raise AlreadyExistsError(f'{self.url(key)}: exists already', path=self.url(key))

    async def delete_listed(self, key: str, must_exist: bool) -> int:
        """List a folder once, as ``pages`` does, and delete what it contains. Return the number of objects."""
        count = 0
        async for page in self.pages(key, must_exist=must_exist):
            count += len(page.items)
            await self.delete([item.key for item in page.items])
        return count

    async def delete_tree(self, key: str) -> None:
        for number in range(self.passes):
            count = await self.delete_listed(key, number == 0)
            if not count:
                return
        raise StoreError(
            f'{self.url(key)}: has {count} {self.noun} after they were deleted {self.passes} times: another writer '
            f'adds {self.noun}, or the store does not delete them',
            path=self.url(key),
        )
