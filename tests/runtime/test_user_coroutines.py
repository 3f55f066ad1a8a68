"""Coroutine functions of the user: whatever they await works through the sync API; they are refused where they would
not be awaited."""

import asyncio
import functools

import pytest

import granular
from granular import MapDataset
from granular.errors import InvalidArgumentError


async def nothing():
    pass


async def pause():
    await asyncio.sleep(0)


async def sleep():
    await asyncio.sleep(1e-4)


async def task():
    await asyncio.create_task(pause())


async def thread():
    await asyncio.to_thread(int)


async def timeout():
    async with asyncio.timeout(60):
        await pause()


async def gathered():
    await asyncio.gather(pause(), pause())


class Source:
    def __init__(self, wait):
        self._wait = wait

    def __len__(self):
        return 4

    async def fetch(self, indices):
        await self._wait()
        return [{'x': int(index)} for index in indices]


class Fields(granular.kappadata.KDDataset):
    def __init__(self, wait):
        super().__init__()
        self._wait = wait

    def __len__(self):
        return 4

    async def getitem_x(self, idx, ctx=None):
        await self._wait()
        return idx

    async def getitems_y(self, indices, ctxs=None):
        await self._wait()
        return indices

    async def getall_z(self):
        await self._wait()
        return [0, 1, 2, 3]

    def getitem_z(self, idx, ctx=None):
        return idx


def load(wait):
    with granular.Loader(granular.sources.Epochs(Source(wait), shuffle=False), 4) as loader:
        return next(loader)['x'].tolist()


def convert(wait, folder):
    async def records():
        for x in range(4):
            await wait()
            yield {'x': x}

    granular.convert(records(), folder)
    with granular.open(folder) as reader:
        return [datapoint['x'] for datapoint in reader]


USES = {
    'index': lambda wait, _: [MapDataset.source(Source(wait))[i]['x'] for i in range(4)],
    'fetch': lambda wait, _: MapDataset.source(Source(wait)).map(lambda d: d['x']).fetch(range(4)),
    'stream': lambda wait, _: [d['x'] for d in MapDataset.source(Source(wait)).to_iter_dataset()],
    'loader': lambda wait, _: load(wait),
    'convert': convert,
    'field': lambda wait, _: list(granular.kappadata.ModeWrapper(Fields(wait), 'x')),
    'fields': lambda wait, _: list(granular.kappadata.ModeWrapper(Fields(wait), 'y')),
    'all_fields': lambda wait, _: granular.kappadata.ModeWrapper(Fields(wait), 'z').getall_z(),
}


@pytest.mark.parametrize('use', USES)
@pytest.mark.parametrize('wait', [nothing, pause, sleep, task, thread, timeout, gathered])
def test_coroutines_of_the_user_may_await_anything(wait, use, tmp_path):
    assert USES[use](wait, tmp_path / 'out') == [0, 1, 2, 3]


async def one(element):
    return element


async def two(first, second):
    return first


class Callable:
    async def __call__(self, index):
        return index

    def __len__(self):
        return 4


class Items:
    async def __getitem__(self, index):
        return index

    def __len__(self):
        return 4


class Batches(Items):
    async def __getitems__(self, indices):
        return indices


class Keep(granular.grain.transforms.Filter):
    async def filter(self, element):
        return False


def each(*values, **options):
    yield from values


class Yielding(Callable):
    def __call__(self, index):
        yield index


dataset = MapDataset.range(4)
REFUSED = {
    'map': lambda: dataset.map(one),
    'map_with_index': lambda: dataset.map_with_index(two),
    'random_map': lambda: dataset.random_map(two, seed=0),
    'filter': lambda: dataset.filter(one),
    'transformation': lambda: dataset.filter(Keep()),
    'batch': lambda: dataset.batch(2, batch_fn=one),
    'map_of_a_stream': lambda: dataset.to_iter_dataset().map(one),
    'filter_of_a_stream': lambda: dataset.to_iter_dataset().filter(one),
    'batch_of_a_stream': lambda: dataset.to_iter_dataset().batch(2, batch_fn=one),
    'transform': lambda: granular.sources.Transform(range(4), two),
    'source_by_call': lambda: MapDataset.source(Callable()),
    'source_by_index': lambda: MapDataset.source(Items()),
    'source_by_indices': lambda: MapDataset.source(Batches()),
    'on_error': lambda: list(dataset.to_iter_dataset(granular.ReadOptions(), on_error=two)),
}


@pytest.mark.parametrize('use', REFUSED)
def test_coroutine_functions_are_refused_where_they_would_not_be_awaited(use):
    with pytest.raises(InvalidArgumentError, match='got the coroutine function .*async def fetch'):
        REFUSED[use]()


@pytest.mark.parametrize(
    'use',
    [
        lambda: dataset.map(each),
        lambda: dataset.filter(functools.partial(each)),
        lambda: dataset.random_map(each, seed=0),
        lambda: dataset.batch(2, batch_fn=each),
        lambda: dataset.to_iter_dataset().filter(each),
        lambda: granular.sources.Transform(range(4), each),
        lambda: MapDataset.source(Yielding()),
        lambda: list(dataset.to_iter_dataset(on_error=each)),
    ],
)
def test_generator_functions_are_refused_where_their_generator_would_be_taken_for_a_value(use):
    with pytest.raises(InvalidArgumentError, match='got the generator function .*: return a value, or .* flat_map'):
        use()
    assert list(dataset.flat_map(each, max_fan_out=1)) == list(dataset.to_iter_dataset().flat_map(each)) == [0, 1, 2, 3]
