"""Damaged ArrayRecord files give records or a GranularError, in bounded memory."""

import pickle
import struct
import sys
import tracemalloc

import brotli
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular.config import MiB
from granular.errors import (
    CorruptError,
    CorruptRecordError,
    GranularError,
    MissingExtraError,
    OutOfRangeError,
    UnsupportedError,
)
from tests.datasources.test_arrayrecord import make, quick, write
from tests.support.tables import examples


@pytest.mark.parametrize('options', ['group_size:5,snappy', 'group_size:5,transpose:true'])
def test_foreign_files_are_rejected(tmp_path, options):
    path = write(tmp_path / 'x.array_record', make(20), options)
    with pytest.raises(UnsupportedError, match=r'x.array_record, (footer|chunk 2).*(snappy|transposed)'):
        granular.ArrayRecordDataSource(path)[12]


def test_missing_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / 'x', make(3), 'group_size:1')
    monkeypatch.setitem(sys.modules, 'zstandard', None)
    with pytest.raises(MissingExtraError, match=r'zstandard.*pip install .*\[arrayrecord\]'):
        granular.ArrayRecordDataSource(path)


def number(value):
    return struct.pack('<Q', value)


FIRST = 64  # start of the first chunk, after the signature
DAMAGE = {  # of an uncompressed record of 10,000 bytes: offset, new bytes, and message
    'data size': (FIRST + 8, number(1 << 40), 'expected 1099511627776 bytes'),
    'no data': (FIRST + 8, number(0), 'no data'),
    'type': (FIRST + 24, b'\xff', 'type 0xff'),
    'padding': (FIRST + 24, b'p', 'is padding'),
    'count': (FIRST + 25, b'\x02', 'has 2 records, but'),
    'decoded size': (FIRST + 32, number(1 << 62), 'bytes of records'),
    'smaller': (FIRST + 32, number(3), 'expected 3 bytes, got 10000'),
    'compression': (FIRST + 40, b'x', 'compressed by 0x78'),
    'other': (FIRST + 40, b'z', 'expected at most 9 bytes, got 10000'),
    'sizes': (FIRST + 41, b'\xff\xff\x7f', 'sizes of its records take 2097151'),
    'number': (FIRST + 42, b'\xff' * 10, 'no varint at byte 0 of 2'),
    'size': (FIRST + 42, b'\x8f', 'expected a record of 9999 bytes, got 10000'),
    'footer': (-65536 + 70, b'\xff\xff\x7f', 'expected the footer to begin before byte 65536, got byte 2097151'),
    'magic': (-65536 + 75, b'\xff', 'not the postscript of an ArrayRecord file'),
}


@pytest.mark.parametrize('what', DAMAGE)
def test_damage_is_an_error(tmp_path, what):
    path = write(tmp_path / 'x', [bytes(10000)] * 3, 'group_size:1,uncompressed')
    data = bytearray(path.read_bytes())
    at, new, message = DAMAGE[what]
    at %= len(data)
    data[at : at + len(new)] = new
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises((CorruptError, UnsupportedError), match=f'{path}.*({message})'):
        granular.ArrayRecordDataSource(path, verify=False)[0]
    assert tracemalloc.get_traced_memory()[1] < 4 * MiB
    tracemalloc.stop()


BOMBS = {
    'brotli': lambda data: brotli.compress(data, quality=1),
    'zstd': zstandard.compress,
    'zstd:1': zstandard.ZstdCompressor(write_content_size=False).compress,
}


@pytest.mark.parametrize('kind', BOMBS)
def test_decompression_bombs_are_rejected(tmp_path, kind):
    path = write(tmp_path / 'x', [bytes(1000)], f'group_size:1,pad_to_block_boundary:true,{kind}')
    with granular.ArrayRecordDataSource(path) as source:
        source.fetch([0])  # the first read of a process takes 32 MB for a moment
    data = bytearray(path.read_bytes())
    values = data.rindex(b'\xe8\x07', FIRST, FIRST + 100) + 2  # after their size, 1000
    bomb = BOMBS[kind](bytes(64 * MiB))
    data[values : values + len(bomb)] = bomb
    data[FIRST + 8 : FIRST + 16] = number(values + len(bomb) - FIRST - 40)
    path.write_bytes(data)
    source = granular.ArrayRecordDataSource(path, verify=False)
    tracemalloc.start()
    with pytest.raises(CorruptRecordError, match='x, chunk 0, values'):
        source.fetch([0])
    assert tracemalloc.get_traced_memory()[1] < 4 * MiB
    tracemalloc.stop()


def test_damaged_record_is_skipped(tmp_path):
    path = write(tmp_path / 'x', [b'%d' % i * 30 for i in range(40)], 'group_size:4,uncompressed')
    data = bytearray(path.read_bytes())
    data[data.index(b'16' * 30) - 5] = 99  # the length of its sizes
    path.write_bytes(data)
    chain = granular.MapDataset.source(granular.ArrayRecordDataSource(path))
    with pytest.raises(CorruptRecordError, match='x, chunk 4'):
        chain[17]
    stream = chain.to_iter_dataset(on_error='skip')
    assert list(stream) == [b'%d' % i * 30 for i in range(40) if i // 4 != 4]


@given(cut=st.integers(0, 200_000))
@quick
def test_truncated_files_are_errors(tmp_path_factory, cut):
    base = tmp_path_factory.getbasetemp()
    intact, path = base / 'whole.array_record', base / 'cut.array_record'
    if not intact.exists():
        write(intact, make(70), 'group_size:9,brotli')
    data = intact.read_bytes()
    path.write_bytes(data[: cut % len(data)])
    with pytest.raises((CorruptError, UnsupportedError)):
        granular.ArrayRecordDataSource(path)


@given(data=st.data())
@settings(quick, max_examples=examples(150))
def test_any_damage_gives_records_or_errors(tmp_path_factory, data):
    options = data.draw(st.sampled_from(['group_size:1,uncompressed', 'group_size:4', 'group_size:4,brotli']))
    base = tmp_path_factory.getbasetemp()
    intact = base / f'{options.replace(":", "").replace(",", "")}.whole'
    if not intact.exists():
        write(intact, [b'%d,' % i * i for i in range(30)], options)
    content = bytearray(intact.read_bytes())
    filled = np.flatnonzero(np.frombuffer(bytes(content), np.uint8)).tolist()
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.sampled_from(filled))] = data.draw(st.integers(0, 255))
    path = base / 'damaged.array_record'
    path.write_bytes(content)
    try:
        source = granular.ArrayRecordDataSource(path, verify=data.draw(st.booleans()))
        records = source.fetch(range(len(source)))
    except GranularError as error:
        assert not isinstance(error, OutOfRangeError)
    else:
        assert len(records) == len(source)
        assert all(type(record) is bytes for record in records)


# --- hashes


@pytest.mark.parametrize(
    'options', ['group_size:1,uncompressed', 'group_size:7,brotli', 'group_size:50', 'group_size:1']
)
def test_hashes_of_array_record_are_those_computed(tmp_path, options):
    records = [bytes(range(256)) * 300, *(bytes([i % 251]) * i for i in range(150))]  # of all lengths modulo 32
    path = write(tmp_path / 'x', records, options)
    source = granular.ArrayRecordDataSource(path)
    assert source.fetch(range(151)) == list(source) == records
    assert source[77] == records[77]


@settings(max_examples=examples(60))
@given(st.integers(0, 65535), st.integers(1, 255))
def test_any_changed_byte_is_noticed_with_hashes(intact, position, change):
    path, content, records = intact
    data = bytearray(content)
    data[position] ^= change
    path.write_bytes(data)
    try:
        with granular.ArrayRecordDataSource(path) as source:
            found = source.fetch(range(3))
    except GranularError as error:
        assert str(path) in str(error)
    else:
        assert found == records and (position < FIRST or position >= 3 * 10_043 + FIRST)


@pytest.fixture(scope='module')
def intact(tmp_path_factory):
    path = tmp_path_factory.mktemp('intact') / 'x'
    records = [bytes([i]) * 10_000 for i in range(3)]
    write(path, records, 'group_size:1,uncompressed')
    return path, path.read_bytes(), records


def test_wrong_hash_names_the_chunk_and_both_hashes(tmp_path):
    path = write(tmp_path / 'x', [bytes(10_000)] * 3, 'group_size:1,uncompressed')
    data = bytearray(path.read_bytes())
    data[FIRST + 5000] ^= 1
    path.write_bytes(data)
    assert granular.ArrayRecordDataSource(path, verify=False)[0] != bytes(10_000)
    with granular.ArrayRecordDataSource(path) as source:
        assert source[1] == bytes(10_000)
        for read in (lambda: source[0], lambda: source.fetch([2, 0]), lambda: pickle.loads(pickle.dumps(source))[0]):
            with pytest.raises(CorruptRecordError, match=r'x, chunk 0: expected hash \w{16} of its data, got \w{16}'):
                read()
