"""Settings of AWS: what granular sends is what a client of botocore sends, for the same settings."""

import contextlib
import hashlib
import os
import re
import urllib.parse
from pathlib import Path

import botocore
import fsspec
import pytest
from botocore.config import Config
from botocore.loaders import create_loader
from botocore.session import Session

import granular
from granular.errors import AccessDeniedError, GranularError, InvalidArgumentError, MissingExtraError
from tests.support.amazon import DATA, SECRETS, Amazon, sent_by

QUICK = granular.IOConfig(attempts=2, backoff=0.001)
LOADER = create_loader()  # which keeps what it has read
KEYS = {'AWS_ACCESS_KEY_ID': 'AK', 'AWS_SECRET_ACCESS_KEY': 'SK'}
IRELAND = {'AWS_DEFAULT_REGION': 'eu-west-1'}
DIRECTORY = 'data--use1-az4--x-s3'
POINT = 'arn:aws:s3:us-west-2:123456789012:accesspoint'
OUTPOST = 'arn:aws:s3-outposts:us-west-2:123456789012:outpost'


def profile(text, name='default'):
    return f'[{name if name == "default" else f"profile {name}"}]\n{text}\n'


ROLE = profile('role_arn = arn:aws:iam::1:role/r\nsource_profile = base\nregion = eu-west-1') + profile(
    'aws_access_key_id = BASE\naws_secret_access_key = SB', 'base'
)
PROGRAM = 'credential_process = echo \'{"Version": 1, "AccessKeyId": "PK", "SecretAccessKey": "PS"}\''
STORED = 'aws_access_key_id = STORED\naws_secret_access_key = SS'
SERVICES = '[default]\nservices = mine\nregion = eu-west-1\n[services mine]\ns3 =\n  endpoint_url = http://s3.test:81\n'

# The configuration, the variables, the options, and the bucket; without other ones, there are keys and a region.
ROWS = {
    'nothing but keys': ('', KEYS, {}),
    'region, AWS_DEFAULT_REGION': ('', {**KEYS, **IRELAND}, {}),
    'AWS_REGION': ('', {**KEYS, **IRELAND, 'AWS_REGION': 'eu-west-3'}, {}),
    'region, profile': (profile('region = eu-west-3'), KEYS, {}),
    'region, option': (profile('region = eu-west-3'), {**KEYS, **IRELAND}, {'region': 'ap-south-2'}),
    'region of China': ('', {**KEYS, 'AWS_DEFAULT_REGION': 'cn-north-1'}, {}),
    'region of GovCloud': ('', {**KEYS, 'AWS_DEFAULT_REGION': 'us-gov-west-1'}, {}),
    'AWS_PROFILE': (profile('region = eu-west-3', 'a'), {**KEYS, 'AWS_PROFILE': 'a'}, {}),
    'AWS_DEFAULT_PROFILE': (
        profile('region = eu-west-3', 'a') + profile('region = eu-west-1', 'b'),
        {**KEYS, 'AWS_DEFAULT_PROFILE': 'a', 'AWS_PROFILE': 'b'}, {},
    ),
    'profile, option': (profile(f'region = eu-west-3\n{STORED}', 'a'), {'AWS_PROFILE': 'none'}, {'profile': 'a'}),
    'endpoint_url, profile': (profile('endpoint_url = http://store.test:81'), {**KEYS, **IRELAND}, {}),
    'endpoint_url, services': (SERVICES, KEYS, {}),
    'endpoint_url with a path': ('', {**KEYS, **IRELAND}, {'endpoint_url': 'https://store.test/path/'}),
    'AWS_ENDPOINT_URL': ('', {**KEYS, **IRELAND, 'AWS_ENDPOINT_URL': 'https://store.test'}, {}),
    'AWS_ENDPOINT_URL_S3': (
        '', {**KEYS, **IRELAND, 'AWS_ENDPOINT_URL_S3': 'http://s3.test', 'AWS_ENDPOINT_URL': 'https://store.test'}, {},
    ),
    'AWS_IGNORE_CONFIGURED_ENDPOINT_URLS': (
        profile('endpoint_url = http://store.test:81'),
        {**KEYS, **IRELAND, 'AWS_IGNORE_CONFIGURED_ENDPOINT_URLS': 'true', 'AWS_ENDPOINT_URL': 'http://store.test'}, {},
    ),
    'ignore_configured_endpoint_urls': (
        profile('endpoint_url = http://store.test:81\nignore_configured_endpoint_urls = true'), {**KEYS, **IRELAND}, {},
    ),
    'addressing_style = path': (profile('s3 =\n  addressing_style = path'), {**KEYS, **IRELAND}, {}),
    'addressing_style = virtual': (
        profile('s3 =\n  addressing_style = virtual'), {**KEYS, **IRELAND}, {'endpoint_url': 'https://store.test'},
    ),
    'addressing_style = auto': (
        profile('s3 =\n  addressing_style = auto'), {**KEYS, **IRELAND}, {'endpoint_url': 'https://store.test'},
    ),
    'addressing_style, another profile': (
        profile('s3 =\n  addressing_style = virtual') + profile('s3 =\n  addressing_style = path', 'other'),
        {**KEYS, **IRELAND, 'AWS_PROFILE': 'other'}, {},
    ),
    'addressing_style, option': (
        profile('s3 =\n  addressing_style = virtual'), {**KEYS, **IRELAND},
        {'config_kwargs': {'s3': {'addressing_style': 'path'}}},
    ),
    'use_fips_endpoint': (profile('use_fips_endpoint = true'), {**KEYS, 'AWS_DEFAULT_REGION': 'us-east-2'}, {}),
    'AWS_USE_FIPS_ENDPOINT': ('', {**KEYS, 'AWS_DEFAULT_REGION': 'us-east-2', 'AWS_USE_FIPS_ENDPOINT': 'true'}, {}),
    'FIPS, option': ('', {**KEYS, **IRELAND}, {'region': 'us-west-1', 'config_kwargs': {'use_fips_endpoint': True}}),
    'FIPS, pseudo-region': ('', {**KEYS, 'AWS_DEFAULT_REGION': 'fips-us-east-2'}, {}),
    'use_dualstack_endpoint': (profile('use_dualstack_endpoint = true'), {**KEYS, **IRELAND}, {}),
    'use_dualstack_endpoint of s3': (profile('s3 =\n  use_dualstack_endpoint = true'), {**KEYS, **IRELAND}, {}),
    'AWS_USE_DUALSTACK_ENDPOINT': ('', {**KEYS, **IRELAND, 'AWS_USE_DUALSTACK_ENDPOINT': 'true'}, {}),
    'FIPS and dual stack': (
        '', {**KEYS, 'AWS_DEFAULT_REGION': 'us-west-2'},
        {'config_kwargs': {'use_fips_endpoint': True, 'use_dualstack_endpoint': True}},
    ),
    'use_accelerate_endpoint': (profile('s3 =\n  use_accelerate_endpoint = true'), {**KEYS, **IRELAND}, {}),
    'acceleration, option': ('', {**KEYS, **IRELAND}, {'config_kwargs': {'s3': {'use_accelerate_endpoint': True}}}),
    'us_east_1_regional_endpoint': (
        profile('s3 =\n  us_east_1_regional_endpoint = legacy'), {**KEYS, 'AWS_DEFAULT_REGION': 'us-east-1'}, {},
    ),
    'AWS_S3_US_EAST_1_REGIONAL_ENDPOINT': (
        '', {**KEYS, 'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_S3_US_EAST_1_REGIONAL_ENDPOINT': 'legacy'}, {},
    ),
    'bucket with dots': ('', {**KEYS, **IRELAND}, {}, 'a.b'),
    'bucket with capitals': ('', {**KEYS, **IRELAND}, {}, 'My_Bucket'),
    'access point': ('', {**KEYS, **IRELAND}, {}, f'{POINT}/name'),
    'access point, colons': ('', {**KEYS, **IRELAND}, {}, f'{POINT}:name'),
    'access point, dual stack': ('', {**KEYS, **IRELAND, 'AWS_USE_DUALSTACK_ENDPOINT': 'true'}, {}, f'{POINT}/name'),
    'access point, FIPS': ('', {**KEYS, **IRELAND, 'AWS_USE_FIPS_ENDPOINT': 'true'}, {}, f'{POINT}/name'),
    'access point, endpoint_url': ('', {**KEYS, **IRELAND}, {'endpoint_url': 'http://store.test'}, f'{POINT}/name'),
    'access point, alias': ('', {**KEYS, **IRELAND}, {}, 'name-abcdefghijklmnopqrstuvwxyz0123-s3alias'),
    's3_use_arn_region': (
        profile('s3_use_arn_region = false'), {**KEYS, 'AWS_DEFAULT_REGION': 'us-west-2'}, {}, f'{POINT}/name',
    ),
    'AWS_S3_USE_ARN_REGION': (
        '', {**KEYS, 'AWS_DEFAULT_REGION': 'us-west-2', 'AWS_S3_USE_ARN_REGION': 'false'}, {}, f'{POINT}/name',
    ),
    'Object Lambda': ('', {**KEYS, **IRELAND}, {}, f'{POINT.replace(":s3:", ":s3-object-lambda:")}/name'),
    'Outposts': ('', {**KEYS, **IRELAND}, {}, f'{OUTPOST}/op-1/accesspoint/name'),
    'Outposts, colons': ('', {**KEYS, **IRELAND}, {}, f'{OUTPOST}:op-1:accesspoint:name'),
    'multi-region access point, anonymous': (
        '', {**KEYS, **IRELAND}, {'anon': True}, 'arn:aws:s3::123456789012:accesspoint/abc.mrap',
    ),
    'directory bucket': ('', {**KEYS, 'AWS_DEFAULT_REGION': 'us-east-1'}, {}, DIRECTORY),
    'directory bucket, session token': (
        '', {**KEYS, 'AWS_SESSION_TOKEN': 'ST', 'AWS_DEFAULT_REGION': 'us-east-1'}, {}, DIRECTORY,
    ),
    'directory bucket, endpoint_url': (
        '', {**KEYS, 'AWS_DEFAULT_REGION': 'us-east-1'}, {'endpoint_url': 'http://store.test'}, DIRECTORY,
    ),
    'directory bucket, anonymous': ('', {'AWS_DEFAULT_REGION': 'us-east-1'}, {'anon': True}, DIRECTORY),
    's3_disable_express_session_auth': (
        profile('s3_disable_express_session_auth = true'), {**KEYS, 'AWS_DEFAULT_REGION': 'us-east-1'}, {}, DIRECTORY,
    ),
    'AWS_S3_DISABLE_EXPRESS_SESSION_AUTH': (
        '', {**KEYS, 'AWS_DEFAULT_REGION': 'us-east-1', 'AWS_S3_DISABLE_EXPRESS_SESSION_AUTH': 'true'}, {}, DIRECTORY,
    ),
    'AWS_SESSION_TOKEN': ('', {**KEYS, **IRELAND, 'AWS_SESSION_TOKEN': 'ST'}, {}),
    'keys, profile': (profile(f'{STORED}\naws_session_token = ST'), IRELAND, {}),
    'keys, variables before profile': (profile(STORED), {**KEYS, **IRELAND}, {}),
    'keys, profile of the options before variables': (profile(STORED, 'a'), {**KEYS, **IRELAND}, {'profile': 'a'}),
    'keys, options': (profile(STORED), {**KEYS, **IRELAND}, {'key': 'OK', 'secret': 'OS', 'token': 'OT'}),
    'credential_process': (profile(PROGRAM), IRELAND, {}),
    'role_arn': (ROLE, {}, {}),
    'AWS_WEB_IDENTITY_TOKEN_FILE': (
        '', {**IRELAND, 'AWS_ROLE_ARN': 'arn:aws:iam::1:role/r', 'AWS_WEB_IDENTITY_TOKEN_FILE': 'FILE'}, {},
    ),
    'anonymous': ('', IRELAND, {'anon': True}),
    'anonymous, endpoint_url': ('', IRELAND, {'anon': True, 'endpoint_url': 'http://store.test'}),
    'signature_version, none': ('', IRELAND, {'config_kwargs': {'signature_version': botocore.UNSIGNED}}),
    'requester-pays': ('', {**KEYS, **IRELAND}, {'requester_pays': True}),
    'requester-pays, anonymous': ('', IRELAND, {'requester_pays': True, 'anon': True}),
    'AWS_CA_BUNDLE': ('', {**KEYS, **IRELAND, 'AWS_CA_BUNDLE': 'FILE'}, {}),
    'ca_bundle': (profile('ca_bundle = FILE'), {**KEYS, **IRELAND, 'AWS_CA_BUNDLE': None}, {}),
    'REQUESTS_CA_BUNDLE': ('', {**KEYS, **IRELAND, 'AWS_CA_BUNDLE': None, 'REQUESTS_CA_BUNDLE': 'FILE'}, {}),
    'tls_verify': ('', {**KEYS, **IRELAND, 'AWS_CA_BUNDLE': '/none'}, {'tls_verify': 'FILE'}),
    'HTTP_PROXY alone': ('', {**KEYS, **IRELAND, 'HTTPS_PROXY': None}, {'endpoint_url': 'http://store.test'}),
    'proxies': (
        '', {**KEYS, **IRELAND, 'HTTPS_PROXY': 'http://127.0.0.1:9', 'NO_PROXY': '*'},
        {'config_kwargs': {'proxies': {'https': 'http://127.0.0.1:PORT'}}},
    ),
    'proxies of this machine': (
        '', {**KEYS, **IRELAND},
        {'endpoint_url': 'http://127.0.0.1:PORT', 'config_kwargs': {'proxies': {'http': '127.0.0.1:PORT'}}},
    ),
    'proxies, none': (
        '', {**KEYS, **IRELAND}, {'endpoint_url': 'http://0.0.0.0:PORT', 'config_kwargs': {'proxies': {}}},
    ),
    'NO_PROXY': ('', {**KEYS, **IRELAND, 'NO_PROXY': '0.0.0.0'}, {'endpoint_url': 'http://0.0.0.0:PORT'}),
}  # fmt: skip
OPTIONS = {'region': 'region_name', 'key': 'aws_access_key_id', 'secret': 'aws_secret_access_key',
           'token': 'aws_session_token', 'endpoint_url': 'endpoint_url', 'tls_verify': 'verify'}  # fmt: skip


@pytest.fixture(scope='module')
def running():
    with Amazon() as amazon:
        yield amazon


@pytest.fixture
def amazon(running, tmp_path, monkeypatch):
    """Lead all requests to a server; leave no other setting of AWS."""
    for name in os.environ:
        if name.startswith('AWS_') or name.upper() in ('NO_PROXY', 'REQUESTS_CA_BUNDLE', 'HTTP_PROXY', 'HTTPS_PROXY'):
            monkeypatch.delenv(name)
    bundle = tmp_path / 'authority.pem'
    bundle.write_bytes(running.authority.cert_pem.bytes())
    for name, value in {
        'HOME': tmp_path, 'AWS_CONFIG_FILE': tmp_path / 'config', 'AWS_EC2_METADATA_DISABLED': 'true',
        'AWS_SHARED_CREDENTIALS_FILE': tmp_path / 'credentials', 'AWS_CA_BUNDLE': bundle,
        'HTTP_PROXY': running.endpoint, 'HTTPS_PROXY': running.endpoint,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    running.reset()
    return running


@pytest.fixture
def configure(amazon, tmp_path, monkeypatch):
    """Return a function that writes the configuration, sets variables, and returns the options."""
    port, bundle = amazon.endpoint.rpartition(':')[2], str(tmp_path / 'authority.pem')

    def filled(value):
        if isinstance(value, dict):
            return {name: filled(item) for name, item in value.items()}
        return value.replace('FILE', bundle).replace('PORT', port) if isinstance(value, str) else value

    def apply(config, variables, options):
        (tmp_path / 'config').write_text(filled(config))
        for name, value in variables.items():
            if value is None:
                monkeypatch.delenv(name)
            else:
                monkeypatch.setenv(name, filled(value))
        return {name: filled(value) for name, value in options.items()}

    return apply


def arrivals_of(amazon):
    arrived = [arrival for arrival in amazon.arrivals if '//sts.' not in arrival.url]
    amazon.arrivals.clear()
    return arrived


def oracle(bucket, options):
    """Return a client of botocore with options of granular, and the arguments of its requests."""
    settings = dict(options.get('config_kwargs') or {})
    if options.get('anon'):
        settings['signature_version'] = botocore.UNSIGNED
    session = Session(profile=options.get('profile'))
    session.register_component('data_loader', LOADER)
    if region := os.environ.get('AWS_REGION'):  # which the other SDKs of AWS take
        settings['region_name'] = region
    elif not (session.get_config_variable('region') or options.get('region')):
        settings = {'region_name': 'us-east-1', 's3': {'us_east_1_regional_endpoint': 'regional'}, **settings}
    arguments = {name: options[option] for option, name in OPTIONS.items() if option in options}
    payer = {'RequestPayer': 'requester'} if options.get('requester_pays') else {}
    return session.create_client('s3', config=Config(**settings), **arguments), {'Bucket': bucket, **payer}


@pytest.mark.parametrize('name', ROWS)
def test_requests_are_those_of_botocore(name, amazon, configure, monkeypatch):
    config, variables, options, bucket = (*ROWS[name], 'bucket')[:4]
    options = configure(config, variables, options)
    client, arguments = oracle(bucket, options)
    with contextlib.closing(client):
        client.get_object(**arguments, Key='a/key +ü')['Body'].read()
    expected = arrivals_of(amazon)
    assert expected, name
    path = granular.Path(f's3://{bucket}/a/key +ü', config=QUICK, **options)
    assert path.read_bytes() == DATA
    arrived = arrivals_of(amazon)
    assert [sent_by(arrival) for arrival in arrived] == [sent_by(arrival) for arrival in expected]
    secrets = {'AK': 'SK', 'STORED': 'SS', 'OK': 'OS', 'PK': 'PS', **SECRETS}
    for arrival in arrived:
        assert not arrival.scope or arrival.is_signed_by(secrets[arrival.scope[1]])


@pytest.mark.parametrize('enabled', [False, True])
def test_bodies_are_signed_over_tls_if_the_configuration_says_so(enabled, amazon, configure):
    configure(profile(f's3 =\n  payload_signing_enabled = {enabled}'.lower()), {**KEYS, **IRELAND}, {})
    granular.Path('s3://bucket/key', config=QUICK).write_bytes(DATA)
    arrived = arrivals_of(amazon)[0]
    assert arrived.headers['x-amz-content-sha256'] == (
        hashlib.sha256(DATA).hexdigest() if enabled else 'UNSIGNED-PAYLOAD'
    )
    assert arrived.is_signed_by('SK')


def test_services_that_issue_keys_are_trusted_as_the_store(amazon, configure):
    options = configure(ROLE, {'AWS_CA_BUNDLE': None}, {'tls_verify': 'FILE'})
    assert granular.Path('s3://bucket/key', config=QUICK, **options).read_bytes() == DATA
    service, store = amazon.arrivals
    assert service.url.startswith('https://sts.')
    assert store.scope[1] == 'ROLE'


def test_service_that_issues_keys_and_is_not_trusted_is_named(amazon, configure):
    configure(ROLE, {'AWS_CA_BUNDLE': None}, {})
    with pytest.raises(AccessDeniedError, match='s3://bucket.*SSL validation failed.*pass its file as tls_verify='):
        granular.Path('s3://bucket/key').read_bytes()


@pytest.mark.parametrize('point', [f'{POINT}/name', f'{POINT}:name'])
def test_access_point_in_addresses_of_fsspec(point, amazon, configure):
    configure('', {**KEYS, **IRELAND}, {})
    filesystem = fsspec.filesystem('granular+s3', config=QUICK)
    for prefix in ('granular+s3://', ''):
        assert filesystem.cat_file(f'{prefix}{point}/a/key') == DATA
    assert {arrival.url for arrival in arrivals_of(amazon)} == {
        'https://name-123456789012.s3-accesspoint.us-west-2.amazonaws.com/a/key'
    }
    path = granular.Path(f's3://{point}/a/key')
    assert granular.Path(str(path)) == path
    assert (path.name, path.parent.name, path.parent.parent.parts) == ('key', 'a', (f's3://{point}',))


def test_copy_within_an_access_point_names_the_object_of_it(amazon, configure):
    configure('', {**KEYS, **IRELAND}, {})
    amazon.script = [(200, DATA), (404, b'')]  # the second object does not exist
    granular.Path(f's3://{POINT}:name/a', config=QUICK).copy(granular.Path(f's3://{POINT}:name/b', config=QUICK))
    sources = {arrival.headers.get('x-amz-copy-source') for arrival in arrivals_of(amazon)} - {None}
    assert {urllib.parse.unquote(source) for source in sources} == {f'{POINT}/name/object/a'}


# --- directory buckets


@pytest.fixture
def directory(amazon, configure):
    configure('', {**KEYS, 'AWS_DEFAULT_REGION': 'us-east-1'}, {})
    return granular.Path(f's3://{DIRECTORY}', config=granular.IOConfig(concurrency=1, backoff=0.001))


def error(code, more=''):
    return f'<Error><Code>{code}</Code><Message>said by the store</Message>{more}</Error>'.encode()


def test_session_serves_all_requests_of_a_directory_bucket(amazon, directory):
    assert [(directory / f'{i}').read_bytes() for i in range(3)] == [DATA] * 3
    (directory / 'folder/new').write_bytes(DATA)
    assert list((directory / 'folder').glob('be*')) == []
    assert amazon.sessions == 1
    session, *others = arrivals_of(amazon)
    assert session.scope == ('AWS4-HMAC-SHA256', 'AK', 'us-east-1', 's3express')
    for arrival in others:
        assert arrival.scope == ('AWS4-HMAC-SHA256', 'SESSION', 'us-east-1', 's3express')
        assert arrival.headers['x-amz-s3session-token'] == 'token-1'
        assert arrival.is_signed_by(SECRETS['SESSION'])
        assert 'content-md5' not in arrival.headers
    assert {arrival.headers.get('x-amz-checksum-crc32c') for arrival in others if arrival.method == 'PUT'} != {None}
    # A directory bucket lists whole folders only.
    assert any('prefix=folder%2F&' in arrival.url for arrival in others)


@pytest.mark.parametrize('status', [400, 403])
@pytest.mark.parametrize('code', ['ExpiredToken', 'InvalidToken'])
def test_session_that_has_expired_is_opened_again(status, code, amazon, directory):
    assert (directory / 'key').read_bytes() == DATA
    amazon.script = [(status, error(code))]
    assert (directory / 'key').read_bytes() == DATA
    assert amazon.sessions == 2
    assert arrivals_of(amazon)[-1].headers['x-amz-s3session-token'] == 'token-2'


def test_session_is_renewed_before_it_expires(amazon, directory):
    amazon.expiry = '2020-01-01T00:00:00Z'
    assert [(directory / 'key').read_bytes() for _ in range(3)] == [DATA] * 3
    assert amazon.sessions == 3


def test_session_that_cannot_be_opened_names_the_words_of_the_store(amazon, directory):
    amazon.refusals = [(503, error('SlowDown')), (500, b''), (200, b'<CreateSessionResult/>')]
    assert (directory / 'key').read_bytes() == DATA
    amazon.reset()
    amazon.script, amazon.refusals = [(400, error('ExpiredToken'))], [(403, error('AccessDenied'))]
    with pytest.raises(AccessDeniedError, match='status 403, AccessDenied: said by the store'):
        (directory / 'key').read_bytes()
    with pytest.raises(InvalidArgumentError, match='create it with the AWS command line'):
        amazon.script = [(404, error('NoSuchBucket'))]
        directory.mkdir()


# --- regions

REGIONS = {
    'malformed': (400, error('AuthorizationHeaderMalformed', '<Region>eu-west-3</Region>')),
    'moved': (301, error('PermanentRedirect', '<Endpoint>bucket.s3-eu-west-3.amazonaws.com</Endpoint>')),
    'moved, path': (301, error('PermanentRedirect', '<Endpoint>s3.eu-west-3.amazonaws.com</Endpoint>')),
    'moved for a time': (307, error('TemporaryRedirect', '<Endpoint>bucket.s3.eu-west-3.amazonaws.com</Endpoint>')),
}  # fmt: skip
OPERATIONS = {
    'read': lambda path: path.read_bytes(),
    'stat': lambda path: path.stat(),
    'exists': lambda path: path.exists(),
    'glob': lambda path: list(path.glob('*')),
    'write': lambda path: path.write_bytes(DATA),
}


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('name', REGIONS)
def test_region_that_only_a_body_names_is_used(name, operation, amazon, configure):
    configure('', {**KEYS, **IRELAND}, {})
    amazon.script = [REGIONS[name]] * (2 if operation in ('stat', 'exists') else 1)  # a reply to HEAD has no body
    OPERATIONS[operation](granular.Path('s3://bucket/key', config=QUICK))
    last = arrivals_of(amazon)[-1]
    assert last.url.startswith('https://bucket.s3.eu-west-3.amazonaws.com/')
    assert last.scope == ('AWS4-HMAC-SHA256', 'AK', 'eu-west-3', 's3')
    assert last.is_signed_by('SK')


def test_other_region_of_a_given_endpoint_changes_the_signature_alone(amazon, configure):
    configure('', {**KEYS, **IRELAND}, {})
    sent = []
    reply = 400, error('AuthorizationHeaderMalformed', '<Region>garage</Region>')
    options = {'endpoint_url': 'http://store.test:81/path'}
    client, arguments = oracle('bucket', options)
    with contextlib.closing(client):
        amazon.script = [reply]
        client.get_object(**arguments, Key='key')['Body'].read()
    sent.append([sent_by(arrival) for arrival in arrivals_of(amazon) if arrival.method == 'GET'])
    amazon.script = [reply]
    assert granular.Path('s3://bucket/key', config=QUICK, **options).read_bytes() == DATA
    sent.append([sent_by(arrival) for arrival in arrivals_of(amazon)])
    assert sent[0] == sent[1]


@pytest.mark.parametrize('region', ['evil.test', 'a/b', 'x-y-z@evil', '', 'eu west 1'])
def test_region_that_is_none_is_not_followed(region, amazon, configure):
    configure('', {**KEYS, **IRELAND}, {})
    amazon.script = [(400, error('AuthorizationHeaderMalformed', f'<Region>{region}</Region>'))]
    with pytest.raises(GranularError, match='AuthorizationHeaderMalformed: said by the store'):
        granular.Path('s3://bucket/key', config=QUICK).read_bytes()
    assert len(amazon.arrivals) == 1


# --- errors

# The configuration, the variables, the options, the bucket, the class of the error and its words.
REFUSED = {
    'bucket with a space': ('', {}, {}, 'a b', InvalidArgumentError, 'Invalid bucket name "a b"'),
    'bucket with a colon': ('', {}, {}, 'tenant:a', InvalidArgumentError, 'Invalid bucket name "tenant:a"'),
    'bucket, ARN': ('', {}, {}, 'arn:aws:s3:::bucket', InvalidArgumentError, 'expected s3://bucket, or the ARN'),
    'ARN, account': ('', {}, {}, 'arn:aws:s3:us-west-2:1:accesspoint/a', InvalidArgumentError, 'Invalid bucket name'),
    'ARN, region': (
        profile('s3_use_arn_region = false'), IRELAND, {}, f'{POINT}/a', InvalidArgumentError, 'us-west-2',
    ),
    'ARN, region, variable': (
        '', {**IRELAND, 'AWS_S3_USE_ARN_REGION': 'false'}, {}, f'{POINT}/a', InvalidArgumentError, 'us-west-2',
    ),
    'ARN, region, option': (
        '', IRELAND, {'config_kwargs': {'s3': {'use_arn_region': False}}}, f'{POINT}/a', InvalidArgumentError,
        'us-west-2',
    ),
    'ARN, acceleration': (
        profile('s3 =\n  use_accelerate_endpoint = true'), {}, {}, f'{POINT}/a', InvalidArgumentError, 'Accelerate',
    ),
    'several regions': (
        '', {'AWS_S3_DISABLE_MULTIREGION_ACCESS_POINTS': 'true'}, {}, 'arn:aws:s3::123456789012:accesspoint/abc.mrap',
        InvalidArgumentError, 'Multi-Region Access Point',
    ),
    'region': ('', {'AWS_DEFAULT_REGION': 'eu west'}, {}, 'bucket', InvalidArgumentError, "region_name 'eu west'"),
    'addressing style': (
        profile('s3 =\n  addressing_style = odd'), {}, {}, 'bucket', InvalidArgumentError, 'addressing style odd',
    ),
    'addressing style, option': (
        '', {}, {'config_kwargs': {'s3': {'addressing_style': 'odd'}}}, 'bucket', InvalidArgumentError, 'style odd',
    ),
    'signature version 2': (
        '', {}, {'config_kwargs': {'signature_version': 's3'}}, 'bucket', InvalidArgumentError, 'of version 4',
    ),
    'FIPS and acceleration': (
        profile('use_fips_endpoint = true\ns3 =\n  use_accelerate_endpoint = true'), {}, {}, 'bucket',
        InvalidArgumentError, 'FIPS',
    ),
    'retries': ('', {}, {'config_kwargs': {'retries': 'x'}}, 'bucket', InvalidArgumentError, 'cannot be used'),
    'no section': (profile('s3 = text'), {}, {}, 'bucket', InvalidArgumentError, 'cannot be used: AttributeError'),
    'attempts': ('', {'AWS_MAX_ATTEMPTS': 'many'}, {}, 'bucket', InvalidArgumentError, "'many'"),
    'profile': ('', {'AWS_PROFILE': 'none'}, {}, 'bucket', AccessDeniedError, r'\(none\).*`aws configure`'),
    'profile, anonymous': ('', {}, {'profile': 'none', 'anon': True}, 'bucket', AccessDeniedError, r'\(none\)'),
    'configuration': ('no section', {}, {}, 'bucket', InvalidArgumentError, 'is not an AWS configuration file'),
    'no credentials': (
        '', dict.fromkeys(KEYS), {}, 'bucket', AccessDeniedError, 'no AWS credentials: set AWS_ACCESS_KEY_ID',
    ),
}  # fmt: skip


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('name', REFUSED)
def test_settings_that_cannot_be_used_are_named(name, operation, amazon, configure):
    config, variables, options, bucket, kind, words = REFUSED[name]
    configure('', KEYS, {})
    configure(config, variables, {})
    with pytest.raises(kind, match=words) as caught:
        OPERATIONS[operation](granular.Path(f's3://{bucket}/key', config=QUICK, **options))
    assert f's3://{bucket}' in str(caught.value) or name == 'configuration'
    assert '\n' not in str(caught.value)
    assert amazon.arrivals == []


def test_access_point_of_several_regions_needs_another_package(amazon, configure, monkeypatch):
    configure('', {**KEYS, **IRELAND}, {})
    monkeypatch.delitem(botocore.auth.AUTH_TYPE_MAPS, 's3v4a', raising=False)
    monkeypatch.delitem(botocore.auth.AUTH_TYPE_MAPS, 'v4a', raising=False)
    monkeypatch.setattr('botocore.utils.HAS_CRT', False, raising=False)
    with pytest.raises(MissingExtraError, match=r"pip install 'botocore\[crt\]'"):
        granular.Path('s3://arn:aws:s3::123456789012:accesspoint/abc.mrap/key').read_bytes()
    assert amazon.arrivals == []


class Asymmetric:
    """A signer in place of that of botocore[crt], whose signatures have no region."""

    REQUIRES_REGION, REQUIRES_TOKEN = True, False

    def __init__(self, credentials, service_name, region_name):
        self.key, self.scope, self.regions = (
            credentials.access_key,
            f'20260101/{service_name}/aws4_request',
            region_name,
        )

    def add_auth(self, request):
        request.headers['X-Amz-Region-Set'] = self.regions
        request.headers['Authorization'] = (
            f'AWS4-ECDSA-P256-SHA256 Credential={self.key}/{self.scope}, SignedHeaders=host, Signature={request.data!r}'
        )


def test_access_point_of_several_regions_is_signed_by_that_package(amazon, configure, monkeypatch):
    configure('', {**KEYS, **IRELAND}, {})
    for name in ('v4a', 's3v4a'):
        monkeypatch.setitem(botocore.auth.AUTH_TYPE_MAPS, name, Asymmetric)
    path = granular.Path('s3://arn:aws:s3::123456789012:accesspoint/abc.mrap/key', config=QUICK)
    assert path.read_bytes() == DATA
    path.write_bytes(DATA)
    for arrival in arrivals_of(amazon):
        assert arrival.url.startswith('https://abc.mrap.accesspoint.s3-global.amazonaws.com/key')
        assert arrival.headers['x-amz-region-set'] == '*'
        assert arrival.headers['authorization'].startswith(
            'AWS4-ECDSA-P256-SHA256 Credential=AK/20260101/s3/aws4_request'
        )
        assert arrival.headers['authorization'].endswith(repr(DATA if arrival.method == 'PUT' else b''))


def test_settings_of_the_documentation_are_tested():
    """The rows of the table in docs/recipes/credentials.md are among those above, and of the files named here."""
    page = (Path(granular.__file__).parent.parent / 'docs/recipes/credentials.md').read_text()
    table = page.partition('| setting of a profile |')[2].partition('\n\n')[0]
    cells = [cell for line in table.splitlines()[2:] for cell in line.split('|')[1:3]]
    names = {name.rpartition(' = ')[2] for cell in cells for name in re.findall('`([^`]+)`', cell)}
    own = Path(__file__).read_text().partition('def test_settings_of_the_documentation')[0]
    others = (Path(__file__).parent / 'test_credential_sources.py').read_text()
    assert len(names) > 30
    assert [name for name in names if name not in own and name not in others] == []
