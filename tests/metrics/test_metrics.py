"""Metrics: requests by outcome, latencies, waiting, and stages, of this process and of its workers."""

import asyncio
import collections
import copy
import math
import multiprocessing
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import granular
from granular import MapDataset, metrics
from granular.errors import GranularError
from granular.grain import MultiprocessingOptions
from granular.grain.experimental import DatasetOptions
from tests.support import seams
from tests.support.faults import DATA, FaultServer

# A busy machine takes its time: no hedge, and no timeout but that of a test, adds a request to those that are counted.
QUICK = granular.IOConfig(
    backoff=0.001, backoff_cap=0.002, read_timeout=2.0, first_byte_timeout=2.0, attempts=4, hedge=0.0
)


@pytest.fixture
def server():
    with FaultServer() as server:
        yield server


@pytest.fixture
def dataset(tmp_path):
    with granular.DatasetWriter(tmp_path / 'data', {'x': 'int'}, granular.encoders) as writer:
        for i in range(64):
            writer.append({'x': i})
    return tmp_path / 'data'


def of(server):
    return metrics.snapshot().stores.get(server.endpoint, metrics.StoreMetrics())


def difference(after, before):
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}


@given(st.lists(st.floats(0, 200), min_size=1), st.floats(0, 1))
def test_quantiles_of_histograms_bound_exact_quantiles(times, share):
    histogram = metrics.Histogram()
    for seconds in times:
        histogram.observe(seconds)
    assert histogram.count == len(times)
    assert math.isclose(histogram.sum, sum(times))
    exact = float(np.quantile(times, share, method='inverted_cdf')) if share else 0.0
    bound = histogram.quantile(share)
    assert exact <= bound
    assert bound <= max(2 * exact, metrics.BOUNDS[0]) or bound == math.inf


@given(st.lists(st.floats(0, 200)))
def test_buckets_of_histograms_are_bounded_above(times):
    histogram = metrics.Histogram()
    for seconds in times:
        histogram.observe(seconds)
    for i, bound in enumerate(metrics.BOUNDS):
        assert sum(histogram.counts[: i + 1]) == sum(seconds <= bound for seconds in times)


@pytest.mark.parametrize(
    ('fault', 'outcome'),
    [(('status', 500), 'server_error'), (('status', 503), 'throttled'), (('status', 429), 'throttled'),
     (('truncate', 3), 'connection'), (('hang',), 'timeout')],
)  # fmt: skip
def test_retries_are_counted_by_cause(server, fault, outcome):
    path = granular.Path(f'{server.endpoint}/object', config=QUICK)
    path.read_range(0, 5)
    before = of(server)
    server.script.append(fault)
    assert path.read_range(10, 50) == DATA[10:50]
    after = of(server)
    assert difference(after.outcomes, before.outcomes) == {'ok': 1, outcome: 1}
    assert difference(after.retries, before.retries) == {outcome: 1}
    assert after.requests - before.requests == 2


def test_requests_that_fail_are_counted_by_outcome(server):
    path = granular.Path(f'{server.endpoint}/object', config=QUICK)
    for status, outcome in ((404, 'not_found'), (403, 'denied'), (501, 'error')):
        server.script.append(('status', status))
        before = of(server)
        with pytest.raises(GranularError):
            path.read_range(10, 50)
        after = of(server)
        assert difference(after.outcomes, before.outcomes) == {outcome: 1}
        assert after.retries == before.retries


def test_requests_of_a_batch_are_counted_with_their_latencies(server):
    path = granular.Path(f'{server.endpoint}/object', config=granular.IOConfig(max_gap=0, hedge=0.0))
    before, whole = of(server), granular.io_stats()
    path.read_ranges(list(range(0, 2000, 100)), list(range(10, 2010, 100)))
    after, now = of(server), granular.io_stats()
    sent = after.requests - before.requests
    assert sent == 20
    assert after.ok - before.ok == sent
    assert after.first_byte.count - before.first_byte.count >= sent
    assert after.first_byte.sum > before.first_byte.sum
    assert after.bytes - before.bytes >= 200
    assert after.in_flight == 0
    assert 0 < after.connections <= after.connects
    assert {name: now[name] - whole[name] for name in ('requests', 'ranges')} == {'requests': 20, 'ranges': 20}


def test_labels_hold_no_secrets_or_keys(server):
    host = server.endpoint.removeprefix('http://')
    path = granular.Path(
        f'http://{host}/object?sig=0123456789', config=QUICK, headers={'Authorization': 'Basic hunter22'}
    )
    path.read_range(0, 10)
    text = repr(list(metrics.samples())) + repr(metrics.snapshot().as_dict())
    assert f'http://{host}' in text
    for secret in ('hunter22', '0123456789', '/object'):
        assert secret not in text


def test_number_of_labels_is_bounded():
    many = metrics.Metrics()
    for i in range(1000):
        many.store(f's3://bucket-{i}').ok += 1
        many.stage(f'map({i})').count += 1
    assert len(many.stores) <= metrics.MAX_LABELS + 1
    assert many.stores['other'].ok == 1000 - metrics.MAX_LABELS
    assert len(many.stages) <= metrics.MAX_LABELS + 1
    assert many.total('requests') == 1000


def test_local_files_are_counted(dataset):
    before = metrics.snapshot().stores['file']
    with granular.DatasetReader(dataset, granular.decoders) as reader:
        reader.fetch(range(64))
    after = metrics.snapshot().stores['file']
    assert after.requests > before.requests
    assert after.outcomes == {'ok': after.requests}


@pytest.mark.parametrize('copied', [lambda iterator: iterator, copy.copy], ids=['original', 'copy'])
def test_waits_of_loaders_and_streams_are_counted(dataset, copied):
    before = metrics.snapshot()
    with copied(granular.Loader(granular.DatasetReader(dataset, granular.decoders), 8)) as loader:
        assert len(list(loader)) == 8
    assert len(list(copied(iter(MapDataset.source(range(10)).to_iter_dataset())))) == 10
    after = metrics.snapshot()
    waited, worked = (getattr(after, name)['loader'].count for name in ('wait', 'consumer'))
    assert waited - _count(before.wait, 'loader') == 8
    assert worked - _count(before.consumer, 'loader') == 8
    assert after.wait['stream'].count > _count(before.wait, 'stream')


class Clock:
    """A clock that stands still until it is set forward, as does that of each thread."""

    now = 1.0

    def __init__(self):
        self.computed = collections.Counter()

    def perf_counter(self):
        return self.now

    def thread_time(self):
        return self.computed[threading.get_ident()]

    def compute(self, seconds):
        self.computed[threading.get_ident()] += seconds

    def advance(self, seconds):
        self.now += seconds


def test_delays_of_the_event_loop_and_of_waking_up_count_as_waiting(monkeypatch):
    clock = Clock()
    for module in ('execution.prefetch', 'loader.running', 'cursor'):
        monkeypatch.setattr(f'granular.aio.pipeline.{module}.time', clock)
    seams.delay_loop(monkeypatch, lambda: clock.advance(10))
    switches = seams.delay_consumer(monkeypatch, lambda: clock.advance(100))
    before = metrics.snapshot()
    with granular.Loader(granular.MapDataset.range(30).map(lambda x: {'x': x}), 10) as loader:
        for _ in range(3):
            clock.advance(1)  # the time of the consumer
            next(loader)
        stats, waited = loader.stats(), 10 + 100 * len(switches)  # only the first batch begins on the loop
    assert (stats['wait_seconds'], stats['consumer_seconds']) == (waited, 2) and switches
    after = metrics.snapshot()
    assert after.wait['loader'].sum - before.wait.get('loader', metrics.Histogram()).sum == pytest.approx(waited)


@pytest.mark.parametrize(
    ('program', 'loader', 'mp', 'says'),
    [
        (6, 3, None, "the thread of the program computed for 60 %, and that of granular's event loop for 30 %"),
        (6, 1, None, ''),  # little to gain
        (1, 9, None, ''),  # the program has nothing to wait for the interpreter for
        (3, 3, None, ''),  # neither waits long for the other
        (6, 3, 'fork', ''),
    ],
)
def test_a_loader_that_shares_a_busy_interpreter_says_so(program, loader, mp, says, monkeypatch, caplog):
    clock = Clock()

    class Source:
        def __len__(self):
            return 4000

        async def fetch(self, indices):
            await asyncio.sleep(0)  # on the loop
            clock.compute(loader)
            return [{'i': i} for i in indices]

    for module in (f'granular.aio.pipeline.{name}.time' for name in ('execution.prefetch', 'loader.running', 'cursor')):
        monkeypatch.setattr(module, clock)
    with granular.Loader(Source(), 4, prefetch=1, mp=mp, workers=1) as batches:
        for _ in range(250):
            next(batches)
            clock.compute(program)
            clock.advance(10)
        stats = batches.stats()
    # The last batches may have been returned before the loop was told to begin others.
    assert stats['consumer_cpu_seconds'] == pytest.approx(250 * program, rel=0.02)
    assert mp or stats['loop_cpu_seconds'] == pytest.approx(250 * loader, rel=0.05)
    said = [record.getMessage() for record in caplog.records if 'interpreter is the limit' in record.getMessage()]
    assert len(said) == bool(says)
    assert says in ''.join(said)


def test_waking_up_counts_as_waiting_for_a_stream(monkeypatch):
    clock = Clock()
    for module in (f'granular.aio.pipeline.{name}.time' for name in ('execution.prefetch', 'loader.running', 'cursor')):
        monkeypatch.setattr(module, clock)

    switches = seams.delay_consumer(monkeypatch, lambda: clock.advance(100))
    dataset = granular.MapDataset.range(30).to_iter_dataset(granular.ReadOptions(prefetch_buffer_size=0))
    for stages in (lambda stream: stream, lambda stream: stream.window_shuffle(1, seed=0).batch(1)):
        stream = stages(dataset).with_options(DatasetOptions(stage_timing=True))
        switches.clear()
        with iter(stream) as elements:
            for _ in range(3):
                clock.advance(1)  # the time of the consumer
                next(elements)
            stats, summary, waited = elements.stats(), elements.execution_summary(), 100 * len(switches)
        assert (stats['wait_seconds'], stats['consumer_seconds']) == (waited, 2) and waited
        assert waited in [row.wait_seconds for row in summary] and all(row.seconds < 100 for row in summary)


def _count(histograms, kind):
    return histograms[kind].count if kind in histograms else 0


def slow(datapoint):
    time.sleep(0.001)
    return {**datapoint, 'pid': os.getpid()}


@pytest.fixture
def timed():
    metrics.time_stages()
    yield
    metrics.time_stages(False)


@pytest.mark.parametrize('method', ['spawn', 'fork'])
def test_workers_of_loaders_report_requests_and_stage_times(method, dataset, timed):
    source = MapDataset.source(granular.DatasetReader(dataset, granular.decoders)).map(slow)
    before = metrics.snapshot()
    with granular.Loader(source, 8, workers=2, mp=method) as loader:
        batches = list(loader)
    after = metrics.snapshot()
    assert os.getpid() not in {pid for batch in batches for pid in batch['pid'].tolist()}
    assert after.stores['file'].requests - before.stores['file'].requests >= 8
    # One datapoint more is read in this process, for the spec.
    assert after.stages['map(slow)'].count - _made(before, 'map(slow)') == 65
    assert after.stages['DatasetReader'].count - _made(before, 'DatasetReader') == 65
    assert after.stages['map(slow)'].seconds >= 64 * 0.001
    assert after.stores['file'].in_flight == 0
    assert after.ranges - before.ranges >= 64


def _made(snapshot, stage):
    return snapshot.stages[stage].count if stage in snapshot.stages else 0


def test_workers_of_streams_report_stage_times(timed):
    before = metrics.snapshot()
    options = MultiprocessingOptions(num_workers=2)
    stream = MapDataset.source([{'x': i} for i in range(20)]).map(slow).to_iter_dataset().mp_prefetch(options)
    assert len(list(stream)) == 20
    after = metrics.snapshot()
    assert after.stages['map(slow)'].count - _made(before, 'map(slow)') == 20


def test_stages_are_not_timed_unless_asked():
    metrics.time_stages(False)  # which the progress of another test may have asked for
    before = metrics.snapshot().stages
    assert len(list(MapDataset.source([{'x': i} for i in range(20)]).map(slow).to_iter_dataset())) == 20
    assert (
        difference(
            {name: stage.count for name, stage in metrics.snapshot().stages.items()},
            {name: stage.count for name, stage in before.items()},
        )
        == {}
    )


def send_snapshot(pipe):
    pipe.send(metrics.snapshot().as_dict())
    pipe.close()


def test_forked_processes_begin_at_zero(dataset):
    with granular.DatasetReader(dataset, granular.decoders) as reader:
        reader.fetch(range(64))
    context = multiprocessing.get_context('fork')
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=send_snapshot, args=(send,))
    process.start()
    send.close()
    child = receive.recv()
    process.join()
    assert child['stores']['file']['ok'] == child['ranges'] == 0
    assert metrics.snapshot().stores['file'].requests > 0
