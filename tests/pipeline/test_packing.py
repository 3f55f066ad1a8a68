"""Packing: Grain's rows for the same settings, every token once, and states that are exact between any two rows."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from granular import MapDataset, ShardOptions, grain
from granular.errors import DatapointError, InvalidArgumentError, StateError
from tests.support.states import check_each_state, plain


def documents(sizes, dtype=np.int32):
    """Create documents whose tokens are all different."""
    starts = np.cumsum([1, *sizes])
    return [
        {
            'tokens': np.arange(start, start + size, dtype=dtype),
            'weights': np.arange(start, start + size, dtype=np.float32) / 4,
            'few': np.arange(size % 3),
            'label': np.int64(size),
            'id': f'document {i}',
        }
        for i, (start, size) in enumerate(zip(starts.tolist(), sizes, strict=False))
    ]


def stream(sizes, **options):
    return MapDataset.source(documents(sizes)).to_iter_dataset(**options)


SIZES = np.random.default_rng(0).integers(0, 17, 40).tolist()

# Our options, and those of Grain.
BINS = {
    'default': ({'tokens': 16}, {}, {}),
    'bins': ({'tokens': 16}, {'num_packing_bins': 5}, {'num_packing_bins': 5}),
    'features': ({'tokens': 20, 'few': 3}, {'num_packing_bins': 4}, {'num_packing_bins': 4}),
    'segments': (
        {'tokens': 32}, {'num_packing_bins': 4, 'max_segments': 2},
        {'num_packing_bins': 4, 'max_sequences_per_bin': 2},
    ),
    'alignment': (
        {'tokens': 32, 'weights': 34}, {'num_packing_bins': 4, 'alignment': {'tokens': 8}},
        {'num_packing_bins': 4, 'pack_alignment_struct': {'tokens': 8, 'weights': 1}},
    ),
    'padding': (
        {'tokens': 32, 'weights': 34}, {'num_packing_bins': 4, 'padding': {'tokens': -1}},
        {'num_packing_bins': 4, 'padding_struct': {'tokens': -1, 'weights': 0}},
    ),
    'meta': (
        {'tokens': 32, 'label': 4, 'few': 5}, {'num_packing_bins': 4, 'meta_features': ['label', 'id']},
        {'num_packing_bins': 4, 'meta_features': ['label', 'id']},
    ),
    'shuffled': (
        {'tokens': 32}, {'num_packing_bins': 4, 'shuffle_bins': True, 'seed': 7},
        {'num_packing_bins': 4, 'shuffle_bins': True, 'seed': 7},
    ),
}  # fmt: skip
CONCATENATED = {
    'default': ({'tokens': 16}, {}, {}),
    'short rows': ({'tokens': 5}, {}, {}),
    'features': ({'tokens': 20, 'weights': 20}, {}, {}),
    'meta': ({'tokens': 20, 'label': 4}, {'meta_features': ['label']}, {'meta_features': ['label']}),
    'bos': (
        {'tokens': 7, 'weights': 7}, {'bos': {'tokens': -1}},
        {'bos_handling': 2, 'bos_features': ['tokens'], 'bos_token_id': -1},
    ),
}  # fmt: skip
CASES = {
    f'{strategy}, {name}': (strategy, *case)
    for strategy, cases in (('first_fit', BINS), ('best_fit', BINS), ('concat_then_split', CONCATENATED))
    for name, case in cases.items()
}


def packed(name, **options):
    strategy, length, ours, _ = CASES[name]
    return stream(sizes_of(name), **options).pack(length, strategy=strategy, **ours)


def sizes_of(name):
    # Grain fails for an empty document that it should begin with bos.
    return [size for size in SIZES if size or 'bos' not in name]


def test_rows_equal_those_of_grain(grain):
    script = """
X = grain.experimental
from grain._src.python.dataset.transformations.packing_concat_then_split import BOSHandling
KINDS = dict(first_fit=X.FirstFitPackIterDataset, best_fit=X.BestFitPackIterDataset,
             concat_then_split=X.ConcatThenSplitIterDataset)
def documents(sizes):
    starts = np.cumsum([1, *sizes])
    return [{
        'tokens': np.arange(start, start + size, dtype=np.int32),
        'weights': np.arange(start, start + size, dtype=np.float32) / 4,
        'few': np.arange(size % 3), 'label': np.int64(size), 'id': f'document {i}',
    } for i, (start, size) in enumerate(zip(starts.tolist(), sizes))]
out = {}
for name, [sizes, kind, length, _, options] in json.loads(sys.argv[1]).items():
    if 'bos_handling' in options: options['bos_handling'] = BOSHandling(options['bos_handling'])
    if kind != 'concat_then_split': options = {'shuffle_bins': False, 'num_packing_bins': 64, **options}
    d = grain.MapDataset.source(documents(sizes))
    if kind == 'concat_then_split': d = d.map(lambda x, k=list(length): {key: x[key] for key in k})
    out[name] = plain(list(KINDS[kind](d.to_iter_dataset(), length_struct=length, **options)))
print(json.dumps(out))
"""
    for name, expected in grain.run(
        script, json.dumps({name: [sizes_of(name), *case] for name, case in CASES.items()})
    ).items():
        rows = [plain(row) for row in packed(name)]
        assert len(rows) == len(expected), name
        for i, (row, expected_row) in enumerate(zip(rows, expected, strict=True)):
            assert row == expected_row, (name, i)


@pytest.mark.parametrize('name', CASES)
def test_classes_of_grain_are_functions_here(name):
    strategy, length, _, options = CASES[name]
    kind = {
        'first_fit': grain.experimental.FirstFitPackIterDataset,
        'best_fit': grain.experimental.BestFitPackIterDataset,
        'concat_then_split': grain.experimental.ConcatThenSplitIterDataset,
    }[strategy]
    options = {'num_packing_bins': 64, 'shuffle_bins': False} | options if strategy != 'concat_then_split' else options
    if 'bos_handling' in options:
        options = {**options, 'bos_handling': grain.experimental.BOSHandling(options['bos_handling'])}
    rows = list(kind(stream(sizes_of(name)), length_struct=length, **options))
    assert rows
    assert [plain(row) for row in rows] == [plain(row) for row in packed(name)]


@pytest.mark.parametrize('name', CASES)
def test_state_is_exact_between_any_two_rows(name):
    with iter(packed(name)) as iterator:
        expected, states = check_each_state(iterator, 3)
        for at in (1, len(states) // 2):
            iterator.set_state(states[at])
            assert [plain(row) for row in iterator] == expected[at:], at


@given(
    st.lists(st.integers(0, 40), max_size=30),
    st.sampled_from(['first_fit', 'best_fit', 'concat_then_split']),
    st.integers(1, 12), st.integers(1, 5), st.sampled_from([None, 1, 3]), st.integers(1, 4), st.booleans(),
)  # fmt: skip
@settings(max_examples=30)
def test_every_token_comes_once_and_in_the_order_of_its_document(
    sizes, strategy, length, bins, segments, alignment, nested
):
    points = documents(sizes)
    if nested:
        points = [{'text': {'tokens': point['tokens']}, 'weights': point['weights']} for point in points]
    lengths = {'text': {'tokens': length}, 'weights': length} if nested else {'tokens': length, 'weights': length}
    options = {} if strategy == 'concat_then_split' else {'shuffle_bins': True, 'seed': 3}
    rows = list(
        MapDataset.source(points).to_iter_dataset().pack(
            lengths, strategy=strategy, num_packing_bins=bins, max_segments=segments, split_long=True,
            alignment=alignment, **options,
        )
    )  # fmt: skip
    parts = []
    for row in rows:
        text = row['text'] if nested else row
        ids, positions = text['tokens_segment_ids'], text['tokens_positions']
        assert text['tokens'].shape == ids.shape == positions.shape == row['weights'].shape == (length,)
        assert ids.dtype == positions.dtype == np.int32
        assert (row['weights'] * 4 == text['tokens']).all()
        assert not text['tokens'][ids == 0].any()
        assert segments is None or ids.max() <= segments
        for number in np.unique(ids[ids > 0]):
            at = np.flatnonzero(ids == number)
            assert at[0] % alignment == 0
            assert (positions[at] == np.arange(len(at))).all()
            assert (np.diff(at) == 1).all()
            parts.append(text['tokens'][at].tolist())
    assert [token for part in sorted(parts) for token in part] == list(range(1, sum(sizes) + 1))
    if strategy != 'concat_then_split':
        whole = [part for part in parts if len(part) < length]
        assert len(whole) == sum(size % length > 0 for size in sizes)  # no document that fits is split


def test_concatenated_rows_have_no_padding_before_the_last():
    rows = list(stream([100, 3, 0, 250, 17]).pack({'tokens': 32}, strategy='concat_then_split', bos=-1))
    assert [int((row['tokens_segment_ids'] > 0).sum()) for row in rows] == [32] * 11 + [18]
    for row in rows:
        assert ((row['tokens'] == -1) == (row['tokens_segment_ids'] > 0) * (row['tokens_positions'] == 0)).all()


def test_bos_marks_beginnings_of_documents_alone_if_asked():
    sizes = [100, 3, 0, 250, 17]
    for strategy in ('concat_then_split', 'first_fit'):
        points = MapDataset.source(documents(sizes)).to_iter_dataset()
        lengths, options = {'tokens': 32, 'few': 2}, {'split_long': True, 'meta_features': ['few']}
        plain_rows = list(points.pack(lengths, strategy=strategy, **options))
        rows = list(points.pack(lengths, strategy=strategy, bos={'tokens': -1, 'few': -2}, bos_parts=False, **options))
        starts = {1, 101, 104, 354}
        for row, expected in zip(rows, plain_rows, strict=True):
            begins = np.isin(expected['tokens'], list(starts))
            assert (row['tokens'] == np.where(begins, -1, expected['tokens'])).all()
        # A meta feature repeats in each part, and is marked in the first one, which the document's first token is in.
        assert sum(int((row['few'] == -2).sum()) for row in rows) == sum(size % 3 > 0 for size in sizes)


def removed(document):
    return None


def shortened(document):
    return {**document, 'tokens': document['tokens'][:-1]}


def extended(document):
    return {**document, 'tokens': np.append(document['tokens'], np.int32(-1))}


def corrected(document):
    return {**document, 'tokens': np.append(np.int32(-1), document['tokens'][1:])}


def recast(document):
    return {**document, 'tokens': document['tokens'].astype(np.int64)}


STRATEGIES = {
    'concat_then_split': {'strategy': 'concat_then_split'},
    'first_fit': {'num_packing_bins': 3, 'split_long': True},
    'best_fit': {'num_packing_bins': 3, 'split_long': True, 'strategy': 'best_fit'},
    'shuffled': {'num_packing_bins': 3, 'split_long': True, 'shuffle_bins': True, 'seed': 1},
    'shards': {'num_packing_bins': 3, 'split_long': True, 'shard_options': ShardOptions(0, 2)},
}


class Changing:
    """Documents of which one is changed after a state was saved."""

    def __init__(self, options):
        self.sizes, self.number, self.change, self.options = [9, 2, 30, 5, 7, 1, 12, 3, 3, 8, 6], -1, None, options

    def _document(self, index, document):
        return self.change(document) if index == self.number else document

    def rows(self):
        points = MapDataset.source(documents(self.sizes)).map_with_index(self._document)
        return iter(points.to_iter_dataset().pack({'tokens': 10}, **self.options))

    def tokens_of_others(self, rows):
        start = sum(self.sizes[: self.number]) + 1
        own = {-1, *range(start, start + self.sizes[self.number])}
        return sorted({int(t) for row in rows for t in row['tokens'][row['tokens_segment_ids'] > 0]} - own)


@pytest.mark.parametrize('change', [removed, shortened, extended, corrected, recast])
@pytest.mark.parametrize('options', STRATEGIES.values(), ids=list(STRATEGIES))
def test_a_document_that_changed_while_it_was_held_is_refused_or_concerns_itself_alone(options, change):
    data = Changing(options)
    with data.rows() as rows:
        states, given = [rows.get_state()], []
        for row in rows:
            given.append(row)
            states.append(json.loads(json.dumps(rows.get_state())))
    refused = accepted = 0
    for at, state in enumerate(states):
        for number in range(len(data.sizes)):
            data.number, data.change = number, change
            try:
                with data.rows() as rows:
                    rows.set_state(state)
                    following = list(rows)
            except (StateError, DatapointError) as error:  # several dtypes in a pack are an error
                refused += 1
                assert 'or from a state that holds none of them' in str(error) or change is recast
                continue
            accepted += 1
            if 'shard_options' in options:
                continue  # the other rows are those of another process
            tokens = [t for row in following for t in row['tokens'].tolist() if t > 0]
            assert len(set(tokens)) == len(tokens)
            assert data.tokens_of_others([*given[:at], *following]) == data.tokens_of_others(given)
    assert refused
    assert accepted


def test_a_removed_document_that_is_held_is_refused_until_it_is_there_again():
    data = Changing(STRATEGIES['concat_then_split'])
    with data.rows() as rows:
        _ = next(rows), next(rows)
        state = rows.get_state()
        expected = list(rows)
    data.number, data.change = 2, removed
    with data.rows() as rows:
        rows.set_state(state)
        with pytest.raises(StateError, match='holds 1 element from number 2 on, and other elements were read in their'):
            next(rows)
    data.number = -1
    with data.rows() as rows:
        rows.set_state(state)
        assert [plain(row) for row in rows] == [plain(row) for row in expected]


def test_features_of_different_lengths_are_split_apart():
    """Grain repeats the tokens of the shorter feature, if the rest of a document is split again."""
    points = [{'a': np.arange(1, 12), 'b': np.arange(1, 4)}, {'a': np.arange(12, 15), 'b': np.arange(4, 7)}]
    for strategy in ('concat_then_split', 'first_fit'):
        packing = MapDataset.source(points).to_iter_dataset().pack({'a': 4, 'b': 8}, strategy=strategy, split_long=True)
        rows = list(packing)
        assert [row['a'][row['a'] > 0].tolist() for row in rows][:2] == [[1, 2, 3, 4], [5, 6, 7, 8]]
        assert sorted(x for row in rows for x in row['a'] if x) == list(range(1, 15))
        assert sorted(x for row in rows for x in row['b'] if x) == list(range(1, 7))


@pytest.mark.parametrize('name', ['first_fit, shuffled', 'concat_then_split, short rows'])
def test_shards_of_rows_are_the_same_for_any_number_of_processes(name):
    strategy, length, options, _ = CASES[name]
    expected = [plain(row) for row in packed(name)]

    def iterators(count):
        return [
            iter(stream(SIZES).pack(length, strategy=strategy, shard_options=ShardOptions(i, count), **options))
            for i in range(count)
        ]

    for before, after in ((1, 3), (3, 1), (2, 5), (4, 4)):
        first = iterators(before)
        rounds = 2
        seen = [plain(next(iterator)) for _ in range(rounds) for iterator in first]
        assert seen == expected[: before * rounds]
        for saved in first:  # the state of any process fits all others
            second = iterators(after)
            for iterator in second:
                iterator.set_state(saved.get_state())
            again = [plain(next(iterator)) for iterator in second]
            assert again == expected[before * rounds :][:after]
            third = iterators(2)
            for iterator in third:
                iterator.set_state(second[-1].get_state())
            rest = [[plain(row) for row in iterator] for iterator in third]
            assert rest == [expected[before * rounds + after :][i::2] for i in range(2)]


def test_rows_are_the_same_with_worker_processes():
    packing = {'length': {'tokens': 40}, 'num_packing_bins': 4}
    expected = [plain(row) for row in stream(SIZES).pack(**packing)]
    with iter(stream(SIZES).pack(**packing).mp_prefetch(1)) as iterator:
        rows = [plain(next(iterator)) for _ in range(3)]
        state = iterator.get_state()
        assert rows == expected[:3]
    with iter(stream(SIZES).pack(**packing)) as iterator:
        iterator.set_state(state)
        assert [plain(row) for row in iterator] == expected[3:]


def test_lists_and_scalars_are_sequences():
    points = [{'t': [1, 2, 3], 'x': 5}, {'t': [], 'x': 6}, {'t': (4,), 'x': 7}]
    (row,) = MapDataset.source(points).to_iter_dataset().pack({'t': 6, 'x': 4})
    assert row['t'].tolist() == [1, 2, 3, 4, 0, 0]
    assert row['t_segment_ids'].tolist() == [1, 1, 1, 3, 0, 0]
    assert row['x'].tolist() == [5, 6, 7, 0]
    assert not list(MapDataset.source([]).to_iter_dataset().pack({'t': 6}))


def test_error_names_the_element_and_leaves_the_state():
    def points(*values):
        return MapDataset.source([{'t': value} for value in values]).to_iter_dataset()

    good = np.arange(3)
    for stream_of_points, message in (
        (points(good, np.arange(9)), "element 1: a sequence of 9 in 't' is longer than a row of 8: split it, or pass"),
        (points(good, good.astype(np.int32)), r'element 1: .*expected int64 of shape \(n\) .* got int32 of \(n\)'),
        (points(good, good[:, None]), r'element 1: .* got int64 of \(n, 1\)'),
        (points(good, [[1], [2, 3]]), "element 1: 't' is not an array"),
        (points(good, 'text'), r'element 1: .*expected int64'),
        (points(good, np.ma.masked_array(good, good > 1)), "element 1: 't': expected an array without a mask"),
        (points('text'), r"element 0: 't': expected numbers, got dtype <U4"),
        (MapDataset.source([{'t': good}, {'u': good}]).to_iter_dataset(), r"element 1 has no 't', only \['u'\]"),
        (MapDataset.source([good]).to_iter_dataset(), "element 0 has no 't', only ndarray"),
    ):
        with iter(stream_of_points.pack({'t': 8})) as iterator:
            state = iterator.get_state()
            for _ in range(2):
                with pytest.raises(DatapointError, match=message):
                    next(iterator)
                assert iterator.get_state() == state
    with pytest.raises(DatapointError, match="'m' is longer than a row of 2: which is a meta feature"):
        points_with_meta = MapDataset.source([{'t': good, 'm': good}]).to_iter_dataset()
        list(points_with_meta.pack({'t': 2, 'm': 2}, strategy='concat_then_split', meta_features=['m']))
    with pytest.raises(DatapointError, match="padding of 't': 0.5 is not a value of dtype int64"):
        list(points(good).pack({'t': 8}, padding=0.5))
    with pytest.raises(DatapointError, match="bos of 't': -1 is not a value of dtype uint16"):
        list(points(good.astype(np.uint16)).pack({'t': 8}, bos=-1))
    with pytest.raises(DatapointError, match="element 0 has no 'id'"):
        list(points(good).pack({'t': 8}, meta_features=['id']))


@pytest.mark.parametrize(
    ('options', 'message'),
    [({'length': 8}, r"expected a mapping from features to lengths such as {'tokens': 2048}, got 8"),
     ({'length': {}}, 'expected a mapping'), ({'length': {'t': 0}}, "length of 't': expected an integer >= 1, got 0"),
     ({'length': {'t': {'u': 'x'}}}, "length of 't.u'"), ({'length': {1: 8}}, 'expected text as keys, got 1'),
     ({'length': {'t': 8, 't_positions': 8}}, "'t_positions' is also the name"),
     ({'strategy': 'worst_fit'}, "strategy: expected one of .*'best_fit'.*, got 'worst_fit'"),
     ({'num_packing_bins': 0}, 'num_packing_bins'), ({'max_segments': 0}, 'max_segments'),
     ({'alignment': 0}, 'alignment: expected an integer >= 1, got 0'), ({'alignment': {'u': 2}}, "'u' is not packed"),
     ({'padding': {'t': {'u': 2}}}, "padding: expected a value for 't'"), ({'meta_features': 't'}, 'sequence of keys'),
     ({'strategy': 'concat_then_split', 'shuffle_bins': True}, 'it has no bins')],
)  # fmt: skip
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        stream([1]).pack(**{'length': {'t': 8}, **options})


def test_states_that_do_not_fit_are_refused():
    iterator = iter(stream(SIZES).pack({'tokens': 16}, num_packing_bins=3))
    with pytest.raises(StateError, match=r"got \['parent', 'place'\]"):
        iterator.set_state({**iterator.get_state(), 'state': {'parent': 4, 'place': 1}})
    state = iterator.get_state()['state']
    for change, message in (
        ({'row': -1}, 'integers >= 0'), ({'rows': 3}, 'row >= 3, got 0'), ({'offsets': [1, 2]}, 'expected 1 offsets'),
        ({'parent': len(SIZES), 'offsets': [3]}, 'holds a part of element 0, and other elements'),
        ({'offsets': [99]}, 'holds a part of element 0'), ({'documents': [1, 2]}, 'number, end and checksum'),
    ):  # fmt: skip
        iterator.set_state({'version': 5, 'state': state})
        with pytest.raises(StateError, match=message):
            iterator.set_state({'version': 5, 'state': {**state, **change}})
            next(iterator)
    other = stream(SIZES).pack({'tokens': 16}, num_packing_bins=3, strategy='best_fit')
    with pytest.raises(StateError, match=r"stage 3 was .*, 3\).*, and is .*, 3, strategy='best_fit'\)"):
        iter(other).set_state(iterator.get_state())
