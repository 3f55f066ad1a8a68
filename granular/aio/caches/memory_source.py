"""Elements in shared memory: stored once, and readable by every process of the machine that knows their name."""

import contextlib
import mmap
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, SupportsIndex

import numpy as np

from granular._support.indexing import Ints, index_of, indices_of
from granular._support.other_names import answering
from granular.aio.caches.segments import Segment, attach, create, path_of
from granular.aio.runtime.lifecycle import Closing
from granular.aio.runtime.tasks import HeldError
from granular.aio.stores.errors import translated
from granular.errors import ClosedError, CorruptError, DecodeError, EncodeError, InvalidArgumentError
from granular.formats.checksums import crc32c
from granular.formats.serialization import decode, encode

_MAGIC: Final = b'granular-data-1\n'
# Magic, number of elements, checksum of everything; followed by the end of each record.
_HEAD: Final = struct.Struct('<16sQI4x')
_BUFFER: Final = 1 << 20


class SharedMemoryDataSource(Closing):
    """Elements stored once in memory for all processes of the machine; for the sync and the async API.

    ::

        from granular.grain.sources import SharedMemoryDataSource

        source = SharedMemoryDataSource(elements, name='digits')  # in one process
        source = SharedMemoryDataSource(name='digits')  # in the others, of the same user
        loader = granular.Loader(source, batch=64)

    It pickles to its name. The process that passes the elements owns them: when the owner is closed, unlinked or
    garbage-collected, or exits, the name is removed, and the memory is freed once no process reads it. If the owner is
    killed, the next process that creates such a source removes them. An attached process never removes anything.

    Memory: the bytes of the elements, and 8 bytes for each, in ``/dev/shm``.

    Args:
      elements: a sequence. An element is None, a bool, an int, a float, a complex, a str, bytes, a numpy array, or a
        list, tuple or dict of these. Reads return copies that belong to the caller; arrays are writable.
      name: 1 to 160 of ``A-Z a-z 0-9 _ . -``; by default a unique one.

    Raises:
      EncodeError: for an element of another type. Elements are never pickled, because unpickling would run code written
        by others.
      AlreadyExistsError: if the name is in use.
      NotFoundError: without elements, if no elements of that name exist.
      StoreError: if there is not enough space.
    """

    @answering()
    def __init__(self, elements: Sequence[Any] | None = None, *, name: str | None = None) -> None:
        if elements is None and name is None:
            raise InvalidArgumentError('expected elements, or the name of existing ones')
        self._named = name is not None
        self._name = secrets.token_hex(8) if name is None else name
        path = path_of('data', self._name)
        segment = attach(path) if elements is None else _created(path, elements)
        self._holder = segment.holder
        try:
            if not os.fstat(segment.fd).st_size:  # an empty file cannot be mapped
                raise CorruptError(f'{path}: is empty')
            with translated(path):
                self._map = mmap.mmap(segment.fd, 0, access=mmap.ACCESS_READ)
            self._ends, self._sum = _index(self._map, path)
        except BaseException:
            if self._holder is not None:
                self._holder.release()
            raise
        finally:
            os.close(segment.fd)
        self._length = len(self._ends) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        return _attached, (self._name, self._named)

    def __repr__(self) -> str:
        # The state of a pipeline contains this text: the same in every process, and different for different elements.
        name = f'name={self._name!r}, ' if self._named else ''
        return f'SharedMemoryDataSource({name}len={self._length}, crc32c={self._sum:08x})'

    @property
    def name(self) -> str:
        """The name by which other processes attach."""
        return self._name

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: SupportsIndex) -> Any:
        return self._read(index_of(index, self._length, repr(self)))

    def fetch(self, indices: Any) -> list[Any]:
        """Return the elements at many indices, in the order requested; negative indices count from the end."""
        return [self._read(position) for position in indices_of(indices, self._length, repr(self)).tolist()]

    # PyTorch's DataLoader and Grain's loaders get a batch by these names.
    __getitems__ = _getitems = fetch

    def _read(self, position: int) -> Any:
        try:
            record = self._map[self._ends[position] : self._ends[position + 1]]
        except ValueError as error:
            raise ClosedError(f'{self!r} is closed') from error
        try:
            return decode(record)
        except DecodeError as error:
            raise CorruptError(f'{self!r}: element {position}: {error}') from error

    def unlink(self) -> None:
        """Remove the name, if this is the owner: no process can attach any more, and attached ones continue to read."""
        if self._holder is not None:
            self._holder.unlink()

    def close(self) -> None:
        """Release the memory and, if this is the owner, remove the name. Closing it again has no effect."""
        if self._holder is not None:
            self._holder.release()
        self._map.close()


def _attached(name: str, named: bool) -> SharedMemoryDataSource:
    source = SharedMemoryDataSource(name=name)
    source._named = named
    return source


def _created(path: str, elements: Sequence[Any]) -> Segment:
    try:
        return create(path, lambda fd: _fill(fd, elements))
    except HeldError as held:
        error = held.error
    try:
        raise error
    finally:
        del error  # whose traceback refers to this frame


def _fill(fd: int, elements: Sequence[Any]) -> None:
    if isinstance(elements, Mapping):
        raise InvalidArgumentError(
            f'elements: expected a sequence, got {type(elements).__name__}: pass a list of its values, or [it]'
        )
    if not (hasattr(elements, '__len__') and hasattr(elements, '__getitem__')):
        remedy = ': pass list(...) of it' if hasattr(elements, '__iter__') else ''
        raise InvalidArgumentError(f'elements: expected a sequence, got {type(elements).__name__}{remedy}')
    count = len(elements)
    ends = np.zeros(count + 1, '<i8')
    at = ends[0] = _HEAD.size + ends.nbytes
    total = 0
    with contextlib.closing(os.fdopen(os.dup(fd), 'wb', _BUFFER)) as file:
        file.seek(at)
        for i in range(count):
            try:
                element = elements[i]
            except OSError as error:  # of their source, and not of writing
                raise HeldError(error) from None
            try:
                record = encode(element)
            except EncodeError as error:
                raise EncodeError(f'element {i}: {error}') from error
            total = crc32c(record, total)
            file.write(record)
            at += len(record)
            ends[i + 1] = at
        file.seek(0)
        file.write(_HEAD.pack(_MAGIC, count, crc32c(ends.tobytes(), total)))
        file.write(ends.tobytes())


def _index(data: mmap.mmap, path: str) -> tuple[Ints, int]:
    """Return the boundaries of the records, and the checksum of everything."""
    if len(data) < _HEAD.size:
        raise CorruptError(f'{path}: expected a header of {_HEAD.size} bytes, got {len(data)} bytes')
    magic, count, total = _HEAD.unpack_from(data)
    if magic != _MAGIC or count >= len(data) // 8:
        raise CorruptError(f'{path}: is not a file of elements')
    ends = np.frombuffer(data[_HEAD.size : _HEAD.size + 8 * (count + 1)], '<i8')
    if ends[0] != _HEAD.size + 8 * (count + 1) or ends[-1] != len(data) or (np.diff(ends) < 0).any():
        raise CorruptError(f'{path}: the positions of its {count} elements do not match its {len(data)} bytes')
    return ends, total
