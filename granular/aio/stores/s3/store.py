"""The store for S3 and S3-compatible servers."""

import os
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from granular._support.redact import without_user
from granular.aio.runtime.threads import offload
from granular.aio.stores import endpoints
from granular.aio.stores.base import ContentInfo, ObjectWriter, Stat, Upload
from granular.aio.stores.clients import Bucket
from granular.aio.stores.listing import Listing, Page
from granular.aio.stores.remote import RemoteStore
from granular.aio.stores.s3.client import EXPRESS, S3Client
from granular.aio.stores.s3.documents import is_writable
from granular.aio.stores.s3.options import OPTIONS, check_mappings

_BATCH: Final = 1000  # keys in one delete request


class S3Store(Bucket, RemoteStore[S3Client]):
    """An S3 bucket.

    Options: ``key``, ``secret``, ``token``, ``profile``, ``anon``, ``endpoint_url``, ``region``, ``requester_pays``,
    ``tls_verify``, ``s3_additional_kwargs`` (headers of what is written, such as ``ServerSideEncryption``),
    ``client_kwargs`` (``endpoint_url`` and ``region_name``) and ``config_kwargs`` (those of botocore's ``Config``, such
    as ``s3={'addressing_style': ...}`` or ``use_fips_endpoint``). ``key`` and ``secret`` are given together. What the
    options do not say, botocore decides: by the environment, the configuration of AWS and its chain of credentials.
    """

    passes = 5
    option_names = OPTIONS
    variables = ('AWS_', 'REQUESTS_CA_BUNDLE')
    endpoint: endpoints.S3Endpoint

    def _find_endpoint(self) -> endpoints.S3Endpoint:
        check_mappings(self.root, self.options)
        return endpoints.s3(self.options, os.environ)

    def _endpoint_options(self) -> dict[str, Any]:
        return {} if self.endpoint.url is None else {'endpoint_url': without_user(self.endpoint.url)}

    def _space(self) -> str:
        return self.endpoint.identity

    async def make_client(self) -> S3Client:
        # Importing botocore is slow: keep it off the event loop.
        return await offload(S3Client, self)

    async def stat(self, key: str) -> Stat:
        if key and (metadata := await (await self.client()).find(key)) is not None:
            return Stat(metadata.size, metadata.modified, metadata.version)
        return await self.stat_folder(key)

    async def content_info(self, key: str) -> ContentInfo:
        client = await self.client()
        return (await client.head(key)).content_info(client.etag_is_md5)

    def digest_kind(self, size: int) -> str:
        return 'md5' if size <= self.config.part_size else 'parts'

    @property
    def ordered(self) -> bool:
        return not self.endpoint.url and not self.bucket.endswith(EXPRESS)

    def _listing(self, key: str, prefix: str = '', delimiter: str = '') -> Listing:
        # A directory bucket takes no other prefix than a folder.
        return super()._listing(key, '' if self.bucket.endswith(EXPRESS) else prefix, delimiter)

    async def page(self, listing: Listing, limit: int = 0) -> Page:
        return await (await self.client()).page(listing, limit)

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        from granular.aio.stores.s3.writing import S3Writer

        return S3Writer(await self.client(), key, new)

    async def create_root(self) -> bool:
        await (await self.client()).create_bucket()
        return True

    async def delete(self, keys: Sequence[str]) -> None:
        client = await self.client()
        if len(keys) == 1:
            await client.delete_one(keys[0])
            return
        writable = [key for key in dict.fromkeys(keys) if is_writable(key)]
        for key in set(keys).difference(writable):
            await client.delete_one(key)
        for i in range(0, len(writable), _BATCH):
            await client.delete_many(writable[i : i + _BATCH])

    async def uploads(self, key: str) -> AsyncGenerator[Upload, None]:
        from granular.aio.stores.s3.uploads import uploads

        async for upload in uploads(await self.client(), key):
            yield upload

    async def abort_upload(self, upload: Upload) -> None:
        from granular.aio.stores.s3.uploads import abort

        await abort(await self.client(), upload.key, upload.id)

    async def copy_within(self, source: str, target: str) -> bool:
        from granular.aio.stores.s3.copying import Copier

        client = await self.client()
        await Copier(client, source, target, await client.head(source)).copy()
        return True
