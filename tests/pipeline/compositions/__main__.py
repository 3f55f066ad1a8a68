"""Try many compositions: ``python -m tests.pipeline.compositions --trials 1000 --seed 0 --kind hosts``."""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.pipeline.compositions.kinds import TRIALS
from tests.pipeline.compositions.trials import Result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--trials', type=int, default=200, help='number of compositions of each kind')
    parser.add_argument('--seed', type=int, default=0, help='number of the first one')
    parser.add_argument('--kind', choices=list(TRIALS), action='append', help='by default all of them')
    parser.add_argument('--show', type=int, default=3, help='number of wrong ones to describe, for each kind')
    options = parser.parse_args()
    logging.getLogger('granular').setLevel(logging.CRITICAL)  # datapoints fail on purpose
    wrong = 0
    for kind in options.kind or TRIALS:
        began = time.perf_counter()
        seeds = range(options.seed, options.seed + options.trials)
        wrong += report(kind, {seed: TRIALS[kind](seed) for seed in seeds}, options.show)
        print(f'  {options.trials / (time.perf_counter() - began):.0f} trials a second', flush=True)
    sys.exit(wrong > 0)


def report(kind: str, results: dict[int, Result], show: int) -> int:
    """Print a row of the table and the wrong compositions; return the number of these."""
    verdicts = Counter(result.verdict for result in results.values())
    refusals = Counter(result.stage for result in results.values() if result.verdict == 'refused')
    weak = sum(result.verdict == 'exact' and not result.checked for result in results.values())
    wrong = {seed: result for seed, result in results.items() if result.verdict == 'wrong'}
    print(f'{kind}: {len(results)} trials, {verdicts["exact"]} exact ({weak} for duplicates only), ', end='')
    print(f'{verdicts["refused"]} refused by stage {listed(refusals.most_common())}, {verdicts["wrong"]} wrong')
    if wrong:
        print(f'  wrong, by seed: {" ".join(map(str, list(wrong)[:40]))}')
        print(f'  wrong, by operation: {listed(of_operations(results.values()))}')
    for seed, result in list(wrong.items())[:show]:
        print(f'  seed {seed}: {result.node.text}\n    {result.text}')
    return len(wrong)


def of_operations(results: Iterable[Result]) -> list[tuple[str, str]]:
    """Return how many of the pipelines with each operation of streams are wrong."""
    wrong, all_of = Counter[str](), Counter[str]()
    for result in results:
        for name in set(result.node.operations()):
            all_of[name] += 1
            wrong[name] += result.verdict == 'wrong'
    return [(name.split('.')[1], f'{count}/{all_of[name]}') for name, count in wrong.most_common() if 'Iter' in name]


def listed(pairs: Iterable[tuple[object, object]]) -> str:
    return ', '.join(f'{name}: {count}' for name, count in pairs) or 'none'


if __name__ == '__main__':
    main()
