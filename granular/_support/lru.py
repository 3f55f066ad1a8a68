"""An LRU cache: the one of everything that a process keeps up to a limit."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar('K', bound=Hashable)
V = TypeVar('V')


class LRU(Generic[K, V]):
    """Values by key, of which those used last are kept, up to a limit.

    Threads need no lock, unless values are weighed: then it is that of the owner.

    Args:
      limit: the largest total weight. It may be changed, and holds from the next ``put`` on.
      weigh: returns the weight of a value, such as its bytes; by default each weighs 1.
      in_use: returns whether the value of a key must not be evicted now; it counts as used then.
      evicted: called with the key and value of each that was evicted.
    """

    def __init__(
        self,
        limit: int,
        weigh: Callable[[V], int] | None = None,
        *,
        in_use: Callable[[K, V], bool] | None = None,
        evicted: Callable[[K, V], object] | None = None,
    ) -> None:
        self.limit = limit
        self._weigh = weigh
        self._in_use = in_use
        self._evicted = evicted
        self._values: OrderedDict[K, V] = OrderedDict()  # that used least recently first
        self._weight = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    @property
    def weight(self) -> int:
        return len(self._values) if self._weigh is None else self._weight

    def items(self) -> list[tuple[K, V]]:
        return list(self._values.items())

    def get(self, key: K) -> V | None:
        """Return the value of a key, which was used now; None if there is none."""
        try:
            value = self._values[key]
            self.touch(key)
        except KeyError:  # also if another thread has evicted it meanwhile
            return None
        return value

    def touch(self, key: K) -> None:
        """Note that a key was used now. Another policy of eviction puts it elsewhere: the first value goes first."""
        self._values.move_to_end(key)

    def put(self, key: K, value: V) -> None:
        """Keep a value, which was used now, in place of a former one, and evict others beyond the limit."""
        self.pop(key)
        if self._weigh is not None:
            self._weight += self._weigh(value)
        self._values[key] = value
        self.trim(self.limit)

    def pop(self, key: K) -> V | None:
        """Remove a key, and return its value; None if there was none."""
        value = self._values.pop(key, None)
        if value is not None and self._weigh is not None:
            self._weight -= self._weigh(value)
        return value

    def clear(self) -> None:
        """Remove everything."""
        self._values.clear()
        self._weight = 0

    def trim(self, limit: int) -> None:
        """Evict until the total weight is at most a limit, or all values are in use."""
        for _ in range(len(self._values)):
            if self.weight <= limit:
                return
            try:
                key, value = self._values.popitem(last=False)
            except KeyError:  # other threads have evicted them
                return
            if self._in_use is not None and self._in_use(key, value):
                self._values[key] = value
                continue
            if self._weigh is not None:
                self._weight -= self._weigh(value)
            if self._evicted is not None:
                self._evicted(key, value)
