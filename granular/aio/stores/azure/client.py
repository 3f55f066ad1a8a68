"""Requests to Azure Blob Storage: adlfs logs in, and its connections are used with granular's limits and retries."""

import asyncio
import ssl
import urllib.parse
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from granular._support.lazy import import_extra
from granular._support.redact import hidden
from granular.aio.http.messages import Head, Origin
from granular.aio.http.pool import UnreachableError
from granular.aio.http.refusals import RecoverableKind, refusal
from granular.aio.http.retry import Attempts, Traffic
from granular.aio.runtime.replied import Server, has_replied, note_reply
from granular.aio.runtime.tasks import end_tasks
from granular.aio.runtime.tracebacks import summary
from granular.aio.stores.azure.account import Account
from granular.aio.stores.base import Store, check_object
from granular.aio.stores.lent import LENT, current, on_its_loop
from granular.aio.stores.threaded import third_party_error
from granular.config import MiB
from granular.errors import AccessDeniedError, BadReplyError, BucketNotFoundError, GranularError, InvalidArgumentError
from granular.metrics import counters

T = TypeVar('T')

_DOTS: Final = frozenset(('.', '..'))
_ASKED_FOR: Final = 5.0  # seconds
_LONGEST: Final = 200  # characters of an error of the store in messages


class AzureClient:
    """Access to a container under one event loop.

    Each request is a coroutine of the Azure SDK, which runs on the event loop of fsspec with the connections of adlfs;
    these are shared by all containers of an account, and closed when the process ends.
    """

    def __init__(self, store: Store, container: str, account: Account) -> None:
        root, config = store.root, store.config
        adlfs = import_extra('adlfs', 'azure', f'{root}: Azure Blob Storage needs adlfs')
        if account.problem:
            raise InvalidArgumentError(f'{root}: {account.problem}')
        try:
            lent = account.login.get(LENT)
            self._fs = adlfs.AzureBlobFileSystem(**account.login) if lent is None else current(lent)
        except ValueError as error:
            raise InvalidArgumentError(f'{root}: the login is invalid: {hidden(summary(error))}') from None
        self._store, self._account = store, account
        self.container: Any = self._fs.service_client.get_container_client(container)
        self.metrics = counters.store(root)
        endpoint = urllib.parse.urlsplit(account.endpoint)
        self._server: Server = (endpoint.scheme == 'https', endpoint.hostname or '', endpoint.port or 0, None)
        self._read: Any = None  # the client of the last blob that was read
        self._traffic = Traffic(config, self.metrics, lambda: None, lambda: has_replied(self._server), self._ask)
        # Arguments of each request.
        self.settings: dict[str, Any] = {
            'retry_total': 0,  # `call` retries
            'connection_timeout': config.connect_timeout,
            'read_timeout': max(config.first_byte_timeout, config.read_timeout),
        }

    def blob(self, key: str) -> Any:
        """Return the SDK's client of a blob, unless its requests would be for another one.

        Azure takes a backslash for a slash; the SDK resolves the components '.' and '..', also beyond the container.
        """
        check_object(self._store, key)
        if '\\' in key or not _DOTS.isdisjoint(key.split('/')):
            raise InvalidArgumentError(f"{self._store.url(key)}: blobs have no names with '\\', '.' or '..'")
        return self.container.get_blob_client(key)

    async def call(
        self,
        name: str,
        request: Callable[[], Coroutine[Any, Any, T]],
        nbytes: int = MiB,
        moved: Callable[[], int | None] | None = None,
    ) -> T:
        """Return the result of a request, which is sent again as in ``Transport.call``.

        ``request`` returns it anew for each attempt; it runs under the event loop of fsspec. ``nbytes`` of memory are
        reserved. ``moved`` returns how many bytes were sent or received so far, or None while none are due.
        """

        async def attempt() -> T:
            try:
                result = await on_its_loop(self._fs, self._watched(request(), nbytes, moved))
            except Exception as error:
                failure = self._converted(name, error)
            else:
                note_reply(self._server)
                return result
            try:
                raise failure
            finally:
                del failure  # which refers to this frame

        return await Attempts(self._traffic, _recover, name).run(attempt, nbytes)

    async def _watched(self, request: Coroutine[Any, Any, T], nbytes: int, moved: Callable[[], int | None] | None) -> T:
        """Return the result of a request that moves at ``min_rate``: the SDK fails only if no byte of a reply comes."""
        config, before = self._store.config, None
        period, least = config.read_timeout, max(1, config.min_rate * config.read_timeout)
        if moved is None:
            wait = config.connect_timeout + config.first_byte_timeout
            async with asyncio.timeout(wait + nbytes / config.min_rate if config.min_rate else None):
                return await request
        task = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait([task], timeout=period))[0]:
                after = moved()
                if before is not None and after is not None and after - before < least:
                    raise TimeoutError(f'{after - before} bytes in {period:g} s, less than {config.min_rate} a second')
                before = after
            return await task
        finally:
            await end_tasks([task])

    async def call_existing(self, name: str, request: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return the result of a request as ``call`` does; None if the blob, not its container, does not exist."""

        async def attempt() -> T | None:
            from azure.core.exceptions import ResourceNotFoundError

            try:
                return await request()
            except ResourceNotFoundError as error:
                if code_of(error) in ('BlobNotFound', 'ResourceNotFound'):
                    return None
                raise

        return await self.call(name, attempt)

    def note_read(self, blob: Any) -> None:
        """Record the client of a blob that was read well."""
        self._read = blob

    async def _ask(self) -> bool:
        """Return whether the store replies to a request for the last blob that was read, and not by its failure."""
        if self._read is None:
            return False
        try:
            async with asyncio.timeout(_ASKED_FOR):
                await on_its_loop(self._fs, self._read.get_blob_properties(**self.settings))
        except Exception as error:
            failure = self._converted('', error)
            return isinstance(failure, GranularError) and (failure.status or 0) < 500
        return True

    def _converted(self, name: str, error: Exception) -> Exception:
        """Convert an exception of the Azure SDK to one that ``Attempts`` takes."""
        import aiohttp
        from azure.core import exceptions

        if (verification := _cause(error, ssl.SSLCertVerificationError)) is not None:
            return verification
        match error:
            case GranularError() | TimeoutError():
                return error
            case exceptions.ClientAuthenticationError() if error.response is None:
                return AccessDeniedError(
                    f'{name}: no credentials: pass account_key, sas_token, credential or anon=True, or set '
                    f'AZURE_STORAGE_ACCOUNT_KEY: {_shown(error)}'
                )
            case exceptions.ClientAuthenticationError() if not code_of(error):  # not a reply of the store
                return AccessDeniedError(f'{name}: the login failed: {_shown(error)}')
            case exceptions.HttpResponseError(response=response) if response is not None:
                note_reply(self._server)
                if response.status_code >= 300:
                    return _refused(name, error)
                return BadReplyError(f'{name}: status {response.status_code}, which does not answer the request')
            case exceptions.ServiceRequestTimeoutError() | exceptions.ServiceResponseTimeoutError():
                return TimeoutError(_shown(error))
            case exceptions.DecodeError() | ValueError() | TypeError() | AttributeError() | KeyError():
                # The SDK fails so when a reply lacks what it looks for.
                return BadReplyError(f'{name}: the reply is not one of Azure: {_shown(error)}')
            case exceptions.AzureError():
                if not has_replied(self._server) and _cause(error, aiohttp.ClientConnectorError) is not None:
                    return UnreachableError(Origin(False, self._account.endpoint, 0), _shown(error))
                return ConnectionError(_shown(error))
        return third_party_error(name, error) or error


def code_of(error: Any) -> str:
    """Return Azure's code of a refused request, which replies without a body have in a header only."""
    code = getattr(error, 'error_code', None)
    headers = {} if error.response is None else error.response.headers
    return str(getattr(code, 'value', code) or headers.get('x-ms-error-code') or '')


def _refused(name: str, error: Any) -> Exception:
    response, code = error.response, code_of(error)
    if code in ('ContainerNotFound', 'ContainerBeingDeleted'):
        missing = 'no such container' if code == 'ContainerNotFound' else 'the container is being deleted'
        return BucketNotFoundError(f'{name}: {missing} (status {response.status_code})')
    if response.status_code == 404 and not code:  # Azure names what is missing
        return BadReplyError(f'{name}: expected an answer of Azure, got status 404 without x-ms-error-code')
    headers = {str(key).lower(): str(value) for key, value in response.headers.items()}
    head = Head(response.status_code, str(response.reason or ''), headers)
    refused = refusal(head, f'<Code>{code}</Code>'.encode() if code.isalnum() else b'', name)
    # The store's reason, such as that a token has expired.
    if reason := (getattr(error, 'additional_info', None) or {}).get('authenticationerrordetail'):
        getattr(refused, 'error', refused).add_note(hidden(' '.join(str(reason).split()))[:_LONGEST])
    return refused


async def _recover(kind: RecoverableKind, detail: str) -> bool:
    """Recover from nothing: adlfs renews tokens itself, before they expire."""
    return False


def _cause(error: BaseException | None, kind: type[T]) -> T | None:
    """Return the exception of that class from which an exception follows, if there is one."""
    for _ in range(8):
        if error is None or isinstance(error, kind):
            return error
        error = getattr(error, 'inner_exception', None) or getattr(error, 'certificate_error', None) or error.__cause__
    return None


def _shown(error: Exception) -> str:
    """Return the first line of an exception's text, without credentials."""
    return hidden((str(error).strip() or type(error).__name__).partition('\n')[0])[:_LONGEST]
