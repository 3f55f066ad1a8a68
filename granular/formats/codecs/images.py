"""Codecs of images, by Pillow, and of JPEG also by simplejpeg. Both are imported on first use."""

import functools
import io
import os
from typing import Any, Final, Literal

import msgpack
import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import check_integer
from granular._support.lazy import import_extra, import_if_installed
from granular.errors import DecodeError, EncodeError, InvalidArgumentError
from granular.formats.base import Buffer, Codec, as_array, checked_file, outline_of
from granular.formats.codecs.arrays import array_of
from granular.formats.codecs.videos import frame_converter

# Formats of records of type jpg or png. Pillow supports more, among them formats that run other programs.
_IMAGES: Final = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP')
_PNG: Final = b'\x89PNG\r\n\x1a\n'
_JPEG: Final = b'\xff\xd8\xff'
_SCALES: Final = (8, 4, 2)  # the divisors of both sides at which libjpeg decodes directly
# Colour spaces of JPEG files that simplejpeg decodes. CMYK is left to Pillow, which knows Adobe's inverted files.
_COLOURS: Final = ('YCbCr', 'RGB', 'Gray')
_BMP_HEADERS: Final = (12, 40, 52, 56, 64, 108, 124)  # lengths of the header behind that of the file
_RAW: Final = b'raw1'
# Bits per pixel of Pillow's modes; a row of mode 1 ends with a whole byte.
_BITS: Final = {
    '1': 1, 'L': 8, 'P': 8, 'LA': 16, 'La': 16, 'PA': 16, 'I;16': 16, 'I;16B': 16, 'RGB': 24, 'YCbCr': 24, 'LAB': 24,
    'HSV': 24, 'RGBA': 32, 'RGBa': 32, 'RGBX': 32, 'CMYK': 32, 'I': 32, 'F': 32,
}  # fmt: skip
_PALETTES: Final = {'RGB': 3, 'RGBA': 4, 'RGBX': 4, 'L': 1}
_MAX_HEADER: Final = 1 << 16  # bytes of a header


def image_type(data: Buffer) -> str:
    """Return the type of an image file, ``'jpg'`` or ``'png'``, by its first bytes; empty if it is not an image.

    ``'png'`` also stands for WebP, GIF and BMP: the type only says how arrays are encoded, and all formats are decoded
    alike.
    """
    head = bytes(data[:14])
    if head.startswith(_JPEG):
        return 'jpg'
    if head.startswith((b'\x89PNG\r\n\x1a\n', b'GIF87a', b'GIF89a')) or (head[:4], head[8:12]) == (b'RIFF', b'WEBP'):
        return 'png'
    return 'png' if is_bmp(bytes(data[:18]), len(data)) else ''


def is_bmp(head: bytes, size: int) -> bool:
    """Return whether a file is a BMP, by its first 18 bytes: not by the size in it, which some programs write wrong."""
    pixels, header = (int.from_bytes(head[at : at + 4], 'little') for at in (10, 14))
    return head.startswith(b'BM') and header in _BMP_HEADERS and 14 + header <= pixels <= size


def encode_image(value: Any, quality: int = 95, format: str = 'jpg') -> bytes:
    """Encode an image by Pillow, or keep an image file as it is.

    Args:
      value: uint8 of shape (height, width) or (height, width, 3), for png also with 2 channels (gray and alpha) or 4,
        and uint16 or bool of shape (height, width); a PIL image; or the bytes of an image file, which are checked by
        their first bytes: a JPEG for jpg; a PNG, WebP, GIF or BMP for png.
      quality: quality of a jpg, 1 to 100. (granular 0.21 accepts the argument but writes 75, Pillow's default.)
      format: ``'jpg'`` or ``'png'``.

    Raises:
      EncodeError: for any other shape, dtype or file.
      InvalidArgumentError: for any other quality.
    """
    if not isinstance(format, str):
        raise InvalidArgumentError(f"format: expected 'jpg' or 'png', got {format!r:.100}")
    quality = check_integer('quality', quality, 1, 100)
    kind, files = ('jpg', 'JPEG') if format in ('jpg', 'jpeg') else ('png', 'PNG, WebP, GIF or BMP')
    if isinstance(value, bytes | bytearray | memoryview):
        return checked_file(value, format, files, image_type(value) == kind)
    image_module = _pillow()
    if isinstance(value, image_module.Image):
        image = value
    else:
        if isinstance(value, str | os.PathLike):
            raise EncodeError(
                f'{format}: expected an array or the bytes of a file, got the path {value!r:.200}: read it'
            )
        array = as_array(value)
        if not _fits(array, kind):
            form = f'uint8 of shape (height, width) or (height, width, {"2, 3 or 4" if kind == "png" else "3"})'
            deep = ', or of uint16 or bool of shape (height, width)' if kind == 'png' else ''
            raise EncodeError(
                f'{format}: expected an image of {form}{deep}, got {array.dtype} of shape {array.shape}: '
                f'{_remedy_for(array, kind)}'
            )
        image = image_module.fromarray(array)
    options = {'quality': quality} if kind == 'jpg' else {}
    stream = io.BytesIO()
    try:
        image.save(stream, format={'jpg': 'jpeg'}.get(format, format).upper(), **options)
    except (OSError, KeyError, ValueError) as error:
        raise EncodeError(
            f"an image of mode {image.mode} and size {image.size} as {format}: {error}: image.convert('RGB') makes one "
            f"of 8 bits, and the type 'array' takes numpy.asarray(image)"
        ) from error
    return stream.getvalue()


def _fits(array: NDArray[Any], kind: str) -> bool:
    """Return whether an image file of a type can have the pixels of an array."""
    if array.ndim not in (2, 3) or 0 in array.shape:
        return False
    channels = array.shape[2] if array.ndim == 3 else 0
    if array.dtype == np.uint8:
        return channels in ((0, 2, 3, 4) if kind == 'png' else (0, 3))
    return kind == 'png' and array.dtype in (np.uint16, np.bool_) and channels == 0


def _remedy_for(array: NDArray[Any], kind: str) -> str:
    if array.ndim == 3 and array.shape[2] == 1 and _fits(array[..., 0], kind):
        return 'array[..., 0] removes the last axis'
    if array.ndim == 3 and _fits(array.transpose(1, 2, 0), kind):
        return 'array.transpose(1, 2, 0) moves the channels'
    if array.dtype.kind == 'f':
        return '(255 * array).astype(numpy.uint8) converts values from 0 to 1'
    return f'the type {"png" if _fits(array, "png") else "array"!r} stores it as it is'


def decode_image(
    buffer: Buffer, min_size: tuple[int, int] | None = None, mode: Literal['RGB', 'original'] = 'original'
) -> NDArray[Any]:
    """Decode an image as a new array, with the channels and the dtype of the file.

    Gray images, masks and palette indices have the shape (height, width), colours three channels, alpha and CMYK four,
    gray with alpha two; 16 bits are uint16, black and white is bool. The orientation in EXIF data is not applied. The
    file is a JPEG, PNG, WebP, GIF or BMP of at most ``PIL.Image.MAX_IMAGE_PIXELS`` pixels (89 million, unless you
    change it; None for any number). JPEG files are decoded by simplejpeg, if it is installed; their pixels differ from
    those of Pillow by one level at most.

    A decoder for training that reduces large JPEG files while it decodes them, which is faster than to resize them::

        decode = functools.partial(granular.formats.decode_image, min_size=(224, 224), mode='RGB')
        decoders = {**granular.decoders, 'jpg': decode}

    Args:
      buffer: the file.
      min_size: least height and width of the result: both sides of a JPEG are divided by 8, 4 or 2 (rounded up), by
        the largest of these that leaves at least this size. Smaller images, and other formats, keep their size; None
        keeps that of all.
      mode: ``'RGB'`` for uint8 of shape (height, width, 3), so that images of any file fit into one batch: gray values
        are repeated, colours of palettes looked up, CMYK and YCCK converted, and 16 bits reduced to their upper 8;
        alpha is dropped.

    Raises:
      DecodeError: if it is not such a file.
      InvalidArgumentError: if ``min_size`` is not a pair of integers >= 1, or there is no such mode.
    """
    if mode not in ('RGB', 'original'):
        raise InvalidArgumentError(f"mode: expected 'RGB' or 'original', got {mode!r:.100}")
    image_module = _pillow()
    if min_size is not None:
        min_size = _check_size(min_size)
    limit = image_module.MAX_IMAGE_PIXELS
    pixels = _decode_by_simplejpeg(buffer, min_size, mode, limit)
    if pixels is not None:
        return pixels
    if mode == 'original' and (form := _deep_form(buffer)):
        return _decode_deep(buffer, form, limit)
    try:
        with image_module.open(io.BytesIO(buffer), formats=_IMAGES) as image:
            if limit is not None and image.width * image.height > limit:
                raise DecodeError(f'expected at most {limit} pixels, got an image of {image.width} by {image.height}')
            if min_size is not None:
                image.draft(None, min_size[::-1])  # of effect for JPEG only
            image.load()
            if mode == 'RGB':
                return np.array(_in_rgb(image))
            array = np.array(image)
            return array.astype(np.uint16, copy=False) if image.mode.startswith('I') else array
    except (DecodeError, MemoryError):  # the size is checked: memory is short
        raise
    except image_module.UnidentifiedImageError as error:
        raise DecodeError(f'expected an image of {", ".join(_IMAGES)}, got {outline_of(buffer)}') from error
    except Exception as error:  # Pillow's plugins raise anything that their parsers run into
        raise DecodeError(f'Pillow cannot decode the image of {len(buffer)} bytes: {error!r:.200}') from error


def _deep_form(buffer: Buffer) -> str:
    """Return FFmpeg's format of a PNG of 16 bits with more than one channel, which Pillow reduces to 8; else empty."""
    head = bytes(buffer[:26])
    if not head.startswith(_PNG) or len(head) < 26 or head[24] != 16:
        return ''
    return {2: 'rgb48le', 4: 'ya16le', 6: 'rgba64le'}.get(head[25], '')


def _decode_deep(buffer: Buffer, form: str, limit: int | None) -> NDArray[np.uint16]:
    """Decode a PNG of 16 bits with several channels."""
    width, height = (int.from_bytes(bytes(buffer[at : at + 4]), 'big') for at in (16, 20))
    if limit is not None and width * height > limit:
        raise DecodeError(f'expected at most {limit} pixels, got an image of {width} by {height}')
    av = import_extra('av', 'formats', 'images of 16 bits and several channels need PyAV')
    try:
        with av.open(io.BytesIO(buffer), format='png_pipe') as container:
            frame = next(container.decode(video=0))
            plane, channels = frame_converter(form)(frame).planes[0], {'rgb48le': 3, 'ya16le': 2, 'rgba64le': 4}[form]
            rows = np.frombuffer(plane, '<u2').reshape(height, plane.line_size // 2)
            return rows[:, : width * channels].reshape(height, width, channels).astype(np.uint16)
    except MemoryError:
        raise
    except Exception as error:  # whatever the parser runs into
        raise DecodeError(f'PyAV cannot decode the image of {len(buffer)} bytes: {error!r:.200}') from error


def _in_rgb(image: Any) -> Any:
    """Return a PIL image in mode RGB."""
    if image.mode.startswith('I'):  # 16 bits, which Pillow would cut off at 255
        image = _pillow().fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image.info.pop('transparency', None)  # dropped, as alpha is; Pillow would warn
    return image.convert('RGB')


def _decode_by_simplejpeg(
    buffer: Buffer, min_size: tuple[int, int] | None, mode: str, limit: int | None
) -> NDArray[np.uint8] | None:
    """Decode a JPEG as Pillow does, but faster; None for whatever is left to Pillow."""
    library = _simplejpeg()
    if library is None or bytes(buffer[:3]) != _JPEG:
        return None
    try:
        height, width, space, _ = library.decode_jpeg_header(buffer)
        if space not in _COLOURS or (limit is not None and height * width > limit):
            return None
        sides = {}
        if min_size is not None:
            # The scales of Pillow's `draft`, so that both decoders return the same size.
            scale = next((s for s in _SCALES if height // s >= min_size[0] and width // s >= min_size[1]), 1)
            if scale > 1:
                sides = {'min_height': -(-height // scale), 'min_width': -(-width // scale)}
        gray = space == 'Gray' and mode == 'original'
        # Decoding is strict: it fails where libjpeg would warn and return pixels that are not in the file.
        pixels: NDArray[np.uint8] = library.decode_jpeg(buffer, 'GRAY' if gray else 'RGB', **sides)
    except Exception:  # Pillow decides whether the file is damaged, and describes the damage
        return None
    return pixels[..., 0] if gray else pixels


def _check_size(size: Any) -> tuple[int, int]:
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise InvalidArgumentError(f'min_size: expected a height and a width, got {size!r:.100}')
    return check_integer('height of min_size', size[0], 1), check_integer('width of min_size', size[1], 1)


def pack_image(value: Any) -> bytes:
    """Return the pixels of an image as they are in memory, after a small header: lossless, without compression.

    For caches: ``granular.SharedMemoryCache(source, pack=granular.formats.pack_image,
    unpack=granular.formats.unpack_image)``. The bytes are ``raw1``, the length of the header (2 bytes, little-endian),
    the header in msgpack, and the pixels row by row.

    Args:
      value: a PIL image of one of Pillow's standard modes, of which palette and transparency are preserved, but not the
        rest of its ``info``; or a numpy array of numbers, of any shape.

    Raises:
      EncodeError: for anything else.
    """
    head: tuple[Any, ...]
    if isinstance(value, np.ndarray) and value.dtype.kind in 'biufc':
        head, pixels = ('array', value.dtype.str, value.shape), as_array(value).tobytes()
    else:
        image_module = _pillow()
        if not isinstance(value, image_module.Image):
            raise EncodeError(f'expected a PIL image or an array of numbers, got {type(value).__name__}')
        if value.mode not in _BITS:
            raise EncodeError(f'image mode: expected one of {", ".join(_BITS)}, got {value.mode!r}')
        pixels = value.tobytes() if value.width and value.height else b''
        palette = value.palette if value.mode in ('P', 'PA') else None
        colours = (None, b'') if palette is None else (palette.mode, bytes(value.getpalette(palette.mode)))
        head = ('image', value.mode, value.size, *colours, value.info.get('transparency'))
    packed = msgpack.packb(head)
    if len(packed) >= _MAX_HEADER:
        raise EncodeError(f'expected a header of fewer than {_MAX_HEADER} bytes, got {len(packed)}')
    return b''.join((_RAW, len(packed).to_bytes(2, 'little'), packed, pixels))


def unpack_image(buffer: Buffer) -> Any:
    """Return the value passed to ``pack_image``: a new PIL image of the same mode, size, palette and pixels, or array.

    Memory is bounded by the bytes of the buffer.

    Raises:
      DecodeError: if the buffer is not exactly an output of ``pack_image``.
    """
    view = memoryview(buffer)
    try:
        start = len(_RAW) + 2 + int.from_bytes(view[len(_RAW) : len(_RAW) + 2], 'little')
        if bytes(view[: len(_RAW)]) != _RAW or start > len(view):
            raise ValueError('unknown magic')
        kind, *head = msgpack.unpackb(view[len(_RAW) + 2 : start])
        if kind == 'image':
            return _image_of(view[start:], *head)
        dtype, shape = head
        return array_of(dtype, shape, memoryview(bytearray(view[start:])))
    except MemoryError:  # the sizes are checked: memory is short
        raise
    except Exception as error:  # the header is untrusted and may cause any exception
        raise DecodeError(f'{len(view)} bytes are not a raw image: {error!r:.200}') from error


def _image_of(
    pixels: memoryview, mode: str, size: list[int], palette: str | None, colours: bytes, transparency: Any
) -> Any:
    width, height = size
    if type(width) is not int or type(height) is not int or width < 0 or height < 0:
        raise ValueError(f'size {size!r:.80}')
    if (expected := -(-width * _BITS[mode] // 8) * height) != len(pixels):
        raise ValueError(f'expected {expected} bytes for mode {mode}, size {width} by {height}, got {len(pixels)}')
    image_module = _pillow()
    if width and height:
        image = image_module.frombytes(mode, (width, height), bytes(pixels))
    else:
        image = image_module.new(mode, (width, height))
    if palette is not None:
        if len(colours) > 256 * _PALETTES[palette]:
            raise ValueError(f'a palette of {len(colours)} bytes')
        image.putpalette(colours, palette)
    if transparency is not None:
        image.info['transparency'] = tuple(transparency) if isinstance(transparency, list) else transparency
    return image


def encode_image_file(value: Buffer) -> bytes:
    """Encode the bytes of an image file (JPEG, PNG, WebP, GIF or BMP), unchanged."""
    if not isinstance(value, bytes | bytearray | memoryview):
        raise EncodeError(f'expected the bytes of an image file, got {type(value).__name__}')
    return checked_file(value, 'image', 'JPEG, PNG, WebP, GIF or BMP', bool(image_type(value)))


def _pillow() -> Any:
    return import_extra('PIL.Image', 'formats', 'images need Pillow')


@functools.cache
def _simplejpeg() -> Any:
    return import_if_installed('simplejpeg')


CODECS: Final = {
    kind: Codec(functools.partial(encode_image, format=kind), decode_image, 'image') for kind in ('jpg', 'png')
}
