"""States of pipelines that differ: refused by Loader, streams and DataLoader alike, unless told otherwise."""

import contextlib
import json
import logging
import random
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import granular
from granular import IterDataset, MapDataset, shuffle, sources
from granular.errors import CorruptError, DecodeError, StateError, UnknownKeyError
from granular.grain.experimental import ParquetIterDataset, TFRecordIterDataset
from tests.support.declared import declared_in
from tests.support.files import FORMATS
from tests.support.states import plain

SPEC = {'i': 'int'}


@pytest.fixture
def folders(tmp_path):
    for name in ('one', 'two'):
        with granular.DatasetWriter(tmp_path / name, SPEC, granular.encoders) as writer:
            for i in range(40):
                writer.append({'i': i})
    return tmp_path


def first(datapoint, seed=None):
    return datapoint


def second(datapoint, seed=None):
    return datapoint


def loader(reader, fn, seed=0):
    return granular.Loader(sources.Transform(sources.Epochs(reader, seed=seed), fn), 4)


def stream(reader, fn, seed=0):
    return iter(granular.MapDataset.source(reader).shuffle(seed).map(fn).batch(4).to_iter_dataset())


def mix(reader, fn, seed=0):
    part = granular.MapDataset.source(reader).shuffle(seed).map(fn).batch(4)
    return iter(granular.IterDataset.mix({'part': part.to_iter_dataset()}))


def data_loader(reader, fn, seed=0):
    sampler = granular.grain.samplers.IndexSampler(len(reader), shuffle=True, num_epochs=1, seed=seed)
    return iter(
        granular.grain.DataLoader(
            data_source=reader, sampler=sampler, operations=[fn, granular.grain.transforms.Batch(4)]
        )
    )


MAKERS = [loader, stream, mix, data_loader]


@pytest.mark.parametrize('make', MAKERS)
def test_other_dataset_and_function_are_refused_and_named_unless_they_are_declared(folders, make, caplog):
    with granular.DatasetReader(folders / 'one') as one, granular.DatasetReader(folders / 'two') as two:
        with make(one, first) as iterator:
            next(iterator)
            state = json.loads(json.dumps(iterator.state_dict()))
            expected = [next(iterator)['i'].tolist() for _ in range(3)]
        with make(one, first) as iterator:
            iterator.load_state_dict(state)
            assert [next(iterator)['i'].tolist() for _ in range(3)] == expected
        with make(two, second) as iterator:
            before = iterator.state_dict()
            with pytest.raises(StateError, match='changes=') as caught:
                iterator.load_state_dict(state)
            for name in ('one', 'two', 'first', 'second'):
                assert name in str(caught.value)
            assert iterator.state_dict() == before
            with caplog.at_level(logging.INFO, 'granular'):
                iterator.load_state_dict(state, changes=declared_in(caught.value))
            assert 'two' in caplog.text
            assert [next(iterator)['i'].tolist() for _ in range(3)] == expected
            with pytest.raises(StateError):  # the next state is compared again
                iterator.load_state_dict(state)


@pytest.mark.parametrize('make', MAKERS)
def test_other_seed_of_a_shuffle_is_refused_and_has_no_declaration(folders, make):
    with granular.DatasetReader(folders / 'one') as reader:
        with make(reader, first, seed=1) as iterator:
            next(iterator)
            state = iterator.state_dict()
        with make(reader, first, seed=2) as iterator:
            with pytest.raises(StateError, match='seed') as caught:
                iterator.load_state_dict(state)
            assert 'changes=' not in str(caught.value)


@pytest.mark.parametrize('make', [loader, stream, data_loader])
def test_dataset_of_another_length_is_refused(folders, make):
    with granular.DatasetReader(folders / 'one') as reader, make(reader, first) as iterator:
        next(iterator)
        state = json.loads(json.dumps(iterator.state_dict()))
    shutil.rmtree(folders / 'one')
    with granular.DatasetWriter(folders / 'one', SPEC, granular.encoders) as writer:
        for i in range(41):
            writer.append({'i': i})
    with granular.DatasetReader(folders / 'one') as reader, make(reader, first) as iterator:
        with pytest.raises(StateError, match=r'of 40, \d+ bytes\", and is .* of 41, \d+ bytes\"'):
            iterator.load_state_dict(state)
        if make is not data_loader:  # its sampler has the length as well
            source, *rest = state['pipeline']
            name = {key: source[key] for key in ('stage', 'source')}  # of a reader that is not open
            for line in (name, {**name, 'elements': 41}):
                iterator.load_state_dict({**state, 'pipeline': [line, *rest]})
            with pytest.raises(StateError, match=r'of 40\", and is .* of 41, \d+ bytes\"'):
                iterator.load_state_dict({**state, 'pipeline': [{**name, 'elements': 40}, *rest]})


def write_dataset(path, records):
    with granular.DatasetWriter(path, {'i': 'int', 'n': 'bytes'}, granular.encoders) as writer:
        for i, record in enumerate(records):
            writer.append({'i': i, 'n': record})


def write_shards(path, records):
    with granular.ShardedDatasetWriter(path, {'n': 'bytes'}, shardlen=7) as writer:
        for record in records:
            writer.append({'n': record})


def write_indexed_shards(path, records):
    write_shards(path, records)
    granular.build_index(path)


def write_bag(path, records):
    with granular.BagWriter(path) as writer:
        for record in records:
            writer.append(record)


WRITERS = {
    'dataset': write_dataset,
    'shards': write_shards,
    'indexed shards': write_indexed_shards,
    'x.bag': write_bag,
    **{f'x.{suffix}': lambda path, records, form=form: form.write(path, records) for suffix, form in FORMATS.items()},
}


def cached(source):
    return granular.SharedMemoryCache(source, max_bytes=1 << 20)


OVER = {  # what a pipeline may read from, over a reader
    'reader': contextlib.nullcontext,
    'cache': cached,
    'cache of a pipeline': lambda reader: cached(MapDataset.source(reader).slice(slice(0, 20))),
}


@pytest.mark.parametrize('over', OVER)
@pytest.mark.parametrize('name', WRITERS)
def test_data_of_other_bytes_is_refused_unless_not_strict(tmp_path, name, over):
    def replace(records):
        path = tmp_path / name
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        WRITERS[name](path, records)

    def run(action):
        with granular.open(tmp_path / name) as reader, OVER[over](reader) as source:
            with iter(MapDataset.source(source).shuffle(1).to_iter_dataset()) as iterator:
                return action(iterator)

    records = [bytes([i]) * 40 for i in range(20)]
    replace(records)
    state = json.loads(json.dumps(run(lambda iterator: next(iterator) and iterator.get_state())))
    replace([random.Random(0).randbytes(100_000), *records[1:]])  # more than formats pad their files by
    with pytest.raises(StateError, match=r'of 20, \d+ bytes.*of 20, \d+ bytes'):
        run(lambda iterator: iterator.set_state(state))
    replace(records)
    run(lambda iterator: iterator.set_state(state))


STREAMS = {
    'parquet': ParquetIterDataset,
    'one parquet': lambda paths: ParquetIterDataset(paths[0]),
    'tfrecord': TFRecordIterDataset,
}
STAGES = {
    'alone': lambda stream: stream,
    'window': lambda stream: stream.window_shuffle(3, seed=0),
    'epochs': lambda stream: stream.repeat(2),
    'window of windows': lambda stream: stream.window_shuffle(3, seed=0).window_shuffle(3, seed=1),
    'parts of a window': lambda stream: stream.window_shuffle(3, seed=0).flat_map(lambda x: [x, x]),
    'parts of what is prefetched': lambda stream: stream.prefetch(2).flat_map(lambda x: [x, x]),
    'cache': lambda stream: stream.cache().repeat(2),
    'cache of a mix by name': lambda stream: granular.IterDataset.mix({'a': stream}).cache(),
    'window of an interleave': lambda stream: granular.IterDataset.interleave([stream], 2).window_shuffle(3, seed=0),
}


@pytest.mark.parametrize('stage', STAGES)
@pytest.mark.parametrize('name', STREAMS)
def test_stream_over_files_of_other_bytes_is_refused(tmp_path, name, stage):
    paths = [tmp_path / f'{i}.{name.split()[-1]}' for i in range(2)]

    def run(action):
        with iter(STAGES[stage](STREAMS[name](paths))) as iterator:
            return action(iterator)

    def write(last):
        for path in paths:
            path.write_bytes(FORMATS[path.suffix[1:]].of_records([*(bytes([i]) * 40 for i in range(20)), last]))

    def go_on(iterator):
        iterator.set_state(state)
        return [str(element) for element in iterator]

    def begin(iterator):
        next(iterator)
        return json.loads(json.dumps(iterator.get_state())), [str(element) for element in iterator]

    write(bytes(40))
    state, rest = run(begin)
    assert run(go_on) == rest
    write(random.Random(0).randbytes(100_000))
    with pytest.raises(StateError, match=r'\d+ bytes, the state was saved with \d+'):
        run(go_on)


def test_state_of_a_series_of_shards_fits_another_series(tmp_path):
    write_shards(tmp_path / 'x', [bytes(i) for i in range(28)])
    for part in range(2):
        with granular.ShardedDatasetReader(tmp_path / 'x', shardstart=part, shardstep=2) as reader:
            with iter(MapDataset.source(reader).to_iter_dataset()) as iterator:
                if part == 0:
                    next(iterator)
                    state = iterator.get_state()
                iterator.set_state(state)
                assert len(next(iterator)['n']) == 1 + 7 * part


def test_windows_over_arrays_of_other_bytes_are_refused(tmp_path):
    for length in (40, 41):  # of each array: as many windows of ten
        shutil.rmtree(tmp_path / 'x', ignore_errors=True)
        with granular.DatasetWriter(tmp_path / 'x', {'tokens': 'array'}) as writer:
            writer.append({'tokens': np.arange(length)})
        with granular.open(tmp_path / 'x') as reader, granular.Windows(reader, {'tokens': 10}, 10, 'drop') as windows:
            with iter(MapDataset.source(windows).to_iter_dataset()) as iterator:
                if length == 40:
                    state = iterator.get_state()
                    iterator.set_state(state)
                else:
                    with pytest.raises(StateError, match=r'of 4, \d+ bytes.*of 4, \d+ bytes'):
                        iterator.set_state(state)


def test_keys_that_are_not_read_may_change(tmp_path):
    for length in (40, 60):
        shutil.rmtree(tmp_path / 'x', ignore_errors=True)
        write_dataset(tmp_path / 'x', [bytes(length)] * 20)
        with granular.open(tmp_path / 'x') as reader:
            iterator = iter(MapDataset.source(reader).select(['i']).to_iter_dataset())
            if length == 40:
                state = iterator.get_state()
            iterator.set_state(state)


def test_states_fit_with_and_without_an_index(tmp_path):
    states = []
    write_shards(tmp_path / 'x', [bytes([i]) * 40 for i in range(20)])
    for _ in range(2):
        with granular.open(tmp_path / 'x') as reader:
            states.append(iter(MapDataset.source(reader).to_iter_dataset()).get_state())
        granular.build_index(tmp_path / 'x')
    assert states[0] == states[1]


@pytest.mark.parametrize(
    'choose', [lambda dataset, i: dataset.slice([i, 2]), lambda dataset, i: fields_of(dataset, [i, 2])]
)
def test_other_indices_are_refused(choose):
    dataset = granular.MapDataset.range(5).map(lambda value: {'x': value})
    states = [iter(choose(dataset, i).to_iter_dataset()).get_state() for i in (0, 1, 0)]
    assert states[0] == states[2]
    with pytest.raises(StateError, match='2 indices, CRC32C'):
        iter(choose(dataset, 0).to_iter_dataset()).set_state(states[1])


LABELED = MapDataset.source([{'label': label} for label in (0, 0, 0, 1, -1)])


@pytest.mark.parametrize(
    'make',
    [
        lambda other: LABELED.oversample(unlabeled=0 if other else -1),
        lambda other: granular.kappadata.ModeWrapper(
            granular.kappadata.OversamplingWrapper(LABELED, unlabeled=0 if other else -1), 'label'
        ),
        lambda other: granular.kappadata.ModeWrapper(
            granular.kappadata.KDConcatDataset([LABELED, LABELED], balanced_sampling=other), 'label'
        ),
        lambda other: sources.Epochs(LABELED, length=3 if other else 4),
        lambda other: sources.Epochs(LABELED, length=3 if other else None),
        lambda other: sources.Sample(LABELED, length=3 if other else None),
    ],
)
def test_other_arguments_of_a_selection_are_refused(make):
    states = [iter(MapDataset.source(make(other)).to_iter_dataset()).get_state() for other in (True, False)]
    stream = MapDataset.source(make(True)).to_iter_dataset()
    iter(stream).set_state(states[0])
    with pytest.raises(StateError, match='another pipeline'):
        iter(stream).set_state(states[1])


def fields_of(dataset, indices):
    return granular.MapDataset.source(
        granular.kappadata.ModeWrapper(granular.kappadata.SubsetWrapper(dataset, indices), 'x')
    )


def test_added_and_removed_stages_are_named(folders):
    with granular.DatasetReader(folders / 'one') as reader:
        plain = granular.MapDataset.source(reader)
        long, short = plain.map(first).shuffle(1).map(second), plain.shuffle(1).map(second)
        state = iter(long.to_iter_dataset()).get_state()
        with pytest.raises(StateError, match=r"stage 2 was 'map\(first\)', and is 'nothing' in this one: ") as caught:
            iter(short.to_iter_dataset()).set_state(state)
        assert 'shuffle' not in str(caught.value)
        with pytest.raises(StateError, match=r"stage 2 was 'nothing', and is 'map\(first\)' in this one: "):
            iter(long.to_iter_dataset()).set_state(iter(short.to_iter_dataset()).get_state())


@pytest.mark.parametrize('state', [{'step': 4}, {'step': 4, 'seed': 0}])
def test_states_of_earlier_releases_are_accepted(folders, state):
    with granular.DatasetReader(folders / 'one') as reader, loader(reader, first) as batches:
        batches.load(state)
        assert batches.consumed == 4


@pytest.mark.parametrize('state', [None, [], {'step': 4, 'pipeline': 3}, {'step': 4, 'pipeline': 'x'}])
def test_what_is_not_a_state_is_refused(folders, state):
    with granular.DatasetReader(folders / 'one') as reader, loader(reader, first) as batches:
        with pytest.raises(StateError):
            batches.load(state)


def test_state_of_a_longer_source_is_refused_and_has_no_declaration():
    def make(length):
        return granular.MapDataset.source([{'i': i} for i in range(length)])

    with granular.Loader(make(40), 5) as batches, iter(make(40).to_iter_dataset().batch(5).repeat()) as iterator:
        for _ in range(6):
            assert next(batches).keys() == next(iterator).keys()
        states = batches.save(), iterator.get_state()
    with granular.Loader(make(30), 5) as batches, iter(make(30).to_iter_dataset().batch(5).repeat()) as stream:
        for load, state in zip((batches.load, stream.set_state), states, strict=True):
            with pytest.raises(StateError, match='list of 40.*list of 30') as caught:
                load(state)
            assert 'changes=' not in str(caught.value)


@pytest.mark.parametrize(
    'join',
    [
        lambda d, size: d.flat_map(lambda x: [x] * size),
        lambda d, size: d.map(lambda x: np.full(size, x)).rebatch(2),
        lambda d, size: d.filter(lambda x: x < size).window_shuffle(9, seed=0),
    ],
    ids=['flat_map', 'rebatch', 'window_shuffle'],
)
def test_state_within_what_is_shorter_now_is_refused(join):
    numbers = granular.MapDataset.range(4).to_iter_dataset()
    with iter(join(numbers, 5)) as iterator:
        states = [iterator.get_state() for _ in zip(range(2), iterator, strict=False)]
    with iter(join(numbers, 1)) as iterator:
        iterator.set_state(states[-1])
        with pytest.raises(StateError, match=r'was saved after \d parts of what it held, and there are 1 now'):
            next(iterator)


def test_states_fit_other_sizes_of_read_ahead():
    def make(size):
        numbers = granular.MapDataset.range(20).to_iter_dataset().prefetch(size)
        return iter(granular.IterDataset.mix([numbers, numbers]).prefetch(size).window_shuffle(5, 0))

    with make(2) as iterator:
        next(iterator)
        state, expected = iterator.get_state(), next(iterator)
    for size in (0, 7):
        with make(size) as iterator:
            iterator.set_state(state)
            assert next(iterator) == expected


NUMBERS = granular.MapDataset.range(20).to_iter_dataset()
HELD = [
    {'count': 5, 'ended': False, 'after': after, 'changes': changes}
    for after in (None, 0, {})
    for changes in ([], None, [[1]], [[None, {}]], [['1', {}]], [[3, {}], [1, {}]])
] + [{'count': 5, 'ended': ended, 'after': {}} for ended in (None, 'x', [], 1)]


@pytest.mark.parametrize(
    ('dataset', 'name', 'wrong'),
    [
        (NUMBERS.batch(4).rebatch(3), 'place', [-1, None, '0', {}, 1 << 63]),
        (NUMBERS.flat_map(lambda value: [value, value]), 'place', [-1, 1.0]),
        (NUMBERS.window_shuffle(5, 0), 'place', [-1, 5, 6]),
        (granular.IterDataset.mix({'a': NUMBERS}).window_shuffle(5, 0), 'held', [{}, 5, *HELD]),
        (NUMBERS.filter(bool).map_with_index(lambda i, value: value), 'count', [-1, 'x']),
        (NUMBERS.repeat(2), 'epoch', [None]),
        (NUMBERS.limit(5), 'count', [[]]),
        (NUMBERS.limit(5), 'parent', [-1, 21, 1 << 63, 2.0, None, True]),
        (granular.IterDataset.mix([NUMBERS, NUMBERS]), 'count', [-1]),
        (granular.IterDataset.mix([NUMBERS, NUMBERS]), 'parents', [[0], 0, [None, None]]),
        (granular.IterDataset.mix({'a': NUMBERS}), 'parents', [5, {}, {'a': {}}]),
        (granular.IterDataset.interleave([NUMBERS, NUMBERS], 2), 'turn', [2, None]),
        (granular.IterDataset.interleave([NUMBERS, NUMBERS], 2), 'open', [[0, 7], ['0', 1], None]),
        (granular.IterDataset.interleave([NUMBERS, NUMBERS], 2), 'parents', [{'0': None}, {'0': {}}, []]),
    ],
)
def test_edited_states_are_refused(dataset, name, wrong):
    with iter(dataset) as iterator:
        next(iterator)
        next(iterator)
        state = iterator.get_state()
    for value in wrong:
        with iter(dataset) as iterator, pytest.raises(StateError):
            iterator.set_state({**state, 'state': {**state['state'], name: value}})
            next(iterator)  # an interleaved stream is restored when its turn comes


def test_names_that_a_mix_begins_and_leaves_out_must_be_declared():
    def iterate(*names):
        return iter(granular.IterDataset.mix(dict.fromkeys(names, NUMBERS)))

    with iterate('web', 'books') as iterator:
        state = iterator.get_state()
    with iterate('books', 'web') as iterator:
        iterator.set_state(state)
    with iterate('wbe', 'books') as iterator:
        with pytest.raises(StateError, match=r"the state has the streams \['books', 'web'\]") as caught:
            iterator.set_state(state)
        changes = declared_in(caught.value)
        assert changes == [granular.changes.Added('wbe'), granular.changes.Removed('web')]
        iterator.set_state(state, changes)
        assert next(iterator) == 0


@pytest.mark.parametrize('wrong', ['run/33', {'step': 3}, None])
def test_what_is_no_state_is_answered_by_what_is_one(wrong):
    with iter(NUMBERS) as iterator, pytest.raises(StateError, match=r'granular.load_state\(path\) returned, got '):
        iterator.set_state(wrong)


def test_converted_batches_pass_changes_on(folders):
    from granular.integrations import torch

    with granular.DatasetReader(folders / 'one') as one, granular.DatasetReader(folders / 'two') as two:
        state = loader(one, first).save()
        with torch.Batches(loader(two, first)) as batches:
            with pytest.raises(StateError, match='one') as caught:
                batches.load_state_dict({**state, 'step': 8})
            batches.load_state_dict({**state, 'step': 8}, changes=declared_in(caught.value))
            assert batches.state_dict()['step'] == 8


def test_processes_with_other_paths_are_at_the_same_position(folders):
    # As a copy of the dataset may be at another path on each machine.
    for index, name in enumerate(('one', 'two')):
        with granular.DatasetReader(folders / name) as reader, loader(reader, first) as batches:
            granular.save_state(folders / 'states', batches.save(), granular.ShardOptions(index, 2))
    assert granular.load_state(folders / 'states')['step'] == 0


def test_processes_with_other_shares_of_a_mix_are_not_at_the_same_position(tmp_path):
    for index, weights in enumerate(([1, 1], [3, 1])):
        with iter(granular.IterDataset.mix([NUMBERS, NUMBERS], weights)) as iterator:
            for _ in range(4):
                next(iterator)
            granular.save_state(tmp_path, iterator.get_state(), granular.ShardOptions(index, 2))
    with pytest.raises(StateError, match='save all of them after the same number of elements'):
        granular.load_state(tmp_path)


def test_states_of_granular_0_21_fit_no_order_of_blocks():
    dataset = granular.MapDataset.range(100).shuffle(1, shuffle.Blocks(8, 16)).map(lambda i: {'i': i})
    with granular.Loader(dataset, 10) as batches:
        state = {'step': 20, 'seed': 1}
        with pytest.raises(StateError, match='granular 0.21, which has none of the orders .*block=8, window=16'):
            batches.load(state)


def test_stages_that_are_there_twice_are_compared():
    once = granular.MapDataset.range(20).map(first)
    for one, two, stage in (
        (once.to_iter_dataset(), once.map(first).to_iter_dataset(), 'map'),
        (once.to_iter_dataset().batch(1).rebatch(2), once.to_iter_dataset().batch(1).rebatch(2).rebatch(2), 'rebatch'),
    ):
        assert str(two).count(f'\n{stage}(') == str(one).count(f'\n{stage}(') + 1 == 2
        with pytest.raises(StateError, match=rf"was 'nothing', and is '{stage}\("):
            iter(two).set_state(iter(one).get_state())


BROKEN: list[Exception] = []  # the error of each read while it is not empty


def fragile(x):
    if BROKEN:
        raise BROKEN[0]
    return x


def numbers(start):
    return MapDataset.range(start, start + 12).map(fragile).to_iter_dataset()


JOINS = {
    'mix by name': lambda: IterDataset.mix({'a': numbers(0), 'b': numbers(20)}),
    'interleave': lambda: IterDataset.interleave([numbers(0), numbers(20)], 2),
    'interleave, made': lambda: IterDataset.interleave(MapDataset.range(2).map(fragile).map(numbers), 2),
}
HOLDING = {
    'nothing': lambda d: d,
    'window_shuffle': lambda d: d.window_shuffle(7, seed=1),
    'flat_map': lambda d: d.flat_map(lambda x: [x] * 2),
    'rebatch': lambda d: d.batch(4).rebatch(3),
    'pack': lambda d: d.map(lambda x: {'t': np.full(x % 3 + 1, x)}).pack({'t': 4}, num_packing_bins=2),
    'cache': lambda d: d.cache().repeat(2),
    'prefetch': lambda d: d.window_shuffle(7, seed=1).prefetch(2),
}


def test_held_elements_that_are_fewer_when_they_are_read_again_are_refused():
    """Also if the stream has come as far with them: at its end."""

    def started(dropped):
        numbers = IterDataset.mix({'a': MapDataset.range(4).to_iter_dataset()})
        return iter(numbers.filter(lambda number: number not in dropped).window_shuffle(4, seed=0))

    with started([]) as iterator:
        next(iterator)
        state = iterator.get_state()
        rest = list(iterator)
    with started([]) as iterator:
        iterator.set_state(state)
        assert list(iterator) == rest
    with started([2]) as iterator, pytest.raises(StateError, match='3 of 4 were found'):
        iterator.set_state(state)


def test_weights_may_change_within_the_elements_that_are_held():
    def started(weights):
        streams = {'a': MapDataset.range(20).to_iter_dataset(), 'b': MapDataset.range(100, 120).to_iter_dataset()}
        return iter(IterDataset.mix(streams, weights).cache().repeat(2))

    state, given = None, []
    for weights in ([1, 1], [3, 1], [1, 3]):
        with started(weights) as iterator:
            if state is not None:
                iterator.set_state(state)
            given += [next(iterator) for _ in range(4)]
            state = iterator.get_state()
            rest = list(iterator)
    assert [number for number in given if number < 100] == list(range(6))
    assert [number for number in given if number >= 100] == list(range(100, 106))
    with started(weights) as iterator:
        iterator.set_state(state)
        assert list(iterator) == rest


@pytest.mark.parametrize('steps', [1, 2, 5, 13])
@pytest.mark.parametrize('options', [{'strategy': 'concat_then_split'}, {'num_packing_bins': 3, 'split_long': True}])
def test_a_stream_of_a_mix_ends_by_the_weight_0_and_is_removed_once_no_stage_holds_its_elements(steps, options):
    documents = {
        name: [{'tokens': 10_000 * number + 100 * i + np.arange(7 + 5 * i % 13)} for i in range(60)]
        for number, name in enumerate(['a', 'b', 'c'], 1)
    }

    def rows(weights):
        streams = {name: MapDataset.source(documents[name]).to_iter_dataset() for name in weights}
        return iter(IterDataset.mix(streams, weights).pack({'tokens': 10}, **options))

    with rows({'a': 0.5, 'b': 0.4, 'c': 0.1}) as iterator:
        given = [next(iterator) for _ in range(steps)]
        state = json.loads(json.dumps(iterator.get_state()))
    if 'c' in str(state['state'].get('held', '')):
        with rows({'a': 0.5, 'b': 0.5}) as iterator, pytest.raises(StateError, match='give streams the weight 0, and'):
            iterator.set_state(state)
    with rows({'a': 0.5, 'b': 0.5, 'c': 0}) as iterator:
        iterator.set_state(state)
        given += [next(iterator) for _ in range(40)]
        state = json.loads(json.dumps(iterator.get_state()))
    with rows({'a': 0.5, 'b': 0.5}) as iterator:
        iterator.set_state(state)
        given += list(iterator)
    tokens = [token for row in given for token in row['tokens'].tolist() if token]
    assert len(tokens) == len(set(tokens))
    for name, number in (('a', 1), ('b', 2), ('c', 3)):  # each from its start on, without a gap
        own = sorted(token for token in tokens if token // 10_000 == number)
        assert own == [token for document in documents[name] for token in document['tokens'].tolist()][: len(own)]
        assert len(own) > 300 or name == 'c'
    assert sum(token >= 30_000 for token in tokens) < 200


def test_stage_that_holds_fewer_elements_than_a_state_is_refused():
    numbers = IterDataset.mix({'a': MapDataset.range(20).to_iter_dataset()})
    with iter(numbers.window_shuffle(4, seed=0)) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(numbers.window_shuffle(2, seed=0)) as iterator:
        iterator.set_state({**state, 'pipeline': None})
        with pytest.raises(StateError, match='the state holds 2 elements more than this stage does'):
            list(iterator)


@pytest.mark.parametrize('error', [ValueError, KeyError, TypeError, OSError, DecodeError, UnknownKeyError])
@pytest.mark.parametrize('stage', HOLDING)
@pytest.mark.parametrize('join', JOINS)
def test_error_of_a_read_while_a_state_is_restored_reaches_the_caller_unchanged(join, stage, error):
    dataset = HOLDING[stage](JOINS[join]())
    with iter(dataset) as iterator:
        for _ in range(3):
            next(iterator)
        state = iterator.get_state()
        rest = plain(list(iterator))
    BROKEN.append(error('cannot be read'))
    try:
        with iter(dataset) as iterator:
            with pytest.raises(error, match='cannot be read') as caught:
                iterator.set_state(state)
                next(iterator)
            assert caught.value is BROKEN.pop()
            for _ in range(9):  # what failed in the read-ahead meanwhile is raised, too
                with contextlib.suppress(error):
                    iterator.set_state(state)
                    break
            assert plain(list(iterator)) == rest
    finally:
        BROKEN.clear()


def test_damaged_file_is_named_while_a_state_is_restored(tmp_path):
    path = tmp_path / 'x.parquet'
    pq.write_table(pa.table({'x': range(9)}), path)
    with iter(ParquetIterDataset(path)) as iterator:
        next(iterator)
        state = iterator.get_state()
    path.write_bytes(path.read_bytes()[:-9] + b'123456789')
    with iter(ParquetIterDataset(path)) as iterator, pytest.raises(CorruptError, match=r'x\.parquet'):
        iterator.set_state(state)


def noisy(element, rng):
    return element, int(rng.integers(1 << 30))


WITHOUT_A_STATE = {
    'no prefetch': lambda d: d.shuffle(3).to_iter_dataset().random_map(noisy, seed=2).batch(2),
    'prefetch': lambda d: d.shuffle(3).to_iter_dataset().random_map(noisy, seed=2).batch(2).prefetch(3),
    'another prefetch': lambda d: d.shuffle(3).to_iter_dataset().prefetch(1).random_map(noisy, seed=2).batch(2),
    'a seed that no stage uses': lambda d: d.seed(8).shuffle(3).to_iter_dataset().random_map(noisy, seed=2).batch(2),
    'a seed of the stream': lambda d: d.shuffle(3).to_iter_dataset().seed(9).random_map(noisy, seed=2).batch(2),
    'batches of another size': lambda d: d.shuffle(3).to_iter_dataset().random_map(noisy, seed=2).batch(4).prefetch(2),
}


def elements_of(batches):
    return [[*map(int, pair)] for batch in batches for pair in zip(*batch, strict=True)]


@pytest.mark.parametrize('named', [False, True])
def test_states_do_not_depend_on_stages_without_a_state(named):
    made = {name: make(MapDataset.range(24)) for name, make in WITHOUT_A_STATE.items()}
    made = {name: IterDataset.mix({'all': stream}) for name, stream in made.items()} if named else made
    expected = elements_of(made['no prefetch'])
    for saved in made:
        with iter(made[saved]) as iterator:
            taken = len(elements_of([next(iterator)]))
            state = json.loads(json.dumps(iterator.get_state()))
        for other in made:
            if named and 'batches of another size' in (saved, other) and saved != other:
                continue
            with iter(made[other]) as iterator:
                iterator.set_state(state)
                assert elements_of(iterator) == expected[taken:], (saved, other)


def test_seeds_that_do_not_change_an_order_are_not_compared():
    reader = [{'i': i} for i in range(12)]
    makers = (
        lambda seed: granular.Loader(sources.Epochs(reader, shuffle=False, seed=seed), 4),
        lambda seed: iter(MapDataset.source(reader).shuffle(seed, order=shuffle.Sequential()).to_iter_dataset()),
        lambda seed: iter(
            MapDataset.source([{'t': [1, 2]}] * 12).to_iter_dataset().pack({'t': 4}, num_packing_bins=1, seed=seed)
        ),
    )
    for make in makers:
        with make(1) as first, make(2) as second:
            next(first)
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            assert plain(next(first)) == plain(next(second))
