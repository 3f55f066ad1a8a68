"""Functions and transformations of the user: their method, their name, and calls that they do not accept."""

import inspect
import types
from collections.abc import Callable
from typing import Any

from granular.aio.runtime.user_functions import refuse_coroutine_function
from granular.errors import InvalidArgumentError


def method_of(transform: Any, name: str) -> Callable[..., Any]:
    """Return the method of a transformation with the given name, or the transformation itself if it has none."""
    method = getattr(transform, name, None) if not isinstance(transform, type) else None
    fn = method if callable(method) else transform
    if not callable(fn):
        raise InvalidArgumentError(f'{transform!r:.100} is neither a function nor an object with a method {name!r}')
    refuse_coroutine_function(fn)
    return fn  # type: ignore[no-any-return]


def refuse_misfit(error: TypeError, call: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Raise an error that shows the call, if a TypeError comes from arguments that a function does not accept.

    Args:
      error: the TypeError, caught in the frame that called the function.
      call: the call, in words.
      fn: the function.
      args: the positional arguments of the call.
      kwargs: its keyword arguments.
    """
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return  # the function was entered
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as misfit:
        raise InvalidArgumentError(f'{call}, which {name_of(fn)}{signature} does not accept: {misfit}') from None


def name_of(fn: Any) -> str:
    """Return the name of a function for printed pipelines."""
    owner = getattr(fn, '__self__', None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        return type(owner).__qualname__
    fn = getattr(fn, 'func', fn)  # unwrap a functools.partial
    return getattr(fn, '__qualname__', type(fn).__qualname__).replace('<locals>.', '')
