"""Changes that are declared continue exactly, or are refused; those that are not are refused, and named."""

import itertools
import json
import random
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import granular
from granular import IterDataset, Loader, MapDataset, changes
from granular.errors import InvalidArgumentError, StateError
from granular.grain.experimental import ParquetIterDataset
from tests.support.declared import declared_in


class Corpus:
    """A source that names itself, of datapoints that name themselves."""

    def __init__(self, name, length):
        self._name, self._length = name, length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return {'id': f'{self._name} {index}', 'tokens': 100 * index + np.arange(index % 13 + 1) + 1}

    def __repr__(self):
        return f'Corpus({self._name})'


def corpus(name='web', length=30):
    return MapDataset.source(Corpus(name, length))


def saved_after(stream, count):
    with iter(stream) as iterator:
        return list(itertools.islice(iterator, count)), json.loads(json.dumps(iterator.get_state()))


def continued(stream, state, declared, count=200):
    """Return the elements after a state, which is refused without the changes, and names them."""
    with iter(stream) as iterator:
        with pytest.raises(StateError, match=r'if this is meant, pass changes=') as caught:
            iterator.set_state(state)
        assert declared_in(caught.value) == declared
        iterator.set_state(state, declared)
        rest = list(itertools.islice(iterator, count))
        again = iterator.get_state()
        iterator.set_state(again)  # the next state is one of this pipeline
        iterator.set_state(again, declared)  # in which the change is made
    return rest


def refusal(stream, state, declared=()):
    with iter(stream) as iterator, pytest.raises(StateError) as caught:
        iterator.set_state(state, declared)
        list(itertools.islice(iterator, 200))
    return str(caught.value)


def ids(elements):
    return [element['id'] for element in elements]


def tokens_of(rows):
    return [token for row in rows for token in row['tokens'][row['tokens_segment_ids'] > 0].tolist()]


@pytest.mark.parametrize('seed', range(8))
def test_concatenated_rows_continue_with_another_length_at_the_exact_token(seed):
    rng = random.Random(seed)

    def rows(length):
        stream = corpus().shuffle(seed).to_iter_dataset()
        return stream.pack({'tokens': length}, strategy='concat_then_split', bos={'tokens': None})

    before, after = rng.sample([5, 8, 21, 64], 2)
    taken, state = saved_after(rows(before), rng.randint(0, 12))
    rest = continued(rows(after), state, [changes.RowLength({'tokens': after})])
    assert tokens_of([*taken, *rest]) == tokens_of(rows(1000))


def test_rows_of_whole_documents_change_their_length_between_packs():
    def rows(length):
        return corpus().to_iter_dataset().pack({'tokens': length}, num_packing_bins=2)

    for count in range(8):
        taken, state = saved_after(rows(16), count)
        declared = [changes.RowLength({'tokens': 40})]
        if state['state']['row'] > state['state']['rows']:
            assert 'rows of a pack were given out' in refusal(rows(40), state, declared)
            continue
        rest = continued(rows(40), state, declared)
        assert sorted(tokens_of([*taken, *rest])) == sorted(tokens_of(rows(16)))
    taken, state = saved_after(rows(16).window_shuffle(4, 1), 2)
    assert 'holds a window back' in refusal(rows(40).window_shuffle(4, 1), state, declared)
    planned = [corpus().pack({'tokens': size}, sizes=[i % 13 + 1 for i in range(30)]) for size in (16, 40)]
    state = saved_after(planned[0].to_iter_dataset(), 3)[1]
    for resized in ([], declared):
        message = refusal(planned[1].to_iter_dataset(), state, resized)
        assert 'changes=' not in message
        assert 'planned rows keep their length and documents, unlike those that pack of a stream makes' in message


def test_a_source_that_has_grown_has_its_new_datapoints_from_the_next_epoch_on():
    def stream(length):
        return corpus(length=length).shuffle(1).repeat().map(lambda x: x).to_iter_dataset()

    declared = [changes.Grown('Corpus(web)', 40)]
    _, state = saved_after(stream(30), 60)
    rest = continued(stream(40), state, declared, 80)
    assert ids(rest) == ids(itertools.islice(stream(40), 80, 160))
    assert sorted(ids(rest[:40])) == sorted(f'web {i}' for i in range(40))
    assert '7 of the 30 elements of epoch 2 were taken' in refusal(stream(40), saved_after(stream(30), 67)[1], declared)
    assert 'changes=' not in refusal(stream(20), state)
    # Within an epoch, the new datapoints are a stream of their own.
    _, state = saved_after(IterDataset.mix({'web': stream(30)}), 67)
    parts = {'web': stream(30), 'new': corpus('new', 10).repeat().to_iter_dataset()}
    rest = continued(IterDataset.mix(parts, {'web': 3, 'new': 1}), state, [changes.Added('new')], 40)
    assert [name for name in ids(rest) if name.startswith('web')] == ids(itertools.islice(stream(30), 67, 97))
    part = corpus(length=30)[:20].repeat().to_iter_dataset()
    grown = corpus(length=40)[:20].repeat().to_iter_dataset()
    assert 'make a stream of each source' in refusal(grown, saved_after(part, 3)[1], declared)


def test_streams_of_a_mix_are_removed_and_added():
    def mixed(*names):
        return IterDataset.mix({name: corpus(name).repeat().to_iter_dataset() for name in names})

    _, state = saved_after(mixed('web', 'books'), 11)
    rest = continued(mixed('web', 'code'), state, [changes.Added('code'), changes.Removed('books')], 8)
    assert sorted(ids(rest)) == sorted([f'web {i}' for i in range(6, 10)] + [f'code {i}' for i in range(4)])
    held = saved_after(mixed('web', 'books').window_shuffle(4, 1), 2)[1]
    message = refusal(mixed('web').window_shuffle(4, 1), held, [changes.Removed('books')])
    assert 'give streams the weight 0, and remove them when it holds none' in message


def test_excluded_datapoints_come_no_more():
    def stream(*excluded):
        dataset = corpus().exclude(excluded) if excluded else corpus()
        return dataset.shuffle(1).repeat(2).to_iter_dataset()

    taken, state = saved_after(stream(), 20)
    expected = [name for name in ids(list(stream())[20:]) if name not in ('web 3', 'web 14')]
    rest, excluded = stream(3, 14), changes.Excluded()
    assert ids(continued(rest, state, [excluded])) == expected
    _, state = saved_after(rest, 20)
    with iter(stream(3)) as iterator, pytest.raises(StateError) as caught:
        iterator.set_state(state)
    assert declared_in(caught.value) == [excluded]
    window = saved_after(stream().window_shuffle(4, 1), 2)[1]
    assert 'holds a window back' in refusal(stream(3).window_shuffle(4, 1), window, [excluded])


@pytest.mark.parametrize('hosts', [1, 2])
def test_an_excluded_document_that_a_pack_holds_is_named_by_its_index_in_the_source(hosts):
    def rows(*excluded):
        documents = corpus().exclude(excluded).shuffle(1).repeat()
        stream = documents.to_iter_dataset(shard_options=granular.ShardOptions(hosts - 1, hosts))
        return IterDataset.mix({'web': stream.map(lambda x: x).pack({'tokens': 8}, strategy='concat_then_split')})

    for count in range(1, 60):
        taken, state = saved_after(rows(2), count)
        begun, place = divmod(tokens_of(taken)[-1] - 1, 100)
        if place == begun % 13:
            continue  # it was the last token of a document
        message = refusal(rows(2, begun), state, [changes.Excluded()])
        found = re.search(r'as exclude\(\) leaves out \[(.*)\] of Corpus\(web\)', message)
        assert str(begun) in found[1].split(', ')


def test_nothing_that_is_excluded_is_no_stage():
    with_none = corpus().exclude([]).shuffle(1).to_iter_dataset()
    assert ids(with_none) == ids(corpus().shuffle(1).to_iter_dataset())
    _, state = saved_after(with_none, 7)
    former = {**state, 'pipeline': list(state['pipeline'])}
    former['pipeline'].insert(1, {'stage': 'exclude', 'excluded': '0 indices, CRC32C 00000000'})
    for saved in (state, former):
        with iter(with_none) as iterator:
            iterator.set_state(saved)
            assert ids(iterator) == ids(with_none)[7:]
    planned = corpus().exclude([]).shuffle(1).pack({'tokens': 16}, sizes=[i % 13 + 1 for i in range(30)])
    assert sum(len(row['tokens_positions']) for row in planned) == 16 * len(planned)


def test_excluded_documents_that_a_pack_holds_are_refused_and_others_leave_its_rows():
    def rows(*excluded):
        dataset = corpus().exclude(excluded) if excluded else corpus()
        return dataset.to_iter_dataset().pack({'tokens': 8}, strategy='concat_then_split')

    outcomes = set()
    for count in range(1, 12):
        taken, state = saved_after(rows(), count)
        try:
            rest = continued(rows(8), state, [changes.Excluded()])
        except StateError as error:
            assert 'holds 1 element from number 8 on' in str(error)  # noqa: PT017 - either
            assert 'as exclude() leaves out [8] of Corpus(web): continue' in str(error)  # noqa: PT017
            outcomes.add('refused')
            continue
        outcomes.add('continued')
        given = set(tokens_of(taken))
        lost = set(range(801, 810)) - given
        assert tokens_of([*taken, *rest]) == [token for token in tokens_of(rows()) if token not in lost]
    assert outcomes == {'refused', 'continued'}


@pytest.mark.parametrize('mixed', [False, True])
@pytest.mark.parametrize('drop', [False, True])
@pytest.mark.parametrize('change', ['excluded', 'length'])
def test_hosts_that_share_rows_continue_as_one_does_each_from_its_own_state(change, drop, mixed):
    def rows(shard, length=8, excluded=()):
        def packed(name):
            documents = corpus(name).exclude(excluded).repeat().to_iter_dataset()
            return documents.pack({'tokens': length}, strategy='concat_then_split', shard_options=shard)

        return IterDataset.mix({'web': packed('web'), 'books': packed('books')}, [3, 1]) if mixed else packed('web')

    other = {'excluded': range(12, 30, 2)} if change == 'excluded' else {'length': 20}
    declared = [changes.Excluded() if change == 'excluded' else changes.RowLength({'tokens': 20})]

    def continuing(shard, state):
        with iter(rows(shard, **other)) as iterator:
            iterator.set_state(state, declared)
            return [row['tokens'].tolist() for row in itertools.islice(iterator, 24 // shard.shard_count)]

    continued = 0
    for hosts, steps in itertools.product((2, 3, 4), range(1, 5)):
        shards = [granular.ShardOptions(host, hosts, drop_remainder=drop) for host in range(hosts)]
        own = [saved_after(rows(shard), steps)[1] for shard in shards]
        try:
            expected = continuing(granular.ShardOptions(0, 1), saved_after(rows(None), steps * hosts)[1])
        except StateError:
            for shard, state in zip(shards, own, strict=True):
                with pytest.raises(StateError):
                    continuing(shard, state)
            continue
        continued += 1
        each = [continuing(shard, state) for shard, state in zip(shards, own, strict=True)]
        assert [sorted(step) for step in zip(*each, strict=True)] == [
            sorted(expected[i : i + hosts]) for i in range(0, 24, hosts)
        ]
        assert each == [continuing(shard, own[-1]) for shard in shards]
    assert continued >= 6


@pytest.mark.parametrize('drop', [False, True])
def test_batches_of_a_dataset_continue_with_another_size(drop):
    def batches(size):
        return corpus().shuffle(1).batch(size, drop_remainder=drop, batch_fn=list).repeat(3).to_iter_dataset()

    declared = [changes.BatchSize(6)]
    for count in range(1, 20):
        taken, state = saved_after(batches(4), count)
        epoch, number = divmod(count, 7 if drop else 8)
        if number * 4 % 6 and number * 4 < 30:
            assert 'are no multiple of 6' in refusal(batches(6), state, declared)
            continue
        rest = continued(batches(6), state, declared)
        expected = [x for batch in list(batches(6))[epoch * 5 + number * 4 // 6 :] for x in batch]
        assert ids(x for batch in rest for x in batch) == ids(expected)
    two = saved_after(batches(4).batch(2, batch_fn=list).batch(3, batch_fn=list), 1)[1]
    assert 'several stages make batches' in refusal(
        batches(6).batch(2, batch_fn=list).batch(3, batch_fn=list), two, declared
    )


def test_augmentations_continue_with_another_seed():
    def stream(seed):
        return corpus().shuffle(1).random_map(draw, seed=seed).to_iter_dataset()

    _, state = saved_after(stream(1), 9)
    assert continued(stream(2), state, [changes.AugmentationSeed(2)]) == list(stream(2))[9:]


def draw(element, rng):
    return {'id': element['id'], 'x': int(rng.integers(1000))}


def test_what_has_no_declaration_is_refused():
    base = corpus().shuffle(1).map(draw_nothing).to_iter_dataset().window_shuffle(3, 1)
    _, state = saved_after(base, 6)
    others = [
        corpus().shuffle(2).map(draw_nothing).to_iter_dataset().window_shuffle(3, 1),
        corpus().map(draw_nothing).to_iter_dataset().window_shuffle(3, 1),
        corpus().shuffle(1).map(draw_nothing).to_iter_dataset().window_shuffle(4, 1),
        corpus().shuffle(1).to_iter_dataset().window_shuffle(3, 1),
        corpus().shuffle(1)[:20].map(draw_nothing).to_iter_dataset().window_shuffle(3, 1),
    ]
    everything = [
        changes.RowLength({'tokens': 1}), changes.BatchSize(4), changes.AugmentationSeed(2), changes.Excluded(),
        changes.Grown('Corpus(web)', 40), changes.Moved('Corpus(web)'), changes.Renamed('map(draw)'),
    ]  # fmt: skip
    for other in others:
        message = refusal(other, state, everything)
        assert 'continue with the pipeline that saved it, or from the start of an epoch' in message


@pytest.mark.parametrize(
    'wrong', [changes.Excluded(), changes.Excluded, [changes.Excluded], 'Excluded', ['Excluded'], [5]]
)
def test_what_is_no_declaration_is_refused(wrong):
    dataset = corpus().map(draw_nothing)
    with iter(dataset.to_iter_dataset()) as iterator:
        with pytest.raises(InvalidArgumentError, match='changes: expected a list such as'):
            iterator.set_state(iterator.get_state(), changes=wrong)
        with pytest.raises(InvalidArgumentError, match='changes: expected a list such as'):
            iterator.load_state_dict(iterator.state_dict(), changes=wrong)
    with Loader(corpus().select(['id']), batch=2) as loader:
        with pytest.raises(InvalidArgumentError, match='changes: expected a list such as'):
            loader.load(loader.save(), changes=wrong)


def draw_nothing(element):
    return element


def test_files_and_datasets_continue_at_another_address(tmp_path):
    table = pa.table({'id': range(40), 'other': range(40)})
    for name in ('one', 'two'):
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / 'rows.parquet', row_group_size=8)

    def streams(name):
        path = tmp_path / name / 'rows.parquet'
        yield ParquetIterDataset(path).map(draw_nothing)
        source = MapDataset.source(granular.ParquetDataSource(path))
        yield source.select(['id']).shuffle(1).to_iter_dataset()

    for before, after in zip(streams('one'), streams('two'), strict=True):
        _, state = saved_after(before, 11)
        with iter(after) as iterator, pytest.raises(StateError, match='pass changes=') as caught:
            iterator.load_state_dict(state)
        (declared,) = set(declared_in(caught.value))
        assert type(declared) is changes.Moved
        assert ids(continued(after, state, declared_in(caught.value))) == ids(list(before)[11:])
    _, state = saved_after(before, 11)
    other = (
        MapDataset.source(granular.ParquetDataSource(tmp_path / 'two' / 'rows.parquet')).select(['other']).shuffle(1)
    )
    assert 'changes=' not in refusal(other.to_iter_dataset(), state)


def test_rows_of_other_features_are_refused():
    def rows(**length):
        stream = MapDataset.range(9).map(lambda i: {'a': [i] * 3, 'b': [i] * 3}).to_iter_dataset()
        return stream.pack(length, strategy='concat_then_split')

    _, state = saved_after(rows(a=4, b=4), 2)
    assert len(continued(rows(a=6, b=4), state, [changes.RowLength({'a': 6, 'b': 4})])) > 0
    for other in (rows(b=4, a=4), rows(a=4), rows(a=4, c=4)):
        assert 'changes=' not in refusal(other, state)


def write(path, values):
    with granular.DatasetWriter(path, {'tokens': 'array', 'label': 'utf8'}) as writer:
        for i, value in enumerate(values):
            writer.append({'tokens': np.full(i % 13 + 1, i), 'label': value})
    return path


def test_a_corpus_that_was_appended_to_continues_as_a_copy_of_its_former_part(tmp_path):
    def rows(**paths):
        corpora = {name: MapDataset.source(granular.open(path)).select(['tokens']) for name, path in paths.items()}
        streams = {name: data.shuffle(1).repeat().to_iter_dataset() for name, data in corpora.items()}
        return IterDataset.mix({name: stream.pack({'tokens': 16}) for name, stream in streams.items()})

    former, grown = write(tmp_path / 'former', ['a'] * 30), write(tmp_path / 'grown', ['a'] * 40)
    _, state = saved_after(rows(web=former), 3)
    with iter(rows(web=grown)) as iterator, pytest.raises(StateError) as caught:
        iterator.set_state(state)
    message = refusal(rows(web=grown), state, declared_in(caught.value))
    assert 'copy the former datapoints by granular.rewrite(..., keep=range(30)), declare Moved' in message
    granular.rewrite(grown, tmp_path / 'copy', keep=range(30))
    granular.rewrite(grown, tmp_path / 'new', keep=range(30, 40))
    expected = list(itertools.islice(rows(web=former), 3, 20))
    moved = rows(web=tmp_path / 'copy', new=tmp_path / 'new')
    with iter(moved) as iterator:
        description = granular.describe_state(iterator.state_dict()).sources[0].source
        assert description.endswith("copy'), keys tokens")
        iterator.set_state(state, [changes.Moved(description), changes.Added('new')])
        rest = list(itertools.islice(iterator, 34))
    assert tokens_of(row for row in rest if row['tokens'].max() < 30) == tokens_of(expected)


def test_other_values_of_keys_that_are_read_continue_by_a_number(tmp_path):
    def stream(path, *keys):
        dataset = MapDataset.source(granular.open(path))
        return (dataset.select(keys) if keys else dataset).shuffle(1).repeat().to_iter_dataset()

    before, after = write(tmp_path / 'before', ['a'] * 30), write(tmp_path / 'after', ['longer'] * 30)
    declared = [changes.Moved(f'DatasetReader({str(after)!r})')]
    taken, state = saved_after(stream(before), 7)
    assert 'with other bytes: if they are meant, set_next_index(step)' in refusal(stream(after), state, declared)
    with iter(stream(after)) as iterator:
        iterator.set_next_index(7)
        assert next(iterator)['tokens'].tolist() == next(itertools.islice(stream(before), 7, None))['tokens'].tolist()
    _, state = saved_after(stream(before, 'tokens'), 7)  # from the start, without the labels
    assert len(continued(stream(after, 'tokens'), state, declared, 10)) == 10


def test_a_pipeline_that_was_changed_begins_at_an_epoch():
    def loaded(dataset):
        return dataset.to_iter_dataset().pack({'tokens': 16}, strategy='concat_then_split')

    data, other = corpus(), corpus().shuffle(1)
    message = refusal(loaded(other.repeat()), saved_after(loaded(data.repeat()), 30)[1])
    assert message.endswith('of an epoch, by set_next_index(epoch * steps) or dataset.repeat()[epoch * len(dataset):]')
    expected = [token for element in list(other.repeat(3))[60:] for token in element['tokens'].tolist()]
    assert tokens_of(itertools.islice(loaded(other.repeat()[2 * len(other) :]), 10)) == expected[:160]
    with iter(other.repeat().to_iter_dataset()) as iterator:
        iterator.set_next_index(2 * len(other))
        assert ids(itertools.islice(iterator, 30)) == ids(list(other.repeat(3))[60:])
