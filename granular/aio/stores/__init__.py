"""Stores, one module or package per kind, and the resolution of addresses to stores."""

import os
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Final

from granular._support.plugins import plugin
from granular._support.redact import hidden, is_quoted
from granular.aio.stores.base import ContentInfo, Entry, ObjectWriter, Request, Stat, Store, Upload
from granular.config import IOConfig
from granular.errors import InvalidArgumentError

__all__ = ['ContentInfo', 'Entry', 'ObjectWriter', 'Request', 'Stat', 'Store', 'Upload', 'resolve', 'split_bucket']

_URL: Final = re.compile(r'([A-Za-z][A-Za-z0-9+.-]+)://(.*)', re.DOTALL)
# Without a slash, or of a store without the colon: both would be local paths.
_ALMOST_URL: Final = re.compile(
    r'\s*(?:([A-Za-z][A-Za-z0-9+.-]+):|(s3a?|gs|gcs|https?|az|abfss?|hf)/)/.*', re.DOTALL | re.IGNORECASE
)
# Access points, also of Outposts and of Object Lambda, as bucket: their parts are separated by colons or slashes.
_ARN: Final = re.compile(r'(arn:[^/]*:(?:outpost[:/][^:/]+[:/])?accesspoint[:/][^:/]+)(?:/(.*))?', re.DOTALL)
_PATH_METHODS: Final = ('name', 'parent', 'exists', 'open', 'glob', '__truediv__')


def resolve(path: Any, config: IOConfig, options: Mapping[str, Any], fs: Any = None) -> tuple[Store, str]:
    """Return the store and the key of an address, without sending a request.

    Args:
      path: a string, an ``os.PathLike``, or a path object of another library.
      config: the settings.
      options: passed to the store; ignored for path objects of another library.
      fs: a file system of fsspec to use, in place of options.

    Raises:
      UnknownSchemeError: if there is no store for the scheme.
      MissingExtraError: if the package for it is not installed.
      InvalidArgumentError: for any other argument that cannot be used, such as an address with credentials in it.
    """
    if not isinstance(config, IOConfig):
        raise InvalidArgumentError(f'config: expected a granular.IOConfig, got {type(config).__name__}')
    if fs is not None:
        from granular.aio.stores.filesystems import adopt

        if options:
            raise InvalidArgumentError(f'expected fs= or options of the store, got fs= and {sorted(options)}')
        path, options, fs = adopt(fs, path)
    if isinstance(path, os.PathLike):
        path = os.fsdecode(path)
    if not isinstance(path, str):
        return _resolve_foreign(path, config)
    match = _URL.fullmatch(path)
    if match is None or match[1].lower() == 'file':
        from granular.aio.stores.local.store import LocalStore

        local = path if match is None else os.fsdecode(urllib.parse.unquote_to_bytes(match[2]))
        if match is None and (almost := _ALMOST_URL.fullmatch(path)):
            raise InvalidArgumentError(
                f'{hidden(path)!r}: expected an address that begins with {almost[1] or almost[2]}:// (pathlib.Path '
                f'drops a slash): pass it as a string or a granular.Path; a local path of this name begins with ./'
            )
        if options:
            raise InvalidArgumentError(f'{path}: expected no storage options for a local path, got {sorted(options)}')
        return LocalStore('', config, {}), local_key(_expand_user(local))
    check_text(path)
    scheme, rest = match[1].lower(), match[2]
    if not is_quoted(path):
        raise InvalidArgumentError(
            f'{scheme}://...: expected a quoted password (%2F for a slash), or credentials as options'
        )
    root, key = split_bucket(rest)
    if scheme in ('s3', 's3a') and rest.startswith('arn:') and _ARN.fullmatch(rest) is None:
        raise InvalidArgumentError(f'{path}: expected s3://bucket, or the ARN of an access point')
    if scheme.startswith('http'):
        from granular.aio.http.addresses import split

        root, key = split(rest)
    if scheme in ('s3', 's3a', 'gs', 'gcs', 'http', 'https'):
        if not root:
            raise InvalidArgumentError(f'{path}: expected a {"host" if scheme.startswith("http") else "bucket"}')
        if '@' in root:
            raise InvalidArgumentError(f'{scheme}://...: pass credentials as options, not in the address')
        key = key if scheme.startswith('http') else key.rstrip('/')
    match scheme if fs is None else None:
        case 's3' | 's3a':
            from granular.aio.stores.s3.store import S3Store

            return S3Store(f's3://{root}', config, options), key
        case 'gs' | 'gcs':
            from granular.aio.stores.gcs.store import GCSStore

            return GCSStore(f'gs://{root}', config, options), key
        case 'http' | 'https':
            from granular.aio.stores.http import HTTPStore

            return HTTPStore(f'{scheme}://{root}', config, options), key
        case 'az' | 'abfs' | 'abfss':
            from granular.aio.stores.azure.store import AzureStore

            return AzureStore(f'{scheme}://{root}', config, options), key.rstrip('/')
        case 'hf' if root != 'buckets':
            from granular.aio.stores.hub import HubStore, split

            repository, key = split(path)
            return HubStore(repository, config, options), key
        case _ if fs is None and (made := plugin('granular.stores', scheme)) is not None:
            return made(f'{scheme}://{root}', config, options), key.rstrip('/')
        case _:
            from granular.aio.stores.fsspec import FsspecStore, fsspec_root

            base = fsspec_root(path, fs)
            return FsspecStore(base, config, options, fs), f'{scheme}://{rest}'.removeprefix(base).strip('/')


def split_bucket(rest: str) -> tuple[str, str]:
    """Split what follows the scheme of an address into the bucket, or the ARN of an access point, and the key."""
    if (arn := _ARN.fullmatch(rest)) is not None:
        return arn[1], arn[2] or ''
    bucket, _, key = rest.partition('/')
    return bucket, key


def check_text(name: str, encode: Callable[[str], bytes] = str.encode) -> None:
    """Check that a name can be encoded: that of a local file may have surrogates, which no other store takes."""
    if not name.isascii():
        try:
            encode(name)
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f'{hidden(name)!r:.200}: is not valid Unicode: {error.reason}') from None


def _resolve_foreign(path: Any, config: IOConfig) -> tuple[Store, str]:
    if not all(hasattr(path, name) for name in _PATH_METHODS):
        raise InvalidArgumentError(f'expected an address or a path, got {type(path).__name__}')
    from granular.aio.stores.foreign import ForeignStore

    # The parent folder becomes the store, so that the path itself has a key and its siblings are reachable.
    folder = path.parent if path.name and str(path.parent) != str(path) else path
    return ForeignStore(str(folder), config, {'path': folder}), '' if folder is path else str(path.name)


def _expand_user(path: str) -> str:
    """Expand a leading ``~`` or ``~user`` of a local path, as shells do."""
    if not path.startswith('~'):
        return path
    try:
        expanded = os.path.expanduser(path)
    except ValueError:  # a null or a surrogate, which no name of a user has
        expanded = path
    if expanded == path:
        name = path.partition('/')[0]
        raise InvalidArgumentError(f'{path}: no home folder {name}: for a name that begins with ~, write ./{path}')
    return expanded


def local_key(path: str) -> str:
    """Drop doubled slashes and single dots from a local path, as pathlib does; keep '..', which may follow a link."""
    if '\0' in path:
        raise InvalidArgumentError(f'{path!r:.200}: expected a path without null characters')
    check_text(path, os.fsencode)
    parts = [part for part in path.split('/') if part not in ('', '.')]
    return ('/' if path.startswith('/') else '') + '/'.join(parts) or '.'
