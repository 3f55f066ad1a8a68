"""Certificates are verified unless an option disables that, with one warning; no token is sent unencrypted."""

import asyncio
import contextlib
import itertools
import random
import shutil
import ssl
import urllib.parse
import warnings

import pytest

import granular
from granular import aio
from granular.aio.http import tls
from granular.errors import GranularError, InvalidArgumentError, StoreError
from tests.support.event_loops import run_on
from tests.support.faults import DATA, FaultServer
from tests.support.loop_server import LoopServer
from tests.support.servers import TLSProxy

QUICK = granular.IOConfig(backoff=0.01, attempts=2)


def remote(server, kind, endpoint, **options):
    """Return the path of a file in a bucket of this server, reached through another endpoint."""
    address = str(server.place() / 'file')
    return granular.Path(address, config=QUICK, **{**server.options, 'endpoint_url': endpoint, **options})


@pytest.mark.parametrize('kind', ['moto', 'fakegcs'])
def test_buckets_accept_a_ca_bundle(kind, request, certified, bundle, monkeypatch):
    monkeypatch.delenv('SSL_CERT_FILE', raising=False)
    monkeypatch.delenv('REQUESTS_CA_BUNDLE', raising=False)
    server = request.getfixturevalue(kind)
    with TLSProxy(certified, server.endpoint) as proxy:
        few = {'config_kwargs': {'retries': {'total_max_attempts': 1}}} if kind == 'moto' else {}
        refused = remote(server, kind, proxy.endpoint, **few)
        with pytest.raises(StoreError, match='(?i)certificate'):
            refused.read_bytes()
        with pytest.raises(StoreError, match='(?i)certificate'):
            refused.stat()
        for option in (bundle, False):
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                open_ = remote(server, kind, proxy.endpoint, tls_verify=option)
            content = random.Random(0).randbytes(500_000)
            open_.write_bytes(content)
            assert open_.read_bytes() == content
            assert open_.stat().size == len(content)
            assert [path.name for path in open_.parent.iterdir()] == ['file']


def test_web_servers_accept_a_ca_bundle(certified, bundle, monkeypatch):
    monkeypatch.delenv('SSL_CERT_FILE', raising=False)
    with FaultServer(certified) as server:
        url = f'{server.endpoint}/object'
        with pytest.raises(StoreError, match='(?i)certificate'):
            granular.Path(url).read_bytes()
        assert granular.Path(url, tls_verify=bundle).read_bytes() == DATA
        with pytest.warns(RuntimeWarning, match='not verified') as caught:
            open_ = granular.Path(url, tls_verify=False)
            assert open_.read_bytes() == DATA
        assert len(caught) == 1
        # Once is enough: warnings are errors here.
        assert granular.Path(url, tls_verify=False).read_range(1, 3) == DATA[1:3]
        assert (open_.parent / 'other').read_range(1, 3) == DATA[1:3]
        # What is opened without it does not share the connections of what is opened with it.
        with pytest.raises(StoreError, match='(?i)certificate'):
            granular.Path(url).read_bytes()


@pytest.mark.parametrize('scheme', ['https', 's3', 'gs'])
@pytest.mark.parametrize(
    'options', [{'tls_verify': None}, {'tls_verify': ''}, {'client_kwargs': {'verify': False}}, {'use_ssl': False}]
)
def test_other_tls_options_are_refused(scheme, options):
    with pytest.raises(InvalidArgumentError, match='tls_verify'):
        granular.Path(f'{scheme}://place/x', **options)


@pytest.mark.parametrize(
    'address', ['https://unverified.test', 's3://unverified', 'gs://unverified', 'hf://un/verified']
)
def test_the_warning_of_unverified_certificates_names_the_place(address):
    with pytest.warns(RuntimeWarning, match='not verified') as caught:
        granular.Path(f'{address}/x', tls_verify=False)
    assert [f'{warning.message}'.partition(': tls_verify=False: ')[0] for warning in caught] == [address]


def test_invalid_ca_bundle_is_an_error_until_it_is_there(certified, bundle, tmp_path):
    (tmp_path / 'x.pem').write_text('nothing')
    with FaultServer(certified) as server:
        for file in ('x.pem', 'missing.pem'):
            remote = granular.Path(f'{server.endpoint}/object', config=QUICK, tls_verify=str(tmp_path / file))
            for _ in range(2):
                with pytest.raises(GranularError, match='CA bundle'):
                    remote.read_bytes()
            shutil.copy(bundle, tmp_path / file)
            assert remote.read_bytes() == DATA


def test_pickled_path_keeps_tls_verify():
    import pickle

    path = granular.Path('https://place.example/x', tls_verify='/a/bundle.pem')
    assert pickle.loads(pickle.dumps(path)).store.tls_verify == '/a/bundle.pem'
    assert tls.verify_of('', {}) is True


# --- what arrives in other pieces than it was sent, and what does not arrive


class Wire(LoopServer):
    """Forwards the bytes of connections to a server in pieces of other sizes.

    Args:
      behind: the server's address.
      sizes: of the pieces.
      until: bytes from the server after which the connection is cut.
    """

    def __init__(self, behind, sizes, until=None):
        super().__init__()
        self.port, self.sizes, self.until = urllib.parse.urlsplit(behind).port, sizes, until

    async def serve(self, reader, writer):
        inner, outer = await asyncio.open_connection('127.0.0.1', self.port)

        async def pump(source, target, until=None):
            with contextlib.suppress(OSError):
                while (until is None or until > 0) and (data := await source.read(65536)):
                    data = data[:until]
                    until = until if until is None else until - len(data)
                    while data:
                        size = next(self.sizes)
                        target.write(data[:size])
                        data = data[size:]
                        await asyncio.sleep(0)
            target.close()

        try:
            await asyncio.gather(pump(reader, outer), pump(inner, writer, self.until))
        finally:
            outer.transport.abort()


@pytest.mark.parametrize('version', ['TLSv1_2', 'TLSv1_3'])
@pytest.mark.parametrize('loop', ['asyncio', 'uvloop'])
@pytest.mark.parametrize('largest', [3, 20_000, 200_000])
def test_records_of_tls_are_decrypted_however_they_arrive(version, loop, largest, certified, bundle):
    certified.maximum_version = ssl.TLSVersion[version]
    draw = random.Random(largest)
    starts = [draw.randrange(90_000) for _ in range(10)]
    stops = [draw.randrange(start + 1, 100_000) if largest > 3 else start + 1000 for start in starts]

    async def main():
        remote = granular.aio.Path(f'https://127.0.0.1:{port}/object', config=config, tls_verify=bundle)
        for _ in range(3):
            parts = await remote.read_ranges(starts, stops)
            assert parts == [DATA[start:stop] for start, stop in zip(starts, stops, strict=True)]
        await granular.aio.aclose()

    config = granular.IOConfig(max_gap=0, concurrency=3, hedge=0.0)
    sizes = (draw.randint(1, largest) for _ in itertools.count())
    with FaultServer(certified) as server, Wire(server.endpoint, sizes) as wire:
        port = urllib.parse.urlsplit(wire.endpoint).port
        run_on(loop, main)


@pytest.mark.parametrize('until', [0, 1, 700])
def test_handshake_that_is_cut_is_an_error(until, certified, bundle):
    with FaultServer(certified) as server, Wire(server.endpoint, itertools.repeat(9000), until) as wire:
        path = granular.Path(f'https{wire.endpoint[4:]}/object', config=QUICK, tls_verify=bundle)
        with pytest.raises(StoreError, match='no connection to 127'):
            path.read_bytes()


@pytest.mark.parametrize('answer', [b'', b'HTTP/1.1 400 X\r\n\r\n'])
def test_server_without_tls_is_an_error(answer, bundle):
    class Plain(LoopServer):
        async def serve(self, reader, writer):
            writer.write(answer)
            await reader.read()

    config = granular.IOConfig(backoff=0.01, attempts=2, connect_timeout=0.3)
    with Plain() as server, pytest.raises(StoreError, match='no connection to 127'):
        granular.Path(f'https{server.endpoint[4:]}/object', config=config, tls_verify=bundle).read_bytes()


# --- redirections, tokens


@pytest.mark.parametrize('header', ['Authorization', 'Cookie', 'X-Api-Key', 'PRIVATE-TOKEN'])
def test_credentials_are_not_sent_to_a_redirected_host(header):
    with FaultServer() as one, FaultServer() as other:
        one.script.append(('redirect', f'{other.endpoint}/elsewhere'))
        path = granular.Path(f'{one.endpoint}/object', headers={header: 'planted', 'User-Agent': 'mine'})
        assert path.read_range(10, 50) == DATA[10:50]
        assert one.heads[0][header] == 'planted'
        assert header not in other.heads[0]
        assert other.heads[0]['User-Agent'] == 'mine'
        assert other.heads[0]['Range'] == 'bytes=10-49'
        # Back again, it is not remembered.
        one.script.append(('redirect', f'{other.endpoint}/elsewhere'))
        other.script.append(('redirect', f'{one.endpoint}/object'))
        assert path.read_range(10, 50) == DATA[10:50]
        assert header not in one.heads[-1]


def test_listing_does_not_send_credentials_to_a_redirected_host():
    page = b'<html><a href="/folder/x">x</a></html>'
    reply = b'HTTP/1.1 200 X\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n%b' % (len(page), page)
    with FaultServer() as one, FaultServer() as other:
        one.script.append(('redirect', f'{other.endpoint}/folder/'))
        other.script.append(('raw', reply))
        list(granular.Path(f'{one.endpoint}/folder', headers={'Authorization': 'planted'}).iterdir())
        assert set(one.authorized) == {'planted'}  # also for the kind of "x", which the page does not tell
        assert other.authorized == ['']


def test_redirect_from_tls_to_plain_http_is_refused(certified, bundle):
    with FaultServer(certified) as server, FaultServer() as plain:
        server.script.extend([('redirect', f'{plain.endpoint}/elsewhere')] * 2)
        with pytest.raises(StoreError, match='from https to http://127'):
            granular.Path(f'{server.endpoint}/object', config=QUICK, tls_verify=bundle).read_bytes()
        assert not plain.ranges


@pytest.mark.parametrize(
    ('endpoint', 'sent'),
    [('http://storage.example', False), ('http://127.0.0.1.example', False), ('http://10.0.0.1:80', False),
     ('http://127.0.0.1:4443', True), ('http://[::1]:4443', True), ('http://localhost:4443', True),
     ('https://storage.example', True)],
)  # fmt: skip
def test_token_is_sent_only_over_tls_or_to_localhost(endpoint, sent):
    from google.oauth2.credentials import Credentials

    path = aio.Path('gs://bucket/object', config=QUICK, endpoint_url=endpoint, token=Credentials('ya29.planted'))

    async def sign():
        return await (await path.store.client()).sign(path.key)

    if sent:
        assert asyncio.run(sign())[1]['authorization'] == 'Bearer ya29.planted'
        return
    with pytest.raises(InvalidArgumentError, match='not sent over plain http') as caught:
        asyncio.run(sign())
    assert 'planted' not in str(caught.value)
