"""The number of cores that this process may use: of the machine, of its affinity, and of its container."""

import contextlib
import os
import pathlib


def usable_cores(mount: str = '/sys/fs/cgroup', groups: str = '/proc/self/cgroup') -> int:
    """Return the number of cores that this process may use, at least one: a quota of a container is rounded up.

    The control groups of the system, in either version, are mounted at ``mount``; ``groups`` names this process's.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    lines: list[str] = []
    with contextlib.suppress(OSError):  # a system may have no control groups
        lines = pathlib.Path(groups).read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(':', 2)
        if controllers == '' or 'cpu' in controllers.split(','):
            root = pathlib.Path(mount, 'cpu' if controllers else '')
            inside = root / path.strip('/')  # in a container, the path may be that of the host, and absent
            for folder in (inside, *inside.parents):
                if folder.is_relative_to(root) and (quota := _quota(folder)) is not None:
                    cores = min(cores, quota)
    return max(1, cores)


def _quota(folder: pathlib.Path) -> int | None:
    """Return the quota of a control group in cores; None if there is none."""
    try:
        with contextlib.suppress(FileNotFoundError):
            quota, period = (folder / 'cpu.max').read_text().split()
            return None if quota == 'max' else -(-int(quota) // int(period))
        count, length = (int((folder / f'cpu.cfs_{name}_us').read_text()) for name in ('quota', 'period'))
        return None if count < 0 else -(-count // length)
    except (OSError, ValueError):  # there is none, or this process may not read it
        return None
