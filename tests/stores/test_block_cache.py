import array
import asyncio
import concurrent.futures
import contextlib
import fcntl
import logging
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular.aio.stores.base import Request
from granular.aio.stores.block_cache import folder as cache_folder
from granular.aio.stores.block_cache.blocks import Blocks
from granular.aio.stores.block_cache.packs import Pack
from granular.aio.stores.local.locks import RangeLocks
from granular.errors import InvalidArgumentError, ObjectChangedError, OutOfRangeError, StoreTimeoutError
from tests.support.faults import DATA, FaultServer

SPEC = {'data': 'bytes', 'label': 'int'}
MB = 1 << 20
BLOCK = 65536


def write(root, count=60, seed=0, size=20_000):
    rng = np.random.default_rng(seed)
    points = [{'data': rng.bytes(int(rng.integers(1, size))), 'label': seed + i} for i in range(count)]
    with granular.ShardedDatasetWriter(root, SPEC, granular.encoders, shardlen=25) as writer:
        for point in points:
            writer.append(point, flush=False)
    return points


def cached(root, folder, **settings):
    """Return the same path with a block cache."""
    config = granular.IOConfig(cache_dir=str(folder), **settings)
    return granular.Path(str(root), config=config, **root.aio.store.options)


def measure(fn):
    """Return the result of a call, and its requests, cache hits and misses."""
    before = granular.io_stats()
    result = fn()
    after = granular.io_stats()
    return result, *(after[name] - before[name] for name in ('requests', 'block_hits', 'block_misses'))


def open_files():
    """Return the paths of the files that this process has open."""
    paths = []
    for link in pathlib.Path('/proc/self/fd').iterdir():
        with contextlib.suppress(FileNotFoundError):
            paths.append(os.readlink(link))
    return paths


def size_of(folder):
    files = [file for file in pathlib.Path(folder).rglob('*') if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)


def test_second_epoch_makes_no_request(bucket, tmp_path):
    points = write(bucket / 'ds')
    with granular.ShardedDatasetReader(cached(bucket / 'ds', tmp_path), granular.decoders) as reader:
        first, requests, _, misses = measure(lambda: reader.fetch(range(60)))
        assert first == points
        assert requests >= 3
        assert misses >= sum(len(point['data']) for point in points) // BLOCK
        order = np.random.default_rng(0).permutation(60)
        again, requests, hits, misses = measure(lambda: reader.fetch(order))
        assert again == [points[i] for i in order]
        assert (requests, misses) == (0, 0)
        assert hits >= sum(len(point['data']) for point in points) // BLOCK
        assert measure(lambda: [reader[int(i)] for i in order])[1] == 0


RESTARTED = """
import sys
import granular
url, folder, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
config = granular.IOConfig(cache_dir=folder, index_cache=folder)
with granular.ShardedDatasetReader(granular.Path(url, config=config, **options), granular.decoders) as reader:
    total = sum(len(point['data']) for point in reader.fetch(range(60)))
print(total, granular.io_stats()['requests'])
"""


def test_second_process_requests_specs_and_one_byte_of_each_bag(fakegcs, tmp_path):
    root = fakegcs.place()
    total = sum(len(point['data']) for point in write(root))

    def run():
        command = [sys.executable, '-c', RESTARTED, str(root), str(tmp_path), repr(fakegcs.options)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert run()[0] == str(total)
    files = [name for name in root.glob('*/*') if name.suffix == '.bag' or name.name == 'spec.json']
    # The listing, the spec of each shard, and one byte of each bag, to know that they are the same.
    assert run() == [str(total), str(1 + len(files))]


def test_replaced_object_is_read_again(fakegcs, tmp_path):
    root = fakegcs.place()
    write(root)
    with granular.ShardedDatasetReader(cached(root, tmp_path), granular.decoders) as old:
        before = old.fetch(range(30))
        old_rest = range(30, 60)
        root.rmtree()
        after = write(root, seed=1)
        with granular.ShardedDatasetReader(cached(root, tmp_path), granular.decoders) as new:
            assert new.fetch(range(60)) == after
        assert old.fetch(range(20)) == before[:20]  # of the version that it opened
        with pytest.raises(ObjectChangedError):
            old.fetch(old_rest)


def test_cache_folder_stays_within_its_limit(fakegcs, tmp_path):
    root = fakegcs.place()
    points = write(root, count=200, size=200_000)
    assert sum(len(point['data']) for point in points) > 16 * MB
    with granular.ShardedDatasetReader(cached(root, tmp_path, cache_bytes=8 * MB), granular.decoders) as reader:
        for _ in range(2):
            for at in range(0, 200, 20):
                assert reader.fetch(range(at, at + 20)) == points[at : at + 20]
                assert size_of(tmp_path) <= 9 * MB
        # What was used last is there still, what was used first is not.
        assert measure(lambda: reader.fetch(range(190, 200)))[1] == 0
        assert measure(lambda: reader.fetch(range(10)))[1] > 0


def test_packs_removed_by_another_process_take_no_disk_space(tmp_path):
    processes = [Blocks(str(tmp_path), 8 * MB) for _ in range(2)]
    objects = [blocks.objects.register('store', 'key', 'version', 64 * MB, 'key') for blocks in processes]
    for start in range(0, 64 * MB, MB):  # alternately, as two processes that read the same object
        writer = start // MB % 2
        processes[writer].write([(objects[writer], start // BLOCK, bytes(MB))])
        reader = 1 - writer
        assert processes[reader].read(objects[reader], start, start + MB) == bytes(MB)
    removed = [file for file in open_files() if file.startswith(str(tmp_path)) and file.endswith('(deleted)')]
    assert len(removed) <= 2  # since the last pack was opened


def test_damaged_block_is_detected_and_replaced(fakegcs, tmp_path, caplog):
    root = fakegcs.place()
    points = write(root)
    with granular.ShardedDatasetReader(cached(root, tmp_path), granular.decoders) as reader:
        reader.fetch(range(60))
    (pack,) = (tmp_path / 'blocks-2' / 'packs').iterdir()
    damaged = bytearray(pack.read_bytes())
    for at in range(100, len(damaged), 3 * BLOCK):
        damaged[at] ^= 1
    pack.write_bytes(damaged)

    def child(queue):
        with granular.ShardedDatasetReader(cached(root, tmp_path), granular.decoders) as reader:
            result, _, _, misses = measure(lambda: reader.fetch(range(60)))
        queue.put((result == points, misses))

    context = multiprocessing.get_context('fork')
    queue = context.SimpleQueue()
    missed = []
    for _ in range(3):
        process = context.Process(target=child, args=(queue,))
        process.start()
        same, misses = queue.get()
        process.join()
        assert same
        missed.append(misses)
    assert missed[0] > 0
    assert missed[2] == 0


def fetch_all(url, options, folder, barrier, queue, die=False):
    root = granular.Path(url, config=granular.IOConfig(cache_dir=folder), **options)
    with granular.ShardedDatasetReader(root, granular.decoders) as reader:
        barrier.wait()
        if die:
            threading_kill()
        result, _, _, misses = measure(lambda: reader.fetch(range(60)))
    if not die:  # a process that is killed within `put` holds the lock of the queue for ever
        queue.put((misses, [point['label'] for point in result], sum(len(point['data']) for point in result)))


def threading_kill():
    import threading

    def kill():
        time.sleep(0.004)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def test_concurrent_processes_fetch_each_block_once(fakegcs, tmp_path):
    root = fakegcs.place()
    points = write(root)
    context = multiprocessing.get_context('fork')
    barrier, queue = context.Barrier(4), context.SimpleQueue()
    arguments = (str(root), fakegcs.options, str(tmp_path), barrier, queue)
    # One of them is killed in the middle, and leaves nothing locked.
    processes = [context.Process(target=fetch_all, args=(*arguments, i == 3)) for i in range(4)]
    for process in processes:
        process.start()
    result = [queue.get() for _ in range(3)]
    for process in processes:
        process.join()
    for _, labels, total in result:
        assert labels == list(range(60))
        assert total == sum(len(point['data']) for point in points)
    with granular.ShardedDatasetReader(cached(root, tmp_path), granular.decoders) as reader:
        result = measure(lambda: reader.fetch(range(60)))
        assert result[0] == points
        assert result[1] == 0


async def test_concurrent_tasks_fetch_each_block_once(tmp_path):
    with FaultServer() as server:
        config = granular.IOConfig(cache_dir=str(tmp_path), hedge=0)
        path = granular.aio.Path(f'{server.endpoint}/file', config=config)
        version = (await path.stat()).version
        before = granular.io_stats()['block_misses']
        assert await path.read_ranges([0], [0], version=version) == [b'']
        assert await path.read_ranges([99_999], [100_000], version=version) == [DATA[99_999:]]
        server.script.extend([('late', 0.4)] * 3)
        sent = len(server.ranges)
        reads = [asyncio.create_task(path.read_ranges([i], [i + 70_000], version=version)) for i in range(8)]
        while not server.ranges[sent:]:
            await asyncio.sleep(0.001)
        reads[0].cancel()  # who fetches is cancelled, and the others go on
        result = await asyncio.gather(*reads, return_exceptions=True)
        assert isinstance(result[0], asyncio.CancelledError)
        assert [data for (data,) in result[1:]] == [DATA[i : i + 70_000] for i in range(1, 8)]
        assert granular.io_stats()['block_misses'] - before <= 4
        assert await path.read_ranges([99_000, 5], [100_000, 6], version=version) == [DATA[99_000:], DATA[5:6]]
        with pytest.raises(OutOfRangeError, match='100000'):
            await path.read_ranges([99_000], [100_001], version=version)
        with pytest.raises(ObjectChangedError):
            await path.read_ranges([0], [1], version='"another"')


class LengthenedMeanwhile(array.array):
    """An array that another thread lengthens whenever its length is read."""

    def __len__(self):
        length = super().__len__()
        self.frombytes(bytes(8 * (length + 1)))
        return length


def test_threads_record_blocks_of_one_pack_at_the_same_time(tmp_path):
    pack = Pack(os.open(tmp_path / 'pack', os.O_CREAT), 1)
    pack.verified = LengthenedMeanwhile('Q')
    for slot in (0, 100, 3):
        pack.set_verified(slot, slot + 1)
    assert [pack.verified[slot] for slot in (0, 100, 3)] == [1, 101, 4]


def test_stopped_lock_owner_does_not_block_other_processes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache_folder, 'LOCK_TIMEOUT', 0.1)  # otherwise the test waits for seconds
    with FaultServer() as server:
        config = granular.IOConfig(cache_dir=str(tmp_path), hedge=0)
        path = granular.Path('s3://bucket/file', config=config, endpoint_url=server.endpoint, anon=True)
        Blocks(str(tmp_path), 8 * MB)
        (file,) = tmp_path.glob('*/lock')
        with open(file, 'rb') as held:
            fcntl.flock(held, fcntl.LOCK_EX)  # as one that was stopped
            for _ in range(3):
                assert path.read_ranges([5], [70_000], version='"one"') == [DATA[5:70_000]]
            assert sum('locked by another process' in record.message for record in caplog.records) == 1
            with pytest.raises(StoreTimeoutError, match='locked by another process'):
                Blocks(str(tmp_path), 8 * MB).packs.trim(0)


def test_block_of_a_stopped_process_is_awaited_once_and_then_cached(tmp_path, monkeypatch):
    monkeypatch.setattr('granular.aio.stores.block_cache.cache.FETCH_TIMEOUT', 0.05)  # otherwise the test waits for it
    with FaultServer() as server:
        config = granular.IOConfig(cache_dir=str(tmp_path), hedge=0)
        path = granular.Path('s3://bucket/file', config=config, endpoint_url=server.endpoint, anon=True)
        Blocks(str(tmp_path), 8 * MB)
        (flights,) = tmp_path.glob('*/flights')
        holder = RangeLocks(str(flights))
        assert holder.lock(0, 0)  # all blocks, as a process that was stopped while it fetched them
        assert path.read_ranges([5], [70_000], version='"one"') == [DATA[5:70_000]]
        sent = len(server.ranges)
        assert path.read_ranges([5], [70_000], version='"one"') == [DATA[5:70_000]]
        assert len(server.ranges) == sent


@pytest.mark.parametrize('registered', [True, False])
def test_block_that_a_task_of_a_stopped_loop_fetches_is_read_elsewhere(registered, tmp_path, monkeypatch):
    monkeypatch.setattr('granular.aio.stores.block_cache.cache.FETCH_TIMEOUT', 0.05)  # otherwise the test waits for it
    with FaultServer() as server:
        config = granular.IOConfig(cache_dir=str(tmp_path), hedge=0)
        path = granular.aio.Path('s3://bucket/file', config=config, endpoint_url=server.endpoint, anon=True)

        async def begin():
            if registered:
                await path.read_ranges([0], [0], version='"one"')
            server.script.append(('late', 1))
            sent = len(server.ranges)
            begun = asyncio.create_task(path.read_ranges([5], [70_000], version='"one"'))
            while not server.ranges[sent:]:
                await asyncio.sleep(0.001)
            return begun

        async def read():
            async with asyncio.timeout(60):
                return await path.read_ranges([5], [70_000], version='"one"')

        stopped = asyncio.new_event_loop()
        begun = stopped.run_until_complete(begin())
        assert asyncio.run(read()) == [DATA[5:70_000]]
        assert stopped.run_until_complete(begun) == [DATA[5:70_000]]
        stopped.close()


def test_forked_child_does_not_inherit_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, 'LOCK_TIMEOUT', 0.1)  # otherwise the test waits for seconds
    one, another = Blocks(str(tmp_path), 8 * MB), Blocks(str(tmp_path), 8 * MB)
    waits, wakes = os.pipe()
    with one.folder.exclusive():
        child = os.fork()
        if not child:
            os.close(wakes)
            os.read(waits, 1)
            os._exit(0)
    try:
        assert another.packs.trim(0) == 0
    finally:
        os.close(wakes)
        os.waitpid(child, 0)
        os.close(waits)


def test_loops_waiting_for_blocks_of_each_other_do_not_deadlock(tmp_path, monkeypatch):
    content = np.random.default_rng(0).bytes(3 * BLOCK)
    with FaultServer(files={'file': content}) as server:
        config = granular.IOConfig(cache_dir=str(tmp_path), hedge=0)
        path = granular.aio.Path('s3://bucket/file', config=config, endpoint_url=server.endpoint, anon=True)
        meet, seen, has = threading.Barrier(2, timeout=60), threading.local(), Blocks.has

        def has_at_second_lookup(blocks, cached, block):
            """Pretend that another process fetched each block before its second lookup."""
            if not hasattr(seen, 'blocks'):
                return has(blocks, cached, block)
            if block in seen.blocks:
                return True
            if seen.blocks:
                meet.wait()  # each loop has said that it fetches a block
            seen.blocks.add(block)
            return False

        def read(spans):
            async def main():
                await path.read_ranges([0], [1], version='"one"')
                seen.blocks = set()  # of this thread, from here on
                jobs = [Request('file', [start], [stop], '"one"') for start, stop in spans]
                async with asyncio.timeout(60):
                    return await path.store.read_many(jobs)

            return asyncio.run(main())

        monkeypatch.setattr(Blocks, 'has', has_at_second_lookup)
        spans = [(BLOCK, BLOCK + 10), (2 * BLOCK, 2 * BLOCK + 10)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            result = list(pool.map(read, [spans, spans[::-1]]))
        expected = [content[start:stop] for start, stop in spans]
        assert result == [expected, expected[::-1]]


@settings(max_examples=30)
@given(st.data())
def test_arbitrary_ranges_match_the_file(data):
    size = data.draw(st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 300_000]))
    content = np.random.default_rng(size).bytes(size)
    with tempfile.TemporaryDirectory() as folder, FaultServer(files={'file': content}) as server:
        config = granular.IOConfig(cache_dir=folder, max_gap=data.draw(st.sampled_from([0, 1000, BLOCK])))
        path = granular.Path('s3://bucket/file', config=config, endpoint_url=server.endpoint, anon=True)
        for _ in range(3):
            starts = data.draw(st.lists(st.integers(0, size), min_size=1, max_size=8))
            stops = [data.draw(st.integers(start, size)) for start in starts]
            expected = [content[start:stop] for start, stop in zip(starts, stops, strict=True)]
            assert path.read_ranges(starts, stops, version='"one"') == expected


def test_unusable_cache_folder_disables_the_block_cache(fakegcs, tmp_path, caplog):
    root = fakegcs.place()
    points = write(root)
    (tmp_path / 'file').write_text('no folder')
    with caplog.at_level(logging.WARNING, 'granular'):
        with granular.ShardedDatasetReader(cached(root, tmp_path / 'file'), granular.decoders) as reader:
            assert reader.fetch(range(60)) == points
    assert 'continuing without a block cache' in caplog.text
    with pytest.raises(InvalidArgumentError, match='cache_bytes: expected at least 8388608, got 1000'):
        granular.IOConfig(cache_bytes=1000)


FULL = """
import os, resource, sys
import granular
url, folder, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
place = granular.Path(url, config=granular.IOConfig(cache_dir=folder), **options)
with granular.ShardedDatasetReader(place, granular.decoders) as reader:
    reader.fetch([0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    print(sum(len(point['data']) for point in reader.fetch(range(60))))
"""


def test_full_disk_is_not_an_error(fakegcs, tmp_path):
    root = fakegcs.place()
    total = sum(len(point['data']) for point in write(root))
    command = [sys.executable, '-c', FULL, str(root), str(tmp_path), repr(fakegcs.options)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == str(total)
    assert 'adding to the block cache is disabled for 30 s: [Errno 27] File too large' in ended.stderr


def test_cache_command_shows_and_trims_the_cache(fakegcs, tmp_path, granular_cli):
    root = fakegcs.place()
    write(root)
    with granular.ShardedDatasetReader(cached(root, tmp_path), granular.decoders) as reader:
        reader.fetch(range(30))
    code, out, err = granular_cli('cache', tmp_path)
    assert code == 0
    assert f'100%  {root}/000000' in out
    assert f'{root}/000001' in out
    assert granular_cli('cache', tmp_path, '--trim', -1)[0] == 2
    code, out, err = granular_cli('cache', tmp_path, '--trim', 0)
    assert err.startswith('0 bytes, ')
    assert granular_cli('cache', tmp_path, '--json')[1].startswith('{"bytes": 0, "removed": 0, "folders": {"gs://')
    code, out, err = granular_cli('cache', tmp_path / 'nothing')
    assert code == 1
    assert 'is not the cache_dir' in err
