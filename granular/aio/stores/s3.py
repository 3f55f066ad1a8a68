"""S3 and what speaks its protocol, by requests that botocore signs and this library sends and checks."""

import asyncio
import base64
import contextlib
import datetime
import hashlib
import logging
import os
import re
import urllib.parse
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from granular.aio.download import coding_of
from granular.aio.http1 import Target, http_date
from granular.aio.loops import need_loop
from granular.aio.stores import endpoints, s3options, s3replies, translating
from granular.aio.stores.base import Entry, Folders, Kept, ObjectWriter, Stat, Upload
from granular.aio.stores.remote import Client, RemoteStore
from granular.aio.stores.s3replies import Found, Listing, Page
from granular.aio.threads import offload
from granular.aio.transport import Answer, Outgoing
from granular.config import KiB, MiB
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BadReplyError,
    GranularError,
    MissingExtraError,
    NotFoundError,
    StoreError,
)
from granular.hiding import hidden, without_user

T = TypeVar('T')
Query = Sequence[tuple[str, str]]

_MOST_SKEW: Final = datetime.timedelta(days=100 * 365)
_BATCH: Final = 1000  # keys in one delete request
_PASSES: Final = 5  # listings of a folder that is deleted
_LOOKS: Final = 5  # at a bucket that was just made
_LISTED: Final = 16 * MiB  # bytes of a page; 1,000 keys of 1,024 bytes each, all of them escaped, are some 10 MB
_REGION: Final = re.compile(r'[a-z]{2,4}(-[a-z]{2,12}){1,3}-\d{1,2}')
_DENIED: Final = (
    *('401', '403', 'AccessDenied', 'ExpiredToken', 'ExpiredTokenException', 'InvalidClientTokenId'),
    *('InvalidAccessKeyId', 'SignatureDoesNotMatch', 'UnrecognizedClientException'),
)
_FIXED: Final = {'x-amz-checksum-mode': 'ENABLED'}  # asks for the checksum of an object that is read whole

logger = logging.getLogger('granular')


class S3Store(RemoteStore['S3Client']):
    """One bucket.

    Options: ``key``, ``secret``, ``token``, ``profile``, ``anon``, ``endpoint_url``, ``region``, ``requester_pays``,
    ``tls_verify``, ``s3_additional_kwargs`` (headers of what is written, such as ``ServerSideEncryption``), and of
    ``client_kwargs`` and ``config_kwargs`` ``region_name`` and ``s3={'addressing_style': ...}``. Where they are silent,
    the environment and the chain of botocore speak.
    """

    has_folders = False
    variables = (
        *('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN', 'AWS_DEFAULT_PROFILE', 'AWS_PROFILE'),
        *('AWS_SHARED_CREDENTIALS_FILE', 'AWS_CONFIG_FILE'),
    )
    endpoint: endpoints.S3Endpoint

    def _find_endpoint(self) -> endpoints.S3Endpoint:
        return endpoints.s3(self.options, os.environ)

    def _endpoint_options(self) -> dict[str, Any]:
        return {} if self.endpoint.url is None else {'endpoint_url': without_user(self.endpoint.url)}

    def _space(self) -> str:
        return self.endpoint.identity

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.root.removeprefix('s3://')

    async def make_client(self) -> 'S3Client':
        # Importing botocore takes a while: not on the loop.
        return await offload(S3Client, self)

    async def stat(self, key: str) -> Stat:
        client = await self.client()
        if key:
            with contextlib.suppress(NotFoundError):
                found = await client.look(key)
                return Stat(found.size, found.modified, found.version)
        listing = Listing(self.url(key), f'{key}/' if key else '', '', client.ordered)
        page = await client.page(listing, most=1)
        if key and not page.items:
            raise NotFoundError(f'{self.url(key)}: no such object or folder')
        return Stat(0, is_dir=True)

    async def kept(self, key: str) -> Kept:
        client = await self.client()
        return (await client.look(key)).kept(client.etag_is_md5)

    def digest_kind(self, size: int) -> str:
        return 'md5' if size <= self.config.part_size else 'parts'

    async def _pages(self, key: str, prefix: str = '', delimiter: str = '') -> AsyncIterator[Page]:
        client = await self.client()
        listing = Listing(self.url(key), f'{key}/{prefix}' if key else prefix, delimiter, client.ordered)
        found = not key or bool(prefix)
        while True:
            await need_loop()  # a page may be asked for from another thread than the one before
            page = await client.page(listing)
            found = found or bool(page.items or page.folders)
            if page.token is None and not found:
                raise NotFoundError(f'{self.url(key)}: no such folder')
            yield page
            if page.token is None:
                return

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        async for page in self._pages(key, prefix, '/'):
            for folder in page.folders:
                yield Entry(folder[:-1], True)
            for name, size, modified in page.items:
                # A key that ends in a slash marks a folder, and the folder itself is no entry of it.
                if not name.endswith('/'):
                    yield Entry(name, False, size, modified)

    async def scan_tree(self, key: str) -> AsyncIterator[Entry]:
        folders = Folders(key)
        async for page in self._pages(key):
            for name, size, modified in page.items:
                for folder in folders.of(name):
                    yield folder
                if not name.endswith('/'):
                    yield Entry(name, False, size, modified)

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        from granular.aio.stores.s3writing import S3Writer

        return S3Writer(self, await self.client(), key, new)

    async def mkdir(self, key: str, parents: bool, exist_ok: bool) -> None:
        if key and exist_ok:
            return
        with contextlib.suppress(NotFoundError):
            await self.stat(key)
            if not exist_ok:
                raise AlreadyExistsError(f'{self.url(key)}: exists already')
            return
        if not key:
            await (await self.client()).make_bucket()

    async def delete(self, keys: Sequence[str]) -> None:
        client = await self.client()
        if len(keys) == 1:
            await client.delete_one(keys[0])
            return
        keys = list(dict.fromkeys(keys))
        for key in keys:
            if not s3replies.is_writable(key):
                await client.delete_one(key)
        keys = [key for key in keys if s3replies.is_writable(key)]
        for i in range(0, len(keys), _BATCH):
            await client.delete_many(keys[i : i + _BATCH])

    async def delete_tree(self, key: str) -> None:
        for tries in range(_PASSES):
            left = 0
            try:
                async for page in self._pages(key):
                    left += len(page.items)
                    await self.delete([item.key for item in page.items])
            except NotFoundError:
                if tries:
                    return
                raise
            if not left:  # only the root of a bucket is there without anything in it
                return
        raise StoreError(
            f'{self.url(key)}: has {left} objects after they were deleted {_PASSES} times: something goes on writing '
            f'them, or the store does not delete them'
        )

    async def uploads(self, key: str) -> AsyncIterator[Upload]:
        from granular.aio.stores.s3writing import uploads

        async for upload in uploads(self, await self.client(), key):
            yield upload

    async def abort_upload(self, upload: Upload) -> None:
        from granular.aio.stores.s3writing import abort

        await abort(await self.client(), upload.key, upload.id)

    async def copy_within(self, source: str, target: str) -> bool:
        from granular.aio.stores.s3copying import copy

        await copy(self, await self.client(), source, target)
        return True


class S3Client(Client):
    """A bucket under one event loop. Made on a worker thread, as botocore reads files and services for it."""

    def __init__(self, store: S3Store) -> None:
        super().__init__()
        try:
            from botocore.session import Session
        except ImportError as error:
            raise MissingExtraError("s3:// needs botocore: pip install 'granular[s3]'") from error
        s3options.check(store.root, store.options)
        self._store = store
        options = store.options
        self._anon = bool(options.get('anon'))
        with translated(store.root):
            session = Session(profile=options.get('profile'))
            session.get_scoped_config()  # which raises for a profile that does not exist
            self._endpoint, self.region, _ = store.endpoint
            if 'key' in options and 'secret' in options:
                session.set_credentials(options['key'], options['secret'], options.get('token'))
            self._credentials = None if self._anon else session.get_credentials()
        self._fixed = self._anon or 'key' in options
        if self._credentials is None and not self._anon:
            raise AccessDeniedError(
                f'{store.root}: no AWS credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, '
                f'pass key= and secret=, or anon=True for a public bucket'
            )
        self._payer = {'x-amz-request-payer': 'requester'} if options.get('requester_pays') else {}
        self.written = s3options.written_headers(options)
        self._base = self._address()
        self._skew = datetime.timedelta()
        express = store.bucket.endswith('--x-s3')
        self.ordered = not self._endpoint and not express
        self.etag_is_md5 = not express
        # Of the servers of others, some refuse the checksums that S3 has had since 2022.
        self.takes_crc32c = not self._endpoint
        self.odd_etags = False  # whether an ETag was no MD5, although the object was right

    def _address(self) -> str:
        return s3options.address(
            self._store.root, self._endpoint, self.region, s3options.addressing(self._store.options)
        )

    # --- signing

    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        return await self._sign('GET', key, (), _FIXED, b'')

    async def _sign(
        self, method: str, key: str, query: Query, headers: Mapping[str, str], body: bytes | memoryview
    ) -> tuple[str, Mapping[str, str]]:
        """The address of a request and its signed headers. Those of a read are good for any range."""
        url = f'{self._base}/{urllib.parse.quote(key, safe="/~-_.")}'
        if not key and urllib.parse.urlsplit(self._base).path:
            url = self._base
        if query:
            url += '?' + '&'.join(f'{_quoted(name)}={_quoted(value)}' for name, value in query)
        headers = {**headers, **self._payer}
        if self._credentials is None:
            return url, headers
        from botocore.awsrequest import AWSRequest

        from granular.aio.stores.signing import UNSIGNED, Signer

        payload = UNSIGNED if body and url.startswith('https:') else await _sha256(body)
        with translated(self._store.url(key)):
            if getattr(self._credentials, 'refresh_needed', bool)():
                await offload(self._credentials.get_frozen_credentials)
            frozen = self._credentials.get_frozen_credentials()
        request = AWSRequest(method, url, headers=headers)
        Signer(frozen, self.region, self._skew, payload).add_auth(request)
        return url, dict(request.headers.items())

    async def find_credentials(self) -> bool:
        def find() -> Any:
            from botocore.session import Session

            with translated(self._store.root):
                # A session keeps what it found: a new one asks the providers again.
                return Session(profile=self._store.options.get('profile')).get_credentials()

        if self._fixed:
            return False
        self._credentials = await offload(find)
        return self._credentials is not None

    async def move(self, region: str) -> bool:
        # An endpoint that was given is not left; and a name that is none would be part of a host's.
        if self._endpoint or not _REGION.fullmatch(region):
            return False
        if region != self.region:
            logger.info('%s is in region %s, not %s', self._store.root, region, self.region)
            self.region = region
            self._base = self._address()
        return True

    def set_clock(self, date: str) -> bool:
        theirs = http_date(date)
        skew = datetime.timedelta.max if theirs is None else theirs - datetime.datetime.now(datetime.UTC)
        if abs(skew) > _MOST_SKEW:
            return False
        self._skew = skew
        logger.warning("%s: this machine's clock is %s behind the store's", self._store.root, self._skew)
        return True

    # --- requests

    def name(self, key: str) -> str:
        """The name of an object, for errors."""
        return self._store.url(key)

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
        """Send a request other than a read. The arguments are those of ``Transport.call``.

        Raises:
          NotFoundError: if the answer has status 404, is of S3, and ``statuses`` does not have it.
        """
        name = self._store.url(key)

        def checked(answer: Answer) -> T:
            if answer.head.status == 404 and 404 not in statuses:
                raise s3replies.missing(answer, name)
            return check(answer)

        async def make() -> Outgoing:
            url, signed = await self._sign(method, key, query, headers, body)
            return Outgoing(Target.of(url, signed), method, body)

        return await self.transport.call(make, self.mend, name, checked, statuses={*statuses, 404}, limit=limit)

    async def look(self, key: str) -> Found:
        """The head of an object.

        Raises:
          NotFoundError: if there is none.
        """
        name = self._store.url(key)

        def check(answer: Answer) -> Found:
            status = answer.head.status
            if status == 404 and any(header.startswith('x-amz') for header in answer.head.headers):
                raise NotFoundError(f'{name}: no such object (status 404)')
            if status != 200:
                raise _UnexplainedError(str(status))
            return s3replies.found_of(answer.head, name)

        async def look() -> Found:
            found = await self.call('HEAD', key, check, headers=_FIXED, statuses=(200, 400, 403, 404))
            if not coding_of(found.headers.get('content-encoding', '')) or not found.size:
                return found
            # The length may be that of what a proxy would compress on the way.
            return found._replace(size=(await self.read(key, name, 0, 1, found.version)).size)

        try:
            return await look()
        except _UnexplainedError:
            # A reply to HEAD has no body that says why: whether it is of S3, and whether credentials, the region or
            # the clock are to be mended. The reply to a read has one.
            await self.call('GET', key, lambda answer: None, headers={'Range': 'bytes=0-0'}, statuses=(200, 206, 416))
        try:
            return await look()
        except _UnexplainedError as error:
            said = f'{name}: HEAD is answered by status {error}, and GET is not'
            raise AccessDeniedError(said) if str(error) == '403' else BadReplyError(said) from None

    async def page(self, listing: Listing, most: int = 0) -> Page:
        """The next page of a listing, or its first names."""
        query = [*listing.query(), *([('max-keys', str(most))] if most else [])]
        page = await self.call('GET', '', listing.check, query=query, statuses=(200, 404), limit=_LISTED)
        listing.advance(page)
        return page

    async def make_bucket(self) -> None:
        """Make the bucket, and see that it is there."""
        name = self._store.root

        def check(answer: Answer) -> None:
            # A request that is sent again finds the bucket of the one whose reply was lost.
            if answer.head.status != 409:
                s3replies.nothing(answer, name)
            elif s3replies.code_of(answer.body) != 'BucketAlreadyOwnedByYou':
                raise AlreadyExistsError(f'{name}: exists already ({s3replies.code_of(answer.body)})')

        body = s3replies.bucket_body(self.region)
        headers = {'Content-MD5': md5_header(body)} if body else {}
        for tries in range(_LOOKS):
            await self.call('PUT', '', check, headers=headers, body=body, statuses=(200, 409))
            with contextlib.suppress(NotFoundError):
                await self.page(Listing(name, '', '', self.ordered), most=1)
                return
            await asyncio.sleep(0.1 * 2**tries)
        raise BadReplyError(f'{name}: the store said that it has made the bucket, but there is none')

    async def delete_one(self, key: str, version: str | None = None) -> None:
        """Delete an object, only of that version if one is given. One that is not there is no error."""
        name = self._store.url(key)

        def check(answer: Answer) -> None:
            if answer.head.status == 404 and s3replies.code_of(answer.body) == 'NoSuchBucket':
                raise NotFoundError(f'{name}: no such bucket (NoSuchBucket)')
            if answer.head.status == 204:
                s3replies.nothing(answer, name)
            elif answer.head.status != 412 and s3replies.code_of(answer.body) != 'NoSuchKey':
                raise BadReplyError(f'{name}: a deletion answered by status {answer.head.status}')

        headers = {'If-Match': version} if version else {}
        await self.call('DELETE', key, check, headers=headers, statuses=(200, 204, 404, *((412,) if version else ())))

    async def delete_many(self, keys: Sequence[str]) -> None:
        """Delete objects in one request. Those that are not there are no error."""
        if not keys:
            return
        name, body = self._store.url(keys[0]), s3replies.delete_body(keys)
        await self.call(
            'POST',
            '',
            lambda answer: s3replies.deleted(answer, name, keys),
            query=[('delete', '')],
            headers={'Content-MD5': md5_header(body), 'Content-Type': 'application/xml'},
            body=body,
            limit=_LISTED,
        )


class _UnexplainedError(GranularError):
    """A status without a word of the reason."""


def md5_header(data: bytes | memoryview) -> str:
    """The value of Content-MD5, by which the server checks what it receives."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


async def _sha256(data: bytes | memoryview) -> str:
    if len(data) < MiB:
        return hashlib.sha256(data).hexdigest()
    return await offload(lambda: hashlib.sha256(data).hexdigest())


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe='-_.~')


def translated(name: str) -> contextlib.AbstractContextManager[None]:
    """Turn the errors of botocore, which finds credentials, into ours."""
    return translating.translated(name, _ours)


def _ours(name: str, error: Exception) -> GranularError | None:
    import botocore.exceptions as botocore

    if isinstance(error, botocore.ClientError):  # of the service that gives the credentials
        code = str(error.response.get('Error', {}).get('Code', ''))
        if code in _DENIED:
            return AccessDeniedError(f'{name}: access denied ({code}): check the credentials and their rights')
        return StoreError(f'{name}: {hidden(str(error))}')
    if isinstance(error, botocore.NoCredentialsError | botocore.PartialCredentialsError | botocore.ProfileNotFound):
        return AccessDeniedError(f'{name}: {error}')
    said = f'{name}: {type(error).__name__}: {hidden(str(error))}'
    # What a program or a service that gives credentials says may be no JSON.
    return StoreError(said) if isinstance(error, botocore.BotoCoreError | ValueError) else None
