import pickle

import msgpack
import numpy as np
import pytest

import granular
from granular import aio
from granular.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptDatasetError,
    DecodeError,
    InvalidArgumentError,
    NotFoundError,
    SpecError,
)

SPEC = {'a': 'int', 'b': 'utf8[]'}
FLAT = {'a': 'int', 'b': 'utf8'}


def point(i):
    return {'a': i, 'b': [str(i)] * (i % 3)}


def write(folder, numbers, **kwargs):
    with granular.ShardedDatasetWriter(folder, SPEC, granular.encoders, **kwargs) as writer:
        for i in numbers:
            writer.append(point(i))
        return writer


def values(folder, **kwargs):
    with granular.ShardedDatasetReader(folder, granular.decoders, **kwargs) as reader:
        return [datapoint['a'] for datapoint in reader]


def test_sharded_dataset_round_trips_in_every_store(root):
    write(root / 'ds', range(25), shardlen=10)
    (root / 'ds' / 'notes.txt').write_text('ignored')
    with granular.ShardedDatasetReader(root / 'ds', granular.decoders, cache_keys=('refs',)) as reader:
        assert (len(reader), reader.shards, reader.spec) == (25, 3, SPEC)
        assert list(reader) == [point(i) for i in range(25)]
        picks = [24, 0, 10, 9, -1, 10]
        assert reader.fetch(picks) == [point(i) for i in (24, 0, 10, 9, 24, 10)]
        assert reader.fetch([]) == []
        assert reader[8:12, 'a'] == {'a': [8, 9, 10, 11]}
        assert reader[::-6, 'a'] == {'a': [24, 18, 12, 6, 0]}
        assert reader[11, {'b': range(1, 2)}] == {'b': ['11']}
        assert reader.available(11) == {'a': True, 'b': range(2)}
        assert reader.size == sum(shard.size for shard in reader.aio.readers)
        with pytest.raises(IndexError, match='25'):
            reader[25]
    with granular.DatasetReader(root / 'ds' / '000001', granular.decoders) as reader:
        assert [datapoint['a'] for datapoint in reader] == list(range(10, 20))


def test_shards_are_divided_among_workers(tmp_path):
    for worker in range(3):
        writer = write(
            tmp_path / 'ds', range(worker * 100, worker * 100 + 20), shardlen=10, shardstart=worker, shardstep=3
        )
        assert writer.shards == 2
        assert len(writer) == 20
    assert values(tmp_path / 'ds', shardstart=1, shardstep=3) == list(range(100, 120))
    assert len(values(tmp_path / 'ds')) == 60
    with pytest.raises(NotFoundError, match='6 shards'):
        values(tmp_path / 'ds', shardstart=6)


def test_fetch_is_one_fan_out_for_all_shards(http):
    write(http.folder / 'ds', range(100), shardlen=10)
    path = granular.Path(f'{http.endpoint}/ds', config=granular.IOConfig(hedge=0.0))
    with granular.ShardedDatasetReader(path, granular.decoders, cache_keys=('refs',)) as reader:
        http.requests.clear()
        http.delay, http.peak = 0.05, 0
        picks = np.arange(0, 100, 10)
        assert reader.fetch(picks, ('a',)) == [{'a': i} for i in picks]
        assert sorted(http.requests) == [('GET', f'/ds/{i:06}/a.bag', 'bytes=0-0') for i in range(10)]
        assert http.peak == 10


def test_reopened_writer_starts_a_new_shard(root):
    write(root / 'ds', range(15), shardlen=10)
    write(root / 'ds', range(15, 30), shardlen=10)
    assert values(root / 'ds') == list(range(30))
    with granular.ShardedDatasetReader(root / 'ds', granular.decoders) as reader:
        assert [len(shard) for shard in reader.aio.readers] == [10, 5, 10, 5]


def test_settings_of_shards_may_be_numpy_integers(moto, tmp_path):
    folder, start, step, length = moto.place() / 'ds', np.int64(0), np.int16(1), np.uint8(10)
    write(folder, range(25), shardlen=length, shardstart=start, shardstep=step)
    assert values(folder, shardstart=start, shardstep=step) == list(range(25))
    granular.convert(range(25), tmp_path, shardlen=length, parallel=step, sample=step)
    assert len(granular.open(tmp_path)) == 25
    with pytest.raises(InvalidArgumentError, match='sample: expected an integer >= 1, got None'):
        granular.convert(range(25), tmp_path, sample=None)


def test_reopened_writer_fills_an_appendable_shard(tmp_path):
    def write(numbers):
        with granular.ShardedDatasetWriter(tmp_path / 'ds', FLAT, granular.encoders, 10, layout='columns') as writer:
            for i in numbers:
                writer.append({'a': i, 'b': str(i)})
            return len(writer)

    assert write(range(15)) == 15
    assert write(range(15, 32)) == 17
    assert write([]) == 0
    assert values(tmp_path / 'ds') == list(range(32))
    with granular.ShardedDatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        assert [len(shard) for shard in reader.aio.readers] == [10, 10, 10, 2]
        assert reader.layout == 'columns'


@pytest.mark.parametrize('layout', ['refs', 'columns'])
async def test_writer_that_failed_to_open_continues_where_the_other_one_stopped(tmp_path, layout):
    options = {'shardlen': 2, 'layout': layout}
    first, second = (aio.ShardedDatasetWriter(tmp_path / 'ds', FLAT, **options) for _ in range(2))
    for i in range(3):
        await first.append({'a': i, 'b': ''})
    with pytest.raises(AlreadyExistsError, match='another writer is writing it'):
        await second.flush()
    await first.abort()
    await second.flush()
    assert second.found == 2
    for i in range(2, 5):
        await second.append({'a': i, 'b': ''})
    await second.aclose()
    assert values(tmp_path / 'ds') == list(range(5))


@pytest.mark.parametrize('layout', ['refs', 'columns'])
@pytest.mark.parametrize('count', [1, 2])
def test_shard_that_another_writer_has_written_since_is_not_appended_to(tmp_path, layout, count):
    first, second = (
        granular.ShardedDatasetWriter(tmp_path / 'ds', FLAT, granular.encoders, 2, layout=layout) for _ in range(2)
    )
    with first:
        for i in range(count):
            first.append({'a': i, 'b': ''})
    with second, pytest.raises(AlreadyExistsError, match='000000'):
        second.append({'a': 7, 'b': ''})
    assert values(tmp_path / 'ds') == list(range(count))


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_datapoint_behind_which_no_shard_could_be_started_is_not_appended_again(tmp_path, layout):
    def open_writer():
        return granular.ShardedDatasetWriter(tmp_path / 'ds', {'a': 'int'}, granular.encoders, 2, layout=layout)

    writer = open_writer()
    writer.append({'a': 0})
    (tmp_path / 'ds' / '000001').touch()
    with pytest.raises(AlreadyExistsError, match='is a file'):
        writer.append({'a': 1})
    (tmp_path / 'ds' / '000001').unlink()
    with pytest.raises(ClosedError, match='datapoint 1 was appended nevertheless'):
        writer.append({'a': 1})
    writer.close()
    with open_writer() as writer:
        writer.append({'a': 2})
    assert values(tmp_path / 'ds') == [0, 1, 2]


def test_invalid_arguments_of_a_sharded_writer_are_refused(tmp_path):
    write(tmp_path / 'ds', range(5), shardlen=10)
    with pytest.raises(SpecError, match='but the writer has'):
        granular.ShardedDatasetWriter(tmp_path / 'ds', FLAT, granular.encoders, shardlen=10)
    with pytest.raises(AlreadyExistsError, match='shardlen'):
        granular.ShardedDatasetWriter(tmp_path / 'ds', SPEC, granular.encoders)
    for bad in ({'shardlen': 0}, {'shardstart': 1}, {'shardlen': 5, 'shardstep': 0}, {'shardlen': 5, 'shardstart': -1}):
        with pytest.raises(InvalidArgumentError, match='shard'):
            granular.ShardedDatasetWriter(tmp_path / 'other', SPEC, granular.encoders, **bad)
    write(tmp_path / 'ds', range(5), shardlen=5)
    with pytest.raises(SpecError, match='layout'):
        granular.ShardedDatasetWriter(tmp_path / 'ds', SPEC | {'b': 'utf8'}, granular.encoders, 5, layout='columns')
    (tmp_path / 'ds' / '000000' / 'spec.json').unlink()
    with pytest.raises(CorruptDatasetError, match=r'000000 has no spec\.json'):
        granular.ShardedDatasetWriter(tmp_path / 'ds', SPEC, granular.encoders, shardlen=10)
    granular.Path(tmp_path / 'ds' / '000000').rmtree()
    with pytest.raises(CorruptDatasetError, match='000000 is missing'):
        granular.ShardedDatasetWriter(tmp_path / 'ds', SPEC, granular.encoders, shardlen=10)


def test_unfinished_shard_is_rewritten(root):
    write(root / 'ds', range(15), shardlen=10)
    (root / 'ds' / '000001' / 'spec.json').unlink()
    if not root.store.local:
        # Its writer may still be alive.
        with pytest.raises(AlreadyExistsError, match='discard'):
            granular.ShardedDatasetWriter(root / 'ds', SPEC, granular.encoders, shardlen=10)
        assert not (root / 'ds' / '000001' / 'spec.json').exists()
    with granular.ShardedDatasetWriter(root / 'ds', SPEC, granular.encoders, 10, resume='discard') as writer:
        assert writer.found == 10
        assert len(writer) == 0
        for i in range(writer.found, 25):
            writer.append(point(i))
    assert values(root / 'ds') == list(range(25))
    with granular.ShardedDatasetReader(root / 'ds', granular.decoders) as reader:
        assert [len(shard) for shard in reader.aio.readers] == [10, 10, 5]
    (root / 'ds' / '000002' / 'notes.txt').write_text('mine')
    (root / 'ds' / '000002' / 'spec.json').unlink()
    with pytest.raises(AlreadyExistsError, match='notes'):
        granular.ShardedDatasetWriter(root / 'ds', SPEC, granular.encoders, 10, resume='discard')


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_started_shard_that_is_not_needed_is_removed(tmp_path, layout):
    """The next shard is started before one is published, so that an incomplete dataset never looks complete."""

    def open_writer():
        return granular.ShardedDatasetWriter(tmp_path / 'ds', FLAT, granular.encoders, 5, layout=layout)

    first = open_writer()
    for i in range(5):
        first.append({'a': i, 'b': str(i)})
    assert sorted(p.name for p in (tmp_path / 'ds').iterdir()) == ['000000', '000001']
    assert (first.shards, len(first), first.found) == (1, 5, 0)
    with pytest.raises(NotFoundError, match='000001'):
        values(tmp_path / 'ds')
    with pytest.raises(AlreadyExistsError, match='another writer'):
        open_writer()
    first.close()
    assert sorted(p.name for p in (tmp_path / 'ds').iterdir()) == ['000000']
    (tmp_path / 'ds' / '000001').mkdir()
    (tmp_path / 'ds' / '000001' / 'a.bag').write_bytes(b'')
    with open_writer() as second:
        assert second.found == 5
    assert sorted(p.name for p in (tmp_path / 'ds').iterdir()) == ['000000']
    assert values(tmp_path / 'ds') == list(range(5))


def test_error_keeps_complete_shards(root):
    with pytest.raises(RuntimeError, match='on purpose'):
        with granular.ShardedDatasetWriter(root / 'ds', SPEC, granular.encoders, shardlen=10) as writer:
            for i in range(15):
                writer.append(point(i))
            raise RuntimeError('on purpose')
    assert values(root / 'ds') == list(range(10))


def test_missing_shard_is_corruption(tmp_path):
    write(tmp_path / 'ds', range(30), shardlen=10)
    granular.Path(tmp_path / 'ds' / '000001').rmtree()
    with pytest.raises(CorruptDatasetError, match='000001 is missing, of 3'):
        values(tmp_path / 'ds')


def test_shards_with_different_specs_are_corruption(tmp_path):
    write(tmp_path / 'ds', range(10), shardlen=10)
    with granular.DatasetWriter(tmp_path / 'ds' / '000001', FLAT, granular.encoders) as writer:
        writer.append({'a': 1, 'b': 'x'})
    with pytest.raises(CorruptDatasetError, match='000001'):
        values(tmp_path / 'ds')


def test_folder_without_shards_is_not_found(root):
    root.mkdir(parents=True, exist_ok=True)
    (root / 'x').write_bytes(b'')
    with pytest.raises(NotFoundError, match='no shards|000000'):
        values(root)


def test_sharded_reader_pickles_and_copies(tmp_path):
    write(tmp_path / 'ds', range(30), shardlen=10)
    reader = granular.ShardedDatasetReader(tmp_path / 'ds', granular.decoders, shardstart=1)
    twin, other = reader.copy(), pickle.loads(pickle.dumps(reader))
    reader.close()
    assert twin[0]['a'] == other[0]['a'] == 10


async def test_async_sharded_reader_and_writer(root):
    async with aio.ShardedDatasetWriter(root / 'ds', SPEC, granular.encoders, shardlen=4) as writer:
        for i in range(10):
            assert await writer.append(point(i)) == i
    async with aio.ShardedDatasetReader(root / 'ds', granular.decoders) as reader:
        assert [datapoint async for datapoint in reader] == [point(i) for i in range(10)]
        assert await reader.get(-1) == point(9)
        assert await reader.fetch([9, 0, 4]) == [point(9), point(0), point(4)]
        assert await reader.get(slice(3, 5), 'a') == {'a': [3, 4]}


@pytest.mark.parametrize('parallel', [{}, {'shardstart': 1, 'shardstep': 2}, {'shardlen': None}])
def test_a_dataset_without_shards_is_not_hidden_under_shards(root, parallel):
    with granular.DatasetWriter(root / 'ds', {'x': 'int'}) as writer:
        writer.append({'x': 7})
    names = sorted(path.name for path in (root / 'ds').iterdir())
    with pytest.raises(AlreadyExistsError, match='is a dataset without shards, .*: choose another folder or remove'):
        granular.ShardedDatasetWriter(root / 'ds', {'x': 'int'}, **{'shardlen': 2, **parallel})
    assert sorted(path.name for path in (root / 'ds').iterdir()) == names
    assert granular.open(root / 'ds').fetch([0]) == [{'x': 7}]


@pytest.mark.parametrize(
    ('references', 'message'),
    [
        (
            [msgpack.packb([i, ()]) for i in range(5)] + [b'\xc1'] * 5,
            r'000001/refs\.bag: reference 1 of those read does not match the spec',
        ),
        ([msgpack.packb([i, (99, 1)]) for i in range(10)], r"000001: datapoint 3 refers to 1 records .* of key 'b'"),
        ([msgpack.packb([i + 5, ()]) for i in range(10)], r"000001: datapoint 7 refers to 1 records .* of key 'a'"),
        ([msgpack.packb([i, (0, 9)]) for i in range(10)], r"000001: 2 datapoints refer to 18 records of key 'b'"),
    ],
    ids=['malformed', 'beyond', 'beyond for some', 'overlapping'],
)
def test_damaged_references_of_one_of_several_shards_are_named(tmp_path, references, message):
    write(tmp_path / 'ds', range(30), shardlen=10)
    for file in (tmp_path / 'ds' / '000001').glob('refs.*'):
        file.unlink()
    with granular.BagWriter(tmp_path / 'ds' / '000001' / 'refs.bag') as bag:
        for record in references:
            bag.append(record)
    with granular.ShardedDatasetReader(tmp_path / 'ds') as reader:
        assert reader.fetch([29, 0], ('b',)) == [{'b': ['29'] * 2}, {'b': []}]
        with pytest.raises(CorruptDatasetError, match=message):
            reader.fetch([29, 13, 17, 0])


def test_record_that_is_not_decoded_names_its_shard_and_datapoint(tmp_path):
    def decode(data):
        value = data.decode()
        if value == '14':
            raise ValueError(value)
        return value

    write(tmp_path / 'ds', range(30), shardlen=10)
    decoders = {**granular.decoders, 'utf8': decode}
    with granular.ShardedDatasetReader(tmp_path / 'ds', decoders) as reader:
        with pytest.raises(DecodeError, match=r"000001.* 4\b.*'b'"):
            reader.fetch([28, 3, 14, 10, 1])
