"""Remedies that ``docs/states.md`` and errors of states name: with each, a pipeline continues."""

import itertools
import json

import numpy as np
import pytest

import granular
from granular import IterDataset, MapDataset, ShardOptions
from granular.errors import StateError
from tests.pipeline.compositions.stream_operations import DOCUMENTS, LENGTH, NUMBERS, STREAM_OPERATIONS, twice
from tests.support.seams import FITS
from tests.support.states import plain

EVEN = list(range(0, LENGTH, 2))


def even(x):
    return x % 2 == 0


def fail(x):
    if not even(x):
        raise ValueError('odd')
    return x


def opened(x):
    return MapDataset.range(10 * x, 10 * x + 4)


# By the name of a stage, and of its remedy: a pipeline that follows it, and after how many elements of a host to save.
FOLLOWED = {
    **{operation.names[0]: operation.remedies for operation in STREAM_OPERATIONS if operation.remedies},
    'to_iter_dataset, elements dropped': {
        'allow_nones': (lambda s: NUMBERS.filter(even).to_iter_dataset(shard_options=s, allow_nones=True), 5),
        'slice': (lambda s: NUMBERS.slice(EVEN).to_iter_dataset(shard_options=s), 5),
    },
    'to_iter_dataset, on_error': {
        'slice': (lambda s: NUMBERS.slice(EVEN).map(fail).to_iter_dataset(shard_options=s), 5),
    },
    'filter': {
        'allow_nones': (lambda s: NUMBERS.filter(even).to_iter_dataset(shard_options=s, allow_nones=True).batch(3), 4),
        'slice': (lambda s: NUMBERS.slice(EVEN).to_iter_dataset(shard_options=s).batch(3), 4),
    },
    'window_shuffle, shards of unequal length': {
        'drop_remainder': (lambda s: NUMBERS.to_iter_dataset(shard_options=even_shard(s)).window_shuffle(4, seed=1), 8),
    },
    'repeat, shards of unequal length': {
        'drop_remainder': (lambda s: NUMBERS.to_iter_dataset(shard_options=even_shard(s)).repeat(2), LENGTH // 2 + 4),
    },
    'interleave, shards of unequal length': {
        'drop_remainder': (
            lambda s: IterDataset.interleave(
                [opened(x).to_iter_dataset(shard_options=even_shard(s)) for x in range(6)], cycle_length=2
            ), 6,
        ),
    },
    'subclass of IterDataset': {
        'map': (lambda s: NUMBERS.to_iter_dataset(shard_options=s).map(lambda x: x + 1), 5),
    },
}  # fmt: skip


def even_shard(shard):
    return ShardOptions(shard.shard_index, shard.shard_count, drop_remainder=True)


def elements_of(iterator, most=None):
    out = []
    for element in itertools.islice(iterator, most):
        value = plain(element)
        out += [json.dumps(part) for part in (value if isinstance(value, list) else [value])]
    return out


@pytest.mark.parametrize(
    ('kind', 'remedy'), [(kind, remedy) for kind, remedies in FOLLOWED.items() for remedy in remedies]
)
def test_the_remedy_lets_a_state_of_two_hosts_continue_on_any_number(kind, remedy):
    make, count = FOLLOWED[kind][remedy]
    given, states = [], []
    for index in range(2):
        with iter(make(ShardOptions(index, 2))) as iterator:
            given += elements_of(iterator, count)
            states.append(json.loads(json.dumps(iterator.get_state())))
    expected = sorted(elements_of(make(ShardOptions(0, 1))))
    for hosts in (1, 2, 3, 5):
        for state in states:
            rest = []
            for index in range(hosts):
                with iter(make(ShardOptions(index, hosts))) as iterator:
                    iterator.set_state(state)
                    rest += elements_of(iterator)
            left = len(expected) - len(given) - len(rest)
            if remedy == 'drop_remainder':
                assert 0 <= left < 20, (hosts, left)
                assert not set(given + rest) - set(expected)
                if not kind.startswith('repeat'):
                    assert len(set(given + rest)) == len(given + rest)
            else:
                assert sorted(given + rest) == expected, hosts


def test_each_remedy_for_states_of_other_hosts_is_followed_by_a_test():
    assert {kind for kind, fit in FITS.items() if fit.remedy} == FOLLOWED.keys()


def test_errors_for_states_of_other_hosts_name_the_remedy():
    pipelines = {
        'filter': lambda s: NUMBERS.to_iter_dataset(shard_options=s).filter(even),
        'to_iter_dataset, elements dropped': lambda s: NUMBERS.filter(even).to_iter_dataset(shard_options=s),
        'to_iter_dataset, on_error': lambda s: NUMBERS.map(fail).to_iter_dataset(shard_options=s, on_error='skip'),
        'flat_map': lambda s: NUMBERS.to_iter_dataset(shard_options=s).flat_map(twice),
        'rebatch': lambda s: NUMBERS.to_iter_dataset(shard_options=s).batch(4).rebatch(3),
        'window_shuffle': lambda s: NUMBERS.to_iter_dataset(shard_options=s).window_shuffle(7, seed=1),
        'pack': lambda s: DOCUMENTS.to_iter_dataset(shard_options=s).pack({'t': 9}),
        'cache': lambda s: NUMBERS.to_iter_dataset(shard_options=s).cache().repeat(2),
    }
    for kind, make in pipelines.items():
        with iter(make(ShardOptions(0, 2))) as iterator:
            elements_of(iterator, 1)
            next(iterator)
            state = iterator.get_state()
        with iter(make(ShardOptions(0, 3))) as iterator, pytest.raises(StateError) as caught:
            iterator.set_state(state)
        assert str(caught.value).endswith(f'for states that fit any number, {FITS[kind].remedy}'), kind


# --- other errors of states


def saved_after(make, count):
    """Return the elements of a stream up to a place, and the state there."""
    with iter(make) as iterator:
        return elements_of(iterator, count), json.loads(json.dumps(iterator.get_state()))


def rest_of(make, state, **options):
    with iter(make) as iterator:
        iterator.set_state(state, **options)
        return elements_of(iterator)


def refused(make, state):
    """Return the error of a state that is refused at once, or with the next element."""
    with iter(make) as iterator, pytest.raises(StateError) as caught:
        iterator.set_state(state)
        next(iterator)
    return str(caught.value)


def same(x):
    return [x]


def also_same(x):
    return [x]


def test_a_renamed_function_is_continued_if_it_is_declared():
    was, now = (NUMBERS.to_iter_dataset().map(function).batch(2) for function in (same, also_same))
    taken, state = saved_after(was, 3)
    declared = "if this is meant, pass changes=[granular.changes.Renamed(stage='map(also_same)')]"
    assert refused(now, state).endswith(declared)
    changes = [granular.changes.Renamed('map(also_same)')]
    assert taken + rest_of(now, state, changes=changes) == elements_of(was)


@pytest.mark.parametrize('hosts', [1, 2])
def test_states_of_stages_that_belong_to_their_hosts_continue_there(hosts):
    def make(index, count):
        return NUMBERS.to_iter_dataset(shard_options=ShardOptions(index, count)).filter(even).window_shuffle(7, seed=1)

    halves = [saved_after(make(index, hosts), 3 + 2 * index) for index in range(hosts)]
    remedy = 'one host' if hosts == 1 else 'as many hosts as before, each from its own state'
    assert f'continue on {remedy}; for states that fit' in refused(make(0, 3), halves[0][1])
    if hosts > 1:
        assert refused(make(1, 2), halves[0][1]).endswith('load the state of this host')
    for index, (taken, state) in enumerate(halves):
        assert taken + rest_of(make(index, hosts), state) == elements_of(make(index, hosts))


def rows(weights):
    streams = {name: NUMBERS.map(lambda x, k=k: {'t': np.full(3, 100 * k + x)}) for k, name in enumerate('ab')}
    chosen = {name: streams[name].to_iter_dataset() for name in weights}
    return IterDataset.mix(chosen, weights).pack({'t': 7}, strategy='concat_then_split')


def test_a_stream_of_a_mix_that_a_later_stage_holds_ends_with_the_weight_0():
    taken, state = saved_after(rows({'a': 1, 'b': 1}), 5)
    message = refused(rows({'a': 1}), state)
    assert message.endswith('give streams the weight 0, and remove them when it holds none')
    with iter(rows({'a': 1, 'b': 0})) as iterator:
        iterator.set_state(state)
        more = elements_of(iterator, 5)
        later = json.loads(json.dumps(iterator.get_state()))
        left = elements_of(iterator)
    assert rest_of(rows({'a': 1}), later) == left
    tokens = [t for row in (*taken, *more, *left) for t in json.loads(row)['t'] if t < 100]
    assert sorted(tokens, key=tokens.index)[-1] == LENGTH - 1


def test_a_step_that_is_no_multiple_of_the_batch_size_is_continued_with_that_batch_size():
    source = NUMBERS.map(lambda x: {'x': x})
    with granular.Loader(source, batch=4) as loader:
        first = next(loader)['x'].tolist()
        state = loader.save()
    with granular.Loader(source, batch=3) as loader, pytest.raises(StateError, match='another batch size: its step 4 '):
        loader.load(state)
    for batch in (2, 4):
        with granular.Loader(source, batch=batch) as loader:
            loader.load(state)
            rest = [x for one in loader for x in one['x'].tolist()]
        assert first + rest == list(range(LENGTH))
