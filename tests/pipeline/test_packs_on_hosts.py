"""Packed rows on several hosts: mixes of them, and equally many rows on every host."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granular import IterDataset, MapDataset, ShardOptions, changes

NAMES = ('web', 'code', 'books', 'math')


def documents(corpus, count, rest=0):
    """Return documents whose tokens tell the corpus, the document and the place in it apart."""
    sizes = np.random.default_rng(corpus).integers(1, 30, count) + rest
    return [{'t': corpus * 10**6 + i * 1000 + np.arange(size)} for i, size in enumerate(sizes.tolist())]


def packed(corpus, shard=None, count=60, repeats=False, decoded=False, **options):
    dataset = MapDataset.source(documents(corpus, count))
    if repeats:
        dataset = dataset.repeat()
    options = {'strategy': 'concat_then_split', **options}
    stream = dataset.to_iter_dataset().pack({'t': 16}, shard_options=shard, **options)
    return stream.map(lambda row: row) if decoded else stream


def corpus_of(row):
    return int(row['t'][0]) // 10**6


def tokens(rows):
    """Return what identifies rows, in a fixed order."""
    return sorted(tuple(row['t'].tolist()) for row in rows)


def mix(weights, shard, **options):
    names = NAMES[: len(weights)]
    return IterDataset.mix(
        {name: packed(i, shard, **options) for i, name in enumerate(names)}, dict(zip(names, weights, strict=True))
    )


def unnamed(weights, shard, **options):
    return IterDataset.mix([packed(i, shard, **options) for i in range(len(weights))], weights)


def sharded_before(weights, shard, **options):
    """Return a mix of rows that each host packs of documents of its own."""
    streams = [
        MapDataset.source(documents(i, 60)).repeat().to_iter_dataset(shard_options=shard).pack({'t': 16}, **options)
        for i in range(len(weights))
    ]
    return IterDataset.mix(streams, weights)


def files_sharded(weights, shard, **options):
    """Return a mix of rows of files that are opened one after the other, of which each host reads a part."""

    def file(number):
        return MapDataset.source(documents(number // 100, 60)).to_iter_dataset(shard_options=shard)

    streams = {
        name: IterDataset.interleave(MapDataset.range(i * 100, i * 100 + 100).map(file), cycle_length=2)
        for i, name in enumerate(NAMES[: len(weights)])
    }
    packs = {name: stream.pack({'t': 16}, **options) for name, stream in streams.items()}
    return IterDataset.mix(packs, dict(zip(packs, weights, strict=True)))


WEIGHTS = [(1, 1), (1, 1, 1, 1), (9, 1), (0.7, 0.3), (5, 3, 2)]


@pytest.mark.parametrize('make', [mix, unnamed, sharded_before, files_sharded])
@pytest.mark.parametrize('hosts', [2, 3, 4, 8, 10])
@pytest.mark.parametrize('weights', WEIGHTS, ids=str)
def test_each_step_and_the_rows_of_each_host_have_the_weights(weights, hosts, make):
    shares = np.array(weights) / sum(weights)
    size = int(np.ceil(5 / min(shares)))
    options = {'split_long': True} if make in (sharded_before, files_sharded) else {'repeats': True}
    rows = []
    for host in range(hosts):
        with iter(make(weights, ShardOptions(host, hosts), **options)) as iterator:
            rows.append([corpus_of(next(iterator)) for _ in range(4 * size)])
    found = np.array(rows)
    for corpus, share in enumerate(shares.tolist()):
        of_batches = (found == corpus).reshape(hosts, 4, size).sum(axis=2)
        assert (np.abs(of_batches - size * share) <= max(2, size * share / 2)).all()
        of_steps = (found == corpus).sum(axis=0)
        assert (np.abs(of_steps - hosts * share) < 2).all()


@pytest.mark.parametrize('options', [{}, {'decoded': True}, {'strategy': 'first_fit', 'num_packing_bins': 5}])
def test_hosts_take_the_rows_that_one_host_has(options):
    whole = {corpus: tokens(packed(corpus, split_long=True, **options)) for corpus in range(3)}
    for hosts in (1, 2, 5, 8):
        parts = []
        for host in range(hosts):
            parts += list(mix((2, 1, 1), ShardOptions(host, hosts), split_long=True, **options))
        rows = tokens(parts)
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(itertools.chain(*whole.values()))
        # The mix ends with a stream that has no row more, or with a round of it that is not complete.
        left = [len(rows_of) - sum(row in set(rows_of) for row in rows) for rows_of in whole.values()]
        assert min(left) < hosts


@given(
    make=st.sampled_from([mix, unnamed]),
    weights=st.sampled_from(WEIGHTS),
    counts=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    steps=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    bins=st.sampled_from([None, 3]),
)
@settings(max_examples=50, deadline=None)
def test_states_of_a_mix_of_packs_move_between_numbers_of_hosts(make, weights, counts, steps, bins):
    options = {'strategy': 'first_fit', 'num_packing_bins': bins, 'split_long': True} if bins else {}
    state, seen = None, []
    for hosts, count in zip(counts, steps, strict=False):
        states = []
        for host in range(hosts):
            with iter(make(weights, ShardOptions(host, hosts), repeats=True, **options)) as iterator:
                if state is not None:
                    iterator.set_state(state)
                seen += list(itertools.islice(iterator, count))
                states.append(json.loads(json.dumps(iterator.get_state())))
                after = tokens(itertools.islice(iterator, 3))
                iterator.set_state(states[-1])
                assert tokens(itertools.islice(iterator, 3)) == after
        assert all(one['state']['count'] == states[0]['state']['count'] for one in states)
        state = states[-1]
    # Each corpus was read from its start, without a gap and without a row twice.
    for corpus in range(len(weights)):
        of_corpus = [row for row in seen if corpus_of(row) == corpus]
        with iter(packed(corpus, repeats=True, **options)) as iterator:
            assert tokens(of_corpus) == tokens(itertools.islice(iterator, len(of_corpus)))


def test_stages_behind_a_mix_of_packs_restore_what_they_hold():
    for make in (mix, sharded_before, files_sharded):
        options = {'repeats': True} if make is mix else {'split_long': True}
        for host in range(2):
            stream = make((3, 1), ShardOptions(host, 2), **options).window_shuffle(5, seed=0).limit(20)
            whole = [row['t'].tolist() for row in stream]
            for at in range(20):
                with iter(stream) as iterator:
                    for _ in range(at):
                        next(iterator)
                    state = iterator.get_state()
                with iter(stream) as iterator:
                    iterator.set_state(state)
                    assert [row['t'].tolist() for row in iterator] == whole[at:]


def test_a_mix_continues_with_other_weights_and_hosts():
    with iter(mix((1, 1), ShardOptions(0, 2), repeats=True)) as iterator:
        rows = [next(iterator) for _ in range(6)]
        state = iterator.get_state()
    with iter(mix((1, 1), ShardOptions(1, 2), repeats=True)) as iterator:
        rows += [next(iterator) for _ in range(6)]
    for host in range(3):
        with iter(mix((3, 1, 1), ShardOptions(host, 3), repeats=True)) as iterator:
            iterator.set_state(state, changes=[changes.Added('books')])
            rows += [next(iterator) for _ in range(5)]
    for corpus in range(3):
        of_corpus = [row for row in rows if corpus_of(row) == corpus]
        with iter(packed(corpus, repeats=True)) as iterator:
            assert tokens(of_corpus) == tokens(itertools.islice(iterator, len(of_corpus)))


# --- equally many rows on every host


@given(
    count=st.integers(0, 40),
    hosts=st.integers(1, 7),
    bins=st.integers(1, 9),
    strategy=st.sampled_from(['first_fit', 'best_fit', 'concat_then_split']),
    at=st.integers(0, 8),
    others=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_hosts_have_equally_many_rows_without_the_remainder(count, hosts, bins, strategy, at, others):
    options = {'count': count, 'num_packing_bins': bins, 'strategy': strategy, 'split_long': True}
    whole = [row['t'].tolist() for row in packed(0, **options)]
    parts, states = [], []
    for host in range(hosts):
        with iter(packed(0, ShardOptions(host, hosts, drop_remainder=True), **options)) as iterator:
            before = [row['t'].tolist() for row in itertools.islice(iterator, at)]
            states.append(iterator.get_state())
            after = [row['t'].tolist() for row in iterator]
            assert list(iterator) == []
            iterator.set_state(states[-1])
            assert [row['t'].tolist() for row in iterator] == after
            parts.append(before + after)
    assert parts == [whole[: len(whole) // hosts * hosts][host::hosts] for host in range(hosts)]
    assert len({json.dumps(state['state']['row'], sort_keys=True) for state in states}) == 1
    first = min(at, len(whole) // hosts) * hosts
    if at <= len(whole) // hosts:
        for host in range(others):
            with iter(packed(0, ShardOptions(host, others, drop_remainder=True), **options)) as iterator:
                iterator.set_state(states[0])
                left = whole[first:]
                if at < len(whole) // hosts or hosts == 1:
                    assert [row['t'].tolist() for row in iterator] == left[: len(left) // others * others][host::others]


@pytest.mark.parametrize('weights', WEIGHTS, ids=str)
def test_a_mix_of_packs_without_remainder_ends_in_the_same_step_on_every_host(weights):
    for hosts in (2, 3, 4):
        parts = [list(mix(weights, ShardOptions(host, hosts, drop_remainder=True))) for host in range(hosts)]
        assert len({len(part) for part in parts}) == 1
        assert len(parts[0]) > 5
        rows = tokens(itertools.chain(*parts))
        assert len(set(rows)) == len(rows)


def test_rows_behind_repeat_fit_other_hosts_without_the_remainder():
    seen = []
    for host in range(4):
        with iter(packed(0, ShardOptions(host, 4, drop_remainder=True)).repeat(3)) as iterator:
            rows = list(iterator)
        seen.append(len(rows))
    assert len(set(seen)) == 1
