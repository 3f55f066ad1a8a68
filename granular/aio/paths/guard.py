"""The right to write in a folder: which writers exclude each other, on a disk by locks, in a bucket by claims."""

import contextlib
import enum
from typing import Any, Final

from granular.aio.paths.claims import Claim, TakeOver
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.lifecycle import ending_with
from granular.aio.stores import Entry
from granular.aio.stores.local.store import LocalStore
from granular.errors import NotFoundError


class Right(enum.Enum):
    """The purpose of writing in a folder."""

    SERIES = enum.auto()
    """A series of shards. On a disk, each shard is locked by its own writer."""
    SOLE = enum.auto()
    """All of its shards, by processes that this one starts."""
    RUN = enum.auto()
    """All of its shards, by a run that continues on any machine where a killed one stopped."""
    COPY = enum.auto()
    """A copy of a dataset, which overwrites files."""
    REMAINS = enum.auto()
    """The removal of the files that a killed writer of a dataset without shards left in a bucket."""


# Of each right: whose claims it takes over, and whose if the user asserts that no other writer is alive.
_TAKE_OVER: Final[dict[Right, tuple[TakeOver, TakeOver]]] = {
    Right.SERIES: ('ended', 'any'),
    Right.SOLE: ('ended', 'any'),
    Right.RUN: ('runs', 'runs'),
    Right.COPY: ('stale', 'stale'),
    Right.REMAINS: ('stale', 'unknown'),
}


class FolderGuard:
    """Keeps other writers out of a folder from ``enter`` to ``leave``; in a store with neither locks nor conditions,
    none.

    Args:
      folder: the folder of the dataset, which exists on a disk.
      right: what it is written for.
      start, step: the series of shards.
      forced: True if the user asserts that no other writer is alive.
    """

    def __init__(self, folder: PurePath, right: Right, start: int = 0, step: int = 1, forced: bool = False) -> None:
        self._folder, self._right = folder, right
        self._locks = contextlib.ExitStack()
        self._claim: Claim | None = None
        if folder.store.conditional and not folder.store.local:
            self._claim = Claim(folder, start, step, _TAKE_OVER[right][forced])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker, which checks the claim; the locks of this process are not passed on."""
        return {**self.__dict__, '_locks': contextlib.ExitStack()}

    @property
    def has_claim(self) -> bool:
        """True if the right is a claim, which can be taken over."""
        return self._claim is not None

    @property
    def took_over(self) -> bool:
        """True if a claim of another writer of the same series existed."""
        return self._claim is not None and self._claim.took_over

    async def enter(self) -> list[Entry] | None:
        """Exclude other writers; return the entries of the folder if that takes to list them, as in a bucket.

        Raises:
          AlreadyExistsError: if another writer has a right to the folder.
        """
        if self._claim is not None:
            return await self._claim.take()
        store, key = self._folder.store, self._folder.key
        if isinstance(store, LocalStore):
            if self._right is Right.COPY:
                self._locks.callback((await store.lock_dataset(key)).close)
            elif self._right in (Right.SOLE, Right.RUN):
                self._locks.callback((await store.lock_folder(key, shared=self._right is Right.RUN)).release)
        return None

    async def enter_and_list(self) -> list[Entry]:
        """Exclude other writers, as ``enter`` does, and return the entries of the folder in any store."""
        entries = await self.enter()
        if entries is None:
            try:
                entries = [entry async for entry in self._folder.store.scan(self._folder.key)]
            except NotFoundError:
                entries = []  # some stores have no empty folders
        return entries

    async def check(self) -> None:
        """Raise ``AlreadyExistsError`` if another writer has taken over. Call it before anything is published."""
        if self._claim is not None:
            await self._claim.check()

    async def check_owner(self) -> bool:
        """Check without a write, for the workers of the writer; return False if the claim was removed."""
        return self._claim is None or await self._claim.check_owner()

    async def leave(self) -> None:
        self._locks.close()
        if self._claim is not None:
            await self._claim.release()

    def leaving(self) -> contextlib.AbstractAsyncContextManager[None]:
        return ending_with(self.leave, 'removing the claim of the writer')
