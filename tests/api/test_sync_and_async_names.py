"""The two faces have the same names, with the same arguments; what is awaited there blocks here."""

import inspect

import pytest

import granular
from granular import aio, sources
from granular.grain import DatasetIterator
from granular.grain.experimental import ParquetIterDataset, TFRecordIterDataset

PAIRS = [
    (getattr(blocking, name), getattr(awaited, name))
    for blocking, awaited in ((granular, aio), (sources, aio.sources), (granular.kappadata, aio.kappadata))
    for name in sorted({*dir(blocking)} & {*dir(awaited)})
    if inspect.isclass(getattr(awaited, name)) and getattr(blocking, name) is not getattr(awaited, name)
    if name != 'Source'  # here the base of the wrappers, there that of all nodes
]

# How async objects are opened and closed; the readers of parts; the attributes of a stage that the pipeline goes by.
ONLY_ASYNC = {'abort', 'aclose', 'arguments', 'bags', 'choose', 'get', 'open', 'read', 'readers'} | {
    'call',
    'changed',
    'chosen',
    'copy_over',
    'describe',
    'divides',
    'elementwise',
    'fetch_undecoded',
    'find',
    'identity',
    'in_first_epoch',
    'is_ready',
    'keep_selections',
    'keeps_turns',
    'kept',
    'line',
    'measure',
    'nbytes',
    'nullable_keys',
    'owners',
    'parents',
    'parts',
    'passes_epochs',
    'pattern',
    'quick',
    'record_time',
    'release',
    'seed',
    'select',
    'selects',
    'sparse',
    'spent_times',
    'stored_nbytes',
    'unlisted',
    'user_functions',
    'varies',
}
ONLY_SYNC = {'close', 'aio', 'endless', 'seed'}


def public(cls):
    return {name for name in dir(cls) if not name.startswith('_')}


@pytest.mark.parametrize(('ours', 'theirs'), PAIRS, ids=lambda cls: f'{cls.__module__}.{cls.__name__}')
def test_names(ours, theirs):
    assert public(ours) - public(theirs) <= ONLY_SYNC
    assert public(theirs) - public(ours) <= ONLY_ASYNC - ({'open'} if ours is granular.Path else set())


@pytest.mark.parametrize(('ours', 'theirs'), PAIRS, ids=lambda cls: f'{cls.__module__}.{cls.__name__}')
def test_signatures(ours, theirs):
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
    for name in sorted({'__init__'} | (public(ours) & public(theirs))):
        here, there = getattr(ours, name), getattr(theirs, name)
        if not inspect.isfunction(here):
            continue
        left, right = inspect.signature(here).parameters, inspect.signature(there).parameters
        assert [(p.name, p.kind, p.default) for p in left.values()] == [
            (p.name, p.kind, p.default) for p in right.values()
        ], name
        assert not inspect.iscoroutinefunction(here), name


@pytest.mark.parametrize(('ours', 'theirs'), PAIRS, ids=lambda cls: f'{cls.__module__}.{cls.__name__}')
def test_everything_public_is_documented(ours, theirs):
    for cls in (ours, theirs):
        assert inspect.getdoc(cls)
        for name in public(cls):
            assert inspect.getdoc(getattr(cls, name)), f'{cls.__module__}.{cls.__name__}.{name}'


@pytest.mark.parametrize('cls', [granular.IterDataset, ParquetIterDataset, TFRecordIterDataset])
def test_one_class_serves_for_and_async_for(cls):
    assert cls is getattr(aio, cls.__name__, cls)
    assert callable(cls.__iter__)
    assert callable(cls.__aiter__)


def test_a_data_loader_serves_for_and_async_for():
    assert callable(granular.grain.DataLoader.__iter__)
    assert callable(granular.grain.DataLoader.__aiter__)


async def test_for_and_async_for_yield_the_same_elements():
    stream = granular.MapDataset.range(10).shuffle(seed=1).to_iter_dataset().batch(4)
    sampler = granular.grain.samplers.IndexSampler(10, shuffle=True, num_epochs=1, seed=1)
    for items in (
        stream,
        granular.grain.DataLoader(
            data_source=range(10), sampler=sampler, operations=[granular.grain.transforms.Batch(4)]
        ),
    ):
        blocking, iterator = iter(items), aiter(items)
        assert isinstance(blocking, DatasetIterator)
        assert isinstance(iterator, aio.DatasetIterator)
        assert (await anext(iterator)).tolist() == next(blocking).tolist()
        await iterator.set_state(blocking.get_state())
        assert [batch.tolist() async for batch in iterator] == [batch.tolist() for batch in blocking]


def test_exported_names():
    assert set(granular.__all__) >= {
        'BagReader', 'BagWriter', 'DatasetReader', 'DatasetWriter', 'IOConfig', 'Loader', 'Path',
        'ShardedDatasetReader', 'ShardedDatasetWriter', 'aio', 'decoders', 'encoders', 'sources',
    }  # fmt: skip
    for name in granular.__all__:
        assert hasattr(granular, name)
    for name in aio.__all__:
        assert hasattr(aio, name)


def test_functions():
    """Names that both faces have take the same arguments."""
    names = [name for name in granular.__all__ if inspect.isfunction(getattr(granular, name)) and name in aio.__all__]
    assert {'clean', 'convert', 'copy_to_local', 'verify'} <= set(names)
    for name in names:
        here, there = getattr(granular, name), getattr(aio, name)
        assert inspect.iscoroutinefunction(there) or here is there or name == 'open', name
        left, right = inspect.signature(here).parameters, inspect.signature(there).parameters
        assert [(p.name, p.kind, p.default) for p in left.values()] == [
            (p.name, p.kind, p.default) for p in right.values()
        ], name


def test_the_tree_of_errors_is_drawn_as_it_is():
    errors = {
        name: cls for name, cls in vars(granular.errors).items()
        if inspect.isclass(cls) and issubclass(cls, granular.GranularError)
    }  # fmt: skip
    for name, cls in errors.items():
        assert name in granular.errors.__doc__
        assert cls.__doc__
        assert str(cls('a message')) == 'a message'


@pytest.mark.parametrize('package', [granular, aio], ids=['granular', 'aio'])
def test_dir_lists_the_public_names_alone(package):
    """Completion in a shell or notebook finds the names that are imported on first access, and no internal ones."""
    assert {name for name in dir(package) if not name.startswith('_')} == set(package.__all__)
