"""What tests of public behaviour need of the inside of the library: of those tests, only this module imports it."""

import pickle
import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import pytest

import granular
from granular._support.lru import LRU
from granular.aio.pipeline.data_source import identify
from granular.aio.pipeline.execution.shared_memory import split
from granular.aio.pipeline.iter_dataset import stream_of
from granular.aio.pipeline.position import FITS
from granular.aio.runtime import replied
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.pools import CORES, Threads
from granular.aio.runtime.portal import portal, run
from granular.aio.runtime.replied import replied_servers
from granular.aio.runtime.worker_pickling import pickling_for_worker
from granular.aio.stores.base import Request

__all__ = [
    'CORES',
    'FITS',
    'delay_consumer',
    'delay_loop',
    'describe',
    'forget_servers',
    'identity_of',
    'on_loop',
    'pickled_for_worker',
    'pool_of_a_thread',
    'read_many',
    'replied_servers',
    'split_for_worker',
    'stream_of',
]

Result = TypeVar('Result')


def on_loop(coro: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine on the library's event loop, as blocking calls do, and return its result."""
    return run(coro)


def pool_of_a_thread() -> Threads:
    """Return a pool of the library with one thread."""
    return Threads(1, 'pool')


def delay_loop(monkeypatch: pytest.MonkeyPatch, delay: Callable[[], object]) -> None:
    """Call a function whenever the first batch of a Loader goes to the event loop, as if that was busy."""

    async def delayed() -> None:
        if sys._getframe(1).f_code.co_name == 'next':  # not where loaders of earlier tests are closed
            delay()
        await to_loop()

    monkeypatch.setattr('granular.aio.pipeline.loader.running.to_loop', delayed)


def delay_consumer(monkeypatch: pytest.MonkeyPatch, delay: Callable[[], object]) -> list[Any]:
    """Call a function after each call of a consumer that another thread ended; return the list of these calls.

    An element that is ready is taken on the consumer's thread.
    """
    calls: list[Any] = []

    def delayed(*args: Any, **options: Any) -> Any:
        before = len(calls)
        result = run(*args, **options)
        if len(calls) > before:
            delay()
        return result

    submit = portal.submit
    monkeypatch.setattr(portal, 'submit', lambda call: (calls.append(call), submit(call)))
    monkeypatch.setattr('granular.aio.pipeline.cursor.run', delayed)
    return calls


def pickled_for_worker(value: Any) -> bytes:
    """Pickle a value as for a worker process: readers with what they have read of their datasets."""
    token = pickling_for_worker.set(True)
    try:
        return pickle.dumps(value)
    finally:
        pickling_for_worker.reset(token)


def split_for_worker(value: Any) -> tuple[bytes, list[Any]]:
    """Pickle a value as for a worker process; the memory of its arrays, which workers share, is apart."""
    token = pickling_for_worker.set(True)
    try:
        return split(value)
    finally:
        pickling_for_worker.reset(token)


def describe(folder: granular.Path) -> dict[str, Any]:
    """Return what ``granular info`` shows of a folder."""
    from granular.cli.describe import describe  # imports much that other tests do not need

    return describe(folder)


async def identity_of(source: Any) -> Any:
    """Return what caches compare of an open data source."""
    await identify(source)
    return source.identity()


async def read_many(bucket: Any, names: Iterable[str], start: int, stop: int, version: str) -> list[bytes]:
    """Read a range of each of several objects of a bucket at once."""
    read: list[bytes] = await bucket.store.read_many([Request(name, [start], [stop], version) for name in names])
    return read


def forget_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which servers have replied, until the end of the test."""
    monkeypatch.setattr(replied, 'known', LRU(4096))
