"""The store for Google Cloud Storage."""

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from granular._redact import without_user
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import offload
from granular.aio.stores import endpoints
from granular.aio.stores.base import ContentInfo, Entry, Folders, ObjectWriter, Stat
from granular.aio.stores.clients import Bucket
from granular.aio.stores.gcs.client import GCSClient
from granular.aio.stores.gcs.listing import Listing, Page
from granular.aio.stores.remote import RemoteStore
from granular.errors import NotFoundError

_PAGE: Final = 1000  # names in a page of a listing, the maximum of the API
_BATCH: Final = 100  # concurrent deletions


class GCSStore(Bucket, RemoteStore[GCSClient]):
    """A GCS bucket.

    Options:
      token: the credentials, as :func:`granular.aio.stores.gcs.auth.log_in` takes them.
      anon: True to send no credentials.
      project: the project of new buckets, also billed for requests if ``requester_pays`` is True.
      endpoint_url: the server, instead of STORAGE_EMULATOR_HOST or https://storage.googleapis.com.
      requester_pays: True, or the name of the project to bill for requests.
      tls_verify: False to skip the verification of certificates, or the file of the authorities to trust.
    """

    version_header = 'x-goog-generation'
    versions_repeat = False
    variables = ('GOOGLE_APPLICATION_CREDENTIALS', 'GOOGLE_CLOUD_PROJECT', 'CLOUDSDK_CONFIG', 'GCE_METADATA_HOST')
    endpoint: str

    def _find_endpoint(self) -> str:
        return endpoints.gcs(self.options, os.environ)

    def _endpoint_options(self) -> dict[str, Any]:
        return {} if self.endpoint == endpoints.GOOGLE else {'endpoint_url': without_user(self.endpoint)}

    def _space(self) -> str:
        return self.endpoint.rstrip('/')

    async def make_client(self) -> GCSClient:
        # Importing google-auth and finding credentials is slow: keep both off the event loop.
        return await offload(GCSClient, self)

    async def stat(self, key: str) -> Stat:
        client = await self.client()
        if key and (resource := await client.find_object(key)) is not None:
            return Stat(resource.size, resource.modified, resource.generation)
        listing = Listing(self.url(key), f'{key}/' if key else '', '')
        while not listing.ended:
            page = await client.page(listing, 1)
            if not key or page.items:
                return Stat(0, is_dir=True)
        raise NotFoundError(f'{self.url(key)}: no such object or folder')

    async def content_info(self, key: str) -> ContentInfo:
        client = await self.client()
        resource = await client.find_object(key)
        if resource is None:
            raise NotFoundError(f'{self.url(key)}: no such object')
        return ContentInfo(resource.size, resource.generation, resource.digests)

    def digest_kind(self, size: int) -> str:
        return 'crc32c'

    async def _pages(self, key: str, prefix: str, delimiter: str, must_exist: bool) -> AsyncIterator[Page]:
        client = await self.client()
        listing = Listing(self.url(key), f'{key}/{prefix}' if key else prefix, delimiter)
        missing = must_exist and bool(key) and not prefix
        while not listing.ended:
            await ensure_event_loop()  # the consumer may request a page on another thread than the previous one
            page = await client.page(listing, _PAGE)
            missing = missing and not page.items and not page.folders
            yield page
        if missing:
            raise NotFoundError(f'{self.url(key)}: no such folder')

    async def scan(self, key: str, prefix: str = '') -> AsyncIterator[Entry]:
        async for page in self._pages(key, prefix, '/', True):
            for folder in page.folders:
                yield Entry(folder[:-1], True)
            for item in page.items:
                # A key that ends in a slash marks a folder, and is not an entry of that folder.
                if not item.name.endswith('/'):
                    yield Entry(item.name, False, item.size, item.modified)

    async def scan_tree(self, key: str) -> AsyncIterator[Entry]:
        folders = Folders(key)
        async for page in self._pages(key, '', '', True):
            for item in page.items:
                for folder in folders.of(item.name):
                    yield folder
                if not item.name.endswith('/'):
                    yield Entry(item.name, False, item.size, item.modified)

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        from granular.aio.stores.gcs.writing import GCSWriter

        return GCSWriter(self, await self.client(), key, new)

    async def has_root(self) -> bool:
        return await (await self.client()).has_bucket()

    async def create_root(self) -> bool:
        return await (await self.client()).create_bucket()

    async def delete(self, keys: Sequence[str]) -> None:
        client = await self.client()
        for i in range(0, len(keys), _BATCH):
            await gather([client.delete(key) for key in keys[i : i + _BATCH]])

    async def delete_listed(self, key: str, must_exist: bool) -> int:
        count = 0
        async for page in self._pages(key, '', '', must_exist):
            count += len(page.items)
            await self.delete([item.name for item in page.items])
        return count

    async def copy_within(self, source: str, target: str) -> bool:
        client = await self.client()
        await client.copy(source, target)
        return True
