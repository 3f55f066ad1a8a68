"""Programs in processes of their own: each ends at its limit, with the stacks of its threads, or is killed."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil

from tests import ROOT

LIMIT = 300
"""Seconds that a program may take. It ends itself, with its stacks, before it is killed."""

_GRACE = 20
_MARK = 'TESTS_DRIVERS_PROGRAM'


def launch(program: str, ranks: int, folder: Path) -> str:
    """Run a program of ``programs/``, in one process or in one per rank, and return its output.

    Raises:
      AssertionError: if it failed, or needed longer than its limit; with its output.
    """
    command = [sys.executable, '-m', 'tests.drivers.run', program, str(folder), str(LIMIT - _GRACE)]
    if ranks > 1:
        # The agent of torchrun finds a free port itself, and the ranks use its store: no port is found and lost.
        options = '--standalone', '--local-addr=localhost', f'--nproc-per-node={ranks}'
        command = [sys.executable, '-m', 'torch.distributed.run', *options, *command[1:]]
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(mark), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = f'killed after {LIMIT} seconds'
        finally:
            kill_marked(mark)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors='replace')
    assert code == 0, f'{program}, {ranks} ranks: {code}:\n{text[-20_000:]}'
    return text


def kill_marked(mark: str) -> None:
    """Kill all processes that have the mark in their environment.

    The group of the first one has not all of them: torchrun gives each rank a session of its own, and the workers of a
    rank that was killed have another parent.
    """
    for _ in range(5):  # they may start others meanwhile
        marked = [process for process in psutil.process_iter() if _has(process, mark)]
        for process in marked:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(marked, timeout=10)


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _environment(mark: str) -> dict[str, str]:
    """Return the environment of a program: one thread for each process, the loopback device, no network, no GPU."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith('lo')), '')
    of_ranks = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')
    return {
        **{name: value for name, value in os.environ.items() if name not in of_ranks},
        _MARK: mark,
        'PYTHONPATH': str(ROOT),
        'PYTHONUNBUFFERED': '1',
        'OMP_NUM_THREADS': '1',
        'CUDA_VISIBLE_DEVICES': '',
        'HF_HUB_OFFLINE': '1',
        'TOKENIZERS_PARALLELISM': 'false',
        'ACCELERATE_USE_CPU': 'true',
        **({'GLOO_SOCKET_IFNAME': loopback} if loopback else {}),
    }
