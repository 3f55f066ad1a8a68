"""The sync API of :mod:`granular.aio.caches`."""

from typing import Any, Generic, SupportsIndex, TypeVar

from granular.aio.caches import redis_cache, shared_cache
from granular.aio.caches.base import Cache as Core
from granular.aio.runtime.bridge import run
from granular.sync.base import Batched, SyncObject, blocking, constructing, passed_on, wrapping

A = TypeVar('A', bound=Core)


class Cache(SyncObject[A], Batched, Generic[A]):
    """Base of the caches in the sync API.

    Attributes:
      aio: the async counterpart, which does the work.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return wrapping, (type(self), self.aio)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return run(self.aio.get(index))

    get = blocking(Core.get)
    fetch = blocking(Core.fetch)


class SharedMemoryCache(Cache[shared_cache.SharedMemoryCache]):
    @constructing(shared_cache.SharedMemoryCache)
    def __init__(self) -> None: ...

    def stats(self) -> dict[str, int]:
        """Return the counters of all processes together, and the size of the cache.

        Returns:
          ``hits`` and ``misses``; ``not_kept``, the misses that were not cached for lack of space; ``entries``,
          ``bytes`` and ``max_bytes``.
        """
        return self.aio.stats()


class RedisCache(Cache[redis_cache.RedisCache]):
    @constructing(redis_cache.RedisCache)
    def __init__(self) -> None: ...

    url: str = passed_on(redis_cache.RedisCache.url)

    def stats(self) -> dict[str, int]:
        """Return the counters of this process.

        Returns:
          ``hits``; ``misses``, read from the source; ``waited``, hits that another process was reading; ``bypassed``,
          read from the source because the server was unavailable; ``damaged`` values; ``not_kept``, values that the
          server refused; ``errors`` of the server.
        """
        return self.aio.stats()
