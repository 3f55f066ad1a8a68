"""On-disk index cache: lets a dataset be reopened without a request.

One file per dataset (or per sharded dataset, for all of its shards): a checksum, a msgpack header and the tables of
limits, which are memory-mapped, so that the processes of a machine share them. The content is bound to the versions of
the objects, and the first read of a folder compares its ``spec.json``, too: if any was replaced, the read raises
ObjectChangedError, and the file is removed. Objects without versions are never cached.

A file is used only if its header names the file itself, whose name is a digest of the store, its server and the key.
The folder and its files are readable by their owner alone.
"""

import abc
import contextlib
import hashlib
import mmap
import os
import secrets
import zlib
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import msgpack
import numpy as np

from granular._support.indexing import Ints
from granular._support.text import logger
from granular.aio.bags.identity import FileIdentity
from granular.aio.http.reply import Reply
from granular.aio.paths.path import Path
from granular.aio.runtime.lock import Lock
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores.owner_only import open_file, open_folder
from granular.errors import GranularError, NotFoundError, ObjectChangedError
from granular.formats.layout import check_limits

T = TypeVar('T')

MAGIC: Final = b'granular-index-4'
SUM: Final = len(MAGIC) + 8  # the checksum covers all bytes from here on
_HEAD: Final = SUM + 8


class BagState(NamedTuple):
    version: int
    size: int  # with the table
    datasize: int
    pin: str  # the version of the object that holds the records
    table_pin: str  # that of the object that holds the limits of a bag of version 3; otherwise empty
    limits: Ints  # the first one 0

    def files(self, path: Path) -> list[tuple[Path, FileIdentity]]:
        if self.version != 3:
            return [(path, FileIdentity(self.size, self.pin))]
        table = FileIdentity(self.size - self.datasize, self.table_pin)
        return [(path, FileIdentity(self.datasize, self.pin)), (path.with_suffix('.idx'), table)]


class FolderState(NamedTuple):
    spec: Reply  # to the read of ``spec.json``
    bags: Mapping[str, BagState]  # with ``'refs'`` in the refs layout


class Snapshot:
    """The cached index of a dataset, whose name is empty, or of a sharded dataset by shard name; ``unproven`` has the
    names of those that may have been replaced since.
    """

    def __init__(self, file: str, folders: Mapping[str, FolderState], unproven: Collection[str] = ()) -> None:
        self._file = file
        self.folders = folders
        self.unproven = set(unproven)

    def __getstate__(self) -> dict[str, Any]:
        # All tables as one array: a reader looks up the limits of many bags together if they are in one.
        rows, tables = rows_of(self.folders)
        return {**self.__dict__, 'folders': (rows, np.concatenate(tables) if tables else np.zeros(0, np.int64))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, folders=folders_of(*state['folders']))

    @classmethod
    async def load(cls, directory: Path) -> 'Snapshot | None':
        """Return the cached index of a dataset; None if its store has no index cache or the dataset is not in it."""
        file = cache_file_of(directory)
        if file is None:
            return None
        folders = await offload(load_tables, file, f'{directory}', folders_of)
        if folders is None:
            return None
        if directory.store.config.cache_dir:
            from granular.aio.stores.block_cache.versions import forget_versions

            # With both caches, no other request would notice that the dataset was replaced.
            forget_versions(directory.store.fingerprint, directory.key)
        return cls(file, folders, folders)

    @classmethod
    async def save(cls, directory: Path, folders: Mapping[str, FolderState]) -> 'Snapshot | None':
        """Cache the index of a dataset by ``save_tables``; None if its store has no index cache."""
        file = cache_file_of(directory)
        if file is None:
            return None
        if all(bag.pin for folder in folders.values() for bag in folder.bags.values()):
            await offload(_save, file, f'{directory}', folders)
        return cls(file, folders)

    def part(self, folder: str) -> 'Snapshot':
        """Return the snapshot of one dataset alone."""
        return Snapshot(self._file, {'': self.folders[folder]}, [''] if folder in self.unproven else ())

    async def forget(self) -> None:
        """Remove the cache file, because the dataset was replaced."""
        if self._file:
            await offload(remove_file, self._file)


class Proof(abc.ABC):
    """Proof that a folder is the one that an index describes, which its first read takes."""

    covers_tables = False
    """True if not even the limits and references in memory may be used before."""

    def __init__(self) -> None:
        self._taking = Lock()

    @property
    @abc.abstractmethod
    def is_missing(self) -> bool:
        """True until a check has succeeded."""

    async def take(self) -> None:
        """Take the proof, by one check for all reads that need it at the same time; raise as ``check``."""
        async with self._taking.turn():
            if self.is_missing:
                await self.check()

    @abc.abstractmethod
    async def check(self) -> None:
        """Compare the folder with the index; raise ``ObjectChangedError`` if it is another one now."""

    @abc.abstractmethod
    async def forget(self) -> None:
        """Forget the index if it is a cached one, after a read that found it outdated."""


class SnapshotProof(Proof):
    """Proof that a folder is still the one of its snapshot, by ``check``."""

    def __init__(
        self, snapshot: Snapshot, directory: Path, folder: str, check: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        super().__init__()
        self.snapshot = snapshot
        self._directory = directory
        self._folder = folder
        self._check = check

    @property
    def is_missing(self) -> bool:
        return self._folder in self.snapshot.unproven

    async def forget(self) -> None:
        await self.snapshot.forget()

    async def check(self) -> None:
        try:
            await self._check()
        except (ObjectChangedError, NotFoundError) as error:
            await self.snapshot.forget()
            name = f'{self._directory}'
            raise ObjectChangedError(
                f'{name}: it was replaced since its index was cached: open it again: {error}', path=name
            ) from error
        self.snapshot.unproven.discard(self._folder)


async def proven(proofs: Collection[Proof], reading: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that reads folders, given their proofs, which it takes meanwhile. Raise
    ``ObjectChangedError`` if a folder is no longer that of its snapshot, which is removed.
    """
    missing = [proof for proof in proofs if proof.is_missing]
    try:
        if not missing:
            return await reading
        try:
            values: list[Any] = await gather([reading, *(proof.take() for proof in missing)])
            return cast(T, values[0])
        except GranularError:
            # An outdated folder may be read in any odd way: the error is that it was replaced, maybe since the check.
            await gather([proof.check() for proof in missing])
            raise
    except (ObjectChangedError, NotFoundError):
        for proof in proofs:
            await proof.forget()
        raise


async def take_first(proofs: Iterable[Proof | None]) -> None:
    """Take the proofs without which no table in memory may be used."""
    missing = {proof for proof in proofs if proof is not None and proof.covers_tables and proof.is_missing}
    if missing:
        await gather([proof.take() for proof in missing])


def cache_file_of(directory: Path) -> str | None:
    """Return the cache file of a dataset whose store is ready; None if that has no index cache."""
    store = directory.store
    cache = store.config.index_cache
    if not cache or store.local:
        return None
    name = hashlib.sha256(repr((store.fingerprint, store.pinned(directory.key))).encode()).hexdigest()
    return os.path.join(os.path.expanduser(cache), f'{name[:40]}.index')


def load_tables(file: str, name: str, parse: Callable[[Any, Ints], T]) -> T | None:
    """Return the content that ``save_tables`` wrote; None if the file is missing, or damaged, which is logged.

    The header must have the address of the dataset, ``name``; any exception that ``parse`` raises, given the header and
    the numbers, is treated as damage. Raise ``AccessDeniedError`` if the folder belongs to another user.
    """
    try:
        folder = open_folder(os.path.dirname(file))
    except GranularError:
        raise  # the folder belongs to another user
    except OSError as error:
        logger.warning('%s: index cache of %s ignored: %s', file, name, error)
        return None
    try:
        fd = open_file(os.path.basename(file), os.O_RDONLY, folder)
        try:
            view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(fd)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning('%s: index cache of %s ignored: %s', file, name, error)
        return None
    finally:
        os.close(folder)
    try:
        if bytes(view[: len(MAGIC)]) != MAGIC:
            raise ValueError('it has another magic')
        if int.from_bytes(view[len(MAGIC) : SUM], 'little') != zlib.crc32(view[SUM:]):
            raise ValueError('wrong checksum')
        start = _HEAD + int.from_bytes(view[SUM:_HEAD], 'little')
        owner, address, rows = msgpack.unpackb(view[_HEAD:start], strict_map_key=False)
        if (owner, address) != (os.path.basename(file), name):
            raise ValueError(f'it is the index of {address}')
        tables = np.frombuffer(view[-(-start // 8) * 8 :], '<i8')
        return parse(rows, tables)
    except Exception as error:
        # Any damage is recoverable: the store has the data.
        logger.warning('%s: index cache of %s ignored: %s', file, name, error)
        remove_file(file)
        return None


def folders_of(rows: Any, tables: Ints) -> dict[str, FolderState]:
    """Return the folders of a snapshot, given the header and the numbers of its file."""
    return {
        folder: FolderState(_spec_reply(spec), {key: _bag_state(row, tables) for key, row in bags.items()})
        for folder, (spec, bags) in rows.items()
    }


def _spec_reply(row: Sequence[Any]) -> Reply:
    reply = Reply(*row)
    types = [type(value) for value in reply._replace(version=reply.version or '')]
    if types != [bytes, int, int, str, str, str]:
        raise ValueError(f'{row!r:.80} is not the reply to a read')
    return reply


def _bag_state(row: Sequence[Any], tables: Ints) -> BagState:
    version, size, datasize, pin, table_pin, start, count = row
    valid = all(type(number) is int and number >= 0 for number in (version, size, datasize, start, count))
    if not valid or not type(pin) is type(table_pin) is str or version not in (1, 2, 3) or datasize > size:
        raise ValueError(f'{row!r:.80} is not a bag')
    if not 0 < count <= len(tables) - start or tables[start]:
        raise ValueError(f'no table at {start}')
    return BagState(
        version, size, datasize, pin, table_pin, check_limits(tables[start : start + count], datasize, 'it')
    )


def _save(file: str, name: str, folders: Mapping[str, FolderState]) -> None:
    save_tables(file, name, *rows_of(folders))


def rows_of(folders: Mapping[str, FolderState]) -> tuple[dict[str, Any], list[Ints]]:
    """Return the header of a snapshot, and its tables, of which it has the positions if they lie one behind the other:
    the reverse of ``folders_of``.
    """
    rows: dict[str, tuple[Reply, dict[str, tuple[Any, ...]]]] = {}
    tables: list[Ints] = []
    start = 0
    for folder, (spec, bags) in folders.items():
        bag_rows = {}
        for key, bag in bags.items():
            bag_rows[key] = (*bag[:-1], start, len(bag.limits))
            tables.append(bag.limits)
            start += len(bag.limits)
        rows[folder] = spec, bag_rows
    return rows, tables


def save_tables(file: str, name: str, rows: Any, tables: Sequence[Ints]) -> None:
    """Write a cache file: a header of msgpack values, followed by numbers. A failed write is logged, not raised."""
    target = os.path.basename(file)
    head = msgpack.packb((target, name, rows))
    temporary = f'{target}.{secrets.token_hex(4)}.tmp'
    try:
        folder = open_folder(os.path.dirname(file))
        try:
            _write_file(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder), head, tables)
            os.replace(temporary, target, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=folder)
            raise
        finally:
            os.close(folder)
    except GranularError:
        raise  # the folder belongs to another user
    except OSError as error:
        logger.warning('the index of %s was not cached, and will be read again: %s', name, error)


def _write_file(fd: int, head: bytes, tables: Sequence[Ints]) -> None:
    with open(fd, 'wb') as opened:
        front = len(head).to_bytes(8, 'little') + head
        front += bytes(-(SUM + len(front)) % 8)
        opened.write(MAGIC + bytes(SUM - len(MAGIC)) + front)
        total = zlib.crc32(front)
        for table in tables:
            data = memoryview(np.ascontiguousarray(table, '<i8').data).cast('B')
            opened.write(data)
            total = zlib.crc32(data, total)
        opened.seek(len(MAGIC))
        opened.write(total.to_bytes(SUM - len(MAGIC), 'little'))


def remove_file(file: str) -> None:
    """Remove a cache file, if it exists. A failure is logged as a warning, not raised."""
    try:
        os.unlink(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning('%s: could not be removed: %s', file, error)
