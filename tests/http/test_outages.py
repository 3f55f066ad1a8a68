"""An outage of a whole store is bounded by time, and the failure of one object by attempts."""

import multiprocessing
import re
import socket

import pytest

import granular
from granular.aio.runtime.replied import has_replied, replied_servers
from granular.errors import GranularError, StoreError
from tests.support.faults import DATA, FaultServer, md5_etag

LONG = 40  # failed requests in a row, four times as many as attempts
CONFIG = {'backoff': 0.001, 'backoff_cap': 0.002, 'retry_time': 600, 'hedge': 0}
PATIENT = granular.IOConfig(**CONFIG)
FAULTS = [('status', 500), ('status', 502), ('status', 503, 'SlowDown'), ('status', 504), 'reset']


@pytest.fixture
def server():
    with FaultServer() as server:
        yield server


def path(server, store, name='object', config=PATIENT):
    options = {'key': 'k', 'secret': 's'} if store == 's3' else {'token': 'anon'} if store == 'gs' else {}
    if store == 'http':
        return granular.Path(f'{server.endpoint}/bucket/{name}', config=config)
    return granular.Path(f'{store}://bucket/{name}', endpoint_url=server.endpoint, config=config, **options)


def attempts_of(error):
    return int(re.search(r'gave up after (\d+) attempt', error.__notes__[0])[1])


@pytest.mark.parametrize('store', ['s3', 'gs', 'http'])
@pytest.mark.parametrize('fault', FAULTS, ids=str)
def test_reads_survive_a_store_that_answers_no_request(server, store, fault):
    one = path(server, store)
    assert one.read_range(0, 5) == DATA[:5]
    server.script.extend([fault] * LONG)
    assert one.read_range(5, 10) == DATA[5:10]
    server.script.extend([fault] * LONG)
    assert one.read_ranges([0, 50_000], [10, 50_010]) == [DATA[:10], DATA[50_000:50_010]]


@pytest.mark.parametrize('store', ['s3', 'http'])
@pytest.mark.parametrize('fault', [('status', 500), 'reset'], ids=str)
def test_metadata_survives_a_store_that_answers_no_request(server, store, fault):
    one = path(server, store)
    one.read_range(0, 5)
    server.script.extend([fault] * LONG)
    assert one.exists()


def test_outage_ends_with_its_time(server):
    config = granular.IOConfig(**{**CONFIG, 'retry_time': 2})
    one = path(server, 'http', config=config)
    one.read_range(0, 5)
    server.script.extend([('status', 500)] * 100_000)
    with pytest.raises(StoreError, match='status 500') as caught:
        one.read_range(0, 5)
    assert attempts_of(caught.value) > 20


@pytest.mark.parametrize('attempts', [1, 2, 5, 9])
def test_fewer_attempts_bound_an_outage_too(server, attempts):
    one = path(server, 'http', config=granular.IOConfig(attempts=attempts, **CONFIG))
    one.read_range(0, 5)
    server.script.extend([('status', 500)] * LONG)
    with pytest.raises(StoreError) as caught:
        one.read_range(0, 5)
    assert len(server.script) == LONG - attempts
    assert attempts == 1 or attempts_of(caught.value) == attempts


@pytest.mark.parametrize('store', ['s3', 'gs', 'http'])
@pytest.mark.parametrize('fault', [('status', 500), 'reset'], ids=str)
def test_failure_of_one_object_ends_after_its_attempts(server, store, fault):
    """The store answers others: here only the request by which it is asked whether it does."""
    config = granular.IOConfig(**{**CONFIG, 'backoff': 0.5, 'backoff_cap': 2.0})
    path(server, store).read_range(0, 5)
    bad = path(server, store, 'bad', config)
    path(server, store, 'good', config).read_range(0, 5)
    server.aim = 'bad'
    server.script.extend([fault] * 1000)
    with pytest.raises(StoreError) as caught:
        bad.read_range(0, 5)
    assert 10 <= attempts_of(caught.value) <= 40


@pytest.mark.parametrize('scheme', ['http', 's3'])
def test_address_that_never_replied_fails_soon(scheme):
    with socket.create_server(('127.0.0.1', 0)) as listener:
        port = listener.getsockname()[1]
    config = granular.IOConfig(connect_timeout=0.5, **{**CONFIG, 'backoff_cap': 0.1})
    options = {'endpoint_url': f'http://127.0.0.1:{port}', 'key': 'k', 'secret': 's'} if scheme == 's3' else {}
    address = 's3://bucket/x' if scheme == 's3' else f'http://127.0.0.1:{port}/x'
    with pytest.raises(StoreError, match='check its address'):
        granular.Path(address, config=config, **options).read_bytes()
    assert not has_replied((False, '127.0.0.1', port, None))


def test_permanent_errors_end_at_once(server):
    one = path(server, 's3')
    one.read_range(0, 5)
    for status, code in ((403, 'AccessDenied'), (404, 'NoSuchBucket')):
        count = len(server.methods)
        server.script.append(('status', status, code))
        with pytest.raises(GranularError):
            one.read_range(0, 5)
        assert len(server.methods) == count + 1


def replied(_):
    return sorted(replied_servers())


@pytest.mark.parametrize('method', ['spawn', 'fork'])
def test_workers_inherit_the_servers_that_have_replied(server, method, monkeypatch):
    path(server, 'http').read_range(0, 5)
    known = replied(None)
    assert known
    monkeypatch.setattr(multiprocessing, 'get_start_method', lambda *args, **kwargs: method)
    dataset = granular.MapDataset.range(2).map(replied).to_iter_dataset()
    options = granular.MultiprocessingOptions(num_workers=1, start_method=method)
    assert set(known) <= set(next(iter(dataset.mp_prefetch(options))))


def test_datasets_are_read_through_an_outage(tmp_path):
    with granular.DatasetWriter(tmp_path / 'd', {'x': 'int'}) as writer:
        for i in range(200):
            writer.append({'x': i})
    files = {f'd/{file.name}': file.read_bytes() for file in (tmp_path / 'd').iterdir()}
    with FaultServer(files=files) as server:
        server.etag_of = md5_etag
        server.modified = {'': 'Fri, 21 Nov 2025 20:00:00 GMT'}
        root = path(server, 's3', 'd')
        with granular.DatasetReader(root, granular.decoders) as reader:
            assert reader[1] == {'x': 1}
            for fault in FAULTS:
                server.script.extend([fault] * LONG)
                with granular.Loader(reader, 20) as loader:
                    assert sum(int(batch['x'].sum()) for _, batch in zip(range(10), loader, strict=False)) == 19900
                server.script.extend([fault] * LONG)
                stream = granular.MapDataset.source(reader).to_iter_dataset()
                assert sum(point['x'] for point in stream) == 19900
        server.script.extend([('status', 500)] * LONG)
        root.copy(tmp_path / 'copy') if False else (root / 'x.bag').copy(tmp_path / 'copy')
        assert (tmp_path / 'copy').read_bytes() == files['d/x.bag']
        server.script.extend([('status', 500)] * LONG)
        granular.convert(root, tmp_path / 'converted')
        with granular.open(tmp_path / 'converted') as reader:
            assert len(reader) == 200
