"""The functions of the compositions. They pickle, have stable names, and lose no atom.

Saved states depend on them: functions may be added, but never changed.
"""

import zlib
from typing import Any

import numpy as np

from tests.pipeline.compositions.atoms import MARKS, atoms, divided, document, values

_WIDTH = 128


def marked(element: Any, mark: int) -> Any:
    """Return an element whose marks depend on their former values and on a number."""
    if element is None:  # what a filter of a MapDataset left in a tuple
        return None
    if isinstance(element, dict):
        keys = [key for key in ('tokens', 'ids') if key in element]
        return {**element, **{key: marked(element[key], mark) for key in keys}}
    if isinstance(element, list | tuple):
        return type(element)(marked(part, mark) for part in element)
    if isinstance(element, np.ndarray) and element.dtype == object:
        return np.array([marked(part, mark) for part in element], object)
    names, marks = element // MARKS, element % MARKS
    values = names * MARKS + (marks * 31 + mark) % MARKS
    return np.where(element > 0, values, element) if isinstance(element, np.ndarray) else values


def keep(element: Any) -> Any:
    return marked(element, 1)


def with_index(index: int, element: Any) -> Any:
    return marked(element, int(index) + 2)


def at_random(element: Any, rng: np.random.Generator) -> Any:
    return marked(element, int(rng.integers(MARKS)))


def is_kept(element: Any) -> bool:
    """Drop about a quarter of the elements, by their first atom."""
    return element_number(element) % 4 != 1


def any_element(element: Any) -> bool:
    return True


def element_number(element: Any) -> int:
    """Return a number that depends on the name of an element's first atom only."""
    names = atoms(element)
    return zlib.crc32(names[0].to_bytes(8, 'little')) % 1013 if names else 0


def parts(element: Any) -> list[Any]:
    """Return one to four parts of an element, which together are all of it."""
    if isinstance(element, int | np.integer):
        return divided(int(element), 1 + element_number(element) % 4)
    if isinstance(element, dict) and 'tokens_positions' not in element:
        tokens = element['tokens'].tolist()
        half = (len(tokens) + 1) // 2
        return [document(part) for part in (tokens[:half], tokens[half:]) if part]
    return [element]


def singles(element: Any) -> list[int]:
    """Return the atoms of an element, one by one, with marks of 0."""
    return [name * MARKS for name in atoms(element)]


def as_document(element: Any) -> dict[str, Any]:
    return document([name * MARKS for name in atoms(element)] or [0])


class Failed(ValueError):
    """The error of a datapoint that cannot be computed."""


def fails_for_some(element: Any) -> Any:
    if element_number(element) % 5 == 2:
        raise Failed(f'element {element_number(element)}')
    return element


def as_datapoint(element: Any) -> dict[str, Any]:
    """Return an element as a Loader takes it: a dict of arrays of fixed shapes."""
    return {'tokens': np.int64(element)}


def with_seed(datapoint: Any, seed: Any) -> Any:
    return marked(datapoint, int(np.random.default_rng(seed).integers(MARKS)))


def replaced(index: int, error: Exception) -> Any:
    """Give out nothing for a datapoint that failed: a policy for errors."""
    return None


def is_something(element: Any) -> bool:
    """Drop what a filter of a MapDataset left."""
    return element is not None


def as_row(element: Any) -> dict[str, Any]:
    """Return an element as a Loader and JAX take it: its first atoms, in an array of a fixed shape."""
    row = np.zeros(_WIDTH, np.int64)
    named = list(values(element))[:_WIDTH]
    row[: len(named)] = named
    return {'row': row.view(np.int32)}  # JAX has no integers of 64 bits by default


def as_row_with_seed(element: Any, seed: Any) -> dict[str, Any]:
    return as_row(with_seed(element, seed))


def as_it_is(element: Any) -> Any:
    """A function for torch's DataLoader to make batches by, which leaves them lists."""
    return element
