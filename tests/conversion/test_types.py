"""Types of conversions: what a source has is what the dataset has."""

import decimal
import io
import json
import tarfile

import numpy as np
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


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning', 'ignore::ResourceWarning')
def test_values_of_hugging_face_datasets_are_those_of_their_parquet_files(tmp_path):
    import datasets

    kinds = [
        'int8',
        'uint64',
        'int64',
        'float32',
        'float64',
        'bool',
        'string',
        'timestamp[us]',
        'timestamp[ns]',
        'date32',
    ]
    kinds += ['duration[ms]', 'time64[us]', 'decimal128(9, 2)']
    features = datasets.Features({kind.replace('[', '_').strip(']'): datasets.Value(kind) for kind in kinds})
    values = {'string': ['a', 'b', 'c'], 'decimal128(9, 2)': [decimal.Decimal(i) for i in range(3)]}
    values |= {'bool': [True, False, True], 'float32': [1.0, 0.0, 1.5], 'float64': [1.0, 0.0, 1.5]}
    columns = {
        name: pyarrow.array(values.get(kind, [1, 0, 1]), features[name].pa_type)
        for name, kind in zip(features, kinds, strict=True)
    }
    nulls = {
        f'{name}_null': pyarrow.array([None, *column[1:].to_pylist()], column.type) for name, column in columns.items()
    }
    table = pyarrow.table({**columns, **nulls})
    parquet.write_table(table, tmp_path / 'a.parquet')
    dataset = datasets.Dataset(table)
    granular.convert(tmp_path / 'a.parquet', tmp_path / 'ours')
    done = granular.convert(dataset, tmp_path / 'theirs')
    granular.convert(dataset.to_iterable_dataset(), tmp_path / 'streamed')
    with granular.open(tmp_path / 'ours') as ours, granular.open(tmp_path / 'theirs') as theirs:
        assert ours.spec == theirs.spec == done.spec
        assert repr(list(ours)) == repr(list(theirs))
        with granular.open(tmp_path / 'streamed') as streamed:
            assert repr(list(streamed)) == repr(list(theirs))


@pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning', 'ignore::ResourceWarning')
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
