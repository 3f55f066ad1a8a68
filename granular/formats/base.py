"""The parts of a codec, for the modules that define some."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]
Buffer = bytes | bytearray | memoryview
Family = Literal['number', 'text', 'json', 'tree', 'array', 'image', 'video', 'audio', 'bytes']


class Codec(NamedTuple):
    """A type of values.

    Attributes:
      encode: converts a value to bytes.
      decode: converts bytes to a value.
      family: how ``granular view`` shows the values.
      light: True if both functions are cheap enough for an event loop.
    """

    encode: Encoder
    decode: Decoder
    family: Family
    light: bool = False
