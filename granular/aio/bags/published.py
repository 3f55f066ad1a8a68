"""Files that a writer has published, and their removal if it fails."""

import dataclasses

from granular.aio.paths.path import Path
from granular.aio.stores.base import ObjectWriter


@dataclasses.dataclass(slots=True)
class Published:
    """A file that a writer has published."""

    size: int
    version: str | None  # if known: that of its writer, or the one that was verified
    writer: ObjectWriter | None  # None of a copy


async def remove(path: Path, published: Published) -> None:
    """Remove a published file, unless it was replaced since."""
    stat = await path.store.find(path.key)
    if stat is None or published.version not in (None, stat.version):
        return
    if published.writer is None:
        await path.store.delete([path.key])
    else:
        await withdraw(path, published.writer)


async def withdraw(path: Path, writer: ObjectWriter) -> bool:
    """Remove a published file, unless it may be another writer's. Return whether it was removed."""
    if (removed := await writer.withdraw()) is None:
        await path.store.delete([path.key])
        return True
    return removed
