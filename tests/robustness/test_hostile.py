"""Untrusted bytes: a correct result or a granular error, without more memory than their own size."""

import contextlib
import io
import json
import logging
import struct
import sys
import time
import tracemalloc
import zlib

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import granular
from granular import cli, formats
from granular.config import MiB
from granular.errors import (
    AlreadyExistsError,
    CorruptBagError,
    CorruptDatasetError,
    CorruptError,
    DecodeError,
    GranularError,
    NotFoundError,
    StoreError,
)
from granular.formats import layout
from tests.robustness.fuzz.targets import join, seeds, targets
from tests.support.faults import FaultServer
from tests.support.tables import examples

SLOW = ('bag', 'bag3', 'dataset', 'columns', 'index', 'signed_index', 'tfrecord', 'mp4', 'webm')
SPECIAL = [number.to_bytes(8, 'little') for number in (0, 1, 8, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)]
quick = settings(suppress_health_check=list(HealthCheck), max_examples=examples(300))


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger('granular').disabled = True  # of indices that are not used
    yield
    logging.getLogger('granular').disabled = False


@st.composite
def damaged(draw, valid):
    """Return valid bytes with a few changes."""
    data = bytearray(draw(st.sampled_from(valid)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(['change', 'insert', 'remove', 'number', 'cut'])):
            case 'change' if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case 'insert':
                data[at:at] = draw(st.binary(min_size=1, max_size=9))
            case 'remove':
                del data[at : at + draw(st.integers(1, 9))]
            case 'number':
                data[at : at + 8] = draw(st.sampled_from(SPECIAL))
            case 'cut':
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize('name', targets)
def test_arbitrary_bytes_are_decoded_or_refused(name):
    target, valid = targets[name], seeds().get(name, [])
    for data in valid:
        target(data)

    @settings(quick, max_examples=examples(120 if name in SLOW else 300))
    @given(st.one_of(st.binary(max_size=200), *([damaged(valid)] * 3 if valid else [])))
    def check(data):
        target(data)

    check()


numbers = st.integers(-(2**63), 2**64 - 1)
packable = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.binary(max_size=9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | numbers, inner, max_size=3),
    max_leaves=9,
)


@settings(quick)
@given(st.lists(packable, min_size=3, max_size=3) | packable)
def test_arbitrary_references_are_decoded_or_refused(value):
    targets['refs'](msgpack.packb(value))


known = ['<f8', '|u1', '<U2', '|S0', '<M8[ns]', '<M8[0s]', '|O', 'O,i4', '(9,)f8', '|V3', '<U0', 'x', '']
dtypes = st.sampled_from(known) | st.text(max_size=4)
shapes = st.lists(st.integers(-2, 5) | st.sampled_from([2**31, 2**62, 2**64 - 1]), max_size=4)


@settings(quick, max_examples=examples(500))
@given(dtypes, shapes | packable, st.binary(max_size=50) | packable)
def test_arbitrary_arrays_are_decoded_or_refused(dtype, shape, data):
    targets['array'](msgpack.packb([dtype, shape, data]))
    targets['tree'](msgpack.packb({'a': [['_', dtype, shape, data]]}))


@settings(quick)
@given(packable)
def test_arbitrary_specs_are_read_or_refused(value):
    with contextlib.suppress(TypeError):  # bytes
        targets['spec'](json.dumps(value).encode())


@settings(quick)
@given(st.text(max_size=8))
def test_arbitrary_keys_stay_in_the_folder(key):
    targets['spec'](json.dumps({key: 'int'}).encode())


@pytest.mark.parametrize(
    'key',
    ['../x', '/etc/x', 'a/b', 'a\\b', 'a\0b', '', '.', '..', '.x', 'a\n', 'A', 'é', '٠', '-x', 'a b', '~x', 'C:x'],
)
def test_keys_that_are_not_file_names_are_refused(tmp_path, key):
    (tmp_path / 'spec.json').write_text(json.dumps({key: 'int'}))
    with pytest.raises(CorruptDatasetError, match='cannot be file names'):
        granular.DatasetReader(tmp_path, None)


@pytest.mark.parametrize(
    'content', [b'[' * 100_000, b'{"a":' * 100_000, b'\xff', b'', b'{}', b'[]', b'{"a": 1}', b'9' * 9999]
)
def test_invalid_specs_are_refused(tmp_path, content):
    (tmp_path / 'spec.json').write_bytes(content)
    with pytest.raises(CorruptDatasetError):
        granular.DatasetReader(tmp_path, None)


RECORDS = [
    b'', b'[' * 100_000, b'{"a":' * 100_000, b'\xff', b'5', b'null', b'[]', b'{}', b'[["shards", 1]]', b'9' * 9999,
    b'{"shards": null, "sample": null}', b'{"shards": 1%b, "sample": 5}' % bytes(b'0' * 4000),
    b'{"shards": 1000000000000, "sample": [1]}', b'{"shards": -1, "sample": "x"}', b'{"shards": 1e300, "sample": true}',
]  # fmt: skip


@pytest.mark.parametrize('content', RECORDS, ids=lambda content: repr(content[:20]))
def test_damaged_records_beside_a_dataset_are_refused(tmp_path, fakegcs, content):
    def write(folder):
        with granular.ShardedDatasetWriter(folder, {'n': 'int'}, granular.encoders, shardlen=2) as writer:
            for number in range(writer.found, 6):
                writer.append({'n': number})

    write(tmp_path / 'appended')
    (tmp_path / 'appended/000002/spec.json').unlink()
    (tmp_path / 'appended/000000/.granular-append').write_bytes(content)
    with Peak() as peak, pytest.raises(NotFoundError, match='000002: has no spec'):
        granular.open(tmp_path / 'appended')
    assert peak.bytes < 4 * MiB

    (tmp_path / 'copied').mkdir()
    (tmp_path / 'copied/.granular-copy.json').write_bytes(content)
    with pytest.raises(AlreadyExistsError, match='was not written by copy_to_local'):
        granular.copy_to_local(tmp_path / 'appended', tmp_path / 'copied')

    granular.convert([{'n': number} for number in range(6)], tmp_path / 'converted', shardlen=2)
    (tmp_path / 'converted/000000/.granular-conversion').write_bytes(content)
    with pytest.raises((CorruptDatasetError, AlreadyExistsError), match='convert|conversion'):
        granular.convert([{'n': number} for number in range(6)], tmp_path / 'converted', shardlen=2)

    folder = fakegcs.new_bucket() / 'claimed'
    (folder / '.writer.0.1.json').write_bytes(content)
    with pytest.raises(AlreadyExistsError, match='another writer'):
        write(folder)


# --- memory


class Peak:
    """The peak of memory that Python and numpy allocated within a block."""

    def __enter__(self):
        tracemalloc.start()
        return self

    def __exit__(self, *args):
        self.bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def refused(kind, record):
    with Peak() as peak, pytest.raises(DecodeError):
        granular.decoders[kind](record)
    return peak.bytes


@pytest.mark.parametrize('kind', ['msgpack', 'tree', 'array'])
def test_nested_lists_of_false_length_take_no_memory(kind):
    size = 100_000
    record = (b'\xdd' + struct.pack('>I', size)) * 1000 + bytes(size)
    assert refused(kind, record) < 4 * len(record)
    assert refused(kind, b'\x91' * 5000) < MiB
    assert refused(kind, b'\xdd\xff\xff\xff\xff' + bytes(100)) < MiB
    assert refused(kind, b'\xdf\xff\xff\xff\xff' + bytes(100)) < MiB
    assert refused(kind, b'\xc6\xff\xff\xff\xff' + bytes(100)) < MiB


def test_deep_nesting_is_decoded_or_refused():
    for depth in (50, 400, 1000, 3000):
        for kind in ('msgpack', 'tree'):
            try:
                value = granular.decoders[kind](b'\x91' * depth + b'\x01')
            except DecodeError:
                assert depth > 100
                continue
            for _ in range(depth):
                (value,) = value
            assert value == 1


@pytest.mark.parametrize(
    ('dtype', 'shape', 'data'),
    [
        ('<f8', [2**40], b''), ('<f8', [0, 2**62], b''), ('<f8', [-1], bytes(8)), ('<f8', [2**32, 2**32], bytes(8)),
        ('<f8', [1.0], bytes(8)), ('<f8', 1, bytes(8)), ('<f8', [1], None), ('<f8', [1], 'aaaabbbb'),
        ('|O', [1], bytes(8)),
        ('O,i4', [1], bytes(12)), ('(1000000000,)f8', [], b''), ('<U1', [1], b'\xff\xff\xff\x7f'),
        ({'names': ['a'], 'formats': ['O']}, [1], bytes(8)), ('<f8', [1] * 65, bytes(8)), ('<M8[0s]', [1], bytes(8)),
    ],
)  # fmt: skip
def test_arrays_of_false_shape_take_no_memory(dtype, shape, data):
    assert refused('array', msgpack.packb([dtype, shape, data])) < MiB
    assert refused('tree', msgpack.packb(['_', dtype, shape, data])) < MiB


def test_billion_empty_items_take_no_memory():
    with Peak() as peak:
        value = formats.decode_array(msgpack.packb(['|S0', [2**30], b'']))
    assert value.shape == (2**30,)
    assert peak.bytes < MiB


def png(width, height):
    def chunk(kind, data):
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

    head = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    return (
        b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', zlib.compress(bytes(1000))) + chunk(b'IEND', b'')
    )


@pytest.mark.filterwarnings('ignore::PIL.Image.DecompressionBombWarning')
@pytest.mark.parametrize(('width', 'height'), [(60_000, 60_000), (10_000, 10_000), (2**31 - 1, 1), (0, 5)])
def test_oversized_images_are_refused(width, height):
    # Pillow warns above its limit, and refuses above twice that.
    assert refused('png', png(width, height)) < 8 * MiB


def test_postscript_images_are_refused():
    eps = b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n'
    with pytest.raises(DecodeError, match='expected an image of JPEG'):
        formats.decode_image(eps)


def test_oversized_videos_are_refused():
    video = formats.encode_video(np.zeros((30, 64, 64, 3), np.uint8))
    assert formats.decode_video(video, max_bytes=30 * 64 * 64 * 3).shape == (30, 64, 64, 3)
    with pytest.raises(DecodeError, match='more than 29 frames of 64 by 64'):
        formats.decode_video(video, max_bytes=30 * 64 * 64 * 3 - 1)
    with pytest.raises(DecodeError):
        formats.decode_video(video, max_bytes=64 * 64)


def test_playlists_are_refused_and_not_fetched():
    with FaultServer() as server:
        for text in (
            f'#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{server.endpoint}/x.ts\n#EXT-X-ENDLIST\n',
            f'ffconcat version 1.0\nfile {server.endpoint}/x.mp4\n',
            f'<MPD><Period><BaseURL>{server.endpoint}/</BaseURL></Period></MPD>',
        ):
            with pytest.raises(DecodeError):
                formats.decode_video(text.encode())
        assert not server.ranges


# --- tables and references


SPEC = {'n': 'int', 'text': 'utf8[]'}


def dataset(tmp_path, refs, spec=SPEC, count=4, body=b'abcd'):
    """Write a dataset in the refs layout with these references."""
    (tmp_path / 'spec.json').write_text(json.dumps(spec))
    packed = [msgpack.packb(ref) for ref in refs]
    for name, records in (('refs', packed), ('n', [b'\x05'] * count), ('text', [body] * count)):
        ends = np.cumsum([len(record) for record in records], dtype=np.int64)
        (tmp_path / f'{name}.bag').write_bytes(b''.join(records) + layout.table_of(ends, 1))
    return tmp_path


BAD = [
    [2**63 - 1, []], [2**64 - 1, []], [4, []], [-1, []], [0, [4, 1]], [0, [0, 5]], [0, [-1, 2]], [0, [2, -1]],
    [0, [2**63 - 1, 2]], [0, [1, 2**63 - 1]], [0, [-(2**63), 2**63 - 1]], [0.5, []], [0, [0, 1.5]], [0, [1]],
    [0, [1, 2, 3]], ['0', []], [None, []], [0, {'a': 1}], [0, 'ab'], [0, b'ab'], [[0, 1], []], [0], [0, [], 0],
    7, 'xy', {}, [0, [[0], 1]],
]  # fmt: skip


@pytest.mark.parametrize('bad', BAD, ids=repr)
def test_invalid_references_are_corruption(tmp_path, bad):
    path = dataset(tmp_path, [[0, [0, 2]], bad])
    with pytest.raises(CorruptDatasetError):
        with granular.DatasetReader(path, granular.decoders, cache_keys=('refs',)) as reader:
            reader[1]
    for options in ({}, {'cache_index': False}):
        with granular.DatasetReader(path, granular.decoders, **options) as reader:
            assert reader[0] == {'n': 5, 'text': ['abcd', 'abcd']}
            for call in (
                lambda: reader[1],
                lambda: reader.fetch([0, 1]),
                lambda: reader.available(1),
                lambda: reader[:],
            ):
                with pytest.raises(CorruptDatasetError):
                    call()
    assert granular.verify(path).problems


def test_overlapping_sequences_are_refused(tmp_path):
    # Each has all of them: 5,000 datapoints of 5,000 values, in 60 kB.
    count = 5000
    path = dataset(tmp_path, [[0, [0, count]]] * count, count=count, body=b'')
    with granular.DatasetReader(path, granular.decoders) as reader:
        assert reader[7]['text'] == [''] * count
        assert len(reader.fetch([3] * 20)) == 20  # what was asked for repeatedly is given
        with Peak() as peak, pytest.raises(CorruptDatasetError, match='5000 datapoints refer to 25000000 records'):
            reader.fetch(range(count))
        assert peak.bytes < 20 * MiB


@pytest.mark.parametrize('options', [{}, {'cache_index': False}, {'cache_data': True}])
def test_record_fetched_repeatedly_is_in_memory_once(tmp_path, options):
    records = [bytes(MiB), b'x', b'yy']
    (tmp_path / 'x.bag').write_bytes(b''.join(records) + layout.table_of(np.cumsum([len(r) for r in records]), 2))
    with granular.BagReader(tmp_path / 'x.bag', **options) as reader, Peak() as peak:
        result = reader.fetch([0, 1, 2] * 300 + [-1])
        assert result == records * 300 + [b'yy']
    assert peak.bytes < 6 * MiB


def test_decreasing_limits_are_corruption(tmp_path):
    # Each record lies in the data, but all of them together are more than it.
    table = np.array([100, 0, 100, 0, 100])
    (tmp_path / 'x.bag').write_bytes(bytes(100) + layout.table_of(table, 3))
    with pytest.raises(CorruptBagError, match='decrease'):
        granular.BagReader(tmp_path / 'x.bag')
    with granular.BagReader(tmp_path / 'x.bag', cache_index=False) as reader:
        assert reader[0] == reader[2] == bytes(100)
        with pytest.raises(CorruptBagError, match='3 records have 300 bytes of 100'):
            reader.fetch([0, 2, 4])


def claiming_reply(size, tail):
    """Return a reply that claims an object of that size with these last bytes."""
    head = f'HTTP/1.1 206 X\r\nContent-Length: {len(tail)}\r\nETag: x\r\n'
    span = f'Content-Range: bytes {size - len(tail)}-{size - 1}/{size}\r\n\r\n'
    return ('raw', f'{head}{span}'.encode() + tail)


@pytest.mark.parametrize('cached', [True, False])
@pytest.mark.parametrize('size', [2**62, 2**63 + 2**17, 10**18])
def test_impossible_table_sizes_are_refused(size, cached):
    tail = 64 * 1024
    with FaultServer() as server:
        server.script.extend([claiming_reply(size, bytes(tail)), ('status', 404)] * 2)  # as it is asked for once more
        began = time.process_time()
        with pytest.raises((CorruptError, StoreError)), Peak() as peak:
            granular.BagReader(f'{server.endpoint}/x', cache_index=cached, index=None)
    assert peak.bytes < 4 * MiB
    assert time.process_time() - began < 5


# --- names


def test_shard_names_are_parsed(tmp_path):
    assert [layout.shard_number(name) for name in ('000007', '1000000', '0000007', '٠٠٠٠٠٠', '1' * 5000, '', '..')] == [
        7, 1_000_000, None, None, None, None, None,
    ]  # fmt: skip
    assert layout.shard_number('20240101') is layout.shard_number('20240101120000') is None
    for name in ('000000', '000002', '000005', '1234567', '999999999999'):
        with granular.DatasetWriter(tmp_path / 'd' / name, {'n': 'int'}, granular.encoders) as writer:
            writer.append({'n': 1})
    with pytest.raises(CorruptDatasetError, match='000001 is missing'):
        granular.ShardedDatasetReader(tmp_path / 'd', None)
    problems = granular.verify(tmp_path / 'd').problems
    assert [problem.message for problem in problems] == [
        'the shard is missing', 'the shard is missing, as are all up to 000004',
    ]  # fmt: skip


def test_shards_of_seven_digits_count_beside_half_a_million(tmp_path, monkeypatch):
    padded = [layout.shard_name(number) for number in range(10**6)]
    assert layout.shard_numbers(['1000000', *padded[:5]]) == [0, 1, 2, 3, 4]
    numbers = list(range(10**6))
    for count, others in (10**6 - 5, [10**6 + 3]), (10**6, [10**6 + 3]), (10**6, [10**6 + 1, 10**6 + 3]):
        names = [*padded[:count], *map(layout.shard_name, others)]
        assert layout.shard_numbers(names) == [*numbers[:count], *others]
    # What is behind a gap is never left out silently.
    monkeypatch.setattr(layout, 'PADDED', 4)
    with granular.ShardedDatasetWriter(tmp_path, {'n': 'int'}, shardlen=1) as writer:
        for n in range(4):
            writer.append({'n': n})
    (tmp_path / '1000000').mkdir()
    (tmp_path / '1000000' / 'refs.bag').write_bytes(b'')  # an empty folder is no shard
    for use in (
        lambda: granular.ShardedDatasetReader(tmp_path), lambda: granular.build_index(tmp_path),
        lambda: granular.ShardedDatasetWriter(tmp_path, {'n': 'int'}, shardlen=1),
    ):  # fmt: skip
        with pytest.raises(granular.errors.CorruptDatasetError, match='shard 000004 is missing'):
            use()
    assert [problem.path for problem in granular.verify(tmp_path).problems] == [
        f'{tmp_path / "000004"}', f'{tmp_path / "1000000"}'
    ]  # fmt: skip


@pytest.mark.parametrize('name', ['20240101120000', '20240101', '1234567', 'notes'])
def test_unrelated_folders_cost_no_memory(tmp_path, name):
    def write(numbers):
        with granular.ShardedDatasetWriter(tmp_path, {'n': 'int'}, granular.encoders, shardlen=2) as writer:
            for number in numbers:
                writer.append({'n': number})

    write(range(4))
    (tmp_path / name).mkdir()
    with Peak() as peak:
        write(range(4, 8))
        with granular.ShardedDatasetReader(tmp_path, granular.decoders) as reader:
            assert [point['n'] for point in reader] == list(range(8))
        assert granular.verify(tmp_path).problems == []
    assert peak.bytes < 16 * MiB


def test_distant_shard_number_costs_no_memory(tmp_path):
    for name in ('000000', '999999'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'refs.bag').write_bytes(b'')
    with Peak() as peak, pytest.raises(CorruptDatasetError, match='000001 is missing, of 1000000'):
        granular.ShardedDatasetWriter(tmp_path, {'n': 'int'}, granular.encoders, shardlen=2)
    assert peak.bytes < 4 * MiB


@pytest.mark.parametrize('kind', ['x[/red]', 'x\x1b[2J', 'x\u202e', '[bold]'])
def test_control_characters_do_not_reach_the_terminal(tmp_path, kind, monkeypatch, capsys):
    path = dataset(tmp_path, [[0, [0, 1]]], {'n': kind, 'text': 'utf8[]'}, body=b'\x1b[31m\x07')
    for command in (['info', path], ['cat', path, '0'], ['ls', path], ['verify', path], ['cat', path, '9']):
        monkeypatch.setattr(sys, 'argv', ['granular', *map(str, command)])
        with pytest.raises(SystemExit):
            cli.main()
        out, err = capsys.readouterr()
        assert not {'\x1b', '\x07', '\u202e'} & {*out, *err}


def test_pickles_are_never_loaded():
    class Harm:
        def __reduce__(self):
            return exec, ('raise SystemExit(3)',)

    import pickle

    record = pickle.dumps(Harm())
    stream = io.BytesIO()
    np.save(stream, np.array([Harm()], object), allow_pickle=True)
    for data in (record, stream.getvalue(), join(record, record)):
        for target in targets.values():
            target(data)
        for kind, decode in granular.decoders.items():
            if kind != 'bytes':
                with contextlib.suppress(GranularError):
                    decode(data)
