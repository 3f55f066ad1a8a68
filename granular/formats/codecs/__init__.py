"""Encoders and decoders by type (docs/format.md); those of granular 0.21 and 0.24 have the same bytes.

Each module of this folder has some of them, in ``CODECS``. Users may supply others for any type; all of these are plain
functions or partials of them, so that readers and writers pickle. To choose a quality, for example::

    encoders = {**granular.encoders, 'jpg': functools.partial(granular.formats.encode_image, format='jpg', quality=95)}
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, Final

from granular.formats.base import Codec, Decoder, Encoder
from granular.formats.codecs.images import encode_image_file

CODECS: Final[dict[str, Codec]] = {}
for _module in pkgutil.iter_modules(__path__, f'{__name__}.'):
    CODECS.update(importlib.import_module(_module.name).CODECS)

encoders: dict[str, Encoder] = {kind: codec.encode for kind, codec in CODECS.items()}
decoders: dict[str, Decoder] = {kind: codec.decode for kind, codec in CODECS.items()}


def inline_safe(fn: Callable[..., Any]) -> bool:
    """Return whether a function is ours and cheap enough for an event loop: not for images, audio or videos."""
    return any(_function(fn) is light for light in _LIGHT)


def _function(fn: Callable[..., Any]) -> Callable[..., Any]:
    return _function(fn.func) if isinstance(fn, functools.partial) else fn


_LIGHT: Final = [
    encode_image_file,
    *(_function(fn) for codec in CODECS.values() if codec.light for fn in (codec.encode, codec.decode)),
]
