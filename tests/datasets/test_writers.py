"""Two writers of one dataset, and writers that are killed."""

import asyncio
import fcntl
import gc
import itertools
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings

import pytest

import granular
from granular import aio
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CorruptBagError,
    GranularError,
    NotFoundError,
    StoreError,
)
from tests.robustness import kills

SPEC = {'x': 'bytes', 'n': 'int'}


def point(i):
    return {'x': bytes([i % 256]) * (i % 90), 'n': i}


def fill(writer, count, first=0):
    for i in range(first, first + count):
        writer.append(point(i))


def test_failed_abort_of_one_bag_aborts_the_others(tmp_path, monkeypatch):
    writer = granular.DatasetWriter(tmp_path / 'ds', SPEC, granular.encoders)
    fill(writer, 3)
    unlink = os.unlink

    def refuse_one(path, **options):
        if os.path.basename(path).startswith('.n.bag'):
            raise PermissionError(1, 'refused', path)
        unlink(path, **options)

    monkeypatch.setattr(os, 'unlink', refuse_one)
    with pytest.raises(AccessDeniedError, match='refused'), writer:
        raise LookupError
    assert [name.startswith('.n.bag') for name in os.listdir(tmp_path / 'ds')] == [True]


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_second_of_two_writers_is_refused(tmp_path, layout):
    first = granular.DatasetWriter(tmp_path / 'data', SPEC, granular.encoders, layout=layout)
    fill(first, 3)
    with pytest.raises(AlreadyExistsError):
        granular.DatasetWriter(tmp_path / 'data', SPEC, granular.encoders, layout=layout)
    fill(first, 3, 3)
    first.close()
    with granular.DatasetReader(tmp_path / 'data', granular.decoders) as reader:
        assert list(reader) == [point(i) for i in range(6)]


@pytest.mark.parametrize(
    ('layout', 'removed'), [('refs', ''), ('columns', ''), ('columns', 'x.bag'), ('columns', 'n.idx')]
)
def test_writer_whose_files_are_removed_fails(tmp_path, layout, removed):
    folder = tmp_path / 'data'
    writer = granular.DatasetWriter(folder, SPEC, granular.encoders, layout=layout)
    fill(writer, 6)
    if removed:
        (folder / removed).unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    with pytest.raises((StoreError, NotFoundError), match='removed or replaced|no such file'):
        writer.close()
    assert not (folder / 'spec.json').exists()


def test_growing_bag_that_is_replaced_is_an_error(tmp_path):
    bag = granular.BagWriter(tmp_path / 'a.bag', version=3)
    bag.append(b'lost')
    (tmp_path / 'other').write_bytes(b'other')
    os.replace(tmp_path / 'other', tmp_path / 'a.bag')
    with pytest.raises(StoreError, match=r'a\.bag: 4 bytes were written, but the file was removed or replaced'):
        bag.close()
    assert (tmp_path / 'a.bag').read_bytes() == b'other'


DROPPED = {
    'refs': (lambda folder: granular.DatasetWriter(folder, SPEC, granular.encoders), '7 of its 7 datapoints'),
    'columns': (lambda folder: granular.DatasetWriter(folder, SPEC, granular.encoders, 'columns'), '3 of its 7 datap'),
    'sharded': (lambda folder: granular.ShardedDatasetWriter(folder, SPEC, granular.encoders, 5), '2 of its 7 datap'),
}


@pytest.mark.parametrize('kind', DROPPED)
def test_dropped_writer_names_its_path_and_what_is_lost(tmp_path, caplog, kind):
    make, lost = DROPPED[kind]
    folder = tmp_path / 'data'
    writer = make(folder)
    fill(writer, 4)
    for i in range(4, 7):
        writer.append(point(i), flush=False)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter('always')
        del writer
        messages = [str(warning.message) for warning in warned]
        warned.clear()  # a warning keeps the writer
        gc.collect()
    # In the columns layout, Python warns of its files as well.
    [message] = [message for message in messages if 'unclosed file' not in message]
    assert f"Writer('{folder}') was never closed: {lost}" in message
    [record] = caplog.records
    assert (record.levelname, record.getMessage()) == ('ERROR', message)


def test_dropped_bag_writer_names_its_path_and_what_is_lost(tmp_path):
    writer = granular.BagWriter(tmp_path / 'a.bag')
    writer.append(b'x')
    with pytest.warns(ResourceWarning, match=r"a.bag'\) was never closed: 1 of its 1 records are lost"):
        del writer
        gc.collect()


def test_closed_and_aborted_writers_report_no_loss(tmp_path, caplog):
    writer = granular.ShardedDatasetWriter(tmp_path / 'closed', SPEC, granular.encoders, 5)
    fill(writer, 7)
    writer.close()
    with pytest.raises(LookupError), granular.DatasetWriter(tmp_path / 'aborted', SPEC, granular.encoders) as aborted:
        fill(aborted, 7)
        raise LookupError
    del writer, aborted
    gc.collect()
    assert not caplog.records


def test_writer_left_at_exit_is_reported_by_its_own_process_alone(tmp_path, interpreter):
    code = f"""
import os, sys, warnings, granular
warnings.simplefilter('default')
writer = granular.DatasetWriter(sys.argv[1], {SPEC!r}, granular.encoders)
for i in range(1000):
    writer.append({{'x': b'', 'n': i}})
if not (child := os.fork()):
    del writer
    sys.exit()
os.waitpid(child, 0)
"""
    with interpreter.start(code, str(tmp_path / 'data')) as program:
        _, errors = program.communicate()
    message = f"DatasetWriter('{tmp_path / 'data'}') was never closed: 1000 of its 1000 datapoints are lost"
    assert errors.count(message) == 2, errors  # the log line and the warning
    assert 'ResourceWarning' in errors


@pytest.mark.parametrize('layout', ['refs', 'columns'])
async def test_cancelled_opening_of_a_writer_leaves_nothing(tmp_path, layout, monkeypatch):
    """The threads that create its files have ended when the cancelled call ends."""
    flock, begun, go_on = fcntl.flock, threading.Event(), threading.Event()

    def delayed(fd, operation):
        if stat.S_ISREG(os.fstat(fd).st_mode):
            begun.set()
            assert go_on.wait(60)
        return flock(fd, operation)

    monkeypatch.setattr(fcntl, 'flock', delayed)
    opening = asyncio.create_task(aio.DatasetWriter.open(tmp_path / 'data', SPEC, layout=layout))
    await asyncio.to_thread(begun.wait, 60)
    for _ in range(2):  # a second cancellation changes nothing
        opening.cancel()
        for _ in range(10):  # turns of the loop, in which it could end
            await asyncio.sleep(0)
    assert not opening.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not list(tmp_path.iterdir())
    assert not [target for target in map(os.readlink, descriptors()) if target.startswith(str(tmp_path))]
    async with aio.DatasetWriter(tmp_path / 'data', SPEC, layout=layout) as writer:
        await writer.append(point(0))


def descriptors():
    folder = '/proc/self/fd'
    return [path for name in os.listdir(folder) if os.path.lexists(path := f'{folder}/{name}')]


async def test_writer_cancelled_twice_leaves_no_lock(tmp_path):
    async def write():
        async with aio.DatasetWriter(tmp_path / 'd', SPEC, layout='columns') as writer:
            for i in itertools.count(writer.found):
                await writer.append({'x': bytes(40_000), 'n': i})

    for _ in range(5):
        writing = asyncio.create_task(write())
        await asyncio.sleep(0.05)
        writing.cancel()
        await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
    async with aio.DatasetWriter(tmp_path / 'd', SPEC, layout='columns') as writer:
        await writer.append({'x': b'', 'n': writer.found})
    numbers = [each['n'] for each in granular.DatasetReader(tmp_path / 'd')]
    assert numbers == list(range(len(numbers)))


class Cancelled:
    """Awaits a coroutine, and cancels the task when it waits for the time of number ``step``, counted from 1."""

    def __init__(self, coro, step):
        self._coro, self._step = coro, step

    def __await__(self):
        steps = self._coro.__await__()
        value = error = None
        while True:
            try:
                waited = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            value = error = None
            self._step -= 1
            if not self._step:
                asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
            try:
                value = yield waited
            except BaseException as raised:
                error = raised


async def test_append_to_shards_cancelled_at_any_step_can_be_continued(tmp_path):
    """No folder of a shard stays behind one that was removed."""

    async def write(folder, step=0):
        async with aio.ShardedDatasetWriter(folder, SPEC, granular.encoders, 2) as writer:
            for i in range(writer.found, 5):
                await Cancelled(writer.append(point(i)), step if i == 3 else 0)

    outcomes = []
    for step in itertools.count(1):
        folder = tmp_path / f'{step}'
        try:
            await asyncio.create_task(write(folder, step))
            break
        except asyncio.CancelledError:
            shards = len(os.listdir(folder))
        await write(folder)
        async with aio.ShardedDatasetReader(folder, granular.decoders) as reader:
            assert await reader.fetch(range(len(reader))) == [point(i) for i in range(5)]
        outcomes.append(shards)
    assert len(outcomes) > 5
    assert set(outcomes) <= {1, 2}


@pytest.mark.parametrize('kind', [aio.DatasetWriter, aio.ShardedDatasetWriter])
@pytest.mark.parametrize('closed', ['again', 'by the block'])
async def test_close_cancelled_before_a_running_append_ends_closes_nothing_halfway(tmp_path, kind, closed):
    begun, allowed = threading.Event(), threading.Event()

    def encode(value):
        begun.set()
        allowed.wait()
        return value

    writer = await kind.open(tmp_path / 'ds', {'x': 'bytes'}, {'bytes': encode})
    appending = asyncio.create_task(writer.append({'x': b'a'}))
    await asyncio.to_thread(begun.wait)
    closing = asyncio.create_task(writer.aclose() if closed == 'again' else writer.__aexit__(None, None, None))
    await asyncio.sleep(0)
    closing.cancel()
    asyncio.get_running_loop().call_soon(allowed.set)
    with pytest.raises(asyncio.CancelledError):
        await closing
    await appending
    if closed == 'again':
        await writer.aclose()
        with granular.open(tmp_path / 'ds') as reader:
            assert reader[0] == {'x': b'a'}
    else:
        assert not (tmp_path / 'ds').exists() or not list((tmp_path / 'ds').iterdir())
    assert writer.closed


def test_bag_being_appended_to_is_locked(tmp_path):
    first = granular.BagWriter(tmp_path / 'a.bag', 3)
    first.append(b'x')
    with pytest.raises(AlreadyExistsError, match='another writer'):
        granular.BagWriter(tmp_path / 'a.bag', 3)
    first.close()
    with granular.BagWriter(tmp_path / 'a.bag', 3) as second:
        second.append(b'y')
    assert list(granular.BagReader(tmp_path / 'a.bag')) == [b'x', b'y']


@pytest.mark.parametrize('size', [10, 9_000_000])
@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_first_writer_to_close_publishes(bucket, layout, size):
    """In a bucket, writers do not see each other until one publishes; the second one then changes nothing."""
    writers = [granular.DatasetWriter(bucket / 'data', SPEC, granular.encoders, layout=layout) for _ in range(2)]
    for number, writer in enumerate(writers):
        writer.append({'x': bytes([number]) * size, 'n': number})
    writers[1].close()
    with pytest.raises(AlreadyExistsError):
        writers[0].close()
    with granular.DatasetReader(bucket / 'data', granular.decoders) as reader:
        assert list(reader) == [{'x': b'\1' * size, 'n': 1}]


def test_file_created_meanwhile_is_not_replaced(tmp_path):
    writer = granular.BagWriter(tmp_path / 'a.bag')
    writer.append(b'x')
    (tmp_path / 'a.bag').write_bytes(b'mine')
    with pytest.raises(AlreadyExistsError):
        writer.close()
    assert (tmp_path / 'a.bag').read_bytes() == b'mine'
    assert sorted(os.listdir(tmp_path)) == ['a.bag']


@pytest.mark.parametrize('layout', ['refs', 'columns'])
@pytest.mark.parametrize('published', [False, True])
def test_second_of_two_shard_writers_is_refused(root, layout, published):
    """Also if it starts after the first one has published a shard, where it would otherwise continue."""
    if str(root).startswith('memory'):  # which knows no conditions: what is published is not replaced
        published = False
    first = granular.ShardedDatasetWriter(root / 'ds', SPEC, granular.encoders, 3, layout=layout)
    fill(first, 4 if published else 2)
    with pytest.raises(AlreadyExistsError):
        with granular.ShardedDatasetWriter(root / 'ds', SPEC, granular.encoders, 3, layout=layout) as second:
            fill(second, 1, 7)
    fill(first, 3, len(first))
    count = len(first)
    first.close()
    with granular.ShardedDatasetReader(root / 'ds', granular.decoders) as reader:
        assert list(reader) == [point(i) for i in range(count)]
    if not str(root).startswith('memory'):
        with granular.ShardedDatasetWriter(root / 'ds', SPEC, granular.encoders, 3, layout=layout) as third:
            assert third.found == count
            fill(third, 2, count)
        with granular.ShardedDatasetReader(root / 'ds', granular.decoders) as reader:
            assert list(reader) == [point(i) for i in range(count + 2)]


def test_child_process_does_not_hold_the_lock_of_its_parent(tmp_path):
    """The process of a writer has ended, while a process that it forked still runs."""
    code = f"""
import os, time, granular
writer = granular.DatasetWriter({str(tmp_path / 'data')!r}, {SPEC!r}, granular.encoders)
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
time.sleep(250)
"""
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            process.wait(60)
            with granular.DatasetWriter(tmp_path / 'data', SPEC, granular.encoders) as writer:
                fill(writer, 3)
        finally:
            os.kill(child, signal.SIGKILL)
    files = ['n.bag', 'n.crc', 'refs.bag', 'refs.crc', 'spec.json', 'x.bag', 'x.crc']
    assert sorted(os.listdir(tmp_path / 'data')) == files


# --- leftovers of a killed writer


def files_of(folder):
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


@pytest.mark.parametrize(('checksums', 'resume'), [(True, 'check'), (False, 'discard')])
def test_columns_resume_from_every_byte(tmp_path, checksums, resume):
    """A crash between any two bytes: a torn table, a tail of records, columns of different lengths."""
    count, ends = 3, ('.bag', '.crc', '.idx') if checksums else ('.bag', '.idx')

    def write(path, count):
        args = granular.encoders, 'columns', resume, checksums
        with granular.DatasetWriter(path, {'x': 'bytes', 'n': 'utf8'}, *args) as writer:
            for i in range(writer.found, count):
                writer.append({'x': b'abc'[: i % 4], 'n': 'n' * (3 - i % 3)})
            return writer.found

    states = []
    for i in range(count + 1):
        write(tmp_path / str(i), i)
        states.append(files_of(tmp_path / str(i)))
    whole = states[-1]
    tried = 0
    for before, after in zip(states, states[1:], strict=False):
        now = {name: data for name, data in before.items() if name != 'spec.json'}
        for name in [f'{key}{end}' for key in ('n', 'x') for end in ends]:
            for size in range(len(before[name]), len(after[name]) + 1):
                now[name] = after[name][:size]
                path = tmp_path / 'torn'
                path.mkdir()
                for file, data in now.items():
                    (path / file).write_bytes(data)
                with pytest.raises(GranularError, match=r'spec\.json'):
                    granular.DatasetReader(path, None)
                assert len(after['n.idx']) // 8 - 1 <= write(path, count) <= len(after['n.idx']) // 8
                assert files_of(path) == whole
                granular.Path(path).rmtree()
                tried += 1
    assert tried > 60


async def test_tail_is_compared_off_the_event_loop(tmp_path, monkeypatch):
    async with aio.BagWriter(tmp_path / 'x.bag', version=3) as bag:
        await bag.append(b'0')
    with (tmp_path / 'x.bag').open('ab') as file:
        file.write(b'123456')  # as after a kill between the records and their table
    threads = []

    def opened(*args, **kwargs):
        threads.append(threading.get_ident())
        return open(*args, **kwargs)

    monkeypatch.setattr('granular.aio.bags.output.open', opened, raising=False)
    async with aio.BagWriter(tmp_path / 'x.bag', version=3) as bag:
        with pytest.raises(CorruptBagError, match='record 1 differs'):
            await bag.append(b'13')
        for record in (b'12', b'', b'3', b'45678', b'9'):
            await bag.append(record)
    assert len(threads) == 5
    assert threading.get_ident() not in threads
    assert (tmp_path / 'x.bag').read_bytes() == b'0123456789'


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_dataset_without_a_spec_is_rewritten(root, layout):
    with granular.DatasetWriter(root / 'ds', SPEC, granular.encoders, layout) as writer:
        fill(writer, 4)
    (root / 'ds' / 'spec.json').unlink()
    (root / 'ds' / ('n.bag' if layout == 'refs' else 'n.idx')).unlink()
    if not root.store.local:
        with pytest.raises(AlreadyExistsError, match="resume='discard'"):
            granular.DatasetWriter(root / 'ds', SPEC, granular.encoders, layout)
    with granular.DatasetWriter(root / 'ds', SPEC, granular.encoders, layout, 'discard') as writer:
        assert writer.found == 0
        fill(writer, 3)
    with granular.DatasetReader(root / 'ds', granular.decoders) as reader:
        assert list(reader) == [point(i) for i in range(3)]
    with pytest.raises(GranularError):  # a dataset that is complete is not discarded, and none is mixed with another
        granular.DatasetWriter(root / 'ds', {'y': 'bytes'}, granular.encoders, layout, 'discard')
    with granular.DatasetReader(root / 'ds', granular.decoders) as reader:
        assert len(reader) == 3


# --- killed: many more of these by python -m tests.robustness.kills


@pytest.mark.parametrize(
    ('store', 'layout', 'checksums', 'times'),
    [('local', 'columns', True, 4), ('local', 'refs', False, 4), ('seaweed', 'refs', True, 1)],
)
@pytest.mark.filterwarnings('ignore:.*columns differ in length')
def test_writer_killed_repeatedly_completes_the_dataset(request, tmp_path, store, layout, checksums, times):
    numbers = itertools.count()
    path = (lambda: granular.Path(tmp_path) / str(next(numbers))) if store == 'local' else None
    path = path or request.getfixturevalue(store).place
    case = kills.small(store, layout, checksums)
    with kills.interpreter() as interpreter:
        killed, _ = kills.run(case, path, times, random.Random(times), interpreter, times + 1)
    assert killed >= times
