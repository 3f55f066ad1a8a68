"""Names of files: what exists under a name with wildcards is opened, and is a pattern only otherwise."""

import re

import pytest

import granular
from granular.errors import NotFoundError
from tests.conftest import empty_folder
from tests.datasources.conftest import STORES
from tests.support.files import FILES, FORMATS, numbers_in, write_numbers
from tests.support.tables import cover
from tests.view.serving import Served
from tests.view.test_server import ask


def dataset(path, numbers, kind=granular.DatasetWriter, **options):
    with kind(path, {'n': 'int'}, **options) as writer:
        for number in numbers:
            writer.append({'n': number})


KINDS = {
    **{f'.{suffix}': lambda path, numbers, suffix=suffix: write_numbers(path, suffix, numbers) for suffix in FORMATS},
    '': dataset,
    '-sharded': lambda path, numbers: dataset(path, numbers, granular.ShardedDatasetWriter, shardlen=2),
}


@pytest.mark.parametrize(('stored', 'kind'), cover([['local'], STORES], [list(KINDS)]), indirect=['stored'])
def test_existing_name_is_no_pattern(stored, kind, tmp_path):
    def fill(folder):
        for name, numbers in {'x1': [1, 1, 1], 'x[1]': [5, 6, 7], 'x[2]': [8], 'y*': [9]}.items():
            KINDS[kind](folder / f'{name}{kind}', numbers)

    folder = stored(fill)

    def read(name):
        with granular.open(folder / f'{name}{kind}') as reader:
            return numbers_in(reader)

    assert {name: read(name) for name in ('x1', 'x[1]', 'x[2]', 'y*')} == {
        'x1': [1, 1, 1], 'x[1]': [5, 6, 7], 'x[2]': [8], 'y*': [9]
    }  # fmt: skip
    with Served(folder) as served:
        name = f'x[1]{kind}'
        assert ask(served, '/api/folder', path=name).json['kind'] == 'data'
        assert ask(served, '/api/dataset', path=name).json['length'] == 3
        assert ask(served, '/api/dataset', path=f'x[2]{kind}').json['length'] == 1
    if kind in ('', '-sharded'):
        return
    granular.convert(folder / f'x[1]{kind}', tmp_path / 'converted', shardlen=2)
    with granular.open(tmp_path / 'converted') as reader:
        assert numbers_in(reader) == [5, 6, 7]
    assert read('x[12]') == [1, 1, 1]
    assert read('x?*') == [1, 1, 1, 5, 6, 7, 8]
    with pytest.raises(NotFoundError, match='matches no files'):
        read('x[3]')


# Names as tfds, Beam and Hugging Face make them; the last one counts from 1.
NAMES = {
    'x{end}-{n:05}-of-00003': 0, 'x-{n:05}-of-00003{end}': 0, 'x-y-{n:05}-of-00003-{n}f31{end}': 0, 'x-{n}-of-3{end}': 1
}  # fmt: skip


@pytest.fixture(params=['local', 'fakegcs'])
def files_of_several(request, tmp_path):
    """A function that writes three files of a format, and returns their folder and their names."""

    def write(suffix, names):
        folder = empty_folder(request, tmp_path) / 'files'
        folder.mkdir(parents=True)
        files = [names.format(n=NAMES[names] + i, end=f'.{suffix}') for i in range(3)]
        for i, name in enumerate(files):
            write_numbers(folder / name, suffix, [10 * i, 10 * i + 1])
        return folder, files

    return write


@pytest.mark.parametrize('names', NAMES)
@pytest.mark.parametrize('suffix', FORMATS)
def test_missing_files_of_several_are_named(files_of_several, suffix, names, tmp_path):
    folder, files = files_of_several(suffix, names)
    paths = [folder, folder / 'x*', folder / '*-of-*']
    for path in paths:
        with granular.open(path) as reader:
            assert numbers_in(reader) == [0, 1, 10, 11, 20, 21]
    (folder / files[1]).unlink()
    lost = files[1].replace('1f31', '0f31')  # the hash of a missing file is unknown
    for i, path in enumerate(paths):
        for read in (granular.open, lambda path, i=i: granular.convert(path, tmp_path / f'out{i}')):
            with pytest.raises(NotFoundError, match=f'has 2 of 3 files: {re.escape(lost)} missing'):
                read(path)
    # Chosen files are read.
    with granular.open([folder / files[0], folder / files[2]]) as reader:
        assert numbers_in(reader) == [0, 1, 20, 21]
    chosen = names.replace('{n:05}', '0000[02]').replace('{n}-of-3', '[13]-of-3').replace('{n}f31', '*')
    with granular.open(folder / chosen.format(end=f'.{suffix}')) as reader:
        assert numbers_in(reader) == [0, 1, 20, 21]


def test_missing_files_are_those_of_one_of_several_folders(tmp_path):
    for name in ('a/x-00000-of-00002', 'a/x-00001-of-00002', 'b/x-00000-of-00002'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f'{name}.tfrecord').write_bytes(FILES['tfrecord']([1]))
    for pattern in ('*/x-*', '{b,a}/*'):
        with pytest.raises(NotFoundError, match='has 1 of 2 files: x-00001-of-00002.tfrecord missing'):
            granular.open(tmp_path / pattern)
    with granular.open(tmp_path / 'a*/x-*') as reader:
        assert len(reader) == 2


def test_first_of_many_missing_files_are_named(tmp_path):
    (tmp_path / 'x.tfrecord-00007-of-999999').write_bytes(FILES['tfrecord']([1]))
    with pytest.raises(NotFoundError, match=r'x\.tfrecord-00002-of-999999 and more missing: copy all of them'):
        granular.open(tmp_path)
