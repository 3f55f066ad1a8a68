"""On-disk index cache: lets a dataset be reopened without a request.

One file per dataset (or per sharded dataset, for all of its shards): a checksum, a msgpack header and the tables of
limits, which are memory-mapped, so that the processes of a machine share them. The content is bound to the versions of
the objects: the first read of a bag that was replaced since returns another version and raises ObjectChangedError, and
the file is removed. Objects without versions are never cached.

A file is used only if its header names the file itself, whose name is a digest of the store, its server and the key.
The folder and its files are readable by their owner alone.
"""

import contextlib
import hashlib
import logging
import mmap
import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgpack
import numpy as np

from granular.aio.paths.path import Path
from granular.aio.runtime.threads import offload
from granular.aio.stores.owner_only import open_file, open_folder
from granular.errors import GranularError
from granular.formats.layout import check_limits
from granular.indexing import Ints

T = TypeVar('T')

logger: Final = logging.getLogger('granular')

_MAGIC: Final = b'granular-index-3'
_SUM: Final = len(_MAGIC) + 8  # the checksum covers all bytes from here on
_HEAD: Final = _SUM + 8


class BagState(NamedTuple):
    """An opened bag.

    Attributes:
      version: 1, 2 or 3.
      size: bytes of records and table.
      datasize: bytes of records.
      pin: the version of the object that holds the records.
      limits: the limits of the records, the first one 0.
    """

    version: int
    size: int
    datasize: int
    pin: str
    limits: Ints


class FolderState(NamedTuple):
    """An opened dataset.

    Attributes:
      spec: the content of ``spec.json``.
      bags: the bags by name, with ``'refs'`` in the refs layout.
    """

    spec: bytes
    bags: Mapping[str, BagState]


class Snapshot:
    """The cached index of a dataset, or of a sharded dataset by shard.

    Args:
      file: the cache file.
      folders: the datasets by shard name; a dataset without shards has the empty name.
    """

    def __init__(self, file: str, folders: Mapping[str, FolderState]) -> None:
        self._file = file
        self.folders = folders

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
        return cls(file, folders)

    @staticmethod
    async def save(directory: Path, folders: Mapping[str, FolderState]) -> None:
        """Cache the index of a dataset. A failed write is logged as a warning, not raised."""
        file = cache_file_of(directory)
        if file is None:
            return
        if all(bag.pin for folder in folders.values() for bag in folder.bags.values()):
            try:
                await offload(_save, file, f'{directory}', folders)
            except GranularError:
                raise  # the folder belongs to another user
            except OSError as error:
                logger.warning('the index of %s was not cached, and will be read again: %s', f'{directory}', error)

    async def forget(self) -> None:
        """Remove the cache file, because the dataset was replaced."""
        await offload(remove_file, self._file)


def cache_file_of(directory: Path) -> str | None:
    """Return the cache file of a dataset; None if its store has no index cache."""
    store = directory.store
    cache = store.config.index_cache
    if not cache or store.local:
        return None
    name = hashlib.sha256(repr((store.fingerprint, directory.key)).encode()).hexdigest()
    return os.path.join(os.path.expanduser(cache), f'{name[:40]}.index')


def load_tables(file: str, name: str, parse: Callable[[Any, Ints], T]) -> T | None:
    """Return the content that ``save_tables`` wrote; None if the file is missing, or damaged, which is logged.

    Args:
      file: the cache file.
      name: the dataset's address, which the header must have.
      parse: makes the result from the header and the numbers; any exception it raises is treated as damage.

    Raises:
      AccessDeniedError: if the folder belongs to another user.
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
        if bytes(view[: len(_MAGIC)]) != _MAGIC:
            raise ValueError('it has another magic')
        if int.from_bytes(view[len(_MAGIC) : _SUM], 'little') != zlib.crc32(view[_SUM:]):
            raise ValueError('wrong checksum')
        start = _HEAD + int.from_bytes(view[_SUM:_HEAD], 'little')
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
        folder: FolderState(bytes(spec), {key: _bag_state(row, tables) for key, row in bags.items()})
        for folder, (spec, bags) in rows.items()
    }


def _bag_state(row: Sequence[Any], tables: Ints) -> BagState:
    version, size, datasize, pin, start, count = row
    if not all(type(number) is int and number >= 0 for number in (version, size, datasize, start, count)):
        raise ValueError(f'{row!r:.80} is not a bag')
    if type(pin) is not str or version not in (1, 2, 3) or datasize > size:
        raise ValueError(f'{row!r:.80} is not a bag')
    if not 0 < count <= len(tables) - start or tables[start]:
        raise ValueError(f'no table at {start}')
    return BagState(version, size, datasize, pin, check_limits(tables[start : start + count], datasize, 'it'))


def _save(file: str, name: str, folders: Mapping[str, FolderState]) -> None:
    rows: dict[str, tuple[bytes, dict[str, tuple[Any, ...]]]] = {}
    tables: list[Ints] = []
    start = 0
    for folder, (spec, bags) in folders.items():
        bag_rows = {}
        for key, bag in bags.items():
            bag_rows[key] = (*bag[:4], start, len(bag.limits))
            tables.append(bag.limits)
            start += len(bag.limits)
        rows[folder] = spec, bag_rows
    save_tables(file, name, rows, tables)


def save_tables(file: str, name: str, rows: Any, tables: Sequence[Ints]) -> None:
    """Write a cache file: a header of msgpack values, followed by numbers."""
    target = os.path.basename(file)
    head = msgpack.packb((target, name, rows))
    temporary = f'{target}.{secrets.token_hex(4)}.tmp'
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


def _write_file(fd: int, head: bytes, tables: Sequence[Ints]) -> None:
    with open(fd, 'wb') as opened:
        front = len(head).to_bytes(8, 'little') + head
        front += bytes(-(_SUM + len(front)) % 8)
        opened.write(_MAGIC + bytes(_SUM - len(_MAGIC)) + front)
        total = zlib.crc32(front)
        for table in tables:
            data = memoryview(np.ascontiguousarray(table, '<i8').data).cast('B')
            opened.write(data)
            total = zlib.crc32(data, total)
        opened.seek(len(_MAGIC))
        opened.write(total.to_bytes(_SUM - len(_MAGIC), 'little'))


def remove_file(file: str) -> None:
    """Remove a cache file, if it exists. A failure is logged as a warning, not raised."""
    try:
        os.unlink(file)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning('%s: could not be removed: %s', file, error)
