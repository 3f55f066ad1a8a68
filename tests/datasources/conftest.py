"""Folders with files in every store."""

import pytest

import granular
from tests.conftest import empty_folder

STORES = ('memory', 'seaweed', 'fakegcs', 'azurite', 'http', 'hub')


@pytest.fixture
def stored(request, tmp_path):
    """A function that fills a folder of a store by a function of a local path, and returns it."""

    def store(fill):
        made = granular.Path(tmp_path / 'made')
        made.mkdir()
        fill(made)
        if request.param == 'hub':
            hub = request.getfixturevalue('hub')
            request.getfixturevalue('monkeypatch').setenv('HF_ENDPOINT', hub.endpoint)
            hub.commit('me/stored', tmp_path / 'made')
            return granular.Path('hf://datasets/me/stored')
        if request.param != 'http':
            return made.copy(empty_folder(request, tmp_path) / 'stored')
        server = request.getfixturevalue('http')
        folder = server.new_bucket()
        made.copy(f'{server.folder}/{folder.name}/stored')
        return folder / 'stored'

    return store
