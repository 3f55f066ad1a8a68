import itertools
import multiprocessing
import os
import pickle
import sys
import threading
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import aio
from granular.errors import (
    BucketNotFoundError,
    ClosedError,
    CorruptDatasetError,
    DatapointError,
    DecodeError,
    EncodeError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    SpecError,
    UnknownKeyError,
    UnknownTypeError,
)
from tests.support.tables import examples, pairwise

SPEC = {'title': 'utf8', 'label': 'int', 'data': 'bytes', 'frames': 'bytes[]', 'times': 'int[]'}
COLUMNS = {'title': 'utf8', 'label': 'int', 'data': 'bytes'}


def datapoint(i, spec=SPEC):
    whole = {
        'title': f'title {i}',
        'label': i,
        'data': bytes([i % 256]) * (i + 1),
        'frames': [b'%d-%d' % (i, j) for j in range(i % 5)],
        'times': list(range(i, i + i % 3)),
    }
    return {key: whole[key] for key in sorted(spec)}


def write(folder, count=20, layout='refs', **kwargs):
    spec = SPEC if layout == 'refs' else COLUMNS
    with granular.DatasetWriter(folder, spec, granular.encoders, layout=layout, **kwargs) as writer:
        for i in range(count):
            assert writer.append(datapoint(i, spec), flush=i % 4 == 0) == i
        assert len(writer) == count
    return spec


LAYOUTS = pytest.mark.parametrize('layout', ['refs', 'columns'])
CACHES = ({}, {'cache_index': False}, {'cache_keys': ('refs', 'label')})
EVERY_STORE = ('local', 'memory', 'moto', 'seaweed', 'fakegcs')


@pytest.mark.parametrize(
    ('root', 'layout', 'cache'),
    pairwise(itertools.product(EVERY_STORE, ['refs', 'columns'], CACHES)),
    indirect=['root'],
)
def test_dataset_round_trips_in_every_store(root, layout, cache):
    spec = write(root / 'ds', layout=layout)
    expected = [datapoint(i, spec) for i in range(20)]
    with granular.DatasetReader(root / 'ds', granular.decoders, **cache) as reader:
        assert reader.spec == dict(sorted(spec.items()))
        assert reader.layout == layout
        assert len(reader) == 20
        assert list(reader) == expected
        assert [reader[i] for i in range(20)] == expected
        picks = [3, 19, -20, 3, 7]
        assert reader.fetch(picks) == reader.__getitems__(picks) == reader._getitems(picks)
        assert reader.fetch(np.array(picks)) == [expected[i] for i in picks]
        assert reader[4:9, ('title', 'label')] == {
            'label': [4, 5, 6, 7, 8],
            'title': [f'title {i}' for i in range(4, 9)],
        }
        assert reader.size == sum(p.stat().size for p in (root / 'ds').iterdir() if p.suffix in ('.bag', '.idx'))


@LAYOUTS
def test_files_of_each_layout(tmp_path, layout):
    write(tmp_path / 'ds', layout=layout)
    names = {'refs': ['refs.bag', 'frames.bag', 'times.bag'], 'columns': ['data.idx', 'label.idx', 'title.idx']}[layout]
    bags = [name for name in ('data.bag', 'label.bag', 'title.bag', *names) if name.endswith('.bag')]
    checksums = [name.replace('.bag', '.crc') for name in bags]
    assert sorted(os.listdir(tmp_path / 'ds')) == sorted({'spec.json', *bags, *names, *checksums})


VALUES = st.fixed_dictionaries(
    {'a': st.integers(-(2**100), 2**100), 'b': st.text(max_size=5), 'c': st.lists(st.binary(max_size=5), max_size=4)}
)


@settings(max_examples=examples(40))
@given(st.lists(VALUES, max_size=12), st.booleans(), st.data())
def test_arbitrary_datapoints_round_trip(tmp_path, points, cache_index, data):
    folder = tmp_path / str(len(os.listdir(tmp_path)))
    with granular.DatasetWriter(folder, {'a': 'int', 'b': 'utf8', 'c': 'bytes[]'}, granular.encoders) as writer:
        for point in points:
            writer.append(point)
    with granular.DatasetReader(folder, granular.decoders, cache_index=cache_index) as reader:
        assert list(reader) == points
        if points:
            picks = data.draw(st.lists(st.integers(-len(points), len(points) - 1), max_size=8))
            keys = data.draw(st.sets(st.sampled_from('abc')))
            assert reader.fetch(picks, keys) == [{k: points[i][k] for k in sorted(keys)} for i in picks]


# --- masks


@pytest.fixture
def reader(tmp_path):
    write(tmp_path / 'ds')
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        yield reader


def test_masks_select_keys(reader):
    assert reader[9, {'title': True}] == {'title': 'title 9'}
    assert reader[9, ('label', 'title')] == reader[9, ['title', 'label']] == {'label': 9, 'title': 'title 9'}
    assert reader[9, {'title': True, 'label': False}] == {'title': 'title 9'}
    assert reader[9, 'title'] == {'title': 'title 9'}
    assert reader[9, ()] == {}
    assert reader.fetch([1, 2], ()) == [{}, {}]
    frames = [b'9-0', b'9-1', b'9-2', b'9-3']
    assert reader[9, {'frames': True}] == {'frames': frames}
    assert reader[9, {'frames': range(1, 3)}] == {'frames': frames[1:3]}
    assert reader[9, {'frames': range(4)}] == {'frames': frames}
    assert reader[9, {'frames': range(1, 10)}] == {'frames': frames[1:]}
    assert reader[9, {'frames': range(4, 10)}] == {'frames': []}
    assert reader.fetch([9, 4], {'frames': range(3, 2**62)}) == [{'frames': frames[3:]}, {'frames': [b'4-3']}]
    assert reader[9, {'frames': slice(2, None)}] == {'frames': frames[2:]}
    assert reader[9, {'frames': slice(-1, None)}] == {'frames': frames[-1:]}
    assert reader[9, {'frames': slice(1, 100)}] == {'frames': frames[1:]}
    assert reader[9, {'frames': range(0, 10, 3)}] == {'frames': frames[::3]}
    assert reader[9, {'frames': slice(None, None, -2)}] == {'frames': frames[::-2]}
    assert reader[9, {'frames': [3, 0, -1, 0]}] == {'frames': [frames[3], frames[0], frames[-1], frames[0]]}
    assert reader.fetch([9, 9], {'frames': np.array([2])}) == [{'frames': frames[2:3]}] * 2
    assert reader[9, {'frames': []}] == {'frames': []}
    assert reader.fetch([9, 4, 9], {'frames': range(1, 3)}) == [
        {'frames': frames[1:3]},
        {'frames': [b'4-1', b'4-2']},
        {'frames': frames[1:3]},
    ]


def test_available_reports_lengths_of_sequences(reader):
    assert reader.available(9) == {'data': True, 'frames': range(4), 'label': True, 'times': range(0), 'title': True}
    assert reader.available(-1)['frames'] == range(4)
    with pytest.raises(OutOfRangeError):
        reader.available(20)


@pytest.mark.parametrize(
    ('mask', 'error', 'builtin'),
    [
        ({'nope': True}, UnknownKeyError, KeyError),
        (('title', 'nope'), UnknownKeyError, KeyError),
        ({'title': range(2)}, InvalidArgumentError, ValueError),
        ({'frames': range(4, 0, -1)}, InvalidArgumentError, ValueError),
        ({'frames': [0, 4]}, OutOfRangeError, IndexError),
        ({'frames': [0.5]}, InvalidArgumentError, ValueError),
        ({'frames': range(3, 1)}, InvalidArgumentError, ValueError),
        ({'frames': 3}, InvalidArgumentError, ValueError),
        ({'frames': range(5, 7)}, OutOfRangeError, IndexError),
    ],
)
def test_invalid_masks_are_refused(reader, mask, error, builtin):
    for ask in (lambda: reader[9, mask], lambda: reader.fetch([9], mask)):
        with pytest.raises(error, match='nope|title|frames') as caught:
            ask()
        assert isinstance(caught.value, builtin)


def test_range_of_a_sequence_is_one_request(http):
    with granular.DatasetWriter(http.folder / 'ds', {'frames': 'bytes[]'}, granular.encoders) as writer:
        for _ in range(5):
            writer.append({'frames': [os.urandom(5000) for _ in range(60)]})
    with granular.DatasetReader(f'{http.endpoint}/ds', granular.decoders, cache_keys=['refs']) as reader:
        http.requests.clear()
        assert len(reader[3, {'frames': range(32, 42)}]['frames']) == 10
        assert len(http.requests) == 1
        assert http.requests[0][2] == f'bytes={5000 * (180 + 32)}-{5000 * (180 + 42) - 1}'


# --- requests


@LAYOUTS
def test_fetch_is_one_fan_out(http, layout):
    spec = write(http.folder / 'ds', 200, layout)
    config = granular.IOConfig(max_gap=0)
    folder = granular.Path(f'{http.endpoint}/ds', config=config)
    with granular.DatasetReader(folder, granular.decoders, cache_keys=['refs', 'label']) as reader:
        http.requests.clear()
        picks = np.random.default_rng(0).permutation(200)[:50]
        assert reader.fetch(picks, tuple(COLUMNS)) == [datapoint(i, COLUMNS) for i in picks]
        assert len(http.requests) <= 50 * 2
        assert not [path for _, path, _ in http.requests if 'label' in path or 'refs' in path]
        http.requests.clear()
        assert reader.fetch(range(40, 140), tuple(COLUMNS)) == [datapoint(i, COLUMNS) for i in range(40, 140)]
        assert len(http.requests) == 2
    assert set(COLUMNS) <= set(spec)


@pytest.mark.parametrize('age', [0, 60])
@LAYOUTS
def test_open_requests_each_file_once_and_verifies_consistency(http, layout, age):
    write(http.folder / 'ds', 50, layout)
    spec = http.folder / 'ds' / 'spec.json'
    os.utime(spec, (spec.stat().st_mtime - age,) * 2)
    granular.DatasetReader(f'{http.endpoint}/ds', granular.decoders).close()
    asked = [path.rpartition('/')[2] for _, path, _ in http.requests]
    files = {path.name for path in spec.parent.iterdir() if path.suffix != '.crc'} | {
        'refs.bag'
    }  # in which a dataset of columns has none
    assert set(asked) == files
    # The proof: the spec, and the references, which are asked for beside it; what was just written is asked for again.
    proof = 1 + (layout == 'refs') if age else len(files) - (layout == 'columns')
    assert len(asked) == len(files) + proof


# --- sharing, pickling, closing


@LAYOUTS
def test_reader_pickles_to_its_path_and_options(root, layout):
    spec = write(root / 'ds', layout=layout)
    reader = granular.DatasetReader(root / 'ds', granular.decoders, cache_keys=('label',))
    content = pickle.dumps(reader)
    for secret in (b'granular-secret', b'granular-key'):
        assert secret not in content
    if root.store.local:
        with pickle.loads(content) as twin:
            assert list(twin) == [datapoint(i, spec) for i in range(20)]
    reader.close()


def read_in_process(reader, connection):
    connection.send([point['label'] for point in reader.fetch([3, 1])])


def test_reader_works_in_a_spawned_process(tmp_path):
    write(tmp_path / 'ds')
    context = multiprocessing.get_context('spawn')
    parent, child = context.Pipe()
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        process = context.Process(target=read_in_process, args=(reader, child))
        process.start()
        assert parent.poll(30)
        assert parent.recv() == [3, 1]
        process.join()
    parent.close()
    child.close()


def test_copy_is_closed_independently(reader):
    twin = reader.copy()
    reader.close()
    assert twin[3] == datapoint(3)
    twin.close()
    with pytest.raises(ClosedError, match='ds'):
        twin[3]
    with pytest.raises(ValueError, match='closed'):
        reader.fetch([1])


def test_many_threads_read_concurrently(root):
    write(root / 'ds')
    failed = []
    with granular.DatasetReader(root / 'ds', granular.decoders) as reader:

        def work(seed):
            for i in np.random.default_rng(seed).integers(0, 20, 8).tolist():
                if reader[i] != datapoint(i) or reader.fetch([i, 0]) != [datapoint(i), datapoint(0)]:
                    failed.append(i)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


@pytest.mark.parametrize('kind', ['refs', 'columns', 'cached', 'indexed', 'bag', 'windows'])
def test_reader_that_another_thread_closes_is_a_closed_error(tmp_path, kind):
    path = tmp_path / 'x'
    layout = 'columns' if kind == 'columns' else 'refs'
    with granular.ShardedDatasetWriter(path, {'x': 'array'}, shardlen=5, layout=layout, index=kind == 'indexed') as w:
        for i in range(10):
            w.append({'x': np.arange(i)})
    whole = granular.ShardedDatasetReader(path)

    def opened():
        if kind == 'indexed':
            return granular.ShardedDatasetReader(path)
        if kind == 'bag':
            return granular.BagReader(path / '000000' / 'x.bag')
        if kind == 'windows':
            return granular.Windows(whole, {'x': 1})
        return granular.DatasetReader(path / '000000', cache_keys=('x', 'refs') if kind == 'cached' else ())

    def read(reader, errors):
        try:
            while True:
                reader[3], reader.fetch([3, 1])
        except Exception as error:
            errors.append(error)

    errors, interval = [], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(40):
            reader = opened()
            threads = [threading.Thread(target=read, args=(reader, errors)) for _ in range(2)]
            for thread in threads:
                thread.start()
            reader[4]
            reader.close()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert {type(error) for error in errors} == {ClosedError}


def test_indices_follow_sequences(reader):
    assert reader[np.int64(3)] == reader[-17] == datapoint(3)
    assert reader[::7, 'label'] == {'label': [0, 7, 14]}
    assert reader[50:60, 'label'] == {'label': []}
    for index in (20, -21, 10**30):
        with pytest.raises(IndexError):
            reader[index]
    with pytest.raises(IndexError, match='index 20 .* expected -20 to 19'):
        reader.fetch([1, 20])
    for index in ('a', 1.0, None):
        with pytest.raises(InvalidArgumentError):
            reader[index]
    with pytest.raises(InvalidArgumentError):
        reader.fetch([[1]])
    assert reader.fetch([]) == []


# --- custom encoders and decoders


def test_custom_types_are_encoded_and_decoded(tmp_path):
    spec = {'x': 'complex', 'y': 'complex[]'}
    encoders = {'complex': lambda value: repr(value).encode()}
    decoders = {'complex': lambda record: complex(record.decode())}
    with granular.DatasetWriter(tmp_path / 'ds', spec, encoders) as writer:
        writer.append({'x': 1 + 2j, 'y': [3j, 4j]})
    assert granular.DatasetReader(tmp_path / 'ds', decoders)[0] == {'x': 1 + 2j, 'y': [3j, 4j]}
    assert granular.DatasetReader(tmp_path / 'ds', None)[0] == {'x': b'(1+2j)', 'y': [b'3j', b'4j']}
    with pytest.raises(UnknownTypeError, match="'x' has type 'complex'") as caught:
        granular.DatasetReader(tmp_path / 'ds', granular.decoders)
    assert isinstance(caught.value, KeyError)


@pytest.mark.parametrize('index', [False, True])
def test_functions_that_are_given_for_keys_are_warned_of_once(tmp_path, index):
    with granular.ShardedDatasetWriter(
        tmp_path / 'ds', {'label': 'int', 'json': 'utf8'}, shardlen=1, index=index
    ) as writer:
        for i in range(3):
            writer.append({'label': i, 'json': ''})
    with pytest.warns(
        UserWarning, match=r"by type: those of \['label'\] have no effect, .*types such as 'int'$"
    ) as caught:
        warnings.simplefilter('default')
        with granular.open(tmp_path / 'ds', {**granular.decoders, 'label': str}) as reader:
            assert reader[2]['label'] == 2
    assert len(caught) == 1
    with pytest.warns(UserWarning, match='encoders and decoders are found by type'):
        granular.DatasetWriter(tmp_path / 'x', {'label': 'int'}, {**granular.encoders, 'label': str})
    with granular.open(tmp_path / 'ds', {**granular.decoders, 'json': str, 'pose': str}) as reader:  # of other datasets
        assert reader[0]['json'] == ''
    with pytest.raises(UnknownTypeError, match=r"expected one of: label; \['label'\] are keys, not types$"):
        granular.open(tmp_path / 'ds', {'label': str})


def test_reader_without_decoders_returns_bytes(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'anything'}, None) as writer:
        writer.append({'x': b'raw'})
        with pytest.raises(EncodeError, match='expected bytes'):
            writer.append({'x': 'text'})
    assert list(granular.DatasetReader(tmp_path / 'ds', None)) == [{'x': b'raw'}]


@LAYOUTS
def test_refused_value_leaves_nothing_in_any_column(tmp_path, layout):
    with granular.DatasetWriter(tmp_path / 'ds', COLUMNS, granular.encoders, layout=layout) as writer:
        writer.append({'data': b'1', 'label': 1, 'title': 'one'})
        with pytest.raises(EncodeError, match="datapoint 1, key 'title'") as caught:
            writer.append({'data': b'2', 'label': 2, 'title': 2})
        assert isinstance(caught.value, ValueError)
        writer.append({'data': b'3', 'label': 3, 'title': 'three'})
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        assert [point['label'] for point in reader] == [1, 3]
        assert {len(bag) for bag in reader.aio.bags.values()} == {2}


def test_failed_generator_leaves_nothing(tmp_path):
    def frames():
        yield b'1'
        raise OSError('the camera')

    with granular.DatasetWriter(tmp_path / 'ds', {'frames': 'bytes[]'}, granular.encoders) as writer:
        with pytest.raises(OSError, match='camera'):
            writer.append({'frames': frames()})
        writer.append({'frames': iter([b'2', b'3'])})
    assert list(granular.DatasetReader(tmp_path / 'ds', granular.decoders)) == [{'frames': [b'2', b'3']}]


def test_refused_record_leaves_the_writer_usable(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'utf8'}, {'utf8': lambda value: value}) as writer:
        writer.append({'x': b'fine'})
        writer.append({'x': b'\xff'})
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        assert reader[0] == {'x': 'fine'}
        for ask in (lambda: reader[1], lambda: reader.fetch([0, 1])):
            with pytest.raises(
                DecodeError,
                match=r"ds: datapoint 1, key 'x' \(1 bytes\): not decoded as 'utf8': .*\non_error='skip' of a",
            ):
                ask()


@pytest.mark.parametrize('decode', [granular.formats.decode_utf8, lambda record: record.decode()])
def test_decode_error_of_a_batch_names_shard_and_datapoint(tmp_path, decode):
    with granular.ShardedDatasetWriter(tmp_path, {'x': 'bytes[]', 'y': 'bytes'}, None, shardlen=3) as writer:
        for i in range(9):
            writer.append({'x': [b'a'] * (i % 3) + [b'\xff'] * (i == 7), 'y': b'\xff' if i == 5 else b'b'})
    with granular.ShardedDatasetReader(tmp_path, {'bytes': decode}) as reader:
        with pytest.raises(DecodeError, match=r"000002: datapoint 1, key 'x' \(1 bytes\)"):
            reader.fetch([8, 0, 4, 7, 6])
        with pytest.raises(DecodeError, match=r"000001: datapoint 2, key 'y' \(1 bytes\)"):
            reader.fetch([8, 0, 5, 4])
        assert reader.fetch([8, 0]) == [{'x': ['a', 'a'], 'y': 'b'}, {'x': [], 'y': 'b'}]


# --- bad input when writing


@pytest.mark.parametrize(
    ('spec', 'layout'),
    [({}, 'refs'), ({'A': 'int'}, 'refs'), ({'a/b': 'int'}, 'refs'), ({'refs': 'int'}, 'refs'), ({'a': 3}, 'refs'),
     ({'a': 'int[]'}, 'columns'), ({'a': ''}, 'refs')],
)  # fmt: skip
def test_invalid_specs_are_refused(tmp_path, spec, layout):
    with pytest.raises(SpecError):
        granular.DatasetWriter(tmp_path / 'ds', spec, granular.encoders, layout=layout)
    assert not (tmp_path / 'ds').exists()


def test_refs_is_an_ordinary_key_in_the_columns_layout(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'refs': 'int'}, granular.encoders, layout='columns') as writer:
        writer.append({'refs': 7})
    assert list(granular.DatasetReader(tmp_path / 'ds', granular.decoders)) == [{'refs': 7}]


def test_datapoints_with_wrong_keys_are_refused(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', COLUMNS, granular.encoders) as writer:
        for point in ({'data': b''}, {**datapoint(0, COLUMNS), 'more': 1}, {'data': b'', 7: 1, 'more': 2}, [1], None):
            with pytest.raises(DatapointError):
                writer.append(point)
        assert len(writer) == 0


@pytest.mark.parametrize('value', [7, None, 'text', b'bytes', {'a': 1}, np.array(7)], ids=str)
def test_value_that_is_not_a_sequence_is_an_encode_error(tmp_path, value):
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'int[]'}, granular.encoders) as writer:
        with pytest.raises(EncodeError, match=r"ds: datapoint 0, key 'x': expected a sequence of values for 'int\[\]'"):
            writer.append({'x': value})
        assert len(writer) == 0


def test_existing_folder_is_written_to(root):
    write(root / 'ds', 3)
    for layout in ('refs', 'columns'):
        with pytest.raises(FileExistsError, match='ds'):
            granular.DatasetWriter(root / 'ds', COLUMNS, granular.encoders, layout=layout)
    assert len(granular.DatasetReader(root / 'ds', granular.decoders)) == 3


def test_unknown_type_is_named_in_the_error(tmp_path):
    with pytest.raises(UnknownTypeError, match="'nope'"):
        granular.DatasetWriter(tmp_path / 'ds', {'x': 'nope'}, granular.encoders)
    assert not (tmp_path / 'ds').exists()


@LAYOUTS
def test_failed_writer_leaves_no_dataset(root, layout):
    with pytest.raises(RuntimeError, match='on purpose'):
        with granular.DatasetWriter(root / 'ds', COLUMNS, granular.encoders, layout=layout) as writer:
            for _ in range(3):
                writer.append({'data': bytes(4 << 20), 'label': 1, 'title': 'x'})
            assert not (root / 'ds' / 'spec.json').exists()
            raise RuntimeError('on purpose')
    assert [path for path in root.glob('ds/*') if path.is_file()] == []
    with pytest.raises(NotFoundError, match=r'spec\.json'):
        granular.DatasetReader(root / 'ds', granular.decoders)
    write(root / 'ds', 2, layout)


def test_unfinished_dataset_is_not_a_dataset(root):
    writer = granular.DatasetWriter(root / 'ds', COLUMNS, granular.encoders)
    writer.append({'data': b'1', 'label': 1, 'title': 'x'})
    with pytest.raises(FileNotFoundError, match='not finished'):
        granular.DatasetReader(root / 'ds', granular.decoders)
    writer.close()
    assert len(granular.DatasetReader(root / 'ds', granular.decoders)) == 1


# --- appending in the columns layout


def test_writer_appends_to_an_existing_dataset(tmp_path):
    write(tmp_path / 'ds', 5, 'columns')
    with granular.DatasetWriter(tmp_path / 'ds', COLUMNS, granular.encoders, layout='columns') as writer:
        assert writer.append(datapoint(5, COLUMNS)) == 5
    assert list(granular.DatasetReader(tmp_path / 'ds', granular.decoders)) == [datapoint(i, COLUMNS) for i in range(6)]
    with pytest.raises(SpecError, match='not'):
        granular.DatasetWriter(tmp_path / 'ds', {'x': 'int'}, granular.encoders, layout='columns')


def uneven(tmp_path):
    write(tmp_path / 'ds', 5, 'columns')
    with granular.BagWriter(tmp_path / 'ds' / 'label.bag', 3) as bag:
        bag.append(granular.encoders['int'](5))


def test_uneven_columns_are_read_up_to_the_shortest(tmp_path):
    uneven(tmp_path)
    with pytest.warns(RuntimeWarning, match="'label': 6"):
        reader = granular.DatasetReader(tmp_path / 'ds', granular.decoders)
    assert len(reader) == 5


def test_uneven_columns_are_verified_before_appending(tmp_path):
    uneven(tmp_path)
    writer = granular.DatasetWriter(tmp_path / 'ds', COLUMNS, granular.encoders, layout='columns')
    assert len(writer) == 5
    with pytest.raises(CorruptDatasetError, match='label'):
        writer.append({**datapoint(5, COLUMNS), 'label': 77})
    writer.aio  # noqa: B018
    with pytest.raises(ClosedError):
        writer.close()
    with granular.DatasetWriter(tmp_path / 'ds', COLUMNS, granular.encoders, layout='columns') as writer:
        writer.append(datapoint(5, COLUMNS))
    assert len(granular.DatasetReader(tmp_path / 'ds', granular.decoders)) == 6


# --- corrupt datasets


def test_missing_bag_is_corruption(tmp_path):
    write(tmp_path / 'ds')
    (tmp_path / 'ds' / 'title.bag').unlink()
    with pytest.raises(CorruptDatasetError, match=r'title'):
        granular.DatasetReader(tmp_path / 'ds', granular.decoders)


def test_column_without_its_table_is_corruption(root):
    """Also if its bytes are those of a bag that has its table at the end."""
    with granular.BagWriter(root / 'single.bag') as bag:
        bag.append(b'another')
        bag.append(b'record')
    with granular.DatasetWriter(root / 'ds', {'x': 'bytes'}, granular.encoders, layout='columns') as writer:
        writer.append({'x': (root / 'single.bag').read_bytes()})
    (root / 'ds' / 'x.idx').unlink()
    with pytest.raises(CorruptDatasetError, match=r'x\.idx'):
        granular.DatasetReader(root / 'ds', granular.decoders)
    with pytest.raises(NotFoundError, match=r'x\.idx'):
        granular.BagReader(root / 'ds' / 'x.bag', index=root / 'ds' / 'x.idx')


@pytest.mark.parametrize('content', [b'', b'nonsense', b'[]', b'{"a": 1}', b'{"../x": "int"}'])
def test_invalid_spec_is_corruption(tmp_path, content):
    write(tmp_path / 'ds')
    (tmp_path / 'ds' / 'spec.json').write_bytes(content)
    with pytest.raises(CorruptDatasetError, match=r'spec\.json'):
        granular.DatasetReader(tmp_path / 'ds', granular.decoders)


@pytest.mark.parametrize('refs', [[99], [-1], ['x'], [[0, 1]], [0, 0], 7])
def test_references_beyond_the_bag_are_corruption(tmp_path, refs):
    with granular.DatasetWriter(tmp_path / 'ds', {'a': 'int'}, granular.encoders) as writer:
        writer.append({'a': 1})
    (tmp_path / 'ds' / 'refs.bag').unlink()
    with granular.BagWriter(tmp_path / 'ds' / 'refs.bag') as bag:
        bag.append(granular.encoders['msgpack'](refs))
    reader = granular.DatasetReader(tmp_path / 'ds', granular.decoders)
    for ask in (lambda: reader[0], lambda: reader.fetch([0])):
        with pytest.raises(CorruptDatasetError, match='ds'):
            ask()


MISSING_BUCKET = {
    'DatasetReader': granular.DatasetReader,
    'ShardedDatasetReader': granular.ShardedDatasetReader,
    'open': granular.open,
    'open of a file': lambda path: granular.open(path / 'x.tar'),
    'open of a pattern': lambda path: granular.open(path / 'x-{0,1}.tar'),
    'convert': lambda path: granular.convert(path, 'converted'),
    'convert of a pattern': lambda path: granular.convert(path / '*.parquet', 'converted'),
    'copy': lambda path: path.copy('copied'),
    'copy_to_local': lambda path: granular.copy_to_local(path, 'copied'),
    'copy_to_local of a part': lambda path: granular.copy_to_local(path, 'copied', 'part'),
    'glob': lambda path: list(path.glob('*')),
    'load_state': granular.load_state,
    'verify': granular.verify,
}


@pytest.mark.parametrize('server', ['moto', 'azurite'])
@pytest.mark.parametrize('call', MISSING_BUCKET)
def test_missing_bucket_is_named(request, server, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    server = request.getfixturevalue(server)
    path = granular.Path(f'{server.scheme}://test-none-at-all/train', **server.options)
    with pytest.raises(BucketNotFoundError, match=r'no such (bucket .*: .* or create it|container)') as caught:
        MISSING_BUCKET[call](path)
    assert 'writer' not in str(caught.value)


def test_missing_dataset_is_not_found(root):
    with pytest.raises(NotFoundError, match=r'spec\.json'):
        granular.DatasetReader(root / 'none', granular.decoders)


def test_unknown_cache_keys_are_refused(tmp_path):
    write(tmp_path / 'ds')
    with pytest.raises(UnknownKeyError, match='nope'):
        granular.DatasetReader(tmp_path / 'ds', granular.decoders, cache_keys=['nope', 7])
    with pytest.raises(InvalidArgumentError, match='label'):
        granular.DatasetReader(tmp_path / 'ds', granular.decoders, cache_keys='label')


# --- asynchronous


@LAYOUTS
async def test_async_reader_and_writer(root, layout):
    spec = SPEC if layout == 'refs' else COLUMNS
    async with aio.DatasetWriter(root / 'ds', spec, granular.encoders, layout=layout) as writer:
        for i in range(20):
            await writer.append(datapoint(i, spec))
    expected = [datapoint(i, spec) for i in range(20)]
    async with await aio.DatasetReader.open(root / 'ds', granular.decoders) as reader:
        assert [point async for point in reader] == expected
        assert await reader.get(-1) == expected[-1]
        assert await reader.get(7, {'title'}) == {'title': 'title 7'}
        assert await reader.fetch([5, 4], ['label']) == [{'label': 5}, {'label': 4}]
        assert (await reader.available(3))['title'] is True
    with pytest.raises(ClosedError):
        await reader.fetch([1])


async def test_image_decoding_does_not_block_the_loop(tmp_path):
    names = set()

    def decode(record):
        names.add(threading.current_thread().name)
        return record

    async with aio.DatasetWriter(tmp_path / 'ds', {'x': 'mine'}, None) as writer:
        for _ in range(10):
            await writer.append({'x': b'1'})
    async with aio.DatasetReader(tmp_path / 'ds', {'mine': decode}) as reader:
        await reader.fetch(range(10))
        await reader.get(3)
    assert threading.current_thread().name not in names


@LAYOUTS
def test_dataset_with_an_empty_bag_opens(root, layout):
    spec = {'note': 'utf8', 'tags': 'utf8[]' if layout == 'refs' else 'bytes'}
    points = [{'note': f'{i}', 'tags': [] if layout == 'refs' else b''} for i in range(3)]
    with granular.ShardedDatasetWriter(root / 'ds', spec, granular.encoders, shardlen=2, layout=layout) as writer:
        for point in points:
            writer.append(point)
    for options in ({}, {'cache_index': False}, {'cache_keys': ('tags',)}):
        with granular.ShardedDatasetReader(root / 'ds', granular.decoders, **options) as reader:
            assert list(reader) == points


# --- indices of numpy


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int64])
def test_indices_of_any_integer_type(tmp_path, dtype):
    write(tmp_path / 'ds')
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        assert reader[dtype(3)] == datapoint(3)
        assert reader.fetch(np.array([5, 0], dtype)) == [datapoint(5), datapoint(0)]
        most = np.iinfo(dtype).max
        for ask in (lambda: reader.fetch(np.array([0, most], dtype)), lambda: reader[dtype(most)]):
            with pytest.raises(OutOfRangeError, match=f'index {most} is out of range'):
                ask()


@pytest.mark.parametrize('index', [2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 2**200])
def test_indices_beyond_64_bits_are_refused(tmp_path, index):
    write(tmp_path / 'ds')
    with granular.DatasetReader(tmp_path / 'ds', granular.decoders) as reader:
        with pytest.raises(OutOfRangeError):
            reader[index]
        for indices in ([index], [0, index], [index, -1]):
            with pytest.raises((OutOfRangeError, InvalidArgumentError)):
                reader.fetch(indices)
