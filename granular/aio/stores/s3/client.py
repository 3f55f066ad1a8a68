"""S3 requests, which botocore signs and this library sends and checks."""

import asyncio
import base64
import contextlib
import datetime
import functools
import hashlib
import re
import urllib.parse
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from granular._words import logger
from granular.aio.http.digests import digest
from granular.aio.http.download import coding_of
from granular.aio.http.messages import Target, http_date
from granular.aio.http.retry import code_of, no_such_bucket
from granular.aio.http.transport import Answer, Outgoing
from granular.aio.stores.base import check_object
from granular.aio.stores.listing import Listing, Page
from granular.aio.stores.remote import Client, RemoteStore
from granular.aio.stores.s3 import options as s3options
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.credentials import botocore_errors, checked, configuration_of, credentials_of
from granular.aio.stores.s3.documents import bucket_body, delete_body
from granular.aio.stores.s3.replies import ObjectMetadata
from granular.config import KiB, MiB
from granular.errors import AccessDeniedError, AlreadyExistsError, BadReplyError, GranularError, NotFoundError

T = TypeVar('T')
Query = Sequence[tuple[str, str]]
EXPRESS: Final = '--x-s3'
"""Ending of the names of directory buckets."""

_MAX_SKEW: Final = datetime.timedelta(days=100 * 365)
_SAME_CLOCK: Final = datetime.timedelta(minutes=1)
_BUCKET_CHECKS: Final = 5  # attempts to list a new bucket
_MAX_PAGE: Final = 16 * MiB  # maximum bytes of a page; 1,000 fully escaped keys of 1,024 bytes take some 10 MB
_REGION: Final = re.compile(r'[a-z]{2,4}(-[a-z]{2,12}){1,3}-\d{1,2}')
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
        configuration = configuration_of(store.root, options)
        self._style = s3options.addressing(store.root, options, configuration.addressing_style)
        if 'tls_verify' not in options and configuration.ca_bundle is not None:
            self.tls_verify = configuration.ca_bundle
        self._credentials = credentials_of(store.root, options)
        self._payer = {'x-amz-request-payer': 'requester'} if options.get('requester_pays') else {}
        self.written_headers: dict[str, str] = s3options.written_headers(options)
        self._base = self._address()
        self._skew = datetime.timedelta()
        self.etag_is_md5: bool = not store.bucket.endswith(EXPRESS)
        # Some servers of other vendors reject the checksums that S3 has supported since 2022.
        self.takes_crc32c: bool = not self.endpoint
        self.has_odd_etags = False  # True once an ETag was not the MD5 of an object that was correct

    def _address(self) -> str:
        return s3options.address(self.store.root, self.endpoint, self.region, self._style)

    # --- signing

    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        check_object(self.store, key)
        return await self._sign('GET', key, (), _READ_HEADERS, b'')

    async def _sign(
        self, method: str, key: str, query: Query, headers: Mapping[str, str], body: bytes | memoryview
    ) -> tuple[str, Mapping[str, str]]:
        """Return the URL of a request and its signed headers. Those of a read are valid for any range."""
        url = f'{self._base}/{urllib.parse.quote(key, safe="/~-_.")}'
        if not key and urllib.parse.urlsplit(self._base).path:
            url = self._base
        if query:
            url += '?' + '&'.join(f'{_quote(name)}={_quote(value)}' for name, value in query)
        headers = {**headers, **self._payer}
        if self._credentials.anonymous:
            return url, headers
        from botocore.awsrequest import AWSRequest

        from granular.aio.stores.s3.signing import UNSIGNED, Signer

        payload = UNSIGNED if body and url.startswith('https:') else (await digest('sha256', body)).hex()
        with botocore_errors(self.store.url(key)):
            frozen = checked(self.store.root, await self._credentials.frozen())
        request = AWSRequest(method, url, headers=headers)
        Signer(frozen, self.region, self._skew, payload).add_auth(request)
        return url, dict(request.headers.items())

    async def find_credentials(self) -> bool:
        return await self._credentials.renew()

    async def move(self, region: str) -> bool:
        # The endpoint of the options is never left, and an invalid region must not become part of a host name.
        if self.endpoint or not _REGION.fullmatch(region):
            return False
        if region != self.region:
            logger.info('%s is in region %s, not %s', self.store.root, region, self.region)
            self.region = region
            self._base = self._address()
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
            return Outgoing(Target.of(url, signed), method, body)

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
            metadata = await self.call('HEAD', key, check, headers=_READ_HEADERS, statuses=(200, 400, 403, 404))
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
        query, check = s3replies.query_of(listing, limit), functools.partial(s3replies.next_page, listing)
        return await self.call('GET', '', check, query=query, statuses=(200, 404), limit=_MAX_PAGE)

    async def create_bucket(self) -> None:
        """Create the bucket, and verify that it exists."""
        name = self.store.root

        def check(answer: Answer) -> None:
            # The bucket may have been created by an earlier attempt whose reply was lost.
            if answer.head.status != 409:
                s3replies.check_empty(answer, name)
            elif code_of(answer.body) != 'BucketAlreadyOwnedByYou':
                raise AlreadyExistsError(f'{name}: exists already ({code_of(answer.body)})')

        body = bucket_body(self.region)
        headers = {'Content-MD5': md5_header(body)} if body else {}
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
        headers = {'Content-MD5': md5_header(body), 'Content-Type': 'application/xml'}
        await self.call('POST', '', check, query=[('delete', '')], headers=headers, body=body, limit=_MAX_PAGE)


class _UnexplainedError(GranularError):
    """An error status whose reply gives no reason."""


def md5_header(data: bytes | memoryview) -> str:
    """Return the value of Content-MD5, by which the server checks the body that it receives."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _quote(text: str) -> str:
    return urllib.parse.quote(text, safe='-_.~')
