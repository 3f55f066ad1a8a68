"""Trainings that other frameworks drive: no id is lost or seen twice, and a resumed training equals one that was not.

Where a framework itself loses or repeats ids, the same loader over a plain dataset of torch shows the same. Each
program of ``programs/`` runs once, in the process that has the first of its tests.
"""

import collections
import functools

import pytest

from tests import ROOT
from tests.drivers.processes import LIMIT, launch
from tests.drivers.results import Case, Result, read_results
from tests.drivers.verdicts import EXACT, REFUSED, RUNS, SHOWN, STARTS_RANKS, WRONG, found, table

RUNS_OF: dict[str, list[tuple[str, int]]] = {}
for program, ranks in RUNS:
    RUNS_OF.setdefault(program.partition('_')[0], []).append((program, ranks))

pytestmark = pytest.mark.timeout(2 * LIMIT + 120)


@functools.cache
def run(program: str, ranks: int, folder) -> tuple[dict[Case, list[Result]], str]:
    """Run a program, and return its results, with the reason if it failed."""
    path = folder / f'{program}{ranks}'
    path.mkdir()
    try:
        launch(program, 1 if program in STARTS_RANKS else ranks, path)
        reason = ''
    except AssertionError as error:
        reason = str(error)
    return read_results(path, ranks), reason


@pytest.fixture(scope='session')
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp('drivers')


def of_framework(function):
    """Run a test for each framework, in one process for all tests of it."""
    marked = [pytest.param(name, id=name, marks=pytest.mark.xdist_group(name)) for name in RUNS_OF]
    return pytest.mark.parametrize('framework', marked)(function)


@of_framework
def test_no_id_is_lost_or_seen_twice(framework, folder):
    problems, failed = [], []
    for program, ranks in RUNS_OF[framework]:
        results, reason = run(program, ranks, folder)
        failed += [reason] * bool(reason)
        for case, (what, why) in found(results).items():
            if what == WRONG:
                problems.append(f'{ranks} ranks, {case}: {why}')
    assert not failed, '\n'.join([*problems, *failed])
    assert not problems, '\n'.join(problems)


@of_framework
def test_verdicts_are_those_of_the_table(framework, folder):
    observed: dict[tuple[str, str], dict[str, str]] = collections.defaultdict(dict)
    for program, ranks in RUNS_OF[framework]:
        for case, (what, why) in found(run(program, ranks, folder)[0]).items():
            observed[case.driver, case.kind] |= {case.scenario: shown(case, what, why)} if what != EXACT else {}
    drivers = {driver for driver, _ in observed}
    assert dict(observed) == {pair: cases for pair, cases in SHOWN.items() if pair[0] in drivers}


def shown(case: Case, what: str, why: str) -> str:
    """Return how the table shows a verdict. A refusal is shown as declared if its message has the remedy."""
    if what != REFUSED:
        return what
    declared = SHOWN.get((case.driver, case.kind), {}).get(case.scenario, '')
    remedy = declared.removeprefix(f'{REFUSED}: pass ').strip('`')
    return declared if declared and remedy in why else f'{REFUSED}: {why}'


def test_page_shows_the_table():
    page = (ROOT / 'docs/frameworks.md').read_text()
    assert page.partition('<!-- drivers -->\n')[2].partition('<!-- /drivers -->')[0] == table()
