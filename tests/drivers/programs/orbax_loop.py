"""The loop of a user that saves by Orbax."""

import os
from typing import Any

import orbax.checkpoint as ocp

from granular.integrations.orbax import CheckpointRestore, CheckpointSave
from tests.drivers.kinds import KINDS, Setting
from tests.drivers.loops import POINTS, Driver
from tests.drivers.results import Recorder

NAMES = (
    'Loader', 'Batches(Loader)', 'Batches(stream)', 'StatefulDataLoader(IterableDataset)',
    'StatefulDataLoader(MapDataset)', 'StatefulDataLoader(iterable of torch)', 'StatefulDataLoader(list of torch)',
)  # fmt: skip


def main(folder: str) -> None:
    recorder = Recorder(folder, 0)
    for name in NAMES:
        kind = KINDS[name]
        for workers in kind.workers():
            path = os.path.join(folder, f'{name}{workers}')
            with ocp.CheckpointManager(path) as manager:

                def save(loader: Any, point: str, manager: Any = manager) -> int:
                    number = POINTS.index(point)
                    manager.save(number, args=ocp.args.Composite(data=CheckpointSave(loader)))
                    manager.wait_until_finished()
                    return number

                def load(loader: Any, number: int, manager: Any = manager) -> None:
                    manager.restore(number, args=ocp.args.Composite(data=CheckpointRestore(loader)))

                Driver(recorder, 'Orbax', name, kind, Setting(workers=workers), save, load).run()
