"""The file systems ``granular+s3://`` and ``granular+gs://`` of fsspec, and what reads through them."""

import asyncio
import datetime
import importlib
import itertools
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile
import tomllib

import fsspec
import fsspec.asyn
import fsspec.callbacks
import numpy as np
import pytest
from pyarrow import parquet

import granular
import granular.integrations.fsspec
from granular.errors import AccessDeniedError, NotFoundError, ObjectChangedError, StoreError, UnsupportedError
from tests import ROOT
from tests.support.credentials import AmazonKeys
from tests.support.fault_proxy import FaultProxy
from tests.support.faults import DATA, FaultServer

CONTENT = bytes(range(200))
QUICK = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=3, retry_time=0.2)


@pytest.fixture(params=['moto', 'seaweed', 'fakegcs'])
def server(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def folder(server):
    return server.place()


@pytest.fixture
def url(folder):
    return f'granular+{folder}'


@pytest.fixture
def fs(server):
    return fsspec.filesystem(f'granular+{server.scheme}', **server.options)


def reference(server):
    """The usual file system of a server."""
    if server.scheme == 'gs':
        import gcsfs.core

        return gcsfs.core.GCSFileSystem(token='anon', endpoint_url=server.endpoint, skip_instance_cache=True)
    import s3fs

    login = {name: server.options.get(name, 'any') for name in ('key', 'secret')}
    return s3fs.S3FileSystem(endpoint_url=server.endpoint, skip_instance_cache=True, **login)


def test_contents_are_slices_of_a_file(fs, folder, url):
    (folder / 'x').write_bytes(CONTENT)
    for start, end in itertools.product([None, 0, 3, 199, 200, 500, -1, -7, -500], repeat=2):
        assert fs.cat_file(f'{url}/x', start, end) == CONTENT[start:end], (start, end)
    with fs.open(f'{url}/x') as file:
        assert (file.read(3), file.seek(-4, 2), file.read(), file.size) == (CONTENT[:3], 196, CONTENT[-4:], 200)


def test_listings_are_those_of_the_usual_filesystem(server, fs, folder, url):
    for name in ('a', 'in/b', 'in/deep/c'):
        (folder / name).write_bytes(name.encode())
    usual, path = reference(server), url.partition('://')[2]
    fields = ('name', 'size', 'type')
    for call in (
        lambda fs: sorted([info[name] for name in fields] for info in fs.ls(path, detail=True)),
        lambda fs: fs.ls(f'{path}/a', detail=False),
        lambda fs: fs.find(path),
        lambda fs: fs.find(path, maxdepth=2),
        lambda fs: fs.glob(f'{path}/**/c'),
        lambda fs: {name: fs.info(f'{path}/a')[name] for name in fields},
        lambda fs: [(fs.exists(name), fs.isfile(name), fs.isdir(name)) for name in (path, f'{path}/a', f'{path}/no')],
    ):
        assert call(fs) == call(usual)
    for call in (fs.ls, fs.info, fs.cat_file, fs.open):
        with pytest.raises(NotFoundError):
            call(f'{path}/no')


def test_ranges_of_many_files_are_one_plan():
    with FaultServer() as server:
        fs = fsspec.filesystem('granular+s3', endpoint_url=server.endpoint, anon=True)
        paths = ['bucket/x', 'bucket/y', 'bucket/x', 'bucket/x']
        assert fs.cat_ranges(paths, [0, 5, 10, 4], [4, 9, 20, 10]) == [DATA[:4], DATA[5:9], DATA[10:20], DATA[4:10]]
        assert sorted(server.ranges) == ['bytes=0-19', 'bytes=5-8']


def test_a_large_range_is_several_requests():
    with FaultServer() as server:
        fs = fsspec.filesystem(
            'granular+s3', endpoint_url=server.endpoint, anon=True, config=granular.IOConfig(max_request=8)
        )
        assert fs.cat_file('bucket/x', 0, 24) == DATA[:24]
        assert sorted(server.ranges) == ['bytes=0-7', 'bytes=16-23', 'bytes=8-15']


def test_each_range_has_its_own_result(fs, folder, url):
    (folder / 'x').write_bytes(CONTENT)
    paths = [f'{url}/x', f'{url}/no', f'{url}/x', f'{url}/x']
    first, missing, cut, last = fs.cat_ranges(paths, [0, 0, 190, -3], [5, 5, 300, None])
    assert (first, cut, last) == (CONTENT[:5], CONTENT[190:], CONTENT[-3:])
    assert isinstance(missing, NotFoundError)
    with pytest.raises(NotFoundError):
        fs.cat_ranges(paths, [0, 0, 190, -3], [5, 5, 300, None], on_error='raise')


def test_a_range_that_is_refused_leaves_the_others(fakegcs):
    folder = fakegcs.place()
    paths = [f'granular+{folder}/{name}' for name in ('x', 'refused')]
    for name in ('x', 'refused'):
        (folder / name).write_bytes(CONTENT)
    with FaultProxy(fakegcs.endpoint, lambda call: 'status 403' * call.path.endswith('refused')) as proxy:
        fs = fsspec.filesystem('granular+gs', **{**fakegcs.options, 'endpoint_url': proxy.endpoint})
        first, refused = fs.cat_ranges(paths, [0, 0], [5, 5])
        assert first == CONTENT[:5]
        assert isinstance(refused, AccessDeniedError)
        with pytest.raises(AccessDeniedError):
            fs.cat_ranges(paths, [0, 0], [5, 5], on_error='raise')


def test_a_file_that_is_replaced_while_it_is_open_is_an_error(fs, folder, url):
    (folder / 'x').write_bytes(CONTENT)
    with fs.open(f'{url}/x', block_size=10, cache_type='none') as file:
        assert file.read(5) == CONTENT[:5]
        (folder / 'x').write_bytes(CONTENT[::-1])
        with pytest.raises(ObjectChangedError):
            file.read(5)


def test_folders_are_downloaded(fs, folder, url, tmp_path):
    for name in ('a', 'in/b'):
        (folder / name).write_bytes(CONTENT)
    fs.get(url, str(tmp_path / 'got'), recursive=True)
    assert sorted(str(file.relative_to(tmp_path)) for file in tmp_path.rglob('*') if file.is_file()) == [
        'got/a',
        'got/in/b',
    ]
    with fsspec.open(f'simplecache::{url}/a', **{fs.protocol: fs.storage_options}) as file:
        assert file.read() == CONTENT


def test_what_is_not_supported_is_an_error(fs, folder, url):
    (folder / 'x').write_bytes(CONTENT)
    for call, kind, message in (
        (lambda: fs.open(f'{url}/y', 'wb'), UnsupportedError, "expected mode 'rb', got 'wb'"),
        (lambda: fs.open(url), StoreError, 'is a folder, not a file'),
        (lambda: fs.ls(''), UnsupportedError, 'buckets are not listed'),
        (lambda: fs.pipe_file(f'{url}/y', b''), UnsupportedError, 'only reads: write through granular.Path'),
        (lambda: fs.put_file(__file__, f'{url}/y'), UnsupportedError, 'only reads'),
        (lambda: fs.cp_file(f'{url}/x', f'{url}/y'), UnsupportedError, 'only reads'),
        (lambda: fs.rm_file(f'{url}/x'), UnsupportedError, 'only reads'),
        (lambda: fs.rm(f'{url}/x'), UnsupportedError, 'only reads'),
        (lambda: fs.mv(f'{url}/x', f'{url}/y'), UnsupportedError, 'only reads'),
    ):
        with pytest.raises(kind, match=message):
            call()
    assert (folder / 'x').read_bytes() == CONTENT


# What becomes of each method of the base class: implemented here, inherited and tested below, or refused.
IMPLEMENTED = {
    'cat_file', 'cat_ranges', 'find', 'get_file', 'info', 'isdir', 'isfile', 'ls', 'modified', 'open', 'to_dict',
    'walk',
}  # fmt: skip
REFUSED = {
    'copy', 'cp', 'cp_file', 'created', 'delete', 'makedir', 'makedirs', 'mkdir', 'mkdirs', 'move', 'mv', 'open_async',
    'pipe', 'pipe_file', 'put', 'put_file', 'rename', 'rm', 'rm_file', 'rmdir', 'sign', 'touch', 'upload',
    'write_bytes', 'write_text',
}  # fmt: skip
INHERITED = {
    'cat': lambda fs, path: fs.cat([f'{path}/a', f'{path}/in/b']) == {f'{path}/a': b'a', f'{path}/in/b': b'in/b'},
    'checksum': lambda fs, path: fs.checksum(f'{path}/a') != fs.checksum(f'{path}/in/b'),
    'clear_instance_cache': lambda fs, path: fs.clear_instance_cache() is None,
    'current': lambda fs, path: type(type(fs).current()) is type(fs),
    'disk_usage': lambda fs, path: fs.disk_usage(path) == 14,
    'du': lambda fs, path: fs.du(path) == 14 and fs.du(path, total=False)[f'{path}/a'] == 1,
    'exists': lambda fs, path: fs.exists(path) and not fs.exists(f'{path}/no'),
    'expand_path': lambda fs, path: fs.expand_path(f'{path}/*') == [f'{path}/a', f'{path}/in'],
    'from_dict': lambda fs, path: fs.from_dict(fs.to_dict()) == fs,
    'from_json': lambda fs, path: fs.from_json(fs.to_json()).ls(path, detail=False) == fs.ls(path, detail=False),
    'get_mapper': lambda fs, path: dict(fs.get_mapper(path)) == {'a': b'a', 'in/b': b'in/b', 'in/deep/c': b'in/deep/c'},
    'glob': lambda fs, path: fs.glob(f'{path}/in/*') == [f'{path}/in/b', f'{path}/in/deep'],
    'head': lambda fs, path: fs.head(f'{path}/in/b', 2) == b'in',
    'invalidate_cache': lambda fs, path: fs.invalidate_cache(path) is None,
    'lexists': lambda fs, path: fs.lexists(f'{path}/a') and not fs.lexists(f'{path}/no'),
    'listdir': lambda fs, path: sorted(fs.listdir(path, detail=False)) == [f'{path}/a', f'{path}/in'],
    'read_block': lambda fs, path: fs.read_block(f'{path}/in/deep/c', 3, 4) == b'deep',
    'read_bytes': lambda fs, path: fs.read_bytes(f'{path}/a') == b'a',
    'read_text': lambda fs, path: fs.read_text(f'{path}/a') == 'a',
    'size': lambda fs, path: fs.size(f'{path}/in/b') == 4,
    'sizes': lambda fs, path: fs.sizes([f'{path}/in/b', f'{path}/a']) == [4, 1],
    'stat': lambda fs, path: fs.stat(f'{path}/a')['size'] == 1,
    'tail': lambda fs, path: fs.tail(f'{path}/in/b', 2) == b'/b',
    'to_json': lambda fs, path: '"protocol": "granular+gs"' in fs.to_json(),
    'tree': lambda fs, path: 'deep' in fs.tree(path),
    'ukey': lambda fs, path: fs.ukey(f'{path}/a') != fs.ukey(f'{path}/in/b'),
    'unstrip_protocol': lambda fs, path: fs.unstrip_protocol(path) == f'granular+gs://{path}',
}  # fmt: skip


def downloaded(get):
    with tempfile.TemporaryDirectory() as folder:
        get(f'{folder}/x')
        return pathlib.Path(f'{folder}/x').read_bytes()


def transact(fs):
    fs.start_transaction()
    fs.end_transaction()
    return fs.transaction is not None


INHERITED |= {
    'download': lambda fs, path: downloaded(lambda target: fs.download(f'{path}/a', target)) == b'a',
    'get': lambda fs, path: downloaded(lambda target: fs.get(f'{path}/in/b', target)) == b'in/b',
    'start_transaction': lambda fs, path: transact(fs),
    'end_transaction': lambda fs, path: transact(fs),
    'transaction_type': lambda fs, path: fs.transaction is not None,
}


@pytest.fixture
def tree(fakegcs):
    """A file system and the path of a folder in it."""
    folder = fakegcs.place()
    for name in ('a', 'in/b', 'in/deep/c'):
        (folder / name).write_bytes(name.encode())
    return fsspec.filesystem('granular+gs', **fakegcs.options), str(folder).partition('://')[2]


def test_each_method_of_the_base_class_has_a_decision():
    base = fsspec.asyn.AsyncFileSystem
    methods = {name for name in dir(base) if not name.startswith('_') and callable(getattr(base, name))}
    assert methods == IMPLEMENTED | REFUSED | INHERITED.keys()
    assert not IMPLEMENTED & REFUSED
    assert not (IMPLEMENTED | REFUSED) & INHERITED.keys()


@pytest.mark.parametrize('name', INHERITED)
def test_inherited_methods_give_what_the_base_class_says(name, tree):
    assert INHERITED[name](*tree)


@pytest.mark.parametrize('name', sorted(REFUSED))
def test_methods_that_would_change_something_are_refused(name, tree):
    fs, path = tree
    arguments = {
        'copy': (f'{path}/a', f'{path}/z'), 'cp': (f'{path}/a', f'{path}/z'), 'cp_file': (f'{path}/a', f'{path}/z'),
        'move': (f'{path}/a', f'{path}/z'), 'mv': (f'{path}/a', f'{path}/z'), 'rename': (f'{path}/a', f'{path}/z'),
        'pipe': (f'{path}/z', b''), 'pipe_file': (f'{path}/z', b''), 'write_bytes': (f'{path}/z', b''),
        'write_text': (f'{path}/z', ''), 'put': (__file__, f'{path}/z'), 'put_file': (__file__, f'{path}/z'),
        'upload': (__file__, f'{path}/z'),
    }.get(name, (f'{path}/a',))  # fmt: skip
    with pytest.raises(UnsupportedError):
        result = getattr(fs, name)(*arguments)
        if name == 'open_async':
            asyncio.run(result)
    assert sorted(fs.find(path)) == [f'{path}/a', f'{path}/in/b', f'{path}/in/deep/c']
    assert fs.cat_file(f'{path}/a') == b'a'


def test_find_takes_a_prefix(tree):
    fs, path = tree
    assert fs.find(path, prefix='in/d') == [f'{path}/in/deep/c']
    assert fs.find(path, prefix='i') == [f'{path}/in/b', f'{path}/in/deep/c']
    assert fs.find(path, prefix='no') == []
    assert fs.find(path, prefix='in', withdirs=True) == [
        f'{path}/in',
        f'{path}/in/b',
        f'{path}/in/deep',
        f'{path}/in/deep/c',
    ]
    assert fs.find(path, prefix='a', detail=True)[f'{path}/a']['size'] == 1


def test_time_of_the_last_change_is_told(tree):
    fs, path = tree
    modified = fs.modified(f'{path}/a')
    assert modified.tzinfo is datetime.UTC
    assert abs((datetime.datetime.now(datetime.UTC) - modified).total_seconds()) < 3600


def test_download_tells_its_size_and_progress(tree, tmp_path):
    fs, path = tree
    callback = fsspec.callbacks.Callback()
    fs.get_file(f'{path}/in/b', str(tmp_path / 'b'), callback=callback)
    assert (callback.size, callback.value) == (4, 4)
    callback = fsspec.callbacks.Callback()
    fs.get(path, str(tmp_path / 'tree'), recursive=True, callback=callback)
    assert callback.size == callback.value


LOOKING = {
    'find': lambda fs, path: fs.find(path),
    'find with a depth': lambda fs, path: fs.find(path, maxdepth=1),
    'find with folders': lambda fs, path: fs.find(path, withdirs=True),
    'glob': lambda fs, path: fs.glob(f'{path}/*'),
    'glob of any depth': lambda fs, path: fs.glob(f'{path}/**'),
    'glob without wildcards': lambda fs, path: fs.glob(path),
    'walk': lambda fs, path: list(fs.walk(path)),
    'du': lambda fs, path: fs.du(path),
    'ls': lambda fs, path: fs.ls(path),
    'info': lambda fs, path: fs.info(path),
    'exists': lambda fs, path: fs.exists(path),
    'isdir': lambda fs, path: fs.isdir(path),
    'isfile': lambda fs, path: fs.isfile(path),
    'expand_path': lambda fs, path: fs.expand_path(path, recursive=True),
    'cat': lambda fs, path: fs.cat(f'{path}/*'),
    'get': lambda fs, path: fs.get(path, '/dev/null/x', recursive=True),
    'tree': lambda fs, path: fs.tree(path),
}


@pytest.mark.parametrize('protocol', ['granular+s3', 'granular+gs'])
@pytest.mark.parametrize('name', LOOKING)
def test_errors_of_a_listing_reach_the_caller(name, protocol):
    """The base class takes each OSError for a folder or file that does not exist."""

    class Refusing(FaultServer):
        code = 403

        async def serve(self, reader, writer):
            while True:
                await reader.readuntil(b'\r\n\r\n')
                writer.write(b'HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n' % self.code)
                await writer.drain()

    with Refusing() as server:
        fs = fsspec.filesystem(protocol, endpoint_url=server.endpoint, anon=True, config=QUICK)
        for server.code, kind in ((403, AccessDeniedError), (500, StoreError)):
            with pytest.raises(kind):
                LOOKING[name](fs, 'bucket/data')


def test_walk_omits_or_reports_errors_on_request():
    class Refusing(FaultServer):
        async def serve(self, reader, writer):
            while True:
                await reader.readuntil(b'\r\n\r\n')
                writer.write(b'HTTP/1.1 403 X\r\nContent-Length: 0\r\n\r\n')
                await writer.drain()

    with Refusing() as server:
        fs = fsspec.filesystem('granular+s3', endpoint_url=server.endpoint, anon=True, config=QUICK)
        errors = []
        assert list(fs.walk('bucket/data', on_error=errors.append)) == [('bucket/data', [], [])]
        assert isinstance(errors[0], AccessDeniedError)
        with pytest.raises(AccessDeniedError):
            list(fs.walk('bucket/data', on_error='raise'))


def test_missing_folders_are_empty_and_missing_buckets_an_error(tree):
    fs, path = tree
    for name in ('find', 'find with a depth', 'find with folders', 'glob', 'glob of any depth', 'du'):
        assert not LOOKING[name](fs, f'{path}/no'), name
    assert list(fs.walk(f'{path}/no')) == [(f'{path}/no', [], [])]
    assert (fs.exists(f'{path}/no'), fs.isdir(f'{path}/no'), fs.isfile(f'{path}/no')) == (False, False, False)
    for name in ('find', 'glob', 'walk', 'ls'):
        with pytest.raises(NotFoundError, match='no such bucket'):
            LOOKING[name](fs, 'no-such-bucket-here/x')


def test_description_without_passwords_has_no_credentials():
    fs = fsspec.filesystem('granular+s3', endpoint_url='http://127.0.0.1:1', key='planted-key', secret='planted-secret')
    assert 'planted' not in fs.to_json(include_password=False)
    assert fs.from_json(fs.to_json()).storage_options == fs.storage_options


# --- what reads through them


def test_pandas_and_pyarrow_read_tables(server, fs, folder, url, tmp_path):
    import pandas
    import pyarrow.dataset

    frame = pandas.DataFrame({'x': range(1000), 'y': np.arange(1000) / 7})
    frame.to_parquet(tmp_path / 'table.parquet', row_group_size=100)
    granular.Path(tmp_path / 'table.parquet').copy(folder / 'table.parquet')
    read = pandas.read_parquet(f'{url}/table.parquet', storage_options=server.options)
    pandas.testing.assert_frame_equal(read, frame)
    path = url.partition('://')[2]
    assert parquet.read_table(f'{path}/table.parquet', filesystem=fs, columns=['x']).num_rows == 1000
    rows = pyarrow.dataset.dataset(path, filesystem=fs).to_table(filter=pyarrow.dataset.field('x') >= 990)
    assert rows['x'].to_pylist() == list(range(990, 1000))


def test_zarr_and_xarray_read_arrays(server, fs, folder, url, tmp_path):
    import xarray
    import zarr

    data = xarray.Dataset({'v': (('t', 'x'), np.arange(200.0).reshape(20, 10))})
    data.to_zarr(tmp_path / 'z', consolidated=False, encoding={'v': {'chunks': (5, 5)}})
    for file in (tmp_path / 'z').rglob('*'):
        if file.is_file():
            (folder / str(file.relative_to(tmp_path))).write_bytes(file.read_bytes())
    array = zarr.open_group(f'{url}/z', mode='r', storage_options=server.options)['v']
    assert array[3:5, 7].tolist() == [37.0, 47.0]
    with xarray.open_zarr(fs.get_mapper(f'{url}/z'), consolidated=False) as opened:
        xarray.testing.assert_equal(opened, data)


async def test_calls_run_under_the_loop_of_the_caller(server, folder, url):
    await granular.aio.Path(folder / 'x').write_bytes(CONTENT)
    fs = fsspec.filesystem(f'granular+{server.scheme}', asynchronous=True, **server.options)
    assert await fs._cat_file(f'{url}/x', 3, 5) == CONTENT[3:5]
    assert [info['size'] for info in await fs._ls(url)] == [200]
    with pytest.raises(UnsupportedError, match='without asynchronous=True'):
        fs.open(f'{url}/x')


# --- credentials, pickles, processes


def test_renewed_credentials_are_used(tmp_path, monkeypatch):
    import s3fs

    with FaultServer() as server:
        keys = AmazonKeys(tmp_path / 'credentials')
        server.renew = keys.renew
        monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(keys.file))
        given = s3fs.S3FileSystem(endpoint_url=server.endpoint, skip_instance_cache=True)
        for options in ({'endpoint_url': server.endpoint}, {'fs': given}):
            fs = fsspec.filesystem('granular+s3', config=QUICK, skip_instance_cache=True, **options)
            assert fs.cat_file('bucket/x', 0, 4) == DATA[:4]
            server.script.append('expire')
            assert fs.cat_file('bucket/x', 4, 8) == DATA[4:8]


def test_pickles_hold_no_credentials(tmp_path):
    import s3fs

    secrets = {'key': 'PLANTED-KEY', 'secret': 'PLANTED-SECRET', 'token': 'PLANTED-TOKEN'}
    for options in ({**secrets, 'region': 'eu-west-3'}, {'fs': s3fs.S3FileSystem(**secrets)}):
        fs = fsspec.filesystem('granular+s3', skip_instance_cache=True, **options)
        pickled = pickle.dumps(fs)
        assert b'PLANTED' not in pickled
        assert pickle.loads(pickled).storage_options.keys() == options.keys() - secrets.keys()


PROGRAM = """
import multiprocessing, os, pickle, sys, warnings
import fsspec
import granular.integrations.fsspec
from tests import ROOT

fs = fsspec.filesystem('granular+s3', endpoint_url=sys.argv[1], anon=True)


def read(fs=fs):
    return fs.cat_file('bucket/x', 0, 4)


if __name__ == '__main__':
    print(read(), flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # of a process with threads
        child = os.fork()
    if not child:
        print(read(), fs.open('bucket/x').read(4), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        print(pool.apply(read, [fs]), flush=True)
        pool.close()
        pool.join()
"""


def test_processes_read_and_end_without_a_word(tmp_path):
    program = tmp_path / 'program.py'
    program.write_text(PROGRAM)
    with FaultServer() as server:
        command = [sys.executable, '-W', 'error', str(program), server.endpoint]
        environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines() == [f'{DATA[:4]}', f'{DATA[:4]} {DATA[:4]}', f'{DATA[:4]}']


def test_fsspec_finds_them_by_their_entry_points():
    project = tomllib.loads(pathlib.Path(ROOT, 'pyproject.toml').read_text())['project']
    found = {}
    for protocol, place in project['entry-points']['fsspec.specs'].items():
        module, _, name = place.partition(':')
        found[protocol] = getattr(importlib.import_module(module), name)
    classes = granular.integrations.fsspec.S3FileSystem, granular.integrations.fsspec.GSFileSystem
    assert found == {cls.protocol: cls for cls in classes}
    assert all(fsspec.get_filesystem_class(protocol) is cls for protocol, cls in found.items())
