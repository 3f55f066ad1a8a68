"""Writer for Azure Blob Storage."""

import io
from collections.abc import Callable, Coroutine
from typing import Any, Final

from granular.aio.stores.azure.client import AzureClient
from granular.aio.stores.base import Store
from granular.aio.stores.multipart import PartWriter
from granular.config import MiB
from granular.errors import AlreadyExistsError, BadReplyError

WRITER: Final = 'granular_writer'
"""Name of the metadata that holds the token of a blob's writer."""


class AzureWriter(PartWriter):
    """An upload in blocks, or a single request if one block is enough. Azure checks the MD5 of each block."""

    def __init__(self, store: Store, client: AzureClient, key: str, new: bool) -> None:
        super().__init__(store, key, new)
        self._client = client
        self._blob: Any = client.blob(key)
        self._metadata = {WRITER: self._token}

    async def start(self) -> None:
        """Do nothing: the first block starts an upload."""

    async def send(self, number: int, data: bytes, last: bool) -> None:
        body = io.BytesIO()

        async def request() -> None:
            nonlocal body
            block = self._block(number)
            # A stream, because aiohttp warns of large bodies of bytes, and to see how much of it was taken.
            body = io.BytesIO(data)
            await self._blob.stage_block(block, body, len(data), validate_content=True, **self._client.settings)

        def sent() -> int | None:
            return body.tell() if body.tell() < len(data) else None

        await self._client.call(self._name, request, len(data), sent)

    def _block(self, number: int) -> str:
        # All ids of a blob must have the same length; the token separates concurrent writers.
        return f'{self._token}-{number:06d}'

    async def finish(self) -> None:
        async def request() -> Any:
            from azure.core import MatchConditions
            from azure.storage.blob import BlobBlock

            blocks = [BlobBlock(self._block(number)) for number in range(self._parts)]
            condition = {'match_condition': MatchConditions.IfMissing} if self._new else {}
            settings = {**condition, **self._client.settings}
            return await self._blob.commit_block_list(blocks, metadata=self._metadata, **settings)

        await self._publish(request, MiB)

    async def put(self, data: bytes) -> None:
        async def request() -> Any:
            return await self._blob.upload_blob(
                io.BytesIO(data),
                length=len(data),
                overwrite=not self._new,
                metadata=self._metadata,
                validate_content=True,
                **self._client.settings,
            )

        await self._publish(request, len(data))

    async def _publish(self, request: Callable[[], Coroutine[Any, Any, Any]], nbytes: int) -> None:
        async def publish() -> str | None:
            from azure.core.exceptions import ResourceExistsError, ResourceModifiedError

            try:
                published = await request()
            except (ResourceExistsError, ResourceModifiedError):
                if not self._new:
                    raise
                # An earlier attempt may have published it, and its reply may be lost.
                return await self._version_published()
            if not (etag := published.get('etag')):
                raise BadReplyError(f'{self._name}: expected the ETag of the blob, got none')
            return str(etag)

        self.version = await self._client.call(self._name, publish, nbytes)
        if self.version is None:
            raise AlreadyExistsError(f'{self._name}: exists already')

    async def _version_published(self) -> str | None:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            properties = await self._blob.get_blob_properties(**self._client.settings)
        except ResourceNotFoundError as error:  # removed meanwhile, or not published yet: it is sent again
            raise BadReplyError(f'{self._name}: refused because it exists, and then reported as missing') from error
        return str(properties.etag) if (properties.metadata or {}).get(WRITER) == self._token else None

    async def discard(self) -> None:
        """Do nothing: uncommitted blocks are invisible, and Azure deletes them after a week."""
