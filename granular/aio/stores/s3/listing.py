"""Listings of S3: the queries of their pages, and the parsing of the replies, without I/O."""

from granular.aio.http.retry import no_such_bucket
from granular.aio.http.transport import Answer
from granular.aio.stores.listing import Item, Listing, Page
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
from granular.errors import BadReplyError, StoreError


def query_of(listing: Listing, limit: int) -> list[tuple[str, str]]:
    """Return the query parameters of the next page, of at most ``limit`` names unless that is 0."""
    query = [('list-type', '2'), ('encoding-type', 'url'), ('prefix', listing.prefix)]
    optional = ('delimiter', listing.delimiter), ('continuation-token', listing.token), ('max-keys', str(limit or ''))
    return query + [(name, value) for name, value in optional if value]


def next_page(listing: Listing, answer: Answer) -> Page:
    """Parse and check the next page of a listing."""
    name = listing.name
    if answer.head.status == 404:
        if code_of(answer.body) != 'NoSuchBucket':
            raise BadReplyError(f'{name}: expected a listing, got status 404 and {quote(answer.body)}')
        if listing.token:
            raise StoreError(f'{name}: the bucket was deleted while it was listed (NoSuchBucket)')
        raise no_such_bucket(name, 'NoSuchBucket')
    root = parse(answer.body, name, 'ListBucketResult')
    decode, truncated = NameDecoder(root, name).decode, is_truncated(root, name)
    # Some servers encode the keys, but not the prefix that they echo.
    if (echo := root.findtext('Prefix')) and listing.prefix not in (echo, decode(echo)):
        raise BadReplyError(f'{name}: expected a listing of {listing.prefix!r}, got one of {decode(echo)!r}')
    items = []
    for element in root.findall('Contents'):
        key = decode(text_of(element, 'Key', name))
        modified = None if element.find('LastModified') is None else time_of(element, 'LastModified', name)
        items.append(Item(key, number_of(element, 'Size', name), modified, key.endswith('/')))
    folders = [decode(text_of(element, 'Prefix', name)) for element in root.findall('CommonPrefixes')]
    # Ceph counts only the keys, not the folders.
    counts = (len(items) + len(folders), len(items))
    if root.find('KeyCount') is not None and (count := number_of(root, 'KeyCount', name)) not in counts:
        raise BadReplyError(f'{name}: expected a page of {count} names, got {counts[0]}')
    token = (root.findtext('NextContinuationToken') or '') if truncated else ''
    if truncated and not token:
        raise BadReplyError(f'{name}: a truncated page without NextContinuationToken')
    return listing.accept(Page(items, folders, token))
