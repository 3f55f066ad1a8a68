"""Conversion: the output equals the input, also after an interruption."""

import asyncio
import datetime
import decimal
import io
import itertools
import json
import os
import pathlib
import shutil
import tarfile
import threading
import time

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

import granular
from granular import aio
from granular.aio.stores import Store
from granular.errors import (
    AlreadyExistsError,
    CorruptDatasetError,
    DatapointError,
    DatapointKeysError,
    EncodeError,
    InvalidArgumentError,
    NotFoundError,
    StoreError,
    UnknownTypeError,
)
from tests.support.tables import pairwise

PLAN = '000000/.granular-conversion'


def datapoint(i):
    return {'n': i, 'x': bytes([i % 251]) * (i * 7919 % 500), 'text': f'nümber {i}', 'f': i / 2, 'a': np.arange(i % 5)}


def equal(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)


def check(target, expected_datapoints):
    with granular.ShardedDatasetReader(target, granular.decoders) as reader:
        found = list(reader)
    assert len(found) == len(expected_datapoints)
    assert all(map(equal, found, expected_datapoints))


def contents(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob('*') if path.is_file()}


class Random:
    """A source with random access that records its fetches."""

    def __init__(self, count, datapoint=datapoint):
        self.count, self.point, self.fetched = count, datapoint, []

    def __len__(self):
        return self.count

    def fetch(self, indices):
        self.fetched += indices
        return [self.point(i) for i in indices]


class Once:
    """An iterable without random access."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return map(datapoint, range(self.count))


class Later(Once):
    async def __aiter__(self):
        for i in range(self.count):
            yield datapoint(i)


@pytest.mark.parametrize(
    ('store', 'layout'), [('local', 'refs'), ('local', 'columns'), ('seaweed', 'refs'), ('fakegcs', 'columns')]
)
def test_sources_and_iterables_are_converted(store, layout, request, tmp_path):
    """Shards do not depend on how the records are read."""
    local = store == 'local'
    root = granular.Path(tmp_path) if local else request.getfixturevalue(store).place()
    expected = None
    count, shards = (25, 3) if local else (15, 2)
    for kind in (Random, Once, Later) if local else (Random, Once):
        seen = []
        target = root / kind.__name__
        done = granular.convert(kind(count), target, shardlen=10, layout=layout, checksums=local, progress=seen.append)
        assert done.spec == {'a': 'array', 'f': 'float', 'n': 'int', 'text': 'utf8', 'x': 'bytes'}
        assert (done.datapoints, done.shards, done.found, sum(seen)) == (count, shards, 0, count)
        assert done.format == ('source' if kind is Random else 'iterable')
        assert done.bytes > 0
        check(target, [datapoint(i) for i in range(count)])
        made = contents(target)
        assert json.loads(made.pop(PLAN))['records'] == (count if kind is Random else None)
        assert expected is None or made == expected
        expected = made
    assert (granular.verify(target).checked > 0) == local


def test_shard_sizes(tmp_path):
    for count in (0, 1, 9, 10, 11, 20):
        for kind in (Random, Once):
            target = tmp_path / f'{kind.__name__}{count}'
            if not count:
                with pytest.raises(InvalidArgumentError, match='has no records to infer a spec from: pass spec'):
                    granular.convert(kind(count), target, shardlen=10)
            spec = None if count else {'n': 'int', 'x': 'bytes'}
            done = granular.convert(kind(count), target, shardlen=10, spec=spec)
            assert done.shards == max(1, -(-count // 10))
            check(target, [datapoint(i) for i in range(count)])
            assert granular.convert(kind(count), target, shardlen=10, spec=spec).found == count
    with pytest.raises(InvalidArgumentError, match='shardlen: expected an integer >= 1, got 0'):
        granular.convert(Random(3), tmp_path / 'x', shardlen=0)


def test_conversion_into_one_dataset(tmp_path):
    for kind in (Random, Once):
        target = tmp_path / kind.__name__
        done = granular.convert(kind(12), target, shardlen=None)
        assert (done.shards, done.datapoints) == (1, 12)
        with granular.DatasetReader(target, granular.decoders) as reader:
            assert all(map(equal, reader, map(datapoint, range(12))))
        assert granular.convert(kind(12), target, shardlen=None).found == 12
        message = 'records 12, not 13' if kind is Random else 'has 12 datapoints, expected 13'
        with pytest.raises((AlreadyExistsError, CorruptDatasetError), match=message):
            granular.convert(kind(13), target, shardlen=None)


async def test_async_api(tmp_path):
    done = await aio.convert(Random(5), tmp_path / 'x')
    assert done.datapoints == 5
    async with aio.ShardedDatasetReader(tmp_path / 'x', granular.decoders) as reader:
        # From a reader of either API, and from a pipeline over it that drops some elements.
        assert (await aio.convert(reader, tmp_path / 'y')).format == 'granular'
        odd = aio.MapDataset.source(reader).filter(lambda one: one['n'] % 2)
        assert (await aio.convert(odd, tmp_path / 'z')).datapoints == 2
    check(tmp_path / 'y', [datapoint(i) for i in range(5)])
    check(tmp_path / 'z', [datapoint(1), datapoint(3)])


# --- specs ----------------------------------------------------------------------------------------------------------


def image_file(format, size=(6, 4)):
    out = io.BytesIO()
    Image.new('RGB', size, (200, 30, 30)).save(out, format)
    return out.getvalue()


JPEG, PNG, WEBP, GIF, BMP, TIFF = map(image_file, ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'TIFF'))

KINDS = [
    ([1, -5, 2**100], 'int'), ([np.int64(3), 4], 'int'), ([True, False], 'bool'), ([1, None], 'msgpack'),
    ([1.5], 'float'), ([np.float64(1), 2.0], 'float'), ([np.float32(1)], 'array'),
    ([np.uint8(1)], 'array'), ([1.5, 2], 'msgpack'), ([True, 1], 'msgpack'),
    (['x'], 'utf8'), ([b'x'], 'bytes'),
    ([JPEG], 'jpg'), ([PNG], 'png'), ([WEBP, GIF, BMP], 'png'), ([JPEG, PNG], 'jpg'), ([JPEG, b'x'], 'bytes'),
    ([TIFF], 'bytes'), ([JPEG, None], 'msgpack'), ([[1, 2], {'a': ['b', None]}], 'msgpack'), ([np.arange(3)], 'array'),
    ([[np.arange(3)], 1], 'tree'), ([{'a': np.int64(2)}], 'tree'), ([Image.new('RGB', (2, 2))], 'png'),
    ([np.bool_(1)], 'bool'), ([np.str_('x\0'), 'y'], 'utf8'), ([np.bytes_(b'x\0')], 'bytes'),
    ([np.timedelta64(1, 'ns')], 'array'),
    ([1.5, None], 'msgpack'), ([JPEG, JPEG, JPEG, None], 'msgpack'), ([1, np.int64(2), None], 'msgpack'),
    ([b'x', 'y', 1], 'msgpack'),
    ([object()], ''), ([2**200], ''), ([np.arange(3), JPEG, 'x'], 'tree'),
]  # fmt: skip


@pytest.mark.parametrize(('values', 'kind'), KINDS, ids=lambda value: value if isinstance(value, str) else None)
def test_types_are_inferred(values, kind, tmp_path):
    records = [{'key': value} for value in values]
    if not kind:
        with pytest.raises(InvalidArgumentError, match='no type fits these keys'):
            granular.convert(records, tmp_path / 'x')
        assert os.listdir(tmp_path) == []
        return
    assert granular.convert(records, tmp_path / 'x').spec == {'key': kind}
    with granular.ShardedDatasetReader(tmp_path / 'x', granular.decoders) as reader:
        found = [one['key'] for one in reader]
    if kind in ('jpg', 'png'):
        with granular.ShardedDatasetReader(tmp_path / 'x', None) as raw:
            files = [one['key'] for one in raw]
        assert all(file == value or not isinstance(value, bytes) for file, value in zip(files, values, strict=True))
        assert all(image.shape[0] for image in found)
    else:
        assert all(np.array_equal(one, value) for one, value in zip(found, values, strict=True))


A_DAY, MORNING = datetime.date(2020, 1, 2), datetime.time(1, 2, 3, 4)
ARROW = [
    (pyarrow.int64(), 5, 'int', 5), (pyarrow.float64(), 1.5, 'float', 1.5),
    *[(pyarrow.from_numpy_dtype(dtype), 5, 'array', dtype(5))
      for dtype in (np.int8, np.int16, np.int32, np.uint8, np.uint16, np.uint32, np.uint64)],
    *[(pyarrow.from_numpy_dtype(dtype), dtype(1.5), 'array', dtype(1.5)) for dtype in (np.float16, np.float32)],
    *[(pyarrow.duration(unit), 7, 'array', np.timedelta64(7, unit)) for unit in ('s', 'ms', 'us', 'ns')],
    *[(pyarrow.timestamp(unit, zone), 7, 'array', np.datetime64(7, unit))
      for unit in ('ms', 'us', 'ns') for zone in (None, 'UTC')],
    (pyarrow.date32(), A_DAY, 'array', np.datetime64('2020-01-02')),
    (pyarrow.bool_(), True, 'bool', True), (pyarrow.string(), 'x', 'utf8', 'x'),
    (pyarrow.binary(), b'x', 'bytes', b'x'),
    (pyarrow.decimal128(9, 2), decimal.Decimal('-1.50'), 'tree', decimal.Decimal('-1.50')),
    (pyarrow.time32('s'), MORNING.replace(microsecond=0), 'tree', MORNING.replace(microsecond=0)),
    (pyarrow.time64('us'), MORNING, 'tree', MORNING),
    (pyarrow.null(), None, 'msgpack', None),
]  # fmt: skip


@pytest.mark.parametrize(('arrow', 'value', 'kind', 'found'), ARROW, ids=lambda value: f'{value}'[:20])
def test_types_of_parquet_files_are_converted(arrow, value, kind, found, tmp_path):
    one = pyarrow.array([value, value], arrow)
    some = pyarrow.array([value, None], arrow)
    struct = pyarrow.StructArray.from_arrays([some], ['x'])
    columns = {
        'one': one,
        'null': some,
        'items': pyarrow.ListArray.from_arrays([0, 1, 2], one),
        'pair': pyarrow.ListArray.from_arrays([0, 1, 2], some),
        'nested': pyarrow.ListArray.from_arrays([0, 1, 2], pyarrow.ListArray.from_arrays([0, 1, 2], some)),
        'struct': struct,
        'structs': pyarrow.ListArray.from_arrays([0, 1, 2], struct),
        'map': pyarrow.MapArray.from_arrays([0, 1, 2], ['k', 'k'], some),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / 'x.parquet')
    assert granular.convert(tmp_path / 'x.parquet', tmp_path / 'x').spec['one'] == kind
    with granular.open(tmp_path / 'x') as reader:
        row, last = reader
    items = [row['items'], row['pair'], row['nested'][0], row['structs'][0].values(), row['struct'].values()]
    assert all(np.array_equal([found], [*each]) for each in items)
    assert row['one'] == row['null'] == row['map'][0][1] == found
    assert last['null'] is None or np.isnan(last['null'])
    if isinstance(found, np.generic):
        assert row['one'].dtype == row['null'].dtype == row['items'].dtype == row['struct']['x'].dtype == found.dtype
        assert type(row['one']) is type(row['null']) is type(found)


def test_invalid_key_names_are_rejected(tmp_path):
    done = granular.convert([{'Image ID': 1, 'Label': 2, '0': 3, 'refs': 4}], tmp_path / 'x')
    assert done.renamed == {'Image ID': 'image_ID', 'Label': 'label', '0': '_0', 'refs': 'refs_'}
    with granular.ShardedDatasetReader(tmp_path / 'x', granular.decoders) as reader:
        assert reader[0] == {'image_ID': 1, 'label': 2, '_0': 3, 'refs_': 4}
    with pytest.raises(InvalidArgumentError, match="fields 'a b' and 'a-b'|fields 'a b' and 'a_b'"):
        granular.convert([{'a b': 1, 'a_b': 2}], tmp_path / 'y')


def test_field_behind_the_sample_that_has_the_key_of_another_one_is_an_error(tmp_path):
    records = [{'a b': i} for i in range(10)]
    with pytest.raises(DatapointError, match="fields 'a_b' and 'a b' would both be key 'a_b'"):
        granular.convert([*records, {'a b': 10, 'a_b': 99}], tmp_path / 'x', sample=1)


def test_types_are_given_by_the_names_of_fields_or_of_keys(granular_cli, tmp_path):
    table = pyarrow.table({'image/encoded': [b'abc'] * 5, 'image/class/label': [1] * 5})
    pyarrow.parquet.write_table(table, tmp_path / 'x.parquet')
    for name in ('image/class/label', 'image_class_label'):
        folder = tmp_path / name.replace('/', '-')
        code, out, _ = granular_cli('convert', tmp_path / 'x.parquet', folder, '--spec', f'{name}=i64')
        assert (code, "image_class_label: i64 (from 'image/class/label') (given)" in out) == (0, True)
        with granular.open(folder) as reader:
            assert reader.spec == {'image_class_label': 'i64', 'image_encoded': 'bytes'}
    both = {'image/class/label': 'i64', 'image_class_label': 'i64'}
    with pytest.raises(InvalidArgumentError, match='spec names a field twice'):
        granular.convert(tmp_path / 'x.parquet', tmp_path / 'both', spec=both)


def test_custom_types_and_encoders(tmp_path):
    spec = {'image': 'bytes', 'times': 'int[]', 'mine': 'mine'}
    records = [{'image': JPEG, 'times': [1, 2], 'mine': object}] * 3
    encoders = {'mine': lambda value: value.__name__.encode()}
    done = granular.convert(records, tmp_path / 'x', spec=spec, encoders=encoders)
    assert done.spec == spec
    with granular.ShardedDatasetReader(tmp_path / 'x', {**granular.decoders, 'mine': bytes}) as reader:
        assert reader[1] == {'image': JPEG, 'times': [1, 2], 'mine': b'object'}
    with pytest.raises(UnknownTypeError, match='mine'):
        granular.convert(records, tmp_path / 'y', spec=spec)
    with pytest.raises(InvalidArgumentError, match=r"spec names keys \['label'\]"):
        granular.convert(records, tmp_path / 'y', spec={'label': 'int'})
    assert os.listdir(tmp_path) == ['x']


def test_unfitting_records_are_errors(tmp_path):
    odd = [{'n': i} for i in range(300)]
    odd[201] = {'n': 'text'}
    with pytest.raises(EncodeError, match=r"datapoint 201, key 'n': not encoded as 'int': .* pass another"):
        granular.convert(iter(odd), tmp_path / 'x', shardlen=100)
    odd[201] = {'m': 1}
    with pytest.raises(DatapointKeysError, match=r"datapoint 201: missing keys \['n'\], unknown keys \['m'\]"):
        granular.convert(iter(odd), tmp_path / 'y', shardlen=100)
    # Finished shards remain, but are not a complete dataset.
    assert sorted(contents(tmp_path / 'y')) == [
        PLAN,
        '000001/n.bag',
        '000001/n.crc',
        '000001/refs.bag',
        '000001/refs.crc',
        '000001/spec.json',
    ]
    with pytest.raises(NotFoundError, match='000000: has no spec.json'):
        granular.ShardedDatasetReader(tmp_path / 'y', granular.decoders)
    # A key that some records lack is None.
    granular.convert([{'a': 1}, {'a': 2, 'b': 3.5}], tmp_path / 'z')
    with granular.ShardedDatasetReader(tmp_path / 'z', granular.decoders) as reader:
        assert list(reader) == [{'a': 1, 'b': None}, {'a': 2, 'b': 3.5}]
    granular.convert(iter([b'1', b'2']), tmp_path / 'bytes')
    with granular.ShardedDatasetReader(tmp_path / 'bytes', granular.decoders) as reader:
        assert list(reader) == [{'data': b'1'}, {'data': b'2'}]
    with pytest.raises(DatapointError, match='a record is of type tuple'):
        granular.convert([(1, 2)], tmp_path / 'tuples')


def test_dry_run_writes_nothing(tmp_path):
    source = Random(1000)
    done = granular.convert(source, tmp_path / 'x', shardlen=300, dry_run=True)
    assert (done.datapoints, done.shards, done.bytes, done.spec['text']) == (1000, 4, 0, 'utf8')
    assert len(source.fetched) == 128
    assert {0, 999} <= set(source.fetched)
    assert granular.convert(Once(1000), tmp_path / 'x', dry_run=True).datapoints is None
    assert os.listdir(tmp_path) == []


# --- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('number', range(4))
def test_shard_removed_by_hand_is_written_again_or_named(number, tmp_path):
    points = [{'n': i} for i in range(20)]

    def convert():
        granular.convert(points, tmp_path / 'data', shardlen=5)

    def copy():
        granular.copy_to_local(tmp_path / 'data', tmp_path / 'copy')

    def write():
        with granular.ShardedDatasetWriter(tmp_path / 'data', {'n': 'int'}, granular.encoders, 5) as writer:
            for point in points[writer.found :]:
                writer.append(point)

    for make, folder in ((convert, 'data'), (write, 'data'), (copy, 'copy')):
        shutil.rmtree(tmp_path / 'data', ignore_errors=True)
        convert()
        copy()
        shutil.rmtree(tmp_path / folder / f'{number:06}')
        try:
            make()
        except CorruptDatasetError as error:
            assert number < 3
            assert str(tmp_path / folder) in str(error)
            assert f'shard {number:06} is missing' in str(error)
            assert 'remove the' in str(error)
        else:
            assert make is not convert or number > 0
            if make is copy:
                continue  # a copy that is complete is not read again
            with granular.ShardedDatasetReader(tmp_path / 'data', granular.decoders) as reader:
                assert list(reader) == points
        shutil.rmtree(tmp_path / 'copy')


def test_different_conversion_is_not_resumed(tmp_path):
    granular.convert(Random(25), tmp_path / 'x', shardlen=10)
    for source, options, message in (
        (Random(26), {}, 'records 25, not 26'), (Random(25), {'shardlen': 5}, 'shardlen 10, not 5'),
        (Once(25), {}, "source 'Random', not 'Once'"), (Random(25), {'spec': {'n': 'i64'}}, "'n': 'i64'"),
    ):  # fmt: skip
        with pytest.raises(AlreadyExistsError, match=message):
            granular.convert(source, tmp_path / 'x', **{'shardlen': 10, **options})
    with granular.ShardedDatasetWriter(tmp_path / 'y', {'n': 'int'}, granular.encoders, 10) as writer:
        writer.append({'n': 1})
    with pytest.raises(AlreadyExistsError, match='that convert did not write'):
        granular.convert(Random(25), tmp_path / 'y')
    # A process that was killed before it wrote its record leaves an empty folder.
    (tmp_path / 'killed' / '000000').mkdir(parents=True)
    (tmp_path / 'killed' / '000000' / '..granular-conversion.01234567.part').write_bytes(b'')
    granular.convert(Random(25), tmp_path / 'killed', shardlen=10)
    assert contents(tmp_path / 'killed') == contents(tmp_path / 'x')
    granular.convert(Once(25), tmp_path / 'z', shardlen=10, sample=8)
    for count, message in ((24, 'has 5 datapoints, expected 4'), (20, '000002: exists, but 20'), (35, 'expected 10')):
        with pytest.raises(CorruptDatasetError, match=message):
            granular.convert(Once(count), tmp_path / 'z', shardlen=10, sample=8)


@pytest.mark.parametrize(
    ('store', 'shardlen', 'kind'),
    pairwise(itertools.product(['local', 'fakegcs'], [10, None], ['a list', 'an iterable', 'a pipeline', 'files'])),
)
def test_other_records_are_not_taken_for_those_that_were_converted(store, shardlen, kind, request, tmp_path):
    def source(first):
        numbers = [{'n': first + i} for i in range(300)]
        if kind == 'files':
            table = pyarrow.table({'n': [one['n'] for one in numbers]})
            pyarrow.parquet.write_table(table, tmp_path / 'n.parquet', compression='none', use_dictionary=False)
        return {
            'a list': numbers, 'an iterable': iter(numbers), 'files': tmp_path / 'n.parquet',
            'a pipeline': granular.MapDataset.source(numbers),
        }[kind]  # fmt: skip

    target = (granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).place()) / 'x'
    granular.convert(source(1000), target, shardlen=shardlen, layout='columns')
    assert granular.convert(source(1000), target, shardlen=shardlen, layout='columns').found == 300
    for options in ({}, {'sample': 7}):
        with pytest.raises(AlreadyExistsError, match='was begun as another conversion'):
            granular.convert(source(2000), target, shardlen=shardlen, layout='columns', **options)
    with granular.open(target) as reader:
        assert [one['n'] for one in reader] == list(range(1000, 1300))


@pytest.mark.parametrize('kind', [list, iter])
def test_other_records_are_not_added_to_finished_shards(kind, tmp_path):
    def convert(first):
        records = kind([{'n': first + i} for i in range(300)])
        return granular.convert(records, tmp_path / 'x', shardlen=100, sample=3)

    convert(1000)
    for name in ('000000', '000002'):
        (tmp_path / 'x' / name / 'spec.json').unlink()
    with pytest.raises(AlreadyExistsError, match='was begun as another conversion'):
        convert(2000)
    assert convert(1000).found == 100


@pytest.mark.parametrize('kind', ['a list', 'a folder', 'images'])
def test_conversion_of_the_same_files_in_another_order_is_refused(kind, tmp_path):
    suffix = 'png' if kind == 'images' else 'parquet'
    folder = tmp_path / 'files'
    files = [(folder / 'class' if kind == 'images' else folder) / f'{name}.{suffix}' for name in 'abcd']
    files[0].parent.mkdir(parents=True)
    for number, file in enumerate(files):
        table = pyarrow.table({'n': [10 * number + i for i in range(10)]})
        if kind == 'images':
            file.write_bytes(granular.encoders['png'](np.full((2, 2), 10 + number, np.uint8)))
        else:
            pyarrow.parquet.write_table(table, file, compression='none', use_dictionary=False)

    def convert():
        return granular.convert(files if kind == 'a list' else folder, tmp_path / 'x', shardlen=1, sample=1)

    count = convert().datapoints
    (tmp_path / 'x' / '000000' / 'spec.json').unlink()
    assert convert().found == count - 1
    if kind == 'a list':
        files[1:3] = files[2:0:-1]
    else:
        for old, new in ((files[1], folder / 'aside'), (files[2], files[1]), (folder / 'aside', files[2])):
            old.rename(new)
        files[3].rename(files[3].with_name(f'bb.{suffix}'))
    with pytest.raises(AlreadyExistsError, match="begun as another conversion, with files '"):
        convert()


def test_dataset_without_shards_that_was_not_converted_is_refused(tmp_path):
    with granular.DatasetWriter(tmp_path / 'x', {'n': 'int'}) as writer:
        writer.append({'n': 1})
    with pytest.raises(AlreadyExistsError, match='that convert did not write'):
        granular.convert([{'n': 1}], tmp_path / 'x', shardlen=None)
    with pytest.raises(granular.errors.GranularError):
        granular.convert(iter([{'n': 1}] * 200 + [{'m': 1}]), tmp_path / 'y', shardlen=None)
    assert not (tmp_path / 'y').exists() or not list((tmp_path / 'y').iterdir())


PROGRAM = """
import json, sys
import granular
place, options, kind, layout = json.loads(sys.argv[1])
class Random:
    def __len__(self):
        return 300
    def fetch(self, indices):
        return list(map(small, indices))
def small(i):
    if i == gate:
        sys.stdin.readline()  # until it is killed
    return {'n': i, 'x': bytes([i % 251]) * (i * 7919 % 500)}
gate = 31 if kind == 'Random' else 250  # none that types are seen in
source = Random() if kind == 'Random' else map(small, range(300))
def progress(count):
    print(count, flush=True)
granular.convert(source, granular.Path(place, **options), shardlen=60, layout=layout, parallel=2, progress=progress)
"""


def small(i):
    return {'n': i, 'x': bytes([i % 251]) * (i * 7919 % 500)}


@pytest.mark.parametrize(('store', 'kind', 'layout'), [('local', 'map', 'columns'), ('seaweed', 'Random', 'refs')])
def test_killed_conversion_is_resumed(store, kind, layout, request, tmp_path, interpreter):
    """The files equal those of an uninterrupted run, byte for byte, and finished shards are not written again."""
    root = granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).place()
    target, options = root / 'x', root.store.options
    source = Random(300, small) if kind == 'Random' else map(small, range(300))
    granular.convert(source, root / 'whole', shardlen=60, layout=layout)
    args = json.dumps([str(target), options, kind, layout])
    with interpreter.start(PROGRAM, args) as process:
        done = 0
        while done < 120:
            done += int(process.stdout.readline())
        while not list(target.glob('*/spec.json')):
            time.sleep(0.01)
        process.kill()
        process.wait()
    finished = [path.parent.name for path in target.glob('*/spec.json')]
    assert 0 < len(finished) < 5
    with pytest.raises((CorruptDatasetError, NotFoundError)):
        granular.ShardedDatasetReader(target, granular.decoders)
    times = {name: (target / name / 'spec.json').stat().modified for name in finished}
    source = Random(300, small) if kind == 'Random' else map(small, range(300))
    again = granular.convert(source, target, shardlen=60, layout=layout)
    assert 60 * len(finished) <= again.found < 300
    if kind == 'Random':
        made = {i // 60 for i in source.fetched[128:]}
        assert not made & {int(name) for name in finished}
    assert times == {name: (target / name / 'spec.json').stat().modified for name in finished}
    assert contents(target) == contents(root / 'whole')
    check(target, [small(i) for i in range(300)])


async def test_concurrent_conversion_is_refused(tmp_path):
    """The second conversion fails, and the first one continues."""
    writing, finish = threading.Event(), threading.Event()

    def gated(i):
        if i == 31:  # types are not inferred from this one: it is read once the shard is locked
            writing.set()
            assert finish.wait(30)
        return datapoint(i)

    first = asyncio.create_task(aio.convert(Random(300, gated), tmp_path / 'x', shardlen=300))
    assert await asyncio.to_thread(writing.wait, 30)
    with pytest.raises(AlreadyExistsError, match='another writer is writing it'):
        await aio.convert(Random(300), tmp_path / 'x', shardlen=300)
    finish.set()
    assert (await first).datapoints == 300

    def slow(i):
        time.sleep(0.0005)
        return datapoint(i)

    # A cancelled conversion leaves no thread or temporary file, and is resumed.
    for source, again in ((map(slow, range(1000)), map(datapoint, range(1000))), (Random(1000, slow), Random(1000))):
        target = tmp_path / type(source).__name__
        task = asyncio.create_task(aio.convert(source, target, shardlen=100, parallel=4))
        while not (target / '000003' / 'spec.json').exists():
            await asyncio.sleep(0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [path.name for path in target.rglob('.*')] == ['.granular-conversion']
        assert (await aio.convert(again, target, shardlen=100)).found >= 100


async def test_full_shards_are_published_although_another_one_fails(tmp_path, monkeypatch):
    failed, write = asyncio.Event(), Store.write

    async def fail(store, key, *args, **options):
        if key.endswith('/000002/spec.json'):
            failed.set()
            raise StoreError('odd')
        if key.endswith('/spec.json'):
            await failed.wait()
            await asyncio.sleep(0.1)
        return await write(store, key, *args, **options)

    monkeypatch.setattr(Store, 'write', fail)
    with pytest.raises(StoreError, match='odd'):
        await aio.convert(map(datapoint, range(200)), tmp_path / 'x', shardlen=10)
    found = {path.parent.name for path in (tmp_path / 'x').rglob('spec.json')}
    assert '000001' in found and found.isdisjoint(['000000', '000002'])
    monkeypatch.undo()
    done = await aio.convert(map(datapoint, range(200)), tmp_path / 'x', shardlen=10)
    assert done.found >= 10
    check(tmp_path / 'x', list(map(datapoint, range(200))))


# --- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('store', ['local', 'seaweed', 'fakegcs'])
def test_image_folders_are_converted(store, request, tmp_path):
    root = (granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).place()) / 'images'
    files = {
        'dog/2.jpg': image_file('JPEG', (5, 5)), 'dog/1.JPEG': JPEG, 'cat/deep/er/0.png': PNG, 'cat/1.webp': WEBP,
        'cat/notes.txt': b'no image', 'cat/.hidden.jpg': b'no image', 'top.jpg': JPEG, 'empty/readme': b'',
    }  # fmt: skip
    for name, data in files.items():
        if store == 'local':
            (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    done = granular.convert(root, tmp_path / 'x', shardlen=3)
    assert (done.format, done.datapoints, done.shards) == ('images', 4, 2)
    assert done.spec == {'class': 'utf8', 'image': 'jpg', 'label': 'int'}
    names = ['cat/1.webp', 'cat/deep/er/0.png', 'dog/1.JPEG', 'dog/2.jpg']
    with granular.ShardedDatasetReader(tmp_path / 'x', None) as raw:
        assert [one['image'] for one in raw] == [files[name] for name in names]  # unchanged
    with granular.ShardedDatasetReader(tmp_path / 'x', granular.decoders) as reader:
        assert [(one['label'], one['class'], one['image'].shape) for one in reader] == [
            (0, 'cat', (4, 6, 3)), (0, 'cat', (4, 6, 3)), (1, 'dog', (4, 6, 3)), (1, 'dog', (5, 5, 3))
        ]  # fmt: skip
    assert granular.convert(str(root) if store == 'local' else root, tmp_path / 'x', shardlen=3).found == 4
    (root / 'dog' / '3.jpg').write_bytes(JPEG)
    with pytest.raises(AlreadyExistsError, match='records 4, not 5'):
        granular.convert(root, tmp_path / 'x', shardlen=3)


def test_unknown_sources_and_formats_are_errors(tmp_path):
    (tmp_path / 'x').mkdir()
    (tmp_path / 'void').mkdir()
    (tmp_path / 'x' / 'file.bin').write_bytes(b'x')
    (tmp_path / 'x' / 'flat').mkdir()
    (tmp_path / 'x' / 'flat' / '0.png').write_bytes(b'')
    (tmp_path / 'x' / 'hub' / 'data').mkdir(parents=True)
    for source, error, message in (
        (tmp_path / 'nothing', NotFoundError, 'nothing'), (5, InvalidArgumentError, 'int'),
        (tmp_path / 'x' / 'flat', InvalidArgumentError, '0.png and all .* in no folder of a class: .* flat/NAME/0.png'),
        (tmp_path / 'void', NotFoundError, r'format: read .* generator of dicts, as in granular.convert\(records'),
        (tmp_path / 'x' / 'hub', NotFoundError, r"unknown format: convert one of the folders \['data'\], or read"),
        (tmp_path / 'x' / 'file.bin', InvalidArgumentError, 'unknown format: .* generator of dicts'),
        (tmp_path / 'x' / '*.parquet', NotFoundError, 'matches no files'), ({'a': 1}, InvalidArgumentError, 'dict'),
        (granular.MapDataset.source(range(3)).repeat(), InvalidArgumentError, 'endless'),
        (granular.MapDataset.source(range(3)).repeat().batch(2), InvalidArgumentError, 'endless'),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            granular.convert(source, tmp_path / 'y')
    with pytest.raises(InvalidArgumentError, match='expected one of parquet'):
        granular.convert(tmp_path / 'x', tmp_path / 'y', format='csv')
    (tmp_path / 'x' / 'a.parquet').write_bytes(b'')
    (tmp_path / 'x' / 'b.tar').write_bytes(b'')
    with pytest.raises(
        InvalidArgumentError,
        match='got parquet .a.parquet., webdataset .b.tar.: pass f',
    ):
        granular.convert(tmp_path / 'x' / '?.*a*', tmp_path / 'y')
    (tmp_path / 'x' / 'b.tar').unlink()
    (tmp_path / 'x' / 'a.tar').write_bytes(b'')
    with pytest.raises(InvalidArgumentError, match='got images .flat/0.png., parquet .*: pass format'):
        granular.convert(tmp_path / 'x', tmp_path / 'y')
    assert sorted(os.listdir(tmp_path)) == ['void', 'x']


def test_arrayrecord_files_are_converted(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    for part in range(2):
        writer = ArrayRecordWriter(str(tmp_path / f'data.array_record-0000{part}-of-00002'), 'group_size:1')
        for i in range(5):
            writer.write(bytes([5 * part + i]) * 3)
        writer.close()
    done = granular.convert(tmp_path, tmp_path / 'x', shardlen=4)
    assert (done.format, done.datapoints, done.shards, done.spec) == ('arrayrecord', 10, 3, {'data': 'bytes'})
    check(tmp_path / 'x', [{'data': bytes([i]) * 3} for i in range(10)])


def test_parquet_files_are_converted(tmp_path, fakegcs):
    import pyarrow
    from pyarrow import parquet

    bucket = fakegcs.place()
    rows = [{'n': i, 'Image': JPEG if i % 2 else PNG, 'text': None if i % 7 == 0 else str(i)} for i in range(60)]
    for part in range(2):
        out = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows[30 * part :][:30]), out, row_group_size=8)
        (bucket / 'data' / f'{part}.parquet').write_bytes(out.getvalue())
    for i, source in enumerate([bucket / 'data', bucket / 'data' / '*.parquet', bucket / 'data' / '0.parquet']):
        done = granular.convert(source, tmp_path / f'{i}', shardlen=25)
        assert (done.format, done.datapoints, done.renamed) == ('parquet', 30 if i == 2 else 60, {'Image': 'image'})
        assert done.spec == {'image': 'jpg', 'n': 'int', 'text': 'msgpack'}
        with granular.ShardedDatasetReader(tmp_path / f'{i}', {**granular.decoders, 'jpg': bytes}) as reader:
            expected = [{'n': row['n'], 'image': row['Image'], 'text': row['text']} for row in rows[: done.datapoints]]
            assert list(reader) == expected


def test_webdataset_files_are_converted(tmp_path, fakegcs):
    bucket = fakegcs.place()
    for part in range(2):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode='w') as file:
            for i in range(10 * part, 10 * part + 10):
                for name, data in (('jpg', JPEG), ('cls', str(i % 3)), ('json', f'{{"i": {i}}}'), ('npy', bytes(i))):
                    data = data if isinstance(data, bytes) else data.encode()
                    info = tarfile.TarInfo(f'{i:04}.{name}')
                    info.size = len(data)
                    file.addfile(info, io.BytesIO(data))
        (bucket / f'data-{part}.tar').write_bytes(out.getvalue())
    done = granular.convert(bucket, tmp_path / 'x', shardlen=8)
    assert (done.format, done.datapoints, done.shards) == ('webdataset', 20, 3)
    assert done.spec == {'__key__': 'utf8', 'cls': 'int', 'jpg': 'jpg', 'json': 'json', 'npy': 'bytes'}
    with granular.ShardedDatasetReader(tmp_path / 'x', {**granular.decoders, 'jpg': bytes}) as reader:
        assert list(reader) == [
            {'__key__': f'{i:04}', 'cls': i % 3, 'jpg': JPEG, 'json': {'i': i}, 'npy': bytes(i)} for i in range(20)
        ]


def test_files_of_numpy_become_arrays(tmp_path):
    out = io.BytesIO()
    np.save(out, np.arange(3.0))
    pickled = io.BytesIO()
    np.save(pickled, np.array([{}]), allow_pickle=True)
    write_tar(tmp_path / 'arrays.tar', [out.getvalue()] * 2, 'npy')
    damaged = out.getvalue().replace(b"'shape'", b"'shape(")
    write_tar(tmp_path / 'others.tar', [pickled.getvalue(), b'', damaged], 'npy')
    assert granular.convert(tmp_path / 'arrays.tar', tmp_path / 'arrays').spec['npy'] == 'array'
    assert granular.open(tmp_path / 'arrays')[1]['npy'].tolist() == [0, 1, 2]
    granular.convert(tmp_path / 'arrays.tar', tmp_path / 'files', spec={'npy': 'bytes'})
    assert granular.open(tmp_path / 'files')[1]['npy'] == out.getvalue()
    assert granular.convert(tmp_path / 'others.tar', tmp_path / 'others').spec['npy'] == 'bytes'
    with pytest.raises(EncodeError, match=r'others.tar: key .*: 0\.npy \(.* not a file of numpy.save: Object arrays'):
        granular.convert(tmp_path / 'others.tar', tmp_path / 'x', spec={'npy': 'array'})


def write_tar(path, contents, suffix):
    with tarfile.open(path, 'w') as file:
        for i, content in enumerate(contents):
            info = tarfile.TarInfo(f'{i}.{suffix}' if content is not None else f'{i}.txt')
            info.size = len(content or b'')
            file.addfile(info, io.BytesIO(content or b''))


@pytest.mark.parametrize(
    ('contents', 'kind', 'records'),
    [
        ([b'{"a":  1.50}', b'[NaN]', b'"text"'], 'json', [b'{"a":  1.50}', b'[NaN]', b'"text"']),
        ([b'{"a": 1}', b'not JSON'], 'utf8', [b'{"a": 1}', b'not JSON']),
        ([b'{"a": 1}', None], 'msgpack', [b'\x81\xa1a\x01', b'\xc0']),
    ],
)
def test_json_files_are_stored_as_they_are(tmp_path, contents, kind, records):
    write_tar(tmp_path / 'data.tar', contents, 'json')
    done = granular.convert(tmp_path / 'data.tar', tmp_path / 'x', shardlen=None)
    assert done.spec['json'] == kind
    with granular.DatasetReader(tmp_path / 'x', None) as reader:
        assert [datapoint['json'] for datapoint in reader] == records


def test_damaged_json_file_behind_the_sample_is_an_error_unless_the_type_is_text(tmp_path):
    write_tar(tmp_path / 'data.tar', [b'{}', b'{'], 'json')
    with pytest.raises(EncodeError, match=r"datapoint 1, key 'json'.* not JSON.*pass another type, such as json=utf8"):
        granular.convert(tmp_path / 'data.tar', tmp_path / 'x', sample=1)
    assert granular.convert(tmp_path / 'data.tar', tmp_path / 'y', sample=1, spec={'json': 'utf8'}).datapoints == 2


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning', 'ignore::ResourceWarning')
def test_hugging_face_datasets_are_converted(tmp_path):
    import datasets

    rows = {
        'image': [{'bytes': data, 'path': None} for data in (JPEG, PNG, JPEG)], 'n': [1, 2, 3],
        'score': [0.5, None, 1.5], 'tags': [['a'], [], ['b', 'c']],
    }  # fmt: skip
    features = {
        'image': datasets.Image(), 'n': datasets.Value('int32'), 'score': datasets.Value('float32'),
        'tags': datasets.Sequence(datasets.Value('string')),
    }  # fmt: skip
    dataset = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    expected = [
        {'image': image['bytes'], 'n': n, 'score': score or 0, 'tags': tags}
        for image, n, score, tags in zip(*rows.values(), strict=True)
    ]
    dataset.save_to_disk(tmp_path / 'saved')
    arrow = next(pathlib.Path(tmp_path / 'saved').glob('*.arrow'))
    for i, source in enumerate([dataset, tmp_path / 'saved', str(arrow), dataset.to_iterable_dataset()]):
        target = tmp_path / f'{i}'
        done = granular.convert(source, target, shardlen=2)
        assert (done.format, done.datapoints) == ('huggingface', 3)
        assert done.spec == {'image': 'jpg', 'n': 'array', 'score': 'array', 'tags': 'msgpack'}
        with granular.ShardedDatasetReader(target, {**granular.decoders, 'jpg': bytes}) as reader:
            found = [{**one, 'score': np.nan_to_num(one['score'])} for one in reader]
            assert found == expected
            assert {(type(one['n']), type(one['score'])) for one in reader} == {(np.int32, np.float32)}
    splits = datasets.DatasetDict(train=dataset)
    with pytest.raises(InvalidArgumentError, match=r"has splits \['train'\]"):
        granular.convert(splits, tmp_path / 'y')
    splits.save_to_disk(tmp_path / 'splits')
    with pytest.raises(NotFoundError, match=r"of \['train'\]: .*splits/NAME"):
        granular.convert(tmp_path / 'splits', tmp_path / 'y')
    assert granular.convert(tmp_path / 'splits' / 'train', tmp_path / 'y').datapoints == 3


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning', 'ignore::ResourceWarning')
def test_names_of_classes_of_hugging_face_datasets_are_in_the_log(tmp_path, caplog):
    import datasets

    features = datasets.Features(label=datasets.ClassLabel(names=['cat', 'dog']))
    dataset = datasets.Dataset.from_dict({'label': [1, 0]}, features=features)
    assert granular.convert(dataset, tmp_path / 'x').spec == {'label': 'int'}
    assert "Dataset: 'label' becomes the numbers of its classes, without their names: cat, dog" in caplog.text


def test_images_in_parquet_files_of_hugging_face_are_kept_as_files(tmp_path):
    image = granular.encoders['png'](np.full((4, 5, 3), 7, np.uint8))
    rows = {'image': [{'bytes': image, 'path': f'{i}.png'} for i in range(3)], 'label': [1, 2, 3]}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / 'x.parquet')
    assert granular.convert(tmp_path / 'x.parquet', tmp_path / 'data').spec == {'image': 'png', 'label': 'int'}
    with granular.open(tmp_path / 'data', None) as reader:
        assert reader[2]['image'] == image
    rows['image'][1]['bytes'] = b'damaged'
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / 'y.parquet')
    with pytest.raises(EncodeError, match=r"key 'image': 1 of 3 sampled files are not"):
        granular.convert(tmp_path / 'y.parquet', tmp_path / 'bad')
    assert granular.convert(tmp_path / 'y.parquet', tmp_path / 'two', on_error='skip').datapoints == 2
