"""Ctrl-C at random moments: ``python -m tests.robustness.interrupts --times 300``.

A process reads, writes or iterates a loader, over a bucket, until it gets SIGINT. It must end within seconds, with
KeyboardInterrupt and nothing else: no 'Task was destroyed', no 'Unclosed', no complaint of ``__del__``, no
ResourceWarning, nothing left in shared memory.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import numpy as np

import granular
from tests.support import programs
from tests.support.servers import FakeGCSServer, MotoServer, Server

TIMEOUT = 100.0  # seconds in which a process that was interrupted must have ended

SETUP = f"""{programs.INTERRUPTIBLE}
import asyncio, gc, json, os, signal, sys, tempfile, threading
import numpy as np
import granular
from granular import aio
place = granular.Path(sys.argv[1], **json.loads(sys.argv[2]))
data = place / 'data'
"""
READY = "print('ready', flush=True)\n"
HEAD = SETUP + READY

# What the programs import late: a module in C that is imported, such as numpy.random, may lose an interrupt.
IMPORTS = """
with tempfile.TemporaryDirectory() as folder:
    with granular.DatasetWriter(f'{folder}/x', {'x': 'array'}, granular.encoders) as writer:
        writer.append({'x': np.zeros(1000)})
    with granular.DatasetReader(f'{folder}/x', granular.decoders) as reader:
        with granular.Loader(granular.sources.Epochs(reader), 1) as loader:
            next(loader)
"""

PROGRAMS = {
    'loader': """
        while True:
            reader = granular.DatasetReader(data, granular.decoders)
            loader = granular.Loader(granular.sources.Epochs(reader), 8)
            for _ in range(20):
                next(loader)
            loader.close()
            reader.close()
        """,
    'unclosed': """
        loaders = []
        while True:
            reader = granular.DatasetReader(data, granular.decoders)
            loader = granular.Loader(granular.sources.Epochs(reader), 4, workers=4)
            for _ in range(10):
                next(loader)
            loaders = [*loaders[-3:], loader]
        """,
    'transforms': """
        def change(point, seed):
            return {'x': np.asarray(point['x']) + sum(range(1000))}
        with granular.DatasetReader(data, granular.decoders) as reader:
            source = granular.sources.Transform(granular.sources.Epochs(reader), change)
            with granular.Loader(source, 8) as loader:
                for batch in loader:
                    pass
        """,
    'reads': """
        while True:
            with granular.DatasetReader(data, granular.decoders) as reader:
                reader.fetch(range(len(reader)))
                list(reader)
                reader[3]
            path = data / 'x.bag'
            path.read_ranges(range(0, 500, 50), range(20, 520, 50))
        """,
    'writes': """
        i = 0
        while True:
            with granular.DatasetWriter(place / f'new-{os.getpid()}-{i}', {'x': 'array'}, granular.encoders) as writer:
                for _ in range(20):
                    writer.append({'x': np.zeros(1000)})
            i += 1
        """,
    'parts': """
        while True:
            with (place / f'large-{os.getpid()}').open('wb') as file:
                for _ in range(12):
                    file.write(bytes(2 << 20))
        """,
    'local': """
        with tempfile.TemporaryDirectory() as folder:
            i = 0
            while True:
                with granular.DatasetWriter(f'{folder}/{i}', {'x': 'array'}, granular.encoders) as writer:
                    for _ in range(50):
                        writer.append({'x': np.zeros(1000)})
                with granular.DatasetReader(f'{folder}/{i}', granular.decoders) as reader:
                    with granular.Loader(granular.sources.Epochs(reader), 8) as loader:
                        for _ in range(30):
                            next(loader)
                i += 1
        """,
    'async': """
        async def main():
            while True:
                async with aio.DatasetReader(data, granular.decoders) as reader:
                    loader = aio.Loader(aio.sources.Epochs(reader), 8)
                    try:
                        for _ in range(20):
                            await anext(loader)
                    finally:
                        await loader.aclose()
                    await asyncio.gather(*(reader.fetch([i, i + 1]) for i in range(20)))
        asyncio.run(main())
        """,
    'careless': """
        async def main():  # closes nothing, and leaves reads behind
            while True:
                reader = await aio.DatasetReader.open(data, granular.decoders)
                loader = aio.Loader(aio.sources.Epochs(reader), 8)
                for _ in range(5):
                    await anext(loader)
                tasks = [asyncio.create_task(reader.fetch([i, i + 1])) for i in range(20)]
                await asyncio.wait(tasks, timeout=0.005)
                for task in tasks:
                    task.cancel()
        asyncio.run(main())
        """,
    'threads': """
        reader = granular.DatasetReader(data, granular.decoders)
        stop = False
        def work():
            while not stop:
                reader.fetch(range(20))
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            work()
        finally:
            stop = True
            for thread in threads:
                thread.join()
        """,
}  # fmt: skip

# What a process says that does not end as it should. The trace of the interrupt itself is what it is to say.
COMPLAINTS = re.compile(
    r'Task was destroyed|Unclosed|Exception ignored|never awaited|ResourceWarning|never retrieved|Fatal|leaked|deadlock'
    r'|Exception in (?:callback|thread)|RuntimeWarning|RuntimeError'
)


def find_problem(code: int | None, stderr: str, seconds: float) -> str | None:
    """Return the problem with the end of a process, or None."""
    if code is None:
        return f'did not end in {seconds:.0f} s'
    if code not in (1, -signal.SIGINT):
        return f'ended with {code}'
    if complaint := COMPLAINTS.search(stderr):
        return f'printed {complaint[0][-60:]!r}'
    last = stderr.strip().splitlines()[-1:] or ['nothing']
    return None if last[0].startswith('KeyboardInterrupt') else f'ended with {last[0]!r}'


def interrupt(
    program: str, path: granular.Path, options: dict[str, object], after: float
) -> tuple[str | None, float, str]:
    """Interrupt a program some seconds after it was ready; returns the problem, the seconds it took, and its output."""
    code = SETUP + IMPORTS + READY + textwrap.dedent(PROGRAMS[program])
    command = [sys.executable, '-W', 'error::ResourceWarning', '-c', code, str(path), json.dumps(options)]
    before = set(os.listdir('/dev/shm'))
    with programs.program(command) as process:
        assert process.stdout is not None
        if process.stdout.readline() != 'ready\n':
            process.kill()
            return f'did not begin: {process.communicate()[1]}', 0.0, ''
        time.sleep(after)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            _, output = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return find_problem(None, '', TIMEOUT), TIMEOUT, ''
        seconds = time.monotonic() - began
    wrong = find_problem(process.returncode, output, seconds)
    own = re.compile(rf'(?<!\d){process.pid}(?!\d)')
    if left := {name for name in set(os.listdir('/dev/shm')) - before if own.search(name)}:
        wrong = wrong or f'left {left} in shared memory'
    return wrong, seconds, output


@contextlib.contextmanager
def bucket(server: Server, delay: float = 0.0) -> Iterator[tuple[granular.Path, dict[str, object]]]:
    """A dataset in a bucket, and the options that open it."""
    path = server.place()
    with granular.DatasetWriter(path / 'data', {'x': 'array'}, granular.encoders) as writer:
        for i in range(64):
            writer.append({'x': np.full(2000, i)})
    yield path, server.options


def main() -> int:
    parser = argparse.ArgumentParser(prog='python -m tests.robustness.interrupts', description=__doc__)
    parser.add_argument('--times', type=int, default=100)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--program', choices=PROGRAMS, help='one of them; all in turn by default')
    args = parser.parse_args()
    rng = random.Random(args.seed)
    names = [args.program] if args.program else list(PROGRAMS)
    wrong: list[str] = []
    longest: collections.Counter[str] = collections.Counter()
    with MotoServer() as moto, FakeGCSServer() as gcs:
        with bucket(moto) as first, bucket(gcs) as second:
            for i in range(args.times):
                name, after = (
                    names[i % len(names)],
                    rng.choice([rng.random() * 0.05, rng.random() * 0.5, rng.random() * 2]),
                )
                problem, seconds, output = interrupt(name, *(first, second)[i // len(names) % 2], after)
                longest[name] = max(longest[name], round(1000 * seconds))  # type: ignore[assignment]
                if problem is not None:
                    wrong.append(f'{name} after {after:.3f} s: {problem}')
                    print(f'{wrong[-1]}\n{output}\n', flush=True)
    print(f'{args.times} interrupts, {len(wrong)} that did not end as they should')
    print('longest ends in ms:', dict(longest))
    return 1 if wrong else 0


if __name__ == '__main__':
    sys.exit(main())
