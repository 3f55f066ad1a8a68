"""Memory for received data: what the allocator keeps when it is freed."""

import os
import subprocess
import sys

import pytest

# The allocator gives an arena to each thread that allocates while the others live, up to its maximum.
PROGRAM = """
import ctypes, pathlib, sys, threading
import granular

path = granular.Path(sys.argv[2])
path.read_range(0, 1)  # the first read of the process
barrier = threading.Barrier(32)

def allocate():
    buffer = bytearray(100_000)
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(32)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b'w'))
libc.malloc_info(0, file)
libc.fclose(file)
print(pathlib.Path(sys.argv[1]).read_text().count('<heap nr='))
"""


MOST = max(2, min(8, os.cpu_count() or 1))


@pytest.mark.parametrize(('setting', 'most'), [({}, MOST), ({'MALLOC_ARENA_MAX': '9'}, 9)])
def test_freed_memory_is_kept_in_few_arenas(tmp_path, setting, most):
    (tmp_path / 'x').write_bytes(b'x')
    command = [sys.executable, '-c', PROGRAM, str(tmp_path / 'arenas.xml'), str(tmp_path / 'x')]
    environment = {**os.environ, **setting}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=250, env=environment)
    assert int(done.stdout) == most
