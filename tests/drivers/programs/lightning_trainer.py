"""The Trainer of Lightning: epochs, limits, validation, loaders made anew, and checkpoints at every point."""

import copy
import dataclasses
import datetime
import logging
import os
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torchdata.stateful_dataloader import StatefulDataLoader

from granular.integrations.lightning import Resumable
from tests.drivers.kinds import BATCH, EPOCHS, KINDS, Kind, PlainUnsized, Setting, dataset, ids_of, ids_of_rank
from tests.drivers.results import Case, Epochs, Recorder

POINTS = ('before the first batch', 'in an epoch', 'after the last batch', 'after validation', 'between epochs')
STOPPED_IN = 1  # the epoch in which checkpoints are saved
AT = 2  # the batch behind which one is saved in the middle of it
LIMIT = 2


class Model(lightning.LightningModule):
    """Logs the ids of each step by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: Epochs = [[] for _ in range(EPOCHS)]
        self.validated: Epochs = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if isinstance(batch, dict):
            self.seen[self.trainer.current_epoch] += ids_of(batch)
        return self.layer(torch.ones(1, 1)).sum()

    def on_validation_epoch_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append([])

    def validation_step(self, batch: Any, index: int) -> None:
        if not self.trainer.sanity_checking and isinstance(batch, dict):
            self.validated[-1] += ids_of(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Saver(lightning.Callback):
    """Saves a checkpoint at each point, with what was seen until then."""

    def __init__(self, folder: str, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self.saved: dict[str, tuple[str, Epochs]] = {}

    def _save(self, trainer: Any, model: Any, point: str) -> None:
        if point not in self.saved:
            path = os.path.join(self._folder, point.replace(' ', '_') + '.ckpt')
            trainer.save_checkpoint(path)
            self.saved[point] = path, copy.deepcopy(model.seen)

    def on_train_start(self, trainer: Any, model: Any) -> None:
        self._save(trainer, model, 'before the first batch')

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.current_epoch == STOPPED_IN and index == AT:
            self._save(trainer, model, 'in an epoch')
        if trainer.current_epoch == STOPPED_IN and index == self._steps - 1:
            self._save(trainer, model, 'after the last batch')

    def on_validation_end(self, trainer: Any, model: Any) -> None:
        if trainer.current_epoch == STOPPED_IN and not trainer.sanity_checking:
            self._save(trainer, model, 'after validation')

    def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
        if trainer.current_epoch == STOPPED_IN:
            self._save(trainer, model, 'between epochs')


class Data(lightning.LightningDataModule):
    """A loader that is made anew each time that Lightning asks for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make

    def train_dataloader(self) -> Any:
        return self._make()


class Driver:
    """Runs the cases of one kind of loader."""

    def __init__(self, recorder: Recorder, name: str, kind: Kind, setting: Setting, folder: str) -> None:
        self._recorder, self._name, self._kind, self._setting = recorder, name, kind, setting
        self._folder = folder

    def _make(self, shuffled: bool = True) -> Any:
        return self._kind.make(dataclasses.replace(self._setting, shuffled=shuffled))

    def _trainer(self, **options: Any) -> Any:
        ddp = DDPStrategy(timeout=datetime.timedelta(seconds=60)) if self._setting.ranks > 1 else 'auto'
        quiet = {'logger': False, 'enable_progress_bar': False, 'enable_model_summary': False}
        options = {'max_epochs': EPOCHS, 'enable_checkpointing': False, 'strategy': ddp, **quiet, **options}
        return lightning.Trainer(
            accelerator='cpu', devices=self._setting.ranks, default_root_dir=self._folder, **options
        )

    def _case(self, scenario: str, function: Callable[[], tuple[Epochs, Epochs]]) -> Epochs | None:
        return self._recorder.run(Case('Lightning', self._name, self._setting.workers, scenario), function)

    def run_whole(self, mode: str = '') -> tuple[Epochs | None, Saver]:
        """Run the whole training, and return what it saw, with the checkpoints."""
        saver = Saver(self._folder, self._setting.steps)
        return self._case(f'whole{mode}', lambda: self._whole(saver)), saver

    def run(self) -> None:
        """Run each case: the whole training first, with which the others are compared."""
        whole, saver = self.run_whole()
        if whole is None:
            return
        few = self._setting.workers > 0  # the other cases take as many processes, and are of the consumer alone
        for point in ('in an epoch', 'between epochs') if few else POINTS:
            self._case(f'resumed {point}', lambda point=point: self._resumed(saver.saved.get(point), whole))
        if few:
            return
        self._case('a look at the first batch', lambda: self._looked(whole))
        self._case('limit_train_batches', lambda: self._limited(whole))
        self._case('reload_dataloaders_every_n_epochs', lambda: self._reloaded(whole))
        self._case('validation', lambda: self._validated(None))
        self._case('limit_val_batches', lambda: self._validated(LIMIT))

    def _whole(self, saver: Saver) -> tuple[Epochs, Epochs]:
        model = Model()
        self._trainer(callbacks=[saver]).fit(model, self._make(), some_data())
        return model.seen, model.seen

    def _resumed(self, saved: tuple[str, Epochs] | None, whole: Epochs) -> tuple[Epochs, Epochs]:
        if saved is None:
            raise AssertionError('Lightning did not reach this point')
        path, before = saved
        model = Model()
        self._trainer().fit(model, self._make(), some_data(), ckpt_path=path)
        return [first + rest for first, rest in zip(before, model.seen, strict=True)], whole

    def _looked(self, whole: Epochs) -> tuple[Epochs, Epochs]:
        model, loader = Model(), self._make()
        next(iter(loader))
        self._trainer().fit(model, loader)
        return model.seen, whole

    def _limited(self, whole: Epochs) -> tuple[Epochs, Epochs]:
        model = Model()
        self._trainer(limit_train_batches=LIMIT).fit(model, self._make())
        return model.seen, [ids[: LIMIT * BATCH] for ids in whole]

    def _reloaded(self, whole: Epochs) -> tuple[Epochs, Epochs]:
        model = Model()
        self._trainer(reload_dataloaders_every_n_epochs=1).fit(model, datamodule=Data(self._make))
        return model.seen, whole

    def _validated(self, limit: int | None) -> tuple[Epochs, Epochs]:
        model = Model()
        self._trainer(limit_val_batches=limit).fit(model, some_data(), self._make(shuffled=False))
        each = ids_of_rank(self._name, self._setting)
        return model.validated, [each[: None if limit is None else limit * BATCH]] * EPOCHS


def with_its_sampler(recorder: Recorder, setting: Setting, folder: str) -> None:
    """Train with a map-style dataset, whose sampler Lightning replaces on several ranks."""

    def make(setting: Setting) -> Any:
        source = dataset(dataclasses.replace(setting, shuffled=False))
        return torch.utils.data.DataLoader(source, BATCH, shuffle=True)

    driver = Driver(recorder, 'DataLoader(MapDataset)', Kind(make), setting, folder)
    driver.run_whole(', shuffle=True')


RESUMABLE = {
    'Resumable(StatefulDataLoader)': Kind(
        lambda setting: Resumable(KINDS['StatefulDataLoader(IterableDataset)'].make(setting))
    )
}


UNSIZED = {
    'StatefulDataLoader(unsized iterable of torch)': Kind(
        lambda setting: StatefulDataLoader(PlainUnsized(setting), batch_size=None), has_workers=False
    )
}


def some_data() -> Any:
    return torch.utils.data.DataLoader(range(8), batch_size=4)


def main(folder: str) -> None:
    for name in ('lightning', 'lightning.pytorch', 'lightning.fabric'):
        logging.getLogger(name).setLevel(logging.ERROR)
    rank, ranks = int(os.environ.get('RANK', '0')), int(os.environ.get('WORLD_SIZE', '1'))
    recorder = Recorder(folder, rank)
    for name, kind in (KINDS | RESUMABLE | UNSIZED).items():
        for workers in kind.workers():
            setting = Setting(rank, ranks, workers)
            path = os.path.join(folder, f'{name}{workers}')
            os.makedirs(path, exist_ok=True)
            Driver(recorder, name, kind, setting, path).run()
    path = os.path.join(folder, 'sampler')
    os.makedirs(path, exist_ok=True)
    with_its_sampler(recorder, Setting(rank, ranks), path)
