"""The Trainer of Hugging Face, with a model that is made here: it divides the data by Accelerate."""

import copy
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from granular.grain.sharding import NoSharding
from granular.integrations.torch import IterableDataset
from tests.drivers.kinds import BATCH, EPOCHS, PlainIterable, PlainMap, PlainSized, Setting, dataset
from tests.drivers.results import Case, Epochs, Recorder

OF_WORKERS = ('transformers.data.data_collator', 'accelerate.data_loader')  # modules
POINTS = ('in the first epoch', 'between epochs', 'in the second epoch')
LIMIT = 2


def _sized(setting: Setting) -> IterableDataset:
    return IterableDataset(dataset(setting), NoSharding(), sized=True)


def _unsized(setting: Setting) -> IterableDataset:
    return IterableDataset(dataset(setting), NoSharding())


DATASETS: dict[str, Callable[[Setting], Any]] = {
    'DataLoader(MapDataset)': lambda setting: dataset(Setting(shuffled=False)),
    'DataLoader(IterableDataset)': _unsized,
    'DataLoader(IterableDataset, sized=True)': _sized,
    'DataLoader(list of torch)': lambda setting: PlainMap(),
    'DataLoader(iterable of torch)': PlainIterable,
    'DataLoader(sized iterable of torch)': PlainSized,
}


class Model(torch.nn.Module):
    """Logs the ids of each step by epoch, and of each evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.epoch, self.seen, self.evaluated = 0, [list[int]() for _ in range(EPOCHS)], list[list[int]]()

    def forward(self, id: Any = None, labels: Any = None) -> dict[str, Any]:
        if self.training:
            self.seen[self.epoch] += id.tolist()
        else:
            self.evaluated[-1] += id.tolist()
        return {'loss': self.layer(torch.ones(1, 1)).sum()}


class Callback(TrainerCallback):
    """Tells the model the epoch, and saves at the points."""

    def __init__(self, model: Model, steps: int, saves: bool) -> None:
        self._model, self._saves, self._steps = model, saves, steps
        self._at = {
            'in the first epoch': LIMIT, 'between epochs': steps, 'in the second epoch': steps + LIMIT
        }  # fmt: skip
        self.saved: dict[str, tuple[int, Epochs]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **other: Any) -> None:
        self._model.epoch = state.global_step // self._steps

    def on_step_end(self, args: Any, state: Any, control: Any, **other: Any) -> None:
        for point, step in self._at.items():
            if self._saves and state.global_step == step:
                self.saved[point] = step, copy.deepcopy(self._model.seen)
                control.should_save = True
        if state.global_step % self._steps == 0:  # an evaluation follows
            self._model.evaluated.append([])


class Driver:
    """Runs the cases of one dataset."""

    def __init__(self, recorder: Recorder, name: str, setting: Setting, folder: str) -> None:
        self._recorder, self._name, self._setting, self._folder = recorder, name, setting, folder
        self._has_length = 'sized' in name or 'Map' in name or 'list' in name

    def _train(self, saves: bool = False, resumed: int | None = None, **options: Any) -> tuple[Model, Callback]:
        model = Model()
        callback = Callback(model, self._setting.steps, saves)
        until = {'num_train_epochs': EPOCHS} if self._has_length else {'max_steps': EPOCHS * self._setting.steps}
        arguments = TrainingArguments(
            self._folder, use_cpu=True, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
            dataloader_num_workers=self._setting.workers, ddp_timeout=60, report_to=[],
            save_strategy='no', logging_strategy='no', disable_tqdm=True, remove_unused_columns=False,
            dataloader_pin_memory=False, **{**until, **options},
        )  # fmt: skip
        unshuffled = dataclasses.replace(self._setting, shuffled=False)
        trainer = Trainer(
            model, arguments, train_dataset=DATASETS[self._name](self._setting),
            eval_dataset=DATASETS[self._name](unshuffled), callbacks=[callback],
        )  # fmt: skip
        path = None if resumed is None else os.path.join(self._folder, f'checkpoint-{resumed}')
        trainer.train(resume_from_checkpoint=path)
        return model, callback

    def _case(self, scenario: str, function: Callable[[], tuple[Epochs, Epochs]]) -> Epochs | None:
        return self._recorder.run(Case('HF Trainer', self._name, self._setting.workers, scenario), function)

    def run(self) -> None:
        saved: dict[str, tuple[int, Epochs]] = {}

        def train_whole() -> tuple[Epochs, Epochs]:
            model, callback = self._train(saves=True)
            saved.update(callback.saved)
            return model.seen, model.seen

        whole = self._case('whole', train_whole)
        if whole is None:
            return
        few = self._setting.workers > 0 or self._setting.ranks > 1  # each case takes a second
        for point in POINTS[-1:] if few else POINTS:
            self._case(f'resumed {point}', lambda point=point: self._resumed(saved[point], whole))
        if not self._setting.workers:
            self._case('validation', self._validated)
        if not few:
            self._case('max_steps', lambda: self._bounded(whole))

    def _resumed(self, saved: tuple[int, Epochs], whole: Epochs) -> tuple[Epochs, Epochs]:
        step, before = saved
        model, _ = self._train(resumed=step)
        return [first + rest for first, rest in zip(before, model.seen, strict=True)], whole

    def _validated(self) -> tuple[Epochs, Epochs]:
        """Evaluate a few times: the same ids each time."""
        model, _ = self._train(eval_strategy='steps', eval_steps=self._setting.steps)
        return model.evaluated, [model.evaluated[0]] * EPOCHS

    def _bounded(self, whole: Epochs) -> tuple[Epochs, Epochs]:
        """Train for one epoch and a few steps."""
        model, _ = self._train(max_steps=self._setting.steps + LIMIT)
        return model.seen[:2], [whole[0], whole[1][: LIMIT * BATCH]]


def main(folder: str) -> None:
    rank, ranks = int(os.environ.get('RANK', '0')), int(os.environ.get('WORLD_SIZE', '1'))
    recorder = Recorder(folder, rank)
    for name in DATASETS:
        for workers in (0, 2):
            setting = Setting(rank, ranks, workers, divides_maps=True, divides_iterables=True)
            path = os.path.join(folder, f'{name}{workers}')
            os.makedirs(path, exist_ok=True)
            Driver(recorder, name, setting, path).run()
