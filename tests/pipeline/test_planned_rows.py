"""Planned rows: each document once in each epoch, as in plain Python; and exact states on any number of hosts."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import MapDataset, ShardOptions, aio
from granular.errors import DatapointError, InvalidArgumentError, StateError, UnknownKeyError
from granular.shuffle import Blocks
from tests.support.files import megatron_index
from tests.support.states import check_each_state, plain
from tests.support.tables import plans


def documents(sizes, dtype=np.int32):
    """Create documents whose tokens are all different, and above 0."""
    starts = np.cumsum([1, *sizes])
    return [
        {'tokens': np.arange(start, start + size, dtype=dtype), 'size': np.int64(size), 'few': np.arange(size % 3)}
        for start, size in zip(starts.tolist(), sizes, strict=False)
    ]


SIZES = np.random.default_rng(0).integers(0, 17, 60).tolist()


def dataset(sizes=SIZES, seed=1):
    return MapDataset.source(documents(sizes)).shuffle(seed=seed)


def pieces(row):
    """Return the values of each segment of a row."""
    ids = row['tokens_segment_ids']
    return [row['tokens'][ids == number].tolist() for number in range(1, ids.max(initial=0) + 1)]


def epoch_of(rows, epoch):
    return rows.fetch(np.arange(len(rows)) + epoch * len(rows))


# --- against plain Python


@settings(max_examples=plans(150))
@given(st.data())
def test_each_document_is_in_one_row(data):
    sizes = data.draw(st.lists(st.integers(0, 20), max_size=40))
    alignment = data.draw(st.integers(1, 4))
    separator = data.draw(st.none() | st.just(-1))
    most = data.draw(st.none() | st.integers(1, 5))
    longer = data.draw(st.sampled_from(['raise', 'cut', 'drop', 'divide']))
    length = data.draw(st.integers(21 if longer == 'raise' else 5, 40))
    docs = dataset(sizes) if data.draw(st.booleans()) else MapDataset.source(documents(sizes))
    options = {'alignment': alignment, 'separator': separator, 'max_segments': most, 'longer': longer}
    rows = docs.pack({'tokens': length}, classes=data.draw(st.none() | st.integers(1, 9)), documents=True, **options)
    mark = [] if separator is None else [separator]
    for epoch in range(2):
        expected = []
        for i, element in enumerate(docs.fetch(np.arange(len(docs)) + epoch * len(docs))):
            values = element['tokens'].tolist()
            if not values or (longer == 'drop' and len(values + mark) > length):
                continue
            values = (values[: length - len(mark)] if longer == 'cut' else values) + mark
            expected += [
                (i + epoch * len(docs), values[start : start + length]) for start in range(0, len(values), length)
            ]
        found = []
        for row in epoch_of(rows, epoch):
            assert row['tokens'].shape == (length,)
            ids, start = row['tokens_segment_ids'].tolist(), 0
            for number, piece in enumerate(pieces(row), 1):
                assert ids[start : start + len(piece)] == [number] * len(piece)
                assert row['tokens_positions'][start : start + len(piece)].tolist() == list(range(len(piece)))
                (document,) = set(row['tokens_documents'][start : start + len(piece)].tolist())
                found.append((document, piece))
                start = -(-(start + len(piece)) // alignment) * alignment
            padding = row['tokens_segment_ids'] == 0
            assert not row['tokens'][padding].any()
            assert (row['tokens_documents'][padding] == -1).all()
            assert 0 < max(ids) <= (most or length)
        assert sorted(found) == sorted(expected)


@settings(max_examples=plans(150))
@given(st.data())
def test_concatenated_documents_are_cut_at_equal_distances(data):
    sizes = data.draw(st.lists(st.integers(0, 30), max_size=30))
    alignment = data.draw(st.sampled_from([1, 2, 4]))
    extra = data.draw(st.integers(0, 2))
    separator = data.draw(st.none() | st.just(-1))
    length = alignment * data.draw(st.integers(1, 9))
    docs = dataset(sizes) if data.draw(st.booleans()) else MapDataset.source(documents(sizes))
    rows = docs.pack(
        {'tokens': length}, strategy='concat_then_split', alignment=alignment, separator=separator, extra=extra
    )
    for epoch in range(2):
        tape = []
        for element in docs.fetch(np.arange(len(docs)) + epoch * len(docs)):
            values = element['tokens'].tolist()
            values += [] if separator is None or not values else [separator]
            tape += values + [0] * (-len(values) % alignment)
        starts = range(0, max(len(tape) - extra, min(1, len(tape))), length)
        padded, full = tape + [0] * (length + extra), length + extra
        expected = [padded[start : start + full] for start in starts]
        found = [row['tokens'].tolist() for row in epoch_of(rows, epoch)]
        assert sorted(found) == sorted(expected)
        if docs.node.varies is False:
            assert found == expected


def test_features_with_sizes_of_their_own():
    rows = dataset().pack({'tokens': 20, 'few': 5}, bos={'tokens': -7}, padding={'few': 9})
    elements = {i: element for i, element in enumerate(documents(SIZES)) if len(element['tokens'])}
    found = [(piece, row['few']) for row in rows for piece in pieces(row)]
    assert len(found) == len(elements)
    assert all(piece[0] == -7 for piece, _ in found)
    total = sum(int((row['few_segment_ids'] > 0).sum()) for row in rows)
    assert total == sum(len(element['few']) for element in elements.values())
    assert all((row['few'][row['few_segment_ids'] == 0] == 9).all() for row in rows)


def test_rows_have_the_keys_of_those_of_a_stream():
    docs = MapDataset.source([{'text': {'ids': np.arange(1, n + 1)}} for n in (3, 4)])
    planned = docs.pack({'text': {'ids': 8}}, bos=-1)[0]
    streamed = next(iter(docs.to_iter_dataset().pack({'text': {'ids': 8}}, bos=-1)))
    assert planned['text'].keys() == streamed['text'].keys()
    assert {key: value.dtype for key, value in planned['text'].items()} == {
        key: value.dtype for key, value in streamed['text'].items()
    }
    assert planned['text']['ids'].tolist() == [-1, 2, 3, 4, -1, 2, 3, 0]


@pytest.mark.parametrize('strategy', ['best_fit', 'concat_then_split'])
def test_limits_of_sequences_for_flash_attention(strategy):
    rows = dataset().pack({'tokens': 16}, strategy=strategy, cu_seqlens=True)
    for row in rows:
        limits = row['cu_seq_lens_q']
        assert limits.dtype == np.int32
        assert (limits == row['cu_seq_lens_k']).all()
        assert len(limits) == len(rows[0]['cu_seq_lens_q'])
        assert (limits[0], limits[-1]) == (0, 16)
        assert row['max_length_q'] == row['max_length_k'] == np.diff(limits).max()
        ids = row['tokens_segment_ids']
        changes = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist(), 16]
        assert sorted(set(limits.tolist())) == sorted(set(changes))


def test_rows_are_in_the_order_of_the_documents_unless_these_are_shuffled():
    docs = MapDataset.source(documents(SIZES))
    rows = docs.pack({'tokens': 16}, documents=True)
    firsts = [min(set(row['tokens_documents'].tolist()) - {-1}) for row in rows]
    assert firsts == sorted(firsts)
    shuffled = dataset().pack({'tokens': 16})
    assert len(shuffled) == len(rows)
    epochs = [plain(epoch_of(shuffled, epoch)) for epoch in range(2)]
    assert epochs[0] != epochs[1]
    assert plain(epoch_of(dataset().pack({'tokens': 16}), 0)) == epochs[0]
    assert plain(epoch_of(dataset(seed=2).pack({'tokens': 16}), 0)) != epochs[0]


def test_sizes_of_concatenated_datasets_are_those_of_its_parts():
    first, second = MapDataset.source(documents(SIZES)), MapDataset.source(documents([3, 0, 7]))[::-1]
    both = MapDataset.concatenate([first, second, MapDataset.source([])])
    rows = both.shuffle(seed=1).pack({'tokens': 16}, documents=True)
    expected = both.shuffle(seed=1).pack({'tokens': 16}, documents=True, sizes=[*SIZES, 7, 0, 3])
    assert plain(list(rows.repeat(2))) == plain(list(expected.repeat(2)))
    mapped = first.map(lambda element: element)
    with pytest.raises(InvalidArgumentError, match="concatenate 2 does not tell the sizes of 'tokens': pass sizes="):
        MapDataset.concatenate([first, mapped]).pack({'tokens': 16})


def test_a_separator_alone_is_no_first_value():
    docs = MapDataset.source([{'tokens': np.arange(1, 4)}, {'tokens': np.arange(5, 9)}])
    rows = docs.pack({'tokens': 3}, strategy='concat_then_split', separator=-1, bos=-2)
    assert [row['tokens'].tolist() for row in rows] == [[-2, 2, 3], [-1, -2, 6], [-2, 8, -1]]
    divided = docs[:1].pack({'tokens': 3}, longer='divide', separator=-1, bos=-2)
    assert sorted(row['tokens'].tolist() for row in divided) == [[-2, 2, 3], [-1, 0, 0]]


# --- sizes and bad input


def test_sizes_are_given_where_they_are_not_known():
    tokenized = dataset().map(lambda element: {**element, 'tokens': element['tokens'] + 1})
    with pytest.raises(InvalidArgumentError, match=r"sizes of 'tokens' behind map\(.*pass sizes="):
        tokenized.pack({'tokens': 16})
    expected = plain(list(dataset().pack({'tokens': 16}).map(lambda row: row['tokens_segment_ids'])))
    for sizes in (SIZES, np.array(SIZES, np.uint8), 'size', {'tokens': 'size'}):
        rows = tokenized.pack({'tokens': 16}, sizes=sizes)
        assert plain([row['tokens_segment_ids'] for row in rows]) == expected


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda docs: docs.filter(bool), 'a filtered dataset'),
        (lambda docs: docs.repeat(), 'repeated infinitely: call pack'),
        (lambda docs: docs[:10], 'slice before shuffle'),
        (lambda docs: MapDataset.source(documents(SIZES)).shuffle(seed=1, order=Blocks(4)), 'without an order'),
        (lambda docs: MapDataset.mix([docs, docs.shuffle(seed=3)[:30]]), 'slice before shuffle'),
        (lambda docs: MapDataset.mix([docs, docs], weights=[1, 2]), r'call pack\(\) before it'),
    ],
)
def test_elements_that_differ_between_epochs_are_refused(change, message):
    with pytest.raises(InvalidArgumentError, match=message):
        change(dataset()).pack({'tokens': 16})


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'length': 16}, 'length: expected a mapping'),
        ({'strategy': 'first_fit'}, 'strategy: expected one of'),
        ({'longer': 'split'}, 'longer: expected one of'),
        ({'classes': 0}, 'classes: expected an integer from 1 to 65536'),
        ({'extra': -1}, 'extra: expected an integer'),
        ({'length': {'tokens': 2**63}}, "length of 'tokens': expected an integer from 1 to"),
        ({'separator': np.array([1, 2])}, r"separator of 'tokens': expected a number, got array"),
        ({'padding': [0]}, "padding of 'tokens': expected a number"),
        ({'sizes': {'few': [1]}}, "sizes: 'few' is not packed"),
        ({'sizes': 'tokens'}, "pack: sizes 'tokens': expected a 1-D sequence of integers"),
        ({'sizes': [1, 2]}, 'expected 60 sizes, one for each element of list of 60, got 2'),
        ({'sizes': [-1] * 60}, 'expected sizes >= 0, got -1 at index 0'),
        ({'strategy': 'concat_then_split', 'max_segments': 2}, 'max_segments: concat_then_split has none'),
        ({'strategy': 'concat_then_split', 'longer': 'cut'}, 'divides all documents'),
        ({'strategy': 'concat_then_split', 'alignment': 3}, 'needs rows of a multiple of 3, got 16'),
        ({'strategy': 'concat_then_split', 'length': {'tokens': 16, 'few': 16}}, r'index \d+ has \d+ in .tokens. and'),
        ({'strategy': 'concat_then_split', 'length': {'tokens': 16, 'few': 4}}, 'expected the length, alignment'),
        ({'length': {'tokens': 16, 'few': 4}, 'cu_seqlens': True}, 'cu_seqlens: expected one feature'),
        ({'length': {'tokens': 16, 'few': 4}, 'longer': 'divide'}, "longer='divide': expected one feature"),
        ({'length': {'tokens': 9}}, r"index \d+: a sequence of 1\d in 'tokens' is longer than the 9 positions"),
    ],
)
def test_invalid_arguments(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        dataset().pack(**{'length': {'tokens': 16}, **options})


def test_unknown_keys_and_sizes_that_do_not_fit():
    with pytest.raises(DatapointError, match="index 0: no 'words'"):
        dataset().pack({'words': 16})
    wrong = [size + (i == 7) for i, size in enumerate(SIZES)]
    rows = dataset().pack({'tokens': 20}, sizes=wrong)
    message = f"index 7: 'tokens': expected {wrong[7]} values.*got {SIZES[7]}"
    with pytest.raises(DatapointError, match=message) as caught:
        list(rows)
    assert (caught.value.key, caught.value.index) == ('tokens', 7)
    lacking = MapDataset.source(documents([3, 3])).map(lambda element: {'size': element['size']})
    with pytest.raises(DatapointError, match="pack: index 0 has no 'tokens', only"):
        list(lacking.pack({'tokens': 16}, sizes=[3, 3]))
    mixed = documents([3, 3, 4])
    mixed[1]['tokens'] = mixed[1]['tokens'].astype(np.int64)
    with pytest.raises(DatapointError, match=r"'tokens': expected int\d\d of shape \(n\) .* got int\d\d"):
        list(MapDataset.source(mixed).pack({'tokens': 16}))
    with pytest.raises(DatapointError, match="padding of 'tokens': 0.5 is not a value"):
        list(dataset().pack({'tokens': 16}, padding=0.5))


def test_a_row_that_fails_is_skipped_as_a_whole():
    wrong = [size + (i == 7) for i, size in enumerate(SIZES)]
    rows = dataset().pack({'tokens': 20}, sizes=wrong, documents=True)
    kept = list(rows.to_iter_dataset(on_error='skip'))
    assert len(kept) == len(rows) - 1


@pytest.mark.parametrize('sizes', [[], [0], [0, 0], [5], [16]])
@pytest.mark.parametrize('strategy', ['best_fit', 'concat_then_split'])
def test_few_documents(sizes, strategy, caplog):
    rows = dataset(sizes).pack({'tokens': 16}, strategy=strategy)
    assert len(rows) == int(any(sizes))
    assert [piece for row in rows for piece in pieces(row)] == [list(range(1, size + 1)) for size in sizes if size]
    assert ('empty, and left out' in caplog.text) == (0 in sizes)


# --- reading and states


class Counting(granular.DataSource):
    """Documents that count how often they are read."""

    def __init__(self, sizes):
        self.documents, self.calls = documents(sizes), []

    def __len__(self):
        return len(self.documents)

    def sizes(self, key):
        return np.array([len(document[key]) for document in self.documents])

    def fetch(self, indices):
        self.calls.append(list(indices))
        return [self.documents[i] for i in indices]


@pytest.mark.parametrize('strategy', ['best_fit', 'concat_then_split'])
def test_a_batch_of_rows_is_one_read_of_each_document(strategy):
    source = Counting(SIZES)
    rows = MapDataset.source(source).shuffle(seed=1).pack({'tokens': 16}, strategy=strategy)
    assert source.calls == []
    batch = rows.batch(8)[0]
    assert batch['tokens'].shape == (8, 16)
    (call,) = source.calls
    assert len(set(call)) == len(call)


async def test_the_async_dataset_has_the_same_rows():
    rows = await aio.MapDataset.source(documents(SIZES)).shuffle(seed=1).pack({'tokens': 16})
    assert plain([row async for row in rows]) == plain(list(dataset().pack({'tokens': 16})))


def test_rows_are_elements_of_a_dataset_like_others():
    rows = dataset().pack({'tokens': 16})
    mixed = MapDataset.mix([rows.repeat(), rows.shuffle(seed=4).repeat()])
    assert plain(mixed[0]) == plain(rows[0])
    assert plain(list(rows.repeat(2))) == plain([*epoch_of(rows, 0), *epoch_of(rows, 1)])
    assert plain(list(rows[3:9])) == plain(rows.fetch(range(3, 9)))
    assert plain(list(pickle.loads(pickle.dumps(rows)))) == plain(list(rows))
    loader = granular.Loader(rows, 4)
    assert plain(next(iter(loader))['tokens']) == plain([row['tokens'] for row in rows.fetch(range(4))])


@pytest.mark.parametrize(
    ('length', 'options'), [(16, {}), (16, {'strategy': 'concat_then_split'}), (7, {'longer': 'divide'})]
)
def test_states_are_exact(length, options):
    rows = dataset().pack({'tokens': length}, **options).repeat(2)
    check_each_state(iter(rows), most=3)


@pytest.mark.parametrize('strategy', ['best_fit', 'concat_then_split'])
def test_the_union_of_rows_is_exact_on_changing_numbers_of_hosts(strategy):
    rows = dataset().pack({'tokens': 16}, strategy=strategy).repeat(3)
    state, found = None, []
    for hosts, steps in ((2, 5), (3, 4), (1, 6), (8, None)):
        iterators = [iter(rows.to_iter_dataset(shard_options=ShardOptions(i, hosts))) for i in range(hosts)]
        for iterator in iterators:
            if state is not None:
                iterator.set_state(state)
        own = [list(itertools.islice(iterator, steps)) for iterator in iterators]
        for step in range(max(map(len, own))):
            found += [part[step] for part in own if step < len(part)]
        state = iterators[0].get_state()
    assert plain(found) == plain(list(rows))


@pytest.mark.parametrize('strategy', ['best_fit', 'concat_then_split'])
def test_a_state_of_other_sizes_is_refused(strategy):
    rows = dataset().pack({'tokens': 16}, strategy=strategy)
    iterator = iter(rows)
    next(iterator)
    state = iterator.get_state()
    others = dataset([*SIZES[:-1], SIZES[-1] + 1 if SIZES[-1] < 16 else 1]).pack({'tokens': 16}, strategy=strategy)
    for hosts in (1, 3):
        rank = iter(others.to_iter_dataset(shard_options=ShardOptions(hosts - 1, hosts)))
        with pytest.raises(StateError, match=r'stage 3 was .*sizes [0-9a-f]{8}.*and is .*sizes [0-9a-f]{8}'):
            rank.set_state(state)


@pytest.mark.parametrize('strategy', ['best_fit', 'concat_then_split'])
@pytest.mark.parametrize('hosts', [1, 3])
def test_the_next_row_is_set_by_its_index(strategy, hosts):
    rows = dataset().pack({'tokens': 16}, strategy=strategy).repeat(3).batch(2)
    for index in range(hosts):
        stream = rows.to_iter_dataset(shard_options=ShardOptions(index, hosts))
        expected = plain(list(stream))
        with iter(stream) as iterator:
            for number in (len(expected) - 1, 0, len(expected) // 2):
                iterator.set_next_index(number)
                assert plain(list(iterator)) == expected[number:]


def test_an_epoch_with_other_sizes_is_refused():
    class Changing(granular.shuffle.Index):
        def lookup(self, positions, length, seed, epoch):
            return positions if not epoch else np.zeros_like(positions)

    rows = MapDataset.source(documents(SIZES)).shuffle(seed=0, order=Changing()).pack({'tokens': 16})
    assert len(rows.fetch(range(len(rows)))) == len(rows)
    with pytest.raises(InvalidArgumentError, match='epoch 1 has elements of other sizes'):
        rows[len(rows)]


OPTIONS = [
    {},
    {'strategy': 'concat_then_split'},
    {'strategy': 'concat_then_split', 'separator': -1, 'extra': 1},
    {'longer': 'divide'},
    {'longer': 'divide', 'separator': -1},
]


@pytest.mark.parametrize('options', OPTIONS)
@pytest.mark.parametrize('kind', ['dataset', 'sharded', 'indexed', 'verified'])
def test_a_dataset_on_disk(tmp_path, options, kind):
    sizes = [*SIZES, 70, 0, 33, 300]
    spec = {'size': 'int', 'tokens': 'array'}
    if kind == 'dataset':
        writer = granular.DatasetWriter(tmp_path / 'ds', spec, granular.encoders)
    else:
        writer = granular.ShardedDatasetWriter(tmp_path / 'ds', spec, granular.encoders, shardlen=20)
    with writer:
        for document in documents(sizes):
            writer.append({'size': int(document['size']), 'tokens': document['tokens']})
    if kind == 'indexed':
        granular.build_index(tmp_path / 'ds')
    open_reader = granular.DatasetReader if kind == 'dataset' else granular.ShardedDatasetReader
    length = 16 if options else 300
    with open_reader(tmp_path / 'ds', granular.decoders, verify=kind == 'verified') as reader:
        rows = MapDataset.source(reader).shuffle(seed=1).pack({'tokens': length}, **options)
        expected = plain(list(dataset(sizes).pack({'tokens': length}, **options).repeat(2)))
        assert plain(list(rows.repeat(2))) == expected
        assert plain(rows.fetch([5, 0, 5])) == [expected[5], expected[0], expected[5]]
        assert plain(list(rows.to_iter_dataset(on_error='skip'))) == expected[: len(rows)]
        assert plain(list(pickle.loads(pickle.dumps(rows)))) == expected[: len(rows)]
        with pytest.raises(UnknownKeyError, match='words'):
            MapDataset.source(reader).pack({'words': 16})


def test_parts_of_long_documents_are_read_alone(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'tokens': 'array'}, granular.encoders) as writer:
        writer.append({'tokens': np.arange(1 << 20, dtype=np.int32)})
        writer.append({'tokens': np.arange(1 << 20, dtype=np.int32)})
    with granular.DatasetReader(tmp_path / 'ds') as reader:
        rows = MapDataset.source(reader).shuffle(seed=1).pack({'tokens': 16}, strategy='concat_then_split')
        assert len(rows) == 1 << 17
        before = granular.io_stats()['bytes']
        rows.fetch([3, 7777])
        assert granular.io_stats()['bytes'] - before < 1000


@pytest.mark.parametrize('options', OPTIONS)
def test_files_of_megatron(tmp_path, options):
    sizes = [*SIZES, 70, 0, 33, 300]
    (tmp_path / 'x.idx').write_bytes(megatron_index(sizes, code=4))
    (tmp_path / 'x.bin').write_bytes(b''.join(document['tokens'].tobytes() for document in documents(sizes)))
    length = 16 if options else 300
    with granular.open(tmp_path / 'x.idx') as source:
        rows = MapDataset.source(source).shuffle(seed=1).pack({'tokens': length}, **options)
        assert plain(list(rows)) == plain(list(dataset(sizes).pack({'tokens': length}, **options)))
