"""Trainings under Lightning, resumed, over batches that do not know their number."""

import logging

import lightning
import numpy as np
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import granular
from granular.integrations.lightning import Resumable
from granular.integrations.torch import Batches, IterableDataset

pytestmark = pytest.mark.filterwarnings('ignore')  # of the frameworks

BATCHES, EPOCHS = 8, 2


def filtered():
    numbers = granular.MapDataset.range(48).shuffle(seed=1).to_iter_dataset()
    return numbers.filter(lambda i: i % 3 != 0).map(lambda i: {'id': np.int64(i)}).batch(4)


def endless():
    return granular.Loader(granular.sources.Epochs([{'id': np.int64(i)} for i in range(48)], seed=1), 4)


LOADERS = {
    'Batches': lambda: Batches(filtered()),
    'StatefulDataLoader': lambda: StatefulDataLoader(IterableDataset(filtered()), batch_size=None),
    'Loader': endless,
}


class Module(lightning.LightningModule):
    def __init__(self, stop, path):
        super().__init__()
        self.layer, self.seen, self.stop, self.path = torch.nn.Linear(1, 1), [], stop, path

    def training_step(self, batch, index):
        self.seen.append([int(i) for i in batch['id']])
        return self.layer(torch.ones(1, 1)).sum()

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_step == self.stop:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def train(name, path, stop=None, resumed=None):
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    module = Module(stop, path)
    trainer = lightning.Trainer(
        max_steps=-1 if stop is None else stop, max_epochs=EPOCHS, accelerator='cpu', logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=path.parent,
    )  # fmt: skip
    trainer.fit(module, Resumable(LOADERS[name](), BATCHES), ckpt_path=resumed)
    return module.seen


@pytest.mark.parametrize('name', LOADERS)
def test_resumed_training_sees_each_batch(tmp_path, name):
    path = tmp_path / 'state'
    whole = train(name, path)
    assert len(whole) == BATCHES * EPOCHS
    for stop in (3, BATCHES, BATCHES + 2):
        assert train(name, path, stop) + train(name, path, resumed=path) == whole


def test_batches_without_a_length_are_reported(tmp_path, caplog):
    trainer = lightning.Trainer(
        max_steps=1, accelerator='cpu', logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(None, tmp_path), Batches(filtered()))
    assert 'Batches: has no length: Lightning reads one batch ahead of it' in caplog.text
    with pytest.raises(granular.InvalidArgumentError, match='Resumable: .* pass length=, the number of batches'):
        Resumable(LOADERS['StatefulDataLoader']())
