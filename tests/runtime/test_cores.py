"""The cores that a process may use: those of its affinity, and of its container."""

import subprocess
import sys

import pytest

from granular.aio.runtime.cores import usable_cores


@pytest.mark.parametrize(
    ('files', 'groups', 'cores'),
    [
        ({'cpu.max': 'max 100000'}, '0::/', 64),
        ({'cpu.max': '150000 100000'}, '0::/', 2),
        ({'cpu.max': '50000 100000'}, '0::/', 1),
        ({'pods/cpu.max': '400000 100000', 'pods/mine/cpu.max': 'max 100000'}, '0::/pods/mine', 4),
        ({'cpu.max': '300000 100000'}, '0::/path/of/the/host', 3),
        ({'cpu/cpu.cfs_quota_us': '-1', 'cpu/cpu.cfs_period_us': '100000'}, '3:cpu,cpuacct:/\n0::/', 64),
        ({'cpu/mine/cpu.cfs_quota_us': '250000', 'cpu/mine/cpu.cfs_period_us': '100000'}, '3:cpu:/mine', 3),
        ({}, '0::/', 64),
        ({}, None, 64),
    ],
)
def test_cores_are_those_of_the_container(files, groups, cores, tmp_path, monkeypatch):
    monkeypatch.setattr('os.sched_getaffinity', lambda _: set(range(64)))
    for name, text in files.items():
        file = tmp_path / 'cgroup' / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if groups is not None:
        (tmp_path / 'groups').write_text(groups)
    assert usable_cores(f'{tmp_path}/cgroup', f'{tmp_path}/groups') == cores


def test_cores_are_those_of_the_affinity():
    program = 'import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n'
    program += 'from granular.aio.runtime.cores import usable_cores; print(usable_cores())'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout == '1\n'
