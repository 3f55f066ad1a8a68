"""Writers that are killed at random moments and resumed: ``python -m tests.robustness.kills --times 300``.

Each run writes one sharded dataset by as many processes as it takes, one after the other, all but the last of which
are killed. After each kill, what is there is read: a shard that looks complete must be, and no datapoint is half there.
At the end every file must be that of an uninterrupted run, byte for byte.
"""

import argparse
import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

import granular
from granular.errors import GranularError
from tests.support.interpreters import Interpreter, Program
from tests.support.servers import FakeGCSServer, MotoServer, SeaweedServer

SPEC = {'x': 'bytes', 'n': 'int'}
SERVERS = {'moto': MotoServer, 'seaweed': SeaweedServer, 'fakegcs': FakeGCSServer}
LIVES = 12

# The program that writes: uploads of several parts in a bucket, many small records on a disk.
PROGRAM = """
import itertools, json, sys
import granular
place, options, layout, checksums, resume, count, shardlen, scale = json.loads(sys.argv[1])
if place.startswith('s3://'):
    import botocore.session
def point(i):
    return {'x': bytes([i % 251]) * (i * 7919 % scale), 'n': i * i}
root = granular.Path(place, **options, **({'config': granular.IOConfig(part_size=5 << 20)} if options else {}))
spec = {'x': 'bytes', 'n': 'int'}
print('ready', flush=True)
args = root, spec, granular.encoders, shardlen, 0, 1, layout, checksums, resume
with granular.ShardedDatasetWriter(*args) as writer:
    for i in range(writer.found, count):
        writer.append(point(i), flush=i % 5 == 0)
print('done', flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A dataset to write, and its path."""

    store: str
    layout: str
    checksums: bool
    count: int
    shardlen: int
    scale: int

    def point(self, i: int) -> dict[str, Any]:
        """A datapoint; the program has the same."""
        return {'x': bytes([i % 251]) * (i * 7919 % self.scale), 'n': i * i}

    def start(self, root: granular.Path, interpreter: Interpreter) -> Program:
        """Start a process that resumes the dataset, and wait until its imports are done."""
        options = root.store.options
        resume = 'discard' if options else 'check'
        args = json.dumps(
            [str(root), options, self.layout, self.checksums, resume, self.count, self.shardlen, self.scale]
        )
        process = interpreter.start(PROGRAM, args)
        assert process.stdout.readline() == 'ready\n'
        return process

    def write(self, root: granular.Path, interpreter: Interpreter) -> float:
        """Write the dataset, or the rest of it, by a process that is not killed; returns its seconds."""
        with self.start(root, interpreter) as process:
            began = time.monotonic()
            self.finish(process)
            return time.monotonic() - began

    def finish(self, process: Program) -> None:
        """Wait for the process to end."""
        out, err = process.communicate()
        assert (out, process.returncode) == ('done\n', 0), f'{self}: the writer failed: {out}{err}'


def interpreter() -> Interpreter:
    """Return what starts writers: their imports take longer than their writes."""
    return Interpreter('numpy', 'granular.sync.datasets', 'botocore.session', options=())


def small(store: str, layout: str, checksums: bool) -> Case:
    """A case that takes a second or less."""
    size = (600, 150, 4000) if store == 'local' else (24, 12, 1_200_000)
    return Case(store, layout, checksums, *size)


def verify(case: Case, root: granular.Path) -> None:
    """Check that readable datapoints are correct, and that complete shards are complete."""
    for number in range(-(-case.count // case.shardlen)):
        folder, first = root / f'{number:06}', number * case.shardlen
        whole = min(case.shardlen, case.count - first)
        try:
            described = (folder / 'spec.json').exists()
            with granular.DatasetReader(folder, granular.decoders) as reader:
                assert described
                assert list(reader) == [case.point(i) for i in range(first, first + whole)]
        except GranularError:
            assert not (folder / 'spec.json').exists(), f'{folder} looks complete'
    try:
        with granular.ShardedDatasetReader(root, granular.decoders) as shards:
            count = len(shards)
    except GranularError:
        return
    assert not count % case.shardlen or count == case.count


def contents(root: granular.Path) -> dict[str, bytes]:
    """Return all files below a folder."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob('*') if path.is_file()}


def kill_one(
    case: Case, root: granular.Path, rng: random.Random, seconds: float, lives: int, interpreter: Interpreter
) -> int:
    """Write a dataset by processes that are killed and a last one that is not; returns the number of kills."""
    for kills in range(lives):
        with case.start(root, interpreter) as process:
            try:
                process.wait(rng.uniform(0, seconds * rng.choice((0.1, 0.5, 1.1))))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                verify(case, root)
            else:
                case.finish(process)
                return kills
    case.write(root, interpreter)
    return lives


def run(
    case: Case, target: Any, times: int, rng: random.Random, interpreter: Interpreter, lives: int = LIVES
) -> tuple[int, int]:
    """Kill that many writers; returns the number of kills and of datasets.

    Args:
      target: creates an empty folder.
      interpreter: starts the writers.
      lives: kills of one dataset, after which a writer may come to its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        whole = granular.Path(folder) / 'whole'
        case.write(whole, interpreter)
        expected = contents(whole)
        verify(case, whole)
    seconds = case.write(root := target(), interpreter)
    assert contents(root) == expected
    kills = datasets = 0
    while kills < times:
        root = target()
        kills += kill_one(case, root, rng, seconds, lives, interpreter)
        datasets += 1
        assert contents(root) == expected, f'{root} is not what an uninterrupted run writes'
        granular.clean(root, remove=True, older=0)
        assert granular.clean(root, older=0) == []
        assert contents(root) == expected, f'{root}: a file of a complete dataset was removed'
        root.rmtree()
    return kills, datasets


@contextlib.contextmanager
def places(store: str) -> Iterator[Any]:
    """Return a function that creates empty folders in a store."""
    if store == 'local':
        with tempfile.TemporaryDirectory(prefix='granular-kills-') as folder:
            yield lambda: granular.Path(tempfile.mkdtemp(dir=folder)) / 'data'
    else:
        with SERVERS[store]() as server:
            yield server.place


def main() -> None:
    """Kill writers of all layouts on a disk and in a bucket."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--times', type=int, default=300, help='kills in all')
    parser.add_argument('--stores', nargs='+', default=['local', 'local', 'seaweed'], choices=['local', *SERVERS])
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter('ignore', RuntimeWarning)  # of columns that differ in length
    cases = [small(store, layout, i % 2 == 1) for i, store in enumerate(args.stores) for layout in ('columns', 'refs')]
    total = 0
    for i, case in enumerate(cases):
        began = time.monotonic()
        with places(case.store) as target, interpreter() as starts:
            kills, datasets = run(case, target, -(-args.times // len(cases)), random.Random(args.seed + i), starts)
        total += kills
        summary = (
            f'{case.store}, {case.layout}, checksums {case.checksums}: {kills} kills, {datasets} datasets, all exact'
        )
        sys.stdout.write(f'{summary}, {time.monotonic() - began:.0f} s\n')
        sys.stdout.flush()
    sys.stdout.write(f'{total} kills in all, nothing lost\n')


if __name__ == '__main__':
    main()
