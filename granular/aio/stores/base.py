"""What a store can do. One class per kind of store; one instance per bucket (or host, or disk) and set of options."""

import abc
import dataclasses
import functools
import inspect
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from granular.aio.loops import gather, need_loop
from granular.aio.reply import Reply
from granular.config import IOConfig, Merge, MiB, store_defaults
from granular.errors import InvalidArgumentError, UnsupportedError
from granular.hiding import protect, without_user

_WINDOW: Final = 16 * MiB  # read at a time beside the memory that it goes into
_SECRET: Final = re.compile(r'key|secret|token|pass|cred|auth|sas|sign|conn|header|user', re.IGNORECASE)
# Headers that are no secret, although all of the option that has them is.
_PUBLIC: Final = frozenset(('accept', 'accept-encoding', 'accept-language', 'content-type', 'range', 'user-agent'))


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One name in a listing.

    Attributes:
      key: the full key in the store, without a trailing slash.
      is_dir: whether it is a folder.
      size: bytes of a file; 0 for a folder.
      modified: seconds since the epoch; None where the listing gives none.
    """

    key: str
    is_dir: bool
    size: int = 0
    modified: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Upload:
    """An upload in parts that was not finished.

    Attributes:
      key: the object that it was to become.
      id: the store's name for it.
      size: bytes of its parts.
      modified: when something was last done for it, in seconds since the epoch.
    """

    key: str
    id: str
    size: int
    modified: float


@dataclasses.dataclass(frozen=True, slots=True)
class Stat:
    """What is known of a file or folder.

    Attributes:
      size: bytes of a file; 0 for a folder.
      modified: seconds since the epoch; None where the store gives none.
      version: ETag or generation; None where the store gives none.
      is_dir: whether it is a folder.
    """

    size: int
    modified: float | None = None
    version: str | None = None
    is_dir: bool = False

    @property
    def st_size(self) -> int:
        """The size, by pathlib's name."""
        return self.size

    @property
    def st_mtime(self) -> float | None:
        """The time of the last change, by pathlib's name."""
        return self.modified


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """What a store says of the content of a file.

    Attributes:
      size: its bytes.
      version: as that of ``Stat``.
      digests: its checksums by kind (:mod:`granular.aio.digests`), as far as the store has any.
    """

    size: int
    version: str | None
    digests: Mapping[str, str]


class Request(NamedTuple):
    """Byte ranges of an object, which must be of the version given, if one is."""

    key: str
    starts: list[int]
    stops: list[int]
    version: str | None = None


class ObjectWriter(abc.ABC):
    """An object that is being written: it appears whole, at ``close``, or not at all."""

    @abc.abstractmethod
    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Publish the object."""

    @abc.abstractmethod
    async def abort(self) -> None:
        """Leave nothing behind."""


class Store(abc.ABC):
    """A place that holds files or objects. Pickles to its root and options, without credentials.

    Args:
      root: what the addresses of its files begin with, such as ``s3://bucket``.
      config: the knobs.
      options: what the user passed on, such as ``endpoint_url``.
    """

    local = False
    """Whether reads are answered without waiting, on the thread that asks."""
    has_folders = True
    """Whether a folder is there before there is something in it."""
    conditional = False
    """Whether of several writers that make a new file at once only one succeeds."""
    versions_repeat = True
    """Whether a file that is written again with the same bytes may have the same version."""

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        self.root = root
        self.config = config
        self.options = dict(options)
        protect(_secrets_in(self.options))
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

    @functools.cached_property
    def fingerprint(self) -> str:
        """The identity of this store in caches: its root, server and options, without credentials."""
        options = {name: value for name, value in without_secrets(self.options).items() if name != 'endpoint_url'}
        return repr((self.root, self._space(), sorted(options.items())))

    def _space(self) -> str:
        """The name of the space in which the root and its keys are unique."""
        return ''

    def address(self, key: str) -> str:
        """The address of a key, as a user would write it."""
        return f'{self.root}/{key}' if key else self.root

    def url(self, key: str) -> str:
        """The address of a key as it is shown: without what lets in whoever reads it."""
        return self.address(key)

    async def ready(self) -> None:
        """Be where this store's calls can wait: under a loop, unless they never do."""
        if not self.local:
            await need_loop()

    async def now(self, key: str) -> float:
        """The time of the clock that the store's times of change are of, in seconds since the epoch.

        Args:
          key: a file or folder, as file systems of one machine may have clocks of their own.
        """
        return time.time()

    # --- reading

    @abc.abstractmethod
    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        """One byte range; all of it by default. A negative start means that many bytes of the end.

        Raises:
          OutOfRangeError: if the object ends before ``stop``.
          ObjectChangedError: if it is not of the version given.
        """

    async def read_into(self, key: str, start: int, stop: int, version: str | None, target: memoryview) -> None:
        """One byte range, however large, into memory of exactly its size."""
        for at in range(start, stop, _WINDOW):
            end = min(at + _WINDOW, stop)
            target[at - start : end - start] = (await self.read(key, at, end, version)).data

    async def read_many(self, requests: Sequence[Request]) -> list[bytes]:
        """The byte ranges of all requests, one request after the other, concurrently.

        None is too large: the store divides it.
        """
        await self.ready()
        replies = await gather(
            [
                self.read(key, start, stop, version)
                for key, starts, stops, version in requests
                for start, stop in zip(starts, stops, strict=True)
            ]
        )
        return [reply.data for reply in replies]

    async def read_fresh(self, requests: Sequence[Request]) -> list[bytes]:
        """As ``read_many``, from the store itself, in place of what a cache has of these bytes."""
        return await self.read_many(requests)

    async def check_version(self, key: str, version: str) -> None:
        """That a file is of a version now.

        Raises:
          ObjectChangedError: if it is of another version.
          NotFoundError: if it is not there.
        """
        await self.read(key, 0, 1, version)

    @abc.abstractmethod
    async def stat(self, key: str) -> Stat:
        """What is known of a file or folder.

        Raises:
          NotFoundError: if there is neither.
        """

    async def kept(self, key: str) -> Kept:
        """What the store says of the content of a file.

        Raises:
          NotFoundError: if there is none.
        """
        found = await self.stat(key)
        return Kept(found.size, None, {})

    def digest_kind(self, size: int) -> str:
        """The checksum that ``kept`` will have of a file of that size once it is written here; empty if none."""
        return ''

    @abc.abstractmethod
    def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        """The entries of a folder, page by page.

        Args:
          key: the folder.
          prefix: what the names begin with; a store that cannot choose by it gives all.

        Raises:
          NotFoundError: if there is no such folder.
        """

    async def scan_tree(self, key: str) -> AsyncIterator[Entry]:
        """All files and folders below a folder, page by page."""
        folders = [key]
        while folders:
            async for entry in self.scan(folders.pop()):
                yield entry
                if entry.is_dir:
                    folders.append(entry.key)

    # --- writing

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        """Begin to write an object, which replaces what is there at ``close``.

        With ``new`` it does not: if there is something by then, closing is an AlreadyExistsError, on local disks, S3
        and GCS whoever else may be writing.
        """
        raise self._unsupported('writing', key)

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        """Make a folder. Object stores have none: there, a folder is what keys begin with."""
        raise self._unsupported('making a folder', key)

    async def delete(self, keys: Sequence[str]) -> None:
        """Delete files. One that is not there is no error."""
        raise self._unsupported('deleting', keys[0] if keys else '')

    async def delete_tree(self, key: str) -> None:
        """Delete a folder and all below it."""
        raise self._unsupported('deleting', key)

    async def delete_empty(self, key: str) -> bool:
        """Delete a folder in which there is nothing; whether it did."""
        return False

    async def uploads(self, key: str) -> AsyncIterator[Upload]:
        """The uploads in parts of objects below a key, or of that key, that were not finished; none if it has none."""
        none: tuple[Upload, ...] = ()
        for upload in none:
            yield upload

    async def abort_upload(self, upload: Upload) -> None:
        """Drop an upload in parts. One that is not there is no error."""
        raise self._unsupported('uploading in parts', upload.key)

    async def copy_within(self, source: str, target: str) -> bool:
        """Copy a file without moving its bytes through here; False if this store cannot."""
        return False

    def _unsupported(self, what: str, key: str) -> UnsupportedError:
        return UnsupportedError(f'{self.url(key)}: {what} is not possible on {type(self).__name__}')


class Folders:
    """The folders that sorted keys lie in, each when the first key in it comes: flat listings name none.

    Args:
      base: the folder that was listed.
    """

    def __init__(self, base: str) -> None:
        self._base = len(base) + 1 if base else 0
        self._last = ''

    def of(self, key: str) -> list[Entry]:
        """The folders above a key that no key before lay in."""
        ends = [i for i, char in enumerate(key) if char == '/' and i >= self._base]
        new = [Entry(key[:i], True) for i in ends if not self._last.startswith(key[: i + 1])]
        self._last = key
        return new


def check_options(root: str, options: Mapping[str, Any], filesystem: Any, more: Sequence[str]) -> None:
    """That the library behind a store knows its options, which reads alone would not notice.

    Raises:
      InvalidArgumentError: naming those it does not know.
    """
    known = {*inspect.signature(filesystem.__init__).parameters, *more} - {'self', 'kwargs', 'asynchronous', 'loop'}
    if unknown := sorted(set(options) - known):
        raise InvalidArgumentError(f'{root}: unknown options {unknown}: there are {sorted(known)}')


def _secrets_in(options: Mapping[str, Any], inside: bool = False) -> Iterator[str]:
    """The texts among the options that may be credentials, by the name of the option, however deep."""
    for name, value in options.items():
        if str(name).lower() in _PUBLIC:
            continue
        secret = inside or _SECRET.search(str(name)) is not None
        if isinstance(value, Mapping):
            yield from _secrets_in(value, secret)
        elif secret and isinstance(value, str):
            yield value


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without what may be a credential, by name, however deep."""
    clean: dict[str, Any] = {}
    for name, value in options.items():
        if _SECRET.search(name):
            continue
        if isinstance(value, Mapping):
            value = without_secrets(value)
        clean[name] = without_user(value) if isinstance(value, str) else value
    return clean
