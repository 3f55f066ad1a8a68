"""Datasets of LeRobot, written here as its versions 2.1 and 3.0 write them."""

import json
import pathlib
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import granular
from granular import Windows
from granular.errors import CorruptDatasetError, DatapointError, NotFoundError, UnknownKeyError, UnsupportedError
from granular.formats import decode_video, encode_image
from tests.datasources.test_video_windows import FPS, video

STEPS = (12, 20, 7)
STATE, LEFT, WRIST = 'observation.state', 'observation.images.left', 'observation.images.wrist'
FEATURES = {
    STATE: {'dtype': 'float32', 'shape': [7]},
    'grid': {'dtype': 'float32', 'shape': [2, 3]},
    'reward': {'dtype': 'float32', 'shape': [1]},
    LEFT: {'dtype': 'video', 'shape': [64, 96, 3]},
    WRIST: {'dtype': 'image', 'shape': [8, 9, 3]},
    'task_index': {'dtype': 'int64', 'shape': [1]},
}


def episodes():
    rng = np.random.default_rng(0)
    return [
        {
            STATE: rng.normal(size=(steps, 7)).astype(np.float32),
            'grid': rng.normal(size=(steps, 2, 3)).astype(np.float32),
            'reward': np.arange(steps, dtype=np.float32),
            WRIST: list(rng.integers(0, 255, (steps, 8, 9, 3), dtype=np.uint8)),
            'task_index': np.full(steps, number % 2),
        }
        for number, steps in enumerate(STEPS)
    ]


def rows_of(some):
    columns = {key: [] for key in some[0]}
    for episode in some:
        for key, values in episode.items():
            images = (
                [{'bytes': encode_image(image, format='png'), 'path': ''} for image in values] if key == WRIST else None
            )
            columns[key] += images or np.asarray(values).tolist()
    kinds = {STATE: pa.list_(pa.float32(), 7), 'grid': pa.list_(pa.list_(pa.float32())), 'reward': pa.float32()}
    return pa.table({key: pa.array(values, kinds.get(key)) for key, values in columns.items()})


def put(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_text(content)


def lines(rows):
    return ''.join(json.dumps(row) + '\n' for row in rows)


def write_v2(folder, **info):
    info = {
        'codebase_version': 'v2.1', 'fps': FPS, 'features': FEATURES, 'chunks_size': 2,
        'data_path': 'data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet',
        'video_path': 'videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4', **info,
    }  # fmt: skip
    records = [video(steps, seed=steps) for steps in STEPS]
    files = {
        'meta/info.json': json.dumps(info),
        'meta/episodes.jsonl': lines({'episode_index': i, 'length': steps} for i, steps in enumerate(STEPS)),
        'meta/tasks.jsonl': lines({'task_index': i, 'task': f'task {i}'} for i in range(2)),
    }
    for i, episode in enumerate(episodes()):
        files[f'data/chunk-{i // 2:03d}/episode_{i:06d}.parquet'] = rows_of([episode])
        files[f'videos/chunk-{i // 2:03d}/{LEFT}/episode_{i:06d}.mp4'] = records[i]
    put(folder, files)
    return [decode_video(record) for record in records]


def write_v3(folder, **info):
    info = {
        'codebase_version': 'v3.0', 'fps': FPS, 'features': FEATURES,
        'data_path': 'data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet',
        'video_path': 'videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4', **info,
    }  # fmt: skip
    records = [video(32, seed=0), video(7, seed=1)]  # the first two episodes share a file
    starts = np.cumsum((0, *STEPS))
    zero = [0, 0, 0]
    own = {
        'episode_index': [0, 1, 2], 'length': STEPS, 'dataset_from_index': starts[:-1], 'data/chunk_index': zero,
        'data/file_index': [0, 1, 1], f'videos/{LEFT}/chunk_index': zero, f'videos/{LEFT}/file_index': [0, 0, 1],
        f'videos/{LEFT}/from_timestamp': [0.0, 12 / FPS, 0.0], 'tasks': [['task 0'], ['task 1'], ['task 0']],
    }  # fmt: skip
    put(
        folder,
        {
            'meta/info.json': json.dumps(info),
            'meta/episodes/chunk-000/file-000.parquet': pa.table(own),
            'meta/tasks.parquet': pa.table({'task_index': [0, 1], '__index_level_0__': ['task 0', 'task 1']}),
            'data/chunk-000/file-000.parquet': rows_of(episodes()[:1]),
            'data/chunk-000/file-001.parquet': rows_of(episodes()[1:]),
            f'videos/{LEFT}/chunk-000/file-000.mp4': records[0],
            f'videos/{LEFT}/chunk-000/file-001.mp4': records[1],
        },
    )
    first, last = map(decode_video, records)
    return [first[:12], first[12:], last]


@pytest.mark.parametrize('write', [write_v2, write_v3])
def test_windows_over_episodes(tmp_path, write):
    frames = write(tmp_path / 'robots')
    with granular.open(tmp_path / 'robots') as source:
        assert isinstance(source, granular.LeRobotDataSource)
        assert (len(source), source.fps) == (3, FPS)
        assert source.fields == (*FEATURES, 'task')
        assert source.sizes(LEFT).tolist() == list(STEPS)
        offsets = {STATE: [-0.1, 0.0], 'grid': 2, 'reward': 1, LEFT: [-0.3, 0.0, 0.1], WRIST: [0], 'task': [0]}
        windows = pickle.loads(pickle.dumps(Windows(source, offsets, fps=source.fps)))
        assert len(windows) == sum(STEPS)
        order = np.random.default_rng(0).permutation(len(windows))
        for index, window in zip(order, windows.fetch(order), strict=True):
            number = int(np.searchsorted(np.cumsum(STEPS), index, side='right'))
            step = int(index) - sum(STEPS[:number])
            episode, last = episodes()[number], STEPS[number] - 1
            at = np.array([step - 3, step, step + 1]).clip(0, last)
            assert (window[LEFT] == frames[number][at]).all()
            assert window[f'{LEFT}_is_pad'].tolist() == [step < 3, False, step == last]
            assert (window[STATE] == episode[STATE][[max(0, step - 1), step]]).all()
            assert (window['grid'] == episode['grid'][[step, min(step + 1, last)]]).all()
            assert (window[WRIST][0] == episode[WRIST][step]).all()
            assert (window['reward'].tolist(), window['task']) == ([step], [f'task {number % 2}'])


@pytest.mark.parametrize('write', [write_v2, write_v3])
def test_episodes(tmp_path, write):
    frames = write(tmp_path / 'robots')
    with granular.LeRobotDataSource(tmp_path / 'robots') as source:
        episode = source[1]
        assert episode.keys() == {*FEATURES, 'task'}
        assert (episode[LEFT] == frames[1]).all()
        assert (episode['grid'] == episodes()[1]['grid']).all()
        assert episode['task'] == ['task 1'] * 20
        assert [part['reward'].tolist() for part in source.fetch([2, 0, 2], ('reward',))] == [
            list(range(7)), list(range(12)), list(range(7)),
        ]  # fmt: skip
        assert list(source[0:2, ('task',)]) == ['task']
        with pytest.raises(UnknownKeyError, match=r"unknown fields \['state'\]"):
            source[0, ('state',)]


def test_only_the_parts_with_the_frames_are_read(bucket, tmp_path):
    write_v3(tmp_path / 'robots')
    for file in filter(pathlib.Path.is_file, (tmp_path / 'robots').rglob('*')):
        (bucket / str(file.relative_to(tmp_path))).write_bytes(file.read_bytes())
    with granular.open(bucket / 'robots') as source:
        windows = Windows(source, {STATE: 2, LEFT: [0, 1]})
        windows[20]
        before = granular.io_stats()['requests']
        windows.fetch([14, 21, 30])
        assert granular.io_stats()['requests'] - before <= 1


@pytest.mark.parametrize(
    ('info', 'error', 'message'),
    [
        ({'codebase_version': 'v1.6'}, UnsupportedError, "expected LeRobot v2 or v3, got 'v1.6'"),
        ({'features': None}, CorruptDatasetError, 'not the description of a dataset'),
        ({'data_path': '../{chunk_index}'}, CorruptDatasetError, 'expected names of files in it'),
        ({'data_path': '{chunk_index.nothing}'}, CorruptDatasetError, 'data_path'),
        ({'data_path': 'data/{chunk_index}'}, NotFoundError, 'data/0'),
        ({'fps': 4}, DatapointError, r'episode 1, key .*left.: no frame at .* seconds: the video has 32 frames'),
    ],
)
def test_datasets_that_contradict_themselves_are_refused(tmp_path, info, error, message):
    write_v3(tmp_path / 'robots', **info)
    with pytest.raises(error, match=message), granular.open(tmp_path / 'robots') as source:
        source[1]
