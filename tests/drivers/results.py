"""Results of cases: a program writes them to a file as they come, and the tests read those of all ranks."""

import dataclasses
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from granular.errors import GranularError

Epochs = list[list[int]]
"""The ids that one rank saw, of each epoch."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One training, or one training that was stopped and resumed."""

    driver: str
    kind: str
    workers: int
    scenario: str


@dataclasses.dataclass(frozen=True)
class Result:
    """The elements that one rank saw in a case."""

    case: Case
    seen: Epochs = dataclasses.field(default_factory=list)
    expected: Epochs = dataclasses.field(default_factory=list)
    refused: str = ''
    error: str = ''


class Recorder:
    """Runs cases of this rank, and writes the result of each at once: a program that hangs leaves those before it."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder) / f'rank{rank}.jsonl'

    def run(self, case: Case, function: Callable[[], tuple[Epochs, Epochs]]) -> Epochs | None:
        """Run a case, whose function returns what it saw and what it should have seen. Returns what it saw."""
        print(f'{time.monotonic():.2f}', *dataclasses.astuple(case), sep=' | ', flush=True)
        try:
            seen, expected = function()
            result = Result(case, seen, expected)
        except Exception as error:
            refusal = refusal_in(error)
            result = Result(case, refused=refusal) if refusal else Result(case, error=traceback.format_exc())
        with self._path.open('a') as file:
            file.write(json.dumps(dataclasses.asdict(result)) + '\n')
        return None if result.refused or result.error else result.seen


def refusal_in(error: BaseException) -> str:
    """Return the message of granular's error in the chain of an error, also if a worker process raised it."""
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__
    for cause in causes:
        if isinstance(cause, GranularError):
            return str(cause)
    return ''


def read_results(folder: Path, ranks: int) -> dict[Case, list[Result]]:
    """Return the results of the cases that all ranks finished."""
    found: dict[Case, list[Result]] = {}
    for rank in range(ranks):
        path = folder / f'rank{rank}.jsonl'
        for line in path.read_text().splitlines() if path.exists() else ():
            fields: dict[str, Any] = json.loads(line)
            case = Case(**fields.pop('case'))
            found.setdefault(case, []).append(Result(case, **fields))
    return {case: results for case, results in found.items() if len(results) == ranks}
