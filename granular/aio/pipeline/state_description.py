"""Descriptions of states: what of each source was taken, what is held, and which hosts a state fits."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from granular._support.other_names import answering
from granular._support.text import counted
from granular.aio.pipeline.nodes.outlines import sources_of, taken_of
from granular.aio.pipeline.position import check_plain, check_version
from granular.aio.pipeline.streams.flow import number_of
from granular.errors import StateError


@dataclasses.dataclass(frozen=True)
class SourceState:
    """The datapoints that all hosts have taken of a source.

    Attributes:
      name: that of the stream in a mix by name; otherwise the numbers of the datasets that are mixed, concatenated or
        zipped, joined by '/'; the description if there is one source only.
      source: the description of the source.
      elements: the number of datapoints that were taken, over all epochs, without those that are held; None if the
        state does not tell, as for planned rows (``dataset.indices`` does) and streams of files.
      length: the number of datapoints of an epoch; None if there are no epochs, or they are not known.
    """

    name: str
    source: str
    elements: int | None
    length: int | None

    @property
    def epoch(self) -> int | None:
        """The number of whole epochs that were taken."""
        return None if self.elements is None or not self.length else self.elements // self.length

    @property
    def place(self) -> int | None:
        """The number of datapoints that were taken of the next epoch."""
        return None if self.elements is None or not self.length else self.elements % self.length


@dataclasses.dataclass(frozen=True)
class PackedState:
    """The rows that a ``pack`` has yielded, over all hosts that share them.

    Attributes:
      name: that of the sources before it, '' for all.
      rows: the number of rows.
      tokens: the number of values in these rows, by feature in the order of ``length``, without padding; None if the
        state does not tell, as of planned rows.
      planned: True for the rows of a MapDataset, which are planned.
    """

    name: str
    rows: int
    tokens: tuple[int, ...] | None
    planned: bool = False


@dataclasses.dataclass(frozen=True)
class HeldState:
    """Elements that a stage has taken from those before it, and has given out in part.

    Attributes:
      name: that of the sources before it, '' for all.
      stage: the description of the stage.
      given: how much of it was given out, in the stage's own elements: those of a window, rows of a pack.
    """

    name: str
    stage: str
    given: int


@dataclasses.dataclass(frozen=True)
class StateDescription:
    """The content of a state; ``print`` shows a table.

    Attributes:
      sources: what was taken of each source, in the order of the pipeline.
      packed: what each ``pack`` has yielded.
      held: what stages hold. It is read again when the state is restored.
      saved_on: the number of hosts, or shards, that shared the data.
      fits: the number of hosts that the state fits; None if it fits any number. Where a ``pack`` of a stream holds
        documents, these are hosts that share its rows, by ``pack(..., shard_options=)``.
      host: the number of the only host that the state fits; None if it fits each.
    """

    sources: tuple[SourceState, ...]
    packed: tuple[PackedState, ...] = ()
    held: tuple[HeldState, ...] = ()
    saved_on: int = 1
    fits: int | None = None
    host: int | None = None

    def __str__(self) -> str:
        shown = [['source', 'epoch', 'place', 'of', 'elements']]
        for source in self.sources:
            numbers = (source.epoch, source.place, source.length, source.elements)
            shown.append([source.name, *('?' if number is None else f'{number:,}' for number in numbers)])
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ['  '.join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in shown]
        lines += [f'packed{_of(pack.name)}: {counted(pack.rows, "row")}, {_tokens_of(pack)}' for pack in self.packed]
        lines += [
            f'held{_of(held.name)} by {held.stage}: {held.given:,} of its elements were given out' for held in self.held
        ]
        hosts = 'any number of hosts' if self.fits is None else counted(self.fits, 'host')
        if self.fits is None and self.held:
            hosts += ' that share rows, by pack(..., shard_options=)'
        alone = '' if self.host is None else f', of which only host {self.host}'
        return '\n'.join([*lines, f'fits {hosts}{alone} (saved on {self.saved_on})'])


def _of(name: str) -> str:
    return f' of {name}' if name else ''


def _tokens_of(pack: PackedState) -> str:
    if pack.tokens is not None:
        return f'with {" and ".join(f"{count:,}" for count in pack.tokens)} tokens'
    if pack.planned:
        return 'planned, of which iterator.indices(steps) tells documents and tokens'
    return 'whose tokens the state does not tell'


@answering()
def describe_state(state: Mapping[str, Any]) -> StateDescription:
    """Describe a state: what of each source was taken, what is held, and which hosts the state fits. Reads no data.

    ::

        description = granular.describe_state(iterator.state_dict())
        print(description)
        print({source.name: source.elements for source in description.sources})

    Elements of a mix before a shuffle are counted by looking up those of the last epoch, about two million a second.

    Args:
      state: from ``state_dict`` or ``load_state``; or that of a DataLoader, such as
        ``StatefulDataLoader`` of torchdata, that has one of granular.

    Raises:
      StateError: if it is not a state, or one of granular 0.21 or from between the epochs of an ``IterableDataset`` of
        torch, which do not have sources; or it has those of several worker processes, each of which is described
        alone.
    """
    check_plain(state)
    found = list(_states_in(state))
    if len(found) != 1:
        what = 'is not one of granular'
        if found:
            first, second = (path for path, _ in found[:2])
            length = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
            place = ''.join(f'[{key!r}]' for key in first[: length + 1])
            what = f'has the states of {len(found)} worker processes: describe each, such as state{place}'
        if isinstance(state, Mapping) and set(state) == {'version', 'epoch'}:  # of an IterableDataset of torch
            what = f'is from before the first element of epoch {state["epoch"]!r:.50}, and has no sources'
        raise StateError(f'expected a state, as from state_dict(), but this {what}: {state!r:.200}')
    _, own = found[0]
    check_version(own)
    walk = _Walk()
    try:
        if 'step' in own:
            walk.loader(own)
        else:
            walk.stage(own['stages'], own['state'])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise StateError(f'not a state of a pipeline: {type(error).__name__}: {error}') from error
    return walk.description()


def _states_in(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Yield the states of pipelines in one that contains them, each with the keys that lead to it."""
    if isinstance(state, Mapping):
        if 'version' in state and ('state' in state or 'step' in state):
            yield path, state
            return
        found = [pair for key, part in state.items() for pair in _states_in(part, (*path, key))]
        if 'fetcher_state' in state and all(own == found[0][1] for _, own in found):
            del found[1:]  # StatefulDataLoader has the state of its dataset beside the same one of the iterator
        yield from found
    elif isinstance(state, list | tuple):
        for i, part in enumerate(state):
            yield from _states_in(part, (*path, i))


class _Later(NamedTuple):
    """The stages behind one, as far as they decide which numbers of hosts a position before them fits."""

    holds: bool = False
    in_step: bool = True  # False if hosts do not advance equally through one of them
    rows: int | None = None  # hosts that share the rows of a pack, for which all read the same; None without a pack


_NONE: Final = _Later()


class _Walk:
    """A walk over the stages of a state, from the last one to the sources."""

    def __init__(self) -> None:
        self._sources: list[SourceState] = []
        self._packed: list[PackedState] = []
        self._held: list[HeldState] = []
        self._hosts = {1}
        self._binds = False  # True if a position fits no other number of hosts
        self._names: set[int] = set()  # of hosts whose state is their own

    def description(self) -> StateDescription:
        hosts = max(self._hosts)
        host = next(iter(self._names)) if self._names and hosts > 1 else None
        fits = hosts if self._binds else None
        return StateDescription(tuple(self._sources), tuple(self._packed), tuple(self._held), hosts, fits, host)

    def loader(self, state: Mapping[str, Any]) -> None:
        step, size, length = number_of(state, 'step'), state['round'], state.get('length')

        def taken(outline: Mapping[str, Any]) -> list[int | None]:
            if length is None or length % size == 0:
                return taken_of(outline, 0, step)
            # The datapoints at the end of each epoch that fill no round were left out.
            used, epoch = length - length % size, step // length
            parts = [taken_of(outline, i * length, i * length + used) for i in range(epoch)]
            return _sum([*parts, taken_of(outline, epoch * length, step)])

        self._add(state['stages'], '', taken)

    def stage(
        self, outline: Mapping[str, Any], state: Any, name: str = '', epochs: int | None = 0, later: _Later = _NONE
    ) -> None:
        """Describe a stage and those before it, of which so many whole epochs were taken before; None for unknown."""
        uneven = isinstance(state, Mapping) and 'uneven' in state
        if uneven or outline.get('drops', 'read' in outline):
            later = later._replace(in_step=False)
        if 'read' in outline:
            self._read(outline, self._at(state, later), name, epochs)
        elif outline.get('names'):
            for label, part in state['parents'].items():
                self.stage(part['stages'], part['state'], f'{name}/{label}' if name else label, epochs and None, later)
        elif not outline.get('of'):
            self._at(state, later)
            self._sources.append(SourceState(name or outline['stage'], outline['stage'], None, None))
        elif 'parents' in state:
            for i, (part, own) in enumerate(zip(outline['of'], state['parents'], strict=True)):
                self.stage(part, own, f'{name}/{i}' if name else str(i), epochs and None, later)
        else:
            later = self._hold(outline['stage'], state, name, later)
            later = later._replace(in_step=later.in_step and not outline.get('apart'))
            if outline['stage'].startswith('limit('):
                epochs = epochs and None
            elif 'epoch' in state:
                epochs = None if epochs else state['epoch']
            self.stage(outline['of'][0], state['parent'], name, epochs, later)

    def _hold(self, stage: str, state: Mapping[str, Any], name: str, later: _Later) -> _Later:
        """Describe what a stage holds, or has packed. Return it with the stages behind it."""
        given = state.get('place', 0)
        if 'rows' in state:
            row, values = self._at(state['row'], later), state.get('values', ())
            self._packed.append(PackedState(name, row, tuple(values[1:]) if values and values[0] == row else None))
            given = row - state['rows'] + any(state['offsets'])
            later = later._replace(rows=_hosts_of(state['row']))
        if given:
            self._held.append(HeldState(name, stage, given))
        return later._replace(holds=later.holds or given > 0)

    def _at(self, state: Any, later: _Later) -> Any:
        """Return a position in the turns of hosts; note which numbers of hosts it fits, given the stages behind it."""
        hosts, host = _hosts_of(state), _host_of(state)
        self._hosts.add(hosts * (later.rows or 1))
        if host is not None and not later.in_step:
            self._names.add(host)
            self._binds = True
        elif later.holds and (hosts > 1 or later.rows is None):
            self._binds = True
        return state['at'] if isinstance(state, Mapping) and 'at' in state else state

    def _read(self, outline: Mapping[str, Any], at: int, name: str, epochs: int | None) -> None:
        length: int | None = outline['length']
        if outline.get('whole') and length is not None:  # the last elements, which fill no round, were left out
            length -= length % max(self._hosts)
            at = min(at, length)

        def taken(outline: Mapping[str, Any]) -> list[int | None]:
            counts = taken_of(outline, 0, int(at))
            if not epochs and epochs is not None:
                return counts
            if epochs is None or length is None:
                return [None for _ in counts]
            whole = [None if count is None else count * epochs for count in taken_of(outline, 0, length)]
            return _sum([whole, counts])

        self._add(outline['read'], name, taken)

    def _add(
        self, outline: Mapping[str, Any], name: str, taken: Callable[[Mapping[str, Any]], Sequence[int | None]]
    ) -> None:
        """Add the sources and planned rows of a dataset, given a function that counts what was taken of each."""
        for (own, leaf), elements in zip(sources_of(outline, name), taken(outline), strict=True):
            self._sources.append(SourceState(own, leaf['source'], elements, leaf['length']))
        rows = _up_to_packs(outline)
        for (own, leaf), count in zip(sources_of(rows, name), taken(rows), strict=True):
            if _is_pack(leaf['source']) and count is not None:
                self._packed.append(PackedState('' if own == leaf['source'] else own, count, None, planned=True))


def _hosts_of(state: Any) -> int:
    """Return the number of hosts that share a position, or the streams of an interleave."""
    return state['hosts'] if isinstance(state, Mapping) and type(state.get('hosts')) is int else 1


def _host_of(state: Any) -> int | None:
    """Return the number of the host that a position names, or one in the streams of an interleave; None for none."""
    if not isinstance(state, Mapping) or 'host' in state:
        return state['host'] if isinstance(state, Mapping) else None
    parents = state.get('parents', ())
    below = [state.get('parent'), state.get('state'), *(parents.values() if isinstance(parents, Mapping) else parents)]
    return next((host for host in map(_host_of, below) if host is not None), None)


def _up_to_packs(outline: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an outline in which planned rows are sources."""
    if 'of' not in outline:
        return outline
    if _is_pack(outline['stage']):
        return {'source': outline['stage'], 'length': outline['length'], 'elements': outline['length']}
    return {**outline, 'of': [_up_to_packs(part) for part in outline['of']]}


def _is_pack(stage: str) -> bool:
    return stage.startswith('pack(')


def _sum(parts: Iterable[Sequence[int | None]]) -> list[int | None]:
    return [None if None in column else sum(filter(None, column)) for column in zip(*parts, strict=True)]
