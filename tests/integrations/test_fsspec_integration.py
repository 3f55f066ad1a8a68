"""The file systems ``granular+s3://`` and ``granular+gs://`` of fsspec, and what reads through them."""

import importlib
import itertools
import os
import pathlib
import pickle
import subprocess
import sys
import tomllib

import fsspec
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
QUICK = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=3)


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
