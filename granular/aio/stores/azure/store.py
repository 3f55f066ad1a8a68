"""The store for Azure Blob Storage."""

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from granular._support.redact import protect
from granular.aio.http.messages import http_date
from granular.aio.http.reply import Reply, changed
from granular.aio.runtime.loop_resources import Scope
from granular.aio.runtime.tasks import for_each, gather
from granular.aio.runtime.threads import offload
from granular.aio.stores import ranges
from granular.aio.stores.azure.account import OPTIONS, VARIABLES, find_account, secrets_of
from granular.aio.stores.azure.client import AzureClient, code_of
from granular.aio.stores.base import ContentInfo, Entry, ObjectWriter, Stat
from granular.aio.stores.clients import Bucket, ClientStore
from granular.aio.stores.listing import Listing, Page
from granular.config import IOConfig, MiB
from granular.errors import BadReplyError, InvalidArgumentError, NotFoundError, StoreError

_CONTAINER: Final = re.compile(r'[A-Za-z0-9$_-]+')
_MOST_READ: Final = 32 * MiB  # bytes above which the SDK sends several requests itself
PAGE: Final = 1000  # names in a page of a listing
_DELETIONS: Final = 100  # concurrent deletions
_POLL: Final = 0.1  # seconds between two questions for the state of a copy
# Blobs that stand for folders, as hierarchical accounts and Hadoop mark them.
_FOLDER_MARKS: Final = ('hdi_isfolder', 'is_directory')


class Blob(NamedTuple):
    """A blob; with ``is_dir``, one that marks a folder."""

    name: str
    size: int
    modified: float | None
    etag: str
    is_dir: bool


class AzureStore(Bucket, ClientStore[AzureClient]):
    """A container in an account of Azure Blob Storage.

    Options:
      account_name: the account, unless the address or a connection string names it.
      account_key, sas_token, connection_string: the credentials.
      credential: an ``azure.core.credentials_async.AsyncTokenCredential``.
      client_id, client_secret, tenant_id: a service principal.
      anon: True to send no credentials.
      account_host: the host of the account, in clouds other than the public one.
      endpoint_url: the URL of the account, such as that of an emulator.
    """

    option_names = OPTIONS
    versions_repeat = False
    variables = VARIABLES
    naming = ('endpoint_url', 'account_host', 'account_name')
    noun = 'blobs'
    ordered = property(lambda self: False)

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        self._container, at, _ = root.partition('://')[2].partition('@')
        if not _CONTAINER.fullmatch(self._container):
            reason = 'pass credentials as options, not in the address' if at else 'expected a container'
            raise InvalidArgumentError(f'{root.partition("://")[0]}://...: {reason}')
        super().__init__(root, config, options)
        protect(secrets_of(self._account.login))

    def _find_endpoint(self) -> str:
        self._account = find_account(self.root, self.options)
        return self._account.endpoint

    def _endpoint_options(self) -> dict[str, Any]:
        return {'endpoint_url': self.endpoint} if self.endpoint else {}

    async def _open_client(self, opened: Scope) -> AzureClient:
        # Importing adlfs and logging in is slow: keep both off the event loop.
        return await offload(AzureClient, self, self._container, self._account)

    async def now(self, key: str) -> float:
        client, answers = await self.client(), list[Any]()

        async def request() -> float:
            pages = client.container.list_blobs(results_per_page=1, raw_response_hook=answers.append, **client.settings)
            await anext(pages.by_page(), None)
            date = answers[-1].http_response.headers.get('Date', '')
            if (moment := http_date(date)) is None:
                raise BadReplyError(f'{self.url(key)}: expected the time in the Date header, got {date!r:.100}')
            return moment.timestamp()

        return await client.call(self.url(key), request)

    # --- reading

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        if start < 0 or start == stop:  # Azure reads no ranges from the end, and no empty ones
            return await self._read_known(key, start, stop, await self._file(key, version))
        if version is not None and stop is not None and stop - start > self._largest:
            replies = await gather([self.read(key, *part, version) for part in self._split(start, stop)])
            return replies[0]._replace(data=b''.join([reply.data for reply in replies]))
        end = start + self._largest if stop is None else min(stop, start + self._largest)
        first = await self._read_part(key, start, end, version)
        if first is None:  # it has no bytes from the start on
            blob = await self._file(key, version)
            if version is not None and start < blob.size:
                had = f'bytes {start} to {stop} of version {version[:80]!r}, which has them'
                raise BadReplyError(f'{self.url(key)}: status 416 for {had}', path=self.url(key))
            return await self._read_known(key, start, stop, blob)
        _, last = self.check_range(key, start, stop, first.size)
        end = start + len(first.data)
        if end == last:
            return first
        rest = await gather([self.read(key, *part, first.version) for part in self._split(end, last)])
        return first._replace(data=b''.join([first.data, *(reply.data for reply in rest)]))

    async def _read_known(self, key: str, start: int, stop: int | None, blob: Blob) -> Reply:
        first, end = self.check_range(key, start, stop, blob.size)
        if first == end:
            return Reply(b'', first, blob.size, blob.etag)
        return await self.read(key, first, end, blob.etag)

    async def _read_part(self, key: str, start: int, stop: int, version: str | None) -> Reply | None:
        """Read a range by one request, up to the end of the blob if that comes first; None if it has no such bytes."""
        client, name = await self.client(), self.url(key)
        blob, answers = client.blob(key), list[Any]()

        async def request() -> Reply | None:
            from azure.core.exceptions import HttpResponseError

            try:
                # A blob may say that its content is compressed: its bytes are read as they are.
                stream = await blob.download_blob(
                    offset=start,
                    length=stop - start,
                    decompress=False,
                    raw_response_hook=answers.append,
                    **_condition(version),
                    **client.settings,
                )
                data = await stream.readall()
            except HttpResponseError as error:
                if error.status_code == 416:
                    return None
                raise
            finally:
                for answer in answers:  # the SDK leaves the connection open if this is cancelled
                    answer.http_response.internal_response.close()
            # The SDK does not compare the range of the reply with that of the request.
            headers = answers[-1].http_response.headers
            size = int(headers['Content-Range'].rpartition('/')[2])
            end = min(stop, size)
            expected = f'bytes {start}-{end - 1}/{size}'
            if headers['Content-Range'] != expected or len(data) != end - start or not stream.properties.etag:
                content = f'{len(data)} bytes of {headers["Content-Range"]!r:.100}'
                raise BadReplyError(f'{name}: expected {end - start} of {expected!r}, got {content}')
            return Reply(data, start, size, stream.properties.etag)

        def received() -> int | None:
            return answers[-1].http_response.internal_response.content.total_bytes if answers else None

        reply = await client.call(name, request, stop - start, received)
        if reply is not None:
            client.note_read(blob)
            client.metrics.bytes += len(reply.data)
            if version is not None and reply.version != version:
                raise changed(name, version, reply.version)
        return reply

    @property
    def _largest(self) -> int:
        return min(self.merge.max_request, _MOST_READ)

    async def read_into(
        self, key: str, start: int, stop: int, version: str | None, target: memoryview, largest: int = 0
    ) -> None:
        await self.ready()
        if version is None:
            version = (await self._file(key)).etag

        async def fill(left: int, right: int) -> None:
            target[left - start : right - start] = (await self.read(key, left, right, version)).data

        await gather([fill(*part) for part in self._split(start, stop, largest)])

    def _split(self, start: int, stop: int, largest: int = 0) -> list[tuple[int, int]]:
        return ranges.split(start, stop, min(max(largest, self._largest), _MOST_READ))

    async def _find(self, key: str, version: str | None = None) -> Blob | None:
        """Return a blob; None if there is none. It must have the given version."""
        client, condition = await self.client(), _condition(version)
        blob = client.blob(key)

        async def request() -> Blob:
            properties = await blob.get_blob_properties(**condition, **client.settings)
            if not properties.etag or properties.size is None:
                raise BadReplyError(f'{self.url(key)}: expected the ETag and the size of a blob, got none')
            return _blob_of(properties)

        return await client.call_existing(self.url(key), request)

    async def _file(self, key: str, version: str | None = None) -> Blob:
        blob = await self._find(key, version) if key else None
        if blob is None:
            raise NotFoundError(f'{self.url(key)}: no such blob', path=self.url(key))
        return blob

    async def stat(self, key: str) -> Stat:
        if key and (blob := await self._find(key)) is not None:
            return Stat(0, is_dir=True) if blob.is_dir else Stat(blob.size, blob.modified, blob.etag)
        return await self.stat_folder(key)

    async def content_info(self, key: str) -> ContentInfo:
        blob = await self._file(key)
        return ContentInfo(blob.size, blob.etag, {})

    async def page(self, listing: Listing, limit: int = 0) -> Page:
        client = await self.client()
        names = client.container.walk_blobs if listing.delimiter else client.container.list_blobs

        async def request() -> Page:
            pages = names(
                name_starts_with=listing.prefix or None,
                include=['metadata'],
                results_per_page=limit or PAGE,
                **client.settings,
            ).by_page(listing.token or None)
            page = await anext(pages, None)
            items = [] if page is None else [item async for item in page]
            blobs = [_blob_of(item) for item in items if hasattr(item, 'etag')]
            found = Page(
                [_entry_of(blob) for blob in blobs],
                [item.name for item in items if not hasattr(item, 'etag')],
                pages.continuation_token or '',
            )
            return listing.accept(found)

        return await client.call(listing.name, request)

    # --- writing

    async def open_writer(self, key: str, new: bool = False) -> ObjectWriter:
        from granular.aio.stores.azure.writing import AzureWriter

        return AzureWriter(self, await self.client(), key, new)

    async def create_root(self) -> bool:
        # It tells whether an attempt whose reply was lost has created it: aiohttp sends such a request again by itself.
        client, mark = await self.client(), {'granular': secrets.token_hex(8)}

        async def request() -> bool:
            from azure.core.exceptions import ResourceExistsError

            try:
                await client.container.create_container(metadata=mark, **client.settings)
            except ResourceExistsError as error:
                if code_of(error) != 'ContainerAlreadyExists':  # such as ContainerBeingDeleted
                    raise
                found = await client.container.get_container_properties(**client.settings)
                return bool(mark.items() <= found.metadata.items())
            return True

        return await client.call(self.url(''), request)

    async def delete(self, keys: Sequence[str]) -> None:
        await self.ready()
        await for_each(keys, self._delete, _DELETIONS)

    async def _delete(self, key: str) -> None:
        client = await self.client()
        blob = client.blob(key)
        await client.call_existing(self.url(key), lambda: blob.delete_blob(**client.settings))

    async def delete_listed(self, key: str, must_exist: bool) -> int:
        mark = await self._find(key) if key else None
        count, marks = 0, [key] if mark is not None and mark.is_dir else []
        async for page in self.pages(key, must_exist=must_exist):
            count += len(page.items)
            await self.delete([item.key for item in page.items if not item.is_dir])
            marks += [item.key for item in page.items if item.is_dir]
        for name in sorted(marks, reverse=True):  # one by one, as what is in a folder goes before its mark
            await self._delete(name)
        return count

    async def copy_within(self, source: str, target: str) -> bool:
        client = await self.client()
        etag = (await self._file(source)).etag
        origin, blob = client.blob(source), client.blob(target)

        async def request() -> None:
            from azure.core import MatchConditions

            state = await blob.start_copy_from_url(
                origin.url, source_etag=etag, source_match_condition=MatchConditions.IfNotModified, **client.settings
            )
            status, number = state['copy_status'], state['copy_id']
            while status == 'pending':
                await asyncio.sleep(_POLL)
                copied = (await blob.get_blob_properties(**client.settings)).copy
                status = copied.status if copied.id == number else 'replaced'
            if status != 'success':
                raise StoreError(
                    f'{self.url(target)}: the copy of {self.url(source)} ended as {status!r}', path=self.url(target)
                )

        await client.call(self.url(source), request, moved=lambda: None)  # however long the store takes for the copy
        return True


def _condition(version: str | None) -> dict[str, Any]:
    """Return the arguments that make a request fail unless the blob has a version."""
    if version is None:
        return {}
    from azure.core import MatchConditions

    return {'etag': version, 'match_condition': MatchConditions.IfNotModified}


def _entry_of(blob: Blob) -> Entry:
    size, version = (0, None) if blob.is_dir else (blob.size, blob.etag)
    return Entry(blob.name, blob.is_dir, size, blob.modified, version)


def _blob_of(properties: Any) -> Blob:
    metadata = dict(properties.metadata or {})
    marked = any(metadata.get(name, metadata.get(name.capitalize())) == 'true' for name in _FOLDER_MARKS)
    modified = properties.last_modified
    return Blob(
        properties.name,
        properties.size,
        None if modified is None else modified.timestamp(),
        '"{}"'.format((properties.etag or '').strip('"')),  # listings leave out the quotes
        marked or properties.name.endswith('/'),
    )
