"""Tracebacks that leave the library: short, with the user's frames, and complete on request."""

import multiprocessing
import os
import subprocess
import sys
import threading
import traceback

import numpy as np
import pytest

import granular
from granular import aio
from granular.errors import (
    ClosedError,
    DecodeError,
    GranularError,
    InvalidArgumentError,
    MissingExtraError,
    NotFoundError,
    StoreError,
)
from granular.grain import MultiprocessingOptions
from tests import ROOT
from tests.support.servers import free_ports

LINES = 16  # of a traceback with one call of the user, without the marks below lines of code


class Source:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {'x': index}


def raises(datapoint):
    return inner(datapoint)


def inner(datapoint):
    raise LookupError('mine')


def opens(datapoint):
    try:
        os.stat('/nowhere')
    except OSError as error:
        raise StoreError(f'not there: {error}') from error


def trace_of(error):
    return ''.join(traceback.format_exception(error))


def lines_of(error):
    return [line for line in trace_of(error).splitlines() if line.strip(' ~^')]


def frames_of(error):
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def refused():
    options = {'key': 'k', 'secret': 's', 'region': 'r', 'endpoint_url': f'http://127.0.0.1:{free_ports(1)[0]}'}
    return granular.Path('s3://bucket/data', config=granular.IOConfig(attempts=2, backoff=0.001), **options)


def append(folder, kind, value):
    with granular.DatasetWriter(folder, {'x': kind}) as writer:
        writer.append({'x': value})


def reopen(file, content):
    file.write_text(content)
    return granular.open(file if file.suffix == '.tar' else file.parent)


def send(lock):
    stream = granular.MapDataset.range(9).map(lambda element, lock=lock: lock).to_iter_dataset()
    return list(stream.mp_prefetch(MultiprocessingOptions(1, start_method='spawn')))


FAULTS = {
    'spec of classes': (lambda folder: granular.DatasetWriter(folder, {'x': int}), "got <class 'int'>"),
    'spec that is not JSON': (lambda folder: reopen(folder / 'spec.json', '{oops'), 'Expecting property name'),
    'text for a tar': (lambda folder: reopen(folder / 'x.tar', 'hello' * 300), 'invalid header'),
    'scalar in msgpack': (lambda folder: append(folder, 'msgpack', {'y': np.float32(1)}), "serialize 'numpy.float32'"),
    'function that does not pickle': (lambda folder: send(threading.Lock()), "cannot pickle '_thread.lock' object"),
}


@pytest.mark.parametrize('name', FAULTS)
def test_errors_that_repeat_their_cause_have_short_tracebacks(name, tmp_path):
    fails, message = FAULTS[name]
    with pytest.raises(GranularError) as caught:
        fails(tmp_path)
    assert len(lines_of(caught.value)) <= LINES, trace_of(caught.value)
    assert message in str(caught.value)


def test_missing_extra_has_a_short_traceback(monkeypatch):
    monkeypatch.setitem(sys.modules, 'redis', None)
    monkeypatch.setitem(sys.modules, 'redis.asyncio', None)
    with pytest.raises(MissingExtraError) as caught:
        granular.RedisCache([1])
    assert len(lines_of(caught.value)) <= LINES, trace_of(caught.value)


def test_script_without_a_guard_is_told_so_by_each_worker(tmp_path):
    (tmp_path / 'x.py').write_text(
        'import granular\n'
        "options = granular.grain.MultiprocessingOptions(1, start_method='spawn')\n"
        'list(granular.MapDataset.range(9).to_iter_dataset().mp_prefetch(options))\n'
    )
    command, environment = [sys.executable, tmp_path / 'x.py'], {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("needs if __name__ == '__main__':\n") == 2, done.stderr
    assert len(done.stderr.splitlines()) <= 45, done.stderr


@pytest.mark.parametrize(
    'call',
    [
        lambda: granular.open('/nowhere'),
        lambda: granular.DatasetReader('/nowhere'),
        lambda: granular.DatasetReader('memory://nowhere'),
        lambda: granular.ShardedDatasetReader('/nowhere'),
        lambda: granular.BagReader('/nowhere'),
        lambda: granular.Path('/nowhere').read_bytes(),
        lambda: granular.DatasetReader(refused()),
        lambda: list(granular.Path('/nowhere').iterdir()),
    ],
)
def test_wrong_paths_and_endpoints_have_short_tracebacks(call):
    with pytest.raises(GranularError) as caught:
        call()
    assert len(lines_of(caught.value)) <= LINES, trace_of(caught.value)


@pytest.mark.parametrize(
    'call',
    [
        lambda reader, dataset: granular.MapDataset.source(reader),
        lambda reader, dataset: granular.MapDataset.mix([dataset, granular.MapDataset.source(reader)]),
        lambda reader, dataset: list(granular.Loader(reader, 2)),
        lambda reader, dataset: granular.sources.Epochs(granular.sources.Transform(reader, same), seed=0),
        lambda reader, dataset: dataset[0],
        lambda reader, dataset: list(dataset),
        lambda reader, dataset: list(dataset.to_iter_dataset()),
        lambda reader, dataset: list(granular.Loader(dataset, 2)),
    ],
)
def test_closed_reader_in_a_pipeline_has_a_short_traceback(call, damaged):
    with granular.DatasetReader(damaged) as reader:
        dataset = granular.MapDataset.source(reader).shuffle(seed=0).map(same).repeat(2).window_shuffle(8, seed=1)
    with pytest.raises(ClosedError, match=f"'{damaged}'.* is closed$") as caught:
        call(reader, dataset)
    assert len(lines_of(caught.value)) <= LINES, trace_of(caught.value)


async def test_opening_with_await_has_a_short_traceback():
    with pytest.raises(NotFoundError) as caught:
        await aio.DatasetReader.open('/nowhere')
    assert len(lines_of(caught.value)) <= LINES, trace_of(caught.value)


@pytest.fixture(scope='module')
def damaged(tmp_path_factory):
    """64 datapoints, of which number 37 has a damaged image."""
    path = tmp_path_factory.mktemp('damaged') / 'data'
    good = granular.encoders['jpg'](np.zeros((8, 8, 3), np.uint8))
    with granular.DatasetWriter(path, {'image': 'jpg'}, {'jpg': bytes}) as writer:
        for i in range(64):
            writer.append({'image': b'not a JPEG' if i == 37 else good})
    return path


def same(datapoint):
    return datapoint


def torch_loader(dataset, **options):
    from torch.utils.data import DataLoader

    before = multiprocessing.active_children()
    try:
        return list(DataLoader(dataset, **options))
    finally:  # the error's traceback would keep its worker alive, which tests of other files would find
        for child in set(multiprocessing.active_children()).difference(before):
            child.terminate()
            child.join()


def iterable(dataset):
    from granular.integrations.torch import IterableDataset

    return IterableDataset(dataset)


ROADS = {
    'an index': lambda reader, _: reader[37],
    'a slice': lambda reader, _: list(reader[30:40]),
    'a reader': lambda reader, _: list(reader),
    'a MapDataset': lambda _, dataset: list(dataset),
    'a Loader': lambda _, dataset: list(granular.Loader(dataset, 8)),
    'a Loader with a worker': lambda _, dataset: list(granular.Loader(dataset, 8, workers=1, mp='fork')),
    'a stream': lambda _, dataset: list(dataset.to_iter_dataset()),
    'a stream with a map': lambda _, dataset: list(dataset.to_iter_dataset().map(same)),
    'a stream of batches': lambda _, dataset: list(dataset.batch(8).to_iter_dataset()),
    'a stream with a worker': lambda _, dataset: list(
        dataset.to_iter_dataset().mp_prefetch(MultiprocessingOptions(1, start_method='fork'))
    ),
    'a DataLoader': lambda reader, _: list(
        granular.grain.DataLoader(data_source=reader, sampler=granular.grain.samplers.SequentialSampler(64))
    ),
    'batches for torch': lambda _, dataset: torch_batches(dataset.batch(8).to_iter_dataset()),
    'torch, map-style': lambda reader, _: torch_loader(reader, batch_size=8),
    'torch, map-style, with a worker': lambda _, dataset: torch_loader(
        dataset, batch_size=8, num_workers=1, multiprocessing_context='fork'
    ),
    'torch, iterable': lambda _, dataset: torch_loader(iterable(dataset.batch(8)), batch_size=None),
    'torch, iterable, with a worker': lambda _, dataset: torch_loader(
        iterable(dataset.batch(8)), batch_size=None, num_workers=1, multiprocessing_context='fork'
    ),
}


def torch_batches(stream):
    from granular.integrations.torch import Batches

    with Batches(stream) as batches:
        return list(batches)


def assert_short(error, parts):
    """Assert that a traceback has 20 lines beside those of torch, and each of some parts once."""
    error.__traceback__ = error.__traceback__.tb_next  # without the frame of the test
    text = trace_of(error)
    of_torch = 2 * sum('/torch/' in line for line in text.splitlines())  # with the line of code
    assert len(lines_of(error)) <= 20 + of_torch, text
    assert {part: text.count(part) for part in parts} == dict.fromkeys(parts, 1), text


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize('road', ROADS)
def test_record_that_is_not_decoded_has_a_short_traceback(road, damaged):
    with granular.DatasetReader(damaged) as reader:
        dataset = granular.MapDataset.source(reader).map(same)
        with pytest.raises(DecodeError) as caught:
            ROADS[road](reader, dataset)
    assert_short(caught.value, ['datapoint 37', f'{damaged}', 'not decoded as'])


def fails(datapoint):
    if datapoint['x'] == 37:
        raise LookupError(f'no label of {datapoint["x"] - 2}')
    return datapoint


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
@pytest.mark.parametrize('road', ROADS)
def test_function_that_fails_has_a_short_traceback(road):
    dataset = granular.MapDataset.source([{'x': i} for i in range(64)]).map(fails)
    with pytest.raises(LookupError) as caught:
        ROADS[road](dataset, dataset)
    assert_short(caught.value, ['at index 37', 'no label of 35', 'in fails'])


def test_frames_of_a_decoder_of_the_user_remain(damaged):
    with granular.DatasetReader(damaged, {'jpg': inner}) as reader, pytest.raises(DecodeError, match='mine') as caught:
        reader[3]
    assert 'in inner' in trace_of(caught.value)


def test_repeated_cause_is_not_printed_but_kept():
    with pytest.raises(NotFoundError) as caught:
        granular.Path('/nowhere').read_bytes()
    assert caught.value.__cause__ is None
    assert isinstance(caught.value.__context__, FileNotFoundError)
    assert 'direct cause' not in trace_of(caught.value)


def test_message_does_not_repeat_that_of_the_system(tmp_path):
    (tmp_path / 'file').touch()
    paths = [granular.Path(tmp_path / name) for name in ('none', 'file/none', '', 'file')]
    for call, name in (
        (paths[0].read_bytes, 'none: no such file or folder'),
        (paths[1].read_bytes, 'file/none: no such folder: this, or a part of its path, is a file'),
        (paths[2].read_bytes, ': is a folder, not a file'),
        (paths[3].mkdir, 'file: exists already'),
    ):
        with pytest.raises(GranularError) as caught:
            call()
        assert str(caught.value) == f'{tmp_path}{"/" if name[0] != ":" else ""}{name}'
        assert 'FileNotFoundError' not in trace_of(caught.value)


def test_full_tracebacks_are_available(monkeypatch):
    monkeypatch.setenv('GRANULAR_FULL_TRACEBACKS', '1')
    with pytest.raises(NotFoundError) as caught:
        granular.DatasetReader('/nowhere')
    assert isinstance(caught.value.__cause__, NotFoundError)
    assert {'run', 'start_coroutine', '_open', '_read_layout', '_read_spec'} <= set(frames_of(caught.value))


@pytest.mark.parametrize('workers', [0, 1])
def test_frames_of_the_user_remain(workers):
    stream = granular.MapDataset.source(Source()).map(raises).to_iter_dataset()
    if workers:
        stream = stream.mp_prefetch(MultiprocessingOptions(workers))
    with iter(stream) as iterator, pytest.raises(LookupError, match='mine') as caught:
        next(iterator)
    text = trace_of(caught.value)
    assert 'in raises' in text
    assert 'in inner' in text
    assert text.count(f'{granular.__path__[0]}/aio/') <= 2 + workers, text


def test_frames_without_lines_are_shortened_as_others():
    """Generated code has none, and neither have some instructions at which a signal handler raises."""

    def fails(x):
        raise LookupError('mine')

    table = b'\xf8' * (len(fails.__code__.co_code) // 2)  # of instructions without a line
    fails.__code__ = fails.__code__.replace(co_linetable=table)
    with pytest.raises(Exception) as error:  # noqa: PT011 - pytest cannot show a traceback without lines
        granular.MapDataset.range(3).map(fails)[0]
    assert (type(error.value), frames_of(error.value)[-1]) == (LookupError, 'fails')


def test_cause_with_frames_of_the_user_is_printed():
    with pytest.raises(StoreError) as caught:
        granular.MapDataset.source(Source()).map(opens)[0]
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert "os.stat('/nowhere')" in trace_of(caught.value)


def test_errors_of_libraries_keep_all_frames():
    # They may be defects of granular, which calls the library.
    with pytest.raises(np.linalg.LinAlgError) as caught:
        granular.MapDataset.source([np.zeros((2, 2))]).map(np.linalg.inv)[0]
    assert {'run', 'fetch', 'map_in_threads'} <= set(frames_of(caught.value))


@pytest.mark.parametrize(
    ('make', 'call'),
    [
        (lambda source, fn: source.map(fn), r'map calls fn\(element\)'),
        (lambda source, fn: source.map_with_index(fn), r'map_with_index calls fn\(index, element\)'),
        (lambda source, fn: source.random_map(fn, seed=1), r'random_map calls fn\(element, rng\)'),
        (lambda source, fn: source.filter(fn), r'filter calls fn\(element\)'),
        (lambda source, fn: source.flat_map(fn, max_fan_out=2), r'flat_map calls fn\(element\)'),
        (
            granular.sources.Transform,
            r'Transform calls fn\(datapoint, seed=\[seed, step',
        ),
    ],
)
@pytest.mark.parametrize('workers', [0, 1])
def test_function_with_other_arguments_is_told_how_it_is_called(make, call, workers):
    def takes_three(a, b, c):
        raise AssertionError

    source = make(granular.MapDataset.source(Source()), takes_three)
    stream = granular.MapDataset.source(source).to_iter_dataset()
    if workers:
        stream = stream.mp_prefetch(MultiprocessingOptions(workers, start_method='fork'))
    with iter(stream) as iterator, pytest.raises(InvalidArgumentError, match=call) as caught:
        next(iterator)
    assert 'takes_three(a, b, c) does not accept' in str(caught.value)


@pytest.mark.parametrize('name', ['map', 'map_with_index', 'random_map', 'filter'])
def test_operation_of_a_data_loader_with_other_arguments_is_told_how_it_is_called(name):
    def takes_four(a, b, c, d):
        raise AssertionError

    base = {
        'map': granular.grain.transforms.Map,
        'map_with_index': granular.grain.transforms.MapWithIndex,
        'random_map': granular.grain.transforms.RandomMap,
        'filter': granular.grain.transforms.Filter,
    }[name]
    operation = type('Operation', (base,), {name: staticmethod(takes_four)})()
    loader = granular.grain.DataLoader(
        data_source=Source(),
        sampler=granular.grain.samplers.IndexSampler(4, shuffle=False, seed=0),
        operations=[operation],
    )
    with iter(loader) as iterator, pytest.raises(InvalidArgumentError, match=rf'{name} calls fn\(') as caught:
        next(iterator)
    assert 'takes_four(a, b, c, d) does not accept' in str(caught.value)


@pytest.mark.parametrize('name', ['map', 'map_with_index', 'random_map', 'filter', 'flat_map'])
def test_function_of_a_stream_with_other_arguments_is_told_how_it_is_called(name):
    def takes_three(a, b, c):
        raise AssertionError

    stream = granular.MapDataset.range(4).to_iter_dataset().batch(2).seed(1)
    with iter(getattr(stream, name)(takes_three)) as iterator:
        with pytest.raises(InvalidArgumentError, match=rf'{name} calls fn\((index, )?element(, rng)?\)'):
            next(iterator)


def nested(datapoint):
    return takes_two(datapoint)


def takes_two(a, b):
    raise AssertionError


@pytest.mark.parametrize('fn', [nested, len, lambda datapoint: datapoint + 'x'])
def test_other_type_errors_of_functions_are_raised_unchanged(fn):
    with pytest.raises(TypeError):
        granular.MapDataset.source([1, 2]).map(fn)[0]
