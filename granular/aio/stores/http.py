"""Files on a web server, read only: listing through fsspec, which reads the links of a page."""

import contextlib
import email.utils
import hashlib
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from granular.aio.stores.base import Entry, Stat
from granular.aio.stores.remote import Client, RemoteStore
from granular.aio.threads import offload
from granular.aio.tls import context_of
from granular.errors import AccessDeniedError, InvalidArgumentError, NotFoundError, StoreError
from granular.hiding import hidden


class HTTPStore(RemoteStore['HTTPClient']):
    """One host. Options: ``headers`` to send with each request, and ``tls_verify``."""

    is_bucket = False

    def _space(self) -> str:
        # A header may choose what the server gives; a digest, as it may be a credential too.
        headers = sorted((str(name).lower(), value) for name, value in (self.options.get('headers') or {}).items())
        return hashlib.sha256(repr(headers).encode()).hexdigest() if headers else ''

    def url(self, key: str) -> str:
        return hidden(self.address(key)) if '?' in key else self.address(key)

    async def make_client(self) -> 'HTTPClient':
        return HTTPClient(self)

    async def stat(self, key: str) -> Stat:
        client = await self.client()
        try:
            head = await client.head(key, self.url(key))
        except NotFoundError:
            head = None
        # A server's page for a folder, with or without the slash, is its listing.
        if head is None or head.get('content-type', '').startswith('text/html'):
            with contextlib.suppress(NotFoundError):
                if await self._links(key):
                    return Stat(0, is_dir=True)
        if head is None:
            raise NotFoundError(f'{self.url(key)}: no such object (status 404)')
        when = email.utils.parsedate_to_datetime(head['last-modified']).timestamp() if 'last-modified' in head else None
        if 'content-length' not in head:
            raise StoreError(f'{self.url(key)}: the server does not say its size')
        return Stat(int(head['content-length']), when, head.get('etag'))

    async def _links(self, key: str) -> list[str]:
        fs = await (await self.client()).filesystem()
        url = self.address(key).rstrip('/') + '/'
        name = hidden(url)
        try:
            links: list[str] = await fs._ls(url, detail=False)
        except FileNotFoundError as error:
            raise NotFoundError(f'{name}: no such folder') from (None if '?' in url else error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if getattr(error, 'status', None) in (401, 403):
                raise AccessDeniedError(f'{name}: access denied: the server lists no folders') from None
            raise StoreError(f'{name}: {hidden(str(error))}') from None
        return sorted(link for link in links if link.startswith(url) and link != url)

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        for link in await self._links(key):
            yield Entry(urllib.parse.unquote(link.removeprefix(self.root).strip('/')), link.endswith('/'))


class HTTPClient(Client):
    """A host under one event loop."""

    def __init__(self, store: HTTPStore) -> None:
        super().__init__()
        if unknown := sorted(set(store.options) - {'headers', 'tls_verify'}):
            raise InvalidArgumentError(f'{store.root}: unknown options {unknown}: there are headers and tls_verify')
        self._store = store
        self._fs: Any = None

    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        path, mark, query = key.partition('?')
        url = f'{self._store.root}/{urllib.parse.quote(path, safe="/~-_.")}{mark}{query}'
        return url, self._store.options.get('headers', {})

    async def filesystem(self) -> Any:
        """The fsspec filesystem that lists."""
        if self._fs is None:
            from fsspec.implementations.http import HTTPFileSystem

            verify = self._store.tls_verify
            trusted = {} if verify is True else {'ssl': await offload(context_of, verify)}
            self._fs = HTTPFileSystem(
                asynchronous=True, skip_instance_cache=True, use_listings_cache=False,
                client_kwargs={'headers': self._store.options.get('headers', {})}, **trusted,
            )  # fmt: skip
        return self._fs

    async def aclose(self) -> None:
        await super().aclose()
        if self._fs is not None and self._fs._session is not None:
            await self._fs._session.close()
