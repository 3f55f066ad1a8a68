"""The governor of the requests to a store: how many are in flight, with how many bytes, and how many start a second.

First come, first served: requests that failed come before those that wait for their first attempt, so that a batch does
not wait for all that are read ahead. If the store has answered no request since, they come after them: so none of
them uses up its attempts in an outage.
"""

import asyncio
import collections
import contextlib
import math
import resource
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from granular._support.text import logger

# Requests in flight.
_START: Final = 4  # to a store that has not answered yet; each answer adds three: four times as many in a round trip
_FIRST: Final = 256  # up to which answers add some; from then on, changes are tried
_RANGE: Final = (32, 2048)  # of what is tried
_WINDOW: Final = 0.5  # seconds over which replies are counted to judge a change
_BETTER: Final = 1.1  # times the replies that more requests must yield, or that fewer may cost
_PATIENCE: Final = (4.0, 30.0)  # seconds until the next trial after one that did not help: at first, and at most
_LONG: Final = 0.003  # seconds of processor time of a turn of the loop, above which it is long

# Requests a second.
_NORMAL: Final = 0.05  # share of refusals that is ignored: a few are normal for a store
_LEAST: Final = 5.0  # to a store that answers none: the equal share of a thousand hosts of what S3 answers for a prefix
_ADDED: Final = 0.08  # to the rate, by each answer
_TAKEN: Final = 0.5, 0.2  # from the rate by a refusal, times its square root; and the share of it at most
_RETRIES: Final = 100  # failures, less answers, from which on the store is taken to answer no request


class Waiting(Protocol):
    """A request that waits for a slot."""

    weight: int
    """The bytes that it reserves."""

    @property
    def withdrawn(self) -> bool:
        """True if it needs no slot any more."""

    def admitted(self) -> None:
        """Called when the request has its slot. It must not raise."""


class _Waiter:
    """A coroutine that waits for a slot, again if an attempt ``failed`` at a time."""

    def __init__(self, weight: int, failed: float = math.inf) -> None:
        self.weight, self.failed = weight, failed
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def withdrawn(self) -> bool:
        return self.future.done()

    def admitted(self) -> None:
        self.future.set_result(None)


def descriptors() -> int:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if files == resource.RLIM_INFINITY else files


class Governor:
    """Admits the requests to a store, and learns from its replies. One larger than all memory runs alone.

    Requests in flight: four at first, and three more for each answer up to 256, so that hosts that start together send
    few that are refused. Afterwards, while requests are queued, half as many more are tried, and kept if they yield
    more replies per second: a distant store gets the requests that its latency calls for, and a busy one no more than
    it can answer. If replies keep the loop busy for long, so that the other coroutines of its program wait, a quarter
    less is tried, and kept if it costs no replies.

    Requests a second: unlimited until the store refuses more than one in twenty, then what it has answered. An answer
    adds one until the next refusal, and little from then on; a refusal takes half of the rate's square root. Hosts that
    see the same share of refusals so come to equal rates. Replies to requests that were sent before a reduction do not
    count.

    Failures: each is one retry of a budget of 100, and each answer returns one. Once it is used up, the store is taken
    to answer no request: it is sent 5 a second, and fewer the more fail, until it answers.

    Args:
      requests: the maximum in flight; 0 to adapt it from 256 on, between 32 and 2,048. Never more than half of the file
        descriptors that the process may have, as each request needs one.
      memory: bytes of the replies in flight.
      clock: returns the time in seconds.
    """

    def __init__(self, requests: int, memory: int, clock: Callable[[], float]) -> None:
        room = max(8, descriptors() // 2)
        if requests > room:
            logger.warning('concurrency=%d needs more open files than `ulimit -n` allows: using %d', requests, room)
        self._clock = clock
        # admission
        self._running = 0
        self._free = memory
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._failed: collections.deque[_Waiter] = collections.deque()  # those that wait again
        self._paused: dict[asyncio.Future[None], None] = {}  # those that were refused, before they wait again
        self._timer: asyncio.TimerHandle | None = None  # of the next request that the rate permits
        # requests in flight
        self._goal = min(requests or _FIRST, room)  # of the start; 0 once it is reached
        self.capacity = min(_START, self._goal)
        self._most = min(requests or _RANGE[1], room)
        self._adapts = not requests
        self._trial: tuple[int, float] | None = None  # the capacity before a change, and the best replies per second
        self._again = 0.0  # time of the next change
        self._patience = _PATIENCE[0]
        # the window in which a change is judged
        self._began = 0.0
        self._settling = False  # True if it begins once the requests in flight have been answered
        self._first, self._enough = 0, 0  # answers at its beginning, and from which on it may end
        self._crowded = False  # True if requests were queued
        self._turns = self._long_turns = 0  # of the loop, measured in the window
        self._measured = 0.0  # time of the last measurement of a turn
        # the record of answers and refusals
        self._answers = 0
        self._last = -math.inf  # time of the last answer
        self._seconds = ((-math.inf, 0),) * 2  # the time and the answers when the last second, and this one, began
        self._refused = 0  # refusals of this second
        # requests a second
        self._rate = math.inf
        self._added = 1.0  # to the rate by an answer: one until the first refusal under this rate
        self._earlier = 0  # requests in flight that were sent before the rate was reduced
        self._proven = False  # True if a later one was answered
        self._tokens, self._filled = 0.0, 0.0
        self._debt = 0  # failures, less answers

    # --- admission

    def admit(self, request: Waiting) -> bool:
        """Return whether a request has a slot. If not, it is queued, and told when it has one."""
        if self._running < self.capacity and not self._waiting and not self._failed and self._take(request):
            return True
        self._crowded = True
        self._waiting.append(request)
        return False

    async def acquire(self, weight: int, failed: float | None = None) -> None:
        """Wait for a slot and bytes, again if an attempt ``failed`` at a time; release them later."""
        if failed is None:
            waiter = _Waiter(weight)
            if self.admit(waiter):
                return
        else:
            waiter = _Waiter(weight, failed)
            self._failed.append(waiter)
            self.fill()
        try:
            await waiter.future
        except BaseException:
            if waiter.future.done() and not waiter.future.cancelled():
                self.release(weight)
            else:
                with contextlib.suppress(ValueError):  # it may have been removed already
                    (self._waiting if failed is None else self._failed).remove(waiter)
                self.fill()  # the next one may fit where this one did not
            raise

    async def pause(self, seconds: float) -> bool:
        """Wait before a refused request waits again, for at most ``seconds``: each answer ends the longest pause.

        So they return as fast as the store answers again. Returns whether an answer ended the pause.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._paused[future] = None
        try:
            await asyncio.wait([future], timeout=seconds)
            return future.done()
        finally:
            self._paused.pop(future, None)

    def release(self, weight: int) -> None:
        self._running -= 1
        self._free += weight
        if self._waiting or self._failed:
            self.fill()

    def fill(self) -> None:
        """Give the free slots to the requests that wait."""
        while self._running < self.capacity and (waiting := self._queue() if self._failed else self._waiting):
            request = waiting[0]
            if request.withdrawn:
                waiting.popleft()
            elif self._take(request):
                waiting.popleft()
                request.admitted()
            else:
                return

    def _queue(self) -> collections.deque[Any]:
        """Return the queue that has the next request, if some have failed."""
        failed = self._failed
        return failed if self._last > failed[0].failed or not self._waiting else self._waiting

    def _take(self, request: Waiting) -> bool:
        """Take a free slot, if memory and rate permit it: once the rate does, the queue is looked at again."""
        if self._free < request.weight and self._running:
            return False
        if (self._debt or self._rate < math.inf) and (seconds := self._next_token()) > 0:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(seconds, self._due)
            return False
        self._running += 1
        self._free -= request.weight
        return True

    def _due(self) -> None:
        self._timer = None
        self.fill()

    # --- answers and failures

    def answered(self, now: float) -> None:
        """Record an answer at this time."""
        self._answers += 1
        if self._debt or self._rate < math.inf or self._paused:
            self._improve()
        if now - self._last > _WINDOW:  # no answer for a while
            self._open_window(now)
        self._last = now
        if now - self._seconds[1][0] > 1.0:
            self._begin_second(now)
        if self._goal:
            self._grow(now)
        elif self._answers >= self._enough and now - self._began > _WINDOW / 2:
            self._judge(now)

    def _improve(self) -> None:
        self._debt = max(0, min(_RETRIES, self._debt) - 1)
        if self._earlier:
            self._earlier -= 1
        elif self._rate < math.inf:
            self._proven = True
            self._rate += self._added
            if self._rate > 1e5:  # more than a process can send
                self._rate = math.inf
        if self._paused:
            future = next(iter(self._paused))
            del self._paused[future]
            future.set_result(None)

    def failed(self) -> None:
        """Record a failure after which the request is sent again."""
        self._debt += 1

    def throttled(self, now: float) -> bool:
        """Record a refusal. Returns whether the store throttles: a few refusals are normal."""
        if now - self._seconds[1][0] > 1.0:
            self._begin_second(now)
        self._refused += 1
        if self._rate < math.inf:
            if self._proven:
                self._rate -= min(_TAKEN[0] * math.sqrt(self._rate), _TAKEN[1] * self._rate)
                self._earlier, self._proven, self._added = self._running, False, _ADDED
            elif self._earlier:
                self._earlier -= 1
            return True
        began, answers = self._seconds[0][0], self._answers - self._seconds[0][1]
        normal = _NORMAL * (answers + self._refused)
        if self._refused < normal + 3 * math.sqrt(normal):  # it may be chance
            return False
        self._rate = max(_LEAST, answers / max(_WINDOW, now - began))
        self._earlier, self._proven, self._added = self._running, False, 1.0
        self._tokens, self._filled = 0.0, now
        if self._goal:
            self.capacity = min(_START, self._goal)
        return True

    def _begin_second(self, now: float) -> None:
        this = now, self._answers
        self._seconds = (self._seconds[1] if now - self._seconds[1][0] < 2.0 else this, this)
        self._refused = 0

    @property
    def rate(self) -> float:
        """The requests a second that are permitted; infinity unless the store throttles."""
        return self._rate if self._debt < _RETRIES else min(self._rate, _LEAST * _RETRIES / self._debt)

    def _next_token(self) -> float:
        """Take the permission for a request; return the seconds until there is one, or 0 if it is taken."""
        rate, now = self.rate, self._clock()
        if rate == math.inf:
            return 0.0
        self._tokens = min(max(1.0, 0.05 * rate), self._tokens + (now - self._filled) * rate)
        self._filled = now
        if self._tokens < 0.999:  # not 1: the time until then may be less than the clock resolves
            return (1 - self._tokens) / rate
        self._tokens -= 1
        return 0.0

    # --- requests in flight

    def _grow(self, now: float) -> None:
        self.capacity = min(self._goal, self.capacity + _START - 1)
        if self.capacity == self._goal:
            self._goal = 0
            self._open_window(now)

    def _open_window(self, now: float, settling: bool = False) -> None:
        """Begin to count the replies; if ``settling``, wait until the requests in flight have been answered before."""
        self._settling = settling
        self._began, self._first = -math.inf if settling else now, self._answers
        self._enough = self._answers + (self._running if settling else self.capacity)
        self._crowded = False
        self._turns = self._long_turns = 0

    def _judge(self, now: float) -> None:
        """Keep a change that is tried, or revert it; try more requests, or fewer if the loop is busy."""
        before, busy = self.capacity, self._long_turns * 2 > self._turns
        if not self._settling and (self._crowded or busy) and self._rate == math.inf:
            self._change(now, (self._answers - self._first) / (now - self._began), busy)
        self._open_window(now, self.capacity != before)
        self.fill()

    def _change(self, now: float, rate: float, busy: bool) -> None:
        if self._trial is not None:
            former, best = self._trial
            self._trial = None
            if rate < best * _BETTER if self.capacity > former else rate * _BETTER < best:
                self.capacity = former
                self._again = now + self._patience
                self._patience = min(_PATIENCE[1], 2 * self._patience)
                return
            rate = max(rate, best)
        wanted = max(_RANGE[0], self.capacity * 3 // 4) if busy else min(self._most, self.capacity * 3 // 2)
        if now >= self._again and (wanted < self.capacity if busy else wanted > self.capacity):
            self._trial, self.capacity = (self.capacity, rate), wanted

    def measure_turn(self, now: float) -> None:
        """Measure the turn of the loop in which a reply ended, if none was measured for a while."""
        if self._adapts and now - self._measured > 3 * _LONG:
            self._measured = now
            started = time.thread_time()
            asyncio.get_running_loop().call_soon(lambda: self.turned(time.thread_time() - started))

    def turned(self, seconds: float) -> None:
        self._turns += 1
        self._long_turns += seconds > _LONG
