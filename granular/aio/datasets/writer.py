"""Writing datasets: every bag streams as it grows, and ``spec.json`` comes last."""

import contextlib
import os
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from granular.aio.bags.writer import BagWriter
from granular.aio.datasets.codec import Encoder, encode, fields_of
from granular.aio.paths.path import Path
from granular.aio.runtime.lifecycle import Opened
from granular.aio.runtime.loops import Lock, gather, settle
from granular.aio.stores.local.locks import FolderLock
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.local.writing import drafted
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
    UnknownKeyError,
)
from granular.formats.layout import LIMIT, SUFFIXES, Layout, check_spec, dump_spec, pack_refs, parse_spec

"""What the names of a bag's files end in."""


class DatasetWriter(Opened):
    """Appends datapoints to a new dataset, or to a local one in the columns layout.

    ``spec.json`` is written when the writer is closed. If its block ends with an error, what it wrote is removed. What
    a killed writer left is gone on with in the columns layout on a local disk, and begun anew elsewhere.

    Args:
      directory: the dataset's folder, which must hold no dataset; in the columns layout on a local disk it may, if the
        spec agrees, and is appended to.
      spec: the type of each key. In the refs layout, a type that ends in ``[]`` is a sequence.
      encoders: by type, the function that makes bytes of a value; None if the values are bytes.
      layout: ``'refs'``, which granular 0.21 writes, or ``'columns'``, which 0.22 and later write.
      resume: what to do with what a killed writer left. ``'check'``: in the columns layout on a local disk, that the
        datapoints appended next are those that it was writing. ``'discard'`` what it left half written; in a bucket,
        where nobody can know whether it still lives, this says that it does not.
      checksums: keep a CRC32C of each record, for readers that verify, in files that granular 0.21 and 0.24 ignore.
    """

    def __init__(
        self,
        directory: Path | str | os.PathLike[str] | Any,
        spec: Mapping[str, str],
        encoders: Mapping[str, Encoder | Any] | None,
        layout: Layout = 'refs',
        resume: Literal['check', 'discard'] = 'check',
        checksums: bool = False,
    ) -> None:
        super().__init__()
        self.directory = Path(directory)
        self._name = f'{self.directory}'
        self._layout = layout
        self._spec = check_spec(spec, layout)
        self._fields = fields_of(self._spec, encoders, layout, self._name)
        versions = dict.fromkeys(self._spec, 2 if layout == 'refs' else 3)
        self._resume = resume
        self._bags = {
            key: BagWriter(self.directory / f'{key}.bag', version, resume, checksums)
            for key, version in versions.items()
        }
        refs = self.directory / 'refs.bag'
        self._refs = BagWriter(refs, checksums=checksums) if layout == 'refs' else None
        for writer in self._writers:
            writer.verifies = False  # all of them are verified together, right before the spec is published
        self._length = self._found = 0
        self._lock: FolderLock | None = None
        self._fresh = True  # whether all that lies in the folder is ours to remove
        self._described = False  # whether its spec was there when it was opened
        self._standing = False  # whether the bags stay whatever happens, as a spec may stand over them
        self._failed = False
        self._turns = Lock()
        self._torn = False  # whether some columns were handed on and others were not

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    @property
    def _writers(self) -> list[BagWriter]:
        return [*self._bags.values(), *([] if self._refs is None else [self._refs])]

    async def _open(self) -> None:
        await self.directory.store.ready()
        try:
            there = await self.directory.stat()
        except NotFoundError:
            there = None
        if there is not None and not there.is_dir:
            raise AlreadyExistsError(f'{self._name}: exists already, and is a file')
        store = self.directory.store
        try:
            # Of two writers that begin at once, one makes the folder, or one has the lock.
            await self.directory.mkdir(parents=True, exist_ok=there is not None or not store.local)
            if isinstance(store, LocalStore):
                self._lock = await store.lock_folder(self.directory.key)
            if there is not None:
                await self._check_existing()
            await self._open_bags()
        except BaseException:
            self._release()
            raise
        # After a crash between two columns some are ahead: what is appended first is checked against them.
        self._length = self._found = min(len(bag) for bag in self._bags.values())

    async def _open_bags(self) -> None:
        try:
            await gather([writer._ensure_open() for writer in self._writers])
        except AlreadyExistsError:
            await gather([writer.abort() for writer in self._writers])  # what lies there is another's
            raise
        except BaseException:
            await self._drop()
            raise

    async def _check_existing(self) -> None:
        """What lies in the folder: to be appended to, to be gone on with, to be discarded, or not to be touched."""
        store = self.directory.store
        entries = {entry.key.rpartition('/')[2]: entry async for entry in store.scan(self.directory.key)}
        ours = entries.keys() & self._names
        drafts = {name for name in entries if drafted(name) in {*self._names, 'spec.json'}}
        growing = self._layout == 'columns' and self._lock is not None
        self._described = 'spec.json' in entries
        if self._described and not growing:
            raise AlreadyExistsError(
                f'{self._name}: exists already: choose another folder or remove this one; only a local dataset in '
                f'the columns layout can be appended to'
            )
        if self._described and 'refs.bag' not in entries.keys() - ours:
            place = self.directory / 'spec.json'
            existing = parse_spec(await place.read_bytes(), f'{place}')
            if existing != self._spec:
                raise SpecError(f'{self._name}: exists with spec {existing}, which is not {self._spec}')
        if strange := [name for name in entries.keys() - ours - {'spec.json'} if not name.startswith('.')]:
            raise AlreadyExistsError(
                f'{self._name}: exists and holds what is no part of this dataset: {sorted(strange)[:5]}'
            )
        sure = self._lock is not None and self._lock.sure
        if growing:
            self._fresh = not self._described and not any(entries[name].size for name in ours)
            if self._resume == 'discard':
                least = min(entries[f'{key}.idx'].size if f'{key}.idx' in ours else 0 for key in self._spec) // LIMIT
                for writer in self._writers:
                    writer.keep(least)
            await store.delete([entries[name].key for name in drafts if sure])
            return
        if (ours or drafts) and not sure and self._resume != 'discard':
            raise AlreadyExistsError(
                f'{self._name}: exists already, without a spec.json: another writer is writing it, or was killed: if '
                f"none lives, pass resume='discard' to write it anew"
            )
        await store.delete([entries[name].key for name in drafts | ours])

    @property
    def _names(self) -> set[str]:
        """The files of its bags."""
        return {f'{writer.path.stem}{end}' for writer in self._writers for end in SUFFIXES}

    # --- what it is

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        return dict(self._spec)

    @property
    def size(self) -> int:
        """Bytes of all bags and their tables."""
        return sum(writer.size for writer in self._writers)

    def __len__(self) -> int:
        return self._length

    @property
    def found(self) -> int:
        """Datapoints that were there when it was opened: go on with those that follow."""
        return self._found

    @property
    def unused(self) -> bool:
        """Whether nothing was there and nothing was appended."""
        return self._fresh and not self._length

    # --- appending

    async def append(self, datapoint: Mapping[str, Any], flush: bool = True) -> int:
        """Append a datapoint; returns its index. All of its values are encoded before any of them is written.

        Args:
          datapoint: a value for each key of the spec; for a sequence any iterable of values.
          flush: hand it on now. To a bucket, bytes go in parts, whenever one is full.

        Several calls at a time take turns, in the order in which they were made.

        Raises:
          DatapointError: if its keys are not those of the spec.
          EncodeError: if an encoder refuses a value.
        """
        if self._state != 'open':
            await self._ensure_open()
        async with self._turns.turn():
            return await self._append(datapoint, flush)

    async def _append(self, datapoint: Mapping[str, Any], flush: bool) -> int:
        self._check_usable()
        if not isinstance(datapoint, Mapping):
            raise DatapointError(f'{self._name}: want a mapping for a datapoint, got {type(datapoint).__name__}')
        if datapoint.keys() != self._spec.keys():
            missing, extra = sorted(self._spec.keys() - datapoint.keys()), sorted(datapoint.keys() - self._spec.keys())
            raise _KeysError(f'{self._name}: datapoint {self._length}: keys are missing {missing} or too many {extra}')
        records = await encode(self._fields, datapoint, self._name, self._length)
        self._failed = True  # until every bag has it
        refs: list[Any] = []
        for field, values in zip(self._fields, records, strict=True):
            bag = self._bags[field.key]
            if self._refs is None and len(bag) > self._length:
                await self._verify(field.key, values[0])
                continue
            refs.append(([len(bag), len(values)] if values else []) if field.many else len(bag))
            for value in values:
                bag.add(value)
        if self._refs is not None:
            self._refs.add(pack_refs(refs))
        self._length += 1
        if flush or any(writer.crowded for writer in self._writers):
            await self._flush()
        self._failed = False
        return self._length - 1

    async def _verify(self, key: str, record: bytes) -> None:
        """That a column which is ahead of the others holds what is appended again."""
        path = self.directory / f'{key}.idx'
        at = LIMIT * self._length
        table = await path.read_range(max(0, at - LIMIT), at + LIMIT)
        start = int.from_bytes(table[:LIMIT], 'little') if at else 0
        stop = int.from_bytes(table[-LIMIT:], 'little')
        if await (self.directory / f'{key}.bag').read_range(start, stop) != record:
            raise CorruptDatasetError(
                f'{self._name}: datapoint {self._length}, key {key!r}: the column holds {stop - start} bytes that are '
                f'not the {len(record)} appended: append the same datapoints as the writer before'
            )

    async def flush(self) -> None:
        """Hand on what was appended."""
        if self._state != 'open':
            await self._ensure_open()
        async with self._turns.turn():
            self._check_usable()
            await self._flush()

    def _check_usable(self) -> None:
        self._check_open()
        if self._failed:
            raise ClosedError(f'{self._name}: a write failed before: close it, or abort')

    async def _flush(self) -> None:
        self._torn = True
        for writer in self._writers:
            await writer.flush()
        self._torn = False

    async def _close(self) -> None:
        await self.directory.store.ready()
        async with self._turns.turn():
            try:
                await self._finish()
            except BaseException:
                await self._drop()
                raise
            self._release()

    async def _finish(self) -> None:
        if self._failed:
            raise ClosedError(f'{self._name}: a write failed before, so it is not published')
        ahead = {key: len(bag) for key, bag in self._bags.items() if self._refs is None and len(bag) > self._length}
        if ahead:
            raise CorruptDatasetError(
                f'{self._name}: columns are ahead of the {self._length} datapoints: {ahead}: append the same '
                f"datapoints as the writer before, or pass resume='discard'"
            )
        await self._flush()
        # The first bag decides between writers: who fails to create it has published nothing, and removes nothing.
        *others, first = self._writers
        await first.aclose()
        await settle([writer.aclose() for writer in others])
        await self._verify_bags()
        if not self._described:
            await self._publish_spec()

    async def _verify_bags(self) -> None:
        await gather([writer.verify() for writer in self._writers])

    async def _publish_spec(self) -> None:
        """Publish the spec, which makes the folder a dataset, and read it back.

        If that fails, the spec may be there all the same: what is there decides, and bags that a spec may stand over
        are never removed.
        """
        place, content = self.directory / 'spec.json', dump_spec(self._spec)
        self._standing = True
        failure: GranularError | None = None
        try:
            writer = await place.store.open_writer(place.key, new=True)
            try:
                await writer.write(content)
                await writer.close()
            except BaseException:
                await writer.abort()
                raise
        except GranularError as error:
            failure = error
        except BaseException:
            if self._lock is not None:  # on a disk nothing appears later
                self._standing = await place.exists()
            raise
        published = await self._read_spec(place, failure)
        if published == content:
            if failure is not None:
                await self._verify_bags()
            return
        if published is not None and failure is None and place.store.conditional:
            await place.store.delete([place.key])
            self._standing = False
            raise BadReplyError(
                f'{place}: expected the {len(content)} bytes that were written, got {len(published)} others: removed'
            )
        if published is not None:
            await self._yield_to(published, place, failure)
        if failure is not None and self._lock is not None:
            self._standing = False
            raise failure
        raise self._unpublished(place, failure, 'there is no such file now')

    async def _read_spec(self, place: Path, failure: GranularError | None) -> bytes | None:
        try:
            return await place.read_bytes()
        except NotFoundError:
            return None
        except GranularError as error:
            raise self._unpublished(place, failure or error, f'the store does not say: {error}') from error

    def _unpublished(self, place: Path, failure: GranularError | None, found: str) -> GranularError:
        """The error for a spec of which nothing tells whether it will be there."""
        says = 'the store accepted it' if failure is None else f'{failure}'
        if failure is None:
            kind: type[GranularError] = BadReplyError
        else:  # that something exists already may be the answer to a request that was sent again
            kind = StoreError if isinstance(failure, AlreadyExistsError) else type(failure)
        error = kind(
            f'{place}: not known to be published: {says}, and {found}. Its bags were left as they are: if the spec '
            f"appears, the dataset is complete; otherwise write it again with resume='discard', or remove what was "
            f'left with `granular clean`'
        )
        error.__cause__ = failure
        return error

    async def _yield_to(self, published: bytes, place: Path, failure: GranularError | None) -> NoReturn:
        """Remove the bags that are no part of the dataset of another writer, which has published its spec."""
        theirs = parse_spec(published, f'{place}')
        await gather([writer.withdraw(sole=False) for writer in self._writers if writer.path.stem not in theirs])
        raise AlreadyExistsError(f'{place}: another writer has published it meanwhile, with spec {theirs}') from failure

    async def _abort(self) -> None:
        await self.directory.store.ready()
        async with self._turns.turn():
            await self._drop()

    async def _drop(self) -> None:
        """Give up what is not published, and remove what is, unless a spec may stand over it."""
        try:
            await gather([writer.abort() for writer in self._writers])
            if self._fresh and not self._standing:
                await self._withdraw()
            elif self._torn:
                least = min(bag.flushed for bag in self._bags.values())
                for bag in self._bags.values():
                    await bag.cut(least)
        finally:
            self._release()

    async def _withdraw(self) -> None:
        store = self.directory.store
        *others, first = self._writers
        sole = self._lock is not None or first.owned
        await gather([writer.withdraw(sole) for writer in others])
        await first.withdraw(sole)  # last, as another writer may begin then
        if store.has_folders:
            await self._remove_folder()

    async def _remove_folder(self) -> None:
        store = self.directory.store
        await store.delete([(self.directory / name).key for name in self._names])
        with contextlib.suppress(NotFoundError):
            await store.delete_empty(self.directory.key)

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()


class _KeysError(DatapointError, UnknownKeyError):
    """A datapoint whose keys are not those of the spec."""
