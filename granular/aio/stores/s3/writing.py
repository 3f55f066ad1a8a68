"""Uploads to S3: writers of objects, and unfinished multipart uploads."""

import base64
import functools
import hashlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from granular.aio.http.messages import http_date
from granular.aio.http.transport import Answer
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import Upload
from granular.aio.stores.multipart import PartWriter
from granular.aio.stores.remote import RemoteStore
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.client import S3Client
from granular.aio.stores.s3.replies import TOKEN, Found, Part, UnfinishedUpload
from granular.config import MiB
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BadReplyError,
    GranularError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from granular.formats.checksums import crc32c

_CONFLICTS: Final = 3  # attempts to publish an object that the store reports as existing, although it does not exist
_READ: Final = 8 * MiB  # bytes per read of an object that is read back
_CLOCKS: Final = 2.0  # seconds by which the times of a store's replies and objects may differ
_REFUSED: Final = (404, 409, 412, 501)

logger = logging.getLogger('granular')


class _Reply(NamedTuple):
    """A store's confirmation that it has published an object: the ETag, and the time in seconds since the epoch."""

    etag: str
    time: float

    @classmethod
    def of(cls, answer: Answer, etag: str) -> '_Reply':
        """Return the confirmation in an answer, with the time of the store's clock."""
        date = http_date(answer.head.headers.get('date', ''))
        return cls(etag, time.time() if date is None else date.timestamp())


Send = Callable[[Mapping[str, str]], Awaitable[_Reply]]
"""Publishes an object with the given headers."""


class _UnknownConditionError(GranularError):
    """The server does not support conditional requests."""


class _Sums(NamedTuple):
    """Checksums of bytes that are sent."""

    md5: bytes
    crc32c: int

    @classmethod
    async def of(cls, data: bytes) -> '_Sums':
        """Compute the checksums, off the event loop from 1 MiB on."""
        if len(data) < MiB:
            return cls(hashlib.md5(data, usedforsecurity=False).digest(), crc32c(data))
        return await offload(lambda: cls(hashlib.md5(data, usedforsecurity=False).digest(), crc32c(data)))


class S3Writer(PartWriter):
    """A multipart upload, or a single put if one part is enough.

    The object's metadata contains a token of its writer. If a reply leaves the outcome open, the token, size and
    checksum of the object in the store decide; no object is reported as written without a comparison.

    Args:
      store, client: the bucket.
      key: the object.
      new: True if the object must not exist yet.
      headers: of the object, in addition to those of the options.
    """

    def __init__(
        self, store: RemoteStore[S3Client], client: S3Client, key: str, new: bool, headers: Mapping[str, str] = {}
    ) -> None:
        super().__init__(store.config.part_size, store.config.upload_concurrency)
        self._store, self._client, self._key, self._new = store, client, key, new
        self._name = store.url(key)
        self._token = uuid.uuid4().hex
        self._headers = {**client.written, **headers, TOKEN: self._token}
        self._size = self._crc = 0
        self._etag = ''  # expected ETag, if ETags are MD5s
        self._upload = ''
        self.parts: dict[int, Part] = {}
        self._md5s: dict[int, bytes] = {}
        self._published = False  # True if the object may exist

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._size += len(data)
        exact = data if isinstance(data, bytes) else bytes(data)
        self._crc = crc32c(exact, self._crc) if len(exact) < MiB else await offload(crc32c, exact, self._crc)
        await super().write(data)

    # --- the steps of an upload

    async def begin(self) -> None:
        headers = dict(self._headers)
        if self._client.takes_crc32c:
            headers |= {'x-amz-checksum-algorithm': 'CRC32C', 'x-amz-checksum-type': 'FULL_OBJECT'}
        self._upload = await self._client.call(
            'POST',
            self._key,
            lambda answer: s3replies.upload_begun(answer, self._name, self._key),
            query=[('uploads', '')],
            headers=headers,
        )

    async def send(self, number: int, data: bytes, last: bool) -> None:
        sums = await _Sums.of(data)
        headers, crc = self._checksums(sums)
        again = False

        def check(answer: Answer) -> str:
            nonlocal again
            self.check_upload(answer)
            etag = s3replies.written(answer, self._name)
            if etag.strip('"') != sums.md5.hex() and not (again or self._odd(answer.head.headers)):
                again = True  # after a second mismatch, ETags may not be MD5s: the whole object is compared later
                raise BadReplyError(
                    f'{self._name}: part {number + 1} of md5 {sums.md5.hex()} was sent, the store has {etag}'
                )
            return etag

        etag = await self._client.call(
            'PUT', self._key, check, query=self.part_query(number), headers=headers, body=data, statuses=(200, 404)
        )
        self.parts[number], self._md5s[number] = Part(etag, crc), sums.md5

    async def finish(self) -> None:
        md5s = b''.join(self._md5s[number] for number in sorted(self._md5s))
        self._etag = f'{hashlib.md5(md5s, usedforsecurity=False).hexdigest()}-{len(self._md5s)}'
        whole = {}
        if self._client.takes_crc32c:
            whole = {'x-amz-checksum-crc32c': _base64(self._crc), 'x-amz-checksum-type': 'FULL_OBJECT'}
        await self.join(whole)

    async def join(self, headers: Mapping[str, str]) -> None:
        """Join the parts into the object."""
        body = s3replies.complete_body([self.parts[number] for number in sorted(self.parts)])

        def check(answer: Answer) -> _Reply:
            self._check_refusal(answer)
            return _Reply.of(answer, s3replies.upload_done(answer, self._name, self._key))

        async def send(condition: Mapping[str, str]) -> _Reply:
            return await self._client.call(
                'POST',
                self._key,
                check,
                query=[('uploadId', self._upload)],
                headers={**headers, **condition, 'Content-Type': 'application/xml'},
                body=body,
                statuses=(200, *_REFUSED),
            )

        await self._publish(send)

    async def discard(self) -> None:
        await abort(self._client, self._key, self._upload)

    async def put(self, data: bytes) -> None:
        sums = await _Sums.of(data)
        self._etag = sums.md5.hex()
        again = False

        def check(answer: Answer) -> _Reply:
            nonlocal again
            self._check_refusal(answer)
            etag = s3replies.written(answer, self._name)
            if etag.strip('"') != self._etag and not (again or self._new or self._odd(answer.head.headers)):
                again = True
                raise BadReplyError(f'{self._name}: an object of md5 {self._etag} was sent, the store has {etag}')
            return _Reply.of(answer, etag)

        async def send(condition: Mapping[str, str]) -> _Reply:
            headers = {**self._headers, **self._checksums(sums)[0], **condition}
            return await self._client.call(
                'PUT', self._key, check, headers=headers, body=data, statuses=(200, *_REFUSED)
            )

        await self._publish(send)

    async def abort(self) -> None:
        await super().abort()
        if self._published:
            await self._withdraw()

    def part_query(self, number: int) -> Sequence[tuple[str, str]]:
        """Return the query parameters of a request that sends a part."""
        return [('partNumber', str(number + 1)), ('uploadId', self._upload)]

    def check_upload(self, answer: Answer) -> None:
        """Raise if the answer says that the upload, or its bucket, no longer exists."""
        if answer.head.status == 404:
            match s3replies.code_of(answer.body):
                case 'NoSuchBucket':
                    raise NotFoundError(f'{self._name}: no such bucket (NoSuchBucket)')
                case 'NoSuchUpload':
                    raise StoreError(f'{self._name}: its upload is gone, as it is after it was aborted (NoSuchUpload)')
                case code:
                    raise BadReplyError(f'{self._name}: what was to be written was answered by status 404, {code}')

    def _check_refusal(self, answer: Answer) -> None:
        """Raise if the answer says that the object exists already, or that its upload no longer exists."""
        status, code = answer.head.status, s3replies.code_of(answer.body)
        if status in (409, 412):
            raise AlreadyExistsError(
                f'{self._name}: another writer has published it meanwhile (status {status}, {code})'
            )
        if status == 501:
            raise _UnknownConditionError(f'{self._name}: status 501, {code}')
        self.check_upload(answer)

    def _checksums(self, sums: _Sums) -> tuple[dict[str, str], str]:
        """Return the headers by which the server checks a body, and the CRC32C among them (empty if unsupported)."""
        headers, crc = {'Content-MD5': base64.b64encode(sums.md5).decode()}, ''
        if self._client.takes_crc32c:
            crc = headers['x-amz-checksum-crc32c'] = _base64(sums.crc32c)
            headers['x-amz-sdk-checksum-algorithm'] = 'CRC32C'
        return headers, crc

    def _odd(self, headers: Mapping[str, str]) -> bool:
        """Return whether an ETag may be something other than an MD5."""
        return self._client.odd_etags or not self._client.etag_is_md5 or s3replies.is_encrypted(headers)

    # --- publication and verification

    async def _publish(self, send: Send) -> None:
        """Publish the object, with ``new`` only if it does not exist, and verify it."""
        condition = {'If-None-Match': '*'} if self._new else {}
        self._published = True
        for tries in range(1, _CONFLICTS + 1):
            try:
                reply = await send(condition)
            except (AlreadyExistsError, _UnknownConditionError, StoreError) as error:
                # The reply to an earlier attempt may be lost: the object in the store shows if that attempt succeeded.
                found = await self._peek_after(error)
                if found is not None and found.writer == self._token:
                    await self._verify(found)
                    return
                self._published = isinstance(error, StoreError)  # an attempt may still be in flight
                if found is not None and self._new:
                    raise AlreadyExistsError(f'{self._name}: another writer has published it meanwhile') from error
                if isinstance(error, _UnknownConditionError):
                    if not condition:
                        raise StoreError(str(error)) from None
                    condition = {}
                elif not isinstance(error, AlreadyExistsError) or tries == _CONFLICTS:
                    raise
            else:
                await self._check(reply)
                return
        raise StoreError(f'{self._name}: it could not be published: the store has something else to say each time')

    async def _peek(self) -> Found | None:
        """Return the metadata of the object in the store; None if it does not exist."""
        try:
            return await self._client.look(self._key)
        except NotFoundError:
            return None

    async def _peek_after(self, error: GranularError) -> Found | None:
        try:
            return await self._peek()
        except GranularError as unknown:
            error.add_note(f'it is not known whether it was written nevertheless: {unknown}')
            raise error from None

    async def _check(self, reply: _Reply) -> None:
        """Verify the object that the store says it has published."""
        proven = reply.etag.strip('"') == self._etag
        try:
            found = await self._peek()
        except AccessDeniedError:
            if not proven:
                raise
            return  # with write-only credentials, the matching ETag is the proof
        if found is None:
            raise BadReplyError(f'{self._name}: the store said that it has published it, but there is no such object')
        if found.writer in ('', self._token):  # some stores drop the metadata
            await self._verify(found)
            return
        # The last writer wins. An object that is older than the reply shows that the store has lost this one.
        younger = found.modified is None or found.modified > reply.time - _CLOCKS
        if not younger or not proven:
            raise ObjectChangedError(
                f'{self._name}: the store said that it has published it, but has the object of another writer'
            )

    async def _verify(self, found: Found) -> None:
        """Compare the object in the store with what was written.

        Raises:
          StoreError: if its size or checksum differs.
        """
        digests, crc = found.content_info(self._client.etag_is_md5).digests, f'{self._crc:08x}'
        if found.size == self._size:
            if self._etag in (digests.get('md5'), digests.get('parts')) or digests.get('crc32c') == crc:
                return
            if 'crc32c' not in digests:
                # Its ETag is not a checksum, or its bytes differ.
                digests = {'crc32c': await self._read_back(found)}
                if digests['crc32c'] == crc:
                    self._client.odd_etags = True
                    return
        raise StoreError(
            f'{self._name}: the store has {found.size} bytes {dict(digests)}, where {self._size} bytes of crc32c {crc} '
            f'were written'
        )

    async def _read_back(self, found: Found) -> str:
        crc = 0
        for start in range(0, found.size, _READ):
            stop = min(start + _READ, found.size)
            reply = await self._store.read(self._key, start, stop, found.version)
            crc = await offload(crc32c, reply.data, crc)
        return f'{crc:08x}'

    async def _withdraw(self) -> None:
        """Delete the object of a publication that failed or was interrupted, if this writer published it."""
        try:
            found = await self._peek()
            if found is not None and found.writer == self._token:
                await self._client.delete_one(self._key, found.version)
        except GranularError as error:
            logger.warning('%s: was not published, but may be there: %s', self._name, error)


def _base64(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(4, 'big')).decode()


async def abort(client: S3Client, key: str, upload: str) -> None:
    """Abort a multipart upload, unless it is already aborted or finished."""
    name = client.name(key)

    def check(answer: Answer) -> None:
        code = s3replies.code_of(answer.body)
        if answer.head.status == 204:
            s3replies.nothing(answer, name)
        elif answer.head.status != 404 or code != 'NoSuchUpload':
            raise BadReplyError(f'{name}: an upload was to be dropped: status {answer.head.status}, {code}')

    await client.call('DELETE', key, check, query=[('uploadId', upload)], statuses=(200, 204, 404))


async def uploads(store: RemoteStore[S3Client], client: S3Client, key: str) -> AsyncIterator[Upload]:
    """Yield the unfinished multipart uploads of an object and of all objects in a folder."""
    name = store.url(key)
    markers: tuple[str, str] | None = None
    while True:
        await ensure_event_loop()
        query = [('uploads', ''), ('encoding-type', 'url'), ('prefix', key)]
        if markers is not None:
            query += [('key-marker', markers[0])] + ([('upload-id-marker', markers[1])] if markers[1] else [])
        check = functools.partial(s3replies.uploads_page, name=name, prefix=key, before=markers)
        page = await client.call('GET', '', check, query=query, limit=16 * MiB)
        below = [upload for upload in page.uploads if not key or f'{upload.key}/'.startswith(f'{key}/')]
        for upload in await gather([_sized(client, upload) for upload in below]):
            if upload is not None:
                yield upload
        markers = page.markers
        if markers is None:
            return


async def _sized(client: S3Client, upload: UnfinishedUpload) -> Upload | None:
    """Return an upload with the size and time of its parts; None if it was finished or aborted meanwhile."""
    size, last, marker = 0, upload.modified, 0
    while True:
        query = [('uploadId', upload.id), *([('part-number-marker', str(marker))] if marker else [])]
        check = functools.partial(s3replies.parts_page, name=client.name(upload.key), before=marker)
        page = await client.call('GET', upload.key, check, query=query, statuses=(200, 404), limit=4 * MiB)
        if page is None:
            return None
        size, last = size + page.size, max(last, page.modified)
        if page.marker is None:
            return Upload(upload.key, upload.id, size, last)
        marker = page.marker
