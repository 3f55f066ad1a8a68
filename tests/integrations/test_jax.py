"""JAX with four devices and with two processes, and Orbax. tests/support/jax_cases.py has the cases."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.servers import free_ports

SOURCE = (ROOT / 'tests/support/jax_cases.py').read_text()
ENVIRONMENT = {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=4', 'PYTHONWARNINGS': ''}


def started(folder, *args, **environment):
    return subprocess.Popen(
        [sys.executable, '-m', 'tests.support.jax_cases', str(folder), *map(str, args)],
        env={**os.environ, **ENVIRONMENT, **environment}, cwd=ROOT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(process):
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
    """Run the cases in one process and in each of two, at the same time, and return their failures."""
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp('jax')
    two = {'XLA_FLAGS': '--xla_force_host_platform_device_count=2'}
    processes = [started(folder), *(started(folder, index, 2, port, **two) for index in range(2))]
    try:
        return [ended(process) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize('case', re.findall(r'^def (case_\w+)', SOURCE, re.MULTILINE))
def test_case_in_one_process(outcomes, case):
    assert not outcomes[0][case], outcomes[0][case]


@pytest.mark.parametrize('index', [0, 1])
def test_cases_in_two_processes(outcomes, index):
    assert outcomes[1 + index] == {'several_each_its_part_and_its_file': ''}, outcomes
