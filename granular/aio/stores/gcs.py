"""Google Cloud Storage: reads with the token of gcsfs's credentials, all else through gcsfs."""

import asyncio
import base64
import contextlib
import datetime
import ipaddress
import json
import os
import secrets
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp

from granular.aio.loops import gather, need_loop
from granular.aio.stores import translating
from granular.aio.stores.base import Entry, Folders, Kept, ObjectWriter, Stat, check_options
from granular.aio.stores.parts import PartWriter
from granular.aio.stores.remote import Client, RemoteStore
from granular.aio.threads import offload
from granular.aio.tls import context_of
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    GranularError,
    InvalidArgumentError,
    MissingExtraError,
    NotFoundError,
    StoreError,
)
from granular.hiding import hidden

_BATCH = 100  # keys in one delete request
_RENEW = 300.0  # seconds before a token's end
_BINARY = {'Content-Type': 'application/octet-stream'}


class GCSStore(RemoteStore['GCSClient']):
    """One bucket.

    Options: ``token``, ``project``, ``anon``, ``endpoint_url``, ``requester_pays``, ``tls_verify``, and what else
    :class:`gcsfs.GCSFileSystem` takes. Where they are silent, STORAGE_EMULATOR_HOST and gcsfs's chain speak.
    """

    version_header = 'x-goog-generation'
    has_folders = False
    versions_repeat = False
    variables = ('STORAGE_EMULATOR_HOST', 'GOOGLE_APPLICATION_CREDENTIALS', 'GOOGLE_CLOUD_PROJECT')

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.root.removeprefix('gs://')

    async def make_client(self) -> 'GCSClient':
        # Importing gcsfs and finding credentials takes a while: not on the loop.
        client = await offload(GCSClient, self, asyncio.get_running_loop())
        if self.tls_verify is not True:
            connector = aiohttp.TCPConnector(ssl=await offload(context_of, self.tls_verify))
            client.fs._session = aiohttp.ClientSession(connector=connector)
        return client

    async def stat(self, key: str) -> Stat:
        client = await self.client()
        with translated(self.url(key)):
            if key:
                with contextlib.suppress(FileNotFoundError):
                    item = await client.call('GET', 'b/{}/o/{}', self.bucket, key, json_out=True)
                    return Stat(int(item['size']), _when(item), item['generation'])
            prefix = f'{key}/' if key else None
            page = await client.call('GET', 'b/{}/o', self.bucket, prefix=prefix, maxResults=1, json_out=True)
        if not key or page.get('items') or page.get('prefixes'):
            return Stat(0, is_dir=True)
        raise NotFoundError(f'{self.url(key)}: no such object or folder')

    async def kept(self, key: str) -> Kept:
        client = await self.client()
        with translated(self.url(key)):
            item = await client.call('GET', 'b/{}/o/{}', self.bucket, key, json_out=True)
        names = {'crc32c': 'crc32c', 'md5': 'md5Hash'}
        digests = {kind: base64.b64decode(item[name]).hex() for kind, name in names.items() if name in item}
        return Kept(int(item['size']), item['generation'], digests)

    def digest_kind(self, size: int) -> str:
        return 'crc32c'

    async def _pages(self, key: str, prefix: str, **options: Any) -> AsyncIterator[dict[str, Any]]:
        client = await self.client()
        start = f'{key}/{prefix}' if key else prefix
        found, token = not key or bool(prefix), None
        while True:
            await need_loop()  # a page may be asked for from another thread than the one before
            with translated(self.url(key)):
                page: dict[str, Any] = await client.call(
                    'GET', 'b/{}/o', self.bucket, prefix=start or None, maxResults=1000, pageToken=token,
                    json_out=True, **options,
                )  # fmt: skip
            if not found and not page.get('prefixes') and not page.get('items'):
                raise NotFoundError(f'{self.url(key)}: no such folder')
            found = True
            yield page
            token = page.get('nextPageToken')
            if not token:
                return

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        async for page in self._pages(key, prefix, delimiter='/'):
            for folder in page.get('prefixes', ()):
                yield Entry(folder[:-1], True)
            for item in page.get('items', ()):
                # A key that ends in a slash marks a folder, and the folder itself is no entry of it.
                if not item['name'].endswith('/'):
                    yield Entry(item['name'], False, int(item['size']), _when(item))

    async def scan_tree(self, key: str) -> AsyncIterator[Entry]:
        folders = Folders(key)
        async for page in self._pages(key, ''):
            for item in page.get('items', ()):
                for folder in folders.of(item['name']):
                    yield folder
                if not item['name'].endswith('/'):
                    yield Entry(item['name'], False, int(item['size']), _when(item))

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        return GCSWriter(self, (await self.client()).fs, key, new)

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        client = await self.client()
        if not key:
            with translated(self.root):
                try:
                    await client.call('GET', 'b/{}', self.bucket, json_out=True)
                except FileNotFoundError:
                    body = {'name': self.bucket}
                    await client.call('POST', 'b/', project=client.fs.project, json=body, json_out=True)
                    return
            if not exist_ok:
                raise AlreadyExistsError(f'{self.root}: exists already')
        elif not exist_ok:
            with contextlib.suppress(NotFoundError):
                await self.stat(key)
                raise AlreadyExistsError(f'{self.url(key)}: exists already')

    async def delete(self, keys: Sequence[str]) -> None:
        client = await self.client()

        async def one(key: str) -> None:
            with translated(self.url(key)), contextlib.suppress(FileNotFoundError):
                await client.call('DELETE', 'b/{}/o/{}', self.bucket, key)

        for i in range(0, len(keys), _BATCH):
            await gather([one(key) for key in keys[i : i + _BATCH]])

    async def delete_tree(self, key: str) -> None:
        async for page in self._pages(key, ''):
            await self.delete([item['name'] for item in page.get('items', ())])

    async def copy_within(self, source: str, target: str) -> bool:
        client = await self.client()
        with translated(self.url(source)):
            await client.fs._cp_file(f'{self.bucket}/{source}', f'{self.bucket}/{target}')
        return True


class GCSClient(Client):
    """A bucket under one event loop. Made on a worker thread, as finding credentials blocks."""

    def __init__(self, store: GCSStore, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        try:
            # Not gcsfs.GCSFileSystem, which asks a gRPC endpoint for the kind of each bucket: emulators have none.
            from gcsfs.core import GCSFileSystem
        except ImportError as error:
            raise MissingExtraError("gs:// needs gcsfs: pip install 'granular[gcs]'") from error
        check_options(store.root, store.options, GCSFileSystem, ('anon', 'tls_verify'))
        self._store = store
        options = {name: value for name, value in store.options.items() if name != 'tls_verify'}
        if options.pop('anon', False):
            options['token'] = 'anon'
        emulated = options.get('endpoint_url') or os.environ.get('STORAGE_EMULATOR_HOST') not in (None, '', 'default')
        if emulated and not os.environ.get('GOOGLE_APPLICATION_CREDENTIALS'):
            options.setdefault('token', 'anon')
        with translated(store.root):
            self.fs = GCSFileSystem(
                **options, asynchronous=True, loop=loop, skip_instance_cache=True, use_listings_cache=False
            )
        self._location = str(self.fs._location).rstrip('/')
        parts = urllib.parse.urlsplit(self._location)
        if parts.scheme not in ('http', 'https') or parts.username or parts.password:
            raise InvalidArgumentError(f'{store.root}: endpoint_url must be http(s)://host, without credentials')
        if parts.scheme == 'http' and self.fs.credentials.credentials is not None and not _loopback(parts.hostname):
            raise InvalidArgumentError(
                f'{store.root}: a token is not sent over plain http to {parts.hostname}: use https'
            )

    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        bucket, name = self._store.bucket, urllib.parse.quote(key, safe='')
        url = f'{self._location}/download/storage/v1/b/{bucket}/o/{name}?alt=media'
        headers = await self._headers()
        if payer := self._store.options.get('requester_pays'):
            url += '&userProject=' + urllib.parse.quote(payer if isinstance(payer, str) else self.fs.project)
        return url, headers

    async def _headers(self) -> dict[str, str]:
        # What is stored compressed is given as it is stored: ranges of it would mean nothing otherwise.
        headers = {'Accept-Encoding': 'gzip'}
        token = self.fs.credentials.credentials
        if token is not None:
            with translated(self._store.root):
                left = token.expiry and token.expiry.replace(tzinfo=datetime.UTC) - datetime.datetime.now(datetime.UTC)
                if not token.valid or (left and left.total_seconds() < _RENEW):
                    await offload(self.fs.credentials.maybe_refresh, _RENEW)
                token.apply(headers)
        return headers

    async def find_credentials(self) -> bool:
        if self.fs.credentials.credentials is None:
            return False
        with translated(self._store.root):
            await offload(self.fs.credentials.maybe_refresh, float('inf'))
        return True

    async def call(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the JSON API, through gcsfs; its token is renewed off the loop first."""
        await self._headers()
        return await self.fs._call(*args, **kwargs)

    async def aclose(self) -> None:
        await super().aclose()
        if self.fs._session is not None:
            await self.fs._session.close()


class GCSWriter(PartWriter):
    """A resumable upload, whose parts follow one another, or a single put if one part is enough."""

    def __init__(self, store: GCSStore, fs: Any, key: str, new: bool) -> None:
        super().__init__(store.config.part_size, parallel=1)
        self._new = new
        self._name, self._fs, self._bucket, self._key = store.url(key), fs, store.bucket, key
        self._location = ''
        self._offset = 0

    async def begin(self) -> None:
        from gcsfs.core import initiate_upload

        with translated(self._name):
            mode = 'create' if self._new else 'overwrite'
            self._location = await initiate_upload(self._fs, self._bucket, self._key, mode=mode)

    async def send(self, number: int, data: bytes, last: bool) -> None:
        if last and self._new:
            await self._check_absent()
        start, self._offset = self._offset, self._offset + len(data)
        size = str(self._offset) if last else '*'
        while start < self._offset:
            body = data[len(data) - (self._offset - start) :]
            headers = {'Content-Range': f'bytes {start}-{self._offset - 1}/{size}', **_BINARY}
            reply = await self._post(self._location, body, headers)
            if last and 'Range' not in reply:
                return
            # The store says how far it got: the last byte it has.
            start = int(reply.get('Range', f'bytes=0-{start - 1}').rpartition('-')[2]) + 1

    async def _check_absent(self) -> None:
        """The store compares when the upload ends; a look before spares the last part."""
        with translated(self._name):
            try:
                await self._fs._call('GET', 'b/{}/o/{}', self._bucket, self._key, json_out=True)
            except FileNotFoundError:
                return
        raise AlreadyExistsError(f'{self._name}: another writer has published it meanwhile')

    async def _post(self, url: str, data: bytes, headers: dict[str, str], **params: str) -> Mapping[str, str]:
        from gcsfs.core import UnclosableBytesIO

        with translated(self._name):
            reply: Mapping[str, str]
            reply, _ = await self._fs._call('POST', url, headers=headers, data=UnclosableBytesIO(data), **params)
        return reply

    async def finish(self) -> None:
        """The last part has finished the upload."""

    async def discard(self) -> None:
        with translated(self._name), contextlib.suppress(FileNotFoundError):
            # GCS answers 499 to a cancelled upload; what is not cancelled expires after a week, and never appears.
            async with self._fs.session.delete(self._location):
                pass

    async def put(self, data: bytes) -> None:
        url = f'{self._fs._location}/upload/storage/v1/b/{self._bucket}/o'
        if not self._new:
            await self._post(url, data, dict(_BINARY), uploadType='media', name=self._key)
            return
        # The kind of upload for which emulators know conditions as well.
        edge = secrets.token_hex(16)
        name = json.dumps({'name': self._key})
        head = f'--{edge}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{name}\r\n--{edge}\r\n'
        head += ''.join(f'{key}: {value}\r\n' for key, value in _BINARY.items()) + '\r\n'
        body = head.encode() + data + f'\r\n--{edge}--\r\n'.encode()
        kind = {'Content-Type': f'multipart/related; boundary={edge}'}
        await self._post(url, body, kind, uploadType='multipart', ifGenerationMatch='0')


def _when(item: Mapping[str, Any]) -> float | None:
    """When an object was written."""
    return datetime.datetime.fromisoformat(item['updated']).timestamp() if 'updated' in item else None


def _loopback(host: str | None) -> bool:
    if host is None or host == 'localhost':
        return host is not None
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def translated(name: str) -> contextlib.AbstractContextManager[None]:
    """Turn the errors of gcsfs and of Google's libraries into ours."""
    return translating.translated(name, _ours)


def _ours(name: str, error: Exception) -> GranularError | None:
    from gcsfs.retry import HttpError
    from google.auth.exceptions import GoogleAuthError, TransportError

    if isinstance(error, TransportError):
        return StoreError(f'{name}: no answer from where its tokens come from: {error}')
    if isinstance(error, GoogleAuthError):
        return AccessDeniedError(f'{name}: {hidden(str(error))}')
    if isinstance(error, HttpError | OSError) and (getattr(error, 'code', 0) in (401, 403) or 'orbidden' in str(error)):
        return AccessDeniedError(
            f'{name}: access denied ({hidden(str(error))}): check the credentials and their rights'
        )
    if isinstance(error, HttpError | OSError) and (getattr(error, 'code', 0) == 412 or 'conditionNotMet' in str(error)):
        return AlreadyExistsError(f'{name}: another writer has published it meanwhile')
    if isinstance(error, HttpError | aiohttp.ClientError):
        return StoreError(f'{name}: {type(error).__name__}: {hidden(str(error))}')
    return None
