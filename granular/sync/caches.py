"""The sync API of :mod:`granular.aio.caches`."""

from typing import Any, Generic, SupportsIndex, TypeVar

from granular.aio.caches import redis_cache, shared_cache
from granular.aio.caches.base import Cache as Core
from granular.aio.caches.base import Function
from granular.aio.runtime.bridge import run
from granular.config import MiB
from granular.sync.base import Batched, SyncObject

A = TypeVar('A', bound=Core)


class Cache(SyncObject[A], Batched, Generic[A]):
    """Base of the caches in the sync API.

    Attributes:
      aio: the async counterpart, which does the work.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.aio)

    def __len__(self) -> int:
        return len(self.aio)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return run(self.aio.get(index))

    def get(self, index: SupportsIndex) -> Any:
        """Return the value at an index, negative from the end."""
        return run(self.aio.get(index))

    def fetch(self, indices: Any) -> list[Any]:
        """Return the values at many indices, in the order requested. Missing ones are read from the source in one
        fetch.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative.

        Raises:
          EncodeError: for a value that cannot be cached: see ``pack``.
        """
        return run(self.aio.fetch(indices))


def _unpickled(kind: type[Cache[Core]], core: Core) -> Cache[Core]:
    """Return the unpickled cache of a worker process, which opens it at its first read."""
    cache = kind.__new__(kind)
    cache.aio = core
    return cache


class SharedMemoryCache(Cache[shared_cache.SharedMemoryCache]):
    __doc__ = shared_cache.SharedMemoryCache.__doc__

    aio: shared_cache.SharedMemoryCache

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
        self._open(
            shared_cache.SharedMemoryCache(
                source,
                transform,
                max_bytes=max_bytes,
                name=name,
                fingerprint=fingerprint,
                pack=pack,
                unpack=unpack,
            )
        )

    def stats(self) -> dict[str, int]:
        """Return the counters of all processes together, and the size of the cache.

        Returns:
          ``hits`` and ``misses``; ``not_kept``, the misses that were not cached for lack of space; ``entries``,
          ``bytes`` and ``max_bytes``.
        """
        return self.aio.stats()


class RedisCache(Cache[redis_cache.RedisCache]):
    __doc__ = redis_cache.RedisCache.__doc__

    aio: redis_cache.RedisCache

    def __init__(
        self,
        source: Any,
        url: str | None = None,
        transform: Function | None = None,
        *,
        namespace: str = 'granular',
        fingerprint: str | None = None,
        expire: float | None = None,
        timeout: float = 2.0,
        wait: float = 2.0,
        retry: float = 5.0,
        pack: Function | None = None,
        unpack: Function | None = None,
    ) -> None:
        self._open(
            redis_cache.RedisCache(
                source,
                url,
                transform,
                namespace=namespace,
                fingerprint=fingerprint,
                expire=expire,
                timeout=timeout,
                wait=wait,
                retry=retry,
                pack=pack,
                unpack=unpack,
            )
        )

    @property
    def url(self) -> str:
        """The server's address, without user and password."""
        return self.aio.url

    def stats(self) -> dict[str, int]:
        """Return the counters of this process.

        Returns:
          ``hits``; ``misses``, read from the source; ``waited``, hits that another process was reading; ``bypassed``,
          read from the source because the server was unavailable; ``damaged`` values; ``not_kept``, values that the
          server refused; ``errors`` of the server.
        """
        return self.aio.stats()
