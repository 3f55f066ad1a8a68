"""Caches that are closed while other threads read through them."""

import os
import threading
import uuid

import pytest

import granular
from tests.support.caches import RUN

CACHES = {
    'anonymous': granular.SharedMemoryCache,
    'named': lambda source: granular.SharedMemoryCache(source, name=f'{RUN}-{uuid.uuid4().hex[:8]}'),
    'redis': lambda source: granular.RedisCache(source, namespace=uuid.uuid4().hex),
}


class ClosingSource:
    """A source that calls a function in the middle of each fetch."""

    def __init__(self):
        self.call = None

    def __repr__(self):
        return 'ClosingSource()'

    def __len__(self):
        return 8

    def fetch(self, indices):
        self.call()
        return [int(index) for index in indices]


class Own:
    """Files of the program, which take the descriptors that were closed."""

    def __init__(self, folder):
        self.folder, self.files = folder, []

    def open(self):
        for i in range(16):
            self.files.append(os.open(self.folder / f'{i}', os.O_RDWR | os.O_CREAT))

    def check(self):
        """Close them; another one that closed any of them, or wrote to it, is an error."""
        for i, fd in enumerate(self.files):
            assert (os.fstat(fd).st_size, os.readlink(f'/proc/self/fd/{fd}')) == (0, str(self.folder / f'{i}'))
            os.close(fd)


@pytest.fixture
def own(tmp_path):
    own = Own(tmp_path)
    yield own
    own.check()


@pytest.mark.parametrize('name', CACHES)
def test_cache_closed_while_its_source_is_read_returns_the_values(name, own, redis_server, monkeypatch):
    monkeypatch.setenv('GRANULAR_REDIS_URL', redis_server.url)
    source = ClosingSource()
    cache = CACHES[name](source)

    def close():
        closing = threading.Thread(target=cache.close)
        closing.start()
        closing.join()
        own.open()

    source.call = close
    assert cache.fetch([1, 2]) == [1, 2]
    with pytest.raises(granular.errors.ClosedError):
        cache.fetch([1])


@pytest.mark.parametrize('name', ['anonymous', 'named'])
def test_close_waits_for_a_thread_that_stores_values(name, own, monkeypatch):
    source, files = ClosingSource(), []
    source.call = int
    cache = CACHES[name](source)
    write = os.pwritev

    def write_while_closing(fd, *args):
        thread.start()
        thread.join(0.2)  # it waits for this call
        own.open()
        files.append(os.readlink(f'/proc/self/fd/{fd}'))
        return write(fd, *args)

    thread = threading.Thread(target=cache.close)
    monkeypatch.setattr(os, 'pwritev', write_while_closing)
    assert cache.fetch([1]) == [1]
    thread.join()
    assert ['granular' in file for file in files] == [True]
