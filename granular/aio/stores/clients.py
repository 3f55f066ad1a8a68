"""Base classes of stores on a network: one client per event loop, and what all buckets have in common."""

import abc
import os
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

from granular.aio.runtime.loop_resources import Scope, peek_scope, scope
from granular.aio.stores.base import Store
from granular.config import IOConfig
from granular.errors import AlreadyExistsError, NotFoundError, StoreError

C = TypeVar('C')


class ClientStore(Store, Generic[C]):
    """A store that is accessed through one client per event loop."""

    conditional = True
    variables: tuple[str, ...] = ()
    """Environment variables from which a client takes credentials that the options do not give."""

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        super().__init__(root, config, options)
        # Part of the identity: a client that was created under another environment must not be reused.
        self._environment = hash(tuple(map(os.environ.get, self.variables)))

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


class Bucket(Store):
    """A store without folders: there, a folder is a common beginning of keys."""

    has_folders = False
    passes: int = 10
    """Passes of listing a folder and deleting what it contains."""
    noun = 'objects'

    async def has_root(self) -> bool:
        """Return whether the bucket exists."""
        return await self._has('')

    @abc.abstractmethod
    async def create_root(self) -> bool:
        """Create the bucket. Return False if it exists."""

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        if not key:
            if not await self.has_root() and await self.create_root():
                return
        elif exist_ok or not await self._has(key):
            return
        if not exist_ok:
            raise AlreadyExistsError(f'{self.url(key)}: exists already')

    async def _has(self, key: str) -> bool:
        try:
            await self.stat(key)
        except NotFoundError:
            return False
        return True

    @abc.abstractmethod
    async def delete_listed(self, key: str, must_exist: bool) -> int:
        """List a folder once and delete what it contains. Return the number of objects.

        Raises:
          NotFoundError: if the folder must exist and is empty.
        """

    async def delete_tree(self, key: str) -> None:
        for number in range(self.passes):
            count = await self.delete_listed(key, number == 0)
            if not count:
                return
        raise StoreError(
            f'{self.url(key)}: has {count} {self.noun} after they were deleted {self.passes} times: another writer '
            f'adds {self.noun}, or the store does not delete them'
        )
