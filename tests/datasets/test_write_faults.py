"""Faults at every write request of a dataset: it is complete, or an error and nothing that looks complete."""

import pytest

import granular
from granular.errors import GranularError
from tests.support.small_parts import PART, small_parts, taken_by_moto
from tests.support.tables import cover
from tests.support.write_faults import FAULTS, WriteProxy

SPEC = {'x': 'bytes', 'n': 'int'}
COUNT, SHARDLEN = 6, 3
CONFIG = granular.IOConfig(backoff=0.001, backoff_cap=0.02, attempts=4, part_size=5 << 20)
# Bytes of a record by kind of dataset: small objects take one request, large ones are uploads in parts, except on
# SeaweedFS, which takes no small parts.
SIZES = {'refs': 10, 'columns': PART // 5, 'shards': 10}
# Families of faults, by what the store has done: the write, nothing, or another write.
FAMILIES = (['lost'], ['reset', 'error', 'html', 'nothing'], ['dropped'])
assert {fault for family in FAMILIES for fault in family} == set(FAULTS)
# SeaweedFS answers faster than moto, and refuses a body without its last byte, which moto keeps.
CASES = [
    ('moto' if store == 's3' and family == ['dropped'] else store.replace('s3', 'seaweed'), kind, family)
    for store in ('s3', 'fakegcs')
    for kind in SIZES
    for family in (FAMILIES if kind != 'shards' else [['lost', 'html']])  # each shard is written as a dataset is
]


def point(i, size):
    return {'x': bytes([i]) * (size + i), 'n': i}


def write(target, kind, size, resume='check'):
    if kind == 'shards':
        writer = granular.ShardedDatasetWriter(target, SPEC, granular.encoders, SHARDLEN, resume=resume)
    else:
        writer = granular.DatasetWriter(target, SPEC, granular.encoders, kind, resume)
    with writer:
        for i in range(writer.found, COUNT):
            writer.append(point(i, size))


def read(target, kind):
    reader = granular.ShardedDatasetReader if kind == 'shards' else granular.DatasetReader
    with reader(target, granular.decoders) as dataset:
        return list(dataset)


def check(target, kind, size, failed):
    """Check the files that one writer left, and that another one completes them."""
    expected = [point(i, size) for i in range(COUNT)]
    folders = [target / f'{i:06}' for i in range(COUNT // SHARDLEN)] if kind == 'shards' else [target]
    for number, folder in enumerate(folders):
        if (folder / 'spec.json').exists():
            first = number * SHARDLEN
            whole = expected[first : first + SHARDLEN] if kind == 'shards' else expected
            assert read(folder, 'refs') == whole, f'{folder}: spec.json stands over other bags'
    if failed and not all((folder / 'spec.json').exists() for folder in folders):
        write(target, kind, size, 'discard')
    assert read(target, kind) == expected


@pytest.mark.parametrize(('store', 'kind', 'family'), CASES, ids=str)
def test_fault_of_each_write_leaves_a_complete_dataset_or_an_error(request, store, kind, family):
    server = request.getfixturevalue(store)
    size, config = (SIZES[kind], small_parts(CONFIG)) if store != 'seaweed' else (10, CONFIG)
    with WriteProxy(server) as proxy, taken_by_moto():
        root = server.place()
        write(proxy.place(root / 'good', config), kind, size)
        assert proxy.writes >= 4
        for step, fault in cover([range(proxy.writes)], [family]):
            path, error = root / f'{step}-{fault}', None
            proxy.arm(fault, step)
            try:
                write(proxy.place(path, config), kind, size)
            except GranularError as caught:
                error = caught
            assert proxy.done
            check(path, kind, size, error)
