"""States of iterators: each is restored, and compared with the elements that follow."""

import itertools
import json
from typing import Any


def plain(element: Any) -> Any:
    """Return an element without numpy, as JSON has it."""
    if isinstance(element, dict):
        return {key: plain(value) for key, value in element.items()}
    if isinstance(element, list | tuple):
        return [plain(value) for value in element]
    return element.tolist() if hasattr(element, 'tolist') else element


def check_each_state(iterator: Any, most: int | None = None) -> tuple[list[Any], list[Any]]:
    """Restore the state before each element, forwards and backwards, and compare the next elements.

    Args:
      iterator: an iterator at its start.
      most: how many elements are compared; None for all.

    Returns:
      The elements, as plain values, and the states.
    """
    states, elements = [iterator.get_state()], []
    for element in iterator:
        elements.append(plain(element))
        states.append(json.loads(json.dumps(iterator.get_state())))
    for at in [*range(len(states)), *range(len(states) - 1, -1, -1)]:
        iterator.set_state(states[at])
        assert iterator.get_state() == states[at]
        rest = [plain(element) for element in itertools.islice(iterator, most)]
        assert rest == elements[at : None if most is None else at + most], at
    return elements, states
