"""Verdicts of each driver with each kind of loader, as the tests show, and the table of docs/frameworks.md."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from tests.drivers.results import Case, Epochs, Result

LENGTH = 32
"""Number of ids."""

CONTROLS = {
    'Batches(stream)': 'StatefulDataLoader(unsized iterable of torch)',
    'DataLoader(IterableDataset)': 'DataLoader(iterable of torch)',
    'DataLoader(IterableDataset, sized=True)': 'DataLoader(sized iterable of torch)',
    'StatefulDataLoader(IterableDataset)': 'StatefulDataLoader(iterable of torch)',
    'DataLoader(MapDataset)': 'DataLoader(list of torch)',
    'StatefulDataLoader(MapDataset)': 'StatefulDataLoader(list of torch)',
    'Resumable(StatefulDataLoader)': 'StatefulDataLoader(iterable of torch)',
    'nodes.IterableWrapper(stream)': 'nodes.IterableWrapper(iterable of torch)',
    'nodes.IterableWrapper(IterableDataset)': 'nodes.IterableWrapper(iterable of torch)',
}
"""The same loaders over a plain dataset of torch."""

EXACT, AS_TORCH, REFUSED, WRONG = 'exact', 'as torch', 'refused', 'wrong'
ORDER = 'another order in each epoch'


def verdict(case: Case, results: Sequence[Result], control: Sequence[Result] | None) -> tuple[str, str]:
    """Return the verdict on a case, given the results of its ranks and those of its control, with the reason."""
    problem = problem_of(case, results)
    if not problem:
        return EXACT, ''
    if any(result.refused for result in results):
        return REFUSED, next(result.refused for result in results if result.refused)
    if control is not None and problem_of(case, control) and symptoms(results) == symptoms(control):
        return AS_TORCH, problem
    return WRONG, problem


def problem_of(case: Case, results: Sequence[Result]) -> str:
    """Return what is wrong with the results of a case: '' if each rank saw what it should have, and all saw all."""
    for rank, result in enumerate(results):
        if result.refused or result.error:
            return f'rank {rank}: {result.refused or result.error}'
        if result.seen != result.expected:
            return f'rank {rank}: {differences(result.seen, result.expected)}'
    if case.scenario.startswith(('whole', 'validation')):
        for epoch in range(len(results[0].seen)):
            counts = collections.Counter(i for result in results for i in result.seen[epoch])
            if set(counts) != set(range(LENGTH)) or max(counts.values()) > 1:
                twice = sum(count > 1 for count in counts.values())
                return f'epoch {epoch}: {LENGTH - len(counts)} ids lost, {twice} twice, over all ranks'
    return ''


def differences(seen: Epochs, expected: Epochs) -> str:
    """Describe how the ids that were seen differ from those expected."""
    parts = []
    for epoch, (one, other) in enumerate(zip(seen, expected, strict=True)):
        lost, twice = collections.Counter(other) - collections.Counter(one), collections.Counter(one)
        twice.subtract(collections.Counter(other))
        if one != other:
            count = sum(lost.values()), sum(n for n in twice.values() if n > 0)
            order = '' if any(count) else ', in another order'
            parts.append(f'epoch {epoch}: of {len(other)} ids {count[0]} lost, {count[1]} twice or others{order}')
    return '; '.join(parts)


def symptoms(results: Sequence[Result]) -> list[object]:
    """Return what a case and its control have in common if they fail alike: what was lost, or the type of error."""
    return [
        result.error.strip().rpartition('\n')[2].partition(':')[0] or differences(result.seen, result.expected)
        for result in results
    ]


def found(results: Mapping[Case, Sequence[Result]]) -> dict[Case, tuple[str, str]]:
    """Return the verdict on each case, without those of controls, and on the orders of the epochs of a whole one."""
    verdicts = {}
    for case, of_ranks in results.items():
        if case.kind in CONTROLS.values():
            continue
        control = results.get(Case(case.driver, CONTROLS.get(case.kind, ''), case.workers, case.scenario))
        verdicts[case] = verdict(case, of_ranks, control)
        if case.scenario == 'whole' and verdicts[case][0] == EXACT and not _has_orders(of_ranks):
            what = WRONG if control is None or _has_orders(control) else AS_TORCH
            verdicts[dataclasses.replace(case, scenario=ORDER)] = what, 'all epochs have the same order'
    return verdicts


def _has_orders(results: Sequence[Result]) -> bool:
    """Return whether each epoch has another order."""
    orders = [result.seen[epoch] for result in results[:1] for epoch in range(len(result.seen))]
    return len({tuple(ids) for ids in orders}) == len(orders)


DRIVERS = (
    'own loop', 'Lightning', 'HF Trainer', 'Accelerate, prepared', 'Accelerate, registered', 'Ray Train', 'Orbax',
    'Composer (imitated)',
)  # fmt: skip
KINDS = (
    'Loader', 'Batches(Loader)', 'Batches(stream)', 'DataLoader(IterableDataset)',
    'DataLoader(IterableDataset, sized=True)', 'StatefulDataLoader(IterableDataset)', 'Resumable(StatefulDataLoader)',
    'DataLoader(MapDataset)', 'StatefulDataLoader(MapDataset)', 'nodes.IterableWrapper(stream)',
    'nodes.IterableWrapper(IterableDataset)',
)  # fmt: skip

RUNS = (
    ('own_loop', 1), ('own_loop', 2), ('lightning_trainer', 1), ('lightning_trainer', 2), ('lightning_spawn', 2),
    ('hf_trainer', 1), ('hf_trainer', 2), ('accelerate_loop', 1), ('accelerate_loop', 2), ('ray_train', 2),
    ('orbax_loop', 1),
)  # fmt: skip
"""The programs, with their numbers of ranks."""

STARTS_RANKS = ('lightning_spawn', 'ray_train')
"""The programs that start their ranks themselves."""

_LAST = 'resumed after the last batch'
_NO_OPTIONS = 'whole, without shard_options'
SHOWN: dict[tuple[str, str], dict[str, str]] = {
    ('own loop', 'Loader'): {},
    ('own loop', 'Batches(Loader)'): {},
    ('own loop', 'Batches(stream)'): {},
    ('own loop', 'DataLoader(IterableDataset)'): {},
    ('own loop', 'StatefulDataLoader(IterableDataset)'): {},
    ('own loop', 'DataLoader(MapDataset)'): {},
    ('own loop', 'StatefulDataLoader(MapDataset)'): {},
    ('own loop', 'nodes.IterableWrapper(stream)'): {ORDER: AS_TORCH, _LAST: AS_TORCH},
    ('own loop', 'nodes.IterableWrapper(IterableDataset)'): {ORDER: AS_TORCH, _LAST: AS_TORCH},
    ('Lightning', 'Loader'): {},
    ('Lightning', 'Batches(Loader)'): {},
    ('Lightning', 'Batches(stream)'): {},
    ('Lightning', 'DataLoader(IterableDataset)'): {ORDER: AS_TORCH, 'resumed in an epoch': AS_TORCH},
    ('Lightning', 'StatefulDataLoader(IterableDataset)'): {ORDER: AS_TORCH, _LAST: AS_TORCH},
    ('Lightning', 'Resumable(StatefulDataLoader)'): {},
    ('Lightning', 'DataLoader(MapDataset)'): {'resumed in an epoch': AS_TORCH, 'resumed between epochs': AS_TORCH},
    ('Lightning', 'StatefulDataLoader(MapDataset)'): {
        'resumed in an epoch': AS_TORCH, _LAST: AS_TORCH, 'resumed between epochs': AS_TORCH
    },
    ('HF Trainer', 'DataLoader(IterableDataset)'): {'resumed in the second epoch': AS_TORCH},
    ('HF Trainer', 'DataLoader(IterableDataset, sized=True)'): {},
    ('HF Trainer', 'DataLoader(MapDataset)'): {},
    ('Accelerate, prepared', 'DataLoader(IterableDataset)'): {_NO_OPTIONS: 'refused: pass `NoSharding()`'},
    ('Accelerate, prepared', 'StatefulDataLoader(IterableDataset)'): {
        _LAST: AS_TORCH, f'{_LAST}, dispatch_batches=False': AS_TORCH
    },
    ('Accelerate, prepared', 'DataLoader(MapDataset)'): {},
    ('Accelerate, prepared', 'StatefulDataLoader(MapDataset)'): {_LAST: AS_TORCH},
    ('Accelerate, registered', 'Loader'): {},
    ('Accelerate, registered', 'Batches(Loader)'): {},
    ('Accelerate, registered', 'Batches(stream)'): {},
    ('Accelerate, registered', 'DataLoader(IterableDataset)'): {_NO_OPTIONS: 'refused: pass `ShardByTorchRank()`'},
    ('Accelerate, registered', 'StatefulDataLoader(IterableDataset)'): {},
    ('Accelerate, registered', 'StatefulDataLoader(MapDataset)'): {},
    ('Ray Train', 'Loader'): {},
    ('Ray Train', 'Batches(Loader)'): {},
    ('Ray Train', 'Batches(stream)'): {},
    ('Ray Train', 'DataLoader(IterableDataset)'): {},
    ('Ray Train', 'StatefulDataLoader(IterableDataset)'): {},
    ('Orbax', 'Loader'): {},
    ('Orbax', 'Batches(Loader)'): {},
    ('Orbax', 'Batches(stream)'): {},
    ('Orbax', 'StatefulDataLoader(IterableDataset)'): {},
    ('Orbax', 'StatefulDataLoader(MapDataset)'): {},
    ('Composer (imitated)', 'DataLoader(IterableDataset)'): {
        ORDER: AS_TORCH, 'whole, with workers': 'refused: pass `num_workers=0`'
    },
}  # fmt: skip
"""For each driver and kind of loader that are tested: the cases that are not exact, and their verdict.

A refusal is followed by what its message tells the user to pass.
"""


def table() -> str:
    """Return the table of docs/frameworks.md: for each driver, the loaders and cases that are not exact."""
    lines = ['| framework | as torch, or refused |', '| --- | --- |']
    for driver in DRIVERS:
        inexact = []
        for kind in KINDS:
            by_verdict = collections.defaultdict(list)
            for case, what in SHOWN.get((driver, kind), {}).items():
                by_verdict[what].append(case)
            for what, cases in by_verdict.items():
                inexact.append(f'`{kind}` ({"; ".join(cases)}{"" if what == AS_TORCH else f": {what}"})')
        if inexact:
            lines.append(f'| {driver} | {", ".join(inexact)} |')
    return '\n'.join(lines) + '\n'
