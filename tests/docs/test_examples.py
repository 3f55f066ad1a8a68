"""Each example runs as it is, against a server that it starts by itself, and achieves what it says."""

import os
import re
import subprocess
import sys

import pytest

from tests import ROOT

EXAMPLES = ROOT / 'examples'
NAMES = sorted(path.stem for path in EXAMPLES.glob('*.py') if path.stem != 'digits')


@pytest.fixture(scope='module')
def running():
    """All of them, begun at the same time."""
    found = {
        name: subprocess.Popen(
            [sys.executable, '-W', 'error::ResourceWarning', str(EXAMPLES / f'{name}.py')],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
        )
        for name in NAMES
    }  # fmt: skip
    yield found
    for process in found.values():
        process.kill()
        process.wait()


@pytest.fixture
def said(running, request):
    process = running[request.node.name.removeprefix('test_')]
    out, err = process.communicate(timeout=55)
    assert process.returncode == 0, err
    assert 'Traceback' not in err and 'Warning' not in err, err
    return out


def number(pattern, text):
    return float(re.search(pattern, text)[1].replace(',', ''))


def test_crawl(said):
    assert number(r'([\d,]+) datapoints', said) == 1797
    assert number(r'up to (\d+) in flight', said) == 500
    assert len(re.findall(r'^  \d: \d+\.\d% ink$', said, re.MULTILINE)) == 10


def test_move_clouds(said):
    assert 'to gs://examples/digits in' in said
    assert number(r'verified 1,797 datapoints: ([\d,]+) records have the checksums', said) >= 2 * 1797
    assert 'deleted s3://examples/digits' in said


def test_train_ddp(said):
    assert said.count('736 + 736 digits, 1472 different ones') == 3
    assert number(r'accuracy on the test set: ([\d.]+)', said) > 0.9


def test_train_jax(said):
    assert number(r'accuracy on the test set: ([\d.]+)', said) > 0.9


def test_train_torch(said):
    assert number(r'accuracy on the test set: ([\d.]+)', said) > 0.9
    # A batch is one fan-out: of two bags, in an epoch of 24 batches.
    assert number(r'epoch 2: .* ([\d,]+) requests', said) < 3 * 24 * 2 + 20


def test_all_are_run_and_explain_themselves():
    assert {f'test_{name}' for name in NAMES} < set(globals())
    for name in NAMES:
        text = (EXAMPLES / f'{name}.py').read_text()
        assert 'argparse.ArgumentParser(description=__doc__)' in text
        assert len(text.splitlines()) < 110
