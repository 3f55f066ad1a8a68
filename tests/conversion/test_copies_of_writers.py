"""Workers that write the same shard at the same time, one of which Ray had considered dead."""

import asyncio
import concurrent.futures
import contextvars
import sys
import types

import pytest

import granular
from granular import aio
from granular.aio.conversion.infer import RecordMapping
from granular.aio.conversion.on_ray import RayShards
from granular.aio.conversion.record_source import Reading, open_source
from granular.aio.conversion.shard_writer import ShardWriter
from granular.aio.datasets.codec import fields_of
from granular.aio.paths.guard import FolderGuard, Right
from granular.errors import AlreadyExistsError

RECORDS = [{'a': i, 'b': 'x' * (i % 7)} for i in range(12)]

late: contextvars.ContextVar['Pause | None'] = contextvars.ContextVar('late', default=None)


class Pause:
    """Stops a worker before it publishes its file of some number."""

    def __init__(self, number):
        self.left, self.reached, self.resumed = number, asyncio.Event(), asyncio.Event()

    async def step(self):
        if not self.left:
            self.reached.set()
            await self.resumed.wait()
        self.left -= 1


@pytest.fixture
def pauses(monkeypatch, bucket):
    kind = type(bucket.aio.store)
    open_writer = kind.open_writer

    async def open_paused(self, key, new=False):
        writer, pause = await open_writer(self, key, new), late.get()
        if pause is None:
            return writer

        close = writer.close

        async def close_paused():
            await pause.step()
            await close()

        writer.close = close_paused
        return writer

    monkeypatch.setattr(kind, 'open_writer', open_paused)


async def job_of(folder, layout):
    source = await open_source(RECORDS, Reading())
    mapping = RecordMapping(await source.sample(12), None, layout, 'records')
    fields = fields_of(mapping.spec, mapping.encoders(None), layout, f'{folder}')
    writer = ShardWriter(folder, mapping, fields, 12, layout, True, 'records')
    shards = await asyncio.to_thread(RayShards, writer, RECORDS, Reading(), source)  # imports ray
    return shards.job, source.source


async def write(job, source, pause=None):
    """Write the shard, as the task of a worker."""
    late.set(pause)
    writer = await job.start(source, 0, 0, 12)
    return None if writer is None else await job.publish(writer, 0, 12)


async def read(folder):
    async with aio.DatasetReader(folder / '000000', granular.decoders) as reader:
        return [dict(point) for point in await reader.fetch(range(len(reader)))]


@pytest.mark.parametrize(('bucket', 'layout'), [('fakegcs', 'refs'), ('seaweed', 'columns')], indirect=['bucket'])
def test_late_worker_beside_its_retry_changes_nothing(bucket, layout, pauses):
    """It is stopped before each of its files, until the retry is done; then it continues, or is cancelled."""

    async def run(number, cancelled):
        folder = bucket.aio / layout / f'{number}-{cancelled}'
        job, source = await job_of(folder, layout)
        pause = Pause(number)
        first = asyncio.create_task(write(job, source, pause))
        reached = asyncio.create_task(pause.reached.wait())
        await asyncio.wait([first, reached], return_when='FIRST_COMPLETED')
        reached.cancel()
        if first.done():
            return False
        assert (await write(job, source))[0] == 12
        assert await read(folder) == RECORDS
        if cancelled:
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        else:
            pause.resumed.set()
            assert (await first)[0] == 12
        assert await read(folder) == RECORDS
        return True

    async def main():
        results = await asyncio.gather(*(run(number, cancelled) for number in range(8) for cancelled in (True, False)))
        return sum(results) / 2

    files = asyncio.run(main())
    assert files == 7  # three bags and their checksums, or two with tables; and the spec


@pytest.mark.parametrize('bucket', ['fakegcs'], indirect=True)
def test_worker_of_a_former_writer_publishes_nothing(bucket):
    async def main():
        folder = bucket.aio / 'ds'
        job, source = await job_of(folder, 'refs')
        job.guard = FolderGuard(folder, Right.SOLE)
        await job.guard.enter()
        writer = await job.start(source, 0, 0, 12)
        await FolderGuard(folder, Right.SOLE, forced=True).enter()
        with pytest.raises(AlreadyExistsError, match='another writer took over'):
            await job.publish(writer, 0, 12)
        return [path.name async for path in folder.rglob('*')]

    assert [name for name in asyncio.run(main()) if name.endswith(('.bag', '.json')) and name[0] != '.'] == []


class Cluster:
    """Ray with tasks that create the folder of their shard; that of shard 2 fails, and the others are cancelled."""

    class exceptions:
        RayError = RayTaskError = KeyError

    def __init__(self, writer):
        self.writer = writer

    def put(self, value):
        return value

    def remote(self, **options):
        return lambda function: types.SimpleNamespace(remote=self.start)

    def start(self, job, number, *_):
        future = concurrent.futures.Future()
        granular.Path(self.writer.folder(number).key).mkdir(parents=True)
        if number == 2:
            future.set_exception(ValueError('bad'))
        return types.SimpleNamespace(future=lambda: future)

    def cancel(self, result):
        pass

    def wait(self, results, num_returns, timeout):
        pass


def test_cancelled_tasks_leave_no_empty_folders(tmp_path, monkeypatch):
    async def main():
        source = await open_source(RECORDS, Reading())
        mapping = RecordMapping(await source.sample(12), None, 'refs', 'records')
        writer = ShardWriter(aio.Path(tmp_path / 'ds'), mapping, [], 4, 'refs', False, 'records')
        monkeypatch.setitem(sys.modules, 'ray', Cluster(writer))
        shards = RayShards(writer, RECORDS, Reading(), source)
        with pytest.raises(ValueError, match='bad'):
            await shards.write({1: (4, 8), 2: (8, 12), 0: (0, 4)}, None, lambda *_: None)

    asyncio.run(main())
    assert list((tmp_path / 'ds').iterdir()) == []
