"""RedisCache against real Redis servers: misses, locks between readers, outages and expiry."""

import asyncio
import cmath
import dataclasses
import functools
import importlib
import logging
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid

import numpy as np
import pytest
import redis

import granular
from granular import aio
from granular.errors import ClosedError, InvalidArgumentError, OutOfRangeError
from tests.support.caches import label
from tests.support.servers import RedisServer, free_ports

PASSWORD = 'hush-hush-secret'


@pytest.fixture
def space():
    return f'test-{uuid.uuid4().hex[:8]}'


@pytest.fixture
def client(redis_server):
    with redis.Redis.from_url(redis_server.url) as opened:
        yield opened


def test_values_are_read_once_for_all_readers(source, redis_server, space, client):
    client.set('mine', 'untouched')
    with granular.RedisCache(source, redis_server.url, label, namespace=space) as cache:
        assert cache.fetch([3, 1, 3, -1]) == [3, 1, 3, 63]
        with granular.RedisCache(source, redis_server.url, label, namespace=space) as other:
            assert other.fetch([1, 2, 63]) == [1, 2, 63]
            assert other[2] == other.get(-62) == 2
            assert other.stats() == {
                'hits': 4, 'misses': 1, 'waited': 0, 'bypassed': 0, 'damaged': 0, 'not_kept': 0, 'errors': 0,
            }  # fmt: skip
        assert source.fetched == [[3, 1, 63], [2]]
        assert cache.__getitems__([1]) == cache._getitems([1]) == [1]
        assert cache.fetch([]) == []
        keys = sorted(key.decode() for key in client.keys(f'{space}:*'))  # without locks
        prefix = keys[0].rpartition(':')[0]
        assert keys == sorted(f'{prefix}:{i}' for i in (1, 2, 3, 63))
        assert client.get('mine') == b'untouched'
        with pytest.raises(OutOfRangeError):
            cache[64]
        assert sorted(granular.MapDataset.source(cache).shuffle(3)) == list(range(64))
    with pytest.raises(ClosedError):
        cache[1]
    until = time.monotonic() + 60
    while len(client.client_list()) > 1:  # except the key of the test
        assert time.monotonic() < until
        time.sleep(0.01)


def test_batch_is_one_command(source, redis_server, space, client):
    with granular.RedisCache(source, redis_server.url, label, namespace=space) as cache:
        cache.fetch(range(64))
        before = client.info('commandstats')
        cache.fetch(range(64))
        after = client.info('commandstats')
        calls = {name: after[name]['calls'] - before.get(name, {'calls': 0})['calls'] for name in after}
        assert {name: n for name, n in calls.items() if n and 'info' not in name} == {'cmdstat_mget': 1}


def test_fingerprint_separates_sources_and_transforms(tmp_path, redis_server, space, client):
    for name in ('a', 'b'):
        with granular.DatasetWriter(tmp_path / name, {'n': 'int'}, granular.encoders) as writer:
            for i in range(5):
                writer.append({'n': i if name == 'a' else -i})
    sources = []
    for name in ('a', 'b'):
        sources.append(granular.DatasetReader(tmp_path / name, granular.decoders))
    sources.append(granular.DatasetReader(tmp_path / 'a', None))
    sources.append(granular.MapDataset.source(sources[0]).shuffle(1))
    for source in sources:
        with granular.RedisCache(source, redis_server.url, namespace=space) as cache:
            for _ in range(2):
                assert cache.fetch(range(5)) == [source[i] for i in range(5)]
            assert cache.stats()['misses'] == cache.stats()['hits'] == 5
    assert len({key.split(b':')[1] for key in client.keys(f'{space}:*')}) == 4
    with granular.RedisCache(sources[0], redis_server.url, namespace=space) as cache:
        assert cache[1] == {'n': 1}
        assert cache.stats()['hits'] == 1  # created again from the same elements
    for reader in sources[:2]:
        with granular.RedisCache(reader, redis_server.url, namespace=space, fingerprint='digits-1') as cache:
            assert cache[1] == {'n': 1}
    assert client.exists(f'{space}:digits-1:1')
    for source in sources[:3]:
        source.close()


def test_fingerprint_separates_the_arguments_of_decoders(tmp_path, redis_server, space):
    with granular.DatasetWriter(tmp_path / 'ds', {'image': 'jpg'}, granular.encoders) as writer:
        writer.append({'image': np.zeros((64, 64, 3), np.uint8)})
    for side, expected in ((16, 16), (32, 32), (33, 64)):
        decode = functools.partial(granular.formats.decode_image, min_size=(side, side))
        with granular.DatasetReader(tmp_path / 'ds', {'jpg': decode}) as reader:
            with granular.RedisCache(reader, redis_server.url, namespace=space) as cache:
                assert cache[0]['image'].shape == (expected, expected, 3)


def masked_sum(array, value):
    return float(array.sum())


def add(number):
    return lambda value: value + number


class Add:
    def __init__(self, number):
        self.number = number

    def map(self, value):
        return value + self.number


class Numbers(granular.kappadata.KDDataset):
    def __init__(self, first):
        self.first = first

    def __len__(self):
        return 2

    def getitem_x(self, index, ctx=None):
        return self.first + index


class Scaled(int):
    factor = 1

    def __new__(cls, value):
        return int.__new__(int, value * cls.factor)


class Scale:
    factor = 1

    def map(self, value):
        return value * self.factor


def defined(code, name, **names):
    """Return what a program defines."""
    exec(code, names)
    return names[name]


def adding(number):
    class Adder:
        def add(self, value):
            return value + number

    return lambda value: Adder().add(value)


def looked_up(dataset):
    return lambda value: dataset[value]


NUMBERS = granular.MapDataset.range(5)


def added(number):
    """Numbers with another one added by a cache, which does not show that."""
    unpack = add(number) if number else None
    return granular.MapDataset.source(granular.SharedMemoryCache(NUMBERS, max_bytes=1 << 16, unpack=unpack))


@pytest.mark.parametrize(
    'make',
    [
        lambda i: NUMBERS.map(add(i)),
        lambda i: NUMBERS.map(Add(i)),
        lambda i: NUMBERS.map(functools.partial(max, i)),
        lambda i: NUMBERS.map(
            functools.partial(defined(f'def f(value, {"ab"[i]}, {"ba"[i]}): return a', 'f'), a=1, b=2)
        ),
        lambda i: NUMBERS.map(looked_up(granular.MapDataset.range(i, 9).map(str))),
        lambda i: NUMBERS.map(
            looked_up(granular.kappadata.ModeWrapper(granular.kappadata.KDConcatDataset([Numbers(i), Numbers(5)]), 'x'))
        ),
        lambda i: NUMBERS.map(type('Scale', (Scale,), {'factor': i})()),
        lambda i: NUMBERS.map(defined('def f(value): return (value, SIDE)', 'f', SIDE=i)),
        lambda i: NUMBERS.map(defined('def f(value): return [SIDES[1] for _ in range(2)]', 'f', SIDES=(5, i))),
        lambda i: NUMBERS.map(defined('def f(value): return MEAN[1]', 'f', MEAN=np.arange(i, i + 2))),
        lambda i: NUMBERS.map(functools.partial(masked_sum, np.ma.masked_array([1, 2], mask=[i, 0]))),
        lambda i: NUMBERS.map([lambda value: value, lambda value: value + 1][i]),
        lambda i: NUMBERS.map([{0: 0, 1: 1}, {0: 1, 1: 0}][i].get),
        lambda i: NUMBERS.map([math.sqrt, cmath.sqrt][i]).map(str),
        lambda i: NUMBERS.map(defined(f'class f(int):\n  def __new__(cls, value): return value + {i}', 'f')),
        lambda i: NUMBERS.map(type('Scaled', (Scaled,), {'factor': i})),
        lambda i: NUMBERS.map(adding(i)),
        lambda i: NUMBERS.filter(lambda value: value > i),
        lambda i: NUMBERS.batch(2, batch_fn=lambda values: values[i]),
        lambda i: NUMBERS.slice([i, 3]),
        lambda i: granular.MapDataset.select_from_datasets([NUMBERS, NUMBERS.map(add(1))], Choice(i)),
        lambda i: granular.kappadata.ModeWrapper(granular.kappadata.SubsetWrapper(Numbers(0), [i, 1]), 'x'),
        lambda i: granular.kappadata.ModeWrapper(Numbers(i), 'x'),
        lambda i: granular.kappadata.ModeWrapper(
            granular.kappadata.KDConcatDataset([Numbers(0), Numbers(5)], bool(i)), 'x'
        ),
        lambda i: granular.SharedMemoryCache(NUMBERS, add(i), max_bytes=1 << 16),
        lambda i: granular.MapDataset.zip([added(int(n == i)) for n in (0, 1)]),
    ],
)
def test_fingerprint_separates_functions_and_indices(make, redis_server, space):
    for i in (0, 1, 0):
        source = make(i)
        with granular.RedisCache(source, redis_server.url, namespace=space) as cache:
            assert cache.fetch([0, 1]) == [source[0], source[1]]
    assert cache.stats()['hits'] == 2  # the third one is the first one again


MODULE = """
import dataclasses, enum, functools, re, threading, types
import {helpers} as helpers
from {helpers} import scaled

lock, NUMBER, TABLE, LISTED, NAMES, PATTERN = threading.Lock(), {i}, {{'a': [{i}]}}, [{i}], {{{i}}}, re.compile('{i}')
SETTINGS = types.SimpleNamespace(number={i})

@dataclasses.dataclass
class Config:
    number: int = {i}

class Kind(enum.Enum):
    ONLY = {i}

CONFIG = Config()

class Base:
    TABLE = {{'a': {i}}}
    NUMBER = {i}

    def helper(self, value):
        return value + {i}

class Adder(Base):
    @classmethod
    def by_class(cls, value): return value + cls.NUMBER
    @staticmethod
    def static(value): return value + {i}
    @property
    def number(self): return {i}
    def __call__(self, value): return self.helper(value)
    def by_table(self, value): return value + self.TABLE['a']
    def by_property(self, value): return value + self.number
    def by_static(self, value): return self.static(value)

ADDER = Adder()

def helper(value): return value + NUMBER
def recursive(value, depth=2): return recursive(value, depth - 1) if depth else again(value)
def again(value): return helper(value) if value < 100 else recursive(value)

@functools.lru_cache
def cached(value): return helper(value)

def wrapped(fn):
    @functools.wraps(fn)
    def wrapper(value): return fn(value) + {i}
    return wrapper

def within(value):
    def inner(): return NUMBER
    return value + inner()

class Own:
    def add(self, value): return Adder().by_table(value)

def locked(value):
    with lock:
        return value + NUMBER

functions = {{
    'helper': lambda value: helper(value), 'helper of a helper': recursive, 'cached': lambda value: cached(value),
    'decorated': wrapped(abs), 'inner function': within, 'lock': locked,
    'dict': lambda value: value + TABLE['a'][0], 'list': lambda value: value + LISTED[0],
    'set': lambda value: value + max(NAMES), 'object': lambda value: value + SETTINGS.number,
    'dataclass': lambda value: value + Config().number, 'object of a dataclass': lambda value: value + CONFIG.number,
    'enum': lambda value: value + Kind.ONLY.value, 'pattern': lambda value: value + bool(PATTERN.match('1')),
    'classmethod': Adder.by_class, 'static method': Adder.static, 'other method': Adder(), 'bound': Adder().by_table,
    'property': Adder().by_property, 'class': lambda value: Own().add(value), 'base': lambda value: ADDER(value),
    'method by name': lambda value: Adder.by_static(ADDER, value),
    'partial': functools.partial(lambda fn, value: fn(value), helper),
    'other module': lambda value: helpers.scaled(value), 'function of another module': lambda value: scaled(value),
    'class of another module': lambda value: helpers.Scaler().scale(value),
    'value of another module': lambda value: value + helpers.NUMBER,
}}
"""

HELPERS = """
NUMBER = {i}
def scaled(value): return value + NUMBER
class Scaler:
    def scale(self, value): return scaled(value)
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Functions of two versions of a module of a user's, which reads another one."""
    monkeypatch.syspath_prepend(tmp_path)
    functions = []
    for i in (0, 1, 0):
        name = f'users_{uuid.uuid4().hex}'
        (tmp_path / f'helpers_{name}.py').write_text(HELPERS.format(i=i))
        helpers = importlib.import_module(f'helpers_{name}')
        sys.modules['helpers_of_users'] = helpers
        helpers.__name__ = 'helpers_of_users'
        (tmp_path / f'{name}.py').write_text(MODULE.format(i=i, helpers='helpers_of_users'))
        functions.append(importlib.import_module(name).functions)
    yield functions
    del sys.modules['helpers_of_users']


def test_fingerprint_separates_what_functions_read_by_global_names(modules, redis_server, space):
    for kind in modules[0]:
        for version, functions in zip((0, 1, 0), modules, strict=True):
            function = functions[kind]
            expected = [function(0), function(1)]
            with granular.RedisCache(NUMBERS.map(function), redis_server.url, namespace=space) as cache:
                assert cache.fetch([0, 1]) == expected, (kind, version)
        assert cache.stats()['hits'] == 2, kind  # the third one is the first one again


def test_fingerprint_of_functions_is_that_of_another_process(modules, redis_server, space, tmp_path):
    code = f"""
import sys, importlib, granular
sys.path.insert(0, {str(tmp_path)!r})
sys.modules['helpers_of_users'] = importlib.import_module(sys.argv[1])
functions = importlib.import_module(sys.argv[2]).functions
for function in functions.values():
    source = granular.MapDataset.range(5).map(function)
    with granular.RedisCache(source, {redis_server.url!r}, namespace={space!r}) as cache:
        cache.fetch([0, 1])
        print(cache.stats()['hits'])
"""
    (name,) = [path.stem for path in sorted(tmp_path.glob('users_*.py'))][:1]
    for seed in ('1', '2'):
        run = [sys.executable, '-c', code, f'helpers_{name}', name]
        env = {**os.environ, 'PYTHONHASHSEED': seed}
        done = subprocess.run(run, check=True, env=env, capture_output=True, text=True, timeout=120)
        hits = done.stdout.split()
    assert hits == ['2'] * len(modules[0]), done.stderr


class Choice:
    def __init__(self, owner):
        self.owner = owner

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return self.owner, index


def test_function_that_counts_its_calls_keeps_its_fingerprint(redis_server, space):
    count = defined('def count(value):\n  global calls\n  calls += 1\n  return calls', 'count', calls=0)
    for _ in range(2):
        with granular.RedisCache(NUMBERS.map(count), redis_server.url, namespace=space) as cache:
            assert cache.fetch([0, 1]) == [1, 2]


def test_fingerprint_separates_versions_behind_other_sources(tmp_path, redis_server, space):
    for number in (1, 2):
        root = tmp_path / 'ds'
        shutil.rmtree(root, ignore_errors=True)
        with granular.DatasetWriter(root, {'x': 'array'}, granular.encoders) as writer:
            writer.append({'x': np.full(4, number)})
        with granular.DatasetReader(root, granular.decoders) as reader:
            windows = granular.Windows(reader, {'x': 2}, 2)
            with granular.SharedMemoryCache(reader, max_bytes=1 << 16) as inner:
                for source in (windows, inner):
                    with granular.RedisCache(source, redis_server.url, namespace=space) as cache:
                        assert cache[0]['x'][0] == number


@pytest.mark.parametrize(
    ('write', 'read'),
    [
        (granular.DatasetWriter, granular.DatasetReader),
        (granular.ShardedDatasetWriter, granular.ShardedDatasetReader),
        (functools.partial(granular.ShardedDatasetWriter, index=True), granular.ShardedDatasetReader),
    ],
    ids=['dataset', 'shards', 'index'],
)
def test_fingerprint_separates_the_same_bytes_divided_into_other_records(moto, redis_server, space, write, read):
    """S3 gives the same bytes the same version."""
    folder = moto.place() / 'ds'
    for texts in (['ab', 'c'], ['a', 'bc']):
        with write(folder, {'text': 'utf8'}, layout='columns') as writer:
            for text in texts:
                writer.append({'text': text})
        with read(folder) as reader, granular.RedisCache(reader, redis_server.url, namespace=space) as cache:
            assert [datapoint['text'] for datapoint in cache.fetch([0, 1])] == texts
        folder.rmtree()


def test_fingerprint_separates_tables_that_are_passed(tmp_path, redis_server, space):
    (tmp_path / 'x.bag').write_bytes(b'abc')
    for ends, records in (([2, 3], [b'ab', b'c']), ([1, 3], [b'a', b'bc'])):
        reader = granular.BagReader(tmp_path / 'x.bag', index=np.array(ends, '<u8').tobytes())
        with granular.RedisCache(reader, redis_server.url, namespace=space) as cache:
            assert cache.fetch([0, 1]) == records


def test_function_without_an_identity_needs_a_fingerprint(redis_server, space):
    lock = threading.Lock()
    source = NUMBERS.map(lambda value: (lock, value)[1])
    with pytest.raises(InvalidArgumentError, match="cannot pickle '_thread.lock' object: pass fingerprint="):
        granular.RedisCache(source, redis_server.url, namespace=space)[0]
    with granular.RedisCache(source, redis_server.url, namespace=space, fingerprint='numbers') as cache:
        assert cache[1] == 1


def test_foreign_and_damaged_values_are_misses(source, redis_server, space, client):
    with granular.RedisCache(source, redis_server.url, label, namespace=space, fingerprint='x') as cache:
        cache.fetch(range(8))
        good = client.get(f'{space}:x:0')
        client.set(f'{space}:x:1', b'foreign')
        client.set(f'{space}:x:2', good[:-1])
        client.set(f'{space}:x:3', good[:40] + bytes([good[40] ^ 1]) + good[41:])
        client.set(f'{space}:x:4', good)  # of another index
        client.delete(f'{space}:x:5', f'{space}:x:6')
        client.lpush(f'{space}:x:5', 'a list')
        client.set(f'{space}:x:6', b'')
        assert cache.fetch(range(8)) == list(range(8))
        assert cache.stats()['damaged'] == 5
        assert source.fetched == [list(range(8)), [1, 2, 3, 4, 5, 6]]
        assert cache.fetch(range(8)) == list(range(8))
        assert len(source.fetched) == 2


def test_concurrent_misses_read_a_value_once(source, redis_server, space):
    source.delay = 0.2
    batches = []

    def read():
        with granular.RedisCache(source, redis_server.url, label, namespace=space) as cache:
            batches.append(cache.fetch(range(10)))
            stats.append(cache.stats())

    stats = []
    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert batches == [list(range(10))] * 6
    assert source.fetched == [list(range(10))]
    assert sum(entry['misses'] for entry in stats) == 10
    assert sum(entry['waited'] + entry['hits'] for entry in stats) == 50


def hang(source, url, space):
    source.delay = 60
    granular.RedisCache(source, url, namespace=space, wait=60).fetch([1, 2])


def test_killed_reader_is_awaited_no_longer_than_configured(source, redis_server, space, client):
    process = multiprocessing.get_context('fork').Process(target=hang, args=(source, redis_server.url, space))
    process.start()
    while not client.keys(f'{space}:*:lock'):
        time.sleep(0.01)
    process.kill()
    process.join()
    process.close()
    with granular.RedisCache(source, redis_server.url, label, namespace=space, wait=0.2) as cache:
        start = time.monotonic()
        assert cache.fetch([1, 2, 3]) == [1, 2, 3]
        assert time.monotonic() - start > 0.2
        assert client.keys(f'{space}:*:lock')  # which would have expired
        assert cache.stats()['misses'] == 3


def test_failed_read_releases_its_locks(redis_server, space, client):
    def fail(index):
        raise ValueError('no')

    with granular.RedisCache(granular.MapDataset.range(9).map(fail), redis_server.url, namespace=space) as cache:
        with pytest.raises(ValueError, match='no'):
            cache.fetch([1, 2])
        assert client.keys(f'{space}:*') == []


def test_cache_survives_a_server_restart(source, caplog):
    with RedisServer() as server:
        with granular.RedisCache(source, server.url, label, retry=0.3) as cache:
            cache.fetch(range(8))
            server.kill()
            with caplog.at_level(logging.WARNING, 'granular'):
                for _ in range(3):
                    assert cache.fetch(range(8)) == list(range(8))
            assert len(caplog.records) == 1
            assert 'Redis cache bypassed for' in caplog.text
            assert cache.stats()['bypassed'] == 24
            assert cache.stats()['errors'] == 1
            server.start()
            while cache.stats()['misses'] < 16:  # the server is tried again after a time
                assert cache.fetch(range(8)) == list(range(8))
            assert cache.fetch(range(8)) == list(range(8))
            assert cache.stats()['hits'] == 8
            assert cache.stats()['misses'] == 16


def test_slow_server_costs_one_timeout(source):
    with RedisServer() as server:
        with granular.RedisCache(source, server.url, label, timeout=0.2) as cache:
            cache.fetch(range(8))
            os.kill(server.process.pid, signal.SIGSTOP)
            start = time.monotonic()
            for _ in range(3):
                assert cache.fetch(range(8)) == list(range(8))
            assert time.monotonic() - start >= 0.2
            assert cache.stats()['errors'] == 1  # the other fetches do not ask
            assert cache.stats()['bypassed'] == 24


def test_unreachable_or_full_server_is_bypassed(source):
    with granular.RedisCache(source, f'redis://127.0.0.1:{free_ports(1)[0]}', label) as cache:
        assert cache.fetch(range(8)) == list(range(8))
        assert cache.stats()['bypassed'] == 8
    with RedisServer(maxmemory='1', **{'maxmemory-policy': 'noeviction'}) as server:
        with granular.RedisCache(source, server.url, label) as cache:
            assert cache.fetch(range(8)) == list(range(8))
            assert cache.fetch(range(8)) == list(range(8))
            assert cache.stats()['not_kept'] == 16


async def test_async_api(source, redis_server, space):
    async with aio.RedisCache(source, redis_server.url, label, namespace=space) as cache:
        assert await cache.fetch(range(64)) == list(range(64))
        assert await cache.get(5) == 5
        assert await asyncio.gather(*(cache.fetch([i, i + 1]) for i in range(20))) == [[i, i + 1] for i in range(20)]
        assert len(source.fetched) == 1


def test_password_is_redacted(source, monkeypatch, caplog, space):
    with RedisServer(PASSWORD) as server:
        with granular.RedisCache(source, server.url, label, namespace=space) as cache:
            cache.fetch(range(8))
            data = pickle.dumps(cache)
            assert PASSWORD.encode() not in data
            assert PASSWORD not in repr(cache)
            plain = pickle.loads(data)
            assert plain.fetch(range(8)) == list(range(8))
            assert plain.stats()['bypassed'] == 8  # the password was rejected
            assert 'AuthenticationError' in caplog.text
            monkeypatch.setenv('GRANULAR_REDIS_URL', server.url)
            for twin in (
                pickle.loads(data),
                pickle.loads(pickle.dumps(plain)),
                granular.RedisCache(source, None, label),
            ):
                assert PASSWORD not in repr(twin)
            twin = pickle.loads(data)
            assert len(twin) == 64
            assert twin.fetch(range(8)) == list(range(8))
            assert twin.stats()['hits'] == 8
            monkeypatch.setenv('GRANULAR_REDIS_URL', f'redis://:{PASSWORD}@elsewhere:1/0')
            assert pickle.loads(data).url == cache.url == f'redis://127.0.0.1:{server.port}/0'
    assert PASSWORD not in caplog.text


def test_worker_processes_share_the_cache(source, redis_server, space):
    with granular.RedisCache(source, redis_server.url, namespace=space) as cache:
        datapoints = granular.sources.Epochs(cache, shuffle=False)
        for _ in range(2):
            with granular.Loader(datapoints, 8, workers=2, prefetch=2, mp='fork') as loader:
                assert np.concatenate([next(loader)['label'] for _ in range(8)]).tolist() == list(range(64))
        indices = [i for line in source.fetched for i in line]
        assert sorted(indices) == list(range(64))


def test_values_expire(source, redis_server, space, client):
    with granular.RedisCache(source, redis_server.url, label, namespace=space, expire=0.05) as cache:
        cache.fetch([1])
        while client.keys(f'{space}:*'):
            time.sleep(0.01)
        assert cache.fetch([1]) == [1]
        assert cache.stats()['misses'] == 2


@pytest.mark.parametrize(
    'options',
    [{'url': 'http://host'}, {'url': 'redis://host:port'}, {'namespace': 'a b'}, {'namespace': ''},
     {'fingerprint': 'a*'}, {'timeout': 0}, {'wait': -1}, {'expire': 0}, {'url': 3}, {'namespace': 3},
     {'fingerprint': b'a'}, {'timeout': '2'}, {'timeout': math.inf}, {'wait': math.nan}, {'wait': math.inf},
     {'expire': math.inf}, {'retry': None}],
)  # fmt: skip
def test_argument_validation(options):
    with pytest.raises(InvalidArgumentError):
        granular.RedisCache([1], **options)


class Odd:
    """A source with the default repr."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return index


class Rounded(Odd):
    """An array with the text of many others."""

    def __repr__(self):
        return '[0.1235, 0.5679]'

    def __array__(self):
        return np.array([0.123456, 0.567891])


@dataclasses.dataclass
class Held(Odd):
    """A source with an array, of which the text has no middle."""

    values: object


SOURCES = [[1, 2], np.zeros(3), Odd(), Rounded(), Held(np.arange(2000)), granular.MapDataset.source(Odd()).shuffle(1)]


@pytest.mark.parametrize('source', SOURCES)
def test_source_without_identity_needs_a_fingerprint(source, redis_server, space):
    with pytest.raises(InvalidArgumentError, match='pass fingerprint='):
        granular.RedisCache(source, redis_server.url, namespace=space)
    with granular.RedisCache(source, redis_server.url, namespace=space, fingerprint='mine') as cache:
        assert cache[1] == source[1]


def test_missing_redis_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'redis.asyncio', None)
    with pytest.raises(granular.errors.MissingExtraError, match=r'pip install .*\[redis\]'):
        granular.RedisCache(range(3))
