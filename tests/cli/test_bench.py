"""``granular bench``: bounds of seconds and bytes, what it measures of slow and throttling servers, and its advice."""

import contextlib
import dataclasses
import json
import math
import re
import ssl
import time

import pytest
import trustme

import granular
from granular.cli import bench as benches
from granular.cli.bench import Measurement, bench, limit_of, saturating
from granular.errors import InvalidArgumentError, NotFoundError, StoreTimeoutError
from tests.support.servers import HTTPServer, TLSProxy

DELAY = 0.01
BANDWIDTH = 4_000_000
MIB = 1 << 20


class ThrottlingServer(HTTPServer):
    """Answers each tenth request with status 503."""

    def _reply(self, path, range_header):
        if range_header is not None and len(self.requests) % 10 == 0:
            return 503, {}, b'slow down'
        return super()._reply(path, range_header)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / 'data').mkdir()
    for name, size in (('large', 2 * MIB), ('small', 5000), ('empty', 0)):
        (tmp_path / 'data' / name).write_bytes(bytes(range(250)) * (size // 250))
    return tmp_path


def requested(server):
    """Return the bytes that a server was asked for."""
    total = 0
    for method, _, ranges in server.requests:
        if method == 'GET' and (match := re.fullmatch(r'bytes=(\d*)-(\d+)', ranges or '')):
            total += int(match[2]) - int(match[1]) + 1 if match[1] else int(match[2])
    return total


def test_bench_measures_latency_within_its_bytes(folder):
    with HTTPServer(folder, DELAY) as server:
        result = bench(granular.Path(f'{server.endpoint}/data'), 30, 2 * MIB)
        assert result.bytes <= requested(server) <= 2 * MIB
    assert result.first_byte_p99 >= result.first_byte_p50 >= DELAY
    assert (result.objects, result.tls) == (2, False)
    assert [one.in_flight for one in result.by_in_flight] == list(benches.IN_FLIGHT)
    assert result.by_in_flight[0].requests_per_second <= 1 / DELAY
    assert result.throttled == 0
    assert result.bytes_per_second >= result.by_in_flight[0].bytes_per_second
    granular.IOConfig(**result.settings)
    assert result.advice


def test_seconds_are_bounded_when_there_are_bytes(folder):
    with HTTPServer(folder, DELAY) as server:
        began = time.monotonic()
        result = bench(granular.Path(f'{server.endpoint}/data/large'), 2, 1 << 40)
        assert time.monotonic() - began < 30  # on a busy machine
    assert result.seconds < 30
    assert result.objects == 1


def test_throttling_is_seen_and_limits(folder):
    with ThrottlingServer(folder) as server:
        config = granular.IOConfig(backoff=0.001, backoff_cap=0.002)
        result = bench(granular.Path(f'{server.endpoint}/data', config=config), 30, MIB)
    assert result.throttled > 0
    assert result.retries >= result.throttled - 1  # the last may be cancelled when the time is up
    assert result.limit == 'the store'
    assert f'throttled {result.throttled} requests' in result.advice[0]


@pytest.mark.parametrize('tls', [False, True])
def test_rates_are_those_of_a_server_of_known_bandwidth(folder, tls):
    with contextlib.ExitStack() as stack:
        endpoint, options = stack.enter_context(HTTPServer(folder, bandwidth=BANDWIDTH)).endpoint, {}
        if tls:
            authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            authority.issue_cert('127.0.0.1').configure_cert(context)
            authority.cert_pem.write_to_path(str(folder / 'authority.pem'))
            endpoint = stack.enter_context(TLSProxy(context, endpoint)).endpoint
            options = {'tls_verify': str(folder / 'authority.pem')}
        for _ in range(6):  # on a busy machine, the processor that the server has may be the limit of some runs
            result = bench(granular.Path(f'{endpoint}/data/large', **options), 60, 3 * MIB)
            if result.bytes_per_second > BANDWIDTH / 2:
                break
    assert result.tls == tls
    assert result.bytes <= BANDWIDTH * result.seconds * 1.1
    # Bytes of a measurement may have been sent, up to those of its requests in flight, before its clock started.
    for one in (*result.by_in_flight, *result.by_size):
        if one.requests:
            assert 0 < one.bytes_per_second <= BANDWIDTH * (1 + 2 * one.in_flight / one.requests)
    assert all(one.requests for one in result.by_in_flight)
    assert BANDWIDTH / 2 < result.bytes_per_second < BANDWIDTH * 1.5


@pytest.mark.parametrize(('rate', 'limit'), [(2_000_000, 'bandwidth'), (math.inf, 'latency')])
def test_a_second_run_confirms_the_recommendation(folder, rate, limit):
    with HTTPServer(folder, 0.1, rate) as server:
        for _ in range(6):  # on a busy machine, the processor that the server has may be the limit of some runs
            first, second = (bench(granular.Path(f'{server.endpoint}/data/large'), 8, 8 * MIB) for _ in range(2))
            if first.limit == second.limit == limit:
                break
    assert first.limit == second.limit == limit
    assert set(first.settings) == set(second.settings) == {'max_gap'}
    assert 0.25 <= first.settings['max_gap'] / second.settings['max_gap'] <= 4


def test_sizes_are_read_with_no_more_requests_in_flight_than_the_bytes_allow(folder):
    with HTTPServer(folder) as server:
        result = bench(granular.Path(f'{server.endpoint}/data/large'), 30, 8 * MIB)
    for one in result.by_size:
        assert one.in_flight == 1 or one.requests >= 2 * one.in_flight


def test_bench_of_a_bucket_measures_the_objects_of_a_dataset(fakegcs):
    place = fakegcs.place()
    with granular.DatasetWriter(place, {'x': 'bytes'}, granular.encoders) as writer:
        writer.append({'x': bytes(100_000)})
    result = bench(place, 30, MIB)
    assert result.objects >= 2
    assert result.requests > 10
    assert not result.tls


@pytest.mark.parametrize(('seconds', 'nbytes'), [(0, MIB), (1, 100), (-1, MIB), (math.nan, MIB), (1, math.inf)])
def test_bounds_are_checked(folder, seconds, nbytes):
    with HTTPServer(folder) as server, pytest.raises(InvalidArgumentError, match='expected a number from '):
        bench(granular.Path(server.endpoint), seconds, nbytes)


def test_places_that_cannot_be_measured_are_errors(folder):
    with pytest.raises(InvalidArgumentError, match='got a local one'):
        bench(granular.Path(folder))
    with HTTPServer(folder) as server:
        for name in ('data/empty', 'data/missing'):
            with pytest.raises(NotFoundError):
                bench(granular.Path(f'{server.endpoint}/{name}'), 5)
    with HTTPServer(folder, 5.0) as server, pytest.raises(StoreTimeoutError, match=r'within 0\.2 s'):
        bench(granular.Path(f'{server.endpoint}/data'), 0.2)


def measured(in_flight, size, rate, cpu=0.1):
    return Measurement(in_flight, size, 100, rate, rate * size, cpu, cpu / rate)


def flights(*rates, cpu=0.1):
    return [measured(count, 4096, rate, cpu) for count, rate in zip(benches.IN_FLIGHT, rates, strict=True)]


@pytest.mark.parametrize(
    ('rates', 'sizes', 'throttled', 'limit', 'in_flight'),
    [
        ((40, 160, 640, 2500, 9000), (9000, 900, 250), 0, 'latency', 256),
        ((40, 160, 640, 2500, 4800), (300, 19, 5), 0, 'bandwidth', 256),
        ((40, 160, 640, 660, 650), (40, 2.5, 0.6), 0, 'bandwidth', 16),
        ((40, 160, 640, 660, 650), (640, 600, 500), 0, 'the store', 16),
        ((40, 160, 640, 2500, 9000), (9000, 900, 250), 3, 'the store', 256),
    ],
)
def test_limit_follows_from_measurements(rates, sizes, throttled, limit, in_flight):
    by_in_flight = flights(*rates)
    best = saturating(by_in_flight)
    by_size = [measured(best.in_flight, size, rate) for size, rate in zip(benches.SIZES, sizes, strict=True)]
    rate = max(benches.bandwidth(one, 0.025) for one in by_size)
    assert best.in_flight == in_flight
    assert limit_of(best, by_in_flight, by_size, rate, throttled) == limit
    settings, advice = benches.advise(limit, best, rate, throttled)
    granular.IOConfig(**settings)
    assert len(advice) == (1 if throttled else 2)
    # What is said of large requests must not slow down small ones.
    assert settings.get('concurrency') == (best.in_flight if limit == 'the store' and not throttled else None)


def test_limit_is_unknown_if_too_little_was_measured():
    by_in_flight = flights(40, 160, 640, 2500, 9000)
    by_size = [dataclasses.replace(measured(256, benches.SIZES[0], 1.0), requests=0)]
    assert limit_of(by_in_flight[-1], by_in_flight, by_size, 1e9, 0) == 'unknown'
    assert benches.advise('unknown', by_in_flight[-1], 1e9, 0)[0] == {}


def test_sizes_that_outlast_the_time_are_left_out(granular_cli, folder, monkeypatch):
    by_in_flight = flights(40, 160, 640, 2500, 9000)
    late = Measurement(8, benches.SIZES[-1], 0, 0.0, 0.0, 0.0, 0.0)
    by_size = [measured(256, benches.SIZES[0], 9000), late]
    assert limit_of(by_in_flight[-1], by_in_flight, by_size, 1e9, 0) == 'latency'
    with HTTPServer(folder) as server:
        result = bench(granular.Path(f'{server.endpoint}/data'), 30, MIB)
        monkeypatch.setattr(benches, 'bench', lambda *args: dataclasses.replace(result, by_size=by_size))
        _, out, _ = granular_cli('bench', f'{server.endpoint}/data')
    assert re.search(r' 8 +4\.2 MB +\? +\? +\? +\?', out)


def test_busy_thread_is_the_limit():
    by_in_flight = flights(1000, 4000, 8000, 8100, 8000, cpu=0.95)
    by_size = [measured(16, size, 8000) for size in benches.SIZES]
    assert limit_of(saturating(by_in_flight), by_in_flight, by_size, 1e9, 0) == 'this core'


def test_command_prints_a_plot_or_json(granular_cli, folder):
    with HTTPServer(folder) as server:
        code, out, err = granular_cli('bench', f'{server.endpoint}/data', '--seconds', 30, '--mib', 1)
        assert (code, err) == (0, '')
        for word in ('first byte: p50', 'requests/s', '█', 'limit: ', 'IOConfig('):
            assert word in out
        code, out, _ = granular_cli('bench', f'{server.endpoint}/data', '--seconds', 30, '--mib', 1, '--json')
        assert code == 0
        assert json.loads(out)['bytes_per_second'] > 0
