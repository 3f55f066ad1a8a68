"""Listings of S3: the queries of their pages, and the checks of the replies, without I/O."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from granular.aio.http.transport import Answer
from granular.aio.stores.s3.documents import (
    NameDecoder,
    code_of,
    is_truncated,
    number_of,
    parse,
    quote,
    text_of,
    time_of,
)
from granular.errors import BadReplyError, BucketNotFoundError, StoreError

_EMPTY_PAGES: Final = 10_000  # in a row: a bucket has empty pages where many versions were deleted


class Item(NamedTuple):
    """An object in a listing."""

    key: str
    size: int
    modified: float | None


class Page(NamedTuple):
    """A page of a listing. ``token`` requests the next one; None on the last page."""

    items: Sequence[Item]
    folders: Sequence[str]
    token: str | None

    def names(self) -> list[str]:
        """Return the keys and folders, merged in byte order if the page has both."""
        if not self.folders:
            return [item.key for item in self.items]
        if not self.items:
            return list(self.folders)
        return sorted([*(item.key for item in self.items), *self.folders], key=str.encode)


class Listing:
    """A listing over any number of pages: the query of the next page, and the checks of its reply.

    Args:
      name: the folder, for errors.
      prefix: the beginning of all keys.
      delimiter: groups the keys that contain it after the prefix into folders; no folders if empty.
      ordered: True if the store lists keys in the order of their bytes, as S3 does.
    """

    def __init__(self, name: str, prefix: str, delimiter: str, ordered: bool) -> None:
        self._name, self._prefix, self._delimiter, self._ordered = name, prefix, delimiter, ordered
        self._token: str | None = None
        self._tokens: set[str] = set()
        self._first_names: set[str] = set()  # the first name of each page
        self._last_name = b''  # the greatest name so far
        self._empty_pages = 0  # in a row

    def query(self) -> list[tuple[str, str]]:
        """Return the query parameters of the next page."""
        query = [('list-type', '2'), ('encoding-type', 'url'), ('prefix', self._prefix)]
        if self._delimiter:
            query.append(('delimiter', self._delimiter))
        if self._token is not None:
            query.append(('continuation-token', self._token))
        return query

    def advance(self, page: Page) -> None:
        """Move on to the page after one that was checked."""
        names = page.names()
        self._empty_pages = 0 if names else self._empty_pages + 1
        if names:
            self._first_names.add(names[0])
            self._last_name = max(self._last_name, *(name.encode() for name in names))
        self._token = page.token
        if page.token is not None:
            self._tokens.add(page.token)

    def check(self, answer: Answer) -> Page:
        """Check and parse the next page.

        Raises:
          BadReplyError: if the reply is not the next page of this listing.
          NotFoundError: if the bucket does not exist.
          StoreError: if the bucket was deleted during the listing.
        """
        if answer.head.status == 404:
            if code_of(answer.body) != 'NoSuchBucket':
                raise BadReplyError(f'{self._name}: expected a listing, got status 404 and {quote(answer.body)}')
            if self._token is not None:
                raise StoreError(f'{self._name}: the bucket was deleted while it was listed (NoSuchBucket)')
            raise BucketNotFoundError(f'{self._name}: no such bucket (NoSuchBucket)')
        page = self._parse(answer.body)
        self._check_names(page)
        self._check_progress(page)
        return page

    def _parse(self, body: bytes) -> Page:
        name, root = self._name, parse(body, self._name, 'ListBucketResult')
        decode, truncated = NameDecoder(root, name).decode, is_truncated(root, name)
        # Some servers encode the keys, but not the prefix that they echo.
        if (echo := root.findtext('Prefix')) and self._prefix not in (echo, decode(echo)):
            raise BadReplyError(f'{name}: expected a listing of {self._prefix!r}, got one of {decode(echo)!r}')
        items = [
            Item(
                decode(text_of(element, 'Key', name)),
                number_of(element, 'Size', name),
                None if element.find('LastModified') is None else time_of(element, 'LastModified', name),
            )
            for element in root.findall('Contents')
        ]
        folders = [decode(text_of(element, 'Prefix', name)) for element in root.findall('CommonPrefixes')]
        # Ceph counts only the keys, not the folders.
        counts = (len(items) + len(folders), len(items))
        if root.find('KeyCount') is not None and (count := number_of(root, 'KeyCount', name)) not in counts:
            raise BadReplyError(f'{name}: expected a page of {count} names, got {counts[0]}')
        token = root.findtext('NextContinuationToken') if truncated else None
        if truncated and not token:
            raise BadReplyError(f'{name}: a truncated page without NextContinuationToken')
        return Page(items, folders, token)

    def _check_names(self, page: Page) -> None:
        """Check that every name belongs to this listing."""
        start, delimiter = self._prefix, self._delimiter
        for item in page.items:
            if not item.key.startswith(start) or (delimiter and delimiter in item.key[len(start) :].rstrip(delimiter)):
                raise BadReplyError(f'{self._name}: a listing of {start!r} has the key {item.key!r}')
        for folder in page.folders:
            inner = folder[len(start) :]
            if not folder.startswith(start) or not delimiter or inner.find(delimiter) != len(inner) - len(delimiter):
                raise BadReplyError(f'{self._name}: a listing of {start!r} has the folder {folder!r}')

    def _check_progress(self, page: Page) -> None:
        """Check that a page is in order, and repeats no earlier one."""
        names = page.names()
        if page.token in self._tokens:
            raise BadReplyError(f'{self._name}: a page has the NextContinuationToken of an earlier one')
        if names and names[0] in self._first_names:
            raise BadReplyError(f'{self._name}: a page begins with {names[0]!r}, as an earlier one does')
        if not names and page.token is not None and self._empty_pages >= _EMPTY_PAGES:
            raise BadReplyError(f'{self._name}: {_EMPTY_PAGES} pages in a row without a name')
        if not self._ordered or not names:
            return
        last = self._last_name
        if names != sorted(names, key=str.encode) or (last and min(name.encode() for name in names) <= last):
            raise BadReplyError(f'{self._name}: the keys of a page that begins with {names[0]!r} are not in order')
