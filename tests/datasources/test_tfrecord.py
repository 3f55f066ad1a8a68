"""TFRecord files: records at random and in order, checksums, states. Grain and protobuf are the oracles."""

import gzip
import json
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular.errors import (
    CorruptError,
    CorruptRecordError,
    DatapointError,
    DecodeError,
    StateError,
    UnsupportedError,
)
from granular.formats import decode_example
from granular.grain.experimental import TFRecordIterDataset
from tests.support import examples, tables
from tests.support.examples import frame
from tests.support.requests import requests, steady


def record(i):
    return bytes([i % 256, i // 256]) * (i * 37 % 300)


def write(path, count=100, first=0, compress=bytes):
    path.write_bytes(compress(b''.join(frame(record(i)) for i in range(first, first + count))))
    return path


# --- at random


def test_copies_share_the_index_and_close_alone(root):
    paths = [write(root / f'{i}.tfrecord', 40, 40 * i) for i in range(3)]
    with granular.TFRecordDataSource(paths) as source:
        assert source.size == sum(path.stat().size for path in paths)
        copy, count, _ = requests(source.copy)
        assert count == 0
    assert copy[41] == record(41)


def test_grain_reads_the_same_records(tmp_path, grain):
    path = write(granular.Path(tmp_path / 'x.tfrecord'))
    script = 'print(json.dumps([r.hex() for r in grain.experimental.TFRecordIterDataset(sys.argv[1])]))'
    theirs = grain.run('import grain.experimental\n' + script, str(path))
    assert [bytes.fromhex(text) for text in theirs] == list(TFRecordIterDataset(path))


def test_files_have_the_bytes_that_tensorflow_writes():
    # tf.io.TFRecordWriter of one empty record
    assert frame(b'') == bytes.fromhex('000000000000000029039807d8ea82a2')


@pytest.fixture(scope='module')
def several(tmp_path_factory):
    folder = granular.Path(tmp_path_factory.mktemp('several'))
    return [write(folder / f'{i}', count, first) for i, (count, first) in enumerate([(7, 0), (0, 7), (20, 7), (1, 27)])]


def test_batch_reads_only_its_records(fakegcs):
    path = write(steady(fakegcs, max_gap=0) / 'x.tfrecord')
    source, count, size = requests(lambda: granular.TFRecordDataSource(path))
    assert count <= 3 and size == path.stat().size
    result, count, size = requests(lambda: source.fetch([3, 50, 99]))
    assert result == [record(3), record(50), record(99)]
    assert (count, size) == (3, sum(map(len, result)) + 12)


def test_indexing_skips_large_records(tmp_path):
    path = tmp_path / 'x.tfrecord'
    path.write_bytes(b''.join(frame(bytes([i]) * (20 << 20)) for i in range(4)) + frame(b'last'))
    source, _, size = requests(lambda: granular.TFRecordDataSource(path))
    assert size < 20 << 20
    assert len(source) == 5 and source[-1] == b'last'
    assert source[3] == bytes([3]) * (20 << 20)


# --- in order


@pytest.mark.parametrize('compress', [bytes, gzip.compress, zlib.compress], ids=['plain', 'gzip', 'zlib'])
def test_streams_yield_records_and_resume(root, compress):
    paths = [write(root / f'{i}.tfrecord.gz', count, first, compress) for i, (count, first) in
             enumerate([(30, 0), (0, 30), (25, 30)])]  # fmt: skip
    expected = [record(i) for i in range(55)]
    stream = TFRecordIterDataset(paths)
    assert list(stream) == expected
    assert list(stream.map(len).batch(10))[5].tolist() == list(map(len, expected[50:]))
    with iter(stream) as iterator, iter(stream) as other:
        start = iterator.get_state()
        for i in range(56):
            state = iterator.get_state()
            if i % 5 == 0 or i in (29, 31, 54):
                other.set_state(state)
                assert next(other, None) == next(iter(expected[i:]), None)
            assert next(iterator, None) == (expected[i] if i < 55 else None)
        other.set_state(start)
        assert list(other) == expected


def test_streams_are_streams_like_others(several):
    stream = TFRecordIterDataset(several)
    assert list(stream.repeat(2)) == 2 * [record(i) for i in range(28)]
    assert list(granular.IterDataset.zip([stream, stream]))[27] == (record(27), record(27))
    assert list(stream.mp_prefetch(0)) == [record(i) for i in range(28)]
    assert 'and 3 more' in str(stream)


def test_workers_of_torch_share_the_records(several):
    from granular.integrations.torch import IterableDataset  # a slow import, needed only here

    for part in range(3):
        shard = IterableDataset(TFRecordIterDataset(several), shard_options=granular.ShardOptions(part, 3))
        assert list(shard) == [record(i) for i in range(part, 28, 3)]


def test_gzip_with_members_and_padding(tmp_path):
    records = [frame(record(i)) for i in range(30)]
    data = gzip.compress(b''.join(records[:10])) + gzip.compress(b''.join(records[10:])) + bytes(512)
    (tmp_path / 'x.gz').write_bytes(data)
    assert list(TFRecordIterDataset(tmp_path / 'x.gz')) == [record(i) for i in range(30)]


def test_highly_compressed_records_are_decompressed_in_parts(tmp_path):
    content = b''.join(frame(bytes(1 << 20)) for _ in range(30))
    (tmp_path / 'x.gz').write_bytes(gzip.compress(content, 1))
    stream = iter(TFRecordIterDataset(tmp_path / 'x.gz'))
    assert sum(map(len, stream)) == 30 << 20


def test_plain_file_that_looks_compressed_is_read(tmp_path):
    size = 0x088B1F  # whose bytes are those of gzip
    path = granular.Path(tmp_path / 'x.tfrecord')
    path.write_bytes(frame(bytes(size)))
    assert [len(item) for item in TFRecordIterDataset(path)] == [size]
    assert len(granular.TFRecordDataSource(path)[0]) == size


@pytest.mark.parametrize('compress', [gzip.compress, zlib.compress])
def test_compressed_files_have_no_random_access(tmp_path, compress):
    path = write(granular.Path(tmp_path / 'x.tfrecord'), compress=compress)
    with pytest.raises(UnsupportedError, match=r'x\.tfrecord: is compressed by .*TFRecordIterDataset'):
        granular.TFRecordDataSource(path)


@pytest.mark.parametrize(('before', 'after'), [(1, 3), (2, 1), (2, 3), (3, 2), (2, 2)])
def test_states_fit_any_number_of_hosts(several, before, after):
    from granular.integrations.torch import IterableDataset

    def part(host, hosts):
        shard = granular.ShardOptions(host, hosts)
        return iter(IterableDataset(TFRecordIterDataset(several), shard_options=shard))

    for taken in (0, 1, 5):
        seen, states = [], []
        for host in range(before):
            with part(host, before) as iterator:
                seen += [next(iterator) for _ in range(taken)]
                states.append(iterator.get_state())
        for host in range(after):
            with part(host, after) as iterator:
                iterator.set_state(states[host % before])
                seen += list(iterator)
        assert sorted(seen) == sorted(record(i) for i in range(28))


def test_states_of_all_hosts_are_of_one_position_or_refused(several, tmp_path):
    from granular.integrations.torch import IterableDataset

    def part(host, hosts):
        shard = granular.ShardOptions(host, hosts)
        return iter(IterableDataset(TFRecordIterDataset(several).repeat(2), shard_options=shard))

    parts = [part(host, 3) for host in range(3)]  # of 10, 9 and 9 records
    for count in range(1, 11):
        for host, iterator in enumerate(parts):
            next(iterator)
            granular.save_state(tmp_path / f'{count}', iterator.get_state(), granular.ShardOptions(host, 3))
        with part(0, 1) as iterator:
            if count < 10:
                iterator.set_state(granular.load_state(tmp_path / f'{count}'))
                assert next(iterator) == record(3 * count)
            else:
                for other in parts:
                    with pytest.raises(StateError, match='hosts do not advance equally'):
                        iterator.set_state(other.get_state())


@pytest.mark.parametrize('damaged', range(8))
def test_hosts_get_their_intact_records_before_the_error(root, damaged):
    from granular.integrations.torch import IterableDataset

    path = write(root / '0.tfrecord', 8)
    content = bytearray(path.read_bytes())
    content[sum(16 + len(record(i)) for i in range(damaged)) + 12 + len(record(damaged))] ^= 1
    path.write_bytes(bytes(content))
    for host in range(3):
        shard, found = granular.ShardOptions(host, 3), []
        iterator = iter(IterableDataset(TFRecordIterDataset(path), shard_options=shard))
        with pytest.raises(CorruptRecordError):
            found.extend(iterator)
        assert found == [record(i) for i in range(host, damaged, 3)]


def test_window_over_several_files_notices_that_a_later_one_was_replaced(root):
    paths = [write(root / f'{i}.tfrecord', 2, 2 * i) for i in range(5)]
    stream = TFRecordIterDataset(paths).window_shuffle(6, seed=0)
    with iter(stream) as iterator:
        next(iterator)
        state, rest = json.loads(json.dumps(iterator.get_state())), list(iterator)
    with iter(stream) as iterator:
        iterator.set_state(state)
        assert list(iterator) == rest
    write(paths[2], 2, 90)
    with iter(stream) as iterator, pytest.raises(StateError, match=r'2\.tfrecord: \d+ bytes, the state was saved with'):
        iterator.set_state(state)
        next(iterator)
    write(paths[2], 2, 4)
    paths[4].unlink()  # is not needed yet
    with iter(stream) as iterator:
        iterator.set_state(state)
        assert [next(iterator) for _ in range(5)] == rest[:5]


def test_invalid_states_are_errors(several):
    iterator = iter(TFRecordIterDataset(several))
    start = iterator.get_state()

    def restore(state):
        iterator.set_state({**start, 'state': state})

    for state in (3, {}, {'file': 0}, {'file': 9, 'offset': 0, 'record': 0, 'position': 0},
                  {'file': -1, 'offset': 0, 'record': 0, 'position': 0},
                  {'file': 0, 'offset': 0, 'record': 0, 'position': 0, 'next_bytes': 3},
                  {'file': 0, 'offset': 0, 'record': 0, 'position': 0, 'next_bytes': ['3']}):  # fmt: skip
        with pytest.raises(StateError):
            restore(state)
    restore({'file': 2, 'offset': 10**6, 'record': 3, 'position': 10})
    with pytest.raises(StateError, match=r'byte 1000000, the file has \d+'):
        next(iterator)
    restore({'file': 2, 'offset': 5, 'record': 3, 'position': 10})
    with pytest.raises(CorruptRecordError, match='record 3 at byte 5'):
        next(iterator)


# --- damage


INTACT = [frame(record(i)) for i in range(20)]


def damaged():
    """Damaged files: a name, the bytes, the number of intact records, and a part of the error."""
    whole, ten = b''.join(INTACT), b''.join(INTACT[:10])
    huge = struct.pack('<Q', 1 << 60)
    return [
        ('in a header', ten + INTACT[10][:7], 10, 'truncated'),
        ('in data', ten + INTACT[10][:60], 10, 'truncated'),
        ('before the last checksum', whole[:-4], 19, 'truncated'),
        ('length', ten + b'\1' + INTACT[10][1:], 10, r'record 10 at byte \d+: expected checksum \w{8} of its length'),
        ('data', ten + INTACT[10][:20] + b'\1' + INTACT[10][21:], 10, r'record 10 of 140 bytes: expected checksum'),
        ('checksum', whole[:-1] + bytes([whole[-1] ^ 1]), 19, r'record 19 of \d+ bytes: expected checksum'),
        ('huge length', ten + huge + examples.masked(huge) + b'x', 10, 'record 10 at byte .* has 1152921504606846976'),
        ('text', b'this is no TFRecord file at all', 0, 'not a TFRecord file'),
    ]


@pytest.mark.parametrize(('name', 'data', 'intact', 'match'), damaged(), ids=lambda value: value if
                         isinstance(value, str) and len(value) < 30 else '')  # fmt: skip
def test_damage_is_an_error_that_names_the_record(tmp_path, name, data, intact, match):
    path = granular.Path(tmp_path / 'damaged.tfrecord')
    path.write_bytes(data)
    with pytest.raises(CorruptRecordError, match=rf'damaged\.tfrecord.*{match}'):
        list(granular.TFRecordDataSource(path))
    for content, expected in ((data, match), (gzip.compress(data), 'expected at most' if 'huge' in name else match)):
        path.write_bytes(content)
        iterator = iter(TFRecordIterDataset(path))
        assert [next(iterator) for _ in range(intact)] == [record(i) for i in range(intact)]
        state = iterator.get_state()
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match=rf'damaged\.tfrecord.*{expected}') as caught:
                next(iterator)
            assert f'record {intact}' in str(caught.value)
        assert iterator.get_state() == state


def test_damaged_compression_is_an_error(tmp_path):
    path = granular.Path(tmp_path / 'x.gz')
    content = gzip.compress(b''.join(INTACT))
    for data, match in ((content[:-20], 'truncated'), (content[:200] + bytes(50) + content[250:], 'damaged|checksum')):
        path.write_bytes(data)
        with pytest.raises(CorruptError, match=rf'x\.gz.*({match})'):
            list(TFRecordIterDataset(path))


@settings(max_examples=tables.examples(60))
@given(st.integers(0, sum(map(len, INTACT)) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(tmp_path, position, change):
    data = bytearray(b''.join(INTACT))
    data[position] ^= change
    (tmp_path / 'x').write_bytes(data)
    number = next(i for i in range(20) if position < sum(map(len, INTACT[: i + 1])))
    with pytest.raises(CorruptRecordError, match=f'record {number} '):
        list(TFRecordIterDataset(tmp_path / 'x'))
    with pytest.raises(CorruptRecordError, match=f'record {number} '):
        granular.TFRecordDataSource(tmp_path / 'x').fetch([number])


# --- Examples


def plain(features):
    """Our features as those of ``examples.decode``."""
    kinds = {'int64': 'int64_list', 'float32': 'float_list'}
    return {
        name: None if value is None
        else ('bytes_list', value) if isinstance(value, list)
        else (kinds[value.dtype.name], value.tolist())
        for name, value in features.items()
    }  # fmt: skip


FEATURES = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.none(),
        st.lists(st.binary(max_size=30), max_size=5),
        st.lists(st.floats(width=32, allow_nan=False), max_size=50),
        st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 200), max_size=50),
    ),
    max_size=5,
)


@settings(max_examples=tables.examples(60))
@given(FEATURES)
def test_features_equal_those_of_protobuf(features):
    data = examples.encode(features)
    decoded = decode_example(data)
    assert plain(decoded) == examples.decode(data)
    assert decode_example(memoryview(data)).keys() == features.keys()
    assert all(value.flags.writeable for value in decoded.values() if isinstance(value, np.ndarray))


@settings(max_examples=tables.examples(100))
@given(FEATURES, st.data())
def test_damaged_examples_equal_those_of_protobuf_or_are_errors(features, data):
    message = bytearray(examples.encode(features))
    for _ in range(data.draw(st.integers(0, 3))):
        position = data.draw(st.integers(0, len(message)))
        message[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    try:
        decoded = plain(decode_example(bytes(message)))
    except DecodeError as error:
        assert 'not an Example' in str(error)
    else:
        assert repr(decoded) == repr({name: examples.decode(bytes(message))[name] for name in decoded})  # also with NaN


def test_messages_that_protobuf_merges():
    one, two = examples.encode({'a': [1, 2], 'b': [1.0]}), examples.encode({'a': [3], 'c': [b'x']})
    assert plain(decode_example(one + two)) == examples.decode(one + two)
    unpacked = b'\x0a\x0f\x0a\x0d\x0a\x01a\x12\x08\x1a\x06\x08\x05\x08\x07\x0a\x00'  # as old writers have it
    assert decode_example(unpacked)['a'].tolist() == [5, 7]
    assert plain(decode_example(unpacked)) == examples.decode(unpacked)
    assert decode_example(b'') == {}


# --- conversion


def example(i):
    tokens = list(range(i % 5))
    return {'label': [i], 'weight': [i / 2], 'image': [b'\xff%d' % i], 'tokens': tokens, 'tags': [b'a', b'b']}


@pytest.mark.parametrize('compress', [bytes, gzip.compress], ids=['plain', 'gzip'])
def test_examples_are_converted(tmp_path, compress):
    data = b''.join(frame(examples.encode(example(i))) for i in range(100))
    (tmp_path / 'x.tfrecord-00000-of-00001').write_bytes(compress(data))
    done = granular.convert(tmp_path / 'x.tfrecord-00000-of-00001', tmp_path / 'out', shardlen=40)
    assert (done.format, done.datapoints, done.shards) == ('tfrecord', 100, 3)
    assert done.spec == {'image': 'bytes', 'label': 'int', 'tags': 'msgpack', 'tokens': 'array', 'weight': 'array'}
    with granular.open(tmp_path / 'out') as reader:
        datapoint = reader[43]
        assert datapoint['tokens'].tolist() == [0, 1, 2] and datapoint['tokens'].dtype == np.int64
        assert {key: datapoint[key] for key in ('image', 'label', 'tags', 'weight')} == {
            'image': b'\xff43', 'label': 43, 'tags': [b'a', b'b'], 'weight': 21.5
        }  # fmt: skip


def test_other_records_are_converted_as_they_are(tmp_path):
    path = write(granular.Path(tmp_path / 'x.tfrecord'), 20)
    with pytest.raises(DecodeError, match='not an Example'):
        granular.convert(path, tmp_path / 'out')
    granular.convert(granular.TFRecordDataSource(path), tmp_path / 'out')
    with granular.open(tmp_path / 'out') as reader:
        assert reader[7] == {'data': record(7)}


def test_feature_that_has_several_values_after_all_is_an_error(tmp_path):
    data = b''.join(frame(examples.encode({'label': [i] * (1 + (i == 1))})) for i in range(200))
    (tmp_path / 'x.tfrecord').write_bytes(data)
    with pytest.raises(DatapointError, match=r"feature 'label': expected one value, as in all sampled records, got 2"):
        granular.convert(tmp_path / 'x.tfrecord', tmp_path / 'out')
