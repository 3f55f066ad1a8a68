"""What a read brings, and the count of what was read. Light, so that local files need no HTTP client."""

import dataclasses
from typing import Any, Final, NamedTuple

from granular.errors import ObjectChangedError


class Reply(NamedTuple):
    """What a store answered to a read.

    Attributes:
      data: the bytes.
      start: where in the object they begin.
      size: the object's bytes.
      version: the object's ETag or generation; None where the store gives none.
      modified: when the object was last written, in the store's own words; empty where the store does not say.
      date: the store's clock, likewise.
      holder: while it is kept, no other file is given the version: a local file's has a number that is used again.
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
    """What was read since the process started, over all stores.

    Attributes:
      ranges: byte ranges that were asked for, such as records.
      requests: requests that were sent for them, retries included.
      retries: requests that were sent again.
      hedges: requests that were sent a second time because the first was slow.
      bytes: bytes of replies.
      in_flight: requests that are being answered.
      cached: datapoints that were asked for when the block that holds them was there already, or on its way; or that a
        cache had.
      block_hits: blocks of objects that came from the block cache.
      block_misses: blocks that were fetched for it.
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


counters = Counters()


def io_stats() -> dict[str, int]:
    """Ranges asked for, requests sent, retries and hedges among them, bytes received, requests in flight, cache hits.

    Reads of local files and of schemes that go through fsspec count as one request each.
    """
    return dataclasses.asdict(counters)


_STAND_IN: Final = '~'


def stand_in(size: int | None, *told: str) -> str:
    """The version of an object whose store gives none: its size and what else is told, such as the time of its change.

    Versions that stand in tell that an object changed while it is read. Kept on a disk for longer, they are too weak.
    """
    return ', '.join([f'{_STAND_IN} {size} bytes', *told])


def stands_in(version: str | None) -> bool:
    """Whether a version is one of ``stand_in``."""
    return version is not None and version.startswith(_STAND_IN)


def changed(name: str, before: str, now: str | None) -> ObjectChangedError:
    """The error for an object that was replaced."""
    before, now = before[:80], None if now is None else now[:80]
    return ObjectChangedError(f'{name}: it was replaced while it was being read: version {before} became {now}')
