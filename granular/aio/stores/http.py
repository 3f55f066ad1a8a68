"""Read-only files on a web server; the links of a folder's page are its listing."""

import asyncio
import contextlib
import dataclasses
import hashlib
import html
import re
import urllib.parse
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from typing import Any, Final

from granular._support.redact import hidden
from granular.aio.http.addresses import encoded, keyed, named
from granular.aio.http.messages import http_date, shown
from granular.aio.http.reply import stands_in
from granular.aio.http.transport import Answer, Outgoing
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import Entry, Stat
from granular.aio.stores.remote import Client, RemoteStore
from granular.config import IOConfig, MiB
from granular.errors import (
    AccessDeniedError,
    BadReplyError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    StoreError,
    UnsupportedError,
)

_MAX_PAGE: Final = 16 * MiB
_AT_ONCE: Final = 16  # entries that are asked for at a time
_IN_TURN: Final = 1_000  # entries that are yielded before the event loop does other work
_TEXT: Final = re.compile(r'text/|application/(json|xml|xhtml)|\S*\+(json|xml)', re.IGNORECASE)
# Of the page of a folder, which may be empty: its title, or the link to the folder above.
_LISTING: Final = re.compile(rb'index of|directory listing|parent directory|href=["\']?\.\.?/?["\'>]', re.IGNORECASE)
_NO_HEAD: Final = (403, 405, 501)  # answers to HEAD where only GET is permitted, as by a presigned address
# Possessive, so that no page is read twice.
_TAG: Final = re.compile(r'<(/?)([a-zA-Z][^\s/>]*+)')
_ATTRIBUTE: Final = re.compile(
    r"""[\s/]*+(?:(>)|([^\s/>][^\s/>=]*+)\s*+(?:=\s*+(?:"([^"]*+)"|'([^']*+)'|(["'])|([^\s>]*+)))?+)"""
)
# Elements that contain text and no tags, with the beginning of their end.
_TEXTS: Final = {name: re.compile(f'</{name}', re.IGNORECASE) for name in ('script', 'style', 'textarea', 'title')}


@dataclasses.dataclass(frozen=True, slots=True)
class _Link(Entry):
    """An entry of a page of links."""

    @property
    def name(self) -> str:
        return named(self.key).rpartition('/')[2]


class HTTPStore(RemoteStore['HTTPClient']):
    """A host. Options: ``headers`` to send with each request, and ``tls_verify``."""

    read_only = True
    option_names = ('headers', 'tls_verify')

    def __init__(self, root: str, config: IOConfig, options: Mapping[str, Any]) -> None:
        super().__init__(root, config, options)
        self.headers: Mapping[str, str] = self.options.get('headers') or {}
        if not isinstance(self.headers, Mapping):
            raise InvalidArgumentError(f'{root}: expected headers={{name: value}}, got {type(self.headers).__name__}')
        for name, value in self.headers.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise InvalidArgumentError(f'{root}: expected text for header {name!r}, got {type(value).__name__}')
            if not (name + value).isascii() or not (name + value).isprintable():
                raise InvalidArgumentError(
                    f'{root}: header {name!r:.100} has characters that are not allowed in HTTP, such as a newline'
                )

    def _space(self) -> str:
        # Headers may select the content; they are hashed, because they may contain credentials.
        headers = sorted((name.lower(), value) for name, value in self.headers.items())
        return hashlib.sha256(repr(headers).encode()).hexdigest() if headers else ''

    def address(self, key: str) -> str:
        return super().address(encoded(key))

    def url(self, key: str) -> str:
        return hidden(self.address(key)) if '?' in key else self.address(key)

    def named(self, key: str) -> str:
        return named(key)

    def keyed(self, name: str) -> str:
        return keyed(name)

    def split_query(self, key: str) -> tuple[str, str]:
        path, mark, query = key.partition('?')
        return path, mark + query

    async def make_client(self) -> 'HTTPClient':
        return HTTPClient(self)

    async def stat(self, key: str) -> Stat:
        client, name = await self.client(), self.url(key)
        try:
            answer = await client.call('HEAD', key, name, lambda answer: answer)
        except NotFoundError:
            answer = None
        except GranularError as error:
            if error.status not in _NO_HEAD:
                raise
            reply = await client.read(key, -1, None, None)
            return _stat_of(reply.size, reply.modified, None if stands_in(reply.version) else reply.version)
        # A server's HTML page for a folder, with or without the trailing slash, is its listing.
        if answer is None or answer.head.headers.get('content-type', '').startswith('text/html'):
            with contextlib.suppress(NotFoundError, UnsupportedError):
                await self.entries(key)
                return Stat(0, is_dir=True)
        if answer is None:
            raise NotFoundError(f'{name}: no such object (status 404)', path=name, status=404)
        headers, size = answer.head.headers, answer.head.length
        if 'content-encoding' in headers or not size:
            # The length may be that of a compressed transfer; servers that make their replies on demand state 0.
            try:
                size = (await client.read(key, 0, 1, None)).size
            except OutOfRangeError:
                size = None if 'content-encoding' in headers else 0
        if size is None:
            raise StoreError(f'{name}: the server does not report its size', path=name)
        return _stat_of(size, headers.get('last-modified', ''), headers.get('etag') or None)

    async def entries(self, key: str) -> list[Entry]:
        """Return the files and folders directly in a folder, sorted. The server must list it."""
        path, query = self.split_query(key)
        folder = path.rstrip('/') + '/' if path else ''
        name = self.url(folder + query)
        client = await self.client()
        answer = await client.call('GET', folder + query, name, lambda answer: _check_page(answer, name))
        kind = answer.head.headers.get('content-type', 'text/html')
        if 'html' not in kind.lower():
            if _TEXT.match(kind):
                raise self._no_listing(name, shown(kind))
            raise NotFoundError(f'{name}: no such folder: expected a page of links, got {shown(kind)}', path=name)
        entries = await offload(_entries_of, answer, folder, query, name)
        if not entries and _LISTING.search(answer.body) is None:
            raise self._no_listing(name, 'one without links to files in it')
        return entries

    def _no_listing(self, name: str, got: str) -> UnsupportedError:
        return UnsupportedError(
            f'{name}: expected a page of links as the listing of a folder, got {got}: read its files without one, '
            f'by an index of the dataset (`granular index`), by braces such as {{000..127}}.tar, or as a list of files',
            path=name,
        )

    async def scan(self, key: str, prefix: str = '') -> AsyncGenerator[Entry, None]:
        entries = await self.entries(key)
        if not any(entry.is_dir for entry in entries):
            entries = await self._with_kinds(entries)
        for i, entry in enumerate(entries, 1):
            if not i % _IN_TURN:
                await asyncio.sleep(0)  # the page may have 100,000 entries
            yield entry

    async def _with_kinds(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries of a page that shows no folder as such, after asking which are: servers redirect those.

        Of the names with one ending, one is asked for first: files of a format are rarely mixed with folders so named.
        """
        folders: set[str] = set()
        client = await self.client()

        async def ask(entry: Entry) -> None:
            with contextlib.suppress(NotFoundError, AccessDeniedError):
                answer = await client.call('HEAD', entry.key, self.url(entry.key), lambda answer: answer, _NO_HEAD)
                if urllib.parse.urlsplit(answer.url).path.endswith('/'):
                    folders.add(entry.key)

        plain, *alike = await offload(_by_ending, entries)
        await for_each([*plain, *(first for first, *_ in alike)], ask, _AT_ONCE)
        await for_each([entry for first, *rest in alike if first.key in folders for entry in rest], ask, _AT_ONCE)
        return [dataclasses.replace(entry, is_dir=True) if entry.key in folders else entry for entry in entries]


class HTTPClient(Client):
    """Client of a host under one event loop."""

    store: HTTPStore

    async def sign(self, key: str) -> tuple[str, Mapping[str, str]]:
        return f'{self.store.root}/{encoded(key)}', self.store.headers

    async def call(
        self, method: str, key: str, name: str, check: Callable[[Answer], Answer], statuses: Collection[int] = ()
    ) -> Answer:
        """Send a request other than a range read, with the redirects, retries and limits of reads.

        ``statuses`` are passed to ``check`` beside 200.
        """

        async def make() -> Outgoing:
            return Outgoing(await self.prepare(key), method)

        return await self.transport.call(make, self.recover, name, check, statuses=(200, *statuses), limit=_MAX_PAGE)


def _stat_of(size: int, modified: str, version: str | None) -> Stat:
    time = http_date(modified)
    return Stat(size, None if time is None else time.timestamp(), version)


def _check_page(answer: Answer, name: str) -> Answer:
    """Check that a page of links is complete: not empty, and closing its html tag if it opens one."""
    body, headers = answer.body.lower(), answer.head.headers
    if not body.strip() and headers.get('content-type', 'text/html').startswith('text/html'):
        raise BadReplyError(f'{name}: expected a page of links, got an empty page')
    if b'<html' in body and b'</html' not in body:
        raise BadReplyError(f'{name}: the page of links ends before its end, after {len(body)} bytes')
    return answer


def _entries_of(answer: Answer, folder: str, query: str, name: str) -> list[Entry]:
    """Return the entries of the page of a folder, whose keys begin with ``folder`` and end with ``query``."""
    children = _children(answer.body, answer.url)
    for child in children:
        if '/' in child or '\0' in child:
            raise StoreError(f'{name}: has a link to {shown(child)}, which is not a file name', path=name)
    return [_Link(folder + keyed(child) + query, is_dir) for child, is_dir in children.items()]


def _by_ending(entries: list[Entry]) -> list[list[Entry]]:
    """Return the entries whose names have no ending, and those of each ending."""
    groups: dict[str, list[Entry]] = {'': []}
    for entry in entries:
        stem, _, ending = entry.name.rpartition('.')
        groups.setdefault(ending if stem else '', []).append(entry)
    return list(groups.values())


def _children(page: bytes, url: str) -> dict[str, bool]:
    """Return the names directly in a folder that its page links to, sorted, with True for each folder.

    ``url`` is that of the page, after all redirects: what is below it counts.
    """
    try:
        text = page.decode()
    except UnicodeDecodeError:
        text = page.decode('latin-1')
    own = urllib.parse.urlsplit(url)
    links: list[list[str]] = []  # their paths
    for href in _links_of(text):
        with contextlib.suppress(ValueError):  # an invalid link
            link = urllib.parse.urlsplit(urllib.parse.urljoin(url, href.strip()))
            if link[:2] == own[:2] and not link.query:
                links.append(_segments(link.path))
    page_path = _segments(own.path)
    folder = page_path[:-1]
    if page_path[-1] and any(len(path) > len(page_path) and path[: len(page_path)] == page_path for path in links):
        folder = page_path  # some servers redirect a folder to its name without a slash
    children: dict[str, bool] = {}
    for path in links:
        inner = path[len(folder) :]
        if path[: len(folder)] == folder and inner and inner[0] not in ('', '.', '..'):
            children[inner[0]] = children.get(inner[0], False) or len(inner) > 1
    return dict(sorted(children.items()))


def _segments(path: str) -> list[str]:
    return [urllib.parse.unquote(segment) for segment in path.split('/')]


def _links_of(page: str) -> list[str]:
    """Return the targets of the links of a page, in order, without those in comments and scripts, in linear time.

    As in a browser, a page may be malformed; a tag or comment that does not end is left out, as is a target that cannot
    be decoded.
    """
    targets: list[str] = []
    at = 0
    while (at := page.find('<', at)) >= 0:
        if (tag := _TAG.match(page, at)) is None:
            if page.startswith(('<!', '<?', '</'), at):
                comment = page.startswith('<!--', at)
                end = page.find('-->' if comment else '>', at + 2)  # also of <!-->
                at = end + 1 if end >= 0 else len(page)
            else:
                at += 1
            continue
        name, at, href = tag[2].lower(), tag.end(), None
        while (attribute := _ATTRIBUTE.match(page, at)) is not None and not attribute[5]:
            at = attribute.end()
            if attribute[1]:
                break
            if attribute[2].lower() == 'href' and href is None:
                href = attribute[3] or attribute[4] or attribute[6]
        else:  # the page, or a value in quotes, ends before the tag does
            break
        if name == 'a' and href and not tag[1]:
            with contextlib.suppress(ValueError):  # the number of a character, of thousands of digits
                targets.append(html.unescape(href))
        if name in _TEXTS and not tag[1]:
            end_tag = _TEXTS[name].search(page, at)
            at = end_tag.start() if end_tag else len(page)
    return targets
