"""Versions of objects and their sizes, as stores have reported them to this process.

No object is served from a block cache before its store has reported its version. So an object that was replaced, or two
objects of different size with the same version, are detected wherever the version comes from.
"""

from typing import Final

_MAX_SIZES: Final = 1 << 18  # sizes of objects, of about 300 bytes each
_sizes: Final[dict[tuple[str, str, str], int]] = {}


def note(identity: str, key: str, version: str, size: int) -> None:
    if len(_sizes) >= _MAX_SIZES:
        _sizes.clear()
    _sizes[identity, key, version] = size


def size_of(identity: str, key: str, version: str) -> int | None:
    return _sizes.get((identity, key, version))


def forget_versions(identity: str, prefix: str) -> None:
    """Forget the versions of a folder's objects, which come from an index cache: the store must confirm them first."""
    for name in [name for name in list(_sizes) if name[0] == identity and name[1].startswith(prefix)]:
        _sizes.pop(name, None)
