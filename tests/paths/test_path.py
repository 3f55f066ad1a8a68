import asyncio
import contextlib
import errno
import gc
import os
import pathlib
import pickle
import string
import sys
import time

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from hypothesis import given
from hypothesis import strategies as st

import granular
from granular import aio
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
    StoreError,
    UnknownSchemeError,
    UnsupportedError,
)
from tests.support.uploads import unfinished_uploads

# What the suffix of a name with two dots in front is, pathlib has answered differently in several releases of Python.
NAMES = st.text(string.ascii_letters + string.digits + '._- ', min_size=1, max_size=8).filter(
    lambda name: name.strip('. ') and not name.startswith('..')
)


# --- paths without a store


@given(st.lists(NAMES, min_size=1, max_size=4), st.booleans())
def test_local_paths_match_pathlib(names, absolute):
    text = ('/' if absolute else '') + '/'.join(names)
    path, expected = granular.Path(text), pathlib.PurePosixPath(text)
    assert str(path) == str(expected)
    assert os.fspath(path) == os.fspath(expected)
    for name in ('name', 'stem', 'suffix', 'parts'):
        assert getattr(path, name) == getattr(expected, name), name
    assert str(path.parent) == str(expected.parent)
    assert str(path / 'x') == str(expected / 'x')
    assert str(path.with_suffix('.y')) == str(expected.with_suffix('.y'))
    assert str(path.with_name('z')) == str(expected.with_name('z'))


@pytest.mark.parametrize('root', ['s3://bucket', 'gs://bucket', 'http://host:80', 'memory://place'])
def test_remote_paths_have_the_parts_of_pathlib(root):
    path = granular.Path(f'{root}/some/data.tar.gz')
    assert str(path) == f'{root}/some/data.tar.gz'
    assert repr(path) == f"Path('{root}/some/data.tar.gz')"
    assert (path.name, path.stem, path.suffix) == ('data.tar.gz', 'data.tar', '.gz')
    assert str(path.parent) == f'{root}/some'
    assert str(path.parent / 'x' / 'y') == f'{root}/some/x/y'
    assert path.parent / 'data.tar.gz' == path
    assert hash(path.parent / 'data.tar.gz') == hash(path)
    assert str(path.with_suffix('.zip')) == f'{root}/some/data.tar.zip'
    assert str(path.relative_to(path.parent.parent)) == 'some/data.tar.gz'
    assert path.is_relative_to(path.parent)
    assert not path.parent.is_relative_to(path)
    assert path.match('*.gz')
    assert path.match('some/data.*')
    assert not path.match('other/*')
    with pytest.raises(InvalidArgumentError, match='no path on the local disk'):
        os.fspath(path)


def test_bucket_root_is_its_own_parent():
    root = granular.Path('s3://bucket/')
    assert (str(root), root.name, root.parent, root.parts) == ('s3://bucket', 'bucket', root, ('s3://bucket',))
    assert (root / 'a').parts == ('s3://bucket', 'a')


def test_as_uri_is_what_programs_take():
    assert granular.Path('s3://b/a b').as_uri() == 's3://b/a b'  # the command line of AWS decodes nothing
    assert granular.Path('http://h/a b').as_uri() == 'http://h/a%20b'
    assert granular.Path('/tmp/a b').as_uri() == 'file:///tmp/a%20b'
    assert granular.Path(os.fsdecode(b'/tmp/\xff')).as_uri() == 'file:///tmp/%FF'
    for name in ('/tmp/x', '/tmp/a b%20', os.fsdecode(b'/tmp/\xff')):
        assert str(granular.Path(granular.Path(name).as_uri())) == name


def test_pickled_path_has_no_credentials():
    options = {'endpoint_url': 'http://localhost:1', 'key': 'MYKEY', 'secret': 'MYSECRET', 'token': 'MYTOKEN'}
    path = granular.Path('s3://bucket/x', client_kwargs={'aws_secret_access_key': 'MYOTHER'}, **options)
    content = pickle.dumps(path)
    for word in (b'MYKEY', b'MYSECRET', b'MYTOKEN', b'MYOTHER'):
        assert word not in content
    twin = pickle.loads(content)
    assert str(twin) == str(path)
    assert twin.store.options == {'endpoint_url': 'http://localhost:1', 'client_kwargs': {}}
    for word in ('MYKEY', 'MYSECRET'):
        assert word not in repr(path)


def test_paths_whose_options_have_names_that_are_no_text_are_pickled():
    path = granular.Path('memory://folder/x', levels={1: 'low', 'token': 'MYTOKEN'})
    content = pickle.dumps(path)
    assert b'MYTOKEN' not in content
    assert pickle.loads(content).store.options == {'levels': {1: 'low'}}


@pytest.mark.parametrize(
    ('remote', 'error'),
    [('nosuch://x/y', UnknownSchemeError), ('s3://', InvalidArgumentError), ('s3:///key', InvalidArgumentError),
     ('https://user:pass@host/x', InvalidArgumentError), (7, InvalidArgumentError), (None, InvalidArgumentError)],
)  # fmt: skip
def test_invalid_addresses_are_refused(remote, error):
    with pytest.raises(error) as caught:
        granular.Path(remote)
    assert 'user:pass' not in str(caught.value)


def test_names_that_no_file_can_have_are_refused(tmp_path):
    disk, bucket = granular.Path(tmp_path / 'x'), granular.Path('gs://bucket/folder/x', anon=True)
    refused = {
        'null': lambda: disk.with_name('a\0').exists(),
        'dot': lambda: disk.with_name('.'),
        'null in a home': lambda: granular.Path('~\0/x'),
        'surrogate in a home': lambda: granular.Path('~\ud800'),
        'account': lambda: granular.Path('az://container@a[]/x'),
        'surrogate': lambda: bucket.with_name('\ud800'),
        'suffix': lambda: bucket.with_suffix('.\ud800'),
        'pattern': lambda: list(bucket.glob('\ud800*')),
        'component': lambda: list(bucket.glob('**/\ud800')),
    }
    for name, call in refused.items():
        with pytest.raises(InvalidArgumentError):
            pytest.fail(f'{name}: {call()}')
    odd = disk.with_name(os.fsdecode(b'\xff'))  # which a file on a disk may have
    odd.write_bytes(b'x')
    assert list(disk.parent.glob(f'{odd.name}*')) == [odd]


@pytest.mark.parametrize('server', ['moto', 'seaweed', 'fakegcs', 'azurite'])
def test_bucket_is_not_taken_for_a_file(server, request, tmp_path):
    root = request.getfixturevalue(server).place()
    while root.parent != root:
        root = root.parent
    other = granular.Path(tmp_path / 'x')
    other.write_bytes(b'x')
    refused = [
        root.read_bytes,
        lambda: root.read_range(1),
        lambda: root.read_ranges([0], [1]),
        lambda: root.write_bytes(b'x'),
        lambda: root.open('wb'),
        lambda: root.unlink(missing_ok=True),
        lambda: other.copy(root),
    ]
    for call in refused:
        with pytest.raises((InvalidArgumentError, NotFoundError), match='got that of the|no such blob') as caught:
            call()
        assert caught.value.path == f'{root}'
    (root / 'y').write_bytes(b'y')
    with pytest.raises(InvalidArgumentError, match='got that of the'):
        (root / 'y').copy(root)
    assert root.is_dir()
    (root / 'y').unlink()


def test_unknown_options_are_refused(bucket):
    with pytest.raises(InvalidArgumentError, match='endpoint_uri'):
        granular.Path(str(bucket), **bucket.store.options, endpoint_uri='x').read_bytes()


def test_settings_of_another_type_are_refused(tmp_path):
    for address in ('s3://bucket/x', str(tmp_path)):
        with pytest.raises(InvalidArgumentError, match=r'config: expected a granular\.IOConfig, got dict'):
            granular.Path(address, config={'cache_dir': 'x'})


def test_local_path_takes_no_options():
    with pytest.raises(InvalidArgumentError, match='anon'):
        granular.Path('/tmp', anon=True)


# --- every store


def test_files_are_written_read_and_removed(root):
    path = root / 'folder' / 'file.bin'
    assert not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    assert path.write_bytes(b'hello world') == 11
    assert path.exists()
    assert path.is_file()
    assert not path.is_dir()
    assert path.parent.is_dir()
    assert not path.parent.is_file()
    assert path.read_bytes() == b'hello world'
    assert path.stat().size == path.stat().st_size == 11
    assert path.stat().modified == pytest.approx(time.time(), abs=3600)
    assert path.write_text('grüße') == 7
    assert path.read_text() == 'grüße'
    path.unlink()
    assert not path.exists()
    with pytest.raises(NotFoundError):
        path.unlink()
    path.unlink(missing_ok=True)


def test_items_of_arrays_are_written_as_their_bytes(root):
    items = np.arange(10, dtype=np.int32)
    root.mkdir(parents=True, exist_ok=True)
    for data in (bytearray(items), memoryview(items), memoryview(items)[::2], items.reshape(2, 5), np.empty(0)):
        assert (root / 'x').write_bytes(data) == memoryview(data).nbytes
        assert (root / 'x').read_bytes() == bytes(data)
        with (root / 'y').open('wb') as file:
            assert file.raw.write(data) == memoryview(data).nbytes == file.raw.tell()
        assert (root / 'y').read_bytes() == bytes(data)
    for data in ('text', [1, 2], None):
        with pytest.raises(InvalidArgumentError, match=f'expected bytes to write, got {type(data).__name__}'):
            (root / 'x').write_bytes(data)


def test_ranges_are_read(root):
    data = os.urandom(100_000)
    root.mkdir(parents=True, exist_ok=True)
    path = root / 'x'
    path.write_bytes(data)
    assert path.read_range(10, 20) == data[10:20]
    assert path.read_range(99_990) == data[-10:]
    assert path.read_range(5, 5) == b''
    starts, ends = [50_000, 0, 10, 5, 99_999, 7, 0], [60_000, 10, 30, 15, 100_000, 7, 100_000]
    assert path.read_ranges(starts, ends) == [data[a:b] for a, b in zip(starts, ends, strict=True)]
    assert path.read_ranges([], []) == []
    with pytest.raises(OutOfRangeError, match='100000'):
        path.read_range(99_990, 100_010)
    for start in (100_000, 100_001):
        with pytest.raises(OutOfRangeError):
            path.read_range(start)
    with pytest.raises(OutOfRangeError):
        path.read_ranges([0, 200_000], [10, 200_001])
    for start, end, message in [(-1, 5, 'start: expected an integer >= 0'), (9, 3, 'end: expected an integer >= 9')]:
        with pytest.raises(InvalidArgumentError, match=message):
            path.read_range(start, end)


def test_empty_file_is_read(root):
    root.mkdir(parents=True, exist_ok=True)
    path = root / 'empty'
    path.write_bytes(b'')
    assert path.read_bytes() == b''
    assert path.is_file()
    assert path.stat().size == 0
    with path.open() as file:
        assert file.read() == b''


def test_open_reads_writes_and_seeks(root):
    root.mkdir(parents=True, exist_ok=True)
    path = root / 'x'
    with path.open('wb') as file:
        for i in range(1000):
            file.write(b'line %d\n' % i)
    with path.open('rb') as file:
        assert file.readline() == b'line 0\n'
        assert sum(1 for _ in file) == 999
        file.seek(-9, os.SEEK_END)
        assert file.read() == b'line 999\n'
        file.seek(5)
        assert file.read(1) == b'0'
    with pytest.raises(RuntimeError, match='on purpose'), (root / 'y').open('wb') as file:
        file.write(b'half')
        raise RuntimeError('on purpose')
    assert not (root / 'y').exists()
    with pytest.raises(NotFoundError):
        (root / 'z').open('rb')
    with pytest.raises(InvalidArgumentError, match='mode'):
        path.open('r+b')


def test_failed_write_leaves_the_previous_file(root):
    root.mkdir(parents=True, exist_ok=True)
    (root / 'x').write_bytes(b'before')
    with pytest.raises(RuntimeError, match='on purpose'), (root / 'x').open('wb') as file:
        file.write(b'half')
        file.flush()
        raise RuntimeError('on purpose')
    assert (root / 'x').read_bytes() == b'before'


def test_file_that_is_never_closed_leaves_the_previous_file(root, caplog):
    root.mkdir(parents=True, exist_ok=True)
    (root / 'x').write_bytes(b'before')
    with pytest.warns(ResourceWarning, match='was never closed, and is discarded'):
        file = (root / 'x').open('wb')
        file.write(b'half')
        del file
        gc.collect()
    assert 'x was never closed' in caplog.text
    assert (root / 'x').read_bytes() == b'before'


@pytest.mark.filterwarnings('ignore::ResourceWarning')
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')  # Python ignores it in finalizers
def test_interrupt_while_a_file_is_opened_leaves_the_previous_file(tmp_path):
    path, point, seen = granular.Path(tmp_path) / 'x', 0, 1
    path.write_bytes(b'before')

    def interrupt(frame, event, argument):
        nonlocal seen
        seen += event in ('call', 'c_return')
        if seen == point:
            sys.setprofile(None)
            raise KeyboardInterrupt

    def opened():
        sys.setprofile(interrupt)
        try:
            return path.open('wb')
        finally:
            sys.setprofile(None)

    while seen >= point:
        point, seen = point + 1, 0
        with contextlib.suppress(KeyboardInterrupt):
            opened()
        gc.collect()
        assert path.read_bytes() == b'before', point
    assert point > 20


@pytest.mark.parametrize('root', ['memory'], indirect=True)
def test_fsspec_folders_and_files_are_distinguished(root):
    (root / 'folder' / 'x').write_bytes(b'content')
    with pytest.raises(StoreError, match='is a folder'):
        (root / 'folder').read_bytes()
    with pytest.raises(NotFoundError, match='no such folder'):
        (root / 'folder' / 'x').rmtree()
    assert (root / 'folder' / 'x').read_bytes() == b'content'


def test_large_file_is_uploaded_in_parts(root):
    data = os.urandom(5 << 20) * 4
    root.mkdir(parents=True, exist_ok=True)
    path = root / 'large'
    with path.open('wb') as file:
        for i in range(0, len(data), 3_000_001):
            file.write(data[i : i + 3_000_001])
    assert path.read_bytes() == data
    assert path.read_ranges([1], [len(data) - 1]) == [data[1:-1]]


def tree(root):
    for name in ('a.txt', 'b.bin', 'sub/a.txt', 'sub/deep/c.txt', 'sub-2/d.txt', 'other/e.txt'):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())


def names(root, paths):
    return sorted(str(path.relative_to(root)) for path in paths)


@pytest.mark.parametrize(
    'pattern', ['x[!a]y', 'x[+-0]y', '[z-a]*', '[a--b]*', '[]a]*', '[!]a]*', '[[]', '[]', '[^a]*', r'[\d]*', '[!!]*']
)
def test_classes_of_characters_match_as_in_pathlib(tmp_path, pattern):
    (tmp_path / 'x').mkdir()
    for name in ('x/y', 'xby', '^a', 'a-b', ']a', '[', 'd', '!c'):
        (tmp_path / name).touch()
    for prefix in ('', '**/'):
        expected = sorted(str(path) for path in tmp_path.glob(prefix + pattern))
        assert sorted(map(str, granular.Path(tmp_path).glob(prefix + pattern))) == expected


def test_iterdir_glob_and_walk_list_a_tree(root):
    tree(root)
    assert names(root, root.iterdir()) == ['a.txt', 'b.bin', 'other', 'sub', 'sub-2']
    assert names(root, root.glob('*.txt')) == ['a.txt']
    assert names(root, root.glob('*/a.txt')) == ['sub/a.txt']
    assert names(root, root.glob('s*/*')) == ['sub-2/d.txt', 'sub/a.txt', 'sub/deep']
    assert names(root, root.glob('sub/deep/c.txt')) == ['sub/deep/c.txt']
    assert names(root, root.glob('[ab].???')) == ['a.txt', 'b.bin']
    assert names(root, root.rglob('[!a].txt')) == ['other/e.txt', 'sub-2/d.txt', 'sub/deep/c.txt']
    assert names(root, root.rglob('deep')) == ['sub/deep']
    assert names(root, root.glob('sub/**/*.txt')) == ['sub/a.txt', 'sub/deep/c.txt']
    assert names(root, root.glob('nothing/*')) == []
    walked = {str(path.relative_to(root)): (sorted(f), sorted(n)) for path, f, n in root.walk()}
    assert walked['.'] == (['other', 'sub', 'sub-2'], ['a.txt', 'b.bin'])
    assert walked['sub'] == (['deep'], ['a.txt'])
    assert walked['sub/deep'] == ([], ['c.txt'])
    with pytest.raises(NotFoundError):
        list((root / 'nothing').iterdir())


@pytest.mark.parametrize('server', ['moto', 'fakegcs'])
def test_empty_names_in_a_bucket_are_listed(server, request):
    bucket = request.getfixturevalue(server).new_bucket()
    for name in ('a//b', 'a/b', 'a///b'):
        (bucket / name).write_bytes(b'')
    walked = [str(path / file) for path, _, files in bucket.walk() for file in files]
    assert sorted(walked) == [f'{bucket}/{name}' for name in ('a///b', 'a//b', 'a/b')]
    assert sorted(str(path) for path in bucket.glob('**/b') if path.is_file()) == sorted(walked)
    granular.Path.of(bucket.store, '/x').write_bytes(b'')
    with pytest.raises(UnsupportedError, match='names that begin with a slash'):
        list(bucket.walk())


# --- what only a disk has


def test_links_that_lead_in_a_circle_are_not_followed(tmp_path):
    (tmp_path / 'a' / 'b').mkdir(parents=True)
    (tmp_path / 'a' / 'b' / 'file').write_bytes(b'x')
    for name, target in (('up', '..'), ('self', '.'), ('root', '/'), ('loop', 'loop')):
        (tmp_path / 'a' / 'b' / name).symlink_to(target)
    (tmp_path / 'c').mkdir()
    (tmp_path / 'c' / 'link').symlink_to('../a')
    root = granular.Path(tmp_path)
    inside = ['b', 'b/file', 'b/loop', 'b/root', 'b/self', 'b/up']
    listed = [f'{folder}/{name}' for folder in ('a', 'c/link') for name in inside]
    assert names(root, root.rglob('*')) == sorted(['a', 'c', 'c/link', *listed])
    assert sum(len(files) for _, _, files in root.walk()) == 10
    assert not (root / 'a' / 'b' / 'loop').exists()
    with pytest.raises(NotFoundError, match='links lead in a circle'):
        (root / 'a' / 'b' / 'loop').read_bytes()
    assert granular.clean(root, older=0) == []


def test_pipes_and_devices_are_refused_at_once(tmp_path):
    folder = tmp_path / 'folder'
    folder.mkdir()
    os.mkfifo(folder / 'spec.json')
    (folder / 'zero').symlink_to('/dev/zero')
    for call in (
        lambda: granular.open(folder),
        lambda: granular.Path(folder / 'spec.json').read_bytes(),
        lambda: granular.Path(folder / 'zero').read_range(0, 5),
        lambda: granular.copy_to_local(folder, tmp_path / 'copy'),
    ):
        with pytest.raises(StoreError, match='expected a file, got a pipe or a device'):
            call()


def test_longest_names_are_written(tmp_path):
    for name in ('n' * 255, 'ü' * 127):
        path = granular.Path(tmp_path / name)
        path.write_bytes(name.encode())
        assert path.read_bytes() == name.encode()
    assert len(os.listdir(tmp_path)) == 2


def test_rmtree_removes_only_its_folder(root):
    tree(root)
    (root / 'sub').rmtree()
    # SeaweedFS shows a folder that has become empty for a while.
    left = ['a.txt', 'b.bin', 'other/e.txt', 'sub-2/d.txt']
    assert names(root, (path for path in root.rglob('*') if path.is_file())) == left
    with pytest.raises(NotFoundError):
        (root / 'never').rmtree()
    with pytest.raises(UnsupportedError, match='root'):
        granular.Path.of(root.store, '').rmtree()


def test_mkdir_follows_pathlib(root):
    tree(root)
    with pytest.raises(AlreadyExistsError):
        (root / 'sub').mkdir()
    (root / 'sub').mkdir(exist_ok=True)
    with pytest.raises(StoreError, match='folder'):
        (root / 'sub').unlink()


@pytest.mark.parametrize('store', ['local', 'memory', 'a path of another library'])
def test_mkdir_over_a_file_is_refused(store, tmp_path):
    root = granular.Path(f'memory://{tmp_path.name}-{time.time_ns()}' if store == 'memory' else tmp_path)
    root.mkdir(exist_ok=True)
    path = root / 'file'
    path.write_bytes(b'content')
    if store == 'a path of another library':
        path = granular.Path(Foreign(path))
    for parents in (False, True):
        with pytest.raises(AlreadyExistsError, match='exists already'):
            path.mkdir(parents=parents, exist_ok=True)
    assert path.read_bytes() == b'content'


def test_copy_copies_files_and_folders(root, tmp_path_factory):
    tree(root)
    assert (root / 'a.txt').copy(root / 'copy.txt') == root / 'copy.txt'
    assert (root / 'copy.txt').read_bytes() == b'a.txt'
    seen = []
    local = granular.Path(tmp_path_factory.mktemp('copy') / 'tree')
    root.copy(local, progress=seen.append)
    assert names(local, local.rglob('*.txt')) == names(root, root.rglob('*.txt'))
    assert sum(seen) == sum(path.stat().size for path in local.rglob('*') if path.is_file())
    back = root.parent / (root.name + '-back')
    local.copy(back)
    assert names(back, back.rglob('*')) == names(root, root.rglob('*'))
    with pytest.raises(InvalidArgumentError, match='itself'):
        root.copy(root / 'inside')


def test_bucket_is_a_folder(bucket):
    root = granular.Path.of(bucket.store, '')
    assert root.is_dir()
    with pytest.raises(AlreadyExistsError):
        root.mkdir()
    root.mkdir(exist_ok=True)


def test_missing_bucket_is_not_found(bucket):
    options = bucket.store.options
    missing = granular.Path(f'{bucket.store.root}-not', **options)
    for ask in (missing.stat, (missing / 'x').read_bytes, lambda: list(missing.iterdir())):
        with pytest.raises(NotFoundError, match='not'):
            ask()


def test_write_to_a_missing_bucket_is_not_found(moto, fakegcs):
    # SeaweedFS makes the bucket.
    for server in (moto, fakegcs):
        missing = granular.Path(f'{server.place().store.root}-not', **server.options)
        with pytest.raises(NotFoundError, match='not'):
            (missing / 'x').write_bytes(b'')


@pytest.mark.parametrize('key', ['a b', 'a+b', 'a%20b', 'ä/ö', 'a#b?c=d&e', "it's", 'a//b', '(x)~!@$*'])
def test_odd_keys_are_written_read_and_listed(bucket, key):
    path = bucket / key
    path.write_bytes(key.encode())
    assert path.read_bytes() == key.encode()
    assert path.stat().size == len(key.encode())


def test_listing_is_lazy(moto, monkeypatch):
    root = moto.place()
    for i in range(5):
        (root / f'{i}').write_bytes(b'')
    pages, store = [], type(root.aio.store)
    request = store.page

    async def noting(self, listing, limit=0):
        page = await request(self, listing, 2)
        pages.append(len(page.items))
        return page

    monkeypatch.setattr(store, 'page', noting)
    names = root.iterdir()
    assert next(names).name == '0'
    assert pages == [2]
    assert [path.name for path in names] == ['1', '2', '3', '4']
    assert pages == [2, 2, 1]


def test_wrong_credentials_are_denied(seaweed):
    remote = seaweed.place()
    remote.write_bytes(b'mine')
    wrong = granular.Path(str(remote), **{**seaweed.options, 'secret': 'not-the-secret'})
    for ask in (wrong.read_bytes, wrong.stat, lambda: wrong.write_bytes(b'x')):
        with pytest.raises(PermissionError) as caught:
            ask()
        assert isinstance(caught.value, AccessDeniedError)
        assert 'credentials' in str(caught.value)
        assert 'not-the-secret' not in str(caught.value)
    assert remote.read_bytes() == b'mine'


def test_missing_credentials_are_denied(seaweed, monkeypatch, tmp_path):
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(tmp_path / 'none'))
    monkeypatch.setenv('AWS_CONFIG_FILE', str(tmp_path / 'none'))
    options = {'endpoint_url': seaweed.endpoint}
    with pytest.raises(AccessDeniedError, match='no AWS credentials'):
        granular.Path('s3://bucket/x', **options).read_bytes()


def test_environment_supplies_missing_options(seaweed, fakegcs, monkeypatch):
    remote = seaweed.place()
    remote.write_bytes(b'mine')
    monkeypatch.setenv('AWS_ENDPOINT_URL', seaweed.endpoint)
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', seaweed.options['key'])
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', seaweed.options['secret'])
    monkeypatch.setenv('AWS_REGION', 'us-east-1')
    assert granular.Path(str(remote)).read_bytes() == b'mine'
    remote = fakegcs.place()
    remote.write_bytes(b'yours')
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', fakegcs.endpoint.removeprefix('http://'))
    assert granular.Path(str(remote)).read_bytes() == b'yours'


def test_read_of_a_pinned_version_fails_after_replacement(bucket):
    path = bucket / 'x'
    path.write_bytes(b'one')
    version = path.stat().version
    assert path.read_ranges([0], [3], version=version) == [b'one']
    path.write_bytes(b'two')
    with pytest.raises(ObjectChangedError, match='replaced'):
        path.read_ranges([0], [3], version=version)


# --- HTTP


def test_http_server_is_read_and_listed(http):
    folder = granular.Path(http.folder)
    tree(folder)
    (folder / 'range.bin').write_bytes(bytes(range(200)))
    root = granular.Path(http.endpoint)
    assert (root / 'range.bin').read_range(5, 9) == bytes([5, 6, 7, 8])
    assert (root / 'range.bin').stat().size == 200
    assert names(root, root.iterdir()) == ['a.txt', 'b.bin', 'other', 'range.bin', 'sub', 'sub-2']
    assert names(root, root.rglob('*.txt')) == names(folder, folder.rglob('*.txt'))
    assert (root / 'sub').is_dir()
    assert not (root / 'nothing').exists()
    with pytest.raises(NotFoundError):
        (root / 'nothing').read_bytes()
    for refused in (lambda: (root / 'x').write_bytes(b''), lambda: (root / 'a.txt').unlink(), (root / 'y').mkdir):  # noqa: PLW0108
        with pytest.raises(UnsupportedError, match='this store does not support'):
            refused()


def test_close_ranges_share_a_request(http):
    (http.folder / 'x').write_bytes(bytes(1000) * 1000)
    config = granular.IOConfig(max_gap=100, max_request=400_000)
    path = granular.Path(f'{http.endpoint}/x', config=config)
    path.read_ranges([0, 200, 5000, 100_000], [150, 300, 5010, 600_000])
    asked = sorted(r for _, _, r in http.requests)
    assert asked == ['bytes=0-299', 'bytes=100000-349999', 'bytes=350000-599999', 'bytes=5000-5009']


def test_requests_in_flight_are_bounded(tmp_path):
    from tests.support.servers import HTTPServer

    (tmp_path / 'x').write_bytes(bytes(1_000_000))
    with HTTPServer(tmp_path, delay=0.01) as server:
        path = granular.Path(f'{server.endpoint}/x', config=granular.IOConfig(concurrency=5, max_gap=0, hedge=0))
        starts = list(range(0, 1_000_000, 10_000))
        path.read_ranges(starts, [start + 10 for start in starts])
        assert server.peak == 5
        assert len(server.requests) == 100


# --- asynchronous files


async def test_async_files_read_and_write(root):
    path = aio.Path(root)
    await path.mkdir(parents=True, exist_ok=True)
    async with await (path / 'x').open('wb') as file:
        await file.write(b'hello ')
        await file.write(b'world')
        with pytest.raises(UnsupportedError, match='writing only'):
            await file.read()
    async with (path / 'x').open() as file:
        assert await file.read(5) == b'hello'
        assert file.seek(-5, 2) == 6
        for whence in (-1, 3):
            with pytest.raises(InvalidArgumentError, match=f'whence: expected 0, 1 or 2, got {whence}'):
                file.seek(0, whence)
        assert await file.read() == b'world'
        assert await file.read() == b''
    with pytest.raises(ClosedError):
        await file.read()
    assert [entry.name async for entry in path.iterdir()] == ['x']


@pytest.mark.parametrize('dtype', [np.uint8, np.int8, np.uint16])
async def test_positions_of_few_bits_are_read_from(dtype, tmp_path):
    path, data, at = aio.Path(tmp_path / 'x'), np.random.default_rng(0).bytes(70_000), np.iinfo(dtype).max
    await path.write_bytes(data)
    assert await path.read_range(dtype(at)) == data[at:]
    assert await path.read_range(dtype(at), 70_000) == data[at:]
    async with await path.open('rb') as file:
        assert file.seek(dtype(at)) == at
        assert await file.read(1000) == data[at : at + 1000]
        assert file.seek(60_000) == 60_000
        assert await file.read(dtype(at)) == data[60_000 : 60_000 + at]
    for wrong in (1.5, 'a', -1, True):
        with pytest.raises(InvalidArgumentError, match=f'start: expected an integer >= 0, got {wrong!r}'):
            await path.read_range(wrong)


async def test_concurrent_writes_to_a_file_are_serialized(root):
    path = aio.Path(root)
    await path.mkdir(parents=True, exist_ok=True)
    parts = [os.urandom(size) for size in (3 << 20, 100, 17 << 20, 9 << 20)]
    file = await (path / 'x').open('wb')
    writes = [asyncio.ensure_future(file.write(part)) for part in parts]
    await asyncio.sleep(0)
    await file.aclose()
    assert await asyncio.gather(*writes) == [len(part) for part in parts]
    assert await (path / 'x').read_bytes() == b''.join(parts)


class AppearingFile(AbstractBufferedFile):
    """A file that appears when it is closed, as in object stores."""

    def _upload_chunk(self, final=False):
        if final:
            self.buffer.seek(0)
            MemoryFile(self.fs, self.path, self.buffer.read()).commit()
        return not final


class BufferingFileSystem(MemoryFileSystem):
    """A file system in memory whose files appear when they are closed."""

    protocol = 'buffering'
    store, pseudo_dirs = {}, ['']

    def _open(self, path, mode='rb', **options):
        return AppearingFile(self, path, mode) if mode == 'wb' else super()._open(path, mode, **options)


def test_failed_fsspec_write_is_not_uploaded():
    fsspec.register_implementation('buffering', BufferingFileSystem, clobber=True)
    remote = granular.Path('buffering://given-up')
    (remote / 'x').write_bytes(b'before')
    with pytest.raises(RuntimeError, match='on purpose'), (remote / 'x').open('wb') as file:
        file.write(bytes(2 << 20))
        raise RuntimeError('on purpose')
    gc.collect()
    assert (remote / 'x').read_bytes() == b'before'


class RefusingFile(AppearingFile):
    """A file whose upload fails when it is closed."""

    def _upload_chunk(self, final=False):
        if final:
            raise OSError('refused on purpose')
        return super()._upload_chunk(final)


class RefusingFileSystem(BufferingFileSystem):
    protocol = 'refusing'

    def _open(self, path, mode='rb', **options):
        return RefusingFile(self, path, mode) if mode == 'wb' else super()._open(path, mode, **options)


def test_failed_fsspec_upload_keeps_the_file_that_it_was_to_replace():
    fsspec.register_implementation('buffering', BufferingFileSystem, clobber=True)
    fsspec.register_implementation('refusing', RefusingFileSystem, clobber=True)
    (granular.Path('buffering://kept') / 'x').write_bytes(b'before')
    with pytest.raises(StoreError, match='refused on purpose'):
        (granular.Path('refusing://kept') / 'x').write_bytes(b'after')
    assert (granular.Path('buffering://kept') / 'x').read_bytes() == b'before'


# --- path objects of other libraries


def test_path_of_elements_is_accepted(tmp_path):
    import elements

    tree(granular.Path(tmp_path))
    root = granular.Path(elements.Path(tmp_path))
    assert (root / 'a.txt').read_bytes() == b'a.txt'
    assert (root / 'sub' / 'a.txt').read_range(1, 3) == b'ub'
    assert names(root, root.iterdir()) == ['a.txt', 'b.bin', 'other', 'sub', 'sub-2']
    assert (root / 'sub').is_dir()
    assert not (root / 'none').exists()
    (root / 'new').write_bytes(b'written')
    assert (tmp_path / 'new').read_bytes() == b'written'


def test_aborted_upload_leaves_no_parts(moto):
    remote = moto.place()
    with pytest.raises(RuntimeError, match='on purpose'), remote.open('wb') as file:
        file.write(bytes(20 << 20))
        raise RuntimeError('on purpose')

    assert unfinished_uploads(remote) == []
    assert not remote.exists()


async def test_file_aborted_during_a_write_leaves_no_parts(moto):
    path = aio.Path(moto.place())
    for delay in (0, 0.001, 0.002, 0.004):
        file = await path.open('wb')
        write = asyncio.ensure_future(file.write(bytes(20 << 20)))
        await asyncio.sleep(delay)
        await file.abort()
        assert await asyncio.gather(write, return_exceptions=True)
        assert [upload async for upload in path.store.uploads(path.key)] == []
    assert not await path.exists()


class Foreign:
    """A path object that is not an ``os.PathLike``, with the methods that granular needs."""

    def __init__(self, path):
        self._path = pathlib.Path(path)
        self.name = self._path.name

    @property
    def parent(self):
        return Foreign(self._path.parent)

    def __truediv__(self, other):
        return Foreign(self._path / other)

    def __str__(self):
        return f'foreign:{self._path}'

    def exists(self):
        return self._path.exists()

    def open(self, mode):
        return self._path.open(mode)

    def glob(self, pattern):
        return (Foreign(path) for path in self._path.glob(pattern))

    def mkdir(self):
        self._path.mkdir()

    def unlink(self):
        self._path.unlink()


def test_foreign_path_is_accepted(tmp_path):
    tree(granular.Path(tmp_path))
    root = granular.Path(Foreign(tmp_path))
    assert str(root) == f'foreign:{tmp_path}'
    assert (root / 'a.txt').read_bytes() == b'a.txt'
    assert (root / 'sub' / 'a.txt').read_range(1, 3) == b'ub'
    assert (root / 'a.txt').stat().size == 5
    assert (root / 'sub').is_dir()
    assert not (root / 'none').exists()
    assert names(root, root.glob('sub/*')) == ['sub/a.txt', 'sub/deep']
    assert (root / 'a.txt').with_suffix('.bin').name == 'a.bin'
    with pytest.raises(NotFoundError):
        (root / 'none').read_bytes()
    with pytest.raises(OutOfRangeError):
        (root / 'a.txt').read_range(3, 9)
    (root / 'new').write_bytes(b'written')
    assert (tmp_path / 'new').read_bytes() == b'written'
    (root / 'new').unlink()
    assert not (tmp_path / 'new').exists()


def test_foreign_file_that_cannot_be_opened_is_no_folder(tmp_path):
    class Guarded(Foreign):
        def __truediv__(self, other):
            return Guarded(self._path / other)

        parent = property(lambda self: Guarded(self._path.parent))

        def is_dir(self):
            return self._path.is_dir()

        def open(self, mode):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / 'x').write_bytes(b'x')
    assert granular.Path(Guarded(tmp_path)).is_dir()
    with pytest.raises(AccessDeniedError, match='access denied'):
        granular.Path(Guarded(tmp_path / 'x')).stat()


def test_dataset_at_a_foreign_path(tmp_path):
    remote = Foreign(tmp_path / 'ds')
    with granular.ShardedDatasetWriter(remote, {'a': 'int', 'b': 'utf8[]'}, granular.encoders, shardlen=4) as writer:
        for i in range(10):
            writer.append({'a': i, 'b': ['x'] * i})
    with granular.ShardedDatasetReader(remote, granular.decoders) as reader:
        assert [point['a'] for point in reader.fetch([9, 0, 4])] == [9, 0, 4]
        assert len(reader[7]['b']) == 7
    with granular.BagReader(Foreign(tmp_path / 'ds' / '000001' / 'a.bag')) as bag:
        assert [granular.decoders['int'](record) for record in bag] == [4, 5, 6, 7]


# --- names of pathlib


ABSENT = {
    'anchor', 'chmod', 'cwd', 'drive', 'expanduser', 'from_uri', 'full_match', 'group', 'hardlink_to', 'home',
    'info', 'is_block_device', 'is_char_device', 'is_fifo', 'is_junction', 'is_mount', 'is_reserved',
    'is_socket', 'is_symlink', 'lchmod', 'link_to', 'lstat', 'owner', 'parser', 'readlink', 'resolve', 'rmdir',
    'root', 'samefile', 'symlink_to', 'with_segments', 'copy_into', 'move', 'move_into',
}  # fmt: skip
"""Names of pathlib, in the versions of Python that are supported, which object stores have nothing for."""


def test_names_of_pathlib_exist_or_are_known_to_be_absent():
    names = {name for name in dir(pathlib.PosixPath) if not name.startswith('_')}
    for kind in (granular.Path, granular.aio.Path):
        assert names - set(dir(kind)) <= ABSENT
        assert not ABSENT & set(dir(kind))


@pytest.mark.parametrize('name', ['a', 'a.b', 'a.tar.gz', '.a', '.a.b', 'a..b', 'a b.c'])
@pytest.mark.parametrize('root', ['/tmp', 's3://bucket', 'http://host/x', 'relative'])
def test_names_are_those_of_pathlib(root, name):
    ours, theirs = granular.Path(root) / name, pathlib.PurePosixPath('/tmp') / name
    assert (ours.suffixes, ours.suffix, ours.stem) == (theirs.suffixes, theirs.suffix, theirs.stem)
    assert ours.with_stem('z').name == theirs.with_stem('z').name
    assert ours.joinpath('x', 'y/z') == ours / 'x' / 'y/z'
    assert ours.joinpath() == ours
    assert root / granular.Path(name) == ours and type(root / granular.aio.Path(name)) is granular.aio.Path
    assert name / granular.Path('/tmp') == granular.Path('/tmp')
    assert ours.is_absolute() is (root != 'relative')
    assert ours.absolute().is_absolute()
    assert str(granular.Path('relative').absolute()) == str(pathlib.Path('relative').absolute())


def test_touch_creates_an_empty_file(bucket, tmp_path):
    for root in (bucket, granular.Path(tmp_path)):
        path = root / 'new'
        path.touch()
        assert path.read_bytes() == b''
        path.write_bytes(b'content')
        path.touch()
        assert path.read_bytes() == b'content'
        with pytest.raises(AlreadyExistsError):
            path.touch(exist_ok=False)
    os.utime(tmp_path / 'new', (1, 1))
    granular.Path(tmp_path / 'new').touch()
    assert (tmp_path / 'new').stat().st_mtime > 1


async def test_files_and_folders_of_a_disk_are_renamed(tmp_path):
    (tmp_path / 'in').mkdir()
    for name in ('a', 'b', 'in/c'):
        (tmp_path / name).write_text(name)
    root = granular.Path(tmp_path)
    open_file = (root / 'b').open()
    assert (root / 'a').rename(root / 'b') == root / 'b'
    assert (root / 'b').read_text() == 'a'
    assert open_file.read() == b'b'
    open_file.close()
    assert (root / 'in').replace(f'{tmp_path}/out') == root / 'out'
    assert (root / 'out/c').read_text() == 'in/c'
    assert await granular.aio.Path(tmp_path / 'out').rename(tmp_path / 'again') == granular.aio.Path(tmp_path / 'again')
    with pytest.raises(NotFoundError):
        (root / 'none').rename(root / 'x')


def test_rename_in_a_bucket_is_refused_with_the_remedy(bucket, tmp_path):
    (bucket / 'a').write_bytes(b'a')
    (tmp_path / 'b').write_bytes(b'b')
    local = granular.Path(tmp_path / 'b')
    for source, target in ((bucket / 'a', bucket / 'z'), (bucket / 'a', tmp_path / 'z'), (local, bucket / 'z')):
        for method in (source.rename, source.replace):
            with pytest.raises(UnsupportedError, match=r'copy it with Path\.copy, and remove it'):
                method(target)
    assert (bucket / 'a').exists()
    assert (tmp_path / 'b').exists()
    with pytest.raises(UnsupportedError):
        granular.Path('http://127.0.0.1:1/x').rename('/tmp/y')


def test_objects_that_are_named_as_folders_are_copied_or_named(fakegcs, moto, tmp_path, caplog):
    for server in (fakegcs, moto):
        folder = server.place()
        (folder / 'in/a').write_bytes(b'a')
        mark = granular.Path.of(folder.store, f'{folder.key}/in/sub/')
        mark.write_bytes(b'bytes')
        granular.Path.of(folder.store, f'{folder.key}/in/empty/').write_bytes(b'')
        (folder / 'in').copy(folder / 'out')
        assert granular.Path.of(folder.store, f'{folder.key}/out/sub/').read_bytes() == b'bytes'
        (folder / 'in').copy(tmp_path / server.scheme)
        assert (tmp_path / server.scheme / 'sub').is_dir()
        assert f'{mark}: not copied: its name is that of a folder, and it holds 5 bytes' in caplog.text
        assert 'empty' not in caplog.text


def test_little_memory_is_enough(fakegcs):
    data = bytes(range(256)) * 40_000
    path = fakegcs.place() / 'x.bag'
    with granular.BagWriter(path) as bag:
        bag.append(data)
        bag.append(b'')
    config = granular.IOConfig(memory=1)
    small = granular.Path(str(path), config=config, **fakegcs.options)
    with granular.BagReader(small, cache_data=True) as reader:
        assert list(reader) == [data, b'']
    assert small.read_bytes() == path.read_bytes()
