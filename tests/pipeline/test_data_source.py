"""DataSource: what a source of the user's tells of itself reaches pipelines, loaders and caches."""

import pytest

import granular
from granular import shuffle
from granular.errors import InvalidArgumentError


class Rows(granular.DataSource):
    seed = 7

    def __init__(self, rows=tuple(range(300)), name=None, nbytes=None, sparse=False, functions=()):
        self.rows, self.name, self.bytes, self.sparse, self.functions = rows, name, nbytes, sparse, functions

    def __len__(self):
        return len(self.rows)

    def fetch(self, indices):
        return [self.rows[i] for i in indices]

    def identity(self):
        return self.name

    def nbytes(self, mask=None):
        return self.bytes

    def user_functions(self):
        return self.functions


class AsyncRows(Rows):
    async def fetch(self, indices):
        return super().fetch(indices)


class IndexedRows(Rows):
    fetch = None

    def __getitem__(self, index):
        return self.rows[index]


KINDS = pytest.mark.parametrize('kind', [Rows, AsyncRows, IndexedRows])


@KINDS
def test_the_size_of_datapoints_chooses_the_size_of_blocks(kind):
    def order(nbytes):
        return str(granular.MapDataset.source(kind(nbytes=nbytes)).shuffle(1, shuffle.Blocks()))

    assert 'block=4, window=512' in order(300 * 100_000)
    assert 'block=64, window=256' in order(None)


@KINDS
def test_the_seed_is_a_part_of_states(kind):
    with granular.Loader(kind([{'x': i} for i in range(20)]), 10) as loader:
        next(loader)
        assert loader.state_dict()['seed'] == 7


@KINDS
def test_a_sparse_source_has_elements_that_iteration_skips(kind):
    dataset = granular.MapDataset.source(kind([1, None, 3], sparse=True))
    assert list(dataset) == [1, 3]
    with pytest.raises(InvalidArgumentError, match='to_iter_dataset'):
        dataset.batch(2)


@KINDS
def test_caches_compare_identities_and_functions(kind, redis_server):
    def cached(rows, *arguments, **options):
        with granular.RedisCache(kind(rows, *arguments, **options), redis_server.url) as cache:
            return cache.fetch([0, 1])

    name = kind.__name__
    assert cached([1, 2], [name, 'version 1']) == [1, 2]
    assert cached([3, 4], [name, 'version 1']) == [1, 2]
    assert cached([3, 4], [name, 'version 2']) == [3, 4]
    assert cached([5, 6], [name, 'version 2'], functions=(abs,)) == [5, 6]


def test_a_fetch_that_its_class_does_not_have_is_used():
    class Forwarding:
        def __init__(self, source):
            self.source = source

        def __len__(self):
            return 3

        def __getattr__(self, name):
            return getattr(self.source, name)

    class Own:
        def __init__(self):
            async def fetch(indices):
                return [f'{index}' for index in indices]

            self.fetch = fetch

        def __len__(self):
            return 3

    for source in (Own(), Forwarding(Own())):
        assert list(granular.MapDataset.source(source)) == ['0', '1', '2']


def test_an_object_of_no_data_source_tells_nothing():
    class Other:
        identity, seed, sparse, nbytes = 'mine', 'none', 'no', 5

        def __len__(self):
            return 300

        def __getitem__(self, index):
            return index

    dataset = granular.MapDataset.source(Other())
    assert dataset.shuffle(1, shuffle.Blocks()).batch(2)[0].shape == (2,)
