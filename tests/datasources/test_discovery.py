"""Files of folders and patterns that are data, as docs/sources.md has the rules."""

import json
import pathlib
import pickle
import re

import numpy as np
import pyarrow.dataset
import pytest
from pyarrow import parquet

import granular
from granular.errors import CorruptDatasetError, GranularError, InvalidArgumentError, NotFoundError
from granular.grain.experimental import ParquetIterDataset, TFRecordIterDataset
from tests.support.files import FORMATS, files_of_numbers, format_of, numbers_in, write_numbers
from tests.support.seams import describe

PNG = granular.encoders['png'](np.zeros((2, 2, 3), np.uint8))
UUID = '0f2f6d6e-7d6b-4d1c-9a51-2a57a1b1c2d3-c000'

FOLDERS = {
    'one folder': (['a.parquet', 'b.parquet'], 'all'),
    'subfolders, capitals': (['a.parquet', 'more/b.parquet', 'C.PARQUET'], 'all'),
    'documents': (['a.parquet', 'README.md', 'LICENSE', '_SUCCESS', '_metadata', '.a.parquet.crc'], ['a.parquet']),
    'other files': (['a.parquet', 'notes.txt'], ['a.parquet']),
    'hidden files': (['a.parquet', '.b.parquet', '_c.parquet'], ['a.parquet']),
    'AppleDouble': (['a.parquet', '._a.parquet', '__MACOSX/._a.parquet'], ['a.parquet']),
    'uncommitted': (['part-0.parquet', '_temporary/0/part-1.parquet'], ['part-0.parquet']),
    'folders with _': (['_x/a.parquet', 'x/a.parquet'], 'all'),
    'splits': (['data/train-00000-of-00001.parquet', 'data/test-00000-of-00001.parquet'], 'refused: splits'),
    'splits within names': (
        ['mnist-test.tfrecord-00000-of-00001', 'mnist-train.tfrecord-00000-of-00001'],
        'refused: splits',
    ),
    'splits as folders': (['train/a.tar', 'validation/a.tar'], 'refused: splits'),
    'one split': (['train-0.parquet', 'train-1.parquet'], 'all'),
    'words, no splits': (['latest.parquet', 'trainer.parquet'], 'all'),
    'generations': (
        [f'train-{i:05}-of-{n:05}.parquet' for n in (2, 3) for i in range(n)],
        'refused: several generations',
    ),
    'Spark, appended': ([f'part-00000-{UUID}.snappy.parquet', f'part-00000-{UUID[::-1]}.snappy.parquet'], 'all'),
    'missing file': (['x-00000-of-00002.parquet'], 'refused: missing'),
    'Hive': (['day=1/a.parquet', 'day=2/a.parquet'], 'all'),
    'TFRecord in folders': (['a/x.tfrecord', 'b/x.tfrecord'], 'refused: several folders'),
    'ArrayRecord': (['x.array_record-00000-of-00002', 'x.array_record-00001-of-00002'], 'all'),
    'Megatron': (['a.idx', 'a.bin', 'b.idx', 'b.bin', 'c.bin'], ['a.idx', 'b.idx']),
    'Megatron in folders': (['a/x.idx', 'a/x.bin', 'b/x.idx', 'b/x.bin'], 'refused: several folders'),
    'index of a tar file': (['a.tar', 'a.idx'], ['a.tar']),
    'two formats': (['a.parquet', 'a.tar'], 'refused: one format'),
    'classes of images': (['cat/1.png', 'dog/2.JPG', '_x/3.png'], 'all'),
    'classes with numbers': (['000000/1.png', '000001/2.png'], 'all'),
    'splits of images': (['train/cat/1.png', 'test/cat/2.png'], 'refused: splits'),
    'a class named train': (['train/1.png', 'bus/2.png'], 'all'),
    'images and their table': (['cat/1.png', 'metadata.parquet'], ['cat/1.png']),
}
"""The files of each folder, and those that are read, or the words of the error."""


def content(name):
    if name == 'metadata.parquet':
        table = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.table({'file_name': ['cat/1.png'], 'text': ['a cat']}), table)
        return table.getvalue().to_pybytes()
    kind = next((suffix for suffix in FORMATS if f'.{suffix}' in name.lower().replace('.bin', '.idx')), '')
    return (
        files_of_numbers(kind, name, [1])[name] if kind else PNG if name.lower().endswith(('.png', '.jpg')) else b'text'
    )


def fill(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content(name))
    return folder


def files_read(folder):
    """Return the files of a folder that are read, or the words of the error."""
    try:
        found = describe(granular.Path(folder))
    except GranularError as error:
        return 'refused: ' + next(word for word in WORDS if word in str(error))
    return sorted(found['files']['taken'])


WORDS = ('several generations', 'missing', 'several folders', 'one format', 'splits')
"""Words of errors that name the reason."""


@pytest.mark.parametrize('title', FOLDERS)
def test_files_of_a_folder_that_are_read(title, tmp_path):
    names, expected = FOLDERS[title]
    assert files_read(fill(tmp_path, names)) == (sorted(names) if expected == 'all' else expected)


def number(name):
    return sum(map(ord, name)) % 251


@pytest.fixture
def numbered(tmp_path):
    """A function that writes files of numbers that tell their names, and returns the folder."""

    def write(names, root=None):
        folder = granular.Path(tmp_path / 'numbered') if root is None else root
        for name in names:
            suffix = next(suffix for suffix in FORMATS if f'.{suffix}' in name.lower())
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_numbers(folder / name, suffix, [number(name)])
        return folder

    return write


def read(path, **options):
    with granular.open(path, **options) as reader:
        return sorted(numbers_in(reader))


def converted(path, target, **options):
    granular.convert(path, target, **options)
    with granular.open(target) as reader:
        return sorted(numbers_in(reader))


def openers(suffix):
    """The ways to read files of a format, as functions that return the numbers."""
    form = FORMATS[suffix]

    def of_source(path, **options):
        with getattr(granular, form.source)(path, **options) as source:
            return sorted(numbers_in(source))

    def of_stream(path, **options):
        with iter(form.stream(path, **options)) as elements:
            return sorted(numbers_in(elements))

    return [read, of_source, *([of_stream] if form.stream else [])]


@pytest.mark.parametrize('store', ['local', 'fakegcs'])
@pytest.mark.parametrize('suffix', FORMATS)
def test_folders_and_patterns_are_read_by_each_source_as_by_open(suffix, store, request, numbered, tmp_path):
    root = None if store == 'local' else request.getfixturevalue(store).place()
    names = [f'{name}.{suffix}' for name in ('d/a', 'd/b', 'd/_hidden', 'd/.part')]
    folder = numbered([*names, f'd/c.{suffix.upper()}', f'e.{suffix}/part-0.{suffix}'], root)
    a, b, c = (number(name) for name in (*names[:2], f'd/c.{suffix.upper()}'))
    paths = {
        'd': [a, b, c], '?/*': [a, b, c], f'd/{{a,b}}.{suffix}': [a, b], f'd/[ab].{suffix}': [a, b],
        f'd/_*.{suffix}': [number(names[2])], f'd/.part.{suffix}': [number(names[3])],
        f'e.{suffix}': [number(f'e.{suffix}/part-0.{suffix}')], f'*/a.{suffix}': [a],
    }  # fmt: skip
    for path, expected in paths.items():
        for call in openers(suffix):
            assert call(folder / path) == sorted(expected), (path, call)
    assert converted(folder / 'd', tmp_path / 'out') == sorted([a, b, c])


async def test_streams_of_folders_and_patterns_are_divided_and_continued(numbered):
    folder = numbered([f'd/{i}.{suffix}' for suffix in ('parquet', 'tfrecord') for i in range(4)])
    for stream, path in ((ParquetIterDataset, 'd/*.parquet'), (TFRecordIterDataset, 'd/*.tfrecord')):
        dataset = stream(folder.aio / path).map(lambda element: element)
        whole = [element async for element in dataset]
        assert len(whole) == 4
        iterator = aiter(dataset)
        start = iterator.get_state()
        first = await anext(iterator)
        state = iterator.get_state()
        resumed = aiter(stream(folder.aio / path).map(lambda element: element))
        await resumed.set_state(state)
        assert [first, *[element async for element in resumed]] == whole
        await resumed.set_state(start)
        assert [element async for element in resumed] == whole
    found = []
    for i in range(2):
        part = ParquetIterDataset(folder.aio / 'd' / '*.parquet')
        part.set_slice(slice(i, None, 2))
        rows = [int(row['n']) async for row in part]
        assert len(rows) == 2
        found += rows
    assert sorted(found) == sorted(number(f'd/{i}.parquet') for i in range(4))


@pytest.mark.parametrize('title', FOLDERS)
def test_open_convert_and_the_description_agree(title, tmp_path):
    folder = fill(tmp_path / 'folder', FOLDERS[title][0])
    try:
        taken = describe(granular.Path(folder))['files']['taken']
    except GranularError as error:
        with pytest.raises(type(error), match=re.escape(f'{error}'[:200])):
            granular.convert(folder, tmp_path / 'out')
        return
    assert granular.convert(folder, tmp_path / 'out').datapoints == len(taken)


@pytest.mark.parametrize(
    ('name', 'split'),
    {
        'train.parquet': 'train', 'a-train-0.parquet': 'train', 'TRAIN_1.parquet': 'train', 'train2.parquet': 'train',
        'training/x.parquet': 'train', 'val.parquet': 'validation', 'dev-1.parquet': 'validation',
        'x.valid.parquet': 'validation', 'a/validation/b/x.parquet': 'validation', 'eval_3.parquet': 'test',
        'testing.parquet': 'test', 'test/train.parquet': 'train', 'trained.parquet': '', 'contest.parquet': '',
        'split=train/x.parquet': '', 'development.parquet': '', 'test-train.parquet': '',
    }.items(),
)  # fmt: skip
def test_splits_are_words_in_names(name, split, numbered, tmp_path):
    others = {'train': 'other-test.parquet', 'test': 'other-train.parquet', 'validation': 'other-test.parquet'}
    other = others.get(split, 'other-test.parquet')
    folder = numbered([name, other])
    if not split:
        with granular.open(folder) as reader:
            assert len(reader) == 2
        return
    for call in (granular.open, lambda path: granular.convert(path, tmp_path / 'out')):
        for path in (folder, folder / '**' / '*.parquet'):
            with pytest.raises(InvalidArgumentError, match=f"of the splits .*'{split}'.*pass one of them, as in "):
                call(path)
    calls = [read, *openers('parquet')[1:]]
    for path in (folder, folder / '**/*'):
        assert [call(path, split=split) for call in calls] == [[number(name)]] * 3
    assert converted(folder, tmp_path / 'out', split=split) == [number(name)]
    with pytest.raises(InvalidArgumentError, match="split: expected one of 'train', 'validation', 'test', got 'all'"):
        granular.open(folder, split='all')
    missing = next(word for word in others if word not in (split, 'test' if 'test' in other else 'train'))
    with pytest.raises(NotFoundError, match=f"has no files of the split '{missing}', only of"):
        granular.open(folder, split=missing)
    # Both are read where the user names both.
    if '/' not in name:
        assert read(folder / f'{{{name},{other}}}') == sorted([number(name), number(other)])
    assert read([folder / name, folder / other]) == sorted([number(name), number(other)])


@pytest.mark.parametrize('store', ['local', 'fakegcs'])
@pytest.mark.parametrize('suffix', FORMATS)
def test_each_source_takes_a_split_of_a_folder_or_a_pattern(suffix, store, request, numbered):
    root = None if store == 'local' else request.getfixturevalue(store).place()
    names = [f'd/{name}.{suffix}' for name in ('x-train-0', 'x-train-1', 'x-test', 'x')]
    folder = numbered(names, root)
    train, test = sorted(map(number, names[:2])), [number(names[2])]
    for call in openers(suffix):
        for path in ('d', f'd/*.{suffix}'):
            assert (call(folder / path, split='train'), call(folder / path, split='test')) == (train, test)
            with pytest.raises(InvalidArgumentError, match="of the splits .* as in split='train'"):
                call(folder / path)
            with pytest.raises(NotFoundError, match="has no files of the split 'validation'"):
                call(folder / path, split='validation')
        for other in (folder / names[0], [folder / names[0]]):
            with pytest.raises(InvalidArgumentError, match='split: expected a folder or a pattern'):
                call(other, split='train')
        with pytest.raises(InvalidArgumentError, match='split: expected one of'):
            call(folder / 'd', split='all')
    source = FORMATS[suffix].opener()
    with source(folder / 'd', split='test') as reader, pickle.loads(pickle.dumps(reader)) as copy:
        assert sorted(numbers_in(copy)) == test
        assert repr(granular.MapDataset.source(reader)) != repr(
            granular.MapDataset.source(source(folder / 'd', split='train'))
        )


def test_files_of_the_split_are_left_out_of_no_other_source(numbered):
    folder = numbered(['train-0.parquet', 'test-0.parquet', 'more.parquet'])
    for path in (folder / 'train-0.parquet', [folder / 'train-0.parquet'], 5):
        with pytest.raises(InvalidArgumentError, match='split: expected '):
            granular.open(path, split='train') if path != 5 else granular.convert([1], folder / 'out', split='train')
    with granular.DatasetWriter(folder / 'dataset', {'n': 'int'}) as writer:
        writer.append({'n': 1})
    with pytest.raises(InvalidArgumentError, match='split: '):
        granular.open(folder / 'dataset', split='train')


def test_images_of_one_split_have_the_classes_of_its_folders(tmp_path):
    folder = fill(tmp_path / 'folder', ['x/train/cat/1.png', 'x/train/dog/2.png', 'x/test/cat/3.png'])
    granular.convert(folder, tmp_path / 'out', split='train', spec={'file': 'utf8'})
    with granular.open(tmp_path / 'out') as reader:
        assert [(one['class'], one['label'], one['file']) for one in reader] == [
            ('cat', 0, 'x/train/cat/1.png'), ('dog', 1, 'x/train/dog/2.png')
        ]  # fmt: skip


HIVE = [
    ['k=1', 'k=2'], ['k=01', 'k=-2'], ['k=5000000000', 'k=2'], ['k=a', 'k=2'], ['k=1.5', 'k=2'], ['k=', 'k=2'],
    ['k=__HIVE_DEFAULT_PARTITION__', 'k=2'], ['k=a%20b'], ['k%20=1'], ['k=1/j=b', 'k=2'], ['k=1', 'x'], ['k=1=2'],
    ['a/k=1/b/j=2'], ['k=+1', 'k=2'], ['k= 1'], ['k=2147483648'], ['k=-2147483648'], ['k=a/j=1', 'j=2/k=b'],
]  # fmt: skip


@pytest.mark.parametrize('folders', HIVE)
def test_columns_of_folders_are_those_of_pyarrow(folders, numbered, tmp_path):
    folder = numbered([f'{name}/a.parquet' for name in folders])
    expected = pyarrow.dataset.dataset(str(folder), partitioning='hive').to_table()
    by_number = {row['n']: row for row in expected.to_pylist()}
    types = {name: expected.schema.field(name).type for name in expected.schema.names if name != 'n'}
    for path in (folder, folder / '**/*.parquet'):
        with granular.open(path) as reader, iter(ParquetIterDataset(path)) as stream:
            assert set(reader.columns) == set(expected.schema.names)
            for row in (*reader, *stream):
                assert row == by_number[int(row['n'])]
                assert {type(row[name]) for name, kind in types.items() if row[name] is not None} <= {np.int32, str}
                for name, kind in types.items():
                    assert row[name] is None or (type(row[name]) is np.int32) == (kind == pyarrow.int32())
            assert reader[0:2, [*types]] == {name: [row[name] for row in reader][:2] for name in types}
            assert [reader[0, ('n', name)][name] for name in types] == [reader[0][name] for name in types]
    with granular.open(folder, hive=False) as reader:
        assert reader.columns == ('n',)
    granular.convert(folder, tmp_path / 'out', hive=False)
    assert granular.open(tmp_path / 'out').spec.keys() == {'n'}
    # Below a folder that has the name of a column, it is none.
    with granular.open(folder / folders[0] / '*.parquet') as reader:
        assert reader.columns == ('n',)


def test_column_of_a_folder_that_the_files_have_is_refused(numbered):
    folder = numbered(['n=1/a.parquet'])
    with pytest.raises(InvalidArgumentError, match=r"has the columns \['n'\] in the names of .* hive=False"):
        granular.open(folder)
    assert read(folder, hive=False) == [number('n=1/a.parquet')]


def test_subfolders_of_another_schema_and_delta_tables_are_refused(numbered):
    folder = numbered(['a.parquet'])
    (folder / 'more').mkdir()
    parquet.write_table(pyarrow.table({'other': [1]}), f'{folder / "more" / "b.parquet"}')
    with pytest.raises(CorruptDatasetError, match='expected the columns of .*pass a pattern or a list'):
        granular.open(folder)
    (folder / 'more' / 'b.parquet').unlink()
    (folder / '_delta_log').mkdir()
    (folder / '_delta_log' / '00000000000000000000.json').write_text('{}')
    with pytest.raises(InvalidArgumentError, match=r'is a Delta table.*file_uris'):
        granular.open(folder)


def test_one_warning_names_what_is_left_out(numbered, caplog, tmp_path):
    folder = numbered(['a.parquet', '_b.parquet', '_temporary/c.parquet', 'd.tar'])
    for name in (
        'x.csv',
        'y.csv',
        'README.md',
        'LICENSE',
        '_SUCCESS',
        '_metadata',
        '.crc',
        'a.parquet.crc',
        '.DS_Store',
    ):
        (folder / name).write_bytes(b'')
    for call in (
        lambda: granular.open(folder, format='parquet'),
        lambda: granular.ParquetDataSource(folder),
        lambda: list(ParquetIterDataset(folder)),
        lambda: granular.convert(folder, tmp_path / 'out', format='parquet'),
    ):
        caplog.clear()
        call()
        [message] = caplog.messages
        assert message == (
            f'{folder}: left out 5 files: _b.parquet (hidden); _temporary/c.parquet (in the hidden folder _temporary); '
            f'x.csv, y.csv (of no format that is read); d.tar (of the format webdataset, not parquet)'
        )


def test_info_lists_what_is_taken_and_left_out(numbered, granular_cli):
    folder = numbered(['a.parquet', '_b.parquet', 'd.tar'])
    _, out, _ = granular_cli('info', folder, '--format', 'parquet')
    for line in ('taken     a.parquet', 'left out  _b.parquet: hidden', 'left out  d.tar: of the format webdataset'):
        assert line in out
    files = json.loads(granular_cli('info', folder, '--format', 'parquet', '--json')[1])['files']
    assert (files['taken'], list(files['left_out'])) == (['a.parquet'], ['_b.parquet', 'd.tar'])
    (folder / 'images').mkdir()
    fill(pathlib.Path(f'{folder}/images'), ['cat/1.png', 'cat/notes.txt'])
    files = json.loads(granular_cli('info', folder / 'images', '--json')[1])['files']
    assert files == {'taken': ['cat/1.png'], 'left_out': {'cat/notes.txt': 'of no format that is read'}}


def test_generations_of_other_hashes_are_refused(numbered):
    folder = numbered(['x-00000-of-00001-0a.parquet', 'x-00000-of-00001-0b.parquet'])
    for path in (folder, folder / '*.parquet'):
        with pytest.raises(InvalidArgumentError, match=r'several generations.*-0a\.parquet and .*-0b\.parquet'):
            granular.open(path)
    assert len(read([folder / name for name in ('x-00000-of-00001-0a.parquet', 'x-00000-of-00001-0b.parquet')])) == 2


def test_listing_stops_at_a_limit(numbered, monkeypatch, tmp_path):
    folder = numbered([f'{i}.parquet' for i in range(5)])
    monkeypatch.setattr('granular.aio.datasources.discovery.discover.MOST', 3)
    for call in (granular.open, granular.ParquetDataSource, lambda path: granular.convert(path, tmp_path / 'out')):
        with pytest.raises(InvalidArgumentError, match='has more than 3 files and folders.*pass a pattern or a list'):
            call(folder)


@pytest.mark.parametrize('suffix', FORMATS)
def test_folder_of_hidden_files_names_them_and_a_list_reads_them(suffix, numbered, tmp_path):
    hidden = [f'd/_a.{suffix}', f'd/.b.{suffix}']
    folder = numbered(hidden)
    kind = format_of(suffix)
    for path in ('d', f'd/*.{suffix}'):
        for call in (
            *openers(suffix), lambda path: granular.open(path, format=kind), lambda path: describe(granular.Path(path)),
            lambda path: granular.convert(path, tmp_path / 'out'),
        ):  # fmt: skip
            with pytest.raises(NotFoundError, match=r'has no files of .*, left out 2 files: .*_a.*hidden.*pass a list'):
                call(folder / path)
    for call in openers(suffix):
        assert call([folder / name for name in hidden]) == sorted(map(number, hidden))


def test_folder_without_files_of_the_format_is_an_error(numbered):
    folder = numbered(['a.tar'])
    for source in (granular.ParquetDataSource, granular.TFRecordDataSource, granular.ArrayRecordDataSource):
        with pytest.raises(NotFoundError, match='has no files of '):
            source(folder)


def test_formats_are_named_where_names_do_not_tell(numbered):
    folder = numbered(['a.parquet', 'b.tar'])
    assert read(folder, format='webdataset') == [number('b.tar')]
    (folder / 'other').mkdir()
    (folder / 'other' / 'a.data').write_bytes((folder / 'a.parquet').read_bytes())
    assert read(folder / 'other' / '*', format='parquet') == [number('a.parquet')]
    assert read(folder / 'other' / 'a.data', format='parquet') == [number('a.parquet')]
    with pytest.raises(InvalidArgumentError, match='format: expected one of parquet, '):
        granular.open(folder, format='csv')
