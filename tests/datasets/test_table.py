"""Reads of sharded datasets of every kind, compared with a list in memory: ``python -m tests.datasets.test_table 1000``
makes as many datasets.
"""

import dataclasses
import itertools
import pickle
import random
import sys
import tempfile

import pytest

import granular
from granular.aio.runtime.worker_pickling import pickling_for_worker
from tests.support.tables import examples

SPECS = {
    'refs': {'a': 'int', 'b': 'utf8[]', 'c': 'bytes', 'd': 'bytes[]'},
    'columns': {'a': 'int', 'c': 'bytes', 'e': 'utf8'},
}
CHANGES = ('none', 'replaced', 'appended', 'moved', 'all replaced')


def datapoint(rng, layout):
    """Return a random datapoint of a layout; some records are empty, some are larger than a gap that is read along."""
    values = {
        'a': rng.randrange(1 << 40),
        'b': [str(rng.random()) for _ in range(rng.choice((0, 0, 1, 3)))],
        'c': rng.randbytes(rng.choice((0, 5, 100, 9000))),
        'd': [rng.randbytes(rng.choice((0, 7, 5000))) for _ in range(rng.randrange(3))],
        'e': str(rng.random()),
    }
    return {key: values[key] for key in SPECS[layout]}


def write(folder, layout, points, length):
    with granular.ShardedDatasetWriter(
        folder, SPECS[layout], granular.encoders, shardlen=length, layout=layout
    ) as writer:
        assert writer.found >= 0  # so that it does not warn of appending
        for point in points:
            writer.append(point, flush=False)


def replace(folder, rng, layout, points, length, shard):
    """Write a shard anew, with other datapoints, as many as before."""
    start = shard * length
    (folder / f'{shard:06}').rmtree()
    with granular.DatasetWriter(folder / f'{shard:06}', SPECS[layout], granular.encoders, layout=layout) as writer:
        for i in range(start, min(start + length, len(points))):
            points[i] = datapoint(rng, layout)
            writer.append(points[i], flush=False)


def changed(folder, rng, layout, points, length, change):
    """Change a dataset after its index was built; return its folder."""
    shards = range(-(-len(points) // length))
    match change:
        case 'replaced':
            # The index lies in the first shard.
            for shard in rng.sample(shards[1:], min(len(shards) - 1, 2)):
                replace(folder, rng, layout, points, length, shard)
        case 'all replaced':
            index = (folder / '000000' / '.granular-index').read_bytes()
            for shard in shards:
                replace(folder, rng, layout, points, length, shard)
            (folder / '000000' / '.granular-index').write_bytes(index)
        case 'appended':
            more = [datapoint(rng, layout) for _ in range(rng.randrange(1, 2 * length + 1))]
            write(folder, layout, more, length)
            points += more
        case 'moved':
            folder.copy(folder.parent / 'moved')
            folder.rmtree()
            folder = folder.parent / 'moved'
    return folder


def chosen(points, length, start, step):
    """Return the datapoints of every ``step``-th shard from ``start`` on."""
    shards = [points[i : i + length] for i in range(0, len(points), length)]
    return list(itertools.chain.from_iterable(shards[start::step]))


def as_used(reader, rng):
    """Return the reader, or a copy of it, made in one of the ways that there are."""
    match rng.choice(('itself', 'copy', 'pickled', 'pickled for a worker', 'pickled unused')):
        case 'copy':
            return reader.copy()
        case 'pickled unused':
            return pickle.loads(pickle.dumps(reader))
        case 'pickled':
            reader.fetch([rng.randrange(len(reader)) for _ in range(3)])
            return pickle.loads(pickle.dumps(reader))
        case 'pickled for a worker':
            reader.fetch([rng.randrange(len(reader)) for _ in range(3)])
            token = pickling_for_worker.set(True)
            try:
                return pickle.loads(pickle.dumps(reader))
            finally:
                pickling_for_worker.reset(token)
    return reader


def masked(point, mask):
    """Return what a mask selects of a datapoint."""
    if mask is None:
        return point
    selected = dict.fromkeys(mask, True) if isinstance(mask, tuple) else mask
    return {
        key: value if (part := selected[key]) is True else value[part.start : part.stop]
        for key, value in point.items()
        if key in selected
    }


def a_mask(rng, layout):
    keys = tuple(rng.sample(list(SPECS[layout]), rng.randrange(1, len(SPECS[layout]) + 1)))
    match rng.randrange(4):
        case 0:
            return keys
        case 1:
            # A range must begin within the sequence.
            return {key: range(rng.randrange(3)) if SPECS[layout][key].endswith('[]') else True for key in keys}
    return None


def compare(reader, expected, rng, layout):
    """Compare reads of every kind with a list; return their number."""
    count = len(expected)
    assert len(reader) == count
    for _ in range(4):
        mask, size = a_mask(rng, layout), rng.choice((0, 1, 2, 5, 30))
        indices = [rng.randrange(-count, count) for _ in range(size)]
        assert reader.fetch(indices, mask) == [masked(expected[i], mask) for i in indices], (indices, mask)
        i = rng.randrange(-count, count)
        assert reader[i, mask] == masked(expected[i], mask), (i, mask)
        start, stop = sorted(rng.sample(range(count + 1), 2))
        part = [masked(point, mask) for point in expected[start:stop]]
        keys = masked(expected[0], mask)
        assert reader[start:stop, mask] == {key: [point[key] for point in part] for key in keys}
    assert list(reader) == expected
    return 12 + count


def attack(folder, seed, caches=None):
    """Compare reads of a dataset that a seed gives, twice if there is a folder for caches; return their number."""
    rng = random.Random(seed)
    layout, length = rng.choice(list(SPECS)), rng.randrange(1, 8)
    points = [datapoint(rng, layout) for _ in range(length * rng.randrange(1, 7))]
    write(folder, layout, points, length)
    change = 'none'
    if rng.random() < 0.8:
        granular.build_index(folder)
        change = rng.choice(CHANGES)
    folder = changed(folder, rng, layout, points, length, change)
    shards = -(-len(points) // length)
    start = rng.choice((0, 0, rng.randrange(shards)))
    options = {
        'cache_index': rng.random() < 0.7,
        'cache_keys': rng.choice(((), ('a',), ('refs',), ('a', 'refs'), ('c',), tuple(SPECS[layout]))),
        'verify': rng.random() < 0.3,
        'shardstart': start,
        'shardstep': rng.choice((1, 1, 2)),
        'index': rng.random() < 0.9,
    }
    config = {'index_memory': rng.choice((1, 3000, 1 << 30)), 'max_gap': rng.choice((-1, 0, 1 << 20))}
    if caches is not None:
        config['index_cache'] = rng.choice(('', f'{caches}/index'))
        config['cache_dir'] = rng.choice(('', f'{caches}/blocks'))
    expected = chosen(points, length, start, options['shardstep'])
    store = folder.aio.store
    path = granular.Path.of(store.with_config(dataclasses.replace(store.config, **config)), folder.aio.key)
    reads = 0
    for _ in range(1 if caches is None else 2):
        with granular.ShardedDatasetReader(path, granular.decoders, **options) as reader:
            with as_used(reader, rng) as used:
                reads += compare(used, expected, rng, layout)
    return reads


@pytest.mark.parametrize('seeds', [range(i, i + 10) for i in range(0, examples(90), 10)])
def test_reads_of_sharded_datasets_are_those_of_a_list(tmp_path, seeds):
    for seed in seeds:
        assert attack(granular.Path(tmp_path / f'{seed}' / 'data'), seed) > 0


@pytest.mark.parametrize('seed', range(examples(24)))
def test_reads_of_sharded_datasets_in_a_bucket_are_those_of_a_list(fakegcs, tmp_path, seed):
    assert attack(fakegcs.place() / 'data', seed, tmp_path) > 0


def main():
    reads = 0
    for seed in range(int(sys.argv[1])):
        with tempfile.TemporaryDirectory() as folder:
            try:
                reads += attack(granular.Path(folder) / 'data', seed)
            except BaseException as error:
                error.add_note(f'seed {seed}')
                raise
    print(reads, 'reads, none of which differs')


if __name__ == '__main__':
    main()
