"""A sharded dataset stays readable while shards are appended to it, and after an append that failed."""

import contextlib
import pickle

import pytest

import granular
from granular.errors import CorruptDatasetError, NotFoundError, StoreError
from tests.support.write_faults import WriteProxy

SPEC = {'a': 'int', 'b': 'utf8'}
LAYOUTS = ('refs', 'columns')


def point(i):
    return {'a': i, 'b': str(i)}


def open_writer(folder, layout='refs', **kwargs):
    return granular.ShardedDatasetWriter(folder, SPEC, granular.encoders, 5, layout=layout, **kwargs)


def write(folder, count, layout='refs', **kwargs):
    with open_writer(folder, layout, **kwargs) as writer:
        for i in range(writer.found, count):
            writer.append(point(i))


def count_of(folder, **kwargs):
    """Return the number of datapoints, all of which are right."""
    with granular.ShardedDatasetReader(folder, granular.decoders, **kwargs) as reader:
        datapoints = list(reader)
        assert datapoints == [point(i) for i in range(len(reader))]
    return len(datapoints)


def marker(folder):
    return folder / '000000' / '.granular-append'


@pytest.mark.parametrize('layout', LAYOUTS)
def test_dataset_stays_readable_while_shards_are_appended(root, layout):
    folder = root / 'ds'
    write(folder, 10, layout, index=not str(root).startswith('memory:'))  # which has no versions
    counts = []
    with open_writer(folder, layout) as writer:
        assert writer.found == 10
        counts.append(count_of(folder))
        for i in range(10, 17):
            writer.append(point(i))
            counts.append(count_of(folder, index=bool(i % 2)))
    assert counts[0] == 10
    assert counts == sorted(counts)
    assert all(count % 5 == 0 for count in counts)
    assert count_of(folder) == 17
    assert not marker(folder).exists()


@pytest.mark.parametrize('asks', [False, True])
@pytest.mark.parametrize(
    'open_one',
    [open_writer, lambda folder: open_writer(folder, 'columns'),
     lambda folder: granular.DatasetWriter(folder, SPEC, layout='columns')],
    ids=['refs', 'columns', 'one in columns'],
)  # fmt: skip
def test_writer_that_appends_to_a_finished_dataset_logs_its_length_unless_asked(tmp_path, caplog, open_one, asks):
    said = 'an earlier run finished it, with 12 datapoints: further ones are appended; skip the'
    for run in range(2):
        with open_one(tmp_path) as writer:
            assert not asks or writer.found == 12 * run
            for i in range(12):
                writer.append(point(i))
                assert caplog.text.count(said) == (run and not asks)
        assert len(caplog.records) == (run and not asks)


def test_unfinished_shard_that_is_being_appended_is_logged(tmp_path, caplog):
    write(tmp_path, 10)
    with open_writer(tmp_path) as writer:
        writer.append(point(10))
        assert count_of(tmp_path) == 10
    assert 'shard 000002 is not finished' in caplog.text
    assert 'reading the 2 shards before it' in caplog.text


def test_shards_behind_a_missing_one_are_logged(tmp_path, caplog):
    write(tmp_path, 5)
    with open_writer(tmp_path, shardstart=1, shardstep=2) as writer:
        for i in range(5, 20):
            writer.append(point(i))
    assert count_of(tmp_path) == 10
    assert 'shard 000002 is missing, and 2 shards follow it: reading the 2 shards before it' in caplog.text
    assert 'wrote fewer shards than the others' in caplog.text


@pytest.mark.parametrize('store', ['moto', 'fakegcs'])
def test_append_that_fails_while_publishing_keeps_the_dataset_readable(request, store):
    """Its bags stay, as its spec may have been published; the next writer replaces them."""
    server = request.getfixturevalue(store)
    folder = server.new_bucket() / 'ds'
    write(folder, 10)
    with WriteProxy(server) as proxy:
        writer = open_writer(proxy.place(folder, granular.IOConfig(attempts=2, backoff=0.001, retry_time=0.5)))
        for i in range(10, 13):
            writer.append(point(i))
        down = False

        def fail(call):
            nonlocal down
            names = f'{call.path}{call.query}'.encode() + call.body
            down = down or (call.method in ('PUT', 'POST') and b'spec.json' in names)
            return 'status 500' if down else ''

        proxy.plan = fail
        with pytest.raises(StoreError, match=r'spec\.json: not known to be published'):
            writer.close()
    assert not (folder / '000002' / 'spec.json').exists()
    assert (folder / '000002' / 'refs.bag').exists()
    assert count_of(folder) == 10
    write(folder, 13, resume='discard')
    assert count_of(folder) == 13
    assert not marker(folder).exists()


def test_append_that_cannot_check_its_claim_leaves_the_finished_shards_and_no_marker(fakegcs):
    """One failing request says nothing about others: each clean-up is tried, and its failure is noted."""
    folder = fakegcs.new_bucket() / 'ds'
    write(folder, 10)
    with WriteProxy(fakegcs) as proxy:
        writer = open_writer(proxy.place(folder, granular.IOConfig(attempts=2, backoff=0.001, retry_time=0.5)))
        writer.append(point(10))
        assert marker(folder).exists()
        proxy.plan = lambda call: 'status 500' if call.method == 'GET' and '.writer.' in call.path else ''
        with pytest.raises(StoreError, match=r'\.writer\.0\.1\.json') as caught:
            writer.close()
    assert [note.partition(':')[0] for note in caught.value.__notes__ if 'too' in note] == [
        'removing the claim of the writer failed, too'
    ]
    assert not (folder / '000002').exists()
    assert not marker(folder).exists()
    assert count_of(folder) == 10


def test_failed_block_leaves_the_finished_shards_and_no_marker(root):
    folder = root / 'ds'
    write(folder, 10)
    with pytest.raises(RuntimeError, match='on purpose'), open_writer(folder) as writer:
        for i in range(10, 17):
            writer.append(point(i))
        raise RuntimeError('on purpose')
    assert count_of(folder) == 15
    assert not marker(folder).exists()


def test_new_dataset_without_all_of_its_shards_is_refused(tmp_path):
    """Its first shards were never a dataset without the rest, whoever opens it again."""
    with open_writer(tmp_path, 'columns') as writer:
        for i in range(7):
            writer.append(point(i))
        for path in (tmp_path / '000000' / 'spec.json', tmp_path / '000001' / 'a.bag'):
            assert path.exists()
        with pytest.raises(NotFoundError, match=r'000001: has no spec\.json: its writer is running, or was killed'):
            count_of(tmp_path)
    (tmp_path / '000001' / 'spec.json').unlink()
    with open_writer(tmp_path, 'columns') as writer:
        for i in range(writer.found, 12):
            writer.append(point(i))
        with pytest.raises(NotFoundError, match='000002'):
            count_of(tmp_path)
    assert count_of(tmp_path) == 12


def test_damage_of_the_appended_dataset_itself_is_an_error(tmp_path):
    write(tmp_path, 10)
    with contextlib.suppress(RuntimeError), open_writer(tmp_path) as writer:
        writer.append(point(10))
        (tmp_path / '000001' / 'spec.json').unlink()
        with pytest.raises(NotFoundError, match='000001'):
            count_of(tmp_path)
        granular.Path(tmp_path / '000001').rmtree()
        with pytest.raises(CorruptDatasetError, match='000001 is missing'):
            count_of(tmp_path)
        raise RuntimeError


def test_series_of_shards_that_are_appended_keep_the_dataset_readable(root):
    folder = root / 'ds'
    write(folder, 10)
    with open_writer(folder, shardstart=3, shardstep=2) as odd, open_writer(folder, shardstart=2, shardstep=2) as even:
        for i in range(15, 20):
            odd.append(point(i))
        odd.close()
        assert count_of(folder) == 10
        for i in range(10, 15):
            even.append(point(i))
    assert count_of(folder) == 20
    assert not marker(folder).exists()


@pytest.mark.parametrize('index', [False, True])
def test_pickled_reader_ignores_shards_that_were_appended_since(tmp_path, index):
    write(tmp_path, 10, index=index)
    with granular.ShardedDatasetReader(tmp_path, granular.decoders) as reader:
        pickled = pickle.dumps(reader)
    with open_writer(tmp_path) as writer:
        for i in range(10, 17):
            writer.append(point(i))
        with pickle.loads(pickled) as reader:
            assert list(reader) == [point(i) for i in range(10)]
    with pickle.loads(pickled) as reader:
        assert list(reader) == [point(i) for i in range(10)]


def test_clean_keeps_the_marker_while_it_is_needed(tmp_path):
    write(tmp_path, 10)
    with open_writer(tmp_path) as writer:
        writer.append(point(10))
        assert granular.clean(tmp_path, older=0, remove=True) == []
        assert count_of(tmp_path) == 10
    (tmp_path / '000002' / 'spec.json').unlink()
    marker(tmp_path).write_text('{"shards": 2}')  # as after a kill
    assert count_of(tmp_path) == 10
    kinds = [leftover.kind for leftover in granular.clean(tmp_path, older=0)]
    assert kinds == ['draft', *['bag'] * 6]
    assert count_of(tmp_path) == 10
    assert [leftover.kind for leftover in granular.clean(tmp_path, older=0, remove=True)] == kinds
    assert not marker(tmp_path).exists()
    assert count_of(tmp_path) == 10


@pytest.mark.parametrize('store', ['moto', 'fakegcs'])
def test_unfinished_series_in_a_bucket_are_told_by_the_claims_of_their_writers(request, caplog, store):
    """The last shard is missing, and no other object says so."""
    folder = request.getfixturevalue(store).new_bucket() / 'ds'
    slow = open_writer(folder, shardstart=1, shardstep=2)
    with open_writer(folder, shardstart=0, shardstep=2) as writer:
        for i in range(5):
            writer.append(point(i))
    slow.append(point(5))
    assert count_of(folder) == 5
    claim = '.writer.1.2.json'
    assert [record.getMessage() for record in caplog.records if claim in record.getMessage()] == [
        f'{folder}: a writer or a copy has not finished, or was killed: run it again to continue it, or list what it '
        f'left with `granular clean` ({claim}): reading the shards that are finished'
    ]
    (problem,) = granular.verify(folder).problems
    assert problem.path == f'{folder}/{claim}'
    slow.close()
    caplog.clear()
    assert count_of(folder) == 6
    assert not caplog.records
    assert not granular.verify(folder).problems
