"""Hosts that are workers of Ray Train: their states travel in its checkpoints, to another number of workers."""

import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.pipeline.compositions.generator import composition
from tests.pipeline.compositions.runs import Run
from tests.pipeline.compositions.trials import Parts, Result, host_trial


def ray_train(seeds: Sequence[int], counts: Sequence[int]) -> dict[int, Result]:
    """Run compositions with one number of workers after another, on the cluster to which this process is connected."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    trials = {seed: host_trial(seed, counts) for seed in seeds}
    together, results = {seed: next(trial) for seed, trial in trials.items()}, dict[int, Result]()
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            result = TorchTrainer(
                _work,
                train_loop_config={'hosts': together},
                scaling_config=ScalingConfig(num_workers=count),
                run_config=RunConfig(name='compositions', storage_path=folder),  # its last checkpoint is continued
            ).fit()
            with result.checkpoint.as_directory() as saved:
                parts = _parts(saved, count)
            following = {}
            for seed in together:
                try:
                    following[seed] = trials[seed].send(parts[seed])
                except StopIteration as ended:
                    results[seed] = ended.value
            together = following
    return results


def _work(config: dict[str, Any]) -> None:
    """Run this worker's part of each composition, and save it."""
    from ray.train import Checkpoint, get_checkpoint, get_context, report

    context, before = get_context(), get_checkpoint()
    runs: dict[int, Parts] = {}
    if before:
        with before.as_directory() as folder:
            runs = _parts(folder, len(list(Path(folder).iterdir())))
    parts = {}
    for seed, hosts in config['hosts'].items():
        saved = [part for part in runs.get(seed, ()) if isinstance(part, Run)]
        parts[seed] = hosts[context.get_world_rank()].run(composition('hosts', seed)[1], saved)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, str(context.get_world_rank())).write_bytes(pickle.dumps(parts))
        report({}, checkpoint=Checkpoint(folder))


def _parts(folder: str, count: int) -> dict[int, Parts]:
    """Return what each worker ran, by the number of the composition."""
    of_workers = [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(count)]
    return {seed: [parts[seed] for parts in of_workers] for seed in of_workers[0]}
