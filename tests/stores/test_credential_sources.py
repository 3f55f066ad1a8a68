"""Sources of credentials that answer anything: no exception of botocore, google-auth or aiohttp reaches the user."""

import datetime
import hashlib
import json

import pytest

import granular
from granular.errors import GranularError
from tests.support.credentials import google_key
from tests.support.faults import FaultServer
from tests.support.loop_server import LoopServer, read_head

QUICK = granular.IOConfig(attempts=1, connect_timeout=5.0, first_byte_timeout=5.0)
SOON = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=5)).strftime('%Y-%m-%dT%H:%M:%SZ')
KEYS = {'Version': 1, 'AccessKeyId': 'a', 'SecretAccessKey': 'b', 'SessionToken': 'c', 'Token': 'c', 'Expiration': SOON}
ANSWERS = {
    'nothing': b'',
    'text': b'no credentials today',
    'not UTF-8': b'\xff\xfe{}',
    'HTML': b'<html><body>blocked</body></html>',
    'XML': b'<?xml version="1.0"?><GetSessionTokenResponse/>',
    'half of XML': b'<AssumeRoleResponse><Credentials>',
    'list': b'[]',
    'null': b'null',
    'number': b'7',
    'JSON text': b'"text"',
    'empty object': b'{}',
    'another version': b'{"Version": "1"}',
    'no secret': json.dumps({**KEYS, 'SecretAccessKey': None}).encode(),
    'key of another type': json.dumps({**KEYS, 'AccessKeyId': 5}).encode(),
    'secret of another type': json.dumps({**KEYS, 'SecretAccessKey': ['b']}).encode(),
    'token of another type': json.dumps({**KEYS, 'SessionToken': {}, 'Token': {}}).encode(),
    'no time': json.dumps({**KEYS, 'Expiration': 'soon'}).encode(),
    'time of another type': json.dumps({**KEYS, 'Expiration': [1]}).encode(),
    'roles of another type': b'{"roleCredentials": "x", "accessToken": 5, "expiresAt": 7}',
    'roles without keys': b'{"roleCredentials": {}, "accessToken": "x", "expiresAt": "soon"}',
    'deep': b'[' * 5000,
}


class Source(LoopServer):
    """A server that gives one answer to all requests; the status 0 closes the connection."""

    status, answer = 200, b''

    async def serve(self, reader, writer):
        while True:
            _, _, headers = await read_head(reader)
            await reader.readexactly(int(headers.get('content-length', 0)))
            if not self.status:
                return
            writer.write(
                f'HTTP/1.1 {self.status} X\r\nContent-Length: {len(self.answer)}\r\n\r\n'.encode() + self.answer
            )
            await writer.drain()


@pytest.fixture(scope='module')
def running():
    with Source() as source:
        yield source


@pytest.fixture
def source(running, tmp_path, monkeypatch):
    """Leave a server that gives any answer as the only source of credentials."""
    for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN', 'AWS_PROFILE'):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        'HOME': tmp_path, 'AWS_CONFIG_FILE': tmp_path / 'config', 'AWS_SHARED_CREDENTIALS_FILE': tmp_path / 'none',
        'AWS_EC2_METADATA_DISABLED': 'true', 'AWS_MAX_ATTEMPTS': '1', 'AWS_DEFAULT_REGION': 'us-east-1',
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr('botocore.utils.ContainerMetadataFetcher.SLEEP_TIME', 0)
    (tmp_path / 'token').write_text('token')
    return running


def assert_refused(path, case):
    """Check that a read fails by an error of granular that names the bucket."""
    try:
        path.read_bytes()
    except GranularError as error:
        assert f'{path.parent}' in str(error), case
    except Exception as error:
        raise AssertionError(f'{case}: {type(error).__name__} is none of granular') from error
    else:
        raise AssertionError(f'{case}: was read')


SSO = (
    '[default]\nsso_session = work\nsso_account_id = 123456789012\nsso_role_name = r\n'
    '[sso-session work]\nsso_start_url = https://127.0.0.1:1/start\nsso_region = us-east-1\n'
)
LOGIN = f'{hashlib.sha1(b"work").hexdigest()}.json'
# The configuration and the variables of a source, given its server and a folder. FILE has the answer.
AMAZON = {
    'program': ('[default]\ncredential_process = cat FILE\n', {}),
    'program, later': (
        '[default]\ncredential_process = sh -c "cat GOOD && rm GOOD 2>/dev/null || cat FILE"\n', {},
    ),
    'container': ('', {'AWS_CONTAINER_CREDENTIALS_FULL_URI': 'URL/x'}),
    'web identity': (
        '',
        {'AWS_ROLE_ARN': 'arn:aws:iam::1:role/r', 'AWS_WEB_IDENTITY_TOKEN_FILE': 'HOME/token',
         'AWS_ENDPOINT_URL_STS': 'URL'},
    ),
    'role': (
        '[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = base\n'
        '[profile base]\naws_access_key_id = a\naws_secret_access_key = b\n',
        {'AWS_ENDPOINT_URL_STS': 'URL'},
    ),
    'login': (SSO, {}),
    'service of logins': (SSO, {'AWS_ENDPOINT_URL_SSO': 'URL', 'AWS_ENDPOINT_URL_SSO_OIDC': 'URL'}),
    'metadata': (
        '', {'AWS_EC2_METADATA_DISABLED': 'false', 'AWS_EC2_METADATA_SERVICE_ENDPOINT': 'URL',
             'AWS_METADATA_SERVICE_TIMEOUT': '5'},
    ),
}  # fmt: skip


@pytest.mark.parametrize('status', [200, 500, 403, 0])
@pytest.mark.parametrize('name', AMAZON)
def test_source_of_keys_that_answers_anything_is_an_error(name, status, source, tmp_path, monkeypatch):
    config, variables = AMAZON[name]

    def filled(text):
        pairs = {'URL': source.endpoint, 'HOME': tmp_path, 'FILE': tmp_path / 'answer', 'GOOD': tmp_path / 'good'}
        for word, value in pairs.items():
            text = text.replace(word, str(value))
        return text

    (tmp_path / 'config').write_text(filled(config))
    for variable, value in variables.items():
        monkeypatch.setenv(variable, filled(value))
    cache = tmp_path / '.aws/sso/cache'
    cache.mkdir(parents=True)
    token = {'startUrl': 'https://127.0.0.1:1/start', 'accessToken': 'x', 'expiresAt': '2999-01-01T00:00:00Z'}
    (cache / LOGIN).write_text(json.dumps(token))
    with FaultServer() as store:
        answers = ANSWERS if status == 200 else {'text': b'text', 'object': b'{}'}
        for number, (case, answer) in enumerate(answers.items()):
            source.status, source.answer = status, answer
            (tmp_path / 'answer').write_bytes(answer)
            (tmp_path / 'good').write_text(json.dumps(KEYS))
            if name == 'login':
                (cache / LOGIN).write_bytes(answer)
            path = granular.Path(f's3://bucket-{number}/key', endpoint_url=store.endpoint, config=QUICK)
            assert_refused(path, case)
        assert not store.methods


@pytest.mark.parametrize('status', [200, 500, 0])
def test_source_of_the_keys_of_a_filesystem_that_answers_anything_is_an_error(status, source, monkeypatch):
    monkeypatch.setenv('AWS_CONTAINER_CREDENTIALS_FULL_URI', f'{source.endpoint}/x')
    monkeypatch.setattr('aiobotocore.utils.AioContainerMetadataFetcher.SLEEP_TIME', 0)
    source.status = status
    with FaultServer() as store:
        for case in ('text', 'list', 'empty object', 'no time') if status == 200 else ('text',):
            source.answer = ANSWERS[case]
            import s3fs

            filesystem = s3fs.S3FileSystem(endpoint_url=store.endpoint, skip_instance_cache=True)
            assert_refused(granular.Path(f's3://bucket-{len(case)}/key', fs=filesystem, config=QUICK), case)
        assert not store.methods


# --- Google


def files(folder, url):
    """Return the contents of files of credentials of which something is wrong."""
    with open(folder / 'account.json', 'rb') as file:
        account = json.load(file)
    user = {
        'type': 'authorized_user',
        'client_id': 'a',
        'client_secret': 'b',
        'refresh_token': 'c',
        'token_uri': f'{url}/token',
    }
    external = {
        'type': 'external_account',
        'audience': '//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/x',
        'subject_token_type': 'urn:ietf:params:oauth:token-type:jwt',
        'token_url': f'{url}/token',
        'credential_source': {'url': f'{url}/x'},
    }
    impersonated = {
        'type': 'impersonated_service_account',
        'source_credentials': user,
        'service_account_impersonation_url': f'{url}/v1/projects/-/serviceAccounts/a@b.test:generateAccessToken',
    }
    for kind in (account, user, external, impersonated):
        yield kind
        for name in kind:
            for value in (None, 5, {}, 'x'):
                yield {**kind, name: value}
            yield {key: value for key, value in kind.items() if key != name}
    yield from ([], 'text', 5, None, {}, {'type': 'odd'})


@pytest.fixture
def unasked(tmp_path, monkeypatch):
    """Leave no other source of tokens than a file."""
    for name in ('GOOGLE_APPLICATION_CREDENTIALS', 'STORAGE_EMULATOR_HOST', 'GOOGLE_CLOUD_PROJECT'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('NO_GCE_CHECK', 'true')


def test_damaged_files_of_google_are_errors(source, tmp_path, monkeypatch, unasked):
    source.status, source.answer = 200, b'{}'
    google_key(tmp_path, source)
    monkeypatch.setenv('GOOGLE_APPLICATION_CREDENTIALS', str(tmp_path / 'key.json'))
    for number, content in enumerate(files(tmp_path, source.endpoint)):
        (tmp_path / 'key.json').write_text(json.dumps(content))
        for options in ({}, {'token': content} if isinstance(content, dict) else {}):
            path = granular.Path(f'gs://bucket-{number}/key', endpoint_url=source.endpoint, config=QUICK, **options)
            assert_refused(path, content)


@pytest.mark.parametrize('status', [200, 403, 0])
def test_token_server_that_answers_anything_is_an_error(status, source, tmp_path, unasked):
    key = google_key(tmp_path, source)
    for number, (case, answer) in enumerate(ANSWERS.items() if status == 200 else [('text', b'text')]):
        source.status, source.answer = status, answer
        path = granular.Path(f'gs://bucket-{number}/key', endpoint_url=source.endpoint, config=QUICK, token=key)
        assert_refused(path, case)
