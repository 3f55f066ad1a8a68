"""Repositories of the Hugging Face Hub, read at one commit.

A branch or tag is looked up once, and everything is read at its commit from then on. The Hub redirects reads of large
files to a content server: each file is looked up once in some minutes, and its ranges are then read from there.
"""

import asyncio
import contextlib
import os
import re
import urllib.parse
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from granular._support.lazy import import_if_installed
from granular._support.redact import hidden, protect
from granular.aio.http.messages import Target, shown
from granular.aio.http.refusals import refusal
from granular.aio.http.reply import Reply
from granular.aio.http.transport import Answer, Outgoing
from granular.aio.runtime.lock import Lock
from granular.aio.runtime.tasks import for_each, gather
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import Entry, Request, Stat, Store
from granular.aio.stores.errors import is_one_word
from granular.aio.stores.remote import Client, RemoteStore
from granular.config import IOConfig, MiB
from granular.errors import (
    AccessDeniedError,
    BadReplyError,
    BucketNotFoundError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from granular.formats.base import parse_json

_ADDRESS: Final = re.compile(
    r'(?:(?P<kind>datasets|spaces|models)/)?(?P<id>[\w.-]+/[\w.-]+)'
    r'(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<key>.*))?',
    re.DOTALL,
)
_KINDS: Final = ('datasets', 'spaces', 'models', 'kernels', 'buckets')
_COMMIT: Final = re.compile(r'[0-9a-f]{40}')
_NEXT: Final = re.compile(r'<([^>]*)>\s*;\s*rel="?next"?')
_MAX_PAGE: Final = 16 * MiB
_AHEAD: Final = 16  # files looked up concurrently
_REDIRECTS: Final = 10  # from one address of the Hub to another one, such as of a repository that was renamed
SIZES: Final = 65536  # of files that are remembered


def split(address: str) -> tuple[str, str]:
    """Return the root of an address, which names a repository and perhaps a revision, and the key in it."""
    match = _ADDRESS.fullmatch(address.partition('://')[2].rstrip('/'))
    if match is None or (match['kind'] is None and match['id'].partition('/')[0] in _KINDS):
        raise InvalidArgumentError(
            f'{hidden(address)}: expected hf://datasets/owner/name/..., hf://spaces/owner/name/... or '
            f'hf://owner/name/..., with @revision behind the name for another branch, tag or commit'
        )
    key = match['key'] or ''
    return f'hf://{match[0][: match.start("key") - 1] if match["key"] is not None else match[0]}', key


class HubStore(RemoteStore['HubClient']):
    """A repository, at the commit that its revision has at the first use. It is read-only.

    Options: ``token``, by default that of the environment or of ``hf auth login``, and False for none;
    ``endpoint_url``; ``tls_verify``.
    """

    read_only = True
    option_names = ('endpoint_url', 'tls_verify', 'token')
    variables = ('HF_TOKEN', 'HF_TOKEN_PATH', 'HF_HOME')

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        super().__init__(root, config, options)
        match = _ADDRESS.fullmatch(root.partition('://')[2])
        if match is None:
            raise InvalidArgumentError(f'{root}: expected hf:// and a repository')
        kind = match['kind'] or 'models'
        revision = urllib.parse.unquote(match['revision'] or 'main')
        self._revision = revision
        self._repository = match['id'] if kind == 'models' else f'{kind}/{match["id"]}'
        self._api = f'{self.endpoint}/api/{kind}/{match["id"]}'
        self._commit = revision if _COMMIT.fullmatch(revision) else None
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return *super().__reduce__(), {'_commit': self._commit}  # other processes read the same commit

    __hash__ = RemoteStore.__hash__

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same repository, not read at another commit already."""
        if not isinstance(other, HubStore) or not super().__eq__(other):
            return False
        return len({self._commit, other._commit} - {None}) < 2

    def _find_endpoint(self) -> str:
        endpoint = self.options.get('endpoint_url') or os.environ.get('HF_ENDPOINT') or 'https://huggingface.co'
        return str(endpoint).rstrip('/')

    def _endpoint_options(self) -> dict[str, Any]:
        return {'endpoint_url': self.endpoint}

    async def make_client(self) -> 'HubClient':
        return HubClient(self, await offload(self._find_token))

    def _find_token(self) -> str | None:
        """Return the token that the options, the environment or the login of huggingface_hub give."""
        token = self.options.get('token')
        if token is None or token is True:
            hub = import_if_installed('huggingface_hub')
            token = os.environ.get('HF_TOKEN', '').strip() if hub is None else hub.get_token()
        if not token:
            return None
        if not isinstance(token, str):
            raise InvalidArgumentError(f'{self.root}: expected a token or False, got {type(token).__name__}')
        if not is_one_word(token):
            raise InvalidArgumentError(
                f'{self.root}: the token has a space, a newline or another character that no token has'
            )
        protect([token])
        return token

    # --- addresses: in requests, keys are pinned, @commit/path

    def url(self, key: str) -> str:
        commit, _, path = key[1:].partition('/')
        if key[:1] == '@' and _COMMIT.fullmatch(commit):
            return f'{self.root.partition("@")[0]}@{commit}/{path}'
        return self.address(key)

    def pinned(self, key: str) -> str:
        return key if self._commit is None else f'@{self._commit}/{key}'

    async def ready(self) -> None:
        await super().ready()
        await self._pin()

    def address_of(self, key: str) -> str:
        commit, _, path = key[1:].partition('/')
        return f'{self.endpoint}/{self._repository}/resolve/{commit}/{urllib.parse.quote(path, safe="/~-_.")}'

    async def _pin(self) -> str:
        """Return the commit that is read, looked up at the first call."""
        if self._commit is None:
            async with self._lock.turn():
                if self._commit is None:
                    self._commit = await self._find_commit()
        return self._commit

    async def _find_commit(self) -> str:
        def check(answer: Answer) -> str:
            commit = _parsed(answer, dict, self.root).get('sha')
            if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
                raise BadReplyError(f'{self.root}: expected the commit of {self._revision!r}, got {commit!r:.100}')
            return commit

        client = await self.client()
        revision = urllib.parse.quote(self._revision, safe='')
        try:
            with self._explained(client):
                commit: str = await client.call('GET', f'{self._api}/revision/{revision}?expand=sha', self.root, check)
                return commit
        except NotFoundError as error:
            raise BucketNotFoundError(
                f'{self.root}: no such repository or revision, or it is private: {self._remedy(client)}', path=self.root
            ) from error

    @contextlib.contextmanager
    def _explained(self, client: 'HubClient') -> Iterator[None]:
        """Name the remedy where the Hub denies access."""
        try:
            yield
        except AccessDeniedError as error:
            raise AccessDeniedError(
                f'{self.root}: access denied: the repository is gated or private, or does not exist: '
                f'{self._remedy(client)}',
                path=self.root,
            ) from error

    def _remedy(self, client: 'HubClient') -> str:
        sent = 'the token that was sent may not read it' if client.token else 'no token was sent'
        return (
            f'{sent}: ask for access at {self.endpoint}/{self._repository}, and pass token=, set HF_TOKEN, or log in '
            f'with `hf auth login`, which needs the extra huggingface'
        )

    # --- reading

    async def _pinned(self, requests: Sequence[Request]) -> list[Request]:
        """Return the requests with pinned keys, whose files were looked up; the block cache requests pinned keys."""
        commit, client = await self._pin(), await self.client()
        start = f'@{commit}/'
        pinned = [request._replace(key=f'{start}{request.key.removeprefix(start)}') for request in requests]
        await client.look_up({request.key for request in pinned})
        return pinned

    async def read(self, key: str, start: int = 0, stop: int | None = None, version: str | None = None) -> Reply:
        """Read a byte range, of an object of the size that the Hub states: a proxy may answer with a page instead."""
        await self._pin()  # before, as another commit has another client
        client, name = await self.client(), self.url(key)
        with self._explained(client):
            for attempt in range(2):  # as the transport repeats a request whose reply is wrong
                (request,) = await self._pinned([Request(key, [], [])])
                size = client.sizes[request.key]
                try:
                    reply = await super().read(request.key, start, stop, version)
                except AccessDeniedError:
                    if attempt:
                        raise
                    client.forget([request.key])  # its link may have expired
                    continue
                except OutOfRangeError:
                    if start >= size or (stop or 0) > size:
                        raise
                    received = 'fewer'
                else:
                    if reply.size == size:
                        return reply
                    received = f'{reply.size}'
                client.sizes.pop(request.key, None)  # it is looked up again
        raise BadReplyError(f'{name}: expected a file of {size} bytes, got {received}')

    async def read_into(
        self, key: str, start: int, stop: int, version: str | None, target: memoryview, largest: int = 0
    ) -> None:
        client = await self.client()
        with self._explained(client):
            (request,) = await self._pinned([Request(key, [], [])])
            read = super().read_into
            try:
                await read(request.key, start, stop, version, target, largest)
            except AccessDeniedError:
                await client.look_up_again([request.key])
                await read(request.key, start, stop, version, target, largest)

    async def read_many(self, requests: Sequence[Request]) -> list[bytes]:
        client = await self.client()
        with self._explained(client):
            pinned = await self._pinned(requests)
            versions = [request.version for request in await gather(map(self._with_version, requests))]
            pairs = zip(pinned, versions, strict=True)
            wanted, read = [request._replace(version=version) for request, version in pairs], super().read_many
            try:
                return await read(wanted)
            except AccessDeniedError:
                await client.look_up_again({request.key for request in wanted})
                return await read(wanted)

    async def _with_version(self, request: Request) -> Request:
        """Return the request, whose ranges must be in the file, with its version, which no page of a proxy has."""
        if request.version is not None:
            return request
        (pinned,) = await self._pinned([request])  # again: its size may be forgotten, where there are many
        if not (size := (await self.client()).sizes[pinned.key]):
            return request
        for start, stop in zip(request.starts, request.stops, strict=True):
            self.check_range(request.key, start, stop, size)
        return request._replace(version=(await self.read(request.key, 0, 1)).version)

    async def read_fresh(self, requests: Sequence[Request]) -> list[bytes]:
        cache = self._cache()
        if cache is not None:
            await offload(cache.forget, self.fingerprint, await self._pinned(requests))
        return await self.read_many(requests)

    async def now(self, key: str) -> float:
        return await Store.now(self, key)

    async def stat(self, key: str) -> Stat:
        commit, client, name = await self._pin(), await self.client(), self.url(key)
        if not key:
            return Stat(0, is_dir=True)
        body = urllib.parse.urlencode({'paths': key, 'expand': 'false'}).encode()
        with self._explained(client):
            infos = await client.call(
                'POST', f'{self._api}/paths-info/{commit}', name, lambda answer: _entries(answer, name), body=body
            )
        for entry in infos:
            if entry.key == key:
                return Stat(entry.size, is_dir=entry.is_dir)
        raise NotFoundError(f'{name}: no such file or folder at commit {commit}')

    def scan(self, key: str, prefix: str = '') -> AsyncGenerator[Entry, None]:
        return self._tree(key, False)

    def scan_tree(self, key: str) -> AsyncGenerator[Entry, None]:
        return self._tree(key, True)

    async def _tree(self, key: str, recursive: bool) -> AsyncGenerator[Entry, None]:
        commit, name = await self._pin(), self.url(key)
        folder = f'{key}/' if key else ''
        path = f'/{urllib.parse.quote(key, safe="")}' if key else ''
        url: str | None = f'{self._api}/tree/{commit}{path}?recursive={str(recursive).lower()}'
        visited: set[str] = set()

        def check(answer: Answer) -> tuple[list[Entry], str | None]:
            entries = _entries(answer, name)
            if wrong := [entry.key for entry in entries if not entry.key.startswith(folder)]:
                raise BadReplyError(f'{name}: expected entries of this folder in its listing, got {wrong[0]!r:.200}')
            following = _NEXT.search(answer.head.headers.get('link', ''))
            if following is None:
                return entries, None
            page = urllib.parse.urljoin(f'{self._api}/', following[1])
            if not page.startswith(f'{self.endpoint}/'):
                raise BadReplyError(f'{name}: the next page of its listing is on another server')
            if page in visited:
                raise BadReplyError(f'{name}: the next page of its listing is one that was listed before')
            return entries, page

        while url is not None:
            client = await self.client()  # on the event loop: between pages the caller may be on none
            visited.add(url)
            with self._explained(client):
                entries, url = await client.call('GET', url, name, check)
            for entry in entries:
                yield entry


class HubClient(Client):
    """Client of a repository under one event loop, with the sizes of the files that were looked up."""

    store: HubStore

    def __init__(self, store: HubStore, token: str | None) -> None:
        super().__init__(store)
        self.token = token
        self._headers = {} if token is None else {'Authorization': f'Bearer {token}'}
        self._looking: dict[str, asyncio.Lock] = {}
        self.sizes: dict[str, int] = {}

    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        return self.store.address_of(key), self._headers

    async def call(self, method: str, url: str, name: str, check: Any, *, body: bytes = b'') -> Any:
        headers = {**self._headers, **({'Content-Type': 'application/x-www-form-urlencoded'} if body else {})}

        async def make() -> Outgoing:
            return Outgoing(Target.of(url, headers), method, body)

        return await self.transport.call(make, self.recover, name, check, limit=_MAX_PAGE)

    async def look_up(self, keys: Iterable[str]) -> None:
        """Find the servers that have the contents of files, unless they were found in the last minutes."""
        if missing := [key for key in keys if not self._is_found(key)]:
            await for_each(missing, self._look_up, _AHEAD)

    async def look_up_again(self, keys: Iterable[str]) -> None:
        """Find the servers of files anew, as the links to them may have expired."""
        self.forget(keys)
        await self.look_up(keys)

    def _is_found(self, key: str) -> bool:
        return self.ready(key) is not None and key in self.sizes

    async def _look_up(self, key: str) -> None:
        async with self._looking.setdefault(key, asyncio.Lock()):  # a waiter that is cancelled leaves it to the others
            try:
                if not self._is_found(key):
                    await self._find_server(key)
            finally:
                self._looking.pop(key, None)

    async def _find_server(self, key: str) -> None:
        """Find the server and the size of a file, so that each read of a range does not have to."""
        target, name = Target.of(*await self.sign(key)), self.store.url(key)
        commit = key[1:].partition('/')[0]

        def check(answer: Answer) -> tuple[Target, int | None]:
            headers, status = answer.head.headers, answer.head.status
            location = headers.get('location', '') if 300 <= status < 400 else ''
            if status != 200 and not location:
                if status == 404 and 'x-error-code' not in headers:
                    raise BadReplyError(f'{name}: expected an answer of the Hub, got status 404 without X-Error-Code')
                raise refusal(answer.head, headers.get('x-error-message', '').encode(), name)
            found = target.follow(location) if location else target
            if location and found.origin == target.origin:
                return found, None
            # Sent by the Hub itself, and not by a page to sign in.
            if headers.get('x-repo-commit') != commit:
                raise BadReplyError(
                    f'{name}: expected a file of this commit, got status {status} with X-Repo-Commit '
                    f'{shown(headers.get("x-repo-commit", ""))}'
                )
            size = headers.get('x-linked-size') or ('' if location else headers.get('content-length', ''))
            if not size.isascii() or not size.isdigit() or len(size) > 18:
                raise BadReplyError(f'{name}: expected the size of the file, got {shown(size)}')
            return found, int(size)

        async def make() -> Outgoing:
            return Outgoing(target, 'HEAD')

        for _ in range(_REDIRECTS):
            target, size = await self.transport.call(
                make, self.recover, name, check, statuses=range(200, 600), follow=False
            )
            if size is not None:
                if len(self.sizes) >= SIZES:
                    self.sizes.clear()
                self.sizes[key] = size
                self.remember(key, target)
                return
        raise BadReplyError(f'{name}: more than {_REDIRECTS} redirections')


def _parsed(answer: Answer, kind: type, name: str) -> Any:
    """Return the JSON of an answer, which must be of the given type."""
    try:
        value = parse_json(answer.body)
    except ValueError as error:
        raise BadReplyError(f'{name}: expected JSON from the Hub, got {len(answer.body)} other bytes') from error
    if not isinstance(value, kind):
        raise BadReplyError(f'{name}: expected a {kind.__name__} from the Hub, got a {type(value).__name__}')
    return value


def _entries(answer: Answer, name: str) -> list[Entry]:
    entries = []
    for info in _parsed(answer, list, name):
        match info:
            case {'type': 'directory', 'path': str(path)}:
                entries.append(Entry(path, True))
            case {'type': 'file', 'path': str(path), 'size': int(size)} if 0 <= size < 1 << 63:
                entries.append(Entry(path, False, size))
            case _:
                raise BadReplyError(f'{name}: expected the type, path and size of a file, got {info!r:.200}')
    return entries
