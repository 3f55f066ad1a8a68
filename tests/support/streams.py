"""Streams and Loaders of each kind over a few numbers, and what iterates and saves each of them."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import granular
from granular import IterDataset, MapDataset, ReadOptions
from granular.grain import MultiprocessingOptions

COUNT = 12


class Waiting:
    """A source that waits on the loop for each of its elements."""

    def __len__(self) -> int:
        return COUNT

    async def fetch(self, indices: Any) -> list[int]:
        await asyncio.sleep(0)
        return [int(index) for index in indices]


def numbers() -> MapDataset[int]:
    """Return what all but ``waiting`` read. A test may replace it."""
    return MapDataset.range(COUNT)


def elements(**options: Any) -> IterDataset[Any]:
    return numbers().to_iter_dataset(ReadOptions(**options))


def waiting() -> IterDataset[Any]:
    return MapDataset.source(Waiting()).to_iter_dataset(ReadOptions(prefetch_buffer_size=3))


def double(x: Any) -> Any:
    return x * 2


def data_loader(**options: Any) -> granular.grain.DataLoader:
    sampler = granular.grain.samplers.IndexSampler(COUNT, shuffle=True, num_epochs=1, seed=1)
    return granular.grain.DataLoader(data_source=numbers(), sampler=sampler, operations=[double], **options)


def loader(**options: Any) -> granular.Loader:
    source = granular.sources.Transform(
        granular.sources.Epochs(numbers(), shuffle=False), lambda x, seed: {'x': np.int64(x)}
    )
    return granular.Loader(source, 2, prefetch=2, **options)


def torch_batches(*args: Any) -> Any:
    from granular.integrations import torch

    return torch.Batches(*args)


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
    'cache of a mix by name': lambda: IterDataset.mix({'a': elements(), 'b': waiting()}).cache().repeat(2),
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
    'Loader, batches of torch': lambda: torch_batches(loader(), 'cpu', 2),
    'batches of torch of a stream': lambda: torch_batches(elements().batch(2), 'cpu'),
}  # fmt: skip


def running(made: Any) -> Any:
    return made if isinstance(made, granular.Loader) else iter(made)


def save(iterator: Any) -> Any:
    return iterator.state_dict()


def consume(iterator: Iterator[Any], result: list[Any], most: int) -> None:
    """Append elements up to the given number: an interrupt comes before one is returned or once it is stored."""
    while len(result) < most:
        try:
            element = iterator.__next__()
        except StopIteration:
            return
        result.append(element)
