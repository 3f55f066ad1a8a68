"""The order of a plan in an epoch is made once for all worker processes, and ahead of the epoch."""

import asyncio
import os
import pathlib
import threading

import numpy as np
import pytest

from granular import MapDataset, ReadOptions, aio, shuffle
from granular.grain import MultiprocessingOptions
from tests.support.states import plain

ELEMENTS = 300_000  # more than are looked up at a time; a tenth is more than is arranged on the event loop
SLOWLY = ReadOptions(num_threads=1, prefetch_buffer_size=1)


class Noted(shuffle.Index):
    """An order that notes in a file which process looks up which epoch."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self._path = path

    def __reduce__(self):
        return Noted, (self._path,)

    def lookup(self, positions, length, seed, epoch):
        with self._path.open('a') as file:
            file.write(f'{epoch} {os.getpid()}\n')
        return super().lookup(positions, length, seed, epoch)


class Waiting(shuffle.Index):
    """An order whose second epoch waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_end, self.calls = threading.Event(), threading.Event(), 0

    def lookup(self, positions, length, seed, epoch):
        if epoch == 1:
            self.calls += 1
            self.began.set()
            assert self.may_end.wait(60)
        return super().lookup(positions, length, seed, epoch)


@pytest.mark.parametrize(
    ('start_method', 'strategy'), [('spawn', 'best_fit'), ('fork', 'concat_then_split'), ('fork', 'batches')]
)
def test_worker_processes_map_the_epoch_that_their_parent_arranged(tmp_path, start_method, strategy):
    sizes = np.random.default_rng(0).integers(1, 9, 500)
    elements = [{'tokens': np.full(size, i + 1)} for i, size in enumerate(sizes.tolist())]

    def planned(order):
        dataset = MapDataset.source(elements).shuffle(seed=1, order=order)
        if strategy == 'batches':
            return dataset.batch_by_size('tokens', 40).repeat(2)
        return dataset.pack({'tokens': 16}, strategy=strategy).repeat(2)

    file = tmp_path / 'lookups'
    rows = planned(Noted(file))
    rows[0]
    file.unlink()
    options = MultiprocessingOptions(num_workers=2, start_method=start_method)
    assert plain(list(rows.to_iter_dataset().mp_prefetch(options))) == plain(list(planned(shuffle.Index())))
    lookups = {tuple(map(int, line.split())) for line in file.read_text().splitlines()}
    assert {epoch for epoch, _ in lookups} == {1}
    assert os.getpid() not in {process for _, process in lookups}


def rows_of(dataset, order, strategy='best_fit'):
    sizes = np.ones(len(dataset), np.int64)
    return dataset.shuffle(seed=1, order=order).pack({'tokens': 100}, strategy=strategy, sizes=sizes)


@pytest.mark.parametrize('strategy', ['best_fit', 'concat_then_split'])
def test_the_next_epoch_is_arranged_before_it_is_read(strategy):
    order = Waiting()
    dataset = MapDataset.range(ELEMENTS // 10).map(lambda i: {'tokens': [i]})
    expected = rows_of(dataset, shuffle.Index(), strategy)
    late = len(expected) * 15 // 16
    stream = rows_of(dataset, order, strategy).repeat(2).to_iter_dataset(SLOWLY)
    with iter(stream) as iterator:
        iterator.set_next_index(late)
        assert plain(next(iterator)) == plain(expected[late])
        assert order.began.wait(60)
        order.may_end.set()
        iterator.set_next_index(len(expected))
        assert plain(next(iterator)) == plain(expected[len(expected)])


async def test_an_epoch_that_is_arranged_ahead_ends_with_its_iterator():
    order = Waiting()
    dataset = aio.MapDataset.range(ELEMENTS).map(lambda i: {'tokens': [i]})
    rows = await rows_of(dataset, order)
    iterator = aiter(rows.repeat(2).to_iter_dataset(SLOWLY))
    await iterator.set_next_index(len(rows) * 15 // 16)
    await anext(iterator)
    assert await asyncio.to_thread(order.began.wait, 60)
    closing = asyncio.create_task(iterator.aclose())
    for _ in range(1000):  # turns of the loop, in which it is cancelled
        await asyncio.sleep(0)
    order.may_end.set()
    await closing
    assert order.calls == 1  # of two
