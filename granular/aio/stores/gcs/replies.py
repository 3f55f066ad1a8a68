"""Answers of Google Cloud Storage's JSON API, parsed strictly: pure functions and values, no I/O.

A reply with status 200 may come from a proxy, be truncated or hold an error document. A reply is rejected unless every
field is what the API documents (BadReplyError): https://cloud.google.com/storage/docs/json_api/v1.
"""

import base64
import datetime
import hashlib
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from granular._support.redact import hidden
from granular.aio.http.transport import Answer
from granular.aio.stores.base import Entry
from granular.aio.stores.errors import quote_body
from granular.aio.stores.listing import Listing, Page
from granular.errors import BadReplyError
from granular.formats.base import parse_json

WRITER: Final = 'granular-writer'
"""Key of an object's metadata that identifies its writer."""

_DIGITS: Final = re.compile(r'[0-9]{1,19}')
_RANGE: Final = re.compile(r'bytes=0-([0-9]{1,19})')
_DIGESTS: Final[Mapping[str, tuple[str, int]]] = {'crc32c': ('crc32c', 4), 'md5': ('md5Hash', 16)}
_EMPTY: Final = {('crc32c', '00000000'), ('md5', hashlib.md5(usedforsecurity=False).hexdigest())}
_NOT_FOUND: Final = re.compile(rb'\s*\{.*"code"\s*:\s*404\b', re.DOTALL)


class Resource(NamedTuple):
    """Description of an object."""

    name: str
    size: int
    generation: str  # its version
    modified: float | None  # seconds since the epoch; None if the answer does not report it
    digests: Mapping[str, str]  # in hexadecimal, by kind (:mod:`granular.aio.http.digests`)
    writer: str  # the token of this library's writer that wrote it; empty if it has none


class Rewrite(NamedTuple):
    """State of a copy within the store: the bytes copied, a token to continue, and the copy once it is complete."""

    copied: int
    token: str
    resource: Resource | None


def document(answer: Answer, name: str) -> Mapping[str, Any]:
    """Return the JSON object in the body of an answer, which must not be an error document."""
    try:
        value = parse_json(answer.body)
    except ValueError:
        raise BadReplyError(f'{name}: expected JSON, got {quote_body(answer.body)}') from None
    if not isinstance(value, dict) or 'error' in value:
        raise BadReplyError(f'{name}: expected a JSON object without an error, got {quote_body(answer.body)}')
    return value


def resource_of(answer: Answer, name: str, key: str) -> Resource:
    """Return the object that an answer describes, which must have the given key."""
    resource = parse_resource(document(answer, name), name)
    if resource.name != key:
        raise BadReplyError(f'{name}: expected the description of {key!r}, got that of {resource.name!r}')
    return resource


def next_page(listing: Listing, answer: Answer) -> Page:
    name = listing.name
    value = document(answer, name)
    fields = ('items', 'prefixes', 'nextPageToken')
    if value.get('kind', 'storage#objects') != 'storage#objects' or not any(key in value for key in ('kind', *fields)):
        raise BadReplyError(f'{name}: expected a listing, got {quote_body(answer.body)}')
    items, folders, token = (value.get(key, default) for key, default in zip(fields, ([], [], ''), strict=True))
    lists = isinstance(items, list) and isinstance(folders, list) and all(isinstance(item, str) for item in folders)
    if not lists or not isinstance(token, str):
        raise BadReplyError(f'{name}: expected items, prefixes and a token, got {quote_body(answer.body)}')
    resources = [parse_resource(item, name) for item in items]
    objects = [
        Entry(item.name, item.name.endswith('/'), item.size, item.modified, item.generation) for item in resources
    ]
    return listing.accept(Page(objects, folders, token))


def check_missing(answer: Answer, name: str) -> None:
    """Check that an answer with status 404 comes from the store: only the store may report an object as missing.

    Only the beginning of the error document is matched: it quotes the key, which may be long, and may be truncated.
    """
    if not _NOT_FOUND.match(answer.body):
        raise BadReplyError(f'{name}: expected an error document with status 404, got {quote_body(answer.body)}')


def bucket_of(answer: Answer, name: str, bucket: str) -> None:
    value = document(answer, name)
    if value.get('kind') != 'storage#bucket' or value.get('name') != bucket:
        raise BadReplyError(f'{name}: expected the description of bucket {bucket!r}, got {quote_body(answer.body)}')


def check_deleted(answer: Answer, name: str) -> None:
    """Check that an answer confirms a deletion: status 204, or 404 if there was nothing to delete.

    Emulators send a 200 with a JSON null. Any other 200 does not come from the store.
    """
    if answer.head.status == 200 and answer.body.strip() != b'null':
        raise BadReplyError(f'{name}: expected status 204 for a deletion, got 200 and {quote_body(answer.body)}')


def persisted_size(answer: Answer, name: str) -> int:
    """Return the bytes of an upload that the store has, from an answer with status 308: none without a Range."""
    header = answer.head.headers.get('range')
    if header is None:
        return 0
    match = _RANGE.fullmatch(header)
    if match is None:
        raise BadReplyError(f'{name}: expected the range of bytes that the store has, got Range {header[:80]!r}')
    return int(match[1]) + 1


def session_of(answer: Answer, name: str) -> str:
    """Return the path and query of the upload that an answer has started.

    The host is dropped: data and tokens are only sent to the endpoint.
    """
    location = answer.head.headers.get('location', '')
    try:
        parts = urllib.parse.urlsplit(location)
        query = urllib.parse.parse_qs(parts.query)
    except ValueError:
        parts, query = urllib.parse.urlsplit(''), {}
    if not parts.path.startswith('/') or not query.get('upload_id'):
        raise BadReplyError(f'{name}: expected the Location of an upload, got {hidden(location)[:80]!r}')
    return f'{parts.path}?{parts.query}'


def rewrite_of(answer: Answer, name: str, key: str) -> Rewrite:
    """Return the state of a copy to the given key."""
    value = document(answer, name)
    done, token = value.get('done'), value.get('rewriteToken') or ''
    if value.get('kind', 'storage#rewriteResponse') != 'storage#rewriteResponse' or not isinstance(done, bool):
        raise BadReplyError(f'{name}: expected the state of a copy, got {quote_body(answer.body)}')
    copied = _count(value.get('totalBytesRewritten'), 'totalBytesRewritten', name)
    if not done:
        if not isinstance(token, str) or not token:
            raise BadReplyError(f'{name}: expected a token to continue the copy, got {quote_body(answer.body)}')
        return Rewrite(copied, token, None)
    resource = parse_resource(value.get('resource'), name)
    if resource.name != key:
        raise BadReplyError(f'{name}: expected a copy at {key!r}, got one at {resource.name!r}')
    return Rewrite(copied, '', resource)


def parse_resource(value: Any, name: str) -> Resource:
    """Return the object that a JSON value describes."""
    if not isinstance(value, dict) or value.get('kind', 'storage#object') != 'storage#object':
        raise BadReplyError(f'{name}: expected the description of an object, got {str(value)[:80]!r}')
    key, generation, metadata = value.get('name'), value.get('generation'), value.get('metadata')
    if not isinstance(key, str) or not key:
        raise BadReplyError(f'{name}: expected the name of an object, got {key!r}')
    if not isinstance(generation, str) or not _DIGITS.fullmatch(generation):
        raise BadReplyError(f'{name}: expected the generation of {key!r}, got {str(generation)[:80]!r}')
    writer = metadata.get(WRITER, '') if isinstance(metadata, dict) else ''
    digests = {
        kind: _digest(value[field], length, field, name)
        for kind, (field, length) in _DIGESTS.items()
        if field in value
    }  # fmt: skip
    return Resource(
        key,
        # JSON that is made of protocol buffers omits a size of 0.
        0 if 'size' not in value and digests and digests.items() <= _EMPTY else _count(value.get('size'), 'size', name),
        generation,
        _time(value.get('updated'), name),
        digests,
        str(writer),
    )


def _count(value: Any, field: str, name: str) -> int:
    """Parse a number of bytes, which the API writes as a string."""
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not _DIGITS.fullmatch(text):
        raise BadReplyError(f'{name}: expected a number of bytes as {field}, got {str(value)[:80]!r}')
    return int(text)


def _time(value: Any, name: str) -> float | None:
    if value is None:
        return None
    try:
        moment = datetime.datetime.fromisoformat(value)
        if moment.tzinfo is not None:
            return moment.timestamp()
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadReplyError(f'{name}: expected a time with a zone, got {str(value)[:80]!r}')


def _digest(value: Any, length: int, field: str, name: str) -> str:
    try:
        digest = base64.b64decode(value, validate=True)
    except (TypeError, ValueError):
        digest = b''
    if len(digest) != length:
        raise BadReplyError(f'{name}: expected {length} bytes in base64 as {field}, got {str(value)[:80]!r}')
    return digest.hex()
