"""S3 requests, which botocore addresses and signs, and this library sends and checks."""

import asyncio
import base64
import contextlib
import datetime
import functools
import re
import time
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from granular._support.text import logger
from granular.aio.http.digests import digest
from granular.aio.http.download import coding_of
from granular.aio.http.messages import Target, http_date
from granular.aio.http.refusals import code_of, no_such_bucket
from granular.aio.http.transport import Answer, Outgoing
from granular.aio.runtime.tasks import result_of
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import check_object
from granular.aio.stores.listing import Listing, Page
from granular.aio.stores.remote import Client, RemoteStore
from granular.aio.stores.s3 import options as s3options
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.credentials import checked, credentials_of
from granular.aio.stores.s3.documents import bucket_body, delete_body
from granular.aio.stores.s3.replies import ObjectMetadata
from granular.aio.stores.s3.route import ASYMMETRIC, Route, route_of
from granular.aio.stores.s3.sdk import credential_errors
from granular.aio.stores.s3.sessions import TOKEN, Session, opened
from granular.config import KiB, MiB
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BadReplyError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
)

T = TypeVar('T')
Query = Sequence[tuple[str, str]]
EXPRESS: Final = '--x-s3'
"""Ending of the names of directory buckets."""

_MAX_SKEW: Final = datetime.timedelta(days=100 * 365)
_SAME_CLOCK: Final = datetime.timedelta(minutes=1)
_BUCKET_CHECKS: Final = 5  # attempts to list a new bucket
_MAX_PAGE: Final = 16 * MiB  # maximum bytes of a page; 1,000 fully escaped keys of 1,024 bytes take some 10 MB
_REGION: Final = re.compile(r'[a-z]{2,4}(-[a-z]{2,12}){1,3}-\d{1,2}')
_LABEL: Final = re.compile(r'[A-Za-z0-9-]{1,63}')  # a region of other vendors
_READ_HEADERS: Final = {'x-amz-checksum-mode': 'ENABLED'}  # requests the checksum of an object that is read whole


class S3Client(Client):
    """Client of a bucket under one event loop. Create it on a worker thread: finding credentials blocks."""

    endpoint: str | None
    region: str

    def __init__(self, store: RemoteStore[Any]) -> None:
        super().__init__(store)
        s3options.check(store.root, store.options)
        options = store.options
        self.endpoint, self.region, _ = store.endpoint
        self._route = self._ask(self.region)
        if 'tls_verify' not in options and self._route.ca_bundle is not None:
            self.tls_verify = self._route.ca_bundle
        self._credentials = credentials_of(store.root, options) if self._route.algorithm else None
        self._payer = {'x-amz-request-payer': 'requester'} if options.get('requester_pays') else {}
        self.written_headers: dict[str, str] = s3options.written_headers(options)
        self._skew = datetime.timedelta()
        self.is_directory: bool = store.bucket.endswith(EXPRESS)
        self.etag_is_md5: bool = not self.is_directory
        self._session: Session | None = None
        self._opening: asyncio.Future[Session] | None = None
        # Some servers of other vendors reject the checksums that S3 has supported since 2022.
        self.takes_crc32c: bool = not self.endpoint or self.is_directory
        self.has_odd_etags = False  # True once an ETag was not the MD5 of an object that was correct

    def _ask(self, region: str) -> Route:
        return route_of(self.store.root, self.store.options, self.store.endpoint, region)

    # --- signing

    def target(self, url: str, headers: Mapping[str, str]) -> Target:
        return Target.of(url, headers, self._route.proxies)

    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        check_object(self.store, key)
        return await self._sign('GET', key, (), _READ_HEADERS, b'')

    async def _sign(
        self, method: str, key: str, query: Query, headers: Mapping[str, str], body: bytes | memoryview
    ) -> tuple[str, Mapping[str, str]]:
        """Return the URL of a request and its signed headers. Those of a read are valid for any range."""
        url, headers = self._url(key, query), {**headers, **self._payer}
        if not self._route.in_session:
            return url, await self._signed(method, url, headers, body, await self._keys(key))
        session = await self._current_session()
        return url, await self._signed(method, url, {**headers, TOKEN: session.session_token}, body, session)

    def _url(self, key: str, query: Query) -> str:
        base = self._route.base
        url = f'{base}/{urllib.parse.quote(key, safe="/~-_.")}'
        if not key and urllib.parse.urlsplit(base).path:
            url = base
        return url + ('?' + '&'.join(f'{_quote(name)}={_quote(value)}' for name, value in query) if query else '')

    async def _keys(self, key: str) -> Any:
        """Return the keys that sign requests; None to send them unsigned."""
        if self._credentials is None:
            return None
        with credential_errors(self.store.url(key)):
            return checked(self.store.root, await self._credentials.frozen())

    async def _signed(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | memoryview, keys: Any
    ) -> Mapping[str, str]:
        if keys is None:
            return headers
        from granular.aio.stores.s3.signing import UNSIGNED, signed

        unsigned = body and url.startswith('https:') and not self._route.signs_bodies
        payload = UNSIGNED if unsigned else (await digest('sha256', body)).hex()
        arguments = self._route, keys, method, url, headers, body, payload, self._skew
        with credential_errors(self.store.root):
            # Asymmetric signatures take milliseconds.
            return await offload(signed, *arguments) if self._route.algorithm == ASYMMETRIC else signed(*arguments)

    async def _current_session(self) -> Session:
        """Return a session of the directory bucket, opened if there is none, or it is about to expire."""
        if self._session is not None and time.monotonic() < self._session.expires:
            return self._session
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open_session())
        return await result_of(self._opening)

    async def _open_session(self) -> Session:
        try:
            name, url = self.store.root, self._url('', [('session', '')])
            headers = await self._signed('GET', url, {}, b'', await self._keys(''))
            # As part of the attempt of another request, it has no limits and retries of its own.
            request, check = Outgoing(self.target(url, headers), 'GET'), functools.partial(opened, name=name)
            self._session = session = await self.transport.send(request, name, check)
            self.signed_for = session.signed_for
            return session
        finally:
            self._opening = None

    async def find_credentials(self) -> bool:
        had_session, self._session = self._session is not None, None
        return (self._credentials is not None and await self._credentials.renew()) or had_session

    async def move(self, region: str) -> bool:
        # The endpoint of the options is never left, and an invalid region must not become part of a host name.
        if not (_LABEL if self.endpoint else _REGION).fullmatch(region):
            return False
        if region != self.region:
            logger.info('%s is in region %s, not %s', self.store.root, region, self.region)
            self._route, self.region = await offload(self._ask, region), region
        return True

    def set_clock(self, date: str) -> bool:
        server_time = http_date(date)
        skew = datetime.timedelta.max if server_time is None else server_time - datetime.datetime.now(datetime.UTC)
        if abs(skew) > _MAX_SKEW:
            return False
        before, self._skew = self._skew, skew
        if abs(skew - before) < _SAME_CLOCK:  # another request was refused for it as well
            return True
        side = 'behind' if skew > datetime.timedelta(0) else 'ahead of'
        logger.warning(
            "%s: this machine's clock is %s %s the store's: signing by the store's", self.store.root, abs(skew), side
        )
        return True

    async def check_headers(self, body: bytes, md5: bytes | None = None) -> dict[str, str]:
        """Return the headers by which the server checks a body that it receives, whose MD5 may be known."""
        headers = {}
        if not self.is_directory:  # which takes no MD5
            headers['Content-MD5'] = base64.b64encode(md5 or await digest('md5', body)).decode()
        if self.takes_crc32c:
            crc = base64.b64encode(await digest('crc32c', body)).decode()
            headers |= {'x-amz-checksum-crc32c': crc, 'x-amz-sdk-checksum-algorithm': 'CRC32C'}
        return headers

    # --- requests

    async def call(
        self,
        method: str,
        key: str,
        check: Callable[[Answer], T],
        *,
        query: Query = (),
        headers: Mapping[str, str] = {},
        body: bytes | memoryview = b'',
        statuses: Collection[int] = (200,),
        limit: int = 256 * KiB,
    ) -> T:
        """Send a request as ``Transport.call`` does; any other status 404 of S3 is a ``NotFoundError``."""
        name = self.store.url(key)

        def checked(answer: Answer) -> T:
            s3replies.check_error(answer, name)
            if answer.head.status == 404 and 404 not in statuses:
                raise s3replies.missing_error(answer, name)
            return check(answer)

        async def make() -> Outgoing:
            url, signed = await self._sign(method, key, query, headers, body)
            return Outgoing(self.target(url, signed), method, body)

        return await self.transport.call(make, self.recover, name, checked, statuses={*statuses, 404}, limit=limit)

    async def head(self, key: str) -> ObjectMetadata:
        """Request the metadata of an object, which must exist (HEAD)."""
        name = self.store.url(key)

        def check(answer: Answer) -> ObjectMetadata:
            status = answer.head.status
            if status == 404 and any(header.startswith('x-amz') for header in answer.head.headers):
                raise NotFoundError(f'{name}: no such object (status 404)', status=404)
            if status != 200:
                raise _UnexplainedError(str(status))
            return s3replies.metadata_of(answer.head, name)

        async def attempt() -> ObjectMetadata:
            metadata = await self.call(
                'HEAD', key, check, headers=_READ_HEADERS, statuses=(200, 301, 307, 400, 403, 404)
            )
            if not coding_of(metadata.headers.get('content-encoding', '')) or not metadata.size:
                return metadata
            # The length may be that of a transfer that a proxy would compress.
            return metadata._replace(size=(await self.read(key, 0, 1, metadata.version)).size)

        try:
            return await attempt()
        except _UnexplainedError:
            # A reply to HEAD has no body to show whether S3 sent it, and whether credentials, region or clock need
            # recovery. The reply to a read has one.
            await self.call('GET', key, lambda answer: None, headers={'Range': 'bytes=0-0'}, statuses=(200, 206, 416))
        try:
            return await attempt()
        except _UnexplainedError as error:
            message = f'{name}: HEAD is answered by status {error}, and GET is not'
            raise AccessDeniedError(message) if str(error) == '403' else BadReplyError(message) from None

    async def find(self, key: str) -> ObjectMetadata | None:
        try:
            return await self.head(key)
        except NotFoundError:
            return None

    async def page(self, listing: Listing, limit: int) -> Page:
        query = s3replies.query_of(listing, limit)
        check = functools.partial(s3replies.next_page, listing, endpoint=self.endpoint)
        return await self.call('GET', '', check, query=query, statuses=(200, 404), limit=_MAX_PAGE)

    async def create_bucket(self) -> None:
        """Create the bucket, and verify that it exists."""
        name = self.store.root
        if self.is_directory or self.store.bucket.startswith('arn:'):
            raise InvalidArgumentError(
                f'{name}: expected the name of a general purpose bucket to create, got a directory bucket or an access '
                f'point: create it with the AWS command line'
            )

        def check(answer: Answer) -> None:
            # The bucket may have been created by an earlier attempt whose reply was lost.
            if answer.head.status != 409:
                s3replies.check_empty(answer, name)
            elif code_of(answer.body) != 'BucketAlreadyOwnedByYou':
                raise AlreadyExistsError(f'{name}: exists already ({code_of(answer.body)})')

        body = bucket_body(self.region)
        headers = await self.check_headers(body) if body else {}
        for tries in range(_BUCKET_CHECKS):
            await self.call('PUT', '', check, headers=headers, body=body, statuses=(200, 409))
            with contextlib.suppress(NotFoundError):
                await self.page(Listing(name, '', '', False), 1)
                return
            await asyncio.sleep(0.1 * 2**tries)
        raise BadReplyError(f'{name}: the store has confirmed the creation of the bucket, but it does not exist')

    async def delete_one(self, key: str, version: str | None = None) -> None:
        """Delete an object, only in the given version unless that is None. A missing object is not an error."""
        check_object(self.store, key)
        name = self.store.url(key)

        def check(answer: Answer) -> None:
            if answer.head.status == 404 and code_of(answer.body) == 'NoSuchBucket':
                raise no_such_bucket(name, 'NoSuchBucket')
            if answer.head.status == 204:
                s3replies.check_empty(answer, name)
            elif answer.head.status != 412 and code_of(answer.body) != 'NoSuchKey':
                raise BadReplyError(f'{name}: expected status 204 for a deletion, got {answer.head.status}')

        headers = {'If-Match': version} if version else {}
        await self.call('DELETE', key, check, headers=headers, statuses=(200, 204, 404, *((412,) if version else ())))

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects in one request. Missing objects are not an error."""
        body = delete_body(keys)
        check = functools.partial(s3replies.check_deleted, name=self.store.url(keys[0]), keys=keys)
        headers = {**await self.check_headers(body), 'Content-Type': 'application/xml'}
        await self.call('POST', '', check, query=[('delete', '')], headers=headers, body=body, limit=_MAX_PAGE)


class _UnexplainedError(GranularError):
    """An error status whose reply gives no reason."""


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe='-_.~')
