"""Parquet files: values, rows, requests, streams and their states, compared with PyArrow, NumPy and Grain."""

import asyncio
import datetime
import decimal
import json
import multiprocessing
import pickle
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import aio
from granular.aio.datasources.parquet.interleave import RowOrder
from granular.errors import (
    CorruptDatasetError,
    CorruptError,
    DatapointError,
    GranularError,
    InvalidArgumentError,
    MissingExtraError,
    ObjectChangedError,
    StateError,
    UnknownKeyError,
    UnsupportedError,
)
from granular.grain import MultiprocessingOptions
from granular.grain.experimental import ParquetIterDataset
from tests.support.requests import requests, steady
from tests.support.tables import FULL_TABLES, examples

COMPRESSIONS = ('none', 'snappy', 'gzip', 'brotli', 'zstd', 'lz4')


def write(path, table, **options):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **options)
    path.write_bytes(sink.getvalue().to_pybytes())
    return path


def numbers(count=1000, first=0):
    """Create a narrow column, a wide one and one of text."""
    rng = np.random.default_rng(first)
    ids = np.arange(first, first + count)
    return pa.table({'id': ids, 'wide': [rng.bytes(200) for _ in range(count)], 'text': [f't{i}' for i in ids]})


def with_nulls(values, every):
    return [None if i % every == 0 else value for i, value in enumerate(values)]


def kinds(count=60):
    """Create a column of each type, with nulls."""
    ids = list(range(count))
    columns = {
        'int64': pa.array([i + (1 << 60) + 1 for i in ids]),
        'int64 null': pa.array(with_nulls([i + (1 << 60) + 1 for i in ids], 3)),
        'uint8': pa.array(with_nulls(ids, 4), pa.uint8()),
        'float32': pa.array([i / 2 for i in ids], pa.float32()),
        'float64 null': pa.array(with_nulls([i / 2 for i in ids], 5)),
        'bool': pa.array([i % 2 == 0 for i in ids]),
        'bool null': pa.array(with_nulls([i % 2 == 0 for i in ids], 3)),
        'text': pa.array(with_nulls([f'ä{i}' for i in ids], 7)),
        'bytes': pa.array(with_nulls([bytes([i, 0, 0]) for i in ids], 7), pa.large_binary()),
        'dictionary': pa.array(with_nulls([f'd{i % 3}' for i in ids], 4)).dictionary_encode(),
        'decimal': pa.array([decimal.Decimal(i) / 4 for i in ids], pa.decimal128(12, 2)),
        'list': pa.array(with_nulls([list(range(i % 5)) for i in ids], 6)),
        'list null': pa.array([[i, None] if i % 2 else [i] for i in ids]),
        'bools': pa.array([[True, None] if i % 2 else [False] for i in ids]),
        'texts': pa.array([[f'{i}', None] for i in ids]),
        'fixed': pa.array(with_nulls([[i, i + 1.5] for i in ids], 4), pa.list_(pa.float32(), 2)),
        'nested': pa.array(with_nulls([[[i], [], [i, i]][: i % 4] for i in ids], 5)),
        'struct': pa.array(with_nulls([{'x': i if i % 2 else None, 'y': [i / 2] * (i % 3)} for i in ids], 5)),
        'map': pa.array(with_nulls([[(f'k{i}', i)] * (i % 3) for i in ids], 4), pa.map_(pa.string(), pa.int64())),
        'a.b': pa.array(ids),
        'a': pa.array([{'b': i, 'c.d': -i} for i in ids]),
        'null': pa.nulls(count),
    }
    return pa.table(columns)


def times(count=10):
    return pa.table({
        'timestamp': pa.array([None, *range(1, count)], pa.timestamp('us', 'UTC')),
        'date': pa.array([None, *range(1, count)], pa.date32()),
        'duration': pa.array([None, *range(1, count)], pa.duration('s')),
        'time': pa.array([None, *range(1, count)], pa.time32('s')),
    })  # fmt: skip


def plain(value):
    """Convert a value, also one of ``to_pylist`` of pyarrow, to one of Python, with lists for tuples."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and np.isnan(value) else value


def equal(actual, reference):
    """Compare values, also their types, with those of Grain, which makes arrays of objects where ours are lists."""
    if isinstance(reference, np.ndarray) and reference.dtype == object:
        assert type(actual) is list
        for one, other in zip(actual, reference, strict=True):
            equal(one, other)
        return
    assert type(actual) is type(reference)
    if isinstance(actual, np.ndarray):
        assert actual.dtype == reference.dtype
        assert len(actual) == len(reference)
    np.testing.assert_equal(actual, reference)


# --- values


@pytest.mark.parametrize('compression', COMPRESSIONS)
def test_values_equal_those_of_pyarrow(tmp_path, compression):
    table = kinds()
    path = write(granular.Path(tmp_path / 'x'), table, compression=compression, row_group_size=7, data_page_size=64)
    reference = plain(table.to_pylist())
    with granular.ParquetDataSource(path) as source:
        assert source.columns == tuple(table.column_names)
        assert len(source) == 60
        assert [plain(row) for row in source] == reference
        order = np.random.default_rng(0).permutation(60).tolist()
        assert [plain(row) for row in source.fetch(order)] == [reference[i] for i in order]


def test_types_equal_those_of_numpy(tmp_path):
    row = granular.ParquetDataSource(write(granular.Path(tmp_path / 'x'), kinds(), row_group_size=9))[11]
    assert type(row['int64']) is type(row['int64 null']) is np.int64
    assert type(row['uint8']) is np.uint8
    assert type(row['float32']) is np.float32
    assert type(row['bool']) is np.bool_
    assert row['list'].dtype == np.int64 and row['list'].flags.writeable and row['list'].base is None
    assert row['list null'].dtype == np.float64
    assert row['fixed'].dtype == np.float32
    assert type(row['nested']) is list and row['nested'][0].dtype == np.int64
    assert type(row['struct']['x']) is np.int64
    assert type(row['map']) is type(row['map'][0]) is list


SCALARS = {
    **{f'{kind}': (kind, 1, f'{kind}') for kind in (
        pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
    )},
    **{f'{kind}': (kind, np.float16(1.5), name) for kind, name in (
        (pa.float16(), 'float16'), (pa.float32(), 'float32'), (pa.float64(), 'float64'),
    )},
    **{f'{kind}': (kind, 1000, f'datetime64[{unit}]') for kind, unit in (
        (pa.date32(), 'D'), (pa.timestamp('ms'), 'ms'), (pa.timestamp('us'), 'us'), (pa.timestamp('ns'), 'ns'),
        (pa.timestamp('us', 'Europe/Vienna'), 'us'),
    )},
    **{f'{pa.duration(unit)}': (pa.duration(unit), 1000, f'timedelta64[{unit}]') for unit in ('s', 'ms', 'us', 'ns')},
    'bool': (pa.bool_(), True, 'bool'),
    'dictionary': (pa.dictionary(pa.int8(), pa.int16()), 1, 'int16'),
    'decimal': (pa.decimal128(9, 2), decimal.Decimal('1.25'), decimal.Decimal),
    'time32': (pa.time32('s'), datetime.time(1, 2, 3), datetime.time),
    'time64': (pa.time64('ns'), datetime.time(1, 2, 3), datetime.time),
    'text': (pa.string(), 'x', str),
    'bytes': (pa.binary(), b'x', bytes),
}  # fmt: skip


@pytest.mark.parametrize('name', SCALARS)
def test_types_do_not_depend_on_the_rows_that_are_read_together(tmp_path, name):
    kind, value, expected = SCALARS[name]
    columns = {
        'plain': pa.array([value, None, value], kind),
        'list': pa.array([[value], [None], None], pa.list_(kind)),
        'fixed': pa.array([[value], [None], None], pa.list_(kind, 1)),
        'nested': pa.array([[[value]], [[None]], None], pa.list_(pa.list_(kind))),
        'struct': pa.array([{'x': value}, {'x': None}, None], pa.struct([('x', kind)])),
        'map': pa.array([[('x', value)], [('x', None)], None], pa.map_(pa.string(), kind)),
    }
    with granular.ParquetDataSource(write(granular.Path(tmp_path / 'x'), pa.table(columns))) as source:
        alone = [source[i] for i in range(3)]
        together = source.fetch(range(3))
    streamed = list(ParquetIterDataset(tmp_path / 'x'))
    for row, others in zip(alone, zip(together, streamed, strict=True), strict=True):
        for other in others:
            assert types_of(other) == types_of(row)
    row = alone[0]
    is_scalar = isinstance(expected, str)
    for item in (row['plain'], row['struct']['x'], row['map'][0][1]):
        assert types_of(item) == (np.dtype(expected) if is_scalar else expected)
    for several in (row['list'], row['fixed'], row['nested'][0]):
        assert several.dtype == expected if is_scalar else type(several) is list


def types_of(value):
    if isinstance(value, dict):
        return {key: types_of(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [types_of(item) for item in value]
    return value.dtype if isinstance(value, np.ndarray | np.generic) else type(value)


def test_views_are_read_in_any_order(tmp_path):
    texts = with_nulls([f'a text that is not in the view, of number {i}' for i in range(30)], 7)
    table = pa.table({'text': pa.array(texts, pa.string_view())})
    with granular.ParquetDataSource(write(granular.Path(tmp_path / 'x'), table, row_group_size=9)) as source:
        order = np.random.default_rng(0).permutation(30).tolist()
        assert [row['text'] for row in source.fetch(order)] == [texts[i] for i in order]
        assert source[3:25, 'text']['text'] == texts[3:25]


def test_list_with_a_null_beside_an_integer_that_no_double_represents_is_refused(tmp_path):
    lists = [[2**60 + 1], [2**53, None], [2**53 + 1, None]]
    source = granular.ParquetDataSource(write(granular.Path(tmp_path / 'x'), pa.table({'x': lists})))
    assert source[0]['x'].tolist() == lists[0]
    np.testing.assert_equal(source[1]['x'], [2.0**53, np.nan])
    message = "row 2, column 'x': cannot be converted: Integer value 9007199254740993.*: write an integer in"
    with pytest.raises(DatapointError, match=message) as caught:
        source[2]
    assert 'UTF-8' not in str(caught.value)


def test_struct_with_fields_of_one_name_is_refused(tmp_path):
    struct = pa.StructArray.from_arrays([pa.array([1, 2]), pa.array(['x', 'y'])], names=['a', 'a'])
    source = granular.ParquetDataSource(write(granular.Path(tmp_path / 'x'), pa.table({'s': struct})))
    with pytest.raises(DatapointError, match=r"row 0, column 's': .*several fields of one name: \['a', 'a'\]: rename"):
        source[0]


def test_times_of_day_that_python_cannot_represent_are_refused(tmp_path):
    values = pa.array([1000, 1001, 86_400 * 10**9], pa.int64()).cast(pa.time64('ns'))
    source = granular.ParquetDataSource(write(granular.Path(tmp_path / 'x'), pa.table({'t': values})))
    assert source[0]['t'] == datetime.time(microsecond=1)
    with pytest.raises(DatapointError, match="row 1, column 't': .*nanoseconds: write times of day in micro"):
        source[1]
    with pytest.raises(DatapointError, match="row 2, column 't': .*: read other columns with columns="):
        source[2]


def test_rows_equal_those_of_grain(tmp_path):
    import grain.experimental

    keys = ['int64', 'float32', 'float64 null', 'bool', 'text', 'bytes', 'decimal', 'list', 'texts', 'fixed', 'nested']
    path = tmp_path / 'x'
    write(granular.Path(path), kinds().select(keys), row_group_size=7)
    reference = list(grain.experimental.ParquetIterDataset(str(path)))
    actual = list(ParquetIterDataset(path=path))
    assert len(actual) == len(reference) == 60
    for one, other in zip(actual, reference, strict=True):
        assert list(one) == list(other)
        for key in keys:
            equal(one[key], other[key])


@pytest.mark.parametrize('part', [slice(0, None, 2), slice(1, None, 2), slice(2, 3), slice(None)])
@pytest.mark.parametrize('sequential', [False, True])
def test_slices_of_a_stream_are_those_of_grain(tmp_path, part, sequential):
    import grain.experimental

    paths = [str(write(granular.Path(tmp_path / f'{i}'), numbers(10, 10 * i), row_group_size=4)) for i in range(4)]
    reference = grain.experimental.ParquetIterDataset(paths)
    reference.set_slice(part, sequential)
    expected = [int(row['id']) for row in reference]
    stream = ParquetIterDataset(paths)
    mapped = ParquetIterDataset(paths).map(lambda row: row['id'])
    for one in (stream, mapped):
        if not sequential or part.stop is None:
            one.set_slice(part, sequential)
        else:
            one.set_slice(part)
    assert [int(row['id']) for row in stream] == [int(number) for number in mapped] == expected
    with iter(stream) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(stream) as iterator:
        iterator.set_state(state)
        assert [int(row['id']) for row in iterator] == expected[1:]


def test_slices_and_positions_that_a_stream_does_not_have_are_errors(tmp_path):
    paths = [write(granular.Path(tmp_path / f'{i}'), numbers(10, 10 * i)) for i in range(2)]
    with pytest.raises(InvalidArgumentError, match='has 2 files, of which .* selects none'):
        ParquetIterDataset(paths).set_slice(slice(2, None))
    with iter(ParquetIterDataset(paths)) as iterator:
        next(iterator)
        with pytest.raises(InvalidArgumentError, match='rows of a stream have no index'):
            iterator.get_next_index()
    options = MultiprocessingOptions(2, start_method='fork')
    parts = ParquetIterDataset(paths).mp_prefetch(options, sequential_slice=True)
    assert sorted(int(row['id']) for row in parts) == list(range(20))


def test_times_equal_those_of_numpy(tmp_path):
    table = times()
    path = write(granular.Path(tmp_path / 'x'), table, row_group_size=3)
    columns = granular.ParquetDataSource(path)[:]
    for key in ('timestamp', 'date', 'duration'):
        np.testing.assert_array_equal(np.array(columns[key]), pq.read_table(path)[key].to_numpy())
    assert columns['time'] == table['time'].to_pylist()


def test_retained_row_does_not_retain_its_row_group(tmp_path):
    path = write(granular.Path(tmp_path / 'x'), pa.table({'x': [[float(i)] * 1000 for i in range(100)]}))
    row = granular.ParquetDataSource(path)[3]
    row['x'][:] = -1
    assert row['x'].base is None
    assert granular.ParquetDataSource(path)[3]['x'][0] == 3


# --- indices


def test_columns_are_selected(root):
    table = numbers(100)
    paths = [write(root / f'{i}.parquet', table.slice(40 * i, 40), row_group_size=15) for i in range(3)]
    with granular.ParquetDataSource(paths) as source:
        assert source[-1] == table.slice(99).to_pylist()[0]
        assert source[38:42, ['id']] == {'id': [38, 39, 40, 41]}
        assert source[5, 'text'] == {'text': 't5'}
        assert source.fetch([], ['id']) == []
        assert source.fetch([3, 3], ()) == [{}, {}]
        assert source[5, {'id': True, 'text': False}] == {'id': 5}
        for mask in (['nothing'], {'nothing': False}):
            with pytest.raises(UnknownKeyError, match='nothing'):
                source[0, mask]
        for mask, message in (
            ({'wide': slice(2)}, "True or False for columns, got {'wide': slice"),
            (5, 'as mask, got 5'),
        ):
            with pytest.raises(InvalidArgumentError, match=message):
                source[0, mask]
    with pytest.raises(UnknownKeyError, match='nothing'):
        granular.ParquetDataSource(paths, ['id', 'nothing'])
    for names in (['text', 'id'], iter(['text', 'id']), dict.fromkeys(['text', 'id'])):
        assert list(granular.ParquetDataSource(paths[0], names)[0]) == ['text', 'id']


def test_unpickled_source_has_the_same_columns(several):
    with granular.ParquetDataSource(several, ['id']) as source, pickle.loads(pickle.dumps(source)) as copy:
        assert copy.columns == ('id',) and copy[79] == source[79]


@pytest.fixture(scope='module')
def several(tmp_path_factory):
    folder = tmp_path_factory.mktemp('several')
    sizes = [13, 0, 1, 40, 26]
    starts = np.cumsum([0, *sizes])
    return [
        write(granular.Path(folder / f'{i}'), numbers(size, int(start)), row_group_size=6)
        for i, (size, start) in enumerate(zip(sizes, starts[:-1], strict=True))
    ]


@settings(max_examples=examples(40))
@given(
    indices=st.lists(st.integers(-80, 79), max_size=30),
    mask=st.sampled_from([None, ('id',), ('id', 'text')]),
    cache=st.sampled_from([0, 300, 1 << 20]),
)
def test_any_indices_are_fetched(several, indices, mask, cache):
    with granular.ParquetDataSource(several, cache_bytes=cache) as source:
        rows = source.fetch(indices, mask)
        assert [row['id'] for row in rows] == [i % 80 for i in indices]
        assert source.fetch(indices[::-1], mask) == rows[::-1]
        assert all(tuple(row) == (mask or ('id', 'wide', 'text')) for row in rows)


# --- requests


def test_columns_are_read_alone_and_a_batch_is_one_request_per_row_group(fakegcs):
    path = write(steady(fakegcs) / 'x', numbers(2000), row_group_size=100, compression='none')
    metadata = pq.read_metadata(pa.BufferReader(path.read_bytes()))
    column = sum(metadata.row_group(i).column(0).total_compressed_size for i in range(20))
    source, count, size = requests(lambda: granular.ParquetDataSource(path))
    assert count == 1 and size <= 64 << 10
    order = np.random.default_rng(0).permutation(2000)
    rows, count, size = requests(lambda: source.fetch(order, ('id',)))
    assert [row['id'] for row in rows] == order.tolist()
    assert count <= 20
    config = granular.IOConfig(max_gap=0, hedge=0)
    exact = granular.ParquetDataSource(granular.Path(str(path), config=config, **path.aio.store.options), ['id'])
    rows, count, size = requests(lambda: exact.fetch(order))
    assert (count, size) == (20, column)
    again, count, _ = requests(lambda: exact.fetch(order[::-1]))
    assert count == 0 and again == rows[::-1]
    chosen = granular.MapDataset.source(source).select(['text'])
    assert requests(lambda: chosen[1999])[0] == {'text': 't1999'}
    with granular.ParquetDataSource(path, cache_bytes=0) as source:
        assert [requests(lambda: source[5, 'id'])[1] for _ in range(2)] == [1, 1]


async def test_concurrent_reads_share_a_request(fakegcs):
    path = write(steady(fakegcs) / 'x', numbers(500))
    async with aio.ParquetDataSource(path) as source:
        before = granular.io_stats()['requests']
        result = await asyncio.gather(*(source.fetch([i, 499 - i], ('id',)) for i in range(20)))
        assert granular.io_stats()['requests'] == before + 1
        assert [[row['id'] for row in rows] for rows in result] == [[i, 499 - i] for i in range(20)]
        waiting = asyncio.create_task(source.fetch([1], ('text',)))
        other = asyncio.create_task(source.fetch([2], ('text',)))
        await asyncio.sleep(0)
        waiting.cancel()
        assert await other == [{'text': 't2'}]


def test_cache_stays_within_its_limit(fakegcs):
    path = write(steady(fakegcs) / 'x', numbers(1000), row_group_size=100, compression='none')
    with granular.ParquetDataSource(path, ['wide'], cache_bytes=50_000) as source:  # two columns of 20 kB, not three
        for i in range(0, 1000, 100):
            source[i]
        counts = [requests(lambda i=i: source[i])[1] for i in (900, 800, 700)]
    assert counts == [0, 0, 1]


def test_footer_without_a_version_is_read(tmp_path):
    pq.write_table(numbers(20), tmp_path / 'a.parquet')
    data = (tmp_path / 'a.parquet').read_bytes()
    length = int.from_bytes(data[-8:-4], 'little')
    footer = data[-8 - length : -8]
    assert footer[0] == 0x15  # the field of the version, of one byte; the next field counts from it
    footer = bytes([footer[2] + 0x10]) + footer[3:]
    (tmp_path / 'b.parquet').write_bytes(data[: -8 - length] + footer + len(footer).to_bytes(4, 'little') + b'PAR1')
    assert list(granular.open(tmp_path / 'b.parquet')) == list(granular.open(tmp_path / 'a.parquet'))


def test_footer_longer_than_the_first_request(fakegcs):
    path = write(steady(fakegcs, tail=64) / 'x', numbers(10))
    source, count, _ = requests(lambda: granular.ParquetDataSource(path))
    assert count == 2
    assert source[9, 'id'] == {'id': 9}


def double(row):
    return int(row['id']) * 2


# --- streams


def test_stream_of_one_file(root):
    path = write(root / 'x', numbers(100), row_group_size=30)
    stream = ParquetIterDataset(path, ['id'])
    iterator = iter(stream)
    size: dict[str, int] = {}
    for i in range(100):
        assert iterator.get_state()['state'] == {'row_group': i // 30, 'index_within_row_group': i % 30, **size}
        assert next(iterator) == {'id': i}
        size = {'bytes': path.stat().size}
    assert iterator.get_state()['state'] == {'row_group': 3, 'index_within_row_group': 10, **size}
    assert list(iterator) == []
    iterator.set_state({**iterator.get_state(), 'state': {'row_group': 1, 'index_within_row_group': 30}})
    assert next(iterator) == {'id': 60}
    iterator.close()


def test_interleaved_order_equals_that_of_grain(several, tmp_path):
    import grain.experimental

    # Grain cannot read empty files.
    filled = [path for path in several if path.stat().size and pq.read_metadata(path).num_rows]
    reference = [row['id'] for row in grain.experimental.ParquetIterDataset([str(path) for path in filled])]
    assert [row['id'] for row in ParquetIterDataset(filled, ['id'])] == reference


@pytest.mark.parametrize('cycle', [1, 2, 3, 16])
def test_states_of_interleaved_files(several, cycle):
    def rows(iterator):
        return [int(row['id']) for row in iterator]

    alone = [ParquetIterDataset(path, ['id']) for path in several]
    stream = ParquetIterDataset(several, ['id'], cycle_length=cycle)
    expected = rows(granular.IterDataset.interleave(alone, cycle))
    iterator = iter(stream)
    iterator.start_prefetch()  # from then on, states have the bytes of the files
    for i in range(81):
        state = json.loads(json.dumps(iterator.get_state()))
        if i % 7 == 0 or i > 76:
            with iter(stream) as other:
                other.set_state(state)
                assert rows(other) == expected[i:]
                other.set_state(state)
                assert other.get_state() == state
        assert [int(row['id']) for row in [next(iterator, None)] if row] == expected[i : i + 1]
    iterator.close()


@settings(max_examples=examples(60))
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8), cycle=st.integers(1, 9), block=st.integers(1, 4))
def test_interleaving_positions_match_a_simulation(lengths, cycle, block):
    streams = [granular.MapDataset.source([(f, i) for i in range(n)]).to_iter_dataset() for f, n in enumerate(lengths)]
    expected = list(granular.IterDataset.interleave(streams, cycle))
    order = RowOrder(lengths, cycle)
    files, rows = order.lookup(np.arange(sum(lengths)))
    assert list(zip(files.tolist(), rows.tolist(), strict=True)) == expected
    blocks = [[*range(block, n, block), n] if n else [] for n in lengths]
    first = {(f, i // block): at for at, (f, i) in reversed(list(enumerate(expected)))}
    for position in range(len(expected)):
        consumed, unopened = order.consumed(position)
        done = expected[:position]
        assert all(consumed[f] == sum(owner == f for owner, _ in done) for f in consumed)
        assert all(f < unopened for f, _ in done)
        coming = list(order.upcoming(position, blocks))
        assert sorted(coming, key=first.__getitem__) == coming
        assert set(coming) >= {key for key, at in first.items() if at > position}


def stages(paths):
    return ParquetIterDataset(paths, ['id'], cycle_length=2).map(double).window_shuffle(7, seed=1).batch(4)


def go_on(paths, state, queue):
    with iter(stages(paths)) as iterator:
        iterator.set_state(json.loads(state))
        queue.put([batch.tolist() for batch in iterator])


def test_state_resumes_in_another_process(several):
    with iter(stages(several)) as iterator:
        for _ in range(7):
            next(iterator)
        state = json.dumps(iterator.get_state())
        rest = [batch.tolist() for batch in iterator]
    context = multiprocessing.get_context('spawn')
    queue = context.Queue()
    process = context.Process(target=go_on, args=(several, state, queue))
    process.start()
    assert queue.get(timeout=250) == rest
    process.join()
    assert len(rest) == 13


def test_foreign_states_are_rejected(several, tmp_path):
    iterator = iter(ParquetIterDataset(several, ['id'], cycle_length=2))
    for _ in range(20):
        next(iterator)
    good = iterator.get_state()
    for change in (
        {'next_file': 99}, {'files': {}}, {'files': {'0': {'row_group': 0}}}, {'next_file': 2}, {'files': []},
        {'files': {'3': {'row_group': 99, 'index_within_row_group': 0}}},
        {'files': {**good['state']['files'], '3': {'row_group': 0, 'index_within_row_group': 7}}},
    ):  # fmt: skip
        with pytest.raises(StateError):
            iterator.set_state({**good, 'state': {**good['state'], **change}})
    with pytest.raises(StateError, match='another pipeline'):
        iter(ParquetIterDataset(several, ['id'])).set_state(good)
    iterator.set_state(good)
    assert len(list(iterator)) == 60


def test_read_ahead_is_bounded(fakegcs):
    path = write(steady(fakegcs) / 'x', numbers(4000), row_group_size=100, compression='none')
    options = granular.ReadOptions(prefetch_buffer_size=500)
    stream = ParquetIterDataset(path, ['wide'], read_ahead=100_000, read_options=options)
    with iter(stream) as iterator:
        _, _, size = requests(lambda: (next(iterator), iterator.start_prefetch()))
        assert size < 600_000  # of 800,000 in total: the footer, the data of 500 rows, and five more row groups
        _, count, size = requests(lambda: sum(1 for _ in iterator))
        assert 200_000 < size < 900_000


def test_concurrent_iterators_are_independent(fakegcs):
    path = write(steady(fakegcs) / 'x', numbers(300), row_group_size=50, compression='none')
    stream = ParquetIterDataset(path, ['wide', 'id'], read_ahead=0).map(double)
    _, _, alone = requests(lambda: list(stream))
    with iter(stream) as one, iter(stream) as other:
        result, _, size = requests(lambda: [(next(one), next(other)) for _ in range(300)])
    assert result == [(2 * i, 2 * i) for i in range(300)]
    assert size < 2.2 * alone


async def test_async_stream(several):
    async with aiter(ParquetIterDataset(several, ['id'], cycle_length=1).batch(10)) as iterator:
        assert [batch['id'][0] async for batch in iterator] == list(range(0, 80, 10))
    iterator = aiter(ParquetIterDataset(several))
    await iterator.start_prefetch()
    await iterator.aclose()
    assert len(asyncio.all_tasks()) == 1


# --- errors


def test_damaged_files_are_errors(tmp_path):
    table = numbers(300)
    intact = write(
        granular.Path(tmp_path / 'whole'), table, row_group_size=100, write_page_checksum=True, compression='snappy'
    ).read_bytes()
    path = granular.Path(tmp_path / 'damaged.parquet')
    rng = np.random.default_rng(0)
    broken = [intact[:n] for n in (0, 3, 4, 11, 12, 500, len(intact) // 2, len(intact) - 1)]
    broken += [intact[:-8] + b'\xff\xff\xff\x7fPAR1', intact[:-8] + b'\0\0\0\0PAR1', b'x' * 1000]
    for data in broken:
        path.write_bytes(data)
        with pytest.raises(CorruptError, match=r'damaged\.parquet'):
            granular.ParquetDataSource(path)
        with pytest.raises(CorruptError, match=r'damaged\.parquet'):
            next(iter(ParquetIterDataset(path)))
    caught = 0
    for at in rng.integers(4, len(intact) - 3000, 20).tolist():
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 0x55]) + intact[at + 1 :])
        try:
            assert [plain(row) for row in granular.ParquetDataSource(path)] == table.to_pylist()
        except GranularError as error:
            assert 'damaged.parquet' in str(error)
            caught += 1
    assert caught > 15


def test_damaged_footers_are_errors(tmp_path):
    """Also those at whose chunks pyarrow ends the process, and whose text is not UTF-8."""
    path = granular.Path(tmp_path / 'damaged.parquet')
    intact = write(path, pa.table({'l': [[1, 2], [3]], 'i': [1, 2], 's': ['a', 'b']})).read_bytes()
    length = int.from_bytes(intact[-8:-4], 'little')
    refused = 0
    for bit in range(0, 8 * length, 1 if FULL_TABLES else 5):
        damaged = bytearray(intact)
        damaged[bit // 8 - length - 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            with granular.ParquetDataSource(path) as source:
                source.fetch(range(min(len(source), 2)))
        except GranularError as error:
            assert 'damaged.parquet' in str(error)
            refused += 1
    assert refused


def test_damaged_row_group_can_be_skipped(tmp_path):
    path = granular.Path(tmp_path / 'x')
    data = bytearray(write(path, numbers(300), row_group_size=100, write_page_checksum=True).read_bytes())
    data[pq.read_metadata(path).row_group(1).column(1).dictionary_page_offset + 5000] ^= 0xFF
    path.write_bytes(data)
    for stream in (
        granular.MapDataset.source(granular.ParquetDataSource(path)).to_iter_dataset(on_error='skip'),
        ParquetIterDataset(path, on_error='skip'),
    ):
        with iter(stream) as iterator:
            assert [row['id'] for row in iterator] == [*range(100), *range(200, 300)]
            assert len(iterator.errors) == 100
    replaced = ParquetIterDataset(path, on_error=lambda index, error: {'id': -1})
    ids = [*range(100), *[-1] * 100, *range(200, 300)]
    assert list(replaced.map(lambda row: (row['id'],))) == [(i,) for i in ids]
    with iter(ParquetIterDataset(path)) as iterator:
        assert [next(iterator)['id'] for _ in range(100)] == list(range(100))
        with pytest.raises(CorruptError, match='row group 1'):
            next(iterator)
        size = path.stat().size
        assert iterator.get_state()['state'] == {'row_group': 1, 'index_within_row_group': 0, 'bytes': size}


async def test_concurrent_read_of_other_row_groups_does_not_fail_with_a_damaged_one(tmp_path):
    path = granular.Path(tmp_path / 'x')
    data = bytearray(write(path, numbers(300), row_group_size=100, write_page_checksum=True).read_bytes())
    data[pq.read_metadata(path).row_group(1).column(1).dictionary_page_offset + 5000] ^= 0xFF
    path.write_bytes(data)
    async with aio.ParquetDataSource(path) as source:
        both, rows = await asyncio.gather(source.fetch([150, 250]), source.fetch([251, 252]), return_exceptions=True)
        assert isinstance(both, CorruptError)
        assert [row['id'] for row in rows] == [251, 252]


def not_utf8(column):
    """Columns of text, of which row 3 of each row group of four is not UTF-8, in several types."""
    texts = [b'd\xff' if i % 4 == 3 else b'text' for i in range(12)]
    text = pa.Array.from_buffers(pa.string(), 12, pa.array(texts, pa.binary()).buffers())
    offsets = pa.array(range(13), pa.int32())
    return {
        'text': lambda: text,
        'large': lambda: pa.Array.from_buffers(pa.large_string(), 12, pa.array(texts, pa.large_binary()).buffers()),
        'dictionary': text.dictionary_encode,
        'list': lambda: pa.ListArray.from_arrays(offsets, text),
        'struct': lambda: pa.StructArray.from_arrays([text], ['x']),
        'map': lambda: pa.MapArray.from_arrays(offsets, pa.array(['k'] * 12), text),
    }[column]()


@pytest.mark.parametrize('column', ['text', 'large', 'dictionary', 'list', 'struct', 'map'])
def test_text_that_is_not_utf8_names_file_row_and_column(tmp_path, column):
    table = pa.table({'id': range(12), column: not_utf8(column)})
    paths = [write(granular.Path(tmp_path / name), table, row_group_size=4) for name in ('a', 'b')]
    with granular.ParquetDataSource(paths) as source:
        for indices in ([19], [16, 17, 18, 19], [22, 19, 0], range(16, 20)):
            with pytest.raises(DatapointError, match=rf"/b: row 7, column '{column}': .*UTF8.*: write text") as caught:
                source.fetch(indices)
        assert isinstance(caught.value.__context__, pa.ArrowException)
        assert source[19, ['id']] == {'id': 7}
        stream = granular.MapDataset.source(source).to_iter_dataset(on_error='skip')
        assert [row['id'] for row in stream] == 2 * [i for i in range(12) if i % 4 != 3]
    with pytest.raises(DatapointError, match='/a: row 3'):
        list(ParquetIterDataset(paths[0]))


def test_stream_of_a_replaced_file_is_an_error(bucket):
    path = write(bucket / 'x', numbers(100), row_group_size=10)
    with iter(ParquetIterDataset(path, read_ahead=0, read_options=granular.ReadOptions(16, 8))) as iterator:
        assert next(iterator)['id'] == 0
        write(path, numbers(100, first=7), row_group_size=10)
        with pytest.raises(ObjectChangedError, match='replaced'):
            list(iterator)


def test_files_with_different_schemas_are_rejected(tmp_path):
    one = write(granular.Path(tmp_path / 'one'), numbers(3))
    other = write(granular.Path(tmp_path / 'other'), numbers(3).drop_columns(['wide']))
    with pytest.raises(CorruptDatasetError, match='other'):
        granular.ParquetDataSource([one, other])
    twice = write(granular.Path(tmp_path / 'twice'), pa.table([[1], [2]], names=['x', 'x']))
    with pytest.raises(UnsupportedError, match="'x'"):
        granular.ParquetDataSource(twice)
    (granular.Path(tmp_path) / 'locked').write_bytes(b'PARE' + bytes(20) + b'PARE')
    with pytest.raises(UnsupportedError, match='encrypted'):
        granular.ParquetDataSource(tmp_path / 'locked')


@pytest.mark.parametrize('source', [ParquetIterDataset, granular.ParquetDataSource])
@pytest.mark.parametrize('columns', ['id', [1], [['id']], 1])
def test_columns_are_validated(several, source, columns):
    with pytest.raises(InvalidArgumentError, match='columns: expected a sequence of names'):
        source(several, columns=columns)


@pytest.mark.parametrize('options', [{'cycle_length': 0}, {'read_ahead': -1}])
def test_counts_are_validated(several, options):
    with pytest.raises(InvalidArgumentError):
        ParquetIterDataset(several, **options)


def test_missing_pyarrow_is_named(several, monkeypatch):
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    with pytest.raises(MissingExtraError, match=r'pip install .*\[parquet\]'):
        granular.ParquetDataSource(several)
    with pytest.raises(MissingExtraError, match=r'pip install .*\[parquet\]'):
        ParquetIterDataset(several)
