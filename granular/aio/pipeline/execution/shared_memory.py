"""Values passed between processes: a pickle, and the memory of its arrays in an anonymous file.

The descriptor of the file is sent over a socket, and the receiver maps it. Nothing has a name, so nothing can be left
behind, however a process ends.

New memory costs more than copying to it: a batch of 3 MB takes the sender 1.3 ms of page faults, and the receiver 1.5
ms to map and to free it, during which no other thread has the interpreter. A ``Sender`` therefore uses a file again
once its ``Receiver`` says that no array of an item is left.
"""

import contextlib
import errno
import itertools
import mmap
import os
import pickle
import socket
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from granular.aio.runtime.forking import last_fork

_ALIGN: Final = 64
_BUFFERS: Final = 512  # per system call
_HELD: Final = 64  # files of a sender whose arrays the receiver holds; a receiver that holds more gets new ones
_SPARE: Final = 2  # files of a sender that no array uses
_SMALL: Final = 1 << 16  # bytes up to which arrays are sent with the pickle, as a file costs more than copying them
_WASTE: Final = 2  # a file is used again for at least this part of its size


def split(value: Any, by_value: bool = False) -> tuple[bytes, list[Any]]:
    """Return a pickle of a value, and the memory of its arrays separately.

    Functions and classes that cannot be imported, such as lambdas, are pickled by value; if ``by_value``, all of
    ``__main__`` are.
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


def write(parts: Sequence[Any]) -> int:
    """Return the descriptor of an anonymous file that contains these parts."""
    fd = _anonymous_file(_total(part.nbytes for part in parts))
    try:
        _write_parts(fd, parts)
    except BaseException:
        os.close(fd)
        raise
    return fd


def join(head: bytes, fd: int, sizes: Sequence[int]) -> Any:
    """Rebuild a value from the parts of ``split``, over the file of ``write``; closes its descriptor.

    Other processes do not see what this one writes to the arrays: a page is copied when it is first written.
    """
    return _load(head, _map(fd, _total(sizes), mmap.MAP_PRIVATE), sizes) if sizes else pickle.loads(head)


class Sent(NamedTuple):
    """The description of the memory of an item, for its receiver."""

    sizes: Sequence[int]  # of the arrays
    content: bytes = b''  # their memory, if it is small
    file: int = -1  # the number of the file that contains it otherwise
    new: int = 0  # the size of the file, if it is new, and its descriptor follows; else 0
    closed: Sequence[int] = ()  # the numbers of files that are not used again


class _File(NamedTuple):
    number: int
    fd: int
    size: int


class Sender:
    """The memory in which a process sends items. ``give_back`` may be called in another thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._held: dict[int, _File] = {}  # the files of items of which the receiver may hold arrays, the oldest first
        self._spare: list[_File] = []  # the others, the oldest first
        self._given_back: deque[tuple[int, bool]] = deque()

    def give_back(self, items: Iterable[tuple[int, bool]]) -> None:
        """Note the items, by their number, of which no array is left, and whether their memory may be used again."""
        self._given_back.extend(items)

    def write(self, item: int, parts: Sequence[Any]) -> tuple[Sent, int]:
        """Write the arrays of an item, whose number no other one has.

        Returns what to tell the receiver, and the descriptor to send to it; -1 if there is none.
        """
        sizes = [part.nbytes for part in parts]
        total = _total(sizes)
        if total <= _SMALL:
            return Sent(sizes, b''.join(_padded(parts))), -1
        closed: list[_File] = []
        while self._given_back:
            number, usable = self._given_back.popleft()
            if (file := self._held.pop(number, None)) is not None:
                (self._spare if usable else closed).append(file)
        fits = [file for file in self._spare if total <= file.size <= total * _WASTE]
        if fits:
            new, file = 0, min(fits, key=lambda file: file.size)
            self._spare.remove(file)
        else:
            new = _rounded(total)
            file = _File(next(self._numbers), _anonymous_file(new), new)
        _write_parts(file.fd, parts)
        self._held[item] = file
        while len(self._spare) > _SPARE:
            closed.append(self._spare.pop(0))
        if len(self._held) > _HELD:
            closed.append(self._held.pop(next(iter(self._held))))
        for old in closed:
            os.close(old.fd)
        return Sent(sizes, b'', file.number, new, [old.number for old in closed]), file.fd if new else -1


class Receiver:
    """The memory of a ``Sender``, in the process that uses the items.

    One thread receives them. Any may ask what is unused, without a lock: an interrupt may come anywhere.
    """

    def __init__(self) -> None:
        self._files: dict[int, mmap.mmap] = {}
        # The owner of all arrays of an item, the last fork before it, or -1 if a child may have it, and its file.
        self._items: dict[int, tuple[Callable[[], NDArray[np.uint8] | None], int, int]] = {}

    def join(self, item: int, head: bytes, sent: Sent, fd: int) -> Any:
        """Rebuild an item from its pickle, ``head``; closes ``fd``, that of a new file, -1 if none was received."""
        if sent.file < 0:
            return _load(head, bytearray(sent.content), sent.sizes)
        for number in sent.closed:
            self._files.pop(number, None)
        if sent.closed:
            for old, (_, _, file) in list(self._items.items()):
                if file in sent.closed:
                    self._items.pop(old, None)
        if sent.new:
            try:
                self._files[sent.file] = _map(fd, sent.new, mmap.MAP_SHARED | getattr(mmap, 'MAP_POPULATE', 0))
            except BaseException:
                self._items[item] = lambda: None, -1, sent.file  # it is given back
                raise
        # Whatever views the memory holds a reference to this array, not only to the map: numpy keeps the last base of
        # its own type.
        owner = np.frombuffer(self._files[sent.file], np.uint8)
        self._items[item] = weakref.ref(owner), last_fork(), sent.file
        return _load(head, owner, sent.sizes)

    def unused(self) -> list[tuple[int, bool]]:
        """Return the items of which no array is left, and whether their memory may be used again.

        It may not if this process forked while there were arrays: the child still has them.
        """
        unused = [(item, made) for item, (owner, made, _) in list(self._items.items()) if owner() is None]
        return [(item, 0 <= made == last_fork()) for item, made in unused]

    def forget(self, items: Iterable[tuple[int, bool]]) -> None:
        """Forget unused items, of which the sender was told. It may be told twice, as after an interrupt."""
        for item, _ in items:
            self._items.pop(item, None)


def _load(head: bytes, memory: Any, sizes: Sequence[int]) -> Any:
    view = memoryview(memory)
    return pickle.loads(head, buffers=[view[at : at + size] for at, size in zip(_offsets(sizes), sizes, strict=False)])


def _offsets(sizes: Iterable[int]) -> list[int]:
    """Return where parts of these sizes begin, and in the end their total size."""
    return list(itertools.accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))


def _total(sizes: Iterable[int]) -> int:
    return max(1, _offsets(sizes)[-1])


def _padded(parts: Sequence[Any]) -> list[Any]:
    """Return parts with the bytes between them."""
    return [buffer for part in parts for buffer in (part, bytes(-part.nbytes % _ALIGN))]


def _rounded(size: int) -> int:
    """Return a size that is at most an eighth larger, so that a file fits items whose sizes differ a little."""
    step = max(mmap.PAGESIZE, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step


def _map(fd: int, size: int, flags: int) -> mmap.mmap:
    """Map a file; closes its descriptor."""
    if fd < 0:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    try:
        return mmap.mmap(fd, size, flags=flags)
    finally:
        os.close(fd)


def _anonymous_file(size: int) -> int:
    if hasattr(os, 'memfd_create'):
        fd = os.memfd_create('granular', os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_parts(fd: int, parts: Sequence[Any]) -> None:
    buffers, offset = _padded(parts), 0
    for first in range(0, len(buffers), _BUFFERS):
        offset += _write_all(fd, buffers[first : first + _BUFFERS], offset)


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
    with _as_socket(pipe) as connection:
        socket.send_fds(connection, [b'f'], [fd])


def receive_fd(pipe: Connection) -> int:
    """Receive a descriptor from a pipe; return -1 if this process has as many as it may have."""
    with _as_socket(pipe) as connection:
        message, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if not message:
        raise EOFError
    return fds[0] if fds else -1


@contextlib.contextmanager
def _as_socket(pipe: Connection) -> Iterator[socket.socket]:
    # Not of a copy of its descriptor: a process forked meanwhile would keep that, and with it the pipe, open. After
    # `socket.setdefaulttimeout`, a socket of another type would let the pipe not block, which another thread may read.
    kind = socket.SOCK_STREAM | getattr(socket, 'SOCK_NONBLOCK', 0)
    connection = socket.socket(socket.AF_UNIX, kind, fileno=pipe.fileno())
    if kind == socket.SOCK_STREAM:  # macOS
        connection.settimeout(None)
    try:
        yield connection
    finally:
        connection.detach()
