"""Pictures of values: thumbnails of images, first frames of videos, heat maps of arrays. Pure functions, for threads.

Memory of one: the bytes of the value, and four bytes for each of at most 16 million pixels. Of those of more
than 2 million pixels, one is made at a time in the process.
"""

import contextlib
import io
import math
import threading
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular._support.lazy import import_extra
from granular.config import MiB
from granular.errors import DecodeError, UnsupportedError
from granular.formats import decode_array, decode_image
from granular.formats.codecs.arrays import array_of, dtype_text
from granular.formats.codecs.videos import frame_converter
from granular.view.kinds import MAGIC, family_of, media_type
from granular.view.previews import array_head

MOST: Final = 16 * MiB
"""Bytes of a value that has a picture in a list."""

_PIXELS: Final = 16_000_000
_REDUCED: Final = 40_000_000  # pixels of a JPEG, which is reduced while it is decoded
_LARGE: Final = 2_000_000  # pixels of an image that is made alone
_alone: Final = threading.Lock()
_IMAGES: Final = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP')
_NUMBERS: Final = 4096  # numbers of a plane that are sent with its picture
_COLOURS: Final = (
    (68, 1, 84), (72, 40, 120), (62, 73, 137), (49, 104, 142), (38, 130, 142), (31, 158, 137), (53, 183, 121),
    (110, 206, 88), (181, 222, 43), (253, 231, 37),
)  # fmt: skip


class Picture(NamedTuple):
    media: str  # its media type
    data: bytes  # none for an array that has no picture
    width: int  # pixels of the original, as the height
    height: int
    note: str = ''  # duration of a video, or dtype and shape of an array


def picture(kind: str, data: bytes, side: int) -> Picture:
    """Return a picture of a value whose sides are at most ``side`` pixels."""
    family = family_of(kind, data[:MAGIC], len(data))
    if family == 'image':
        return _image(data, side)
    if family == 'video':
        return _video(data, side)
    if family == 'array':
        return _array(decode_array(data), side)
    raise UnsupportedError(f'{kind}: has no picture')


def _image(data: bytes, side: int) -> Picture:
    pil = import_extra('PIL.Image', 'formats', 'images need Pillow')
    try:
        with pil.open(stream := io.BytesIO(data), formats=_IMAGES) as image:
            width, height = image.size
            with _turn(width, height, _REDUCED if image.format == 'JPEG' else _PIXELS):
                image.draft(None, (2 * side, 2 * side))  # it reduces JPEG files alone
                image.load()
                return _fit(image, side)._replace(width=width, height=height)
    except (UnsupportedError, MemoryError):
        raise
    except Exception as error:  # Pillow's plugins raise anything that their parsers run into
        why = repr(error).replace(repr(stream), 'of this value')
        raise DecodeError(f'Pillow cannot decode the image of {len(data)} bytes: {why:.200}') from error


def as_decoded(data: bytes) -> bytes | None:
    """Return an image in RGB, as a decoder does, if a browser shows other colours: of CMYK; else None."""
    pil = import_extra('PIL.Image', 'formats', 'images need Pillow')
    try:
        with pil.open(io.BytesIO(data), formats=('JPEG',)) as image:
            if image.mode != 'CMYK' or image.width * image.height > _PIXELS:
                return None
    except Exception:  # Pillow raises anything: the browser says that it is damaged
        return None
    stream = io.BytesIO()
    pil.fromarray(decode_image(data, mode='RGB')).save(stream, 'PNG', compress_level=1)
    return stream.getvalue()


def _turn(width: int, height: int, most: int) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which an image may be decoded; raise ``UnsupportedError`` if it has too many pixels."""
    if width * height > most:
        raise UnsupportedError(f'{width} x {height} pixels are too many for a thumbnail')
    return _alone if width * height > _LARGE else contextlib.nullcontext()


def _fit(image: Any, side: int) -> Picture:
    """Reduce a PIL image: small ones stay as they are, without loss."""
    width, height = image.size
    small = max(width, height) <= side
    if image.mode.startswith(('I', 'F')):  # 16 bits or more, which Pillow would cut off at 255
        image = import_extra('PIL.Image', 'formats').fromarray(_levels(np.asarray(image)))
    elif image.mode not in ('1', 'L', 'RGB', 'RGBA'):
        image = image.convert('RGBA' if image.has_transparency_data else 'RGB')
    image.thumbnail((side, side), reducing_gap=2.0)
    opaque = image.mode in ('L', 'RGB') and not small
    stream = io.BytesIO()
    image.save(stream, 'JPEG', quality=82) if opaque else image.save(stream, 'PNG', compress_level=1)
    return Picture('image/jpeg' if opaque else 'image/png', stream.getvalue(), width, height)


def _video(data: bytes, side: int) -> Picture:
    av = import_extra('av', 'formats', 'videos need PyAV')
    # The format is given, as other formats of FFmpeg are lists of further files and URLs, which it would open.
    form = 'matroska' if media_type(data[:MAGIC], len(data)) == 'video/webm' else 'mp4'
    try:
        with av.open(io.BytesIO(data), format=form, options={'max_pixels': str(_PIXELS)}) as container:
            seconds = None if container.duration is None else container.duration / av.time_base
            stream = container.streams.video[0]
            stream.thread_count = 1  # each thread would hold frames of its own
            with _turn(stream.width, stream.height, _PIXELS):
                for frame in container.decode(stream):
                    note = '' if seconds is None else f'{seconds:.1f} s'
                    image = frame_converter()(frame).to_image()
                    return _fit(image, side)._replace(width=frame.width, height=frame.height, note=note)
    except (UnsupportedError, MemoryError):
        raise
    except Exception as error:  # FFmpeg raises it, or there is no video stream
        raise DecodeError(f'{len(data)} bytes are not a video that PyAV supports: {error!r:.200}') from error
    raise DecodeError(f'{len(data)} bytes are a video without frames')


class Plane(NamedTuple):
    """A plane of an array: its last two axes, at a position of the others; of colours, also their channels."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of the array
    rows: int
    columns: int
    channels: int  # of an image, otherwise 1
    planes: int  # their number
    start: int  # its first byte in the record
    stop: int


def plane_of(head: bytes, size: int, number: int) -> Plane:
    """Return a plane of an encoded array, by its first bytes and its size; a number past the last plane is the last."""
    dtype, shape, start = array_head(head, size)
    channels = shape[-1] if dtype == np.uint8 and len(shape) >= 3 and shape[-1] in (3, 4) else 1
    sides = shape[:-1] if channels > 1 else shape
    rows, columns = [1, 1, *sides][-2:] if len(sides) < 2 else sides[-2:]
    planes = math.prod(sides[:-2])
    step = rows * columns * channels * dtype.itemsize
    first = start + min(number, max(planes - 1, 0)) * step
    return Plane(dtype, shape, rows, columns, channels, planes, first, first + step if planes else first)


def show_plane(plane: Plane, data: bytes, side: int) -> tuple[Picture | None, dict[str, Any]]:
    """Return a picture of a plane, if it has numbers, and facts: its least, greatest and mean number, and all."""
    shape = [plane.rows, plane.columns] + ([plane.channels] if plane.channels > 1 else [])
    facts: dict[str, Any] = {
        'dtype': str(plane.dtype), 'shape': plane.shape, 'rows': plane.rows, 'columns': plane.columns,
        'planes': plane.planes,
    }  # fmt: skip
    values = array_of(dtype_text(plane.dtype), shape if plane.planes else [0, 0], data)
    if values.dtype.kind not in 'biufc':
        facts['numbers'] = [str(item) for item in values.ravel()[:_NUMBERS].tolist()]
        return None, facts
    if values.size and values.size <= _NUMBERS and plane.channels == 1:
        facts['numbers'] = [_exact(item) for item in values.ravel()]
    if values.size:
        facts.update(_statistics(values))
    return (_array(values, side) if values.size else None), facts


def _exact(item: Any) -> str:
    return f'{item:.7g}' if isinstance(item, np.floating) else str(item.item())


def _statistics(values: NDArray[Any]) -> dict[str, Any]:
    numbers = np.abs(values) if values.dtype.kind == 'c' else values
    finite = numbers[np.isfinite(numbers)] if numbers.dtype.kind == 'f' else numbers
    out: dict[str, Any] = {'strange': int(values.size - finite.size)}
    if finite.size:
        out.update(least=_exact(finite.min()), greatest=_exact(finite.max()), mean=f'{finite.mean(dtype=float):.5g}')
    return out


def _array(array: NDArray[Any], side: int) -> Picture:
    """Return an array as an image if it has one's shape, else its first plane as a heat map."""
    pil = import_extra('PIL.Image', 'formats', 'heat maps need Pillow')
    note = f'{array.dtype} {" x ".join(map(str, array.shape))}'
    if array.dtype.kind not in 'biufc' or not array.size:
        return Picture('', b'', 0, 0, note)
    colours = array.dtype == np.uint8 and array.ndim >= 3 and array.shape[-1] in (3, 4)
    kept = 3 if colours else 2
    plane = array.reshape(-1, *array.shape[-kept:])[0] if array.ndim > kept else np.atleast_2d(array)
    height, width = plane.shape[:2]
    step = max(1, -(-max(height, width) // (2 * side)))
    plane = plane[::step, ::step]
    if colours:
        return _fit(pil.fromarray(np.ascontiguousarray(plane)), side)._replace(width=width, height=height, note=note)
    image = pil.fromarray(_levels(np.ascontiguousarray(plane)))
    palette = np.array(_COLOURS, float)
    at = np.linspace(0, len(palette) - 1, 255)
    table = np.stack([np.interp(at, np.arange(len(palette)), channel) for channel in palette.T], axis=1)
    image.putpalette([*table.round().astype(int).ravel().tolist(), 128, 128, 128])
    stream = io.BytesIO()
    image.save(stream, 'PNG', compress_level=1)
    return Picture('image/png', stream.getvalue(), width, height, note)


def _levels(plane: NDArray[Any]) -> NDArray[np.uint8]:
    """Return numbers as levels from 0 to 254 of their range; 255 for those that are not finite."""
    numbers = (np.abs(plane) if plane.dtype.kind == 'c' else plane).astype(np.float64)
    finite = np.isfinite(numbers)
    if not finite.any():
        return np.full(plane.shape, 255, np.uint8)
    least, greatest = numbers[finite].min(), numbers[finite].max()
    # The range is computed of halves, as that of two finite doubles may not be finite.
    span = greatest / 2 - least / 2
    scaled = (numbers / 2 - least / 2) / span if span else np.full(plane.shape, 0.5)
    return np.where(finite, np.nan_to_num(scaled) * 254, 255).round().astype(np.uint8)
