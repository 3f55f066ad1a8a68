"""Server-side copies within an S3 bucket."""

import urllib.parse
from collections.abc import Mapping
from typing import Final

from granular.aio.http.transport import Answer
from granular.aio.reply import changed
from granular.aio.runtime.tasks import gather
from granular.aio.stores.remote import RemoteStore
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.client import S3Client
from granular.aio.stores.s3.documents import code_of
from granular.aio.stores.s3.replies import ObjectMetadata, Part
from granular.aio.stores.s3.writing import S3Writer
from granular.config import MiB
from granular.errors import StoreError

# S3 copies up to 5 GiB per request, but sends nothing meanwhile: a copy that long would run into the timeouts.
_MAX_COPY: Final = 256 * MiB
_MAX_PARTS: Final = 10_000
# Headers of an object that a copy in parts does not carry over by itself.
_CARRIED: Final = (
    'cache-control',
    'content-disposition',
    'content-encoding',
    'content-language',
    'content-type',
    'expires',
)


async def copy_object(store: RemoteStore[S3Client], client: S3Client, source: str, target: str) -> None:
    """Copy an object within the bucket.

    Raises:
      NotFoundError: if the source does not exist.
      ObjectChangedError: if the source is replaced during the copy.
      StoreError: if the copy has another size.
    """
    metadata = await client.head(source)
    if metadata.size <= _MAX_COPY:
        await _copy_at_once(store, client, source, target, metadata)
    else:
        await _Copier(store, client, source, target, metadata).copy()


def _source_headers(store: RemoteStore[S3Client], source: str, metadata: ObjectMetadata) -> dict[str, str]:
    """Return the headers that name the source and require its current version."""
    headers = {'x-amz-copy-source': urllib.parse.quote(f'/{store.bucket}/{source}', safe='/~-_.')}
    return headers | ({'x-amz-copy-source-if-match': metadata.version} if metadata.version else {})


def _check_source(answer: Answer, name: str, metadata: ObjectMetadata) -> None:
    if answer.head.status == 412:
        raise changed(name, metadata.version or '', None)
    if answer.head.status == 404:
        if code_of(answer.body) == 'NoSuchUpload':
            raise StoreError(f'{name}: the upload of its copy no longer exists: was it aborted?')
        raise s3replies.missing_error(answer, name)


async def _copy_at_once(
    store: RemoteStore[S3Client], client: S3Client, source: str, target: str, metadata: ObjectMetadata
) -> None:
    name = store.url(source)

    def check(answer: Answer) -> Part:
        _check_source(answer, name, metadata)
        return s3replies.copied_part(answer, name, 'CopyObjectResult')

    headers = {**client.written_headers, **_source_headers(store, source, metadata)}
    await client.call('PUT', target, check, headers=headers, statuses=(200, 404, 412))
    copied = await client.head(target)
    _check_size(store.url(target), name, metadata.size, copied.size)


def _check_size(target: str, source: str, size: int, copied: int) -> None:
    if size != copied:
        raise StoreError(f'{target}: expected {size} bytes, as {source} has, got {copied}', path=target)


class _Copier(S3Writer):
    """A server-side copy in parts."""

    def __init__(
        self, store: RemoteStore[S3Client], client: S3Client, source: str, target: str, metadata: ObjectMetadata
    ) -> None:
        super().__init__(store, client, target, False, _carried(metadata.headers))
        self._source, self._metadata = source, metadata
        self._size = metadata.size
        self._parallel = store.config.upload_concurrency

    async def copy(self) -> None:
        """Copy all parts and join them."""
        size = self._metadata.size
        step = max(_MAX_COPY, -(-size // _MAX_PARTS))
        parts = [(start, min(start + step, size)) for start in range(0, size, step)]
        await self.start()
        self._started = True
        try:
            for first in range(0, len(parts), self._parallel):
                batch = enumerate(parts[first : first + self._parallel], first)
                await gather([self._copy_part(number, *span) for number, span in batch])
            await self.join({})
        except BaseException:
            await self.abort()
            raise

    async def _copy_part(self, number: int, start: int, stop: int) -> None:
        name = self._store.url(self._source)

        def check(answer: Answer) -> Part:
            _check_source(answer, name, self._metadata)
            return s3replies.copied_part(answer, name, 'CopyPartResult')

        headers = {
            **_source_headers(self._store, self._source, self._metadata),
            'x-amz-copy-source-range': f'bytes={start}-{stop - 1}',
        }
        self.parts[number] = await self._client.call(
            'PUT', self._key, check, query=self.part_query(number), headers=headers, statuses=(200, 404, 412)
        )

    async def _verify(self, metadata: ObjectMetadata) -> None:
        _check_size(self._name, self._store.url(self._source), self._size, metadata.size)


def _carried(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an object that its copy has as well."""
    return {name: value for name, value in headers.items() if name in _CARRIED or name.startswith('x-amz-meta-')}
