"""Server-side copies within an S3 bucket."""

import urllib.parse
from collections.abc import Mapping
from typing import Final

from granular.aio.http.reply import changed
from granular.aio.http.transport import Answer
from granular.aio.runtime.tasks import gather
from granular.aio.stores.remote import RemoteStore
from granular.aio.stores.s3 import replies as s3replies
from granular.aio.stores.s3.client import S3Client
from granular.aio.stores.s3.replies import Found, Part
from granular.aio.stores.s3.writing import S3Writer
from granular.config import MiB
from granular.errors import StoreError

# S3 copies up to 5 GiB per request, but sends nothing meanwhile: a copy that long would run into the timeouts.
_AT_ONCE: Final = 256 * MiB
_MOST_PARTS: Final = 10_000
# Headers of an object that a copy in parts does not carry over by itself.
_OWN: Final = (
    'cache-control',
    'content-disposition',
    'content-encoding',
    'content-language',
    'content-type',
    'expires',
)


async def copy(store: RemoteStore[S3Client], client: S3Client, source: str, target: str) -> None:
    """Copy an object within the bucket.

    Raises:
      NotFoundError: if the source does not exist.
      ObjectChangedError: if the source is replaced during the copy.
      StoreError: if the copy has another size.
    """
    found = await client.look(source)
    if found.size <= _AT_ONCE:
        await _copy_whole(store, client, source, target, found)
    else:
        await _Copier(store, client, source, target, found).copy()


def _pinned(store: RemoteStore[S3Client], source: str, found: Found) -> dict[str, str]:
    """Return the headers that name the source and require its current version."""
    headers = {'x-amz-copy-source': urllib.parse.quote(f'/{store.bucket}/{source}', safe='/~-_.')}
    return headers | ({'x-amz-copy-source-if-match': found.version} if found.version else {})


def _check_source(answer: Answer, name: str, found: Found) -> None:
    if answer.head.status == 412:
        raise changed(name, found.version or '', None)
    if answer.head.status == 404:
        if s3replies.code_of(answer.body) == 'NoSuchUpload':
            raise StoreError(f'{name}: the upload of its copy is gone, as it is after it was aborted')
        raise s3replies.missing(answer, name)


async def _copy_whole(store: RemoteStore[S3Client], client: S3Client, source: str, target: str, found: Found) -> None:
    name = store.url(source)

    def check(answer: Answer) -> Part:
        _check_source(answer, name, found)
        return s3replies.copied(answer, name, 'CopyObjectResult')

    headers = {**client.written, **_pinned(store, source, found)}
    await client.call('PUT', target, check, headers=headers, statuses=(200, 404, 412))
    there = await client.look(target)
    _check_size(store.url(target), name, found.size, there.size)


def _check_size(target: str, source: str, size: int, copied: int) -> None:
    if size != copied:
        raise StoreError(f'{target}: has {copied} bytes after it was copied from {source}, of {size} bytes')


class _Copier(S3Writer):
    """A server-side copy in parts."""

    def __init__(self, store: RemoteStore[S3Client], client: S3Client, source: str, target: str, found: Found) -> None:
        super().__init__(store, client, target, False, _carried(found.headers))
        self._source, self._found = source, found
        self._size = found.size
        self._parallel = store.config.upload_concurrency

    async def copy(self) -> None:
        """Copy all parts and join them."""
        size = self._found.size
        step = max(_AT_ONCE, -(-size // _MOST_PARTS))
        spans = [(start, min(start + step, size)) for start in range(0, size, step)]
        await self.begin()
        self._started = True
        try:
            for first in range(0, len(spans), self._parallel):
                some = enumerate(spans[first : first + self._parallel], first)
                await gather([self._copy_part(number, *span) for number, span in some])
            await self.join({})
        except BaseException:
            await self.abort()
            raise

    async def _copy_part(self, number: int, start: int, stop: int) -> None:
        name = self._store.url(self._source)

        def check(answer: Answer) -> Part:
            _check_source(answer, name, self._found)
            return s3replies.copied(answer, name, 'CopyPartResult')

        headers = {
            **_pinned(self._store, self._source, self._found),
            'x-amz-copy-source-range': f'bytes={start}-{stop - 1}',
        }
        self.parts[number] = await self._client.call(
            'PUT', self._key, check, query=self.part_query(number), headers=headers, statuses=(200, 404, 412)
        )

    async def _verify(self, found: Found) -> None:
        _check_size(self._name, self._store.url(self._source), self._size, found.size)


def _carried(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of an object that its copy takes over."""
    return {name: value for name, value in headers.items() if name in _OWN or name.startswith('x-amz-meta-')}
