"""File systems of fsspec that lend a store their credentials or their methods."""

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from granular.errors import InvalidArgumentError

T = TypeVar('T')

LENT: Final = 'credentials of fs'
"""Name of the option with the file system that lends a store its credentials. Pickles leave it out, by its name."""


def options_of(fs: Any) -> dict[str, Any]:
    """Return the options with which a file system was made, by name."""
    names = [
        name
        for name, parameter in inspect.signature(type(fs).__init__).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name != 'self'
    ]
    if len(fs.storage_args) > len(names):
        raise InvalidArgumentError(f'{type(fs).__name__}: pass its options by name, as in project=..., not by position')
    return {**dict(zip(names, fs.storage_args, strict=False)), **fs.storage_options}


def current(fs: Any) -> Any:
    """Return a file system that works in this process: after a fork, an asynchronous one is made anew."""
    try:
        _ = fs.async_impl and fs.loop
    except RuntimeError:  # it is that of the parent process
        return type(fs)(*fs.storage_args, **fs.storage_options)
    return fs


async def on_its_loop(fs: Any, coro: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that runs under the event loop of a file system; cancelling cancels it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, fs.loop))
