"""The loop of a user, in one process or in the ranks of torchrun; loaders of torchdata, too."""

import datetime
import os
from typing import Any

import torch
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchdata import nodes

import granular
from granular.integrations.torch import IterableDataset
from tests.drivers.kinds import (
    BATCH,
    EPOCHS,
    KINDS,
    Kind,
    PlainIterable,
    Setting,
    dataset,
    ids_of,
    numbered,
)
from tests.drivers.loops import AT, Driver, rank_and_ranks
from tests.drivers.results import Case, Epochs, Recorder
from tests.drivers.verdicts import LENGTH

COMPOSER = 'Composer (imitated)'


def _nodes(source: Any) -> Any:
    return nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(source), 2))


def _stream_of_batches(setting: Setting) -> granular.IterDataset:
    return dataset(setting).batch(BATCH).to_iter_dataset(shard_options=granular.ShardByTorchRank())


NODES = {
    'nodes.IterableWrapper(stream)': Kind(lambda setting: _nodes(_stream_of_batches(setting)), has_workers=False),
    'nodes.IterableWrapper(IterableDataset)': Kind(
        lambda setting: _nodes(IterableDataset(dataset(setting).batch(BATCH))), has_workers=False
    ),
    'nodes.IterableWrapper(iterable of torch)': Kind(lambda setting: _nodes(PlainIterable(setting)), has_workers=False),
}


def save(loader: Any, name: str) -> Any:
    return loader.state_dict()


def load(loader: Any, state: Any) -> None:
    loader.load_state_dict(state)


def save_as_composer(loader: Any, name: str) -> Any:
    """Save as Composer does: it asks the dataset, tells what it counted, and tells no epochs."""
    return loader.dataset.state_dict(num_samples=AT * BATCH if name == 'in an epoch' else 0, from_beginning=True)


def load_as_composer(loader: Any, state: Any) -> None:
    loader.dataset.load_state_dict(state)


def replicas(setting: Setting) -> tuple[Epochs, Epochs]:
    """Train on ranks that are peers in one replica of the model: both see all ids, in the same order."""
    mesh = init_device_mesh('cpu', (1, setting.ranks), mesh_dim_names=('data', 'tensor'))
    shard = granular.ShardByTorchRank(mesh=mesh, dims=('data',))
    loader = KINDS['DataLoader(IterableDataset)'].make(Setting(shuffled=False, asked=shard))
    seen = [[i for batch in loader for i in ids_of(batch)] for _ in range(EPOCHS)]
    return seen, [list(range(LENGTH))] * EPOCHS


def uneven(setting: Setting) -> tuple[Epochs, Epochs]:
    """Train with DistributedDataParallel and Join on ranks that have unequal numbers of batches."""
    length = LENGTH - BATCH  # an odd number of batches
    batches = granular.MapDataset.range(length).map(numbered).batch(BATCH)
    loader = DataLoader(IterableDataset(batches), batch_size=None)
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    seen: Epochs = []
    for _ in range(EPOCHS):
        seen.append([])
        with Join([model]):
            for batch in loader:
                seen[-1] += ids_of(batch)
                model(torch.ones(1, 1)).sum().backward()
    each = [i for i in range(length) if i // BATCH % setting.ranks == setting.rank]
    return seen, [each] * EPOCHS


def composer(recorder: Recorder) -> None:
    """Run the cases of Composer, which takes and drops batches itself where a dataset has no states."""
    states = {'save': save_as_composer, 'load': load_as_composer}
    for name, has_state in (('DataLoader(IterableDataset)', True), ('DataLoader(iterable of torch)', False)):
        for workers, mode in ((0, ''), (2, ', with workers')):
            options = {**(states if has_state else {}), 'tells': False, 'mode': mode}
            Driver(recorder, COMPOSER, name, KINDS[name], Setting(workers=workers), **options).run()


def main(folder: str) -> None:
    if 'RANK' in os.environ:
        torch.distributed.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))
    rank, ranks = rank_and_ranks()
    recorder = Recorder(folder, rank)
    for name, kind in (KINDS | NODES).items():
        for workers in kind.workers():
            setting = Setting(rank, ranks, workers)
            states = {} if name.startswith('DataLoader(') else {'save': save, 'load': load}
            Driver(recorder, 'own loop', name, kind, setting, **states).run()
    if ranks == 1:
        composer(recorder)
    if ranks > 1:
        setting = Setting(rank, ranks)
        recorder.run(Case('own loop', 'DataLoader(IterableDataset)', 0, 'Join'), lambda: uneven(setting))
        case = Case('own loop', 'DataLoader(IterableDataset)', 0, 'peers of a replica')
        recorder.run(case, lambda: replicas(setting))
        torch.distributed.destroy_process_group()
