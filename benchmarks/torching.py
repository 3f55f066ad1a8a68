"""PyTorch's DataLoader in a benchmark, in a process of its own: ``python -m benchmarks.torching WHAT JOB``, in JSON."""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.clients import open_reader
from benchmarks.piping import rate

Job = Mapping[str, Any]
BATCH = 64


class OneByOne:
    """A dataset that can only be asked for one datapoint after the other."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def sizes(points: Sequence[Mapping[str, Any]]) -> list[int]:
    """A batch without its bytes, so that reading is measured and not the collation."""
    return [len(point['data']) for point in points]


def loader(job: Job) -> dict[str, float]:
    """Datapoints a second of the DataLoader over a reader, with ``__getitems__`` or without."""
    reader = open_reader(job)
    items = DataLoader(
        reader if job['together'] else OneByOne(reader),
        batch_size=BATCH,
        shuffle=True,
        num_workers=job['workers'],
        collate_fn=sizes,
    )
    return {'rate': rate(items, job['batches'], BATCH, 2 + 2 * job['workers'])}


if __name__ == '__main__':
    print(json.dumps(globals()[sys.argv[1]](json.loads(pathlib.Path(sys.argv[2]).read_text()))))
