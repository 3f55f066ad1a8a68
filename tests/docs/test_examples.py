"""Each example runs as a program, unchanged, against the server that it starts, and reaches its result."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys

import pytest

from tests import ROOT
from tests.support.servers import free_ports

EXAMPLES = ROOT / 'examples'
NAMES = sorted(path.stem for path in EXAMPLES.glob('*.py') if path.stem != 'digits')

# As `python examples/...` does.
PROGRAM = """
import os, runpy, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name='__main__')
"""
TORCHRUN = """
from torch.distributed.run import main
main()
"""


@pytest.fixture
def output(request, learning_interpreter):
    """Run the example that the test is named after, and return its output."""
    program = EXAMPLES / f'{request.node.name.removeprefix("test_")}.py'
    environment = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    done = learning_interpreter.run(PROGRAM, str(program), env=environment)
    assert done.returncode == 0, done.stderr
    assert 'Traceback' not in done.stderr and 'Warning' not in done.stderr, done.stderr
    return done.stdout


def number(pattern, text):
    return float(re.search(pattern, text)[1].replace(',', ''))


def test_crawl(output):
    assert number(r'([\d,]+) datapoints', output) == 1797
    assert number(r'up to (\d+) in flight', output) == 500
    assert len(re.findall(r'^  \d: \d+\.\d% ink$', output, re.MULTILINE)) == 10


def test_move_clouds(output):
    assert 'to gs://examples/digits in' in output
    assert number(r'verified 1,797 datapoints: ([\d,]+) records have the checksums', output) >= 2 * 1797
    assert 'deleted s3://examples/digits' in output


def test_train_ddp(output):
    assert output.count('736 + 736 digits, 1472 different ones') == 3
    assert number(r'accuracy on the test set: ([\d.]+)', output) > 0.9


def test_train_jax(output):
    assert number(r'accuracy on the test set: ([\d.]+)', output) > 0.9


@pytest.mark.timeout(600)
@pytest.mark.parametrize('ranks', [1, 2])
def test_train_images(ranks, learning_interpreter, tmp_path):
    program = [str(EXAMPLES / 'train_images.py'), '--epochs', '2']
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}

    def start(*arguments, code=PROGRAM, **variables):
        return learning_interpreter.start(code, *arguments, cwd=tmp_path, env={**environment, **variables})

    def run_to_the_end(*arguments):
        # What torchrun tells its ranks, of which each would import PyTorch anew.
        variables = {'WORLD_SIZE': f'{ranks}', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': f'{free_ports(1)[0]}'}
        with contextlib.ExitStack() as stack:
            processes = [
                stack.enter_context(start(*program, *arguments, RANK=f'{rank}', LOCAL_RANK=f'{rank}', **variables))
                for rank in range(ranks)
            ]
            outputs = []
            for process in processes:
                output, errors = process.communicate()
                assert process.wait() == 0, errors
                outputs.append(output)
        return ''.join(outputs)

    def losses(output):
        return re.findall(r'step (\d+): loss (\S+)$', output, re.MULTILINE)

    whole = losses(run_to_the_end('--out', 'whole'))
    assert [int(step) for step, _ in whole] == list(range(1, 2 * 1797 // 32 + 1))

    again = '--out', 'run', '--images', 'whole/images'
    torchrun = ['--standalone', '--nproc-per-node=2', *program, *again]
    with start(*torchrun, code=TORCHRUN) if ranks > 1 else start(*program, *again) as process:
        # The process cannot come to its end before it is killed: its pipe is full before.
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        killed = ''
        while ' step 13:' not in killed:
            assert (read := os.read(process.stdout.fileno(), 64)), process.communicate()[1]
            killed += read.decode()
        os.kill(int(re.search(r'process (\d+)', killed)[1]), signal.SIGKILL)
        rest, errors = process.communicate()
        assert process.wait() == (-signal.SIGKILL if ranks == 1 else 1), errors
    assert set(losses(rest)) < set(whole[13:-1])
    rest = losses(run_to_the_end(*again))
    assert 10 <= len(whole) - len(rest) < len(whole)
    assert rest == whole[-len(rest) :]


@pytest.mark.xdist_group('ray')
@pytest.mark.timeout(900)
def test_train_ray():
    # Ray emits warnings for its own settings, so it runs without the interpreter that raises them.
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'RAY_USAGE_STATS_ENABLED': '0', 'RAY_worker_niceness': '0'}
    environment['RAY_TRAIN_HEALTH_CHECK_INTERVAL_S'] = '0.05'  # each saved checkpoint waits for such a check
    environment['RAY_TRAIN_ENABLE_PREEMPTION_WATCHER'] = '0'  # another process for each run
    environment['RAY_enable_metrics_collection'] = '0'
    program = [sys.executable, str(EXAMPLES / 'train_ray.py')]
    done = subprocess.run(program, check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    output = done.stdout
    assert 'a worker was killed at step 20' in output
    assert 'resumed with 3 workers: 1440 digits, 1440 different ones' in output
    assert number(r'accuracy on the test set: ([\d.]+)', output) > 0.7


def test_train_text(output):
    assert number(r'loss [\d.]+ in the first, ([\d.]+)', output) < 3.5 < number(r'loss ([\d.]+)', output)
    assert 'resumed at step 20: 20 of 20 losses are the same' in output


def test_train_torch(output):
    assert number(r'accuracy on the test set: ([\d.]+)', output) > 0.9
    # A batch is one fan-out to two bags; an epoch has 24 batches.
    assert number(r'epoch 2: .* ([\d,]+) requests', output) < 3 * 24 * 2 + 20


def test_every_example_has_a_test_and_a_description():
    assert {f'test_{name}' for name in NAMES} < set(globals())
    for name in NAMES:
        text = (EXAMPLES / f'{name}.py').read_text()
        assert 'argparse.ArgumentParser(description=__doc__' in text
        assert len(text.splitlines()) < 110
