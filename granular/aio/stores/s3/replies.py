"""Replies of S3 about objects, and their listings, without I/O.

Each reply is checked against its request (BadReplyError): proxies answer requests with an empty 200 or a page of HTML,
and S3 itself may send an error document with status 200.
"""

import base64
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple
from xml.etree import ElementTree

from granular._support.redact import hidden
from granular.aio.http.messages import Head, http_date
from granular.aio.http.refusals import RetryableError, code_of, no_such_bucket, refusal
from granular.aio.http.transport import Answer
from granular.aio.stores.base import ContentInfo, Entry
from granular.aio.stores.listing import Listing, Page
from granular.aio.stores.s3.documents import is_truncated, name_decoder, number_of, parse, quote, text_of, time_of
from granular.errors import BadReplyError, GranularError, NotFoundError, StoreError

WRITER: Final = 'x-amz-meta-granular-writer'  # header of an object that identifies its writer

_ERROR: Final = re.compile(rb'\s*(?:<\?xml[^>]*>\s*)?<Error>')
# The statuses of errors that S3 reports within a reply that began with status 200, and that do not last.
_STATUSES: Final = {'InternalError': 500, 'OperationAborted': 503, 'ServiceUnavailable': 503, 'SlowDown': 503}
_ETAG: Final = re.compile(r'[0-9a-f]{32}(-\d+)?')
_CRC32C: Final = re.compile(r'[A-Za-z0-9+/]{6}==')  # a checksum of parts does not match: it ends in their number


class ObjectMetadata(NamedTuple):
    """Metadata of an object."""

    size: int
    modified: float | None
    version: str | None
    headers: Mapping[str, str]

    @property
    def writer(self) -> str:
        """Token of the writer that published the object; empty if it has none."""
        return self.headers.get(WRITER, '')

    def content_info(self, etag_is_md5: bool) -> ContentInfo:
        """Return the size, version and checksums; ``etag_is_md5`` says if the bucket's ETags are checksums."""
        digests = {}
        etag = (self.version or '').strip('"')
        if etag_is_md5 and not is_encrypted(self.headers) and (match := _ETAG.fullmatch(etag)):
            digests['parts' if match[1] else 'md5'] = etag
        crc = self.headers.get('x-amz-checksum-crc32c', '')
        if _CRC32C.fullmatch(crc) and self.headers.get('x-amz-checksum-type', 'FULL_OBJECT') == 'FULL_OBJECT':
            digests['crc32c'] = base64.b64decode(crc).hex()
        return ContentInfo(self.size, self.version, digests)


class Part(NamedTuple):
    """An uploaded part: its ETag, and its CRC32C in base64 if the store knows it."""

    etag: str
    crc32c: str = ''


def metadata_of(head: Head, name: str) -> ObjectMetadata:
    """Parse the reply to HEAD, which has a length, and an ETag or a time, for every object of a bucket."""
    version, date = head.headers.get('etag') or None, head.headers.get('last-modified')
    if head.length is None or (version is None and date is None):
        lacking = 'a length' if head.length is None else 'an ETag or a time'
        raise BadReplyError(f'{name}: expected the metadata of an object, got status {head.status} without {lacking}')
    time = None if date is None else http_date(date)
    if date is not None and time is None:
        raise BadReplyError(f'{name}: expected a time for Last-Modified, got {date[:80]!r}')
    return ObjectMetadata(head.length, None if time is None else time.timestamp(), version, head.headers)


def is_encrypted(headers: Mapping[str, str]) -> bool:
    """Return whether an object is encrypted in a way that makes its ETag something other than an MD5.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
    """
    kind = headers.get('x-amz-server-side-encryption', 'AES256')
    return kind != 'AES256' or 'x-amz-server-side-encryption-customer-algorithm' in headers


def query_of(listing: Listing, limit: int) -> list[tuple[str, str]]:
    """Return the query parameters of the next page, of at most ``limit`` names unless that is 0."""
    query = [('list-type', '2'), ('encoding-type', 'url'), ('prefix', listing.prefix)]
    optional = ('delimiter', listing.delimiter), ('continuation-token', listing.token), ('max-keys', str(limit or ''))
    return query + [(name, value) for name, value in optional if value]


def next_page(listing: Listing, answer: Answer, endpoint: str | None = None) -> Page:
    name = listing.name
    if answer.head.status == 404:
        if code_of(answer.body) != 'NoSuchBucket':
            path = urllib.parse.urlsplit(endpoint or '').path.rstrip('/')
            hint = f': endpoint_url has the path {path}, which is sent before the bucket' if path else ''
            raise BadReplyError(f'{name}: expected a listing, got status 404 and {quote(answer.body)}{hint}')
        if listing.token:
            raise StoreError(f'{name}: the bucket was deleted while it was listed (NoSuchBucket)')
        raise no_such_bucket(name, 'NoSuchBucket')
    root = parse(answer.body, name, 'ListBucketResult')
    decode, truncated = name_decoder(root, name), is_truncated(root, name)
    # Some servers encode the keys, but not the prefix that they echo.
    if (echo := root.findtext('Prefix')) and listing.prefix not in (echo, decode(echo)):
        raise BadReplyError(f'{name}: expected a listing of {listing.prefix!r}, got one of {decode(echo)!r}')
    items = []
    for element in root.findall('Contents'):
        key = decode(text_of(element, 'Key', name))
        modified = None if element.find('LastModified') is None else time_of(element, 'LastModified', name)
        tag = (element.findtext('ETag') or '').strip('"')  # some servers leave out the quotes
        version = f'"{tag}"' if tag else None
        items.append(Entry(key, key.endswith('/'), number_of(element, 'Size', name), modified, version))
    folders = [decode(text_of(element, 'Prefix', name)) for element in root.findall('CommonPrefixes')]
    # Some servers count only the keys, not the folders.
    counts = (len(items) + len(folders), len(items))
    if root.find('KeyCount') is not None and (count := number_of(root, 'KeyCount', name)) not in counts:
        raise BadReplyError(f'{name}: expected a page of {count} names, got {counts[0]}')
    token = (root.findtext('NextContinuationToken') or '') if truncated else ''
    if truncated and not token:
        raise BadReplyError(f'{name}: a truncated page without NextContinuationToken')
    return listing.accept(Page(items, folders, token))


def check_error(answer: Answer, name: str) -> None:
    """Raise the error of an error document with status 200, as that of its own status: S3 sends it for long work."""
    if answer.head.status == 200 and _ERROR.match(answer.body) and (status := _STATUSES.get(code_of(answer.body))):
        raise refusal(answer.head._replace(status=status), answer.body, name)


def check_empty(answer: Answer, name: str) -> None:
    """Check that the reply to a request without a result has no body."""
    if answer.body.strip():
        raise BadReplyError(f'{name}: expected no body, got {quote(answer.body.strip())}')


def missing_error(answer: Answer, name: str) -> GranularError:
    """Return the error for status 404: NotFoundError only if S3 itself sent the answer."""
    code = code_of(answer.body)
    if code not in ('NoSuchKey', 'NoSuchBucket'):
        return BadReplyError(f'{name}: expected an answer of S3, got status 404 with {quote(answer.body)}')
    if code == 'NoSuchBucket':
        return no_such_bucket(name, f'status 404, {code}')
    return NotFoundError(f'{name}: no such object (status 404, {code})')


def written_etag(answer: Answer, name: str) -> str:
    etag = answer.head.headers.get('etag', '')
    if answer.body.strip() or not etag:
        raise BadReplyError(f'{name}: expected the ETag of the data sent, got {quote(answer.body.strip())}')
    return etag


def copied_part(answer: Answer, name: str, tag: str) -> Part:
    """Return the ETag and checksum in the reply to an object or a part that was copied: a document with that root."""
    root = parse(answer.body.strip(), name, tag)
    etag = text_of(root, 'ETag', name).strip()
    if not etag:
        raise BadReplyError(f'{name}: {tag} with an empty ETag')
    return Part(etag, root.findtext('ChecksumCRC32C') or '')


def upload_id(answer: Answer, name: str, key: str) -> str:
    root = parse(answer.body, name, 'InitiateMultipartUploadResult')
    _check_key(root, name, key)
    upload = text_of(root, 'UploadId', name)
    if not upload:
        raise BadReplyError(f'{name}: an upload with an empty UploadId')
    return upload


def joined_etag(answer: Answer, name: str, key: str) -> str:
    # S3 sends whitespace while it joins the parts, even before the XML declaration.
    root = parse(answer.body.strip(), name, 'CompleteMultipartUploadResult')
    _check_key(root, name, key)
    return text_of(root, 'ETag', name)


def _check_key(root: ElementTree.Element, name: str, key: str) -> None:
    echo = root.findtext('Key')
    if echo is not None and key not in (echo, urllib.parse.unquote(echo)):
        raise BadReplyError(f'{name}: expected {root.tag} of the key {key!r}, got that of {echo!r}')


def check_deleted(answer: Answer, name: str, keys: Sequence[str]) -> None:
    """Check that the reply to a deletion reports for each object that it was deleted."""
    root, requested = parse(answer.body, name, 'DeleteResult'), set(keys)
    deleted = {text_of(element, 'Key', name) for element in root.findall('Deleted')}
    errors = {text_of(element, 'Key', name): element.findtext('Code') or '' for element in root.findall('Error')}
    for key in (*deleted, *errors):
        if key not in requested:
            raise BadReplyError(f'{name}: a deletion answered for {key!r}, which was not to be deleted')
    failed = {key: code for key, code in errors.items() if code != 'NoSuchKey'}
    if failed:
        key, code = next(iter(failed.items()))
        messages = {text_of(error, 'Key', name): error.findtext('Message') or '' for error in root.findall('Error')}
        reason = f'{code}: {hidden(messages[key])}' if messages[key] else code
        message = f'{name}: {key!r} was not deleted: {reason}, as {len(failed)} of {len(keys)} objects'
        statuses = {_STATUSES.get(code, 0) for code in failed.values()}
        if 0 in statuses:
            raise StoreError(message)
        raise RetryableError(StoreError(message), throttled=503 in statuses, after=0.0)
    if unreported := requested - deleted - errors.keys():
        raise BadReplyError(
            f'{name}: a deletion of {len(keys)} objects does not report the outcome of {len(unreported)}, such as '
            f'{min(unreported)!r}'
        )
