"""Write the shards of a dataset so that a killed run is continued: the plan of the run, and the shards that exist."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol

from granular.aio.datasets.clean import CONVERSION
from granular.aio.datasets.shards import listed_shards, missing_shard, shards_in
from granular.aio.datasets.writer import DatasetWriter
from granular.aio.paths.file import Progress
from granular.aio.paths.guard import FolderGuard, Right
from granular.aio.paths.path import Path
from granular.aio.runtime.progress import ProgressReport
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.aio.stores.local.writing import final_name, remove_leftovers
from granular.errors import AlreadyExistsError, CorruptDatasetError, NotFoundError
from granular.formats.base import parse_json
from granular.formats.layout import shard_name

PLAN: Final = f'{shard_name(0)}/{CONVERSION}'
"""The file that records the source and the settings, so that a resumed run uses the same. It is in the folder of the
first shard because granular 0.21 and 0.24 take every name beside the shards for a shard."""

PARALLEL: Final = 8
"""Shards that one process writes at a time, by default."""


class Shards(Protocol):
    """The shards of a run: where they are, and which of the records of its plan they hold."""

    directory: Path
    skip: bool  # True if a shard may have fewer datapoints than records

    @property
    def is_sharded(self) -> bool: ...
    def folder(self, number: int) -> Path: ...
    def shard_of(self, record: int) -> int: ...
    async def length_of(self, number: int) -> int | None: ...


class Run:
    """A run that writes shards, and finds those that an earlier run of the same plan has finished.

    ``plan`` has the source and the settings; a run with another one is refused. ``sample`` has digests of records, by
    their numbers, which are compared likewise. ``name`` is that of the function, ``kind`` is that of its runs.
    """

    def __init__(
        self,
        shards: Shards,
        plan: Mapping[str, Any],
        sample: Mapping[str, str],
        progress: Progress | None,
        name: str = 'convert',
        kind: str = 'conversion',
    ) -> None:
        self._shards = shards
        self._directory = shards.directory
        self._plan, self._sample = dict(plan), dict(sample)
        self._name, self._kind = name, kind
        self.report = ProgressReport(progress)
        self.guard = FolderGuard(self._directory, Right.RUN) if shards.is_sharded else None
        self.lengths: dict[int, int] = {}  # of the finished shards
        self._is_new = self._owns_folder = False  # True if this run has begun it, and created its folder
        self.found = 0
        self.bytes = 0
        self.missing = 0  # records without a datapoint

    async def run(self, write: Callable[[], Awaitable[Any]]) -> None:
        """Find the finished shards, and then write the others by a function, while others are kept out."""
        if self._directory.store.has_folders:
            self._owns_folder = not await self._directory.exists()
        await self._directory.mkdir(parents=True, exist_ok=True)
        if self.guard is None:  # the writer of the dataset has the right to its folder
            await self._run(write)
            return
        await self.guard.enter()
        async with self.guard.leaving():
            await self._run(write)

    async def _run(self, write: Callable[[], Awaitable[Any]]) -> None:
        try:
            await self._find_shards()
            await write()
        except AlreadyExistsError:
            raise  # the shards are those of another run, which may not have ended
        except Exception:
            await self._tidy()
            raise

    async def write_shards(
        self,
        ranges: Mapping[int, tuple[int, int]],
        start: Callable[[int, int, int], Awaitable[DatasetWriter]],
        parallel: int | None,
    ) -> None:
        """Write the shards that are not finished, each by a writer that ``start`` returns once it has all datapoints.

        ``ranges`` has the first record and the one after the last of each shard; shard 0 comes last, and is published
        last: without it, this is not a dataset.
        """
        finished = asyncio.Semaphore(0)  # counts the shards after the first one

        async def write_shard(number: int) -> None:
            first, end = ranges[number]
            if not await self.is_finished(number, end - first):
                writer = await start(number, first, end)
                async with writer:
                    for _ in range(0 if number else len(ranges) - 1):
                        await finished.acquire()
                self.bytes += writer.size
                self.missing += end - first - len(writer)
            if number:
                finished.release()

        await for_each(ranges, write_shard, parallel or PARALLEL)

    async def is_finished(self, number: int, expected: int) -> bool:
        """Return whether a shard is finished; raise ``CorruptDatasetError`` if it has another number of records."""
        length = self.lengths.get(number)
        if length is None:
            return False
        if length != expected and not (self._shards.skip and length < expected):
            raise CorruptDatasetError(
                f'{self._shards.folder(number)}: has {length} datapoints, expected {expected} from '
                f'{self._plan["source"]}: the source has changed'
            )
        self.found += length
        self.missing += expected - length
        await self.report.add(expected)
        return True

    def check_surplus(self, shards: int, records: int) -> None:
        """Raise ``CorruptDatasetError`` if there is a shard behind those that the records fill."""
        if surplus := sorted(number for number in self.lengths if number >= shards):
            raise CorruptDatasetError(
                f'{self._shards.folder(surplus[0])}: exists, but {records} records fill {shards} shards'
            )

    async def _find_shards(self) -> None:
        """Find the finished shards, and check that they belong to the same run."""
        numbers = []
        if not self._shards.is_sharded:
            numbers = [0] if await self._directory.store.has_files(self._directory.key) else []
        else:
            with contextlib.suppress(NotFoundError):  # a bucket has no empty folders
                numbers = await shards_in(self._directory)
        existing = await self._check_plan(numbers)

        async def read_length(number: int) -> None:
            if (length := await self._shards.length_of(number)) is not None:
                self.lengths[number] = length

        await for_each(numbers, read_length, 16)
        await self._check_sample(existing)

    async def _check_sample(self, plan: dict[str, Any]) -> None:
        """Compare the sampled records with those of a plan, but for bad ones, which may be repaired, and add them."""
        before = plan['sample']
        for index in before.keys() & self._sample.keys():
            shard = self._shards.shard_of(int(index))
            if before[index] != self._sample[index] and (before[index] or shard in self.lengths):
                raise AlreadyExistsError(
                    f'{self._directory}: has another record {index} than {self._plan["source"]}: was begun as another '
                    f'{self._kind}: choose another folder, or remove this one'
                )
        plan['sample'] = {**before, **self._sample}
        if plan['sample'] != before:
            await self._write_plan(plan)

    async def _check_plan(self, numbers: list[int]) -> dict[str, Any]:
        """Write the plan, or check that the existing one is the same, but for its sample. Return it."""
        plan = dict(self._plan)
        try:
            existing = parse_json(await self._plan_path.read_bytes())
            sample = {**existing['sample']}
        except NotFoundError:
            if numbers and 0 not in numbers:
                rest = f'record of the {self._kind}: remove the other {len(numbers)} shards, and {self._name} again'
                raise missing_shard(f'{self._directory}', 0, f', and with it the {rest}') from None
            if await self._is_used(numbers) or await (self._directory / 'spec.json').exists():
                raise AlreadyExistsError(
                    f'{self._directory}: has data that {self._name} did not write: choose another folder, or remove it'
                ) from None
            plan['sample'] = self._sample
            await self._write_plan(plan, new=self._directory.store.local)  # in a bucket, a claim keeps other runs out
            self._is_new = True
            return plan
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptDatasetError(f'{self._plan_path}: was not written by {self._name}') from error
        if differ := [name for name in plan if existing.get(name) != plan[name]]:
            names = ['source'] if 'source' in differ else differ  # the rest follows from another source
            differences = ', '.join(f'{name} {existing.get(name)!r}, not {plan[name]!r}' for name in names)
            raise AlreadyExistsError(
                f'{self._directory}: was begun as another {self._kind}, with {differences}: pass the same, choose '
                f'another folder, or remove this one'
            )
        plan['sample'] = sample
        return plan

    async def _tidy(self) -> None:
        """Remove the empty folders that an error left, and then the plan if nothing else is left."""
        store, first, sharded = self._directory.store, self._shards.folder(0), self._shards.is_sharded
        with contextlib.suppress(NotFoundError):
            for number in await listed_shards(self._directory) if sharded and store.has_folders else ():
                await store.delete_empty(self._shards.folder(number).key)
            if self._is_new and not await self._is_used(await shards_in(self._directory) if sharded else [0]):
                await store.delete([self._plan_path.key])
                if sharded and store.has_folders:
                    await store.delete_empty(first.key)
                if self._owns_folder:
                    await store.delete_empty(self._directory.key)

    async def _is_used(self, numbers: list[int]) -> bool:
        """Return whether there are shards, apart from a folder of the first one with nothing but a plan."""
        if numbers != [0]:
            return bool(numbers)
        first = self._shards.folder(0)
        names = [entry.name async for entry in first.store.scan(first.key)]
        return any(CONVERSION not in (name, final_name(name)) for name in names)

    @property
    def _plan_path(self) -> Path:
        return self._shards.folder(0) / CONVERSION

    async def _write_plan(self, plan: dict[str, Any], new: bool = False) -> None:
        path = self._plan_path
        if path.store.local:
            await path.parent.mkdir(exist_ok=True)
            await offload(remove_leftovers, path.key)
        await path.store.write(path.key, f'{json.dumps(plan, sort_keys=True)}\n'.encode(), new)
