"""Other writers of the same path: a dataset with shards, and one without, of which readers would see only one.

On a disk, locks keep them apart. In a bucket, each writer publishes a ``spec.json``, and then looks for the other one:
of two, at least one sees the other, and withdraws.
"""

from collections.abc import Collection, Sequence

from granular.aio.datasets.shards import filled, shards_of
from granular.aio.paths.claims import is_claim
from granular.aio.paths.path import Path
from granular.aio.stores import Entry
from granular.formats.layout import SUFFIXES, shard_number


def folder_of_shards(folder: Path) -> Path | None:
    """Return the folder of the dataset of which a folder is a shard, by its name; None if it is none."""
    return None if shard_number(folder.name) is None else folder.parent


async def find_dataset_above(folder: Path) -> str:
    """Return why a folder cannot be written as a shard, for an error message; '' if it can, or is no shard."""
    above = folder_of_shards(folder)
    if above is None or not await (above / 'spec.json').exists():
        return ''
    return f'{above} is a dataset without shards, which readers would read in place of its shards'


async def find_rival(folder: Path, entries: Sequence[Entry], own: Collection[str]) -> str:
    """Return which other writer a folder with these entries has, beside the writer of its own files, for an error
    message; '' if it has none.
    """
    if claim := next((entry.name for entry in entries if is_claim(entry.name)), ''):
        return f'another writer is writing it, or was killed: if it is not running, remove {claim}'
    if others := sorted(entry.name for entry in entries if entry.name.endswith(SUFFIXES) and entry.name not in own):
        return f'another writer has put {others[0]} beside them'
    if shards := await filled(folder, shards_of(entries)):
        return f'another writer has begun {len(shards)} of its shards'
    return await find_dataset_above(folder)
