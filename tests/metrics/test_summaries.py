"""Summaries: one table of the seconds of reads, decoding, functions, waiting and the consumer, and the bottleneck."""

import pytest

import granular
from granular import metrics
from granular.aio.pipeline.summary import ExecutionSummary, StageSummary
from granular.aio.runtime.pools import CORES
from granular.errors import InvalidArgumentError
from granular.grain.experimental import DatasetOptions
from tests.metrics.test_metrics import Clock
from tests.support.faults import FaultServer

COUNT = 12
TIMED = (
    'metrics', 'aio.datasets.codec', 'aio.pipeline.execution.prefetch', 'aio.pipeline.loader.running',
    'aio.pipeline.cursor',
    'aio.pipeline.nodes.adapters', 'aio.pipeline.nodes.source', 'aio.pipeline.streams.tracing', 'aio.stores.fanout',
)  # fmt: skip


class Bound:
    """A pipeline of which one part takes a second of a clock that else stands still."""

    def __init__(self, part, clock):
        self.part, self._advance = part, clock.advance

    def slow(self, part):
        if part == self.part:
            self._advance(1)

    def decode(self, record):
        self.slow('decode')
        return granular.decoders['int'](record)

    def transform(self, datapoint):
        self.slow('map')
        return datapoint


class Server(FaultServer):
    bound = None

    async def good(self, *args):
        if self.bound is not None:
            self.bound.slow('read')
        await super().good(*args)


@pytest.fixture(params=['read', 'decode', 'map', 'consumer'])
def bound(request, monkeypatch):
    clock = Clock()
    for module in TIMED:
        monkeypatch.setattr(f'granular.{module}.time', clock)
    return Bound(request.param, clock)


@pytest.fixture
def dataset(tmp_path, bound):
    """The pipeline over a bucket, which begins to be slow once the dataset is open."""
    with granular.DatasetWriter(tmp_path / 'numbers', {'number': 'int'}, granular.encoders) as writer:
        for number in range(COUNT):
            writer.append({'number': number})
    files = {f'numbers/{file.name}': file.read_bytes() for file in (tmp_path / 'numbers').iterdir()}
    with Server(files=files) as server:
        config = granular.IOConfig(hedge=0.0)
        path = granular.Path('s3://bucket/numbers', config=config, endpoint_url=server.endpoint, anon=True)
        with granular.DatasetReader(path, {'int': bound.decode}) as reader:
            server.bound = bound
            yield granular.MapDataset.source(reader).map(bound.transform)


@pytest.fixture
def timed():
    metrics.time_stages()
    yield
    metrics.time_stages(False)


def names(bound):
    return {
        'read': 'read s3://bucket', 'decode': 'decode int', 'map': 'map(Bound)', 'consumer': 'consumer'
    }[bound.part]  # fmt: skip


def check(summary, bound, seconds):
    """Check that all seconds are those of one part, which the summary names."""
    assert summary.bottleneck.stage == names(bound)
    # The next elements are computed while the consumer computes.
    spent = {row.stage: row.seconds for row in (summary[-1:] if bound.part == 'consumer' else summary)}
    assert {stage: time for stage, time in spent.items() if time} == {names(bound): seconds}
    assert summary[-1].stage == 'consumer'
    assert summary[-1].wait_seconds == (0 if bound.part == 'consumer' else seconds)
    assert str(summary).endswith(f'bottleneck: {names(bound)}')


def test_summary_of_a_stream_names_its_bottleneck(dataset, bound, timed):
    options = granular.ReadOptions(num_threads=1, prefetch_buffer_size=0)
    stream = dataset.to_iter_dataset(options).batch(3)
    with iter(stream.with_options(DatasetOptions(stage_timing=True))) as batches:
        for _ in range(3):
            next(batches)
            bound.slow('consumer')
        next(batches)
        summary = batches.execution_summary()
    elements = {row.stage: row.elements for row in summary}
    assert elements.pop('read s3://bucket')  # limits too
    assert elements.pop('decode int') == elements.pop('map(Bound)') == COUNT
    assert elements['batch(3)'] == elements['consumer'] == 4
    reads = summary[0].seconds if bound.part == 'read' else None
    check(summary, bound, reads or {'consumer': 3}.get(bound.part, COUNT))


@pytest.mark.parametrize('mp', [None, 'fork'])
@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
def test_summary_of_a_loader_names_its_bottleneck(dataset, bound, mp, timed):
    with granular.Loader(dataset, 3, prefetch=0, workers=1, mp=mp) as loader:
        for _ in loader:
            bound.slow('consumer')
        summary = loader.execution_summary()
    assert summary.bottleneck.stage == names(bound) or mp  # the clock of a process is its own
    elements = {row.stage: row.elements for row in summary}
    assert elements['decode int'] == elements['map(Bound)'] == COUNT + 1  # one more for the spec
    assert elements['consumer'] == 4


@pytest.mark.parametrize('bound', ['map'], indirect=True)
def test_progress_shows_the_same_table(dataset, capsys):
    stream = dataset.to_iter_dataset(granular.ReadOptions(num_threads=1, prefetch_buffer_size=0))
    assert len(list(granular.progress(stream, summary=True))) == COUNT
    shown = capsys.readouterr().err
    assert 'decode int' in shown
    assert 'read s3://bucket' in shown
    assert 'bottleneck: map(Bound)' in shown


@pytest.mark.parametrize(
    ('decoding', 'batching', 'computing', 'expected'),
    [
        (CORES, 1, 2, 'read s3://bucket'),
        (15 * CORES, 1, 2, 'decode jpg'),  # reads at a time wait for cores
        (CORES, 11, 8, 'batch(9)'),  # which takes turns with the consumer, who waits for nothing else
        (15 * CORES, 8, 11, 'consumer'),
    ],
)
def test_bottleneck_of_stages_at_a_time_and_in_turn(decoding, batching, computing, expected):
    ahead = [('read s3://bucket', 9, 40 * CORES), ('decode jpg', 9, decoding), ('map(crop)', 9, CORES)]
    later = [('to_iter_dataset()', 9, 0.1), ('batch(9)', 1, batching)]
    rows = [[StageSummary(*row, 0.0) for row in part] for part in (ahead, later)]
    consumer = StageSummary('consumer', 1, computing, 20 - computing)
    assert ExecutionSummary(rows[0], [*rows[1], consumer]).bottleneck.stage == expected


def test_a_loader_that_is_not_timed_says_so():
    with granular.Loader([{'x': 1}] * 4, 2) as loader:
        list(loader)
        with pytest.raises(InvalidArgumentError, match='nothing was timed: call granular.metrics.time_stages()'):
            loader.execution_summary()
