"""Unfinished multipart uploads of S3: their listing and removal."""

import functools
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from granular.aio.http.transport import Answer
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import gather
from granular.aio.stores.base import Upload
from granular.aio.stores.remote import RemoteStore
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.client import S3Client
from granular.aio.stores.s3.documents import NameDecoder, code_of, is_truncated, number_of, parse, text_of, time_of
from granular.config import MiB
from granular.errors import BadReplyError


class UnfinishedUpload(NamedTuple):
    """An unfinished multipart upload, without the size of its parts."""

    key: str
    id: str
    modified: float


class UploadsPage(NamedTuple):
    """A page of unfinished multipart uploads, and the markers of the next page."""

    uploads: Sequence[UnfinishedUpload]
    markers: tuple[str, str] | None


class PartsPage(NamedTuple):
    """A page of an upload's parts: their bytes, the time of the last one, and the marker of the next page."""

    size: int
    modified: float
    marker: int | None


async def uploads(store: RemoteStore[S3Client], client: S3Client, key: str) -> AsyncIterator[Upload]:
    """Yield the unfinished multipart uploads of an object and of all objects in a folder."""
    name = store.url(key)
    markers: tuple[str, str] | None = None
    while True:
        await ensure_event_loop()  # the consumer may request a page on another thread than the previous one
        query = [('uploads', ''), ('encoding-type', 'url'), ('prefix', key)]
        if markers is not None:
            query += [('key-marker', markers[0])] + ([('upload-id-marker', markers[1])] if markers[1] else [])
        check = functools.partial(uploads_page, name=name, prefix=key, before=markers)
        page = await client.call('GET', '', check, query=query, limit=16 * MiB)
        inside = [upload for upload in page.uploads if not key or f'{upload.key}/'.startswith(f'{key}/')]
        for upload in await gather([_with_size(client, upload) for upload in inside]):
            if upload is not None:
                yield upload
        markers = page.markers
        if markers is None:
            return


async def _with_size(client: S3Client, upload: UnfinishedUpload) -> Upload | None:
    """Return an upload with the size and time of its parts; None if it was finished or aborted meanwhile."""
    size, modified, marker = 0, upload.modified, 0
    while True:
        query = [('uploadId', upload.id), *([('part-number-marker', str(marker))] if marker else [])]
        check = functools.partial(parts_page, name=client.name(upload.key), before=marker)
        page = await client.call('GET', upload.key, check, query=query, statuses=(200, 404), limit=4 * MiB)
        if page is None:
            return None
        size, modified = size + page.size, max(modified, page.modified)
        if page.marker is None:
            return Upload(upload.key, upload.id, size, modified)
        marker = page.marker


async def abort(client: S3Client, key: str, upload: str) -> None:
    """Abort a multipart upload, unless it is already aborted or finished."""
    name = client.name(key)

    def check(answer: Answer) -> None:
        status, code = answer.head.status, code_of(answer.body)
        if status == 204:
            s3replies.check_empty(answer, name)
        elif status != 404 or code != 'NoSuchUpload':
            raise BadReplyError(f'{name}: expected status 204 for an upload to abort, got {status}, {code}')

    await client.call('DELETE', key, check, query=[('uploadId', upload)], statuses=(200, 204, 404))


# --- replies


def uploads_page(answer: Answer, name: str, prefix: str, before: tuple[str, str] | None) -> UploadsPage:
    """Parse a page of unfinished multipart uploads.

    Args:
      before: the markers by which this page was requested.
    """
    root = parse(answer.body, name, 'ListMultipartUploadsResult')
    decode, truncated, uploads = NameDecoder(root, name).decode, is_truncated(root, name), []
    for element in root.findall('Upload'):
        key = decode(text_of(element, 'Key', name))
        if not key.startswith(prefix):
            raise BadReplyError(f'{name}: a list of the uploads of {prefix!r} has one of {key!r}')
        time = time_of(element, 'Initiated', name)
        uploads.append(UnfinishedUpload(key, text_of(element, 'UploadId', name), time))
    if not truncated:
        return UploadsPage(uploads, None)
    markers = decode(text_of(root, 'NextKeyMarker', name)), root.findtext('NextUploadIdMarker') or ''
    if not markers[0] or markers == before:
        raise BadReplyError(f'{name}: a truncated page of uploads without the markers of the next one')
    return UploadsPage(uploads, markers)


def parts_page(answer: Answer, name: str, before: int) -> PartsPage | None:
    """Parse a page of the parts of an upload; return None if the upload does not exist.

    Args:
      before: the marker by which this page was requested; 0 for the first one.
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
    return PartsPage(size, modified, marker)
