"""Codecs of videos, by PyAV, which is imported on first use."""

import functools
import io
import numbers
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular._support.lazy import import_extra
from granular.errors import DecodeError, EncodeError
from granular.formats.base import Buffer, Codec, as_array, checked_file

_MATROSKA: Final = b'\x1aE\xdf\xa3'
# Brands of images and sound in the same container: HEIC, AVIF, M4A.
_NO_VIDEOS: Final = (b'heic', b'heix', b'hevc', b'heim', b'heis', b'mif1', b'msf1', b'avif', b'avis', b'M4A ', b'M4B ')
_SEGMENT: Final = b'\x18S\x80g'
MAX_VIDEO: Final = 4 << 30


def video_type(data: Buffer) -> str:
    """Return the type of a video file, ``'mp4'`` or ``'webm'``, by its first bytes; empty if it is neither."""
    head = bytes(data[:12])
    if head[:4] == _MATROSKA:
        return 'webm'
    return 'mp4' if head[4:8] == b'ftyp' and head[8:12] not in _NO_VIDEOS else ''


def encode_video(value: Any, fps: int = 20, format: str = 'mp4', codec: str = 'h264') -> bytes:
    """Encode a video by PyAV, in yuv420p: lossy, and of even width and height; or keep a video file as it is.

    Args:
      value: uint8 of shape (frames, height, width, 3), or the bytes of a video file, which are checked by their first
        bytes: MP4 for mp4, WebM or Matroska for webm.
      fps: frames per second.
      format: the container, ``'mp4'`` or ``'webm'``.
      codec: ``'h264'``, ``'vp9'``, or another codec that PyAV can write into the container.

    Raises:
      EncodeError: for any other shape, dtype or file.
    """
    for name, given in (('format', format), ('codec', codec)):
        if not isinstance(given, str):
            raise EncodeError(f'{name}: expected a name, got {given!r:.100}')
    if isinstance(value, bytes | bytearray | memoryview):
        return checked_file(value, format, 'video', video_type(value) == format)
    if not isinstance(fps, numbers.Rational) or fps <= 0:
        raise EncodeError(f'{format}: expected fps as an integer or a fraction > 0, got {fps!r:.100}')
    av = pyav()
    array = as_array(value)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3 or 0 in array.shape:
        raise EncodeError(
            f'expected a video of uint8 of shape (frames, height, width, 3), got {array.dtype} of shape {array.shape}'
        )
    frames, height, width = array.shape[:3]
    if height % 2 or width % 2:
        raise EncodeError(f'a video of {height} by {width} pixels: yuv420p needs both even; pad or crop it by one')
    stream = io.BytesIO()
    try:
        with av.open(stream, mode='w', format=format) as container:
            output = container.add_stream(codec, rate=fps)
            if output.type != 'video':
                raise ValueError(f'{codec} is no codec of videos')
            output.width = width
            output.height = height
            output.pix_fmt = 'yuv420p'
            for i in range(frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(array[i]), format='rgb24')
                frame.pts = i
                container.mux(output.encode(frame))
            container.mux(output.encode(None))
    except (av.FFmpegError, ValueError, OverflowError) as error:
        raise EncodeError(f'a video of shape {array.shape} as {format} with {codec} at {fps} fps: {error}') from error
    return stream.getvalue()


def decode_video(buffer: Buffer, max_bytes: int = MAX_VIDEO) -> NDArray[np.uint8]:
    """Decode a video, in MP4 or WebM, as uint8 of shape (frames, height, width, 3).

    Args:
      buffer: the file.
      max_bytes: maximum bytes of all frames, so that a small file cannot fill the memory.

    Raises:
      DecodeError: if it is not such a file, is damaged or truncated, or its frames have more bytes.
    """
    av = pyav()
    to_rgb = frame_converter()
    frames: list[Any] = []
    size = 0
    # The format is given, as other formats of FFmpeg are lists of further files and URLs, which it would open.
    container_format = 'matroska' if buffer[:4] == _MATROSKA else 'mp4'
    try:
        check_complete(buffer)
        options = {'max_pixels': str(max_bytes // 3)}
        with av.open(io.BytesIO(buffer), format=container_format, options=options) as container:
            for frame in container.decode(video=0):
                size += frame.width * frame.height * 3
                if size > max_bytes:
                    raise DecodeError(
                        f'expected at most {max_bytes} bytes, got a video of more than {len(frames)} frames of '
                        f'{frame.height} by {frame.width} pixels'
                    )
                frames.append(to_rgb(frame).to_ndarray())
            return np.stack(frames)
    except Exception as error:  # FFmpeg's, or for lack of a video stream
        # The size is checked, as that of audio.
        short = isinstance(error, MemoryError) and not isinstance(error, av.FFmpegError)
        if short or isinstance(error, DecodeError):
            raise
        raise DecodeError(f'{len(buffer)} bytes are not a video that PyAV supports: {error!r:.200}') from error


def check_complete(data: Buffer) -> None:
    """Raise ``DecodeError`` for a truncated file, which FFmpeg reads as far as it goes."""
    length = (_length_of_webm if data[:4] == _MATROSKA else _length_of_mp4)(data)
    if length > len(data):
        raise DecodeError(f'expected a video of {length} bytes, got {len(data)}: the file is truncated')


# These return the position at which the frames end.


def _length_of_mp4(data: Buffer) -> int:
    at = end = 0
    while at + 16 <= len(data):
        size = int.from_bytes(data[at : at + 4])
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16])
        if data[at + 4 : at + 8] == b'mdat':
            end = at + size
        if size < 8:  # 0: up to the end of the file
            break
        at += size
    return end


def _length_of_webm(data: Buffer) -> int:
    size, at = _vint(data, len(_MATROSKA))
    at += size
    size, start = _vint(data, at + len(_SEGMENT))
    return start + size if data[at : at + len(_SEGMENT)] == _SEGMENT else 0


def _vint(data: Buffer, at: int) -> tuple[int, int]:
    """Return the size of an EBML element, 0 if it is unknown, and the position behind it."""
    width = 9 - data[at].bit_length()
    most = (1 << 7 * width) - 1
    size = int.from_bytes(data[at : at + width]) & most
    return size % most, at + width


def frame_converter(form: str = 'rgb24') -> Callable[[Any], Any]:
    """Return a function that converts frames of one video to a format of FFmpeg, on the calling thread.

    From version 19 on, PyAV keeps the converter of ``frame.to_ndarray(format=...)`` and ``frame.to_image()`` for each
    thread, and converters have threads: a child that is forked by another thread hangs as it tries to join these.
    """
    reformatter = import_extra('av.video.reformatter', 'formats', 'videos need PyAV').VideoReformatter()
    # Videos are decoded by many threads already. Before version 17, converters have no threads.
    threads = {'threads': 1} if int(pyav().__version__.partition('.')[0]) >= 17 else {}
    return functools.partial(reformatter.reformat, format=form, **threads)


def pyav() -> Any:
    return import_extra('av', 'formats', 'videos need PyAV')


CODECS: Final = {
    'mp4': Codec(functools.partial(encode_video, format='mp4', codec='h264'), decode_video, 'video'),
    'webm': Codec(functools.partial(encode_video, format='webm', codec='vp9'), decode_video, 'video'),
}
