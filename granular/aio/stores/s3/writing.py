"""Writers of S3 objects, which verify what they have published."""

import contextlib
import functools
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, NamedTuple

from granular._support.text import logger
from granular.aio.http.digests import digest
from granular.aio.http.messages import http_date
from granular.aio.http.refusals import code_of, no_such_bucket
from granular.aio.http.transport import Answer
from granular.aio.runtime.threads import offload
from granular.aio.stores.multipart import PartWriter, encode_crc, extend_crc
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.client import S3Client
from granular.aio.stores.s3.conditions import NEW, creates_once
from granular.aio.stores.s3.documents import complete_body
from granular.aio.stores.s3.replies import WRITER, ObjectMetadata, Part
from granular.aio.stores.s3.uploads import abort
from granular.config import MiB
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BadReplyError,
    GranularError,
    ObjectChangedError,
    StoreError,
)
from granular.formats.checksums import crc32c

_CONFLICTS: Final = 3  # attempts to publish an object that the store reports as existing, although it does not exist
_READ: Final = 8 * MiB  # bytes per read of an object that is read back
_CLOCK_SKEW: Final = 2.0  # seconds by which the times of a store's replies and objects may differ
_REFUSALS: Final = (404, 409, 412, 501)


class _Confirmation(NamedTuple):
    """A store's confirmation that it has published an object: the ETag, and the time in seconds since the epoch."""

    etag: str
    time: float

    @classmethod
    def of(cls, answer: Answer, etag: str) -> '_Confirmation':
        """Return the confirmation in an answer, with the time of the store's clock."""
        date = http_date(answer.head.headers.get('date', ''))
        return cls(etag, time.time() if date is None else date.timestamp())


Attempt = Callable[[Mapping[str, str]], Awaitable[_Confirmation]]
"""An attempt to publish an object, with the given additional headers."""


class _NoConditionsError(GranularError):
    """The server does not support conditional requests."""


class S3Writer(PartWriter):
    """A multipart upload, or a single put if one part is enough.

    If a reply leaves the outcome open, the token, size and checksum of the object in the store decide; no object is
    reported as written without a comparison. It has the given headers and those of the options.
    """

    def __init__(self, client: S3Client, key: str, new: bool, headers: Mapping[str, str] = {}) -> None:
        super().__init__(client.store, key, new)
        self._client = client
        self._headers = {**client.written_headers, **headers, WRITER: self._token}
        self._size = self._crc = 0
        self._etag = ''  # expected ETag, if ETags are MD5s
        self._upload = ''
        self.parts: dict[int, Part] = {}
        self._md5s: dict[int, bytes] = {}
        self._unwanted = False  # True if the object may exist, and is to be removed unless it is published

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._size += len(data)
        self._crc = await extend_crc(self._crc, bytes(data))
        await super().write(data)

    # --- the steps of an upload

    async def start(self) -> None:
        headers = dict(self._headers)
        if self._client.takes_crc32c:
            headers |= {'x-amz-checksum-algorithm': 'CRC32C', 'x-amz-checksum-type': 'FULL_OBJECT'}
        check = functools.partial(s3replies.upload_id, name=self._name, key=self._key)
        self._upload = await self._client.call('POST', self._key, check, query=[('uploads', '')], headers=headers)

    async def send(self, number: int, data: bytes, last: bool) -> None:
        md5 = await digest('md5', data)
        headers = await self._client.check_headers(data, md5)
        check_etag = self._etag_check(md5.hex(), f'part {number + 1}')

        def check(answer: Answer) -> str:
            self.check_upload(answer)
            return check_etag(answer)

        etag = await self._client.call(
            'PUT', self._key, check, query=self.part_query(number), headers=headers, body=data, statuses=(200, 404)
        )
        self.parts[number], self._md5s[number] = Part(etag, headers.get('x-amz-checksum-crc32c', '')), md5

    async def finish(self) -> None:
        md5s = b''.join(self._md5s[number] for number in sorted(self._md5s))
        self._etag = f'{hashlib.md5(md5s, usedforsecurity=False).hexdigest()}-{len(self._md5s)}'
        checksum = {}
        if self._client.takes_crc32c:
            checksum = {'x-amz-checksum-crc32c': encode_crc(self._crc), 'x-amz-checksum-type': 'FULL_OBJECT'}
        await self.join(checksum)

    async def join(self, headers: Mapping[str, str]) -> None:
        body = complete_body([self.parts[number] for number in sorted(self.parts)])

        def check(answer: Answer) -> _Confirmation:
            self._check_refusal(answer)
            return _Confirmation.of(answer, s3replies.joined_etag(answer, self._name, self._key))

        async def attempt(condition: Mapping[str, str]) -> _Confirmation:
            query, own = [('uploadId', self._upload)], {**headers, **condition, 'Content-Type': 'application/xml'}
            return await self._client.call(
                'POST', self._key, check, query=query, headers=own, body=body, statuses=(200, *_REFUSALS)
            )

        await self._publish(attempt)

    async def discard(self) -> None:
        await abort(self._client, self._key, self._upload)

    async def put(self, data: bytes) -> None:
        md5 = await digest('md5', data)
        self._etag = md5.hex()
        headers = {**self._headers, **await self._client.check_headers(data, md5)}
        check_etag = self._etag_check(self._etag, 'the object', self._new)

        def check(answer: Answer) -> _Confirmation:
            self._check_refusal(answer)
            return _Confirmation.of(answer, check_etag(answer))

        async def attempt(condition: Mapping[str, str]) -> _Confirmation:
            return await self._client.call(
                'PUT', self._key, check, headers={**headers, **condition}, body=data, statuses=(200, *_REFUSALS)
            )

        await self._publish(attempt)

    async def abort(self) -> None:
        try:
            await super().abort()
        finally:
            if self._unwanted:
                try:
                    await self.withdraw()
                except GranularError as error:
                    logger.warning('%s: was not published, but may exist: %s', self._name, error)

    def part_query(self, number: int) -> Sequence[tuple[str, str]]:
        return [('partNumber', str(number + 1)), ('uploadId', self._upload)]

    def check_upload(self, answer: Answer) -> None:
        """Raise if the answer says that the upload, or its bucket, no longer exists."""
        if answer.head.status == 404:
            match code_of(answer.body):
                case 'NoSuchBucket':
                    raise no_such_bucket(self._name, 'NoSuchBucket')
                case 'NoSuchUpload':
                    raise StoreError(f'{self._name}: its upload no longer exists: was it aborted? (NoSuchUpload)')
                case code:
                    raise BadReplyError(f'{self._name}: expected a confirmation of the upload, got status 404, {code}')

    def _check_refusal(self, answer: Answer) -> None:
        """Raise if the answer says that the object exists already, or that its upload no longer exists."""
        status, code = answer.head.status, code_of(answer.body)
        if status in (409, 412):
            raise AlreadyExistsError(
                f'{self._name}: another writer has published it in the meantime (status {status}, {code})'
            )
        if status == 501:
            raise _NoConditionsError(f'{self._name}: status 501, {code}')
        self.check_upload(answer)

    def _etag_check(self, md5: str, sent: str, may_differ: bool = False) -> Callable[[Answer], str]:
        """Return a check of the replies to data, which returns their ETag.

        A second mismatch passes, because ETags may not be MD5s: the whole object is compared later.
        """

        def check(answer: Answer) -> str:
            nonlocal may_differ
            etag = s3replies.written_etag(answer, self._name)
            may_differ = (
                may_differ
                or self._client.has_odd_etags
                or not self._client.etag_is_md5
                or s3replies.is_encrypted(answer.head.headers)
            )
            if etag.strip('"') != md5 and not may_differ:
                may_differ = True
                raise BadReplyError(f'{self._name}: expected md5 {md5} of {sent}, the store has {etag}')
            return etag

        return check

    # --- publication and verification

    async def _publish(self, attempt: Attempt) -> None:
        """Publish the object, with ``new`` only if it does not exist, and verify it."""
        condition = NEW if self._new else {}
        for tries in range(1, _CONFLICTS + 1):
            self._unwanted = self._new  # one that has replaced another stays: otherwise neither is left
            try:
                confirmation = await attempt(condition)
            except (AlreadyExistsError, _NoConditionsError, StoreError) as error:
                if await self._succeeded(error):
                    return
                if isinstance(error, _NoConditionsError) and condition:
                    condition = {}
                elif isinstance(error, _NoConditionsError):
                    raise StoreError(str(error)) from None
                elif not isinstance(error, AlreadyExistsError) or tries == _CONFLICTS:
                    raise
            else:
                await self._check(confirmation)
                return
        raise StoreError(f'{self._name}: not published: the store reports a conflict each time, but no object exists')

    async def _succeeded(self, error: GranularError) -> bool:
        """Return whether this writer has published the object although its last attempt failed; raise
        ``AlreadyExistsError`` if the object must be new, and another writer has published it.

        The reply to an earlier attempt may be lost: the object in the store shows if that attempt succeeded.
        """
        try:
            metadata = await self._client.find(self._key)
        except GranularError as unknown:
            error.add_note(f'unknown whether it was written nevertheless: {unknown}')
            raise error from None
        if metadata is not None and metadata.writer == self._token:
            await self._verify(metadata)
            return True
        self._unwanted = self._new and isinstance(error, StoreError)  # an attempt may still be in flight
        if metadata is not None and self._new:
            raise AlreadyExistsError(f'{self._name}: another writer has published it in the meantime') from error
        return False

    async def _check(self, confirmation: _Confirmation) -> None:
        """Verify the object whose publication the store has confirmed."""
        proven = confirmation.etag.strip('"') == self._etag
        try:
            metadata = await self._client.find(self._key)
        except AccessDeniedError:
            if not proven:
                raise
            return  # with write-only credentials, the matching ETag is the proof
        if metadata is None:
            raise BadReplyError(f'{self._name}: the store has confirmed its publication, but it does not exist')
        if metadata.writer in ('', self._token):  # some stores drop the metadata
            await self._verify(metadata)
            return
        if self._new:
            self._unwanted = False
            with contextlib.suppress(GranularError):
                await creates_once(self._client, self._key)  # warns if not: a copy replaces objects with any server
            raise AlreadyExistsError(f'{self._name}: another writer has replaced it in the meantime')
        # The last writer wins. An object that is older than the reply shows that the store has lost this one.
        younger = metadata.modified is None or metadata.modified > confirmation.time - _CLOCK_SKEW
        if not younger or not proven:
            raise ObjectChangedError(
                f'{self._name}: the store has confirmed its publication, but has the object of another writer'
            )

    async def _verify(self, metadata: ObjectMetadata) -> None:
        """Compare size and checksum of the object in the store with what was written."""
        self.version = metadata.version
        digests, crc = metadata.content_info(self._client.etag_is_md5).digests, f'{self._crc:08x}'
        if metadata.size == self._size:
            if self._etag in (digests.get('md5'), digests.get('parts')) or digests.get('crc32c') == crc:
                return
            if 'crc32c' not in digests:
                # Its ETag is not a checksum, or its bytes differ.
                digests = {'crc32c': await self._read_back(metadata)}
                if digests['crc32c'] == crc:
                    self._client.has_odd_etags = True
                    return
        found = f'{metadata.size} bytes {dict(digests)}'
        raise self.damaged(f'expected {self._size} bytes of crc32c {crc}, the store has {found}')

    def damaged(self, detail: str) -> StoreError:
        """Return the error for a published object that is not what was written, and is to be removed."""
        self._unwanted = True
        return StoreError(f'{self._name}: {detail}', path=self._name)

    async def _read_back(self, metadata: ObjectMetadata) -> str:
        crc = 0
        for start in range(0, metadata.size, _READ):
            stop = min(start + _READ, metadata.size)
            reply = await self._client.store.read(self._key, start, stop, metadata.version)
            crc = await offload(crc32c, reply.data, crc)
        return f'{crc:08x}'

    async def withdraw(self) -> bool:
        if (metadata := await self._client.find(self._key)) is None:
            return True
        if metadata.writer != self._token or not await creates_once(self._client, self._key):
            return False
        await self._client.delete_one(self._key, metadata.version)
        return True
