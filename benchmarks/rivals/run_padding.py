"""The padding of the rows and batches of others, for elements of some sizes."""

import sys

import numpy as np
from measuring import job, tell

SIZES = np.array(job['sizes'])


def grain():
    """Rows of Grain's packing, as elements come, first fit."""
    from grain import MapDataset
    from grain.experimental import FirstFitPackIterDataset

    documents = MapDataset.source([{'tokens': np.ones(size, np.int32)} for size in SIZES.tolist()])
    stream = documents.shuffle(seed=1).to_iter_dataset()
    rows = FirstFitPackIterDataset(stream, length_struct={'tokens': job['length']}, num_packing_bins=64)
    count = sum(1 for _ in rows)
    tell(padding=1 - int(SIZES.sum()) / count / job['length'])


def torch():
    """Batches of elements as they come, each padded to its longest, as a collate function with pad_sequence does."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader

    one = torch.ones(1, dtype=torch.uint8)
    clips = [one.expand(size) for size in SIZES.tolist()]  # views, as all of them would fill the memory
    generator = torch.Generator().manual_seed(0)
    each = max(1, job['budget'] // int(SIZES.max()))
    loader = DataLoader(
        clips, each, shuffle=True, generator=generator, collate_fn=lambda some: pad_sequence(some, batch_first=True)
    )
    tell(padding=1 - int(SIZES.sum()) / sum(batch.numel() for batch in loader))


def lhotse():
    """Batches of Lhotse's sampler with dynamic buckets, each padded to its longest."""
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    rate = 16_000
    cuts = [MonoCut(id=str(i), start=0, duration=size / rate, channel=0) for i, size in enumerate(SIZES.tolist())]
    sampler = DynamicBucketingSampler(
        CutSet.from_cuts(cuts), max_duration=job['budget'] / rate, num_buckets=job['buckets'], shuffle=True,
        buffer_size=10_000,
    )  # fmt: skip
    padded = total = 0
    for batch in sampler:
        sizes = [round(cut.duration * rate) for cut in batch]
        padded, total = padded + len(sizes) * max(sizes), total + sum(sizes)
    tell(padding=1 - total / padded)


globals()[sys.argv[1]]()
