"""Damaged states: one is refused with a ``StateError``, whatever the damage and the place where it is read."""

import asyncio
import copy
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import granular
from granular import aio
from granular.errors import GranularError, StateError
from granular.grain.experimental import ParquetIterDataset, TFRecordIterDataset
from tests.support.files import FILES
from tests.support.states import plain
from tests.support.streams import STREAMS, consume, running, save
from tests.support.tables import FULL_TABLES


def nested(levels: int) -> Any:
    value: Any = None
    for _ in range(levels):
        value = [value]
    return value


REMOVED = object()
VALUES: list[Any] = [
    REMOVED, None, True, False, -1, 0, 3, 10**9, 2**62, 2**63, 10**5000, 1.5, 1.0, float('nan'),
    float('inf'),
    '', 'x', '1', b'x', [], [0], [[]], {}, {'x': 1}, {'at': 1, 'hosts': 3}, {'at': None, 'hosts': 1},
    {'at': {'at': 1, 'hosts': 10**30}, 'hosts': 0}, nested(150), nested(5000),
]  # fmt: skip


def places(state: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if place and place[-1] == 'stages':
        return  # which describe the state, and restore nothing
    for key in state if isinstance(state, dict) else range(len(state)) if isinstance(state, list) else ():
        yield from places(state[key], (*place, key))


def changed(state: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    result = node = copy.deepcopy(state)
    for key in place[:-1]:
        node = node[key]
    if value is REMOVED:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    return result


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp('files')
    for number in range(3):
        table = pa.table({'x': list(range(6 * number, 6 * number + 6))})
        pq.write_table(table, folder / f'{number}.parquet', row_group_size=2)
    (folder / 'a.tfrecord').write_bytes(FILES['tfrecord'](range(6)))
    return folder


OF_FILES = {
    'Parquet': lambda folder: ParquetIterDataset(str(folder / '0.parquet')),
    'Parquet files': lambda folder: ParquetIterDataset([str(folder / f'{i}.parquet') for i in range(3)]),
    'TFRecord': lambda folder: TFRecordIterDataset(str(folder / 'a.tfrecord')),
    'rebatch': lambda folder: STREAMS['batch']().rebatch(3),
    'repeat': lambda folder: STREAMS['plain']().repeat(2),
    'limit': lambda folder: STREAMS['filter']().limit(6),
    'map_with_index': lambda folder: STREAMS['plain']().map_with_index(lambda i, x: (i, x)),
}


@pytest.mark.filterwarnings('ignore::RuntimeWarning')
@pytest.mark.parametrize('name', [name for name in (*STREAMS, *OF_FILES) if 'processes' not in name])
def test_changed_state_is_refused_or_continued(name: str, files: Any) -> None:
    def make() -> Any:
        return running(STREAMS[name]() if name in STREAMS else OF_FILES[name](files))

    most = 6 if name == 'Loader' else 30
    expected: list[Any] = []
    with make() as iterator:
        consume(iterator, expected, most)
    with make() as iterator:
        consume(iterator, [], 3)
        state = json.loads(json.dumps(save(iterator)))
        refused = 0
        changes = list(itertools.product(places(state), range(len(VALUES))))
        for place, number in changes:
            value, where = VALUES[number], f'{name}: {place}, value {number}'
            if value is REMOVED and not place:
                continue
            rest: list[Any] = []
            try:
                iterator.load_state_dict(changed(state, place, value))
                consume(iterator, rest, most - 3)
            except StateError:
                refused += 1
                continue
            except GranularError:  # of another position: streams of a zip that end apart, a byte within a record
                assert isinstance(value, int | dict), where
                continue
            if not (value is None or isinstance(value, int | dict)):  # another number may be another position
                assert plain(rest) == plain(expected[3:]), where
        iterator.load_state_dict(state)
        consume(iterator, rest := [], most - 3)
        assert plain(rest) == plain(expected[3:])
    assert refused > 100


def named() -> Any:
    parts = {'a': STREAMS['plain']().repeat(2), 'b': STREAMS['map']().repeat(2)}
    return granular.IterDataset.mix(parts, {'a': 2, 'b': 1})


def sharded() -> Any:
    return granular.MapDataset.range(30).to_iter_dataset(shard_options=granular.ShardOptions(1, 3))


NESTED = {
    'interleave of shards, repeated': lambda: granular.IterDataset.interleave(
        [sharded(), sharded().filter(lambda x: x % 3), sharded()], cycle_length=2
    ).repeat(2),
    'interleave of mixes': lambda: granular.IterDataset.interleave([named(), named(), sharded()], cycle_length=2),
    'mix of an interleave': lambda: granular.IterDataset.mix({'x': STREAMS['interleave'](), 'y': named()}),
    'cache of a mix': lambda: named().cache().repeat(2),
    'window of a mix': lambda: named().window_shuffle(4, seed=1),
    'rebatch of a mix': lambda: named().batch(2).rebatch(3),
    'pack of a mix': lambda: (
        named().map(lambda x: {'t': np.full(x % 3 + 1, x)}).pack({'t': 4}, num_packing_bins=2)
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', [name for name in (*NESTED, *STREAMS, *OF_FILES) if 'processes' not in name])
def test_state_that_lacks_a_part_is_refused_or_continued_exactly(name: str, files: Any) -> None:
    make = {**NESTED, **STREAMS}.get(name) or (lambda: OF_FILES[name](files))
    expected: list[Any] = []
    with running(make()) as iterator:
        consume(iterator, expected, 6 if name == 'Loader' else 30)
    for taken in (1, 3, 8, 11) if FULL_TABLES else (1, 8):
        with running(make()) as iterator:
            consume(iterator, [], taken)
            state = json.loads(json.dumps(save(iterator)))
            for place in places(state):
                rest: list[Any] = []
                try:
                    if place:
                        iterator.load_state_dict(changed(state, place, REMOVED))
                        consume(iterator, rest, len(expected[taken:]))
                except StateError:
                    continue
                assert not place or plain(rest) == plain(expected[taken:]), f'{name}: {place} after {taken}'


GOOD = '{"version": 1, "crc32c": "%s", "state": {"step": 4, "seed": 0}}'
DAMAGED: dict[str, bytes] = {
    'empty': b'',
    'zeros': bytes(64),
    'truncated': b'{"version": 1, "state": {"step": 4',
    'text behind it': b'{"version": 1, "state": {"step": 4}}}',
    'not UTF-8': b'{"version": 1, "state": {"step": 4, "x": "\xff"}}',
    'UTF-16': '{"version": 1, "state": {"step": 4}}'.encode('utf-16'),
    'nested': b'{"version": 1, "state": {"step": ' + b'[' * 100_000 + b']' * 100_000 + b'}}',
    'nested objects': b'{"version": 1, "state": ' + b'{"a": ' * 50_000 + b'1' + b'}' * 50_000 + b'}',
    'nested less': b'{"version": 1, "state": {"step": ' + b'[' * 600 + b']' * 600 + b'}}',
    'huge float': b'{"version": 1, "state": {"step": 1e999}}',
    'huge integer': b'{"version": 1, "state": {"step": 1' + b'0' * 5000 + b'}}',
    'large integer': b'{"version": 1, "state": {"step": 1' + b'0' * 400 + b'}}',
    'NaN': b'{"version": 1, "state": {"step": NaN}}',
    'infinite': b'{"version": 1, "state": {"step": -Infinity}}',
    'key twice': b'{"version": 1, "state": {"step": 4, "step": 8}}',
    'state twice': b'{"version": 1, "state": {"step": 4}, "state": {"step": 8}}',
    'other key': b'{"version": 1, "state": {"step": 4}, "other": 1}',
    'no version': b'{"state": {"step": 4}}',
    'other version': b'{"version": [1], "state": {"step": 4}}',
    'no state': b'{"version": 1}',
    'state is a list': b'{"version": 1, "state": [4]}',
    'state is null': b'{"version": 1, "state": null}',
    'a number': b'4',
    'a list': b'[1, 2]',
    'wrong checksum': b'{"version": 1, "crc32c": "00000000", "state": {"step": 4}}',
    'checksum is a list': b'{"version": 1, "crc32c": [[]], "state": {"step": 4}}',
    'checksum is null': b'{"version": 1, "crc32c": null, "state": {"step": 4}}',
}


READERS = {
    'load_state': granular.load_state,
    'load_state of other processes': lambda folder: granular.load_state(folder, granular.ShardOptions(0, 3)),
    'aio.load_state': lambda folder: asyncio.run(aio.load_state(folder)),
}


@pytest.mark.parametrize('read', READERS)
@pytest.mark.parametrize('kind', DAMAGED)
def test_damaged_file_is_refused_by_name_with_a_remedy(kind: str, read: str, tmp_path: Any) -> None:
    file = tmp_path / 'process_0-of-1.json'
    file.write_bytes(DAMAGED[kind])
    with pytest.raises(StateError, match='load an earlier state') as caught:
        READERS[read](tmp_path)
    assert str(caught.value).startswith(f'{file}')
    assert len(str(caught.value)) < 1000


def test_no_changed_bit_of_a_file_changes_its_state(tmp_path):
    with iter(STREAMS['mix by name']()) as iterator:
        consume(iterator, [], 3)
        state = iterator.get_state()
    file = tmp_path / granular.save_state(tmp_path, state).name
    data = file.read_bytes()
    for number in range(0, 8 * len(data), 1 if FULL_TABLES else 7):  # each byte, and each bit of some
        damaged = bytearray(data)
        damaged[number // 8] ^= 1 << number % 8
        file.write_bytes(damaged)
        try:
            assert granular.load_state(tmp_path) == state
        except StateError as error:
            assert str(file) in str(error)
    for length in range(0, len(data), 1 if FULL_TABLES else 5):
        file.write_bytes(data[:length])
        with pytest.raises(StateError):
            granular.load_state(tmp_path)


def test_state_of_an_earlier_release_has_no_checksum(tmp_path):
    (tmp_path / 'process_0-of-1.json').write_text('{"version": 1, "state": {"step": 4}}')
    assert granular.load_state(tmp_path) == {'step': 4}


def test_state_that_could_not_be_loaded_is_not_saved(tmp_path):
    for state in ({1: 1, '1': 2}, {'a': float('inf')}, {'a': 10**5000}, {'a': 10**400}, nested(900), nested(5000)):
        with pytest.raises(StateError, match='process_0-of-1.json'):
            granular.save_state(tmp_path, state)
    assert not list(tmp_path.iterdir())


def test_torch_dataset_refuses_what_is_not_its_state():
    from granular.integrations import torch

    dataset = torch.IterableDataset(granular.MapDataset.range(3))
    for value in VALUES:
        valid = type(value) is int and 0 <= value < 2**63
        for wrong in [value] if valid else [value, {'epoch': value}]:
            with pytest.raises(StateError):
                dataset.load_state_dict(wrong)
