"""Unfinished multipart uploads of S3: their listing and removal."""

import dataclasses
import functools
from collections.abc import AsyncGenerator, Collection

from granular.aio.http.refusals import code_of
from granular.aio.http.transport import Answer
from granular.aio.runtime.tasks import gather
from granular.aio.stores.base import Upload
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.client import S3Client
from granular.aio.stores.s3.documents import is_truncated, name_decoder, number_of, parse, text_of, time_of
from granular.config import MiB
from granular.errors import BadReplyError

Markers = tuple[str, str]
"""The markers by which a page of uploads is requested: the key and the id of the last upload before it."""


async def uploads(client: S3Client, key: str) -> AsyncGenerator[Upload, None]:
    """Yield the unfinished multipart uploads of an object and of all objects in a folder."""
    name = client.store.url(key)
    markers: Markers | None = None
    requested: set[Markers] = set()
    # A directory bucket takes no other prefix than a folder.
    prefix = key[: key.rfind('/') + 1] if client.is_directory else key
    while True:
        query = [('uploads', ''), ('encoding-type', 'url'), ('prefix', prefix)]
        if markers is not None:
            requested.add(markers)
            query += [('key-marker', markers[0])] + ([('upload-id-marker', markers[1])] if markers[1] else [])
        check = functools.partial(uploads_page, name=name, prefix=prefix, before=requested)
        found, markers = await client.call('GET', '', check, query=query, limit=16 * MiB)
        inside = [upload for upload in found if not key or f'{upload.key}/'.startswith(f'{key}/')]
        for upload in await gather([_with_size(client, upload) for upload in inside]):
            if upload is not None:
                yield upload
        if markers is None:
            return


async def _with_size(client: S3Client, upload: Upload) -> Upload | None:
    """Return an upload with the size and time of its parts; None if it was finished or aborted meanwhile."""
    marker: int | None = 0
    while marker is not None:
        query = [('uploadId', upload.id), *([('part-number-marker', str(marker))] if marker else [])]
        check = functools.partial(parts_page, name=client.store.url(upload.key), before=marker)
        page = await client.call('GET', upload.key, check, query=query, statuses=(200, 404), limit=4 * MiB)
        if page is None:
            return None
        size, modified, marker = page
        upload = dataclasses.replace(upload, size=upload.size + size, modified=max(upload.modified, modified))
    return upload


async def abort(client: S3Client, key: str, upload: str) -> None:
    """Abort a multipart upload, unless it is already aborted or finished."""
    name = client.store.url(key)

    def check(answer: Answer) -> None:
        status, code = answer.head.status, code_of(answer.body)
        if status == 204:
            s3replies.check_empty(answer, name)
        elif status != 404 or code != 'NoSuchUpload':
            raise BadReplyError(f'{name}: expected status 204 for an upload to abort, got {status}, {code}')

    await client.call('DELETE', key, check, query=[('uploadId', upload)], statuses=(200, 204, 404))


def uploads_page(
    answer: Answer, name: str, prefix: str, before: Collection[Markers]
) -> tuple[list[Upload], Markers | None]:
    """Parse a page of unfinished uploads, where ``before`` has the markers by which this page and those before it were
    requested. Return the uploads, without the size of their parts, and the next page's markers.
    """
    root = parse(answer.body, name, 'ListMultipartUploadsResult')
    decode, truncated, uploads = name_decoder(root, name), is_truncated(root, name), []
    for element in root.findall('Upload'):
        key = decode(text_of(element, 'Key', name))
        if not key.startswith(prefix):
            raise BadReplyError(f'{name}: a list of the uploads of {prefix!r} has one of {key!r}')
        uploads.append(Upload(key, text_of(element, 'UploadId', name), 0, time_of(element, 'Initiated', name)))
    if not truncated:
        return uploads, None
    markers = decode(text_of(root, 'NextKeyMarker', name)), root.findtext('NextUploadIdMarker') or ''
    if not markers[0] or markers in before:
        raise BadReplyError(f'{name}: a truncated page of uploads without the markers of the next one')
    return uploads, markers


def parts_page(answer: Answer, name: str, before: int) -> tuple[int, float, int | None] | None:
    """Parse a page of the parts of an upload, requested by the marker ``before``, 0 for the first one. Return the bytes
    of the parts, the time of the last one, and the next page's marker; None if the upload does not exist.
    """
    if answer.head.status == 404 and code_of(answer.body) == 'NoSuchUpload':
        return None
    root = parse(answer.body, name, 'ListPartsResult')
    truncated, size, modified = is_truncated(root, name), 0, 0.0
    for element in root.findall('Part'):
        size += number_of(element, 'Size', name)
        modified = max(modified, time_of(element, 'LastModified', name))
    marker = number_of(root, 'NextPartNumberMarker', name) if truncated else None
    if marker is not None and marker <= before:
        raise BadReplyError(f'{name}: expected a page of parts after {before}, got one after {marker}')
    return size, modified, marker
