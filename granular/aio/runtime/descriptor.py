"""Descriptors of open files that close themselves."""

import collections
import functools
import os


class Descriptor:
    """A descriptor of an open file, closed when nothing refers to this object any more.

    Functions in C open and close it. An interrupt (Ctrl-C), which comes between two instructions of Python, would lose
    a descriptor that is not stored yet, and is ignored in a finalizer: a program which opens many small files would
    miss every tenth one.

    The file is given by its path, to be opened as by ``os.open``, or by the descriptor of one that is open.
    """

    fd: int
    __del__: functools.partial[None]

    __slots__ = ('__del__', '__weakref__', 'fd')

    def __init__(self, file: str | int, flags: int = 0, mode: int = 0o777) -> None:
        opened = (file,) if isinstance(file, int) else map(os.open, (file,), (flags,), (mode,))
        closing = map(functools.partial, (os.close,), opened)
        collections.deque(map(setattr, (self,), ('__del__',), closing), 0)
        self.fd = self.__del__.args[0]
