"""The Trainer of Lightning with 'ddp_spawn': a loader is made before the ranks exist, and another one by each rank."""

import logging
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

import granular
from granular.integrations.torch import IterableDataset
from tests.drivers.kinds import BATCH, EPOCHS, KINDS, Setting, dataset, ids_of, ids_of_rank
from tests.drivers.results import Case, Epochs, Recorder

RANKS = 2


class Model(lightning.LightningModule):
    """Logs the ids of each step and of each validation, and writes them at the end."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self._folder = folder
        self.seen: Epochs = [[] for _ in range(EPOCHS)]
        self.validated: Epochs = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen[self.trainer.current_epoch] += ids_of(batch)
        return self.layer(torch.ones(1, 1)).sum()

    def val_dataloader(self) -> Any:
        return KINDS['Loader'].make(Setting(self.trainer.global_rank, RANKS, shuffled=False))

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated[-1] += ids_of(batch)

    def on_train_end(self) -> None:
        rank = self.trainer.global_rank
        recorder = Recorder(self._folder, rank)
        case = Case('Lightning', 'DataLoader(IterableDataset)', 0, 'whole, made before ddp_spawn')
        recorder.run(case, lambda: (self.seen, self.seen))
        expected = [ids_of_rank('Loader', Setting(rank, RANKS))] * EPOCHS
        case = Case('Lightning', 'Loader', 0, 'validation, made by ddp_spawn')
        recorder.run(case, lambda: (self.validated[1:], expected))  # behind that of the sanity check

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def main(folder: str) -> None:
    for name in ('lightning', 'lightning.pytorch', 'lightning.fabric'):
        logging.getLogger(name).setLevel(logging.ERROR)
    options = {'logger': False, 'enable_checkpointing': False, 'enable_progress_bar': False}
    trainer = lightning.Trainer(
        accelerator='cpu', devices=RANKS, strategy='ddp_spawn', max_epochs=EPOCHS, default_root_dir=folder, **options
    )
    shard = granular.ShardByTorchRank(drop_remainder=True)
    trainer.fit(Model(folder), DataLoader(IterableDataset(dataset(Setting()).batch(BATCH), shard), batch_size=None))
