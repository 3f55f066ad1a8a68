"""The messages to a worker process."""

import collections
import contextlib
import pickle
import select
import threading
from multiprocessing.connection import Connection
from typing import Any

from granular.aio.pipeline.execution import shared_memory
from granular.aio.runtime.pools import start_thread
from granular.errors import ClosedError

Message = tuple[int, tuple[int, ...] | None, bool]
"""The number of an item, its position, or None to cancel it, and whether to measure times."""


class Outbox:
    """The messages to a worker, in order, sent without blocking the caller.

    A process that is stopped, or whose main thread does not run, does not empty its pipe. Messages that find it full
    are sent by a thread, which ends with the last of them. A message that has not been sent yet can be withdrawn, so
    that there are never more than there are items in progress. Each tells the process, too, what memory is unused.
    """

    def __init__(self, pipe: Connection, process: Any, memory: shared_memory.Receiver) -> None:
        self._pipe = pipe
        self._process = process
        self._memory = memory
        self._lock = threading.Lock()
        self._unsent: collections.deque[Message | None] = collections.deque()  # the first is being sent
        self._poll = select.poll()
        self._poll.register(pipe.fileno(), select.POLLOUT)
        self.thread: threading.Thread | None = None

    def send(self, message: Message | None) -> None:
        """Send a message, at once or later; raise ``OSError`` if the process has ended."""
        with self._lock:
            if not self._unsent and self._poll.poll(0):  # a pipe that is writable has room for far more than a message
                self._send(message)
                return
            self._unsent.append(message)
            if self.thread is None:
                thread = threading.Thread(target=self._send_rest, name=f'{self._process.name}-send', daemon=True)
                with contextlib.suppress(ClosedError):  # the interpreter exits, and kills the process
                    start_thread(thread)
                    self.thread = thread

    def _send(self, message: Message | None) -> None:
        # Pickled here, as a pipe would make a pickler of its own for each message, which takes 0.2 ms after a pause.
        if message is None:
            self._pipe.send_bytes(pickle.dumps(None))
            return
        unused = self._memory.unused()
        self._pipe.send_bytes(pickle.dumps((*message, unused)))
        self._memory.forget(unused)

    def withdraw(self, number: int) -> bool:
        """Remove the message with this number. Return False if it was sent, or is being sent."""
        with self._lock:
            for i, message in enumerate(self._unsent):
                if i and message is not None and message[0] == number:
                    del self._unsent[i]
                    return True
        return False

    def _send_rest(self) -> None:
        while True:
            with self._lock:
                if not self._unsent:
                    self.thread = None
                    return
                message = self._unsent[0]
            try:
                self._send(message)
            except (OSError, ValueError, TypeError):  # the process has ended, which its reader thread reports; or close
                return
            except MemoryError:  # the message may be half sent, and those after it cannot be read
                self._process.kill()
                return
            with self._lock:
                self._unsent.popleft()
