"""The result of a read, and counters of reads. Lightweight, so that local files need no HTTP client."""

import dataclasses
from typing import Any, Final, NamedTuple

from granular.errors import ObjectChangedError


class Reply(NamedTuple):
    """A store's answer to a read.

    Attributes:
      data: the bytes.
      start: the position of the first byte in the object.
      size: the size of the object in bytes.
      version: the object's ETag or generation; None if the store gives none.
      modified: the time of the last write, as the store formats it; empty if the store does not send it.
      date: the time of the store's clock, likewise.
      holder: keeps the version unique while it is referenced: a local file's version contains its inode number, which
        is reused.
    """

    data: bytes
    start: int
    size: int
    version: str | None
    modified: str = ''
    date: str = ''
    holder: Any = None


@dataclasses.dataclass(slots=True)
class Counters:
    """Counters of reads since the process started, over all stores.

    Attributes:
      ranges: byte ranges requested, such as records.
      requests: requests sent for them, including retries and hedged requests.
      retries: requests sent again.
      hedges: hedged requests, sent a second time because the first was slow.
      bytes: bytes of replies.
      in_flight: requests in flight.
      cached: datapoints whose block was already loaded or in flight when they were requested, or that a cache had.
      block_hits: blocks of objects read from the block cache.
      block_misses: blocks fetched for it.
    """

    ranges: int = 0
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    bytes: int = 0
    in_flight: int = 0
    cached: int = 0
    block_hits: int = 0
    block_misses: int = 0


counters: Final = Counters()


def io_stats() -> dict[str, int]:
    """Return counters of the reads since the process started, over all stores.

    The keys are ``ranges``, ``requests`` (including retries and hedged requests), ``retries``, ``hedges``, ``bytes``,
    ``in_flight``, ``cached``, ``block_hits`` and ``block_misses``. Reads of local files, and of schemes that go through
    fsspec, count as one request each::

        before = granular.io_stats()['bytes']
        reader.fetch(range(1000))
        print(granular.io_stats()['bytes'] - before, 'bytes received')
    """
    return dataclasses.asdict(counters)


_STAND_IN: Final = '~'


def stand_in(size: int | None, *told: str) -> str:
    """Return a substitute version for an object whose store gives none: its size and, say, its modification time.

    A substitute version reveals that an object changed while it was read. It is too weak for caches on disk.
    """
    return ', '.join([f'{_STAND_IN} {size} bytes', *told])


def stands_in(version: str | None) -> bool:
    """Return whether a version is a substitute from ``stand_in``."""
    return version is not None and version.startswith(_STAND_IN)


def changed(name: str, before: str, now: str | None) -> ObjectChangedError:
    """Return the error for an object that was replaced."""
    replaced = f'{name}: it was replaced while it was being read'
    if now is None:
        return ObjectChangedError(f'{replaced}: version {before[:80]} is not there any more')
    return ObjectChangedError(f'{replaced}: version {before[:80]} became {now[:80]}')
