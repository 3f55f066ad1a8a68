"""Every fault at every write request of a dataset: it is complete, or an error and nothing that looks complete."""

import itertools

import pytest

import granular
from granular.errors import GranularError
from tests.write_faults import FAULTS, WriteProxy

SPEC = {'x': 'bytes', 'n': 'int'}
COUNT, SHARDLEN = 6, 3
CONFIG = {'backoff': 0.001, 'backoff_cap': 0.02, 'attempts': 4, 'part_size': 5 << 20}
KINDS = ('refs', 'columns', 'shards')
# Small datasets, of one request per object, and large ones, of uploads in parts.
SIZES = {'small': 10, 'large': 1 << 20}

# Cases that depend on the stores' own checks of the replies to uploads in parts.
PENDING = set(itertools.product(('moto', 'fakegcs'), ('html', 'nothing'), ('large',)))


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


CASES = [
    (store, kind, fault, size)
    for store, kind, fault, size in itertools.product(('moto', 'fakegcs'), KINDS, FAULTS, SIZES)
    if (store, fault, size) not in PENDING
    # Each shard is written as a dataset is.
    and (kind != 'shards' or (size == 'small' and fault in ('lost', 'dropped')))
]


@pytest.mark.parametrize(('store', 'kind', 'fault', 'size'), CASES)
def test_a_fault_of_each_write_leaves_a_complete_dataset_or_an_error(request, store, kind, fault, size):
    server = request.getfixturevalue(store)
    with WriteProxy(server) as proxy:
        direct = server.place()
        for step in itertools.count():
            place = direct / str(step)
            proxy.arm(fault, step)
            failed = None
            try:
                write(proxy.place(place, **CONFIG), kind, SIZES[size])
            except GranularError as error:
                failed = error
            if proxy.times:  # there are no more writes
                assert failed is None
                break
            check(place, kind, SIZES[size], failed)
        assert step >= 3
