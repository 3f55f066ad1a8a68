"""A dataset that is replaced while it is opened or read: what is read is all of one dataset, or it is an error."""

import asyncio
import concurrent.futures
import email.utils
import hashlib
import os
import pickle
import time

import pytest

import granular
from granular.aio.path import Path
from granular.aio.snapshots import sharing
from granular.aio.stores.local import LocalStore
from granular.aio.stores.remote import RemoteStore
from granular.aio.stores.threaded import FsspecStore
from granular.errors import CorruptError, GranularError, NotFoundError, ObjectChangedError, UnsupportedError
from tests.faults import FaultServer

COUNT = 6
SHARDS = 2
STORES = ('local', 'moto', 'fakegcs', 'memory', 'http with ETags', 'http with Last-Modified')
KINDS = ('refs', 'columns', 'sharded refs', 'sharded columns')
MOMENTS = 40  # more than the requests of any opening


def point(name, index):
    return {key: f'{name} {key} {index}' for key in 'xy'}


def name_of(points):
    """The dataset that datapoints are of. All of them are there, in their order, or it is none."""
    return next((name for name in ('a', 'b') if points == [point(name, i) for i in range(COUNT)]), f'mixed: {points}')


@pytest.fixture(scope='module')
def contents(tmp_path_factory):
    """By kind and name the files of a dataset. Those of two names differ in nothing but the bytes of the records."""

    def make(kind, name):
        place = tmp_path_factory.mktemp('contents') / 'ds'
        spec, layout = dict.fromkeys('xy', 'utf8'), kind.rpartition(' ')[2]
        if kind.startswith('sharded'):
            writer = granular.ShardedDatasetWriter(
                place, spec, granular.encoders, shardlen=COUNT // SHARDS, layout=layout
            )
        else:
            writer = granular.DatasetWriter(place, spec, granular.encoders, layout=layout)
        with writer:
            for i in range(COUNT):
                writer.append(point(name, i))
        files = [path for path in sorted(place.rglob('*')) if path.is_file()]
        return {str(path.relative_to(place)): path.read_bytes() for path in files}

    return {(kind, name): make(kind, name) for kind in KINDS for name in ('a', 'b')}


class Server:
    """Files on a web server, replaced in place of a bucket's."""

    def __init__(self, server, place):
        self.server, self.place, self.clock = server, place, time.time() - 3600

    def put(self, name, data):
        self.clock += 10
        self.server.files = {**self.server.files, f'ds/{name}': data}
        self.server.modified[f'ds/{name}'] = email.utils.formatdate(self.clock, usegmt=True)

    def remove(self, name):
        self.server.files = {key: data for key, data in self.server.files.items() if key != f'ds/{name}'}


class Folder:
    """Files on a disk or in a bucket."""

    def __init__(self, place):
        self.place = place

    def put(self, name, data):
        (self.place / name).parent.mkdir(parents=True, exist_ok=True)
        (self.place / name).write_bytes(data)

    def remove(self, name):
        (self.place / name).unlink()


@pytest.fixture
def put(request, tmp_path, store):
    """A place of the store, and what writes and removes files there."""
    if store == 'local':
        yield Folder(granular.Path(tmp_path / 'ds'))
    elif store == 'memory':
        yield Folder(granular.Path(f'memory://{tmp_path.name}-{time.time_ns()}/ds'))
    elif store.startswith('http'):
        with FaultServer(files={}) as server:
            server.etag = None
            server.date = email.utils.formatdate(usegmt=True)
            if store == 'http with ETags':
                server.etag_of = lambda data: f'"{hashlib.md5(data).hexdigest()}"'
            yield Server(server, granular.Path(f'{server.endpoint}/b/ds'))
    else:
        yield Folder(request.getfixturevalue(store).place() / 'ds')


def fill(put, content):
    for name, data in content.items():
        put.put(name, data)


def steps(put, before, after):
    """The replacement of a dataset as this library does it: specs go first and come last."""
    specs = [name for name in before if name.endswith('spec.json')]
    bags = [name for name in after if not name.endswith('spec.json')]
    return [
        *((put.remove, name) for name in specs),
        *((put.put, name, after[name]) for name in bags),
        *((put.put, name, after[name]) for name in specs),
    ]


class Interruption:
    """Something that happens right before the n-th request of a store, and before those that follow.

    Requests go one after the other, so that it is the same each time.

    Args:
      begin: before which request it begins.
      steps: what happens.
      at_once: all of it at that time, or a step before each request.
    """

    def __init__(self, monkeypatch, begin, steps, at_once):
        self._begin, self._steps, self._at_once = begin, list(steps), at_once
        self.asked = 0
        self._lock = asyncio.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        for kind in (LocalStore, RemoteStore, FsspecStore):
            monkeypatch.setattr(kind, 'read', self._around(kind.read))
        monkeypatch.setattr(LocalStore, 'check_version', self._around(LocalStore.check_version))
        monkeypatch.setattr(granular.aio.sharded, 'shards_in', self._listing(granular.aio.sharded.shards_in))

    def _around(self, call):
        async def read(store, *args, **options):
            async with self._lock:
                self._happen()
                return await call(store, *args, **options)

        return read

    def _listing(self, call):
        async def scan(directory):
            async with self._lock:
                self._happen()
            return await call(directory)

        return scan

    def _happen(self):
        self.asked += 1
        while self._steps and self.asked > self._begin:
            fn, *args = self._steps.pop(0)
            self._pool.submit(fn, *args).result()  # not awaited, as who asks may be cancelled
            if not self._at_once:
                break


async def opened(kind, place, **options):
    reader = granular.aio.ShardedDatasetReader if kind.startswith('sharded') else granular.aio.DatasetReader
    return await reader.open(Path(place.aio), granular.decoders, **options)


def listed(server):
    """Let a web server list the folder of its dataset."""

    async def links(self, key):
        folder = key.partition('/')[2]
        found = {name.removeprefix(f'{folder}/').partition('/') for name in server.files if name.startswith(folder)}
        return [f'{self.address(key)}/{first}{slash}' for first, slash, _ in sorted(found)]

    return links


@pytest.fixture(autouse=True)
def listings(request, monkeypatch):
    if 'put' in request.fixturenames and isinstance(put := request.getfixturevalue('put'), Server):
        monkeypatch.setattr(granular.aio.stores.http.HTTPStore, '_links', listed(put.server))


@pytest.mark.parametrize('at_once', [True, False], ids=['at once', 'step by step'])
@pytest.mark.parametrize('options', [{}, {'cache_index': False}, {'cache_keys': ('x',)}], ids=str)
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('store', STORES)
def test_a_dataset_that_is_replaced_while_it_is_opened(store, put, contents, kind, options, at_once):
    before, after = contents[kind, 'a'], contents[kind, 'b']
    outcomes = []
    for moment in range(MOMENTS):
        fill(put, before)
        with pytest.MonkeyPatch.context() as patch:
            interruption = Interruption(patch, moment, steps(put, before, after), at_once)

            async def read():
                async with await opened(kind, put.place, **options) as reader:
                    return await reader.fetch(range(len(reader)))

            try:
                outcomes.append(name_of(asyncio.run(read())))
            except GranularError as error:
                outcomes.append(type(error).__name__)
        if interruption.asked <= moment:
            break  # it was not interrupted
    wrong = {moment: outcome for moment, outcome in enumerate(outcomes) if outcome.startswith('mixed')}
    assert not wrong
    assert outcomes[0] == 'b' or not at_once
    assert outcomes[-1] == 'a'
    # If all of it happens between two requests, it can be opened; what was opened before cannot be read any more.
    errors = {'ObjectChangedError'} if at_once else {'ObjectChangedError', 'NotFoundError', 'CorruptDatasetError'}
    assert set(outcomes) <= {'a', 'b', *errors}
