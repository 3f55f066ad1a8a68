"""Descriptors of open files that close themselves."""

import functools
import os


class Descriptor:
    """A descriptor of an open file, closed when nothing refers to this object any more.

    A function in C closes it: in one of Python, an interrupt (Ctrl-C) would be ignored, every tenth one in a program
    that opens many small files.

    The file is given by its path, to be opened as by ``os.open``, or by the descriptor of one that is open.
    """

    fd: int
    __del__: functools.partial[None]

    __slots__ = ('__del__', '__weakref__', 'fd')

    def __init__(self, file: str | int, flags: int = 0, mode: int = 0o777) -> None:
        self.fd = file if isinstance(file, int) else os.open(file, flags, mode)
        self.__del__ = functools.partial(os.close, self.fd)
