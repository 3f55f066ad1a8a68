"""Reads of sharded datasets of every kind, compared with a list in memory: ``python -m tests.datasets.test_table 1000``
makes as many datasets.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import traceback

import pytest

import granular
from granular.aio.datasets import comparison, listing
from granular.errors import ObjectChangedError
from tests.support.fault_proxy import FaultProxy
from tests.support.seams import pickled_for_worker
from tests.support.tables import examples

SPECS = {
    'refs': {'a': 'int', 'b': 'utf8[]', 'c': 'bytes', 'd': 'bytes[]'},
    'columns': {'a': 'int', 'c': 'bytes', 'e': 'utf8'},
}
KEPT = ('none', 'indexed', 'appended')
"""Changes after which a reader that was pickled before reads what it read."""
CHANGES = (*KEPT, 'replaced', 'resized', 'divided', 'moved', 'moved and resized', 'moved and divided', 'all replaced')
FAULTS = ('reset', 'status 503', 'after half', 'after reset')


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


def resized(rng, point):
    """Return another datapoint whose records have the same sizes."""
    bits = max(1, point['a'].bit_length()) - 1
    values = {'a': 1 << bits | rng.getrandbits(bits), 'e': f'{rng.random():.30f}'[: len(point.get('e', ''))]}
    values['b'] = [f'{rng.random():.30f}'[: len(text)] for text in point.get('b', ())]
    values['c'] = rng.randbytes(len(point['c']))
    values['d'] = [rng.randbytes(len(record)) for record in point.get('d', ())]
    return {key: values[key] for key in point}


def divided(rng, points):
    """Divide the bytes of datapoints differently: their files have the same sizes, and the bags the same bytes."""
    others = [dict(point) for point in points]
    for left, right in itertools.pairwise(others):
        both = left['c'] + right['c']
        cut = rng.randrange(len(both) + 1)
        left['c'], right['c'] = both[:cut], both[cut:]
        for key in {'b', 'd'} & left.keys():
            both = left[key] + right[key]
            cut = rng.randrange(len(both) + 1)
            left[key], right[key] = both[:cut], both[cut:]
    return others


def replace(folder, layout, points, start, others):
    """Write a shard, which begins at a datapoint, anew."""
    points[start : start + len(others)] = others
    shard = folder / f'{start // len(others):06}'
    index = shard / '.granular-index'
    kept = index.read_bytes() if index.exists() else b''
    shard.rmtree()
    with granular.DatasetWriter(shard, SPECS[layout], granular.encoders, layout=layout) as writer:
        for point in others:
            writer.append(point, flush=False)
    if kept:
        index.write_bytes(kept)


def changed(folder, rng, layout, points, length, change):
    """Change a dataset; return its folder."""
    if change.startswith('moved'):
        folder.copy(folder.parent / 'moved')
        folder.rmtree()
        folder = folder.parent / 'moved'
    starts = range(0, len(points), length)
    match change.rpartition(' ')[2]:
        case 'indexed':
            granular.build_index(folder)
        case 'appended':
            more = [datapoint(rng, layout) for _ in range(length * rng.randrange(1, 3))]
            write(folder, layout, more, length)
            points += more
        case 'replaced' | 'resized' | 'divided' as how:
            some = rng.sample(starts, min(len(starts), rng.randrange(1, 3)))
            for start in starts if change == 'all replaced' else some:
                own = points[start : start + length]
                if how == 'divided':
                    others = divided(rng, own)
                else:
                    others = [datapoint(rng, layout) if how == 'replaced' else resized(rng, point) for point in own]
                replace(folder, layout, points, start, others)
    return folder


def chosen(points, length, start, step):
    """Return the datapoints of every ``step``-th shard from ``start`` on."""
    shards = [points[i : i + length] for i in range(0, len(points), length)]
    return list(itertools.chain.from_iterable(shards[start::step]))


def pickled(reader, rng):
    """Return a pickled reader: used or not, and with its tables, as for a worker process, or without."""
    if rng.random() < 0.7:
        reader.fetch([rng.randrange(len(reader)) for _ in range(3)])
    if rng.random() < 0.6:
        return pickle.dumps(reader)
    return pickled_for_worker(reader)


def read_pickled(content, picks, listed, at_once):
    """Read by a pickled reader in another process."""
    comparison.LISTED, listing.AT_ONCE = listed, at_once
    with pickle.loads(content) as reader:
        return reader.fetch(picks), list(reader)


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


def compare_copies(reader, expected, rng, layout, others):
    """Compare reads of a reader, and of a copy of it, made in one of the ways that there are; return their number."""
    reads = 0
    match rng.choice(('none', 'copy', 'pickle', 'fork', 'process')):
        case 'copy':
            with reader.copy() as copy:
                reads = compare(copy, expected, rng, layout)
        case 'pickle':
            with pickle.loads(pickled(reader, rng)) as copy:
                reads = compare(copy, expected, rng, layout)
        case 'fork':
            if not (child := os.fork()):
                signal.alarm(120)
                try:
                    compare(reader, expected, rng, layout)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        case 'process' if others is not None:
            picks = [rng.randrange(len(expected)) for _ in range(10)]
            limits = comparison.LISTED, listing.AT_ONCE
            found = others.submit(read_pickled, pickled(reader, rng), picks, *limits).result()
            assert found == ([expected[i] for i in picks], expected)
    return reads + compare(reader, expected, rng, layout)


def attack(folder, seed, caches=None, others=None, place=None, listed=True):
    """Compare reads of a dataset that a seed gives, twice if there is a folder for caches; return their number.

    ``others`` is another process, and ``place`` returns the path by which a folder is read. If objects are not
    ``listed``, replaced shards are noticed when they are first read.
    """
    rng = random.Random(seed)
    layout, length = rng.choice(list(SPECS)), rng.randrange(1, 8)
    points = [datapoint(rng, layout) for _ in range(length * rng.randrange(1, 7))]
    write(folder, layout, points, length)
    if rng.random() < 0.8:
        granular.build_index(folder)
    change = rng.choice(CHANGES)
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
    config = {'index_memory': rng.choice((1, 3000, 1 << 30)), 'max_gap': rng.choice((-1, 0, 1 << 20)), 'backoff': 0.001}
    if caches is not None:
        config['index_cache'] = rng.choice(('', f'{caches}/index'))
        config['cache_dir'] = rng.choice(('', f'{caches}/blocks'))

    def opened(folder):
        path = (folder if place is None else place(folder)).aio
        path = granular.Path.of(path.store.with_config(dataclasses.replace(path.store.config, **config)), path.key)
        return granular.ShardedDatasetReader(path, granular.decoders, **options)

    before = None
    if rng.random() < 0.5:
        with opened(folder) as reader:
            before = pickled(reader, rng), chosen(points, length, start, options['shardstep'])
    folder = changed(folder, rng, layout, points, length, change)
    reads = 0
    if before is not None and change in KEPT:
        with pickle.loads(before[0]) as reader:
            reads += compare(reader, before[1], rng, layout)
    elif before is not None and listed and not change.startswith('moved'):
        with contextlib.suppress(ObjectChangedError), pickle.loads(before[0]) as reader:
            assert list(reader) == before[1]  # the shards that are read were not replaced
    expected = chosen(points, length, start, options['shardstep'])
    if config.get('index_cache'):
        # An index cache is compared when it is first used, and removed if the dataset was replaced.
        with contextlib.suppress(ObjectChangedError), opened(folder) as reader:
            assert list(reader) == expected
    for _ in range(1 if caches is None else 2):
        with opened(folder) as reader:
            reads += compare_copies(reader, expected, rng, layout, others)
    return reads


@pytest.fixture(scope='module')
def others():
    """Another process."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as executor:
        yield executor


@pytest.fixture
def prepared(monkeypatch):
    """Let readers list the objects of an index for every other seed, as they do not if there are many, and open shards
    without an index when they are first read, as if there were many.
    """

    def prepared(seed):
        if seed % 2:
            monkeypatch.setattr(comparison, 'LISTED', 0)
        monkeypatch.setattr(listing, 'AT_ONCE', 1 if seed % 3 else 32)
        return not seed % 2

    return prepared


@pytest.mark.parametrize('seeds', [range(i, i + 10) for i in range(0, examples(90), 10)])
def test_reads_of_sharded_datasets_are_those_of_a_list(tmp_path, others, prepared, seeds):
    for seed in seeds:
        prepared(seed)
        assert attack(granular.Path(tmp_path / f'{seed}' / 'data'), seed, others=others) > 0


@pytest.mark.parametrize('seed', range(examples(24)))
def test_reads_of_sharded_datasets_in_a_bucket_are_those_of_a_list(fakegcs, tmp_path, others, prepared, seed):
    assert attack(fakegcs.place() / 'data', seed, tmp_path, others, listed=prepared(seed)) > 0


@pytest.mark.parametrize('seed', range(examples(24)))
def test_reads_of_sharded_datasets_with_faults_are_those_of_a_list(fakegcs, tmp_path, prepared, seed):
    rng = random.Random(seed)
    with FaultProxy(fakegcs.endpoint, lambda call: rng.choice(FAULTS) if rng.random() < 0.03 else '') as proxy:

        def place(folder):
            return granular.Path(f'{folder}', **{**folder.aio.store.options, 'endpoint_url': proxy.endpoint})

        assert attack(fakegcs.place() / 'data', seed, tmp_path, None, place, prepared(seed)) > 0


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
