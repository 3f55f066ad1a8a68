"""Open the files of one dataset: the spec, the references and the bags."""

import copy
import functools
import warnings
from collections.abc import Collection, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from granular.aio.bags.bag import Bag, join_limits
from granular.aio.bags.identity import FileIdentity, check_files
from granular.aio.bags.index_cache import FolderState, Proof, Snapshot, SnapshotProof, proven
from granular.aio.bags.records import proofs_of
from granular.aio.datasets.codec import Decoders, Field, fields_of
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.consistency import OpenedSpec, open_as_one
from granular.aio.datasets.index import DatasetIndex
from granular.aio.datasets.references import References
from granular.aio.paths.path import Path, has_optional
from granular.aio.runtime.tasks import gather
from granular.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    CorruptBagError,
    CorruptDatasetError,
    CorruptError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    UnknownKeyError,
)
from granular.formats.layout import Layout, Spec, is_sequence, parse_spec, shard_name

K = TypeVar('K')
T = TypeVar('T')
V = TypeVar('V')


class OpenOptions(NamedTuple):
    """The options of a reader: ``decoders``, ``cache_index``, ``cache_keys`` and ``verify`` of ``DatasetReader``."""

    decoders: Decoders = None
    cache_index: bool = True
    cache_keys: tuple[str, ...] = ()
    verify: bool = False

    @classmethod
    def of(cls, decoders: Decoders, cache_index: bool, cache_keys: Sequence[str], verify: bool) -> Self:
        """Return the options that the user passed; raise ``InvalidArgumentError`` for a wrong ``cache_keys``."""
        keys = tuple(cache_keys) if isinstance(cache_keys, Iterable) and not isinstance(cache_keys, str) else None
        if keys is None or not all(isinstance(key, Hashable) for key in keys):
            hint = f': pass ({cache_keys!r},)' if isinstance(cache_keys, str) else ''
            raise InvalidArgumentError(f'cache_keys: expected a sequence of keys, got {cache_keys!r:.100}{hint}')
        return cls(decoders, cache_index, keys, verify)

    def fields(self, spec: Spec, layout: Layout, name: str) -> list[Field]:
        """Return the fields of a dataset with their decoders; raise ``UnknownKeyError`` for a key in ``cache_keys``
        that is not in the spec.
        """
        if unknown := set(self.cache_keys) - set(spec) - {'refs'}:
            raise UnknownKeyError(f'{name}: cache_keys has {sorted(unknown, key=str)}, the spec has {list(spec)}')
        return fields_of(spec, self.decoders, layout, name)


class Dataset:
    """A dataset, or one shard, whose name is empty for a dataset without shards."""

    def __init__(self, directory: Path, options: OpenOptions, shard: str = '') -> None:
        self.directory: Path = directory
        self.name: str = f'{directory}'
        self._options, self._shard = options, shard
        self._opened_spec: OpenedSpec | None = None
        self._denied: AccessDeniedError | None = None  # the error of references that may be absent
        self.columns: Columns = Columns(self.name, {}, (), {}, None)

    def copy(self) -> Self:
        """Return an independently closable dataset that shares what is cached."""
        dataset = copy.copy(self)
        dataset.columns = self.columns.copy()
        return dataset

    def open_indexed(
        self,
        index: DatasetIndex,
        shard: int,
        fields: Sequence[Field],
        pins: Sequence[str | None] | None = None,
        proof: Proof | None = None,
    ) -> None:
        """Open all files as the index of a sharded dataset has them, without reading anything: in other versions if
        ``pins`` has them, and with a ``proof`` that they are those in the index if that is not known yet.
        """
        spec, layout = index.directory.spec, index.directory.layout
        self._opened_spec = None
        bags = {key: self._bag(key, key in self._options.cache_keys, None, None) for key in spec}
        refs = self._bag('refs', False, None, None) if layout == 'refs' else None
        self.columns = Columns(self.name, spec, fields, bags, refs)
        for number, (key, bag) in enumerate(self.columns.all_bags.items()):
            state = index.bag(shard, key)
            bag.open_indexed(state if pins is None else state._replace(pin=pins[number]), proof)
        self.columns.complete(index.references(shard))

    def expect(self, like: Columns, bags: Mapping[str, FileIdentity], length: int) -> None:
        """Note the lengths and sizes of a dataset that is not open, whose spec is that of another one: reading it fails
        until ``open`` was called.
        """
        split = like.refs is None
        own = {key: self._bag(key, False, split, None) for key in like.spec}
        refs = None if split else self._bag('refs', False, False, None)
        self.columns = Columns(self.name, like.spec, [choice.field for choice in like.choices], own, refs)
        for key, bag in self.columns.all_bags.items():
            bag.expect(bags[f'{key}.bag'], length if split or key == 'refs' else 0)
        self.columns.complete()

    def confirm(self) -> None:
        """Read without waiting where that is possible, as the files are those in the index."""
        for bag in self.columns.all_bags.values():
            bag.confirm()
        self.columns.complete(self.columns.references)

    async def read_extras(self) -> None:
        """Read what ``cache_keys`` and ``verify`` need in memory, once it is opened by an index."""
        await self._unless_replaced(gather([bag.read_extras() for bag in self.columns.all_bags.values()]))
        self.columns.complete(self.columns.references)

    async def _unless_replaced(self, reading: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine; raise ``ObjectChangedError`` in place of the error of files that differ."""
        try:
            return await reading
        except CorruptError:
            await check_files([file for bag in self.columns.all_bags.values() for file in bag.files])
            raise

    async def open_unchanged(self) -> None:
        """Open all files by their own tables, again if the dataset is replaced meanwhile."""
        await open_as_one(self.name, self.open, self.check_unchanged)

    async def open(self, snapshot: Snapshot | None = None) -> None:
        """Open all files, without a request if the snapshot has them."""
        self._opened_spec, self._denied = None, None
        self.columns = Columns(self.name, {}, (), {}, None)
        state = None if snapshot is None else snapshot.folders.get(self._shard)
        refs = self._bag('refs', False, False, state)
        if state is None:
            spec, layout = await self._read_layout(refs)
        else:
            spec = self._parse(state.spec.data)
            layout = 'refs' if 'refs' in state.bags.keys() - spec.keys() else 'columns'
        fields = self._options.fields(spec, layout, self.name)
        bags = {key: self._bag(key, key in self._options.cache_keys, layout == 'columns', state) for key in spec}
        self.columns = Columns(self.name, spec, fields, bags, refs if layout == 'refs' else None)
        if state is None or snapshot is None:
            await self._open_bags()
        else:
            proof = self.keep(snapshot)
            opening = self._unless_replaced(self._open_bags())
            await proven([proof] if self._options.cache_keys or self._options.verify else (), opening)

    async def _open_bags(self) -> None:
        columns, references = self.columns, None
        await gather([self._open_bag(key, bag) for key, bag in columns.bags.items()])
        if columns.refs is not None:
            if not columns.refs.opened:
                await columns.refs.open()
            if 'refs' in self._options.cache_keys:
                references = await References.load(columns.refs, columns.spec)
        columns.complete(references)

    def keep(self, snapshot: Snapshot) -> Proof:
        """Note the snapshot that has this dataset: it is removed once a read finds it outdated. Return its proof."""
        self.columns.snapshot = snapshot
        spec, states = snapshot.folders[self._shard]
        files = [file for key, state in states.items() for file in state.files(self.directory / f'{key}.bag')]
        check = functools.partial(OpenedSpec(self.directory, spec).check, (), files)
        proof = SnapshotProof(snapshot, self.directory, self._shard, check)
        for bag in self.columns.all_bags.values():
            bag.proof = proof
        return proof

    def _bag(self, key: str, cache_data: bool, split: bool | None, state: FolderState | None) -> Bag:
        bag_state = None if state is None else state.bags.get(key)
        path, options = self.directory / f'{key}.bag', self._options
        return Bag(path, options.cache_index, cache_data, verify=options.verify, split=split, state=bag_state)

    def _parse(self, content: bytes) -> Spec:
        return parse_spec(content, f'{self.directory / "spec.json"}')

    async def _read_layout(self, refs: Bag) -> tuple[Spec, Layout]:
        """Read the spec, try to open the references, and return the spec and the layout."""
        content: Any
        error: Any
        if self.directory.store.local:
            content = await self._read_spec()
            error = await _try_open(refs)
        else:
            content, error = await gather([self._read_spec(), _try_open(refs)])
        spec = self._parse(content)
        if 'refs' in spec or isinstance(error, self.directory.store.absent):
            self._denied = error if isinstance(error, AccessDeniedError) and 'refs' not in spec else None
            if many := [key for key, kind in spec.items() if is_sequence(kind)]:
                raise CorruptDatasetError(
                    f'{self.name}: key {many[0]!r} has type {spec[many[0]]!r}, which needs references, but refs.bag is '
                    f'missing, or may not be read'
                ) from error
            return spec, 'columns'
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback refers to this frame
        return spec, 'refs'

    async def _read_spec(self) -> bytes:
        try:
            reply = await self.directory.store.read((self.directory / 'spec.json').key)
            self._opened_spec = OpenedSpec(self.directory, reply)
            return reply.data
        except BucketNotFoundError:
            raise
        except NotFoundError as error:
            if not self._shard and await has_optional(self.directory / shard_name(0) / 'spec.json'):
                raise NotFoundError(
                    f'{self.name}: is a sharded dataset: open it with ShardedDatasetReader, or with granular.open'
                ) from None
            state = 'is not a dataset, or its writer has not finished'
            if self._shard:
                state = (
                    'its writer is running, or was killed: open the writer again to continue, or remove the shard with '
                    '`granular clean --remove`'
                )
            raise NotFoundError(f'{self.name}: has no spec.json: {state}: {error}', path=self.name) from error

    async def _open_bag(self, key: str, bag: Bag) -> None:
        try:
            await bag.open()
        except self.directory.store.absent as error:
            if self._denied is not None:  # columns have tables of their own, which the layout with references lacks
                raise AccessDeniedError(
                    f'{self.name}: neither its references nor the table of key {key!r} may be read, one of which it '
                    f'has: {self._denied}; {error}'
                ) from error
            if not isinstance(error, NotFoundError):
                raise
            raise CorruptDatasetError(
                f'{self.name}: the spec has key {key!r}, but its bag is missing: {error}'
            ) from error

    async def check_unchanged(self) -> None:
        """Check that all files belong to one dataset that still exists, as ``OpenedSpec.check`` does. One opened from a
        snapshot is not checked.
        """
        if self._opened_spec is not None:
            refs = () if self.columns.refs is None else self.columns.refs.files
            await self._opened_spec.check(refs, [file for bag in self.columns.bags.values() for file in bag.files])

    def warn_of_lengths(self) -> None:
        """Warn if the bags of the columns layout differ in length."""
        columns = self.columns
        lengths = {key: bag.length for key, bag in columns.bags.items()}
        if columns.refs is None and columns.length != max(lengths.values()):
            warnings.warn(
                f'{self.name}: columns differ in length, as after a crash: {lengths}; reading {columns.length}',
                RuntimeWarning,
                stacklevel=2,
            )

    async def identify(self) -> None:
        """Read what the identities of the files need.

        A cache that has all values reads nothing, and would not notice that the dataset was replaced.
        """
        bags = self.columns.all_bags.values()
        await gather([proof.take() for proof in proofs_of(bags) if proof.is_missing])
        await gather([bag.read_digest() for bag in bags])

    # --- what was opened

    def files(self) -> dict[str, FileIdentity]:
        return {file: bag.identity() for file, bag in self.bags_by_file().items()}

    def opened_files(self) -> list[tuple[Path, FileIdentity]]:
        """Return the spec and the files of all bags, as they were read."""
        spec = self._opened_spec
        own = (
            [] if spec is None else [(self.directory / 'spec.json', FileIdentity(spec.first.size, spec.first.version))]
        )
        return own + [file for bag in self.columns.all_bags.values() for file in bag.files]

    def bags_by_file(self, folder: str = '') -> dict[str, Bag]:
        return {f'{folder}{key}.bag': bag for key, bag in self.columns.all_bags.items()}

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot of this dataset alone; None unless the state of every bag is complete."""
        if self.columns.snapshot is not None:
            return self.columns.snapshot.part(self._shard)
        return None if (state := self.state()) is None else Snapshot('', {'': state})

    def state(self) -> FolderState | None:
        """Return the state for a snapshot; None unless the state of every bag is complete."""
        if self.columns.snapshot is not None:
            return self.columns.snapshot.folders[self._shard]
        states = all_or_none({key: bag.state for key, bag in self.columns.all_bags.items()})
        return None if states is None or self._opened_spec is None else FolderState(self._opened_spec.first, states)


def join_tables(datasets: Collection[Dataset]) -> None:
    """Join the limits of the shards that were opened by their own tables, so that a batch looks up all at once."""
    join_limits([bag for dataset in datasets for bag in dataset.columns.all_bags.values()])


def all_or_none(values: Mapping[K, V | None]) -> dict[K, V] | None:
    """Return the values by key; None if one of them is None."""
    present = {key: value for key, value in values.items() if value is not None}
    return present if len(present) == len(values) else None


async def _try_open(bag: Bag) -> GranularError | None:
    """Open a bag. Return the error if it is missing or is not a bag."""
    try:
        await bag.open()
    except GranularError as error:
        if not isinstance(error, (*bag.require_path().store.absent, CorruptBagError)):
            raise
        return error.with_traceback(None)  # whose frames refer to the error: a cycle in memory for each shard
    return None
