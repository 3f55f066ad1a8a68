"""Forks, one at a time, and the functions that run in a forked child process, in a defined order.

A child has a copy of its parent's memory, but none of its threads, and shares its open files. Modules register what
they have to forget or to release.
"""

import contextlib
import itertools
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
_numbers: Final = itertools.count(1)
_last: Final = [0]  # the number of the last fork that began
_forking: Final[set[int]] = set()  # the threads that fork


def fork_turn() -> contextlib.AbstractContextManager[bool]:
    """Return the lock that excludes other threads that fork worker processes.

    From Python 3.12 on, filelock, which torch, ray and datasets import, fails a fork that begins during another one.
    """
    return _turns[0]


def last_fork() -> int:
    """Return the number of the last fork of this process; -1 during one, whose child may have what is made now."""
    return -1 if _forking else _last[0]


def _begin_fork() -> None:
    _forking.add(threading.get_ident())
    _last[0] = next(_numbers)


def _end_fork() -> None:
    _forking.discard(threading.get_ident())


def after_fork(reset: Callable[[], Any]) -> None:
    """Call a function in each forked child, after those of modules that were imported before, as of lower layers."""
    _resets.append(reset)


def each_after_fork(reset: Callable[[T], Any]) -> weakref.WeakSet[T]:
    """Return an empty weak set; in each forked child, the function is called with each of its members."""
    members: weakref.WeakSet[T] = weakref.WeakSet()

    def reset_all() -> None:
        with contextlib.ExitStack() as stack:  # as in _reset
            for member in list(members):
                stack.callback(reset, member)

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
after_fork(_forking.clear)
os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_reset)
