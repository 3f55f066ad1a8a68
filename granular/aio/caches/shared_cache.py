"""A cache in memory shared by the processes of a machine."""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

from granular._support.indexing import check_integer, index_of
from granular.aio.caches.base import Cache, Function, digest, storable
from granular.aio.caches.segments import path_of
from granular.aio.caches.table import Address, Table
from granular.aio.pipeline.data_source import restored
from granular.aio.runtime.immediate import is_immediate
from granular.aio.runtime.threads import offload, offload_whole
from granular.config import MiB
from granular.errors import InvalidArgumentError
from granular.metrics import counters


class SharedMemoryCache(Cache):
    """Caches a source's values in shared memory: each is read from the source once for all processes of a machine.

    ::

        cache = granular.SharedMemoryCache(reader, max_bytes=8 << 30)
        loader = granular.Loader(cache, batch=64, mp='spawn')

    A value that one process stores is read by all others from shared memory, without a lock and without a server
    process. Worker processes share the cache if it is pickled into them (spawned), or if they are forked: those of
    ``torch``, of ``Loader(mp=)``, of ``mp_prefetch``. Without a name it is anonymous and lives as long as the process
    that created it: nothing is left behind, however processes end. With a name it is also shared by processes started
    separately, as by ``torchrun``, and lives as long as any of them; if all are killed, the next process that creates
    such memory removes it.

    Nothing is evicted: once the cache is full, missing values are read from the source each time. Processes that miss a
    value at the same moment each read it, and it is cached once. Linux only.

    Memory: ``max_bytes`` and 8 bytes for each index, for all processes together, allocated as values arrive.

    Args:
      source: any source that a MapDataset accepts.
      transform: a function of each value, or an object with ``map``, that runs at each read, in threads.
      max_bytes: limit on the bytes cached: those of the values, and about 20 more for each.
      name: 1 to 160 of ``A-Z a-z 0-9 _ . -``, for processes that are started separately. A name belongs to one source.
      fingerprint: identifies the source of a named cache; by default derived from its stages and its length, from a
        reader's address, spec, versions and decoders, and from the values that other sources and functions hold, of
        which a list or an array is read once.
      pack: converts a value into a cacheable one: None, a bool, an int, a float, a complex, a str, bytes, a numpy
        array, a tensor of torch, an image of PIL, or a list, tuple or dict of these. By default values must be of these
        types. Runs in threads, once per value.
      unpack: converts a packed value back; runs in threads, at each read.

    Reads return copies that belong to the caller; arrays are writable. A missing value is returned exactly as later
    reads return it.
    """

    def __init__(
        self,
        source: Any,
        transform: Function | None = None,
        *,
        max_bytes: int = 1024 * MiB,
        name: str | None = None,
        fingerprint: str | None = None,
        pack: Function | None = None,
        unpack: Function | None = None,
    ) -> None:
        super().__init__(source, transform, pack, unpack, fingerprint, {'max_bytes': max_bytes, 'name': name})
        if name is not None:
            path_of('cache', name)
        if fingerprint is not None and not (isinstance(fingerprint, str) and fingerprint):
            raise InvalidArgumentError(f'fingerprint: expected a text, got {fingerprint!r:.100}')
        self._max_bytes, self._name = check_integer('max_bytes', max_bytes, 1), name
        self._address: Address | None = None
        self._table: Table

    def __reduce__(self) -> tuple[Any, ...]:
        if self._address is None and self._name is None:
            self._check_open()
        address = self._table.address if self._state == 'open' else self._address
        return restored, self._copy_args(_address=address)

    async def _connect(self) -> None:
        if self._address is not None:
            self._table = Table.at(self._address)
        elif self._name is None:
            self._table = Table.anonymous(self._length, self._max_bytes)
        else:
            given = self._print
            source = await self._fingerprint(False) if given is None else digest(given)[:16]
            self._table = Table.named(self._length, self._max_bytes, source, self._name)

    async def _close(self) -> None:
        await offload_whole(self._table.close)

    async def get(self, index: SupportsIndex) -> Any:
        """Return the value at an index, negative from the end."""
        if self._plain and self._state == 'open' and is_immediate():
            position = index_of(index, self._length, 'the cache')
            if (entry := self._table.find(position)) is not None:
                counters.cached += 1
                self._table.add(0, 1)
                return self._value(entry, position)
        return await super().get(index)

    async def _find(self, indices: Sequence[int]) -> list[Any]:
        entries = [self._table.find(index) for index in indices]
        missing = entries.count(None)
        self._table.add(0, len(entries) - missing)
        self._table.add(1, missing)
        return entries

    async def _fill(self, missing: Sequence[int]) -> Mapping[int, Any]:
        records = await self._read(missing)
        await offload(self._table.put, storable(records))
        return records

    def _record(self, entry: Any) -> bytes:
        return self._table.read(entry) if type(entry) is range else entry

    def stats(self) -> dict[str, int]:
        """Return the counters of all processes together, and the size of the cache.

        Returns:
          ``hits`` and ``misses``; ``not_kept``, the misses that were not cached for lack of space; ``entries``,
          ``bytes`` and ``max_bytes``.
        """
        self._check_open()
        return self._table.stats()
