"""Hosts whose shards have unequal lengths, also because of where they continued: states are exact, or refused."""

import collections
import functools
import itertools

import pytest

from granular import IterDataset, MapDataset, ShardOptions
from granular.errors import StateError
from granular.testing import assert_equal_output_after_checkpoint

NUMBERS = 7


def interleaved(shard):
    stops = (NUMBERS, 100 + NUMBERS, 206, 306)
    parts = [MapDataset.range(stop // 100 * 100, stop).to_iter_dataset(shard_options=shard) for stop in stops]
    return IterDataset.interleave(parts, 1)


def repeated(shard):
    return MapDataset.range(NUMBERS).to_iter_dataset(shard_options=shard).repeat(3)


def repeated_evenly(shard):  # but for an epoch that other hosts have begun
    return MapDataset.range(NUMBERS - 1).to_iter_dataset(shard_options=shard).repeat(3)


def repeated_behind_prefetch(size, shard):
    return MapDataset.range(NUMBERS).to_iter_dataset(shard_options=shard).prefetch(size).repeat(3)


def repeated_in_turn(shard):
    first = MapDataset.range(NUMBERS - 1).to_iter_dataset(shard_options=shard).repeat(2)
    return IterDataset.interleave([first, MapDataset.range(100, 106).to_iter_dataset(shard_options=shard)], 1)


PREFETCHED = [functools.partial(repeated_behind_prefetch, size) for size in (0, 2)]


@pytest.mark.parametrize('make', [interleaved, repeated, repeated_evenly, *PREFETCHED, repeated_in_turn])
@pytest.mark.parametrize('hosts', [(1, 2, 2, 1), (2, 2, 2, 1), (1, 3, 3, 2), (3, 2, 2, 3)])
@pytest.mark.parametrize('first', [0, 1, 2])
def test_no_element_is_repeated_or_left_out(make, hosts, first):
    expected = collections.Counter(make(ShardOptions(0, 1)))
    for second in range(1, expected.total() // hosts[1] - first * hosts[0]):
        given, states = collections.Counter(), None
        try:
            for count, number in zip(hosts, (first, second, 0, None), strict=True):  # also states of what was restored
                parts = [iter(make(ShardOptions(host, count))) for host in range(count)]
                for host, part in enumerate(parts):
                    if states:
                        part.set_state(states[host % len(states)])
                for part in parts:
                    given.update(itertools.islice(part, number))
                states = [part.get_state() for part in parts]
        except StateError as error:
            assert 'hosts do not advance equally' in str(error)
            continue
        assert given == expected, (hosts, first, second)


@pytest.mark.parametrize('length', range(8))
@pytest.mark.parametrize(
    'stages',
    [lambda stream: stream.window_shuffle(2, seed=1), lambda stream: stream.repeat(3)],
    ids=['windows', 'repeat'],
)
def test_state_of_a_host_that_has_nothing_left_leaves_out_nothing_of_others(stages, length):
    def parts(hosts):
        shards = [ShardOptions(host, hosts) for host in range(hosts)]
        return [stages(MapDataset.range(length).to_iter_dataset(shard_options=shard)) for shard in shards]

    expected = collections.Counter(*parts(1))
    for hosts, others, count in itertools.product((2, 3), (1, 2, 3), range(5)):
        given, states = collections.Counter(), []
        for part in parts(hosts):
            with iter(part) as iterator:
                given.update(itertools.islice(iterator, count))
                states.append(iterator.get_state())
        for state in states:
            rest, refused = collections.Counter(), 0
            for part in parts(others):
                with iter(part) as iterator:
                    try:
                        iterator.set_state(state)
                    except StateError:
                        refused += 1
                    else:
                        rest.update(iterator)
            assert refused or given + rest == expected, (hosts, others, count)


def test_state_of_the_end_is_that_of_all_hosts():
    numbers = [MapDataset.range(20).to_iter_dataset(shard_options=ShardOptions(host, 3)) for host in range(3)]
    states = []
    for part in numbers:
        with iter(part) as iterator:
            list(iterator)
            states.append(iterator.get_state())
    assert states == [states[0]] * 3
    for part, length in zip(numbers, (7, 7, 6), strict=True):
        with iter(part) as iterator:
            for _ in range(length):
                next(iterator)
            state = iterator.get_state()  # before the end was found
        with iter(part) as iterator:
            for saved in (states[0], state):
                iterator.set_state(saved)
                assert list(iterator) == []


def test_state_of_another_host_is_refused_where_even_streams_follow_an_uneven_one():
    def part(host):
        shard = ShardOptions(host, 2)
        parts = [MapDataset.range(first, first + length) for first, length in ((0, 3), (100, 6))]
        return IterDataset.interleave([part.to_iter_dataset(shard_options=shard) for part in parts], 1)

    for count in (2, 3):  # behind the first stream, of which host 1 has one element less
        with iter(part(1)) as iterator:
            given = list(itertools.islice(iterator, count))
            state = iterator.get_state()
            rest = list(iterator)
        with iter(part(1)) as iterator:
            iterator.set_state(state)
            assert given + list(iterator) == given + rest
        with iter(part(0)) as iterator:
            with pytest.raises(StateError, match='the state is of host 1 of 2, this is host 0'):
                iterator.set_state(state)


@pytest.mark.parametrize(
    'stages',
    [
        lambda stream: stream.flat_map(lambda x: [x, x]),
        lambda stream: stream.batch(2).rebatch(1),
        lambda stream: stream.window_shuffle(2, seed=1).flat_map(lambda x: [x]),
        lambda stream: stream.cache().filter(lambda x: x >= 0),
        lambda stream: IterDataset.mix({'a': stream.prefetch(2)}).filter(lambda x: x >= 0),
        lambda stream: stream.flat_map(lambda x: [x]).batch(2).repeat(2).prefetch(2),
    ],
)
def test_states_of_a_shard_are_the_same_once_they_are_restored(stages):
    for host in range(2):
        stream = MapDataset.range(NUMBERS).to_iter_dataset(shard_options=ShardOptions(host, 2))
        assert_equal_output_after_checkpoint(stages(stream))
