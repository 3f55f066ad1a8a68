"""Server-side copies within an S3 bucket."""

import urllib.parse
from collections.abc import Mapping
from typing import Final

from granular.aio.http.refusals import code_of
from granular.aio.http.reply import changed
from granular.aio.http.transport import Answer
from granular.aio.runtime.tasks import gather
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.client import Query, S3Client
from granular.aio.stores.s3.replies import ObjectMetadata, Part
from granular.aio.stores.s3.writing import S3Writer
from granular.config import MiB
from granular.errors import StoreError

# S3 copies up to 5 GiB per request, but sends nothing meanwhile: a copy that long would run into the timeouts.
MAX_COPY: Final = 256 * MiB
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


class Copier(S3Writer):
    """A server-side copy of the version of an object that has the given metadata, of a large one in parts."""

    def __init__(self, client: S3Client, source: str, target: str, metadata: ObjectMetadata) -> None:
        super().__init__(client, target, False, _carried(metadata.headers))
        self._source_name, self._version = client.store.url(source), metadata.version
        self._source = {'x-amz-copy-source': urllib.parse.quote(_source_of(client.store.bucket, source), safe='/~-_.')}
        if metadata.version:
            self._source['x-amz-copy-source-if-match'] = metadata.version
        self._size = metadata.size

    async def copy(self) -> None:
        """Copy the object at once, or all parts, which are then joined."""
        if self._size <= MAX_COPY:
            await self._send_copy('CopyObjectResult', self._client.written_headers)
            await self._verify(await self._client.head(self._key))
            return
        step = max(MAX_COPY, -(-self._size // _MAX_PARTS))
        parts = list(enumerate(range(0, self._size, step)))
        try:
            await self.begin()
            for first in range(0, len(parts), self._parallel):
                await gather([self._copy_part(*part, step) for part in parts[first : first + self._parallel]])
            await self.join({})
        except BaseException:
            await self.abort()
            raise

    async def _copy_part(self, number: int, start: int, step: int) -> None:
        span = {'x-amz-copy-source-range': f'bytes={start}-{min(start + step, self._size) - 1}'}
        self.parts[number] = await self._send_copy('CopyPartResult', span, self.part_query(number))

    async def _send_copy(self, tag: str, headers: Mapping[str, str], query: Query = ()) -> Part:
        def check(answer: Answer) -> Part:
            if answer.head.status == 412:
                raise changed(self._source_name, self._version or '', None)
            if answer.head.status == 404:
                if code_of(answer.body) == 'NoSuchUpload':
                    raise StoreError(f'{self._source_name}: the upload of its copy no longer exists: was it aborted?')
                raise s3replies.missing_error(answer, self._source_name)
            return s3replies.copied_part(answer, self._source_name, tag)

        headers = {**headers, **self._source}
        return await self._client.call('PUT', self._key, check, query=query, headers=headers, statuses=(200, 404, 412))

    async def _verify(self, metadata: ObjectMetadata) -> None:
        if metadata.size != self._size:
            raise self.damaged(f'expected {self._size} bytes, as {self._source_name} has, got {metadata.size}')


def _source_of(bucket: str, key: str) -> str:
    """Return the source of a copy. What an ARN ends in may have colons in an address, and has slashes here."""
    if not bucket.startswith('arn:'):
        return f'/{bucket}/{key}'
    *parts, resource = bucket.split(':', 5)
    return ':'.join([*parts, resource.replace(':', '/')]) + f'/object/{key}'


def _carried(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name in _CARRIED or name.startswith('x-amz-meta-')}
