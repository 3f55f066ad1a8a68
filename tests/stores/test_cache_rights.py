"""Permissions of cache folders, and links planted in them."""

import os
import stat

import pytest

import granular
from granular.errors import AccessDeniedError
from tests.support.faults import FaultServer
from tests.support.files import FORMATS, files_of_numbers

SPEC = {'x': 'int'}
CACHES = ('cache_dir', 'index_cache')


@pytest.fixture
def server(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', SPEC, granular.encoders) as writer:
        for i in range(5):
            writer.append({'x': i})
    files = {f'ds/{file.name}': file.read_bytes() for file in (tmp_path / 'ds').iterdir()}
    with FaultServer(files=files) as server:
        yield server


def read(server, **caches):
    config = granular.IOConfig(**{name: str(folder) for name, folder in caches.items()})
    root = granular.Path('s3://bucket/ds', config=config, endpoint_url=server.endpoint, anon=True)
    with granular.DatasetReader(root, granular.decoders) as reader:
        return [point['x'] for point in reader]


def modes(folder):
    """Return the permission bits of a folder and its contents that other users have."""
    wide = {}
    for root in [folder, *folder.rglob('*')]:
        mode = stat.S_IMODE(root.lstat().st_mode)
        if mode != (0o700 if root.is_dir() else 0o600):
            wide[f'{root.relative_to(folder)}'] = oct(mode)
    return wide


@pytest.fixture(autouse=True)
def usual_mask():
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize('cache', CACHES)
def test_cache_files_are_private_to_their_user(server, tmp_path, cache):
    folder = tmp_path / 'a' / 'cache'
    for _ in range(2):
        assert read(server, **{cache: folder}) == list(range(5))
    assert list(folder.rglob('*'))
    assert modes(folder) == {}


@pytest.mark.parametrize('cache', CACHES)
def test_wide_permissions_are_tightened(server, tmp_path, cache):
    folder = tmp_path / 'cache'
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    read(server, **{cache: folder})
    assert modes(folder) == {}
    for root in folder.rglob('*'):
        root.chmod(0o777)
    folder.chmod(0o755)
    os.rename(folder, tmp_path / 'moved')  # as a process opens a folder once
    assert read(server, **{cache: tmp_path / 'moved'}) == list(range(5))
    files = {name for name in modes(tmp_path / 'moved') if not name.endswith(('draft', 'flights'))}
    assert files == set()


@pytest.mark.parametrize('cache', CACHES)
def test_folder_with_unrelated_files_keeps_its_mode(server, tmp_path, cache):
    folder = tmp_path / 'shared'
    folder.mkdir(mode=0o755)
    (folder / 'notes.txt').write_text('of others')
    read(server, **{cache: folder})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    (folder / 'notes.txt').unlink()
    folder.chmod(0o700)
    assert modes(folder) == {}


def give_away(folder, monkeypatch):
    """Give a folder to another user, or, without the right to do so, let this process be another user's."""
    other = os.geteuid() + 12345
    if os.geteuid() == 0:
        os.chown(folder, other, other)
    else:
        monkeypatch.setattr(os, 'geteuid', lambda: other)


@pytest.mark.parametrize('cache', CACHES)
def test_folder_of_another_user_is_refused(server, tmp_path, cache, monkeypatch):
    folder = tmp_path / 'cache'
    read(server, **{cache: folder})
    os.rename(folder, tmp_path / 'moved')
    give_away(tmp_path / 'moved', monkeypatch)
    for _ in range(2):
        with pytest.raises(AccessDeniedError, match=r'moved: belongs to user \d+, not to user \d+ of this process'):
            read(server, **{cache: tmp_path / 'moved'})


@pytest.mark.parametrize('kind', ['DatasetReader', 'TFRecordDataSource', 'WebDatasetDataSource'])
def test_folder_that_is_another_users_when_an_index_is_saved_is_refused(server, tmp_path, kind, monkeypatch):
    for suffix, form in FORMATS.items():
        server.files |= files_of_numbers(suffix, form.source, [1])
    server.files |= {name.replace('ds', 'DatasetReader'): data for name, data in server.files.items()}
    record = server.record

    def give_and_record(*args):
        give_away(tmp_path / 'cache', monkeypatch)
        return record(*args)

    server.record = give_and_record  # called with each request
    (tmp_path / 'cache').mkdir()
    config = granular.IOConfig(index_cache=str(tmp_path / 'cache'))
    path = granular.Path(f's3://bucket/{kind}', config=config, endpoint_url=server.endpoint, anon=True)
    with pytest.raises(AccessDeniedError, match='belongs to user'):
        getattr(granular, kind)(path).close()


@pytest.mark.parametrize('cache', CACHES)
def test_files_of_another_user_are_not_read(server, tmp_path, cache, monkeypatch):
    folder = tmp_path / 'cache'
    read(server, **{cache: folder})
    os.rename(folder, tmp_path / 'moved')
    owner, fstat = os.geteuid(), os.fstat

    def foreign(fd):
        info = fstat(fd)
        values = list(info)
        path = os.readlink(f'/proc/self/fd/{fd}')
        if stat.S_ISREG(info.st_mode) and path.startswith(str(tmp_path / 'moved')) and not path.endswith('.tmp'):
            values[4] = owner + 1
        return os.stat_result(values)

    monkeypatch.setattr(os, 'fstat', foreign)
    if cache == 'cache_dir':
        with pytest.raises(AccessDeniedError, match='table: belongs to user'):
            read(server, cache_dir=tmp_path / 'moved')
    else:
        assert read(server, index_cache=tmp_path / 'moved') == list(range(5))


def test_link_in_a_parent_folder_is_followed(server, tmp_path):
    (tmp_path / 'disk').mkdir()
    (tmp_path / 'link').symlink_to(tmp_path / 'disk')
    for cache in CACHES:
        assert read(server, **{cache: tmp_path / 'link'}) == list(range(5))
        assert read(server, **{cache: tmp_path / 'link' / cache}) == list(range(5))


@pytest.mark.parametrize('hard', [False, True], ids=['symbolic', 'hard'])
@pytest.mark.parametrize('name', ['table', 'flights', 'lock'])
def test_planted_link_is_refused_and_its_target_unchanged(server, tmp_path, name, hard):
    victim = tmp_path / 'victim'
    victim.write_text('precious')
    victim.chmod(0o644)
    folder = tmp_path / 'cache' / 'blocks-2'
    folder.mkdir(parents=True)
    os.link(victim, folder / name) if hard else (folder / name).symlink_to(victim)
    with pytest.raises(AccessDeniedError, match=f'{name}: .*remove it'):
        read(server, cache_dir=tmp_path / 'cache')
    assert (victim.read_text(), stat.S_IMODE(victim.stat().st_mode)) == ('precious', 0o644)
    (folder / name).unlink()
    assert read(server, cache_dir=tmp_path / 'cache') == list(range(5))  # once it is gone


@pytest.mark.parametrize('name', ['blocks-2', 'blocks-2/objects', 'blocks-2/packs'])
def test_planted_link_to_a_folder_is_refused(server, tmp_path, name):
    (tmp_path / 'elsewhere').mkdir()
    root = tmp_path / 'cache' / name
    root.parent.mkdir(parents=True)
    root.symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(AccessDeniedError, match='is a symbolic link inside a cache folder'):
        read(server, cache_dir=tmp_path / 'cache')
    assert not any((tmp_path / 'elsewhere').iterdir())


def test_planted_link_at_an_index_is_not_followed(server, tmp_path):
    read(server, index_cache=tmp_path / 'cache')
    (file,) = (tmp_path / 'cache').iterdir()
    victim = tmp_path / 'victim'
    file.rename(victim)
    before = victim.read_bytes()
    file.symlink_to(victim)
    for _ in range(2):
        assert read(server, index_cache=tmp_path / 'cache') == list(range(5))
    assert victim.read_bytes() == before
    assert modes(tmp_path / 'cache') == {}
