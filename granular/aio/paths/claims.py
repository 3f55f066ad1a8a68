"""Claims: objects that give one writer at a time the right to write a series of shards, or one copy at a time the right
to write a dataset, in a bucket.
"""

import asyncio
import functools
import json
import math
import os
import re
import secrets
import socket
import weakref
from typing import Any, Final, Literal

from granular._support.text import logger
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.background import background
from granular.aio.runtime.lifecycle import ending_with
from granular.aio.runtime.lock import Lock
from granular.aio.runtime.tasks import end_tasks
from granular.aio.stores import Entry
from granular.errors import AlreadyExistsError, BadReplyError, GranularError, NotFoundError
from granular.formats.base import parse_json

_NAME: Final = re.compile(r'\.writer\.([0-9]{1,18})\.([0-9]{1,18})\.json')
RENEWED: Final = 300.0  # seconds
_STALE: Final = 3 * RENEWED

TakeOver = Literal['ended', 'stale', 'runs', 'unknown', 'any']


def is_claim(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


class Claim:
    """An object beside the shards that excludes other writers while this writer is alive.

    On a disk, the system releases the locks of a process that ends. A bucket has no locks: the claim of a killed writer
    remains, and is taken over by a writer on the same machine, which can see that the process has ended, or by a writer
    with ``resume='discard'``, which asserts it. Until it is released, a task rewrites the claim every 300 seconds,
    however slow the writer is, because ``granular clean`` spares the shards beside a fresh claim.

    Args:
      start, step: the series of shards.
      take_over: the claims of other writers to take over. ``'ended'``: those of ended processes of this machine;
        ``'stale'``: also those of other machines that were not renewed for 900 seconds; ``'runs'``: also all that were
        made with this value on other machines; ``'unknown'``: all of other machines, whose state is unknown;
        ``'any'``: all, but for those made with ``'stale'`` by copies that run on this machine: they overwrite files.
    """

    def __init__(self, directory: PurePath, start: int, step: int, take_over: TakeOver) -> None:
        self._directory = directory
        self._start = start
        self._step = step
        self._take_over = take_over
        self._path = directory / f'.writer.{start}.{step}.json'
        self._token = secrets.token_hex(16)
        self._turns = Lock()
        self._released = False
        self._renewing: asyncio.Task[None] | None = None
        self.took_over = False  # True if the claim of another writer of the same series existed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_renewing': None}

    async def take(self) -> list[Entry]:
        """Create the claim, unless another writer has claimed a shard, and return the entries of the folder."""
        self._released = False  # as it may have been taken before by an opening that failed
        try:
            await self._write(new=True)
        except GranularError as error:  # The claim may exist nevertheless, if the reply was lost.
            owner = await self._read(self._path)
            if owner is None:
                raise
            if owner.get('token') != self._token:
                if not isinstance(error, AlreadyExistsError):
                    raise
                await self._refuse(self._path, owner, error)
                self.took_over = True
                await self._write(new=False)
        _held.add(self)
        # Of two writers whose series share shards, the one that lists last sees the claim of the other.
        store = self._directory.store
        try:
            entries = [entry async for entry in store.scan(self._directory.key)]
            if all(entry.key != self._path.key for entry in entries):
                raise BadReplyError(f'{self._path}: the store accepted it, but does not list it')
            for entry in entries:
                await self._resolve(entry)
        except BaseException:
            async with ending_with(self.release, 'removing the claim of the writer'):
                raise
        await self._keep_fresh()
        return entries

    async def _keep_fresh(self) -> None:
        """Start to renew the claim, unless it is being renewed under a loop that still runs."""
        if self._renewing is None or self._renewing.done():
            self._renewing = background(_renew_regularly(weakref.ref(self)))

    async def _resolve(self, entry: Entry) -> None:
        """Raise for the claim of another series that shares shards, or delete it if it can be taken over."""
        match = _NAME.fullmatch(entry.name)
        if match is None or entry.key == self._path.key:
            return
        start, step = int(match[1]), int(match[2])
        if not step or (start - self._start) % math.gcd(step, self._step):
            return
        path = PurePath.of(self._directory.store, entry.key)
        if (owner := await self._read(path)) is not None:
            await self._refuse(path, owner, None)
            await self._directory.store.delete([entry.key])

    async def check(self) -> None:
        """Raise ``AlreadyExistsError`` if another writer has taken over. Call it before a shard is published."""
        if not await self.check_owner():
            await self._write(new=True)  # removed meanwhile, as by `granular clean`, and not claimed since
        await self._keep_fresh()

    async def check_owner(self) -> bool:
        """Return whether the claim exists; as ``check``, but write nothing, for the workers of the writer."""
        owner = await self._read(self._path)
        if owner is not None and owner.get('token') != self._token:
            raise AlreadyExistsError(f'{self._directory}: another writer took over, on {owner.get("host")!r:.100}')
        return owner is not None

    async def renew(self) -> None:
        """Rewrite the claim, to show that the writer is alive; as ``check``, raise if another one has taken over."""
        async with self._turns.turn():
            if not self._released:
                await self._write(new=not await self.check_owner())

    async def release(self) -> None:
        _held.discard(self)
        async with self._turns.turn():  # a renewal that has begun ends first, so that none recreates the claim
            self._released = True
            if self._renewing is not None:
                await end_tasks([self._renewing])
            owner = await self._read(self._path)
            if owner is not None and owner.get('token') == self._token:
                await self._directory.store.delete([self._path.key])

    async def _refuse(self, path: PurePath, owner: dict[str, Any], error: GranularError | None) -> None:
        alive, take_over, theirs = _is_alive(owner), self._take_over, owner.get('take_over')
        if alive is False or (take_over == 'any' and not (alive and theirs == 'stale')):
            return
        if alive is None and (take_over == 'unknown' or take_over == theirs == 'runs'):
            return
        if alive is None and take_over in ('stale', 'runs') and await self._age(path) > _STALE:
            return
        waiting = f'wait for it, or remove {path.name}'
        remedy = {'ended': "if it is not running, pass resume='discard'", 'stale': waiting, 'runs': waiting}
        raise AlreadyExistsError(
            f'{self._directory}: another writer is writing it{"" if alive else ", or was killed"}: process '
            f'{owner.get("pid")!r:.20} on {owner.get("host")!r:.100}: {remedy.get(take_over, "wait for it")}'
        ) from error

    async def _age(self, path: PurePath) -> float:
        """Return the seconds since a claim was renewed; 0 if unknown."""
        stat = await path.store.find(path.key)
        return 0.0 if stat is None or stat.modified is None else await path.store.now(path.key) - stat.modified

    async def _write(self, new: bool) -> None:
        series = {'shardstart': self._start, 'shardstep': self._step, 'take_over': self._take_over}
        content = {'token': self._token, **series, **_process()}
        await self._path.store.write(self._path.key, json.dumps(content).encode(), new)

    async def _read(self, path: PurePath) -> dict[str, Any] | None:
        try:
            content = parse_json((await path.store.read(path.key)).data)
        except NotFoundError:
            return None
        except ValueError:
            content = None
        return content if isinstance(content, dict) else {}


async def _renew_regularly(reference: 'weakref.ref[Claim]') -> None:
    """Renew a claim until its writer is closed, or dropped without being closed."""
    while True:
        await asyncio.sleep(RENEWED)
        if (claim := reference()) is None:
            return
        try:
            await claim.renew()
        except AlreadyExistsError:
            return  # `check` raises it before the next shard is published
        except GranularError as error:
            logger.warning('%s: the claim of a writer could not be renewed: %s', claim._path, error)
        del claim


_held: Final[weakref.WeakSet[Claim]] = weakref.WeakSet()


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Return whether the writer that made a claim is alive; None if it runs on another machine."""
    process = _process()
    if process['system'] is None or owner.get('system') != process['system']:
        return None
    if owner.get('pid') == process['pid'] and owner.get('started') == process['started']:
        return any(claim._token == owner.get('token') for claim in list(_held))
    pid = owner.get('pid')
    return isinstance(pid, int) and _started(pid) == owner.get('started')


def _process() -> dict[str, Any]:
    """Return the identity of this process, by which other processes of this machine can tell whether it is alive."""
    return {'host': socket.gethostname(), 'system': _system(), 'pid': os.getpid(), 'started': _started(os.getpid())}


@functools.cache
def _system() -> str | None:
    """Return the identity of the running system and its process namespace; None if unavailable."""
    try:
        with open('/proc/sys/kernel/random/boot_id') as file:
            return f'{file.read().strip()}.{os.stat("/proc/self/ns/pid").st_ino}'
    except OSError:
        return None


def _started(pid: int) -> str | None:
    """Return a process's start time in clock ticks since boot; None if there is no such process."""
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[19]
    except OSError:
        return None
