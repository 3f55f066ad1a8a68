"""Programs that tests start: none of them outlives its test."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import Any

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
