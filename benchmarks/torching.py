"""PyTorch's DataLoader in a benchmark, in its own process."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.clients import open_reader
from benchmarks.rivals.timing import rate

Job = Mapping[str, Any]
BATCH = 64


class OneByOne:
    """A dataset without ``__getitems__``."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def sizes(points: Sequence[Mapping[str, Any]]) -> list[int]:
    """Drop the bytes of a batch, so that the collation is not measured."""
    return [len(point['data']) for point in points]


def loader(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of the DataLoader over a reader, with ``__getitems__`` or without."""
    reader = open_reader(job)
    items = DataLoader(
        reader if job['together'] else OneByOne(reader),
        batch_size=BATCH,
        shuffle=True,
        num_workers=job['workers'],
        collate_fn=sizes,
    )
    return {'rate': rate(items, job['batches'], BATCH, 2 + 2 * job['workers'])}
