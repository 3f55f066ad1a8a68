"""Bags: records in every version and store, the number of requests, damage, appending and errors."""

import asyncio
import contextlib
import itertools
import os
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import granular
from granular import aio
from granular.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptBagError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
)
from tests.support.faults import FaultServer, md5_etag
from tests.support.small_parts import PART, small_parts, taken_by_moto
from tests.support.uploads import unfinished_uploads

RECORDS = st.lists(st.binary(max_size=30), max_size=25)


def fill(path, records, version=2):
    with granular.BagWriter(path, version) as writer:
        for i, record in enumerate(records):
            assert writer.append(record, flush=i % 3 == 0) == i
        assert len(writer) == len(records)
        return writer.size


@given(RECORDS, st.sampled_from([1, 2, 3]), st.booleans(), st.booleans(), st.data())
def test_any_records_round_trip_in_every_version(tmp_path, records, version, cache_index, cache_data, data):
    path = tmp_path / f'{len(os.listdir(tmp_path))}.bag'
    size = fill(path, records, version)
    with granular.BagReader(path, cache_index=cache_index, cache_data=cache_data) as reader:
        assert len(reader) == len(records)
        assert list(reader) == records
        assert [reader[i] for i in range(len(records))] == records
        assert reader.version == (1 if version == 2 and b'' in records else version)
        assert reader.size == size
        picks = data.draw(st.lists(st.integers(-len(records), len(records) - 1), max_size=9)) if records else []
        assert reader.fetch(picks) == [records[i] for i in picks]
        cut = data.draw(st.slices(len(records)))
        assert reader[cut] == records[cut]


@pytest.mark.parametrize(
    ('version', 'content'), [(1, bytes(8)), (2, b''), (3, b'')], ids=['version 1', 'version 2', 'version 3']
)
def test_empty_bag_has_no_records(tmp_path, version, content):
    fill(tmp_path / 'x.bag', [], version)
    assert (tmp_path / 'x.bag').read_bytes() == content
    with granular.BagReader(tmp_path / 'x.bag') as reader:
        assert len(reader) == 0
        assert list(reader) == []
        with pytest.raises(IndexError):
            reader[0]


def test_file_bytes_of_each_version(tmp_path):
    def limits(*ends):
        return np.array(ends, '<u8').tobytes()

    for version in (1, 2, 3):
        fill(tmp_path / f'{version}.bag', [b'ab', b'c'], version)
    assert (tmp_path / '1.bag').read_bytes() == b'abc' + limits(0, 2, 3)
    assert (tmp_path / '2.bag').read_bytes() == b'abc' + limits(2, 3)
    assert (tmp_path / '3.bag').read_bytes() == b'abc'
    assert (tmp_path / '3.idx').read_bytes() == limits(2, 3)


@pytest.mark.parametrize('cache_index', [True, False])
def test_bag_is_read_from_memory(tmp_path, cache_index):
    index = np.array([2, 3], '<u8').tobytes()
    content = b'abc' + index
    (tmp_path / 'x.bag').write_bytes(b'abc')
    (tmp_path / 'y.idx').write_bytes(index)
    assert list(granular.BagReader(content, cache_index)) == [b'ab', b'c']
    for source, table in itertools.product([b'abc', tmp_path / 'x.bag'], [index, tmp_path / 'y.idx']):
        assert list(granular.BagReader(source, cache_index, index=table)) == [b'ab', b'c']
    assert list(pickle.loads(pickle.dumps(granular.BagReader(content)))) == [b'ab', b'c']


@pytest.mark.parametrize('cache_index', [True, False])
def test_index_may_be_in_another_store(tmp_path, fakegcs, cache_index):
    records, folders = [b'a', b'', b'bc'], (tmp_path, fakegcs.place())
    for folder in folders:
        fill(folder / 'x.bag', records, 3)
    for one, other in itertools.permutations(folders):
        with granular.BagReader(one / 'x.bag', cache_index, index=other / 'x.idx') as reader:
            assert list(reader) == records


@pytest.mark.parametrize('version', [1, 2, 3])
@pytest.mark.parametrize('cache_index', [True, False])
def test_bag_round_trips_in_every_store(root, version, cache_index):
    records = [os.urandom(i % 50 + 1) for i in range(200)]
    root.mkdir(parents=True, exist_ok=True)
    fill(root / 'x.bag', records, version)
    with granular.BagReader(root / 'x.bag', cache_index=cache_index) as reader:
        assert list(reader) == records
        assert reader.fetch([7, 3, -1, 3]) == [records[i] for i in (7, 3, -1, 3)]
        with pytest.raises(OutOfRangeError, match='200'):
            reader[200]


@pytest.mark.parametrize(('records', 'requests'), [(100, 1), (20_000, 2)])
@pytest.mark.parametrize('version', [1, 2])
def test_opening_takes_at_most_two_round_trips(http, records, requests, version):
    fill(http.folder / 'x.bag', [b'x'] * records, version)
    reader = granular.BagReader(f'{http.endpoint}/x.bag')
    requested = [path for _, path, _ in http.requests if path == '/x.bag']
    assert len(requested) == requests
    assert len(reader) == records
    reader.close()


def test_reads_without_cached_index_request_only_needed_limits(http):
    records = [os.urandom(10_000) for _ in range(100)]
    fill(http.folder / 'x.bag', records)
    config = granular.IOConfig(tail=64, max_gap=0)
    with granular.BagReader(granular.Path(f'{http.endpoint}/x.bag', config=config), cache_index=False) as reader:
        http.requests.clear()
        assert reader.fetch([10, 11, 12, 50]) == [records[i] for i in (10, 11, 12, 50)]
        table = 1_000_000
        requested = [tuple(map(int, r.removeprefix('bytes=').split('-'))) for _, _, r in http.requests]
        assert sorted(b - a + 1 for a, b in requested if a >= table) == [16, 32]
        assert len(requested) == 4


def test_range_of_records_is_one_request(http):
    records = [os.urandom(1000) for _ in range(100)]
    fill(http.folder / 'x.bag', records)
    with granular.BagReader(f'{http.endpoint}/x.bag') as reader:
        http.requests.clear()
        assert reader[20:60] == records[20:60]
        assert len(http.requests) == 1


# --- corrupt bags


@pytest.mark.parametrize(
    ('content', 'match'),
    [
        (b'abc', '3 bytes'),
        (b'abc' + np.array([2, 99], '<u8').tobytes(), 'starts at 99'),
        (b'abcd' + np.array([2, 3], '<u8').tobytes(), 'starts at 3'),
        (b'abc' + np.array([3, 2, 3], '<u8').tobytes(), 'decrease, from 3 to 2'),
        (b'abc' + np.array([2**63 + 1, 3], '<u8').tobytes(), 'decrease'),
    ],
)
def test_corrupt_bag_is_an_error(tmp_path, content, match):
    (tmp_path / 'x.bag').write_bytes(content)
    with pytest.raises(CorruptBagError, match=match) as caught:
        granular.BagReader(tmp_path / 'x.bag')
    assert 'x.bag' in str(caught.value)


def test_last_limit_beyond_the_data_is_an_error(tmp_path):
    (tmp_path / 'x.bag').write_bytes(b'abc')
    (tmp_path / 'x.idx').write_bytes(np.array([2, 5], '<u8').tobytes())
    with pytest.raises(CorruptBagError, match='last limit is 5, but it has only 3'):
        granular.BagReader(tmp_path / 'x.bag')


def test_corrupt_uncached_table_is_an_error(tmp_path):
    (tmp_path / 'x.bag').write_bytes(b'abc' + np.array([2, 1, 3], '<u8').tobytes())
    with granular.BagReader(tmp_path / 'x.bag', cache_index=False) as reader:
        assert reader[0] == b'ab'
        with pytest.raises(CorruptBagError, match='record 1 has limits 2 to 1'):
            reader[1]
    (tmp_path / 'x.bag').write_bytes(b'abc')
    (tmp_path / 'x.idx').write_bytes(np.array([2, 5, -1, 3], '<i8').tobytes())
    with granular.BagReader(tmp_path / 'x.bag', cache_index=False) as reader:
        for index, limits in (1, '2 to 5'), (2, '5 to -1'), (3, '-1 to 3'):
            with pytest.raises(CorruptBagError, match=f'record {index} has limits {limits}, of 3 bytes'):
                reader[index]


def test_crashed_version_3_bag_is_read_up_to_its_last_complete_limit(tmp_path):
    (tmp_path / 'x.bag').write_bytes(b'abcdef')
    (tmp_path / 'x.idx').write_bytes(np.array([2, 3], '<u8').tobytes() + b'\x07\x00\x00')
    for cache_index in (True, False):
        with granular.BagReader(tmp_path / 'x.bag', cache_index=cache_index) as reader:
            assert list(reader) == [b'ab', b'c']


# --- appending to version 3


def test_appending_continues_a_bag(tmp_path):
    fill(tmp_path / 'x.bag', [b'ab', b'c'], 3)
    with granular.BagReader(tmp_path / 'x.bag') as early, granular.BagWriter(tmp_path / 'x.bag', 3) as writer:
        assert len(writer) == 2
        assert writer.append(b'def') == 2
        with granular.BagReader(tmp_path / 'x.bag') as late:
            assert list(late) == [b'ab', b'c', b'def']
        assert list(early) == [b'ab', b'c']


async def test_writers_that_open_a_bag_at_the_same_time_lose_no_record(tmp_path):
    async def append(records):
        while records:
            with contextlib.suppress(AlreadyExistsError):
                async with aio.BagWriter(tmp_path / 'x.bag', version=3) as bag:
                    await bag.append(records[-1])
                records.pop()
            await asyncio.sleep(0)

    every = [[f'{writer}, {i}'.encode() for i in range(10)] for writer in range(4)]
    await asyncio.gather(*(append(list(records)) for records in every))
    async with aio.BagReader(tmp_path / 'x.bag', verify=True) as reader:
        assert sorted(await reader.fetch(range(len(reader)))) == sorted(sum(every, []))


@pytest.mark.parametrize('resume', ['check', 'discard'])
def test_bag_of_another_version_is_not_appended_to(tmp_path, resume):
    fill(tmp_path / 'x.bag', [b'a', b'bc'])
    with pytest.raises(AlreadyExistsError, match=r'x\.bag: exists already, without the table x\.idx'):
        granular.BagWriter(tmp_path / 'x.bag', 3, resume)
    assert list(granular.BagReader(tmp_path / 'x.bag')) == [b'a', b'bc']


@pytest.mark.parametrize('version', [1, 2])
def test_bag_is_not_written_beside_the_table_of_another_one(root, version):
    root.mkdir(parents=True, exist_ok=True)
    fill(root / 'x.bag', [b'ab', b'c'], 3)
    (root / 'x.bag').unlink()
    with pytest.raises(AlreadyExistsError, match=r'x\.idx: exists already'):
        fill(root / 'x.bag', [b'defg'], version)
    (root / 'x.idx').unlink()
    fill(root / 'x.bag', [b'defg'], version)
    assert list(granular.BagReader(root / 'x.bag')) == [b'defg']


def crash(tmp_path):
    fill(tmp_path / 'x.bag', [b'ab', b'c'], 3)
    with open(tmp_path / 'x.bag', 'ab') as file:
        file.write(b'defg')
    with open(tmp_path / 'x.idx', 'ab') as file:
        file.write(b'\x07\x00')


def test_appending_identical_records_resumes(tmp_path):
    crash(tmp_path)
    with granular.BagWriter(tmp_path / 'x.bag', 3) as writer:
        assert [writer.append(record) for record in (b'de', b'fghi', b'j')] == [2, 3, 4]
    assert list(granular.BagReader(tmp_path / 'x.bag')) == [b'ab', b'c', b'de', b'fghi', b'j']
    assert (tmp_path / 'x.bag').read_bytes() == b'abcdefghij'


def test_checksums_are_added_for_records_of_any_size(tmp_path):
    records = [b'a', bytes(9 << 20), b'', b'b']
    with granular.BagWriter(tmp_path / 'x.bag', 3, checksums=False) as writer:
        for record in records:
            writer.append(record)
    with granular.BagWriter(tmp_path / 'x.bag', 3) as writer:
        writer.append(b'c')
    with granular.BagReader(tmp_path / 'x.bag', verify=True) as reader:
        assert [reader[i] for i in range(5)] == reader.fetch(range(5)) == [*records, b'c']


@pytest.mark.parametrize('size', [1, 4, 6, 8, 15, 20])
def test_checksums_that_do_not_fit_the_table_are_mended(tmp_path, size):
    """A writer that is killed may have written more of them than limits, or a part of one."""
    fill(tmp_path / 'x.bag', [b'ab', b'c'], 3)
    sums = tmp_path / 'x.crc'
    sums.write_bytes((sums.read_bytes() + bytes(16))[:size])
    with granular.BagWriter(tmp_path / 'x.bag', 3) as writer:
        writer.append(b'def')
    with granular.BagReader(tmp_path / 'x.bag', verify=True) as reader:
        assert reader.fetch(range(3)) == [b'ab', b'c', b'def']


def test_appending_different_records_is_an_error(tmp_path):
    crash(tmp_path)
    writer = granular.BagWriter(tmp_path / 'x.bag', 3)
    with pytest.raises(CorruptBagError, match='record 2 differs'):
        writer.append(b'dx')
    writer.aio  # noqa: B018
    with pytest.raises(CorruptBagError, match='4 bytes'):
        writer.close()
    assert list(granular.BagReader(tmp_path / 'x.bag')) == [b'ab', b'c']


def test_discarding_records_left_by_a_crash(tmp_path):
    crash(tmp_path)
    with granular.BagWriter(tmp_path / 'x.bag', 3, resume='discard') as writer:
        writer.append(b'new')
    assert list(granular.BagReader(tmp_path / 'x.bag')) == [b'ab', b'c', b'new']
    assert (tmp_path / 'x.bag').read_bytes() == b'abcnew'


# --- bad input


def test_unwritable_records_are_errors(tmp_path):
    with pytest.raises(InvalidArgumentError, match='version'):
        granular.BagWriter(tmp_path / 'x.bag', version=4)
    with granular.BagWriter(tmp_path / 'x.bag') as writer:
        with pytest.raises(InvalidArgumentError, match='str'):
            writer.append('text')
        writer.append(b'kept')
    with pytest.raises(AlreadyExistsError, match=r'x\.bag'):
        granular.BagWriter(tmp_path / 'x.bag')
    assert list(granular.BagReader(tmp_path / 'x.bag')) == [b'kept']


def test_failed_writer_leaves_no_file(root):
    root.mkdir(parents=True, exist_ok=True)
    with pytest.raises(RuntimeError, match='on purpose'), granular.BagWriter(root / 'x.bag') as writer:
        writer.append(bytes(9 << 20))
        raise RuntimeError('on purpose')
    assert not (root / 'x.bag').exists()
    assert [path.name for path in root.glob('*')] == []


def test_closed_readers_and_writers_raise(tmp_path):
    fill(tmp_path / 'x.bag', [b'a'])
    reader = granular.BagReader(tmp_path / 'x.bag')
    reader.close()
    reader.close()
    with pytest.raises(ClosedError, match=r'x\.bag'):
        reader[0]
    writer = granular.BagWriter(tmp_path / 'y.bag')
    writer.close()
    with pytest.raises(ValueError, match='closed'):
        writer.append(b'a')


def test_missing_bag_is_not_found(root):
    with pytest.raises(NotFoundError, match=r'x\.bag'):
        granular.BagReader(root / 'x.bag')


@pytest.mark.parametrize('index', [1.5, 'a', None])
def test_invalid_index_is_rejected(tmp_path, index):
    fill(tmp_path / 'x.bag', [b'a'])
    with pytest.raises(InvalidArgumentError):
        granular.BagReader(tmp_path / 'x.bag')[index]


def test_removed_or_truncated_local_file_is_an_error(tmp_path):
    fill(tmp_path / 'x.bag', [b'aaaa', b'bbbb'])
    reader = granular.BagReader(tmp_path / 'x.bag')
    (tmp_path / 'x.bag').unlink()
    assert reader[1] == b'bbbb'  # the descriptor is still open
    granular.aio.stores.local.files.files.forget(str(tmp_path / 'x.bag'))
    for ask in (lambda: reader[1], lambda: reader.fetch([1])):
        with pytest.raises(NotFoundError, match=r'x\.bag'):
            ask()
    fill(tmp_path / 'x.bag', [b'cccc', b'dddd'])
    with pytest.raises(ObjectChangedError, match=r'x\.bag'):
        reader[1]
    with granular.BagReader(tmp_path / 'x.bag') as reader:
        os.truncate(tmp_path / 'x.bag', 5)
        for ask in (lambda: reader[1], lambda: reader.fetch([1])):
            with pytest.raises(ObjectChangedError, match=r'x\.bag: it was replaced'):
                ask()


def test_bag_without_its_table_is_written_anew(bucket):
    path = bucket / 'x.bag'
    fill(path, [b'old'], 3)
    path.with_suffix('.idx').unlink()  # as if the writer was killed before its last request
    with pytest.raises(AlreadyExistsError, match=r"without its table x\.idx.*resume='discard'"):
        granular.BagWriter(path, 3)
    with granular.BagWriter(path, 3, resume='discard') as writer:
        writer.append(b'new')
    with granular.BagReader(path) as reader:
        assert list(reader) == [b'new']
    with pytest.raises(AlreadyExistsError, match='only bags of version 3 on a local disk'):
        granular.BagWriter(path, 3, resume='discard')


@pytest.mark.parametrize('records', [3, PART // 4 + 1])  # with checksums of one request, or of an upload in parts
@pytest.mark.parametrize('store', ['moto', 'fakegcs'])
def test_checksums_that_a_killed_writer_left_are_replaced(request, store, records):
    root = request.getfixturevalue(store).place()
    path = granular.Path(str(root), config=small_parts(granular.IOConfig()), **root.store.options) / 'x.bag'
    (root / 'x.crc').write_bytes(bytes(4 * records))
    with taken_by_moto(), granular.BagWriter(path) as writer:
        for i in range(records):
            writer.append(b'%d' % i, flush=False)
    with granular.BagReader(path, verify=True) as reader:
        assert reader.fetch([0, -1]) == [b'0', b'%d' % (records - 1)]

    assert unfinished_uploads(root) == []


def test_object_replaced_by_one_of_equal_size_is_detected(bucket):
    fill(bucket / 'x.bag', [b'aaaa', b'bbbb'])
    with granular.BagReader(bucket / 'x.bag') as reader:
        assert reader[1] == b'bbbb'
        (bucket / 'x.bag').unlink()
        fill(bucket / 'x.bag', [b'cccc', b'dddd'])
        with pytest.raises(ObjectChangedError, match=r'x\.bag'):
            reader[1]


class Rewriting(FaultServer):
    """Refuses one request, after all have arrived, and has other files from then on."""

    async def rewrite(self, writer, request):
        while len(self.ranges) < 2 or self.answered < 1:
            await asyncio.sleep(0)
        self.files = split_files(AFTER)
        await self.status(writer, request, 503)

    answered = 0

    async def good(self, writer, request, cut=None):
        await super().good(writer, request, cut)
        self.answered += 1


BEFORE, AFTER = [b'aa', b'bbbb', b'cc'], [b'1111', b'22', b'33']  # of the same size


def split_files(records):
    """Return the files of a bag of version 3."""
    limits = np.cumsum([len(record) for record in records]).astype('<u8')
    return {'x.bag': b''.join(records), 'x.idx': limits.tobytes()}


@pytest.mark.parametrize('options', [{}, {'cache_data': True}, {'cache_index': False}])
@pytest.mark.parametrize('late', ['.bag', '.idx'])
def test_bag_that_is_rewritten_while_its_two_files_are_requested_is_never_mixed(late, options):
    config = granular.IOConfig(backoff=0.001)
    with Rewriting(files=split_files(BEFORE)) as server:
        server.etag_of, server.aim = md5_etag, late
        server.script.append('rewrite')
        path = granular.Path('s3://bucket/x.bag', endpoint_url=server.endpoint, anon=True, config=config)
        with pytest.raises(ObjectChangedError, match='was replaced'), granular.BagReader(path, **options) as reader:
            list(reader)
        with granular.BagReader(path, **options) as reader:
            assert list(reader) == AFTER


@pytest.mark.parametrize('options', [{}, {'cache_data': True}, {'cache_index': False}])
def test_local_bag_that_is_rewritten_at_any_call_of_its_opening_is_never_mixed(tmp_path, options):
    """The calls are those of functions in Python: a bag is opened on the thread of its caller."""
    results = set()
    for at in itertools.count():
        for name, content in split_files(BEFORE).items():
            (tmp_path / name).write_bytes(content)
        calls = itertools.count()

        def rewrite(frame, event, argument, at=at, calls=calls):
            if event == 'call' and next(calls) == at:
                for name, content in split_files(AFTER).items():
                    (tmp_path / 'new').write_bytes(content)
                    os.replace(tmp_path / 'new', tmp_path / name)

        sys.setprofile(rewrite)
        try:
            with granular.BagReader(tmp_path / 'x.bag', **options) as reader:
                sys.setprofile(None)
                results.add(tuple(reader))
        except ObjectChangedError:
            results.add('changed')
        finally:
            sys.setprofile(None)
        if next(calls) <= at:
            break
    assert results == {tuple(BEFORE), tuple(AFTER), 'changed'}


# --- asynchronous


async def test_async_api(root):
    await aio.Path(root).mkdir(parents=True, exist_ok=True)
    async with aio.BagWriter(root / 'x.bag') as writer:
        for i in range(300):
            await writer.append(b'%d' % i)
    async with await aio.BagReader.open(root / 'x.bag') as reader:
        assert [record async for record in reader] == [b'%d' % i for i in range(300)]
        assert await reader.get(-1) == b'299'
        assert await reader.get(slice(0, 300, 100)) == [b'0', b'100', b'200']
    with pytest.raises(ClosedError):
        await reader.get(0)


async def test_unopened_async_reader_raises(tmp_path):
    fill(tmp_path / 'x.bag', [b'a'])
    reader = aio.BagReader(tmp_path / 'x.bag')
    with pytest.raises(ClosedError, match='not open yet'):
        len(reader)
    assert await reader.get(0) == b'a'
    assert len(reader) == 1
