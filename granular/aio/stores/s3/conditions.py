"""Servers that ignore the conditions of requests, as some of other vendors do."""

import functools
import uuid
from typing import Final

from granular._support.text import logger
from granular.aio.http.transport import Answer
from granular.aio.runtime.lock import Lock
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.client import S3Client
from granular.aio.stores.s3.documents import complete_body
from granular.aio.stores.s3.replies import Part
from granular.aio.stores.s3.uploads import abort

NEW: Final = {'If-None-Match': '*'}
"""The condition that an object does not exist."""

_REFUSED: Final = (409, 412)

_honour: Final[dict[str, bool]] = {}  # by endpoint
_turns: Final = Lock()


async def creates_once(client: S3Client, key: str) -> bool:
    """Return whether the server refuses to create an object that exists, found out once per endpoint.

    Otherwise, an object that a writer has created may be another's a moment later. To find out, a small object is
    created beside the given one, and removed.
    """
    endpoint = client.endpoint
    if not endpoint:
        return True  # Amazon's own
    async with _turns.turn():
        if endpoint not in _honour:
            folder = key[: key.rfind('/') + 1]
            _honour[endpoint] = await _refuses_to_replace(client, f'{folder}.granular-conditions.{uuid.uuid4().hex}')
            if not _honour[endpoint]:
                logger.warning(
                    '%s: ignores the condition that an object is new (If-None-Match): concurrent writers of one path '
                    'are not kept apart, and a writer that fails leaves what it has published',
                    endpoint,
                )
    return _honour[endpoint]


async def _refuses_to_replace(client: S3Client, key: str) -> bool:
    name = client.store.url(key)

    async def put() -> int:
        statuses = (200, *_REFUSED, 501)
        headers = {**NEW, **await client.check_headers(b'x')}
        return await client.call('PUT', key, _status, headers=headers, body=b'x', statuses=statuses)

    async def join() -> int:
        started = functools.partial(s3replies.upload_id, name=name, key=key)
        upload = await client.call('POST', key, started, query=[('uploads', '')])
        try:
            query = [('partNumber', '1'), ('uploadId', upload)]
            sent = functools.partial(s3replies.written_etag, name=name)
            etag = await client.call('PUT', key, sent, query=query, body=b'x')
            body, headers = complete_body([Part(etag)]), {**NEW, 'Content-Type': 'application/xml'}
            return await client.call(
                'POST', key, _status, query=query[1:], headers=headers, body=body, statuses=(200, *_REFUSED, 501)
            )
        finally:
            await abort(client, key, upload)

    try:
        return await put() != 501 and await put() in _REFUSED and await join() in _REFUSED
    finally:
        await client.delete_one(key)


def _status(answer: Answer) -> int:
    return answer.head.status
