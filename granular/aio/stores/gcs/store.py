"""The store for Google Cloud Storage."""

import os
from collections.abc import Sequence
from typing import Any, Final

from granular._support.redact import without_user
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.aio.stores import endpoints
from granular.aio.stores.base import ContentInfo, ObjectWriter, Stat
from granular.aio.stores.clients import Bucket
from granular.aio.stores.gcs.client import GCSClient
from granular.aio.stores.listing import Listing, Page
from granular.aio.stores.remote import RemoteStore
from granular.errors import StoreError

PAGE: Final = 1000  # names in a page of a listing, the maximum of the API
_DELETIONS: Final = 100  # at a time


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

    option_names = ('anon', 'endpoint_url', 'project', 'requester_pays', 'tls_verify', 'token')
    version_header = 'x-goog-generation'
    versions_repeat = False
    variables = (
        *('GOOGLE_APPLICATION_CREDENTIALS', 'GOOGLE_CLOUD_PROJECT', 'CLOUDSDK_CONFIG', 'GCE_METADATA_HOST'),
        *('REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE'),
    )
    endpoint: str

    def _find_endpoint(self) -> str:
        return endpoints.gcs(self.options, os.environ)

    def _endpoint_options(self) -> dict[str, Any]:
        return {} if self.endpoint == endpoints.GOOGLE else {'endpoint_url': without_user(self.endpoint)}

    async def make_client(self) -> GCSClient:
        # Importing google-auth and finding credentials is slow: keep both off the event loop.
        return await offload(GCSClient, self)

    async def stat(self, key: str) -> Stat:
        client = await self.client()
        if key and (resource := await client.find_object(key)) is not None:
            return Stat(resource.size, resource.modified, resource.generation)
        return await self.stat_folder(key)

    async def content_info(self, key: str) -> ContentInfo:
        resource = await (await self.client()).get_object(key)
        return ContentInfo(resource.size, resource.generation, resource.digests)

    def digest_kind(self, size: int) -> str:
        return 'crc32c'

    async def page(self, listing: Listing, limit: int = 0) -> Page:
        return await (await self.client()).page(listing, limit or PAGE)

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        from granular.aio.stores.gcs.writing import GCSWriter

        return GCSWriter(await self.client(), key, new)

    async def create_root(self) -> bool:
        created = await (await self.client()).create_bucket()
        if created:
            return True
        # Bucket names are global to all projects: a bucket that is invisible to these credentials cannot be used.
        if await self.find('') is None:
            raise StoreError(f'{self.root}: the store reports that the bucket exists, and that it does not')
        return created is None

    async def delete(self, keys: Sequence[str]) -> None:
        client = await self.client()
        await for_each(keys, client.delete, _DELETIONS)

    async def copy_within(self, source: str, target: str) -> bool:
        client = await self.client()
        await client.copy(source, target)
        return True
