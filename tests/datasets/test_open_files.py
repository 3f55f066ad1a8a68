"""Descriptors of local files: bounded by the limit of the process, and closed with the last reader."""

import os
import re
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import granular
from tests.support.programs import run_python


def shards(folder, count):
    with granular.ShardedDatasetWriter(folder, {'n': 'int', 'x': 'bytes'}, shardlen=1, checksums=False) as writer:
        for n in range(count):
            writer.append({'n': n, 'x': b'x' * n})
    return folder


@pytest.fixture(scope='module')
def many(tmp_path_factory):
    return shards(tmp_path_factory.mktemp('many') / 'shards', 100)


@pytest.mark.parametrize('limit', [48, 96, 256])
def test_readers_leave_descriptors_to_the_program(many, limit):
    """The limit of macOS is 256."""
    program = """
        import asyncio, errno, os, resource, sys
        import granular

        folder, limit = sys.argv[1], int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        with granular.ShardedDatasetReader(folder) as reader:
            for _ in range(2):
                assert [reader[i]['n'] for i in range(100)] == list(range(100))
            assert [point['n'] for point in reader.fetch(range(99, -1, -1))] == list(range(99, -1, -1))
            own = [os.open('/dev/null', os.O_RDONLY) for _ in range(limit // 8)]  # some are left
            try:
                while True:
                    own.append(os.open('/dev/null', os.O_RDONLY))
            except OSError as error:
                assert error.errno == errno.EMFILE
            # Files are closed to open others.
            assert [reader[i]['n'] for i in range(100)] == list(range(100))
        with open(__import__('os').devnull):
            pass
        print('ok')
        """
    done = run_python(program, str(many), str(limit))
    assert (done.returncode, done.stdout, done.stderr) == (0, 'ok\n', '')


def test_limit_is_raised_where_more_files_are_read_and_low_descriptors_stay_free(many):
    program = """
        import os, resource, sys
        import granular

        folder = sys.argv[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
        with granular.DatasetReader(f'{folder}/000005') as reader:
            print(reader[0]['n'], resource.getrlimit(resource.RLIMIT_NOFILE))
        with granular.ShardedDatasetReader(folder) as reader:
            for _ in range(2):
                assert [point['n'] for point in reader.fetch(range(100))] == list(range(100))
            print(resource.getrlimit(resource.RLIMIT_NOFILE))
            links = {int(fd): os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')}
            files = [fd for fd, link in links.items() if link.startswith(folder)]
            print(sum(fd >= 64 for fd in files) > 150, os.open('/dev/null', os.O_RDONLY) < 64)
            resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))
            assert [reader[i]['n'] for i in range(100)] == list(range(100))
        """
    done = run_python(program, f'{many}')
    assert (done.stdout, done.stderr) == ('5 (64, 4096)\n(4096, 4096)\nTrue True\n', '')


@pytest.mark.parametrize('harm', ['written', 'replaced', 'removed'])
def test_file_that_changes_while_it_is_closed_for_others_is_an_error(tmp_path, harm):
    program = """
        import os, resource, sys
        import granular
        from granular.errors import NotFoundError, ObjectChangedError

        folder, harm = sys.argv[1:]
        resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
        with granular.ShardedDatasetReader(folder) as reader:
            assert [reader[i]['n'] for i in range(100)] == list(range(100))
            file = f'{folder}/000007/x.bag'
            info = os.stat(file)
            with open(file, 'rb') as opened:
                content = opened.read()
            if harm == 'replaced':
                os.rename(file, f'{file}.old')
            if harm == 'removed':
                os.unlink(file)
            else:
                with open(file, 'r+b' if harm == 'written' else 'wb') as opened:
                    opened.write(content)
                os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))
            for read in (lambda: reader[7], lambda: reader.fetch(range(10))):
                try:
                    read()
                except (NotFoundError, ObjectChangedError) as error:
                    print(type(error).__name__, file in str(error))
            print([reader[i]['n'] for i in (6, 8)])
        """
    done = run_python(program, f'{shards(tmp_path / "shards", 100)}', harm)
    name = 'NotFoundError' if harm == 'removed' else 'ObjectChangedError'
    assert (done.stdout, done.stderr) == (f'{name} True\n' * 2 + '[6, 8]\n', '')


WORKERS = """
import os, resource, sys
import granular

def number(datapoint, seed):
    return {'n': datapoint['n']}

if __name__ == '__main__':
    folder, method, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with granular.ShardedDatasetReader(folder) as reader:
        source = granular.sources.Transform(granular.sources.Epochs(reader), number)
        limit = len(os.listdir('/proc/self/fd')) + 24
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            with granular.Loader(source, 10, mp=method, workers=count) as loader:
                print(sorted(n for _ in range(10) for n in next(loader)['n'].tolist()) == list(range(100)))
        except granular.errors.WorkerError as error:
            print(error)
"""


@pytest.mark.parametrize('method', ['spawn', 'fork'])
@pytest.mark.parametrize(
    ('count', 'outcome'), [(2, 'True'), (20, r'.*worker process .*Too many open files.*`ulimit -n`.* fewer workers')]
)
def test_workers_start_with_few_descriptors_or_name_the_limit(method, count, outcome, many, tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(WORKERS)
    command = [sys.executable, str(script), str(many), method, str(count)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert re.match(outcome, done.stdout), done.stderr


FULL = """
import contextlib, errno, os, resource, sys
import numpy as np
import psutil
import granular

def number(i, seed):
    return {'x': np.full(20_000, i)}

if __name__ == '__main__':
    source = granular.sources.Transform(range(4_000), number)
    with granular.Loader(source, 4, prefetch=2, workers=1, mp='fork') as loader:
        batches, messages = [next(loader)], set()
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        for free in range(4):
            own = []
            with contextlib.suppress(OSError):
                while True:
                    own.append(os.open('/dev/null', os.O_RDONLY))
            for fd in own[:free]:
                os.close(fd)
            for _ in range(10):
                try:
                    batches.append(next(loader))
                except granular.errors.WorkerError as error:
                    messages.add(str(error))
            for fd in own[free:]:
                os.close(fd)
            batches.append(next(loader))
        print(messages)
        right = all((batch['x'] == np.arange(4 * i, 4 * i + 4)[:, None]).all() for i, batch in enumerate(batches))
        del batches
        for _ in range(20):
            next(loader)
        (worker,) = psutil.Process().children()
        links = [os.readlink(f'/proc/{worker.pid}/fd/{fd}') for fd in os.listdir(f'/proc/{worker.pid}/fd')]
        print(right, sum('memfd:granular' in link for link in links) < 10)
"""


def test_batches_of_workers_that_meet_the_limit_of_descriptors_name_it_and_are_read_later(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(FULL)
    done = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True, timeout=100)
    message = r"{'the item of a worker process cannot be received .*Too many open files.*`ulimit -n`.*'}"
    assert re.fullmatch(f'{message}\nTrue True\n', done.stdout), (done.stdout, done.stderr)


def links(folder):
    found = [os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')]
    return [link for link in found if link.startswith(str(folder))]


def tables(folder):
    path = folder / 'table.parquet'
    pyarrow.parquet.write_table(pyarrow.table({'n': np.arange(10)}), path)
    return path


READERS = {
    'bag': lambda folder: granular.BagReader(shards(folder / 'shards', 3) / '000001' / 'x.bag'),
    'dataset': lambda folder: granular.DatasetReader(shards(folder / 'shards', 3) / '000001'),
    'shards': lambda folder: granular.ShardedDatasetReader(shards(folder / 'shards', 3)),
    'shards, no table in memory': lambda folder: granular.ShardedDatasetReader(
        shards(folder / 'shards', 3), cache_index=False
    ),
    'parquet': lambda folder: granular.ParquetDataSource(tables(folder)),
    'file': lambda folder: granular.Path(tables(folder)).open('rb'),
}  # fmt: skip


def read(reader):
    return reader.read(4) if hasattr(reader, 'read') else [reader[i] for i in range(len(reader))]


@pytest.mark.parametrize('name', READERS)
def test_files_close_with_their_last_reader(tmp_path, name):
    first = READERS[name](tmp_path)
    read(first)
    assert links(tmp_path)
    if hasattr(first, 'copy'):
        second = first.copy()
        first.close()
        assert read(second)
        second.close()
    else:
        first.close()
    assert links(tmp_path) == []
    dropped = READERS[name](tmp_path / 'dropped') if (tmp_path / 'dropped').mkdir() is None else None
    read(dropped)
    del dropped
    assert links(tmp_path) == []
    path = tmp_path / 'plain'
    path.write_bytes(b'content')
    assert granular.Path(path).read_range(1, 3) == b'on'
    assert links(tmp_path) == []
