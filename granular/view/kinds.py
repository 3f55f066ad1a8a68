"""The families of values that are shown alike: by type, and for bytes and unknown types by their first bytes."""

from typing import Final, cast

from granular.formats.base import Family
from granular.formats.codecs import CODECS
from granular.formats.codecs.images import is_bmp

# The types of specs, except for those that say nothing, and suffixes of WebDataset.
FAMILIES: Final[dict[str, Family]] = {
    **{kind: codec.family for kind, codec in CODECS.items() if codec.family != 'bytes'},
    **dict.fromkeys(('txt', 'text', 'cls'), 'text'),
    **dict.fromkeys(('jpeg', 'webp', 'gif', 'bmp'), 'image'),
    **dict.fromkeys(('audio', 'mp3', 'ogg'), 'audio'),
}
MAGIC: Final = 18
"""Bytes by which media are recognised."""

_STARTS: Final = {
    b'\xff\xd8\xff': 'image/jpeg',
    b'\x89PNG\r\n\x1a\n': 'image/png',
    b'GIF87a': 'image/gif',
    b'GIF89a': 'image/gif',
    b'\x1aE\xdf\xa3': 'video/webm',
    b'fLaC': 'audio/flac',
    b'OggS': 'audio/ogg',
    b'ID3': 'audio/mpeg',
    b'\xff\xfb': 'audio/mpeg',
}
_RIFF: Final = {b'WEBP': 'image/webp', b'WAVE': 'audio/wav'}


def media_type(head: bytes, size: int) -> str:
    """Return the media type of a value by its first bytes; empty for anything that is not a known medium.

    Only types that a browser shows, and never runs, are recognised: SVG and HTML are not among them.
    """
    if head[:4] == b'RIFF':
        return _RIFF.get(head[8:12], '')
    if head[4:8] == b'ftyp':
        return 'image/avif' if head[8:12] == b'avif' else 'audio/mp4' if head[8:12] == b'M4A ' else 'video/mp4'
    if is_bmp(head, size):
        return 'image/bmp'
    return next((media for start, media in _STARTS.items() if head.startswith(start)), '')


def family_of(kind: str, head: bytes = b'', size: int = 0) -> Family:
    """Return how a value is shown, by its type, or if that says nothing, by its first bytes."""
    if kind in FAMILIES:
        return FAMILIES[kind]
    return cast(Family, media_type(head, size).partition('/')[0] or 'bytes')
