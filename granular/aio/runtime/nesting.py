"""Blocking calls that a thread makes within another one, as a handler of a signal does."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final, TypeVar

from granular.errors import GranularError

F = TypeVar('F', bound=Callable[..., Any])

_blocking: Final[set[CodeType]] = set()


def blocking_call(function: F) -> F:
    """Mark a function that blocks the thread until a coroutine has ended."""
    _blocking.add(function.__code__)
    return function


def nested_calls() -> bool:
    """Return whether this thread runs a function that blocks within another one."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # of a long stack, too: this is asked only where a call would wait
        count += frame.f_code in _blocking
        frame = frame.f_back
    return count > 1


def refuse_within(code: CodeType, owner: object) -> None:
    """Raise ``GranularError`` if this thread runs a method of an object, with this code, outside of the caller."""
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get('self') is owner:
            raise nested_call()
        frame = frame.f_back


def nested_call() -> GranularError:
    """Return the error of a call that can only wait for itself."""
    return GranularError(
        'the object is in use by another call of this thread, which a signal interrupted, or which called this '
        'function: let the handler of a signal set a flag, and act on it between two calls'
    )
