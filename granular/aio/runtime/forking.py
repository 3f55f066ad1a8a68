"""Forks, one at a time, and the functions that run in a forked child process, in a defined order.

A child has a copy of its parent's memory, but none of its threads, and shares its open files. Modules register what
they have to forget or to release.
"""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from granular import metrics

T = TypeVar('T')

inherited: Final[list[Any]] = []
"""Objects of the parent process that a child must neither use nor collect, such as its event loops."""

_resets: Final[list[Callable[[], Any]]] = []
_turns: Final = [threading.Lock()]
_forks: Final = [0]


def fork_turn() -> contextlib.AbstractContextManager[bool]:
    """Return the lock that excludes other threads that fork worker processes.

    From Python 3.12 on, filelock, which torch, ray and datasets import, fails a fork that begins during another one.
    """
    return _turns[0]


def forks() -> int:
    """Return a number that changes whenever this process forks, before and after it: a child has what it had then."""
    return _forks[0]


def _count_fork() -> None:
    _forks[0] += 1


def after_fork(reset: Callable[[], Any]) -> None:
    """Call a function in each forked child, after all that were registered before it.

    Modules register when they are imported, and import the layers below first: so lower layers are reset first.
    """
    _resets.append(reset)


def each_after_fork(reset: Callable[[T], Any]) -> weakref.WeakSet[T]:
    """Return an empty weak set; in each forked child, the function is called with each of its members."""
    members: weakref.WeakSet[T] = weakref.WeakSet()

    def reset_all() -> None:
        for member in list(members):
            reset(member)

    after_fork(reset_all)
    return members


def _reset() -> None:
    # An exit stack calls all of them, whichever of them fail; Python prints the error that it then raises.
    with contextlib.ExitStack() as stack:
        for reset in reversed(_resets):
            stack.callback(reset)


def _reset_turns() -> None:
    _turns[0] = threading.Lock()  # the thread of the parent that forked holds the one before


after_fork(metrics.reset)
after_fork(_reset_turns)
os.register_at_fork(before=_count_fork, after_in_parent=_count_fork, after_in_child=_reset)
