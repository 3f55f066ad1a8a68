"""Whether all of an object is what its store says it is, by the checksum that the store keeps."""

import base64
import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Final

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
