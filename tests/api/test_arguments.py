"""Checks of integer arguments: one rule, and one text, for all of them."""

import dataclasses
import functools

import numpy as np
import pytest

import granular
from granular import shuffle, sources
from granular.errors import DecodeError, InvalidArgumentError, OutOfRangeError, StoreError
from granular.grain import MultiprocessingOptions
from granular.grain.experimental import DatasetOptions

dataset = granular.MapDataset.source(range(10))

ARGUMENTS = {
    'batch': functools.partial(granular.Loader, dataset),
    'batch_size': dataset.batch,
    'block': shuffle.Blocks,
    'cycle_length': functools.partial(granular.IterDataset.interleave, [dataset.to_iter_dataset()]),
    'length': functools.partial(sources.Sample, dataset),
    'limit': functools.partial(sources.Truncate, dataset),
    'num_epochs': dataset.repeat,
    'num_records': granular.grain.samplers.IndexSampler,
    'prefetch_buffer_size': lambda value: granular.ReadOptions(prefetch_buffer_size=value),
    'seed': dataset.seed,
    'shard_count': functools.partial(granular.ShardOptions, 0),
    'shard_id': lambda value: granular.Loader(dataset, 2, shard_id=value, num_shards=2),
    'window_size': functools.partial(dataset.to_iter_dataset().window_shuffle, seed=0),
}


@pytest.mark.parametrize('value', [-1, 1.0, '1', True, None])
def test_a_checked_integer_is_within_its_limits_and_not_a_bool(value):
    with pytest.raises(InvalidArgumentError, match=rf'^num_threads: expected an integer >= 0, got {value!r}$'):
        granular.ReadOptions(num_threads=value)


def test_a_checked_integer_is_returned_as_an_int():
    assert type(granular.ReadOptions(num_threads=np.uint8(3)).num_threads) is int
    with pytest.raises(InvalidArgumentError, match=r'^shard_index: expected an integer from 0 to 2, got 3$'):
        granular.ShardOptions(3, 3)


@pytest.mark.parametrize('name', ARGUMENTS)
def test_errors_name_the_argument(name):
    for value in (-1, True, 1.5):
        with pytest.raises(InvalidArgumentError, match=rf'^{name}: expected an integer .*, got {value}$'):
            ARGUMENTS[name](value)


@pytest.mark.parametrize(
    'source',
    [sources.Epochs, sources.Sample, lambda source, seed: sources.Mix([source], [1], seed)],
    ids=['Epochs', 'Sample', 'Mix'],
)
@pytest.mark.parametrize('seed', [-1, 1.5, 'a'])
def test_seeds_of_sources_are_checked(source, seed):
    with pytest.raises(InvalidArgumentError, match='^seed: expected an integer >= 0'):
        source([1, 2], seed=seed)


@pytest.mark.parametrize('weights', [[1], ['a', 'b'], 5, None, [1, float('nan')]], ids=str)
def test_weights_are_numbers_for_each_source(weights):
    mixes = [sources.Mix, granular.MapDataset.mix, granular.IterDataset.mix]
    for mix in mixes if weights is not None else mixes[:1]:
        with pytest.raises(InvalidArgumentError, match='^expected 2 weights'):
            mix([dataset, dataset], weights)


@pytest.mark.parametrize(
    'make',
    [
        dataset.batch,
        functools.partial(dataset.window_shuffle, seed=0),
        lambda size: dataset.flat_map(str, max_fan_out=size),
        shuffle.Blocks,
        functools.partial(shuffle.Blocks, 1),
    ],
)
def test_sizes_have_63_bits(make):
    make(2**63 - 1)
    with pytest.raises(InvalidArgumentError, match='expected an integer from 1 to 9223372036854775807, got 10'):
        make(10**30)


def test_sizes_may_exceed_the_dataset():
    largest = 2**63 - 1
    assert len(dataset.batch(largest)[0]) == 10
    assert sorted(dataset.window_shuffle(largest, seed=0)) == list(range(10))
    assert sorted(dataset.shuffle(seed=0, order=shuffle.Blocks(largest, largest))) == list(range(10))


@pytest.mark.parametrize(
    'make',
    [
        lambda: granular.MapDataset.range(1.5),
        lambda: granular.MapDataset.range(0, 5, 0),
        lambda: granular.grain.sources.RangeDataSource(0, 5, 0),
        lambda: granular.MapDataset.select_from_datasets([dataset], lambda index: (0, index)),
    ],
)
def test_ranges_and_maps_of_other_types_are_refused(make):
    with pytest.raises(InvalidArgumentError, match='expected (integers|an object with a length)'):
        make()


@pytest.mark.parametrize('part', [slice(None, None, 0), slice('a', 'b'), slice(0, 1.5)], ids=str)
def test_slices_are_of_integers(tmp_path, part):
    with granular.DatasetWriter(tmp_path / 'x', {'x': 'int'}) as writer:
        writer.append({'x': 1})
    with granular.DatasetReader(tmp_path / 'x') as reader:
        for read in (
            dataset.__getitem__,
            dataset.slice,
            reader.fetch,
            granular.kappadata.ModeWrapper(reader, 'x').fetch,
        ):
            with pytest.raises(InvalidArgumentError, match='expected a slice of integers'):
                read(part)


@pytest.mark.parametrize('index', [np.ma.masked, np.ma.masked_array(0, True), np.array(0.5), (1, 2, 3)], ids=repr)
def test_an_index_is_an_integer_without_a_mask(tmp_path, index):
    with granular.DatasetWriter(tmp_path / 'x', {'x': 'int'}) as writer:
        writer.append({'x': 1})
    with granular.DatasetReader(tmp_path / 'x') as reader:
        for read in (dataset.__getitem__, reader.__getitem__):
            with pytest.raises(InvalidArgumentError, match='expected an integer as index'):
                read(index)


def test_arguments_of_other_types_are_named(tmp_path):
    with pytest.raises(InvalidArgumentError, match='^read_options: expected a granular.ReadOptions, got 5$'):
        dataset.to_iter_dataset(5)
    with granular.DatasetWriter(tmp_path / '000000', {'x': 'int'}) as writer:
        writer.append({'x': 1})
    for reader, folder in ((granular.DatasetReader, tmp_path / '000000'), (granular.ShardedDatasetReader, tmp_path)):
        for keys in ('x', 5, [['x']]):
            with pytest.raises(InvalidArgumentError, match='^cache_keys: expected a sequence of keys, got'):
                reader(folder, cache_keys=keys)
        for decoders in (['x'], 'x', 5):
            with pytest.raises(InvalidArgumentError, match='expected a mapping of functions such as '):
                reader(folder, decoders)
        for mask in (5, [['x']]):
            with reader(folder) as opened, pytest.raises(InvalidArgumentError, match='expected keys, .* as mask, got'):
                opened.fetch([0], mask=mask)
    arguments = {
        'relative_path': lambda value: granular.copy_to_local(tmp_path, tmp_path / 'copy', value),
        'spec': lambda value: granular.convert([{'x': 1}], tmp_path / 'new', spec=value),
        'encoders': lambda value: granular.convert([{'x': 1}], tmp_path / 'new', encoders=value),
        'progress': lambda value: granular.verify(tmp_path, progress=value),
        'decoders': lambda value: granular.verify(tmp_path, decoders=value),
    }
    for name, call in arguments.items():
        for value in (b'x', 5):
            with pytest.raises(InvalidArgumentError, match=f'^{name}: expected '):
                call(value)
    with pytest.raises(InvalidArgumentError, match='^decoders: expected a mapping of functions'):
        granular.verify(tmp_path, decoders={'int': 5})
    with pytest.raises(InvalidArgumentError, match="expected resume 'check' or 'discard', got 'no'"):
        granular.ShardedDatasetWriter(tmp_path / 'new', {'x': 'int'}, resume='no')
    with granular.DatasetWriter(tmp_path / 'many', {'x': 'int[]'}) as writer:
        writer.append({'x': [1]})
    with granular.DatasetReader(tmp_path / 'many') as opened, pytest.raises(InvalidArgumentError, match='as limits'):
        opened.fetch([0], mask={'x': slice('a', None)})


@pytest.mark.parametrize('field', [field for field in dataclasses.fields(granular.IOConfig) if field.type is not str])
def test_the_largest_settings_are_used_and_larger_ones_refused(field, tmp_path):
    for value in (10**400, 10**5000):
        with pytest.raises(InvalidArgumentError, match=f'^IOConfig.{field.name}: expected at most') as caught:
            granular.IOConfig(**{field.name: value})
    most = int(str(caught.value).rpartition(' ')[2])
    most -= most % (1 << 18) if field.name == 'part_size' else 0
    root = granular.Path(tmp_path, config=granular.IOConfig(**{field.name: most}))
    with granular.DatasetWriter(root / 'data', {'i': 'int', 'x': 'bytes'}) as writer:
        for i in range(9):
            writer.append({'i': i, 'x': bytes(1000 * i)})
    with granular.DatasetReader(root / 'data', granular.decoders) as reader:
        assert reader.fetch([3, 8]) == [{'i': i, 'x': bytes(1000 * i)} for i in (3, 8)]


@pytest.mark.parametrize('field', [field for field in dataclasses.fields(granular.IOConfig) if field.type is int])
def test_the_smallest_settings_are_used_and_smaller_ones_refused(field, tmp_path):
    with granular.DatasetWriter(tmp_path, {'x': 'int', 'y': 'utf8[]'}) as writer:
        for i in range(9):
            writer.append({'x': i, 'y': [f'{i}'] * i})
    for value in (-2, -1, 0, 1, 7, 8, 5 << 20, 8 << 20):
        try:
            config = granular.IOConfig(**{field.name: value})
        except InvalidArgumentError:
            continue
        with granular.DatasetReader(granular.Path(tmp_path, config=config)) as reader:
            assert reader[8] == {'x': 8, 'y': ['8'] * 8}


SIZES = {
    'num_records': granular.grain.samplers.IndexSampler,
    'num_workers': lambda value: MultiprocessingOptions(num_workers=value),
    'tail': lambda value: granular.IOConfig(tail=value),
    'worker_count': lambda value: granular.grain.DataLoader(
        data_source=[1], sampler=granular.grain.samplers.SequentialSampler(1), worker_count=value
    ),
    'workers': lambda value: granular.Loader(dataset, 2, workers=value, mp='spawn'),
}


@pytest.mark.parametrize('name', SIZES)
def test_sizes_that_no_machine_has_are_refused(name):
    with pytest.raises(InvalidArgumentError, match=f'{name}: expected '):
        SIZES[name](10**30)


@pytest.mark.parametrize('source', [[1], granular.grain.sources.RangeDataSource(0, 2**62, 1)], ids=str)
def test_a_cache_larger_than_memory_is_an_error(source):
    with (
        pytest.raises(StoreError, match='File too large'),
        granular.SharedMemoryCache(source, max_bytes=10**30) as cache,
    ):
        cache.get(0)


def test_arguments_of_paths_are_checked(tmp_path):
    path = granular.Path(tmp_path / 'x')
    path.write_bytes(b'\xff')
    with pytest.raises(InvalidArgumentError, match=r'^version: expected the text of Stat.version, or None, got 5$'):
        path.read_ranges([0], [1], version=5)
    for encoding in ('utf-8', 'none', 5):
        with pytest.raises(DecodeError, match=f'expected text with the encoding {encoding!r}'):
            path.read_text(encoding)


FLAGS = {
    'drop_remainder': lambda value: dataset.batch(2, drop_remainder=value),
    'shuffle': lambda value: granular.grain.samplers.IndexSampler(10, None, value, seed=0),
    'allow_nones': lambda value: dataset.to_iter_dataset(allow_nones=value),
    'cache_data': lambda value: granular.BagReader(b'', cache_data=value),
    'remove': lambda value: granular.clean('.', value),
    'debug': lambda value: DatasetOptions(debug=value),
}


@pytest.mark.parametrize('value', ['false', None, 2, np.array([True, False])], ids=str)
@pytest.mark.parametrize('name', FLAGS)
def test_a_flag_is_a_boolean(name, value):
    with pytest.raises(InvalidArgumentError, match=f'^{name}: expected True or False, got '):
        FLAGS[name](value)


@pytest.mark.parametrize('value', [True, np.bool_(True), 1], ids=repr)
def test_a_flag_may_be_a_boolean_of_numpy_or_an_integer(value):
    assert len(dataset.batch(4, drop_remainder=value)) == 2


@pytest.mark.parametrize('make', [dataset.batch, dataset.to_iter_dataset().batch])
def test_a_batch_function_can_be_called(make):
    for value in (5, 0, 'stack'):
        with pytest.raises(InvalidArgumentError, match=f'^batch_fn: expected a function or None, got {value!r}$'):
            make(2, batch_fn=value)


def test_numbers_beyond_63_bits_are_refused_or_endless():
    with pytest.raises(InvalidArgumentError, match='^range: expected integers'):
        granular.grain.sources.RangeDataSource(0, 10**30, 1)
    with pytest.raises(OutOfRangeError, match='^RangeDataSource: index 5 is out of range'):
        granular.grain.sources.RangeDataSource(0, 5, 1)[5]
    assert next(iter(granular.grain.load([7], num_epochs=10**30, batch_size=1))) == [7]
    with pytest.raises(InvalidArgumentError, match='expected str, got int$'):
        list(granular.Path('x').glob(5))
