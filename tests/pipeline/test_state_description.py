"""Descriptions of states against the datapoints that were counted, which name themselves."""

import collections
import itertools
import json
import random

import numpy as np
import pytest

import granular
from granular import IterDataset, MapDataset
from granular.errors import StateError
from tests.pipeline.random_datasets import names_of, random_stream, source


def described(iterator):
    return granular.describe_state(json.loads(json.dumps(iterator.get_state())))


@pytest.mark.parametrize('seed', range(30))
def test_what_was_taken_by_random_streams_that_are_resumed(seed):
    rng = random.Random(seed)
    stream, sources = random_stream(rng)
    taken, state = [], None
    for _ in range(3):
        with iter(stream) as iterator:
            if state is not None:
                iterator.set_state(state)
            taken += itertools.islice(iterator, rng.randint(0, 25))
            state, description = iterator.get_state(), described(iterator)
        counts = collections.Counter(number for element in taken for number, _ in names_of(element))
        assert [own.elements for own in description.sources] == [counts[i] for i in range(sources)]
        assert not description.held
        assert description.fits is None


def test_streams_of_a_mix_by_name_and_what_is_held():
    parts = {name: source(i, 20).shuffle(i).repeat().to_iter_dataset() for i, name in enumerate(('web', 'books'))}
    with iter(IterDataset.mix(parts, {'web': 3, 'books': 1}).window_shuffle(10, 1)) as iterator:
        list(itertools.islice(iterator, 33))
        description = described(iterator)
        web, books = description.sources
        assert (web.name, web.elements, web.length, web.epoch, web.place) == ('web', 23, 20, 1, 3)
        assert (books.name, books.elements, books.epoch, books.place) == ('books', 7, 0, 7)
        (held,) = description.held
        assert (held.name, held.given) == ('', 3)
        assert held.stage.startswith('window_shuffle')
        assert description.fits == 1
        list(itertools.islice(iterator, 7))
        assert (described(iterator).held, described(iterator).fits) == ((), None)
    assert str(description).splitlines()[1].split() == ['web', '1', '3', '20', '23']


@pytest.mark.parametrize('strategy', ['first_fit', 'best_fit', 'concat_then_split'])
def test_rows_and_tokens_of_a_pack_after_any_row(strategy):
    data = [{'tokens': np.ones(size, int)} for size in np.random.default_rng(0).integers(1, 30, 60).tolist()]
    parts = {
        name: MapDataset.source(data)
        .shuffle(i)
        .to_iter_dataset()
        .pack({'tokens': 32}, num_packing_bins=4, strategy=strategy)
        for i, name in enumerate(('web', 'books'))
    }
    stream, tokens, rows = IterDataset.mix(parts, {'web': 2, 'books': 1}), [0, 0], [0, 0]
    with iter(stream) as iterator:
        for count in range(24):
            before = [own.rows for own in described(iterator).packed]
            row = next(iterator)
            after = [own.rows for own in described(iterator).packed]
            owner = next(i for i in range(2) if after[i] > before[i])
            rows[owner] += 1
            tokens[owner] += int(row['tokens'].sum())
            assert [(own.name, own.rows, own.tokens) for own in described(iterator).packed] == [
                (name, rows[i], (tokens[i],)) for i, name in enumerate(('web', 'books'))
            ]
            if not count % 5:
                iterator.set_state(json.loads(json.dumps(iterator.get_state())))


def test_hosts_that_a_state_fits():
    def state_on(hosts, stage):
        stream = stage(source(0, 60).to_iter_dataset(shard_options=granular.ShardOptions(1, hosts)))
        with iter(stream) as iterator:
            list(itertools.islice(iterator, 3))
            return described(iterator)

    plain = state_on(3, lambda stream: stream)
    assert (plain.saved_on, plain.fits, plain.host, plain.sources[0].elements) == (3, None, None, 9)
    filtered = state_on(3, lambda stream: stream.filter(lambda name: True))
    assert (filtered.fits, filtered.host) == (3, 1)
    window = state_on(3, lambda stream: stream.window_shuffle(4, 1))
    assert (window.fits, window.host) == (3, None)
    documents = MapDataset.source([{'x': np.ones(3, int)}] * 40).to_iter_dataset()
    with iter(documents.pack({'x': 8}, num_packing_bins=4, shard_options=granular.ShardOptions(1, 2))) as rows:
        next(rows)
        description = described(rows)
        assert (description.saved_on, description.fits, description.packed[0].rows) == (2, None, 2)


def pair(name):
    return [name, name]


def texts(shard=None):
    return MapDataset.source([{'x': np.full(i % 5 + 1, i)} for i in range(61)]).to_iter_dataset(shard_options=shard)


def plan():
    return MapDataset.source([{'x': np.full(i % 5 + 1, i)} for i in range(161)]).shuffle(1).pack({'x': 8})


def packed(stream, shard):
    return stream.pack({'x': 8}, num_packing_bins=3, shard_options=shard)


def numbers(shard):
    return source(0, 61).to_iter_dataset(shard_options=shard)


SHARDED = {
    'elements': numbers,
    'batches': lambda shard: numbers(shard).batch(2, batch_fn=list),
    'filter': lambda shard: numbers(shard).filter(bool),
    'filter behind a window': lambda shard: numbers(shard).window_shuffle(2, 1).filter(bool),
    'exclude': lambda shard: source(0, 61).exclude([3]).to_iter_dataset(shard_options=shard),
    'on_error': lambda shard: source(0, 61).to_iter_dataset(shard_options=shard, on_error='skip'),
    'window': lambda shard: numbers(shard).window_shuffle(2, 1),
    'flat_map': lambda shard: numbers(shard).flat_map(pair),
    'repeat': lambda shard: source(0, 5).to_iter_dataset(shard_options=shard).repeat(9),
    'planned rows': lambda shard: plan().to_iter_dataset(shard_options=shard).batch(2),
    'mix of planned rows': lambda shard: IterDataset.mix({'a': plan().repeat().to_iter_dataset(shard_options=shard)}),
    'packed rows': lambda shard: packed(texts(), shard),
    'mix of packed rows': lambda shard: IterDataset.mix({name: packed(texts(), shard) for name in 'ab'}).batch(2),
    'packed rows of a window': lambda shard: packed(texts().window_shuffle(3, 1), shard),
    'window of packed rows': lambda shard: packed(texts(), shard).window_shuffle(2, 1),
    'filter of packed rows': lambda shard: packed(texts(), shard).filter(bool),
    'interleave': lambda shard: IterDataset.interleave([numbers(shard), numbers(shard)], 2),
    'interleave of few': lambda shard: IterDataset.interleave(
        [source(0, 5).to_iter_dataset(shard_options=shard), numbers(shard)], 2
    ),
}


@pytest.mark.parametrize('name', SHARDED)
def test_a_state_loads_on_the_hosts_that_it_fits(name):
    make = SHARDED[name]
    for hosts, taken in itertools.product((1, 2, 3), (0, 1, 4)):
        with iter(make(granular.ShardOptions(hosts - 1, hosts))) as iterator:
            list(itertools.islice(iterator, taken))
            state, description = json.loads(json.dumps(iterator.get_state())), described(iterator)
        assert description.saved_on in (hosts, 1 if not taken else hosts)
        for others in (1, 2, 3, 4):
            for host in range(others):
                with iter(make(granular.ShardOptions(host, others))) as iterator:
                    try:
                        iterator.set_state(state)
                        fits = True
                    except StateError:
                        fits = False
                assert fits is (description.fits in (None, others) and description.host in (None, host))


@pytest.mark.parametrize('hosts', [2, 3, 8])
def test_tokens_of_rows_that_several_hosts_share(hosts):
    """Each host tells the tokens of the rows of all, also behind the last one."""
    streams = {
        'concatenated': lambda shard: texts().pack({'x': 4}, strategy='concat_then_split', shard_options=shard),
        'fitted': lambda shard: packed(texts(), shard),
    }
    for make in streams.values():
        rows = [int((row['x_segment_ids'] > 0).sum()) for row in make(None)]
        for host in range(hosts):
            with iter(make(granular.ShardOptions(host, hosts))) as iterator:
                for taken, _ in enumerate(iterator, 1):
                    (own,) = described(iterator).packed
                    assert (own.rows, own.tokens) == (min(len(rows), taken * hosts), (sum(rows[: taken * hosts]),))
                (own,) = described(iterator).packed
                assert (own.rows, own.tokens) == (len(rows), (sum(rows),))
    weights = {'concatenated': 3, 'fitted': 1}
    with iter(
        IterDataset.mix({name: make(granular.ShardOptions(0, hosts)) for name, make in streams.items()}, weights)
    ) as iterator:
        next(iterator)
        own = described(iterator).packed
    for pack, make in zip(own, streams.values(), strict=True):
        rows = itertools.islice(make(None), pack.rows)
        assert pack.tokens == (sum(int((row['x_segment_ids'] > 0).sum()) for row in rows),)


def test_rows_of_a_plan_and_what_tells_their_tokens():
    mix = IterDataset.mix(
        {name: plan().repeat().to_iter_dataset() for name in ('web', 'books')}, {'web': 3, 'books': 1}
    )
    with iter(mix.batch(4)) as iterator:
        list(itertools.islice(iterator, 50))
        description = described(iterator)
    assert [(own.name, own.rows, own.tokens, own.planned) for own in description.packed] == [
        ('web', 150, None, True),
        ('books', 50, None, True),
    ]
    assert 'packed of web: 150 rows, planned, of which iterator.indices(steps) tells' in str(description)
    assert description.fits is None
    with granular.Loader(plan().repeat(), 3) as loader:
        list(itertools.islice(loader, 7))
        (own,) = granular.describe_state(loader.save()).packed
        assert (own.name, own.rows) == ('', 21)


def test_loaders_count_the_rounds_of_each_epoch():
    dataset = MapDataset.concatenate([MapDataset.range(17), MapDataset.range(9)]).shuffle(3).map(lambda i: {'id': i})
    for batch, shards in ((3, 1), (4, 2), (13, 1)):
        with granular.Loader(dataset, batch, num_shards=shards) as loader:
            for _ in range(2):
                for _ in loader:
                    pass
            taken = 2 * len(loader)
            origins = []
            for shard in range(shards):
                with granular.Loader(dataset, batch, num_shards=shards, shard_id=shard) as other:
                    origins.append(other.indices(range(taken)))
            counts = sum((collections.Counter(own.counts()) for own in origins), collections.Counter())
            description = granular.describe_state(loader.save())
            assert {own.name: own.elements for own in description.sources} == dict(counts)
    assert [own.length for own in description.sources] == [17, 9]


def test_states_within_those_of_others_and_what_is_none(tmp_path):
    with iter(source(0, 9).to_iter_dataset()) as iterator:
        next(iterator)
        state = iterator.get_state()
    assert granular.describe_state({'loader': [{'iterator': state}]}).sources[0].elements == 1
    granular.save_state(tmp_path, state)
    assert granular.describe_state(granular.load_state(tmp_path)) == granular.describe_state(state)
    for wrong, match in (
        ({'a': 1}, 'is not one of granular'),
        ([state, state], 'has the states of 2 worker processes'),
        ({**state, 'version': 2}, 'the state has version 2'),
        ({name: state[name] for name in ('version', 'state', 'pipeline')}, 'not a state of a pipeline'),
        ({**state, 'state': {'x': 3}}, 'not a state of a pipeline'),
    ):
        with pytest.raises(StateError, match=match):
            granular.describe_state(wrong)


def test_what_a_state_does_not_tell():
    rows = MapDataset.source([{'x': [1, 2]}] * 40).shuffle(1).pack({'x': 8}).to_iter_dataset()
    with iter(rows) as iterator:
        next(iterator)
        (own,) = described(iterator).sources
        assert (own.elements, own.epoch, own.place) == (None, None, None)
        assert str(described(iterator)).splitlines()[1].split()[-1] == '?'
    with iter(IterDataset.interleave([source(0, 4).to_iter_dataset()], 1)) as iterator:
        (own,) = described(iterator).sources
        assert own.elements is None
        assert own.source.startswith('interleave')
