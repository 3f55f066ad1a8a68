"""Reading a huge record takes about its own size of memory, however it is read."""

import json
import subprocess
import sys

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from granular.config import MiB
from granular.formats import layout
from tests.support.servers import HTTPServer

SIZE = 96 * MiB
# Beside the record itself: buffers of connections and what the allocator keeps.
MOST = SIZE + 40 * MiB

WAYS = {
    'get': 'with granular.BagReader(path) as reader: assert len(reader[0]) == size',
    'fetch': 'with granular.BagReader(path) as reader: assert len(reader.fetch([0])[0]) == size',
    'neighbours': 'with granular.BagReader(path) as reader: assert sum(map(len, reader.fetch([0, 1]))) == size + 1',
    'without the table': 'with granular.BagReader(path, cache_index=False) as reader: assert len(reader[0]) == size',
    'iteration': 'with granular.BagReader(path) as reader: assert sum(map(len, reader)) == size + 1',
    'read_bytes': 'assert len(granular.Path(path).read_bytes()) == size + 17',
    'read_range': 'assert len(granular.Path(path).read_range(0, size)) == size',
    'cache_data': 'with granular.BagReader(path, cache_data=True) as reader: assert len(reader) == 2',
    'brotli': 'with granular.ArrayRecordDataSource(f"{path}.brotli") as source: assert len(source[0]) == size',
    'zstd': 'with granular.ArrayRecordDataSource(f"{path}.zstd") as source: assert len(source[0]) == size',
    'asynchronous': """
async def read():
    async with granular.aio.BagReader(path) as reader:
        assert len(await reader.get(0)) == size
asyncio.run(read())
""",
}
REMOTE_WAYS = ('get', 'cache_data', 'asynchronous')
PROGRAM = """
import asyncio, json, os, resource, sys
import granular
# A system call reads 2 GiB at most; here, less, so that the file need not be as large.
pread, preadv, most = os.pread, os.preadv, 8 << 20
os.pread = lambda fd, size, at: pread(fd, min(size, most), at)
os.preadv = lambda fd, views, at: preadv(fd, [view[:most] for view in views], at)
path, small, size, ways = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
with granular.BagReader(small) as reader:
    reader.fetch([0])  # imports what reading needs
for name, way in ways.items():
    if not os.fork():  # its peak is its own
        before = peak()
        exec(way)
        print(json.dumps([name, peak() - before]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""


@pytest.fixture(scope='module')
def huge(tmp_path_factory):
    """A bag of a sparse record of zeros and a record of one byte."""
    folder = tmp_path_factory.mktemp('huge')
    for name, size in (('huge', SIZE), ('small', 1)):
        with open(folder / f'{name}.bag', 'wb') as file:
            file.truncate(size)
            file.seek(size)
            file.write(b'x' + layout.table_of(np.array([size, size + 1]), 2))
    for compression in ('brotli', 'zstd'):
        writer = ArrayRecordWriter(str(folder / f'huge.bag.{compression}'), f'group_size:1,{compression}:1')
        writer.write(bytes(SIZE))
        writer.close()
    return folder


def peaks(ways, root):
    """Return the peak of memory of each way to read."""
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, f'{root}/huge.bag', f'{root}/small.bag', str(SIZE), json.dumps(ways)],
        capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.fixture(scope='module')
def local_peaks(huge):
    return peaks(WAYS, huge)


@pytest.fixture(scope='module')
def remote_peaks(huge):
    with HTTPServer(huge) as server:
        return peaks({way: WAYS[way] for way in REMOTE_WAYS}, server.endpoint)


@pytest.mark.parametrize('way', WAYS)
def test_huge_local_record_takes_its_own_size_of_memory(local_peaks, way):
    # Of neighbours in one request each is cut out of it, so that one does not keep the other alive.
    assert local_peaks[way] < MOST + (SIZE if way in ('neighbours', 'iteration') else 0)


@pytest.mark.parametrize('way', REMOTE_WAYS)
def test_huge_remote_record_takes_its_own_size_of_memory(remote_peaks, way):
    assert remote_peaks[way] < MOST
