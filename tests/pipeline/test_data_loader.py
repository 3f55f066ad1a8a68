"""Samplers and the DataLoader: records and order of Grain, for any number of workers."""

import asyncio
import itertools
import json
import sys
import threading
import types

import numpy as np
import pytest

import granular
from granular import ShardOptions
from granular.errors import InvalidArgumentError, OutOfRangeError, StateError
from granular.grain import DataLoader
from granular.grain.samplers import IndexSampler, SequentialSampler
from granular.grain.sharding import NoSharding, ShardByJaxProcess
from granular.grain.transforms import Batch
from tests.support.states import plain


class Add(granular.grain.transforms.Map):
    def map(self, element):
        return element + 1


class Noise(granular.grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element * 1000 + int(rng.integers(1000))


class Even(granular.grain.transforms.Filter):
    def filter(self, element):
        return element % 2 == 0


def test_order_is_pinned():
    sampler = IndexSampler(5, shuffle=True, num_epochs=2, seed=0)
    assert [sampler[i].record_key for i in range(10)] == [0, 4, 1, 2, 3, 1, 2, 3, 0, 4]
    assert list(DataLoader(data_source=range(5), sampler=sampler)) == [0, 4, 1, 2, 3, 1, 2, 3, 0, 4]
    assert len(sampler) == 10
    assert sampler[3].index == 3
    rng = np.random.Generator(np.random.Philox(key=3))
    assert sampler[3].rng.integers(1 << 40) == rng.integers(1 << 40)
    for index in (-1, 10, 2**64):
        with pytest.raises(OutOfRangeError, match='out of range'):
            sampler[index]
    for index in (1.0, '1', None):
        with pytest.raises(InvalidArgumentError, match='expected an integer as index'):
            sampler[index]


def test_integers_of_numpy_have_the_same_datapoint_and_random_numbers():
    sampler = IndexSampler(1000, ShardOptions(0, 3), shuffle=True, num_epochs=1, seed=250)
    for index in (0, 9, 255):
        entry, same = sampler[index], sampler[np.uint8(index)]
        assert same.record_key == entry.record_key and type(same.index) is int
        assert same.rng.integers(1 << 40) == entry.rng.integers(1 << 40)


LOADS = [
    {'num_epochs': 1}, {'num_epochs': 2, 'shuffle': True, 'seed': 3}, {'num_epochs': 1, 'batch_size': 5},
    {'num_epochs': 3, 'batch_size': 5, 'drop_remainder': True, 'shuffle': True, 'seed': 1}, {'batch_size': 7},
    {'num_epochs': 1, 'worker_count': 0, 'shuffle': True, 'seed': 0, 'batch_size': 100},
]  # fmt: skip


def test_load_yields_what_grain_loads(grain):
    script = """
import itertools
class Add(grain.transforms.Map):
    def map(self, x): return x + 1
out = []
for options in json.loads(sys.argv[1]):
    for index in (0, 1):
        shard = grain.sharding.ShardOptions(index, 2)
        loader = grain.load(list(range(24)), transformations=[Add()], shard_options=shard, **options)
        out.append([np.asarray(x).tolist() for x in itertools.islice(loader, 30)])
print(json.dumps(out))
"""
    expected = iter(grain.run(script, json.dumps(LOADS)))
    for options in LOADS:
        for index in (0, 1):
            shard = ShardOptions(index, 2)
            loader = granular.grain.load(list(range(24)), transformations=[Add()], shard_options=shard, **options)
            assert [plain(x) for x in itertools.islice(loader, 30)] == next(expected), options


def test_shard_options_of_grain_are_accepted_everywhere():
    shard = types.SimpleNamespace(shard_index=1, shard_count=2, drop_remainder=False)  # as Grain's, another class
    ours, data = ShardOptions(1, 2), list(range(11))
    for read in (
        lambda shard: granular.grain.load(data, num_epochs=1, shard_options=shard),
        lambda shard: granular.grain.DataLoader(data_source=data, sampler=IndexSampler(11, shard, num_epochs=1)),
        lambda shard: granular.MapDataset.source(data).to_iter_dataset(shard_options=shard),
    ):
        assert [plain(x) for x in read(shard)] == [plain(x) for x in read(ours)] != []


def test_load_takes_a_reader_and_checks_its_arguments(tmp_path):
    with granular.DatasetWriter(tmp_path / 'x', {'label': 'int'}, granular.encoders) as writer:
        for i in range(10):
            writer.append({'label': i})
    with granular.DatasetReader(tmp_path / 'x', granular.decoders) as reader:
        batches = list(granular.grain.load(reader, num_epochs=1, batch_size=4))
        assert [batch['label'].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for wrong in (
        {'shuffle': True}, {'batch_size': 0}, {'num_epochs': -1}, {'worker_count': -1}, {'transformations': str},
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError):
            granular.grain.load([1, 2], **wrong)


def test_elements_equal_those_of_grain(grain):
    script = """
out = {}
class Add(grain.transforms.Map):
    def map(self, x): return x + 1
class Noise(grain.transforms.RandomMap):
    def random_map(self, x, rng): return x * 1000 + int(rng.integers(1000))
class Even(grain.transforms.Filter):
    def filter(self, x): return x % 2 == 0
for count in (1, 2):
    for index in range(count):
        shard = grain.sharding.ShardOptions(index, count, drop_remainder=True)
        sampler = grain.samplers.IndexSampler(12, shard, shuffle=True, num_epochs=2, seed=7)
        loader = grain.DataLoader(data_source=list(range(100, 112)), sampler=sampler,
                                  operations=[Add(), Noise(), Even(), grain.transforms.Batch(4)])
        out[f'{index}/{count}'] = [batch.tolist() for batch in loader]
        found = [sampler[i] for i in range(index, 24, count)]
        out[f'{index}/{count} keys'] = [[record.record_key, int(record.rng.integers(99))] for record in found]
sampler = grain.samplers.SequentialSampler(7, grain.sharding.NoSharding(), seed=3)
out['sequential'] = [sampler[i].record_key for i in range(7)]
print(json.dumps(out))
"""
    expected = grain.run(script)
    for count in (1, 2):
        for index in range(count):
            sampler = IndexSampler(12, ShardOptions(index, count, True), shuffle=True, num_epochs=2, seed=7)
            operations = [Add(), Noise(), Even(), Batch(4)]
            loader = DataLoader(data_source=list(range(100, 112)), sampler=sampler, operations=operations)
            assert plain(list(loader)) == expected[f'{index}/{count}']
            keys = [[sampler[i].record_key, int(sampler[i].rng.integers(99))] for i in range(index, 24, count)]
            assert keys == expected[f'{index}/{count} keys']
    sampler = SequentialSampler(7, NoSharding(), seed=3)
    assert [sampler[i].record_key for i in range(7)] == expected['sequential']


@pytest.mark.parametrize('shuffle', [False, True])
def test_uneven_shards_are_exact(shuffle):
    for count in (2, 3, 4):
        for epoch in range(3):
            elements = []
            for index in range(count):
                sampler = IndexSampler(11, ShardOptions(index, count), shuffle=shuffle, num_epochs=3, seed=1)
                items = list(DataLoader(data_source=range(11), sampler=sampler))
                each = len(items) // 3
                elements += items[epoch * each : (epoch + 1) * each]
            assert sorted(elements) == list(range(11))
    parts = [
        list(DataLoader(data_source=range(11), sampler=SequentialSampler(11, ShardOptions(i, 3)))) for i in range(3)
    ]
    assert parts == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]
    even = [SequentialSampler(11, ShardOptions(i, 3, drop_remainder=True)) for i in range(3)]
    assert [list(DataLoader(data_source=range(11), sampler=one)) for one in even] == [part[:3] for part in parts]
    assert len(IndexSampler(11, ShardOptions(0, 3))) == sys.maxsize


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
def test_batches_and_states_do_not_depend_on_workers():
    def loader(workers):
        sampler = IndexSampler(50, shuffle=True, num_epochs=2, seed=0)
        operations = [Add(), Noise(), Even(), Batch(7)]
        return DataLoader(
            data_source=range(50), sampler=sampler, operations=operations, worker_count=workers, start_method='fork'
        )

    expected_batches = plain(list(loader(0)))
    with iter(loader(2)) as iterator:
        first = [plain(next(iterator)) for _ in range(3)]
        state = json.loads(json.dumps(iterator.get_state()))
        assert first + plain(list(iterator)) == expected_batches
    for workers in (0, 1):
        with iter(loader(workers)) as iterator:
            iterator.set_state(state)
            assert first + plain(list(iterator)) == expected_batches
    other = DataLoader(data_source=range(50), sampler=IndexSampler(50, shuffle=True, num_epochs=2, seed=1))
    with pytest.raises(StateError, match='stage 2 was .*seed=0.*, and is .*seed=1'):
        iter(other).set_state(state)


def test_custom_sampler():
    class Backwards:
        def __len__(self):
            return 5

        def __getitem__(self, index):
            return granular.grain.RecordMetadata(index, 4 - index, np.random.Generator(np.random.Philox(key=index)))

    assert list(DataLoader(data_source=range(5), sampler=Backwards())) == [4, 3, 2, 1, 0]
    assert list(DataLoader(data_source=range(5), sampler=Backwards(), shard_options=ShardOptions(1, 2))) == [3, 1]
    assert len(list(DataLoader(data_source=range(5), sampler=Backwards(), operations=[Noise()]))) == 5
    assert str(granular.grain.sources.RangeDataSource(1, 9, 2)) == 'RangeDataSource(start=1, stop=9, step=2)'
    assert list(
        DataLoader(data_source=granular.grain.sources.RangeDataSource(1, 9, 2), sampler=SequentialSampler(4))
    ) == [1, 3, 5, 7]


def test_sampler_without_length_ends_at_its_first_index_error():
    class Backwards:
        def __getitem__(self, index):
            if not 0 <= index < 5:
                raise IndexError(index)
            return granular.grain.RecordMetadata(index, 4 - index)

    assert list(DataLoader(data_source=range(5), sampler=Backwards())) == [4, 3, 2, 1, 0]
    assert list(DataLoader(data_source=range(5), sampler=Backwards(), shard_options=ShardOptions(1, 2))) == [3, 1]
    with pytest.raises(OutOfRangeError, match='record_key=4 at index 0: the data source has 4'):
        list(DataLoader(data_source=range(4), sampler=Backwards()))


@pytest.mark.parametrize('name', ['torch', 'jax'])
def test_missing_frameworks_are_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, {'torch': 'torch.distributed'}.get(name, name), None)
    kind = {'torch': granular.ShardByTorchRank, 'jax': ShardByJaxProcess}[name]
    with pytest.raises(granular.errors.MissingExtraError, match=rf'pip install .*\[{name}\]'):
        kind()


def test_invalid_samplers_are_rejected():
    for make in (
        lambda: IndexSampler(0), lambda: IndexSampler(5, num_epochs=0), lambda: IndexSampler(5, shuffle=True),
        lambda: IndexSampler(5, seed=-1), lambda: ShardOptions(2, 2), lambda: ShardOptions(0, 0),
        lambda: ShardOptions(0.5, 2), lambda: ShardOptions(0, 2.0), lambda: ShardOptions(False, 2),
        lambda: DataLoader(data_source=[1], sampler=object()),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(2)),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), worker_count=-1),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), worker_buffer_size=-1),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), worker_count=2, start_method='thread'),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), operations=[3]),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), operations=[Noise()]),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), operations=[Batch(0)]),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), read_options=3),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), shard_options=3),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), on_error='ignore'),
        lambda: DataLoader(data_source=3, sampler=IndexSampler(1)),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), operations=Batch(2)),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), operations='map'),
        lambda: DataLoader(data_source=[1], sampler=[0]),
        lambda: DataLoader(data_source=[1], sampler=[granular.grain.RecordMetadata(0)]),
        lambda: DataLoader(data_source=[1], sampler=[types.SimpleNamespace(record_key=0)]),
        lambda: Batch(0),
        lambda: DataLoader(data_source=[1], sampler=IndexSampler(1), shard_options=ShardOptions(0, 2)),
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError):
            make()
    with pytest.raises(InvalidArgumentError, match='pass a seed to the sampler'):
        list(DataLoader(data_source=[1], sampler=IndexSampler(1, num_epochs=1), operations=[Noise()]))


async def test_async_api():
    sampler = IndexSampler(10, shuffle=True, num_epochs=1, seed=0)
    elements = [
        plain(batch)
        async for batch in granular.grain.DataLoader(data_source=range(10), sampler=sampler, operations=[Batch(4)])
    ]
    assert elements == plain(list(DataLoader(data_source=range(10), sampler=sampler, operations=[Batch(4)])))


def test_indices_of_samplers_are_checked():
    """A negative index would be read from the end, and one beyond it from the beginning."""
    for key in (-1, 3):
        entries = [granular.grain.RecordMetadata(0, 1), granular.grain.RecordMetadata(1, key)]
        with pytest.raises(granular.errors.OutOfRangeError, match=f'record_key={key} at index 1: .* has 3 datapoints'):
            list(DataLoader(data_source=[5, 6, 7], sampler=entries))
    entries = [granular.grain.RecordMetadata(0, 1), granular.grain.RecordMetadata(1, None)]
    with pytest.raises(InvalidArgumentError, match='at index 1: expected a RecordMetadata with a record_key'):
        list(DataLoader(data_source=[5, 6, 7], sampler=entries))


def test_sampler_is_not_called_on_the_event_loop():
    class Source(list):
        async def fetch(self, indices):
            await asyncio.sleep(0)
            return [self[index] for index in indices]

    class Sampler(list):
        def __getitem__(self, index):
            assert threading.current_thread().name != 'granular-loop'
            return super().__getitem__(index)

    sampler = Sampler(granular.grain.RecordMetadata(i, i) for i in range(1000))
    assert list(DataLoader(data_source=Source(range(1000)), sampler=sampler)) == list(range(1000))


@pytest.mark.parametrize(('before', 'after'), [(2, 1), (2, 3), (3, 2), (1, 2)])
def test_states_of_samplers_without_a_shard_fit_any_number_of_hosts(before, after):
    class Backwards:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            return granular.grain.RecordMetadata(index, record_key=19 - index)

    def loader(host, hosts):
        return DataLoader(data_source=range(20), sampler=Backwards(), shard_options=ShardOptions(host, hosts))

    seen = []
    for host in range(before):
        iterator = iter(loader(host, before))
        seen += [next(iterator) for _ in range(3)]
        state = json.loads(json.dumps(iterator.get_state()))
        iterator.close()
    for host in range(after):
        with iter(loader(host, after)) as iterator:
            iterator.set_state(state)
            seen += list(iterator)
    assert sorted(seen) == list(range(20))


class Forwards:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return granular.grain.RecordMetadata(index, record_key=index)


@pytest.mark.parametrize('filtered', [True, False], ids=['data source', 'operations'])
def test_operations_and_states_are_the_same_wherever_a_filter_is(filtered):
    source = granular.MapDataset.range(12)
    source, operations = (source.filter(Even()), [Add()]) if filtered else (source, [Even(), Add()])

    def loader(host, hosts):
        shard = ShardOptions(host, hosts)
        return DataLoader(data_source=source, sampler=Forwards(), operations=operations, shard_options=shard)

    assert list(loader(0, 1)) == [1, 3, 5, 7, 9, 11]
    with iter(loader(0, 3)) as iterator:
        assert next(iterator) == 1
        state = iterator.get_state()
    with iter(loader(0, 2)) as iterator, pytest.raises(StateError, match='hosts do not advance equally'):
        iterator.set_state(state)


def test_samplers_may_have_a_shard_as_those_of_grain():
    for index in range(2):

        class Sampler(list):
            _shard_options = types.SimpleNamespace(shard_index=index, shard_count=2, drop_remainder=False)

        sampler = Sampler(granular.grain.RecordMetadata(i, 6 - i) for i in range(7))
        loader = DataLoader(data_source=list(range(7)), sampler=sampler, worker_buffer_size=0)
        assert list(loader) == [6, 5, 4, 3, 2, 1, 0][index::2]
