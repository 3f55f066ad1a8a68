"""Trainings over planned rows and batches under Lightning and the HF Trainer, resumed: each document once an epoch."""

import collections
import logging

import lightning
import numpy as np
import pytest
import torch
import transformers
from torchdata.stateful_dataloader import StatefulDataLoader

import granular
from granular.grain.sharding import NoSharding
from granular.integrations.lightning import Resumable
from granular.integrations.torch import IterableDataset

pytestmark = pytest.mark.filterwarnings('ignore')  # of the frameworks

SIZES = np.random.default_rng(0).integers(1, 17, 60).tolist()
EPOCHS, STOP = 3, 1.5  # epochs after which the training stops


def planned(strategy):
    documents = [{'tokens': np.full(size, i, np.int64)} for i, size in enumerate(SIZES)]
    dataset = granular.MapDataset.source(documents).shuffle(seed=1)
    if strategy == 'batches':
        return dataset.batch_by_size('tokens', 64, align=2)
    return dataset.pack({'tokens': 16}, strategy=strategy).batch(2)


def documents_of(batch):
    """Return the document of each token of a batch."""
    if 'tokens_sizes' in batch:
        rows = zip(batch['tokens'].tolist(), batch['tokens_sizes'].tolist(), strict=True)
        return [token for row, size in rows for token in row[:size]]
    return batch['tokens'][batch['tokens_segment_ids'] > 0].tolist()


def check(seen, strategy):
    """Compare what a training saw with the batches in order, and with the documents."""
    batches = planned(strategy)
    expected = [documents_of(batch) for batch in batches.repeat(EPOCHS)]
    assert [sorted(tokens) for tokens in seen] == [sorted(tokens) for tokens in expected]
    counts = collections.Counter(token for tokens in seen for token in tokens)
    assert counts == {i: size * EPOCHS for i, size in enumerate(SIZES)}


class Module(lightning.LightningModule):
    def __init__(self, steps, path):
        super().__init__()
        self.layer, self.seen, self.steps, self.path = torch.nn.Linear(1, 1), [], steps, path

    def training_step(self, batch, index):
        self.seen.append(documents_of(batch))
        return self.layer(torch.ones(1, 1)).sum()

    def on_train_batch_end(self, outputs, batch, index):
        if self.global_step == self.steps:
            self.trainer.save_checkpoint(self.path)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


@pytest.mark.parametrize('strategy', ['best_fit', 'batches'])
def test_lightning(tmp_path, strategy):
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    steps, seen = int(STOP * len(planned(strategy))), []
    for until, resumed in ((steps, None), (EPOCHS * len(planned(strategy)), tmp_path / 'state')):
        module = Module(steps, tmp_path / 'state')
        trainer = lightning.Trainer(
            max_steps=until, max_epochs=EPOCHS, accelerator='cpu', logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip
        loader = Resumable(StatefulDataLoader(IterableDataset(planned(strategy)), batch_size=None))
        trainer.fit(module, loader, ckpt_path=resumed)
        seen += module.seen
    check(seen, strategy)


def tensors(batches):
    (batch,) = batches
    return {key: torch.as_tensor(value) for key, value in batch.items()}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def forward(self, **batch):
        self.seen.append(documents_of(batch))
        return {'loss': self.layer(torch.ones(1, 1)).sum()}


@pytest.mark.parametrize('strategy', ['best_fit', 'batches'])
def test_hf_trainer(tmp_path, strategy):
    steps, seen = int(STOP * len(planned(strategy))), []
    for until, resumed in ((steps, None), (EPOCHS * len(planned(strategy)), tmp_path / f'checkpoint-{steps}')):
        model = Model()
        arguments = transformers.TrainingArguments(
            tmp_path, use_cpu=True, max_steps=until, save_steps=steps, report_to=[], disable_tqdm=True,
            logging_strategy='no', remove_unused_columns=False, per_device_train_batch_size=1,
            dataloader_pin_memory=False,
        )  # fmt: skip
        data = IterableDataset(planned(strategy), NoSharding(), sized=True)
        trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=tensors)
        trainer.train(resume_from_checkpoint=resumed)
        seen += model.seen
    check(seen, strategy)
