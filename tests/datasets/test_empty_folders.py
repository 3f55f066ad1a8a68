"""Empty folders named like shards: on disks, of deleted objects in listings, or marked by empty objects."""

import asyncio

import pytest

import granular

EMPTY = {'all': range(8), 'the first': [0], 'those that follow': [2, 3, 7]}


def mark(folder):
    """Create an empty folder; in a bucket, an object whose name ends with a slash."""
    if folder.aio.store.local:
        folder.mkdir(parents=True, exist_ok=True)
    else:
        asyncio.run(folder.aio.store.write(f'{folder.aio.key}/', b''))


def write(path, stop, start=0, **options):
    with granular.ShardedDatasetWriter(path, {'x': 'int'}, shardlen=4, **options) as writer:
        for i in range(start, stop):
            writer.append({'x': i})


def values(path, **options):
    with granular.ShardedDatasetReader(path, **options) as reader:
        return [datapoint['x'] for datapoint in reader]


def build(path):
    granular.build_index(path)
    return values(path)


READS = {
    'read': values,
    'without the index': lambda path: values(path, index=False),
    'build_index': build,
    'verify': lambda path: granular.verify(path).problems or values(path),
}


@pytest.fixture
def path(root, tmp_path):
    return root / 'dataset'


@pytest.mark.parametrize('root', ['local', 'seaweed', 'fakegcs', 'moto'], indirect=True)
@pytest.mark.parametrize('empty', ['all', 'the first'])
@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_writer_begins_with_the_first_shard_beside_empty_folders(path, empty, layout):
    for number in EMPTY[empty]:
        mark(path / f'{number:06}')
    write(path, 8, layout=layout)
    assert values(path) == list(range(8))


@pytest.mark.parametrize('root', ['local', 'seaweed', 'fakegcs'], indirect=True)
@pytest.mark.parametrize('read', READS)
@pytest.mark.parametrize('index', [False, True])
def test_empty_folders_behind_the_last_shard_are_no_shards(path, read, index):
    write(path, 8, index=index)
    for number in EMPTY['those that follow']:
        mark(path / f'{number:06}')
    assert READS[read](path) == list(range(8))


@pytest.mark.parametrize('root', ['local', 'seaweed', 'fakegcs'], indirect=True)
def test_appending_fills_an_empty_folder(path):
    write(path, 8)
    mark(path / '000002')
    mark(path / '000005')
    write(path, 14, 8)
    assert values(path) == list(range(14))


@pytest.mark.parametrize('root', ['local', 'seaweed', 'fakegcs', 'moto'], indirect=True)
def test_dataset_is_written_where_one_was_removed(path):
    write(path, 32)
    path.rmtree()
    write(path, 8)
    assert values(path) == list(range(8))
    path.rmtree()
    granular.convert([{'x': i} for i in range(12)], path, shardlen=4)
    assert values(path) == list(range(12))
