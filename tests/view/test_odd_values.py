"""Odd values in ``granular view``: one that cannot be shown says so, and the rest of its page is shown."""

import json

import msgpack
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import granular
from granular.view.previews import array_head
from tests.support.files import FILES
from tests.view.serving import Served
from tests.view.test_server import ask

TREES = {
    'bytes as keys': {b'\xff\0': 1},
    'numbers as keys': {2: 1, 1.5: {None: 3}, True: 4},
    'surrogates in text': {'a': '\ud800', '\udfff': 1},
    'a number that is none': [float('nan'), float('inf'), -float('inf')],
    'a long number': 2**64 - 1,
    'an extension': msgpack.ExtType(5, b'abc'),
    'a time': msgpack.Timestamp(2**33, 999),
    'an odd time': msgpack.Timestamp(-(2**62), 1),
    'nesting': json.loads('[' * 400 + ']' * 400),
    'an empty map': {},
}
OPTIONS = {'unicode_errors': 'surrogatepass', 'strict_types': False}
VALUES = {
    **{('tree', name): msgpack.packb(value, **OPTIONS) for name, value in TREES.items()},
    **{('msgpack', name): msgpack.packb(value, **OPTIONS) for name, value in TREES.items()},
    ('tree', 'a tuple as a key'): b'\x81\x92\x01\x02\x03',
    ('tree', 'damage'): b'\xc1',
    ('tree', 'an array as a value'): granular.formats.encode_tree({'x': [np.arange(3), np.array(['\ud800'])]}),
    ('json', 'surrogates'): b'{"\\ud800": "\\udfff"}',
    ('json', 'no numbers'): b'[NaN, Infinity, -Infinity, 1e999]',
    ('json', 'a number of 10,000 digits'): b'1' * 10_000,
    ('json', 'a short number of 700 digits'): b'1' * 700,
    ('json', 'nesting'): b'[' * 500 + b']' * 500,
    ('json', 'deep nesting'): b'[' * 100_000 + b']' * 100_000,
    ('json', 'damage'): b'{',
    ('utf8', 'surrogates'): '\ud800'.encode(errors='surrogatepass'),
    ('utf8', 'no UTF-8'): b'\xff\xfe',
    ('utf8', 'zeros'): b'\0' * 100,
    ('utf8', 'control characters'): bytes(range(32)) + '\u202e\ufeff\uffff'.encode(),
    ('int', 'damage'): b'123',
    ('int', 'nothing'): b'',
    ('float', 'not a number'): np.array(np.nan).tobytes(),
    ('float', 'infinity'): np.array(np.inf).tobytes(),
    ('float', 'damage'): b'1',
    ('bool', 'neither'): b'\7',
    ('array', 'damage'): b'\x93',
    ('array', 'dates'): granular.formats.encode_array(np.array(['2000', 'NaT'], 'M8[Y]')),
    ('array', 'dates beyond those of Python'): granular.formats.encode_array(np.array([2**62], 'M8[s]')),
    ('array', 'text with surrogates'): granular.formats.encode_array(np.array(['\ud800'])),
    ('array', 'text beyond Unicode'): granular.formats.encode_array(
        np.array([2**31], np.uint32)
    ).replace(b'<u4', b'<U1'),
    ('array', 'no numbers'): granular.formats.encode_array(np.array([np.nan, np.inf, 1e300 * 1j])),
    ('array', 'no dimensions'): granular.formats.encode_array(np.float16('nan')),
    ('bytes', 'nothing'): b'',
    ('jpg', 'damage'): b'\xff\xd8\xff',
    ('mp4', 'damage'): b'\0',
    ('wav', 'damage'): b'RIFF',
    ('unheard of', 'anything'): b'\xff',
}  # fmt: skip


@pytest.fixture(scope='module')
def odd(tmp_path_factory):
    """Datasets of 20 rows by type, in whose middle the odd values are, and one datapoint of a text."""
    folder = granular.Path(tmp_path_factory.mktemp('odd'))
    for kind in dict.fromkeys(kind for kind, _ in VALUES):
        records = [record for (other, _), record in VALUES.items() if other == kind]
        with granular.DatasetWriter(folder / kind, {'odd': kind, 'all': f'{kind}[]', 'n': 'int'}, None) as writer:
            for i, record in enumerate(records):
                writer.append({'odd': record, 'all': [record, record], 'n': i.to_bytes(8, 'little')})
    with Served(folder) as served:
        yield served


@pytest.mark.parametrize('kind', dict.fromkeys(kind for kind, _ in VALUES))
def test_odd_values_are_shown_beside_the_others(kind, odd):
    count = sum(other == kind for other, _ in VALUES)
    reply = ask(odd, '/api/rows', path=kind, start=0, count=count)
    assert reply.status == 200
    columns = reply.json['columns']
    assert [cell['text'] for cell in columns['n']] == [str(i) for i in range(count)]
    assert all('text' in cell or cell['error'] for key in ('odd', 'all') for cell in columns[key])
    for index in range(count):
        values = ask(odd, '/api/datapoint', path=kind, index=index)
        assert values.status == 200
        assert [value['key'] for value in values.json['values']] == ['all', 'n', 'odd']
        assert values.json['values'][1]['text'] == str(index)
        assert len(ask(odd, '/api/values', path=kind, key='all', index=index).json['values']) == 2
    assert ask(odd, '/api/histograms', path=kind).status == 200
    assert ask(odd, '/api/pictures', path=kind, key='odd', at='0').status == 200
    for relation in ('=', 'has', '<'):
        assert ask(odd, '/api/search', path=kind, key='odd', relation=relation, text='1').status in (200, 400)


def test_error_of_an_array_without_a_text_is_named():
    with pytest.raises(granular.errors.DecodeError, match='100 bytes are not an array: FormatError'):
        array_head(b'\x93\xc1', 100)


def parquet(path):
    table = pyarrow.table({'n': list(range(40)), 'text': [f'number {i}' for i in range(40)]})
    pyarrow.parquet.write_table(table, path, row_group_size=10, use_dictionary=False)
    chunk = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(1)
    return range(chunk.data_page_offset, chunk.data_page_offset + chunk.total_compressed_size), range(10, 20)


def tfrecord(path):
    path.write_bytes(FILES['tfrecord'](range(40)))
    record = path.stat().st_size // 40
    return [10 * record + 12], [10]  # behind the length of the record and its checksum


@pytest.mark.parametrize('write', [parquet, tfrecord])
def test_damaged_part_of_a_file_is_named_beside_the_other_rows(write, tmp_path):
    path = tmp_path / f'x.{write.__name__}'
    places, rows = write(path)
    data = bytearray(path.read_bytes())
    for place in places:
        data[place] ^= 0xFF
    path.write_bytes(data)
    with Served(granular.Path(tmp_path)) as served:
        columns = ask(served, '/api/rows', path=path.name, start=0, count=40).json['columns']
        for key, cells in columns.items():
            damaged = [i for i, cell in enumerate(cells) if 'error' in cell]
            assert damaged == ([] if key == 'n' else list(rows))
            assert all(path.name in cells[i]['error'] for i in damaged)
            if key == 'n':
                assert [cell['text'] for cell in cells] == [str(i) for i in range(40)]
        values = ask(served, '/api/datapoint', path=path.name, index=rows[0]).json['values']
        assert path.name in values[-1]['error']
        key = values[-1]['key']
        assert path.name in ask(served, '/api/media', path=path.name, key=key, index=rows[0]).json['error']
        entries, _ = ask(served, '/api/pictures', path=path.name, key=key, at=str(rows[0])).files
        assert path.name in entries[0]['error']
        assert ask(served, '/api/histograms', path=path.name).status == 200
        found = ask(served, '/api/search', path=path.name, key=key, relation='has', text='number').json
        assert found['skipped'] == len(rows)


ERRORS = [
    RuntimeError('odd'), RecursionError('odd'), MemoryError(), OSError(5, 'odd'), KeyError('odd'), ImportError('odd'),
    StopIteration(), StopAsyncIteration(), ZeroDivisionError('odd'), UnicodeDecodeError('utf-8', b'x', 0, 1, 'odd'),
    granular.errors.StoreError('odd'), ExceptionGroup('odd', [ValueError()]),
]  # fmt: skip


@pytest.mark.parametrize('error', ERRORS, ids=lambda error: type(error).__name__)
def test_any_error_of_a_decoder_is_shown_beside_the_other_values(error, odd, monkeypatch):
    decode = granular.decoders['int']

    def fail_once(record):
        if int.from_bytes(record, 'little') == 1:
            raise error
        return decode(record)

    monkeypatch.setitem(granular.decoders, 'int', fail_once)
    reply = ask(odd, '/api/rows', path='tree', start=0, count=3)
    assert reply.status == 200
    cells = reply.json['columns']['n']
    assert [cells[0]['text'], cells[2]['text']] == ['0', '2']
    assert 'odd' in cells[1]['error'] or type(error).__name__ in cells[1]['error']
    assert ask(odd, '/api/datapoint', path='tree', index=1).json['values'][1]['error']
    assert ask(odd, '/api/search', path='tree', key='n', relation='=', text='2').json['matches'] == [2]
    histograms = ask(odd, '/api/histograms', path='tree')
    assert histograms.status == 200
    # Where memory was short, nothing is known of the value.
    damaged = [] if isinstance(error, MemoryError) else [1]
    assert sum(row['damaged'] for row in histograms.json['keys'] if row['key'] == 'n') == len(damaged)
    found = ask(odd, '/api/search', path='tree', key='n', relation='damaged', text='').json
    assert (found['matches'], found['skipped']) == (damaged, 1 - len(damaged))


@pytest.mark.parametrize('kind', ['jpg', 'mp4'])
def test_image_or_video_for_which_memory_is_short_is_not_damaged(kind, tmp_path, monkeypatch):
    value = np.zeros((16, 16, 3) if kind == 'jpg' else (1, 16, 16, 3), np.uint8)
    with granular.DatasetWriter(tmp_path / 'ds', {'x': kind}, granular.encoders) as writer:
        writer.append({'x': value})

    def short(*args, **options):
        raise MemoryError

    monkeypatch.setattr('PIL.Image.Image.thumbnail', short)
    with Served(granular.Path(tmp_path)) as server:
        found = ask(server, '/api/search', path='ds', key='x', relation='damaged', text='').json
        assert (found['matches'], found['skipped']) == ([], 1)
        entries, _ = ask(server, '/api/pictures', path='ds', key='x', at='0').files
        assert 'MemoryError' in entries[0]['error']
        assert 'cannot decode' not in entries[0]['error']


ARRAYS = [
    np.array(['2000-01-02', 'NaT'], 'M8[D]'), np.array([5], 'm8[s]'), np.array(['text', 'b']), np.zeros((0, 3)),
    np.zeros((2, 0, 4), np.uint8), np.array([], 'M8[s]'), np.array(b'bytes'),
]  # fmt: skip


def test_arrays_without_a_picture_are_no_errors(tmp_path):
    with granular.DatasetWriter(tmp_path / 'd', {'x': 'array', 'all': 'array[]'}) as writer:
        for array in ARRAYS:
            writer.append({'x': array, 'all': [array]})
    with Served(granular.Path(tmp_path)) as served:
        for index, array in enumerate(ARRAYS):
            cell = ask(served, '/api/rows', path='d', start=index, count=1).json['columns']['x'][0]
            assert cell['text'].startswith(f'{array.dtype}') and 'error' not in cell
            [entry], [file] = ask(served, '/api/pictures', path='d', key='x', at=index).files
            assert 'error' not in entry and not file and entry['note'].startswith(f'{array.dtype}')
            assert ask(served, '/api/plane', path='d', key='x', index=index, plane=0).status == 200
