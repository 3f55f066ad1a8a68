"""The coroutines that each thread begins or waits for: one within another, as by the handler of a signal."""

import contextlib
import contextvars
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeVar, TypeVarTuple

from granular.errors import GranularError

T = TypeVar('T')
Ts = TypeVarTuple('Ts')

Root = Coroutine[Any, Any, Any]


class _Here(threading.local):
    """The call that this thread begins now, and those that it began or waits for beneath it, the outermost first."""

    coro: Root | None = None
    beneath: tuple[Root, ...] = ()


here: Final = _Here()
calls: Final[contextvars.ContextVar[tuple[Root, ...]]] = contextvars.ContextVar('calls', default=())
"""The coroutine of the blocking call that the running task works for, last, and those beneath it in its thread."""


@contextlib.contextmanager
def blocked(coro: Root, context: contextvars.Context) -> Iterator[None]:
    """Let this thread wait for a coroutine, which runs in a context."""
    outer, beneath = here.coro, here.beneath
    waiting = (*beneath, coro) if outer is None else (*beneath, outer, coro)
    context.run(calls.set, waiting)
    here.coro, here.beneath = None, waiting
    try:
        yield
    finally:
        here.coro, here.beneath = outer, beneath


def outside_loops(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call a function on this thread, which a loop may have called, as if it was not: what it begins has no loop."""
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(None, None)
    try:
        return fn(*args)
    finally:
        sys.set_asyncgen_hooks(*hooks)


def call_on_own_loop() -> GranularError:
    """Return the error of a blocking call on the loop that would wait for what that loop has to do."""
    return GranularError(
        'a blocking call on the loop that would have to run it: await the method of granular.aio instead'
    )


def nested_call() -> GranularError:
    """Return the error of a call that can only wait for itself."""
    return GranularError(
        'the object is in use by another call of this thread, which a signal interrupted, or which called this '
        'function: let the handler of a signal set a flag, and act on it between two calls'
    )
