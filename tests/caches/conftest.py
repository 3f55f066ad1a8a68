import contextlib
import gc
import time

import pytest

from tests.support.caches import RUN, RecordingSource, open_memory, unheld_memory


@pytest.fixture
def source(tmp_path):
    return RecordingSource(tmp_path / 'log')


@pytest.fixture
def program(interpreter):
    """Start a program that knows the name of this run."""
    with contextlib.ExitStack() as programs:
        yield lambda code, *args: programs.enter_context(interpreter.start(f'RUN = {RUN!r}\n{code}', *map(str, args)))


@pytest.fixture(autouse=True)
def no_memory_left():
    yield
    deadline = time.monotonic() + 60  # for threads that still hold a source
    while open_memory() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert not [path for path in unheld_memory() if RUN in path]
    assert open_memory() == []
