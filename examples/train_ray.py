"""Train on digits from S3 with Ray Train: a worker is killed, and the run resumes with another number of workers.

Each worker has a Loader, which reads its part of every global batch. The state of a loader is a step: it is saved with
the model, and it fits any number of workers. So each digit is used exactly once in the epoch.
"""

import argparse
import os
import pathlib
import shutil
import tempfile

import numpy as np
import ray
import torch
from digits import bucket, prepare
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig, get_checkpoint, get_context, report
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn
from train_torch import accuracy, cnn

import granular

BATCH, LENGTH, EVERY = 16, 1440, 3  # of a worker; of the epoch, which 2 and 3 workers divide; steps to a checkpoint


def numbered(index: int, datapoint: dict) -> dict:
    """Convert a datapoint, with its index."""
    return {**prepare(datapoint), 'index': np.int64(index)}


def train(config: dict) -> None:
    """Train in one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, workers = get_context().get_world_rank(), get_context().get_world_size()
    reader = granular.DatasetReader(config['url'], granular.decoders, cache_keys=('refs', 'label'))
    source = granular.MapDataset.source(reader)[:LENGTH].map_with_index(numbered).shuffle(seed=0)
    model, seen = prepare_model(cnn()), []
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with granular.Loader(source, BATCH, shard_id=rank, num_shards=workers) as loader:
        if checkpoint := get_checkpoint():
            with checkpoint.as_directory() as folder:
                saved = torch.load(pathlib.Path(folder) / 'state.pt', weights_only=True)
            model.module.load_state_dict(saved['model'])
            optimizer.load_state_dict(saved['optimizer'])
            loader.load_state_dict(saved['loader'])
            seen = saved['seen']
        for number, batch in enumerate(loader, 1):
            if rank == config['killed'] and number == config['at']:
                os._exit(1)  # as if its machine had failed
            images, labels = torch.from_numpy(batch['image']), torch.from_numpy(batch['label'])
            loss = nn.functional.cross_entropy(model(images), labels.long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            used = torch.empty(workers * BATCH, dtype=torch.int64)
            torch.distributed.all_gather_into_tensor(used, torch.from_numpy(batch['index']))
            seen = seen + used.tolist()
            if number % EVERY == 0 or loader.consumed == LENGTH:
                save(rank, {'workers': workers, 'seen': len(seen), 'different': len(set(seen))}, {
                    'model': model.module.state_dict(), 'optimizer': optimizer.state_dict(),
                    'loader': loader.state_dict(), 'seen': seen,
                })  # fmt: skip


def save(rank: int, metrics: dict, state: dict) -> None:
    """Save the state of the workers, which is that of one of them, and report the metrics."""
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            torch.save(state, pathlib.Path(folder) / 'state.pt')
        report(metrics, checkpoint=Checkpoint(folder) if rank == 0 else None)


def run(url: str, folder: str, workers: int, killed: int = -1, at: int = 0) -> ray.train.Result:
    """Run, or resume, the training with a number of workers."""
    return TorchTrainer(
        train,
        train_loop_config={'url': url, 'killed': killed, 'at': at},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name='digits', storage_path=folder, checkpoint_config=CheckpointConfig(num_to_keep=1)),
    ).fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--url', help='a folder for the digits in any store (default: an S3 server of this program)')
    args = parser.parse_args()
    folder = tempfile.mkdtemp(prefix='ray-')
    with bucket(args.url) as path:
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level='error', _temp_dir=folder)
        try:
            try:
                run(path / 'train', folder, workers=2, killed=1, at=20)
            except ray.train.TrainingFailedError:
                print('a worker was killed at step 20')
            result = run(path / 'train', folder, workers=3)
            print('resumed with {workers} workers: {seen} digits, {different} different ones'.format(**result.metrics))
            model = cnn()
            with result.checkpoint.as_directory() as saved:
                model.load_state_dict(torch.load(pathlib.Path(saved) / 'state.pt', weights_only=True)['model'])
            print(f'accuracy on the test set: {accuracy(model, path / "test"):.3f}')
        finally:
            ray.shutdown()
            shutil.rmtree(folder)


if __name__ == '__main__':
    main()
