"""Uploads to S3: one that is being written, and those that nobody finished."""

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from granular.aio.loops import gather, need_loop
from granular.aio.stores.base import Upload
from granular.aio.stores.parts import PartWriter
from granular.aio.stores.s3 import S3Store, translated
from granular.errors import NotFoundError


class S3Writer(PartWriter):
    """A multipart upload, or a single put if one part is enough."""

    def __init__(self, store: S3Store, fs: Any, key: str, new: bool) -> None:
        super().__init__(store.config.part_size, store.config.upload_concurrency)
        self._absent = {'IfNoneMatch': '*'} if new else {}
        self._name, self._fs = store.url(key), fs
        self._target = {'Bucket': store.bucket, 'Key': key}
        self._upload: dict[str, Any] = {}
        self._etags: dict[int, str] = {}

    async def begin(self) -> None:
        with translated(self._name):
            reply = await self._fs._call_s3('create_multipart_upload', **self._target)
        self._upload = {**self._target, 'UploadId': reply['UploadId']}

    async def send(self, number: int, data: bytes, last: bool) -> None:
        with translated(self._name):
            reply = await self._fs._call_s3('upload_part', **self._upload, PartNumber=number + 1, Body=data)
        self._etags[number + 1] = reply['ETag']

    async def finish(self) -> None:
        parts = [{'PartNumber': number, 'ETag': self._etags[number]} for number in sorted(self._etags)]
        with translated(self._name):
            call = functools.partial(self._fs._call_s3, MultipartUpload={'Parts': parts}, **self._upload)
            await self._publish(call, 'complete_multipart_upload')

    async def discard(self) -> None:
        await abort(self._name, self._fs, self._upload['Bucket'], self._upload['Key'], self._upload['UploadId'])

    async def put(self, data: bytes) -> None:
        with translated(self._name):
            await self._publish(functools.partial(self._fs._call_s3, Body=data, **self._target), 'put_object')

    async def _publish(self, call: Callable[..., Awaitable[Any]], method: str) -> None:
        """Make the object appear, if it is to be new and is not there yet."""
        from botocore.exceptions import ClientError

        try:
            await call(method, **self._absent)
        except (ClientError, NotImplementedError) as error:
            # Servers of others may not know conditions.
            if not self._absent or 'NotImplemented' not in f'{type(error).__name__} {error}':
                raise
            await call(method)


async def abort(name: str, fs: Any, bucket: str, key: str, upload: str) -> None:
    """Drop an upload in parts, unless it is dropped or finished already."""
    with contextlib.suppress(NotFoundError), translated(name):
        await fs._call_s3('abort_multipart_upload', Bucket=bucket, Key=key, UploadId=upload)


async def uploads(store: S3Store, fs: Any, key: str) -> AsyncIterator[Upload]:
    """The uploads in parts of objects below a key, or of that key, that were not finished."""

    async def look(found: dict[str, Any]) -> Upload | None:
        size, last = 0, found['Initiated'].timestamp()
        more: dict[str, Any] = {}
        while True:
            with translated(store.url(found['Key'])):
                try:
                    page = await fs._call_s3(
                        'list_parts', Bucket=store.bucket, Key=found['Key'], UploadId=found['UploadId'], **more
                    )
                except FileNotFoundError:
                    return None  # finished or dropped meanwhile
            for part in page.get('Parts', ()):
                size += part['Size']
                last = max(last, part['LastModified'].timestamp())
            if not page.get('IsTruncated'):
                return Upload(found['Key'], found['UploadId'], size, last)
            more = {'PartNumberMarker': page['NextPartNumberMarker']}

    more: dict[str, Any] = {}
    while True:
        await need_loop()
        with translated(store.url(key)):
            page = await fs._call_s3('list_multipart_uploads', Bucket=store.bucket, Prefix=key, **more)
        below = [item for item in page.get('Uploads', ()) if not key or f'{item["Key"]}/'.startswith(f'{key}/')]
        for upload in await gather([look(item) for item in below]):
            if upload is not None:
                yield upload
        if not page.get('IsTruncated'):
            return
        more = {'KeyMarker': page['NextKeyMarker'], 'UploadIdMarker': page['NextUploadIdMarker']}
