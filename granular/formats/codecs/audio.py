"""Codecs of audio, WAV and FLAC files, by PyAV, which is imported on first use."""

import functools
import io
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import check_integer
from granular._support.lazy import import_extra
from granular.errors import DecodeError, EncodeError
from granular.formats.base import Buffer, Codec, as_array, checked_file, outline_of

# FFmpeg's codec and sample format for each dtype.
_CODECS: Final = {
    'wav': {
        'uint8': ('pcm_u8', 'u8'), 'int16': ('pcm_s16le', 's16'), 'int32': ('pcm_s32le', 's32'),
        'float32': ('pcm_f32le', 'flt'), 'float64': ('pcm_f64le', 'dbl'),
    },
    'flac': {'int16': ('flac', 's16'), 'int32': ('flac', 's32')},
}  # fmt: skip
_CHANNELS: Final = {'wav': 1 << 10, 'flac': 8}
_MAX_WAV: Final = (1 << 32) - 1024  # its header has 32 bits for the size
_PCM: Final = (1, 3, 0xFFFE)  # codes of formats with equally many bytes for each sample
_MAX_AUDIO: Final = 4 << 30
_CHUNK: Final = 1 << 16  # samples per frame that is encoded


class Audio(NamedTuple):
    """Samples of one or more channels.

    ::

        audio = granular.formats.Audio(np.zeros((16000, 1), np.int16), rate=16000)  # a second of silence

    Attributes:
      samples: an array of shape (samples, channels).
      rate: samples per second.
    """

    samples: NDArray[Any]
    rate: int


def audio_type(data: Buffer) -> str:
    """Return the type of an audio file, ``'wav'`` or ``'flac'``, by its first bytes; empty if it is neither."""
    head = bytes(data[:12])
    if head[:4] in (b'RIFF', b'RF64') and head[8:] == b'WAVE':
        return 'wav'
    return 'flac' if head.startswith(b'fLaC') else ''


def encode_audio(value: Any, format: str = 'wav') -> bytes:
    """Encode audio without loss by PyAV, or keep an audio file as it is.

    Args:
      value: an ``Audio``, or a pair of samples and rate. The samples have shape (samples, channels), or (samples,) for
        one channel. Their dtype is uint8, int16, int32, float32 or float64 for wav; int16 or int32 for flac, which
        has 24 bits at most: the lowest 8 bits of int32 must be zero. Or the bytes of an audio file, which are checked
        by their first bytes: WAV for wav, FLAC for flac.
      format: ``'wav'`` or ``'flac'``.

    Raises:
      EncodeError: for any other shape, dtype or file, and for samples that the format would change.
    """
    if not isinstance(format, str) or format not in _CODECS:
        raise EncodeError(f'expected the format {" or ".join(_CODECS)}, got {format!r:.100}')
    if isinstance(value, bytes | bytearray | memoryview):
        return checked_file(value, format, format.upper(), audio_type(value) == format)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise EncodeError(
            f'{format}: expected a pair of samples and rate, or the bytes of a {format.upper()} file, got '
            f'{type(value).__name__}'
        )
    samples = as_array(value[0])
    samples = samples[:, None] if samples.ndim == 1 else samples
    dtypes = _CODECS[format]
    if samples.dtype.name not in dtypes or samples.ndim != 2 or 0 in samples.shape:
        raise EncodeError(
            f'{format}: expected samples of {" or ".join(dtypes)} of shape (samples, channels), got {samples.dtype} of '
            f'shape {np.shape(value[0])}'
        )
    if samples.shape[1] > _CHANNELS[format]:
        raise EncodeError(
            f'{format}: expected samples of shape (samples, channels) with at most {_CHANNELS[format]} channels, got '
            f'shape {samples.shape}: transpose those of shape (channels, samples)'
        )
    if format == 'wav' and samples.nbytes > _MAX_WAV:
        raise EncodeError(f'wav: expected at most {_MAX_WAV} bytes of samples, got {samples.nbytes}')
    if format == 'flac' and samples.dtype == np.int32 and (samples & 0xFF).any():
        raise EncodeError('flac: expected int32 samples of 24 bits, the lowest 8 of them zero, got more: use wav')
    try:
        rate = check_integer('rate', value[1], 1)
    except ValueError as error:
        raise EncodeError(f'{format}: {error}') from error
    return _encode(np.ascontiguousarray(samples, samples.dtype.newbyteorder('=')), rate, format)


def _encode(samples: NDArray[Any], rate: int, format: str) -> bytes:
    av = _pyav()
    codec, sample_format = _CODECS[format][samples.dtype.name]
    channels = samples.shape[1]
    layout = {1: 'mono', 2: 'stereo'}.get(channels, f'{channels} channels' if format == 'wav' else f'{channels}c')
    stream = io.BytesIO()
    try:
        # No name and version of the writer in the file, and no space for comments in its header.
        options = {'fflags': '+bitexact', 'metadata_header_padding': '0'}
        with av.open(stream, mode='w', format=format, options=options) as container:
            output = container.add_stream(codec, rate=rate)
            output.codec_context.format, output.codec_context.layout = sample_format, layout
            for start in range(0, len(samples), _CHUNK):
                chunk = samples[start : start + _CHUNK].reshape(1, -1)
                frame = av.AudioFrame.from_ndarray(chunk, format=sample_format, layout=layout)
                frame.sample_rate, frame.pts = rate, start
                container.mux(output.encode(frame))
            container.mux(output.encode(None))
    except (av.FFmpegError, ValueError, OverflowError) as error:
        raise EncodeError(
            f'{format}: samples of {samples.dtype} of shape {samples.shape} at a rate of {rate}: {error}'
        ) from error
    return stream.getvalue()


def decode_audio(buffer: Buffer, max_bytes: int = _MAX_AUDIO) -> Audio:
    """Decode a WAV or FLAC file.

    Returns:
      The samples, a new array of shape (samples, channels), and their rate. The dtype is that of the file: uint8,
      int16, int32, float32 or float64. Files of 24 bits give int32, with the lowest 8 bits zero.

    Args:
      buffer: the file.
      max_bytes: maximum bytes of all samples, so that a small file cannot fill the memory. Decoding takes twice the
        bytes of the samples.

    Raises:
      DecodeError: if it is not such a file, is damaged or truncated, has no samples, or more bytes of them.
    """
    av = _pyav()
    container_format = audio_type(buffer)
    if not container_format:
        raise DecodeError(f'expected a WAV or FLAC file, got {outline_of(buffer)}')
    if container_format == 'wav':
        _check_length(buffer)
    chunks: list[NDArray[Any]] = []
    count = 0
    try:
        # The format is given, as other formats of FFmpeg are lists of further files and URLs, which it would open.
        with av.open(io.BytesIO(buffer), format=container_format) as container:
            source = container.streams.audio[0]
            source.codec_context.options = {'err_detect': 'crccheck+explode'}
            rate, channels = source.rate, source.codec_context.layout.nb_channels
            for frame in container.decode(source):
                array = frame.to_ndarray()
                chunk = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
                if chunks and (frame.sample_rate, chunk.shape[1], chunk.dtype) != (rate, channels, chunks[0].dtype):
                    raise DecodeError(f'the rate, channels or dtype change at sample {count}')
                count += len(chunk)
                if count * channels * chunk.itemsize > max_bytes:
                    raise DecodeError(f'expected at most {max_bytes} bytes, got audio of more than {count} samples')
                chunks.append(chunk)
            # The header of a FLAC file has the number of samples, or 0 if the file was written into a pipe.
            expected = (container_format == 'flac' and source.duration) or count
        if not count or count != expected:
            raise DecodeError(f'expected {expected or "1 or more"} samples, got {count}: the file is damaged')
        return Audio(np.concatenate(chunks), rate)
    except Exception as error:  # FFmpeg's, or for lack of an audio stream
        # The size is checked: memory is short, unless FFmpeg says so, to which no block may have 2 GiB.
        short = isinstance(error, MemoryError) and not isinstance(error, av.FFmpegError)
        if short or isinstance(error, DecodeError):
            raise
        raise DecodeError(f'{len(buffer)} bytes are not audio that PyAV supports: {error!r:.200}') from error


def audio_length(buffer: Buffer) -> int:
    """Return the number of samples of a WAV or FLAC file, by its header; it is decoded if that does not tell.

    Raises:
      DecodeError: if it is not such a file, or is truncated.
    """
    if audio_type(buffer) == 'flac':
        found = int.from_bytes(buffer[18:26], 'big') & ((1 << 36) - 1)
    else:
        _check_length(buffer)
        found = _wav_length(buffer)
    return found or len(decode_audio(buffer).samples)


def _wav_length(buffer: Buffer) -> int:
    """Return the number of samples that the chunks of a WAV file tell; 0 if they do not."""
    position, width = 12, 0
    while position + 8 <= len(buffer):
        size = int.from_bytes(buffer[position + 4 : position + 8], 'little')
        if buffer[position : position + 4] == b'fmt ' and int.from_bytes(buffer[position + 8 :][:2], 'little') in _PCM:
            width = int.from_bytes(buffer[position + 20 :][:2], 'little')
        if buffer[position : position + 4] == b'data':
            return size // width if width and size != 0xFFFFFFFF else 0
        position += 8 + size + size % 2
    return 0


def _check_length(buffer: Buffer) -> None:
    """Reject a WAV file that ends before its samples do, which FFmpeg reads as far as they go."""
    position = 12
    while position + 8 <= len(buffer):
        size = int.from_bytes(buffer[position + 4 : position + 8], 'little')
        if buffer[position : position + 4] == b'data':
            # 0 and the largest number stand for an unknown length: of a file written into a pipe, or of 4 GiB or more.
            if size != 0xFFFFFFFF and (missing := position + 8 + size - len(buffer)) > 0:
                raise DecodeError(f'expected {size} bytes of samples, got {size - missing}: the file is truncated')
            return
        position += 8 + size + size % 2


def _pyav() -> Any:
    return import_extra('av', 'formats', 'audio needs PyAV')


CODECS: Final = {
    kind: Codec(functools.partial(encode_audio, format=kind), decode_audio, 'audio') for kind in ('wav', 'flac')
}
