"""Check objects against the checksums that their store keeps.

The names of checksums are ``'crc32c'`` and ``'md5'`` of the whole object, and ``'parts'``, which S3 returns as the ETag
of a multipart upload: the MD5 of the MD5s of its parts, and their number. All are in hexadecimal.
"""

import base64
import functools
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from granular._support.lazy import import_if_installed
from granular.aio.http.messages import shown
from granular.aio.runtime.threads import offload
from granular.config import KiB
from granular.errors import BadReplyError
from granular.formats.checksums import crc32c

Data = bytes | memoryview

_OFFLOADED: Final = 256 * KiB  # from this size on, a checksum would block the loop for half a millisecond
_ETAG: Final = re.compile(r'"?([0-9a-fA-F]{32})"?')


DIGESTS: Final[dict[str, Callable[[Data], bytes]]] = {
    'crc32c': lambda data: crc32c(bytes(data)).to_bytes(4, 'big'),  # which copies a view, but not bytes
    'crc32': lambda data: zlib.crc32(data).to_bytes(4, 'big'),
    'md5': lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
    'sha256': lambda data: hashlib.sha256(data).digest(),
    'sha1': lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
}


@functools.cache
def find_crc64nvme() -> None:
    """Register S3's default checksum if AWS's library is installed: in Python, megabytes would take seconds."""
    if (checksums := import_if_installed('awscrt.checksums')) is not None:
        DIGESTS['crc64nvme'] = lambda data: checksums.crc64nvme(bytes(data)).to_bytes(8, 'big')


def checksum_in(headers: Mapping[str, str], ranged: bool) -> tuple[str, str] | None:
    """Return the kind and base64 value of an object's checksum, if a reply has one that this library supports.

    GCS sends ``x-goog-hash: crc32c=...,md5=...``, S3 ``x-amz-checksum-crc32c`` and others, which may cover an upload's
    parts rather than the object (https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html),
    or a part if a range was requested.
    """
    google = dict(part.strip().split('=', 1) for part in headers.get('x-goog-hash', '').split(',') if '=' in part)
    amazon = not ranged and headers.get('x-amz-checksum-type', 'FULL_OBJECT') == 'FULL_OBJECT'
    if 'x-amz-checksum-crc64nvme' in headers:
        find_crc64nvme()
    for kind in DIGESTS:
        value = google.get(kind) or (headers.get(f'x-amz-checksum-{kind}') if amazon else None)
        if value and '-' not in value:
            return kind, value
    return None


def etag_md5(headers: Mapping[str, str]) -> str | None:
    """Return the ETag of a reply in lower case if it may be the MD5 of the object.

    It is not the MD5 for multipart uploads, for objects encrypted with KMS or customer-provided keys, and in directory
    buckets (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html). Servers other than S3 may send any ETag:
    the caller finds out by comparing.
    """
    match = _ETAG.fullmatch(headers.get('etag', ''))
    plain = (
        headers.get('x-amz-server-side-encryption', 'AES256') == 'AES256'
        and 'x-amz-server-side-encryption-customer-algorithm' not in headers
        and headers.get('x-amz-storage-class') != 'EXPRESS_ONEZONE'
    )
    return match[1].lower() if match is not None and plain else None


async def digest(kind: str, data: Data) -> bytes:
    """Compute a checksum, in a thread if the data is large."""
    return DIGESTS[kind](data) if len(data) < _OFFLOADED else await offload(DIGESTS[kind], data)


async def check_reported(headers: Mapping[str, str], data: Data, name: str, ranged: bool) -> bool:
    """Compare an object with the checksum in a reply's headers. Returns False if there is none."""
    checksum = checksum_in(headers, ranged)
    if checksum is None:
        return False
    kind, value = checksum
    computed = base64.b64encode(await digest(kind, data)).decode()
    if computed != value:
        raise BadReplyError(f'{name}: {len(data)} bytes came with {kind} {computed}, the store says {shown(value)}')
    return True


def proven(*kept: Iterable[str]) -> list[str]:
    """Return the checksums that all objects have and that depend on nothing but the bytes."""
    return [kind for kind in ('crc32c', 'md5') if all(kind in kinds for kinds in kept)]


class Digests:
    """Checksums computed incrementally: 'crc32c', 'md5', and 'parts' of an upload in parts of this size."""

    def __init__(self, kinds: Iterable[str], part_size: int) -> None:
        self._kinds = set(kinds)
        self._crc = 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._part: Any = hashlib.md5(usedforsecurity=False)
        self._parts: list[bytes] = []
        self._part_size = self._left = part_size

    def add(self, data: bytes) -> None:
        if 'crc32c' in self._kinds:
            self._crc = crc32c(data, self._crc)
        if 'md5' in self._kinds:
            self._md5.update(data)
        if 'parts' in self._kinds:
            self._add_parts(memoryview(data))

    def _add_parts(self, data: memoryview) -> None:
        while data:
            if not self._left:
                self._parts.append(self._part.digest())
                self._part = hashlib.md5(usedforsecurity=False)
                if len(self._parts) % 1000 == 0:
                    self._part_size *= 2  # as PartWriter does
                self._left = self._part_size
            head, data = data[: self._left], data[self._left :]
            self._part.update(head)
            self._left -= len(head)

    def compare(self, kept: Mapping[str, str], size: int, name: str) -> None:
        """Raise ``BadReplyError`` if one of the proven checksums that a store keeps of its bytes is another one."""
        for kind in proven(kept):
            if self.found(kind) != kept[kind]:
                raise BadReplyError(
                    f'{name}: expected {size} bytes of {kind} {kept[kind]}, as the store reports, got '
                    f'{self.found(kind)}',
                    path=name,
                )

    def found(self, kind: str) -> str:
        match kind:
            case 'crc32c':
                return f'{self._crc:08x}'
            case 'md5':
                return self._md5.hexdigest()
        digests = [*self._parts, self._part.digest()]
        return f'{hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}'
