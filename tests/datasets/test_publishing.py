"""Publishing of datasets: by one of several writers, verified, and never a spec over missing bags."""

import asyncio
import dataclasses
import gc
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import granular
from granular import aio
from granular.errors import AlreadyExistsError, GranularError, InvalidArgumentError, StoreError
from tests.datasets.test_writers import SPEC, fill, point
from tests.support.write_faults import WriteProxy

CONFIG = granular.IOConfig(backoff=0.001, backoff_cap=0.02, attempts=3)
LAYOUTS = ('refs', 'columns')


def read(folder, sharded=False):
    with (granular.ShardedDatasetReader if sharded else granular.DatasetReader)(folder, granular.decoders) as reader:
        return list(reader)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file())


# --- one writer at a time


@pytest.fixture(params=['local', 'seaweed', 'fakegcs'])
def shards(request, tmp_path):
    if request.param == 'local':
        return granular.Path(tmp_path)
    return request.getfixturevalue(request.param).place()


def shard_writer(folder, **kwargs):
    return granular.ShardedDatasetWriter(folder, SPEC, granular.encoders, kwargs.pop('shardlen', 2), **kwargs)


@pytest.mark.parametrize('layout', LAYOUTS)
def test_one_of_two_racing_shard_writers_writes_every_shard(shards, layout):
    for number in range(4):
        folder, met, done, refused = shards / str(number), threading.Barrier(2), [], []

        def race(first, folder=folder, met=met, done=done, refused=refused):
            writer = None
            try:
                met.wait()
                try:
                    writer = shard_writer(folder, layout=layout)
                finally:
                    met.wait()  # so that neither has ended before the other one begins
                with writer:
                    fill(writer, 6, first)
                done.append(first)
            except AlreadyExistsError as error:
                refused.append(error)

        threads = [threading.Thread(target=race, args=(first,)) for first in (0, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(done), len(refused)) == (1, 1)
        assert read(folder, sharded=True) == [point(i) for i in range(done[0], done[0] + 6)]


def test_writers_of_disjoint_shards_work_concurrently(shards):
    writers = [shard_writer(shards / 'ds', shardstart=i, shardstep=3) for i in range(3)]
    for step in range(2):
        for number, writer in enumerate(writers):
            fill(writer, 2, 2 * (number + 3 * step))
    for writer in writers:
        writer.close()
    assert read(shards / 'ds', sharded=True) == [point(i) for i in range(12)]
    assert not [name for name in names(shards / 'ds') if name.startswith('.')]


@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_overlapping_shard_series_are_refused(request, store):
    folder = request.getfixturevalue(store).place() / 'ds'
    with shard_writer(folder, shardstart=1, shardstep=2):
        for start, step in ((1, 2), (0, 1), (0, 3), (1, 4)):
            with pytest.raises(AlreadyExistsError, match=f'{os.getpid()}.*discard'):
                shard_writer(folder, shardstart=start, shardstep=step)
        shard_writer(folder, shardstart=0, shardstep=4).close()
    shard_writer(folder).close()
    assert not folder.exists()


@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_superseded_shard_writer_publishes_no_more(request, store):
    folder = request.getfixturevalue(store).place() / 'ds'
    first = shard_writer(folder)
    fill(first, 3, 100)
    with shard_writer(folder, resume='discard') as second:
        assert second.found == 2
        with pytest.raises(AlreadyExistsError, match='took over'):
            fill(first, 1, 103)
        fill(second, 2, 102)
    with pytest.raises(GranularError):
        first.close()
    assert read(folder, sharded=True) == [point(i) for i in range(100, 104)]
    assert len(names(folder)) == 14


@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_claims_of_dead_writers_expire(request, store):
    """A dead writer on this machine is detected; the claim of one elsewhere is released by the caller or by `clean`."""
    server = request.getfixturevalue(store)
    folder = server.place() / 'ds'
    program = f"""
import os, granular
place = granular.Path({str(folder)!r}, **{server.options!r})
writer = granular.ShardedDatasetWriter(place, {SPEC!r}, granular.encoders, 2)
for i in range(3):
    writer.append({{'x': b'', 'n': i}})
os._exit(0)
"""
    subprocess.run([sys.executable, '-c', program], check=True)
    [claim] = [name for name in names(folder) if name.startswith('.')]
    with shard_writer(folder) as writer:
        assert writer.found == 2
    dropped = shard_writer(folder)
    del dropped
    gc.collect()
    shard_writer(folder).close()

    (folder / claim).write_text(json.dumps({'token': 'x', 'system': 'elsewhere', 'host': 'elsewhere', 'pid': 7}))
    with pytest.raises(AlreadyExistsError, match=r"process 7 on 'elsewhere'.*discard"):
        shard_writer(folder)
    assert granular.clean(folder) == []
    assert [(left.kind, left.size > 0) for left in granular.clean(folder, older=0, remove=True)] == [('claim', True)]
    shard_writer(folder).close()
    (folder / claim).write_text('not JSON')
    with pytest.raises(AlreadyExistsError):
        shard_writer(folder)
    with shard_writer(folder, resume='discard') as writer:
        fill(writer, 2, 2)
    assert len(read(folder, sharded=True)) == 4
    assert not [name for name in names(folder) if name.startswith('.')]


@pytest.mark.parametrize('kind', ['writer', 'writer that failed to open', 'conversion'])
def test_claim_is_renewed_while_its_writer_waits(moto, monkeypatch, kind):
    """The claim protects from `granular clean`, such as the first shard of a conversion, published last."""
    monkeypatch.setattr('granular.aio.paths.claims.RENEWED', 0.01)  # instead of five minutes
    folder = moto.place() / 'ds'

    def writes():
        return sum(method == 'PUT' and '.writer.' in path for method, path in proxy.calls)

    async def wait():
        before = writes()
        while writes() < before + 3:
            await asyncio.sleep(0.01)

    async def source():
        yield {'n': 1}
        await wait()

    async def write(root):
        if kind == 'conversion':
            await aio.convert(source(), root, shardlen=1, sample=1)
            return
        writer = aio.ShardedDatasetWriter(root, {'n': 'int'}, granular.encoders, shardlen=1)
        if kind != 'writer':
            (folder / 'spec.json').write_text('{}')
            with pytest.raises(AlreadyExistsError, match='without shards'):
                await writer.flush()
            (folder / 'spec.json').unlink()
        async with writer:
            await wait()
            await writer.append({'n': 1})

    with WriteProxy(moto) as proxy:
        asyncio.run(write(proxy.place(folder).aio))
        count = writes()
    assert count > 3
    assert not [name for name in names(folder) if name.startswith('.')]
    assert read(folder, True) == [{'n': 1}]


@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_second_of_two_conversions_is_refused(request, store):
    folder = request.getfixturevalue(store).place() / 'ds'
    reached, go_on = threading.Event(), threading.Event()

    def records():
        for i in range(6):
            if i == 3:
                reached.set()
                go_on.wait()
            yield {'n': i}

    errors = []

    def convert():
        try:
            granular.convert(records(), folder, shardlen=2, sample=1)
        except GranularError as error:
            errors.append(error)

    thread = threading.Thread(target=convert)
    thread.start()
    try:
        assert reached.wait(30)
        with pytest.raises(AlreadyExistsError, match='another writer is writing it: process .*: wait'):
            granular.convert([{'n': 7}], folder, shardlen=2)
    finally:
        go_on.set()
        thread.join()
    assert errors == []
    assert [point['n'] for point in read(folder, sharded=True)] == list(range(6))
    assert [name for name in names(folder) if '/.' in f'/{name}'] == ['000000/.granular-conversion']


# --- concurrent appends


@pytest.mark.parametrize('kind', [*LAYOUTS, 'shards'])
async def test_concurrent_appends_are_written_once_in_order(root, kind):
    if kind == 'shards':
        writer = await aio.ShardedDatasetWriter.open(root / 'ds', SPEC, granular.encoders, 30)
    else:
        writer = await aio.DatasetWriter.open(root / 'ds', SPEC, granular.encoders, kind)
    async with writer:
        assert await asyncio.gather(*(writer.append(point(i)) for i in range(80))) == list(range(80))
        points = point(80), {'x': b'', 'n': 'no number'}, point(81)
        refused = asyncio.gather(*map(writer.append, points), return_exceptions=True)
        assert [isinstance(result, GranularError) for result in await refused] == [False, True, False]
        tasks = [asyncio.create_task(writer.append(point(i))) for i in range(82, 90)]
        for task in tasks[3:5]:  # two that have not begun give up
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    reader = aio.ShardedDatasetReader if kind == 'shards' else aio.DatasetReader
    async with reader(root / 'ds', granular.decoders) as dataset:
        assert [element async for element in dataset] == [point(i) for i in range(90) if i not in (85, 86)]


@pytest.mark.parametrize('kind', [*LAYOUTS, 'shards', 'bag'])
def test_threads_append_to_one_writer(root, kind):
    if kind == 'bag':
        writer = granular.BagWriter(root / 'a.bag')
    elif kind == 'shards':
        writer = shard_writer(root / 'ds', shardlen=40)
    else:
        writer = granular.DatasetWriter(root / 'ds', SPEC, granular.encoders, kind)
    errors = []

    def work(first):
        try:
            for i in range(first, first + 25):
                writer.append(f'{i}'.encode() if kind == 'bag' else point(i))
        except Exception as error:
            errors.append(error)

    with writer:
        threads = [threading.Thread(target=work, args=(25 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    if kind == 'bag':
        with granular.BagReader(root / 'a.bag') as reader:
            assert sorted(map(int, reader)) == list(range(100))
    else:
        assert sorted(read(root / 'ds', kind == 'shards'), key=lambda value: value['n']) == [
            point(i) for i in range(100)
        ]


# --- verification before publication


class DroppingFile:
    """A file that loses the last byte written to a bag."""

    def __init__(self, file):
        self._file = file

    def __getattr__(self, name):
        return getattr(self._file, name)

    def close(self):
        if not self._file.closed and self._file.tell():
            self._file.truncate(self._file.tell() - 1)
        self._file.close()


class DroppingFileSystem(MemoryFileSystem):
    protocol = 'dropping'
    store = {}
    pseudo_dirs = ['']

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace('dropping://', 'memory://'))

    def _open(self, path, mode='rb', **kwargs):
        file = super()._open(path, mode, **kwargs)
        return DroppingFile(file) if mode == 'wb' and path.endswith('x.bag') else file


class DroppingPath(type(pathlib.Path())):
    """A path object of another library, on a disk that loses bytes."""

    __fspath__ = None

    def open(self, mode='r', *args, **kwargs):
        file = open(str(self), mode, *args, **kwargs)  # noqa: SIM115
        return DroppingFile(file) if mode == 'wb' and self.name == 'x.bag' else file


@pytest.mark.parametrize('layout', LAYOUTS)
def test_truncated_bag_is_not_published(layout):
    fsspec.register_implementation('dropping', DroppingFileSystem, clobber=True)
    folder = granular.Path(f'dropping://{layout}')
    with pytest.raises(StoreError, match=r'x\.bag: expected \d+ bytes after writing, got \d+'):
        with granular.DatasetWriter(folder, SPEC, granular.encoders, layout) as writer:
            fill(writer, 3)
    assert not (folder / 'spec.json').exists()
    assert not (folder / 'n.bag').exists()
    with pytest.raises(StoreError, match=r'x\.bag: expected \d+ bytes after writing, got \d+'):
        with granular.BagWriter(folder / 'x.bag') as writer:
            writer.append(b'123')
    with pytest.raises(StoreError, match=r'x\.bag: expected 3 bytes after writing, got 2'):
        (folder / 'x.bag').write_bytes(b'123')
    assert not (folder / 'x.bag').exists()


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_bags_removed_during_close_are_not_published(request, store, layout):
    """Another writer is told that this one is dead, and discards the bags that it has published."""
    server = request.getfixturevalue(store)
    direct, looks = server.place() / 'ds', []
    before = 2 if store == 'seaweed' else 1  # the look by which it is verified: a writer of S3 confirms its upload

    def remove_before_it_is_verified(call):
        if call.method in ('GET', 'HEAD') and call.path.endswith('/x.bag') and (direct / 'x.bag').exists():
            looks.append(call)
            if len(looks) == before:
                (direct / 'x.bag').unlink()
        return ''

    with WriteProxy(server) as proxy:  # a server of which nothing is known from other tests
        proxy.plan = remove_before_it_is_verified
        folder = proxy.place(direct, CONFIG)
        with pytest.raises(StoreError, match=r'x\.bag: \d+ bytes were written, but there is no such file'):
            with granular.DatasetWriter(folder, SPEC, granular.encoders, layout) as writer:
                fill(writer, 3)
        assert len(looks) == before
        assert not folder.exists()


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_ambiguous_spec_write_keeps_its_bags(request, store, layout):
    """The reply to the last request is lost and reads fail: the dataset is complete once they work again."""
    server = request.getfixturevalue(store)
    folder = server.place() / 'ds'
    with WriteProxy(server) as proxy:
        config = dataclasses.replace(CONFIG, retry_time=0.5)
        writer = granular.DatasetWriter(proxy.place(folder, config), SPEC, granular.encoders, layout)
        fill(writer, 3)
        proxy.arm('lost', 6, down=True)
        with pytest.raises(StoreError, match=r'spec\.json: not known to be published.*bags were left.*discard'):
            writer.close()
    assert read(folder) == [point(i) for i in range(3)]


@pytest.mark.parametrize('fault', ['hang', 'after hang'])
@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_cancelled_writer_leaves_no_spec_over_missing_bags(request, store, fault):
    server = request.getfixturevalue(store)

    async def close(folder, proxy, step):
        writer = await aio.DatasetWriter.open(folder, SPEC, granular.encoders)
        for i in range(3):
            await writer.append(point(i))
        proxy.arm(fault, step)
        closing = asyncio.create_task(writer.aclose())
        while not proxy.done and not closing.done():
            await asyncio.wait([closing], timeout=0.01)
        if proxy.done:
            closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)

    with WriteProxy(server) as proxy:
        for step in range(9):
            folder = server.place() / 'ds'
            asyncio.run(close(proxy.place(folder, CONFIG), proxy, step))
            if not (folder / 'spec.json').exists():
                with granular.DatasetWriter(folder, SPEC, granular.encoders, resume='discard') as writer:
                    fill(writer, 3)
            assert read(folder) == [point(i) for i in range(3)]
            if not proxy.done:
                break
        assert step == 7


@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_late_write_of_a_cancelled_writer_changes_nothing(request, store):
    """The store carries out a write of a cancelled writer after another one has written the dataset anew."""
    server = request.getfixturevalue(store)
    points = [point(i) for i in range(5, 8)]

    async def close(folder, proxy, step):
        writer = await aio.DatasetWriter.open(folder, SPEC, granular.encoders)
        for i in range(3):
            await writer.append(point(i))
        proxy.arm('late', step)
        closing = asyncio.create_task(writer.aclose())
        while not proxy.done and not closing.done():
            await asyncio.wait([closing], timeout=0.01)
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)

    for step in range(9):
        with WriteProxy(server) as proxy:
            folder = server.place() / 'ds'
            asyncio.run(close(proxy.place(folder, CONFIG), proxy, step))
            if not proxy.done:
                break
            with granular.DatasetWriter(folder, SPEC, granular.encoders, resume='discard') as writer:
                for written in points:
                    writer.append(written)
            proxy.carry_out()
            with granular.DatasetReader(folder, granular.decoders, verify=True) as reader:
                assert list(reader) == points
            assert not granular.verify(folder).problems
    assert step == 7


@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_spec_of_another_writer_keeps_its_bags(request, store):
    """Two writers of different keys in one folder, both of which have published their bags."""
    server = request.getfixturevalue(store)
    with WriteProxy(server) as proxy:  # a server of which nothing is known from other tests
        folder = proxy.place(server.place() / 'ds', CONFIG)
        first = granular.DatasetWriter(folder, {'a': 'bytes'}, granular.encoders, 'columns')
        second = granular.DatasetWriter(folder, {'b': 'bytes'}, granular.encoders, 'refs')
        first.append({'a': b'1'})
        second.append({'b': b'2'})
        first.close()
        with pytest.raises(AlreadyExistsError, match=r"spec\.json: another writer.*'a'"):
            second.close()
        assert names(folder) == ['a.bag', 'a.crc', 'a.idx', 'spec.json']
        assert read(folder) == [{'a': b'1'}]


# --- disks


def test_new_names_are_synced_to_disk(tmp_path, monkeypatch):
    """Only a power cut would show what is synced, so the calls of fsync are recorded."""
    synced = set()
    fsync = os.fsync

    def noting(fd):
        synced.add(os.readlink(f'/proc/self/fd/{fd}'))
        fsync(fd)

    monkeypatch.setattr(os, 'fsync', noting)
    for kind, write in {
        'refs': lambda folder: granular.DatasetWriter(folder, SPEC, granular.encoders, 'refs'),
        'columns': lambda folder: granular.DatasetWriter(folder, SPEC, granular.encoders, 'columns'),
        'shards': shard_writer,
    }.items():
        synced.clear()
        with write(tmp_path / kind / 'new' / 'ds') as writer:
            fill(writer, 3)
        folders = [path for path in (tmp_path / kind).rglob('*') if path.is_dir()]
        assert synced >= {str(path.parent) for path in [tmp_path / kind, *folders]}
        assert synced >= {str(path.parent) for path in (tmp_path / kind).rglob('*.bag')}
    (tmp_path / 'bags').mkdir()
    synced.clear()
    with granular.BagWriter(tmp_path / 'bags' / 'a.bag', 3) as bag:
        bag.append(b'x')
    assert str(tmp_path / 'bags') in synced


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('after', [False, True])
@pytest.mark.parametrize('call', ['fsync', 'link', 'unlink'])
def test_disk_failure_at_any_call_leaves_a_complete_dataset_or_none(tmp_path, monkeypatch, layout, call, after):
    real, calls = getattr(os, call), [0, -1]

    def failing(*args, **kwargs):
        number, calls[0] = calls[0], calls[0] + 1
        if after:
            real(*args, **kwargs)
        if number == calls[1]:
            raise OSError(5, 'Input/output error')
        if not after:
            real(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)
    for step in range(100):
        folder = tmp_path / str(step)
        calls[:], failed = [0, step], None
        try:
            with granular.DatasetWriter(folder, SPEC, granular.encoders, layout) as writer:
                fill(writer, 3)
        except StoreError as error:
            failed = error
        used = calls[0] > step
        calls[1] = -1
        if failed is not None and not (folder / 'spec.json').exists():
            with granular.DatasetWriter(folder, SPEC, granular.encoders, layout) as writer:
                fill(writer, 3 - writer.found, writer.found)
        assert read(folder) == [point(i) for i in range(3)]
        if not used:
            break
    assert step >= (1 if call == 'unlink' or layout == 'columns' else 3)


# --- clocks


@pytest.mark.parametrize('store', ['local', 'seaweed', 'fakegcs'])
def test_clean_uses_the_clock_of_the_store(request, store, tmp_path, monkeypatch):
    """A machine whose clock is two hours ahead keeps files that were just written."""
    folder = granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).place()
    with shard_writer(folder / 'ds') as writer:
        fill(writer, 4)
    (folder / 'ds' / '000001' / 'spec.json').unlink()
    clock = time.time
    monkeypatch.setattr(time, 'time', lambda: clock() + 7200)
    assert granular.clean(folder, remove=True) == []
    left = granular.clean(folder, older=0)
    assert len(left) == 6
    assert all(0 <= leftover.age < 600 for leftover in left)


# --- home folders


def test_tilde_is_expanded_wherever_a_path_is_accepted(tmp_path, monkeypatch, granular_cli, fakegcs):
    home = tmp_path / 'home'
    home.mkdir()
    monkeypatch.setenv('HOME', str(home))
    monkeypatch.chdir(tmp_path)
    with granular.DatasetWriter('~/ds', SPEC, granular.encoders) as writer:
        fill(writer, 3)
    with shard_writer(pathlib.Path('~/shards')) as writer:
        fill(writer, 3)
    with granular.BagWriter('file://~/a.bag') as bag:
        bag.append(b'x')
    assert read('~/ds') == [point(i) for i in range(3)]
    assert granular.copy_to_local('~/ds', '~/copy').path == str(home / 'copy')
    granular.Path('~/ds').copy('~/copied')
    granular.convert([{'x': 1}], '~/converted')
    assert granular_cli('copy', '~/ds', '~/cli')[0] == 0
    assert granular_cli('info', '~/cli')[0] == 0
    assert granular.verify('~/ds').problems == []
    assert granular.clean('~/ds') == []
    bucket = fakegcs.place()
    granular.Path('~/ds').copy(bucket)
    config = granular.IOConfig(index_cache='~/index', cache_dir='~/cache')
    read(granular.Path(str(bucket), config=config, **fakegcs.options))
    assert granular_cli('cache', '~/cache')[0] == 0
    expected = ['a.bag', 'a.crc', 'cache', 'cli', 'converted', 'copied', 'copy', 'ds', 'index', 'shards']
    assert sorted(os.listdir(home)) == expected
    assert os.listdir(tmp_path) == ['home']
    assert str(granular.Path('~')) == str(home)
    user = os.path.expanduser('~root')
    assert str(granular.Path('~root/x')) == f'{user}/x'
    with pytest.raises(InvalidArgumentError, match=r'no home folder ~no-such-user.*\./~no-such-user'):
        granular.Path('~no-such-user/x')
    assert granular.Path('s3://b/~/x', anon=True).key == '~/x'


def test_names_beginning_with_a_tilde_are_unchanged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    granular.Path('./~').mkdir()
    for path in (
        granular.Path('./~/x'),
        granular.Path('.') / '~' / 'x',
        granular.Path(str(granular.Path('./~') / 'x')),
    ):
        path.write_bytes(b'1')
        assert path.name == 'x'
        assert (tmp_path / '~' / 'x').read_bytes() == b'1'
        path.unlink()
    (created,) = granular.Path('.').iterdir()
    assert created.name == '~'
    assert granular.Path(str(created)).is_dir()
    assert (granular.Path(tmp_path) / '~' / 'y').parent.is_dir()
