"""File systems of fsspec that are given: ``Path(url, fs=filesystem)`` and ``open(url, fs=filesystem)``."""

import datetime
import os
import pickle
import re
import subprocess
import sys
import uuid

import fsspec
import pytest
from fsspec.asyn import get_loop
from fsspec.implementations.cached import SimpleCacheFileSystem, WholeFileCacheFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.http import HTTPFileSystem
from fsspec.implementations.local import LocalFileSystem

import granular
from granular.errors import AccessDeniedError, InvalidArgumentError
from tests import ROOT
from tests.support.credentials import AmazonKeys, google_key
from tests.support.faults import DATA, FaultServer

QUICK = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=3)
KEY = {'key': 'PLANTEDKEY', 'secret': 'planted-secret', 'token': 'planted-token'}
BUCKETS = ('moto', 'seaweed', 'fakegcs', 'azurite')
PLANTED = re.compile(rb'planted', re.IGNORECASE)


@pytest.fixture
def server():
    with FaultServer() as server:
        yield server


# What takes long to import is imported by the tests that use it.


def s3_filesystem(**options):
    import s3fs

    return s3fs.S3FileSystem(**options)


def gcs_filesystem(**options):
    import gcsfs.core

    return gcsfs.core.GCSFileSystem(**options)


def azure_filesystem(**options):
    import adlfs

    return adlfs.AzureBlobFileSystem(**options)


def arrow_filesystem():
    import pyarrow.fs

    return pyarrow.fs.LocalFileSystem()


def filesystem_of(server):
    """A file system of the usual package for a server."""
    options = {'skip_instance_cache': True}
    if server.scheme == 'gs':
        return gcs_filesystem(token='anon', project='test', endpoint_url=server.endpoint, **options)
    if server.scheme == 'az':
        return azure_filesystem(connection_string=server.connection_string, **options)
    login = {name: server.options.get(name, 'any') for name in ('key', 'secret')}
    return s3_filesystem(endpoint_url=server.endpoint, **login, **options)


@pytest.fixture(params=[*BUCKETS, 'memory', 'folder', 'web', 'local'])
def place(request, tmp_path):
    """A file system, the address of a folder in it, the path of the folder for its own methods, and if it can write."""
    name = uuid.uuid4().hex[:12]
    if request.param in BUCKETS:
        server = request.getfixturevalue(request.param)
        folder = server.place()
        return filesystem_of(server), str(folder), str(folder).partition('://')[2], True
    if request.param == 'memory':
        return fsspec.filesystem('memory'), f'memory://{name}', f'/{name}', True
    if request.param == 'local':
        (tmp_path / name).mkdir()
        return LocalFileSystem(), f'file://{tmp_path}/{name}', f'{tmp_path}/{name}', True
    if request.param == 'folder':
        return DirFileSystem(str(tmp_path), fs=LocalFileSystem()), f'dir://{name}', name, True
    web = request.getfixturevalue('http')
    granular.Path(web.folder / 'x').write_bytes(bytes(range(100)))
    return HTTPFileSystem(), web.endpoint, web.endpoint, False


def test_paths_read_and_write_through_every_kind_of_filesystem(place):
    fs, url, own, writable = place
    path = granular.Path(f'{url}/x', fs=fs)
    if writable:
        path.write_bytes(bytes(range(100)))
        assert fs.cat_file(f'{own}/x') == bytes(range(100))
        assert granular.Path(f'{own}/x', fs=fs).read_bytes() == bytes(range(100))  # without a scheme
        assert [child.name for child in granular.Path(url, fs=fs).iterdir()] == ['x']
    assert path.read_ranges([90, 3], [100, 5]) == [bytes(range(90, 100)), b'\x03\x04']
    assert path.stat().size == 100
    assert path == granular.Path(f'{url}/x', fs=fs)
    assert hash(path) == hash(granular.Path(f'{url}/x', fs=fs))
    assert pickle.loads(pickle.dumps(path)).key == path.key


def test_datasets_open_through_every_kind_of_filesystem(place):
    fs, url, own, writable = place
    if not writable:
        return
    with granular.DatasetWriter(granular.Path(f'{url}/train', fs=fs), {'x': 'int'}) as writer:
        for x in range(10):
            writer.append({'x': x})
    for name in (f'{url}/train', f'{own}/train'):
        with granular.open(name, fs=fs) as reader:
            assert reader.fetch([3, 1]) == [{'x': 3}, {'x': 1}]
    fs.pipe_file(f'{own}/0.tfrecord', b'')
    with granular.open([f'{url}/0.tfrecord'], fs=fs) as reader:
        assert len(reader) == 0


@pytest.mark.parametrize('place', BUCKETS, indirect=True)
def test_requests_to_buckets_are_granulars_own(place, monkeypatch):
    fs, url, _, _ = place

    def refused(*args, **kwargs):
        raise AssertionError('a method of the file system was used')

    for name in ('_cat_file', '_info', '_ls', '_pipe_file', '_call_s3', '_call', 'cat_file', 'info', 'ls'):
        if hasattr(fs, name):
            monkeypatch.setattr(fs, name, refused)
    path = granular.Path(f'{url}/x', fs=fs)
    path.write_bytes(b'content')
    assert (path.read_range(1, 3), path.stat().size) == (b'on', 7)


# --- credentials


def keys_of(server):
    """The access keys by which requests were signed, and tokens, in order."""
    found = (re.search(r'Credential=([^/]*)|Bearer (.*)', text) for text in server.authorized)
    return [match and (match[1] or match[2]) for match in found]


def refreshing(server, valid, key=None, secret='planted-secret', token='planted-token'):
    """An s3fs whose session has keys that are valid for some seconds, and the keys that it has got."""
    issued = []

    async def refresh():
        issued.append(key or f'KEY{len(issued) + 1}')
        expiry = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=valid)
        renewed = {'access_key': issued[-1], 'secret_key': secret, 'token': token}
        return {**renewed, 'expiry_time': expiry.isoformat()}

    import aiobotocore.credentials
    import aiobotocore.session

    class Provider:
        METHOD = CANONICAL_NAME = 'planted'

        async def load(self):
            return aiobotocore.credentials.AioRefreshableCredentials.create_from_metadata(
                await refresh(), refresh, 'planted'
            )

    session = aiobotocore.session.AioSession()
    resolver = aiobotocore.credentials.AioCredentialResolver([Provider()])
    session.register_component('credential_provider', resolver)
    return s3_filesystem(session=session, endpoint_url=server.endpoint, skip_instance_cache=True), issued


def test_keys_of_a_session_are_renewed_before_they_expire(server):
    fs, issued = refreshing(server, valid=30)  # botocore renews keys some minutes before
    folder = granular.Path('s3://bucket', fs=fs, config=QUICK)
    for name in ('a', 'b', 'c'):
        assert (folder / name).read_range(1, 5) == DATA[1:5]
    assert keys_of(server) == issued[-3:]
    assert len(set(keys_of(server))) == 3


def test_renewed_keys_of_a_session_are_those_that_a_server_verifies(seaweed):
    folder = seaweed.place()
    login = seaweed.options['key'], seaweed.options['secret'], None
    fs, issued = refreshing(seaweed, 30, *login)
    for name in ('a', 'b'):
        granular.Path(f'{folder}/{name}', fs=fs).write_bytes(DATA)
        assert granular.Path(f'{folder}/{name}', fs=fs).read_range(1, 5) == DATA[1:5]
    assert len(issued) >= 4
    wrong, _ = refreshing(seaweed, 30, login[0], 'another-secret', None)
    with pytest.raises(AccessDeniedError):
        granular.Path(f'{folder}/a', fs=wrong, config=QUICK).read_bytes()


def test_keys_of_a_session_are_kept_while_they_are_valid(server):
    fs, issued = refreshing(server, valid=36_000)
    folder = granular.Path('s3://bucket', fs=fs, config=QUICK)
    for name in ('a', 'b'):
        assert (folder / name).read_range(1, 5) == DATA[1:5]
    assert keys_of(server) == ['KEY1', 'KEY1']
    assert issued == ['KEY1']


def test_refused_keys_of_a_session_are_looked_for_again(server, tmp_path, monkeypatch):
    keys = AmazonKeys(tmp_path / 'credentials')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(keys.file))
    fs = s3_filesystem(endpoint_url=server.endpoint, skip_instance_cache=True)
    path = granular.Path('s3://bucket/x', fs=fs, config=QUICK)
    assert path.read_range(1, 5) == DATA[1:5]
    server.renew = keys.renew
    server.script.append('expire')
    assert path.read_range(1, 5) == DATA[1:5]
    first, refused, second = keys_of(server)
    assert first == refused != second


GIVEN = {
    'key and secret': KEY,
    'username and password': {'username': 'PLANTEDKEY', 'password': 'planted-secret', 'token': 'planted-token'},
    'client_kwargs': {
        'client_kwargs': {
            'aws_access_key_id': 'PLANTEDKEY',
            'aws_secret_access_key': 'planted-secret',
            'aws_session_token': 'planted-token',
        }
    },
}


@pytest.mark.parametrize('options', GIVEN.values(), ids=GIVEN)
def test_given_keys_sign_requests_and_are_not_renewed(server, options):
    fs = s3_filesystem(endpoint_url=server.endpoint, skip_instance_cache=True, **options)
    path = granular.Path('s3://bucket/x', fs=fs, config=QUICK)
    assert path.read_range(1, 5) == DATA[1:5]
    assert keys_of(server) == ['PLANTEDKEY']
    assert server.heads[0]['X-Amz-Security-Token'] == 'planted-token'
    server.script.append('expire')
    with pytest.raises(AccessDeniedError) as caught:
        (path.parent / 'y').read_range(1, 5)
    assert not PLANTED.search(str(caught.value).encode())


@pytest.mark.parametrize('pays', [False, True])
def test_s3fs_without_the_attribute_requester_pays_is_honoured(server, pays):
    fs = s3_filesystem(endpoint_url=server.endpoint, skip_instance_cache=True, requester_pays=pays, **KEY)
    vars(fs).pop('requester_pays', None)  # as in releases before 2026.9
    assert granular.Path('s3://bucket/x', fs=fs, config=QUICK).read_range(1, 5) == DATA[1:5]
    assert ('requester' in server.heads[0].values()) == pays


def test_a_session_without_keys_is_an_error(server):
    fs = s3_filesystem(endpoint_url=server.endpoint, skip_instance_cache=True)
    with pytest.raises(AccessDeniedError, match='no AWS credentials'):
        granular.Path('s3://bucket/x', fs=fs, config=QUICK).read_bytes()


def test_error_of_a_spawned_process_says_that_given_keys_are_not_pickled(server):
    fs = s3_filesystem(endpoint_url=server.endpoint, skip_instance_cache=True, **KEY)
    for given in ({'fs': fs}, {'endpoint_url': server.endpoint, 'key': KEY['key'], 'secret': KEY['secret']}):
        path = pickle.loads(pickle.dumps(granular.Path('s3://bucket/x', config=QUICK, **given)))
        with pytest.raises(AccessDeniedError, match='key=, secret= and fs= are not pickled'):
            path.read_bytes()


def test_an_anonymous_filesystem_sends_no_keys(server):
    fs = s3_filesystem(anon=True, endpoint_url=server.endpoint, skip_instance_cache=True)
    assert granular.Path('s3://bucket/x', fs=fs, config=QUICK).read_range(1, 5) == DATA[1:5]
    assert server.authorized == ['']


def test_tokens_of_gcsfs_are_renewed_and_replaced(server, tmp_path):
    fs = gcs_filesystem(
        token=google_key(tmp_path, server), project='test', endpoint_url=server.endpoint, skip_instance_cache=True
    )
    path = granular.Path('gs://bucket/x', fs=fs, config=QUICK)
    assert path.read_range(1, 5) == DATA[1:5]
    server.script.append('expire')
    assert path.read_range(1, 5) == DATA[1:5]
    assert fs.credentials.credentials.token == 'token-2'  # the file system has the new one as well
    from google.oauth2.credentials import Credentials

    fs.credentials.connect(Credentials('ya29.other'))
    assert (path.parent / 'y').read_range(1, 5) == DATA[1:5]
    assert keys_of(server) == ['token-1', 'token-1', 'token-2', 'ya29.other']


def test_caches_tell_the_accounts_of_a_server_apart(server):
    def fingerprint(**options):
        return granular.Path('s3://bucket/x', **options).store.fingerprint

    def fingerprint_in(**options):
        return fingerprint(fs=s3_filesystem(endpoint_url=server.endpoint, **options))

    given = fingerprint_in(key='a', secret='b')
    sessions = [fingerprint(fs=refreshing(server, 60)[0]) for _ in range(2)]
    assert (
        len({given, fingerprint_in(key='c', secret='b'), fingerprint_in(anon=True), fingerprint_in(), *sessions}) == 6
    )
    assert given == fingerprint(endpoint_url=server.endpoint, key='a', secret='b')
    assert fingerprint_in() == fingerprint(endpoint_url=server.endpoint)


# --- pickles, and children


def holding_secrets(server, tmp_path):
    """File systems that hold secrets, each with an address."""
    from google.oauth2.credentials import Credentials

    web = HTTPFileSystem(headers={'Authorization': 'Bearer planted-token'}, skip_instance_cache=True)
    azure = {'account_name': 'any', 'account_key': 'cGxhbnRlZA==', 'skip_instance_cache': True}
    return {
        's3://bucket/x': s3_filesystem(endpoint_url=server.endpoint, skip_instance_cache=True, **KEY),
        's3://bucket/y': s3_filesystem(client_kwargs=GIVEN['client_kwargs']['client_kwargs']),
        'gs://bucket/x': gcs_filesystem(token=Credentials('planted-token'), skip_instance_cache=True),
        'az://bucket/x': azure_filesystem(**azure),
        'https://host/x': web,
        'dir://x': DirFileSystem('https://host', fs=web, skip_instance_cache=True),
    }


def test_pickles_hold_no_credentials(server, tmp_path):
    for url, fs in holding_secrets(server, tmp_path).items():
        path = granular.Path(url, fs=fs)
        pickled = pickle.dumps(path)
        assert not PLANTED.search(pickled), url
        assert b'cGxhbnRlZA' not in pickled
        assert str(pickle.loads(pickled)) == str(path)


FORKED = """
import os, pickle, sys
import s3fs
from fsspec.implementations.http import HTTPFileSystem
import granular

endpoint, web = sys.argv[1:]
fs = s3fs.S3FileSystem(key='any', secret='any', endpoint_url=endpoint)
paths = [granular.Path('s3://bucket/x', fs=fs), granular.Path(web, fs=HTTPFileSystem())]
print([path.read_range(1, 3) for path in paths], flush=True)
child = os.fork()
if not child:
    print([path.read_range(1, 3) for path in paths], flush=True)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_forked_children_read_through_the_filesystem_of_their_parent(server, http):
    (http.folder / 'x').write_bytes(DATA)
    command = [sys.executable, '-W', 'ignore', '-c', FORKED, server.endpoint, f'{http.endpoint}/x']
    environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, '')
    assert done.stdout.splitlines() == [repr([DATA[1:3]] * 2)] * 2


# --- arguments

S3 = {'anon': True, 'endpoint_url': 'http://127.0.0.1:1'}
REFUSED = {
    'version_aware': (s3_filesystem, {**S3, 'version_aware': True}),
    'fixed_upload_size': (s3_filesystem, {**S3, 'fixed_upload_size': True}),
    'use_ssl': (s3_filesystem, {'anon': True, 'use_ssl': False}),
    'asynchronous': (s3_filesystem, {**S3, 'asynchronous': True}),
    'loop': (s3_filesystem, {**S3, 'loop': get_loop()}),
    'api_version': (s3_filesystem, {**S3, 'client_kwargs': {'api_version': '2006-03-01'}}),
    'client_cert': (s3_filesystem, {**S3, 'config_kwargs': {'client_cert': '/cert.pem'}}),
    'signature_version': (s3_filesystem, {**S3, 'config_kwargs': {'signature_version': 's3'}}),
    'SSECustomerKey': (s3_filesystem, {**S3, 's3_additional_kwargs': {'SSECustomerKey': 'planted'}}),
    'session_kwargs': (gcs_filesystem, {'token': 'anon', 'session_kwargs': {'trust_env': True}}),
    'default_location': (gcs_filesystem, {'token': 'anon', 'default_location': 'US'}),
    'auto_mkdir': (LocalFileSystem, {'auto_mkdir': True}),
    'version_aware of Azure': (azure_filesystem, {'account_name': 'any', 'anon': True, 'version_aware': True}),
}


@pytest.mark.parametrize('name', REFUSED)
def test_options_that_cannot_be_honoured_are_named(name):
    cls, options = REFUSED[name]
    fs = cls(**options, skip_instance_cache=True)
    scheme = fs.protocol[0]
    with pytest.raises(InvalidArgumentError, match=rf"{scheme}://bucket/x: .*'{name.split()[0]}'"):
        granular.Path(f'{scheme}://bucket/x', fs=fs)


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        ({'client_kwargs': {'verify': '/ca.pem'}}, {'tls_verify': '/ca.pem'}),
        ({'client_kwargs': {'region_name': 'eu-west-3'}}, {'region': 'eu-west-3'}),
        ({'config_kwargs': {'region_name': 'eu-west-3'}}, {'region': 'eu-west-3'}),
        *(
            ({'config_kwargs': settings}, {'config_kwargs': settings})
            for settings in ({'proxies': {'https': 'http://host'}}, {'use_fips_endpoint': True})
        ),
        ({'requester_pays': True}, {'requester_pays': True}),
        ({'s3_additional_kwargs': {'ACL': 'private'}}, {'s3_additional_kwargs': {'ACL': 'private'}}),
        (
            {'config_kwargs': {'s3': {'addressing_style': 'path'}}},
            {'config_kwargs': {'s3': {'addressing_style': 'path'}}},
        ),
        ({'default_block_size': 1 << 20, 'use_listings_cache': False}, {}),  # of buffers and listings of its own
    ],
    ids=str,
)
def test_options_of_s3fs_are_those_of_a_path(options, expected):
    fs = s3_filesystem(**S3, **options, skip_instance_cache=True)
    assert granular.Path('s3://bucket/x', fs=fs) == granular.Path('s3://bucket/x', **S3, **expected)


@pytest.mark.parametrize('kind', [WholeFileCacheFileSystem, SimpleCacheFileSystem])
def test_caching_filesystems_over_a_disk_take_its_paths(kind, tmp_path):
    with granular.DatasetWriter(tmp_path / 'data', {'x': 'int'}) as writer:
        writer.append({'x': 5})
    folder = granular.Path(f'{tmp_path}/data', fs=kind(fs=LocalFileSystem(), cache_storage=f'{tmp_path}/cache'))
    assert granular.DatasetReader(folder)[0] == {'x': 5}
    assert 'spec.json' in [path.name for path in folder.iterdir()]


@pytest.mark.parametrize(
    ('url', 'fs', 'options', 'message'),
    [
        ('gs://bucket/x', s3_filesystem, {}, 'expected an address of the file system, s3:// or s3a://'),
        ('s3://bucket/x', arrow_filesystem, {}, 'expected a file system of fsspec'),
        ('s3://bucket/x', 's3', {}, 'expected a file system of fsspec, .* got str'),
        ('s3://bucket/x', s3_filesystem, {'anon': True}, r"expected fs= or options .* \['anon'\]"),
        (7, s3_filesystem, {}, 'expected an address in the file system, got int'),
    ],
    ids=['another scheme', 'pyarrow', 'text', 'options', 'number'],
)
def test_arguments_that_do_not_fit_are_explained(url, fs, options, message):
    given = fs() if callable(fs) else fs
    with pytest.raises(InvalidArgumentError, match=message):
        granular.Path(url, fs=given, **options)
