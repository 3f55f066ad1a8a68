"""The shards of a dataset that was opened by its index, each made when it is first used."""

import copy
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular._support.text import logger
from granular.aio.bags.bag import read_digests
from granular.aio.bags.identity import FileIdentity, Identity
from granular.aio.bags.index_cache import FolderState, Proof, Snapshot
from granular.aio.datasets.codec import Field
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.comparison import Pins, find_indexed, has_versions
from granular.aio.datasets.dataset import Dataset, all_or_none
from granular.aio.datasets.index import DatasetIndex
from granular.aio.datasets.opened_shards import OpenedShards
from granular.aio.paths.path import Path
from granular.aio.pipeline.data_source import Mask
from granular.aio.runtime.immediate import Rest, is_immediate
from granular.aio.runtime.pools import threads
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import start_inline
from granular.errors import GranularError, ObjectChangedError
from granular.formats.layout import shard_name

T = TypeVar('T')

_REMEDY: Final = 'run `granular index` on it, or open it with index=False'


class IndexedShards(OpenedShards):
    """Shards of an index.

    A shard that was replaced or added since the index was built is read by its own tables: ``own`` has it by position.

    Args:
      numbers: the number of each shard.
      create: returns the unopened dataset of a shard's name.
    """

    def __init__(
        self,
        directory: Path,
        index: DatasetIndex,
        numbers: Ints,
        create: Callable[[str], Dataset],
    ) -> None:
        super().__init__(create)
        self._directory, self._name = directory, f'{directory}'
        self.index = index
        self._numbers = numbers
        self.fields: Sequence[Field] = ()  # as the options of the reader have them
        # Shards that may have been replaced since the index was built: all of them, until they are compared. A later
        # replacement is an error, as without an index.
        self.unchecked: NDArray[np.bool_] = np.ones(len(numbers), np.bool_)
        # The versions of shards that were moved: as they were found when the dataset was opened, or else when the shard
        # was compared.
        self.pins: dict[int, Pins] = {}
        # True if a shard was moved: then each of the others is compared before it is read, not meanwhile.
        self.moved: bool = False
        self._expected: Identity | None = None  # of the reader that this one was unpickled from
        self._warned = False

    def copy(self) -> 'IndexedShards':
        """Return independently closable shards that share the index."""
        shards = copy.copy(self)
        shards.own = {i: dataset.copy() for i, dataset in self.own.items()}
        shards._made = {i: dataset.copy() for i, dataset in self._made.items() if not self.unchecked[i]}
        shards._datasets, shards.pins = None, dict(self.pins)
        # A shard that one of them reads by its own tables from now on may be the indexed one in the other.
        shards.unchecked = self.unchecked.copy()
        return shards

    def __len__(self) -> int:
        return len(self._numbers)

    def _make(self, position: int) -> Dataset:
        dataset = self._create(self._shard_name(position))
        proof = _Comparison(self, position) if self.moved and self.unchecked[position] else None
        pins = self.pins.get(position)
        bags = None if pins is None else self.index.bags_among(pins)
        dataset.open_indexed(self.index, int(self._numbers[position]), self.fields, bags, proof)
        return dataset

    def missing(self, positions: Iterable[int]) -> list[int]:
        """Return no shard: the index replaces the opening."""
        return []

    def columns(self, positions: Iterable[int]) -> list[Columns]:
        """Return the columns of some shards."""
        return [self[i].columns for i in positions]

    def _shard_name(self, position: int) -> str:
        return shard_name(int(self._numbers[position]))

    async def open_own(self, positions: Iterable[int], folders: Mapping[int, FolderState] | None = None) -> bool:
        """Open shards by their own tables, or by their states. Return whether they have the spec of the index."""
        for i in positions:
            self.own[i] = self._create(self._shard_name(i))
        states = {self._shard_name(i): state for i, state in (folders or {}).items()}
        await gather([dataset.open(Snapshot('', states) if states else None) for dataset in self.own.values()])
        return all(self._difference(dataset) is None for dataset in self.own.values())

    async def open_like(self, expected: Identity) -> None:
        """Open the shards by their own tables that a reader found to be others than those in the index, or whose tables
        it told by versions, which the index does not have.

        Those that it found to be copies of those in the index are read in the versions that it told. Others must be
        those that it told, if it had compared them.
        """
        self._expected = expected
        files, others = expected.files, list[int]()
        if expected.host == Identity.of([self._directory.store], {}).host:
            for i in self._indexed_unchecked():
                self._adopt_told(i, files)
            others = [i for i in self._indexed_unchecked() if self._differs(i, files)]
        by_version = {file.rpartition('/')[0] for file, told in files.items() if told.table and not told.has_digest}
        own = [i for i in range(len(self)) if i not in self.own and self._shard_name(i) in by_version]
        own += await self.find_replaced(i for i in others if i not in own)
        datasets = [self._create(self._shard_name(i)) for i in own]
        await gather([dataset.open_unchanged() for dataset in datasets])
        for i, dataset in zip(own, datasets, strict=True):
            self._check_spec(dataset)
            self.own[i] = dataset
            self.unchecked[i] = False

    def _indexed_unchecked(self) -> list[int]:
        return [i for i in np.flatnonzero(self.unchecked).tolist() if i not in self.own]

    def _differs(self, position: int, expected: Mapping[str, FileIdentity]) -> bool:
        """Return whether a reader told other files of a shard than the index has."""
        name, files = self._shard_name(position), self._identities(position)
        told = {file: expected.get(f'{name}/{file}') for file in files}
        return any(one is not None and not one.is_same(files[file]) for file, one in told.items())

    def _adopt_told(self, position: int, expected: Mapping[str, FileIdentity]) -> None:
        number, name = int(self._numbers[position]), self._shard_name(position)
        told = [expected.get(f'{name}/{key}.bag') for key in self.index.keys]
        digests, states = self.index.digests(number), [self.index.bag(number, key) for key in self.index.keys]
        rows = zip(told, digests.values(), states, strict=True)
        if any(one is None or (one.size, one.table) != (state.size, digest) for one, digest, state in rows):
            return
        versions = [one.version for one in told if one is not None]
        bags = self.index.bags_among(self.index.files(number))
        known = all(version or not bag.size for version, bag in zip(versions, bags, strict=True))
        pins = self.pins.get(position) or self.index.pins_of_bags(versions)
        # The versions of the index may be those of a shard that the reader had not compared.
        if known and versions != [bag.version for bag in bags] and self.index.bags_among(pins) == versions:
            self._adopt(position, pins)

    def note_moved(self, moved: Mapping[int, Pins | None]) -> None:
        """Note which shards, by number, were moved, after all were compared by their sizes, versions and times."""
        self.unchecked[:] = False
        for i, number in enumerate(self._numbers.tolist()):
            if number in moved:
                self.unchecked[i] = self.moved = True
                if (pins := moved[number]) is not None:
                    self.pins[i] = pins

    async def read_extras(self) -> None:
        """Read what ``cache_keys`` and ``verify`` need in memory."""
        await gather([dataset.read_extras() for i, dataset in enumerate(self) if i not in self.own])

    async def check_unchanged(self) -> None:
        """Check that the shards which were opened by their own tables were not replaced meanwhile."""
        await gather([dataset.check_unchanged() for dataset in self.own.values()])

    def _difference(self, dataset: Dataset) -> str | None:
        expected = self.index.directory
        return dataset.columns.difference(expected.spec, expected.layout, f'the index of {self._name}')

    def _check_spec(self, dataset: Dataset) -> None:
        if (difference := self._difference(dataset)) is not None:
            raise ObjectChangedError(f'{dataset.name}: has {difference}: {_REMEDY}')

    # --- what was opened

    def lengths(self) -> Ints:
        return self._values(self.index.lengths, lambda dataset: dataset.columns.length)

    def size(self, mask: Mask = None) -> int:
        keys = None if mask is None else [choice.field.key for choice in self[0].columns.choose(mask)]
        return int(self._values(self.index.sizes(keys), lambda dataset: dataset.columns.size_of(mask)).sum())

    def _values(self, indexed: Ints, of: Callable[[Dataset], int]) -> Ints:
        values = indexed[np.minimum(self._numbers, len(indexed) - 1)]
        for i, dataset in self.own.items():
            values[i] = of(dataset)
        return values

    def _identities(self, position: int) -> dict[str, FileIdentity]:
        pins, is_unchecked = self.pins.get(position), bool(self.unchecked[position])
        if pins is None and not is_unchecked:
            return self.index.file_identities(int(self._numbers[position]))
        return self._identities_as(position, pins or [None] * len(self.index.file_names), is_unchecked)

    def _identities_as(self, position: int, pins: Pins, is_unchecked: bool = False) -> dict[str, FileIdentity]:
        """Return the identities of the bags of a shard in some versions; unless it is unchecked, with their digests."""
        number = int(self._numbers[position])
        files, bags = self.index.file_identities(number), self.index.bags_among(pins)
        digests = dict.fromkeys(self.index.keys, '') if is_unchecked else self.index.digests(number)
        return {
            name: FileIdentity(file.size, pin, digest)
            for (name, file), pin, digest in zip(files.items(), bags, digests.values(), strict=True)
        }

    def _check_expected(self, position: int, files: Mapping[str, FileIdentity]) -> None:
        """Raise ``ObjectChangedError`` unless a shard has the files that were pickled."""
        if self._expected is not None:
            name = self._shard_name(position)
            opened = Identity.of([self._directory.store], {f'{name}/{file}': told for file, told in files.items()})
            self._expected.check(opened, self._name, partly=True)

    def states(self) -> dict[int, FolderState] | None:
        """Return the states of the shards that were opened by their own tables; None unless all are complete."""
        return all_or_none({i: dataset.state() for i, dataset in self.own.items()})

    def warn_of_lengths(self) -> None:
        super().warn_of_lengths()
        if self.index.directory.kinds is None:
            records = self.index.directory.rows['records']
            uneven = np.flatnonzero(records.min(axis=1) != records.max(axis=1))
            for i in np.flatnonzero(np.isin(self._numbers, uneven)).tolist():
                if i not in self.own:
                    self[i].warn_of_lengths()

    async def read(self, positions: Ints, reading: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that reads shards, of which each is compared with the index once. Raise
        ``ObjectChangedError`` if one is another one: call ``replace``, and read again.
        """
        if not self.unchecked[positions].any():
            return await reading
        if self.moved:
            try:
                await self._check(positions.tolist())
            except BaseException:
                reading.close()
                raise
            return await reading
        both: list[Any] = await gather([reading, self._check(positions.tolist())])
        values: T = both[0]
        return values

    # --- shards that were replaced

    def warn(self, reason: str, remedy: str = 'run `granular index` on it') -> None:
        """Log once that the index does not match the shards, or is gone."""
        if self._warned:
            return
        self._warned = True
        if self.index.may_be_compared:
            logger.warning('the index of %s is outdated: %s: read by their own tables: %s', self._name, reason, remedy)
        else:
            logger.warning(
                'the index of %s cannot be compared with its shards, which are read by their own tables: its server '
                'gives files no ETag',
                self._name,
            )

    def outdated(self, error: GranularError) -> ObjectChangedError:
        """Return the error for a file of a shard that is not the one in the index, where it cannot be replaced."""
        return ObjectChangedError(f'{error}; or since the index of {self._name} was built: {_REMEDY}')

    async def find_replaced(self, positions: Iterable[int]) -> list[int]:
        """Return the shards that are not those in the index. Each is compared once."""
        unchecked = [i for i in positions if self.unchecked[i] and i not in self.own]
        if self.moved and self._directory.store.local and len(unchecked) > 1 and not is_immediate():
            # Files are compared in one thread, which takes less than a hop to a thread for each.
            rest = await start_inline(lambda: gather([self._is_indexed(i) for i in unchecked]), threads())
            found = await rest if isinstance(rest, Rest) else rest
        else:
            found = await gather([self._is_indexed(i) for i in unchecked])
        return [i for i, is_indexed in zip(unchecked, found, strict=True) if not is_indexed]

    async def _check(self, positions: Sequence[int]) -> None:
        before = self.columns(positions)
        replaced = await self.find_replaced(positions)
        if replaced or self.columns(positions) != before:
            others = replaced or positions
            raise ObjectChangedError(
                f'{self._name}: {len(others)} shards are not those in its index, such as {self._shard_name(others[0])}'
            )

    async def _is_indexed(self, position: int) -> bool:
        """Return whether an unchecked shard is the one in the index, or a copy of it, whose versions are read then."""
        pins = await find_indexed(self.index, self._directory, int(self._numbers[position]), self.pins.get(position))
        if pins is None:
            return False
        if self._expected is not None:
            self._check_expected(position, self._identities_as(position, pins))
        self._adopt(position, pins)
        return True

    def _adopt(self, position: int, pins: Pins) -> None:
        """Read a shard, which was compared, in the versions that were found."""
        if pins != (before := self._pins(position)):
            self.moved = True
        if self.moved:
            dataset = self._made.get(position)
            if dataset is not None and pins == before:
                dataset.confirm()
            else:
                self._made.pop(position, None)
            self._datasets = None  # a read that has them continues with the shards that it began with
            self.pins[position] = pins
        self.unchecked[position] = False

    def _pins(self, position: int) -> Pins:
        """Return the versions in which a shard is read."""
        if (pins := self.pins.get(position)) is not None:
            return pins
        return [file.version for file in self.index.files(int(self._numbers[position]))]

    async def compared(self, position: int) -> Dataset:
        """Return a shard after it was compared with the index."""
        if replaced := await self.find_replaced([position]):
            await self.replace(replaced)
        return self[position]

    async def replace(self, positions: Sequence[int], columns: Sequence[Columns] = ()) -> bool:
        """Open shards by their own tables if they are not those in the index, or if its pages can no longer be read.

        Return whether there were any, or whether they have other columns now than those that were read. Raise
        ``ObjectChangedError`` if such a shard has another number of datapoints, or was replaced since it was compared,
        or if the index was replaced, too, and it is not known which shard was opened: other shards would be those of
        the former dataset.
        """
        if columns and columns != self.columns(positions):
            return True
        indexed = [i for i in positions if i not in self.own]
        changed = await gather([self._is_replaced(i) for i in indexed])
        stale = [i for i, is_replaced in zip(indexed, changed, strict=True) if is_replaced and self.unchecked[i]]
        if columns and not stale and columns != self.columns(positions):
            return True
        if not stale and (any(changed) or self.index.in_memory):
            return False
        is_replaced = await self.index.is_replaced()
        if not stale and not is_replaced:
            return False
        unknown = [i for i in stale if i not in self.pins]
        if unknown and is_replaced:
            raise ObjectChangedError(
                f'{self._name}: was written anew since it was opened, or its index was: shard '
                f'{self._shard_name(unknown[0])} is not the one that was opened: open a new reader'
            )
        opened = stale or indexed
        await self._open_again(opened, are_checked=not stale)
        if stale:
            name = self._shard_name(stale[0])
            self.warn(f'{len(stale)} of {len(positions)} shards that were read were replaced, such as {name}')
        elif opened:
            self.warn(f'it was replaced or removed itself: {len(opened)} shards that were read', 'open a new reader')
        return bool(opened)

    async def _is_replaced(self, position: int) -> bool:
        if self.unchecked[position]:
            return not await self._is_indexed(position)
        number, pins = int(self._numbers[position]), self._pins(position)
        return not await has_versions(self.index, self._directory, number, pins)

    async def _open_again(self, positions: Sequence[int], are_checked: bool) -> None:
        """Open shards by their own tables in place of those in the index, unless another read has done so."""
        positions = [i for i in positions if i not in self.own]
        opening = [self._open(i, are_checked or i in self.pins) for i in positions]
        for i, dataset in zip(positions, await gather(opening), strict=True):
            self.own[i] = dataset
            self.unchecked[i] = False
        self._datasets = None

    async def _open(self, position: int, is_checked: bool) -> Dataset:
        number, dataset = int(self._numbers[position]), self._create(self._shard_name(position))
        await dataset.open_unchanged()
        self._check_spec(dataset)
        expected, actual = int(self.index.lengths[number]), dataset.columns.length
        if actual != expected:
            raise ObjectChangedError(
                f'{dataset.name}: was replaced since the index of {self._name} was built: expected {expected} '
                f'datapoints, got {actual}: {_REMEDY}'
            )
        if is_checked:
            pairs = zip(self._pins(position), dataset.opened_files(), strict=True)
            if not all(now._replace(version=pin).is_same(now) for pin, (_, now) in pairs):
                raise ObjectChangedError(f'{dataset.name}: was replaced while it was being read: open a new reader')
        await read_digests(dataset.bags_by_file(f'{self._shard_name(position)}/'), self._expected)
        self._check_expected(position, dataset.files())
        return dataset


class _Comparison(Proof):
    """Proof that a shard, which was moved, has the limits and references of the index."""

    covers_tables = True

    def __init__(self, shards: IndexedShards, position: int) -> None:
        super().__init__()
        self._shards, self._position = shards, position

    @property
    def is_missing(self) -> bool:
        return bool(self._shards.unchecked[self._position])

    async def forget(self) -> None:
        pass

    async def check(self) -> None:
        if await self._shards.find_replaced([self._position]):
            raise self._shards.outdated(
                ObjectChangedError(f'{self._shards[self._position].name}: was replaced since it was opened')
            )
