"""Ray: reading through it on one node, conversion with two workers, and a write during which a node is killed."""

import functools
import itertools
import multiprocessing
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import granular
from benchmarks.bars import CORE, Bar, Curves, Result, ratio
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import ours, table

Job = Mapping[str, Any]


def ray(data: Data, server: Server) -> Result:
    """Compare Ray with the readers, and with a conversion in one process."""
    times = data.runs(3)
    source = {'url': f'{server.instant}/{data.repeated().name}', 'count': 8 * data.count(10_000), 'times': times}
    read = ours(data, 'read', None, 'clusters', **source)
    name, note = 'reading through Ray / a reader, 100 kB, one node of 2 cores', ', Ray with blocks from memory '
    bars = [ratio(name, read['ray'], read['reader'], 0.7, f'{note}{read["ready"]:,.0f}/s')]
    folder = str(data.images())
    seconds = {
        name: [
            ours(data, what, core, 'clusters', url=folder, engine=engine, repeats=repeats, times=times)['seconds']
            for repeats in (1, 5)
        ]
        for name, what, core, engine in (
            ('one process, one core', 'convert', CORE, 'local'),
            ('one process, both cores', 'convert', None, 'local'),
            ('two processes, half of the images each', 'halves', None, 'local'),
            ('2 workers of Ray', 'convert', None, 'ray'),
        )
    }
    one, free, halves, two = (times[-1] for times in seconds.values())
    figures = (
        f'{two:.2f} s, one process {one:.2f} s on one core, {free:.2f} s on both; two processes with half of the '
        f'images each {halves:.2f} s, {one / halves:.2f}'
    )
    bars.append(Bar('conversion of 10,000 images with 2 workers of Ray / one process', one / two, 1.6, figures))
    killed = ours(data, 'kill', None, 'clusters')
    bars.append(Bar('a node killed during a write: the same dataset', killed['same'], 1, f'{killed["seconds"]:.1f} s'))
    rates = {
        'a reader, without Ray': read['reader'],
        'Ray, blocks from memory': read['ready'],
        'Ray, granular.integrations.ray.read': read['ray'],
        'Ray, blocks from memory, an eighth of the records': read['ready, part'],
        'Ray, granular.integrations.ray.read, an eighth of the records': read['ray, part'],
    }
    points = [f'{repeats * data.count(2000):,} images' for repeats in (1, 5)]
    return bars, [
        table('ray', '80,000 records of 100 kB in order, batches of 64, 2 cores', 'records/s', rates),
        Curves('ray-convert', 'Conversion into 10 shards', 's', 'images', points, seconds),
    ]


def _start(processors: int) -> Any:
    """Start Ray with a node on this machine, for this process."""
    os.environ.update(RAY_USAGE_STATS_ENABLED='0', RAY_worker_niceness='0')
    import ray
    import ray.data

    ray.init('local', num_cpus=processors, include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray


def read(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of a reader, of Ray, and of Ray with blocks from memory, in batches of 64."""
    _start(2)
    import granular.integrations.ray as integration

    count, part = job['count'], job['count'] // 8
    reader = granular.ShardedDatasetReader(job['url'])

    def batches(dataset: Any) -> int:
        return sum(len(batch['data']) for batch in dataset.iter_batches(batch_size=64))

    runs: dict[str, tuple[int, Callable[[], int]]] = {
        'reader': (count, lambda: sum(1 for _ in reader)),
        'ray': (count, functools.partial(batches, integration.read(job['url']))),
        'ready': (count, functools.partial(batches, _from_memory(count))),
        'ray, part': (part, functools.partial(batches, integration.read(f'{job["url"]}/000000'))),
        'ready, part': (part, functools.partial(batches, _from_memory(part))),
    }
    runs['ray, part'][1]()  # starts the workers
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(job['times']):
        for name, (expected, fn) in runs.items():
            started = time.perf_counter()
            if (got := fn()) != expected:
                raise RuntimeError(f'{name} read {got} of {expected}')
            rates[name].append(expected / (time.perf_counter() - started))
    return {name: median(values) for name, values in rates.items()}


def _from_memory(count: int) -> Any:
    """Return a dataset of Ray whose tasks yield one block of 16 MB again and again: what Ray takes for itself."""
    import pyarrow as pa
    import ray

    def work(rows: int) -> Iterator[Any]:
        values = {'data': [bytes(100_000)] * 160, 'label': list(range(160)), 'text': ['text'] * 160}
        block = pa.table(values)
        for start in range(0, rows, 160):
            yield block.slice(0, min(160, rows - start))

    class Memory(ray.data.Datasource):  # type: ignore[misc]
        def estimate_inmemory_data_size(self) -> int:
            return count * 100_000

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:
            edges = [count * number // parallelism for number in range(parallelism + 1)]
            return [self._task(stop - start) for start, stop in itertools.pairwise(edges)]

        def _task(self, rows: int) -> Any:
            metadata = ray.data.block.BlockMetadata(
                num_rows=rows, size_bytes=rows * 100_000, exec_stats=None, input_files=None
            )
            return ray.data.ReadTask(functools.partial(work, rows), metadata)

    dataset = ray.data.read_datasource(Memory(), override_num_blocks=max(1, count // 2500))
    dataset.context.execution_options.preserve_order = True
    return dataset


def convert(job: Job) -> dict[str, float]:
    """Measure the seconds of a conversion that decodes and encodes images, as often as they are repeated."""
    reader = granular.DatasetReader(job['url'])
    source = granular.MapDataset.source(reader)
    options: dict[str, Any] = {'spec': {'image': 'jpg'}, 'engine': job['engine']}
    shardlen, times = len(reader) * job['repeats'] // 10, []
    with tempfile.TemporaryDirectory() as folder:
        if job['engine'] == 'ray':
            _start(2)
            granular.convert(source[:4], f'{folder}/warm', shardlen=1, **options)
        for number in range(job['times']):
            started = time.perf_counter()
            granular.convert(source.repeat(job['repeats']), f'{folder}/{number}', shardlen=shardlen, **options)
            times.append(time.perf_counter() - started)
    return {'seconds': median(times)}


def halves(job: Job) -> dict[str, float]:
    """Measure the seconds in which two processes without Ray convert half of the images each: the machine's limit."""
    context, times = multiprocessing.get_context('spawn'), []
    barrier = context.Barrier(3)
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_half, args=(job, folder, half, barrier), daemon=True) for half in (0, 1)]
        for process in processes:
            process.start()
        for _ in range(job['times']):
            barrier.wait(60)
            started = time.perf_counter()
            barrier.wait(600)
            times.append(time.perf_counter() - started)
        for process in processes:
            process.join()
    return {'seconds': median(times)}


def _half(job: Job, folder: str, half: int, barrier: Any) -> None:
    """Convert half of the images as often as the other process does, at the same time."""
    reader = granular.DatasetReader(job['url'])
    source = granular.MapDataset.source(reader)
    count = len(reader) * job['repeats']
    images = source.repeat(job['repeats'])[count // 2 * half : count // 2 * (half + 1)]
    granular.convert(source[:4], f'{folder}/{half}.warm', shardlen=1, spec={'image': 'jpg'})
    for number in range(job['times']):
        barrier.wait(60)
        granular.convert(images, f'{folder}/{half}.{number}', shardlen=count // 10, spec={'image': 'jpg'})
        barrier.wait(600)


def kill(job: Job) -> dict[str, float]:
    """Return 1 if a write during which one of three nodes is killed has the bytes of one without, and its seconds."""
    os.environ.update(RAY_USAGE_STATS_ENABLED='0', RAY_worker_niceness='0')
    import ray
    import ray.data
    from ray.cluster_utils import Cluster

    import granular.integrations.ray as integration

    head = {'num_cpus': 1, 'include_dashboard': False, 'object_store_memory': 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=100 << 20) for _ in range(2)]
    with tempfile.TemporaryDirectory() as name:
        folder, victim = pathlib.Path(name), nodes[0].node_id

        def compute(row: dict[str, Any]) -> dict[str, Any]:
            if row['id'] >= 500 and not (folder / 'killed').exists():
                (folder / ray.get_runtime_context().get_node_id()).touch()
                while not (folder / 'killed').exists():
                    time.sleep(0.01)
            return {'id': row['id'], 'x': bytes(1000)}

        def end() -> None:
            while not (folder / victim).exists():
                time.sleep(0.01)
            cluster.remove_node(nodes[0], allow_graceful=False)
            (folder / 'killed').touch()

        try:
            ray.init(address=cluster.address, log_to_driver=False)
            ray.data.DataContext.get_current().enable_progress_bars = False
            spec = {'id': 'int', 'x': 'bytes'}
            killer = threading.Thread(target=end)
            killer.start()
            started = time.perf_counter()
            rows = ray.data.range(2000, override_num_blocks=20).map(compute)
            integration.write(rows, folder / 'got', spec, shardlen=300)
            seconds = time.perf_counter() - started
            killer.join()
            with granular.ShardedDatasetWriter(folder / 'expected', spec, shardlen=300) as writer:
                for i in range(2000):
                    writer.append({'id': i, 'x': bytes(1000)}, flush=False)
            return {'same': float(_contents(folder / 'got') == _contents(folder / 'expected')), 'seconds': seconds}
        finally:
            ray.shutdown()
            cluster.shutdown()


def _contents(root: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob('*') if path.is_file()}
