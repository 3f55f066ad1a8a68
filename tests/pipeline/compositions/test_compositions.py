"""A cover of the random compositions; ``python -m tests.pipeline.compositions`` tries any number of them."""

import inspect
import itertools
import logging
import os
import subprocess
import sys

import pytest

import granular
from tests.pipeline.compositions.generator import composition
from tests.pipeline.compositions.kinds import TRIALS
from tests.pipeline.compositions.rules import KINDS, OF_MAPS, OF_STREAMS
from tests.support.tables import FULL_TABLES

pytestmark = [
    pytest.mark.filterwarnings('ignore:.*multi-?threaded.*'),  # forked workers
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata calls it
    pytest.mark.filterwarnings('ignore:The given NumPy array is not writable'),
]

CANDIDATES = 300
# Numbers of trials of kinds whose trials take longer, and of 'same', whose pairs 'workers' continues as well.
FEW = {'consumers': 40, 'killed': 12, 'same': 20}
NO_OPERATIONS = {'aio', 'fetch', 'node', 'parents'}  # of a MapDataset
TESTED_APART = {('MapDataset', name) for name in ('pack', 'batch_by_size', 'shapes', 'exclude', 'indices')}


def cover(kind):
    """Return numbers of compositions that hold all pairs of operations on streams which the candidates hold."""
    if FULL_TABLES:
        return range(5 * CANDIDATES)
    if kind in FEW:
        return range(FEW[kind])
    pairs = {
        seed: {pair for pair in composition(kind, seed)[1].pairs() if of_streams(pair)} for seed in range(CANDIDATES)
    }
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(pairs, key=lambda seed: len(pairs[seed] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def of_streams(pair):
    return all(name.startswith('IterDataset.') for name in pair)


@pytest.mark.parametrize('kind', TRIALS)
def test_states_are_continued_exactly_or_are_refused(kind, caplog):
    caplog.set_level(logging.CRITICAL, 'granular')  # datapoints fail on purpose
    seeds = [seed for seed in cover(kind) if not of_jax(kind, seed)]
    results = {seed: TRIALS[kind](seed) for seed in seeds}
    wrong = [f'seed {seed}: {r.node.text}: {r.text}' for seed, r in results.items() if r.verdict == 'wrong']
    assert not wrong, '\n'.join([f'{len(wrong)} of {len(results)}', *wrong])
    checked = [result for result in results.values() if result.verdict == 'refused' or result.checked]
    assert len(checked) > 0.8 * len(results)  # the others were only searched for duplicates


def of_jax(kind, seed):
    return kind == 'consumers' and composition(kind, seed)[0].consumer.startswith('jax.')


def test_states_are_continued_exactly_by_consumers_of_jax():
    """In another process, because forks warn in one that has imported JAX."""
    seeds = [seed for seed in cover('consumers') if of_jax('consumers', seed)]
    script = (
        'import logging\n'
        'from tests.pipeline.compositions.kinds import TRIALS\n'
        'logging.disable()\n'
        f'results = [TRIALS["consumers"](seed) for seed in {seeds}]\n'
        'print([result.text for result in results if result.verdict == "wrong"])'
    )
    done = subprocess.run(
        [sys.executable, '-c', script], env={**os.environ, 'PYTHONPATH': ':'.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == '[]\n'


def test_all_consumers_are_tried():
    numbers = range(FEW['consumers'])
    assert {composition('consumers', seed)[0].consumer for seed in numbers} == {*OF_MAPS, *OF_STREAMS}


def test_all_public_operations_are_composed():
    missing = {
        (kind.__name__, name)
        for kind in (granular.MapDataset, granular.IterDataset)
        for name, _ in inspect.getmembers(kind)
        if not name.startswith('_') and name not in NO_OPERATIONS
    }
    missing -= TESTED_APART
    for seed, kind in itertools.product(range(CANDIDATES), KINDS):
        missing -= {tuple(name.split('.')[:2]) for name in composition(kind, seed)[1].operations()}
        if not missing:
            break
    assert missing == set()


def test_compositions_are_the_same_in_each_process():
    script = (
        'from tests.pipeline.compositions.generator import composition\n'
        'from tests.pipeline.compositions.rules import KINDS\n'
        'print([composition(kind, seed)[1].text for kind in KINDS for seed in range(20)])'
    )
    done = subprocess.run(
        [sys.executable, '-c', script], env={'PYTHONHASHSEED': '1', 'PYTHONPATH': ':'.join(sys.path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert os.environ.get('PYTHONHASHSEED') != '1'  # so hashes differ from those of this process
    assert done.stdout == f'{[composition(kind, seed)[1].text for kind in KINDS for seed in range(20)]}\n'
