"""Processes that are killed between two elements, and another interpreter that continues from their states on disk."""

import atexit
import functools
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import granular
from granular.errors import StateError
from tests.pipeline.compositions import functions as f
from tests.pipeline.compositions.consumers import Wrong, expect, readable, taken
from tests.pipeline.compositions.generator import composition
from tests.pipeline.compositions.plans import Node, Setting
from tests.pipeline.compositions.runs import MOST
from tests.pipeline.compositions.trials import Result, place


def killed(seed: int) -> Result:
    """Take some elements in a process that is killed, and the others in one with other hashes of strings."""
    draw, node = composition('killed', seed)
    elements = taken(iter(opened(node)), MOST)
    at = place(draw, len(elements))
    if node.kind != 'IterDataset':
        at = min(at, max(0, len(elements) - 1))  # after the last element, a Loader is in the next epoch
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder, 'state.json')
        try:
            _take_and_be_killed(node, at, state)
            rest, following = _successor().rest(seed, state), json.loads(json.dumps(elements[at:]))
            found = rest if len(elements) < MOST else rest[: len(following)]  # unless there are others
            expect(f'saved after {at}', found, following)
        except Wrong as error:
            return Result('wrong', node, text=str(error))
    return Result('exact', node)


def opened(node: Node) -> Any:
    """Return a stream, or a Loader of a MapDataset."""
    dataset = node.build(Setting())
    return dataset if node.kind == 'IterDataset' else granular.Loader(dataset.map(f.as_row), 1)


def _take_and_be_killed(node: Node, at: int, state: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            iterator = iter(opened(node))
            for _ in range(at):
                next(iterator)
            state.write_text(json.dumps(iterator.state_dict(), allow_nan=False))
            os.write(writing, b'.')
            for _ in itertools.islice(iterator, MOST):  # it is killed while it goes on
                pass
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, 'rb') as pipe:
        saved = pipe.read(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not saved:
        raise Wrong(f'the process failed before it had {at} elements')


class _Successor:
    """An interpreter that continues from states of other processes."""

    def __init__(self) -> None:
        hashes = '1' if os.environ.get('PYTHONHASHSEED') != '1' else '2'
        environment = {**os.environ, 'PYTHONHASHSEED': hashes, 'PYTHONPATH': os.pathsep.join(sys.path)}
        command = [sys.executable, '-W', 'ignore', '-m', __spec__.name]
        pipes: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)
        atexit.register(self._close)

    def rest(self, seed: int, state: Path) -> Any:
        """Return the elements that follow a state."""
        asking, answering = self._process.stdin, self._process.stdout
        if asking is None or answering is None:
            raise Wrong('the interpreter has no pipes')
        print(json.dumps([seed, str(state)]), file=asking, flush=True)
        answer = json.loads(answering.readline())
        if isinstance(answer, str):
            raise Wrong(answer)
        return answer

    def _close(self) -> None:
        self._process.communicate()


_successor = functools.cache(_Successor)


def main() -> None:
    """Answer each line, a trial and its state, by the elements that follow or the error."""
    logging.getLogger('granular').setLevel(logging.CRITICAL)
    for line in sys.stdin:
        seed, path = json.loads(line)
        iterator = iter(opened(composition('killed', seed)[1]))
        state = json.loads(Path(path).read_text())
        try:
            iterator.load_state_dict(state)
            answer: Any = [readable(element) for element in itertools.islice(iterator, MOST)]
        except StateError as error:
            answer = f'refused: {error}'
        print(json.dumps(answer), flush=True)
        iterator.close()


if __name__ == '__main__':
    main()
