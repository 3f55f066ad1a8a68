"""Listings of buckets: the checks that each page continues those before it, without I/O."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from granular.aio.stores.base import Entry
from granular.errors import BadReplyError

EMPTY_PAGES: Final = 10_000  # in a row: a bucket of S3 has empty pages where many versions were deleted


class Page(NamedTuple):
    """A page of a listing."""

    items: Sequence[Entry]  # the objects; folders are objects that mark a folder, whose keys may end in a slash
    folders: Sequence[str]  # the beginnings of keys up to and including the delimiter
    token: str  # requests the next page; empty on the last one


class Listing:
    """A listing over any number of pages, of keys that begin with a prefix.

    The delimiter groups the keys that contain it after the prefix into folders; there are none if it is empty. It is
    ``ordered`` if the store lists keys and folders in the order of their bytes.
    """

    def __init__(self, name: str, prefix: str, delimiter: str, ordered: bool) -> None:
        self.name = name
        self.prefix = prefix
        self.delimiter = delimiter
        self.token, self.ended = '', False
        self._ordered = ordered
        self._tokens: set[str] = set()
        self._first_names: set[str] = set()  # the first name of each page
        self._last_key = self._last_folder = ''
        self._empty_pages = 0  # in a row

    def accept(self, page: Page) -> Page:
        """Check the next page. Return it without a folder that the page before has, as pages of GCS may.

        If it is not the next page (BadReplyError), the listing is unchanged, so that a retry can pass.
        """
        keys = [item.key for item in page.items]
        folders = [folder for folder in page.folders if folder != self._last_folder]
        self._check_names(keys, folders)
        first = next(iter(keys or folders), None)
        if page.token in self._tokens:
            raise BadReplyError(f'{self.name}: a page of the listing has the token of an earlier one')
        if first in self._first_names:
            raise BadReplyError(f'{self.name}: a page of the listing begins with {first!r}, as an earlier one does')
        if self._ordered:
            self._check_order(keys, self._last_key)
            self._check_order(folders, self._last_folder)
        empty = self._empty_pages + 1 if first is None else 0
        if page.token and empty > EMPTY_PAGES:
            raise BadReplyError(f'{self.name}: {EMPTY_PAGES} pages of the listing in a row without a new name')
        self._empty_pages = empty
        self.token = page.token
        self.ended = not page.token
        if page.token:
            self._tokens.add(page.token)
        if first is not None:
            self._first_names.add(first)
        self._last_key = keys[-1] if keys else self._last_key
        self._last_folder = folders[-1] if folders else self._last_folder
        return page._replace(folders=folders)

    def _check_names(self, keys: Sequence[str], folders: Sequence[str]) -> None:
        start, delimiter = self.prefix, self.delimiter
        for key in keys:
            if not key.startswith(start) or (delimiter and delimiter in key[len(start) :].rstrip(delimiter)):
                raise BadReplyError(f'{self.name}: a listing of {start!r} has the key {key!r:.200}')
        for folder in folders:
            inner = folder[len(start) :]
            if not folder.startswith(start) or not delimiter or inner.find(delimiter) != len(inner) - len(delimiter):
                raise BadReplyError(f'{self.name}: a listing of {start!r} has the folder {folder!r:.200}')

    def _check_order(self, names: Sequence[str], last: str) -> None:
        for before, name in zip([last, *names], names, strict=False):
            if name <= before:
                raise BadReplyError(f'{self.name}: expected a name after {before!r} in the listing, got {name!r}')
