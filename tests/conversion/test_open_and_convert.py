"""The values and types of each format: those that ``granular.open`` reads are those of the converted dataset."""

import datetime
import decimal
import io
import json
import tarfile

import msgpack
import numpy as np
import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image
from pyarrow import parquet

import granular
from granular.formats import decode_example
from tests.support.examples import encode, frame
from tests.support.files import FORMATS

COUNT = 12
FILES = ('jpg', 'png', 'mp4', 'webm', 'wav', 'flac')  # types of files, which convert finds also among bytes


def typed(value):
    """Return a value with its types. A number of Python has the dtype that it has in a batch."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return 'objects', value.shape, [typed(item) for item in value.ravel().tolist()]
    if isinstance(value, bool | int | float | np.ndarray | np.generic):
        array = np.asarray(value)
        return array.dtype, array.shape, repr(array.tolist())
    return type(value), value


def picture(i, mode, format):
    stream = io.BytesIO()
    pixels = np.full((4, 5), 20 * i, np.uint16 if mode == 'I;16' else np.uint8)
    Image.fromarray(pixels).convert(mode).save(stream, format)
    return stream.getvalue()


def npy(value):
    stream = io.BytesIO()
    np.save(stream, value)
    return stream.getvalue()


# --- Parquet: columns

KINDS = {
    **{f'{kind}': (kind, [i % 100 for i in range(COUNT)]) for kind in (
        pyarrow.int8(), pyarrow.int16(), pyarrow.int32(), pyarrow.int64(), pyarrow.uint8(), pyarrow.uint16(),
        pyarrow.uint32(), pyarrow.uint64(), pyarrow.date32(), pyarrow.timestamp('us'), pyarrow.timestamp('ns', 'UTC'),
        pyarrow.duration('ms'),
    )},
    'halffloat': (pyarrow.float16(), [np.float16(i / 2) for i in range(COUNT)]),
    'float': (pyarrow.float32(), [i / 4 for i in range(COUNT)]),
    'double': (pyarrow.float64(), [i / 3 for i in range(COUNT)]),
    'bool': (pyarrow.bool_(), [i % 3 == 0 for i in range(COUNT)]),
    'string': (pyarrow.string(), [f'text {i}' for i in range(COUNT)]),
    'binary': (pyarrow.binary(), [b'%d\0' % i for i in range(COUNT)]),
    'dictionary': (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), [f'{i % 3}' for i in range(COUNT)]),
    'decimal': (pyarrow.decimal128(9, 2), [decimal.Decimal(i) / 4 for i in range(COUNT)]),
    'time': (pyarrow.time64('us'), [datetime.time(i, 2, 3, i) for i in range(COUNT)]),
}  # fmt: skip
SHAPES = {
    'plain': (lambda kind: kind, lambda value, i: value),
    'null': (lambda kind: kind, lambda value, i: None if i % 4 == 1 else value),
    'list': (pyarrow.list_, lambda value, i: [value, value]),
    'ragged': (pyarrow.list_, lambda value, i: [value] * (i % 3)),
    'list_null': (pyarrow.list_, lambda value, i: None if i % 4 == 1 else [value] * (i % 3)),
    'nulls_of_lists': (pyarrow.list_, lambda value, i: [value, None if i % 4 == 1 else value]),
    'fixed': (lambda kind: pyarrow.list_(kind, 2), lambda value, i: [value, value]),
    'lists': (lambda kind: pyarrow.list_(pyarrow.list_(kind)), lambda value, i: [[value], [value, value]]),
    'struct': (lambda kind: pyarrow.struct({'a': kind, 'b': pyarrow.list_(kind)}), lambda v, i: {'a': v, 'b': [v]}),
    'struct_null': (lambda kind: pyarrow.struct({'a': kind}), lambda v, i: [None, {'a': None}, {'a': v}][i % 3]),
    'structs': (lambda kind: pyarrow.list_(pyarrow.struct({'a': kind})), lambda value, i: [{'a': value}] * 2),
    'map': (lambda kind: pyarrow.map_(pyarrow.string(), kind), lambda value, i: [('k', value)]),
}  # fmt: skip


def parquet_of(folder, kind):
    """Write a file with a column of each shape, with values of a kind."""
    arrow, values = KINDS[kind]
    columns = {
        shape: pyarrow.array([change(value, i) for i, value in enumerate(values)], type_of(arrow))
        for shape, (type_of, change) in SHAPES.items()
    }
    parquet.write_table(pyarrow.table(columns), folder / 'a.parquet', row_group_size=5)
    return folder / 'a.parquet'


# --- tar files: members

SOUND, CLIP = (np.arange(100, dtype=np.int16), 8000), np.zeros((4, 16, 16, 3), np.uint8)
MEMBERS = {
    'jpg': lambda i: picture(i, 'RGB', 'JPEG'), 'jpeg': lambda i: picture(i, 'L', 'JPEG'),
    'png': lambda i: picture(i, 'RGBA', 'PNG'), 'depth.png': lambda i: picture(i, 'I;16', 'PNG'),
    'webp': lambda i: picture(i, 'RGB', 'WEBP'), 'gif': lambda i: picture(i, 'P', 'GIF'),
    'bmp': lambda i: picture(i, 'RGB', 'BMP'), 'tiff': lambda i: picture(i, 'L', 'TIFF'),
    'left': lambda i: picture(i, 'L', 'PNG'), 'npy': lambda i: npy(np.full((2, 3), i, np.uint16)),
    'cls': lambda i: b'%d\n' % i, 'cls2': lambda i: b'-%d' % i, 'index': lambda i: b'%03d' % i,
    'name.cls': lambda i: b'class %d' % i, 'txt': lambda i: f'caf\xe9 {i}'.encode(), 'text': lambda i: b'%d' % i,
    'utf8': lambda i: b'%d' % i, 'json': lambda i: json.dumps({'a': [i, None, 0.5]}).encode(),
    'json5': lambda i: b'{a: %d}' % i, 'msgpack': lambda i: msgpack.packb({'a': [i, b'x']}),
    **dict.fromkeys(('bytes', 'bin', 'id', 'int', 'i64', 'u64', 'float', 'bool', 'array', 'tree'), lambda i: b'%d' % i),
    'wav': lambda i: granular.encoders['wav'](SOUND), 'flac': lambda i: granular.encoders['flac'](SOUND),
    'mp3': lambda i: b'ID3%d' % i, 'mp4': lambda i: granular.encoders['mp4'](CLIP),
    'mov': lambda i: granular.encoders['mp4'](CLIP), 'm4v': lambda i: granular.encoders['mp4'](CLIP),
    'webm': lambda i: granular.encoders['webm'](CLIP), 'mkv': lambda i: granular.encoders['webm'](CLIP),
}  # fmt: skip


def tar_of(folder, suffixes=MEMBERS, lacks=()):
    with tarfile.open(folder / 'a.tar', 'w') as tar:
        for i in range(COUNT):
            for suffix in suffixes:
                if suffix not in lacks or i % 4 != 1:
                    data = MEMBERS[suffix](i)
                    member = tarfile.TarInfo(f'{i:03}.{suffix}')
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return folder / 'a.tar'


# --- TFRecord: features, and ArrayRecord: records

FEATURES = {
    'integer': lambda i: [i], 'integers': lambda i: [i, -i], 'float': lambda i: [i / 2],
    'floats': lambda i: [i / 2] * 3, 'bytes': lambda i: [b'%d' % i], 'list': lambda i: [b'%d' % i, b'x'],
    'ragged': lambda i: [i] * (i % 3 + 1), 'image': lambda i: [picture(i, 'RGB', 'JPEG')],
    'images': lambda i: [picture(i, 'L', 'PNG')] * 2,
}  # fmt: skip
RECORDS = {
    'bytes': lambda i: b'record %d' % i, 'example': lambda i: encode({'n': [i]}),
    'image': lambda i: picture(i, 'L', 'PNG'),
}  # fmt: skip


def tfrecord_of(folder):
    records = [frame(encode({name: values(i) for name, values in FEATURES.items()})) for i in range(COUNT)]
    (folder / 'a.tfrecord').write_bytes(b''.join(records))
    return folder / 'a.tfrecord'


def array_record_of(folder, name):
    writer = ArrayRecordWriter(f'{folder / "a.array_record"}', 'group_size:1')
    for i in range(COUNT):
        writer.write(RECORDS[name](i))
    writer.close()
    return folder / 'a.array_record'


def megatron_of(folder, dtype):
    documents = [{'tokens': np.arange(i % 4, dtype=dtype)} for i in range(COUNT)]
    granular.convert(granular.MapDataset.source(documents), folder / 'a.idx')
    return folder / 'a.idx'


def keyed(record):
    return {'data': record}


def features(record):
    """Return the features of an Example: a single value, if all records have one."""
    return {
        key: value[0] if len(value) == 1 and key != 'ragged' else value for key, value in decode_example(record).items()
    }


# By the format and what a file holds, the function that writes it, and what makes datapoints of its records.
CASES = {
    **{('parquet', kind): (lambda folder, kind=kind: parquet_of(folder, kind), None) for kind in KINDS},
    ('tar', 'members'): (tar_of, None),
    ('tfrecord', 'features'): (tfrecord_of, features),
    **{('array_record', name): (lambda folder, name=name: array_record_of(folder, name), keyed) for name in RECORDS},
    **{('idx', dtype): (lambda folder, dtype=dtype: megatron_of(folder, dtype), None) for dtype in ('uint16', 'int32')},
}


def both(path, out, fn):
    """Return the opened file and the converted dataset, as pipelines; bytes that are files for convert are decoded."""
    spec = granular.convert(path, out).spec

    def decoded(datapoint):
        return {key: decoded_as(spec[key], value) for key, value in fn(datapoint).items()}

    def decoded_as(kind, value):
        if kind.endswith('[]'):
            return [decoded_as(kind[:-2], item) for item in value]
        return granular.decoders[kind](value) if kind in FILES and isinstance(value, bytes) else value

    before = granular.MapDataset.source(granular.open(path))
    found = granular.MapDataset.source(granular.open(out))
    return (before.map(decoded) if fn else before), found, sorted(spec)


def batches_of(dataset):
    """Return the batches of a MapDataset, a stream and a Loader, or the types of their errors."""
    found = []
    for batches in (dataset.batch(4), dataset.to_iter_dataset().batch(4), granular.Loader(dataset, 4)):
        try:
            found.append([typed(batch) for batch in batches])
        except granular.errors.GranularError as error:
            found.append(type(error))
    return found


def test_every_format_is_in_the_table():
    assert {suffix for suffix, _ in CASES} == set(FORMATS)


@pytest.mark.parametrize('case', CASES, ids=' '.join)
def test_open_and_convert_give_the_same_values_and_types(case, tmp_path):
    write, fn = CASES[case]
    before, after, keys = both(write(tmp_path), tmp_path / 'out', fn)
    assert [typed(one) for one in before] == [typed(one) for one in after]
    for key in keys:
        assert batches_of(before.select([key])) == batches_of(after.select([key]))


def test_members_that_some_datapoints_lack_are_none(tmp_path):
    lacks = ('cls', 'name.cls', 'txt', 'json', 'msgpack', 'npy', 'bin', 'int')
    before, after, keys = both(tar_of(tmp_path, (*lacks, 'id'), lacks), tmp_path / 'out', None)
    assert [typed({**dict.fromkeys(keys), **one}) for one in before] == [typed(one) for one in after]
