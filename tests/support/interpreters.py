"""Interpreters that have imported what programs need, and run each program in a fork of their own."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

DEVELOPMENT = ('-X', 'dev', '-W', 'error')

_SLOW = re.compile(r'(?ms)^Executing <.*? took [\d.]+ seconds\n')  # the result of a task may have several lines


def without_slow_callbacks(errors: str) -> str:
    """Return what a program wrote to stderr without what asyncio says of slow callbacks: a busy machine has some."""
    return _SLOW.sub('', errors)


# The server imports nothing that starts threads of Python. A program is a child with its own session, ``__main__``,
# arguments, environment and standard streams; it ends as any process does, with finalizers and handlers at exit.
SERVER = """
import gc, importlib, json, os, select, socket, sys, types

control = socket.socket(fileno=int(sys.argv[1]))
poll = select.poll()
poll.register(control, select.POLLIN)
for name in sys.argv[2:]:
    importlib.import_module(name)
gc.freeze()  # what is imported is not collected again by each program
running = {}
while True:
    ready = [descriptor for descriptor, _ in poll.poll()]
    for ended in set(ready) - {control.fileno()}:
        poll.unregister(ended)
        pid, status = running.pop(ended)
        os.write(status, b'%d' % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os.close(status)
        os.close(ended)
    if control.fileno() not in ready:
        continue
    request, descriptors, _, _ = socket.recv_fds(control, 1 << 18, 4)
    if not request:
        os._exit(0)
    *streams, status = descriptors
    pid = os.fork()
    if not pid:
        break
    for descriptor in streams:
        os.close(descriptor)
    os.write(status, b'%d\\n' % pid)
    ended = os.pidfd_open(pid)
    running[ended] = pid, status
    poll.register(ended, select.POLLIN)

control.close()
os.close(status)
for ended, (pid, status) in running.items():
    os.close(ended)
    os.close(status)
os.setsid()
for target, descriptor in enumerate(streams):
    os.dup2(descriptor, target)
    os.close(descriptor)
sys.stdout = open(1, 'w', closefd=False)  # as that before it takes its file, not this pipe, for seekable
request = json.loads(request)
sys.argv = ['-c', *request['args']]
os.environ.clear()
os.environ.update(request['env'])
os.chdir(request['cwd'])
main = sys.modules['__main__'] = types.ModuleType('__main__')
exec(compile(request['code'], '<string>', 'exec'), main.__dict__)
"""


class Program:
    """A running program: a part of the interface of ``subprocess.Popen``, with text streams."""

    def __init__(self, pid: int, stdin: Any, stdout: Any, stderr: Any, status: Any) -> None:
        self.pid = pid
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._stderr, self._status = stderr, status

    def communicate(self) -> tuple[str, str]:
        """Wait for the end of the program, and return what it has written since to stdout, and all of stderr."""
        self.stdin.close()
        out = self.stdout.read()
        self.wait()
        self._stderr.seek(0)
        return out, without_slow_callbacks(self._stderr.read())

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, which is that of ``subprocess``, when the program has ended.

        Raises:
          subprocess.TimeoutExpired: if it has not ended in that many seconds.
        """
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._status, select.POLLIN)  # also of a process that has more than 1,024 descriptors
            if not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(['-c'], timeout or 0.0)
            self.returncode = int(self._status.read())
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program, without the processes that it has started."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        """Kill the program, and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        for stream in (self.stdin, self.stdout, self._stderr, self._status):
            stream.close()


class Interpreter:
    """A Python interpreter that runs programs, each in a fork. Starting one costs milliseconds, not its imports.

    Args:
      imports: the modules that are imported before. None of them may start threads.
      python: the executable.
      options: of the interpreter.
    """

    def __init__(
        self, *imports: str, python: str | os.PathLike[str] = sys.executable, options: Sequence[str] = DEVELOPMENT
    ) -> None:
        self._control, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [python, *options, '-c', SERVER, str(remote.fileno()), *imports]
        with remote:
            self._server = subprocess.Popen(
                command, pass_fds=[remote.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )

    def start(
        self, code: str, *args: str, env: Mapping[str, str] | None = None, cwd: str | os.PathLike[str] = '.'
    ) -> Program:
        """Start a program. It is a context manager, at whose end the program is killed."""
        stdin, stdin_writer = os.pipe()
        stdout_reader, stdout = os.pipe()
        status_reader, status = os.pipe()
        stderr = tempfile.TemporaryFile('w+')  # noqa: SIM115
        environment = dict(os.environ if env is None else env)
        request = {'code': code, 'args': args, 'env': environment, 'cwd': os.path.abspath(cwd)}
        sent = stdin, stdout, stderr.fileno(), status
        socket.send_fds(self._control, [json.dumps(request).encode()], sent)
        for descriptor in (stdin, stdout, status):
            os.close(descriptor)
        statuses = open(status_reader)  # noqa: SIM115
        pid = int(statuses.readline())
        return Program(pid, open(stdin_writer, 'w'), open(stdout_reader), stderr, statuses)

    def run(self, code: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        with self.start(code, *args, **options) as program:
            out, err = program.communicate()
            return subprocess.CompletedProcess(['-c', *args], program.wait(), out, err)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        self._server.wait()
