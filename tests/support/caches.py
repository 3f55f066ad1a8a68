"""Sources for the tests of caches, and the shared memory that processes have left or opened."""

import contextlib
import os
import time
import uuid

import numpy as np

from granular.aio.caches.segments import FOLDER, path_of
from granular.aio.stores.local.locks import RangeLocks, is_locked

RUN = f'run-{uuid.uuid4().hex[:12]}'
"""A part of each name, as several runs of the tests may share a machine."""


def named_memory():
    """Return the paths of all named memory."""
    return {os.path.join(FOLDER, name) for name in os.listdir(FOLDER) if name.startswith('granular-')}


def unheld_memory():
    """Return the paths of named memory that no process holds."""
    return {path for path in named_memory() if not is_locked(path) and os.path.lexists(path)}


def cache_file(name):
    """Return the path of the memory of a named cache."""
    return path_of('cache', name)


def data_file(name):
    """Return the path of the memory of a named source in memory."""
    return path_of('data', name)


def locked_table(name):
    """Lock the table of a named cache, as a process that stores values; return what holds the lock."""
    locks = RangeLocks(cache_file(name))
    if not locks.lock(0, 1):
        raise AssertionError(f'{name}: its table is locked')
    return locks


def open_memory():
    """Return the memory that this process has open."""
    links = []
    for name in os.listdir('/proc/self/fd'):
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f'/proc/self/fd/{name}'))
    return [link for link in links if 'granular-' in link and ('memfd:' in link or link.startswith(FOLDER))]


class RecordingSource:
    """A source that writes the indices of each fetch to a file that processes share."""

    def __init__(self, log, count=64, size=1000, delay=0.0):
        self.log, self.count, self.size, self.delay = str(log), count, size, delay

    def __len__(self):
        return self.count

    def __repr__(self):
        return f'RecordingSource({self.count})'

    def fetch(self, indices):
        with open(self.log, 'a') as file:
            file.write(' '.join(map(str, indices)) + '\n')
        time.sleep(self.delay)
        return [{'x': np.full(self.size, i, np.uint8), 'label': i} for i in indices]

    @property
    def fetched(self):
        with open(self.log) as file:
            return [[int(index) for index in line.split()] for line in file]


def label(datapoint):
    assert (datapoint['x'] == datapoint['label']).all()
    return datapoint['label']
