"""Base classes and value types of stores.

There is one class per kind of store, and one instance per bucket (or host, or disk) and set of options.
"""

import abc
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from granular._support.indexing import Ints
from granular._support.redact import protect
from granular.aio.http.reply import Reply, check_same
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.tasks import gather
from granular.aio.stores.options import check_options, secrets_in, without_secrets
from granular.config import IOConfig, Merge, MiB, store_defaults
from granular.errors import GranularError, InvalidArgumentError, NotFoundError, OutOfRangeError, UnsupportedError

_WINDOW: Final = 16 * MiB  # bytes per read of the default ``read_into``, which copies them into the target


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a listing.

    Attributes:
      key: the full key in the store, without a trailing slash.
      is_dir: True for a folder.
      size: bytes of a file; 0 for a folder, unless an object that marks it in a bucket holds some.
      modified: seconds since the epoch; None if the listing does not report it.
      version: of a file, as in ``Stat``; None if the listing does not report it.
    """

    key: str
    is_dir: bool
    size: int = 0
    modified: float | None = None
    version: str | None = None

    @property
    def name(self) -> str:
        return self.key.rpartition('/')[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """An unfinished multipart upload of an object, with the size of its parts and the time of its last change."""

    key: str
    id: str
    size: int
    modified: float


@dataclasses.dataclass(frozen=True, slots=True)
class Stat:
    """Metadata of a file or folder.

    Attributes:
      size: bytes of a file; 0 for a folder.
      modified: seconds since the epoch; None if the store does not report it.
      version: the ETag, the generation or a similar tag; None if the store does not report one.
      is_dir: True for a folder.
    """

    size: int
    modified: float | None = None
    version: str | None = None
    is_dir: bool = False

    @property
    def st_size(self) -> int:
        return self.size

    @property
    def st_mtime(self) -> float | None:
        """Time of the last change, under pathlib's name."""
        return self.modified


@dataclasses.dataclass(frozen=True, slots=True)
class ContentInfo:
    """Size, version and checksums, by kind (``aio/http/digests.py``), of a file, as far as the store has them."""

    size: int
    version: str | None
    digests: Mapping[str, str]


class Request(NamedTuple):
    """Byte ranges to read from one object, which must have the given version unless that is None.

    Stores get their limits as lists of integers; :func:`granular.aio.stores.fanout.read_all` takes arrays, too.
    """

    key: str
    starts: list[int] | Ints
    stops: list[int] | Ints
    version: str | None = None


class Target(NamedTuple):
    """An object to read, which must have the given version unless that is None."""

    key: str
    version: str | None = None
    kept: Mapping[str, Any] | None = None  # the local file by its version, while it is kept open


class Spans(NamedTuple):
    """Byte ranges to read from many objects: those of one object behind those of another, and except for local files
    ascending and disjoint.
    """

    objects: Sequence[Target]
    owners: list[int]  # the position of the object of each range
    starts: list[int]
    stops: list[int]

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        """Return the ranges of requests."""
        owners = [i for i, request in enumerate(requests) for _ in request.starts]
        starts = [int(start) for request in requests for start in request.starts]
        stops = [int(stop) for request in requests for stop in request.stops]
        return cls([Target(request.key, request.version) for request in requests], owners, starts, stops)

    def requests(self) -> list[Request]:
        """Return a request for each object that has ranges."""
        objects, owners, starts, stops = self
        out, last = [], -1
        own_starts, own_stops = list[int](), list[int]()  # of the last request
        for owner, start, stop in zip(owners, starts, stops, strict=True):
            if owner == last:
                own_starts.append(start)
                own_stops.append(stop)
                continue
            key, version, _ = objects[owner]
            own_starts, own_stops, last = [start], [stop], owner
            out.append(Request(key, own_starts, own_stops, version))
        return out


class ObjectWriter(abc.ABC):
    """Writer of one object, which appears complete at ``close`` or not at all.

    Attributes:
      version: the version of the published object, if the store tells it.
    """

    version: str | None = None

    @abc.abstractmethod
    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Publish the object."""

    @abc.abstractmethod
    async def abort(self) -> None:
        """Discard what was written, leaving nothing behind."""

    async def withdraw(self) -> bool | None:
        """Remove the published object if it is provably this writer's, and return whether it was.

        Returns:
          None if the store keeps other writers from replacing it, so that its version is a proof.
        """
        return None


class Store(abc.ABC):
    """A bucket, host or disk that holds files or objects.

    Pickles as its root, config and options, without credentials.

    Args:
      root: the beginning of the addresses of its files, such as ``s3://bucket``.
      config: the settings.
      options: the user's options, such as ``endpoint_url``, of ``option_names`` (empty if any are accepted).
    """

    local = False
    """True if reads can complete on the calling thread, without an event loop."""
    has_folders = True
    """True if a folder can exist while it is empty."""
    conditional = False
    """True if only one of several writers that create the same new file concurrently succeeds."""
    versions_repeat = True
    """True if a file that is rewritten with the same bytes may have the same version."""
    read_only = False
    """True if nothing can be written."""
    absent: tuple[type[GranularError], ...] = (NotFoundError,)
    """The errors of a read that say that an optional file is absent."""

    option_names: Sequence[str] = ()

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        self.root = root
        self.config = config
        self.options: dict[str, Any] = dict(options)
        if self.option_names:
            check_options(root, self.options, self.option_names)
        protect(secrets_in(self.options))
        self.merge: Merge = store_defaults(config, local=self.local)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self.url("")!r})'

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.root, self.config, without_secrets(self.options))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Store) and type(self) is type(other) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash((type(self), self.root))

    def _identity(self) -> tuple[Any, ...]:
        return self.root, self.config, self.options

    def with_config(self, config: IOConfig) -> Self:
        """Return this store, with its credentials or the file system that was passed, under other settings."""
        store = object.__new__(type(self))
        store.__dict__.update(self.__dict__, config=config, merge=store_defaults(config, local=self.local))
        return store

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identity of this store in caches: its root, server and options, without credentials."""
        options = {name: value for name, value in without_secrets(self.options).items() if name != 'endpoint_url'}
        return repr((self.root, self._space(), sorted(options.items())))

    @property
    def server(self) -> str:
        """The URL of the server, without user; empty if the root names it, or it is that of all roots of the scheme."""
        return ''

    def _space(self) -> str:
        """Return the namespace in which the root and its keys are unique."""
        return ''

    def pinned(self, key: str) -> str:
        """Return a key together with the version of the whole store that is read, once a store with such is ready."""
        return key

    def address(self, key: str) -> str:
        """Return the address of a key, as a user would write it."""
        return f'{self.root}/{key}' if key else self.root

    def url(self, key: str) -> str:
        """Return the address of a key for display, without credentials."""
        return self.address(key)

    def named(self, key: str) -> str:
        """Return a key, or the end of one, as the names of files: on the web, without its query and escapes."""
        return key

    def keyed(self, name: str) -> str:
        """Return names, separated by slashes, as a part of a key: the reverse of ``named``."""
        return name

    def split_query(self, key: str) -> tuple[str, str]:
        """Return the path of a key, and on the web its query, with the question mark."""
        return key, ''

    async def ready(self) -> None:
        """Switch to the event loop, unless this store's calls never wait."""
        if not self.local:
            await to_loop()

    async def now(self, key: str) -> float:
        """Return the current time of the clock behind the store's modification times, in seconds since the epoch.

        The file systems of one machine may have different clocks: it is that of the given file or folder.
        """
        return time.time()

    # --- reading

    @abc.abstractmethod
    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        """Read one byte range, by default the whole object. A negative ``start`` reads that many bytes from the end.

        Raises:
          OutOfRangeError: if the object ends before ``stop``, or, without one, has no byte at a ``start`` above 0.
          ObjectChangedError: if the object does not have the given version.
        """

    async def read_into(
        self, key: str, start: int, stop: int, version: str | None, target: memoryview, largest: int = 0
    ) -> None:
        """Read one byte range of any size into a buffer of exactly its size.

        ``largest`` is the number of bytes that one request may have, if that is more than ``IOConfig.max_request``.
        """
        for at in range(start, stop, _WINDOW):
            end = min(at + _WINDOW, stop)
            target[at - start : end - start] = (await self.read(key, at, end, version)).data

    async def read_many(self, requests: Sequence[Request]) -> list[bytes]:
        """Read the byte ranges of all requests concurrently; return them in order, request by request.

        Ranges may be of any size: the store splits large ones.
        """
        await self.ready()
        replies = await gather(
            [
                self.read(key, start, stop, version)
                for key, starts, stops, version in requests
                for start, stop in zip(starts, stops, strict=True)
            ]
        )
        at = 0
        for key, starts, _, _ in requests:
            check_same(self.url(key), [reply.version for reply in replies[at : at + len(starts)]])
            at += len(starts)
        return [reply.data for reply in replies]

    def read_spans(self, spans: Spans, fresh: bool = False) -> Coroutine[Any, Any, list[bytes]]:
        """Read byte ranges as ``read_many`` does, or as ``read_fresh``."""
        return self.read_fresh(spans.requests()) if fresh else self.read_many(spans.requests())

    async def read_fresh(self, requests: Sequence[Request]) -> list[bytes]:
        """Read as ``read_many`` does, but from the store itself, replacing these bytes in its caches."""
        return await self.read_many(requests)

    async def read_uncached(self, requests: Sequence[Request]) -> list[bytes]:
        """Read as ``read_many`` does, without the block cache."""
        return await self.read_many(requests)

    async def check_version(self, key: str, version: str) -> None:
        """Check that a file currently has the given version; raise ObjectChangedError if it has another one."""
        await self.read(key, 0, 1, version)

    def check_range(self, key: str, start: int, stop: int | None, size: int) -> tuple[int, int]:
        """Return the first byte of a read and the one after its last, or raise OutOfRangeError."""
        first = max(0, size + start) if start < 0 else start
        end = size if stop is None else stop
        if size < (start + (start > 0) if stop is None else stop):
            raise OutOfRangeError(
                f'{self.url(key)}: bytes {start} to {stop} were requested, but it has {size}', path=self.url(key)
            )
        return first, end

    @abc.abstractmethod
    async def stat(self, key: str) -> Stat:
        """Return the metadata of a file or folder; raise NotFoundError if neither exists."""

    async def find(self, key: str) -> Stat | None:
        """Return what ``stat`` does; None if there is neither a file nor a folder."""
        try:
            return await self.stat(key)
        except NotFoundError:
            return None

    async def content_info(self, key: str) -> ContentInfo:
        """Return the size, version and checksums that the store reports for a file, which must exist."""
        return ContentInfo((await self.stat(key)).size, None, {})

    def digest_kind(self, size: int) -> str:
        """Return the kind of checksum that ``content_info`` reports for a file of that size, if any."""
        return ''

    @abc.abstractmethod
    def scan(self, key: str, prefix: str = '') -> AsyncGenerator[Entry, None]:
        """Yield the entries of a folder, page by page; raise NotFoundError if there is no such folder.

        ``prefix`` is the beginning of the names to list; a store that cannot filter by it yields all.
        """

    async def scan_tree(self, key: str) -> AsyncGenerator[Entry, None]:
        """Yield all files and folders in a folder, recursively, page by page."""
        folders = [key]
        while folders:
            async for entry in self.scan(folders.pop()):
                yield entry
                if entry.is_dir:
                    folders.append(entry.key)

    async def has_files(self, key: str) -> bool:
        with contextlib.suppress(NotFoundError):
            async for entry in self.scan_tree(key):
                if not entry.is_dir:
                    return True
        return False

    # --- writing

    def keep_open(self, key: str) -> Mapping[str, Any] | None:
        """Return an object that keeps a local file open from its next read on, as long as the object exists; it has the
        open file by its version.
        """
        return None

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        """Open a writer for an object, which replaces an existing object at ``close``.

        With ``new``, ``close`` raises AlreadyExistsError instead if the object exists by then. On local disks, S3 and
        GCS this also holds for concurrent writers; other stores check, and raise, when the writer is opened.
        """
        raise self._unsupported('writing', key)

    async def write(self, key: str, data: bytes | bytearray | memoryview, new: bool = False) -> ObjectWriter:
        """Write a whole object, as by ``open_writer``, and return its writer, which is closed."""
        writer = await self.open_writer(key, new)
        try:
            await writer.write(data)
            await writer.close()
        except BaseException:
            await writer.abort()
            raise
        return writer

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        """Create a folder. Object stores have none: there, a folder is a common beginning of keys."""
        raise self._unsupported('creating folders', key)

    async def touch(self, key: str) -> None:
        """Set the time of the last change of a file to now. Object stores only do when a file is written."""
        if self.read_only:
            raise self._unsupported('changing files', key)

    async def rename(self, key: str, target: str) -> None:
        """Rename a file or folder; replace a file that has the new name."""
        why = ': copy it with Path.copy, and remove it with unlink or rmtree'
        raise UnsupportedError(f'{self.url(key)}: this store does not rename{why}', path=self.url(key))

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete files. A missing file is not an error."""
        raise self._unsupported('deleting', keys[0] if keys else '')

    async def delete_tree(self, key: str) -> None:
        """Delete a folder and everything in it."""
        raise self._unsupported('deleting', key)

    async def delete_empty(self, key: str) -> bool:
        """Delete a folder if it is empty. Return whether it was deleted."""
        return False

    async def uploads(self, key: str) -> AsyncGenerator[Upload, None]:
        """Yield the unfinished multipart uploads of an object and of all objects in a folder; by default none."""
        for upload in tuple[Upload, ...]():
            yield upload

    async def abort_upload(self, upload: Upload) -> None:
        """Abort a multipart upload. A missing one is not an error."""
        raise self._unsupported('uploading in parts', upload.key)

    async def copy_within(self, source: str, target: str) -> bool:
        """Copy a file within the store, without a download. Return False if the store cannot."""
        return False

    def _unsupported(self, operation: str, key: str) -> UnsupportedError:
        why = ': it is read-only, unlike a disk, s3://, gs:// and az://' if self.read_only else ''
        return UnsupportedError(f'{self.url(key)}: this store does not support {operation}{why}', path=self.url(key))


def check_object(store: Store, key: str) -> None:
    """Check that a key is that of an object in a bucket: a request with an empty key is for the bucket itself."""
    if not key:
        name = store.url(key)
        raise InvalidArgumentError(f'{name}: expected a path in the bucket, got that of the bucket', path=name)
