"""Write sharded datasets: one shard after the other, each a dataset of its own."""

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from granular import formats
from granular._support.indexing import check_integer
from granular._support.other_names import WRITER_ARGUMENTS, answering
from granular._support.text import logger
from granular.aio.datasets.appending import all_finished, mark, unmark
from granular.aio.datasets.build_index import build_index
from granular.aio.datasets.codec import Encoders
from granular.aio.datasets.datapoint_writer import DatapointWriter
from granular.aio.datasets.reader import DatasetReader, columns_of
from granular.aio.datasets.shards import check_complete, check_series, filled, shards_of
from granular.aio.datasets.writer import DatasetWriter, count_unflushed, is_unused, precede, remove_if_empty
from granular.aio.paths.claims import is_claim
from granular.aio.paths.guard import FolderGuard, Right
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.lifecycle import ending_with, ensure_open, report_no_loss
from granular.aio.runtime.tasks import gather
from granular.aio.stores import Entry
from granular.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptDatasetError,
    InvalidArgumentError,
    SpecError,
)
from granular.formats.checksums import SUFFIX
from granular.formats.layout import Layout, shard_name, shard_number


class ShardedDatasetWriter(DatapointWriter):
    """Appends datapoints to shards of ``shardlen`` datapoints, one shard after the other.

    Opened again, it continues after the last of its shards. A shard that is not full is filled if it is a local dataset
    in the columns layout, and left as it is otherwise. A shard that a killed writer left without a ``spec.json`` is
    continued or rewritten, as by ``DatasetWriter``; ``found`` tells which datapoint to continue with. A shard with a
    ``spec.json`` is never overwritten.

    Writers of the same shards exclude each other. In a bucket, a small object ``.writer.<start>.<step>.json`` beside
    the shards marks an active writer; closing the writer removes it. An object that a killed writer left is taken over
    on the same machine, and elsewhere with ``resume='discard'``.

    Args:
      directory: the folder of the shards; it may exist.
      spec, encoders, layout, checksums, resume: as for ``DatasetWriter``.
      shardlen: datapoints per shard; None for a single shard of any length.
      shardstart: the first shard to write, if several writers share the work.
      shardstep: the distance between two shards of this writer.
      index: build the index of the dataset when the writer is closed, as ``build_index`` does. Not with ``shardstart``
        or ``shardstep``: build it after the last of the writers.

    Example::

        async with granular.aio.ShardedDatasetWriter('./digits', spec, granular.encoders, shardlen=1000) as writer:
            for datapoint in datapoints:
                await writer.append(datapoint)
    """

    @answering(
        **WRITER_ARGUMENTS,
        size_limit='shardlen, which counts datapoints',
        maxcount='shardlen',
        shard_size='shardlen',
    )
    def __init__(
        self,
        directory: AnyPath,
        spec: Mapping[str, str],
        encoders: Encoders = formats.encoders,
        shardlen: int | None = None,
        shardstart: int = 0,
        shardstep: int = 1,
        layout: Layout = 'refs',
        checksums: bool = True,
        resume: Literal['check', 'discard'] = 'check',
        index: bool = False,
    ) -> None:
        super().__init__(Path(directory), spec, layout)
        shardstart, shardstep = check_series(shardstart, shardstep)
        shardlen = None if shardlen is None else check_integer('shardlen', shardlen, 1)
        if shardlen is None and (shardstart > 0 or shardstep > 1):
            raise InvalidArgumentError('shardstart and shardstep need a shardlen: without it there is one shard')
        if index and (shardstart > 0 or shardstep > 1):
            raise InvalidArgumentError(
                'index needs all shards: with shardstart or shardstep, call granular.build_index, or run `granular '
                'index`, once all writers are closed'
            )
        self._index = index
        self._args = (spec, encoders, layout, resume, checksums)
        self._checksums = checksums
        DatasetWriter(self.directory, *self._args)  # rejects unknown types and others before a shard starts
        self._shardlen = shardlen
        self._next = shardstart
        self._step = shardstep
        self._writer: DatasetWriter | None = None
        self._done = [0, 0, 0]  # number, bytes and datapoints of the finished shards
        self._resumed = 0
        self._failed = False
        self._readable = 0  # shards that were a finished dataset when the writer was opened
        self._appends = False  # True if readers may need to be told so
        # On a disk, the lock on the next shard's folder excludes other writers before a shard is published.
        self._guard = FolderGuard(self.directory, Right.SERIES, shardstart, shardstep, resume == 'discard')

    def _loss(self) -> str:
        if not len(self):
            return ''
        lost = 0 if self._writer is None else count_unflushed(self._writer)
        return f'{lost} of its {len(self)} datapoints are lost ({self._done[0]} shards are complete)'

    async def _open(self) -> None:
        await self.directory.mkdir(parents=True, exist_ok=True)
        entries = await self._guard.enter_and_list()
        claims = sum(is_claim(entry.name) for entry in entries)
        alone = not self._guard.has_claim or (not self._guard.took_over and claims == 1)
        try:
            await self._resume(entries, alone)
        except BaseException:
            async with self._guard.leaving():
                raise

    async def _resume(self, entries: Sequence[Entry], alone: bool = True) -> None:
        """Find where the previous writer stopped; ``alone`` is False if another one is writing, or was killed."""
        if any(entry.name == 'spec.json' for entry in entries):
            raise AlreadyExistsError(
                f'{self._name}: is a dataset without shards, which readers would read in place of the shards: '
                f'choose another folder or remove this one'
            )
        existing = await filled(self.directory, shards_of(entries))
        self._appends = bool(existing)
        if alone and await all_finished(self.directory, existing):
            self._readable = len(existing)
        own = [number for number in existing if number >= self._next and not (number - self._next) % self._step]
        if not own:
            return
        hint = 'remove the shards that follow, or begin after it with shardstart'
        check_complete(self._name, own, hint, self._next, self._step)
        growing = self._layout == 'columns' and self.directory.store.local
        folders = [self.directory / shard_name(number) for number in (own[:-1] if growing else own)]
        lengths = await gather([length_of_shard(folder, self._spec, self._layout) for folder in folders])
        if len(own) > 1 and lengths[len(own) - 2] is None and await self._drop(own[-1]):
            own, lengths = own[:-1], lengths[: len(own) - (2 if growing else 1)]
        if None in lengths[: len(own) - 1]:
            raise CorruptDatasetError(
                f'{self._name}: shard {shard_name(own[lengths.index(None)])} has no spec.json, but a later one '
                f'exists: its writer was killed, and another one continued without it: remove it and the rest'
            )
        last = self.directory / shard_name(own[-1])
        if self._shardlen is None and await (last / 'spec.json').exists():
            raise AlreadyExistsError(f'{last}: exists already: pass shardlen to write further shards')
        await self._compare_checksums([number for number, length in zip(own, lengths, strict=False) if length])
        writer, resumed, finished = None, 0, sum(length or 0 for length in lengths)
        if growing or lengths[-1] is None:
            writer = await self._open_shard(last)
            resumed = writer.found  # which tells it that the caller asks this writer
            if self._full(writer):
                await writer.aclose()
                writer, resumed, finished = None, 0, finished + resumed
        # Last, as a writer that fails to open may be opened again.
        self._writer, self._resumed = writer, resumed
        self._next, self._found = own[-1] + self._step, finished + resumed
        self._untold = self._readable > 0

    async def _compare_checksums(self, finished: list[int]) -> None:
        """Log if the last of the finished shards, which are never changed, has no checksums, but the next ones do."""
        if not finished or not self._checksums:
            return
        shard = self.directory / shard_name(finished[-1])
        if not await (shard / f'{"refs" if self._layout == "refs" else next(iter(self._spec))}{SUFFIX}').exists():
            logger.warning(
                '%s: was written without checksums and is left so: further shards have them, but readers with '
                'verify=True refuse the dataset; pass checksums=False to write further shards like it',
                shard,
            )

    async def _drop(self, number: int) -> bool:
        """Remove a shard that was started and never used, as left by a writer killed between two shards."""
        folder = self.directory / shard_name(number)
        if not folder.store.local or await (folder / 'spec.json').exists():
            return False
        writer = await self._open_shard(folder)
        removable = is_unused(writer)
        await writer.abort()
        return removable

    @property
    def shards(self) -> int:
        """The number of shards that this writer has started."""
        return self._done[0] + (self._writer is not None and len(self._writer) > 0)

    @property
    def size(self) -> int:
        """Bytes of the shards that this writer has started."""
        return self._done[1] + (0 if self._writer is None else self._writer.size)

    def __len__(self) -> int:
        return self._done[2] + (0 if self._writer is None else len(self._writer) - self._resumed)

    async def _append(self, datapoint: Mapping[str, Any], flush: bool) -> int:
        self._check_open()
        self._check_published()
        if self._writer is not None and self._full(self._writer):  # by a datapoint that would be appended again
            raise ClosedError(
                f'{self._name}: starting a shard failed: datapoint {len(self) - 1} was appended nevertheless: close '
                f'the writer to publish it, and open another one to continue'
            )
        if self._writer is None:
            self._writer = await self._begin()
        await self._writer.append(datapoint, flush)
        index = len(self) - 1
        if self._full(self._writer):
            await self._turn()
        return index

    async def _flush(self) -> None:
        self._check_open()
        if self._writer is not None:
            await self._writer.flush()

    def _full(self, writer: DatasetWriter) -> bool:
        return self._shardlen is not None and len(writer) >= self._shardlen

    async def _begin(self) -> DatasetWriter:
        if self._readable:
            await mark(self.directory, self._readable)
            self._readable = 0
        await to_loop()
        folder = self.directory / shard_name(self._next)
        writer = await self._open_shard(folder)
        if not is_unused(writer):  # a shard in columns, to which it would append
            await writer.abort()
            raise AlreadyExistsError(f'{folder}: another writer has written it first: open another one to continue')
        self._next += self._step
        return writer

    async def _open_shard(self, folder: Path) -> DatasetWriter:
        writer = DatasetWriter(folder, *self._args)
        report_no_loss(writer)
        if self.directory.store.local and (number := shard_number(folder.name)) is not None:
            precede(writer, folder.with_name(shard_name(number + self._step)))
        await ensure_open(writer)
        return writer

    async def _turn(self) -> None:
        """Publish the full shard."""
        await to_loop()
        # On a disk, the next shard is started first: its folder excludes other writers and shows that more follows.
        following, full = await self._begin() if self.directory.store.local else None, self._writer
        try:
            await self._finish()
        except BaseException:
            if following is not None and full is not None:
                await following.abort()
                await remove_if_empty(full)
            raise
        self._writer = following

    async def _finish(self) -> None:
        writer = self._writer
        if writer is None:
            return
        self._failed = True  # until the shard is published
        try:
            await self._guard.check()
        except BaseException:
            await writer.abort()
            raise
        await writer.aclose()
        self._failed = False
        self._done = [self._done[0] + 1, self._done[1] + writer.size, self._done[2] + len(writer) - self._resumed]
        self._writer, self._resumed = None, 0

    def _check_published(self) -> None:
        if self._failed:
            raise ClosedError(f'{self._name}: publishing a shard failed: open another writer to continue')

    async def _close(self) -> None:
        await self.directory.store.ready()
        async with self._ending():
            self._check_published()
            if self._writer is not None and is_unused(self._writer):
                await self._writer.abort()
            else:
                await self._finish()
        if self._index and (self._found or self._done[2]):
            await build_index(self.directory)

    async def _abort(self) -> None:
        await self.directory.store.ready()
        async with self._ending():
            if self._writer is not None:
                await self._writer.abort()

    @contextlib.asynccontextmanager
    async def _ending(self) -> AsyncIterator[None]:
        """Remove the record of the append, if all shards are finished, and then the claim."""
        async with self._guard.leaving(), ending_with(self._unmark, 'removing the record of the append'):
            yield

    async def _unmark(self) -> None:
        if self._appends:
            await unmark(self.directory)


async def length_of_shard(folder: Path, spec: Mapping[str, str], layout: Layout) -> int | None:
    """Return the number of datapoints of a shard; None if it is not finished. Raise ``SpecError`` for another spec."""
    if not await (folder / 'spec.json').exists():
        return None
    async with DatasetReader(folder, None, cache_index=False) as reader:
        if (difference := columns_of(reader).difference(spec, layout, 'the writer')) is not None:
            raise SpecError(f'{folder}: exists with {difference}')
        return len(reader)
