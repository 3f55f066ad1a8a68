"""A cache that has all values of a dataset, which is replaced meanwhile."""

import uuid

import pytest

import granular
from granular.errors import ObjectChangedError


@pytest.mark.parametrize('shardlen', [None, 2])
def test_values_of_a_dataset_that_was_replaced_are_not_served(moto, redis_server, tmp_path, shardlen):
    path = moto.place()
    config = granular.IOConfig(index_cache=str(tmp_path))
    cached, space = granular.Path(str(path), config=config, **moto.options), f'test-{uuid.uuid4().hex[:8]}'

    def write(first):
        options = {} if shardlen is None else {'shardlen': shardlen}
        writer = granular.DatasetWriter if shardlen is None else granular.ShardedDatasetWriter
        with writer(path, {'n': 'int'}, **options) as writing:
            for n in range(first, first + 5):
                writing.append({'n': n})

    def read():
        with granular.open(cached) as reader, granular.RedisCache(reader, redis_server.url, namespace=space) as cache:
            return [point['n'] for point in cache.fetch(range(5))]

    write(10)
    assert [read(), read()] == [[10, 11, 12, 13, 14]] * 2
    path.rmtree()
    write(20)
    with pytest.raises(ObjectChangedError, match='since its index was cached'):
        read()
    assert read() == [20, 21, 22, 23, 24]
