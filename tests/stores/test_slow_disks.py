"""Reads from a disk of which each takes a while, as of a network file system."""

import contextlib
import os
import threading
import time

import pytest

import granular
from granular.errors import GranularError

COUNT = 80


def record(i):
    return bytes([i]) * 10_000


@contextlib.contextmanager
def slow_disk(monkeypatch):
    """Let each read take 5 ms. Yields a list with the most reads at a time."""
    original, lock, active, most = os.pread, threading.Lock(), [0], [0]

    def pread(*args):
        with lock:
            active[0] += 1
            most[0] = max(most[0], active[0])
        time.sleep(0.005)
        with lock:
            active[0] -= 1
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, 'pread', pread)
        yield most


@pytest.fixture(params=[1, COUNT // 2], ids=['one file', 'many files'])
def folder(request, tmp_path):
    with granular.ShardedDatasetWriter(tmp_path / 'ds', {'x': 'bytes'}, shardlen=COUNT // request.param) as writer:
        for i in range(COUNT):
            writer.append({'x': record(i)})
    return tmp_path / 'ds'


@pytest.mark.parametrize('opened', [False, True], ids=['first read', 'second read'])
def test_scattered_records_are_read_at_the_same_time(folder, monkeypatch, opened):
    picks = list(range(0, COUNT, 2))  # which are too far apart for one read
    with granular.ShardedDatasetReader(folder) as reader:
        reader.fetch(picks if opened else [])
        with slow_disk(monkeypatch) as most:
            assert [datapoint['x'] for datapoint in reader.fetch(picks)] == list(map(record, picks))
    assert most[0] > 4


@pytest.mark.parametrize('opened', [False, True], ids=['first read', 'second read'])
def test_file_that_shrinks_while_others_are_read_is_named(folder, monkeypatch, opened):
    picks = [*range(0, COUNT - 2, 2), COUNT - 1]
    with granular.ShardedDatasetReader(folder) as reader:
        reader.fetch(picks if opened else [])
        last = sorted(folder.rglob('x.bag'))[-1]
        os.truncate(last, 4)
        with slow_disk(monkeypatch), pytest.raises(GranularError, match=f'{last}'):
            reader.fetch(picks)
