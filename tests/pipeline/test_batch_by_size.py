"""Batches within a budget: each element once, padded to the top of its bucket, equally many in each epoch."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import MapDataset, ShardOptions, aio
from granular.errors import DatapointError, InvalidArgumentError, StateError
from tests.support.states import check_each_state, plain
from tests.support.tables import plans


def clips(sizes, channels=()):
    """Create clips whose values all have their number, from 1 on."""
    return [
        {'audio': np.full((size, *channels), i + 1, np.float32), 'text': f'clip {i}', 'label': i + 1}
        for i, size in enumerate(sizes)
    ]


SIZES = np.random.default_rng(0).integers(0, 30, 100).tolist()


def dataset(sizes=SIZES, seed=1, **options):
    return MapDataset.source(clips(sizes, **options)).shuffle(seed=seed)


def epoch_of(batches, epoch):
    return batches.fetch(np.arange(len(batches)) + epoch * len(batches))


def elements_of(batch):
    """Return the number and size of the elements of a batch."""
    present = batch['audio_sizes'] > 0
    assert (batch['label'] > 0).tolist() == present.tolist()
    assert present.tolist() == sorted(present.tolist(), reverse=True)
    for row, size, label, text in zip(*(batch[key] for key in ('audio', 'audio_sizes', 'label', 'text')), strict=True):
        assert row[:size].tolist() == np.full_like(row[:size], label).tolist()
        assert not row[size:].any()
        assert text == (f'clip {label - 1}' if size else '')
    return list(zip(batch['label'][present].tolist(), batch['audio_sizes'][present].tolist(), strict=True))


@settings(max_examples=plans(150))
@given(st.data())
def test_each_element_is_in_one_batch(data):
    sizes = data.draw(st.lists(st.integers(0, 30), max_size=50))
    docs = dataset(sizes) if data.draw(st.booleans()) else MapDataset.source(clips(sizes))
    align = data.draw(st.integers(1, 3))
    budget, most_elements = data.draw(st.integers(30, 120)), data.draw(st.none() | st.integers(1, 5))
    buckets = data.draw(st.integers(1, 5) | st.lists(st.integers(1, 29), max_size=3).map(lambda tops: [*tops, 30]))
    batches = docs.batch_by_size('audio', budget, buckets=buckets, max_elements=most_elements, align=align)
    assert len(batches) % align == 0
    expected = sorted((i + 1, size) for i, size in enumerate(sizes) if size)
    for epoch in range(2):
        own = epoch_of(batches, epoch)
        elements_in = [elements_of(batch) for batch in own]
        assert sorted(element for elements in elements_in for element in elements) == expected
        counts: dict[tuple[int, int], list[int]] = {}
        for batch, elements in zip(own, elements_in, strict=True):
            counts.setdefault(batch['audio'].shape, []).append(len(elements))
        assert set(counts) == set(batches.shapes)
        for (rows, top), filled in counts.items():
            most = min(budget // top, most_elements or budget)
            assert max(filled) == rows <= most
            assert len(filled) == align or sum(filled) > (len(filled) - align) * most  # no batch is needless
        for start in range(0, len(own), align):
            assert len({batch['audio'].shape for batch in own[start : start + align]}) == 1
            filled = [len(elements) for elements in elements_in[start : start + align]]
            assert max(filled) - min(filled) <= 1
            assert align > 1 or min(filled) > 0


def test_a_smaller_last_group_is_dropped():
    batches = dataset().batch_by_size('audio', 60, align=2, drop_remainder=True)
    for batch in batches:
        assert (batch['audio_sizes'] > 0).all()
    assert 0 < len(batches) < len(dataset().batch_by_size('audio', 60, align=2))


def test_batches_without_elements_have_the_structure_of_others():
    elements = [{'audio': np.ones((3, 2)), 'raw': b'x', 'none': None, 'label': 4}]
    batches = list(MapDataset.source(elements).batch_by_size('audio', 6, align=3))
    assert [batch['audio_sizes'].tolist() for batch in batches] == [[3], [0], [0]]
    for batch in batches:
        assert {key: np.shape(value) for key, value in batch.items()} == {
            'audio': (1, 3, 2), 'raw': (1,), 'none': (), 'label': (1,), 'audio_sizes': (1,)
        }  # fmt: skip
    assert [batch['raw'].tolist() for batch in batches] == [[b'x'], [b''], [b'']]
    assert [batch['audio'].any() for batch in batches] == [True, False, False]


def test_the_cost_may_be_any_function():
    batches = dataset().batch_by_size('audio', 2000, cost=lambda elements, top: elements * top**2)
    for elements, top in batches.shapes:
        assert elements * top**2 <= 2000


@pytest.mark.parametrize('options', [{'max_size': float('inf')}, {'max_size': 1, 'cost': lambda elements, top: 1}])
def test_a_large_budget_has_as_many_rows_as_elements(options):
    batches = dataset().batch_by_size('audio', **options, buckets=2)
    assert sum(elements for elements, _ in batches.shapes) == np.count_nonzero(SIZES)
    assert len(list(batches)) == 2


def test_several_keys_with_several_axes():
    elements = [{'a': np.ones((n, 2)), 'b': np.full(n, 3)} for n in (1, 2, 3)]
    batch = MapDataset.source(elements).batch_by_size(['a', 'b'], 100, buckets=1)[0]
    assert (batch['a'].shape, batch['b'].shape) == ((3, 3, 2), (3, 3))
    assert batch['a_sizes'].tolist() == [1, 2, 3]
    assert batch['b'][:2].tolist() == [[3, 0, 0], [3, 3, 0]]
    elements[1]['b'] = np.full(5, 3)
    with pytest.raises(DatapointError, match="index 1: 'b': expected 2 values, as its size says, got 5"):
        list(MapDataset.source(elements).batch_by_size(['a', 'b'], 100, buckets=1))


def test_shapes_are_known_behind_functions_and_orders():
    batches = dataset().batch_by_size('audio', 60)
    assert batches.shuffle(seed=3).map(lambda batch: batch).repeat().shapes == batches.shapes
    with pytest.raises(InvalidArgumentError, match=r'call batch_by_size\(\) before'):
        assert dataset().shapes


def test_the_spec_has_no_lengths_that_differ():
    spec = granular.grain.experimental.get_element_spec(
        dataset(channels=(2,)).select(['audio', 'label']).batch_by_size('audio', 60)
    )
    assert {key: value.shape for key, value in spec.items()} == {
        'audio': (None, None, 2), 'label': (None,), 'audio_sizes': (None,)
    }  # fmt: skip


def test_padding_is_about_the_least():
    sizes = np.random.default_rng(0).lognormal(6, 0.6, 20_000).astype(np.int64).clip(1)
    docs = MapDataset.range(len(sizes)).map(lambda i: {'audio': np.zeros(sizes[i])}).shuffle(seed=1)
    for buckets, most in ((8, 0.2), (64, 0.03)):
        batches = docs.batch_by_size('audio', 60_000, buckets=buckets, sizes=sizes)
        assert len(batches.shapes) <= buckets
        padded = sum(batches.shapes[i][1] * count for i, count in enumerate(np.histogram(
            sizes, [0, *(top + 1 for _, top in batches.shapes)])[0].tolist()))  # fmt: skip
        assert 1 - sizes.sum() / padded < most


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'key': 3}, 'key: expected a key'),
        ({'max_size': 0}, 'max_size: expected a number > 0'),
        ({'buckets': []}, 'buckets: expected a number'),
        ({'buckets': 0}, 'buckets: expected an integer >= 1'),
        ({'buckets': [5, 10]}, r"index \d+: \d+ in 'audio' is larger than the last top of buckets=\[5, 10\]"),
        ({'max_size': 20}, r"index \d+: \d+ in 'audio' is larger than a batch: .* costs more than 20"),
        ({'align': 0}, 'align: expected an integer'),
        ({'cost': 5}, 'cost: expected'),
        ({'cost': lambda elements, top: None}, r'cost: expected a number for \(1, \d+\), got None'),
        ({'cost': lambda elements, top: float('nan')}, 'cost: expected a number for'),
        ({'sizes': [1]}, 'expected 100 sizes'),
    ],
)
def test_invalid_arguments(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        dataset().batch_by_size(**{'key': 'audio', 'max_size': 60, **options})


def test_elements_that_do_not_fit_the_plan():
    wrong = [size + (i == 7) for i, size in enumerate(SIZES)]
    with pytest.raises(
        DatapointError, match=f"index 7: 'audio': expected {wrong[7]} values.* got {SIZES[7]}"
    ) as caught:
        list(dataset().batch_by_size('audio', 60, sizes=wrong))
    assert (caught.value.key, caught.value.index) == ('audio', 7)
    with pytest.raises(DatapointError, match="index 0: 'audio_sizes': is also the name of the sizes"):
        list(MapDataset.source([{'audio': np.ones(3), 'audio_sizes': 7}]).batch_by_size('audio', 60))
    for value, got in ((['x', 'y'], '<U1'), (np.array([None] * 2), 'object'), ('xy', 'str')):
        with pytest.raises(DatapointError, match=f'expected an array or a list of numbers, got {got}: convert it'):
            list(MapDataset.source([{'audio': value}]).batch_by_size('audio', 60))
    mixed = clips([3, 3])
    mixed[1]['audio'] = mixed[1]['audio'].astype(np.float64)
    with pytest.raises(DatapointError, match='expected float32 of shape'):
        list(MapDataset.source(mixed).batch_by_size('audio', 60))
    with pytest.raises(DatapointError, match=r"expected a dict with \['audio'\], got ndarray"):
        list(dataset().map(lambda clip: clip['audio']).batch_by_size('audio', 60, sizes=SIZES))


@pytest.mark.parametrize('sizes', [[], [0], [5]])
def test_few_elements(sizes, caplog):
    batches = dataset(sizes).batch_by_size('audio', 60)
    assert [elements_of(batch) for batch in batches] == [[(1, 5)]] * int(any(sizes))
    assert batches.shapes == [(1, 5)] * int(any(sizes))
    assert ('empty, and left out' in caplog.text) == (0 in sizes)


async def test_the_async_dataset_has_the_same_batches():
    batches = await aio.MapDataset.source(clips(SIZES)).shuffle(seed=1).batch_by_size('audio', 60)
    assert batches.shapes == dataset().batch_by_size('audio', 60).shapes
    assert plain([batch async for batch in batches]) == plain(list(dataset().batch_by_size('audio', 60)))


def test_states_are_exact():
    batches = dataset().batch_by_size('audio', 100).repeat(2)
    check_each_state(iter(batches), most=3)
    assert plain(list(pickle.loads(pickle.dumps(batches)))) == plain(list(batches))
    iterator = iter(batches)
    next(iterator)
    others = dataset([*SIZES[:-1], SIZES[-1] % 20 + 1]).batch_by_size('audio', 100).repeat(2)
    with pytest.raises(StateError, match=r'stage 3 was .*sizes [0-9a-f]{8}.*and is .*sizes [0-9a-f]{8}'):
        iter(others).set_state(iterator.get_state())


def test_a_state_of_another_cost_is_refused():
    states = []
    for power in (1, 2):
        batches = dataset().batch_by_size('audio', 1000, cost=lambda elements, top, power=power: elements * top**power)
        iterator = iter(batches)
        next(iterator)
        states.append(iterator.get_state())
    with pytest.raises(StateError, match=r'stage 3 was .*plan [0-9a-f]{8}.*and is .*plan [0-9a-f]{8}'):
        iterator.set_state(states[0])


def test_the_union_of_batches_is_exact_on_changing_numbers_of_hosts():
    batches = dataset().batch_by_size('audio', 60, align=6).repeat(4)
    state, found = None, []
    for hosts, steps in ((2, 6), (3, 4), (1, 6), (6, None)):
        iterators = [iter(batches.to_iter_dataset(shard_options=ShardOptions(i, hosts))) for i in range(hosts)]
        for iterator in iterators:
            if state is not None:
                iterator.set_state(state)
        own = [list(itertools.islice(iterator, steps)) for iterator in iterators]
        assert len({len(part) for part in own}) == 1
        for step in zip(*own, strict=True):
            assert len({batch['audio'].shape for batch in step}) == 1  # equal cost
            found += step
        state = iterators[0].get_state()
    assert plain(found) == plain(list(batches))


@pytest.mark.parametrize('ranks', [1, 2, 3, 8, 64])
def test_all_ranks_have_as_many_steps_and_equal_cost(ranks):
    batches = dataset().select(['audio']).batch_by_size('audio', 60, buckets=2, align=64)
    shapes = []
    for rank in range(ranks):
        shard = ShardOptions(rank, ranks, drop_remainder=True)
        shapes.append([batch['audio'].shape for batch in batches.to_iter_dataset(shard_options=shard)])
    assert len({len(own) for own in shapes}) == 1
    steps = [set(step) for step in zip(*shapes, strict=True)]
    assert ranks == 3 or all(len(step) == 1 for step in steps)  # 64 is no multiple of 3
