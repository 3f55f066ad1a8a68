"""Ray on a cluster of two nodes: reading, writing, conversion, and nodes that are killed meanwhile."""

import asyncio
import contextlib
import logging
import os
import pathlib
import pickle
import re
import shutil
import tempfile
import threading
import time
import tracemalloc
import types

import numpy as np
import psutil
import pyarrow.parquet
import pytest

import granular
from granular.errors import (
    AlreadyExistsError,
    CorruptDatasetError,
    DatapointError,
    DecodeError,
    EncodeError,
    FunctionError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
    UnknownKeyError,
    UnknownTypeError,
    WorkerError,
)
from tests import ROOT
from tests.pipeline.compositions.ray_train import ray_train
from tests.support.fault_proxy import FaultProxy

pytestmark = [
    pytest.mark.xdist_group('ray'),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings(r'ignore:`\w+` is deprecated'),  # of settings that Ray itself sets
]

SPEC = {
    'n': 'int', 'x': 'bytes', 'text': 'utf8', 'a': 'array', 'ragged': 'array', 'm': 'msgpack', 'words': 'utf8[]',
    'image': 'png',
}  # fmt: skip


def row(i):
    return {
        'n': i, 'x': bytes([i % 251]) * (i * 7919 % 500), 'text': f'nümber {i}', 'a': np.full((2, 3), i, np.float32),
        'ragged': np.arange(i % 4), 'm': {'half': i / 2}, 'words': [str(i)] * (i % 3),
        'image': np.full((3, 4, 3), i % 255, np.uint8),
    }  # fmt: skip


def plain(i):
    return {'id': i, 'x': bytes([i % 251]) * (i % 50)}


PLAIN = {'id': 'int', 'x': 'bytes'}


def equal(left, right):
    return left.keys() == right.keys() and all(np.array_equal(left[key], right[key]) for key in left)


def table(count):
    return pyarrow.Table.from_pylist([plain(i) for i in range(count)])


def written(folder, count, shardlen=30, spec=SPEC, make=row, **options):
    """Write a dataset with granular alone."""
    with granular.ShardedDatasetWriter(folder, spec, granular.encoders, shardlen=shardlen, **options) as writer:
        for i in range(count):
            writer.append(make(i), flush=False)
    return folder


def contents(root):
    root = granular.Path(root)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob('*') if path.is_file()}


class Nodes:
    """A cluster of two nodes with one processor each."""

    # Ray's functions for the exit of this process refer to its nodes. From Python 3.13 on, processes forked by
    # multiprocessing drop these functions, and crash if that collects a node: its gRPC client does not survive a fork.
    _started = []

    def __init__(self):
        from ray.cluster_utils import Cluster

        memory = 100 << 20
        self._options = {'num_cpus': 1, 'object_store_memory': memory}
        # Without what watches a cluster: its processes take a tenth of the processor's time.
        quiet = {'include_dashboard': False, 'include_log_monitor': False, 'no_monitor': True}
        self.cluster = Cluster(initialize_head=True, head_node_args={**self._options, **quiet})
        self._started.append(self.cluster.head_node)
        self._add()

    def _add(self, **options):
        node = self.cluster.add_node(**options, **self._options)
        self._started.append(node)
        return node

    @contextlib.contextmanager
    def victim(self):
        """Add a node, and yield its id with a function that kills it."""
        node = self._add()
        killed = []

        def kill():
            killed.append(node)
            self.cluster.remove_node(node, allow_graceful=False)

        try:
            yield node.node_id, kill
        finally:
            if not killed:
                kill()


@pytest.fixture(scope='module')
def nodes(seaweed):
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('RAY_USAGE_STATS_ENABLED', '0')
        patch.setenv('RAY_worker_niceness', '0')  # by default, workers wait for all other processes
        patch.setenv('RAY_enable_metrics_collection', '0')
        patch.setenv('RAY_health_check_period_ms', '100')  # a dead node is one that refused five of these checks
        # Paths are sent to the workers without credentials.
        patch.setenv('AWS_ENDPOINT_URL', seaweed.endpoint)
        patch.setenv('AWS_ACCESS_KEY_ID', seaweed.options['key'])
        patch.setenv('AWS_SECRET_ACCESS_KEY', seaweed.options['secret'])
        folder = tempfile.mkdtemp(prefix='ray-')  # short, as it holds sockets
        # Ray notes the address of each cluster in one file: that of this run is apart from other clusters here.
        patch.setenv('RAY_TMPDIR', folder)
        patch.delenv('RAY_ADDRESS', raising=False)
        nodes = Nodes()
        try:
            ray.init(address=nodes.cluster.address, log_to_driver=False, logging_level='error')
            context = ray.data.DataContext.get_current()
            context.enable_progress_bars = False
            yield nodes
        finally:
            ray.shutdown()
            nodes.cluster.shutdown()
            left = [process for process in psutil.process_iter(['cmdline']) if folder in str(process.info['cmdline'])]
            _, alive = psutil.wait_procs(left, 30)
            shutil.rmtree(folder)
    assert not alive


@pytest.fixture
def ray_(nodes):
    import granular.integrations.ray

    return granular.integrations.ray


@pytest.fixture
def data(nodes):
    import ray.data

    return ray.data


def test_other_clusters_of_this_machine_are_left_alone(nodes):
    place = pathlib.Path(tempfile.gettempdir(), 'ray', 'ray_current_cluster')
    assert not place.exists() or place.read_text().strip() != nodes.cluster.address


# --- reading


@pytest.mark.parametrize('store', ['local', 'seaweed'])
def test_read_datasets(store, ray_, request, tmp_path):
    root = granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).place()
    folder = written(root / 'train', 100, 60)
    dataset = ray_.read(folder, override_num_blocks=3)
    assert dataset.count() == 100  # known without a task
    stored = sum(array.nbytes for i in range(100) for array in (row(i)['a'], row(i)['image']))
    assert stored < dataset.size_bytes() < 20 * stored
    rows = dataset.take_all()
    assert len(rows) == 100
    assert all(map(equal, rows, map(row, range(100))))
    batch = next(iter(dataset.iter_batches(batch_size=64)))
    assert (batch['a'].shape, batch['a'].dtype) == ((64, 2, 3), np.float32)
    assert (batch['image'].shape, batch['image'].dtype) == ((64, 3, 4, 3), np.uint8)
    # More tasks than shards divide the shards, fewer take several.
    for blocks in (1, 7) if store == 'local' else (5,):
        again = ray_.read(folder, fields=['n'], override_num_blocks=blocks).take_all()
        assert again == [{'n': i} for i in range(100)]


def test_read_one_dataset_and_parts_of_sequences(ray_, tmp_path):
    with granular.DatasetWriter(tmp_path / 'one', {'n': 'int', 'words': 'utf8[]'}) as writer:
        for i in range(20):
            writer.append({'n': i, 'words': [f'{i}.{j}' for j in range(4)]})
    dataset = ray_.read(tmp_path / 'one', fields={'words': slice(1, 3)})
    assert dataset.take_all() == [{'words': [f'{i}.1', f'{i}.2']} for i in range(20)]
    raw = ray_.read(tmp_path / 'one', None, fields=['words']).take(1)
    assert raw == [{'words': [b'0.0', b'0.1', b'0.2', b'0.3']}]


class FailsElsewhere:
    """A decoder of integers that fails in other processes: at any value, or from one on."""

    def __init__(self, least):
        self.least, self.driver = least, os.getpid()

    def __call__(self, record):
        value = granular.decoders['int'](record)
        if value >= self.least and os.getpid() != self.driver:
            raise ValueError(f'{value} was read')
        return value


def rows_of(dataset, tasks, **options):
    """Return the rows of the read tasks, run in this process, and their blocks."""
    import granular.integrations.ray as integration

    tables = [table for task in integration.Datasource(dataset, **options).get_read_tasks(tasks) for table in task()]
    return [row for table in tables for row in table.to_pylist()], tables


@pytest.mark.parametrize(('store', 'layout'), [('local', 'refs'), ('local', 'columns'), ('seaweed', 'refs')])
def test_blocks_share_the_memory_of_raw_records(store, layout, request, tmp_path):
    """Records of any size, in one shard or in many, behind one another or not."""
    root = granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).place()
    spec, sizes = {'n': 'int', 'x': 'bytes', 'y': 'bytes'}, [0, 1, 17 << 20 if store == 'local' else 9, 0, 0, 300, 5]
    rows = [{'n': i, 'x': bytes([i]) * size, 'y': b'%d' % i} for i, size in enumerate(sizes)]
    for shardlen in (1, 3, 100) if store == 'local' else (3,):
        folder = written(root / 'train' / f'{shardlen}', len(rows), shardlen, spec, rows.__getitem__, layout=layout)
        for tasks in (1, 3):
            read, tables = rows_of(folder, tasks)
            assert read == rows
            assert all(table['x'].num_chunks == 1 for table in tables)  # Ray would copy several into one
        assert rows_of(folder, 2, verify=True)[0] == rows
        raw = [{key: granular.encoders[kind](row[key]) for key, kind in spec.items()} for row in rows]
        assert rows_of(folder, 2, decoders=None)[0] == raw
        assert rows_of(folder, 2, fields=['y'])[0] == [{'y': row['y']} for row in rows]
    if layout == 'refs':  # the values of the first shard, in another order than its datapoints
        bag = folder / '000000' / 'refs.bag'
        with granular.BagReader(bag) as reader:
            references = list(reader)
        bag.unlink()
        with granular.BagWriter(bag) as writer:
            for i in reversed(range(len(references))):
                writer.append(references[i])
        first = len(references)
        assert rows_of(folder, 1)[0] == rows[:first][::-1] + rows[first:]


def test_blocks_of_one_shard_are_not_copied(tmp_path):
    folder = written(tmp_path, 3, spec={'x': 'bytes'}, make=lambda i: {'x': bytes(2 << 20)})
    allocated = pyarrow.total_allocated_bytes()
    rows, tables = rows_of(folder, 1)
    assert [len(row['x']) for row in rows] == [2 << 20] * 3
    assert sum(table.nbytes for table in tables) >= 6 << 20  # they are still there
    assert pyarrow.total_allocated_bytes() - allocated < 1 << 20


def test_memory_of_a_plan_grows_with_the_tasks_and_not_with_tasks_times_shards(tmp_path):
    import granular.integrations.ray

    written(tmp_path, 1, 1, {'n': 'int'}, lambda i: {'n': i})
    for number in range(1, 1000):
        shutil.copytree(tmp_path / '000000', tmp_path / f'{number:06}')
    source = granular.integrations.ray.Datasource(tmp_path)
    tracemalloc.start()
    tasks = source.get_read_tasks(1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(tasks) == 1000
    assert peak < 1000 * 1000 * 8


def test_columns_and_limits_are_pushed_down(ray_, tmp_path):
    spec = {'n': 'int', 'text': 'utf8'}
    folder = written(tmp_path / 'x', 50, 10, spec, lambda i: {'n': i, 'text': str(i)})
    never = ray_.read(folder, {**granular.decoders, 'int': FailsElsewhere(0)})
    assert never.select_columns(['text']).take_all() == [{'text': str(i)} for i in range(50)]
    assert never.select_columns([]).count() == 50
    late = ray_.read(folder, {**granular.decoders, 'int': FailsElsewhere(5)}, override_num_blocks=1)
    # Ray passes a limit on through operations that keep the number of rows.
    assert late.map(lambda row: row).limit(5).take_all() == [{'n': i, 'text': str(i)} for i in range(5)]
    with pytest.raises(DecodeError, match='5 was read'):
        late.take_all()


def test_bad_reads(ray_, tmp_path):
    folder = written(tmp_path / 'x', 20, 10)
    with pytest.raises(NotFoundError, match='nothing'):
        ray_.read(tmp_path / 'nothing')
    with pytest.raises(UnknownKeyError, match="the mask has \\['z'\\]"):
        ray_.read(folder, fields=['n', 'z'])
    with granular.BagWriter(tmp_path / 'a.bag') as bag:
        bag.append(b'')
    with pytest.raises(InvalidArgumentError, match=r'a\.bag: expected a dataset of granular, got files for BagReader'):
        ray_.read(tmp_path / 'a.bag')
    dataset = ray_.read(folder)
    shutil.rmtree(folder)
    written(folder, 20, 10, make=lambda i: row(i + 1))
    with pytest.raises(ObjectChangedError):
        dataset.take_all()


def test_documentation(nodes, user_buckets):
    """The blocks of the page, which has no cluster in its own test."""
    text = (ROOT / 'docs' / 'frameworks.md').read_text().partition('## Ray\n')[2]
    block = re.search(r'^```python no-run\n(.*?)^```', text, re.MULTILINE | re.DOTALL)[1]
    with granular.DatasetWriter('s3://my-bucket/images', {'image': 'array', 'label': 'int'}) as writer:
        for i in range(256):
            writer.append({'image': np.full((8, 8), i, np.uint8), 'label': i % 10}, flush=False)
    with granular.Path('s3://my-bucket/rows.parquet').open('wb') as file:
        pyarrow.parquet.write_table(pyarrow.table({'n': list(range(10))}), file)
    exec(block, {})
    bright = granular.open('s3://my-bucket/bright')
    assert [point['label'] for point in bright] == [i % 10 for i in range(256)]
    assert bright[100]['image'].tolist() == [[178] * 8] * 8
    assert [point['n'] for point in granular.open('s3://my-bucket/converted')] == list(range(10))


def batch_of_forked_workers(folder):
    """Return the first batch of a Loader, and whether another process computed it."""
    source = granular.MapDataset.source(granular.open(folder)).map(
        lambda point: {'id': point['id'], 'pid': os.getpid()}
    )
    with granular.Loader(source, 4, mp='fork', workers=1) as loader:
        batch = next(loader)
    return batch['id'].tolist(), bool((batch['pid'] != os.getpid()).all())


@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
def test_forks_of_drivers_and_tasks(nodes, tmp_path):
    import ray

    folder = str(written(tmp_path / 'a', 4, spec=PLAIN, make=plain))
    assert batch_of_forked_workers(folder) == ([0, 1, 2, 3], True)
    assert ray.get(ray.remote(batch_of_forked_workers).remote(folder)) == ([0, 1, 2, 3], True)


# --- writing


@pytest.mark.parametrize(('store', 'layout'), [('local', 'refs'), ('local', 'columns'), ('seaweed', 'refs')])
def test_write_datasets(store, layout, ray_, data, request, tmp_path):
    """Shards do not depend on the blocks."""
    root = granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).place()
    spec = {key: kind for key, kind in SPEC.items() if layout == 'refs' or not kind.endswith('[]')}
    expected = written(root / 'expected', 100, 30, spec, lambda i: {k: row(i)[k] for k in spec}, layout=layout)
    dataset = ray_.read(expected, override_num_blocks=3).repartition(7)
    ray_.write(dataset, root / 'got', spec, shardlen=30, layout=layout)
    assert contents(root / 'got') == contents(expected)


def test_write_keeps_the_order_of_tasks_that_end_in_another_one(ray_, data, tmp_path):
    class Late:
        """The first block is computed last."""

        def __call__(self, batch):
            if batch['id'][0] == 0:
                while len(list((tmp_path / 'blocks').iterdir())) < 5:
                    time.sleep(0.01)
            (tmp_path / 'blocks' / str(batch['id'][0])).touch()
            return {'id': batch['id'], 'x': [plain(int(i))['x'] for i in batch['id']]}

    (tmp_path / 'blocks').mkdir()
    dataset = data.range(60, override_num_blocks=6).map_batches(Late(), batch_size=None)
    ray_.write(dataset, tmp_path / 'got', PLAIN, shardlen=25, checksums=True)
    assert contents(tmp_path / 'got') == contents(written(tmp_path / 'a', 60, 25, PLAIN, plain, checksums=True))
    assert granular.verify(tmp_path / 'got').checked == 180
    assert not dataset.context.execution_options.preserve_order


def test_empty_datasets(ray_, data, tmp_path):
    ray_.write(data.range(0), tmp_path / 'none', {'id': 'int'})
    seven = data.range(20).map_batches(lambda batch: {'id': batch['id'][batch['id'] == 7]})
    ray_.write(seven, tmp_path / 'one', {'id': 'int'}, shardlen=1)
    assert len(granular.open(tmp_path / 'none')) == 0
    assert list(granular.open(tmp_path / 'one')) == [{'id': 7}]
    assert ray_.read(tmp_path / 'none').count() == 0
    assert ray_.read(tmp_path / 'none').take_all() == []


def test_tasks_that_run_twice_or_die(ray_, data, tmp_path):
    class Twice(ray_.Datasink):
        """Each task runs twice, and the first attempt of one dies with its worker, halfway."""

        def write(self, blocks_, ctx):
            from ray.data.block import BlockAccessor

            blocks_ = list(blocks_)
            super().write(blocks_, ctx)
            if ctx.task_idx == 2 and not (tmp_path / 'died').exists():
                (tmp_path / 'died').touch()
                os._exit(1)
            assert sum(BlockAccessor.for_block(block).num_rows() for block in blocks_) == 10
            return super().write(blocks_, ctx)

    dataset = data.range(60, override_num_blocks=6).map(lambda row: plain(row['id']))
    dataset.context.execution_options.preserve_order = True
    dataset.write_datasink(Twice(tmp_path / 'got', PLAIN, shardlen=25))
    assert (tmp_path / 'died').exists()
    assert contents(tmp_path / 'got') == contents(written(tmp_path / 'expected', 60, 25, PLAIN, plain))


class Gate:
    """A function that records on which node an item is, and waits from an item on until a file appears."""

    def __init__(self, folder, start):
        self.folder, self.start = pathlib.Path(folder), start
        (self.folder / 'seen').mkdir()

    def __call__(self, i):
        import ray

        if i >= self.start:
            (self.folder / 'seen' / ray.get_runtime_context().get_node_id()).touch()
            while not (self.folder / 'open').exists():
                time.sleep(0.01)

    def wait(self, node, thread):
        """Wait until an item is on a node."""
        while not (self.folder / 'seen' / node).exists():
            assert thread.is_alive()
            time.sleep(0.01)

    def open(self):
        (self.folder / 'open').touch()


def in_thread(function, *args, **options):
    errors = []

    def call():
        try:
            function(*args, **options)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, errors


def test_a_node_killed_during_a_write_changes_nothing(nodes, ray_, data, tmp_path):
    gate = Gate(tmp_path, 40)

    def compute(row):
        gate(row['id'])
        return plain(row['id'])

    with nodes.victim() as (node, kill):
        dataset = data.range(120, override_num_blocks=12).map(compute)
        thread, errors = in_thread(ray_.write, dataset, tmp_path / 'got', PLAIN, shardlen=25)
        gate.wait(node, thread)
        kill()
        gate.open()
        thread.join()
    assert not errors
    assert contents(tmp_path / 'got') == contents(written(tmp_path / 'expected', 120, 25, PLAIN, plain))


def test_bad_writes_leave_nothing(ray_, data, tmp_path):
    dataset, target = data.range(30, override_num_blocks=3), tmp_path / 'got'
    for spec, error, message in (
        ({'n': 'int'}, DatapointError, r"missing keys \['n'\], unknown keys \['id'\]"),
        ({'id': 'utf8'}, EncodeError, "key 'id': not encoded as 'utf8': expected str, got int"),
        ({'id': 'foo'}, UnknownTypeError, "key 'id' has type 'foo'"),
    ):
        with pytest.raises(error, match=message):
            ray_.write(dataset, target, spec)
        assert contents(tmp_path) == {}
    with pytest.raises(InvalidArgumentError, match='shardlen: expected an integer >= 1, got 0'):
        ray_.write(dataset, target, {'id': 'int'}, shardlen=0)
    ray_.write(dataset, target, {'id': 'int'})
    before = contents(tmp_path)
    with pytest.raises(AlreadyExistsError, match='has a dataset already'):
        ray_.write(dataset, target, {'id': 'int'})
    first = ray_.Datasink(tmp_path / 'other', {'id': 'int'})
    first.on_write_start()
    with pytest.raises(AlreadyExistsError, match='another writer'):
        ray_.write(dataset, tmp_path / 'other', {'id': 'int'})
    first.abort()
    with granular.ShardedDatasetWriter(tmp_path / 'mine', {'id': 'int'}, shardlen=1, shardstart=3) as writer:
        writer.append({'id': 1})
    with pytest.raises(AlreadyExistsError, match='shards of an unfinished writer, such as 000003'):
        ray_.write(dataset, tmp_path / 'mine', {'id': 'int'})
    shutil.rmtree(tmp_path / 'mine')
    assert contents(tmp_path) == before


# SeaweedFS lists folders for a while after their last file.
@pytest.mark.parametrize('store', ['local', 'moto'])
def test_what_killed_writers_left_is_cleaned_or_replaced(store, ray_, data, request, tmp_path):
    """Parts, and the shards that were published before the first one."""
    root = granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).place()

    def left(target):
        # As in a worker, whose driver is killed then.
        sink = pickle.loads(pickle.dumps(ray_.Datasink(target, PLAIN)))
        for number in (1, 2):
            sink.write([table(5)], types.SimpleNamespace(task_idx=number))
        with granular.ShardedDatasetWriter(target, PLAIN, shardlen=5, shardstart=1) as writer:
            for i in range(10):
                writer.append(plain(i))

    left(root / 'a')
    assert granular.clean(root) == []  # too young
    leftovers = {(leftover.path, leftover.kind) for leftover in granular.clean(root, older=0)}
    assert leftovers == {(f'{root / name}', 'part') for name in contents(root)}
    assert {(leftover.path, leftover.kind) for leftover in granular.clean(root, older=0, remove=True)} == leftovers
    assert contents(root) == {}
    left(root / 'b')  # some servers remove the empty folders of deleted objects only later
    ray_.write(data.range(30).map(lambda row: plain(row['id'])), root / 'b', PLAIN, shardlen=20)
    assert granular.clean(root, older=0) == []
    expected = written(tmp_path / 'expected', 30, 20, PLAIN, plain)
    assert contents(root / 'b') == contents(expected)
    # Beside a dataset, the parts are leftovers, and nothing else is.
    part = pickle.loads(pickle.dumps(ray_.Datasink(root / 'b', PLAIN)))
    part.write([table(1)], types.SimpleNamespace(task_idx=0))
    assert granular.clean(root, older=0, remove=True)
    assert contents(root / 'b') == contents(expected)


def test_write_whose_parts_are_cleaned_meanwhile_fails(ray_, data, fakegcs):
    """``--older 0`` ignores the claim of a live writer. The first shard is not there yet when the folder is listed."""
    root, cleaned = fakegcs.place(), []

    def clean_once(call):
        if call.method == 'POST' and b'/ds/000000/' in call.body and not cleaned:
            cleaned.append(len(contents(root)))
            granular.clean(root, older=0, remove=True)
            cleaned.append(len(contents(root)))
        return ''

    with FaultProxy(fakegcs.endpoint, clean_once) as proxy:
        target = granular.Path(f'{root / "ds"}', **{**fakegcs.options, 'endpoint_url': proxy.endpoint})
        with pytest.raises(StoreError, match=r'/ds: .*spec.json was removed during the write, as by `granular clean`'):
            ray_.write(data.range(30).map(lambda row: plain(row['id'])), target, PLAIN, shardlen=10)
    assert cleaned[0] > cleaned[1] == 0
    assert contents(root) == {}


# --- conversion


class Records:
    """A source with random access, which can wait and fail."""

    def __init__(self, count, gate=None, wrong=None):
        self.count, self.gate, self.wrong = count, gate, wrong

    def __len__(self):
        return self.count

    def fetch(self, indices):
        if self.gate is not None and len(indices) > 1:  # not for the sample
            self.gate(max(indices))
        return [{'id': 'no', 'x': b''} if i == self.wrong else plain(i) for i in indices]


@pytest.mark.parametrize('store', ['local', 'seaweed'])
def test_convert_in_a_cluster(store, nodes, request, tmp_path):
    """The same bytes as in one process, also after an interruption."""
    root = granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).place()
    seen, options = [], {'shardlen': 10, 'checksums': True}
    expected = granular.convert(Records(95), tmp_path / 'expected', **options)
    done = granular.convert(Records(95), root / 'got', **options, engine='ray', progress=seen.append)
    assert (done.datapoints, done.shards, done.found, done.bytes) == (95, 10, 0, expected.bytes)
    assert sorted(seen) == [5] + [10] * 9
    assert contents(root / 'got') == contents(tmp_path / 'expected')
    for number in (1, 3, 7):
        (root / 'got' / f'{number:06}').rmtree()
    done = granular.convert(Records(95), root / 'got', **options, engine='ray', parallel=2)
    assert done.found == 65
    assert contents(root / 'got') == contents(tmp_path / 'expected')
    assert granular.convert(Records(95), root / 'got', **options, engine='ray').found == 95


def test_shards_of_several_reads(nodes, ray_, tmp_path):
    """A shard has more records than are read at a time, and more than a part."""
    records = [plain(i) for i in range(2500)]
    granular.convert(records, tmp_path / 'expected', shardlen=1200, spec=PLAIN)
    granular.convert(records, tmp_path / 'got', shardlen=1200, spec=PLAIN, engine='ray')
    assert contents(tmp_path / 'got') == contents(tmp_path / 'expected')
    ray_.write(ray_.read(tmp_path / 'got', override_num_blocks=4), tmp_path / 'again', PLAIN, shardlen=1200)
    expected = {name: data for name, data in contents(tmp_path / 'expected').items() if '/.' not in name}
    assert contents(tmp_path / 'again') == expected


def test_convert_files_by_relative_paths(nodes, granular_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for part in range(2):
        table = pyarrow.table({'n': list(range(part * 30, part * 30 + 30))})
        pyarrow.parquet.write_table(table, f'{part}.parquet')
    granular.convert('*.parquet', 'expected', shardlen=25)
    code, out, _ = granular_cli('convert', '*.parquet', 'got', '--shardlen', 25, '--engine', 'ray')
    assert (code, '60 datapoints of *.parquet (parquet) in 3 shards' in out) == (0, True)
    assert contents('got') == contents('expected')
    assert granular.convert('*.parquet', 'one', shardlen=None, engine='ray').datapoints == 60
    assert [point['n'] for point in granular.open('one')] == list(range(60))


def test_a_node_killed_during_a_conversion_changes_nothing(nodes, tmp_path):
    gate = Gate(tmp_path, 30)
    with nodes.victim() as (node, kill):
        source, options = Records(100, gate), {'shardlen': 10, 'sample': 1, 'spec': PLAIN}
        thread, errors = in_thread(granular.convert, source, tmp_path / 'got', **options, engine='ray')
        gate.wait(node, thread)
        kill()
        gate.open()
        thread.join()
    assert not errors
    granular.convert(Records(100), tmp_path / 'expected', **options)
    assert contents(tmp_path / 'got') == contents(tmp_path / 'expected')


def test_bad_conversions(nodes, tmp_path):
    with pytest.raises(EncodeError, match="datapoint 37, key 'id': not encoded as 'int'"):
        granular.convert(Records(50, wrong=37), tmp_path / 'a', shardlen=50, spec=PLAIN, engine='ray')
    assert not (tmp_path / 'a' / '000000' / 'spec.json').exists()
    with pytest.raises(InvalidArgumentError, match="map: has no random access, which engine='ray' needs"):
        granular.convert(map(plain, range(5)), tmp_path / 'b', engine='ray')
    with pytest.raises(InvalidArgumentError, match='cannot be pickled for the workers of Ray'):
        granular.convert(Records(5, threading.Lock()), tmp_path / 'c', sample=1, engine='ray')
    with pytest.raises(InvalidArgumentError, match="engine: expected 'local' or 'ray', got 'spark'"):
        granular.convert(Records(5), tmp_path / 'd', engine='spark')

    class Shrinks(Records):
        driver = os.getpid()

        def __len__(self):
            return self.count - (os.getpid() != self.driver)

    with pytest.raises(CorruptDatasetError, match='Shrinks: expected 5 records'):
        granular.convert(Shrinks(5), tmp_path / 'e', engine='ray')


class Slow(Records):
    """A source whose shards take some time."""

    def fetch(self, indices):
        time.sleep(0.05)
        return super().fetch(indices)


def test_a_cancelled_conversion_leaves_whole_shards_alone(nodes, tmp_path):
    """Also if a task is interrupted just when it has written its shard."""
    options = {'shardlen': 2, 'sample': 1, 'spec': PLAIN}

    async def cancelled():
        begun = asyncio.Event()
        work = granular.aio.convert(Slow(60), tmp_path / 'got', **options, engine='ray', progress=lambda _: begun.set())
        task = asyncio.create_task(work)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    granular.convert(Slow(60), tmp_path / 'expected', **options)
    expected, deadline = contents(tmp_path / 'expected'), time.monotonic() + 60
    while not contents(tmp_path / 'got').items() <= expected.items():  # workers may still remove temporary files
        assert time.monotonic() < deadline, sorted(contents(tmp_path / 'got'))
    assert '000000/spec.json' not in contents(tmp_path / 'got')


class Fails(Records):
    """A source that raises an exception in other processes."""

    def __init__(self, count, make):
        super().__init__(count)
        self.make, self.driver = make, os.getpid()

    def fetch(self, indices):
        if os.getpid() != self.driver and 37 in indices:
            raise self.make()
        return super().fetch(indices)


class StopEverything(BaseException):
    """An exception that is not an Exception."""


class LockedError(Exception):
    """An exception that does not pickle."""

    def __init__(self):
        super().__init__('does not pickle')
        self.lock = threading.Lock()


class TwoPartsError(Exception):
    """An exception that pickles, but does not unpickle."""

    def __init__(self, left, right):
        super().__init__(f'{left} and {right}')


@pytest.mark.parametrize(
    ('make', 'error', 'message'),
    [
        (lambda: ValueError('no'), ValueError, 'no'),
        (lambda: KeyboardInterrupt('no'), FunctionError, 'raised KeyboardInterrupt: no'),
        (lambda: SystemExit(3), FunctionError, 'raised SystemExit: 3'),
        (lambda: StopEverything('no'), StopEverything, 'no'),
        (LockedError, WorkerError, 'LockedError: does not pickle'),
        (lambda: TwoPartsError(1, 2), WorkerError, 'TwoPartsError: 1 and 2'),
        (lambda: StopIteration(5), FunctionError, 'raised StopIteration: 5'),
    ],
)
def test_errors_of_sources_are_raised_as_they_are_in_one_process(make, error, message, nodes, tmp_path):
    with pytest.raises(error) as caught:
        granular.convert(Fails(50, make), tmp_path / 'a', shardlen=10, sample=1, spec=PLAIN, engine='ray')
    assert type(caught.value) is error
    assert message in str(caught.value)
    assert not (tmp_path / 'a' / '000000' / 'spec.json').exists()


# --- training


def test_states_are_continued_exactly_by_workers_of_ray_train_or_are_refused(nodes, caplog):
    caplog.set_level(logging.CRITICAL)  # datapoints fail on purpose
    results = ray_train(range(20), counts=(2, 1))
    assert [(seed, r.node.text, r.text) for seed, r in results.items() if r.verdict == 'wrong'] == []
    assert [result.verdict for result in results.values()].count('exact') > 3
