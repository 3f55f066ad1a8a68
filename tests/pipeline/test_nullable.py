"""Types of batches of keys that may be None: they do not depend on which values a batch has."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import granular
from granular.errors import DatapointError
from granular.grain.experimental import ParquetIterDataset, get_element_spec

# Of batches of three: one without None, one with some, one of None alone.
PRESENT = [True, True, True, True, False, True, False, False, False, True, True, True]
VALUES = {
    'int': range(12), 'float': [i / 2 for i in range(12)], 'bool': [i % 2 == 0 for i in range(12)],
    'text': [f'{i}' for i in range(12)], 'bytes': [b'%d' % i for i in range(12)],
}  # fmt: skip
ARROW = {'int': 'int64', 'bool': 'bool', 'text': 'string', 'bytes': 'binary', 'int32': 'int32'}


def nullable(values):
    return [value if is_present else None for value, is_present in zip(values, PRESENT, strict=True)]


def written(folder, kind):
    names = {name: nullable(values) for name, values in VALUES.items() if name != 'bytes' or kind != 'json'}
    spec = {**dict.fromkeys(names, kind), 'plain': 'int'}
    with granular.DatasetWriter(folder / 'out', spec) as writer:
        for i in range(12):
            writer.append({'plain': i, **{name: values[i] for name, values in names.items()}})
    return folder / 'out', set(names)


def in_parquet(folder):
    values = {**VALUES, 'int32': range(12)}
    columns = {name: pyarrow.array(nullable(values[name]), kind) for name, kind in ARROW.items()}
    columns |= {'plain': pyarrow.array(range(12)), 'float': pyarrow.array(nullable(VALUES['float']))}
    parquet.write_table(pyarrow.table(columns), folder / 'a.parquet', row_group_size=5)
    return folder / 'a.parquet', set(ARROW)


def converted(folder):
    file, names = in_parquet(folder)
    granular.convert(file, folder / 'converted')
    return folder / 'converted', names


SOURCES = {
    **{kind: lambda folder, kind=kind: written(folder, kind) for kind in ('msgpack', 'json', 'tree')},
    'parquet': in_parquet, 'converted': converted,
}  # fmt: skip
PIPELINES = {
    'batch': lambda source: source.batch(3),
    'stages': lambda source: source.filter(lambda one: True).to_iter_dataset().batch(3),
    'stream': lambda source: source.to_iter_dataset().batch(3),
    'batches': lambda source: source.batch(3).to_iter_dataset(),
    'streams': lambda source: source.to_iter_dataset().limit(12).prefetch(2).repeat(1).cache().batch(3),
    'mix': lambda source: granular.MapDataset.mix([source, source]).slice(slice(0, None, 2)).batch(3),
    'concatenation': lambda source: granular.MapDataset.concatenate([source[:6], source[6:]]).batch(3),
    'mixed streams': lambda source: granular.IterDataset.mix([source.to_iter_dataset()], [1]).batch(3),
    'workers': lambda source: source.to_iter_dataset().batch(3).mp_prefetch(1),
}  # fmt: skip


@pytest.mark.parametrize('pipeline', PIPELINES)
@pytest.mark.parametrize('source', SOURCES)
def test_types_of_batches_do_not_depend_on_their_values(source, pipeline, tmp_path):
    path, names = SOURCES[source](tmp_path)
    with granular.open(path) as reader:
        dataset = PIPELINES[pipeline](granular.MapDataset.source(reader))
        batches = list(dataset)
        spec = get_element_spec(dataset)
    assert len(batches) == 4
    for batch in batches:
        kinds = {name: values.dtype for name, values in batch.items()}
        assert kinds['plain'] == np.int64
        assert {name: kind for name, kind in kinds.items() if name in names} == dict.fromkeys(names, np.dtype(object))
        assert all(values.shape == (3,) for values in batch.values())
        if source in ('parquet', 'converted'):
            assert kinds['float'] == np.float64
        elif pipeline != 'workers':
            assert {name: values.dtype for name, values in spec.items()} == kinds
    found = [value for batch in batches for value in batch['int'].tolist()]
    assert found == nullable(range(12))


def test_rows_of_a_parquet_stream_have_the_same_types_in_all_batches(tmp_path):
    path, names = in_parquet(tmp_path)
    for batch in ParquetIterDataset(path).batch(3):
        assert {name for name, values in batch.items() if values.dtype == object} == names
    for batch in ParquetIterDataset(path, columns=['plain', 'bool']).filter(lambda row: True).batch(3):
        assert [batch[name].dtype for name in ('plain', 'bool')] == [np.int64, object]


def test_a_cache_has_the_types_of_its_source(tmp_path):
    path, _ = written(tmp_path, 'msgpack')
    with granular.open(path) as reader, granular.SharedMemoryCache(reader, max_bytes=1 << 20) as cache:
        assert all(batch['int'].dtype == object for batch in granular.MapDataset.source(cache).batch(3))


def test_functions_and_decoders_of_the_user_decide_over_their_values(tmp_path):
    path, _ = written(tmp_path, 'msgpack')
    with granular.open(path) as reader:
        filled = granular.MapDataset.source(reader).map(lambda one: {'int': -1 if one['int'] is None else one['int']})
        assert [batch['int'].dtype for batch in filled.batch(3)] == [np.int64] * 4
    decoders = {**granular.decoders, 'msgpack': len}
    with granular.open(path, decoders) as reader:
        assert [batch['int'].dtype for batch in granular.MapDataset.source(reader).batch(3)] == [np.int64] * 4


@pytest.mark.parametrize('values', [[None, [1, 2]], [[1, 2], None], [{'a': 1}, None], [None, {'a': 1}]], ids=str)
def test_none_beside_structures_is_an_error_in_any_order(values, tmp_path):
    with granular.DatasetWriter(tmp_path / 'out', {'x': 'msgpack'}) as writer:
        for value in values:
            writer.append({'x': value})
    missing, other = values.index(None), 1 - values.index(None)
    with granular.open(tmp_path / 'out') as reader:
        dataset = granular.MapDataset.source(reader)
        for read in (lambda: dataset.batch(2)[0], lambda: list(dataset.to_iter_dataset().batch(2))):
            with pytest.raises(
                DatapointError, match=f"'x': datapoint {missing} of a batch is None, datapoint {other} a"
            ):
                read()


def test_a_loader_has_the_types_of_the_first_datapoint_and_refuses_none(tmp_path):
    path, _ = written(tmp_path, 'msgpack')
    with granular.open(path) as reader:
        with granular.Loader(granular.MapDataset.source(reader).select(['int']), 3) as loader:
            assert next(loader)['int'].dtype == np.int64
            with pytest.raises(DatapointError, match=r"step 4, key 'int'.*remove the key in a transform"):
                next(loader)
        with granular.Loader(granular.MapDataset.source(reader)[6:].select(['int']), 3) as loader:
            with pytest.raises(DatapointError, match=r"step 0, key 'int'"):
                next(loader)
