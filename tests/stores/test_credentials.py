"""Errors that name missing, expired or damaged credentials, and that quote the store."""

import json

import pytest

import granular
from granular.errors import AccessDeniedError, GranularError, InvalidArgumentError, NotFoundError, StoreError
from tests.support.faults import FaultServer

SSO = (
    '[default]\nregion = us-east-1\nsso_session = work\nsso_account_id = 123456789012\nsso_role_name = r\n'
    '[sso-session work]\nsso_start_url = https://127.0.0.1:1/start\nsso_region = us-east-1\n'
)
OLD_SSO = (
    '[default]\nsso_start_url = https://127.0.0.1:1/start\nsso_region = us-east-1\nsso_account_id = 123456789012\n'
    'sso_role_name = r\n'
)


@pytest.fixture
def server():
    with FaultServer(files={'data/spec.json': b'{}'}) as server:
        yield server


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Leave no source of credentials; return the folder of the configuration."""
    for name in (
        'AWS_ACCESS_KEY_ID',
        'AWS_SECRET_ACCESS_KEY',
        'AWS_SESSION_TOKEN',
        'AWS_PROFILE',
        'STORAGE_EMULATOR_HOST',
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('AWS_CONFIG_FILE', str(tmp_path / 'config'))
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(tmp_path / 'credentials'))
    monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
    return tmp_path


def external(home, source):
    account = {
        'type': 'external_account',
        'audience': '//iam.googleapis.com/projects/1/locations/global/workloadIdentityPools/p/providers/x',
        'subject_token_type': 'urn:ietf:params:oauth:token-type:jwt',
        'token_url': 'https://sts.googleapis.com/v1/token',
        'credential_source': source,
    }
    (home / 'google.json').write_text(json.dumps(account))
    return {
        'GOOGLE_APPLICATION_CREDENTIALS': str(home / 'google.json'),
        'GOOGLE_EXTERNAL_ACCOUNT_ALLOW_EXECUTABLES': '1',
    }


@pytest.mark.parametrize('options', [{}, {'profile': 'nobody'}])
def test_profile_that_does_not_exist_is_an_error_with_the_remedy(options, tmp_path, monkeypatch):
    for name in ('AWS_CONFIG_FILE', 'AWS_SHARED_CREDENTIALS_FILE'):
        monkeypatch.setenv(name, str(tmp_path / 'none'))
    monkeypatch.delenv('AWS_PROFILE', raising=False)
    if not options:
        monkeypatch.setenv('AWS_PROFILE', 'nobody')
    with pytest.raises(AccessDeniedError, match=r'nobody.*: add it with `aws configure`, or name another one by'):
        granular.Path('s3://bucket/x', endpoint_url='http://127.0.0.1:1', **options).exists()


# What provides no credentials: the configuration of AWS, and variables, of a folder.
MISSING = {
    's3: nothing': ('', lambda home: {}),
    's3: web identity': (
        '',
        lambda home: {
            'AWS_WEB_IDENTITY_TOKEN_FILE': f'{home}/none',
            'AWS_ROLE_ARN': 'arn:aws:iam::123456789012:role/r',
        },
    ),
    's3: container': (
        '',
        lambda home: {
            'AWS_CONTAINER_CREDENTIALS_FULL_URI': 'http://127.0.0.1:9/x',
            'AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE': f'{home}/none',
        },
    ),
    's3: container, a folder': (
        '',
        lambda home: {
            'AWS_CONTAINER_CREDENTIALS_FULL_URI': 'http://127.0.0.1:9/x',
            'AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE': f'{home}',
        },
    ),
    's3: program': ('[default]\ncredential_process = no-such-program-here print\n', lambda home: {}),
    's3: source profile': ('[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = none\n', lambda home: {}),
    's3: sso': (SSO, lambda home: {}),
    's3: sso without a session': (OLD_SSO, lambda home: {}),
    'gs: program': ('', lambda home: external(home, {'executable': {'command': '/no/such', 'timeout_millis': 5000}})),
    'gs: file': ('', lambda home: external(home, {'file': f'{home}/none'})),
    'gs: file of a key': ('', lambda home: {'GOOGLE_APPLICATION_CREDENTIALS': f'{home}/none.json'}),
}  # fmt: skip
OPERATIONS = {
    'exists': lambda path: path.exists(),
    'is_dir': lambda path: path.is_dir(),
    'stat': lambda path: path.stat(),
    'glob': lambda path: list(path.glob('*')),
    'walk': lambda path: list(path.walk()),
    'read': lambda path: (path / 'spec.json').read_bytes(),
    'write': lambda path: (path / 'new').write_bytes(b''),
    'open': granular.open,
    'copy': lambda path: path.copy('/dev/null/x'),
}


@pytest.mark.parametrize('name', MISSING)
def test_missing_credentials_are_an_error_about_credentials(name, home, server, monkeypatch):
    config, variables = MISSING[name]
    (home / 'config').write_text(config)
    for variable, value in variables(home).items():
        monkeypatch.setenv(variable, value)
    scheme, _, _ = name.partition(':')
    for number, call in enumerate(OPERATIONS.values()):
        before = granular.io_stats()['retries']
        with pytest.raises(AccessDeniedError) as caught:
            call(granular.Path(f'{scheme}://bucket{number}/data', endpoint_url=server.endpoint))
        assert not isinstance(caught.value, NotFoundError)
        assert 'credentials' in str(caught.value)
        assert f'{scheme}://bucket{number}' in str(caught.value)
        assert granular.io_stats()['retries'] == before
    assert not server.methods


@pytest.mark.parametrize('config', [SSO, OLD_SSO])
def test_expired_sso_login_names_its_remedy(config, home, server):
    (home / 'config').write_text(config)
    with pytest.raises(AccessDeniedError, match='aws sso login'):
        granular.Path('s3://bucket/data', endpoint_url=server.endpoint).read_bytes()


@pytest.mark.parametrize('end', ['\n', '\r\n', ' ', '\t', '\0', 'é'])
@pytest.mark.parametrize(
    'name', ['AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN', 'key', 'secret', 'token']
)
def test_newline_in_a_key_is_named(name, end, home, server, monkeypatch):
    variables = {'AWS_ACCESS_KEY_ID': 'AK', 'AWS_SECRET_ACCESS_KEY': 'SK', 'AWS_SESSION_TOKEN': 'ST'}
    options = dict(zip(('key', 'secret', 'token'), variables.values(), strict=True)) if name not in variables else {}
    if name in variables:
        variables[name] += end.replace('\0', '\n')  # a variable has no zero
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
    else:
        options[name] += end
    with pytest.raises(AccessDeniedError, match='s3://bucket.*credentials have a space, a newline') as caught:
        granular.Path('s3://bucket/data', endpoint_url=server.endpoint, **options).read_bytes()
    assert caught.value.path == 's3://bucket/data'
    assert not server.methods


@pytest.mark.parametrize('end', ['\n', ' x', 'é'])
def test_newline_in_a_token_or_header_is_named(end, server):
    with pytest.raises(AccessDeniedError, match='gs://bucket.*credentials have a space'):
        granular.Path('gs://bucket/data', endpoint_url=server.endpoint, token=f'planted{end}').read_bytes()
    with pytest.raises(InvalidArgumentError, match='hf://.*token has a space'):
        granular.Path('hf://datasets/a/b/c', endpoint_url=server.endpoint, token=f'planted{end}').read_bytes()
    if end != ' x':
        with pytest.raises(InvalidArgumentError, match='header .Authorization. has characters') as caught:
            granular.Path(f'{server.endpoint}/x', headers={'Authorization': f'Bearer planted{end}'})
        assert 'planted' not in str(caught.value)
    assert not server.methods


def xml(code, message):
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()


def document(message):
    return json.dumps({'error': {'code': 403, 'message': message, 'errors': [{'message': message}]}}).encode()


KMS = 'User: arn:aws:iam::1:user/u is not authorized to perform: kms:Decrypt on resource: arn:aws:kms:us-east-1:1:key/k'
ROLE = 'x@y.iam.gserviceaccount.com does not have storage.objects.get access to the Google Cloud Storage object.'
# The status, the body, and the words of the error.
MESSAGES = {
    's3: right': (403, xml('AccessDenied', KMS), ['AccessDenied: User: arn:aws', 'kms:Decrypt', 'give the']),
    's3: archived': (403, xml('InvalidObjectState', 'It is not valid'), ['InvalidObjectState: It is not', 'restore']),
    's3: customer key': (400, xml('InvalidRequest', 'stored using Encryption &amp; more'), ['Encryption & more']),
    's3: plain': (403, xml('AccessDenied', 'Access Denied'), ['status 403', 'Access Denied', 'anon=True']),
    's3: server': (500, xml('InternalError', 'We encountered an internal error'), ['InternalError: We encountered']),
    's3: no code': (403, b'<html>blocked by the firewall</html>', ['blocked by the firewall']),
    'gs: role': (403, document(ROLE), ['does not have storage.objects.get access']),
    'gs: server': (503, document('Backend error &c'), ['status 503, Backend error &c']),
}  # fmt: skip


@pytest.mark.parametrize('name', MESSAGES)
@pytest.mark.parametrize('operation', ['read', 'stat', 'glob', 'write'])
def test_words_of_the_store_reach_the_user(name, operation):
    status, body, words = MESSAGES[name]
    raw = b'HTTP/1.1 %d X\r\nx-amz-request-id: R\r\nContent-Length: %d\r\n\r\n' % (status, len(body))

    class Refusing(FaultServer):
        async def serve(self, reader, writer):
            while True:
                head = await reader.readuntil(b'\r\n\r\n')
                length = head.lower().partition(b'content-length: ')[2].partition(b'\r')[0]
                await reader.readexactly(int(length or 0))
                writer.write(raw + (b'' if head.startswith(b'HEAD') else body))
                await writer.drain()

    options = {'key': 'k', 'secret': 's'} if name.startswith('s3') else {'token': 'anon'}
    config = granular.IOConfig(attempts=2, backoff=0.001, retry_time=0.2)
    with Refusing() as refusing:
        path = granular.Path(f'{name[:2]}://bucket/data', endpoint_url=refusing.endpoint, config=config, **options)
        with pytest.raises(GranularError) as caught:
            OPERATIONS[operation](path)
    if status >= 500 and operation == 'stat':  # a reply to HEAD has no words
        words = [f'status {status}']
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, AccessDeniedError if status == 403 else StoreError)
