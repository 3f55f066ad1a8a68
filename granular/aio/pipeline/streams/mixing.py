"""Several streams combined into one."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

import numpy as np

from granular._support.indexing import Ints
from granular._support.text import AT_EPOCH
from granular.aio.pipeline.changes import Added, Removed, declaration
from granular.aio.pipeline.describe import check_lines, lines_of
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.combinations import all_turns_before, turns, turns_before
from granular.aio.pipeline.nodes.indices import ENDLESS
from granular.aio.pipeline.nodes.patterns import Shares
from granular.aio.pipeline.nodes.patterns import mixed as mixed_pattern
from granular.aio.pipeline.origins import Picked
from granular.aio.pipeline.position import EARLIER, FREE, RestoreRules
from granular.aio.pipeline.streams.flow import Flow, flag_of, number_of
from granular.aio.pipeline.streams.packing import Packing
from granular.aio.pipeline.streams.stream import RenumberedError, Stream
from granular.aio.runtime.threads import offload
from granular.errors import DatapointError, StateError

_PLANNED: Final = 64  # steps that are planned at a time
_MOST_PLANNED: Final = 1024  # after some that followed each other


class Zipped(Stream):
    """Tuples of the elements of several streams."""

    def __init__(self, parents: Sequence[Stream], strict: bool) -> None:
        super().__init__(*parents)
        self._strict = strict

    def length(self) -> int:
        return min(cast(int, parent.length()) for parent in self.parents)

    def index_of(self, state: Any) -> int:
        # The first streams may have returned an element more when another one ended.
        self.length()
        pairs = zip(self.parents, state['parents'], strict=True)
        return min(cast(int, parent.index_of(saved)) for parent, saved in pairs)

    def state_at(self, index: int) -> Any:
        return {'parents': [parent.state_at(index) for parent in self.parents], 'count': index}

    def traced_back(self, picked: Picked) -> list[tuple[Any, Picked]]:
        return [(parent, picked) for parent in self.parents]

    def flow(self) -> Flow:
        return Zipping(self)

    def describe(self) -> str:
        return f'zip of {len(self.parents)}{"" if self._strict else ", strict=False"}'


class _Combining(Flow):
    """A stage that takes elements from several streams. Its state is theirs, and the number of its elements."""

    def __init__(self, stage: Stream) -> None:
        self.parents: tuple[Flow, ...] = tuple(parent.flow() for parent in stage.parents)
        self._count, self._ended = 0, False

    def state(self) -> Any:
        return {'parents': [parent.state() for parent in self.parents], 'count': self._count}

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        count = number_of(state, 'count')
        for parent, parent_state in zip(self.parents, state['parents'], strict=True):
            await parent.restore(parent_state, rules)
        self._count, self._ended = count, False


class Zipping(_Combining):
    def __init__(self, stage: Zipped) -> None:
        super().__init__(stage)
        self._strict = stage._strict

    async def next(self) -> Any:
        if self._ended:
            return END
        elements: list[Any] = []
        for parent in self.parents:
            elements.append(await parent.next())
            if elements[-1] is END and not self._strict:
                self._ended = True
                return END
        ended = [element is END for element in elements]
        if all(ended):
            self._ended = True
            return END
        if any(ended):
            raise DatapointError(
                f'zip: stream {ended.index(True)} ended after {self._count} elements, and stream {ended.index(False)} '
                f'did not: pass strict=False to end with the first'
            )
        self._count += 1
        return tuple(elements)

    def state(self) -> Any:
        # One that ended has taken elements in vain from the first streams: it stays at its end.
        return {**super().state(), 'ended': True} if self._ended else super().state()

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        await super().restore(state, rules)
        self._ended = flag_of(state, 'ended')


class Mixed(Stream):
    """Elements of several streams in proportion to their weights, until one of them ends."""

    def __init__(self, parents: Sequence[Stream], weights: Sequence[int]) -> None:
        super().__init__(*parents)
        self._weights = tuple(weights)

    def length(self) -> int:
        lengths: list[int] = [parent.length() for parent in self.parents]
        if not all(self._weights):
            lengths = [length if weight else ENDLESS for length, weight in zip(lengths, self._weights, strict=True)]
        low, high = min(lengths), ENDLESS  # even if all elements came from the shortest stream, it would have enough
        while low < high:
            middle = (low + high + 1) // 2
            counts = turns_before(middle, self._weights)
            if all(count <= length for count, length in zip(counts, lengths, strict=True)):
                low = middle
            else:
                high = middle - 1
        return low

    def index_of(self, state: Any) -> int:
        self.length()
        index = cast(int, state['count'])
        counts = turns_before(index, self._weights)
        try:
            numbers = self._indices_of(state['parents'])
        except StateError as error:
            raise RenumberedError(f'{self.describe()}: {error}: to leave out the next elements, take them') from None
        if numbers != counts:
            raise RenumberedError(
                f'{self.describe()}: elements have no index since the mix resumed at element {index} with other '
                f'streams, weights or shards: expected elements {counts} of the streams next, got {numbers}: to leave '
                f'out the next ones, take them'
            )
        return index

    def _indices_of(self, states: Any) -> list[int]:
        """Return the index of the next element of each stream."""
        return [parent.index_of(state) for parent, state in zip(self.parents, states, strict=True)]

    def state_at(self, index: int) -> Any:
        counts = turns_before(index, self._weights)
        states = [parent.state_at(count) for parent, count in zip(self.parents, counts, strict=True)]
        return {'parents': states, 'count': index}

    def traced_back(self, picked: Picked) -> list[tuple[Any, Picked]]:
        return picked.divided(self.parents, *turns(picked.indices, self._weights))

    def flow(self) -> Flow:
        return Mixing(self)

    def describe(self) -> str:
        return f'mix of {len(self.parents)}, weights {":".join(map(str, self._weights))}'


class Mixing(_Combining):
    passes = True

    def __init__(self, stage: Mixed) -> None:
        super().__init__(stage)
        self._mixed: Sequence[Flow] = self.parents
        self._weights = stage._weights
        # What states have of the streams, but for those that moved in the last step: those of all streams would take
        # longer than an element. None if it is unknown.
        self._states: list[Any] | None = None
        self._moved: Sequence[int] = ()
        self._arrange()

    def _arrange(self) -> None:
        """Let hosts take elements of different streams in each step.

        Where they advance unequally in any case, each begins with another stream.
        """
        self._states = None
        self._owners, self._first_planned = list[int](), 0  # the streams of the next elements, and the first of these
        self._arranged = self.knows_host
        self._begins_apart = any(parent.apart for parent in self.parents)
        self._first = self.host if self._begins_apart else 0
        self._rows = _shared_rows(self._mixed, self._weights)

    async def begin(self) -> None:
        await super().begin()
        self._states = None
        if not self._arranged:
            self._arrange()
            self._arranged = True

    def keep_host(self) -> None:
        super().keep_host()
        self._states = None

    def received(self, seconds: float) -> None:
        for i in self._moved:
            self._mixed[i].received(seconds)

    async def next(self) -> Any:
        if self._ended:
            return END
        if not self._arranged:
            await self.begin()
        states = self._current_states()
        if self._rows is None:
            owner = await self._owner(self._first + self._count)
            self._states, self._moved = states, (owner,)
            element = await self._mixed[owner].next()
        else:
            step = await self._rows.step(self._count)
            self._states, self._moved = states, tuple(step.moves)
            element = await self._rows.next(step)
        self._ended = element is END
        self._count += not self._ended
        return element

    async def _owner(self, index: int) -> int:
        """Return the number of the stream of an element, planned for many elements at a time."""
        if not 0 <= index - self._first_planned < len(self._owners):
            count = min(_MOST_PLANNED, max(_PLANNED, 2 * len(self._owners)))
            owners = await offload(_owners, self._weights, np.arange(index, index + count))
            self._owners, self._first_planned = owners.tolist(), index
        return self._owners[index - self._first_planned]

    def _current_states(self) -> list[Any]:
        """Return what states have of each stream."""
        if self._states is None:
            return [self._state_of(i) for i in range(len(self._mixed))]
        states = list(self._states)
        for i in self._moved:
            states[i] = self._state_of(i)
        return states

    def _state_of(self, i: int) -> Any:
        return self._mixed[i].state()

    def state(self) -> Any:
        return {'parents': self._current_states(), 'count': self._count}

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        self._states = None
        await super().restore(state, rules)
        self._arrange()


class _SharedRows:
    """A mix of streams whose rows every host packs: hosts share the rows of each step, so that each gets its share.

    In a step, they take the next rows of the mix, one each: so many of each stream, whose positions all move on by
    them. So a state is of the same position on all hosts, and fits any number of them.
    """

    def __init__(self, mixed: Sequence[Flow], packs: Sequence[Packing], weights: Sequence[int]) -> None:
        self._mixed = mixed
        self._packs = packs
        self._weights = weights
        own = packs[0].turns
        self._hosts, self._whole = own.count, any(pack.turns.whole for pack in packs)
        pattern, owners = mixed_pattern(weights, [None] * len(weights)), partial(_owners, weights)
        self._shares = Shares(own.index, own.count, pattern, owners)
        self._first, self._steps = 0, list[_Step]()  # the number of the first step that is planned

    async def step(self, count: int) -> '_Step':
        """Return the step with a number."""
        if not 0 <= count - self._first < len(self._steps):
            self._steps, self._first = await offload(self._planned, count), count
        return self._steps[count - self._first]

    async def next(self, step: '_Step') -> Any:
        """Return the row of this host in a step, or ``END``."""
        self._packs[step.owner].set_place(step.place)
        row = await self._mixed[step.owner].next()
        if row is END:
            return END
        moves = [(self._packs[i], count) for i, count in step.moves.items()]
        complete = [await pack.has(count) for pack, count in moves]
        if self._whole and not all(complete):
            return END
        for (pack, count), is_complete in zip(moves, complete, strict=True):
            pack.advance(count if is_complete else 0)
        return row

    def _planned(self, count: int) -> 'list[_Step]':
        rounds = np.arange(count, count + _PLANNED) * self._hosts
        owners, inner = turns(self._shares.taken(rounds), self._weights)
        before = all_turns_before(np.append(rounds, rounds[-1] + self._hosts), self._weights)
        moved = np.diff(before, axis=0)
        return [
            _Step(owner, number - int(now[owner]), {i: int(moves[i]) for i in np.flatnonzero(moves).tolist()})
            for owner, number, now, moves in zip(owners.tolist(), inner.tolist(), before, moved, strict=False)
        ]


class _Step(NamedTuple):
    """A step of hosts that share rows: the stream of this host's row, its place there, and the rows of each stream."""

    owner: int
    place: int
    moves: dict[int, int]


def _owners(weights: Sequence[int], indices: Ints) -> Ints:
    return turns(indices, weights)[0]


def _shared_rows(mixed: Sequence[Flow], weights: Sequence[int]) -> _SharedRows | None:
    packs = [source for flow in mixed if isinstance(source := flow.row_source(), Packing)]
    if len(packs) < len(mixed) or len({(pack.turns.index, pack.turns.count) for pack in packs}) > 1:
        return None
    return _SharedRows(mixed, packs, weights)


class NamedMix(Mixed):
    """A mix of streams that have names. Its state fits other streams and weights."""

    named = True

    def __init__(self, parents: Mapping[str, Stream], weights: Sequence[int]) -> None:
        super().__init__(list(parents.values()), weights)
        self.names = tuple(parents)

    def lines(self) -> dict[str, list[Line]]:
        """Return the lines of each stream."""
        return {name: lines_of(parent) for name, parent in zip(self.names, self.parents, strict=True)}

    def outline(self) -> dict[str, Any]:
        return {'stage': self.describe(), 'names': True}  # the state of each stream has its own

    def stages(self, lines: Mapping[str, Sequence[Line]]) -> dict[str, Any]:
        """Return what states have of each stream beside its state."""
        return {
            name: {'pipeline': [line.saved() for line in lines[name]], 'stages': parent.outline()}
            for name, parent in zip(self.names, self.parents, strict=True)
        }

    def _indices_of(self, states: Any) -> list[int]:
        return [
            parent.index_of(states[name]['state']) if name in states else 0
            for name, parent in zip(self.names, self.parents, strict=True)
        ]

    def state_at(self, index: int) -> Any:
        state = super().state_at(index)
        parents = zip(self.stages(self.lines()).items(), state['parents'], strict=True)
        states = {name: {'state': parent, **stages} for (name, stages), parent in parents}
        return {'parents': states, 'count': index, 'weights': dict(zip(self.names, self._weights, strict=True))}

    def flow(self) -> Flow:
        return NamedMixing(self)

    def describe(self) -> str:
        weights = ', '.join(f'{name}: {weight}' for name, weight in zip(self.names, self._weights, strict=True))
        return f'mix of {{{weights}}}'


class NamedMixing(Mixing):
    """A mix whose streams are restored by name; one that a state does not name begins.

    A later stage that holds elements reads them again with the streams and weights of the state.
    """

    adapts = True

    def __init__(self, stage: NamedMix) -> None:
        super().__init__(stage)
        self._named = dict(zip(stage.names, self.parents, strict=True))
        self._own = dict(zip(stage.names, stage._weights, strict=True))
        self._lines = stage.lines()
        self._stages, self._description = stage.stages(self._lines), stage.describe()
        self._starts = {name: parent.state() for name, parent in self._named.items()}
        self._current: Mapping[str, int] = self._own
        self._mixed_names = list(self._named)
        self._removed: Mapping[str, Any] = {}  # states of streams of weight 0, which this mix does not have

    def mixes(self) -> list[Any]:
        return [dict(self._current), *super().mixes()]

    def _state_of(self, i: int) -> Any:
        name = self._mixed_names[i]
        return {'state': self._named[name].state(), **self._stages[name]}

    def state(self) -> Any:
        parents = {**dict(zip(self._mixed_names, self._current_states(), strict=True)), **self._removed}
        return {'parents': parents, 'count': self._count, 'weights': self._current}

    async def restore(self, state: Any, rules: RestoreRules = FREE) -> None:
        count, current, self._states = number_of(state, 'count'), self._chosen(state, rules), None
        if missing := [name for name in state.get('weights', ()) if name in current and name not in state['parents']]:
            raise StateError(f'{self._description}: the state has weights of {missing}, but no states: {EARLIER}')
        if rules.changes is not None:
            self._check_names(state, current, rules.changes)
        named = [name for name in current if name in self._named]
        for name in named:
            new = {'state': self._starts[name], **self._stages[name]}
            saved = state['parents'].get(name, new)
            made = check_lines(saved['pipeline'], self._lines[name], rules.changes or ())
            await self._named[name].restore(saved['state'], rules._replace(applied=(*rules.applied, *made)))
        self._mixed, self._weights = [self._named[name] for name in named], tuple(current[name] for name in named)
        self._mixed_names = named
        self._removed = {name: state['parents'][name] for name in current if name not in self._named}
        self._current = current
        self._count = count
        self._ended = False
        self._arrange()

    def _check_names(self, state: Mapping[str, Any], current: Mapping[str, int], changes: Sequence[Any]) -> None:
        """Refuse a state of other streams, which a name that was changed by mistake leads to, unless it is declared."""
        saved, weights = state['parents'], {**dict.fromkeys(state['parents'], 1), **(state.get('weights') or {})}
        others = [
            *(Added(name) for name in current if name not in saved),
            *(Removed(name) for name in saved if name not in self._named and weights[name]),
        ]
        if undeclared := [change for change in others if change not in changes]:
            raise StateError(
                f'{self._description}: the state has the streams {sorted(saved)}: if this is meant, pass '
                f'{declaration(undeclared)}'
            )

    def _chosen(self, state: Mapping[str, Any], rules: RestoreRules) -> Mapping[str, int]:
        """Return the weights to continue with; raise ``StateError`` if a later stage needs others."""
        saved = state.get('weights')
        if rules.weights == 'own' or saved == self._own:
            return self._own
        if not isinstance(saved, Mapping) or not (
            any(saved.values()) and all(type(w) is int and w >= 0 for w in saved.values())
        ):
            raise StateError(
                f'{rules.stage}: holds elements of a {self._description}, whose weights an earlier release did not '
                f'save: continue with that release, or {AT_EPOCH}'
            )
        if rules.weights == 'same':
            raise StateError(
                f'{rules.stage}: the state was saved with the weights {dict(saved)} of a {self._description}, and may '
                f'hold elements of it: continue with these weights, or mix after {rules.stage}'
            )
        if missing := sorted(name for name, weight in saved.items() if weight and name not in self._named):
            raise StateError(
                f'{rules.stage}: holds elements of {missing}, which a {self._description} does not have: give '
                f'streams the weight 0, and remove them when it holds none'
            )
        return saved
