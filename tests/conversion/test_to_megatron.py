"""Conversion into datasets of Megatron: what is written is what is read, whole or not at all."""

import numpy as np
import pytest

import granular
from granular import aio
from granular.errors import AlreadyExistsError, DatapointError, InvalidArgumentError, StoreError
from tests.support.files import megatron_index

RNG = np.random.default_rng(0)
DOCUMENTS = [RNG.integers(0, 60_000, length).astype(np.uint16) for length in RNG.integers(0, 200, 300)]


def read(path, **options):
    with granular.open(path, **options) as source:
        return [one['tokens'].tolist() for one in source]


def dataset(folder):
    with granular.ShardedDatasetWriter(folder, {'tokens': 'array', 'title': 'utf8'}, shardlen=100) as writer:
        for i, tokens in enumerate(DOCUMENTS):
            writer.append({'tokens': tokens, 'title': f'title {i}'})
    return granular.MapDataset.source(granular.open(folder)).select(['tokens'])


async def asynchronous():
    for tokens in DOCUMENTS:
        yield {'tokens': tokens}


SOURCES = {
    'list of arrays': lambda folder: DOCUMENTS,
    'list of dicts': lambda folder: [{'tokens': tokens} for tokens in DOCUMENTS],
    'generator': lambda folder: ({'tokens': tokens} for tokens in DOCUMENTS),
    'async generator': lambda folder: asynchronous(),
    'pipeline': lambda folder: dataset(folder / 'pipeline'),
}


@pytest.mark.parametrize('kind', SOURCES)
def test_documents_of_any_source_are_written(kind, root, tmp_path):
    progress = []
    source = SOURCES[kind](granular.Path(tmp_path))
    done = granular.convert(source, root / 'x.idx', progress=progress.append)
    assert read(root / 'x.idx') == [tokens.tolist() for tokens in DOCUMENTS]
    assert (done.datapoints, sum(progress), done.spec) == (300, 300, {'tokens': 'array'})
    assert done.bytes == sum((root / name).stat().st_size for name in ('x.idx', 'x.bin'))
    assert (root / 'x.idx').read_bytes() == megatron_index([len(tokens) for tokens in DOCUMENTS], code=8)
    assert (root / 'x.bin').read_bytes() == b''.join(tokens.tobytes() for tokens in DOCUMENTS)


@pytest.mark.parametrize('dtype', ['uint8', 'int8', 'int16', 'int32', 'int64', 'float64', 'float32', 'uint16', '>i4'])
def test_dtype_of_the_tokens_is_kept(tmp_path, dtype):
    granular.convert([np.array([1, 2], dtype), np.array([100], dtype)], tmp_path / 'x.idx')
    with granular.open(tmp_path / 'x.idx') as source:
        assert source.dtype == np.dtype(dtype).newbyteorder('=')
        assert read(tmp_path / 'x.idx') == [[1, 2], [100]]


class Tensor:
    """An array of another library."""

    def __array__(self, dtype=None, copy=None):
        return np.arange(5)


def test_arrays_of_other_libraries_are_written(tmp_path):
    granular.convert([Tensor()], tmp_path / 'x.idx')
    assert read(tmp_path / 'x.idx') == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize('suffix', ['', '.idx'])
def test_conversion_there_and_back_is_the_same_to_the_byte(tmp_path, suffix):
    """By way of a dataset of granular, and directly: with lengths and modes of sequences."""
    (tmp_path / 'x.idx').write_bytes(megatron_index([3, 0, 1, 2, 1], [0, 2, 2, 4, 5], [0, 1, -1, 127, -128], 8))
    (tmp_path / 'x.bin').write_bytes(np.arange(7, dtype='<u2').tobytes())
    granular.convert(tmp_path / 'x.idx', tmp_path / f'y{suffix}')
    granular.convert(tmp_path / f'y{suffix}', tmp_path / 'z.idx')
    for name in ('.idx', '.bin'):
        assert (tmp_path / f'z{name}').read_bytes() == (tmp_path / f'x{name}').read_bytes()
    granular.convert(granular.open(tmp_path / 'x.idx', sequences=True), tmp_path / 'sequences.idx')
    expected = megatron_index([3, 0, 1, 2, 1], None, [0, 1, -1, 127, -128], 8)
    assert (tmp_path / 'sequences.idx').read_bytes() == expected


def test_megatron_reads_what_is_written(megatron, tmp_path):
    (tmp_path / 'x.idx').write_bytes(megatron_index([3, 0, 1], [0, 2, 2, 3], [0, 1, 2], 4))
    (tmp_path / 'x.bin').write_bytes(np.arange(4, dtype='<i4').tobytes())
    granular.convert(tmp_path / 'x', tmp_path / 'modes.idx')
    granular.convert(DOCUMENTS, tmp_path / 'plain.idx')
    granular.convert([], tmp_path / 'empty.idx')
    assert megatron.read(tmp_path, ['modes', 'plain', 'empty']) == {
        'modes': ['int32', [[0, 1, 2], [], [3]], [0, 1, 2], [0, 2, 2, 3]],
        'plain': ['uint16', [tokens.tolist() for tokens in DOCUMENTS], None, [*range(301)]],
        'empty': ['int32', [], None, [0]],
    }


def test_command_writes_them(tmp_path, granular_cli):
    (tmp_path / 'x.idx').write_bytes(megatron_index([3, 1]))
    (tmp_path / 'x.bin').write_bytes(b'abcd')
    code, out, _ = granular_cli('convert', tmp_path / 'x.idx', tmp_path / 'y.idx', '--dry-run')
    assert (code, 'would write 2 datapoints' in out, (tmp_path / 'y.bin').exists()) == (0, True, False)
    assert granular_cli('convert', tmp_path / 'x.idx', tmp_path / 'y.idx')[0] == 0
    assert (tmp_path / 'y.idx').read_bytes() == (tmp_path / 'x.idx').read_bytes()


TWO = np.arange(2, dtype=np.int32)
BAD = {
    'other dtype': (TWO.astype(np.int64), 'record 3: expected tokens of int32, as the first record has, got int64'),
    'dtype': (TWO.astype(np.uint32), 'record 3: expected tokens of uint8, .*, uint16, got uint32: convert them'),
    'text': (np.array(['a']), 'record 3: expected tokens of .* got <U1'),
    'list': ([1, 2], 'record 3: expected an array of tokens with one dimension, got list'),
    'bytes': (b'ab', 'record 3: expected an array of tokens with one dimension, got bytes'),
    'shape': (TWO[None], r'record 3: expected an array of tokens .* got one of shape \(1, 2\)'),
    'no tokens': ({'text': TWO}, r"record 3: expected an array, or one .* got the keys \['text'\]: choose"),
    'more keys': ({'tokens': TWO, 'title': 'x'}, r"got the keys \['tokens', 'title'\]"),
    'lengths': ({'tokens': TWO, 'lengths': [1, 2]}, r'expected lengths that add up to its 2 tokens, got \[1, 2\]'),
    'negative': ({'tokens': TWO, 'lengths': [3, -1]}, r'lengths: expected integers from 0 to 2147483647, got \[3, -'),
    'fraction': ({'tokens': TWO, 'lengths': [2.0]}, r'lengths: expected integers from 0'),
    'modes': ({'tokens': TWO, 'modes': [0]}, r'expected no modes, as the first record has none, got \[0\]'),
}  # fmt: skip


@pytest.mark.parametrize('title', BAD)
@pytest.mark.parametrize('root', ['local', 'fakegcs'], indirect=True)
def test_record_that_does_not_fit_is_named_and_nothing_is_left(root, title):
    root.mkdir(parents=True, exist_ok=True)
    record, message = BAD[title]
    with pytest.raises(
        DatapointError, match=rf'x\.idx: {message}' if message.startswith('record') else message
    ) as caught:
        granular.convert([TWO, TWO, TWO, record], root / 'x.idx')
    assert caught.value.index == 3
    assert [*root.rglob('*')] == []


def test_modes_are_of_all_documents_and_of_their_sequences(tmp_path):
    first = {'tokens': TWO, 'lengths': [1, 1], 'modes': [0, 1]}
    for record, message in (
        ({'tokens': TWO}, 'record 1: expected a mode for each of its 1 sequences, got None'),
        ({'tokens': TWO, 'modes': [0, 1]}, r'record 1: expected a mode for each of its 1 sequences, got \[0, 1\]'),
        ({'tokens': TWO, 'mode': 128}, r'record 1: modes: expected integers from -128 to 127, got \[128\]'),
    ):
        with pytest.raises(DatapointError, match=message):
            granular.convert([first, record], tmp_path / 'x.idx')


@pytest.mark.parametrize('name', ['x.idx', 'x.bin'])
def test_file_that_exists_is_not_replaced(root, name):
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b'kept')
    with pytest.raises(AlreadyExistsError, match=rf'{name}: exists already'):
        granular.convert(DOCUMENTS, root / 'x.idx')
    assert [path.name for path in root.rglob('*')] == [name]
    assert (root / name).read_bytes() == b'kept'


def test_index_that_another_writer_has_made_meanwhile_leaves_no_data(root):
    root.mkdir(parents=True, exist_ok=True)

    def records():
        yield TWO
        (root / 'x.idx').write_bytes(b'of another writer')

    with pytest.raises(AlreadyExistsError, match=r'x\.idx'):
        granular.convert(records(), root / 'x.idx')
    assert [path.name for path in root.rglob('*')] == ['x.idx']
    assert (root / 'x.idx').read_bytes() == b'of another writer'


def test_options_of_datasets_are_refused(tmp_path):
    options = {
        'spec': {'tokens': 'array'}, 'shardlen': 5, 'layout': 'columns', 'checksums': False, 'parallel': 2,
        'on_error': 'skip', 'decoders': granular.decoders, 'encoders': granular.encoders,
    }  # fmt: skip
    for name, value in options.items():
        with pytest.raises(InvalidArgumentError, match=rf'x\.idx: files of Megatron have no {name}: leave them out'):
            granular.convert(DOCUMENTS, tmp_path / 'x.idx', **{name: value})


async def test_error_of_the_source_leaves_nothing(tmp_path):
    async def records():
        yield TWO
        raise StoreError('lost')

    with pytest.raises(StoreError, match='lost'):
        await aio.convert(records(), tmp_path / 'x.idx')
    assert [*tmp_path.iterdir()] == []
