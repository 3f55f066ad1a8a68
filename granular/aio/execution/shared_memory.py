"""Values passed between processes: a pickle, and the memory of its arrays in an anonymous file.

The descriptor of the file is sent over a socket; the receiver maps it, and the memory is freed with the last array.
Nothing has a name, so nothing can be left behind, however a process ends.
"""

import contextlib
import mmap
import os
import pickle
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

_ALIGN: Final = 64
_BUFFERS: Final = 512  # per system call


def split(value: Any, by_value: bool = False) -> tuple[bytes, list[Any]]:
    """Return a pickle of a value, and the memory of its arrays separately.

    Args:
      value: the value. Functions and classes that cannot be imported, such as lambdas, are pickled by value.
      by_value: True to pickle all functions and classes of ``__main__`` by value.
    """
    if not by_value:
        try:
            return _split(pickle.dumps, value)
        except Exception:  # the methods of its class may raise anything; cloudpickle raises what remains
            pass
    import cloudpickle

    return _split(cloudpickle.dumps, value)


def _split(dumps: Callable[..., bytes], value: Any) -> tuple[bytes, list[Any]]:
    buffers: list[pickle.PickleBuffer] = []
    head = dumps(value, protocol=5, buffer_callback=buffers.append)
    return head, [buffer.raw() for buffer in buffers]


def join(head: bytes, fd: int, sizes: Sequence[int]) -> Any:
    """Rebuild a value from the parts of ``split``, over shared memory; closes the descriptor."""
    if fd < 0:
        return pickle.loads(head)
    try:
        offsets, total = _offsets(sizes)
        flags = mmap.MAP_SHARED | getattr(mmap, 'MAP_POPULATE', 0)
        view = memoryview(mmap.mmap(fd, max(total, 1), flags=flags))
    finally:
        os.close(fd)
    parts = [view[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
    return pickle.loads(head, buffers=parts)


def _offsets(sizes: Iterable[int]) -> tuple[list[int], int]:
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGN) * _ALIGN
    return offsets, end


def write(parts: Sequence[Any]) -> int:
    """Return the descriptor of an anonymous file that contains these parts."""
    _, total = _offsets(part.nbytes for part in parts)
    fd = _anonymous_file()
    try:
        os.ftruncate(fd, max(total, 1))
        buffers = []
        for part in parts:
            buffers += [part, bytes(-part.nbytes % _ALIGN)]
        offset = 0
        for first in range(0, len(buffers), _BUFFERS):
            offset += _write_all(fd, buffers[first : first + _BUFFERS], offset)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _anonymous_file() -> int:
    if hasattr(os, 'memfd_create'):
        return os.memfd_create('granular', os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_all(fd: int, buffers: Sequence[Any], offset: int) -> int:
    """Write buffers one after the other, and return their size. The system splits large writes."""
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    written = os.pwritev(fd, buffers, offset)
    if written < size:
        joined = memoryview(b''.join(buffers))
        while written < size:
            written += os.pwrite(fd, joined[written:], offset + written)
    return size


def send_fd(pipe: Connection, fd: int) -> None:
    """Send a descriptor over a pipe."""
    with _as_socket(pipe) as connection:
        socket.send_fds(connection, [b'f'], [fd])


def receive_fd(pipe: Connection) -> int:
    """Receive a descriptor from a pipe."""
    with _as_socket(pipe) as connection:
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if not fds:
        raise EOFError
    return fds[0]


@contextlib.contextmanager
def _as_socket(pipe: Connection) -> Iterator[socket.socket]:
    # Not of a copy of its descriptor: a process forked meanwhile would keep that, and with it the pipe, open.
    connection = socket.socket(fileno=pipe.fileno())
    try:
        yield connection
    finally:
        connection.detach()
