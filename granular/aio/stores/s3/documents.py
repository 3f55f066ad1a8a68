"""XML documents of S3: strict parsing of replies, and the bodies of requests."""

import datetime
import re
import urllib.parse
from collections.abc import Callable, Iterable
from typing import Final
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from granular.aio.http.refusals import explanation_of
from granular.aio.stores.errors import quote_body
from granular.errors import BadReplyError

# What XML does not preserve. It is compiled when it is first used, as that takes longer than importing this module.
_UNWRITABLE: Final = '[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]'
_NAMESPACE: Final = 'http://s3.amazonaws.com/doc/2006-03-01/'


# --- replies


def parse(body: bytes, name: str, tag: str) -> ElementTree.Element:
    """Return the root of an XML document, which must have the given tag; namespaces are stripped from all tags."""
    expected = f'{name}: expected the XML document {tag}'
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise BadReplyError(f'{expected}, got a body that is not UTF-8: {error}') from None
    if '<!DOCTYPE' in text or '<!ENTITY' in text:
        raise BadReplyError(f'{expected}, got one with a document type: {quote(body)}')
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError) as error:
        raise BadReplyError(f'{expected}, got {quote(body)} ({error})') from None
    for element in root.iter():
        element.tag = element.tag.rpartition('}')[2]
    if root.tag != tag:
        raise BadReplyError(f'{expected}, got {quote(body)}')
    return root


def quote(body: bytes) -> str:
    """Return the beginning of a body, or the code and message of an error document, without credentials."""
    explanation = explanation_of(body)
    return f'the error {explanation}' if explanation else quote_body(body)


def text_of(element: ElementTree.Element, tag: str, name: str) -> str:
    """Return the text of a child that must exist."""
    text = element.findtext(tag)
    if text is None:
        raise BadReplyError(f'{name}: {element.tag} without {tag}')
    return text


def number_of(element: ElementTree.Element, tag: str, name: str) -> int:
    """Return the number in a child that must exist."""
    text = text_of(element, tag, name)
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise BadReplyError(f'{name}: expected a number for {tag}, got {text[:80]!r}')
    return int(text)


def time_of(element: ElementTree.Element, tag: str, name: str) -> float:
    """Return the time in a child that must exist, in seconds since the epoch."""
    text = text_of(element, tag, name)
    try:
        time = datetime.datetime.fromisoformat(text)
        return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        raise BadReplyError(f'{name}: expected a time for {tag}, got {text[:80]!r}') from None


def is_truncated(root: ElementTree.Element, name: str) -> bool:
    text = text_of(root, 'IsTruncated', name).strip()
    if text not in ('true', 'false'):
        raise BadReplyError(f'{name}: expected true or false for IsTruncated, got {text[:80]!r}')
    return text == 'true'


def name_decoder(root: ElementTree.Element, name: str) -> Callable[[str], str]:
    """Return the function that decodes the names in a page, which are URL-encoded if the page says so."""
    if root.findtext('EncodingType') != 'url':
        return str

    def decode(text: str) -> str:
        try:
            return urllib.parse.unquote_plus(text, errors='strict')
        except UnicodeDecodeError:
            raise BadReplyError(f'{name}: expected names in UTF-8, got {text[:80]!r}') from None

    return decode


# --- requests


def is_writable(key: str) -> bool:
    """Return whether a key survives an XML document unchanged."""
    return re.search(_UNWRITABLE, key) is None


def complete_body(parts: Iterable[tuple[str, str]]) -> bytes:
    """Return the body of a request that joins parts, which are numbered from 1, given their ETags and CRC32Cs."""
    lines = []
    for number, (etag, crc) in enumerate(parts, 1):
        checksum = f'<ChecksumCRC32C>{crc}</ChecksumCRC32C>' if crc else ''
        lines.append(f'<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag>{checksum}</Part>')
    return _body('CompleteMultipartUpload', lines)


def delete_body(keys: Iterable[str]) -> bytes:
    return _body('Delete', [f'<Object><Key>{escape(key)}</Key></Object>' for key in keys])


def bucket_body(region: str) -> bytes:
    """Return the body of a request that creates a bucket; empty for us-east-1, which must not be named."""
    if region == 'us-east-1':
        return b''
    return _body('CreateBucketConfiguration', [f'<LocationConstraint>{escape(region)}</LocationConstraint>'])


def _body(tag: str, lines: Iterable[str]) -> bytes:
    return f'<{tag} xmlns="{_NAMESPACE}">{"".join(lines)}</{tag}>'.encode()
