"""Names of files: what exists under a name with wildcards is opened, and is a pattern only otherwise."""

import pytest

import granular
from granular.errors import NotFoundError
from tests.conftest import empty_folder
from tests.support.files import FILES, numbers_in
from tests.view.serving import Served
from tests.view.test_server import ask

STORES = ['local', 'memory', 'seaweed', 'fakegcs', 'azurite', 'http']


@pytest.fixture(params=STORES)
def stored(request, tmp_path):
    """A function that fills a folder of a store by a function of a local path, and returns it."""

    def store(fill):
        made = granular.Path(tmp_path / 'made')
        made.mkdir()
        fill(made)
        if request.param != 'http':
            return made.copy(empty_folder(request, tmp_path) / 'stored')
        server = request.getfixturevalue('http')
        folder = server.new_bucket()
        made.copy(f'{server.folder}/{folder.name}/stored')
        return folder / 'stored'

    return store


def dataset(path, numbers, kind=granular.DatasetWriter, **options):
    with kind(path, {'n': 'int'}, **options) as writer:
        for number in numbers:
            writer.append({'n': number})


KINDS = {
    **{
        f'.{suffix}': lambda path, numbers, make=make: path.write_bytes(make(numbers)) for suffix, make in FILES.items()
    },
    '': dataset,
    '-sharded': lambda path, numbers: dataset(path, numbers, granular.ShardedDatasetWriter, shardlen=2),
}


@pytest.mark.parametrize('kind', KINDS)
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
