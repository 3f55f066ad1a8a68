"""Encoders and decoders by type: the values that granular 0.21 and 0.24 know, in the same bytes (docs/format.md).

An encoder makes bytes of a value, a decoder a value of bytes. A user may bring others for any type; all of these are
plain functions or partials of them, so that readers and writers pickle. To choose a quality, for example::

    encoders = {**granular.encoders, 'jpg': functools.partial(granular.formats.encode_image, format='jpg', quality=95)}
"""

import functools
import io
from collections.abc import Callable
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from granular.errors import DecodeError, EncodeError, MissingExtraError

Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]
Buffer = bytes | bytearray | memoryview

_ARRAY_KINDS: Final = 'biufcmMSUV'


# --- plain values -----------------------------------------------------------------------------------------------------


def encode_bytes(value: Buffer) -> bytes:
    """Bytes as they are."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise EncodeError(f'want bytes, got {type(value).__name__}')
    return bytes(value)


def decode_bytes(buffer: Buffer) -> bytes:
    """Bytes as they are."""
    return bytes(buffer)


def encode_utf8(value: str) -> bytes:
    """Text in UTF-8."""
    if not isinstance(value, str):
        raise EncodeError(f'want str, got {type(value).__name__}')
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise EncodeError(f'text with a lone surrogate at {error.start} has no UTF-8') from error


def decode_utf8(buffer: Buffer) -> str:
    """Text from UTF-8."""
    try:
        return str(buffer, 'utf-8')
    except UnicodeDecodeError as error:
        raise DecodeError(f'{len(buffer)} bytes are not UTF-8: {error.reason} at {error.start}') from error


def encode_int(value: Any, size: int | None = None, signed: bool = True) -> bytes:
    """An integer, little-endian.

    Args:
      value: a Python or numpy integer.
      size: its bytes; None for the fewest that hold it signed, at most 16.
      signed: two's complement, or no sign.

    Raises:
      EncodeError: for what is no integer, or does not fit.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise EncodeError(f'want an integer, got {type(value).__name__}')
    number = int(value)
    # One bit for the sign, as the decoder reads it; granular 0.21 refuses numbers whose top bit would be taken for one.
    width = (number if number >= 0 else ~number).bit_length() // 8 + 1 if size is None else size
    if width > 16:
        raise EncodeError(f'an integer of {number.bit_length()} bits is too wide: want 127 or fewer')
    try:
        return number.to_bytes(width, 'little', signed=signed)
    except OverflowError:
        raise EncodeError(f'{number} does not fit {width} {"signed" if signed else "unsigned"} bytes') from None


def decode_int(buffer: Buffer, size: int | None = None, signed: bool = True) -> int:
    """An integer from its little-endian bytes, of which there must be ``size``, or up to 16."""
    if len(buffer) > 16 or (size is not None and len(buffer) != size):
        raise DecodeError(f'an integer of {len(buffer)} bytes: want {size or "up to 16"}')
    return int.from_bytes(buffer, 'little', signed=signed)


def encode_msgpack(value: Any) -> bytes:
    """What msgpack holds: None, bool, int, float, str, bytes, lists and maps. Tuples come back as lists."""
    try:
        packed: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(f'{type(value).__name__} does not fit msgpack: {error}') from error
    return packed


def decode_msgpack(buffer: Buffer) -> Any:
    """What msgpack holds; maps may have keys of any type."""
    try:
        return msgpack.unpackb(buffer, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DecodeError(f'{len(buffer)} bytes are not msgpack: {error}') from error


# --- arrays -----------------------------------------------------------------------------------------------------------


def encode_array(value: Any) -> bytes:
    """An array or numpy scalar: msgpack of (dtype.str, shape, data), C-contiguous.

    Raises:
      EncodeError: for objects and for fields, which ``dtype.str`` does not tell.
    """
    if not isinstance(value, np.ndarray | np.generic):
        raise EncodeError(f'want a numpy array, got {type(value).__name__}')
    packed: bytes = msgpack.packb(_pack_array(value))
    return packed


def decode_array(buffer: Buffer) -> NDArray[Any]:
    """An array: a read-only view of the record's bytes."""
    try:
        dtype, shape, data = msgpack.unpackb(buffer)
        return _unpack_array(dtype, shape, data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DecodeError(f'{len(buffer)} bytes are no array: {error}') from error


def encode_tree(value: Any) -> bytes:
    """Nested lists, tuples and dicts of arrays and of what msgpack holds. Tuples come back as lists.

    Raises:
      EncodeError: for what msgpack does not hold, and for a list of four that begins with ``'_'``, which is how an
        array is written.
    """
    try:
        packed: bytes = msgpack.packb(_pack_tree(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise EncodeError(f'the tree holds what does not fit: {error}') from error
    return packed


def decode_tree(buffer: Buffer) -> Any:
    """A tree, whose arrays are read-only views of the record's bytes."""
    try:
        return _unpack_tree(msgpack.unpackb(buffer, strict_map_key=False))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DecodeError(f'{len(buffer)} bytes are no tree: {error}') from error


def _pack_array(value: Any) -> tuple[str, tuple[int, ...], Any]:
    array = np.asarray(value)
    if array.dtype.kind not in _ARRAY_KINDS or array.dtype.names is not None:
        raise EncodeError(f'an array of dtype {array.dtype} has no bytes of its own: want numbers or fixed-width text')
    # Bytes, and not a buffer: dates and times give no buffer, and one of zero size or dimensions is not contiguous.
    return array.dtype.str, array.shape, array.tobytes()


def _unpack_array(dtype: Any, shape: Any, data: Any) -> NDArray[Any]:
    kind = np.dtype(dtype)
    if not isinstance(dtype, str) or kind.kind not in _ARRAY_KINDS:
        raise ValueError(f'its dtype is {dtype!r}')
    if not kind.itemsize or not data:
        return np.empty(shape, kind) if not data else np.frombuffer(data, kind).reshape(shape)
    return np.frombuffer(data, kind).reshape(shape)


def _pack_tree(value: Any) -> Any:
    if isinstance(value, list | tuple):
        if len(value) == 4 and isinstance(value[0], str) and value[0] == '_':
            raise EncodeError("a list of four that begins with '_' would be read as an array")
        return [_pack_tree(item) for item in value]
    if isinstance(value, dict):
        return {key: _pack_tree(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return ('_', *_pack_array(value))
    return value


def _unpack_tree(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) == 4 and isinstance(value[0], str) and value[0] == '_':
            return _unpack_array(*value[1:])
        return [_unpack_tree(item) for item in value]
    if isinstance(value, dict):
        return {key: _unpack_tree(item) for key, item in value.items()}
    return value


# --- images and videos ------------------------------------------------------------------------------------------------


def encode_image(value: Any, quality: int = 95, format: str = 'jpg') -> bytes:
    """An image, by Pillow.

    Args:
      value: uint8 of shape (height, width) or (height, width, 3), for png also (height, width, 4), or a PIL image.
      quality: of a jpg, 1 to 100. (granular 0.21 takes the argument but writes 75, Pillow's default.)
      format: ``'jpg'`` or ``'png'``.

    Raises:
      EncodeError: for another shape or dtype.
    """
    image_module = _pillow()
    if isinstance(value, image_module.Image):
        image = value
    else:
        array = np.asarray(value)
        channels = array.shape[2:] if array.ndim == 3 else ()
        fits = channels in ((), (3,)) or (format == 'png' and channels == (4,))
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or not fits or 0 in array.shape:
            raise EncodeError(
                f'an image as {format} is uint8 of shape (height, width) or (height, width, 3'
                f'{" or 4" if format == "png" else ""}), got {array.dtype} of shape {array.shape}'
            )
        image = image_module.fromarray(array)
    options = {'quality': quality} if format in ('jpg', 'jpeg') else {}
    stream = io.BytesIO()
    try:
        image.save(stream, format={'jpg': 'jpeg'}.get(format, format).upper(), **options)
    except (OSError, KeyError, ValueError) as error:
        raise EncodeError(f'an image of mode {image.mode} and size {image.size} as {format}: {error}') from error
    return stream.getvalue()


def decode_image(buffer: Buffer) -> NDArray[Any]:
    """An image as a new uint8 array of shape (height, width) or (height, width, channels), as the file has them.

    A palette comes back as its indices, and CMYK as four channels.
    """
    image_module = _pillow()
    try:
        with image_module.open(io.BytesIO(buffer)) as image:
            return np.array(image)
    except (OSError, ValueError, SyntaxError) as error:
        raise DecodeError(f'{len(buffer)} bytes are no image that Pillow knows: {error}') from error


def encode_video(value: Any, fps: int = 20, format: str = 'mp4', codec: str = 'h264') -> bytes:
    """A video, by PyAV, in yuv420p: lossy, and of even width and height.

    Args:
      value: uint8 of shape (frames, height, width, 3).
      fps: frames per second.
      format: the container, ``'mp4'`` or ``'webm'``.
      codec: ``'h264'``, ``'vp9'``, or what else PyAV can write into it.

    Raises:
      EncodeError: for another shape or dtype.
    """
    av = _pyav()
    array = np.asarray(value)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or 0 in array.shape:
        raise EncodeError(
            f'a video is uint8 of shape (frames, height, width, 3), got {array.dtype} of shape {array.shape}'
        )
    frames, height, width = array.shape[:3]
    if height % 2 or width % 2:
        raise EncodeError(f'a video of {height} by {width} pixels: yuv420p needs both even; pad or crop it by one')
    stream = io.BytesIO()
    try:
        with av.open(stream, mode='w', format=format) as container:
            output = container.add_stream(codec, rate=fps)
            output.width, output.height, output.pix_fmt = width, height, 'yuv420p'
            for i in range(frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array[i]), format='rgb24')
                frame.pts = i
                container.mux(output.encode(frame))
            container.mux(output.encode(None))
    except (av.FFmpegError, ValueError) as error:
        raise EncodeError(f'a video of shape {array.shape} as {format} with {codec}: {error}') from error
    return stream.getvalue()


def decode_video(buffer: Buffer) -> NDArray[np.uint8]:
    """A video as uint8 of shape (frames, height, width, 3)."""
    av = _pyav()
    try:
        with av.open(io.BytesIO(buffer)) as container:
            return np.stack([frame.to_ndarray(format='rgb24') for frame in container.decode(video=0)])
    except (av.FFmpegError, ValueError, IndexError) as error:
        raise DecodeError(f'{len(buffer)} bytes are no video that PyAV knows: {error}') from error


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("images need Pillow: pip install 'granular[formats]'") from error
    return Image


def _pyav() -> Any:
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("videos need PyAV: pip install 'granular[formats]'") from error
    return av


# --- by type ----------------------------------------------------------------------------------------------------------

encoders: dict[str, Encoder] = {
    'bytes': encode_bytes,
    'utf8': encode_utf8,
    'msgpack': encode_msgpack,
    'int': encode_int,
    'i64': functools.partial(encode_int, size=8, signed=True),
    'u64': functools.partial(encode_int, size=8, signed=False),
    'array': encode_array,
    'tree': encode_tree,
    'jpg': functools.partial(encode_image, format='jpg'),
    'png': functools.partial(encode_image, format='png'),
    'mp4': functools.partial(encode_video, format='mp4', codec='h264'),
    'webm': functools.partial(encode_video, format='webm', codec='vp9'),
}

decoders: dict[str, Decoder] = {
    'bytes': decode_bytes,
    'utf8': decode_utf8,
    'msgpack': decode_msgpack,
    'int': decode_int,
    'i64': functools.partial(decode_int, size=8, signed=True),
    'u64': functools.partial(decode_int, size=8, signed=False),
    'array': decode_array,
    'tree': decode_tree,
    'jpg': decode_image,
    'png': decode_image,
    'mp4': decode_video,
    'webm': decode_video,
}

_LIGHT: Final[tuple[Callable[..., Any], ...]] = (
    *(encode_bytes, encode_utf8, encode_int, encode_msgpack, encode_array, encode_tree),
    *(decode_bytes, decode_utf8, decode_int, decode_msgpack, decode_array, decode_tree),
)


def inline_safe(fn: Callable[..., Any]) -> bool:
    """Whether a function is one of ours that is cheap enough for an event loop: not images, videos or a user's."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return any(fn is light for light in _LIGHT)
