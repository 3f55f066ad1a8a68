"""Images by Pillow and videos by PyAV, to bytes and back. Both are imported when they are first needed."""

import io
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular.errors import DecodeError, EncodeError, MissingExtraError

Buffer = bytes | bytearray | memoryview

# What a record of type jpg or png may hold. Pillow knows more, among them formats that run other programs.
_IMAGES: Final = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP')
_MATROSKA: Final = b'\x1aE\xdf\xa3'
_MAX_VIDEO: Final = 4 << 30


def image_type(data: Buffer) -> str:
    """The type that the bytes of an image file have, ``'jpg'`` or ``'png'``, by how they begin; empty if they are none.

    ``'png'`` is also that of WebP, GIF and BMP: it says how arrays are encoded, and all of them are read alike.
    """
    head = bytes(data[:14])
    if head.startswith(b'\xff\xd8\xff'):
        return 'jpg'
    if head.startswith((b'\x89PNG\r\n\x1a\n', b'GIF87a', b'GIF89a')) or (head[:4], head[8:12]) == (b'RIFF', b'WEBP'):
        return 'png'
    return 'png' if head.startswith(b'BM') and int.from_bytes(head[2:6], 'little') == len(data) else ''


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

    A palette comes back as its indices, and CMYK as four channels. The file is a JPEG, PNG, WebP, GIF or BMP of at most
    ``PIL.Image.MAX_IMAGE_PIXELS`` pixels (89 million, unless you change it; None for any number).
    """
    image_module = _pillow()
    try:
        with image_module.open(io.BytesIO(buffer), formats=_IMAGES) as image:
            most = image_module.MAX_IMAGE_PIXELS
            if most is not None and image.width * image.height > most:
                raise DecodeError(f'an image of {image.width} by {image.height} pixels: want at most {most}')
            image.load()
            return np.array(image)
    except DecodeError:
        raise
    except Exception as error:  # of whatever kind: its plugins raise what their parsers run into
        raise DecodeError(f'{len(buffer)} bytes are no image that Pillow decodes: {error!r:.200}') from error


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


def decode_video(buffer: Buffer, max_bytes: int = _MAX_VIDEO) -> NDArray[np.uint8]:
    """A video, in MP4 or WebM, as uint8 of shape (frames, height, width, 3).

    Args:
      buffer: the file.
      max_bytes: bytes that its frames may have, so that a small file cannot fill the memory.
    """
    av = _pyav()
    frames: list[Any] = []
    size = 0
    # Named, as other formats of FFmpeg are lists of further files and addresses, which it would open.
    container_format = 'matroska' if bytes(buffer[:4]) == _MATROSKA else 'mp4'
    try:
        with av.open(
            io.BytesIO(buffer), format=container_format, options={'max_pixels': str(max_bytes // 3)}
        ) as container:
            for frame in container.decode(video=0):
                size += frame.width * frame.height * 3
                if size > max_bytes:
                    raise DecodeError(
                        f'a video of more than {len(frames)} frames of {frame.height} by {frame.width} pixels: want at '
                        f'most {max_bytes} bytes'
                    )
                frames.append(frame.to_ndarray(format='rgb24'))
            return np.stack(frames)
    except DecodeError:
        raise
    except Exception as error:  # of whatever kind: FFmpeg's, or of a stream that is not there
        raise DecodeError(f'{len(buffer)} bytes are no video that PyAV decodes: {error!r:.200}') from error


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
