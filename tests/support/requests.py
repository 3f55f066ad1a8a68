"""The requests of a function: how many, and how many bytes."""

from collections.abc import Callable
from typing import Any, TypeVar

import granular
from tests.support.servers import Server

Result = TypeVar('Result')


def steady(server: Server, **options: Any) -> granular.Path:
    """Make an empty folder in a bucket, without hedged requests, so that requests can be counted."""
    folder = server.place()
    config = granular.IOConfig(hedge=0, **options)
    return granular.Path(str(folder), config=config, **folder.aio.store.options)


def requests(fn: Callable[[], Result]) -> tuple[Result, int, int]:
    """Return a function's result, and the requests and bytes that it took."""
    before = granular.io_stats()
    result = fn()
    after = granular.io_stats()
    return result, after['requests'] - before['requests'], after['bytes'] - before['bytes']
