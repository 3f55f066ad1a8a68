"""Ray Train: two workers train and save checkpoints, and those of a second run resume from each state in them."""

import json
import os
import pathlib
import tempfile
from typing import Any

import ray
from ray.train import Checkpoint, RunConfig, ScalingConfig, get_checkpoint, get_context, report
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader

from granular.integrations.torch import IterableDataset
from tests import ROOT
from tests.drivers.kinds import BATCH, KINDS, Kind, Setting, dataset
from tests.drivers.loops import Driver
from tests.drivers.results import Recorder

RANKS = 2
NAMES = ('Loader', 'Batches(Loader)', 'Batches(stream)', 'DataLoader(IterableDataset)',
         'StatefulDataLoader(IterableDataset)')  # fmt: skip


def work(config: dict[str, Any]) -> None:
    """Run the cases of one worker: those of the whole training, or those that resume from the checkpoint."""
    rank = get_context().get_world_rank()
    recorder = Recorder(config['folder'], rank)
    drivers = {}
    for name in NAMES:
        has_state = not name.startswith('DataLoader(')
        states = {'save': save, 'load': load} if has_state else {}
        drivers[name] = Driver(recorder, 'Ray Train', name, KINDS[name], Setting(rank, RANKS), **states)
    if (before := get_checkpoint()) is not None:
        with before.as_directory() as folder:
            states = json.loads(pathlib.Path(folder, f'{rank}.json').read_text())
        for name, driver in drivers.items():
            driver.run_resumed(states[name])
        return
    # Made by the program that starts the workers, which ask for their rank themselves.
    made = Kind(lambda setting: DataLoader(config['made'], batch_size=None))
    Driver(recorder, 'Ray Train', 'DataLoader(IterableDataset)', made, Setting(rank, RANKS), mode=', made before').run()
    states = {name: driver.run_whole() for name, driver in drivers.items()}
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, f'{rank}.json').write_text(json.dumps(states))
        report({}, checkpoint=Checkpoint(folder))


def save(loader: Any, name: str) -> Any:
    return loader.state_dict()


def load(loader: Any, state: Any) -> None:
    loader.load_state_dict(state)


def main(folder: str) -> None:
    made = IterableDataset(dataset(Setting()).batch(BATCH))
    with tempfile.TemporaryDirectory(prefix='ray-') as temporary:  # short, as addresses of sockets are
        ray.init(
            address='local', num_cpus=RANKS + 1, object_store_memory=100 << 20, include_dashboard=False,
            logging_level='error', _temp_dir=temporary, runtime_env={'env_vars': {'PYTHONPATH': str(ROOT)}},
        )  # fmt: skip
        try:
            for _ in range(2):  # the second one finds the checkpoint of the first
                TorchTrainer(
                    work,
                    train_loop_config={'folder': folder, 'made': made},
                    scaling_config=ScalingConfig(num_workers=RANKS),
                    run_config=RunConfig(name='drivers', storage_path=os.path.join(folder, 'storage')),
                ).fit()
        finally:
            ray.shutdown()
