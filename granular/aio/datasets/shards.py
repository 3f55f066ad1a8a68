"""The folders of a sharded dataset."""

from collections.abc import Iterable

from granular.aio.paths.path import Path
from granular.aio.stores import Entry
from granular.formats.layout import shard_numbers
from granular.indexing import check_integer


async def shards_in(directory: Path) -> list[int]:
    """Return the sorted numbers of the shards in a folder. Other files and folders are ignored."""
    return shards_of([entry async for entry in directory.store.scan(directory.key)])


def shards_of(entries: Iterable[Entry]) -> list[int]:
    """Return the sorted numbers of the shards among the entries of a folder."""
    return shard_numbers([entry.name for entry in entries if entry.is_dir])


def check_steps(start: int, step: int) -> tuple[int, int]:
    """Return the arguments that select every ``step``-th shard from ``start`` on, as ``int``."""
    return check_integer('shardstart', start, 0), check_integer('shardstep', step, 1)
