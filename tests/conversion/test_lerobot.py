"""Conversion of datasets of LeRobot: each episode has the frames and values that the source reads."""

import fractions
import io
import json

import av
import numpy as np
import pytest

import granular
from granular import Windows
from granular.errors import DatapointError, SpecError, UnsupportedError
from granular.formats import decode_image, decode_video, frame_times
from tests.datasources.test_lerobot import FEATURES, LEFT, STATE, STEPS, WRIST, episodes, write_v2, write_v3
from tests.datasources.test_video_windows import FPS, video


def joined(records):
    """Return a file with the frames of several, as they are stored, as LeRobot joins the videos of episodes."""
    out, start = io.BytesIO(), 0
    with av.open(out, 'w', format='mp4') as file:
        stream = None
        for record in records:
            with av.open(io.BytesIO(record)) as source:
                stream = stream or file.add_stream_from_template(source.streams.video[0], opaque=True)
                unit = source.streams.video[0].time_base
                for packet in source.demux(video=0):
                    if packet.size:
                        packet.stream = stream
                        packet.pts, packet.dts = packet.pts + start, packet.dts + start
                        file.mux(packet)
                start += round(len(frame_times(record)) / FPS / unit)
    return out.getvalue()


def write_joined(folder, codec='h264'):
    """Write a dataset of version 3, of which the first two episodes share a video; return the videos of each."""
    write_v3(folder)
    records = [video(steps, codec, seed=steps) for steps in STEPS]
    for name, content in (('000', joined(records[:2])), ('001', records[2])):
        (folder / f'videos/{LEFT}/chunk-000/file-{name}.mp4').write_bytes(content)
    return [decode_video(record) for record in records]


@pytest.mark.parametrize('write', [write_v2, write_joined], ids=['v2', 'v3'])
def test_a_dataset_has_the_episodes_of_its_source(tmp_path, write):
    frames = write(tmp_path / 'robots')
    done = granular.convert(tmp_path / 'robots', tmp_path / 'ds', shardlen=2)
    assert (done.format, done.datapoints, done.shards) == ('lerobot', 3, 2)
    assert done.spec == {
        'grid': 'array', LEFT: 'mp4', WRIST: 'png[]', STATE: 'array', 'reward': 'array', 'task': 'utf8[]',
        'task_index': 'array',
    }  # fmt: skip
    with granular.open(tmp_path / 'robots') as source, granular.open(tmp_path / 'ds') as reader:
        for i, (datapoint, expected) in enumerate(zip(reader, source, strict=True)):
            assert datapoint.keys() == expected.keys() == {*FEATURES, 'task'}
            assert (datapoint[LEFT] == frames[i]).all()
            for key in (STATE, 'grid', 'reward', 'task_index'):
                assert datapoint[key].dtype == expected[key].dtype
                assert (datapoint[key] == expected[key]).all()
            assert (np.stack(datapoint[WRIST]) == episodes()[i][WRIST]).all()
            assert datapoint['task'] == expected['task']
        offsets = {STATE: [-0.1, 0.0], LEFT: [-0.3, 0.0, 0.1], WRIST: [0], 'task': [0], 'grid': 2}
        for one, other in zip(*(Windows(own, offsets, fps=FPS) for own in (reader, source)), strict=True):
            assert one.keys() == other.keys()
            assert all(np.array_equal(np.array(one[key]), np.array(other[key])) for key in one)


@pytest.mark.parametrize('codec', ['h264', 'hevc', 'libsvtav1', 'mpeg4'])
def test_frames_are_those_of_the_shared_file(tmp_path, codec):
    """They are cut out as they are stored: the bytes of each frame are in the file of LeRobot."""
    frames = write_joined(tmp_path / 'robots', codec)
    shared = (tmp_path / f'robots/videos/{LEFT}/chunk-000/file-000.mp4').read_bytes()
    granular.convert(tmp_path / 'robots', tmp_path / 'ds')
    with granular.open(tmp_path / 'ds', None) as reader:
        records = [reader[i, (LEFT,)][LEFT] for i in range(3)]
    assert records[2] == (tmp_path / f'robots/videos/{LEFT}/chunk-000/file-001.mp4').read_bytes()
    for record, expected in zip(records, frames, strict=True):
        assert (decode_video(record) == expected).all()
        assert np.allclose(frame_times(record), np.arange(len(expected)) / FPS)
    for record in records[:2]:
        with av.open(io.BytesIO(record)) as file:
            packets = [bytes(packet) for packet in file.demux(video=0) if packet.size]
            assert file.streams.video[0].duration * file.streams.video[0].time_base == fractions.Fraction(
                len(packets), FPS
            )
        assert all(packet in shared for packet in packets)


def test_a_resumed_conversion_is_the_same_and_another_source_is_refused(bucket, tmp_path):
    write_joined(tmp_path / 'robots')
    for file in filter(lambda path: path.is_file(), (tmp_path / 'robots').rglob('*')):
        (bucket / str(file.relative_to(tmp_path))).write_bytes(file.read_bytes())
    with granular.open(bucket / 'robots') as source:
        granular.convert(source, bucket / 'ds', shardlen=1)
    with granular.open(bucket / 'ds') as reader:
        before = [granular.formats.encode_tree(list(row.values())) for row in reader]
    (bucket / 'ds/000000/spec.json').unlink()
    done = granular.convert(bucket / 'robots', bucket / 'ds', shardlen=1)
    assert done.found == 2
    with granular.open(bucket / 'ds') as reader:
        assert [granular.formats.encode_tree(list(row.values())) for row in reader] == before
    (bucket / 'robots/meta/info.json').write_text(json.dumps({}))
    with pytest.raises(granular.errors.CorruptDatasetError):
        granular.convert(bucket / 'robots', bucket / 'ds', shardlen=1)


def test_what_cannot_be_cut_is_refused(tmp_path):
    write_v3(tmp_path / 'odd')
    times = [0, 50, *range(100, 3200, 100)]  # the second episode begins with its 14th frame, and each 12th one is a key
    (tmp_path / f'odd/videos/{LEFT}/chunk-000/file-000.mp4').write_bytes(video(33, times=times))
    with pytest.raises(UnsupportedError, match=r"odd: episode \d, key '.*left': its frames are not cut .*file-000"):
        granular.convert(tmp_path / 'odd', tmp_path / 'target')
    with granular.open(tmp_path / 'odd') as source:
        granular.convert(granular.MapDataset.source(source), tmp_path / 'decoded')
        with granular.open(tmp_path / 'decoded') as reader:
            assert (reader[1][LEFT] == source[1][LEFT]).all()
    write_v3(tmp_path / 'slow', fps=4)
    with pytest.raises(DatapointError, match=r'episode 1.*: no frame at .* seconds'):
        granular.convert(tmp_path / 'slow', tmp_path / 'target')


def test_the_columns_layout_has_lists(tmp_path):
    write_v2(tmp_path / 'robots')
    done = granular.convert(tmp_path / 'robots', tmp_path / 'ds', layout='columns', shardlen=None)
    assert (done.spec['task'], done.spec[WRIST]) == ('msgpack', 'msgpack')
    with granular.open(tmp_path / 'ds') as reader:
        assert reader[1]['task'] == ['task 1'] * 20
        assert (decode_image(reader[1][WRIST][3]) == episodes()[1][WRIST][3]).all()
    with pytest.raises(SpecError, match='does not support sequences'):
        granular.convert(tmp_path / 'robots', tmp_path / 'other', layout='columns', spec={'task': 'utf8[]'})
