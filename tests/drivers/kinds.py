"""Loaders of all kinds over the same ids, and for each a control: the same loader over a plain dataset of torch."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import granular
from granular.grain.sharding import NoSharding
from granular.integrations.torch import Batches, IterableDataset
from tests.drivers.verdicts import LENGTH

BATCH, EPOCHS = 4, 3
WORKERS = (0, 2)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A process of the training, and how it loads."""

    rank: int = 0
    ranks: int = 1
    workers: int = 0
    shuffled: bool = True
    divides_maps: bool = False  # True if the framework divides map-style datasets
    divides_iterables: bool = False  # True if it divides iterable ones
    asked: granular.ShardOptions | None = None  # the shard_options of an IterableDataset

    @property
    def shard(self) -> granular.ShardOptions:
        return granular.ShardOptions(self.rank, self.ranks)

    @property
    def steps(self) -> int:
        """Batches of this rank in an epoch."""
        return LENGTH // BATCH // self.ranks


def numbered(index: int) -> dict[str, Any]:
    return {'id': np.int64(index)}


def dataset(setting: Setting) -> granular.MapDataset:
    """Return the datapoints, each with its id."""
    numbers = granular.MapDataset.range(LENGTH).map(numbered)
    return numbers.shuffle(seed=0) if setting.shuffled else numbers


def ids_of(batch: Any) -> list[int]:
    """Return the ids of a batch of any kind."""
    return [int(i) for i in batch['id']]


def ids_of_rank(name: str, setting: Setting) -> list[int]:
    """Return the ids that a kind gives a rank, if they are not shuffled."""
    if 'MapDataset' in name or 'list' in name or 'stream' in name:  # one by one
        return list(range(setting.rank, LENGTH, setting.ranks))
    return [i for i in range(LENGTH) if i // BATCH % setting.ranks == setting.rank]


class PlainMap(torch.utils.data.Dataset):
    """The control of a MapDataset."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return numbered(index)


class PlainIterable(torch.utils.data.IterableDataset):
    """The control of an IterableDataset, in the same orders.

    It is divided by rank and worker as torch's documentation has it, is told the epoch, and has no states. Its length
    is that of an IterableDataset: the number of its batches, none if the framework divides its elements.
    """

    def __init__(self, setting: Setting) -> None:
        elements = IterableDataset(dataset(setting), NoSharding())
        self._orders, self._epoch = [], 0
        for epoch in range(EPOCHS):
            elements.set_epoch(epoch)
            self._orders.append(np.array([element['id'] for element in elements]))
        self._setting = setting

    def __len__(self) -> int:
        if self._setting.divides_iterables:
            raise TypeError('it has no length')
        return self._setting.steps

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order, setting = self._orders[self._epoch], self._setting
        elements: Any = [{'id': i} for i in order]
        if not setting.divides_iterables:
            batches = [{'id': order[at : at + BATCH]} for at in range(0, LENGTH, BATCH)]
            elements = batches[setting.rank :: setting.ranks]
        worker = torch.utils.data.get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        yield from elements[number::workers]


class PlainSized(PlainIterable):
    """The control of an IterableDataset of single elements that has a length."""

    def __len__(self) -> int:
        return LENGTH


class PlainUnsized(PlainIterable):
    """The control of batches of a stream."""

    __len__ = None


def _map_style(loader: Callable[..., Any], source: Any, setting: Setting) -> Any:
    # A sampler that is told the epoch: the order of any other depends on what was drawn before.
    ranks, rank = (1, 0) if setting.divides_maps else (setting.ranks, setting.rank)
    sampler = torch.utils.data.DistributedSampler(source, ranks, rank, setting.shuffled)
    return loader(source, BATCH, sampler=sampler, num_workers=setting.workers)


def _iterable(loader: Callable[..., Any], source: Any, setting: Setting) -> Any:
    return loader(source, batch_size=BATCH if setting.divides_iterables else None, num_workers=setting.workers)


def _granular(setting: Setting) -> IterableDataset:
    if setting.divides_iterables:  # by their elements
        return IterableDataset(dataset(setting), NoSharding())
    return IterableDataset(dataset(setting).batch(BATCH), setting.asked)


def _loader(setting: Setting) -> granular.Loader:
    return granular.Loader(dataset(setting), BATCH, shard_id=setting.rank, num_shards=setting.ranks)


def _stream(setting: Setting) -> granular.IterDataset:
    return dataset(setting).to_iter_dataset(shard_options=setting.shard).batch(BATCH)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to load.

    Args:
      make: returns the loader.
      has_workers: True if it takes a number of workers.
    """

    make: Callable[[Setting], Any]
    has_workers: bool = True

    def workers(self) -> tuple[int, ...]:
        return WORKERS if self.has_workers else (0,)


def _numbers(setting: Setting) -> granular.MapDataset:
    return dataset(dataclasses.replace(setting, shuffled=False))  # the sampler shuffles


# With the controls that verdicts.CONTROLS names.
KINDS = {
    'Loader': Kind(_loader, has_workers=False),
    'Batches(Loader)': Kind(lambda setting: Batches(_loader(setting)), has_workers=False),
    'Batches(stream)': Kind(lambda setting: Batches(_stream(setting)), has_workers=False),
    'DataLoader(IterableDataset)': Kind(lambda setting: _iterable(DataLoader, _granular(setting), setting)),
    'StatefulDataLoader(IterableDataset)': Kind(
        lambda setting: _iterable(StatefulDataLoader, _granular(setting), setting)
    ),
    'DataLoader(MapDataset)': Kind(lambda setting: _map_style(DataLoader, _numbers(setting), setting)),
    'StatefulDataLoader(MapDataset)': Kind(lambda setting: _map_style(StatefulDataLoader, _numbers(setting), setting)),
    'DataLoader(iterable of torch)': Kind(lambda setting: _iterable(DataLoader, PlainIterable(setting), setting)),
    'StatefulDataLoader(iterable of torch)': Kind(
        lambda setting: _iterable(StatefulDataLoader, PlainIterable(setting), setting)
    ),
    'DataLoader(list of torch)': Kind(lambda setting: _map_style(DataLoader, PlainMap(), setting)),
    'StatefulDataLoader(list of torch)': Kind(lambda setting: _map_style(StatefulDataLoader, PlainMap(), setting)),
}
