"""Proxies of the environment, in front of web servers and buckets."""

import asyncio
import os
import ssl

import pytest
import trustme
import uvloop

import granular
from granular.errors import AccessDeniedError, InvalidArgumentError, StoreError
from tests.support.forward_proxy import ForwardProxy, away
from tests.support.servers import HTTPServer, TLSProxy

QUICK = granular.IOConfig(attempts=3, backoff=0.01)


@pytest.fixture(scope='module')
def proxy(tmp_path_factory):
    proxy = ForwardProxy(tmp_path_factory.mktemp('proxy'))
    yield proxy
    proxy.close()


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ('http_proxy', 'https_proxy', 'no_proxy', 'all_proxy'):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server(tmp_path):
    (tmp_path / 'served').mkdir()
    (tmp_path / 'served' / 'object').write_bytes(bytes(range(256)) * 1000)
    with HTTPServer(tmp_path / 'served') as server:
        yield server


@pytest.fixture
def secure(server, tmp_path):
    """The server over TLS: its address, and the authority to trust."""
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.cert_pem.write_to_path(str(tmp_path / 'authority.pem'))
    authority.issue_cert('0.0.0.0').configure_cert(context)
    with TLSProxy(context, server.endpoint) as front:
        yield away(front.endpoint), str(tmp_path / 'authority.pem')


EXPECTED = (bytes(range(256)) * 1000)[1000:1600]


def test_web_server_is_read_through_a_proxy(proxy, server, monkeypatch):
    monkeypatch.setenv('HTTP_PROXY', proxy.address)
    address = f'{away(server.endpoint)}/object'
    assert granular.Path(address, config=QUICK).read_range(1000, 1600) == EXPECTED


@pytest.mark.parametrize('password', ['wrong', 'wrong%FF', os.fsdecode(b'wrong\xff')])
def test_proxy_that_denies_access_is_an_error(proxy, server, monkeypatch, password):
    monkeypatch.setenv('HTTP_PROXY', proxy.address.replace('se%3Acret', password))
    with pytest.raises(AccessDeniedError, match='proxy denied access') as caught:
        granular.Path(f'{away(server.endpoint)}/object', config=QUICK).read_range(1000, 1600)
    assert 'wrong' not in str(caught.value)


@pytest.mark.parametrize('run', [uvloop.run, asyncio.run])
def test_web_server_is_read_through_a_tunnel(proxy, secure, monkeypatch, run):
    monkeypatch.setenv('HTTPS_PROXY', proxy.address)
    address, authority = secure

    async def read():
        return await granular.aio.Path(f'{address}/object', config=QUICK, tls_verify=authority).read_range(1000, 1600)

    assert run(read()) == EXPECTED
    monkeypatch.setenv('HTTPS_PROXY', proxy.address.replace('se%3Acret', 'wrong'))
    with pytest.raises(AccessDeniedError, match='proxy 127.0.0.1:[0-9]+ refused') as caught:
        run(read())
    assert 'wrong' not in str(caught.value)


def test_certificate_is_verified_behind_a_proxy(proxy, secure, monkeypatch):
    monkeypatch.setenv('HTTPS_PROXY', proxy.address)
    with pytest.raises(StoreError, match='certificate'):
        granular.Path(f'{secure[0]}/object', config=QUICK).read_bytes()


@pytest.mark.parametrize('store', ['moto', 'fakegcs'])
def test_dataset_in_a_bucket_is_written_and_read_through_a_proxy(proxy, store, request, monkeypatch):
    server = request.getfixturevalue(store)
    options = {**server.options, 'endpoint_url': away(server.endpoint)}
    monkeypatch.setenv('HTTP_PROXY', proxy.address)
    folder = granular.Path(f'{server.place()}', **options)
    with granular.DatasetWriter(folder, {'x': 'bytes'}) as writer:
        for i in range(20):
            writer.append({'x': bytes([i]) * 50_000})
    with granular.DatasetReader(folder) as reader:
        assert [point['x'] for point in reader] == [bytes([i]) * 50_000 for i in range(20)]


def test_addresses_of_no_proxy_and_of_this_machine_are_asked_for_directly(server, secure, monkeypatch):
    monkeypatch.setenv('HTTP_PROXY', 'http://127.0.0.1:9')
    monkeypatch.setenv('HTTPS_PROXY', '127.0.0.1:9')
    assert granular.Path(f'{server.endpoint}/object', config=QUICK).read_range(1000, 1600) == EXPECTED
    with pytest.raises(StoreError, match='through the proxy 127.0.0.1:9 '):
        granular.Path(f'{secure[0]}/object', config=QUICK, tls_verify=secure[1]).read_bytes()
    monkeypatch.setenv('NO_PROXY', 'example.org,0.0.0.0')
    assert granular.Path(f'{away(server.endpoint)}/object', config=QUICK).read_range(1000, 1600) == EXPECTED


@pytest.mark.parametrize('address', ['socks5://host:1', 'http://:1', 'https://host:1', 'http://host:port'])
def test_proxy_of_another_kind_is_an_error(address, monkeypatch):
    monkeypatch.setenv('HTTP_PROXY', address)
    with pytest.raises(InvalidArgumentError, match=r'HTTP_PROXY: expected http://host:port'):
        granular.Path('http://example.org/object', config=QUICK).read_bytes()
