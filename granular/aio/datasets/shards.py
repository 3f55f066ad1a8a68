"""The shards of a dataset: their listing, and the error for a missing one."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from granular._support.indexing import check_integer
from granular.aio.paths.claims import is_claim
from granular.aio.paths.path import Path
from granular.aio.runtime.tasks import gather
from granular.aio.stores import Entry
from granular.aio.stores.local.writing import final_name
from granular.errors import CorruptDatasetError, NotFoundError
from granular.formats.layout import SUFFIXES, shard_name, shard_numbers

READ: Final = 'its writer has not finished, it was removed, or writers with shardstep wrote unequal numbers of shards'
"""The causes of a missing shard, for readers."""
UNFINISHED: Final = (
    'a writer or a copy has not finished, or was killed: run it again to continue it, or list what it left with '
    '`granular clean`'
)


async def shards_in(directory: Path) -> list[int]:
    """Return the sorted numbers of the shards in a folder. Other files and folders are ignored, and empty folders."""
    return await filled(directory, await listed_shards(directory))


async def listed_shards(directory: Path) -> list[int]:
    """Return the sorted numbers of the shards in a folder by one listing, which may have empty folders."""
    return shards_of([entry async for entry in directory.store.scan(directory.key)])


def claims_of(entries: Iterable[Entry]) -> list[str]:
    """Return the names of the claims among the entries of a folder: of writers and copies that have not finished.

    In a bucket, nothing else tells that more shards belong to a dataset.
    """
    return [entry.name for entry in entries if is_claim(entry.name)]


def shards_of(entries: Iterable[Entry]) -> list[int]:
    """Return the sorted numbers of the shards among the entries of a folder, of which some may be empty folders."""
    return shard_numbers([entry.name for entry in entries if entry.is_dir])


def describe_unfinished(names: Iterable[str]) -> str:
    """Describe a folder without a ``spec.json`` that has files of a writer, and the remedy; empty for any other."""
    bags = sorted(name for name in names if (final_name(name) or name).endswith(SUFFIXES))
    if not bags:
        return ''
    dataset = 'a writer is writing this dataset, or left it unfinished: write it again'
    if 'refs.bag' in bags or any(map(final_name, bags)):
        return f'has no spec.json: {dataset}, or remove it with `granular clean --remove`'
    return f'has bags but no spec.json: open one of them, such as {bags[0]}; if they are of a dataset, {dataset}'


async def no_dataset(directory: Path) -> NotFoundError:
    """Return the error for a folder that has neither a ``spec.json`` nor shards."""
    names = [entry.name async for entry in directory.store.scan(directory.key)]
    reason = describe_unfinished(names) or 'is not a dataset: it has neither a spec.json nor shards'
    return NotFoundError(f'{directory}: {reason}')


async def filled(directory: Path, numbers: Sequence[int]) -> list[int]:
    """Return the shards that have a file: some servers list folders of deleted objects, and tools make empty ones."""

    async def is_filled(number: int) -> bool:
        folder = directory / shard_name(number)
        return await (folder / 'spec.json').exists() or await folder.store.has_files(folder.key)

    return list(itertools.compress(numbers, await gather([is_filled(number) for number in numbers])))


async def described(directory: Path, numbers: Sequence[int]) -> list[int]:
    """Return the shards that have a ``spec.json``, which their writers publish last."""
    exist = await gather([(directory / shard_name(number) / 'spec.json').exists() for number in numbers])
    return list(itertools.compress(numbers, exist))


def missing_shard(name: str, number: int, rest: str) -> CorruptDatasetError:
    return CorruptDatasetError(f'{name}: shard {shard_name(number)} is missing{rest}', path=name)


def check_complete(name: str, numbers: Sequence[int], hint: str = READ, start: int = 0, step: int = 1) -> None:
    """Raise an error, with a hint, unless shards, at least one, are those from ``start`` on in steps of ``step``."""
    expected = range(start, numbers[-1] + 1, step)
    missing = next((number for number, present in zip(expected, numbers, strict=False) if number != present), None)
    if missing is not None:
        raise missing_shard(name, missing, f', of {numbers[-1] + 1}: {hint}')


def check_series(start: int, step: int) -> tuple[int, int]:
    """Return the arguments that select every ``step``-th shard from ``start`` on, as ``int``."""
    return check_integer('shardstart', start, 0), check_integer('shardstep', step, 1)
