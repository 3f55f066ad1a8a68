import asyncio
import concurrent.futures
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
from granular.errors import InvalidArgumentError, ObjectChangedError, OutOfRangeError, StoreTimeoutError
from tests.support.faults import DATA, FaultServer

SPEC = {'data': 'bytes', 'label': 'int'}
MB = 1 << 20
BLOCK = 65536


def write(place, count=60, seed=0, size=20_000):
    rng = np.random.default_rng(seed)
    points = [{'data': rng.bytes(int(rng.integers(1, size))), 'label': seed + i} for i in range(count)]
    with granular.ShardedDatasetWriter(place, SPEC, granular.encoders, shardlen=25) as writer:
        for point in points:
            writer.append(point, flush=False)
    return points


def cached(place, folder, **knobs):
    """The same place, with a block cache."""
    config = granular.IOConfig(cache_dir=str(folder), **knobs)
    return granular.Path(str(place), config=config, **place.aio.store.options)


def taken(fn):
    """What a call gives, and the requests, hits and misses that it takes."""
    before = granular.io_stats()
    found = fn()
    after = granular.io_stats()
    return found, *(after[name] - before[name] for name in ('requests', 'block_hits', 'block_misses'))


def size_of(folder):
    files = [file for file in pathlib.Path(folder).rglob('*') if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)


def test_the_second_epoch_makes_no_request(bucket, tmp_path):
    points = write(bucket / 'ds')
    with granular.ShardedDatasetReader(cached(bucket / 'ds', tmp_path), granular.decoders) as reader:
        first, requests, _, misses = taken(lambda: reader.fetch(range(60)))
        assert first == points
        assert requests >= 3
        assert misses >= sum(len(point['data']) for point in points) // BLOCK
        order = np.random.default_rng(0).permutation(60)
        again, requests, hits, misses = taken(lambda: reader.fetch(order))
        assert again == [points[i] for i in order]
        assert (requests, misses) == (0, 0)
        assert hits >= sum(len(point['data']) for point in points) // BLOCK
        assert taken(lambda: [reader[int(i)] for i in order])[1] == 0


RESTARTED = """
import sys
import granular
url, folder, options = sys.argv[1], sys.argv[2], eval(sys.argv[3])
config = granular.IOConfig(cache_dir=folder, index_cache=folder)
with granular.ShardedDatasetReader(granular.Path(url, config=config, **options), granular.decoders) as reader:
    total = sum(len(point['data']) for point in reader.fetch(range(60)))
print(total, granular.io_stats()['requests'])
"""


def test_another_process_asks_for_one_byte_of_each_object(moto, tmp_path):
    place = moto.place()
    total = sum(len(point['data']) for point in write(place))

    def run():
        command = [sys.executable, '-c', RESTARTED, str(place), str(tmp_path), repr(moto.options)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert run()[0] == str(total)
    bags = [name for name in place.glob('*/*') if name.suffix == '.bag']
    # The listing, and one byte of each bag, to know that it is the same.
    assert run() == [str(total), str(1 + len(bags))]


def test_an_object_that_was_replaced_is_read_anew(moto, tmp_path):
    place = moto.place()
    write(place)
    with granular.ShardedDatasetReader(cached(place, tmp_path), granular.decoders) as old:
        before = old.fetch(range(30))
        old_rest = range(30, 60)
        place.rmtree()
        after = write(place, seed=1)
        with granular.ShardedDatasetReader(cached(place, tmp_path), granular.decoders) as new:
            assert new.fetch(range(60)) == after
        assert old.fetch(range(20)) == before[:20]  # of the version that it opened
        with pytest.raises(ObjectChangedError):
            old.fetch(old_rest)


def test_the_folder_stays_within_its_limit(moto, tmp_path):
    place = moto.place()
    points = write(place, count=200, size=200_000)
    assert sum(len(point['data']) for point in points) > 16 * MB
    with granular.ShardedDatasetReader(cached(place, tmp_path, cache_bytes=8 * MB), granular.decoders) as reader:
        for _ in range(2):
            for at in range(0, 200, 20):
                assert reader.fetch(range(at, at + 20)) == points[at : at + 20]
                assert size_of(tmp_path) <= 9 * MB
        # What was used last is there still, what was used first is not.
        assert taken(lambda: reader.fetch(range(190, 200)))[1] == 0
        assert taken(lambda: reader.fetch(range(10)))[1] > 0


def test_damage_is_noticed_and_mended(moto, tmp_path, caplog):
    place = moto.place()
    points = write(place)
    with granular.ShardedDatasetReader(cached(place, tmp_path), granular.decoders) as reader:
        reader.fetch(range(60))
    (pack,) = (tmp_path / 'blocks-2' / 'packs').iterdir()
    damaged = bytearray(pack.read_bytes())
    for at in range(100, len(damaged), 3 * BLOCK):
        damaged[at] ^= 1
    pack.write_bytes(damaged)

    def child(queue):
        with granular.ShardedDatasetReader(cached(place, tmp_path), granular.decoders) as reader:
            found, _, _, misses = taken(lambda: reader.fetch(range(60)))
        queue.put((found == points, misses))

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
    place = granular.Path(url, config=granular.IOConfig(cache_dir=folder), **options)
    with granular.ShardedDatasetReader(place, granular.decoders) as reader:
        barrier.wait()
        if die:
            threading_kill()
        found, _, _, misses = taken(lambda: reader.fetch(range(60)))
    queue.put((misses, [point['label'] for point in found], sum(len(point['data']) for point in found)))


def threading_kill():
    import threading

    def kill():
        time.sleep(0.004)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def test_processes_fetch_each_block_once(moto, tmp_path):
    place = moto.place()
    points = write(place)
    context = multiprocessing.get_context('fork')
    barrier, queue = context.Barrier(4), context.SimpleQueue()
    arguments = (str(place), moto.options, str(tmp_path), barrier, queue)
    # One of them is killed in the middle, and leaves nothing locked.
    processes = [context.Process(target=fetch_all, args=(*arguments, i == 3)) for i in range(4)]
    for process in processes:
        process.start()
    found = [queue.get() for _ in range(3)]
    for process in processes:
        process.join()
    for _, labels, total in found:
        assert labels == list(range(60))
        assert total == sum(len(point['data']) for point in points)
    with granular.ShardedDatasetReader(cached(place, tmp_path), granular.decoders) as reader:
        found = taken(lambda: reader.fetch(range(60)))
        assert found[0] == points
        assert found[1] == 0


async def test_tasks_fetch_each_block_once(tmp_path):
    with FaultServer() as server:
        config = granular.IOConfig(cache_dir=str(tmp_path), hedge=0)
        path = granular.aio.Path(f'{server.endpoint}/file', config=config)
        version = (await path.stat()).version
        before = granular.io_stats()['block_misses']
        assert await path.read_ranges([0], [0], version=version) == [b'']
        assert await path.read_ranges([99_999], [100_000], version=version) == [DATA[99_999:]]
        server.script.extend([('late', 0.4)] * 3)
        reads = [asyncio.create_task(path.read_ranges([i], [i + 70_000], version=version)) for i in range(8)]
        await asyncio.sleep(0.2)
        reads[0].cancel()  # who fetches is cancelled, and the others go on
        found = await asyncio.gather(*reads, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert [data for (data,) in found[1:]] == [DATA[i : i + 70_000] for i in range(1, 8)]
        assert granular.io_stats()['block_misses'] - before <= 4
        assert await path.read_ranges([99_000, 5], [100_000, 6], version=version) == [DATA[99_000:], DATA[5:6]]
        with pytest.raises(OutOfRangeError, match='100000'):
            await path.read_ranges([99_000], [100_001], version=version)
        with pytest.raises(ObjectChangedError):
            await path.read_ranges([0], [1], version='"another"')


def test_a_process_that_keeps_the_lock_does_not_stop_others(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache_folder, '_LOCK_TIMEOUT', 0.1)
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


def test_a_child_that_is_forked_while_the_lock_is_held_does_not_keep_it(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, '_LOCK_TIMEOUT', 0.1)
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


def test_loops_that_wait_for_blocks_of_each_other_end(tmp_path, monkeypatch):
    content = np.random.default_rng(0).bytes(3 * BLOCK)
    with FaultServer(files={'file': content}) as server:
        config = granular.IOConfig(cache_dir=str(tmp_path), hedge=0)
        path = granular.aio.Path('s3://bucket/file', config=config, endpoint_url=server.endpoint, anon=True)
        meet, seen, has = threading.Barrier(2, timeout=20), threading.local(), Blocks.has

        def there(blocks, cached, block):
            """That another process has brought each block when it is looked for a second time."""
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
                async with asyncio.timeout(20):
                    return await path.store.read_many(jobs)

            return asyncio.run(main())

        monkeypatch.setattr(Blocks, 'has', there)
        spans = [(BLOCK, BLOCK + 10), (2 * BLOCK, 2 * BLOCK + 10)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            found = list(pool.map(read, [spans, spans[::-1]]))
        wanted = [content[start:stop] for start, stop in spans]
        assert found == [wanted, wanted[::-1]]


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_any_ranges(data):
    size = data.draw(st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 300_000]))
    content = np.random.default_rng(size).bytes(size)
    with tempfile.TemporaryDirectory() as folder, FaultServer(files={'file': content}) as server:
        config = granular.IOConfig(cache_dir=folder, max_gap=data.draw(st.sampled_from([0, 1000, BLOCK])))
        path = granular.Path('s3://bucket/file', config=config, endpoint_url=server.endpoint, anon=True)
        for _ in range(3):
            starts = data.draw(st.lists(st.integers(0, size), min_size=1, max_size=8))
            stops = [data.draw(st.integers(start, size)) for start in starts]
            wanted = [content[start:stop] for start, stop in zip(starts, stops, strict=True)]
            assert path.read_ranges(starts, stops, version='"one"') == wanted


def test_a_folder_that_cannot_be_had(moto, tmp_path, caplog):
    place = moto.place()
    points = write(place)
    (tmp_path / 'file').write_text('no folder')
    with caplog.at_level(logging.WARNING, 'granular'):
        with granular.ShardedDatasetReader(cached(place, tmp_path / 'file'), granular.decoders) as reader:
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


def test_a_full_disk_is_no_error(moto, tmp_path):
    place = moto.place()
    total = sum(len(point['data']) for point in write(place))
    command = [sys.executable, '-c', FULL, str(place), str(tmp_path), repr(moto.options)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == str(total)
    assert 'adding to the block cache is disabled for 30 s: [Errno 27] File too large' in ended.stderr


def test_it_is_shown_and_trimmed(moto, tmp_path, granular_cli):
    place = moto.place()
    write(place)
    with granular.ShardedDatasetReader(cached(place, tmp_path), granular.decoders) as reader:
        reader.fetch(range(30))
    code, out, err = granular_cli('cache', tmp_path)
    assert code == 0
    assert f'100%  {place}/000000' in out
    assert f'{place}/000001' in out
    code, out, err = granular_cli('cache', tmp_path, '--trim', 0)
    assert err.startswith('0 bytes, ')
    assert granular_cli('cache', tmp_path, '--json')[1].startswith('{"bytes": 0, "removed": 0, "places": {"s3://')
    code, out, err = granular_cli('cache', tmp_path / 'nothing')
    assert code == 1
    assert 'is not the cache_dir' in err
