"""Every fault at every write request of a dataset: it is complete, or an error and nothing that looks complete."""

import itertools

import pytest

import granular
from granular.errors import GranularError
from tests.support.write_faults import FAULTS, WriteProxy

SPEC = {'x': 'bytes', 'n': 'int'}
COUNT, SHARDLEN = 6, 3
CONFIG = {'backoff': 0.001, 'backoff_cap': 0.02, 'attempts': 4, 'part_size': 5 << 20}
# By kind: the bytes of a record and the faults. Small objects take one request, large ones are uploads in parts.
KINDS = {
    'refs': (10, tuple(FAULTS)),
    'columns': (1 << 20, ('lost', 'html', 'nothing', 'dropped')),  # the others are those of any request
    'shards': (10, ('lost', 'html')),  # each shard is written as a dataset is
}
CASES = [
    (store, kind, fault) for store in ('moto', 'fakegcs') for kind, (_, faults) in KINDS.items() for fault in faults
]


def point(i, size):
    return {'x': bytes([i]) * (size + i), 'n': i}


def write(place, kind, size, resume='check'):
    if kind == 'shards':
        writer = granular.ShardedDatasetWriter(place, SPEC, granular.encoders, SHARDLEN, resume=resume)
    else:
        writer = granular.DatasetWriter(place, SPEC, granular.encoders, kind, resume)
    with writer:
        for i in range(writer.found, COUNT):
            writer.append(point(i, size))


def read(place, kind):
    reader = granular.ShardedDatasetReader if kind == 'shards' else granular.DatasetReader
    with reader(place, granular.decoders) as dataset:
        return list(dataset)


def check(place, kind, size, failed):
    """Check what one writer left, and that another one completes it."""
    expected = [point(i, size) for i in range(COUNT)]
    folders = [place / f'{i:06}' for i in range(COUNT // SHARDLEN)] if kind == 'shards' else [place]
    for number, folder in enumerate(folders):
        if (folder / 'spec.json').exists():
            first = number * SHARDLEN
            whole = expected[first : first + SHARDLEN] if kind == 'shards' else expected
            assert read(folder, 'refs') == whole, f'{folder}: spec.json stands over other bags'
    if failed and not all((folder / 'spec.json').exists() for folder in folders):
        write(place, kind, size, 'discard')
    assert read(place, kind) == expected


@pytest.mark.parametrize(('store', 'kind', 'fault'), CASES)
def test_a_fault_of_each_write_leaves_a_complete_dataset_or_an_error(request, store, kind, fault):
    server, size = request.getfixturevalue(store), KINDS[kind][0]
    with WriteProxy(server) as proxy:
        direct = server.place()
        for step in itertools.count():
            place, failed = direct / str(step), None
            proxy.arm(fault, step)
            try:
                write(proxy.place(place, **CONFIG), kind, size)
            except GranularError as error:
                failed = error
            if not proxy.done:  # there are no more writes
                assert failed is None
                break
            check(place, kind, size, failed)
        assert step >= 4
