"""Writers for Google Cloud Storage that verify the publication of their objects."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Literal

from granular.aio.http.retry import jittered
from granular.aio.http.transport import Answer
from granular.aio.stores.gcs import replies as gcsreplies
from granular.aio.stores.gcs.client import GCSClient
from granular.aio.stores.gcs.replies import WRITER, Resource
from granular.aio.stores.multipart import PartWriter, encode_crc, extend_crc
from granular.errors import AlreadyExistsError, BadReplyError, GranularError, StoreError

_BINARY: Final = 'application/octet-stream'
_UPLOADED: Final = (200, 201, 308, 404, 410, 412)
_DISCARDED: Final = (200, 204, 400, 404, 410, 412, 499)

Refusal = Literal['exists', 'ended']
"""An answer that a lost reply to an earlier attempt may explain: the object exists already, or the upload has ended."""


class GCSWriter(PartWriter):
    """A resumable upload, whose parts are sent in sequence, or a single request if one part is enough.

    If the reply to an attempt may have been lost, the existing object decides: this writer has published it if it has
    the token, the size and the checksum of what was sent.
    """

    def __init__(self, client: GCSClient, key: str, new: bool) -> None:
        super().__init__(client.store, key, new, parallel=1)
        self._client = client
        self._condition = {'ifGenerationMatch': '0'} if new else {}
        # Description of the object, sent along with its data.
        self._resource = {'name': key, 'contentType': _BINARY, 'metadata': {WRITER: self._token}}
        self._session = ''  # the URL of the upload
        self._offset = 0  # bytes that the store has
        self._crc = 0  # CRC32C of all bytes passed to ``send`` or ``put``

    async def put(self, data: bytes) -> None:
        self._crc = await extend_crc(0, data)
        digest = encode_crc(self._crc)
        edge = secrets.token_hex(16)
        # The store itself checks this checksum before the object appears.
        description = json.dumps({**self._resource, 'crc32c': digest})
        head = (
            f'--{edge}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{description}\r\n'
            f'--{edge}\r\nContent-Type: {_BINARY}\r\n\r\n'
        )
        body = b''.join((head.encode(), data, f'\r\n--{edge}--\r\n'.encode()))
        url = self._client.uploads(uploadType='multipart', **self._condition)
        headers = {'Content-Type': f'multipart/related; boundary={edge}'}

        def check(answer: Answer) -> Resource | Refusal:
            if answer.head.status == 412:
                return 'exists'
            return self._matching(gcsreplies.resource_of(answer, self._name, self._key), len(data))

        await self._publish(
            len(data), lambda: self._client.send(self._name, 'POST', url, check, (200, 201, 412), body, headers)
        )

    async def start(self) -> None:
        def check(answer: Answer) -> str | None:
            return None if answer.head.status == 412 else gcsreplies.session_of(answer, self._name)

        url = self._client.uploads(uploadType='resumable', **self._condition)
        headers = {'Content-Type': 'application/json; charset=UTF-8', 'X-Upload-Content-Type': _BINARY}
        body = json.dumps(self._resource).encode()
        session = await self._client.send(self._name, 'POST', url, check, (200, 201, 412), body, headers)
        if session is None:
            raise self._conflict(await self._client.find_object(self._key))
        self._session = f'{self._client.origin}{session}'

    async def send(self, number: int, data: bytes, last: bool) -> None:
        self._crc = await extend_crc(self._crc, data)
        end = self._offset + len(data)
        if last:
            # The store checks the condition only when the upload ends: checking before can save sending the last part.
            if self._new and (resource := await self._client.find_object(self._key)) is not None:
                raise self._conflict(resource)
            await self._publish(end, lambda: self._upload(data, end, True))
            return
        match await self._upload(data, end, False):
            case 'exists':
                raise self._conflict(await self._client.find_object(self._key))
            case 'ended':
                raise StoreError(f'{self._name}: the upload no longer exists, after {self._offset} bytes')
            case Resource() as resource:
                # It holds the beginning of the data only, such as when the request for the progress ended the upload.
                if resource.writer == self._token:
                    await self._client.delete(self._key, resource.generation)
                raise StoreError(f'{self._name}: the store ended the upload at {resource.size} bytes, before its end')

    async def finish(self) -> None:
        """Do nothing: the last part has finished the upload."""

    async def withdraw(self) -> bool | None:
        if self.version is None:
            return await super().withdraw()
        await self._client.delete(self._key, self.version)  # unless a copy has replaced it since
        return True

    async def discard(self) -> None:
        # An upload that is not cancelled expires after a week, without creating its object.
        nothing = b'', {'Content-Length': '0'}
        await self._client.call(self._name, 'DELETE', self._session, lambda: nothing, lambda answer: None, _DISCARDED)

    async def _upload(self, data: bytes, end: int, last: bool) -> Resource | Refusal | None:
        """Send a part until the store has all of it, resuming at the position that the store reports.

        Returns:
          The object if this ended the upload, a refusal, or None if the store has the part.
        """
        start, stalled = end - len(data), 0
        while True:
            state = await self._advance(memoryview(data)[self._offset - start :], end, last)
            if not isinstance(state, int):
                return state
            if state > end:
                raise BadReplyError(f'{self._name}: {end} bytes were sent, the store reports {state}')
            if state == end and not last:
                self._offset = end
                return None
            if state > self._offset:
                self._offset, stalled = state, 0
                continue
            stalled += 1
            if stalled >= self._config.attempts:
                raise StoreError(
                    f'{self._name}: the store has {state} of {end} bytes, no progress after {stalled} attempts'
                )
            await asyncio.sleep(jittered(self._config.backoff, self._config.backoff_cap, stalled))

    async def _advance(self, rest: memoryview, end: int, last: bool) -> Resource | Refusal | int:
        """Send the rest of a part. Return the bytes that the store then has, the object, or a refusal.

        A lost reply leaves open how much has arrived, so all further attempts only ask for that.
        """
        total = str(end) if last else '*'
        sent = not rest

        def requests() -> tuple[bytes | memoryview, Mapping[str, str]]:
            nonlocal sent
            if sent:
                return b'', {'Content-Range': f'bytes */{total}'}
            sent = True
            headers = {'Content-Type': _BINARY, 'Content-Range': f'bytes {self._offset}-{end - 1}/{total}'}
            if last:
                headers['X-Goog-Hash'] = f'crc32c={encode_crc(self._crc)}'
            return rest, headers

        def check(answer: Answer) -> Resource | Refusal | int:
            match answer.head.status:
                case 308:
                    return gcsreplies.persisted_size(answer, self._name)
                case 412:
                    return 'exists'
                case 404 | 410:
                    return 'ended'
            resource = gcsreplies.resource_of(answer, self._name, self._key)
            return self._matching(resource, end) if last else resource

        return await self._client.call(self._name, 'PUT', self._session, requests, check, _UPLOADED)

    async def _publish(self, size: int, send: Callable[[], Awaitable[Resource | Refusal | None]]) -> None:
        """Send the request that publishes the object; if its outcome is in doubt, the object in the store decides."""
        failure: GranularError | None = None  # None if the store reports that the object exists
        try:
            outcome = await send()
            if isinstance(outcome, Resource):
                self.version = outcome.generation
                return
            if outcome == 'ended':
                failure = StoreError(f'{self._name}: the upload no longer exists')
        except StoreError as error:
            failure = error
        try:
            resource = await self._client.find_object(self._key)
        except GranularError as error:
            failure = failure or error
            failure.add_note(f'{self._name}: unknown whether the object was written')
            raise failure from failure.__cause__
        if resource is None or resource.writer != self._token:
            failure = failure or self._conflict(resource)
            raise failure from failure.__cause__
        try:
            self._matching(resource, size)
        except BadReplyError:
            await self._client.delete(self._key, resource.generation)
            raise
        self.version = resource.generation

    def _matching(self, resource: Resource, size: int) -> Resource:
        """Return the object, which must have the size and checksum of what was sent."""
        digest, expected = resource.digests.get('crc32c'), f'{self._crc:08x}'
        if resource.size != size or digest != expected:
            raise BadReplyError(
                f'{self._name}: expected {size} bytes of crc32c {expected}, the store has {resource.size} bytes of '
                f'crc32c {digest}'
            )
        return resource

    def _conflict(self, resource: Resource | None) -> GranularError:
        """Return the error for status 412, given the object that exists."""
        if self._new and resource is not None:
            return AlreadyExistsError(f'{self._name}: another writer has published it in the meantime')
        reason = 'there is no object' if self._new else 'the request had no condition'
        return StoreError(f'{self._name}: status 412, although {reason}')
