"""Frames of a video, found by their index or time, and decoded from the parts of the file that have them."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints, cut_to, indices_of
from granular.errors import DecodeError, OutOfRangeError, UnsupportedError
from granular.formats.base import Buffer
from granular.formats.codecs.videos import MAX_VIDEO, check_complete, frame_converter, pyav, video_type

T = TypeVar('T')
Part = tuple[int, bytes]
"""The position of bytes in a file, and the bytes."""

_EARLY: Final = 1e-3  # seconds that a time may precede its frame: WebM rounds times to milliseconds
_HIDDEN: Final = np.iinfo(np.int64).max  # the time of a packet that is not shown
_NO_TIME: Final = np.iinfo(np.int64).min
_IS_KEY: Final = 1  # flag of an index entry
_IN_PARTS: Final = ('h264', 'hevc', 'av1', 'vp9')  # codecs of which a key is all that later frames need
_HEAD: Final = 16  # bytes of the longest head of a box


class _Packets(NamedTuple):
    """The stored frames, in the order of decoding; times are in units of the stream."""

    shown: Ints
    decoded: Ints
    starts: Ints  # of their bytes in the file
    sizes: Ints
    are_keys: Ints  # 1 for those that need no other frame
    durations: Ints


class FrameTable:
    """The positions of the frames of a video in its file, and the times at which they are shown.

    Args:
      size: bytes of the file.
      parts: all of the file; or of an MP4 file all but the frames.

    Attributes:
      times: seconds at which the frames are shown, in order, float64 of shape ``(frames,)``.
      end: seconds at which the last frame ends.
      needs_all: True if the frames cannot be decoded from parts of the file, and not all of it was given.
      nbytes: about the memory that the table takes.
    """

    def __init__(self, size: int, parts: Sequence[Part]) -> None:
        self._size, self._parts = size, list(parts)
        is_whole = _known(parts, 0, size) is not None
        with _errors(size), self._stream() as (container, stream):
            packets = [packet for packet in container.demux(stream) if packet.size]
            # Without their bytes, frames are not recognised as keys by what they begin with.
            keys = {} if is_whole else {entry.pos: entry.flags & _IS_KEY for entry in stream.index_entries}
            rows = [
                (
                    _HIDDEN if packet.is_discard or packet.pts is None else packet.pts,
                    _NO_TIME if packet.dts is None else packet.dts,
                    packet.pos,
                    packet.size,
                    keys.get(packet.pos, packet.is_keyframe),
                    packet.duration or 0,
                )
                for packet in packets
            ]
            if not rows:
                raise DecodeError(f'{size} bytes are a video without frames')
            self._packets = _Packets(*np.array(rows, np.int64).T)
            self._data = [bytes(packet) for packet in packets] if is_whole else None
            self.needs_all: bool = not is_whole and stream.codec_context.codec.canonical_name not in _IN_PARTS
            self._unit = stream.time_base
            duration = packets[-1].duration or 0
            shown = self._packets.shown
            visible = np.flatnonzero(shown != _HIDDEN)
            self._order = visible[np.argsort(shown[visible], kind='stable')]  # the packet of each frame
            times = shown[self._order]
            self.times: NDArray[np.float64] = self._seconds(times)
            self.end: float = float(self._seconds(times[-1] + max(duration, *np.diff(times[-2:]), 0)))
            self.nbytes: int = sum(len(data) for _, data in parts) * (1 + is_whole) + 48 * len(rows)

    def _seconds(self, times: Any) -> Any:
        return times * self._unit.numerator / self._unit.denominator

    def __len__(self) -> int:
        return len(self._order)

    def frames_at(self, seconds: NDArray[np.float64]) -> Ints:
        """Return the frames that are shown at some times; raise ``OutOfRangeError`` for a time that has none.

        A time may precede its frame by a millisecond, as times in files are rounded.
        """
        frames = np.searchsorted(self.times, seconds + _EARLY, side='right') - 1
        outside = (frames < 0) | (seconds > self.end + _EARLY)
        if outside.any():
            raise OutOfRangeError(
                f'no frame at {seconds[np.argmax(outside)]:.6g} seconds: the video has {len(self)} frames from '
                f'{self.times[0]:.6g} to {self.end:.6g} seconds'
            )
        return frames

    def spans(self, frames: Ints) -> tuple[Ints, Ints]:
        """Return where the bytes begin and end of which frames are decoded; none if all of the file was given."""
        if self._data is not None:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        starts, sizes = self._packets.starts, self._packets.sizes
        runs = self._runs(frames)
        return (
            np.array([starts[first : last + 1].min() for first, last in runs], np.int64),
            np.array([(starts + sizes)[first : last + 1].max() for first, last in runs], np.int64),
        )

    def _runs(self, frames: Ints) -> list[tuple[int, int]]:
        """Return the first and last of the packets that are decoded for frames, which begin at a key."""
        shown, keys = self._packets.shown, np.flatnonzero(self._packets.are_keys)
        runs: dict[int, int] = {}
        for packet in self._order[frames].tolist():
            # Frames that are stored behind a key, and shown before it, need those before it.
            before = keys[: np.searchsorted(keys, packet, side='right')]
            before = before[shown[before] <= shown[packet]]
            first = int(before[-1]) if len(before) else 0
            runs[first] = max(packet, runs.get(first, 0))
        return sorted(runs.items())

    def decode(self, frames: Ints, spans: Sequence[bytes] = ()) -> NDArray[np.uint8]:
        """Return frames, in ascending order, as uint8 of shape (frames, height, width, 3).

        Args:
          frames: the frames, each once.
          spans: the bytes of ``spans(frames)``; none if all of the file was given.
        """
        with _errors(self._size), self._stream() as (container, stream):
            wanted = self._packets.shown[self._order[frames]]
            found: dict[int, NDArray[np.uint8]] = {}
            to_rgb, left = frame_converter(), set(wanted.tolist())
            in_parts = stream.codec_context.codec.canonical_name in _IN_PARTS
            for frame in self._decoded(stream, frames, spans) if in_parts else container.decode(stream):
                if frame.pts in left:
                    if len(frames) * frame.width * frame.height * 3 > MAX_VIDEO:
                        raise DecodeError(
                            f'expected at most {MAX_VIDEO} bytes, got {len(frames)} frames of {frame.height} by '
                            f'{frame.width} pixels'
                        )
                    found[frame.pts] = to_rgb(frame).to_ndarray()
                    left.discard(frame.pts)
                if not left:
                    break
            if left:
                index = int(frames[np.argmax(np.isin(wanted, list(left)))])
                raise DecodeError(f'frame {index} at {self.times[index]:.6g} seconds is damaged')
            return np.stack([found[time] for time in wanted.tolist()])

    def cut_span(self, first: int, last: int) -> tuple[int, int]:
        """Return where the bytes of consecutive frames begin and end in the file, as ``cut`` takes them.

        Raises:
          UnsupportedError: unless the first of them is a key, and is stored before the others, without others between.
        """
        starts, sizes = self._packets.starts, self._packets.sizes
        packets = self._order[first : last + 1]
        begin, end = int(packets[0]), int(packets.max()) + 1
        if packets.min() != begin or end - begin != len(packets) or not self._packets.are_keys[begin]:
            raise UnsupportedError(f'frames {first} to {last} of {len(self)} cannot be decoded without others')
        return int(starts[begin:end].min()), int((starts + sizes)[begin:end].max())

    def cut(self, first: int, last: int, start: float, span: bytes) -> bytes:
        """Return an MP4 file that has consecutive frames as they are stored, shown as from some seconds on.

        Args:
          first, last: the frames.
          start: seconds at which the file begins, at most those at which the first frame is shown.
          span: the bytes of ``cut_span(first, last)``.
        """
        packets, out = self._packets, io.BytesIO()
        begin, end = int(self._order[first]), int(self._order[first : last + 1].max())
        shift = min(round(start * self._unit.denominator / self._unit.numerator), int(packets.shown[begin]))
        muxing = {'fflags': '+bitexact'}  # without the version of FFmpeg
        with (
            _errors(self._size),
            self._stream() as (_, stream),
            pyav().open(out, 'w', format='mp4', options=muxing) as file,
        ):
            copied = file.add_stream_from_template(stream, opaque=True)  # which needs no encoder
            for i, packet in enumerate(self._read(begin, end, span), begin):
                packet.stream, packet.duration = copied, int(packets.durations[i])
                packet.is_keyframe = bool(packets.are_keys[i])
                packet.pts -= shift
                packet.dts = packet.pts if packet.dts is None else packet.dts - shift
                file.mux(packet)
        return out.getvalue()

    def _decoded(self, stream: Any, frames: Ints, spans: Sequence[bytes]) -> Iterator[Any]:
        """Yield frames, each after those that it needs."""
        for number, (first, last) in enumerate(self._runs(frames)):
            stream.codec_context.flush_buffers()
            for packet in [*self._read(first, last, spans[number] if spans else b''), None]:
                yield from stream.codec_context.decode(packet)

    def _read(self, first: int, last: int, span: bytes) -> Iterator[Any]:
        """Yield packets for the decoder."""
        av = pyav()
        shown, decoded, starts, sizes, *_ = self._packets
        origin = int(starts[first : last + 1].min())
        for i in range(first, last + 1):
            at = int(starts[i]) - origin
            packet = av.Packet(span[at : at + int(sizes[i])] if self._data is None else self._data[i])
            packet.time_base = self._unit
            packet.pts = None if shown[i] == _HIDDEN else int(shown[i])
            packet.dts = None if decoded[i] == _NO_TIME else int(decoded[i])
            yield packet

    @contextlib.contextmanager
    def _stream(self) -> Iterator[tuple[Any, Any]]:
        """Open the file, and its first stream of frames, which one thread decodes."""
        is_webm = any(video_type(data) == 'webm' for start, data in self._parts if not start)
        options = {'max_pixels': str(MAX_VIDEO // 3)}
        with pyav().open(
            _File(self._size, self._parts), format='matroska' if is_webm else 'mp4', options=options
        ) as file:
            stream = file.streams.video[0]
            stream.codec_context.thread_count = 1  # many videos are decoded at a time
            yield file, stream


class _File(io.RawIOBase):
    """A file of which some parts are known; all other bytes are zeros."""

    def __init__(self, size: int, parts: Sequence[Part]) -> None:
        self._size = size
        self._parts = parts
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        begin, end = self._at, self._size if size < 0 else min(self._at + size, self._size)
        self._at = max(begin, end)
        out = bytearray(max(0, end - begin))
        for start, data in self._parts:
            first, last = max(begin, start), min(end, start + len(data))
            if first < last:
                out[first - begin : last - begin] = memoryview(data)[first - start : last - start]
        return bytes(out)


@contextlib.contextmanager
def _errors(size: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # FFmpeg's, or for lack of a video stream
        short = isinstance(error, MemoryError) and not isinstance(error, pyav().FFmpegError)
        if short or isinstance(error, DecodeError):
            raise
        raise DecodeError(f'{size} bytes are not a video that PyAV supports: {error!r:.200}') from error


def missing_head(size: int, parts: Sequence[Part]) -> tuple[int, int] | None:
    """Return which bytes of a file are still to be read for the table of its frames.

    Args:
      size: bytes of the file.
      parts: what is known, at least the first bytes.

    Returns:
      Where the bytes begin and end; all of a file that has no table of its frames. None if none are missing.
    """
    if _known(parts, 0, size) is not None:
        return None
    if any(video_type(data) == 'webm' for start, data in parts if not start):
        return 0, size
    at = 0
    while at < size:
        head = _known(parts, at, min(at + _HEAD, size))
        if head is None:
            return at, min(at + _HEAD, size)
        length, kind = int.from_bytes(head[:4]), head[4:8]
        length = int.from_bytes(head[8:16]) if length == 1 else length or size - at
        if length < 8 or kind == b'moof':
            return 0, size
        end = min(at + length, size)
        if kind != b'mdat' and _known(parts, at, end) is None:
            return at, end
        at = end
    return None


def _known(parts: Sequence[Part], start: int, stop: int) -> bytes | None:
    """Return bytes of a file; None if no part has all of them."""
    for first, data in parts:
        if first <= start and stop <= first + len(data):
            return data[start - first : stop - first]
    return None


def frame_times(buffer: Buffer) -> NDArray[np.float64]:
    """Return the seconds at which the frames of a video are shown, without decoding them, float64 of shape (frames,).

    ::

        record = granular.formats.encode_video(np.zeros((3, 64, 64, 3), np.uint8), fps=10)
        granular.formats.frame_times(record)  # [0.0, 0.1, 0.2]

    Raises:
      DecodeError: if it is no MP4 or WebM file, or is truncated.
    """
    return _table_of(buffer).times


def decode_frames(buffer: Buffer, frames: Any) -> NDArray[np.uint8]:
    """Decode some frames of a video, as uint8 of shape (frames, height, width, 3), and those that they need.

    Args:
      buffer: an MP4 or WebM file.
      frames: indices of frames, in any order, negative from the end; or a range or slice, which ends with the video.

    Raises:
      DecodeError: if it is no such file, or a frame is damaged.
      OutOfRangeError: for a frame that the video does not have.
    """
    table = _table_of(buffer)
    chosen = indices_of(cut_to(frames, len(table)), len(table), 'frames')
    if not len(chosen):
        return table.decode(np.zeros(1, np.int64))[:0]
    once, again = np.unique(chosen, return_inverse=True)
    decoded: NDArray[np.uint8] = table.decode(once)[again]
    return decoded


def _table_of(buffer: Buffer) -> FrameTable:
    data = bytes(buffer)
    with _errors(len(data)):
        check_complete(data)
    return FrameTable(len(data), [(0, data)])
