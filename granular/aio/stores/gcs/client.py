"""Requests to the JSON API of Google Cloud Storage, authorised by google-auth, and checks of the answers."""

import asyncio
import functools
import json
import os
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, TypeVar

from granular.aio.http.messages import Target
from granular.aio.http.proxies import is_loopback
from granular.aio.http.refusals import no_such_bucket
from granular.aio.http.transport import Answer, Outgoing
from granular.aio.runtime.threads import offload
from granular.aio.stores import endpoints
from granular.aio.stores.base import check_object
from granular.aio.stores.gcs import replies as gcsreplies
from granular.aio.stores.gcs.auth import Login, log_in
from granular.aio.stores.gcs.replies import Resource, Rewrite
from granular.aio.stores.listing import Listing, Page
from granular.aio.stores.remote import Client, RemoteStore
from granular.errors import BadReplyError, InvalidArgumentError, NotFoundError, ObjectChangedError, StoreError

_OBJECT_FIELDS: Final = 'kind,name,size,generation,updated,crc32c,md5Hash,metadata'
_PAGE_FIELDS: Final = 'kind,nextPageToken,prefixes,items(kind,name,size,generation,updated)'
T = TypeVar('T')


class GCSClient(Client):
    """Client of a bucket under one event loop. Create it on a worker thread: finding credentials blocks."""

    def __init__(self, store: RemoteStore[Any]) -> None:
        super().__init__(store)
        self._token_lock = asyncio.Lock()
        if 'tls_verify' not in store.options:
            # As the requests of google-auth to token servers.
            bundle = os.environ.get('REQUESTS_CA_BUNDLE') or os.environ.get('CURL_CA_BUNDLE')
            self.tls_verify = bundle or self.tls_verify
        self.base: str = endpoints.check(store.root, store.endpoint)
        timeout = store.config.connect_timeout + store.config.first_byte_timeout
        self._login: Login = log_in(store.root, store.options, is_emulator(store.endpoint), timeout)
        parts = urllib.parse.urlsplit(self.base)
        self.origin = f'{parts.scheme}://{parts.netloc}'
        if parts.scheme == 'http' and self._login.credentials is not None and not is_loopback(parts.hostname or ''):
            raise InvalidArgumentError(
                f'{store.root}: a token is not sent over plain http to {parts.hostname}: use https'
            )
        payer = store.options.get('requester_pays')
        self._payer = payer if isinstance(payer, str) else self._login.project if payer else ''
        if payer and not self._payer:
            raise InvalidArgumentError(f'{store.root}: requester_pays=True needs a project to bill: pass project=')

    # --- reads

    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        check_object(self.store, key)
        # Accept gzip, so that the store does not decompress a gzip object: byte ranges refer to the stored bytes.
        headers = {'Accept-Encoding': 'gzip', **await self._headers()}
        return self._url(f'/download/storage/v1/b/{_quote(self.store.bucket)}/o/{_quote(key)}', alt='media'), headers

    async def find_credentials(self) -> bool:
        if self._login.credentials is None:
            return False
        async with self._token_lock:
            await offload(self._login.renew)
        return True

    async def _headers(self) -> dict[str, str]:
        if self._login.stale:
            async with self._token_lock:
                if self._login.stale:
                    await offload(self._login.renew_stale)
        return self._login.headers()

    def _url(self, path: str, **query: str) -> str:
        if self._payer:
            query['userProject'] = self._payer
        query = {name: value for name, value in query.items() if value}
        return f'{self.base}{path}?{urllib.parse.urlencode(query, quote_via=urllib.parse.quote)}'

    # --- requests to the JSON API

    async def send(
        self,
        name: str,
        method: str,
        url: str,
        check: Callable[[Answer], T],
        statuses: Collection[int] = (200,),
        body: bytes = b'',
        headers: Mapping[str, str] = {},
    ) -> T:
        """Send a request as ``Transport.call`` does; any other status 404 of GCS is a ``BucketNotFoundError``."""

        def checked(answer: Answer) -> T:
            if answer.head.status == 404:
                gcsreplies.check_missing(answer, name)
                if 404 not in statuses:
                    raise no_such_bucket(name, 'status 404', 404)
            return check(answer)

        return await self.call(name, method, url, lambda: (body, headers), checked, {*statuses, 404})

    async def call(
        self,
        name: str,
        method: str,
        url: str,
        requests: Callable[[], tuple[bytes | memoryview, Mapping[str, str]]],
        check: Callable[[Answer], T],
        statuses: Collection[int],
    ) -> T:
        """Send a request, also one of an upload; ``requests`` returns the body and headers of each attempt."""

        async def make() -> Outgoing:
            body, headers = requests()
            return Outgoing(Target.of(url, {**await self._headers(), **headers}), method, body)

        return await self.transport.call(make, self.recover, name, check, statuses=statuses)

    def objects(self, key: str | None = None, suffix: str = '', **query: str) -> str:
        """Return the URL of an object's description, or of the list of all objects."""
        item = '' if key is None else f'/{_quote(key)}'
        return self._url(f'/storage/v1/b/{_quote(self.store.bucket)}/o{item}{suffix}', **query)

    def uploads(self, **query: str) -> str:
        """Return the URL to which new objects are sent."""
        return self._url(f'/upload/storage/v1/b/{_quote(self.store.bucket)}/o', **query)

    async def find_object(self, key: str) -> Resource | None:
        name = self.store.url(key)

        def check(answer: Answer) -> Resource | None:
            return None if answer.head.status == 404 else gcsreplies.resource_of(answer, name, key)

        return await self.send(name, 'GET', self.objects(key, fields=_OBJECT_FIELDS), check, (200, 404))

    async def get_object(self, key: str) -> Resource:
        if (resource := await self.find_object(key)) is None:
            raise NotFoundError(f'{self.store.url(key)}: no such object', path=self.store.url(key))
        return resource

    async def page(self, listing: Listing, limit: int) -> Page:
        url = self.objects(
            prefix=listing.prefix, delimiter=listing.delimiter, pageToken=listing.token, maxResults=str(limit),
            fields=_PAGE_FIELDS,
        )  # fmt: skip
        return await self.send(listing.name, 'GET', url, functools.partial(gcsreplies.next_page, listing))

    async def delete(self, key: str, generation: str = '') -> None:
        """Delete an object, only in the given generation unless that is empty. A missing object is not an error."""
        check_object(self.store, key)
        name = self.store.url(key)
        check = functools.partial(gcsreplies.check_deleted, name=name)
        url = self.objects(key, ifGenerationMatch=generation)
        await self.send(name, 'DELETE', url, check, (200, 204, 404, 412) if generation else (200, 204, 404))

    async def copy(self, source: str, target: str) -> None:
        """Copy the current generation of an object within the bucket, and compare size and checksum."""
        check_object(self.store, target)
        name = self.store.url(source)
        original = await self.get_object(source)

        def check(answer: Answer) -> Rewrite:
            if answer.head.status in (404, 412):
                raise ObjectChangedError(f'{name}: it was replaced or deleted while it was being copied')
            rewrite = gcsreplies.rewrite_of(answer, name, target)
            if (copy := rewrite.resource) is not None and (
                copy.size != original.size or copy.digests.get('crc32c') != original.digests.get('crc32c')
            ):
                raise BadReplyError(
                    f'{name}: expected a copy of {original.size} bytes of crc32c {original.digests.get("crc32c")} at '
                    f'{target!r}, got {copy.size} of {copy.digests.get("crc32c")}'
                )
            return rewrite

        rewrite_to = f'/rewriteTo/b/{_quote(self.store.bucket)}/o/{_quote(target)}'
        token, copied, stalled = '', -1, 0
        while True:
            url = self.objects(source, rewrite_to, ifSourceGenerationMatch=original.generation, rewriteToken=token)
            rewrite = await self.send(name, 'POST', url, check, (200, 404, 412))
            if rewrite.resource is not None:
                return
            stalled = 0 if rewrite.copied > copied else stalled + 1
            if stalled >= self.store.config.attempts:
                raise StoreError(
                    f'{name}: {rewrite.copied} of {original.size} bytes copied, no progress after {stalled} requests'
                )
            token, copied = rewrite.token, max(copied, rewrite.copied)

    async def create_bucket(self) -> bool | None:
        """Create the bucket. Return False if it exists; None if an earlier attempt of this call may have created it."""
        name, bucket = self.store.root, self.store.bucket
        if not self._login.project and self._login.credentials is not None:
            raise InvalidArgumentError(f'{name}: a new bucket needs a project: pass project=')

        attempts = 0

        def request() -> tuple[bytes, Mapping[str, str]]:
            nonlocal attempts
            attempts += 1
            return json.dumps({'name': bucket}).encode(), {'Content-Type': 'application/json'}

        def check(answer: Answer) -> bool | None:
            if answer.head.status == 409:
                return None if attempts > 1 else False
            gcsreplies.bucket_of(answer, name, bucket)
            return True

        url = self._url('/storage/v1/b', project=self._login.project)
        return await self.call(name, 'POST', url, request, check, (200, 409))


def is_emulator(endpoint: str) -> bool:
    """Return whether an endpoint is an emulator, which needs no credentials: any plain http one is."""
    return endpoint.startswith('http://') or endpoint == endpoints.emulator(os.environ)


def _quote(part: str) -> str:
    return urllib.parse.quote(part, safe='')
