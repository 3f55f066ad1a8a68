"""Caches, with a ``fetch`` that blocks: the synchronous face of :mod:`granular.aio.caches`."""

from typing import Any, Generic, SupportsIndex, TypeVar

from granular.aio.caches import redis_cache as rediscache
from granular.aio.caches import shared_cache as sharedcache
from granular.aio.caches.base import Cache as Core
from granular.aio.caches.base import Function
from granular.aio.runtime.bridge import run
from granular.config import MiB
from granular.sync.base import Batched, Face

A = TypeVar('A', bound=Core)


class Cache(Face[A], Batched, Generic[A]):
    """What caches of any kind have in common.

    Attributes:
      aio: the asynchronous twin, which does the work.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _faced, (type(self), self.aio)

    def __len__(self) -> int:
        return len(self.aio)

    def __getitem__(self, index: SupportsIndex) -> Any:
        return run(self.aio.get(index))

    def get(self, index: SupportsIndex) -> Any:
        """The value at an index, negative from the end."""
        return run(self.aio.get(index))

    def fetch(self, indices: Any) -> list[Any]:
        """The values at many indices, in the order asked; what is missing is read below in one fetch.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative.

        Raises:
          EncodeError: for a value that cannot be kept: see ``pack``.
        """
        return run(self.aio.fetch(indices))


def _faced(kind: type[Cache[Core]], twin: Core) -> Cache[Core]:
    """A cache in a worker process, which opens it when it first reads."""
    face = kind.__new__(kind)
    face.aio = twin
    return face


class SharedMemoryCache(Cache[sharedcache.SharedMemoryCache]):
    __doc__ = sharedcache.SharedMemoryCache.__doc__

    aio: sharedcache.SharedMemoryCache

    def __init__(
        self,
        source: Any,
        transform: Function | None = None,
        *,
        max_bytes: int = 1024 * MiB,
        name: str | None = None,
        pack: Function | None = None,
        unpack: Function | None = None,
    ) -> None:
        self._open(
            sharedcache.SharedMemoryCache(source, transform, max_bytes=max_bytes, name=name, pack=pack, unpack=unpack)
        )

    def stats(self) -> dict[str, int]:
        """What all processes together counted, and what is kept.

        Returns:
          ``hits``, ``misses``; ``not_kept``, of the misses those that there was no room for; ``entries``, ``bytes`` and
          ``max_bytes``.
        """
        return self.aio.stats()


class RedisCache(Cache[rediscache.RedisCache]):
    __doc__ = rediscache.RedisCache.__doc__

    aio: rediscache.RedisCache

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
            rediscache.RedisCache(
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
        """What this process counted.

        Returns:
          ``hits``; ``misses``, read below; ``waited``, hits that another process was reading; ``bypassed``, read below
          because the server was not there; ``damaged`` values; ``not_kept``, which the server refused; ``errors`` of
          the server.
        """
        return self.aio.stats()
