"""States in files of every store, and progress of a running pipeline."""

import json
import os
import re

import numpy as np
import pytest

import granular
from granular import MapDataset, ShardOptions, aio
from granular.errors import NotFoundError, StateError
from granular.grain.experimental import DatasetOptions


def stream(index=0, count=1):
    dataset = MapDataset.range(48).shuffle(seed=1).map(abs)
    return dataset.to_iter_dataset(shard_options=ShardOptions(index, count))


def test_state_round_trips_in_every_store(root):
    iterator = iter(stream().batch(5))
    next(iterator)
    file = granular.save_state(root / 'checkpoint', iterator.get_state())
    assert file.name == 'process_0-of-1.json'
    rest = [batch.tolist() for batch in iterator]
    granular.save_state(root / 'other', {'step': 3})
    other = iter(stream().batch(5))
    other.set_state(granular.load_state(root / 'checkpoint'))
    assert [batch.tolist() for batch in other] == rest
    with pytest.raises(NotFoundError, match='contains no state'):
        granular.load_state(root / 'nothing')


def test_state_resumes_on_more_and_fewer_hosts(tmp_path):
    seen = []
    for index in range(4):
        with iter(stream(index, 4)) as iterator:
            seen += [next(iterator) for _ in range(5)]
            granular.save_state(tmp_path, iterator.get_state(), ShardOptions(index, 4))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f'process_{i}-of-4.json' for i in range(4)]
    for count in (1, 3, 4, 6):
        rest = []
        for index in range(count):
            with iter(stream(index, count)) as iterator:
                iterator.set_state(granular.load_state(tmp_path, ShardOptions(index, count)))
                rest += list(iterator)
        assert sorted(seen + rest) == list(range(48))
    with iter(stream(0, 4)) as iterator:
        granular.save_state(tmp_path, iterator.get_state(), ShardOptions(0, 4))
    with pytest.raises(StateError, match='after the same number of elements'):
        granular.load_state(tmp_path, ShardOptions(0, 3))


def test_states_of_an_earlier_number_of_hosts_are_not_taken_for_those_of_now(tmp_path):
    dataset = MapDataset.range(100)

    def save(hosts, count):
        for host in range(hosts):
            shard = ShardOptions(host, hosts)
            with iter(dataset.to_iter_dataset(shard_options=shard)) as iterator:
                for _ in range(count // hosts):
                    next(iterator)
                granular.save_state(tmp_path, iterator.get_state(), shard)

    save(4, 20)
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    save(2, 40)
    assert granular.load_state(tmp_path, ShardOptions(0, 2))['state']['at'] == 40
    for hosts in (1, 4):
        with pytest.raises(StateError, match='remove those of another number that are outdated'):
            granular.load_state(tmp_path, ShardOptions(0, hosts))


def test_loader_resumes_on_more_hosts(tmp_path):
    source = granular.sources.Epochs([{'i': i} for i in range(96)], seed=1)

    def batches(count, state, rounds):
        out = []
        for index in range(count):
            with granular.Loader(source, 12 // count, shard_id=index, num_shards=count) as loader:
                loader.load(state)
                out.append([next(loader)['i'].tolist() for _ in range(rounds)])
                state_after = loader.save()
        return [[i for part in parts for i in part] for parts in zip(*out, strict=True)], state_after

    first, state = batches(2, {'step': 0}, 3)
    granular.save_state(tmp_path, state)
    for count in (1, 3, 4):
        rest, _ = batches(count, granular.load_state(tmp_path), 4)
        assert rest == batches(2, state, 4)[0]


def test_loader_of_a_finite_source_ends_on_any_number_of_hosts():
    """A step that the hosts do not divide must not lead into the next epoch."""
    dataset = granular.MapDataset.range(120).map(lambda i: {'i': i})
    for count, epoch, expected in ((3, 0, range(80, 110)), (2, 0, range(80, 120)), (5, 1, range(100))):
        rest = []
        for index in range(count):
            with granular.Loader(dataset, 10, shard_id=index, num_shards=count) as loader:
                for _ in range(2):
                    loader.load({'step': 80, 'seed': 0})
                    assert loader.epoch == epoch  # 5 hosts get no whole round of the rest
                    taken = [i for batch in loader for i in batch['i'].tolist()]
                assert loader.save()['step'] == 120 * (epoch + 1)
                rest += taken
        assert sorted(rest) == list(expected)


def test_invalid_state_files_are_rejected(tmp_path):
    (tmp_path / 'process_0-of-1.json').write_text('{"version": 9}')
    with pytest.raises(StateError, match=r'process_0-of-1.json: is not a state of version 1'):
        granular.load_state(tmp_path)
    (tmp_path / 'process_0-of-1.json').write_text('{"vers')
    with pytest.raises(StateError, match='is not a state: '):
        granular.load_state(tmp_path)
    with pytest.raises(StateError, match='not plain JSON'):
        granular.save_state(tmp_path / 'new', {'x': object()})
    assert not (tmp_path / 'new').exists()


async def test_async_api(tmp_path):
    file = await aio.save_state(tmp_path, {'step': 3})
    assert json.loads(await file.read_text()) == {'version': 1, 'crc32c': 'c115c025', 'state': {'step': 3}}
    assert await aio.load_state(tmp_path) == {'step': 3}


def test_progress_shows_the_waiting_stage(capsys):
    source = granular.sources.Epochs([{'i': i} for i in range(100)], seed=1)
    with granular.Loader(granular.sources.Truncate(source, 100), 10) as loader:
        items = granular.progress(loader, total=8, summary=True)
        assert len([next(items) for _ in range(8)]) == 8
        items.close()
        stats = loader.stats()
    assert stats['batches'] == 8
    assert {'wait_seconds', 'consumer_seconds', 'bytes_per_second', 'in_flight', 'errors'} <= stats.keys()
    shown = capsys.readouterr().err
    assert 'waiting' in shown
    assert 'list of 100' in shown  # the duration


@pytest.mark.parametrize(
    'items_of',
    [lambda dataset: dataset, lambda dataset: dataset.to_iter_dataset().map(str),
     lambda dataset: iter(dataset.to_iter_dataset().batch(2)),
     lambda dataset: granular.grain.DataLoader(
         data_source=dataset, sampler=granular.grain.samplers.SequentialSampler(20))],
    ids=['MapDataset', 'IterDataset', 'iterator', 'DataLoader'],
)  # fmt: skip
def test_progress_shows_the_time_of_each_stage_and_leaves_timing_as_it_was(items_of, capsys):
    options = DatasetOptions(stage_timing=True)
    other = granular.MapDataset.range(100).map(abs).to_iter_dataset(granular.ReadOptions(2, 0)).with_options(options)
    with iter(other) as iterator:
        next(iterator)
        assert list(granular.progress(items_of(granular.MapDataset.range(20).map(abs)), summary=True))
        assert 'map(abs)' in capsys.readouterr().err
        assert len(list(iterator)) == 99
        assert {stage.stage: stage.elements for stage in iterator.execution_summary()}['map(abs)'] == 100
    granular.metrics.time_stages(False)


def test_summaries_that_end_in_any_order_end_the_timing(capsys):
    class Failing:
        def __iter__(self):
            raise RuntimeError('no iterator')

    timing = granular.metrics.timing
    with pytest.raises(RuntimeError, match='no iterator'):
        list(granular.progress(Failing(), summary=True))
    assert not timing.on
    first, second = granular.progress(range(3), summary=True), granular.progress(range(3), summary=True)
    assert next(first) == next(second) == 0
    assert list(first) == [1, 2] and timing.on
    assert list(second) == [1, 2] and not timing.on


@pytest.mark.parametrize('stats', [{'bytes': 1}, lambda self: {'ready': 'yes'}, None])
def test_progress_leaves_other_stats_of_iterators_alone(stats):
    class Numbers:
        def __init__(self):
            self._numbers = iter(range(3))

        def __iter__(self):
            return self

        def __next__(self):
            return next(self._numbers)

    Numbers.stats = stats
    assert list(granular.progress(Numbers(), summary=True)) == [0, 1, 2]


def test_progress_shows_totals_of_finite_loaders_only(capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', '200')  # for the counters of all tests before this one
    points = [{'i': i} for i in range(40)]
    with granular.Loader(points, 10) as loader:
        next(loader)
        loader.load(loader.save())
        assert len(list(granular.progress(loader))) == 3
    assert ' 3/3  ' in capsys.readouterr().err
    with granular.Loader(granular.sources.Epochs(points), 10) as loader:
        items = granular.progress(loader)
        assert len([next(items) for _ in range(3)]) == 3
        items.close()
    shown = capsys.readouterr().err
    assert ' 3  ' in shown
    assert re.search(r' 3/\d', shown) is None


def test_progress_in_a_notebook_is_a_line_of_text(capsys, monkeypatch):
    monkeypatch.setattr('rich.console._is_jupyter', lambda: True)
    assert list(granular.progress(range(1500))) == list(range(1500))
    with granular.Loader([{'i': i} for i in range(40)], 10) as loader:
        assert len(list(granular.progress(loader))) == 4
    shown = capsys.readouterr()
    assert not shown.out
    assert '\x1b' not in shown.err
    first, second, _ = (line.split('\r')[-1] for line in shown.err.split('\n'))
    assert first.startswith('1,500  ')
    assert second.startswith('4/4  ')


@pytest.mark.parametrize('strategy', ['first_fit', 'best_fit', 'concat_then_split'])
@pytest.mark.parametrize(('hosts', 'steps', 'others'), [(2, 6, 3), (3, 4, 2), (4, 3, 1), (2, 6, 4)])
def test_packed_rows_resume_on_more_and_fewer_hosts(tmp_path, strategy, hosts, steps, others):
    documents = [{'tokens': np.arange(1, size + 1)} for size in (5, 2, 4, 9, 3, 7, 6, 1, 8, 2)]

    def rows_of(host, count):
        shard = ShardOptions(host, count)
        stream = MapDataset.source(documents).shuffle(seed=1).repeat().to_iter_dataset()
        return iter(stream.pack({'tokens': 16}, strategy=strategy, shard_options=shard)), shard

    for host in range(hosts):
        rows, shard = rows_of(host, hosts)
        with rows:
            for _ in range(steps):
                next(rows)
            granular.save_state(tmp_path, rows.get_state(), shard)
    resumed = []
    for host in range(others):
        rows, shard = rows_of(host, others)
        with rows:
            rows.set_state(granular.load_state(tmp_path, shard))
            resumed += [next(rows)['tokens'].tolist() for _ in range(12 // others)]
    with rows_of(0, 1)[0] as rows:
        expected = [next(rows)['tokens'].tolist() for _ in range(24)][12:]
    assert sorted(resumed) == sorted(expected)
