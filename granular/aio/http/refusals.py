"""Refusals: replies that are neither a success nor about ranges, and what the error documents of stores say."""

import datetime
import html
import re
from typing import Final, Literal

from granular._support.redact import hidden
from granular.aio.http.messages import Head, http_date
from granular.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    GranularError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from granular.formats.base import parse_json

_RETRIED: Final = frozenset((408, 429, 500, 502, 503, 504))
_EXPIRED: Final = frozenset(('ExpiredToken', 'ExpiredTokenException', 'TokenRefreshRequired', 'InvalidToken'))
# Servers send these codes for a body that arrived damaged or too late: S3 with status 400, others with 499.
_DAMAGED: Final = frozenset(
    ('BadDigest', 'IncompleteBody', 'RequestTimeout', 'XAmzContentChecksumMismatch', 'ClientDisconnected')
)
_ARCHIVED: Final = frozenset(('InvalidObjectState', 'BlobArchived'))
_MESSAGE: Final = re.compile(rb'<Message>([^<]*)</Message>')
_TITLE: Final = re.compile(rb'<title[^>]*>\s*([^<\s][^<]*)</title>', re.IGNORECASE)
_REGION: Final = re.compile(
    rb'<Region>([A-Za-z0-9-]{1,63})</Region>'
    rb'|<Endpoint>(?:[^<]*\.)?s3[.-](?:dualstack\.)?([a-z0-9-]{1,63})\.amazonaws\.com(?:\.cn)?</Endpoint>'
)
_LONGEST: Final = 400  # characters of a message of the store
_LONGEST_MARKUP: Final = 80  # characters of a page without a title
_RATE_LIMIT: Final = re.compile(r';\s*r=0\s*;\s*t=(\d{1,9})')  # draft-ietf-httpapi-ratelimit-headers: used up

RecoverableKind = Literal['expired', 'region', 'skewed']
"""A recoverable request error reported by the store: expired credentials, wrong region, or clock skew."""


class RecoverableError(Exception):
    """A reply that reports a recoverable error of the request."""

    def __init__(self, error: GranularError, kind: RecoverableKind, detail: str = '') -> None:
        super().__init__(str(error))
        self.error, self.detail = error, detail
        self.kind = self.outcome = kind


class DoubtfulError(Exception):
    """A reply of another version, which may be the late reply to another request: retry on another connection."""

    def __init__(self, error: ObjectChangedError) -> None:
        super().__init__(str(error))
        self.error = error


class RetryableError(Exception):
    """A reply after which the request is retried."""

    def __init__(self, error: StoreError, throttled: bool, after: float, outcome: str = 'server_error') -> None:
        super().__init__(str(error))
        self.error = error
        self.throttled = throttled
        self.after = after
        self.outcome = 'throttled' if throttled else outcome


def no_such_bucket(name: str, reason: str, status: int | None = None) -> BucketNotFoundError:
    """Return the error for a path in a bucket that does not exist."""
    remedy = 'check its name and the endpoint, or create it with granular.Path(...).mkdir()'
    return BucketNotFoundError(f'{name}: no such bucket ({reason}): {remedy}', status=status)


def code_of(body: bytes | bytearray) -> str:
    """Return the code of an error document of S3; empty if there is none."""
    match = re.search(rb'<Code>(\w+)</Code>', body)
    return '' if match is None else match[1].decode()


def explanation_of(body: bytes | bytearray) -> str:
    """Return the code and the message of an error document of S3, Azure or GCS; empty if there is none."""
    if (match := _MESSAGE.search(body)) is not None:
        message = html.unescape(match[1].decode(errors='replace'))
    else:
        message = _json_message(body)
    return ' '.join(hidden(': '.join(filter(None, (code_of(body)[:80], message)))).split())[:_LONGEST]


def _json_message(body: bytes | bytearray) -> str:
    try:
        document = parse_json(bytes(body)) if body.lstrip()[:1] == b'{' else {}
    except ValueError:
        return ''
    match document:
        case {'error': {'message': str(message)}} | {'error': str(message)}:
            return message
    return ''


def refusal(head: Head, body: bytes | bytearray, name: str) -> Exception:
    """Return the error for a reply that is neither a success nor about ranges."""
    refused = _refusal(head, body, name)
    error = refused.error if isinstance(refused, RecoverableError | RetryableError) else refused
    error.status = head.status
    return refused


def _refusal(head: Head, body: bytes | bytearray, name: str) -> GranularError | RecoverableError | RetryableError:
    status = head.status
    code = code_of(body)
    detail = explanation_of(body) or _text(body) or _text(head.reason.encode())
    if status in (404, 410) and 'NoSuchBucket' in detail:
        return no_such_bucket(name, f'status {status}')
    if status in (404, 410):
        return NotFoundError(f'{name}: no such object (status {status})')
    if status in (401, 403) or code in _EXPIRED:
        denied = AccessDeniedError(f'{name}: access denied (status {status}, {detail}): {_remedy(name, code, detail)}')
        if code == 'RequestTimeTooSkewed':
            return RecoverableError(denied, 'skewed', head.headers.get('date', ''))
        return RecoverableError(denied, 'expired') if status == 401 or code in _EXPIRED else denied
    if status == 407:
        return AccessDeniedError(
            f'{name}: the proxy denied access (status 407, {detail}): check the user in HTTP_PROXY'
        )
    if status == 412:
        return ObjectChangedError(f'{name}: it was replaced while it was being read (status 412): open it again')
    region = _region_of(head, body) if status in (301, 307, 400) else ''
    if region:
        moved = f'{name}: the bucket is in region {region} (status {status}, {detail}): pass region={region!r}'
        return RecoverableError(StoreError(moved), 'region', region)
    error = StoreError(f'{name}: status {status}, {detail}')
    if status not in _RETRIED and code not in _DAMAGED:
        return error
    return RetryableError(error, throttled=status in (429, 503), after=_retry_after(head))


def _region_of(head: Head, body: bytes | bytearray) -> str:
    """Return the region that S3 names for a bucket, in the header, or in the error document; empty if it names none."""
    if region := head.headers.get('x-amz-bucket-region', ''):
        return region[:63]
    match = _REGION.search(body)
    return '' if match is None else (match[1] or match[2]).decode()


def _remedy(name: str, code: str, detail: str) -> str:
    """Return what to do where access is denied, by the address, the code of the store and its message."""
    if name.startswith(('http://', 'https://')):
        return 'check the address, which may have expired, or pass headers= to granular.Path, such as Authorization'
    if code in _ARCHIVED:
        return 'it is archived: restore it first, as with `aws s3api restore-object`'
    if 'not authorized to perform' in detail:  # the message names the user and the right that is missing
        return 'give the credentials this right'
    return 'check the credentials and their rights, or pass anon=True for a public bucket'


def _retry_after(head: Head) -> float:
    """Return the seconds to wait that a reply asks for; 0 if it states none that can be parsed."""
    value = head.headers.get('retry-after', '')
    if not value and (limit := _RATE_LIMIT.search(head.headers.get('ratelimit', ''))):
        return float(limit[1])  # of the Hugging Face Hub, which sends no Retry-After
    if value.isdecimal():
        return float(value[:9])
    until, now = http_date(value), http_date(head.headers.get('date', '')) or datetime.datetime.now(datetime.UTC)
    return 0.0 if until is None else max(0.0, (until - now).total_seconds())


def _text(body: bytes | bytearray) -> str:
    # Servers may quote the request. Of a page of HTML, the title says what failed.
    title = _TITLE.search(body)
    text = html.unescape((title[1] if title else bytes(body)).decode(errors='replace'))
    return ' '.join(hidden(text).split())[: _LONGEST_MARKUP if text.lstrip().startswith('<') else 200]
