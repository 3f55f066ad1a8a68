"""The parts of a codec, for the modules that define some."""

import json
import re
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular._support.lazy import is_masked
from granular.errors import EncodeError

Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]
Buffer = bytes | bytearray | memoryview
Family = Literal['number', 'text', 'json', 'tree', 'array', 'image', 'video', 'audio', 'bytes']


_UNSTORED: Final = (
    ('TIFF', re.compile(rb'II\*\0|MM\0\*')),
    ('HEIC', re.compile(rb'....ftyp(hei|mif1)', re.DOTALL)),
    ('AVIF', re.compile(rb'....ftypavi', re.DOTALL)),
    ('PPM', re.compile(rb'P[1-6]\s')),
)  # formats of images


class Codec(NamedTuple):
    """A type of values."""

    encode: Encoder
    decode: Decoder
    family: Family  # how ``granular view`` shows the values
    light: bool = False  # True if both functions are cheap enough for an event loop


def as_array(value: Any) -> NDArray[Any]:
    """Return a value as an array; raise ``EncodeError`` for one with a mask, which would be lost."""
    if is_masked(type(value)):
        raise EncodeError('expected an array without a mask: call its filled(), or encode the mask as another array')
    try:
        return np.asarray(value)
    except (TypeError, RuntimeError) as error:
        raise EncodeError(no_array(value, error)) from error


def no_array(value: Any, error: Exception) -> str:
    """Describe a value that numpy does not convert, such as a tensor of bfloat16 or one that requires gradients."""
    return (
        f'numpy makes no array of this {type(value).__name__}: {error}: convert it before, such as a tensor by '
        f'tensor.detach().cpu().float()'
    )


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON document; raise ``ValueError`` for any other text, and for one that nests too deep."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f'{error}') from None


def checked_file(value: Buffer, format: str, expected: str, fits: bool) -> bytes:
    """Return a file, which is kept as it is; raise ``EncodeError`` unless it fits the type that is expected."""
    if not fits:
        raise EncodeError(f'{format}: expected a {expected} file, got {outline_of(value)}')
    return bytes(value)


def outline_of(data: Buffer) -> str:
    """Describe the bytes of a file that is none of those expected, for errors."""
    head = bytes(memoryview(data)[:12])
    image = next((name for name, start in _UNSTORED if start.match(head)), '')
    image = f', a {image} image, which no type of images takes: convert it to PNG' if image else ''
    return f'{memoryview(data).nbytes} bytes that begin with {head!r}{image}' if head else 'an empty file'
