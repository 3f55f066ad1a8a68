"""One coroutine at a time, whichever threads and event loops they run on."""

import asyncio
import collections
import concurrent.futures
import threading

from granular.aio.loops import need_loop


class Turns:
    """Lets coroutines through one at a time, in the order in which they came.

    Unlike :class:`asyncio.Lock` it is shared by threads and event loops, and an uncontended turn needs no loop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._waiting: collections.deque[concurrent.futures.Future[None]] = collections.deque()

    async def __aenter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            turn: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._waiting.append(turn)
        try:
            await need_loop()
            await asyncio.wrap_future(turn)
        except BaseException:
            if not turn.cancel():
                self._pass_on()  # it was given to this coroutine, which does not take it
            raise

    async def __aexit__(self, *error: object) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        with self._lock:
            while self._waiting:
                turn = self._waiting.popleft()
                if turn.set_running_or_notify_cancel():
                    break
            else:
                self._taken = False
                return
        turn.set_result(None)
