"""Google credentials from every source, and the endpoints that they are sent to."""

import asyncio
import contextlib
import datetime
import http.server
import json
import os
import pathlib
import ssl
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest
import trustme
from google.oauth2.credentials import Credentials

import granular
from granular import aio
from granular.aio.stores import endpoints
from granular.aio.stores.endpoints import check
from granular.aio.stores.gcs.auth import log_in
from granular.aio.stores.gcs.client import is_emulator
from granular.errors import AccessDeniedError, InvalidArgumentError, MissingExtraError, NotFoundError, StoreError
from tests.support.credentials import google_key
from tests.support.faults import DATA, FaultServer
from tests.support.servers import free_ports

QUICK = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=3)
USER = {'type': 'authorized_user', 'client_id': 'id', 'client_secret': 'planted', 'refresh_token': 'planted'}


@pytest.fixture
def server():
    with FaultServer() as server:
        yield server


def path(server, **options):
    return granular.Path('gs://bucket/object', config=QUICK, endpoint_url=server.endpoint, **options)


def account(tmp_path, server):
    """A service account: its file and the content."""
    file = pathlib.Path(google_key(tmp_path, server))
    return file, json.loads(file.read_text())


# Each way to give credentials, and what is sent then.
WAYS = {
    'nothing': (lambda file, held: {}, ''),
    'anonymous': (lambda file, held: {'anon': True}, ''),
    'a name for anonymous': (lambda file, held: {'token': 'anon'}, ''),
    'both': (lambda file, held: {'token': 'anon', 'anon': True}, ''),
    'a path': (lambda file, held: {'token': str(file)}, 'Bearer token-1'),
    'a path object': (lambda file, held: {'token': file}, 'Bearer token-1'),
    'a dict': (lambda file, held: {'token': held}, 'Bearer token-1'),
    'a dict without a type': (
        lambda file, held: {'token': {name: value for name, value in held.items() if name != 'type'}},
        'Bearer token-1',
    ),
    'an access token': (lambda file, held: {'token': 'ya29.given'}, 'Bearer ya29.given'),
    'credentials': (lambda file, held: {'token': Credentials('ya29.made')}, 'Bearer ya29.made'),
}


@pytest.mark.parametrize('way', WAYS)
def test_every_form_of_the_token_option_is_accepted(server, tmp_path, way):
    make, sent = WAYS[way]
    assert path(server, **make(*account(tmp_path, server))).read_range(1, 5) == DATA[1:5]
    assert server.authorized == [sent]


def test_credentials_come_from_the_environment(server, tmp_path, monkeypatch):
    monkeypatch.setenv('GOOGLE_APPLICATION_CREDENTIALS', str(account(tmp_path, server)[0]))
    assert path(server).read_range(1, 5) == DATA[1:5]
    assert path(server, token='google_default').read_range(1, 5) == DATA[1:5]
    assert path(server, anon=True).read_range(1, 5) == DATA[1:5]
    assert server.authorized == ['Bearer token-1', 'Bearer token-2', '']


def test_login_of_gcloud_is_used():
    for token in (USER, {name: value for name, value in USER.items() if name != 'type'}):
        login = log_in('gs://bucket', {'token': token, 'project': 'mine'}, False, 1.0)
        assert (login.credentials.refresh_token, login.project, login.stale) == ('planted', 'mine', True)


def test_project_option_overrides_the_project_of_the_account(server, tmp_path, monkeypatch):
    held = {**account(tmp_path, server)[1], 'project_id': 'its'}
    assert log_in('gs://bucket', {'token': held}, False, 1.0).project == 'its'
    assert log_in('gs://bucket', {'token': held, 'project': 'mine'}, False, 1.0).project == 'mine'
    monkeypatch.setenv('GOOGLE_CLOUD_PROJECT', 'environments')
    assert log_in('gs://bucket', {'token': held}, False, 1.0).project == 'environments'


@pytest.mark.parametrize(
    ('options', 'error', 'says'),
    [({'token': 'cache'}, InvalidArgumentError, 'not supported'), ({'token': 'browser'}, InvalidArgumentError, 'not'),
     ({'token': 7}, InvalidArgumentError, 'got int'), ({'token': {}}, InvalidArgumentError, 'credentials'),
     ({'token': 'missing.json'}, InvalidArgumentError, 'missing.json'),
     ({'token': 'odd.json'}, InvalidArgumentError, 'odd.json'), ({'token': 'list.json'}, InvalidArgumentError, 'list'),
     ({'token': {**USER, 'client_id': None, 'refresh_token': 7, 'type': 'service_account'}}, InvalidArgumentError, 'x'),
     ({'token': {'type': 'service_account', 'private_key': 'planted', 'client_email': 'x', 'token_uri': 'x'}},
      InvalidArgumentError, 'credentials'),
     ({'token': {'type': 'unheard-of'}}, InvalidArgumentError, 'unheard-of'),
     ({'token': 'ya29.planted', 'anon': True}, InvalidArgumentError, 'got both'),
     ({'requester_pays': True}, InvalidArgumentError, 'project='), ({'access': 'x'}, InvalidArgumentError, 'unknown')],
    ids=str,
)  # fmt: skip
def test_invalid_credentials_are_named_in_the_error(server, tmp_path, monkeypatch, options, error, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'odd.json').write_text('{"type": "planted')
    (tmp_path / 'list.json').write_text('["planted"]')
    with pytest.raises(error) as caught:
        path(server, **options).stat()
    assert 'gs://bucket' in str(caught.value)
    assert says in str(caught.value)
    assert 'planted' not in str(caught.value)
    assert server.connections == 0


def test_missing_credentials_are_an_error_and_not_anonymous(monkeypatch, tmp_path):
    monkeypatch.setenv('CLOUDSDK_CONFIG', str(tmp_path))
    monkeypatch.setattr('google.auth.compute_engine._metadata._NO_GCE_CHECK', True)
    with pytest.raises(AccessDeniedError, match='(?s)no Google credentials.*GOOGLE_APPLICATION_CREDENTIALS.*anon=True'):
        log_in('gs://bucket', {}, False, 1.0)
    assert log_in('gs://bucket', {}, True, 1.0).credentials is None
    monkeypatch.setenv('GOOGLE_APPLICATION_CREDENTIALS', str(tmp_path / 'none.json'))
    with pytest.raises(AccessDeniedError, match='none.json'):
        log_in('gs://bucket', {}, True, 1.0)


async def test_a_failed_login_is_repeated_although_its_caller_was_cancelled(server, tmp_path):
    file = tmp_path / 'token.json'
    os.mkfifo(file)
    remote = aio.Path('gs://bucket/object', config=QUICK, endpoint_url=server.endpoint, token=str(file))
    reading = asyncio.create_task(remote.read_bytes())
    writer = await asyncio.to_thread(open, file, 'wb')  # once it is read
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    writer.close()
    while asyncio.all_tasks() != {asyncio.current_task()}:
        await asyncio.sleep(0.01)  # the login fails, as its file is empty
    account(tmp_path, server)[0].replace(file)
    assert await remote.read_range(1, 5) == DATA[1:5]


def test_missing_google_auth_is_named_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, 'google.auth', None)
    with pytest.raises(MissingExtraError, match=r'pip install .*\[gcs\]'):
        log_in('gs://bucket', {}, False, 1.0)
    assert log_in('gs://bucket', {'anon': True}, False, 1.0).headers() == {}


@pytest.mark.parametrize('method', ['read_bytes', 'stat'])
def test_concurrent_requests_fetch_one_token(tmp_path, server, method):
    folder = aio.Path('gs://bucket', config=QUICK, endpoint_url=server.endpoint, token=google_key(tmp_path, server))

    async def main():
        # The server has no descriptions of objects: what counts is what it is asked for.
        return await asyncio.gather(*(getattr(folder / str(n), method)() for n in range(20)), return_exceptions=True)

    assert len(asyncio.run(main())) == 20
    assert len(server.authorized) >= 20
    assert set(server.authorized) == {'Bearer token-1'}
    assert server.tokens == 1


def test_token_is_renewed_before_it_expires(server, tmp_path, monkeypatch):
    file, _ = account(tmp_path, server)
    login = log_in('gs://bucket', {'token': str(file)}, False, 5.0)
    assert login.stale
    login.renew()
    assert not login.stale
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    login.credentials.expiry = now + datetime.timedelta(seconds=200)
    # It was fetched just now: the next one would be the same.
    assert not login.stale
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 60)  # instead of waiting for a minute
    monkeypatch.setattr('granular.aio.stores.gcs.auth.time', clock)
    assert login.stale
    login.credentials.expiry = now - datetime.timedelta(seconds=1)
    assert login.stale


def test_valid_token_is_used_while_none_newer_is_available(server, tmp_path):
    unreachable = {**account(tmp_path, server)[1], 'token_uri': f'http://127.0.0.1:{free_ports(1)[0]}/token'}
    login = log_in('gs://bucket', {'token': unreachable}, False, 5.0)
    login.credentials.token = 'valid'
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    login.credentials.expiry = now + datetime.timedelta(seconds=200)
    assert login.stale
    login.renew_stale()
    assert not login.stale  # until the next attempt
    assert login.headers()['authorization'] == 'Bearer valid'
    login.credentials.expiry = now - datetime.timedelta(seconds=1)
    with pytest.raises(StoreError, match='no answer from the token server'):
        login.renew_stale()


@pytest.mark.parametrize(
    ('status', 'error'),
    [(400, AccessDeniedError), (503, StoreError), (302, AccessDeniedError), (307, AccessDeniedError)],
)
def test_refused_token_is_a_granular_error(tmp_path, server, status, error, monkeypatch):
    # google-auth asks three times, with seconds in between.
    monkeypatch.setattr('google.auth._exponential_backoff.time', types.SimpleNamespace(sleep=lambda seconds: None))

    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers['Content-Length']))
            body = b'{"error": "invalid_grant", "error_description": "no such account"}'
            self.send_response(status)
            self.send_header('Content-Length', str(len(body)))
            self.send_header('Location', f'{server.endpoint}/token')
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with served(Refuses) as port:
        held = {**account(tmp_path, server)[1], 'token_uri': f'http://127.0.0.1:{port}/token'}
        with pytest.raises(error, match='gs://bucket'):
            log_in('gs://bucket', {'token': held}, False, 5.0).renew()
    # What the account signed goes to no other host.
    assert server.connections == 0


@contextlib.contextmanager
def served(handler):
    """Serve HTTP on a free port."""
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running.server_address[1]
        running.shutdown()
        thread.join(10)


class Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata server of a Google Cloud machine."""

    def do_GET(self):
        key = self.path.partition('?')[0].removeprefix('/computeMetadata/v1/')
        account = {'aliases': ['default'], 'email': 'machine@example.org', 'scopes': []}
        token = {'access_token': 'machine-token', 'expires_in': 3600, 'token_type': 'Bearer'}
        values = {
            'project/project-id': 'machine-project',
            'instance/service-accounts/default/': json.dumps(account),
            'instance/service-accounts/default/token': json.dumps(token),
            'instance/service-accounts/machine@example.org/token': json.dumps(token),
        }
        body = values.get(key, '').encode()
        self.send_response(200)
        self.send_header('Metadata-Flavor', 'Google')
        self.send_header('Content-Type', 'application/json' if body[:1] == b'{' else 'text/plain')
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def python(code, *args, **environment):
    """Run a program in which warnings are errors."""
    command = [sys.executable, '-W', 'error', '-c', textwrap.dedent(code), *args]
    inherited = {name: value for name, value in os.environ.items() if name != 'NO_GCE_CHECK'}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**inherited, **environment}, check=False
    )


@pytest.mark.parametrize('token', ['cloud', 'google_default'])
def test_credentials_come_from_the_metadata_server(server, tmp_path, token):
    code = """
    import sys, granular
    path = granular.Path('gs://bucket/object', endpoint_url=sys.argv[1], token=sys.argv[2])
    assert path.read_range(1, 5)
    """
    with served(Metadata) as port:
        host = f'127.0.0.1:{port}'
        done = python(
            code, server.endpoint, token,
            GCE_METADATA_HOST=host, GCE_METADATA_IP=host, CLOUDSDK_CONFIG=str(tmp_path), PATH='',
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ''), done.stderr
    assert server.authorized == ['Bearer machine-token']


def test_anonymous_access_needs_no_google_library(fakegcs):
    code = """
    import json, sys
    for name in ('gcsfs', 'google.auth', 'requests', 'aiohttp', 's3fs', 'botocore', 'fsspec'):
        sys.modules[name] = None
    import granular
    place = granular.Path(sys.argv[1], **json.loads(sys.argv[2]))
    (place / 'a' / 'x').write_bytes(b'content')
    (place / 'large').write_bytes(bytes(9 << 20))
    assert (place / 'a' / 'x').read_bytes() == b'content'
    assert (place / 'large').stat().size == 9 << 20
    (place / 'a' / 'x').copy(place / 'y')
    assert sorted(path.name for path in place.rglob('*')) == ['a', 'large', 'x', 'y']
    (place / 'y').unlink()
    place.rmtree()
    assert not place.exists()
    """
    done = python(code, str(fakegcs.place()), json.dumps(fakegcs.options))
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


# --- addresses


@pytest.mark.parametrize(
    ('option', 'environment', 'expected'),
    [(None, {}, ('https://storage.googleapis.com', False)),
     (None, {'STORAGE_EMULATOR_HOST': ''}, ('https://storage.googleapis.com', False)),
     (None, {'STORAGE_EMULATOR_HOST': 'default'}, ('https://storage.googleapis.com', False)),
     (None, {'GOOGLE_CLOUD_UNIVERSE_DOMAIN': 'example.org'}, ('https://storage.example.org', False)),
     (None, {'STORAGE_EMULATOR_HOST': '127.0.0.1:4443'}, ('http://127.0.0.1:4443', True)),
     (None, {'STORAGE_EMULATOR_HOST': 'localhost'}, ('http://localhost', True)),
     (None, {'STORAGE_EMULATOR_HOST': 'http://[::1]:4443/'}, ('http://[::1]:4443', True)),
     (None, {'STORAGE_EMULATOR_HOST': 'https://emulator'}, ('https://emulator', True)),
     ('https://private.example/', {'STORAGE_EMULATOR_HOST': 'x'}, ('https://private.example', False)),
     ('http://127.0.0.1:1', {}, ('http://127.0.0.1:1', True))],
    ids=str,
)  # fmt: skip
def test_endpoints_of_options_and_environment(monkeypatch, option, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    endpoint = endpoints.gcs({} if option is None else {'endpoint_url': option}, os.environ)
    assert (check('gs://bucket', endpoint), is_emulator(endpoint)) == expected


AUTHORITIES = {
    'option': ({}, {'tls_verify': 'BUNDLE'}),
    'option before variable': ({'REQUESTS_CA_BUNDLE': '/none'}, {'tls_verify': 'BUNDLE'}),
    'REQUESTS_CA_BUNDLE': ({'REQUESTS_CA_BUNDLE': 'BUNDLE'}, {}),
    'CURL_CA_BUNDLE': ({'CURL_CA_BUNDLE': 'BUNDLE'}, {}),
    'REQUESTS_CA_BUNDLE first': ({'REQUESTS_CA_BUNDLE': 'BUNDLE', 'CURL_CA_BUNDLE': '/none'}, {}),
}


@pytest.mark.parametrize('name', AUTHORITIES)
def test_store_and_token_server_trust_the_same_authorities(name, tmp_path, monkeypatch):
    authority, bundle = trustme.CA(), tmp_path / 'authority.pem'
    authority.cert_pem.write_to_path(bundle)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert('127.0.0.1').configure_cert(context)
    variables, options = AUTHORITIES[name]
    for variable in ('REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE'):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.replace('BUNDLE', str(bundle)))
    options = {option: value.replace('BUNDLE', str(bundle)) for option, value in options.items()}
    with FaultServer(context) as server:
        key = google_key(tmp_path, server)
        path = granular.Path('gs://bucket/key', endpoint_url=server.endpoint, token=key, config=QUICK, **options)
        assert path.read_bytes() == DATA
        assert server.tokens == 1


def test_token_server_of_an_unknown_authority_is_asked_once(tmp_path, server):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert('127.0.0.1').configure_cert(context)
    with FaultServer(context) as issuing:
        path = granular.Path('gs://bucket/key', endpoint_url=server.endpoint, token=google_key(tmp_path, issuing))
        before = granular.io_stats()['retries']
        with pytest.raises(
            AccessDeniedError, match='gs://bucket.*certificate verify failed.*pass its file as tls_verify='
        ):
            path.read_bytes()
        assert granular.io_stats()['retries'] == before


@pytest.mark.parametrize(
    'url', ['ftp://host', 'https://', 'https://[', 'https://host:port', 'https://user:planted@host', 'x', 5, b'http://x',
            'https://host?x=planted', 'https://host:99999']
)  # fmt: skip
def test_invalid_endpoints_are_named_in_the_error(url):
    with pytest.raises(InvalidArgumentError, match='gs://bucket: expected an endpoint_url') as caught:
        granular.Path('gs://bucket/x', endpoint_url=url).stat()
    assert 'planted' not in str(caught.value)


def test_emulator_address_with_or_without_a_scheme(fakegcs, monkeypatch):
    root = fakegcs.place()
    root.write_bytes(b'content')
    for host in (fakegcs.endpoint, fakegcs.endpoint.removeprefix('http://')):
        monkeypatch.setenv('STORAGE_EMULATOR_HOST', host)
        assert granular.Path(str(root)).read_bytes() == b'content'
        with pytest.raises(NotFoundError):
            granular.Path(f'{root}-none').stat()
