"""Ctrl-C inside ``next``, caught: the next call returns the same element, and the saved state is the one before it.

Interrupts come at counted points, as in ``test_interrupts.py``: on the main thread, and while it waits for the loop.
One that comes after ``next`` has returned, and before its caller stores the element, is not seen: no point is there.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import granular
from granular import IterDataset, MapDataset, MultiprocessingOptions, ReadOptions
from granular.aio.runtime.loops import ensure_event_loop
from tests.pipeline.test_map_dataset import plain
from tests.robustness.test_interrupts import Loop, MainThread, points

COUNT = 12


class Waiting:
    """A source that waits on the loop for each of its elements."""

    def __len__(self) -> int:
        return COUNT

    async def fetch(self, indices: Any) -> list[int]:
        await ensure_event_loop()
        await asyncio.sleep(0)
        return [int(index) for index in indices]


def elements(**options: Any) -> IterDataset[Any]:
    return MapDataset.range(COUNT).to_iter_dataset(ReadOptions(**options))


def waiting() -> IterDataset[Any]:
    return MapDataset.source(Waiting()).to_iter_dataset(ReadOptions(prefetch_buffer_size=3))


def double(x: Any) -> Any:
    return x * 2


def data_loader(**options: Any) -> granular.DataLoader:
    sampler = granular.IndexSampler(COUNT, shuffle=True, num_epochs=1, seed=1)
    return granular.DataLoader(data_source=range(COUNT), sampler=sampler, operations=[double], **options)


def loader(**options: Any) -> granular.Loader:
    source = granular.sources.Transform(
        granular.sources.Epochs(range(COUNT), shuffle=False), lambda x, seed: {'x': np.int64(x)}
    )
    return granular.Loader(source, 2, prefetch=2, **options)


STREAMS: dict[str, Callable[[], Any]] = {
    'plain': elements,
    'without read-ahead': lambda: elements(prefetch_buffer_size=0),
    'source that waits': waiting,
    'map': lambda: elements().map(double),
    'filter': lambda: elements().filter(lambda x: x % 3),
    'flat_map': lambda: elements().flat_map(lambda x: [x, x]),
    'batch': lambda: elements().batch(2),
    'pack': lambda: elements().map(lambda x: {'t': np.full(x % 3 + 1, x)}).pack({'t': 4}, num_packing_bins=2),
    'cache': lambda: elements().cache().repeat(2),
    'window_shuffle': lambda: elements().window_shuffle(4, seed=1),
    'zip': lambda: IterDataset.zip([elements(), elements().map(double)]),
    'mix': lambda: IterDataset.mix([elements(), waiting()], [2, 1]),
    'mix by name': lambda: IterDataset.mix({'a': elements(), 'b': elements().map(double)}),
    'interleave': lambda: IterDataset.interleave([elements(), waiting(), elements()], cycle_length=2),
    'prefetch': lambda: elements().prefetch(3),
    'prefetch of a mix': lambda: IterDataset.mix([elements(), waiting()]).prefetch(2),
    'prefetch and batch': lambda: waiting().map(double).prefetch(2).batch(2),
    'processes': lambda: elements().map(double).mp_prefetch(MultiprocessingOptions(1, start_method='fork')),
    'DataLoader': data_loader,
    'Loader': loader,
    'Loader, processes': lambda: loader(mp='fork', workers=1),
}  # fmt: skip


def running(made: Any) -> Any:
    return made if isinstance(made, granular.Loader) else iter(made)


def save(iterator: Any) -> Any:
    return iterator.save() if isinstance(iterator, granular.Loader) else iterator.get_state()


def consume(iterator: Iterator[Any], result: list[Any], most: int) -> None:
    """Append elements up to the given number. Between two instructions behind ``__next__``, no interrupt comes."""
    while len(result) < most:
        try:
            element = iterator.__next__()
        except StopIteration:
            return
        result.append(element)


@pytest.mark.filterwarnings('ignore:coroutine .* was never awaited')  # the interrupt came before its first step
@pytest.mark.parametrize('kind', [MainThread, Loop])
@pytest.mark.parametrize('name', STREAMS)
def test_interrupted_next_loses_and_repeats_no_element(name: str, kind: Any) -> None:
    make, most = STREAMS[name], 6 if name.startswith('Loader') else 30
    expected: list[Any] = []
    with running(make()) as iterator, kind() as counted:
        consume(iterator, expected, most)
    expected = plain(expected)
    assert len(expected) > 3
    middle = counted.count // 2
    for at in itertools.chain(points(counted.count), range(middle, middle + 8)):
        result: list[Any] = []
        with running(make()) as iterator:
            interrupt = kind(at)
            try:
                with interrupt:
                    consume(iterator, result, most)
            except KeyboardInterrupt:
                pass
            state, position = save(iterator), len(result)
            consume(iterator, result, most)
            assert plain(result) == expected, f'{name}, point {at}: {interrupt.where}'
        with running(make()) as resumed:
            resumed.load_state_dict(state)
            rest = expected[:position]
            consume(resumed, rest, most)
            assert plain(rest) == expected, f'{name}, point {at}, from its state: {interrupt.where}'
