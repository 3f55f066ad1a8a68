"""Nodes that combine several sources: each index maps to one of them, or to all.

Mix and concatenate have the order and semantics that Google Grain documents.
"""

import abc
import functools
import itertools
import math
import operator
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import Ints, grouped, placed
from granular.aio.pipeline.data_source import Joint
from granular.aio.pipeline.execution.failures import Failure
from granular.aio.pipeline.nodes.adapters import Fetching, convert
from granular.aio.pipeline.nodes.elements import measured
from granular.aio.pipeline.nodes.indices import (
    ENDLESS,
    IndexNode,
    check_finite,
    check_length,
    in_epochs,
    looked_up,
    looked_up_now,
)
from granular.aio.pipeline.nodes.patterns import Pattern, mixed, size_of
from granular.aio.pipeline.nodes.source import Node, Source, check_not_empty, length_of
from granular.aio.runtime.immediate import to_loop
from granular.aio.runtime.tasks import gather
from granular.aio.runtime.threads import Calls, offload
from granular.aio.runtime.user_functions import call_user
from granular.errors import InvalidArgumentError, OutOfRangeError

_LONGEST_CYCLE: Final = 1 << 18  # choices of a mix that are kept in memory
_SHORT_CYCLE: Final = 1 << 14  # choices, times sources, that an event loop computes
_FEW: Final = 16  # sources in which an event loop looks up indices


class SourceChoice(Node):
    """Several sources; each index maps to one of them."""

    selects = True
    _quick = False  # True if ``choose`` is fast enough for an event loop

    def __init__(self, parents: Sequence[Any]) -> None:
        if not isinstance(parents, Iterable) or not parents:
            raise InvalidArgumentError(f'expected one source or more, got {parents!r:.100}')
        super().__init__(*map(convert, parents))
        self._joints = Joints(self.parents)

    def copy_over(self, *parents: Source) -> Self:
        return self.changed(parents=parents, _joints=Joints(parents))

    def _parts(self) -> list[Pattern | None]:
        return [parent.pattern() for parent in self.parents]

    def owners(self, indices: Ints) -> Ints:
        owners, inner = self._chosen(indices)
        parts = self._parts()
        firsts = np.cumsum([0, *map(size_of, parts)])
        numbers = firsts[owners]
        for owner, part in enumerate(parts):
            if part is not None and part.datasets:
                its = owners == owner
                numbers[its] += self.parents[owner].owners(inner[its])
        return numbers

    @abc.abstractmethod
    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        """Return, for each index, the number of the source and the index in that source."""

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        steps = np.asarray(indices, np.int64)
        groups, parts = await self._find(steps)
        return placed(groups, await self._joints.fetch(parts), len(steps))

    async def fetch_undecoded(self, indices: ArrayLike) -> Calls[list[Any]] | None:
        steps = np.asarray(indices, np.int64)
        groups, parts = await self._find(steps)
        calls = await self._joints.fetch_undecoded(parts)
        return calls.then(lambda values: placed(groups, values, len(steps)))

    async def _find(self, indices: Ints) -> tuple[list[tuple[int, Ints]], list[tuple[Source, Ints]]]:
        """Return the owners with their positions, and what is read of each: its source, and the indices in that."""
        if self._quick and len(self.parents) <= _FEW and (found := call_user(self._found_now, indices)) is not None:
            return found
        return await offload(self._found, indices)

    def _found(self, indices: Ints) -> tuple[list[tuple[int, Ints]], list[tuple[Source, Ints]]]:
        owners, inner = self._chosen(indices)
        groups = grouped(owners)
        return groups, [looked_up(self.parents[owner], inner[positions]) for owner, positions in groups]

    def _found_now(self, indices: Ints) -> tuple[list[tuple[int, Ints]], list[tuple[Source, Ints]]] | None:
        """Return the result of ``_found``; None if that takes too long for an event loop."""
        owners, inner = self._chosen(indices)
        groups = grouped(owners)
        parts = [looked_up_now(self.parents[owner], inner[positions]) for owner, positions in groups]
        known = [part for part in parts if part is not None]
        return (groups, known) if len(known) == len(parts) else None

    def _chosen(self, indices: Ints) -> tuple[Ints, Ints]:
        if not self.kept:
            return self.choose(indices)
        epochs, positions = np.divmod(indices, len(self))
        owners, inner = self.choose(positions)
        lengths = np.array([len(parent) for parent in self.parents], np.int64)
        return owners, in_epochs(inner, epochs, lengths[owners])


def choices_of(node: SourceChoice, indices: Ints) -> tuple[Ints, Ints]:
    """Return, for each index, the number of the source and the index in that source, in any epoch."""
    return node._chosen(indices)


class Joints:
    """Sources beneath a stage, of which readers that are alike are read in one fan-out, as one from batch to batch."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._by_kin: dict[Any, Joint] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._sources,)

    async def fetch(self, parts: Sequence[tuple[Source, Ints]]) -> list[list[Any]]:
        """Return the datapoints of several sources, by the indices in each."""
        if len(parts) == 1:
            [(source, indices)] = parts
            return [await source.fetch(indices)]
        alike = _alike(parts)
        if len(alike) > 1:
            await to_loop()
        fetched = await gather([self._fetch_alike(kin, [parts[i] for i in own]) for kin, own in alike.items()])
        return _spread(alike, fetched)

    async def fetch_undecoded(self, parts: Sequence[tuple[Source, Ints]]) -> Calls[list[list[Any]]]:
        """Read datapoints of several sources, as ``fetch``, and return the calls that decode them, for threads."""
        alike = _alike(parts)
        calls = await gather([self._fetch_alike_undecoded(kin, [parts[i] for i in own]) for kin, own in alike.items()])
        return Calls.all_of(calls).then(lambda fetched: _spread(alike, fetched))

    async def _fetch_alike(self, kin: Any, parts: Sequence[tuple[Source, Ints]]) -> list[list[Any]]:
        if len(sources := _fetching(parts)) > 1:
            return await sources[0].fetch_with(self._joint(kin, sources), sources, [own for _, own in parts])
        [(source, indices)] = parts
        return [await source.fetch(indices)]

    async def _fetch_alike_undecoded(self, kin: Any, parts: Sequence[tuple[Source, Ints]]) -> Calls[list[list[Any]]]:
        if len(sources := _fetching(parts)) > 1:
            return await sources[0].fetch_undecoded_with(self._joint(kin, sources), sources, [own for _, own in parts])
        [(source, indices)] = parts
        if (calls := await source.fetch_undecoded(indices)) is None:
            return Calls.none([await source.fetch(indices)])
        return calls.then(lambda datapoints: [datapoints])

    def _joint(self, kin: Any, sources: Sequence[Fetching]) -> Joint:
        """Return sources that are kin as one."""
        joint = self._by_kin.get(kin)
        if joint is None or not joint.fits([source.root for source in sources]):
            # With all that are open, so that the next batches, which read others of them, find them in it.
            beneath = [source for source in map(_read_by, self._sources) if isinstance(source, Fetching)]
            own = {id(source.root): source for source in (*beneath, *sources) if source.kin() == kin}
            joint = self._by_kin[kin] = sources[0].join(list(own.values()))
        return joint


def _alike(parts: Sequence[tuple[Source, Ints]]) -> dict[Any, list[int]]:
    """Return the numbers of the parts that are read together, by what their sources have in common."""
    alike: dict[Any, list[int]] = {}
    for number, (source, _) in enumerate(parts):
        kin = source.kin() if isinstance(source, Fetching) else None
        alike.setdefault(number if kin is None else kin, []).append(number)
    return alike


def _spread(alike: Mapping[Any, list[int]], fetched: Sequence[list[list[Any]]]) -> list[list[Any]]:
    """Return the datapoints of each part, of those that were read together."""
    pairs = zip(itertools.chain(*alike.values()), itertools.chain(*fetched), strict=True)
    return [datapoints for _, datapoints in sorted(pairs, key=operator.itemgetter(0))]


def _fetching(parts: Sequence[tuple[Source, Ints]]) -> list[Fetching]:
    return [source for source, _ in parts if isinstance(source, Fetching)]


def _read_by(source: Source) -> Source:
    """Return the source that a chain of operations on indices reads."""
    while isinstance(source, IndexNode):
        source = source.parents[0]
    return source


async def fetch_by_owner(owners: Ints, fetch: Callable[[int, Ints], Coroutine[Any, Any, Sequence[Any]]]) -> list[Any]:
    """Fetch from several sources concurrently, and return the datapoints in the order of their owners.

    ``fetch`` returns the datapoints of a source, given its number and the positions in ``owners``.
    """
    groups = grouped(owners)
    if len(groups) > 1:
        await to_loop()
    return placed(groups, await gather([fetch(owner, positions) for owner, positions in groups]), len(owners))


class Interleave(SourceChoice):
    """One datapoint of each source in turn."""

    _quick = True

    def pattern(self) -> Pattern | None:
        return mixed((1,) * len(self.parents), self._parts())

    @property
    def varies(self) -> bool:  # type: ignore[override]
        return not self.kept and len({length_of(source) for source in self.parents}) > 1

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        inner, owners = np.divmod(indices, len(self.parents))
        return owners, inner

    def __len__(self) -> int:
        return min(ENDLESS, len(self.parents) * min(length_of(source) for source in self.parents))

    def describe(self) -> str:
        return f'Interleave of {len(self.parents)}'


class Proportional(SourceChoice):
    """Sources mixed evenly in proportion to their weights; ends when the first of them is exhausted."""

    def __init__(self, parents: Sequence[Source], weights: Sequence[float] | None) -> None:
        super().__init__(parents)
        self._weights = proportions(len(parents), weights)
        total = sum(self._weights)
        self._quick = len(parents) * total // math.gcd(*self._weights) <= _SHORT_CYCLE
        read = [
            (i, parent, weight) for i, (parent, weight) in enumerate(zip(parents, self._weights, strict=True)) if weight
        ]
        for i, parent, _ in read:
            if not len(parent):
                raise InvalidArgumentError(f'mix: dataset {i} is empty: {parent.describe()}')
        shares = [len(parent) / (weight / total) for _, parent, weight in read]
        self._length = min(ENDLESS, int(min(shares)))
        # False if an epoch of the mix is one epoch of each source.
        self.varies = turns_before(self._length, self._weights) != list(map(len, parents))

    def __len__(self) -> int:
        return self._length

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        return turns(indices, self._weights)

    def pattern(self) -> Pattern | None:
        return mixed(self._weights, self._parts())

    def arguments(self) -> dict[str, Any]:
        return {'weights': list(self._weights)}

    def describe(self) -> str:
        return f'mix of {len(self.parents)}, weights {":".join(map(str, self._weights))}'


def proportions(count: int, weights: Sequence[float] | None) -> tuple[int, ...]:
    """Scale weights to integers, the smallest of which is 100, and 0 to 0; without weights, 1 for each source."""
    if weights is None:
        return (1,) * count
    try:
        if len(weights) == count and all(math.isfinite(weight) and weight >= 0 for weight in weights):
            scale = 100 / min(weight for weight in weights if weight)
            return tuple(int(weight * scale) for weight in weights)
    except (TypeError, ValueError, OverflowError):  # no sequence, not of numbers, or too far apart
        pass
    raise InvalidArgumentError(
        f'expected {count} weights >= 0, one or more of them > 0 and each below 1e300 times any other, got '
        f'{weights!r:.200}'
    )


def turns(indices: Ints, weights: Sequence[int]) -> tuple[Ints, Ints]:
    """Return, for each index, the number of the source and how often that source was chosen before.

    Of the first k choices, the first source gets ``k - k * (sum - weight) // sum``; the other sources divide the rest
    in the same way. So the choices repeat themselves, with another turn of each weight.
    """
    total = sum(weights)
    divisor = math.gcd(*weights)
    if total // divisor > _LONGEST_CYCLE:
        return _turns(indices, weights)
    owners, inner, shares = _cycle(tuple(weight // divisor for weight in weights))
    cycles = indices // len(owners)
    places = indices - cycles * len(owners)
    chosen: Ints = owners[places]
    before: Ints = inner[places] + cycles * shares[chosen]
    return chosen, before


@functools.lru_cache(8)
def _cycle(weights: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """Return the result of ``turns`` until it repeats itself, and how often each source is chosen until then."""
    return (*_turns(np.arange(sum(weights)), weights), np.array(weights))


def _turns(indices: Ints, weights: Sequence[int]) -> tuple[Ints, Ints]:
    owners, inner = np.full_like(indices, -1), np.zeros_like(indices)
    left = sum(weights)
    if left * (int(np.abs(indices).max(initial=0)) + 1) >= 1 << 63:
        indices = indices.astype(object)  # the products are larger than 64 bits
    at = np.arange(len(indices))  # those that are not chosen yet
    now, then = indices, indices + 1
    for i, weight in enumerate(weights):
        if not weight:  # never chosen; behind the last that is, none is left to divide by
            continue
        rest, rest_then = now * (left - weight) // left, then * (left - weight) // left
        has = then - rest_then
        others = now - rest == has
        its = ~others
        owners[at[its]], inner[at[its]] = i, has[its] - 1
        left -= weight
        now, then, at = rest[others], rest_then[others], at[others]
        if not len(at):
            break
    return owners, inner


def turns_before(index: int, weights: Sequence[int]) -> list[int]:
    """Return how often ``turns`` chooses each source before an index of any size."""
    counts, left = [], sum(weights)
    for weight in weights:
        rest = index * (left - weight) // left if weight else index
        counts.append(index - rest)
        index, left = rest, left - weight
    return counts


def all_turns_before(indices: Ints, weights: Sequence[int]) -> Ints:
    """Return ``turns_before`` of each index, as rows."""
    left = sum(weights)
    if left * (int(np.abs(indices).max(initial=0)) + 1) >= 1 << 63:
        indices = indices.astype(object)
    counts = np.zeros((len(indices), len(weights)), indices.dtype)
    for i, weight in enumerate(weights):
        if weight:
            rest = indices * (left - weight) // left
            counts[:, i] = indices - rest
            indices, left = rest, left - weight
    return counts


class Concatenate(SourceChoice):
    """One source after another; an epoch contains one epoch of each."""

    _quick = True

    def __init__(self, parents: Sequence[Source]) -> None:
        super().__init__(parents)
        for parent in parents:
            check_finite(parent, 'concatenate', 'call concatenate() before repeat()')
        check_length(sum(map(len, parents)), 'concatenate')
        self._lengths = np.array([len(parent) for parent in parents], np.int64)
        self._stops = np.cumsum(self._lengths)

    def __len__(self) -> int:
        return int(self._stops[-1])

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        check_not_empty(self, len(self), indices)
        epochs, positions = np.divmod(indices, len(self))
        owners = np.searchsorted(self._stops, positions, side='right')
        return owners, positions - (self._stops - self._lengths)[owners] + epochs * self._lengths[owners]

    def pattern(self) -> Pattern | None:
        parts = self._parts()
        if all(part is None for part in parts):
            return None
        unknown = any(part is not None and not part.datasets for part in parts)
        return Pattern(0 if unknown else sum(map(size_of, parts)), 0)

    async def measure(self, path: Sequence[str]) -> Ints | None:
        parts = await gather([measured(parent, path) for parent in self.parents])
        known = [sizes for sizes in parts if sizes is not None]
        return np.concatenate(known) if len(known) == len(parts) else None

    def describe(self) -> str:
        return f'concatenate {len(self.parents)}'


class Selection(SourceChoice):
    """Sources mixed by a function from index to (source, index in the source)."""

    def __init__(self, parents: Sequence[Source], chooser: Callable[[int], tuple[int, int]], length: int) -> None:
        super().__init__(parents)
        self._chooser, self._length = chooser, length

    def __len__(self) -> int:
        return self._length

    def choose(self, indices: Ints) -> tuple[Ints, Ints]:
        check_not_empty(self, self._length, indices)
        epochs, positions = np.divmod(indices, self._length)
        chosen = [self._chooser(position) for position in positions.tolist()]
        try:
            pairs = np.array([tuple(map(operator.index, pair)) for pair in chosen], np.int64).reshape(len(chosen), 2)
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                f'the selection map: expected pairs of integers, (dataset, index), got {chosen!r:.100}: {error}'
            ) from error
        owners = pairs[:, 0]
        for i in np.flatnonzero((owners < 0) | (owners >= len(self.parents))).tolist():
            raise OutOfRangeError(
                f'the selection map chooses dataset {owners[i]} at index {indices[i]}: there are {len(self.parents)}'
            )
        lengths = np.array([len(parent) for parent in self.parents], np.int64)
        return owners, in_epochs(pairs[:, 1], epochs, lengths[owners])

    def pattern(self) -> Pattern | None:
        return Pattern(0, 0)  # the user's function is not called for the elements of other hosts

    def user_functions(self) -> tuple[Any, ...]:
        return (self._chooser,)

    def describe(self) -> str:
        return f'select from {len(self.parents)}'


class Zip(Node):
    """Tuples of the datapoints at the same index of each source."""

    def __init__(self, parents: Sequence[Source]) -> None:
        lengths = [len(parent) for parent in parents]
        if not lengths or len(set(lengths)) > 1:
            raise InvalidArgumentError(f'expected datasets of equal length, got {lengths}')
        super().__init__(*parents)

    async def fetch(self, indices: ArrayLike) -> list[Any]:
        if len(self.parents) > 1:
            await to_loop()
        fetched = await gather([parent.fetch(indices) for parent in self.parents])
        rows: list[Any] = list(zip(*fetched, strict=True))
        if any(Failure in set(map(type, column)) for column in fetched):
            rows = [next((part for part in row if type(part) is Failure), row) for row in rows]
        return rows

    def _in_turn(self) -> Source:
        """Return the source whose elements come from several datasets in turn; the first, if none is one."""
        return next((parent for parent in self.parents if parent.pattern() is not None), self.parents[0])

    def pattern(self) -> Pattern | None:
        return self._in_turn().pattern()

    def owners(self, indices: Ints) -> Ints:
        return self._in_turn().owners(indices)

    def describe(self) -> str:
        return f'zip of {len(self.parents)}'
