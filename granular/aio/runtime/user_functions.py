"""Functions and transformations of the user: their method, their name, calls that they do not accept, and calls whose
exceptions must not be taken for those of coroutines, iterators and the program.
"""

import asyncio
import concurrent.futures
import contextvars
import inspect
import threading
import types
from collections.abc import Awaitable, Callable
from typing import Any, Final, NoReturn, TypeVar, TypeVarTuple

from granular.aio.runtime.tasks import was_cancelled
from granular.errors import FunctionError, GranularError, InvalidArgumentError

T = TypeVar('T')
Ts = TypeVarTuple('Ts')

CONTROL: Final = (
    StopIteration, StopAsyncIteration, GeneratorExit, asyncio.CancelledError, concurrent.futures.CancelledError,
    SystemExit, KeyboardInterrupt,
)  # fmt: skip
"""Exceptions that mean an end to coroutines, futures, iterators or the program, instead of that a function failed."""


computing: Final[contextvars.ContextVar[tuple[object, ...]]] = contextvars.ContextVar('computing', default=())
"""Tokens of the iterators whose elements this context computes: a function that it calls may not wait for them."""


def mark_computing(token: object) -> None:
    """Mark the context of the current task: it computes elements of the iterator with this token."""
    tokens = computing.get()
    if token not in tokens:
        computing.set((*tokens, token))


def refuse_own_use(token: object) -> None:
    """Raise an error in a function that computes elements of the iterator with this token, and would wait for them."""
    if token in computing.get():
        raise GranularError(
            'an iterator was used by a function that computes its elements, which would wait for itself: '
            'use another iterator there'
        )


def function_error(error: BaseException) -> FunctionError:
    """Return the error to raise in place of an exception of ``CONTROL``, which becomes its cause."""
    detail = f': {error}' if str(error) else ''
    replacement = FunctionError(f'a function that was given to granular raised {type(error).__name__}{detail}')
    replacement.__cause__ = error
    return replacement


def is_of_signal(error: BaseException) -> bool:
    """Return whether an exception may come from the handler of a signal, which Python calls in the main thread."""
    return isinstance(error, SystemExit | KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def raise_control(error: BaseException) -> NoReturn:
    """Raise the ``FunctionError`` for an exception of ``CONTROL``, or the exception itself if it may be of a signal."""
    if not is_of_signal(error):
        raise function_error(error)
    try:
        raise error
    finally:
        del error  # this frame would keep it alive, by its own traceback


def call_user(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a user function. An exception of ``CONTROL`` becomes a ``FunctionError``, except those of signals."""
    try:
        return fn(*args)
    except CONTROL as error:
        raise_control(error)


def refuse_deferred(fn: object, yields: bool = False) -> None:
    """Raise an error for a function whose coroutine, or generator unless it ``yields``, would be taken for a result."""
    for function in (fn, getattr(fn, '__call__', None)):  # noqa: B004
        if inspect.iscoroutinefunction(function):
            kind = 'coroutine'
            remedy = 'only the coroutine of a source with `async def fetch(self, indices)` is awaited'
        elif not yields and (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
            kind = 'generator'
            remedy = 'return a value, or pass a function that yields several to flat_map'
        else:
            continue
        name = getattr(fn, '__qualname__', type(fn).__qualname__)
        raise InvalidArgumentError(f'expected a function, got the {kind} function {name}: {remedy}')


def function_or(name: str, fn: object, default: Callable[..., Any]) -> Callable[..., Any]:
    """Return an argument that must be a function, or the default for None."""
    if fn is None:
        return default
    if not callable(fn):
        raise InvalidArgumentError(f'{name}: expected a function or None, got {fn!r:.100}')
    refuse_deferred(fn)
    return fn


def method_of(transform: object, name: str) -> Callable[..., Any]:
    """Return the method of a transformation with the given name, or the transformation itself if it has none."""
    method = getattr(transform, name, None) if not isinstance(transform, type) else None
    fn: object = method if callable(method) else transform
    if not callable(fn):
        raise InvalidArgumentError(f'{transform!r:.100} is neither a function nor an object with a method {name!r}')
    refuse_deferred(fn, yields=name == 'flat_map')
    return fn


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


async def await_user(coro: Awaitable[T]) -> T:
    """Await a user's coroutine, as ``call_user`` calls a function. A cancellation of this task passes through."""
    try:
        return await coro
    except asyncio.CancelledError as error:
        if was_cancelled():
            raise
        raise function_error(error) from error
    except GeneratorExit as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is None:
            raise  # this coroutine is being closed: the error does not come from the user's
        raise function_error(error) from error
    except CONTROL as error:
        raise_control(error)
    except FunctionError:
        raise
    except RuntimeError as error:
        if isinstance(cause := error.__cause__, StopIteration | StopAsyncIteration):  # Python wraps these in coroutines
            raise function_error(cause) from cause
        raise
