"""JAX with four devices, Orbax beside it, and two processes of JAX; the cases are those of jax_cases.py."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.servers import free_ports

SOURCE = (pathlib.Path(__file__).parent / 'jax_cases.py').read_text()
ENVIRONMENT = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=4', 'PYTHONWARNINGS': ''}


def started(folder, *args, **environment):
    return subprocess.Popen(
        [sys.executable, '-m', 'tests.jax_cases', str(folder), *map(str, args)],
        env={**os.environ, **ENVIRONMENT, **environment}, cwd=pathlib.Path(__file__).parent.parent,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process):
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope='module')
def outcome(tmp_path_factory):
    """What each case failed with."""
    return ended(started(tmp_path_factory.mktemp('jax')))


@pytest.mark.parametrize('case', re.findall(r'^def (case_\w+)', SOURCE, re.MULTILINE))
def test_one_process(outcome, case):
    assert not outcome[case], outcome[case]


def test_two_processes(tmp_path):
    (port,) = free_ports(1)
    two = {'XLA_FLAGS': '--xla_force_host_platform_device_count=2'}
    processes = [started(tmp_path, index, 2, port, **two) for index in range(2)]
    try:
        for found in map(ended, processes):
            assert set(found.values()) == {''}, '\n'.join(found.values())
    finally:
        for process in processes:
            process.kill()
