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


def call_checked(call: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the user's; raise ``InvalidArgumentError``, with the call in words, if it refuses it."""
    try:
        return fn(*args, **kwargs)
    except TypeError as error:
        entered = error.__traceback__ is None or error.__traceback__.tb_next is not None
        misfit = '' if entered else _misfit(fn, args, kwargs)
        if not misfit:
            raise
        raise InvalidArgumentError(f'{call}, which {misfit}') from None


def _misfit(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe why a function does not accept arguments; empty if it does, or if that is unknown."""
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):
        return ''
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return f'{name_of(fn)}{signature} does not accept: {error}'
    return ''


def name_of(fn: Any) -> str:
    """Return the name of a function for printed pipelines."""
    owner = getattr(fn, '__self__', None)
    if owner is not None and not isinstance(owner, type | types.ModuleType):
        return type(owner).__qualname__
    fn = getattr(fn, 'func', fn)  # unwrap a functools.partial
    return getattr(fn, '__qualname__', type(fn).__qualname__).replace('<locals>.', '')
