"""Ray: reading through it on one node, conversion with two workers, and a write during which a node is killed."""

import json
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import granular
from benchmarks.bars import CORE, Bar, Result, median
from benchmarks.data import Data
from benchmarks.nginx import Server
from benchmarks.remote import ours

Job = Mapping[str, Any]


def ray(data: Data, server: Server) -> Result:
    """Compare Ray with the readers, and with a conversion in one process."""
    medium = data.medium()
    job = {'url': f'{server.instant}/{medium.name}', 'count': data.count(10_000), 'times': 1 if data.quick else 3}
    read = ours(data, 'read', None, 'clusters', **job)
    bars = [
        Bar(
            'reading through Ray / a reader, 100 kB, one node of 2 cores',
            read['ray'] / read['reader'],
            0.7,
            f'{read["ray"]:,.0f}/s / {read["reader"]:,.0f}/s',
        )
    ]
    convert = {'url': str(data.images()), 'times': 1 if data.quick else 3, 'shardlen': data.count(1000) // 10}
    one = ours(data, 'convert', CORE, 'clusters', **convert, engine='local')['seconds']
    free = ours(data, 'convert', None, 'clusters', **convert, engine='local')['seconds']
    two = ours(data, 'convert', None, 'clusters', **convert, engine='ray')['seconds']
    figures = f'{two:.2f} s, one process {one:.2f} s on one core, {free:.2f} s on both'
    bars.append(Bar('conversion of 2,000 images with 2 workers of Ray / one process', one / two, 1.6, figures))
    killed = ours(data, 'kill', None, 'clusters')
    bars.append(Bar('a node killed during a write: the same dataset', killed['same'], 1, f'{killed["seconds"]:.1f} s'))
    return bars, []


def _start(processors: int) -> Any:
    """Start Ray with a node on this machine, for this process."""
    os.environ.update(RAY_USAGE_STATS_ENABLED='0', RAY_worker_niceness='0')
    import ray
    import ray.data

    ray.init(num_cpus=processors, include_dashboard=False, log_to_driver=False, object_store_memory=4 << 30)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray


def read(job: Job) -> dict[str, float]:
    """Measure the datapoints per second of a reader and of Ray, in turns, in batches of 64."""
    _start(2)
    import granular.integrations.ray as integration

    reader = granular.DatasetReader(job['url'])
    dataset = integration.read(job['url'])

    def alone() -> int:
        return sum(1 for _ in reader)

    def through() -> int:
        return sum(len(batch['data']) for batch in dataset.iter_batches(batch_size=64))

    through()  # starts the workers
    rates: dict[str, list[float]] = {'reader': [], 'ray': []}
    for _ in range(job['times']):
        for name, fn in (('reader', alone), ('ray', through)):
            started = time.perf_counter()
            if (count := fn()) != job['count']:
                raise RuntimeError(f'{name} read {count} of {job["count"]}')
            rates[name].append(count / (time.perf_counter() - started))
    return {name: median(values) for name, values in rates.items()}


def convert(job: Job) -> dict[str, float]:
    """Measure the seconds of a conversion that decodes and encodes images."""
    reader = granular.DatasetReader(job['url'])
    options: dict[str, Any] = {'spec': {'image': 'jpg'}, 'engine': job['engine']}
    times = []
    with tempfile.TemporaryDirectory() as folder:
        if job['engine'] == 'ray':
            _start(2)
            source = granular.MapDataset.source(reader)[:4]
            granular.convert(source, f'{folder}/warm', shardlen=1, **options)
        for number in range(job['times']):
            started = time.perf_counter()
            granular.convert(reader, f'{folder}/{number}', shardlen=job['shardlen'], **options)
            times.append(time.perf_counter() - started)
    return {'seconds': median(times)}


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


def main() -> None:
    """The part in its own process: ``python -m benchmarks.clusters FUNCTION JOB``."""
    functions: dict[str, Callable[[Job], dict[str, float]]] = {'read': read, 'convert': convert, 'kill': kill}
    print(json.dumps(functions[sys.argv[1]](json.loads(pathlib.Path(sys.argv[2]).read_text()))))


if __name__ == '__main__':
    main()
