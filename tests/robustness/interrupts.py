"""Ctrl-C at random moments of twenty programs: ``python -m tests.robustness.interrupts --times 300``.

Programs that end do so within seconds, with KeyboardInterrupt and nothing else on stderr, without processes and shared
memory that are left; each dataset that they wrote is whole, or the last is absent. Programs that go on catch interrupts
around ``next``: each element comes once, and states saved after interrupts are exact. A quarter of the runs are storms:
programs end or go on, no finished dataset is damaged, no element comes twice, and the state before it is exact.
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import granular
from granular import aio
from granular.errors import GranularError
from granular.grain import MultiprocessingOptions
from tests.support.interpreters import Interpreter, Program
from tests.support.servers import FakeGCSServer, MotoServer
from tests.support.states import plain
from tests.support.streams import save, torch_batches

MODULES = 'aiohttp', 'numpy.random', 'torch', 'tests.robustness.interrupts'  # imported before the programs start
OPTIONS = '-W', 'error::ResourceWarning'
TIMEOUT = 100.0  # seconds in which a process that was interrupted must have ended
COUNT, SPEC, SIZE = 24, {'n': 'int', 'x': 'array'}, 400_000  # datapoints, and bytes of files
POINTS = [{'n': i, 'x': np.full(1000, i)} for i in range(COUNT)]
FORK = MultiprocessingOptions(1, start_method='fork')


def slow(point: Any) -> Any:
    time.sleep(0.001)
    return {'n': int(point['n'])}


def mapped(reader: Any) -> granular.MapDataset[Any]:
    return granular.MapDataset.source(reader).map(slow)


def stream_of(reader: Any) -> granular.IterDataset[Any]:
    return mapped(reader).to_iter_dataset(granular.ReadOptions(num_threads=4, prefetch_buffer_size=8))


def opened(place: granular.Path) -> Any:
    return granular.DatasetReader(place / 'data', granular.decoders)


# --- programs that end: functions that are called again and again, which resume what they write


def load(place: granular.Path, **options: Any) -> None:
    with opened(place) as reader, granular.Loader(mapped(reader), 8, **options) as loader:
        for _ in loader:
            pass


async def read_async(place: granular.Path, times: int) -> None:
    for _ in range(times):
        async with aio.DatasetReader(place / 'data', granular.decoders) as reader:
            await anext(aio.Loader(aio.sources.Epochs(reader), 8))
            await asyncio.gather(*(reader.fetch([i, i + 1]) for i in range(20)))


def write(kind: str, root: granular.Path, *options: Any, **others: Any) -> None:
    with getattr(granular, kind)(root, SPEC, granular.encoders, *options, **others) as writer:
        for point in POINTS[writer.found :]:
            writer.append(point)


def write_files(root: granular.Path) -> None:
    root.parent.mkdir(exist_ok=True)
    root.with_name(f'{root.name}.file').write_bytes(bytes(SIZE))
    with root.with_name(f'{root.name}-2.file').open('wb') as file:
        for _ in range(4):
            file.write(bytes(SIZE // 4))
    if root.store.local:
        with granular.BagWriter(root.with_name(f'{root.name}.bag')) as writer:
            for point in POINTS[len(writer) :]:
                writer.append(b'%d' % point['n'])


def copy(place: granular.Path, root: granular.Path) -> None:
    (place / 'data').copy(root)
    with tempfile.TemporaryDirectory() as folder:
        granular.copy_to_local(root, f'{folder}/copy')


def load_in_threads(place: granular.Path, threads: list[threading.Thread]) -> None:
    while len(threads) < 2:
        threads.append(threading.Thread(target=lambda: [load(place) for _ in itertools.count()], daemon=True))
        threads[-1].start()
    load(place)


def view() -> None:
    from granular import cli

    with tempfile.TemporaryDirectory() as folder:
        write('DatasetWriter', granular.Path(folder) / 'data')
        sys.argv = ['granular', 'view', folder]
        cli.main()


WRITES: dict[str, Callable[[granular.Path, granular.Path], object]] = {
    'writer': lambda place, root: write('DatasetWriter', root),
    'writer, columns': lambda place, root: write('DatasetWriter', root, 'columns'),
    'writer of shards': lambda place, root: write('ShardedDatasetWriter', root, 16),
    'files': lambda place, root: write_files(root),
    'convert': lambda place, root: granular.convert(POINTS, root, spec=SPEC, shardlen=16),
    'convert, iterator': lambda place, root: granular.convert(iter(POINTS), root, spec=SPEC, shardlen=16),
    'copies': copy,
}  # fmt: skip
ENDS = WRITES | {
    'loader': lambda place, root: load(place),
    'left open': lambda place, root: next(iter(granular.Loader(mapped(opened(place)), 4))),
    'workers, spawn': lambda place, root: load(place, mp='spawn', workers=1),
    'asyncio.run': lambda place, root: asyncio.run(read_async(place, 1 if root.name == '0' else 10**6)),
    'threads': lambda place, root, threads=[]: load_in_threads(place, threads),
    'view': lambda place, root: view(),
}  # fmt: skip

# --- programs that catch interrupts and go on: iterators, of a reader

GOES_ON: dict[str, Callable[[Any], Any]] = {
    'loader goes on': lambda reader: granular.Loader(mapped(reader), 2),
    'Batches': lambda reader: torch_batches(granular.Loader(mapped(reader), 2), 'cpu', 2),
    'stream': lambda reader: iter(stream_of(reader).prefetch(3).batch(2)),
    'workers, fork': lambda reader: iter(stream_of(reader).mp_prefetch(FORK)),
    'notebook': lambda reader: iter(stream_of(reader).window_shuffle(8, seed=1)),
    'iteration': iter,
    'caches': lambda reader: iter(stream_of(granular.SharedMemoryCache(reader, max_bytes=1 << 24))),
}  # fmt: skip

within = [False]  # True within next; outside of it, no interrupt is raised


def handle(*_: object) -> None:
    if within[0]:
        raise KeyboardInterrupt
    os.write(1, b'missed\n')


def take(iterator: Any, elements: list[Any], caught: Callable[[], object] = lambda: None) -> list[Any]:
    """Append all elements, and call a function after each interrupt."""
    while True:
        try:
            within[0] = True
            element = iterator.__next__()
            within[0] = False
        except StopIteration:
            within[0] = False
            return elements
        except KeyboardInterrupt:
            within[0] = False
            caught()
        else:
            elements.append(plain(element))


def go_on(make: Callable[[], Any], storm: bool) -> None:
    """Iterate again and again, until a few interrupts were caught."""

    def mark() -> None:
        states.append((len(elements), save(iterator) if hasattr(iterator, 'load_state_dict') else None))

    with contextlib.closing(make()) as iterator:
        expected = take(iterator, [])
    print('ready', flush=True)
    states: list[tuple[int, Any]] = []
    while len(states) < 4:
        with contextlib.closing(make()) as iterator:
            elements = [plain(next(iterator))]
            mark()
            take(iterator, elements, lambda: os.write(1, b'caught\n') and (storm or mark()))
        places = list(map(expected.index, elements))
        assert (places == sorted({*places})) if storm else elements == expected, elements
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for position, state in states:
        if state is not None and position < len(expected):
            with contextlib.closing(make()) as iterator:
                iterator.load_state_dict(state)
                assert take(iterator, []) == expected[position:], position
    print('right', flush=True)


def run(name: str, storm: str, root: str, place: str, options: str) -> None:
    """Run a program, in a process of its own."""
    source = granular.Path(place, **json.loads(options))
    signal.signal(signal.SIGINT, handle if name in GOES_ON else signal.default_int_handler)
    for number in itertools.count() if name in ENDS else ():
        ENDS[name](source, granular.Path(root, **(source.store.options if '://' in root else {})) / f'{number}')
        if not number:  # late imports are done: a module in C that is imported may lose an interrupt
            print('ready', flush=True)

    async def cell() -> None:  # as in a notebook: blocking, in the thread of a running loop
        play()

    with tempfile.TemporaryDirectory() as blocks, contextlib.closing(asyncio.new_event_loop()) as loop:
        config = granular.IOConfig(cache_dir=blocks if name == 'caches' else None)
        with opened(granular.Path(place, **source.store.options, config=config)) as reader:
            play = functools.partial(go_on, functools.partial(GOES_ON[name], reader), bool(storm))
            loop.run_until_complete(cell()) if name == 'notebook' else play()


# --- their processes


# What a process says that does not end as it should. The trace of the interrupt is what it is to say, and Python warns
# of a coroutine that the interrupt kept from its first step.
COMPLAINTS = re.compile(
    r'Task was destroyed|Unclosed|Exception ignored|ResourceWarning|never retrieved|Fatal|leaked|deadlock'
    r'|Exception in (?:callback|thread)|RuntimeError'
)


def interrupt(process: Program, name: str, storm: bool, draw: random.Random) -> str:
    """Interrupt a program at random moments, until it ends; returns what it has written to stderr."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(40):  # the program has ended before, except in a storm in which it cannot go on
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.choice([0.02, 0.2]) * draw.random())
                break
            for _ in range(10 if storm else 1):
                process.send_signal(signal.SIGINT)
                time.sleep(0.001 * storm)
            if name in ENDS or (not storm and process.stdout.readline() == 'right\n'):
                break
    return process.communicate()[1]


def problem_of(name: str, code: int | None, errors: str, storm: bool) -> str:
    """Return the problem with the end of a process; empty if there is none."""
    right = {'view': [130], **dict.fromkeys(GOES_ON, [0])}.get(name, [1, -signal.SIGINT])
    if code == -signal.SIGKILL or (code not in right and not (storm and name in ENDS)):
        return f'ended with {code}'
    if not storm and (complaint := COMPLAINTS.search(errors)):
        return f'printed {complaint[0]!r}'
    ended = storm or name in GOES_ON or name == 'view' or errors.endswith('KeyboardInterrupt\n')
    return '' if ended else 'ended without KeyboardInterrupt'


def damage_of(root: granular.Path) -> str:
    """Return which dataset or file is neither whole nor, if it is the last, absent."""
    names = {path.name for path in root.iterdir()} if root.exists() else set()
    last = max((int(name) for name in names if name.isdigit()), default=0)
    for name in names:
        if name.endswith('.file') and (root / name).stat().size != SIZE:
            return f'{name} is damaged'
        if name.isdigit():
            try:
                with granular.open(root / name, granular.decoders) as reader:
                    points = plain(list(reader))
                    whole = (COUNT, 16) if int(name) == last else (COUNT,)  # or a shard of what was being written
                    if points != plain(POINTS[: len(points)]) or len(points) not in whole:
                        return f'{name} is damaged'
            except GranularError as error:
                if int(name) != last:
                    return f'{name}: {error}'
    return ''


def check(
    name: str, place: granular.Path, interpreter: Interpreter, draw: random.Random, storm: bool
) -> tuple[str, float]:
    """Run and interrupt a program; returns the problem, if there was one, and the seconds that it took to end."""
    shared = {*os.listdir('/dev/shm')}
    code = 'import sys; from tests.robustness.interrupts import run; run(*sys.argv[1:])'
    environment = {**os.environ, 'AWS_ACCESS_KEY_ID': 'test', 'AWS_SECRET_ACCESS_KEY': 'test'}  # for spawned processes
    with tempfile.TemporaryDirectory() as folder:
        root = granular.Path(folder) / 'root' if draw.random() < 0.4 else place / f'{draw.random()}'
        arguments = name, 'storm' if storm else '', str(root), str(place), json.dumps(place.store.options)
        with interpreter.start(code, *arguments, env=environment) as process:
            killer = threading.Timer(TIMEOUT, os.killpg, (process.pid, signal.SIGKILL))
            killer.start()
            if not process.stdout.readline():
                killer.cancel()
                return f'did not begin: {process.communicate()[1]}', 0.0
            began = time.monotonic()
            errors = interrupt(process, name, storm, draw)
            seconds = time.monotonic() - began
            killer.cancel()
            problem = problem_of(name, process.returncode, errors, storm) or damage_of(root)
            with contextlib.suppress(ProcessLookupError):
                for _ in range(300):
                    os.killpg(process.pid, 0)
                    time.sleep(0.1)
                problem = problem or 'left processes'
    if left := [file for file in {*os.listdir('/dev/shm')} - shared if f'{process.pid}' in file]:
        problem = problem or f'left {left} in shared memory'
    return problem and f'{problem}\n{errors}', seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Interrupt programs in turn, and print a table; returns the number of problems."""
    parser = argparse.ArgumentParser(prog='python -m tests.robustness.interrupts', description=__doc__)
    parser.add_argument('--times', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    args = parser.parse_args(arguments)
    draw, table = random.Random(args.seed), {name: [0, 0, 0, 0.0] for name in (*ENDS, *GOES_ON)}
    names = draw.sample(sorted(table), len(table))
    with MotoServer() as moto, FakeGCSServer() as gcs, Interpreter(*MODULES, options=OPTIONS) as interpreter:
        places = moto.place(), gcs.place()
        for place in places:
            write('DatasetWriter', place / 'data')
        for number, name in zip(range(args.times), itertools.cycle(names)):
            storm, row = draw.random() < 0.25, table[name]
            problem, seconds = check(name, draw.choice(places), interpreter, draw, storm)
            row[:] = row[0] + 1, row[1] + storm, row[2] + bool(problem), max(row[3], seconds)
            if problem:
                print(f'{name}, run {number}: {problem}', flush=True)
    print(f'{"program":24} runs storms problems longest end in s')
    for name, row in table.items():
        print('{:24} {:4} {:6} {:8} {:8.2f}'.format(name, *row))
    return int(sum(row[2] for row in table.values()))


if __name__ == '__main__':
    sys.exit(bool(main()))
