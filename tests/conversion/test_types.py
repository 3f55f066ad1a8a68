"""Types of conversions: what a source has is what the dataset has."""

import datetime
import decimal
import io
import json
import re
import tarfile

import numpy as np
import pandas
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

import granular
from granular.errors import DatapointError, EncodeError, InvalidArgumentError
from tests.support.examples import frame

ROWS = 400


def write_parquet(path, **columns):
    parquet.write_table(pyarrow.table(columns), path, row_group_size=50)
    return path


def batch_of(path, **options):
    with granular.open(path, **options) as reader:
        return next(iter(granular.MapDataset.source(reader).to_iter_dataset().batch(8)))


NUMBERS = [
    pyarrow.int8(), pyarrow.int16(), pyarrow.int32(), pyarrow.int64(), pyarrow.uint8(), pyarrow.uint16(),
    pyarrow.uint32(), pyarrow.uint64(), pyarrow.float16(), pyarrow.float32(), pyarrow.float64(), pyarrow.bool_(),
    pyarrow.timestamp('ns'), pyarrow.timestamp('us', 'UTC'), pyarrow.date32(), pyarrow.duration('ms'),
]  # fmt: skip


@pytest.mark.parametrize('kind', NUMBERS, ids=str)
def test_batches_have_the_types_of_the_source_whatever_their_values(kind, tmp_path):
    numbers = [i % 2 for i in range(ROWS)]
    values = [np.float16(i) for i in numbers] if kind == pyarrow.float16() else numbers
    array = pyarrow.array(values, pyarrow.int64()).cast(kind) if kind == pyarrow.bool_() else None
    file = write_parquet(tmp_path / 'a.parquet', x=array if array is not None else pyarrow.array(values, kind))
    granular.convert(file, tmp_path / 'out')
    before, after = batch_of(file)['x'], batch_of(tmp_path / 'out')['x']
    assert (after.dtype, after.shape, after.tolist()) == (before.dtype, before.shape, before.tolist())
    with granular.open(tmp_path / 'out') as reader:
        assert {hash(one['x']) for one in reader} == {hash(before[0]), hash(before[1])}  # a label can be a key


@pytest.mark.parametrize('kind', [*NUMBERS, pyarrow.string(), pyarrow.binary()], ids=str)
@pytest.mark.parametrize('statistics', [True, False])
def test_a_null_behind_the_sample_is_in_the_type(kind, statistics, tmp_path):
    values = [b'x' if kind == pyarrow.binary() else 'x' if kind == pyarrow.string() else 1] * ROWS
    values = (
        [np.float16(1)] * ROWS if kind == pyarrow.float16() else [True] * ROWS if kind == pyarrow.bool_() else values
    )
    values[ROWS - 7] = None
    table = pyarrow.table({'x': pyarrow.array(values, kind), 'list': [[i] if i % 3 else [] for i in range(ROWS)]})
    parquet.write_table(table, tmp_path / 'a.parquet', row_group_size=50, write_statistics=statistics)
    done = granular.convert(tmp_path / 'a.parquet', tmp_path / 'out', sample=4)
    assert done.spec['list'] == 'array'  # empty lists are counted as nulls in the statistics
    with granular.open(tmp_path / 'a.parquet') as before, granular.open(tmp_path / 'out') as after:
        for i in (0, ROWS - 7):
            expected, found = before[i]['x'], after[i]['x']
            if done.spec['x'] != 'array' and done.spec['x'] != 'tree' and isinstance(expected, np.generic):
                expected = expected.item()
            assert repr(found) == repr(expected)


def test_nulls_within_lists_and_structs_are_in_the_type(tmp_path):
    flags = [[True]] * ROWS
    structs = [{'a': 1, 'b': ['x']}] * ROWS
    flags[ROWS - 3], structs[ROWS - 3], structs[ROWS - 2] = [True, None], None, {'a': None, 'b': None}
    file = write_parquet(tmp_path / 'a.parquet', flags=flags, structs=structs, whole=[[True]] * ROWS)
    done = granular.convert(file, tmp_path / 'out', sample=4)
    assert done.spec == {'flags': 'tree', 'structs': 'tree', 'whole': 'array'}
    assert done.reasons['flags'] == 'of the schema'
    with granular.open(tmp_path / 'out') as reader:
        assert reader[ROWS - 3] == {'flags': [True, None], 'structs': None, 'whole': np.array([True])}
        assert reader[ROWS - 2]['structs'] == {'a': None, 'b': None}


def test_columns_of_folders_and_files_of_several_types_are_converted(tmp_path):
    for name, values in {'k=1/a': [1, 2], 'k=2/a': [None, 3]}.items():
        (tmp_path / 'in' / name).parent.mkdir(parents=True)
        write_parquet(tmp_path / 'in' / f'{name}.parquet', x=pyarrow.array(values, pyarrow.int64()))
    assert granular.convert(tmp_path / 'in', tmp_path / 'out').spec == {'k': 'array', 'x': 'msgpack'}
    with granular.open(tmp_path / 'out') as reader:
        assert [(one['k'], one['x']) for one in reader] == [(1, 1), (1, 2), (2, None), (2, 3)]
        assert type(reader[0]['k']) is np.int32


# --- tar files


def tar_of(path, members):
    with tarfile.open(path, 'w') as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def npy(value):
    stream = io.BytesIO()
    np.save(stream, value)
    return stream.getvalue()


def image(format):
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 10, 3), np.uint8)).save(stream, format)
    return stream.getvalue()


def members():
    sound, clip = (np.zeros(100, np.int16), 8000), np.zeros((4, 16, 16, 3), np.uint8)
    return {
        'jpg': image('JPEG'), 'jpeg': image('JPEG'), 'png': image('PNG'), 'webp': image('WEBP'), 'gif': image('GIF'),
        'bmp': image('BMP'), 'npy': npy(np.arange(3, dtype=np.uint16)), 'json': json.dumps({'a': [1]}).encode(),
        **{kind: granular.encoders[kind](sound) for kind in ('wav', 'flac')},
        **{kind: granular.encoders[kind](clip) for kind in ('mp4', 'webm')}, 'bin': b'bytes',
        'mov': granular.encoders['mp4'](clip), 'mkv': granular.encoders['webm'](clip),
    }  # fmt: skip


@pytest.mark.parametrize('suffix', members())
def test_open_and_convert_of_a_tar_file_give_the_same_values(suffix, tmp_path):
    data = members()[suffix]
    tar = tar_of(tmp_path / 'a.tar', [(f'{i}.{suffix}', data) for i in range(3)])
    granular.convert(tar, tmp_path / 'out')
    with granular.open(tar) as before, granular.open(tmp_path / 'out') as after:
        assert type(before[1][suffix]) is type(after[1][suffix])
        assert np.array_equal(before[1][suffix], after[1][suffix]) or repr(before[1]) == repr(after[1])
    with granular.open(tmp_path / 'out', None) as raw:
        assert suffix == 'npy' or raw[1][suffix] == data  # the files are stored as they are


@pytest.mark.parametrize(('suffix', 'good', 'kind'), [('npy', npy(np.arange(3)), 'array'), ('json', b'[1]', 'json')])
def test_one_damaged_member_is_named_or_skipped(suffix, good, kind, tmp_path):
    tar = tar_of(tmp_path / 'a.tar', [(f'{i:03}.{suffix}', good[:-1] if i == 7 else good) for i in range(20)])
    with pytest.raises(EncodeError, match=rf"a\.tar: key '{suffix}': 1 of 20 sampled files are damaged: 007\.{suffix}"):
        granular.convert(tar, tmp_path / 'stopped')
    assert not (tmp_path / 'stopped').exists()
    done = granular.convert(tar, tmp_path / 'out', on_error='skip')
    assert (done.spec[suffix], done.datapoints, list(done.skipped)) == (kind, 19, ['datapoint 7'])


def test_files_of_numpy_are_arrays_also_in_trees(tmp_path):
    tar = tar_of(tmp_path / 'a.tar', [('0.npy', npy(np.arange(3)))])
    granular.convert(tar, tmp_path / 'out', spec={'npy': 'tree'})
    assert granular.open(tmp_path / 'out')[0]['npy'].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ('lists', 'kind'),
    {
        'jpg': ([['JPEG', 'JPEG'], [], ['JPEG']], 'jpg[]'), 'png': ([['PNG'], ['WEBP']], 'png[]'),
        'both': ([['PNG'], ['JPEG']], 'jpg[]'), 'none': ([[], []], 'msgpack'), 'null': ([['PNG'], None], 'msgpack'),
    }.values(),
)  # fmt: skip
def test_lists_of_images_are_sequences(lists, kind, tmp_path):
    records = [{'x': None if one is None else list(map(image, one))} for one in lists]
    file = write_parquet(tmp_path / 'a.parquet', x=[record['x'] for record in records])
    structs = [None if r['x'] is None else [{'bytes': data, 'path': ''} for data in r['x']] for r in records]
    sources = [records, *([file] if kind != 'msgpack' or lists[0] else [])]
    if lists[0]:
        sources.append(write_parquet(tmp_path / 'b.parquet', x=structs))
    for number, source in enumerate(sources):
        assert granular.convert(source, tmp_path / f'{number}').spec == {'x': kind}
        with granular.open(tmp_path / f'{number}', None if kind != 'msgpack' else granular.decoders) as reader:
            assert [one['x'] for one in reader] == [record['x'] for record in records]
    if kind != 'msgpack':
        assert granular.convert(records, tmp_path / 'columns', layout='columns').spec == {'x': 'msgpack'}


# --- objects


TIME = datetime.datetime(2020, 1, 2, 3, 4, 5, 6)


@pytest.mark.parametrize(
    ('value', 'expected'),
    {
        'timestamp': (TIME, np.datetime64(TIME)), 'date': (TIME.date(), np.datetime64('2020-01-02')),
        'zone': (TIME.astimezone(datetime.timezone(datetime.timedelta(hours=5))), np.datetime64(TIME)),
        'duration': (TIME - datetime.datetime(2020, 1, 2), np.timedelta64(11045000006, 'us')),
        'pandas': (pandas.Timestamp('2020-01-02T03:04:05.000000006'), np.datetime64('2020-01-02T03:04:05.000000006')),
        'pandas duration': (pandas.Timedelta(7, 'ns'), np.timedelta64(7, 'ns')),
    }.values(),
)  # fmt: skip
def test_times_are_those_of_numpy_also_beside_none_and_in_containers(value, expected, tmp_path):
    assert granular.convert([{'x': value}], tmp_path / 'one').spec == {'x': 'array'}
    assert granular.convert([{'x': None}, {'x': {'list': [value]}}, {'x': value}], tmp_path / 'all').spec == {
        'x': 'tree'
    }
    found = [granular.open(tmp_path / 'one')[0]['x'], *granular.open(tmp_path / 'all')[1]['x']['list']]
    for one in (*found, granular.open(tmp_path / 'all')[2]['x']):
        assert (one.dtype, one) == (expected.dtype, expected)
    assert granular.open(tmp_path / 'all')[0]['x'] is None


@pytest.mark.parametrize('mode', ['1', 'L', 'LA', 'RGB', 'RGBA', 'P', 'I;16'])
def test_images_of_pillow_are_files_also_in_lists_and_beside_none(mode, tmp_path):
    pixels = Image.fromarray(np.full((3, 4), 500, np.uint16)) if mode == 'I;16' else Image.new(mode, (4, 3))
    records = [{'one': pixels, 'list': [pixels, pixels], 'none': None}, {'one': pixels, 'list': [], 'none': pixels}]
    assert granular.convert(records, tmp_path / 'x').spec == {'list': 'png[]', 'none': 'msgpack', 'one': 'png'}
    with granular.open(tmp_path / 'x') as reader:
        first, second = reader
    found = [first['one'], *first['list'], granular.decoders['png'](second['none'])]
    for one in found:
        assert (one.dtype, one.tolist()) == (np.asarray(pixels).dtype, np.asarray(pixels).tolist())
    assert first['none'] is None


@pytest.mark.parametrize('options', [{'dtype': 'bfloat16'}, {'requires_grad': True}], ids=str)
def test_tensors_that_numpy_does_not_take_are_errors_with_a_remedy(options, tmp_path):
    import torch

    if 'dtype' in options:
        options = {'dtype': torch.bfloat16}
    records = [{'x': torch.ones(2, **options)}] * 2
    with pytest.raises(EncodeError, match=r"field 'x': .* Tensor: .*tensor\.detach\(\)\.cpu\(\)\.float\(\)"):
        granular.convert(records, tmp_path / 'out')
    for call in (
        lambda: granular.MapDataset.source(records).batch(2)[0],
        lambda: next(iter(granular.MapDataset.source(records).to_iter_dataset().batch(2))),
        lambda: next(iter(granular.Loader(records, batch=2))),
    ):
        with pytest.raises(DatapointError, match=r"'x': .*tensor\.detach\(\)\.cpu\(\)\.float\(\)"):
            call()
    fixed = granular.MapDataset.source(records).map(lambda one: {'x': one['x'].detach().cpu().float()})
    assert fixed.batch(2)[0]['x'].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ('value', 'kind'), [(1, 'int'), (0.5, 'float'), ('a', 'utf8'), (np.ones(1), 'array'), ([1], 'msgpack')]
)
def test_remedy_for_a_value_that_does_not_fit_is_a_type_that_takes_it(value, kind, tmp_path):
    other = np.ones(2) if kind == 'msgpack' else None
    records = [{'x': value}] * 4 + [{'x': {'a': other}}]
    assert granular.convert(records[:4], tmp_path / 'plain').spec == {'x': kind}
    with pytest.raises(EncodeError) as caught:
        granular.convert(records, tmp_path / 'stopped', sample=1)
    remedy = re.search(r'or pass another type, such as (\w+)=(\w+) \(spec\)', str(caught.value))
    spec = {remedy[1]: remedy[2]}
    spec = spec if other is None or kind == 'msgpack' else {'x': 'tree'}
    assert granular.convert(records, tmp_path / 'out', spec=spec).datapoints == 5


# --- Examples


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(values):
    if isinstance(values[0], bytes):
        return field(1, b''.join(field(1, value) for value in values))
    dtype, kind = ('<f4', 2) if isinstance(values[0], float) else ('', 3)
    data = np.array(values, dtype).tobytes() if dtype else b''.join(map(varint, values))
    return field(kind, field(1, data))


def sequence_example(context, sequences):
    entries = b''.join(field(1, field(1, name.encode()) + field(2, feature(value))) for name, value in context.items())
    lists = b''.join(
        field(1, field(1, name.encode()) + field(2, b''.join(field(1, feature(step)) for step in steps)))
        for name, steps in sequences.items()
    )
    return field(1, entries) + field(2, lists)


def test_sequences_of_sequence_examples_are_kept(tmp_path):
    records = [
        sequence_example(
            {'id': [b'v%d' % i], 'score': [0.5 * i]},
            {
                'rgb': [[0.25 * i, float(step)] for step in range(i + 1)], 'label': [[step] for step in range(3)],
                'jpeg': [[image('JPEG')]] * (i + 1), 'ragged': [[1], [2, 3]], 'words': [[b'a'], [b'b', b'c']],
            },
        )
        for i in range(4)
    ]  # fmt: skip
    (tmp_path / 'a.tfrecord').write_bytes(b''.join(map(frame, records)))
    done = granular.convert(tmp_path / 'a.tfrecord', tmp_path / 'out')
    assert done.spec == {
        'id': 'bytes', 'score': 'array', 'rgb': 'array', 'label': 'array', 'jpeg': 'jpg[]', 'ragged': 'tree',
        'words': 'msgpack',
    }  # fmt: skip
    with granular.open(tmp_path / 'out') as reader:
        one = reader[3]
        assert (one['rgb'].dtype, one['rgb'].tolist()) == (np.float32, [[0.75, step] for step in range(4)])
        assert (type(one['score']), one['score']) == (np.float32, 1.5)
        assert one['label'].tolist() == [0, 1, 2]
        assert len(one['jpeg']) == 4
        assert [step.tolist() for step in one['ragged']] == [[1], [2, 3]]
        assert one['words'] == [[b'a'], [b'b', b'c']]
    context, sequences = granular.formats.decode_sequence_example(records[1])
    assert (context['id'], [step.tolist() for step in sequences['label']]) == ([b'v1'], [[0], [1], [2]])
    other = sequence_example({'id': [b'x']}, {'rgb': [[1.0]]})
    (tmp_path / 'b.tfrecord').write_bytes(b''.join(map(frame, [*records * 40, other, *records])))
    with pytest.raises(DatapointError, match=r"sequence 'rgb': expected 2 values of float32 in each step.* step 0"):
        granular.convert(tmp_path / 'b.tfrecord', tmp_path / 'x')
    both = sequence_example({'x': [1]}, {'x': [[1]]})
    (tmp_path / 'c.tfrecord').write_bytes(frame(both))
    with pytest.raises(DatapointError, match="a feature and a sequence are both named 'x'"):
        granular.convert(tmp_path / 'c.tfrecord', tmp_path / 'y')


# --- Hugging Face


HUGGING_FACE = {
    'int8': [1, 0, 1], 'uint64': [1, 0, 1], 'int64': [1, 0, 1], 'float32': [1.0, 0.0, 1.5], 'float64': [1.0, 0.0, 1.5],
    'bool': [True, False, True], 'string': ['a', 'b', 'c'], 'timestamp[us]': [1, 0, 1], 'timestamp[ns]': [1, 0, 1],
    'date32': [1, 0, 1], 'duration[ms]': [1, 0, 1], 'time64[us]': [1, 0, 1],
    'decimal128(9, 2)': [decimal.Decimal(i) for i in range(3)],
}  # fmt: skip
quiet = pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning', 'ignore::ResourceWarning')


@quiet
def test_values_of_hugging_face_datasets_are_those_of_their_parquet_files_in_any_format(tmp_path):
    import datasets

    columns = {}
    for kind, values in HUGGING_FACE.items():
        name, arrow = re.sub(r'\W', '_', kind), datasets.Value(kind).pa_type
        columns[name] = pyarrow.array(values, arrow)
        columns[f'{name}_null'] = pyarrow.array([None, *columns[name][1:].to_pylist()], arrow)
        one, struct = pyarrow.list_(arrow), pyarrow.struct([('a', arrow), ('b', pyarrow.string())])
        inner = columns[name].to_pylist()
        columns[f'{name}_list'] = pyarrow.array([inner, inner[:1], inner], one)
        columns[f'{name}_lists'] = pyarrow.array([[inner], [], [inner, inner]], pyarrow.list_(one))
        columns[f'{name}_struct'] = pyarrow.array([{'a': value, 'b': 'x'} for value in inner], struct)
        columns[f'{name}_list_null'] = pyarrow.array([inner, None, inner], one)
    columns['bool_list_with_null'] = pyarrow.array([[True, None], [True], [True]])
    table = pyarrow.table(columns)
    parquet.write_table(table, tmp_path / 'a.parquet')
    dataset = datasets.Dataset(table)
    granular.convert(tmp_path / 'a.parquet', tmp_path / 'ours')
    others = {form: dataset.with_format(form) for form in (None, 'numpy', 'torch', 'arrow', 'pandas')}
    others |= {'streamed': dataset.to_iterable_dataset(), 'streamed arrow': others['arrow'].to_iterable_dataset()}
    with granular.open(tmp_path / 'ours') as ours:
        for name, other in others.items():
            spec = granular.convert(other, tmp_path / f'{name}').spec
            with granular.open(tmp_path / f'{name}') as theirs:
                assert repr(list(ours)) == repr(list(theirs))
                assert spec == ours.spec or 'streamed' in f'{name}'  # of which the sample decides
    some = dataset.with_format('numpy', columns=['int8', 'string'])
    assert granular.convert(some, tmp_path / 'some').spec == {'int8': 'array', 'string': 'utf8'}


@quiet
def test_selected_rows_and_transforms_of_hugging_face_datasets_are_those_that_are_converted(tmp_path):
    import datasets

    dataset = datasets.Dataset.from_dict({'n': [*range(ROWS), None], 'list': [[True]] * ROWS + [[None]]})
    granular.convert(dataset.filter(lambda row: row['n'] is not None and row['n'] % 2), tmp_path / 'filtered')
    with granular.open(tmp_path / 'filtered') as reader:
        assert (reader.spec, [one['n'] for one in reader]) == ({'list': 'array', 'n': 'int'}, [*range(1, ROWS, 2)])
    assert granular.convert(dataset, tmp_path / 'whole', sample=4).spec == {'list': 'tree', 'n': 'msgpack'}
    picture = datasets.Dataset.from_dict(
        {'x': [Image.new('L', (2, 3))]}, features=datasets.Features(x=datasets.Image())
    )
    turned = picture.with_transform(lambda rows: {'size': [image.size for image in rows['x']]})
    assert granular.convert(turned, tmp_path / 'transformed').spec == {'size': 'msgpack'}
    assert granular.open(tmp_path / 'transformed')[0]['size'] == [2, 3]


@quiet
def test_arrays_and_nested_files_of_hugging_face_datasets_are_kept(tmp_path):
    import datasets

    (tmp_path / 'a.png').write_bytes(image('PNG'))
    by_path, shape = {'bytes': None, 'path': str(tmp_path / 'a.png')}, (2, 3)
    arrays = [np.arange(6, dtype=np.uint8).reshape(shape), None, np.zeros(shape, np.uint8)]
    features = datasets.Features(
        array=datasets.Array2D(shape, 'uint8'), ragged=datasets.Array2D((None, 2), 'float32'),
        struct={'image': datasets.Image(), 'n': datasets.Value('int16')}, gray=datasets.List(datasets.Image(mode='L')),
        null=datasets.Image(),
    )  # fmt: skip
    rows = {
        'array': arrays, 'ragged': [np.ones((i, 2)) for i in range(3)], 'null': [by_path, by_path, None],
        'struct': [{'image': by_path, 'n': 3}, None, {'image': None, 'n': None}],
        'gray': [[by_path] * 2, [], [by_path]],
    }  # fmt: skip
    dataset = datasets.Dataset.from_dict(rows, features=features)
    for name, source in {'a': dataset, 'b': dataset.with_format('torch'), 'c': dataset.to_iterable_dataset()}.items():
        spec = granular.convert(source, tmp_path / name).spec
        expected = {'array': 'tree', 'gray': 'png[]', 'null': 'msgpack', 'ragged': 'array', 'struct': 'tree'}
        assert spec == expected
        with granular.open(tmp_path / name) as reader:
            first, second, third = reader
        assert (first['array'].dtype, first['array'].tolist()) == (np.uint8, arrays[0].tolist())
        assert (second['array'], second['struct'], third['null']) == (None, None, None)
        assert (second['ragged'].shape, second['ragged'].dtype) == ((1, 2), np.float32)
        assert first['struct'] == {'image': image('PNG'), 'n': np.int16(3)}
        assert third['struct'] == {'image': None, 'n': None}
        assert [one.shape for one in first['gray']] == [(8, 10)] * 2
        assert first['null'] == image('PNG')


@quiet
def test_demands_of_features_are_obeyed(tmp_path):
    import datasets

    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 3), np.uint8)
    picture, stream = Image.fromarray(pixels), io.BytesIO()
    picture.save(stream, 'TIFF')
    files = [{'bytes': data, 'path': None} for data in (image('PNG'), stream.getvalue())]
    sound = {'bytes': granular.encoders['wav']((np.zeros(100, np.int16), 8000)), 'path': None}
    clip = {'bytes': granular.encoders['mp4'](np.zeros((4, 16, 16, 3), np.uint8)), 'path': None}

    def converted(feature, values):
        target = tmp_path / f'{len(list(tmp_path.iterdir()))}'
        if isinstance(feature, datasets.Audio | datasets.Video):  # of which files are encoded by torchcodec
            stored = {'bytes': datasets.Value('binary'), 'path': datasets.Value('string')}
            dataset = datasets.Dataset.from_dict({'x': values}, features=datasets.Features(x=stored))
            dataset = dataset.cast_column('x', feature)
        else:
            dataset = datasets.Dataset.from_dict({'x': values}, features=datasets.Features(x=feature))
        spec = granular.convert(dataset, target).spec
        with granular.open(target) as reader:
            return spec['x'], [one['x'] for one in reader]

    kind, found = converted(datasets.Image(mode='L'), [picture])
    assert (kind, found[0].tolist()) == ('png', np.asarray(picture.convert('L')).tolist())
    kind, found = converted(datasets.Image(), files)
    assert (kind, found[1].tolist()) == ('png', pixels.tolist())
    kind, found = converted(datasets.Image(decode=False), files[:1])
    assert (kind, found[0].shape) == ('png', (8, 10, 3))
    kind, found = converted(datasets.List(datasets.Image()), [files[:1], files[:1] * 2])
    assert (kind, [len(one) for one in found]) == ('png[]', [1, 2])
    kind, found = converted(datasets.List(datasets.Image()), [files[1:], []])
    assert (kind, found[0][0].tolist()) == ('png[]', pixels.tolist())
    for feature in (datasets.Audio(), datasets.Audio(sampling_rate=8000)):
        kind, found = converted(feature, [sound])
        assert (kind, found[0].rate) == ('wav', 8000)
    for feature in (datasets.Audio(sampling_rate=16000), datasets.Audio(num_channels=2)):
        with pytest.raises(
            InvalidArgumentError, match=r"'x' is Audio\(.*\), which its files are not: cast it to Audio"
        ):
            converted(feature, [sound])
    kind, found = converted(datasets.Video(), [clip])
    assert (kind, found[0].shape) == ('mp4', (4, 16, 16, 3))


def test_empty_row_groups_and_files_have_no_nulls(tmp_path):
    kind = pyarrow.int32()
    (tmp_path / 'in').mkdir()
    write_parquet(tmp_path / 'in' / 'a.parquet', x=pyarrow.array([], kind))
    write_parquet(tmp_path / 'in' / 'b.parquet', x=pyarrow.array([1, 2], kind))
    assert granular.convert(tmp_path / 'in', tmp_path / 'out').spec == {'x': 'array'}
    with pytest.raises(InvalidArgumentError, match='has no records to infer a spec from: pass spec'):
        granular.convert(tmp_path / 'in' / 'a.parquet', tmp_path / 'none')
