"""Hosts with several addresses, some of which are dead, and names whose addresses change."""

import asyncio
import contextlib
import itertools
import socket
import urllib.parse

import pytest

import granular
from tests.support.faults import DATA, FaultServer

LIVE = '127.0.0.1'
SILENT = ['127.0.0.7', '127.0.0.8', '127.0.0.9', '::1']  # these drop every packet
REFUSING = '127.0.0.5'
NUMBERS = itertools.count()


@pytest.fixture
def server():
    with FaultServer() as server:
        server.port = urllib.parse.urlsplit(server.endpoint).port
        # The process remembers which servers it has reached, and ports are given out again.
        server.name = f'data{next(NUMBERS)}.test'
        yield server


@pytest.fixture
def silent(server):
    """Let addresses drop the packets of new connections, as those of a machine that is gone: their queues are full."""
    with contextlib.ExitStack() as stack:
        for address in SILENT:
            family = socket.AF_INET6 if ':' in address else socket.AF_INET
            queue = stack.enter_context(socket.socket(family))
            queue.bind((address, server.port))
            queue.listen(0)
            for _ in range(3):
                waiting = stack.enter_context(socket.socket(family))
                waiting.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    waiting.connect((address, server.port))
        yield


class Names:
    """A resolver that knows one name, whose addresses may be set."""

    def __init__(self, name):
        self.name = name
        self.addresses = [LIVE]
        self.later = None  # the addresses from the second look-up on
        self.error = socket.EAI_NONAME  # without addresses
        self.asked = 0  # how often there were none
        self._look_up = socket.getaddrinfo

    def __call__(self, host, *args, **kwargs):
        hosts = [host]
        if host == self.name:
            hosts, self.addresses = self.addresses, self.later or self.addresses
        if not hosts:
            self.asked += 1
            raise socket.gaierror(self.error, 'Name or service not known')
        return [entry for host in hosts for entry in self._look_up(host, *args, **kwargs)]


@pytest.fixture
def names(server, monkeypatch):
    names = Names(server.name)
    monkeypatch.setattr(socket, 'getaddrinfo', names)
    return names


async def read(server, count=8, **settings):
    """Read over that many new connections. Returns the number of retries."""
    before = granular.io_stats()['retries']
    config = granular.IOConfig(hedge=0, backoff=0.01, **settings)
    path = granular.aio.Path(f'http://{server.name}:{server.port}/object', config=config)
    assert await asyncio.gather(*(path.read_range(10, 50) for _ in range(count))) == [DATA[10:50]] * count
    await granular.aio.aclose()
    return granular.io_stats()['retries'] - before


@pytest.mark.parametrize('dead', [SILENT[:1], SILENT[:3], SILENT[3:], [REFUSING], [REFUSING, *SILENT]], ids='-'.join)
@pytest.mark.parametrize('first', [True, False])
async def test_dead_addresses_of_a_host_cost_no_attempt(dead, first, server, silent, names):
    names.addresses = [*dead, LIVE] if first else [LIVE, *dead]
    assert await read(server) == 0


@pytest.mark.parametrize('dead', [SILENT[:1], [REFUSING], []], ids=['silent', 'refusing', 'unknown'])
async def test_names_of_dead_hosts_are_looked_up_again(dead, server, silent, names):
    names.addresses, names.later = dead, [LIVE]
    assert await read(server, 1, connect_timeout=0.5, attempts=4) == 1


async def test_host_without_a_living_address_is_an_error(server, silent, names):
    names.addresses = [SILENT[0], REFUSING]
    with pytest.raises(granular.errors.StoreError, match=rf'no connection to {server.name}:'):
        await read(server, connect_timeout=0.7, attempts=2)


@pytest.mark.parametrize(('error', 'attempts'), [(socket.EAI_NONAME, 2), (socket.EAI_NODATA, 2), (socket.EAI_AGAIN, 6)])
async def test_host_name_that_does_not_exist_fails_soon(error, attempts, server, names):
    names.addresses, names.error = [], error
    with pytest.raises(granular.errors.StoreError, match=f"'{server.name}' cannot be resolved") as caught:
        await read(server, 1, attempts=6, connect_timeout=100)
    assert names.asked == attempts
    assert 'check its address' in str(caught.value)


@pytest.mark.parametrize('error', [socket.EAI_NONAME, socket.EAI_AGAIN])
async def test_host_name_that_is_lost_is_looked_up_until_the_time_is_up(error, server, names):
    await read(server, 1)
    names.addresses, names.error = [], error
    with pytest.raises(granular.errors.StoreError, match=f"'{server.name}' cannot be resolved") as caught:
        await read(server, 1, attempts=2, backoff_cap=0.02, retry_time=0.5)
    assert names.asked > 2
    assert 'check its address' not in str(caught.value)
