"""The orders of mosaicml-streaming and webdataset for the records of a sharded dataset."""

import random
import sys

import numpy as np
from measuring import job, tell

shards = [range(at, at + job['shard']) for at in range(0, job['count'], job['shard'])]


def streaming():
    from streaming.base.shuffle import get_shuffle

    sizes = np.array([len(shard) for shard in shards])
    orders = {}
    for name, block in (('py1e, its default', 1 << 18), ('py1e, blocks of 4,000', 4000)):
        orders[name] = get_shuffle('py1e', sizes, 1, 1, 0, block).tolist()
    return orders


def webdataset():
    from webdataset.filters import shuffle

    mixed = random.Random(1).sample(shards, len(shards))
    stream = (i for shard in mixed for i in shard)
    return {'shards shuffled, shuffle(1000)': list(shuffle(1000, rng=random.Random(1))(stream))}


if __name__ == '__main__':
    tell(**globals()[sys.argv[1]]())
