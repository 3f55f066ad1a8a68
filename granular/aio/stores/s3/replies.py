"""S3 replies and the XML bodies of requests: pure functions and values, no I/O.

Each reply is checked against its request: proxies answer requests with an empty 200 or an HTML page, and S3 itself may
send an error document with status 200.
"""

import base64
import datetime
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from granular._redact import hidden
from granular.aio.http.messages import Head, http_date
from granular.aio.http.transport import Answer
from granular.aio.stores.base import ContentInfo
from granular.errors import BadReplyError, GranularError, NotFoundError, StoreError

TOKEN: Final = 'x-amz-meta-granular-writer'  # identifies the writer of an object

_ETAG: Final = re.compile(r'[0-9a-f]{32}(-\d+)?')
_CRC32C: Final = re.compile(r'[A-Za-z0-9+/]{6}==')  # a checksum of parts does not match: it ends in their number
_UNWRITABLE: Final = re.compile('[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]')  # not preserved by XML
_NAMESPACE: Final = 'http://s3.amazonaws.com/doc/2006-03-01/'
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


class Found(NamedTuple):
    """Metadata of an object."""

    size: int
    modified: float | None
    version: str | None
    headers: Mapping[str, str]

    @property
    def writer(self) -> str:
        """Token of the writer that published the object; empty if it has none."""
        return self.headers.get(TOKEN, '')

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


class PartsPage(NamedTuple):
    """A page of an upload's parts: their bytes, the time of the last one, and the marker of the next page."""

    size: int
    modified: float
    marker: int | None


class UnfinishedUpload(NamedTuple):
    """An unfinished multipart upload."""

    key: str
    id: str
    modified: float


class UploadsPage(NamedTuple):
    """A page of unfinished multipart uploads, and the markers of the next page."""

    uploads: Sequence[UnfinishedUpload]
    markers: tuple[str, str] | None


# --- XML


def document(body: bytes, name: str, tag: str, *others: str) -> ElementTree.Element:
    """Return the root of an XML document with one of the given root tags; namespaces are stripped from all tags.

    Raises:
      BadReplyError: if the body is not XML, declares entities, or has another root.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadReplyError(f'{name}: the answer is not UTF-8: {error}') from None
    if '<!DOCTYPE' in text or '<!ENTITY' in text:
        raise BadReplyError(f'{name}: expected the XML document {tag}, got one with a document type: {_quoted(body)}')
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise BadReplyError(f'{name}: expected the XML document {tag}, got {_quoted(body)} ({error})') from None
    for element in root.iter():
        element.tag = element.tag.rpartition('}')[2]
    if root.tag not in (tag, *others):
        raise BadReplyError(f'{name}: expected the XML document {tag}, got {_quoted(body)}')
    return root


def code_of(body: bytes) -> str:
    """Return the code of an error document; empty if there is none."""
    match = re.search(rb'<Code>(\w+)</Code>', body)
    return '' if match is None else match[1].decode()


def _quoted(body: bytes) -> str:
    if code := code_of(body):
        return f'the error {code}'
    return repr(' '.join(hidden(body[:400].decode(errors='replace')).split())[:120]) if body else 'nothing'


def _text(element: ElementTree.Element, tag: str, name: str) -> str:
    text = element.findtext(tag)
    if text is None:
        raise BadReplyError(f'{name}: {element.tag} without {tag}')
    return text


def _number(text: str, what: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise BadReplyError(f'{name}: expected a number for {what}, got {text[:80]!r}')
    return int(text)


def _time(text: str, what: str, name: str) -> float:
    try:
        return _seconds(datetime.datetime.fromisoformat(text))
    except (ValueError, OverflowError):
        raise BadReplyError(f'{name}: expected a time for {what}, got {text[:80]!r}') from None


def _seconds(time: datetime.datetime) -> float:
    return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()


def _truncated(root: ElementTree.Element, name: str) -> bool:
    text = _text(root, 'IsTruncated', name).strip()
    if text not in ('true', 'false'):
        raise BadReplyError(f'{name}: expected true or false for IsTruncated, got {text[:80]!r}')
    return text == 'true'


class _Names:
    """Decoder of the names in a listing, which are URL-encoded if the reply says so."""

    def __init__(self, root: ElementTree.Element, name: str) -> None:
        self._name = name
        self._encoded = root.findtext('EncodingType') == 'url'

    def of(self, text: str) -> str:
        """Return a name as it was given to the object."""
        if not self._encoded:
            return text
        try:
            return urllib.parse.unquote_plus(text, errors='strict')
        except UnicodeDecodeError:
            raise BadReplyError(f'{self._name}: a listing with the name {text[:80]!r}, which is no UTF-8') from None


# --- listings


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
        self._firsts: set[str] = set()  # the first name of each page
        self._last = b''  # the greatest name so far
        self._empty = 0  # empty pages in a row

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
        names = _names(page)
        self._empty = 0 if names else self._empty + 1
        if names:
            self._firsts.add(names[0])
            self._last = max(self._last, *(name.encode() for name in names))
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
                raise BadReplyError(f'{self._name}: a listing answered by status 404, {_quoted(answer.body)}')
            if self._token is not None:
                raise StoreError(f'{self._name}: the bucket is gone while it is listed (NoSuchBucket)')
            raise NotFoundError(f'{self._name}: no such bucket (NoSuchBucket)')
        page = self._page(answer.body)
        self._check_progress(page)
        return page

    def _page(self, body: bytes) -> Page:
        name, root = self._name, document(body, self._name, 'ListBucketResult')
        names, more = _Names(root, name), _truncated(root, name)
        # Some servers encode the keys, but not the prefix that they echo.
        if (echo := root.findtext('Prefix')) and self._prefix not in (echo, names.of(echo)):
            raise BadReplyError(f'{name}: a listing of {names.of(echo)!r}, where {self._prefix!r} was asked for')
        items, folders = [], []
        for element in root:
            if element.tag == 'Contents':
                time = element.findtext('LastModified')
                items.append(
                    Item(
                        names.of(_text(element, 'Key', name)),
                        _number(_text(element, 'Size', name), 'Size', name),
                        None if time is None else _time(time, 'LastModified', name),
                    )
                )
            elif element.tag == 'CommonPrefixes':
                folders.append(names.of(_text(element, 'Prefix', name)))
        count = root.findtext('KeyCount')
        # Ceph counts only the keys, not the folders.
        counts = (len(items) + len(folders), len(items))
        if count is not None and _number(count, 'KeyCount', name) not in counts:
            raise BadReplyError(f'{name}: a page of {counts[0]} names says that it has {count[:20]}')
        token = root.findtext('NextContinuationToken') if more else None
        if more and not token:
            raise BadReplyError(f'{name}: a page says that there are more, but has no NextContinuationToken')
        page = Page(items, folders, token)
        self._check_place(page)
        return page

    def _check_place(self, page: Page) -> None:
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
        names = _names(page)
        if page.token in self._tokens:
            raise BadReplyError(f'{self._name}: a page has the NextContinuationToken of an earlier one')
        if names and names[0] in self._firsts:
            raise BadReplyError(f'{self._name}: a page begins with {names[0]!r}, as an earlier one does')
        if not names and page.token is not None and self._empty >= _EMPTY_PAGES:
            raise BadReplyError(f'{self._name}: {_EMPTY_PAGES} pages in a row without a name')
        if not self._ordered or not names:
            return
        if names != sorted(names, key=str.encode) or (self._last and min(n.encode() for n in names) <= self._last):
            raise BadReplyError(f'{self._name}: the keys of a page that begins with {names[0]!r} are not in order')


def _names(page: Page) -> list[str]:
    """Return the keys and folders of a page, merged in byte order if it has both."""
    if not page.folders:
        return [item.key for item in page.items]
    if not page.items:
        return list(page.folders)
    return sorted([*(item.key for item in page.items), *page.folders], key=str.encode)


# --- objects


def found_of(head: Head, name: str) -> Found:
    """Parse the reply to HEAD.

    Raises:
      BadReplyError: if it has no length, or neither an ETag nor a time, which every object of a bucket has.
    """
    version, date = head.headers.get('etag') or None, head.headers.get('last-modified')
    if head.length is None or (version is None and date is None):
        raise BadReplyError(
            f'{name}: status {head.status} without {"a length" if head.length is None else "an ETag or a time"}, '
            f'which is no object'
        )
    time = None if date is None else http_date(date)
    if date is not None and time is None:
        raise BadReplyError(f'{name}: expected a time for Last-Modified, got {date[:80]!r}')
    return Found(head.length, None if time is None else time.timestamp(), version, head.headers)


def is_encrypted(headers: Mapping[str, str]) -> bool:
    """Return whether an object is encrypted in a way that makes its ETag something other than an MD5.

    https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html
    """
    kind = headers.get('x-amz-server-side-encryption', 'AES256')
    return kind != 'AES256' or 'x-amz-server-side-encryption-customer-algorithm' in headers


def written(answer: Answer, name: str) -> str:
    """Return the ETag in the reply to an object or a part that was sent.

    Raises:
      BadReplyError: if the reply has no ETag, or has a body.
    """
    etag = answer.head.headers.get('etag', '')
    if answer.body.strip() or not etag:
        raise BadReplyError(f'{name}: expected an ETag for what was sent, got {_quoted(answer.body.strip())}')
    return etag


def copied(answer: Answer, name: str, tag: str) -> Part:
    """Return the ETag and checksum in the reply to an object or a part that was copied.

    Raises:
      BadReplyError: if the reply is not a document with the given root tag and an ETag.
    """
    root = document(answer.body.strip(), name, tag)
    etag = _text(root, 'ETag', name).strip()
    if not etag:
        raise BadReplyError(f'{name}: {tag} with an empty ETag')
    return Part(etag, root.findtext('ChecksumCRC32C') or '')


def nothing(answer: Answer, name: str) -> None:
    """Check the reply to a request that has no result.

    Raises:
      BadReplyError: if it has a body.
    """
    if answer.body.strip():
        raise BadReplyError(f'{name}: expected no body, got {_quoted(answer.body.strip())}')


def missing(answer: Answer, name: str) -> GranularError:
    """Return the error for status 404: NotFoundError only if S3 itself sent the answer."""
    code = code_of(answer.body)
    if code not in ('NoSuchKey', 'NoSuchBucket'):
        return BadReplyError(f'{name}: status 404 with {_quoted(answer.body)}, which is no answer of S3')
    return NotFoundError(f'{name}: no such {"object" if code == "NoSuchKey" else "bucket"} (status 404, {code})')


# --- multipart uploads


def upload_begun(answer: Answer, name: str, key: str) -> str:
    """Return the id of a multipart upload that was started."""
    root = document(answer.body, name, 'InitiateMultipartUploadResult')
    _check_key(root, name, key)
    upload = _text(root, 'UploadId', name)
    if not upload:
        raise BadReplyError(f'{name}: an upload with an empty UploadId')
    return upload


def upload_done(answer: Answer, name: str, key: str) -> str:
    """Return the ETag of an object that was joined from parts."""
    # S3 sends whitespace while it joins the parts, even before the XML declaration.
    root = document(answer.body.strip(), name, 'CompleteMultipartUploadResult')
    _check_key(root, name, key)
    return _text(root, 'ETag', name)


def _check_key(root: ElementTree.Element, name: str, key: str) -> None:
    said = root.findtext('Key')
    if said is not None and key not in (said, urllib.parse.unquote(said)):
        raise BadReplyError(f'{name}: {root.tag} of the key {said!r}')


def complete_body(parts: Sequence[Part]) -> bytes:
    """Return the body of a request that joins parts, which are numbered from 1."""
    lines = []
    for number, (etag, crc) in enumerate(parts, 1):
        checksum = f'<ChecksumCRC32C>{crc}</ChecksumCRC32C>' if crc else ''
        lines.append(f'<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag>{checksum}</Part>')
    return _body('CompleteMultipartUpload', lines)


def uploads_page(answer: Answer, name: str, prefix: str, before: tuple[str, str] | None) -> UploadsPage:
    """Parse a page of unfinished multipart uploads.

    Args:
      before: the markers by which this page was requested.
    """
    root = document(answer.body, name, 'ListMultipartUploadsResult')
    names, more, uploads = _Names(root, name), _truncated(root, name), []
    for element in root.findall('Upload'):
        key = names.of(_text(element, 'Key', name))
        if not key.startswith(prefix):
            raise BadReplyError(f'{name}: a list of the uploads of {prefix!r} has one of {key!r}')
        time = _time(_text(element, 'Initiated', name), 'Initiated', name)
        uploads.append(UnfinishedUpload(key, _text(element, 'UploadId', name), time))
    if not more:
        return UploadsPage(uploads, None)
    markers = names.of(_text(root, 'NextKeyMarker', name)), root.findtext('NextUploadIdMarker') or ''
    if not markers[0] or markers == before:
        raise BadReplyError(f'{name}: a page of uploads says that there are more, but not from which one on')
    return UploadsPage(uploads, markers)


def parts_page(answer: Answer, name: str, before: int) -> PartsPage | None:
    """Parse a page of the parts of an upload; return None if the upload does not exist.

    Args:
      before: the marker by which this page was requested; 0 for the first one.
    """
    if answer.head.status == 404 and code_of(answer.body) == 'NoSuchUpload':
        return None
    root = document(answer.body, name, 'ListPartsResult', 'ListPartsResponse')  # moto sends the second tag
    more, size, modified = _truncated(root, name), 0, 0.0
    for element in root.findall('Part'):
        size += _number(_text(element, 'Size', name), 'Size', name)
        modified = max(modified, _time(_text(element, 'LastModified', name), 'LastModified', name))
    marker = _number(_text(root, 'NextPartNumberMarker', name), 'NextPartNumberMarker', name) if more else None
    if marker is not None and marker <= before:
        raise BadReplyError(f'{name}: a page of parts behind {before} says that the next one begins behind {marker}')
    return PartsPage(size, modified, marker)


# --- deletions


def is_writable(key: str) -> bool:
    """Return whether a key survives an XML document unchanged."""
    return _UNWRITABLE.search(key) is None


def delete_body(keys: Iterable[str]) -> bytes:
    """Return the body of a request that deletes objects."""
    return _body('Delete', [f'<Object><Key>{escape(key)}</Key></Object>' for key in keys])


def deleted(answer: Answer, name: str, keys: Sequence[str]) -> None:
    """Check that all objects of a deletion were deleted.

    Raises:
      BadReplyError: if the reply does not report the outcome for each key.
      StoreError: if some objects were not deleted.
    """
    root, asked = document(answer.body, name, 'DeleteResult'), set(keys)
    gone = {_text(element, 'Key', name) for element in root.findall('Deleted')}
    errors = {_text(element, 'Key', name): element.findtext('Code') or '' for element in root.findall('Error')}
    for key in (*gone, *errors):
        if key not in asked:
            raise BadReplyError(f'{name}: a deletion answered for {key!r}, which was not to be deleted')
    failed = {key: code for key, code in errors.items() if code != 'NoSuchKey'}
    if failed:
        key, code = next(iter(failed.items()))
        raise StoreError(f'{name}: {key!r} was not deleted: {code}, as {len(failed)} of {len(keys)} objects')
    if silent := asked - gone - errors.keys():
        raise BadReplyError(
            f'{name}: a deletion of {len(keys)} objects says nothing of {len(silent)}, such as {min(silent)!r}'
        )


# --- buckets


def bucket_body(region: str) -> bytes:
    """Return the body of a request that creates a bucket; empty for us-east-1, which must not be named."""
    if region == 'us-east-1':
        return b''
    return _body('CreateBucketConfiguration', [f'<LocationConstraint>{escape(region)}</LocationConstraint>'])


def _body(tag: str, lines: Iterable[str]) -> bytes:
    return f'<{tag} xmlns="{_NAMESPACE}">{"".join(lines)}</{tag}>'.encode()
