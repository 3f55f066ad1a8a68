"""Datasets of Megatron, beside Megatron's own reader and writer, and its published layout."""

import pickle
import struct

import numpy as np
import pytest

import granular
from granular import aio
from granular.errors import (
    CorruptDatasetError,
    CorruptError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    StateError,
    UnknownKeyError,
    UnsupportedError,
)
from tests.support.files import megatron_index
from tests.support.requests import requests, steady

DTYPES = ('uint8', 'int8', 'int16', 'int32', 'int64', 'float64', 'float32', 'uint16')  # by their codes, from 1 on


def write(folder, name, sequences, ends=None, modes=None, dtype='uint16'):
    """Write a dataset of sequences of tokens, and return its index."""
    index, data = folder / f'{name}.idx', folder / f'{name}.bin'
    code = DTYPES.index(dtype) + 1
    index.write_bytes(megatron_index([len(tokens) for tokens in sequences], ends, modes, code))
    data.write_bytes(b''.join(np.array(tokens, np.dtype(dtype).newbyteorder('<')).tobytes() for tokens in sequences))
    return index


def plain(datapoint):
    return {key: value.tolist() for key, value in datapoint.items()}


SEQUENCES = [[1, 2, 3], [], [40_000], [5, 6], [7]]
ENDS = [0, 2, 2, 4, 5]  # documents of 2, 0, 2 and 1 sequences
MODES = [0, 1, 2, 3, 4]
DOCUMENTS = [
    {'tokens': [1, 2, 3], 'lengths': [3, 0], 'modes': [0, 1]},
    {'tokens': [], 'lengths': [], 'modes': []},
    {'tokens': [40_000, 5, 6], 'lengths': [1, 2], 'modes': [2, 3]},
    {'tokens': [7], 'lengths': [1], 'modes': [4]},
]


# --- elements


@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
def test_documents_have_the_tokens_of_their_sequences(root):
    root.mkdir(parents=True, exist_ok=True)
    with granular.open(write(root, 'x', SEQUENCES, ENDS, MODES)) as source:
        assert source.fields == ('tokens', 'lengths', 'modes')
        assert [plain(document) for document in source] == DOCUMENTS
        dtypes = {key: value.dtype for key, value in source[0].items()}
        assert dtypes == {'tokens': np.uint16, 'lengths': np.int32, 'modes': np.int8}
        assert plain(source[2, ('modes', 'tokens')]) == {'modes': [2, 3], 'tokens': [40_000, 5, 6]}
        assert [value.tolist() for value in source[1:, ['lengths']]['lengths']] == [[], [1, 2], [1]]
        assert source.dtype == np.uint16
        with pytest.raises(UnknownKeyError, match=r"unknown fields \['mode'\]"):
            source[0, ('mode',)]


def test_changes_of_a_datapoint_do_not_change_the_source(tmp_path):
    with granular.open(write(granular.Path(tmp_path), 'x', SEQUENCES, ENDS, MODES)) as source:
        for key in ('lengths', 'modes'):
            source[0][key][:] = 9
        assert plain(source[0]) == DOCUMENTS[0]


def test_sequences_are_datapoints_where_they_are_asked_for(root):
    root.mkdir(parents=True, exist_ok=True)
    with granular.open(write(root, 'x', SEQUENCES, ENDS, MODES), sequences=True) as source:
        assert [plain(one) for one in source] == [
            {'tokens': tokens, 'mode': mode} for tokens, mode in zip(SEQUENCES, MODES, strict=True)
        ]
        assert type(source[1]['mode']) is np.int8
    with granular.open(write(root, 'y', SEQUENCES, ENDS), sequences=True) as source:
        assert source.fields == ('tokens',)


def test_fields_that_tell_nothing_are_left_out(tmp_path):
    folder = granular.Path(tmp_path)
    with granular.open(write(folder, 'plain', SEQUENCES)) as source:
        assert [plain(one) for one in source] == [{'tokens': tokens} for tokens in SEQUENCES]
    # If documents of one file have several sequences, those of all files have lengths.
    with granular.open([folder / 'plain.idx', write(folder, 'other', SEQUENCES, ENDS)]) as source:
        lengths = [[len(tokens)] for tokens in SEQUENCES]
        assert [one['lengths'].tolist() for one in source] == [*lengths, *(one['lengths'] for one in DOCUMENTS)]
        assert source.sizes('lengths').tolist() == [1] * 5 + [2, 0, 2, 1]


@pytest.mark.parametrize('dtype', DTYPES)
def test_tokens_have_the_dtype_of_the_file(tmp_path, dtype):
    with granular.open(write(granular.Path(tmp_path), 'x', [[1, 2], [100]], dtype=dtype)) as source:
        assert source.dtype == source[1]['tokens'].dtype == np.dtype(dtype)
        assert [one['tokens'].tolist() for one in source] == [[1, 2], [100]]


def test_sizes_are_those_of_the_datapoints_and_nothing_is_read(fakegcs):
    folder = steady(fakegcs)
    paths = [write(folder, 'x', SEQUENCES, ENDS, MODES), write(folder, 'y', [[9]], modes=[0])]
    with granular.open(paths) as source:
        sizes, count, _ = requests(lambda: {key: source.sizes(key) for key in source.fields})
        assert count == 0
        for key, found in sizes.items():
            assert found.dtype == np.int64
            assert found.tolist() == [len(one[key]) for one in source]
        with pytest.raises(UnknownKeyError, match='nothing'):
            source.sizes('nothing')
    with granular.open(paths, sequences=True) as source:
        assert source.sizes('tokens').tolist() == [3, 0, 1, 2, 1, 1]
        with pytest.raises(UnknownKeyError, match="'mode'"):  # a number has no length
            source.sizes('mode')


@pytest.mark.parametrize('strategy', ['best_fit', 'concat_then_split'])
def test_rows_are_planned_by_the_sizes(tmp_path, strategy):
    tokens = np.split(np.arange(1, 5001), np.cumsum(np.random.default_rng(0).integers(1, 90, 100)))
    with granular.open(write(granular.Path(tmp_path), 'x', tokens)) as source:
        rows = granular.MapDataset.source(source).shuffle(seed=1).pack({'tokens': 5000}, strategy=strategy)
        packed = np.concatenate([row['tokens'][row['tokens_segment_ids'] > 0] for row in rows])
    assert sorted(packed.tolist()) == [*range(1, 5001)]


async def test_sizes_are_awaited_in_the_async_api(tmp_path):
    path = write(granular.Path(tmp_path), 'x', SEQUENCES, ENDS)
    async with aio.MegatronDataSource(path) as source:
        assert (await source.sizes('tokens')).tolist() == [3, 0, 3, 1]


def test_large_index_is_read_in_parts(fakegcs):
    folder = steady(fakegcs)
    lengths = np.random.default_rng(0).integers(0, 5, 30_000)
    tokens = np.split(np.arange(lengths.sum()) % 60_000, np.cumsum(lengths)[:-1])
    path = write(folder, 'x', tokens)
    assert path.stat().st_size > path.aio.store.config.tail
    source, count, _ = requests(lambda: granular.open(path))
    assert count <= 6
    order = np.random.default_rng(1).permutation(len(tokens))[:1000]
    assert [one['tokens'].tolist() for one in source.fetch(order)] == [tokens[i].tolist() for i in order]


def test_states_and_caches_tell_documents_from_sequences(tmp_path):
    path = write(granular.Path(tmp_path), 'x', SEQUENCES, ENDS)
    documents, sequences = (granular.open(path, sequences=flag) for flag in (False, True))
    assert repr(pickle.loads(pickle.dumps(sequences))) == repr(sequences) != repr(documents)
    assert len(pickle.loads(pickle.dumps(sequences))) == 5
    assert documents.aio.identity() != sequences.aio.identity()
    with iter(granular.MapDataset.source(documents).to_iter_dataset()) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(granular.MapDataset.source(sequences).to_iter_dataset()) as iterator, pytest.raises(StateError):
        iterator.set_state(state)


def test_other_division_of_the_same_data_is_another_source(tmp_path):
    folder = granular.Path(tmp_path)
    path = write(folder, 'x', [[1, 2], [3]])
    with granular.open(path) as source:
        identity, pickled = source.aio.identity(), pickle.dumps(source)
    path.write_bytes(megatron_index([1, 2], code=8))
    with granular.open(path) as source:
        assert source.aio.identity() != identity
    with pytest.raises(GranularError, match='was replaced since the reader was pickled'):
        pickle.loads(pickled)[0]


# --- names


@pytest.mark.parametrize('root', ['local', 'fakegcs', 'seaweed'], indirect=True)
@pytest.mark.parametrize('name', ['corpus', 'corpus.v2', 'corpus_text_document'])
def test_dataset_is_opened_by_either_name_and_by_their_beginning(root, name, tmp_path):
    root.mkdir(parents=True, exist_ok=True)
    write(root, name, SEQUENCES)
    for path in (root / name, root / f'{name}.idx', root / f'{name}.bin'):
        for source in (granular.open(path), granular.MegatronDataSource(path), granular.open(path, format='megatron')):
            with source:
                assert [one['tokens'].tolist() for one in source] == SEQUENCES
        assert granular.convert(path, tmp_path / 'out' / path.name.replace('.', '-')).datapoints == len(SEQUENCES)
    with pytest.raises(InvalidArgumentError, match='split: expected a folder or a pattern'):
        granular.open(root / name, split='train')


@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
def test_missing_file_of_the_two_is_named(root):
    root.mkdir(parents=True, exist_ok=True)
    for missing, other in (('.bin', '.idx'), ('.idx', '.bin')):
        write(root, 'x', SEQUENCES)
        (root / f'x{missing}').unlink()
        match = rf'x\{missing}: does not exist, beside .*x\{other}: copy both files'
        with pytest.raises(NotFoundError, match=match):
            granular.MegatronDataSource(root / f'x{other}')
    write(root, 'y', SEQUENCES)
    write(root, 'x', SEQUENCES)
    (root / 'x.bin').unlink()
    for path in (root, root / '*', root / '*.idx', [root / 'x.idx', root / 'y.idx']):
        with pytest.raises(NotFoundError, match=r'x\.bin: does not exist, beside .*x\.idx'):
            granular.open(path)
    for path in (root / 'none', root / 'none.idx', root / 'none.bin'):
        with pytest.raises(NotFoundError, match='none'):
            granular.open(path)


def test_warning_names_data_without_its_index(tmp_path, caplog):
    folder = granular.Path(tmp_path)
    write(folder, 'a', SEQUENCES)
    write(folder, 'b', SEQUENCES).unlink()
    assert len(granular.open(folder)) == len(SEQUENCES)
    assert caplog.messages == [f'{folder}: left out 1 file: b.bin (without b.idx, its index)']


def test_several_files_are_of_one_kind(tmp_path):
    folder = granular.Path(tmp_path)
    write(folder, 'a', SEQUENCES)
    write(folder, 'b', [], dtype='int32')  # without a sequence, it may be of any
    write(folder, 'c', SEQUENCES)
    with granular.open(folder / '?.idx') as source:
        assert len(source) == 2 * len(SEQUENCES)
        assert source.dtype == np.uint16
    for name, options, problem in (
        (
            'd',
            {'dtype': 'int32'},
            'expected tokens of uint16 without modes, as .*a.idx has, got tokens of int32 without',
        ),
        ('d', {'modes': MODES}, 'expected tokens of uint16 without modes, .* got tokens of uint16 with modes'),
    ):
        write(folder, name, SEQUENCES, **options)
        with pytest.raises(CorruptDatasetError, match=rf'd\.idx: {problem}'):
            granular.open(folder)


def test_both_files_of_a_dataset_are_not_two_datasets(tmp_path):
    path = write(granular.Path(tmp_path), 'x', SEQUENCES)
    data = path.with_suffix('.bin')
    for files in ([path, data], [data, path], [path, path.with_name('x')]):
        with pytest.raises(InvalidArgumentError, match='x.* and .*x.* are of one dataset: pass one of them'):
            granular.MegatronDataSource(files)
    with granular.MegatronDataSource([path, path]) as source:  # as any list, it is read as it is
        assert len(source) == 2 * len(SEQUENCES)


# --- bad input


def change(at, value):
    return lambda data: data[:at] + value + data[at + len(value) :]


BAD = {
    'magic': (change(0, b'TNTIDX\0\0\0'), None, CorruptError, r"x\.idx: is no index of Megatron: .*got b'TNTIDX"),
    'version': (change(9, b'\2'), None, UnsupportedError, r'x\.idx: expected version 1 of the index, got 2'),
    'code': (change(17, b'\11'), None, UnsupportedError, r'x\.idx: expected a code of a dtype from 1 to 8, got 9'),
    'code 0': (change(17, b'\0'), None, UnsupportedError, r'from 1 to 8, got 0'),
    'head': (lambda data: data[:20], None, CorruptError, r'x\.idx: is truncated: expected a head of 34 bytes, got 20'),
    'empty': (lambda data: b'', None, CorruptError, r"x\.idx: is no index of Megatron: .* got b''"),
    'index': (lambda data: data[:-1], None, CorruptError,
              r'x\.idx: is truncated or damaged: expected 134 bytes, or 139 with modes, for 5 sequences .*133'),
    'longer index': (lambda data: data + b'\0', None, CorruptError, r'expected 134 bytes, .* got 135'),
    'huge counts': (change(18, b'\xff' * 16), None, CorruptError, r'for 18446744073709551615 sequences'),
    'dtype': (change(17, b'\4'), None, CorruptError, r'x\.idx: sequence 1: expected it to begin at byte 12, .*got 6'),
    'length': (change(34, b'\xff' * 4), None, CorruptError, r'sequence 0: expected a length of 0 or more, got -1'),
    'pointer': (change(54 + 24, b'\0' * 8), None, CorruptError, r'sequence 3: .* to begin at byte 8, .* got 0'),
    'data': (None, lambda data: data[:-2], CorruptError,
             r'x\.bin: is truncated: .*x\.idx has 7 tokens of uint16, expected 14 bytes, got 12'),
    'longer data': (None, lambda data: data + b'\0', CorruptError,
                    r'x\.bin: is longer than its index tells: .* has 7 tokens .*, expected 14 bytes, got 15'),
    'no data': (None, lambda data: b'', CorruptError, r'x\.bin: is truncated: .*expected 14 bytes, got 0'),
    'last end': (change(126, struct.pack('<q', 4)), None, CorruptError,
                 r'x\.idx: expected ends of documents from 0 to 5, .* got from 0 to 4: pass sequences=True'),
    'first end': (change(94, struct.pack('<q', 1)), None, CorruptError, r'from 0 to 5, .* got from 1 to 5'),
    'middle end': (change(110, struct.pack('<q', 1)), None, CorruptError,
                   r'x\.idx: document 1: expected it to end at sequence 2 or later, got 1'),
}  # fmt: skip


@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
def test_bad_files_are_named_with_both_figures(root):
    root.mkdir(parents=True, exist_ok=True)
    for title, (of_index, of_data, kind, message) in BAD.items():
        path = write(root, 'x', SEQUENCES, ENDS)
        if of_index is not None:
            path.write_bytes(of_index(path.read_bytes()))
        if of_data is not None:
            data = path.with_suffix('.bin')
            data.write_bytes(of_data(data.read_bytes()))
        for read in (granular.open, granular.MegatronDataSource):
            with pytest.raises(kind, match=message):
                read(path)
                raise AssertionError(title)
        if ' end' in title:  # sequences need none
            with granular.open(path, sequences=True) as source:
                assert [one['tokens'].tolist() for one in source] == SEQUENCES


def test_index_without_any_end_of_a_document_is_refused(tmp_path):
    path = write(granular.Path(tmp_path), 'x', [], ends=[])
    with pytest.raises(CorruptError, match='expected ends of documents from 0 to 0, .* got none'):
        granular.open(path)


def test_large_file_of_another_kind_is_not_read_whole(fakegcs):
    folder = steady(fakegcs)
    (folder / 'x.idx').write_bytes(bytes(4 << 20))
    (folder / 'x.bin').write_bytes(b'x')

    def fail():
        with pytest.raises(CorruptError, match='is no index of Megatron'):
            granular.MegatronDataSource(folder / 'x.idx')

    _, _, size = requests(fail)
    assert size < 1 << 20


# --- Megatron itself


def random_documents(seed, most=4):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most, 60) if most > 1 else [1] * 60
    return [[rng.integers(0, 100, rng.integers(0, 40)).tolist() for _ in range(count)] for count in counts]


def test_what_megatron_writes_is_read(megatron, tmp_path):
    datasets = {dtype: (dtype, random_documents(i), False) for i, dtype in enumerate(DTYPES)}
    datasets |= {'modes': ('uint16', random_documents(8), True), 'plain': ('uint16', random_documents(9, 1), False)}
    datasets |= {'empty': ('int32', [], False), 'empty documents': ('int32', [[], []], False)}
    megatron.write(tmp_path, datasets)
    for name, (dtype, documents, modes) in datasets.items():
        with granular.open(tmp_path / f'{name}.idx') as source:
            assert source.dtype == np.dtype(dtype)
            assert [one['tokens'].tolist() for one in source] == [sum(document, []) for document in documents]
            if 'lengths' in source.fields:
                assert [one['lengths'].tolist() for one in source] == [[*map(len, document)] for document in documents]
            assert ('modes' in source.fields) == modes
            if modes:
                assert [one['modes'].tolist() for one in source] == [[*map(len, document)] for document in documents]
        with granular.open(tmp_path / f'{name}.idx', sequences=True) as source:
            assert [one['tokens'].tolist() for one in source] == [tokens for one in documents for tokens in one]


def test_layout_of_the_tests_is_that_of_megatron(megatron, tmp_path):
    folder = granular.Path(tmp_path)
    write(folder, 'a', SEQUENCES, ENDS)
    write(folder, 'b modes', SEQUENCES, ENDS, MODES)
    write(folder, 'c', [[1], [-2]], dtype='int64')
    assert megatron.read(tmp_path, ['a', 'b modes', 'c']) == {
        'a': ['uint16', SEQUENCES, None, ENDS],
        'b modes': ['uint16', SEQUENCES, MODES, ENDS],
        'c': ['int64', [[1], [-2]], None, [0, 1, 2]],
    }


def test_data_without_an_index_is_named_with_it(tmp_path):
    (tmp_path / 'x.bin').write_bytes(b'1234')
    with pytest.raises(NotFoundError, match=r'x.bin: unknown format: .*it needs x.idx beside it: copy both files'):
        granular.open(tmp_path / 'x.bin')
    with pytest.raises(InvalidArgumentError, match=r'y.bin: is the name of data of Megatron: pass y.idx'):
        granular.convert([np.zeros(3, np.int32)], tmp_path / 'y.bin')
