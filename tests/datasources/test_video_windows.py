"""Frames of videos in windows: those of PyAV, of which only the parts of the file are read that have them."""

import fractions
import io
import struct

import av
import numpy as np
import pytest
from PIL import Image

import granular
from granular import Windows
from granular.errors import CorruptRecordError, DatapointError, DecodeError
from granular.formats import decode_frames, decode_image, decode_video, frame_times

FPS = 10
UNIT = fractions.Fraction(1, 1000)


def pixels(frames, seed=0, size=(64, 96)):
    noise = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    return np.stack([np.roll(noise, 3 * i, axis=1) for i in range(frames)])


def video(frames, codec='h264', format='mp4', seed=0, times=None, muxing=None, size=(64, 96)):
    """Return a file, whose frames are shown at some milliseconds, with a key at every 12th."""
    file = io.BytesIO()
    with av.open(file, 'w', format=format, options=muxing or {}) as container:
        stream = container.add_stream(codec, rate=FPS, options={'g': '12', 'svtav1-params': 'keyint=12'})
        stream.height, stream.width = size
        stream.pix_fmt, stream.codec_context.time_base = 'yuv420p', UNIT
        for i, image in enumerate(pixels(frames, seed, size)):
            frame = av.VideoFrame.from_ndarray(image, format='rgb24')
            frame.pts, frame.time_base = 100 * i if times is None else times[i], UNIT
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def frames_of_pyav(record):
    """Return the times and pixels of all frames."""
    with av.open(io.BytesIO(record)) as container:
        frames = [(frame.time, frame.to_ndarray(format='rgb24')) for frame in container.decode(video=0)]
    return np.array([time for time, _ in frames]), np.stack([image for _, image in frames])


@pytest.mark.parametrize(
    ('codec', 'format'), [('h264', 'mp4'), ('hevc', 'mp4'), ('libsvtav1', 'mp4'), ('mpeg4', 'mp4'), ('vp9', 'webm')]
)
def test_frames_are_those_of_pyav(codec, format):
    record = video(30, codec, format)
    times, expected = frames_of_pyav(record)
    assert frame_times(record).tolist() == times.tolist()
    assert (decode_video(record) == expected).all()
    for frames in ([29, 0, 0, 13, -2], range(5, 100, 7), slice(None, None, -9), []):
        chosen = range(*frames.indices(30)) if isinstance(frames, slice) else frames
        chosen = range(5, 30, 7) if isinstance(frames, range) else list(chosen)
        assert (decode_frames(record, frames) == expected[chosen]).all()


def write(path, records, **options):
    with granular.DatasetWriter(path, {'camera': 'mp4', 'state': 'array'}, **options) as writer:
        for record in records:
            writer.append({'camera': record, 'state': np.arange(len(frame_times(record)), dtype=np.int32)})


@pytest.mark.parametrize('codec', ['h264', 'libsvtav1', 'mpeg4'])
@pytest.mark.parametrize('options', [{}, {'verify': True}, {'fragments': True}], ids=str)
def test_windows_have_the_frames_of_their_steps(tmp_path, codec, options):
    muxing = {'movflags': 'frag_keyframe+empty_moov'} if 'fragments' in options else {}  # a table for each part
    options = {name: value for name, value in options.items() if name != 'fragments'}
    records = [video(frames, codec, seed=frames, muxing=muxing) for frames in (20, 1, 25)]
    write(tmp_path / 'ds', records)
    expected = [frames_of_pyav(record)[1] for record in records]
    with granular.open(tmp_path / 'ds', **options) as reader:
        for fps, offsets in ((None, [-3, 0, 1]), (FPS, [-0.3, 0.0, 0.1])):
            if fps is not None and muxing:
                continue  # its times do not begin at 0
            windows = Windows(reader, {'camera': offsets, 'state': 1}, fps=fps)
            order = np.random.default_rng(0).permutation(len(windows))
            for index, window in zip(order, windows.fetch(order), strict=True):
                episode = int(np.searchsorted([20, 21], index, side='right'))
                at = window['state'][0] + np.array([-3, 0, 1])
                last = len(expected[episode]) - 1
                assert (window['camera'] == expected[episode][at.clip(0, last)]).all()
                assert window['camera_is_pad'].tolist() == ((at < 0) | (at > last)).tolist()
        mask = {'camera': [5, 2], 'state': True}
        assert (reader[0, mask]['camera'] == expected[0][[5, 2]]).all()
        assert (reader.fetch([2], {'camera': range(1, 40, 8)})[0]['camera'] == expected[2][1::8]).all()


def test_frames_at_times_of_a_variable_rate(tmp_path):
    rng = np.random.default_rng(1)
    milliseconds = np.cumsum([0, *rng.integers(5, 400, 39)]).tolist()
    record = video(40, times=milliseconds)
    times, expected = frames_of_pyav(record)
    assert np.round(times * 1000).tolist() == milliseconds
    steps = int(times[-1] * 50)
    with granular.DatasetWriter(tmp_path / 'ds', {'camera': 'mp4', 'state': 'array'}) as writer:
        writer.append({'camera': record, 'state': np.arange(steps)})
    with granular.open(tmp_path / 'ds') as reader:
        windows = Windows(reader, {'camera': 1, 'state': 1}, 50, fps=50)
        for window in windows:
            shown = np.searchsorted(times, window['state'][0] / 50 + 0.001, side='right') - 1
            assert (window['camera'][0] == expected[shown]).all()
        with pytest.raises(DatapointError, match=rf"key 'camera': expected {steps} frames, .* got 40: pass fps="):
            Windows(reader, {'camera': 1, 'state': 1})[0]
        slow = Windows(reader, {'camera': 1, 'state': 1}, fps=10)
        with pytest.raises(
            DatapointError, match=r"key 'camera': no frame at .* seconds: the video has 40 frames from 0"
        ):
            slow[-1]


def test_only_the_bytes_of_the_frames_are_read(bucket):
    record = video(120, size=(480, 640))
    assert len(record) > 1 << 20
    write(bucket / 'ds', [record])
    calm = granular.Path(f'{bucket}/ds', config=granular.IOConfig(hedge=0), **bucket.store.options)
    expected = frames_of_pyav(record)[1]
    with granular.open(calm) as reader:
        windows = Windows(reader, {'camera': [0, 1], 'state': 1})
        windows[0]  # reads the table of the frames

        def cost(indices):
            before = granular.io_stats()
            for index, window in zip(indices, windows.fetch(indices), strict=True):
                assert (window['camera'][0] == expected[index]).all()
            after = granular.io_stats()
            return after['requests'] - before['requests'], after['bytes'] - before['bytes']

        requests, nbytes = cost([40])
        assert requests == 2
        assert nbytes < len(record) / 8
        assert cost([40, 41, 40, 43])[0] == 2


def test_damage_that_ffmpeg_conceals_is_found_by_checksums(tmp_path):
    record = video(30)
    write(tmp_path / 'ds', [record])
    file = tmp_path / 'ds' / 'camera.bag'
    data = bytearray(file.read_bytes())
    data[len(record) // 2 : len(record) // 2 + 20] = bytes(20)
    file.write_bytes(data)
    with granular.open(tmp_path / 'ds', verify=True) as reader:
        with pytest.raises(CorruptRecordError, match=r'camera.bag: record 0: expected checksum'):
            reader[0]
        with pytest.raises(CorruptRecordError, match=r'camera.bag: record 0: expected checksum'):
            Windows(reader, {'camera': 1, 'state': 1})[0]
    with granular.open(tmp_path / 'ds') as reader:
        assert reader[0]['camera'].shape == (30, 64, 96, 3)  # concealed


def test_damaged_tables_are_errors_that_name_the_datapoint(tmp_path):
    record = bytearray(video(30))
    at = record.index(b'stsz')
    record[at : at + 4] = b'xxxx'
    with granular.DatasetWriter(tmp_path / 'ds', {'camera': 'mp4', 'state': 'array'}) as writer:
        writer.append({'camera': bytes(record), 'state': np.arange(30)})
    with granular.open(tmp_path / 'ds') as reader:
        with pytest.raises(DecodeError, match=r"datapoint 0, key 'camera'"):
            Windows(reader, {'camera': 1, 'state': 1})[0]


def test_frames_of_a_phone_that_was_turned_are_as_stored():
    record = bytearray(video(3))
    expected = decode_video(bytes(record))
    matrix = record.index(b'tkhd') - 4 + 48
    record[matrix : matrix + 36] = struct.pack('>9i', 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    with av.open(io.BytesIO(record)) as container:
        assert abs(next(container.decode(video=0)).rotation) == 90
    assert (decode_video(bytes(record)) == expected).all()
    assert (decode_frames(bytes(record), [1]) == expected[1]).all()


def test_of_an_animated_picture_the_first_frame_is_read():
    images = [Image.fromarray(image) for image in pixels(3)]
    for kind in ('PNG', 'WEBP'):
        images[0].save(file := io.BytesIO(), kind, save_all=True, append_images=images[1:], lossless=True)
        assert (decode_image(file.getvalue()) == pixels(3)[0]).all()
