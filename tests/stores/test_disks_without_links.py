"""Disks whose file systems have no hard links, such as exFAT: the system refuses them to a process."""

import errno
import platform
import subprocess
import sys

import pytest

import granular

# The numbers of the system calls link and linkat.
CALLS = {'x86_64': (86, 265), 'aarch64': (37,)}
PROGRAM = """
import ctypes, struct, sys
import granular

folder, code, *numbers = sys.argv[1:]
# Instructions of seccomp(2): load the number of a call, compare it, allow the call or return an error.
skips = enumerate(map(int, numbers))
lines = [(0x20, 0, 0, 0), *((0x15, len(numbers) - i, 0, number) for i, number in skips)]
lines += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050000 | int(code))]
rules = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in lines))
filters = ctypes.create_string_buffer(struct.pack('HP', len(lines), ctypes.addressof(rules)))
libc = ctypes.CDLL(None)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filters):
    sys.exit('unsupported')

def write(values):
    with granular.DatasetWriter(folder, {'x': 'int'}) as writer:
        for value in values:
            writer.append({'x': value})

write(range(3))
try:
    write(range(5))
except granular.errors.AlreadyExistsError:
    print('refused')
"""


@pytest.mark.skipif(sys.platform != 'linux' or platform.machine() not in CALLS, reason='needs the calls of Linux')
@pytest.mark.parametrize('code', [errno.EPERM, errno.ENOTSUP, errno.ENOSYS], ids=errno.errorcode.get)
def test_datasets_are_written_once_without_hard_links(tmp_path, code):
    command = [sys.executable, '-c', PROGRAM, tmp_path / 'data', code, *CALLS[platform.machine()]]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    if done.stderr == 'unsupported\n':
        pytest.skip('the system has no filters of calls')
    assert (done.returncode, done.stdout, done.stderr) == (0, 'refused\n', '')
    with granular.DatasetReader(tmp_path / 'data') as reader:
        assert [point['x'] for point in reader] == [0, 1, 2]
    assert not [path for path in (tmp_path / 'data').iterdir() if path.name.startswith('.')]
