"""Descriptors of open files that close themselves."""

import functools
import os
from collections.abc import Callable


class Descriptor:
    """A descriptor of an open file, closed when nothing refers to this object any more.

    A function in C closes it, without a finalizer in Python: Python ignores an interrupt (Ctrl-C) that comes there, so
    that a program which opens many small files would miss every tenth one.

    Attributes:
      fd: the descriptor.
    """

    fd: int

    __slots__ = ('__del__', '__weakref__', 'fd')

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.__del__: Callable[[], None] = functools.partial(os.close, fd)
