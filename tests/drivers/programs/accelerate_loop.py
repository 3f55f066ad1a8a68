"""Accelerate: loaders that it prepares, whose data it divides itself, and loaders that it only saves."""

import dataclasses
import datetime
import os
from collections.abc import Callable
from typing import Any

from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from torch.utils.data import DataLoader

import granular
from granular.integrations.torch import IterableDataset
from tests.drivers.kinds import BATCH, EPOCHS, KINDS, Kind, Setting, dataset, ids_of
from tests.drivers.loops import Driver
from tests.drivers.results import Case, Epochs, Recorder

OF_WORKERS = ('accelerate.data_loader',)  # a module
TIMEOUT = InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=60))


def accelerator(stateful: bool, dispatches: bool | None) -> Accelerator:
    loading = DataLoaderConfiguration(dispatch_batches=dispatches, use_stateful_dataloader=stateful)
    return Accelerator(cpu=True, dataloader_config=loading, kwargs_handlers=[TIMEOUT])


class Session:
    """An Accelerator for each loader, as each program has one; its states are folders."""

    def __init__(self, folder: str, prepares: bool, stateful: bool = False, dispatches: bool | None = None) -> None:
        self._folder, self._prepares = folder, prepares
        self._stateful, self._dispatches = stateful, dispatches
        self.accelerator = accelerator(stateful, dispatches)

    def prepare(self, loader: Any) -> Any:
        self.accelerator = accelerator(self._stateful, self._dispatches)
        if self._prepares:
            return self.accelerator.prepare(loader)
        self.accelerator.register_for_checkpointing(loader)
        return loader

    def save(self, loader: Any, name: str) -> str:
        path = self.accelerator.save_state(os.path.join(self._folder, name.replace(' ', '_')))
        self.accelerator.wait_for_everyone()
        return path

    def load(self, loader: Any, state: str) -> None:
        self.accelerator.load_state(state)

    def iterate(self, loader: Any, number: int) -> Any:
        return self.accelerator.skip_first_batches(loader, number) if number else loader


PREPARED, REGISTERED = 'Accelerate, prepared', 'Accelerate, registered'


def main(folder: str) -> None:
    first = accelerator(False, None)
    rank, ranks = first.process_index, first.num_processes
    recorder = Recorder(folder, rank)
    for name, kind in KINDS.items():
        for workers in kind.workers():
            path = os.path.join(folder, f'{name}{workers}')
            if not name.startswith('DataLoader('):
                session = Session(f'{path}registered', prepares=False)
                states = {'save': session.save, 'load': session.load}
                setting = Setting(rank, ranks, workers, asked=granular.ShardByTorchRank())
                Driver(recorder, REGISTERED, name, kind, setting, **states, prepare=session.prepare).run()
            if kind.has_workers:
                for dispatches in (None, False) if 'terable' in name and not workers else (None,):
                    prepared(recorder, name, kind, Setting(rank, ranks, workers), f'{path}{dispatches}', dispatches)
    by_default(recorder, Setting(rank, ranks))
    first.end_training()


def prepared(recorder: Recorder, name: str, kind: Kind, setting: Setting, folder: str, dispatches: bool | None) -> None:
    """Run the cases of a loader whose data Accelerate divides; it makes a StatefulDataLoader itself."""
    stateful = name.startswith('Stateful')
    session = Session(folder, True, stateful, dispatches)
    states: dict[str, Callable[..., Any]] = {'save': session.save, 'load': session.load} if stateful else {}
    setting = dataclasses.replace(setting, divides_maps=True, divides_iterables=True)
    plain = KINDS[name.removeprefix('Stateful')]
    mode = '' if dispatches is None else f', dispatch_batches={dispatches}'
    driver = Driver(
        recorder, PREPARED, name, plain, setting, **states, prepare=session.prepare, iterate=session.iterate, mode=mode
    )
    whole = driver.run_whole()
    if setting.ranks == 1 or not stateful:  # several ranks write the states of their loaders into one file at once
        driver.run_resumed(whole)


def by_default(recorder: Recorder, setting: Setting) -> None:
    """Train with an IterableDataset that was told nothing about ranks."""

    def train(driver: str) -> tuple[Epochs, Epochs]:
        session = accelerator(False, None)
        loader: Any = DataLoader(IterableDataset(dataset(setting)), batch_size=BATCH)
        loader = session.prepare(loader) if driver == PREPARED else loader
        seen = [[i for batch in loader for i in ids_of(batch)] for _ in range(EPOCHS)]
        return seen, seen

    for driver in (PREPARED, REGISTERED):
        case = Case(driver, 'DataLoader(IterableDataset)', 0, 'whole, without shard_options')
        recorder.run(case, lambda driver=driver: train(driver))
