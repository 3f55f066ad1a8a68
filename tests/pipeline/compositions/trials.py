"""Trials: a composition is saved somewhere, built anew, restored, and compared with what it should have given out."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from granular import ReadOptions
from tests.pipeline.compositions.atoms import plain, read, stream_of
from tests.pipeline.compositions.generator import composition
from tests.pipeline.compositions.plans import Node, Setting
from tests.pipeline.compositions.rules import Draw
from tests.pipeline.compositions.runs import ALL, MOST, Refused, Run, continued, counted, run


@dataclasses.dataclass
class Result:
    """Result of a trial.

    Attributes:
      verdict: 'exact', 'refused' or 'wrong'.
      stage: the stage that a refusal names.
      checked: False if only duplicates were looked for, as the composition may drop elements.
      node: the pipeline.
      text: what was duplicated and lost.
    """

    verdict: str
    node: Node
    stage: str | None = None
    checked: bool = True
    text: str = ''


def place(draw: Draw, length: int) -> int:
    """Choose a place between elements: the beginning, the end, or anywhere."""
    return draw.one_of([0, length, *[draw.number(0, length)] * 6])


def same(seed: int, kind: str = 'same') -> Result:
    """Continue the same pipeline; for 'workers' with other processes, threads and read-ahead."""
    draw, node = composition(kind, seed)
    first, second = Setting(), Setting()
    if kind == 'workers':
        first, second = _any_workers(draw), _any_workers(draw)
    dataset = node.build(first)
    whole = run(dataset)
    at = place(draw, len(whole.elements))
    again = dataset if kind == 'same' and draw.maybe() else node.build(second)
    rest = continued(again, whole.states[at], used=draw.one_of([0, 0, 1, 5]))
    text = f'saved after {at} of {len(whole.elements)} elements: '
    if kind == 'workers':
        text = f'with {first}, restored with {second}, {text}'
    if isinstance(rest, Refused):
        return Result('wrong', node, text=f'{text}refused: {rest.error}')
    if without_lines(rest.states[0]['state']) != without_lines(whole.states[at]['state']):
        return Result('wrong', node, text=f'{text}the state is {rest.states[0]} once it is restored')
    following = whole.elements[at:]
    found = rest.elements if whole.ended else rest.elements[: len(following)]
    if plain(found) != plain(following):
        names = Counter(rest.names()), counted([whole.names()]) - counted([whole.names(at)])
        return Result('wrong', node, text=text + difference(*names))
    with iter(dataset) as iterator:
        if plain(list(itertools.islice(iterator, 1))) != plain(whole.elements[:1]):
            return Result('wrong', node, text='another iterator does not begin again')
    return Result('exact', node)


def without_lines(state: Any) -> Any:
    """Return a state without the lines of pipelines, with sizes of read-ahead, and what caches have read ahead."""
    if isinstance(state, dict):
        return {key: without_lines(value) for key, value in state.items() if key not in ('pipeline', 'cached')}
    return [without_lines(value) for value in state] if isinstance(state, list) else state


def _any_workers(draw: Draw) -> Setting:
    options = ReadOptions(draw.number(0, 3), draw.one_of([0, 1, 3, 100]))
    method = 'spawn' if draw.maybe(0.03) else 'fork'
    return Setting(read=options, prefetch=draw.number(0, 4), processes=draw.number(0, 2), method=method)


@dataclasses.dataclass(frozen=True)
class Host:
    """The part that one of several hosts runs.

    Attributes:
      setting: its part of the pipeline.
      source: the host of before from whose run the state comes.
      at: number of elements of that run before the state; None to begin.
    """

    setting: Setting
    source: int = 0
    at: int | None = None

    def run(self, node: Node, before: Sequence[Run]) -> Run | Refused:
        """Return the elements of a host, given the runs of all hosts before."""
        dataset = node.build(self.setting)
        return run(dataset, ALL) if self.at is None else continued(dataset, before[self.source].states[self.at], ALL)


Parts = Sequence[Run | Refused]


def hosts(seed: int) -> Result:
    """Continue with other numbers of hosts, once or twice, all of them in this process."""
    trial, node = host_trial(seed), composition('hosts', seed)[1]
    parts: Parts = []
    try:
        together = next(trial)
        while True:
            parts = [host.run(node, [part for part in parts if isinstance(part, Run)]) for host in together]
            together = trial.send(parts)
    except StopIteration as ended:
        result: Result = ended.value
        return result


def host_trial(seed: int, counts: Sequence[int] = ()) -> Generator[list[Host], Parts, Result]:
    """Yield the hosts that run together, and take what they ran; each takes equally many elements before a save.

    Args:
      seed: number of the composition.
      counts: numbers of hosts, one after another; drawn by default.
    """
    draw, node = composition('hosts', seed)
    count, batch = draw.number(1, 4), 2
    rounds = counts[1:] or [0] * draw.one_of([1, 1, 2, 2, 3])
    count = counts[0] if counts else count
    parts = yield [Host(Setting(host=host, hosts=count)) for host in range(count)]
    runs = [part for part in parts if isinstance(part, Run)]
    expected = counted([part.names() for part in runs])
    checked = not node.loses and all(part.ended for part in runs)
    given: Counter[int] = Counter()
    text = f'{count} hosts'
    for chosen in rounds:
        at = place(draw, min(len(part.elements) for part in runs))
        given += counted([part.names(at) for part in runs])
        before = count
        count, batch = draw.one_of([count, *(other for other in range(1, 5) if other != count)]), draw.number(1, 4)
        count = chosen or count
        text += f', saved after {at} elements each, {count} hosts with batches of {batch}'
        parts = yield [Host(Setting(host=host, hosts=count, batch=batch), host % before, at) for host in range(count)]
        for part in parts:
            if isinstance(part, Refused):
                result = refused(node, part, text)
                if count == before:
                    return dataclasses.replace(result, verdict='wrong', text=f'{text}: refused: {part.error}')
                return result
        runs = [part for part in parts if isinstance(part, Run)]
    given += counted([part.names() for part in runs])
    if checked and given != expected:  # unless how the work is divided decides which elements there are
        checked = counted([run(node.build(Setting()), ALL).names()]) == expected
    if checked and given != expected:
        return Result('wrong', node, text=f'{text}: {difference(given, expected)}')
    if not checked and _more(given, expected):  # unless hosts that divide it differently see more of it
        expected |= Sequences(node, given.total()).most()
        if twice := _more(given, expected):
            return Result('wrong', node, text=f'{text}: duplicated {shown(twice)}')
    return Result('exact', node, checked=checked)


def weights(seed: int) -> Result:
    """Continue a mix by name with other weights, once or twice: each stream goes on where it stood."""
    # Elements that are not looked at may be those that a window or a pack still holds, which depends on their number.
    for most in (MOST, ALL, ALL + 14, ALL + 28):
        result = _weights(seed, most)
        if result.verdict != 'wrong':
            break
    return result


def _weights(seed: int, most: int) -> Result:
    draw, node = composition('weights', seed)
    part, text = run(node.build(Setting()), most), 'weights 0'
    before: list[int] = []
    for number in (1, 2)[: draw.one_of([1, 1, 2])]:
        at = place(draw, min(MOST, len(part.elements)))
        before += part.names(at)
        text += f', saved after {at} elements, weights {number}'
        following = continued(node.build(Setting(weights=number)), part.states[at], most)
        if isinstance(following, Refused):
            return refused(node, following, text)
        part = following
    given = before + part.names()
    sequences = Sequences(node)
    faults, checked = sequences.faults(given), True
    if faults:  # which the end of a stream that is joined with others may hide
        sequences = Sequences(node, len(given))
        faults = sequences.faults(given)
    if faults:  # unless the end of the stream is dropped, or comes from a window that is not complete
        uninterrupted = [run(node.build(Setting(weights=number)), most).names() for number in range(3)]
        checked = draw.exact and not any(map(sequences.faults, uninterrupted))
        if not checked:
            expected = sequences.most()
            for names in uninterrupted:
                expected |= Counter(names)
            faults = f'duplicated {shown(twice)}' if (twice := _more(Counter(given), expected)) else ''
    if faults:
        return Result('wrong', node, text=f'{text}: {faults}')
    return Result('exact', node, checked=checked)


def _more(given: Counter[int], expected: Counter[int]) -> Counter[int]:
    """Return what was given out more often than any pipeline gives it out, which may have dropped its end."""
    most = max(expected.values(), default=1)
    return given - Counter({name: expected[name] or most for name in given})


class Sequences:
    """The atoms of the streams of a mix by name, each in the order in which the mix takes them.

    Args:
      node: the pipeline.
      atoms: number of atoms up to which each stream is run to its own end, which takes longer; 0 not to do so.
    """

    def __init__(self, node: Node, atoms: int = 0) -> None:
        self._node = node
        alone: dict[tuple[frozenset[str], int | None], list[int]] = {}
        self._sequences: dict[int, list[int]] = {}
        for leaf, tracks in node.leaves:
            key = tracks, leaf if atoms else None
            if key not in alone:
                dataset = node.build(Setting(tracks=tracks, unmixed=True, leaf=key[1]))
                alone[key] = run(dataset, 3 * max(MOST, atoms)).names()
            self._sequences[leaf] = [name for name in alone[key] if stream_of(name) == leaf]

    def most(self) -> Counter[int]:
        """Return how often each atom may be given out."""
        counts = Counter(itertools.chain.from_iterable(self._sequences.values()))
        return Counter({name: count * self._node.epochs for name, count in counts.items()})

    def faults(self, given: Iterable[int]) -> str:
        """Return how atoms that were given out are no beginning of each sequence; '' if they are."""
        counts = Counter(given)
        faults = []
        for leaf, sequence in self._sequences.items():
            own = Counter({name: count for name, count in counts.items() if stream_of(name) == leaf})
            if not _is_sum(own, sequence, self._node.epochs):
                # Equal epochs are what it comes to, or nearly.
                each, over = divmod(own.total(), self._node.epochs)
                expected = counted([sequence[: each + (epoch < over)] for epoch in range(self._node.epochs)])
                faults.append(f'stream {leaf}: {difference(own, expected)}')
        return '; '.join(faults)


def _is_sum(given: Counter[int], sequence: list[int], epochs: int) -> bool:
    """Return whether atoms are those of several epochs, each a beginning of a sequence."""
    if epochs == 1:
        return given == Counter(sequence[: given.total()])
    if len(set(sequence)) == len(sequence):
        numbers = [given[name] for name in sequence]
        whole = sum(numbers) == given.total()
        return whole and sorted(numbers, reverse=True) == numbers and max(numbers, default=0) <= epochs
    for stop in range(len(sequence) + 1):
        first = Counter(sequence[:stop])
        if first <= given and _is_sum(given - first, sequence[:stop], epochs - 1):
            return True
    return False


def refused(node: Node, refused: Refused, text: str) -> Result:
    if refused.late:
        return Result('wrong', node, text=f'{text}: refused behind some elements: {refused.error}')
    if refused.stage is None:
        return Result('wrong', node, text=f'{text}: refused without a stage: {refused.error}')
    return Result('refused', node, refused.stage)


def difference(given: Counter[int], expected: Counter[int]) -> str:
    twice, lost = given - expected, expected - given
    if not twice and not lost:
        return 'the same atoms in another order, or with other values'
    return f'duplicated {shown(twice)}, lost {shown(lost)}'


def shown(counts: Counter[int]) -> str:
    texts = [f'{read(name)}{f" x {count}" if count > 1 else ""}' for name, count in sorted(counts.items())]
    return f'{counts.total()} ({", ".join(texts[:6])}{", ..." if len(texts) > 6 else ""})' if texts else 'none'


def workers(seed: int) -> Result:
    return same(seed, 'workers')
