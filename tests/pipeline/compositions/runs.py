"""Running a composition: its elements with the state before each of them, and what a state is continued with."""

import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from granular.errors import StateError
from tests.pipeline.compositions.atoms import atoms

MOST: Final = 100  # elements that are looked at, as some compositions have no end
ALL: Final = 1000  # where all of them are needed


@dataclasses.dataclass
class Run:
    """The elements of a pipeline, from a state or the beginning on.

    Attributes:
      elements: the elements, up to some number.
      states: the state before each of them, and behind the last one.
      ended: True if there are no others.
    """

    elements: list[Any]
    states: list[Any]
    ended: bool

    def names(self, stop: int | None = None) -> list[int]:
        """Return the atoms of the first elements."""
        return [name for element in self.elements[:stop] for name in atoms(element)]


@dataclasses.dataclass
class Refused:
    """A state that was refused.

    Attributes:
      stage: the stage that the error names first; None if it names none.
      error: the error.
      late: True if elements were given out before.
    """

    stage: str | None
    error: StateError
    late: bool = False


def run(dataset: Any, most: int = MOST) -> Run:
    """Run a pipeline from its beginning."""
    with iter(dataset) as iterator:
        return _taken(iterator, Run([], [], False), most)


def continued(dataset: Any, state: Any, most: int = MOST, used: int = 0) -> Run | Refused:
    """Continue from a state, or return how it is refused.

    Args:
      dataset: the pipeline.
      state: the state.
      most: number of elements to take, unless it ends before.
      used: number of elements that the iterator has given out before it is set to the state.
    """
    part = Run([], [], False)
    with iter(dataset) as iterator:
        list(itertools.islice(iterator, used))
        try:
            iterator.set_state(through_json(state))
            return _taken(iterator, part, most)
        except StateError as error:
            return Refused(stage_in(str(error), str(dataset)), error, bool(part.elements))


def _taken(iterator: Any, part: Run, most: int) -> Run:
    part.states.append(iterator.get_state())
    for element in itertools.islice(iterator, most):
        part.elements.append(element)
        part.states.append(iterator.get_state())
    part.ended = len(part.elements) < most
    if part.ended and (more := list(itertools.islice(iterator, 1))):
        raise AssertionError(f'the stream goes on behind its end, with {more}')
    return part


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


def stage_in(message: str, pipeline: str) -> str | None:
    """Return the stage of a printed pipeline that a message names first."""
    stages = {match[1] for line in pipeline.splitlines() if (match := re.match(r'\s*([A-Za-z_]\w*)', line))}
    return next((word for word in re.findall(r'[A-Za-z_]\w*', message) if word in stages), None)


def counted(parts: Sequence[Sequence[int]]) -> Counter[int]:
    return Counter(itertools.chain.from_iterable(parts))
