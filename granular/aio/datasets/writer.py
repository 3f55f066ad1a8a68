"""Write datasets: every bag streams while it grows, and ``spec.json`` is published last."""

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

from granular import formats
from granular._support.other_names import WRITER_ARGUMENTS, answering
from granular.aio.bags.copied import CopiedBag
from granular.aio.bags.output import BagOutput
from granular.aio.bags.published import withdraw
from granular.aio.datasets.codec import Encoders, encode_datapoint, fields_of, keys_error
from granular.aio.datasets.datapoint_writer import DatapointWriter
from granular.aio.datasets.publishing import Anew, Found, read_spec, unpublished
from granular.aio.datasets.rivals import find_dataset_above, find_rival, folder_of_shards
from granular.aio.datasets.stored_columns import StoredColumn, add_columns, check_ahead
from granular.aio.paths.claims import is_claim
from granular.aio.paths.guard import FolderGuard, Right
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.paths.removal import explain, find_removal, marked
from granular.aio.runtime.lifecycle import ensure_open
from granular.aio.runtime.tasks import finish_within, gather, settle
from granular.aio.runtime.threads import offload
from granular.aio.stores import ObjectWriter
from granular.aio.stores.local.locks import FolderLock
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.local.writing import final_name
from granular.errors import (
    AlreadyExistsError,
    BadReplyError,
    ClosedError,
    CorruptDatasetError,
    DatapointError,
    GranularError,
    NotFoundError,
    SpecError,
    StoreError,
)
from granular.formats.layout import LIMIT, SUFFIXES, Layout, dump_spec, pack_refs, parse_spec


class DatasetWriter(DatapointWriter):
    """Appends datapoints to a new dataset, or to an existing local one in the columns layout.

    ``spec.json`` is written when the writer is closed. If the ``with`` block ends with an error, the files of a new
    dataset are removed. What a killed writer left is continued in the columns layout on a local disk, and rewritten
    elsewhere (in a bucket only with ``resume='discard'``).

    Args:
      directory: the dataset's folder. It must not hold a dataset, except in the columns layout on a local disk: a
        dataset with the same spec is appended to.
      spec: the type of each key. In the refs layout, a type that ends in ``[]`` is a sequence.
      encoders: the encoder of each type, a function from a value to bytes; by default those of granular, None if the
        values are bytes.
      layout: ``'refs'``, which granular 0.21 writes, or ``'columns'``, which 0.22 and later write.
      resume: how to treat what a killed writer left. ``'check'``: in the columns layout on a local disk, check that the
        datapoints appended next equal those that are half written. ``'discard'``: drop what is half written. A bucket
        cannot tell whether the other writer is alive: there, ``'discard'`` asserts that it is not.
      checksums: write a CRC32C of each record, for readers with ``verify``, in files that granular 0.21 and 0.24
        ignore. Columns that are appended to and have none get those of their existing records first, which reads all
        of them and is logged; columns that have checksums get them in any case.

    Example::

        async with granular.aio.DatasetWriter('./digits', {'label': 'int'}, granular.encoders) as writer:
            for label in range(100):
                await writer.append({'label': label})
    """

    @answering(**WRITER_ARGUMENTS, shardlen='it to a ShardedDatasetWriter')
    def __init__(
        self,
        directory: AnyPath,
        spec: Mapping[str, str],
        encoders: Encoders = formats.encoders,
        layout: Layout = 'refs',
        resume: Literal['check', 'discard'] = 'check',
        checksums: bool = True,
    ) -> None:
        super().__init__(Path(directory), spec, layout)
        self._fields = fields_of(self._spec, encoders, layout, self._name)
        self._resume = resume
        version = 2 if layout == 'refs' else 3
        self._bags = {key: BagOutput(self.directory / f'{key}.bag', version, resume, checksums) for key in self._spec}
        self._refs = BagOutput(self.directory / 'refs.bag', 2, 'check', checksums) if layout == 'refs' else None
        self._writers = [*self._bags.values(), *([] if self._refs is None else [self._refs])]
        for writer in self._writers:
            writer.alone = False  # all are verified together, right before the spec is published
        self._length = 0
        self._lock: FolderLock | None = None
        self._owns_folder = False  # True if this writer, or the one that owns it, has created the folder
        self._shared_lock: FolderLock | None = None  # on the folder of shards, if it is one
        self._folder_had = Found.NOTHING
        self._standing = False  # True if a spec may exist that needs the bags, so they are never removed
        self._anew: Anew | None = None
        self._next_folder: Path | None = None  # see `precede`
        self._failed = False  # True while, or after, only some of the bags have a datapoint
        self._torn = False  # True while, or after, only some of the columns were flushed

    def _loss(self) -> str:
        if self._length == self._found:
            return ''
        lost = count_unflushed(self)
        is_readable = self._folder_had is Found.DATASET
        hint = '' if is_readable or lost == self._length else ' (the others need a writer that is closed, too)'
        return f'{lost} of its {self._length} datapoints are lost{hint}'

    async def _open(self) -> None:
        store = self.directory.store
        await store.ready()
        stat = await store.find(self.directory.key)
        if stat is not None and not stat.is_dir:
            raise AlreadyExistsError(f'{self._name}: exists already, and is a file')
        self._owns_folder = self._owns_folder or stat is None
        try:
            await self._enter(exist_ok=stat is not None or not store.local)
            # Also a folder that was created here: another writer may have locked it first, and have finished by now.
            if stat is not None or self._lock is not None:
                await self._check_existing()
            await self._open_bags()
        except BaseException as error:
            try:
                if stat is None and not (self._lock is None and isinstance(error, AlreadyExistsError)):
                    await self._remove_own_folder()
            finally:
                self._release()
            raise
        # After a crash between two columns, some are longer: the next appends are checked against them.
        self._length = self._found = min(bag.length for bag in self._bags.values())
        self._untold = self._folder_had is Found.DATASET and self._found > 0

    async def _enter(self, exist_ok: bool) -> None:
        """Create and lock the folder. If two writers start at once, only one of them creates it or gets the lock."""
        is_guarded = self._anew is not None and self._anew.guarded
        store, above = self.directory.store, None if is_guarded else folder_of_shards(self.directory)
        if isinstance(store, LocalStore) and above is not None:
            await above.mkdir(parents=True, exist_ok=True)
            self._shared_lock = await store.lock_folder(above.key, shared=True)
        while self._lock is None:
            await self.directory.mkdir(parents=True, exist_ok=exist_ok)
            if not isinstance(store, LocalStore):
                return
            with contextlib.suppress(NotFoundError):  # `granular clean` may remove it before it is locked.
                self._lock = await store.lock_folder(self.directory.key)

    async def _open_bags(self) -> None:
        try:
            await gather([ensure_open(writer) for writer in self._writers])
        except AlreadyExistsError:
            await settle([writer.abort() for writer in self._writers])  # the files belong to another writer
            raise
        except BaseException:
            await self._drop()
            raise

    async def _check_existing(self) -> None:
        """Decide for the files in the folder: append to them, continue them, delete them, or refuse to write."""
        store = self.directory.store
        entries = {entry.name: entry async for entry in store.scan(self.directory.key)}
        bag_files = entries.keys() & self._names
        temporary = {name for name in entries if final_name(name) in {*self._names, 'spec.json'}}
        appendable = self._layout == 'columns' and self._lock is not None
        is_described = 'spec.json' in entries
        if is_described and not appendable:
            raise AlreadyExistsError(
                f'{self._name}: exists already: choose another folder or remove this one; to append datapoints later, '
                f'write with ShardedDatasetWriter, or to a disk in the columns layout'
            )
        if is_described and 'refs.bag' not in entries.keys() - bag_files:
            path = self.directory / 'spec.json'
            existing = parse_spec(await path.read_bytes(), f'{path}')
            if existing != self._spec:
                raise SpecError(f'{self._name}: exists with spec {existing}, which is not {self._spec}')
        if foreign := [name for name in entries.keys() - bag_files - {'spec.json'} if not name.startswith('.')]:
            raise AlreadyExistsError(
                f'{self._name}: exists and holds files that are not part of this dataset: {sorted(foreign)[:5]}: '
                f'choose another folder, or remove them'
            )
        if reason := explain(entries) or await find_dataset_above(self.directory):
            raise AlreadyExistsError(f'{self._name}: {reason}')
        exclusive = self._lock is not None and self._lock.sure
        claims = set() if store.local else {name for name in entries if is_claim(name)}
        if isinstance(store, LocalStore) and exclusive:
            await store.delete_unlocked([entries[name] for name in temporary])
            temporary = set()
        if appendable:
            if is_described:
                self._folder_had = Found.DATASET
            elif any(entries[name].size for name in bag_files):
                self._folder_had = Found.REMAINS
            if self._resume == 'discard':
                tables = (f'{key}.idx' for key in self._spec)
                shortest = min(entries[name].size if name in bag_files else 0 for name in tables) // LIMIT
                shortest = 0 if self._anew is not None and not is_described else shortest
                for writer in self._writers:
                    writer.open_at_most(shortest)
            return
        if self._has_copies:
            return
        if (bag_files or temporary or claims) and not exclusive and self._resume != 'discard':
            raise AlreadyExistsError(
                f'{self._name}: exists already, without a spec.json: another writer is writing it, or was killed: if '
                f"no other writer is running, pass resume='discard' to write it anew"
            )
        if left := temporary | bag_files | claims:
            if store.local or not store.conditional:
                await store.delete([entries[name].key for name in left])
            else:
                await self._discard()

    async def _discard(self) -> None:
        """Remove what a killed writer left in a bucket, under a claim: another writer that publishes a spec sees that,
        and withdraws, or has published it before.
        """
        store = self.directory.store
        asserted = self._anew is None or folder_of_shards(self.directory) is not None
        guard = FolderGuard(self.directory, Right.REMAINS, forced=asserted)
        entries = await guard.enter_and_list()
        async with guard.leaving():
            if any(entry.name == 'spec.json' for entry in entries):
                raise AlreadyExistsError(f'{self._name}: another writer has finished it first')
            await store.delete([entry.key for entry in entries if entry.name in self._names])

    @property
    def _has_copies(self) -> bool:
        return self._anew is not None and self._anew.has_copies

    @property
    def _names(self) -> set[str]:
        return {f'{writer.path.stem}{end}' for writer in self._writers for end in SUFFIXES}

    @property
    def size(self) -> int:
        """Bytes of all bags, tables included."""
        return sum(writer.size for writer in self._writers)

    def __len__(self) -> int:
        self._untold = False
        return self._length

    async def _append(self, datapoint: Mapping[str, Any], flush: bool) -> int:
        self._check_usable()
        if not isinstance(datapoint, Mapping):
            raise DatapointError(f'{self._name}: expected a mapping for a datapoint, got {type(datapoint).__name__}')
        if datapoint.keys() != self._spec.keys():
            raise keys_error(self._spec, datapoint, self._name, self._length)
        records = await encode_datapoint(self._fields, datapoint, self._name, self._length)
        self._failed = True
        refs: list[Any] = []
        for field, values in zip(self._fields, records, strict=True):
            bag = self._bags[field.key]
            if self._refs is None and bag.length > self._length:
                await check_ahead(self._name, bag.path, self._length, values[0])
                continue
            refs.append(([bag.length, len(values)] if values else []) if field.many else bag.length)
            for value in values:
                if bag.is_resuming:
                    await bag.check(value)
                bag.add(value)
        if self._refs is not None:
            self._refs.add(pack_refs(refs))
        self._length += 1
        if flush or any(writer.is_full for writer in self._writers):
            await self._flush_bags()
        self._failed = False
        return self._length - 1

    def _check_usable(self) -> None:
        self._check_open()
        if self._failed:
            raise ClosedError(f'{self._name}: an earlier write failed: close the writer, or abort it')

    async def _flush(self) -> None:
        self._check_usable()
        await self._flush_bags()

    async def _flush_bags(self) -> None:
        self._torn = True
        for writer in self._writers:
            await writer.flush()
        self._torn = False

    async def _close(self) -> None:
        await self.directory.store.ready()
        try:
            await self._finish()
        except BaseException:
            await self._drop()
            raise
        self._release()

    async def _finish(self) -> None:
        if self._failed:
            raise ClosedError(f'{self._name}: an earlier write failed, so it is not published')
        ahead = {key: bag.length for key, bag in self._bags.items() if self._refs is None and bag.length > self._length}
        if ahead:
            raise CorruptDatasetError(
                f'{self._name}: columns are ahead of the {self._length} datapoints: {ahead}: append the same '
                f"datapoints as the previous writer, or pass resume='discard'"
            )
        await self._flush_bags()
        # The first bag decides between writers: the writer that fails to create it has published nothing to remove.
        *rest, first = self._writers
        await first.aclose()
        await settle([writer.aclose() for writer in rest])
        await self._verify_bags()
        if self._folder_had is not Found.DATASET:
            await self._publish_spec()

    async def _verify_bags(self) -> None:
        await gather([writer.verify() for writer in self._writers])

    async def _publish_spec(self) -> None:
        """Publish the spec, which makes the folder a dataset, and read it back.

        If publishing fails, the spec may exist nevertheless: the read decides. Bags are never removed once a spec that
        needs them may exist.
        """
        path, content = self.directory / 'spec.json', dump_spec(self._spec)
        self._standing = True
        failure: GranularError | None = None
        writer: ObjectWriter | None = None
        try:
            writer = await finish_within(path.store.write(path.key, content, new=not self._has_copies))
        except GranularError as error:
            failure = error
        except BaseException:
            if self._lock is not None:  # On a disk, no file appears later.
                self._standing = await path.exists()
            raise
        published = await read_spec(path, failure)
        if published == content:
            if failure is not None:
                await self._verify_bags()
            if self._lock is None or not self._lock.sure:
                await self._ensure_alone(path, writer)
            return
        if published is not None and writer is not None and path.store.conditional and await withdraw(path, writer):
            self._standing = False
            raise BadReplyError(
                f'{path}: expected the {len(content)} bytes that were written, got other bytes: removed'
            )
        if published is not None:
            spec = parse_spec(published, f'{path}')
            await self._remove_unneeded()
            raise AlreadyExistsError(f'{path}: another writer published it first, with spec {spec}') from failure
        if failure is not None and self._lock is not None:
            self._standing = False
            raise failure
        raise unpublished(path, failure, 'there is no such file now')

    async def _ensure_alone(self, path: Path, writer: ObjectWriter | None) -> None:
        """Withdraw the spec, and raise, if another writer or `granular clean` may not have seen it."""
        names = [file.name for bag in self._writers for file in bag.published]
        try:
            entries = [entry async for entry in path.store.scan(self.directory.key)]
            # A disk's columns are not published, but appended to.
            rival = await find_rival(self.directory, entries, names or self._names)
            reason = rival or await find_removal(self.directory, names, entries)
        except GranularError as error:
            raise unpublished(path, error, f'looking for other writers failed: {error}') from error
        if reason:
            self._standing = self._has_copies or writer is None or not await withdraw(path, writer)
            kind = AlreadyExistsError if rival else StoreError
            raise kind(f'{self._name}: its bags were written, but {reason}')

    async def _abort(self) -> None:
        await self.directory.store.ready()
        await self._drop()

    async def _drop(self) -> None:
        """Discard what is not published, and remove what is, unless a spec may exist that needs it."""
        try:
            await settle([writer.abort() for writer in self._writers])
            if self._folder_had is Found.NOTHING and not self._standing:
                await self._remove_published()
            elif self._torn:
                shortest = min(bag.flushed for bag in self._bags.values())
                for bag in self._bags.values():
                    await bag.truncate(shortest)
        finally:
            self._release()

    async def _remove_published(self) -> None:
        if self.directory.store.local or not any(bag.published for bag in self._writers):
            await self._remove_all()
        elif not await self._remove_unneeded():
            async with marked(self.directory, by_writer=True):  # a copy that ends from now on sees it
                if not await self._remove_unneeded():
                    await self._remove_all()

    async def _remove_unneeded(self) -> bool:
        """If the folder has the dataset of another writer, or its claim, remove only the published files that the
        dataset has no use for, and return True. A copy may have found that the others equal its own, and replaces those
        that do not.
        """
        store, spec = self.directory.store, self._spec
        try:
            names = [entry.name async for entry in store.scan(self.directory.key)]
        except NotFoundError:
            return False
        if 'spec.json' in names:
            path = self.directory / 'spec.json'
            spec = parse_spec(await path.read_bytes(), f'{path}')
        elif not any(map(is_claim, names)):
            return False
        unneeded = [bag.remove_published(sole=False) for key, bag in self._bags.items() if key not in spec]
        if self._refs is None and 'refs.bag' in names:
            unneeded += [bag.remove_table() for bag in self._bags.values()]
        if self._refs is not None and any(name.endswith('.idx') for name in names):
            unneeded.append(self._refs.remove_published(sole=False))
        await settle(unneeded)
        return True

    async def _remove_all(self) -> None:
        store = self.directory.store
        *rest, first = self._writers
        sole = self._lock is not None or first.is_winner
        await settle([writer.remove_published(sole) for writer in rest])
        await first.remove_published(sole)  # last, because another writer may start then
        await settle([writer.remove_opened() for writer in self._writers])
        if store.has_folders and self._owns_folder:
            await self._remove_empty()

    async def _remove_own_folder(self) -> None:
        """Remove the folder that this writer may have created, if it is empty, unless another writer has locked it."""
        store = self.directory.store
        if isinstance(store, LocalStore):
            with contextlib.suppress(AlreadyExistsError, NotFoundError):
                self._lock = self._lock or await store.lock_folder(self.directory.key)
                await self._remove_empty()

    async def _remove_empty(self) -> None:
        if self._next_folder is None or not await self._next_folder.exists():
            with contextlib.suppress(NotFoundError):
                await self.directory.store.delete_empty(self.directory.key)

    def _release(self) -> None:
        for lock in (self._lock, self._shared_lock):
            if lock is not None:
                lock.release()
        self._lock = self._shared_lock = None


# --- writers that own this one


def count_unflushed(writer: DatasetWriter) -> int:
    """Return how many datapoints are lost if a writer is not closed: all, except in local columns."""
    return writer._length - min(bag.flushed for bag in writer._bags.values())


def is_unused(writer: DatasetWriter) -> bool:
    """Return whether the folder of a writer held no datapoints, and none were appended."""
    return writer._folder_had is Found.NOTHING and not writer._length


def precede(writer: DatasetWriter, folder: Path) -> None:
    """Keep the folder of a writer that fails or is aborted, without its files, while another folder exists; without
    that, remove it, also if a killed writer has left it.
    """
    writer._next_folder, writer._owns_folder = folder, True


async def remove_if_empty(writer: DatasetWriter) -> None:
    """Remove the folder of an aborted writer, if it was kept and is not needed any longer."""
    await writer._remove_own_folder()
    writer._release()


async def append_columns(writer: DatasetWriter, columns: Mapping[str, StoredColumn], count: int) -> None:
    """Append datapoints, given by the records of each key, or their references in bags that are copied."""
    writer._check_usable()
    writer._failed = True  # only some of the bags have the datapoints until the end
    await offload(add_columns, writer._bags, writer._refs, writer.spec, columns)
    writer._length += count
    if any(bag.is_full for bag in writer._writers):
        await writer._flush_bags()
    writer._failed = False


def copy_bags(writer: DatasetWriter, copies: Mapping[str, CopiedBag]) -> None:
    """Copy the bags of some keys as they are, instead of writing their records. Call it before the writer is opened.

    The bag that decides between concurrent writers is a written one, unless all of them are copied.
    """
    writer._bags.update(copies)
    writer._writers = [*copies.values(), *(bag for bag in writer._writers if bag.path.stem not in copies)]


def write_anew(writer: DatasetWriter, guarded: bool, copies: bool) -> None:
    """Drop all that an unfinished dataset has, also in the layout in which ``resume='discard'`` continues it. Call it
    before the writer is opened; a finished dataset is kept.

    Args:
      guarded: rely on the process that started this one, which keeps other writers out of the folder of the shards.
      copies: allow other processes to write the same bytes at the same time. In a bucket, its files are then
        overwritten and never removed, so that the dataset is complete once one of the writers is closed, whatever
        becomes of the others. On a disk, locks exclude the others, as for all writers.
    """
    has_copies = copies and not writer.directory.store.local
    writer._anew = Anew(guarded, has_copies)
    if has_copies:
        writer._standing = True
        for bag in writer._writers:
            bag.has_copies = True
