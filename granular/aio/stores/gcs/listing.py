"""Listings of Google Cloud Storage: the checks of their pages, without I/O."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from granular.aio.http.transport import Answer
from granular.aio.stores.errors import quote_body
from granular.aio.stores.gcs.replies import Resource, document, parse_resource
from granular.errors import BadReplyError

_MAX_EMPTY_PAGES: Final = 1000  # consecutive pages that list nothing new


class Page(NamedTuple):
    """One page of a listing.

    Attributes:
      items: the objects.
      folders: the prefixes up to and including the delimiter.
      token: requests the next page; empty on the last one.
    """

    items: Sequence[Resource]
    folders: Sequence[str]
    token: str


class Listing:
    """Checks of the pages of a listing, each of which must continue the one before.

    Names are in ascending order, so that a repeated page is detected whatever its token.

    Args:
      name: the folder, for errors.
      prefix: the beginning of all names.
      delimiter: the end of the names of folders; empty to list all objects.
    """

    name: str
    prefix: str
    delimiter: str

    def __init__(self, name: str, prefix: str, delimiter: str) -> None:
        self.name, self.prefix, self.delimiter = name, prefix, delimiter
        self.token: str = ''
        self.ended: bool = False
        self._last_name = self._last_folder = ''
        self._empty_pages = 0

    def next_page(self, answer: Answer) -> Page:
        """Check and parse the next page.

        Raises:
          BadReplyError: if the answer is not the next page. The state is then unchanged, so that a retry can pass.
        """
        name, value = self.name, document(answer, self.name)
        fields = ('items', 'prefixes', 'nextPageToken')
        if value.get('kind', 'storage#objects') != 'storage#objects' or not any(
            key in value for key in ('kind', *fields)
        ):
            raise BadReplyError(f'{name}: expected a listing, got {quote_body(answer.body)}')
        items, folders, token = (value.get(key, default) for key, default in zip(fields, ([], [], ''), strict=True))
        if not isinstance(items, list) or not isinstance(folders, list) or not isinstance(token, str):
            raise BadReplyError(f'{name}: expected items, prefixes and a token, got {quote_body(answer.body)}')
        if token and token == self.token:
            raise BadReplyError(f'{name}: a page of the listing has the token of the page before')
        resources = [parse_resource(item, name) for item in items]
        item, folder = self._last_name, self._last_folder
        for resource in resources:
            self._check(resource.name, item)
            if resource.name == item or (self.delimiter and self.delimiter in resource.name[len(self.prefix) :][:-1]):
                raise BadReplyError(f'{name}: expected a name after {item!r} in the listing, got {resource.name!r}')
            item = resource.name
        fresh: list[str] = []
        for prefix in folders:
            if not isinstance(prefix, str) or not self.delimiter or not prefix.endswith(self.delimiter):
                raise BadReplyError(f'{name}: expected prefixes that end in {self.delimiter!r}, got {prefix!r}')
            self._check(prefix, folder)
            if prefix != folder:
                fresh.append(prefix)
            folder = prefix
        empty = 0 if resources or fresh else self._empty_pages + 1
        if token and empty >= _MAX_EMPTY_PAGES:
            raise BadReplyError(f'{name}: {empty} pages of the listing in a row without a new name')
        self._last_name, self._last_folder, self._empty_pages = item, folder, empty
        self.token, self.ended = token, not token
        return Page(resources, fresh, token)

    def _check(self, listed: str, before: str) -> None:
        if not listed.startswith(self.prefix) or listed < before:
            raise BadReplyError(
                f'{self.name}: expected names that begin with {self.prefix!r} in ascending order, got {listed!r} '
                f'after {before!r}'
            )
