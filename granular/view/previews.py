"""Values as plain data for the page: a line for tables and tiles, a tree for the detail of a datapoint.

Numbers are sent as text, as JavaScript would round integers from 2**53 on.
"""

import json
import math
from typing import Any, Final

import numpy as np

from granular.errors import DecodeError
from granular.formats import decode_json, decode_tree, decoders
from granular.formats.codecs.arrays import UNPACKING, array_of, dtype_text, parse_array_head
from granular.view.kinds import MAGIC, family_of
from granular.view.sources import Value, reason

LINE: Final = 1024
"""Bytes of a value that are read for a line."""
TEXT: Final = 256 * 1024
"""Bytes of a text or tree that are read for the detail of a datapoint."""

CHARS: Final = 240
"""Characters of a line."""

_NODES: Final = 2000  # nodes of a tree
_DEPTH: Final = 32
_NUMBERS: Final = 6  # values of an array in a line


def head_size(value: Value, most: int) -> int:
    """Return how many bytes of a value are read to describe it: none of media, up to ``most`` of text."""
    family = family_of(value.kind)
    if family in ('image', 'video', 'audio'):
        return 0
    if family == 'bytes' or (family == 'array' and most > LINE):
        return min(value.size, LINE)
    return min(value.size, most)


def line(value: Value, head: bytes) -> dict[str, Any]:
    """Return a value as a line: its family, its size, and its text or what is wrong with it, by its first bytes."""
    family = family_of(value.kind, head[:MAGIC], value.size)
    out: dict[str, Any] = {'family': family, 'type': value.kind, 'size': value.size}
    if value.error:
        return {**out, 'error': value.error}
    try:
        out['text'] = _text(family, value, head)
    except Exception as error:  # a decoder may raise anything: the other values are shown
        out['error'] = reason(error)
    return out


def detail(value: Value, head: bytes) -> dict[str, Any]:
    """Return a value as ``line`` does, with ``full`` for the whole text and ``tree`` for a nested value."""
    out = line(value, head)
    if 'error' in out:
        return out
    if out['family'] == 'text' or (out['family'] == 'json' and len(head) < value.size):
        out['full'] = _decode_text(head, value.size)
    elif out['family'] in ('json', 'tree') and len(head) == value.size:
        try:
            out['tree'] = _Nodes().node((decode_json if out['family'] == 'json' else decode_tree)(head), 0)
        except Exception as error:  # a decoder may raise anything: the other values are shown
            out['error'] = reason(error)
    elif out['family'] == 'bytes':
        out['full'] = _hex_dump(head)
    out['cut'] = ('full' in out or out['family'] in ('json', 'tree')) and len(head) < value.size
    return out


def _text(family: str, value: Value, head: bytes) -> str:
    if family == 'number':
        number = decoders[value.kind](head)
        return repr(number)
    if family == 'text':
        return _decode_text(head, value.size)[:CHARS]
    if family == 'json':
        return (_decode_text(head, value.size) if len(head) < value.size else compact(decode_json(head)))[:CHARS]
    if family == 'tree':
        return compact(decode_tree(head))[:CHARS] if len(head) == value.size else ''
    if family == 'array':
        return _array_line(value, head)
    if family == 'bytes':
        return head[:24].hex(' ')
    return ''


def _decode_text(head: bytes, size: int) -> str:
    if len(head) < size:
        return head.decode('utf-8', 'ignore')  # the last character may be cut in two
    text: str = decoders['utf8'](head)
    return text


def compact(value: Any) -> str:
    """Return a nested value as the JSON that the page shows."""
    return json.dumps(_with_text_keys(value), ensure_ascii=False, default=_short)


def _with_text_keys(value: Any) -> Any:
    """Return a nested value whose maps have keys that JSON allows."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f'{value.dtype} {_shape(value.shape)}'
    return f'{len(value)} bytes' if isinstance(value, bytes) else f'{value}'


def _shape(shape: Any) -> str:
    return ' x '.join(map(str, shape)) or 'scalar'


def _array_line(value: Value, head: bytes) -> str:
    dtype, shape, start = array_head(head, value.size)
    text = f'{dtype} {_shape(shape)}'
    count = min(_NUMBERS, (len(head) - start) // dtype.itemsize) if dtype.itemsize else 0
    if count <= 0 or 0 in shape:
        return text
    values = array_of(dtype_text(dtype), [count], head[start : start + count * dtype.itemsize]).tolist()
    more = ', …' if count * dtype.itemsize < value.size - start else ''
    return f'{text}: {", ".join(_number(item) for item in values)}{more}'


def _number(item: Any) -> str:
    return f'{item:.5g}' if isinstance(item, float) else str(item)


def array_head(head: bytes, size: int) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """Return the dtype and shape of an encoded array of this size, and the position of its data."""
    try:
        dtype, shape, end = parse_array_head(head)
        start = end + {0xC4: 2, 0xC5: 3, 0xC6: 5}[head[end]]
        if start + math.prod(shape) * dtype.itemsize != size:
            raise ValueError(f'shape {list(shape)!r:.80} of {dtype.str!r} does not match {size} bytes')
    except (*UNPACKING, KeyError, IndexError) as error:
        raise DecodeError(f'{size} bytes are not an array: {str(error) or type(error).__name__}') from error
    return dtype, shape, start


def _hex_dump(data: bytes) -> str:
    rows = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        text = ''.join(chr(byte) if 32 <= byte < 127 else '·' for byte in row)
        rows.append(f'{start:06x}  {row.hex(" "):<47}  {text}')
    return '\n'.join(rows)


class _Nodes:
    """Converts a nested value to lists that name what they hold; a large one is cut."""

    def __init__(self) -> None:
        self._left = _NODES

    def node(self, value: Any, depth: int) -> list[Any]:
        self._left -= 1
        if depth > _DEPTH or self._left <= 0:
            return ['cut', '…']
        if isinstance(value, dict):
            items = list(value.items())[: self._left]
            pairs = [[str(key), self.node(item, depth + 1)] for key, item in items]
            return ['map', pairs, len(value)]
        if isinstance(value, list | tuple):
            return ['list', [self.node(item, depth + 1) for item in value[: self._left]], len(value)]
        if isinstance(value, str):
            return ['text', value]
        if isinstance(value, np.ndarray):
            few = ', '.join(_number(item.item()) for item in value.ravel()[:_NUMBERS])
            return ['array', f'{_short(value)}: {few}{", …" if value.size > _NUMBERS else ""}']
        if isinstance(value, bytes):
            return ['bytes', f'{len(value)} bytes: {value[:16].hex(" ")}{" …" if len(value) > 16 else ""}']
        if isinstance(value, bool | None):
            return ['word', {True: 'true', False: 'false', None: 'null'}[value]]
        return ['number', f'{value}']
