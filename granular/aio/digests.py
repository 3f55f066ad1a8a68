"""Whether all of an object is what its store says it is, by the checksum that the store keeps.

Where checksums have names, they are ``'crc32c'`` and ``'md5'`` of the whole, and ``'parts'``, what S3 gives as the ETag
of an upload in parts: the MD5 of the MD5s of its parts, and their number. All in hexadecimal.
"""

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from granular.aio.threads import offload
from granular.checksums import crc32c
from granular.config import MiB
from granular.errors import BadReplyError

_DIGESTS: Final[Mapping[str, Callable[[bytes], bytes]]] = {
    'crc32c': lambda data: crc32c(data).to_bytes(4, 'big'),
    'crc32': lambda data: zlib.crc32(data).to_bytes(4, 'big'),
    'md5': lambda data: hashlib.md5(data, usedforsecurity=False).digest(),
    'sha256': lambda data: hashlib.sha256(data).digest(),
    'sha1': lambda data: hashlib.sha1(data, usedforsecurity=False).digest(),
}


def said(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """The kind and value of an object's checksum, in base64, if a reply has one that this library knows.

    GCS sends ``x-goog-hash: crc32c=...,md5=...``, S3 ``x-amz-checksum-crc32c`` and others, which may be of an upload's
    parts rather than of the object (https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html).
    """
    kept = dict(part.strip().split('=', 1) for part in headers.get('x-goog-hash', '').split(',') if '=' in part)
    for kind in _DIGESTS:
        value = kept.get(kind) or headers.get(f'x-amz-checksum-{kind}')
        if value and '-' not in value and headers.get('x-amz-checksum-type', 'FULL_OBJECT') == 'FULL_OBJECT':
            return kind, value
    return None


async def check_whole(headers: Mapping[str, str], data: bytes, name: str) -> None:
    """Compare an object with its checksum, off the loop if it is large.

    Raises:
      BadReplyError: if they differ.
    """
    kept = said(headers)
    if kept is None:
        return
    kind, value = kept
    digest = _DIGESTS[kind](data) if len(data) < MiB else await offload(_DIGESTS[kind], data)
    found = base64.b64encode(digest).decode()
    if found != value:
        raise BadReplyError(f'{name}: {len(data)} bytes came with {kind} {found}, the store says {value}')


def proven(*kept: Iterable[str]) -> list[str]:
    """The checksums that all have, and which depend on nothing but the bytes."""
    return [kind for kind in ('crc32c', 'md5') if all(kind in kinds for kinds in kept)]


class Digests:
    """Checksums of bytes as they come.

    Args:
      kinds: which, of ``'crc32c'``, ``'md5'`` and ``'parts'``.
      part_size: that of the upload in parts, as ``IOConfig.part_size``.
    """

    def __init__(self, kinds: Iterable[str], part_size: int) -> None:
        self._kinds = set(kinds)
        self._crc = 0
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._part: Any = hashlib.md5(usedforsecurity=False)
        self._parts: list[bytes] = []
        self._part_size = self._left = part_size

    def add(self, data: bytes) -> None:
        """What comes next."""
        if 'crc32c' in self._kinds:
            self._crc = crc32c(data, self._crc)
        if 'md5' in self._kinds:
            self._md5.update(data)
        if 'parts' in self._kinds:
            self._add_parts(memoryview(data))

    def _add_parts(self, data: memoryview) -> None:
        while data:
            if not self._left:
                self._end_part()
            head, data = data[: self._left], data[self._left :]
            self._part.update(head)
            self._left -= len(head)

    def _end_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part = hashlib.md5(usedforsecurity=False)
        if len(self._parts) % 1000 == 0:
            self._part_size *= 2  # as PartWriter does
        self._left = self._part_size

    def found(self, kind: str) -> str:
        """One of the checksums."""
        match kind:
            case 'crc32c':
                return f'{self._crc:08x}'
            case 'md5':
                return self._md5.hexdigest()
        digests = [*self._parts, self._part.digest()]
        return f'{hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}'
