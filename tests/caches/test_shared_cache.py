"""SharedMemoryCache: fetches, limits, worker processes, and caches with a name."""

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import pickle
import resource
import threading
import time
import uuid

import numpy as np
import pytest
from PIL import Image

import granular
from granular import aio
from granular.errors import (
    AlreadyExistsError,
    ClosedError,
    EncodeError,
    FunctionError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from tests.support.caches import RUN, RecordingSource, cache_file, label, locked_table, unheld_memory


def test_misses_are_one_fetch(source):
    with granular.SharedMemoryCache(source, label) as cache:
        assert len(cache) == 64
        assert cache.fetch([3, 1, 3, -1]) == [3, 1, 3, 63]
        assert cache.fetch([1, 2, 63]) == [1, 2, 63]
        assert cache[2] == cache.get(-62) == 2
        assert cache.__getitems__([1]) == cache._getitems([1]) == [1]
        assert source.fetched == [[3, 1, 63], [2]]
        assert cache.stats() == {
            'hits': 6, 'misses': 4, 'not_kept': 0, 'entries': 4, 'bytes': cache.stats()['bytes'], 'max_bytes': 1 << 30,
        }  # fmt: skip
        with pytest.raises(OutOfRangeError):
            cache[64]
        assert list(granular.MapDataset.source(cache).shuffle(3)) != list(range(64))
        assert sorted(granular.MapDataset.source(cache).shuffle(3)) == list(range(64))
    with pytest.raises(ClosedError):
        cache[1]
    with pytest.raises(ClosedError):
        cache.stats()
    cache.close()


async def test_async_api(source):
    async with aio.SharedMemoryCache(source, label) as cache:
        assert await cache.fetch(range(64)) == list(range(64))
        assert await cache.get(5) == 5
        assert await asyncio.gather(*(cache.fetch([i, i + 1]) for i in range(20))) == [[i, i + 1] for i in range(20)]
        assert len(source.fetched) == 1
    late = aio.SharedMemoryCache([1, 2])
    assert await late.get(-1) == 2
    assert await pickle.loads(pickle.dumps(late)).get(0) == 1
    await late.aclose()
    with pytest.raises(ClosedError, match='not open yet'):
        pickle.dumps(aio.SharedMemoryCache(source))


def test_misses_and_hits_return_equal_values(source):
    values = [(1, [2]), b'a\0', {'a': np.arange(3)}, None, 'x', 2**70]
    with granular.SharedMemoryCache(values) as cache:
        first, second = cache.fetch(range(6)), cache.fetch(range(6))
        assert repr(first) == repr(second) == repr(values)
        first[2]['a'][:] = 9  # a copy for the caller
        second[2]['a'][:] = 8
        assert cache[2]['a'].tolist() == values[2]['a'].tolist() == [0, 1, 2]


def test_max_bytes_limits_the_cache(source):
    with granular.SharedMemoryCache(source, label, max_bytes=20_000) as cache:
        for _ in range(2):
            assert cache.fetch(range(64)) == list(range(64))
        stats = cache.stats()
        assert 15 <= stats['entries'] < 20
        assert stats['bytes'] <= stats['max_bytes'] == 20_000
        assert stats['not_kept'] == 2 * (64 - stats['entries'])
        assert stats['hits'] == stats['entries']
        assert len(source.fetched[1]) == 64 - stats['entries']
    with pytest.raises(InvalidArgumentError, match='max_bytes'):
        granular.SharedMemoryCache(source, max_bytes=0)


def test_uncacheable_value_is_an_encode_error():
    with granular.SharedMemoryCache([1, {2}]) as cache:
        with pytest.raises(EncodeError, match='index 1 cannot be cached; pass pack='):
            cache.fetch([0, 1])
        stream = granular.MapDataset.source(cache).to_iter_dataset(on_error='skip')
        assert list(stream) == [1]


def test_value_that_is_packed_as_none_is_an_encode_error():
    with granular.SharedMemoryCache([1, 0], pack=lambda value: value or None, unpack=lambda value: value or 0) as cache:
        assert cache[0] == 1
        for _ in range(2):
            with pytest.raises(EncodeError, match='index 1 cannot be cached: pack returned None'):
                cache.fetch([0, 1])


def fail(datapoint):
    raise ValueError('no')


def stop(datapoint):
    raise StopIteration('no')


@pytest.mark.parametrize(('transform', 'error'), [(fail, ValueError), (stop, FunctionError)])
def test_failed_transform_names_the_step(source, transform, error):
    with granular.SharedMemoryCache(source, transform) as cache:
        for read in (lambda: cache[7], lambda: cache.fetch([7]), lambda: cache[7]):  # a miss, and then hits
            with pytest.raises(error, match='no') as caught:
                read()
            assert 'index 7' in caught.value.__notes__[0]


def test_filtered_elements_are_cached(source):
    dataset = granular.MapDataset.source(source).filter(lambda datapoint: datapoint['label'] % 2)
    with granular.SharedMemoryCache(dataset, label) as cache:
        for _ in range(2):
            assert cache.fetch(range(4)) == [None, 1, None, 3]
        assert len(source.fetched) == 1
        assert list(granular.MapDataset.source(cache)) == list(range(1, 64, 2))


def test_decoded_images_are_cached_by_pack_and_unpack():
    images = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (8, 9, 3), np.uint8)) for i in range(4)]
    pack, unpack = granular.formats.pack_image, granular.formats.unpack_image
    with granular.SharedMemoryCache(images, pack=pack, unpack=unpack) as cache:
        for _ in range(2):
            fetched = cache.fetch(range(4))
            assert [image.tobytes() for image in fetched] == [image.tobytes() for image in images]
        assert cache.stats()['hits'] == 4
        assert cache[0].mode == 'RGB'
        twin = pickle.loads(pickle.dumps(cache))
        assert twin[1].tobytes() == images[1].tobytes()


def test_tensors_and_images_are_cached_as_they_are():
    import torch  # a slow import, needed only here

    tensors = [
        torch.arange(6).view(2, 3), torch.tensor(3.5), torch.zeros(0, 4, dtype=torch.bfloat16), torch.tensor([True]),
        torch.arange(6, dtype=torch.bfloat16).view(2, 3).T, torch.tensor([1 + 2j]).conj(),
    ]  # fmt: skip
    image = Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3))
    indexed = image.quantize(4)
    indexed.info['transparency'] = 2
    values = [*((i, tensor) for i, tensor in enumerate(tensors)), {'image': image, 'more': [indexed, tensors[0]]}]
    with granular.SharedMemoryCache(values) as cache:
        for _ in range(2):
            *pairs, images = cache.fetch(range(len(values)))
            for i, ((number, copy), tensor) in enumerate(zip(pairs, tensors, strict=True)):
                assert (number, copy.dtype, copy.shape) == (i, tensor.dtype, tensor.shape)
                assert torch.equal(copy, tensor)
            assert (images['image'].mode, images['image'].tobytes()) == ('RGB', image.tobytes())
            copy = images['more'][0]
            assert (copy.mode, copy.tobytes(), copy.getpalette()) == ('P', indexed.tobytes(), indexed.getpalette())
            assert copy.info['transparency'] == 2
            pairs[0][1].zero_()  # a copy of the caller's own
    for refused in (torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2)), torch.ones(2).to_sparse()):
        with granular.SharedMemoryCache([refused]) as cache, pytest.raises(EncodeError, match='pass pack='):
            cache[0]


def test_reader_hits_count_in_io_stats(tmp_path):
    with granular.DatasetWriter(tmp_path / 'data', {'x': 'array', 'n': 'int'}, granular.encoders) as writer:
        for i in range(10):
            writer.append({'x': np.full(3, i), 'n': i})
    with granular.DatasetReader(tmp_path / 'data', granular.decoders) as reader:
        with granular.SharedMemoryCache(reader) as cache:
            first = cache.fetch(range(10))
            before = granular.io_stats()
            second = cache.fetch(range(10))
            after = granular.io_stats()
            for datapoints in (first, second):
                assert [datapoint['n'] for datapoint in datapoints] == [*range(10)]
            assert (after['cached'] - before['cached'], after['ranges'] - before['ranges']) == (10, 0)
            assert str(tmp_path) in repr(cache)


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_workers_of_a_loader_share_the_cache(source, method):
    with granular.SharedMemoryCache(source) as cache:
        points = granular.sources.Epochs(cache, shuffle=False)
        for _ in range(1 if method == 'spawn' else 2):
            with granular.Loader(points, 8, workers=2, prefetch=2, mp=method) as loader:
                batches = [next(loader)['label'] for _ in range(8)]
            assert np.concatenate(batches).tolist() == list(range(64))
        assert {i for line in source.fetched for i in line} == set(range(64))
        stats = cache.stats()
        assert stats['entries'] == 64
        assert method == 'spawn' or stats['hits'] >= 64


def test_workers_of_torch_share_the_cache(source):
    import torch  # a slow import, needed only here

    with granular.SharedMemoryCache(source, label) as cache:
        for context, count in (('fork', 2), ('spawn', 1)):
            loader = torch.utils.data.DataLoader(cache, 8, num_workers=count, multiprocessing_context=context)
            assert torch.cat(list(loader)).tolist() == list(range(64))
        assert sorted(i for line in source.fetched for i in line) == list(range(64))


def fill(cache, seed):
    for index in np.random.default_rng(seed).permutation(len(cache)).tolist():
        datapoint = cache[index]
        assert datapoint['label'] == index
        assert (datapoint['x'] == index % 256).all()


class Large(RecordingSource):
    """A source of values that are slow to store. It records no fetches."""

    def fetch(self, indices):
        return [{'x': np.full(self.size, i, np.uint8), 'label': i} for i in indices]


def test_killed_workers_leave_no_lock_and_no_partial_value(tmp_path):
    context = multiprocessing.get_context('fork')
    rng = np.random.default_rng(0)
    source = Large(tmp_path / 'log', count=200, size=500_000)
    with granular.SharedMemoryCache(source, max_bytes=400 << 20) as cache:
        seed = 0
        while seed < 12 or not cache.stats()['entries']:  # a busy machine stores nothing in the first of them
            process = context.Process(target=fill, args=(cache, seed))
            process.start()
            seed += 1
            time.sleep(rng.uniform(0.01, 0.08) * (1 + seed // 12))
            process.kill()
            process.join()
            process.close()
        fill(cache, 99)  # each entry is complete, and no lock keeps others from being stored
        stats = cache.stats()
        assert stats['not_kept'] == 0
        assert stats['entries'] in (199, 200)  # killed between a value and its count
        before = stats['hits']
        fill(cache, 100)
        assert cache.stats()['hits'] == before + 200


def test_stopped_lock_holder_does_not_block_readers(source, monkeypatch):
    monkeypatch.setattr('granular.aio.caches.table.WAIT', 0.05)
    name = f'{RUN}-stopped'
    with granular.SharedMemoryCache(source, label, name=name) as cache:
        held = locked_table(name)
        assert cache.fetch([1, 2]) == [1, 2]
        with monkeypatch.context() as patch:  # it is not waited for at each batch
            patch.setattr(time, 'sleep', lambda seconds: seconds and pytest.fail('waited again'))
            assert cache.fetch([1, 2]) == [1, 2]
        del held  # as the system releases it once that process is killed
        assert cache.fetch([1, 2]) == [1, 2]
        assert cache.fetch([1, 2]) == [1, 2]
        assert source.fetched == [[1, 2], [1, 2], [1, 2]]


SIGNALLED = """
import faulthandler, signal, sys
import granular
from tests.support.caches import locked_table

def handle(*_):
    values.append(cache[1])
    if sys.argv[2] == 'closes':
        cache.close()

faulthandler.dump_traceback_later(20, exit=True)
values, cache = [], granular.SharedMemoryCache([1, 2, 3], name=sys.argv[1])
held = locked_table(sys.argv[1])
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.3)
print(cache.fetch([0, 1]), values)
"""


@pytest.mark.parametrize('then', ['closes', 'continues'])
def test_handler_of_a_signal_uses_the_cache_that_it_interrupts(interpreter, then):
    """It comes while the first read waits for a lock that another process holds."""
    done = interpreter.run(SIGNALLED, f'{RUN}-signalled-{then}', then)
    assert (done.stdout, done.stderr) == ('[1, 2] [2]\n', '')


def test_concurrent_threads_fetch_each_value_once(source):
    with granular.SharedMemoryCache(source, label) as cache:
        threads = [threading.Thread(target=cache.fetch, args=(range(i, 64, 4),)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert cache.stats()['entries'] == cache.stats()['misses'] == 64


def test_attaching_after_the_owner_closed_is_an_error(source):
    cache = granular.SharedMemoryCache(source)
    data = pickle.dumps(cache)
    cache.close()
    twin = pickle.loads(data)
    assert len(twin) == 64
    with pytest.raises(NotFoundError, match='give the cache a name'):
        twin[0]


def test_attached_readers_continue_after_the_owner_closed(source):
    cache = granular.SharedMemoryCache(source, label)
    twin = pickle.loads(pickle.dumps(cache))
    cache.fetch([1, 2])
    assert twin[1] == 1
    cache.close()
    assert twin.fetch([1, 2, 3]) == [1, 2, 3]
    assert source.fetched == [[1, 2], [3]]


def test_attached_readers_continue_after_the_owner_was_killed(program):
    code = 'import granular, pickle, time; c = granular.SharedMemoryCache(range(5)); c[1]'
    owner = program(f'{code}; print(pickle.dumps(c).hex(), flush=True); time.sleep(60)')
    data = bytes.fromhex(owner.stdout.readline())
    twin = pickle.loads(data)
    assert twin[1] == 1
    owner.kill()
    owner.communicate()
    assert twin.fetch([1, 2]) == [1, 2]
    assert twin.stats()['misses'] == 2
    twin.close()
    with pytest.raises(NotFoundError):
        pickle.loads(data)[1]


FEW_DESCRIPTORS = """
import collections, os, resource
import granular
make = {
    'named cache': lambda: granular.SharedMemoryCache([1, 2], max_bytes=1000, name=f'few-{os.getpid()}'),
    'cache': lambda: granular.SharedMemoryCache([1, 2], max_bytes=1000),
    'named data': lambda: granular.grain.sources.SharedMemoryDataSource([1, 2], name=f'few-{os.getpid()}'),
    'data': lambda: granular.grain.sources.SharedMemoryDataSource([1, 2]),
}
for opened in make.values():
    with opened():  # imports
        pass
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for name, opened in make.items():
    outcomes = collections.Counter()
    for left in range(6):
        held = []
        try:
            while True:
                held.append(os.open('/dev/null', os.O_RDONLY))
        except OSError:
            for descriptor in held[:left]:
                os.close(descriptor)
        try:
            with opened() as source:
                outcomes[source[1]] += 1
        except granular.errors.StoreError as error:
            outcomes['Too many open files' in str(error)] += 1
        for descriptor in held[left:]:
            os.close(descriptor)
    print(name, outcomes.keys() == {True, 2}, [path for path in os.listdir('/dev/shm') if str(os.getpid()) in path])
"""


def test_few_descriptors_are_an_error_that_names_the_cause(interpreter):
    done = interpreter.run(FEW_DESCRIPTORS)
    expected = [f'{name} True []\n' for name in ('named cache', 'cache', 'named data', 'data')]
    assert (done.stdout, done.stderr) == (''.join(expected), '')


# --- with a name ------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time
from tests.support.caches import RecordingSource, label
import granular
cache = granular.SharedMemoryCache(RecordingSource(sys.argv[1]), label, max_bytes=1 << 20, name=f'{RUN}-ranks')
print(sum(cache.fetch(range(64))), flush=True)
if len(sys.argv) > 2:
    time.sleep(60)
"""


def test_independent_processes_share_a_named_cache(source, program):
    with granular.SharedMemoryCache(source, label, max_bytes=1 << 20, name=f'{RUN}-ranks') as cache:
        out, error = program(PROGRAM, source.log).communicate()
        assert out == '2016\n', error
        assert cache[3] == 3
        assert len(source.fetched) == 1
        with pytest.raises(InvalidArgumentError, match=r"-ranks' is of 64 elements and max_bytes=1048576, not 3"):
            granular.SharedMemoryCache([1, 2, 3], name=f'{RUN}-ranks')
        with pytest.raises(InvalidArgumentError, match='another source'):
            granular.SharedMemoryCache(list(range(64)), max_bytes=1 << 20, name=f'{RUN}-ranks')
        twin = pickle.loads(pickle.dumps(cache))
        assert twin[3] == 3
    assert not [path for path in os.listdir('/dev/shm') if f'{RUN}-ranks' in path]


class Numbers:
    """A source whose repr does not show what it holds."""

    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 2

    def __repr__(self):
        return 'Numbers()'

    def __getitem__(self, index):
        return self.first + index


def test_name_of_a_cache_belongs_to_the_limits_of_records_too(tmp_path):
    """Of a bag whose table is a file of its own: the same bytes may be divided into other records."""
    for name, records in (('one', [b'ab', b'c']), ('two', [b'a', b'bc'])):
        with granular.BagWriter(tmp_path / f'{name}.bag', 3) as bag:
            for record in records:
                bag.append(record)

    def cached(cache_index):
        reader = granular.BagReader(tmp_path / 'one.bag', cache_index=cache_index)
        return granular.SharedMemoryCache(reader, max_bytes=1 << 16, name=f'{RUN}-limits')

    with cached(True) as cache:
        assert cache.fetch([0, 1]) == [b'ab', b'c']
        with cached(False) as same:
            assert same.fetch([0, 1]) == [b'ab', b'c']
        os.replace(tmp_path / 'two.idx', tmp_path / 'one.idx')
        for cache_index in (True, False):
            with pytest.raises(InvalidArgumentError, match='is of another source'):
                cached(cache_index)


def with_attribute(number):
    def add(value):
        return value + add.number

    add.number = number
    return add


@pytest.mark.parametrize(
    'make',
    [
        lambda i: [i, 1],
        lambda i: np.array([i, 1]),
        Numbers,
        lambda i: granular.MapDataset.source([i, 1]).shuffle(3),
        lambda i: granular.MapDataset.range(2).map(lambda value: value + i),
        lambda i: granular.MapDataset.range(2).map([lambda value: value, lambda value: value + 1][i]),
        lambda i: granular.MapDataset.range(2).map(with_attribute(i)),
        lambda i: granular.SharedMemoryCache([i, 1], max_bytes=1 << 16),
    ],
)
def test_name_of_a_cache_belongs_to_one_source(make):
    """Of equal length, and with equal stages and names of functions: another source never gets its values."""
    options = {'max_bytes': 1 << 16, 'name': f'{RUN}-{uuid.uuid4().hex}'}
    sources = [make(0), make(1), make(0)]
    with granular.SharedMemoryCache(sources[0], **options) as cache:
        values = cache.fetch([0, 1])
        with pytest.raises(InvalidArgumentError, match='is of another source: choose another name, or pass the same f'):
            granular.SharedMemoryCache(sources[1], **options)
        with granular.SharedMemoryCache(sources[2], **options) as again:
            assert again.fetch([0, 1]) == values
            assert again.stats()['misses'] == 2


def test_fingerprint_stands_for_the_source_of_a_named_cache():
    source, other = Numbers(0), Numbers(0)
    source.lock, other.rank = threading.Lock(), 1
    options = {'max_bytes': 1 << 16, 'name': f'{RUN}-fingerprint'}
    with pytest.raises(InvalidArgumentError, match="cannot pickle '_thread.lock' object: pass fingerprint="):
        granular.SharedMemoryCache(source, **options)
    for fingerprint in ('', 1):
        with pytest.raises(InvalidArgumentError, match='fingerprint: expected a text, got'):
            granular.SharedMemoryCache(other, **options, fingerprint=fingerprint)
    with granular.SharedMemoryCache(source, **options, fingerprint='numbers') as cache:
        assert cache.fetch([0, 1]) == [0, 1]
        with granular.SharedMemoryCache(other, **options, fingerprint='numbers') as again:
            assert pickle.loads(pickle.dumps(again)).fetch([0, 1]) == [0, 1]
            assert again.stats()['misses'] == 2


def test_functions_in_other_roles_make_another_source_of_a_named_cache():
    options = {'max_bytes': 1 << 16, 'name': f'{RUN}-roles'}
    numbers = granular.MapDataset.source(range(4))

    def tenfold(unpack=None):
        cache = granular.SharedMemoryCache(numbers, max_bytes=1 << 16, unpack=unpack)
        return granular.MapDataset.source(cache).map(lambda value: 10 * value)

    def add(value):
        return value + 1

    with granular.SharedMemoryCache(tenfold(unpack=add), **options) as cache:
        assert cache.fetch(range(4)) == [10, 20, 30, 40]
        with pytest.raises(InvalidArgumentError, match='is of another source'):
            granular.SharedMemoryCache(tenfold(), pack=add, **options).fetch([0])


def test_named_cache_lives_until_its_last_process_ends(source, program):
    first = program(PROGRAM, source.log, 'stay')
    assert first.stdout.readline() == '2016\n', first.communicate()
    with granular.SharedMemoryCache(source, label, max_bytes=1 << 20, name=f'{RUN}-ranks') as cache:
        first.kill()
        first.communicate()
        assert cache.fetch(range(64)) == list(range(64))
        assert len(source.fetched) == 1
    second = program(PROGRAM, source.log, 'stay')
    assert second.stdout.readline() == '2016\n'
    assert len(source.fetched) == 2  # the first cache was removed
    second.kill()
    second.communicate()
    with granular.SharedMemoryCache([1, 2, 3], max_bytes=1 << 20, name=f'{RUN}-ranks') as cache:  # of another source
        assert cache.fetch(range(3)) == [1, 2, 3]
    assert not [path for path in unheld_memory() if RUN in path]


def places_of(content, count):
    """Return where the positions of the records are in the file of a cache of so many indices."""
    numbers = np.frombuffer(content[: 8 * (16 + 4000 + count)], '<u8')
    return [8 * place for place in np.flatnonzero(numbers).tolist() if place >= 16 + 4000]


@contextlib.contextmanager
def damaged_cache(source):
    """Yield the file of a cache of two values, its content and the places of their positions; then, both are read."""
    name = f'test-{uuid.uuid4().hex}'
    with granular.SharedMemoryCache(source, label, name=name, max_bytes=10_000) as cache:
        assert cache.fetch([1, 2]) == [1, 2]
        with open(cache_file(name), 'r+b') as opened:
            content = opened.read()
            yield opened, content, places_of(content, len(source))
        assert cache.fetch([1, 2]) == [1, 2]
        assert len(source.fetched) == 2


@pytest.mark.parametrize('position', [2, 9_990, 10_000, 2**31, 2**62, 2**64 - 1])
def test_value_at_a_damaged_position_is_read_from_its_source(source, position):
    with damaged_cache(source) as (opened, _, places):
        for place in places:
            opened.seek(place)
            opened.write(position.to_bytes(8, 'little'))


@pytest.mark.parametrize('damage', ['the position of another value', 'a length beyond the memory'])
def test_value_that_is_not_at_its_position_is_read_from_its_source(source, damage):
    with damaged_cache(source) as (opened, content, places):
        positions = [content[place : place + 8] for place in places]
        if damage == 'a length beyond the memory':
            start = len(content) - 10_000 - 1
            places = [start + int.from_bytes(position, 'little') for position in positions]
            positions = [(1 << 20).to_bytes(8, 'little')] * 2
        for place, changed in zip(places, reversed(positions), strict=True):
            opened.seek(place)
            opened.write(changed)


def test_value_that_was_written_in_part_is_not_kept():
    values = [bytes([i]) * 10_000 for i in range(8)]
    with granular.SharedMemoryCache(values, max_bytes=100_000) as cache:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, limits[1]))
        try:
            assert cache.fetch(range(8)) == values
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert 0 < cache.stats()['entries'] < 8
        assert cache.fetch(range(8)) == values


def test_copy_of_a_cache_that_is_gone_never_attaches_to_another_one():
    with granular.SharedMemoryCache([1, 2], max_bytes=1000) as gone:
        copy = pickle.dumps(gone)
    with contextlib.ExitStack() as others:
        for _ in range(3):  # of which one has the descriptor of the first
            others.enter_context(granular.SharedMemoryCache([3, 4], max_bytes=1000)).fetch([0, 1])
        with pytest.raises(NotFoundError, match='a cache ended with the process that created it'):
            pickle.loads(copy).fetch([0, 1])


def test_invalid_cache_file_is_replaced(source):
    name = f'test-{uuid.uuid4().hex}'
    with granular.SharedMemoryCache(source, name=name, max_bytes=10_000) as cache:
        cache.fetch([1, 2])
        with open(cache_file(name), 'rb') as opened:
            content = opened.read()
    damaged = [b'another!' + content[8:], content[:40] + b'\xff' * 16 + content[56:]]
    for broken in (b'', b'junk' * 100, content[:200], content[:-1], *damaged):
        with open(cache_file(name), 'xb') as opened:
            opened.write(broken)
        with granular.SharedMemoryCache(source, name=name, max_bytes=10_000) as cache:
            assert len(cache.fetch([1, 2])) == 2
            assert cache.stats()['hits'] == 0
    with open(cache_file(name), 'xb') as opened:
        fcntl.flock(opened, fcntl.LOCK_SH)  # as of a process with another release
        with pytest.raises(AlreadyExistsError, match=f'{name}: is in use: choose another name'):
            granular.SharedMemoryCache(source, name=name, max_bytes=10_000)
    os.unlink(cache_file(name))
