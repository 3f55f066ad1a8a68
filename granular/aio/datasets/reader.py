"""Read datasets of either layout. docs/format.md describes the files."""

import contextlib
import os
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Self, SupportsIndex

import numpy as np

from granular.aio.bags.identity import FileIdentity, Identity, reopened
from granular.aio.bags.index_cache import FolderState, Snapshot
from granular.aio.bags.reader import BagReader, once_more
from granular.aio.datasets.codec import Decoder, Field, fields_of
from granular.aio.datasets.columns import Choice, Columns, Datapoint, Spans, fetch_points, locate, read_columns
from granular.aio.datasets.proof import Proof, open_as_one
from granular.aio.paths.path import Path
from granular.aio.runtime.lifecycle import AsyncResource
from granular.aio.runtime.loops import running_loop
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.sharing import sharing
from granular.aio.runtime.tasks import gather
from granular.errors import (
    CorruptBagError,
    CorruptDatasetError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    UnknownKeyError,
)
from granular.formats.layout import Layout, parse_spec
from granular.indexing import index_of, indices_of

Mask = Mapping[str, bool | range | slice] | Iterable[str] | None


class DatasetReader(AsyncResource):
    """Random access to the datapoints of a dataset in either layout.

    Opening takes three round trips: the spec with the references, the bags, and a check that the dataset was not
    replaced meanwhile. Tables longer than ``IOConfig.tail`` take more. Memory: 8 bytes per record of each bag with
    ``cache_index``, and the bags of ``cache_keys``.

    Args:
      directory: the dataset's folder: a string, an ``os.PathLike``, or a path object of another library.
      decoders: the decoder of each type, a function from a record's bytes to a value; None for raw bytes.
      cache_index: keep the tables in memory, so that reading a value takes one request. Otherwise only the limits that
        a read needs are fetched.
      cache_keys: keys whose bags are kept in memory; ``'refs'`` keeps the references of the refs layout.
      parallel: accepted for code written for granular 0.21; reads are always concurrent.
      verify: check each record against its checksum; the dataset must have been written with ``checksums=True``.
        Memory: 4 bytes per record.

    Example::

        async with granular.aio.DatasetReader('s3://bucket/digits', granular.decoders) as reader:
            datapoint = await reader.get(7)
            labels = await reader.fetch([3, 1, 41], mask=('label',))
    """

    def __init__(
        self,
        directory: Path | str | os.PathLike[str] | Any,
        decoders: Mapping[str, Decoder | Any] | None,
        cache_index: bool = True,
        cache_keys: Sequence[str] = (),
        parallel: bool = False,
        verify: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(cache_keys, str):
            raise InvalidArgumentError(f'cache_keys is {cache_keys!r}: want a sequence of keys')
        self.directory = Path(directory)
        self._decoders = decoders
        self._options = (cache_index, tuple(cache_keys), parallel, verify)
        self._name = f'{self.directory}'
        self._columns = Columns(self._name, {}, {}, None)
        self._length = 0
        self._all: list[Choice] = []
        self._content = b''
        self._snapshot: Snapshot | None = None
        self._proof: Proof | None = None
        self.expected: Identity | None = None
        self._given = False  # True if the snapshot was pickled with the reader
        self._alone = True  # False for a shard: the sharded reader owns the snapshot
        self._quick = False
        self._light = False

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self.directory, self._decoders, *self._options)
        if sharing.get() and self._state == 'open' and (state := self._state_now()) is not None:
            return _shared, (type(self), args, {'': state})
        identity = Identity.of(self.directory.store, self.files()) if self._state == 'open' else None
        return reopened, (type(self), args, {}, identity)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({self._name!r})'

    # --- opening

    @classmethod
    def of_shard(cls, directory: Path, args: tuple[Any, ...], snapshot: Snapshot | None) -> Self:
        """Return the reader of one shard, which opens from ``snapshot`` if the snapshot has the shard."""
        reader = cls(directory, *args)
        reader._snapshot, reader._alone = snapshot, False
        return reader

    async def _open(self) -> None:
        await self.directory.store.ready()
        if not self._alone:
            await self._open_once()
            return
        await open_as_one(self._name, self._open_once, self.prove)
        self.warn_of_lengths()
        if self.expected is not None:
            self.expected.check(Identity.of(self.directory.store, self.files()), self._name)
        if self._proof is not None and (state := self._state_now()) is not None:
            await Snapshot.save(self.directory, {'': state})

    async def _open_once(self) -> None:
        self._proof, self._columns = None, Columns(self._name, {}, {}, None)
        try:
            await self._open_files()
        except ObjectChangedError:
            if self._alone and self._snapshot is not None and not self._given:
                await self._snapshot.forget()
                self._snapshot = None
            raise

    async def _open_files(self) -> None:
        cache_index, cache_keys, _, verify = self._options
        if self._alone and cache_index and self._snapshot is None:
            self._snapshot = await Snapshot.load(self.directory)
        folders = {} if self._snapshot is None else self._snapshot.folders
        known = folders.get('' if self._alone else self.directory.name)
        refs = None if known is None else known.bags.get('refs')
        index = BagReader.of_version(self.directory / 'refs.bag', False, cache_index, False, verify, refs)
        layout: Layout
        if known is None:
            layout = await self._look(index)
        else:
            self._content, layout = known.spec, 'columns' if refs is None else 'refs'
        spec = parse_spec(self._content, f'{self.directory / "spec.json"}')
        if unknown := set(cache_keys) - set(spec) - {'refs'}:
            raise UnknownKeyError(f'{self._name}: cache_keys has {sorted(unknown)}, the spec has {list(spec)}')
        fields = fields_of(spec, self._decoders, layout, self._name)
        self._all = [Choice(field, i, True) for i, field in enumerate(fields)]
        self._light = all(field.light for field in fields)
        bags = {
            key: BagReader.of_version(
                self.directory / f'{key}.bag',
                layout == 'columns',
                cache_index,
                key in cache_keys,
                verify,
                None if known is None else known.bags.get(key),
            )
            for key in spec
        }
        columns = Columns(self._name, spec, bags, index if layout == 'refs' else None)
        columns.snapshot, self._columns = self._snapshot if known is not None else None, columns
        await gather([self._open_bag(key, bag) for key, bag in bags.items()])
        if columns.refs is not None:
            await index._ensure_open()
            columns.length = len(index)
            if 'refs' in cache_keys:
                columns.spans = await Spans.load(index, spec)
        else:
            lengths = {key: len(bag) for key, bag in bags.items()}
            columns.length = min(lengths.values())
        self._length, self._quick = columns.length, columns.immediate

    async def prove(self) -> None:
        """Check that all files belong to one dataset that still exists. One opened from a snapshot is not checked.

        Raises:
          ObjectChangedError: if the dataset was replaced since opening began.
          NotFoundError: if it was removed.
        """
        if self._proof is not None:
            refs, bags = self._columns.refs, self._columns.bags.values()
            await self._proof.check(refs, [bag for bag in bags if bag._state == 'open'])

    def warn_of_lengths(self) -> None:
        """Warn if the bags of the columns layout differ in length."""
        lengths = {key: len(bag) for key, bag in self._columns.bags.items()}
        if self._columns.refs is None and self._length != max(lengths.values()):
            warnings.warn(
                f'{self._name}: columns differ in length, as after a crash: {lengths}; reading {self._length}',
                RuntimeWarning,
                stacklevel=2,
            )

    async def _look(self, refs: BagReader) -> Layout:
        """Read the spec, try to open the references, and return the layout."""
        found: Any  # the error of opening the references, or None
        if self.directory.store.local:
            await self._read_spec()
            found = await _try_open(refs)
        else:
            _, found = await gather([self._read_spec(), _try_open(refs)])
        spec = parse_spec(self._content, f'{self.directory / "spec.json"}')
        layout: Layout = 'columns' if 'refs' in spec or isinstance(found, NotFoundError) else 'refs'
        if layout == 'refs' and found is not None:
            raise found
        return layout

    def _state_now(self) -> FolderState | None:
        """Return the state of the open dataset for a snapshot; None unless the state of every bag is complete."""
        columns = self._columns
        bags = columns.bags if columns.refs is None else {'refs': columns.refs, **columns.bags}
        known = {key: bag.known for key, bag in bags.items()}
        whole = {key: state for key, state in known.items() if state is not None}
        return FolderState(self._content, whole) if len(whole) == len(known) else None

    async def _read_spec(self) -> None:
        try:
            reply = await self.directory.store.read((self.directory / 'spec.json').key)
            self._content, self._proof = reply.data, Proof(self.directory, reply)
        except NotFoundError as error:
            raise NotFoundError(
                f'{self._name}: has no spec.json: it is no dataset, or one that its writer has not finished: {error}'
            ) from error

    async def _open_bag(self, key: str, bag: BagReader) -> None:
        try:
            await bag._ensure_open()
        except NotFoundError as error:
            raise CorruptDatasetError(
                f'{self._name}: the spec has key {key!r}, but its bag is missing: {error}'
            ) from error

    async def _close(self) -> None:
        await self._columns.aclose()

    # --- properties

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        self._check_open()
        return dict(self._columns.spec)

    @property
    def layout(self) -> str:
        """``'refs'`` or ``'columns'``."""
        self._check_open()
        return 'columns' if self._columns.refs is None else 'refs'

    @property
    def size(self) -> int:
        """Bytes of all bags, tables included."""
        self._check_open()
        return sum(bag.size for bag in self.bags.values())

    @property
    def bags(self) -> dict[str, BagReader]:
        """The bags by key, with ``'refs'`` in the refs layout."""
        self._check_open()
        columns = self._columns
        return columns.bags if columns.refs is None else {'refs': columns.refs, **columns.bags}

    def files(self) -> dict[str, FileIdentity]:
        """Return the identities of the opened bags, by file name."""
        columns = self._columns
        bags = columns.bags if columns.refs is None else {'refs': columns.refs, **columns.bags}
        return {f'{key}.bag': bag.identity for key, bag in bags.items()}

    @property
    def identity(self) -> tuple[Any, ...]:
        """The identity of this dataset: address, spec, size and version of each bag, decoder of each key."""
        versions = {key: (bag.size, bag.identity.version or '') for key, bag in self.bags.items()}
        return self._name, self.spec, versions, {choice.field.key: choice.field.fn for choice in self._all}

    def __len__(self) -> int:
        self._check_open()
        return self._length

    def copy(self) -> Self:
        """Return an independently closable reader of the same dataset that shares its caches."""
        self._check_open()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._columns = self._columns.copy()
        return twin

    # --- reading

    async def get(self, index: SupportsIndex | slice, mask: Mask = None) -> Any:
        """Return a datapoint, or ``{key: [values]}`` for a slice.

        Args:
          index: an integer (negative counts from the end) or a slice.
          mask: the keys to read; or a mapping from keys to True, or to a range of a sequence's values, which is cut to
            the sequence's length.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index out of range, or a mask's range that begins beyond the end.
          UnknownKeyError: a ``KeyError``, for a key that is not in the spec.
        """
        if self._state != 'open':
            await self._ensure_open()
        if isinstance(index, slice | range):
            chosen = self.choose(mask)
            columns = await read_columns([(self._columns, indices_of(index, self._length, self._name))], chosen)
            return {choice.field.key: column for choice, column in zip(chosen, columns, strict=True)}
        place = index_of(index, self._length, self._name)
        chosen = self._all if mask is None else self.choose(mask)
        if self._quick and (running_loop() is None or (self._light and self._columns.is_small(place, chosen))):
            return self._columns.get_now(place, chosen)
        return (await fetch_points([(self._columns, np.array([place]))], chosen))[0]

    async def fetch(self, indices: Any, mask: Mask = None) -> list[Datapoint]:
        """Return many datapoints, read in one fan-out: all values are requested at once, neighbours in one request.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
          mask: as for ``get``.

        Returns:
          The datapoints, in the order of ``indices``.
        """
        if self._state != 'open':
            await self._ensure_open()
        return await fetch_points([(self._columns, indices_of(indices, self._length, self._name))], self.choose(mask))

    async def check_references(self, places: range) -> None:
        """Check that the references of datapoints point to existing records.

        Raises:
          CorruptDatasetError: if one does not.
        """
        await self._ensure_open()
        indices = indices_of(places, self._length, self._name)

        async def check(fresh: bool) -> None:
            firsts, counts = (await locate([(self._columns, indices)], fresh))[0]
            for choice in self._all:
                self._columns.records(indices, choice, firsts, counts)

        await once_more(check, not self.directory.store.local)

    async def available(self, index: SupportsIndex) -> dict[str, bool | range]:
        """Return, by key, what a mask can select from a datapoint: True, or for a sequence the range of its values."""
        await self._ensure_open()
        place = index_of(index, self._length, self._name)
        if self._columns.refs is None:
            return dict.fromkeys(self._columns.spec, True)

        async def look(fresh: bool) -> dict[str, bool | range]:
            firsts, counts = (await locate([(self._columns, np.array([place]))], fresh))[0]
            out: dict[str, bool | range] = {}
            for field, column, _ in self._all:
                count = int(counts[0, column])
                self._columns.check_span(field.key, place, int(firsts[0, column]), count)
                out[field.key] = range(count) if field.many else True
            return out

        return await once_more(look, not self.directory.store.local)

    async def __aiter__(self) -> AsyncIterator[Datapoint]:
        await self._ensure_open()
        local = self.directory.store.local
        async with contextlib.aclosing(pages(self.fetch, self._length, self.size, local)) as items:
            async for point in items:
                yield point

    def choose(self, mask: Mask) -> list[Choice]:
        """Return the fields that a mask selects.

        Raises:
          UnknownKeyError: for a key that is not in the spec.
          InvalidArgumentError: for a range of a key that is not a sequence, or a range with a step.
        """
        if mask is None:
            return self._all
        wants: Mapping[str, bool | range | slice]
        wants = mask if isinstance(mask, Mapping) else dict.fromkeys([mask] if isinstance(mask, str) else mask, True)
        if unknown := [key for key in wants if key not in self._columns.spec]:
            raise UnknownKeyError(f'{self._name}: the mask has {unknown}, the spec has {list(self._columns.spec)}')
        chosen = []
        for choice in self._all:
            want = wants.get(choice.field.key, False)
            if want is False:
                continue
            if want is not True:
                _check_want(want, choice.field, self._name)
            chosen.append(choice._replace(want=want))
        return chosen


def _check_want(want: Any, field: Field, name: str) -> None:
    if not field.many:
        raise InvalidArgumentError(f'{name}: key {field.key!r} is no sequence: the mask can be True, not {want!r}')
    if not isinstance(want, range | slice) or want.step not in (None, 1):
        raise InvalidArgumentError(f'{name}: key {field.key!r}: want True or a range without a step, not {want!r}')
    if isinstance(want, range) and not 0 <= want.start <= want.stop:
        raise InvalidArgumentError(f'{name}: key {field.key!r}: want 0 <= start <= stop, got {want!r}')


async def _try_open(bag: BagReader) -> GranularError | None:
    """Open a bag. Return the error if it is missing or is not a bag."""
    try:
        await bag._ensure_open()
    except (NotFoundError, CorruptBagError) as error:
        return error
    return None


def _shared(kind: type[DatasetReader], args: tuple[Any, ...], folders: Mapping[str, FolderState]) -> DatasetReader:
    """Return a reader in a worker process that uses the index of the parent process."""
    reader = kind(*args)
    reader._snapshot, reader._given = Snapshot('', folders), True
    return reader
