"""Write datasets of Ray as sharded datasets: tasks write parts, and further tasks assemble the shards out of them."""

import contextlib
import functools
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from granular._support.indexing import check_integer
from granular._support.lazy import import_extra
from granular.aio.conversion.on_ray import RayShards, shared
from granular.aio.conversion.record_source import Reading, open_source
from granular.aio.conversion.shard_writer import ShardWriter
from granular.aio.datasets.codec import Encoders, fields_of
from granular.aio.datasets.parts_folder import parts_name, remove_parts, remove_unfinished
from granular.aio.datasets.reader import DatasetReader
from granular.aio.datasets.shards import shards_in
from granular.aio.paths.guard import FolderGuard, Right
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.paths.removal import first_missing
from granular.aio.runtime.portal import run
from granular.errors import CorruptDatasetError, GranularError, InvalidArgumentError, NotFoundError, StoreError
from granular.formats.codecs import encoders as all_encoders
from granular.formats.layout import Layout, check_spec, shard_name
from granular.integrations.ray.concatenation import Concatenation
from granular.sync.writers import DatasetWriter

ray = import_extra('ray', 'ray')
data = import_extra('ray.data', 'ray')
blocks = import_extra('ray.data.block', 'ray')
_Base: Any = data.Datasink


def write(
    dataset: Any,
    url: AnyPath,
    spec: Mapping[str, str],
    encoders: Encoders = all_encoders,
    shardlen: int = 10_000,
    layout: Layout = 'refs',
    checksums: bool = True,
    resume: Literal['check', 'discard'] = 'check',
    **options: Any,
) -> None:
    """Write a ``ray.data.Dataset`` as a sharded dataset, with each row once and in the order of the dataset.

    ::

        dataset = ray.data.read_images('s3://bucket/images')
        granular.integrations.ray.write(dataset, 's3://bucket/train', {'image': 'jpg'}, shardlen=1000)

    Each write task encodes its rows into a part of its own, in a folder ``.parts.<token>`` beside the shards. The parts
    of the attempts that Ray counts are then assembled by further tasks into shards of ``shardlen`` datapoints, whatever
    the blocks of the dataset. So a task that is retried, runs twice or loses its node changes nothing, as long as the
    dataset computes the same rows again. The first shard is published last: until then, there is nothing to read.
    Every record is written twice and read once, between the workers and the store, and compared with its checksum then.

    A killed program leaves parts, and perhaps shards, which ``granular clean`` finds and the next ``write`` replaces.
    Workers take credentials from their environment, and must reach the folder by the same address.

    Args:
      dataset: the dataset. Its columns are the keys of ``spec``.
      url: the folder of the shards, which every node can reach. It must hold no dataset.
      spec, encoders, layout, checksums: as for ``DatasetWriter``. Encoders are pickled.
      shardlen: datapoints per shard.
      resume: in a bucket, ``'discard'`` asserts that no other writer is alive, where a killed one has left its claim.
      options: ``ray_remote_args`` and ``concurrency``, as for ``ray.data.Dataset.write_datasink``.

    Raises:
      AlreadyExistsError: if there is a dataset, or another writer.
      DatapointError: if a row does not have the keys of the spec.
      EncodeError: if an encoder rejects a value.
      WorkerError: if the worker of a shard died again and again.
    """
    sink = Datasink(url, spec, encoders, shardlen, layout, checksums, resume)
    execution = dataset.context.execution_options
    ordered, execution.preserve_order = execution.preserve_order, True
    try:
        sink.on_write_start()  # it refuses an existing dataset before anything is computed
        dataset.write_datasink(sink, **options)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GranularError):
            raise error.cause from error
        raise
    finally:
        execution.preserve_order = ordered
        sink.abort()  # it does nothing after a success


class Datasink(_Base):  # type: ignore[misc]
    """A sharded dataset as a sink of Ray Data; see :func:`write` for the arguments.

    For ``Dataset.write_datasink`` with ``preserve_order`` in the execution options of the dataset; ``write`` sets it.
    """

    def __init__(
        self,
        url: AnyPath,
        spec: Mapping[str, str],
        encoders: Encoders = all_encoders,
        shardlen: int = 10_000,
        layout: Layout = 'refs',
        checksums: bool = True,
        resume: Literal['check', 'discard'] = 'check',
    ) -> None:
        self._directory = shared(Path(url))
        self._spec, self._shardlen = check_spec(spec, layout), check_integer('shardlen', shardlen, 1)
        fields_of(self._spec, encoders, layout, f'{self._directory}')  # rejects unknown types before a task starts
        if resume not in ('check', 'discard'):
            raise InvalidArgumentError(f"resume: expected 'check' or 'discard', got {resume!r}")
        self._encoders = encoders
        self._layout = layout
        self._checksums = checksums
        self._resume = resume
        self._parts = self._directory / parts_name(secrets.token_hex(8))
        self._guard: FolderGuard | None = None
        self._committing = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_guard': None}

    def get_name(self) -> str:
        """Return the name of the write tasks."""
        return 'Granular'

    # --- in the workers

    def write(self, blocks_: Iterable[Any], ctx: Any) -> tuple[int, str, int]:
        """Write the rows of a task as a part with a name of its own.

        Returns:
          The number of the task, the name of the part and its length.
        """
        rows = (row for block in blocks_ for row in blocks.BlockAccessor.for_block(block).iter_rows(True))
        first = next(rows, None)
        name = f'{ctx.task_idx:06}.{secrets.token_hex(8)}'
        if first is None:
            return ctx.task_idx, name, 0
        with DatasetWriter(
            self._parts / name, self._spec, self._encoders, self._layout, checksums=self._checksums
        ) as writer:
            writer.append(first, flush=False)
            for row in rows:
                writer.append(row, flush=False)
        return ctx.task_idx, name, len(writer)

    # --- in the driver

    def on_write_start(self, schema: Any = None) -> None:
        """Exclude other writers, and remove what a killed one left."""
        if self._guard is None:
            self._guard = run(self._enter())

    def on_write_complete(self, write_result: Any) -> None:
        """Assemble the shards, and remove the parts."""
        self.on_write_start()
        parts = sorted(write_result.write_returns)
        if len({number for number, _, _ in parts}) != len(parts):
            raise CorruptDatasetError(f'{self._directory}: Ray reported several parts of one task: {parts!r:.500}')
        run(self._commit([part for part in parts if part[2]]))
        self._release()

    def on_write_failed(self, error: Exception) -> None:
        """Remove what was written."""
        self.abort()

    def abort(self) -> None:
        """Remove what was written, unless it is complete. Tasks that still run may leave parts: `granular clean`."""
        if self._guard is not None:
            try:
                run(self._remove())
            finally:
                self._release()

    def _release(self) -> None:
        guard, self._guard = self._guard, None
        if guard is not None:
            run(guard.leave())

    async def _enter(self) -> FolderGuard:
        await self._directory.store.ready()
        await self._directory.mkdir(parents=True, exist_ok=True)
        guard = FolderGuard(self._directory, Right.SOLE, forced=self._resume == 'discard')
        entries = await guard.enter_and_list()
        try:
            await remove_unfinished(self._directory, entries)
        except BaseException:
            await guard.leave()
            raise
        return guard

    async def _commit(self, parts: Sequence[tuple[int, str, int]]) -> None:
        if self._guard is not None:
            await self._guard.check()
        lengths = [length for _, _, length in parts]
        folders = [self._parts / name for _, name, _ in parts]
        mean = 1
        if folders:
            async with DatasetReader(folders[0], None, cache_index=False) as reader:
                mean = max(1, reader.size // lengths[0])
        mapping = _Records(self._spec, mean)
        fields = fields_of(self._spec, None, self._layout, f'{self._directory}')
        source = Concatenation(functools.partial(_open, folders, self._checksums), lengths)
        writer = ShardWriter(
            self._directory, mapping, fields, self._shardlen, self._layout, self._checksums, f'{self._parts}'
        )
        writer.guarded = True
        self._committing = True
        tasks = RayShards(writer, source, Reading(), await open_source(source, Reading()))
        await tasks.write(writer.ranges(len(source)), None, None, self._guard)
        if not self._directory.store.local:  # on a disk, the lock of the guard keeps `granular clean` out
            await self._ensure_kept(folders)
        self._committing = False
        await remove_parts(self._directory, [self._parts])

    async def _ensure_kept(self, folders: Sequence[Path]) -> None:
        """Withdraw the first shard, and raise, if `granular clean` may have removed others: it removes the parts last.

        It marks the folder of the first shard meanwhile, which the writer of that has not seen.
        """
        store, names = self._directory.store, ('spec.json', *(f'{key}.bag' for key in self._spec))
        present: set[str] = set()
        with contextlib.suppress(NotFoundError):
            present = {entry.key async for entry in store.scan_tree(self._parts.key)}
        gone = await first_missing((folder / name for folder in folders for name in names), present)
        if gone is not None:
            if self._guard is not None:
                await self._guard.check()
            await store.delete([(self._directory / shard_name(0) / 'spec.json').key])
            raise StoreError(f'{self._directory}: {gone} was removed during the write, as by `granular clean`')

    async def _remove(self) -> None:
        first = self._directory / shard_name(0) / 'spec.json'
        if self._committing:
            try:
                if await first.exists():
                    return  # the dataset is complete, and `granular clean` removes the parts
            except StoreError:
                return  # `granular clean` finds out whether the dataset is complete
            numbers = await shards_in(self._directory)
            await remove_parts(self._directory, [self._directory / shard_name(number) for number in numbers])
        await remove_parts(self._directory, [self._parts])


class _Records:
    """The mapping of records that are encoded already."""

    def __init__(self, spec: dict[str, str], mean: int) -> None:
        self.spec, self.mean = spec, mean

    def datapoint(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        return record


def _open(folders: Sequence[Path], verify: bool, number: int) -> DatasetReader:
    return DatasetReader(folders[number], None, verify=verify)
