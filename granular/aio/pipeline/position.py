"""Positions: where a pipeline stands, how hosts take turns over its elements, and what a state fits.

The state of a stage is plain JSON: the position of the stages before it, and what the stage itself counts. A stage that
holds elements back saves them by reference: the position before them, and how many were read from there on
(``streams/held.py``). ``docs/states.md`` describes the states for users, with a table of ``FITS``.
"""

import contextvars
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from granular._support.indexing import Ints
from granular._support.text import AT_EPOCH, counted
from granular.aio.pipeline.changes import Grown
from granular.aio.pipeline.lines import Applied, Line
from granular.aio.pipeline.nodes.patterns import Shares
from granular.aio.pipeline.shards import ShardOptions
from granular.errors import StateError

VERSION: Final = 5
"""The version of the states that are saved, and the only one that is read."""


def check_version(state: Mapping[str, Any]) -> None:
    """Raise ``StateError`` if another release saved the state, in another form."""
    if (version := state.get('version')) != VERSION or type(version) is not int:
        raise StateError(
            f'the state has version {version!r:.100}, this release reads version {VERSION}: continue with the release '
            f'that saved it, or {AT_EPOCH}'
        )


EARLIER: Final = 'load an earlier state'
_DEEPEST: Final = 200
_LARGEST: Final = 1 << 1024


def check_plain(state: Any, name: str = 'the state') -> None:
    """Raise ``StateError`` for a state that is nested deeper than any, or holds an integer too long to be shown."""
    values = [state]
    for _ in range(_DEEPEST):
        for value in values:
            if type(value) is int and abs(value) >= _LARGEST:
                raise StateError(f'{name} holds an integer of {value.bit_length()} bits, as no state does: {EARLIER}')
        values = [part for value in values for part in _parts_of(value)]
        if not values:
            return
    raise StateError(f'{name} is nested more than {_DEEPEST} levels deep, as no state is: {EARLIER}')


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return (*value.keys(), *value.values())
    return value if isinstance(value, list | tuple) else ()


def of_former(change: Grown, was: Line | None) -> str:
    """Return how to continue with a source that has grown where no epoch ends."""
    length = change.elements if was is None else was.arguments['elements']
    return (
        f'copy the former datapoints by granular.rewrite(..., keep=range({length})), declare Moved, and mix the new '
        f'ones as a stream of another name, which is Added'
    )


def kind_of_state(state: Any) -> str:
    """Describe what was given in place of a state, for an error: its kind, or its keys."""
    if not isinstance(state, Mapping):
        return f'{state!r:.100}'
    if type(state.get('step')) is int:
        return f'the state of a Loader at step {state["step"]}'
    return 'the state of a stream' if 'state' in state else f'a dict with the keys {sorted(map(str, state))!s:.200}'


_OF_INTERLEAVE: Final = {'open', 'turn', 'begun', 'parents'}
_VARYING: Final[Mapping[str, type]] = {
    'pipeline': list, 'stages': dict, 'version': int, 'round': int, 'values': list, 'host': int, 'waiting': list,
}  # fmt: skip


def same_position(one: Any, other: Any, reread: bool = False) -> bool:
    """Return whether two states, as plain JSON, are of one position.

    Their pipelines may be described differently, as they may have other paths on another machine; so may the number of
    the host, what a cache has read beyond its place, and the bytes of files that follow. One of them may not know yet
    how many hosts there are, the bytes of its files, or the documents of a pack. Hosts that share rows may stand in
    different packs. If they are ``reread``, equally many elements
    behind one position, streams of an ``interleave`` may have begun in one of them that wait in the other, as they have
    given no element.
    """
    same = partial(same_position, reread=reread)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if _shares_rows(one) and _shares_rows(other) and one.get('rows') != other.get('rows'):
            return same(one['row'], other['row'])
        left, right = _compared(one), _compared(other)
        if _reads_beyond(one) or _reads_beyond(other):
            left.pop('cached', None)
            right.pop('cached', None)
        for key in ('hosts', 'bytes', 'next_bytes', 'mixes', 'documents', 'streams'):
            if not (key in left and key in right) or key == 'next_bytes':
                left.pop(key, None)
                right.pop(key, None)
        if reread and left.keys() & right.keys() >= _OF_INTERLEAVE:
            begun = left['parents'].keys() & right['parents'].keys()
            for part in (left, right):
                part.pop('streams', None)
                part['parents'] = {number: part['parents'][number] for number in begun}
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _compared(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not isinstance(value, _VARYING.get(key, ()))}


def _shares_rows(state: Mapping[str, Any]) -> bool:
    row = state.get('row')
    return isinstance(row, Mapping) and row.get('hosts') not in (None, 1)


def _reads_beyond(state: Mapping[str, Any]) -> bool:
    cached = state.get('cached')
    return isinstance(cached, Mapping) and (cached.get('count') != state.get('place') or bool(cached.get('ended')))


class Fit(NamedTuple):
    """Conditions of the states of a stage, besides the same pipeline. All fit other prefetches, threads and workers."""

    # True if all hosts have taken equally many elements of the stages before it when they have returned equally many,
    # so that the state of one host is that of all.
    in_step: bool = True
    holds: str = ''  # what the stage may hold back, which another number of hosts would divide differently
    weights: bool = True  # True if the stages before it may continue with other weights and streams of a mix by name
    remedy: str = ''  # how to shard or save so that states fit another number of hosts


_CHOOSE: Final = 'keep dropped elements by allow_nones=True, or choose the others beforehand by slice(indices)'
FITS: Final[dict[str, Fit]] = {
    'to_iter_dataset': Fit(),
    'to_iter_dataset, elements dropped': Fit(in_step=False, remedy=_CHOOSE),
    'to_iter_dataset, on_error': Fit(in_step=False, remedy='choose the elements that do not fail by slice(indices)'),
    'map': Fit(),
    'filter': Fit(in_step=False, remedy=_CHOOSE),
    'window_shuffle, shards of unequal length': Fit(in_step=False, remedy='shard with drop_remainder=True'),
    'repeat, shards of unequal length': Fit(in_step=False, remedy='shard with drop_remainder=True'),
    'interleave, shards of unequal length': Fit(in_step=False, remedy='shard with drop_remainder=True'),
}
"""Hosts and weights that the states of a stage fit, by its ``kind``; its class adds its ``fit``. Others fit all."""


class RestoreRules(NamedTuple):
    """The rules under which stages continue from a state, because a later stage needs the elements that follow."""

    stage: str = ''  # the description of the later stage, for errors; '' if there are no rules
    kind: str = ''  # its name in ``FITS``
    held: bool = False  # True if it holds elements, so that no other number of hosts may read them again
    in_step: bool = True  # False if the state of each host is its own
    # Continue with the weights of this pipeline, read again with those of the state, or refuse other ones.
    weights: Literal['own', 'saved', 'same'] = 'own'
    # Those that are declared; None where a pipeline restores a state of its own.
    changes: tuple[Any, ...] | None = None
    applied: tuple[Applied, ...] = ()  # those that were made since the state was saved

    def of(self, stage: str, kind: str, held: bool) -> 'RestoreRules':
        """Return these rules, and those of a stage before the later one."""
        fit = FITS[kind]
        weights: Literal['own', 'saved', 'same'] = 'saved' if held else self.weights
        if not fit.weights or self.weights == 'same':
            weights = 'same'
        rules = self._replace(in_step=self.in_step and fit.in_step, weights=weights)
        if held or not (fit.in_step or self.held):  # errors name this stage
            rules = rules._replace(stage=stage, kind=kind, held=held)
        return rules

    def later(self) -> 'RestoreRules':
        """Return the rules under which a stage restores states that this pipeline has saved itself."""
        return self._replace(applied=())

    def check_held(self, *kinds: type[Any]) -> None:
        """Raise ``StateError`` for changes of some kinds, if a later stage holds elements that they concern."""
        for change, was, now in self.applied if self.held else ():
            if isinstance(change, kinds):
                before, after = (repr('nothing' if line is None else line.text) for line in (was, now))
                remedy = f', or {of_former(change, was)}' if isinstance(change, Grown) else ''
                raise StateError(
                    f'{self.stage}: it holds {FITS[self.kind].holds} back, which must be read again as before, and '
                    f'{change!r} is declared, {after} in place of {before}: load a state where it holds none'
                    f'{remedy}'
                )

    def check_hosts(self, saved: int | None, own: int) -> None:
        """Raise ``StateError`` if the rules exclude a state of ``saved`` hosts, None if it names none, on ``own``."""
        hosts = saved or 1
        if hosts != own and (self.held or (hosts > 1 and not self.in_step)):
            fit = FITS[self.kind]
            later = 'as many hosts as before, each from its own state' if hosts > 1 else 'one host'
            reason = f'it holds {fit.holds} back' if self.held else 'hosts do not advance equally through it'
            raise StateError(
                f'{self.stage}: the state was saved on {counted(hosts, "host")}, this pipeline has {own}, and '
                f'{reason}: continue on {later}; for states that fit any number, {fit.remedy}'
            )


FREE: Final = RestoreRules()
restoring: Final[contextvars.ContextVar[RestoreRules]] = contextvars.ContextVar('restoring', default=FREE)
"""The rules under which an iterator of the user's restores the streams that it reads."""


class Turns:
    """Hosts that take turns over the elements of a whole: in each round, one element each, or one batch.

    A position is the number of elements that all hosts have taken; from there on they take turns, however many they
    are. So it is the same on all hosts after the same number of rounds, and fits any number of them.
    """

    def __init__(self, index: int, count: int, unit: int = 1, whole: bool = False) -> None:
        self.index, self.count = index, count  # the number of this host, and of all
        self.unit = unit  # elements that a host takes in its turn
        self.whole = whole  # True to end before a round that is not complete, so that all hosts take equally many
        self.stride: int = unit * count  # elements of a round
        self.offset: int = unit * index  # elements of a round before those of this host

    @classmethod
    def of(cls, shard: ShardOptions) -> 'Turns':
        """Return the turns of the shards of a stream."""
        return cls(shard.shard_index, shard.shard_count, 1, shard.drop_remainder)

    def taken(self, rounds: Ints) -> Ints:
        """Return the first element of this host in rounds, given the position that each begins at."""
        return rounds + self.offset

    def stop(self, start: int, length: int) -> int:
        """Return the position at which this host ends, if hosts take turns from another one on."""
        if self.whole:
            return start + max(0, length - start) // self.stride * self.stride
        return max(start, length - self.offset)

    def rounds(self, start: int, length: int) -> int:
        """Return the number of rounds in which this host takes something, from a position on."""
        return max(0, -(-(self.stop(start, length) - start) // self.stride))

    def even(self, length: int) -> bool:
        """Return whether all hosts take equally many elements of a whole."""
        return self.whole or length % self.stride == 0

    def state(self, at: Any, own: bool) -> Any:
        """Return the state of a position, with the number of hosts if there are several, and with ``own`` this one."""
        if self.count == 1:
            return at
        return {'at': at, 'hosts': self.count, **({'host': self.index} if own else {})}

    def at(self, state: Any, rules: RestoreRules) -> Any:
        """Return the position of a state; raise ``StateError`` if the rules exclude its host, or number of hosts."""
        if not isinstance(state, Mapping) or 'at' not in state:
            hosts, host, at = None, None, state
        else:
            hosts, host, at = state.get('hosts', 1), state.get('host'), state['at']
            if type(hosts) is not int or hosts < 1 or not (host is None or type(host) is int):
                raise StateError(f'expected the position of one of several hosts, got {state!r:.200}')
        rules.check_hosts(hosts, self.count)
        if hosts == self.count and host not in (None, self.index) and not rules.in_step:
            raise StateError(
                f'{rules.stage}: the state is of host {host} of {hosts}, this is host {self.index}: hosts do not '
                f'advance equally through this stage: load the state of this host'
            )
        return at


class EvenTurns(Turns):
    """Turns in which each host gets its share of every dataset of a mix; see ``Shares``.

    Args:
      shares: those of this host; their pattern is that of the whole.
      length: number of elements. In a last round that is not complete, hosts take turns in their order.
    """

    def __init__(self, index: int, count: int, whole: bool, shares: Shares, length: int) -> None:
        super().__init__(index, count, whole=whole)
        self._shares, self._length = shares, length

    def taken(self, rounds: Ints) -> Ints:
        complete = rounds <= self._length - self.stride
        taken = super().taken(rounds)
        taken[complete] = self._shares.taken(rounds[complete])
        return taken
