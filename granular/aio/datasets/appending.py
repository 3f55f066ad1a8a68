"""Keep a sharded dataset readable while shards are appended to it.

A shard without a ``spec.json`` makes a folder of shards unfinished. A writer that appends to a finished dataset first
writes ``000000/.granular-append``: the number of shards that it found, which are a dataset without those that follow.
Readers that fail for an unfinished shard read this file, and then the finished shards up to the first unfinished one.
The file is removed once all shards are finished. It is in the folder of the first shard because granular 0.21 and 0.24
take every name beside the shards for a shard.
"""

import itertools
import json
from collections.abc import Iterable
from typing import Final

from granular._support.text import counted, logger
from granular.aio.datasets.shards import described, shards_in
from granular.aio.paths.path import Path
from granular.formats.base import parse_json
from granular.formats.layout import shard_name

NAME: Final = '.granular-append'


def warn_of_found(name: str, found: int) -> None:
    """Log that a finished dataset is appended to, as a script does that is run twice by mistake."""
    logger.warning(
        '%s: an earlier run finished it, with %s: further ones are appended; skip the first writer.found of them to '
        'write none twice',
        name, counted(found, 'datapoint'),
    )  # fmt: skip


def marker_path(directory: Path) -> Path:
    """Return the path of the file that marks a sharded dataset as being appended to."""
    return directory / shard_name(0) / NAME


async def mark(directory: Path, shards: int) -> None:
    """Record that the first ``shards`` shards are a dataset without those that follow."""
    await marker_path(directory).write_text(f'{json.dumps({"shards": shards})}\n')


async def unmark(directory: Path) -> None:
    """Remove the record, unless a shard is unfinished."""
    finished = await finished_shards(directory)
    if finished is not None and finished == len(await shards_in(directory)):
        await marker_path(directory).unlink()


async def finished_shards(directory: Path) -> int | None:
    """Return the number of finished shards before the first unfinished one, if those that follow are being appended;
    None if the dataset is not being appended to, or is not finished itself.
    """
    try:
        content = parse_json(await marker_path(directory).read_bytes())
    except ValueError:
        return None
    except directory.store.absent:
        return None
    shards = content.get('shards') if isinstance(content, dict) else None
    numbers = await shards_in(directory)
    if not isinstance(shards, int) or not 1 <= shards <= len(numbers) or numbers[shards - 1] != shards - 1:
        return None
    return shards + await _finished(directory, numbers[shards:], shards)


async def all_finished(directory: Path, numbers: Iterable[int]) -> bool:
    """Return whether shards begin with the first one, none is missing, and each of them is finished."""
    expected = list(numbers)
    return bool(expected) and await _finished(directory, expected, 0) == expected[-1] + 1


async def _finished(directory: Path, numbers: list[int], start: int) -> int:
    """Return how many shards from ``start`` on follow each other and have a ``spec.json``."""
    present = set(await described(directory, numbers))
    return next(i for i in itertools.count() if start + i not in present)
