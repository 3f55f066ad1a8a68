"""Disks whose file systems have no hard links, such as exFAT: the system refuses them to a process."""

import errno
import itertools
import os
import platform
import signal
import subprocess
import sys

import pytest

import granular
from tests.support.interpreters import Interpreter

# The numbers of the system calls link and linkat, and of renameat2.
CALLS = {'x86_64': (86, 265), 'aarch64': (37,)}
RENAME = {'x86_64': 316, 'aarch64': 276}
PROGRAM = """
import ctypes, os, signal, struct, sys
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

def killed(event, _, left=[int(os.environ.get('STEPS', -1))]):
    left[0] -= event.startswith('os.') or event == 'open'
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(killed)
write(range(3))
try:
    write(range(5))
except granular.errors.AlreadyExistsError:
    print('refused')
"""


pytestmark = pytest.mark.skipif(
    sys.platform != 'linux' or platform.machine() not in CALLS, reason='needs the calls of Linux'
)


@pytest.mark.parametrize('renames', [True, False], ids=['renames', 'no renames'])
@pytest.mark.parametrize('code', [errno.EPERM, errno.ENOTSUP, errno.ENOSYS], ids=errno.errorcode.get)
def test_datasets_are_written_once_without_hard_links(tmp_path, code, renames):
    machine = platform.machine()
    command = [sys.executable, '-c', PROGRAM, tmp_path / 'data', code, *CALLS[machine]]
    command += [] if renames else [RENAME[machine]]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=60, check=False)
    if done.stderr == 'unsupported\n':
        pytest.skip('the system has no filters of calls')
    assert (done.returncode, done.stdout, done.stderr) == (0, 'refused\n', '')
    with granular.DatasetReader(tmp_path / 'data') as reader:
        assert [point['x'] for point in reader] == [0, 1, 2]
    assert not [path for path in (tmp_path / 'data').iterdir() if path.name.startswith('.')]


def test_a_writer_killed_at_any_step_without_hard_links_leaves_what_is_written_anew(tmp_path):
    """Rather than an empty file under the name of ``spec.json``, which is neither read nor written over."""
    args = [f'{errno.EPERM}', *map(str, CALLS[platform.machine()])]
    with Interpreter('numpy', 'granular.sync.datasets', options=()) as interpreter:
        for steps in itertools.count(1):
            folder = tmp_path / f'{steps}'
            done = interpreter.run(PROGRAM, f'{folder}', *args, env={**os.environ, 'STEPS': f'{steps}'})
            if done.stderr == 'unsupported\n':
                pytest.skip('the system has no filters of calls')
            assert done.returncode == -signal.SIGKILL, done.stderr
            published = (folder / 'spec.json').exists()
            if not published:
                with granular.DatasetWriter(folder, {'x': 'int'}) as writer:
                    for value in range(3):
                        writer.append({'x': value})
            with granular.DatasetReader(folder, verify=True) as reader:
                assert [point['x'] for point in reader] == [0, 1, 2], steps
            if published:
                break
    assert steps > 10
