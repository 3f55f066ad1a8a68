"""The result of a read, and the versions of objects."""

from collections.abc import Sequence
from typing import Final, NamedTuple

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
    """

    data: bytes
    start: int
    size: int
    version: str | None
    modified: str = ''
    date: str = ''


_STAND_IN: Final = '~ '
_WEAK: Final = 'W/"'  # the beginning of an ETag that may stay when the content changes (RFC 9110, 8.8.1)


def stand_in(size: int | None, *told: str) -> str:
    """Return a substitute version for an object whose store gives none: its size and, say, its modification time.

    A substitute version reveals that an object changed while it was read. It is too weak for caches on disk.
    """
    return ', '.join([f'{_STAND_IN}{size} bytes', *told])


def stands_in(version: str | None) -> bool:
    """Return whether a version proves as little as a substitute from ``stand_in``, as a weak ETag does."""
    return version is not None and version.startswith((_STAND_IN, _WEAK))


def changed(name: str, before: str, now: str | None) -> ObjectChangedError:
    """Return the error for an object that was replaced."""
    replaced = f'{name}: it was replaced while it was being read'
    if now is None:
        return ObjectChangedError(f'{replaced}: version {before[:80]} no longer exists: open it again', path=name)
    return ObjectChangedError(f'{replaced}: version {before[:80]} became {now[:80]}: open it again', path=name)


def check_same(name: str, versions: Sequence[str | None]) -> None:
    """Check that several replies are of one version of an object."""
    for version in versions:
        if version != versions[0]:
            raise changed(name, versions[0] or '', version)
