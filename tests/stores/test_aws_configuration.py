"""The authorities of TLS that the configuration of AWS names."""

import contextlib
import warnings

import pytest

import granular
from granular.errors import InvalidArgumentError, StoreError
from tests.support.faults import DATA, FaultServer

QUICK = granular.IOConfig(attempts=1)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return the folder of the configuration, which is empty."""
    for name in ('AWS_PROFILE', 'AWS_CA_BUNDLE', 'HTTP_PROXY', 'HTTPS_PROXY', 'http_proxy', 'https_proxy'):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv('AWS_CONFIG_FILE', str(tmp_path / 'config'))
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(tmp_path / 'credentials'))
    return tmp_path


@pytest.fixture
def server(certified):
    with FaultServer(certified) as server:
        yield server


BUNDLES = {
    'variable': ('', {'AWS_CA_BUNDLE': 'BUNDLE'}, {}),
    'profile': ('[default]\nca_bundle = BUNDLE\n', {}, {}),
    'another profile': ('[profile other]\nca_bundle = BUNDLE\n', {}, {'profile': 'other'}),
    'variable before profile': ('[default]\nca_bundle = /none\n', {'AWS_CA_BUNDLE': 'BUNDLE'}, {}),
    'option before both': ('[default]\nca_bundle = /none\n', {'AWS_CA_BUNDLE': '/none'}, {'tls_verify': 'BUNDLE'}),
    'none needed': ('[default]\nca_bundle = /none\n', {}, {'tls_verify': False}),
}


@pytest.mark.parametrize('name', BUNDLES)
def test_bundle_of_authorities_is_that_of_the_configuration(name, home, server, bundle, monkeypatch):
    config, variables, options = BUNDLES[name]
    (home / 'config').write_text(config.replace('BUNDLE', bundle))
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value.replace('BUNDLE', bundle))
    options = {key: bundle if value == 'BUNDLE' else value for key, value in options.items()}
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        path = granular.Path(
            's3://bucket/key', endpoint_url=server.endpoint, key='k', secret='s', config=QUICK, **options
        )
        assert path.read_bytes() == DATA


def test_unknown_authority_names_the_remedy(home, server):
    with pytest.raises(StoreError, match='certificate verify failed.*pass its file as tls_verify='):
        granular.Path('s3://bucket/key', endpoint_url=server.endpoint, key='k', secret='s', config=QUICK).read_bytes()


@pytest.mark.parametrize('content', [None, 'no certificate'])
def test_bundle_that_cannot_be_read_is_named(home, server, monkeypatch, content):
    file = home / 'bundle.pem'
    with contextlib.suppress(TypeError):
        file.write_text(content)
    monkeypatch.setenv('AWS_CA_BUNDLE', str(file))
    with pytest.raises(InvalidArgumentError, match=r'bundle\.pem.*AWS_CA_BUNDLE.*cannot be read as a CA bundle'):
        granular.Path('s3://bucket/key', endpoint_url=server.endpoint, key='k', secret='s', config=QUICK).read_bytes()
