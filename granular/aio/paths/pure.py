"""The part of ``Path`` that needs no I/O: joining, parts, names, matching. The sync and the async ``Path`` share it."""

import fnmatch
import os
import pathlib
import re
import urllib.parse
from functools import lru_cache
from typing import Any, Protocol, Self

from granular.aio.stores import Store, check_text, local_key, resolve
from granular.config import IOConfig
from granular.errors import InvalidArgumentError, StoreError


class ForeignPath(Protocol):
    """A path object of another library, such as PyPI's ``elements``."""

    @property
    def name(self) -> str: ...
    @property
    def parent(self) -> Any: ...
    def exists(self) -> Any: ...
    def open(self, mode: str, /) -> Any: ...
    def glob(self, pattern: str, /) -> Any: ...
    def __truediv__(self, name: str, /) -> Any: ...


def check_str(value: Any, path: 'PurePath', purpose: str = '') -> str:
    """Return an argument of a method of a path that must be a text."""
    if not isinstance(value, str):
        raise InvalidArgumentError(f'{path}: expected str{purpose}, got {type(value).__name__}')
    return value


class PurePath:
    """A path on a disk, in a bucket or on a server.

    ``str`` and pickles hold the full address. ``repr``, formatting (``f'{path}'``) and all messages omit secrets: the
    query of a presigned ``http(s)`` address, and a user and password.

    Args:
      path: a path (``./data``, ``~/data``), an address (``s3://bucket/data``), an ``os.PathLike``, a ``granular``
        path, or a path object of another library that has ``/``, ``name``, ``parent``, ``exists``, ``open('rb')`` and
        ``glob``.
      config: the settings for reading and writing.
      fs: a file system of fsspec to which the address belongs. The server, the options and the credentials of an s3fs,
        gcsfs or adlfs are used by granular's own requests; all others are used through their methods.
      options: options of the store, such as ``endpoint_url``, ``anon``, or the ``key`` and ``secret`` of S3. A pickled
        path has all of them except credentials.
    """

    __slots__ = ('_key', '_store')

    _store: Store
    _key: str

    def __init__(self, path: Any, *, config: IOConfig | None = None, fs: Any = None, **options: Any) -> None:
        if isinstance(path, PurePath):
            if config is not None or options or fs is not None:
                path = str(path)
            else:
                self._store, self._key = path._store, path._key
                return
        self._store, self._key = resolve(path, config or IOConfig(), options, fs)

    @classmethod
    def of(cls, store: Store, key: str) -> Self:
        """Return the path of a key in a store."""
        path = cls.__new__(cls)
        path._store, path._key = store, key
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).of, (self._store, self._key)

    @property
    def store(self) -> Store:
        """The store that holds this path."""
        return self._store

    @property
    def key(self) -> str:
        """The path within its store, without the bucket or the host."""
        return self._key

    # --- names

    def __str__(self) -> str:
        return self._store.address(self._key)

    def __format__(self, spec: str) -> str:
        # Formatting is used for messages, which must not reveal a presigned query.
        return format(self._store.url(self._key), spec)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._store.url(self._key)!r})'

    def __fspath__(self) -> str:
        if not self._store.local:
            raise InvalidArgumentError(f'{self}: has no path on the local disk')
        return self._key

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PurePath):
            return NotImplemented
        return self._key == other._key and self._store == other._store

    def __hash__(self) -> int:
        return hash((self._store, self._key))

    def __lt__(self, other: 'PurePath') -> bool:
        return str(self) < str(other)

    def __truediv__(self, other: str | os.PathLike[str]) -> Self:
        tail = check_str(os.fspath(other) if isinstance(other, os.PathLike) else other, self, ' to join')
        if self._store.local:
            joined = os.path.join(self._key, tail) if self._key != '.' or tail.startswith('/') else tail
            return type(self).of(self._store, local_key(joined))
        if tail.startswith('/'):
            raise InvalidArgumentError(f'{self}: expected a relative path to join, got {tail!r}')
        check_text(tail)
        path, query = self._store.split_query(self._key)
        tail = self._store.keyed(tail.rstrip('/'))
        return type(self).of(self._store, (f'{path}/{tail}' if path and tail else path or tail) + query)

    def __rtruediv__(self, other: str) -> Self:
        return type(self)(other) / self if isinstance(other, str) else NotImplemented

    def joinpath(self, *others: str | os.PathLike[str]) -> Self:
        """Return this path joined with others, as by ``/``."""
        path = self
        for other in others:
            path = path / other
        return path

    def is_absolute(self) -> bool:
        """Return whether the path does not depend on the current folder, as an address never does."""
        return not self._store.local or self._key.startswith('/')

    def absolute(self) -> Self:
        """Return the absolute path; links and ``..`` stay."""
        return self if self.is_absolute() else type(self).of(self._store, local_key(f'{os.getcwd()}/{self._key}'))

    @property
    def parts(self) -> tuple[str, ...]:
        """The components: the root (``/``, ``s3://bucket``), then each name."""
        root = ('/' if self._key.startswith('/') else '') if self._store.local else self._store.root
        names = [] if self._key == '.' else filter(None, self._store.named(self._key).split('/'))
        return (root, *names) if root else tuple(names)

    @property
    def name(self) -> str:
        """The last component; for a bucket its name."""
        path = self._store.named(self._key)
        if path in ('', '.', '/'):
            return '' if self._store.local else self._store.root.rpartition('/')[2]
        return path.rpartition('/')[2]

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return self.name[: -len(self.suffix)] if self.suffix else self.name

    @property
    def suffix(self) -> str:
        """The end of the name from its last dot on, as in pathlib."""
        stem, dot, end = self.name.rpartition('.')
        return dot + end if stem.strip('.') and end else ''

    @property
    def suffixes(self) -> list[str]:
        """All suffixes of the name, as in pathlib: those of ``a.tar.gz`` are ``.tar`` and ``.gz``."""
        name = self.name
        return [] if name.endswith('.') else [f'.{end}' for end in name.lstrip('.').split('.')[1:]]

    @property
    def parent(self) -> Self:
        """The folder of this path; a root is its own parent."""
        path, query = self._store.split_query(self._key)
        head = path.rpartition('/')[0]
        if self._store.local:
            head = head or ('/' if path.startswith('/') else '.')
        return type(self).of(self._store, head + query)

    @property
    def parents(self) -> tuple[Self, ...]:
        """All folders that contain this path, the nearest first."""
        parents: list[Self] = []
        path = self
        while path.parent != path:
            path = path.parent
            parents.append(path)
        return tuple(parents)

    def with_name(self, name: str) -> Self:
        """Return this path with another name."""
        path, query = self._store.split_query(self._key)
        if check_str(name, self) in ('', '.') or '/' in name or not path.strip('./'):
            raise InvalidArgumentError(f'{self}: cannot be named {name!r}')
        head, slash, _ = path.rpartition('/')
        if self._store.local:
            return type(self).of(self._store, local_key(head + slash + name))
        check_text(name)
        return type(self).of(self._store, head + slash + self._store.keyed(name) + query)

    def with_stem(self, stem: str) -> Self:
        """Return this path with another name before the same suffix."""
        return self.with_name(check_str(stem, self) + self.suffix)

    def with_suffix(self, suffix: str) -> Self:
        """Return this path with another suffix; ``''`` removes it."""
        if check_str(suffix, self) and (not suffix.startswith('.') or suffix == '.' or '/' in suffix):
            raise InvalidArgumentError(f'{self}: {suffix!r} is not a suffix')
        return self.with_name(self.stem + suffix)

    def relative_to(self, other: 'PurePath | str') -> pathlib.PurePosixPath:
        """Return this path relative to another.

        Raises:
          InvalidArgumentError: if this path is not under the other.
        """
        base = other if isinstance(other, PurePath) else type(self)(other, config=self._store.config)
        path, above = (item._store.split_query(str(item))[0] for item in (self, base))
        if path == above:
            return pathlib.PurePosixPath()
        head = above.rstrip('/') + '/'
        if above == '.' and not self._key.startswith('/'):
            head = ''
        if not path.startswith(head):
            raise InvalidArgumentError(f'{self}: is not in {base}')
        return pathlib.PurePosixPath(self._store.named(path[len(head) :]))

    def is_relative_to(self, other: 'PurePath | str') -> bool:
        """Return whether this path equals another or is under it."""
        try:
            self.relative_to(other)
        except InvalidArgumentError:
            return False
        return True

    def match(self, pattern: str) -> bool:
        """Return whether the last components match those of a pattern, or all components for an absolute pattern."""
        patterns = [part for part in check_str(pattern, self).split('/') if part]
        names = [part for part in self._store.named(self._key).split('/') if part]
        if not patterns:
            raise InvalidArgumentError(f'{self}: expected a pattern, got {pattern!r}')
        if len(patterns) > len(names) or (pattern.startswith('/') and len(patterns) != len(names)):
            return False
        return all(glob_regex(p).fullmatch(name) for p, name in zip(patterns, names[-len(patterns) :], strict=True))

    def as_posix(self) -> str:
        """Return the address, with forward slashes."""
        return str(self)

    def as_uri(self) -> str:
        """Return the address that leads to this path in any program: ``Path(path.as_uri())`` is the same path.

        Local paths and those on the web are percent-encoded. No program decodes addresses of object stores.
        """
        if self._store.local:
            return 'file://' + urllib.parse.quote(os.fsencode(os.path.abspath(self._key)))
        return str(self)


def relative_name(folder: PurePath, key: str) -> str:
    """Return the names of a key in a folder, relative to it."""
    path = folder.store.split_query(folder.key)[0]
    if path in ('', '.'):
        return folder.store.named(key)
    head = path.rstrip('/') + '/'
    if not key.startswith(head):
        raise StoreError(f'{folder}: expected entries of this folder in its listing, got {key!r}', path=f'{folder}')
    return folder.store.named(key[len(head) :])


@lru_cache(maxsize=256)
def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for one component of a glob pattern: ``*``, ``?``, ``[ab]``, ``[!ab]``."""
    parts, i = [''], 0  # between the stars
    while i < len(pattern):
        char = pattern[i]
        i += 1
        if char == '*':
            parts.append('')
        elif char == '?':
            parts[-1] += '[^/]'
        elif char == '[' and (end := pattern.find(']', i + 1 + (pattern[i : i + 1] == '!'))) > 0:
            parts[-1] += '(?!/)' + fnmatch.translate(pattern[i - 1 : end + 1])[len('(?s:') : -len(r')\Z')]
            i = end + 1
        else:
            parts[-1] += re.escape(char)
    if len(parts) > 1:  # a part is taken where it comes first, and not tried elsewhere, which may take hours
        parts[1:] = [*(f'(?>[^/]*?{part})' for part in parts[1:-1]), f'[^/]*{parts[-1]}']
    return re.compile(''.join(parts), re.DOTALL)


AnyPath = PurePath | str | os.PathLike[str] | ForeignPath
"""A path, in any form that ``Path`` takes."""
