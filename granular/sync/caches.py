"""The sync API of :mod:`granular.aio.caches`."""

from typing import Any, Generic, SupportsIndex, TypeVar

from granular.aio.caches import redis_cache, shared_cache
from granular.aio.caches.base import Cache as Core
from granular.aio.pipeline.execution.failures import without_failures
from granular.aio.runtime.portal import run
from granular.sync.base import Batched, SyncObject, blocking, constructing, documented_by, passed_on, wrapping

A = TypeVar('A', bound=Core)


class Cache(SyncObject[A], Batched, Generic[A]):
    """Base of the caches in the sync API."""

    def __reduce__(self) -> tuple[Any, ...]:
        return wrapping, (type(self), self.aio)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return run(self.aio.get(index), immediate=True)

    get = blocking(Core.get, immediate=True)

    @documented_by(Core.fetch)
    def fetch(self, indices: Any) -> list[Any]:
        return without_failures(run(self.aio.fetch(indices), immediate=True))


class SharedMemoryCache(Cache[shared_cache.SharedMemoryCache]):
    @constructing(shared_cache.SharedMemoryCache)
    def __init__(self) -> None: ...

    @documented_by(shared_cache.SharedMemoryCache.stats)
    def stats(self) -> dict[str, int]:
        return self.aio.stats()


class RedisCache(Cache[redis_cache.RedisCache]):
    @constructing(redis_cache.RedisCache)
    def __init__(self) -> None: ...

    url: str = passed_on(redis_cache.RedisCache.url)

    @documented_by(redis_cache.RedisCache.stats)
    def stats(self) -> dict[str, int]:
        return self.aio.stats()
