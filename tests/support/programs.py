"""Programs that tests start: none of them outlives its test."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.support.interpreters import without_slow_callbacks

# A shell's background jobs, and what they start, begin with SIGINT ignored: a program that is to be interrupted sets
# the handler first.
INTERRUPTIBLE = 'import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n'


@contextlib.contextmanager
def program(command: Sequence[Any], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a program with pipes for its output. It is killed at the end, with all processes that it has started."""
    pipes: dict[str, Any] = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE, 'text': True}
    # In a group of its own, which outlives it while any process that it started does.
    with subprocess.Popen(command, start_new_session=True, **pipes, **options) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run_python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, in development mode, with warnings as errors."""
    command = [sys.executable, '-X', 'dev', '-W', 'error', '-c', textwrap.dedent(code), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    done.stderr = without_slow_callbacks(done.stderr)
    return done


def run_in_child(function: Callable[[], object]) -> int:
    """Call a function in a forked child. Returns the exit code: 0 for True."""
    child = os.fork()
    if not child:
        sys.unraisablehook = lambda _: os._exit(3)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
