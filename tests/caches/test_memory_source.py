"""InMemoryDataSource: values in shared memory, their owners, and the processes that attach to them."""

import contextlib
import fcntl
import gc
import multiprocessing
import os
import pickle
import signal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular.errors import (
    AlreadyExistsError,
    ClosedError,
    DecodeError,
    EncodeError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
)
from granular.formats.serialization import decode, encode
from granular.grain.sources import SharedMemoryDataSource
from tests.support.caches import RUN, data_file, named_memory
from tests.support.tables import examples

PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False)
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(PLAIN, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(50))
@given(VALUES)
def test_values_round_trip(value):
    decoded = decode(encode(value))
    assert decoded == value
    assert repr(decoded) == repr(value)  # tuples and lists, True and 1, -0.0


@pytest.mark.parametrize(
    'value',
    [np.arange(6).reshape(2, 3), np.zeros((0, 3)), np.array(3.0), np.array(['a', 'bc']), np.array([b'a\0', b'bc']),
     np.array('2020-01-01', 'M8[D]'), np.arange(24).reshape(4, 6)[::2, ::3].T, np.zeros(3, '>u2')],
    ids=lambda value: f'{value.dtype}-{value.shape}',
)  # fmt: skip
def test_decoded_arrays_are_writable_and_independent(value):
    first, (second, [third]) = decode(encode((value, (value, [value]))))
    for decoded in (first, second, third):
        assert decoded.dtype == value.dtype
        assert decoded.shape == value.shape
        assert decoded.tobytes() == value.tobytes()
        assert decoded.flags.writeable
        assert not np.shares_memory(decoded, value)


def test_text_of_numpy_keeps_its_zeros():
    for value, plain in ((np.str_('a\0'), 'a\0'), (np.bytes_(b'a\0'), b'a\0')):
        assert [decode(encode(value)), *decode(encode([value]))] == [plain, plain]


def test_numpy_scalars_keep_their_type():
    for value in (np.float32(1.5), np.int8(-3), np.bool_(True), np.datetime64('2020-01-01')):
        decoded = decode(encode({'x': value}))['x']
        assert decoded == value
        assert type(decoded) is type(value)


@pytest.mark.parametrize('value', [object(), {1}, np.array([object()]), np.zeros(2, [('a', 'i4')]), [[{1}]]])
def test_unsupported_values_are_rejected(value):
    with pytest.raises(EncodeError):
        encode(value)


def test_deep_nesting_is_rejected():
    value = ()
    for _ in range(100):
        value = (value,)
    with pytest.raises(EncodeError, match='nests more than'):
        encode(value)


@settings(max_examples=examples(100))
@given(st.data())
def test_damaged_records_are_decode_errors(data):
    record = bytearray(encode({'x': np.arange(4), 'y': (1, 'two', b'3', 2**70), 'z': 1j}))
    for _ in range(data.draw(st.integers(1, 4))):
        record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(record)))
    with contextlib.suppress(DecodeError):
        decode(bytes(record[:cut]))


# --- the source -------------------------------------------------------------------------------------------------------

ELEMENTS = [b'zeros\0\0', b'', 'text', 3, 2.5, None, {'image': np.arange(12).reshape(3, 4), 'label': (1, [2])}]


def test_elements_of_any_type_are_stored():
    with SharedMemoryDataSource(ELEMENTS) as source:
        assert len(source) == 7
        assert [repr(item) for item in source] == [repr(item) for item in ELEMENTS]
        assert source[0] == b'zeros\0\0'
        assert source.fetch([-2, 3, 3]) == source.__getitems__([5, 3, 3]) == source._getitems([5, 3, 3]) == [None, 3, 3]
        decoded = source[6]['image']
        decoded[0, 0] = 99  # a copy for the caller
        assert source[6]['image'][0, 0] == 0
        with pytest.raises(OutOfRangeError):
            source[7]
        dataset = granular.MapDataset.source(source).shuffle(1).batch(7, batch_fn=list)
        assert sorted(map(repr, dataset[0])) == sorted(map(repr, ELEMENTS))


def test_another_process_attaches_by_name(program):
    with SharedMemoryDataSource([b'a\0', np.arange(3)], name=f'{RUN}-there') as source:
        code = (
            "import granular; s = granular.grain.sources.SharedMemoryDataSource(name=f'{RUN}-there'); s.unlink();"
            ' print(s, s[0], s[1].sum()); print(granular.grain.sources.SharedMemoryDataSource([1, 2]))'
        )
        out, error = program(code).communicate()
        assert (out.splitlines(), error) == ([f"{source!r} b'a\\x00' 3", repr(SharedMemoryDataSource([1, 2]))], '')
        # The other process removes it neither by unlink() nor at its end.
        assert SharedMemoryDataSource(name=f'{RUN}-there')[0] == b'a\0'
        with pytest.raises(AlreadyExistsError, match='there'):
            SharedMemoryDataSource([1], name=f'{RUN}-there')
    with pytest.raises(NotFoundError, match='there'):
        SharedMemoryDataSource(name=f'{RUN}-there')


def test_repr_depends_on_elements_only():
    first, second, other = (SharedMemoryDataSource(items) for items in ([1, b'a'], [1, b'a'], [1, b'b']))
    assert repr(first) == repr(second) != repr(other)
    assert first.name not in repr(first)
    stream = granular.MapDataset.source(first).to_iter_dataset()
    with iter(stream) as items:
        next(items)
        state = items.get_state()
    with iter(granular.MapDataset.source(second).to_iter_dataset()) as items:
        items.set_state(state)
        assert list(items) == [b'a']
    with iter(granular.MapDataset.source(other).to_iter_dataset()) as items, pytest.raises(granular.errors.StateError):
        items.set_state(state)


def test_pickles_as_its_name():
    source = SharedMemoryDataSource([b'x' * 10_000], name=f'{RUN}-pickled')
    data = pickle.dumps(source)
    assert len(data) < 200
    twin = pickle.loads(data)
    assert twin[0] == source[0]
    assert repr(twin) == repr(source)
    twin.close()
    assert SharedMemoryDataSource(name=f'{RUN}-pickled')[0] == source[0]
    source.unlink()
    assert source[0] == b'x' * 10_000
    with pytest.raises(NotFoundError):
        pickle.loads(data)
    source.close()
    source.close()
    with pytest.raises(ClosedError):
        source[0]


def total(source, queue):
    queue.put(sum(source))


def test_forked_and_unpickling_processes_share_the_memory(program):
    context = multiprocessing.get_context('fork')
    with SharedMemoryDataSource(range(100)) as source:
        queue = context.SimpleQueue()
        processes = [context.Process(target=total, args=(source, queue)) for _ in range(2)]
        for process in processes:
            process.start()
        assert [queue.get(), queue.get()] == [4950, 4950]
        for process in processes:
            process.join()
            process.close()
        queue.close()
        code = 'import pickle, sys; s = pickle.loads(bytes.fromhex(sys.argv[1])); print(repr(s), sum(s))'
        assert program(code, pickle.dumps(source).hex()).communicate() == (f'{source!r} 4950\n', '')
        assert sum(SharedMemoryDataSource(name=source.name)) == 4950


def test_collected_or_exited_owner_leaves_no_memory(program):
    source = SharedMemoryDataSource([1], name=f'{RUN}-brief')
    del source
    gc.collect()
    with pytest.raises(NotFoundError):
        SharedMemoryDataSource(name=f'{RUN}-brief')
    out, error = program(
        "import granular; s = granular.grain.sources.SharedMemoryDataSource([1], name=f'{RUN}-brief'); print(s[0])"
    ).communicate()
    assert (out, error) == ('1\n', '')


def test_memory_of_a_killed_owner_is_removed_by_the_next(program):
    process = program(
        'import granular, time;'
        " s = granular.grain.sources.SharedMemoryDataSource([1], name=f'{RUN}-killed');"
        ' print(s[0], flush=True); time.sleep(60)'
    )
    assert process.stdout.readline() == '1\n'
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with SharedMemoryDataSource([2], name=f'{RUN}-killed') as source:  # with the same name
        assert source[0] == 2


@pytest.mark.parametrize(
    ('args', 'error', 'message'),
    [(((),), None, ''), ((), InvalidArgumentError, 'elements'), (([{1}],), EncodeError, 'element 0: set')],
)  # fmt: skip
def test_argument_validation(args, error, message):
    if error is None:
        assert list(SharedMemoryDataSource(*args)) == []
    else:
        with pytest.raises(error, match=message):
            SharedMemoryDataSource(*args)


@pytest.mark.parametrize('name', ['', '../etc', 'a/b', 'a' * 200, 3])
def test_invalid_names_are_rejected(name):
    with pytest.raises(InvalidArgumentError, match='expected 1 to 160'):
        SharedMemoryDataSource([1], name=name)


def test_foreign_shared_memory_is_an_error(tmp_path):
    path = data_file(f'{RUN}-odd')
    with SharedMemoryDataSource([b'one', b'two'], name=f'{RUN}-odd'), open(path, 'rb') as file:
        whole = file.read()
    damaged = [
        b'x' * 16 + whole[16:],
        whole[:16] + (1).to_bytes(8, 'little') + whole[24:],  # the number of elements
        whole[:32] + (57).to_bytes(8, 'little') + whole[40:],  # where the first one begins
        whole[:40] + len(whole).to_bytes(8, 'little') + whole[48:-1],  # where the first one ends
        whole[:40] + (2 * len(whole)).to_bytes(8, 'little') + whole[48:],
        whole[:-1],
        whole + b'x',
    ]
    for content in (b'', b'granular-data-1\n', b'x' * 100, b'granular-data-1\n' + b'\xff' * 100, *damaged):
        with open(path, 'wb') as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # otherwise it would be removed as that of an ended process
            file.write(content)
            file.flush()
            with pytest.raises(granular.errors.CorruptError, match='odd'):
                SharedMemoryDataSource(name=f'{RUN}-odd')
    os.unlink(path)
    os.symlink(tmp_path, path)
    with pytest.raises(granular.errors.AccessDeniedError):
        SharedMemoryDataSource(name=f'{RUN}-odd')
    os.unlink(path)


@pytest.mark.parametrize('kind', [FileNotFoundError, FileExistsError, OSError, ObjectChangedError, AlreadyExistsError])
def test_error_of_the_elements_is_raised_unchanged(kind):
    class Elements(list):
        def __getitem__(self, index):
            raise error

    error, before = kind('mine'), named_memory()
    with pytest.raises(kind) as caught:
        SharedMemoryDataSource(Elements([1]))
    assert caught.value is error
    assert {path for path in named_memory() - before if 'draft' in path} == set()
