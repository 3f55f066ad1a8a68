"""The functions that decode the members of tar files, by the suffixes of their names."""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from granular import formats
from granular.formats.codecs.arrays import decode_npy

Decoders = Mapping[str, Callable[[bytes], Any] | None] | None


def decode_class(data: bytes) -> int | str:
    """Decode the number of a class, or its name."""
    text = formats.decode_utf8(data).strip()
    return int(text) if re.fullmatch(r'-?[0-9]{1,38}', text) else text


class _Member(NamedTuple):
    kind: str  # the type of the values, whose decoder is used
    decode: Callable[[bytes], Any] | None = None  # what is used in its place


_MEMBERS: Final = {
    'jpeg': _Member('jpg'), **dict.fromkeys(('webp', 'gif', 'bmp'), _Member('png')),
    **dict.fromkeys(('mov', 'm4v'), _Member('mp4')), 'mkv': _Member('webm'),
    **dict.fromkeys(('txt', 'text'), _Member('utf8')),
    **dict.fromkeys(('cls', 'cls2', 'index'), _Member('int', decode_class)), 'npy': _Member('array', decode_npy),
}  # fmt: skip
# Types whose bytes are those of datasets: in tar files, such names have texts or files of others.
_NO_FILES: Final = ('int', 'i64', 'u64', 'float', 'bool', 'array', 'tree')


def decoder_of(field: str, decoders: Decoders) -> Callable[[bytes], Any] | None:
    """Return the function that decodes the members of a field; None for bytes."""
    table, suffix = decoders or {}, field.rpartition('.')[2]
    for name in (field, suffix):
        if name in table:
            fn = table[name]
            return None if name in _NO_FILES and fn is formats.decoders[name] else fn
    member = _MEMBERS.get(suffix)
    if member is None or member.kind not in table:
        return None
    return member.decode or table[member.kind]


def type_of_members(field: str) -> str:
    """Return the type of the values of a field, as decoded by default; empty if they decide."""
    if (fn := decoder_of(field, formats.decoders)) is None:
        return 'bytes'
    return next((kind for kind in ('bytes', 'utf8', 'msgpack') if fn is formats.decoders[kind]), '')
