"""The slow tests, which `make test` leaves to `make test-slow`.

``tests/slow.txt`` names their functions: those that took longest in a whole run, until the others took ``REST``
seconds. `make slow-list` writes it anew.
"""

import collections
import pathlib
from collections.abc import Iterable, Mapping
from typing import Final

LIST: Final = pathlib.Path(__file__).parents[1] / 'slow.txt'
REST: Final = 600.0  # seconds of all processes together


def function_of(nodeid: str) -> str:
    """Return the file and the function of a test, without its parameters."""
    return nodeid.partition('[')[0]


def listed() -> frozenset[str]:
    return frozenset(LIST.read_text().split())


def slowest(seconds: Iterable[tuple[str, float]]) -> list[str]:
    """Return the functions of the tests that took longest, of pairs of a test and its seconds, sorted by name."""
    totals: Mapping[str, float] = collections.Counter()
    for nodeid, duration in seconds:
        totals[function_of(nodeid)] += duration
    rest, chosen = sum(totals.values()), []
    for function, duration in sorted(totals.items(), key=lambda item: -item[1]):
        if rest <= REST:
            break
        chosen.append(function)
        rest -= duration
    return sorted(chosen)
