"""Folders of images with a table of them, beside what Hugging Face's ImageFolder reads from the same folder."""

import csv
import gc
import io
import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import granular
from granular.errors import CorruptError, InvalidArgumentError, NotFoundError

quiet = pytest.mark.filterwarnings('ignore::DeprecationWarning', 'ignore::FutureWarning', 'ignore::ResourceWarning')


def image(number):
    return granular.encoders['png'](np.full((2, 3, 3), number, np.uint8))


def table(name, columns):
    rows = list(zip(*columns.values(), strict=True))
    if name.endswith('.jsonl'):
        return '\n'.join(json.dumps(dict(zip(columns, row, strict=True))) for row in rows).encode()
    if name.endswith('.csv'):
        stream = io.StringIO()
        csv.writer(stream).writerows([columns, *rows])
        return stream.getvalue().encode()
    stream = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), stream)
    return stream.getvalue().to_pybytes()


def fill(folder, tables, images):
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(images, 1):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(image(number))
    for name, columns in tables.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(columns if isinstance(columns, bytes) else table(name, columns))
    return folder


def plain(value):
    """Return a value to compare: of an image, its number."""
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {key: plain(one) for key, one in sorted(value.items())}
    if hasattr(value, 'mode') or (isinstance(value, np.ndarray) and value.ndim == 3):
        return f'image {np.asarray(value).flat[0]}'
    return plain(value.tolist()) if isinstance(value, np.ndarray) else value


def ours(folder, target, **options):
    granular.convert(folder, target, **options)
    with granular.open(target) as reader:
        return plain(list(reader))


def of_hugging_face(folder, cache):
    import datasets

    dataset = datasets.load_dataset('imagefolder', data_dir=str(folder), split='train', cache_dir=str(cache))
    gc.collect()  # it leaves CSV files open
    return plain(list(dataset))


COLUMNS = {'file_name': ['b.png', 'a.png'], 'text': ['a bee, "b"', 'line\nbreak'], 'n': [1, 2], 'x': [0.5, 1.5]}
ONE = {'file_name': ['a.png'], 'n': [1]}
BOXES = [{'box': [[1, 2], [3, 4]], 'kind': ['cat']}, {'box': [], 'kind': []}]
FOLDERS = {
    **{suffix: ({f'metadata.{suffix}': COLUMNS}, ['a.png', 'b.png']) for suffix in ('parquet', 'csv', 'jsonl')},
    'classes': ({'metadata.csv': {'file_name': ['dog/a.png', 'cat/b.PNG'], 'n': [5, 6]}}, ['dog/a.png', 'cat/b.PNG']),
    'images alone in a folder': ({'metadata.csv': {'file_name': ['./x/a.png'], 'date': ['2020-01-02']}}, ['x/a.png']),
    'repeated and unlisted': ({'metadata.csv': {'file_name': ['a.png', 'a.png'], 'n': [1, 2]}}, ['a.png', 'b.png']),
    'several': ({'metadata.jsonl': {'file_names': [['a.png', 'b.png'], ['b.png']], 'n': [1, 2]}}, ['a.png', 'b.png']),
    'pairs': (
        {'metadata.csv': {'image_file_name': ['a.png'], 'mask_file_name': ['m/a.png']}}, ['a.png', 'm/a.png']
    ),
    'nested': ({'metadata.jsonl': {'file_name': ['a.png', 'b.png'], 'objects': BOXES}}, ['a.png', 'b.png']),
    'in one folder each': (
        {'x/metadata.csv': {'file_name': ['a.png'], 'n': [1]}, 'y/metadata.csv': {'file_name': ['a.png'], 'n': [2]}},
        ['x/a.png', 'y/a.png'],
    ),
}  # fmt: skip


@quiet
@pytest.mark.parametrize('title', FOLDERS)
def test_tables_of_images_are_joined_as_by_image_folder(title, tmp_path):
    folder = fill(tmp_path / 'folder', *FOLDERS[title])
    expected = of_hugging_face(folder, tmp_path / 'cache')
    if title == 'in one folder each':  # in no order there
        expected.sort(key=lambda record: record['n'])
    assert ours(folder, tmp_path / 'out') == expected


def test_images_and_tables_are_described_and_the_others_named(tmp_path, granular_cli, caplog):
    columns = {'file_name': ['a.png', '.hidden.png'], 'n': [1, 2]}
    folder = fill(tmp_path / 'folder', {'metadata.csv': columns}, ['a.png', 'b.png', '.hidden.png'])
    granular.convert(folder, tmp_path / 'out', spec={'file': 'utf8'})
    assert caplog.messages == [f'{folder}: left out 1 file: b.png (not in metadata.csv)']
    assert [one['file'] for one in granular.open(tmp_path / 'out')] == ['a.png', '.hidden.png']
    found = json.loads(granular_cli('info', folder, '--json')[1])
    assert found['datapoints'] == 2
    assert found['files'] == {
        'taken': ['.hidden.png', 'a.png'], 'left_out': {'b.png': 'not in metadata.csv'}, 'tables': ['metadata.csv'],
    }  # fmt: skip
    assert 'table     metadata.csv' in granular_cli('info', folder)[1]


def test_types_and_missing_values_of_tables_are_kept(tmp_path):
    text = b'file_name,n,text,flag,none\na.png,1,,true,x\nb.png,,NA,false,y\n'
    folder = fill(tmp_path / 'csv', {'metadata.csv': text}, ['a.png', 'b.png'])
    assert [[one[key] for key in ('n', 'text', 'flag')] for one in ours(folder, tmp_path / 'a')] == [
        [1, '', True], [None, 'NA', False]
    ]  # fmt: skip
    values = pyarrow.array([1, None], pyarrow.int8())
    columns = {'file_name': ['a.png', None], 'n': values, 'x': pyarrow.array([1, 2], pyarrow.float32())}
    folder = fill(tmp_path / 'parquet', {'metadata.parquet': columns}, ['a.png'])
    spec = granular.convert(folder, tmp_path / 'b').spec
    assert spec == {'image': 'msgpack', 'n': 'tree', 'x': 'array'}
    assert granular.open(tmp_path / 'b')[1] == {'image': None, 'n': None, 'x': np.float32(2)}


@pytest.mark.parametrize('root', [True, False])
def test_tables_of_images_have_the_rows_of_a_split(root, tmp_path):
    images = ['train/a.png', 'test/a.png', 'train/b.png']
    if root:
        tables = {'metadata.csv': {'file_name': images, 'n': [1, 2, 3]}}
    else:
        tables = {
            'train/metadata.csv': {'file_name': ['a.png', 'b.png'], 'n': [1, 3]},
            'test/metadata.csv': {'file_name': ['a.png'], 'n': [2]},
        }
    folder = fill(tmp_path / 'folder', tables, images)
    with pytest.raises(InvalidArgumentError, match=r"pass one of them, as in split='train', to convert"):
        granular.convert(folder, tmp_path / 'out')
    assert [one['n'] for one in ours(folder, tmp_path / 'train', split='train')] == [1, 3]
    assert [one['n'] for one in ours(folder, tmp_path / 'test', split='test')] == [2]


@pytest.mark.parametrize(
    ('tables', 'error', 'message'),
    {
        'no names': ({'metadata.csv': {'name': ['a.png']}}, InvalidArgumentError, "no column 'file_name'.*rename it"),
        'missing': ({'metadata.csv': {'file_name': ['x.png']}}, NotFoundError, "file 'x.png'.*remove the row"),
        'outside': ({'x/metadata.csv': {'file_name': ['../a.png']}}, NotFoundError, 'not in its folder'),
        'absolute': ({'metadata.csv': {'file_name': ['/etc/passwd']}}, NotFoundError, 'not in its folder'),
        'no texts': ({'metadata.csv': {'file_name': [1]}}, InvalidArgumentError, 'expected the names of files, got 1'),
        'two formats': (
            {'metadata.csv': COLUMNS, 'metadata.jsonl': COLUMNS}, InvalidArgumentError, 'tables of images of several',
        ),
        'other columns': (
            {'metadata.csv': {'file_name': ['a.png']}, 'x/metadata.csv': {'file_name': ['b.png'], 'n': [1]}},
            InvalidArgumentError, 'expected the columns of .*metadata.csv',
        ),
        'other types': (
            {'metadata.csv': ONE, 'x/metadata.csv': {'file_name': ['b.png'], 'n': ['x']}},
            InvalidArgumentError, 'columns of other types',
        ),
        'twice': (
            {'metadata.csv': {'file_name': ['a.png'], 'image': [1]}}, InvalidArgumentError, "the field 'image'",
        ),
        'damaged': ({'metadata.parquet': b'x'}, CorruptError, 'is not a table of images'),
        'empty': ({'metadata.csv': b''}, CorruptError, 'is not a table of images'),
    }.values(),
)  # fmt: skip
def test_unfit_tables_of_images_are_errors(tables, error, message, tmp_path):
    folder = fill(tmp_path / 'folder', tables, ['a.png', 'x/b.png'])
    with pytest.raises(error, match=message):
        granular.convert(folder, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_table_without_images_is_data(tmp_path):
    folder = fill(tmp_path / 'folder', {'metadata.parquet': {'file_name': ['a.png'], 'n': [1]}}, [])
    assert granular.open(folder)[0] == {'file_name': 'a.png', 'n': 1}
    fill(folder, {}, ['a.png'])
    assert granular.open(folder, format='parquet')[0] == {'file_name': 'a.png', 'n': 1}
