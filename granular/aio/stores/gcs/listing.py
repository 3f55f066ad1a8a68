"""Listings of Google Cloud Storage: the parsing of their pages, without I/O."""

from granular.aio.http.retry import no_such_bucket
from granular.aio.http.transport import Answer
from granular.aio.stores.errors import quote_body
from granular.aio.stores.gcs.replies import check_missing, document, parse_resource
from granular.aio.stores.listing import Item, Listing, Page
from granular.errors import BadReplyError


def next_page(listing: Listing, answer: Answer) -> Page:
    """Parse and check the next page.

    Raises:
      BadReplyError: if the answer is not the next page.
      NotFoundError: if the bucket does not exist.
    """
    name = listing.name
    if answer.head.status == 404:
        check_missing(answer, name)
        raise no_such_bucket(name, 'status 404', 404)
    value = document(answer, name)
    fields = ('items', 'prefixes', 'nextPageToken')
    if value.get('kind', 'storage#objects') != 'storage#objects' or not any(key in value for key in ('kind', *fields)):
        raise BadReplyError(f'{name}: expected a listing, got {quote_body(answer.body)}')
    items, folders, token = (value.get(key, default) for key, default in zip(fields, ([], [], ''), strict=True))
    lists = isinstance(items, list) and isinstance(folders, list) and all(isinstance(item, str) for item in folders)
    if not lists or not isinstance(token, str):
        raise BadReplyError(f'{name}: expected items, prefixes and a token, got {quote_body(answer.body)}')
    resources = [parse_resource(item, name) for item in items]
    objects = [Item(item.name, item.size, item.modified, item.name.endswith('/')) for item in resources]
    return listing.accept(Page(objects, folders, token))
