"""Folders of parts: datapoints that several processes have written, before they are assembled into shards.

While ``.parts.<token>`` is beside the shards of a folder and shard 0 is not published, the other shards are as
unfinished as the parts. ``granular clean`` removes both.
"""

import re
from collections.abc import Sequence
from typing import Final

from granular.aio.datasets.shards import filled, shards_of
from granular.aio.paths.path import Path
from granular.aio.stores import Entry
from granular.errors import AlreadyExistsError
from granular.formats.layout import shard_name

_NAME: Final = re.compile(r'\.parts\.[0-9a-f]{16}')


def parts_name(token: str) -> str:
    return f'.parts.{token}'


def is_parts(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


async def remove_unfinished(directory: Path, entries: Sequence[Entry]) -> None:
    """Remove what a killed writer of parts left in a folder, given its entries. The caller excludes other writers;
    raise ``AlreadyExistsError`` if the folder holds a dataset, or shards of another writer.
    """
    parts = [entry for entry in entries if entry.is_dir and is_parts(entry.name)]
    shards = await filled(directory, shards_of(entries))
    first = directory / shard_name(0) / 'spec.json'
    if any(entry.name == 'spec.json' for entry in entries) or await first.exists():
        raise AlreadyExistsError(f'{directory}: has a dataset already: choose another folder, or remove it')
    if shards and not parts:
        raise AlreadyExistsError(
            f'{directory}: has shards of an unfinished writer, such as {shard_name(shards[0])}: choose another '
            f'folder, or remove them'
        )
    await remove_parts(directory, [directory / shard_name(number) for number in shards])
    for entry in parts:  # last, as they mark the shards as unfinished
        await Path.of(directory.store, entry.key).rmtree()


async def remove_parts(directory: Path, folders: Sequence[Path]) -> None:
    """Remove folders in a folder, if they exist."""
    existing = {entry.key async for entry in directory.store.scan(directory.key) if entry.is_dir}
    for folder in folders:
        if folder.key in existing:
            await folder.rmtree()
