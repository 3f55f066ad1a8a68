"""Limits on requests and bytes in flight, and on their rate while the store throttles.

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
from typing import Any, Final, Protocol

from granular._support.text import logger

_FIRST, _FEWEST, _MOST = 256, 8, 2048
_START: Final = 4  # requests to a store that has not answered yet
_MORE: Final = 3  # requests that each answer adds to the limit until it is 256: four times as many in a round trip
_BUSY: Final = 32  # requests, to which a busy loop reduces the limit at most
_WINDOW: Final = 0.5  # seconds over which the rate of replies is measured
_PATIENCE: Final = (4.0, 30.0)  # seconds until the next increase after one that did not help: at first, and at most
_RELIEF: Final = 5.0  # seconds until the next decrease after one that cost replies
_BETTER: Final = 1.1
_AS_GOOD: Final = 0.95
_LONG: Final = 0.003  # seconds of processor time for the replies of one turn of the loop, above which it is long
_EVERY: Final = 0.01  # seconds between two measurements of such a turn
_DRIP: Final = 0.1  # seconds in which the tokens of one retry are refilled
_HEARD: Final = 0.05  # share of throttling replies that is ignored: a few are normal for a store
_SURE: Final = 3.0  # standard deviations above this share, from which on it is not chance
_SHORT: Final = 0.5  # seconds in which a store that answers at once after a pause shows its rate
_PAUSE: Final = 1.0  # seconds between two reductions, and of the window in which replies are counted

# A rate loses TAKEN * rate ** power for each refusal, and gains ADDED * rate ** power in a second. Where an equal share
# of all requests is refused, a host above a certain rate loses more than it gains, and others gain: all come to it.
_TAKEN: Final = (0.38, 0.7)  # factor and power
_ADDED: Final = (0.0084, 1.3)
# Added, too, by the larger of two terms, for each squared second without refusals.
_UNREFUSED: Final = (0.0145, 0.5, 0.00055, 1.3)
_REDUCED: Final = 0.8  # of the rate is left after a second with refusals, at the least
_OUTAGE: Final = 20  # refusals one after the other, from which on the store is taken to answer no request
_FEW: Final = 3  # refusals from which nothing is concluded about the store
_SILENCE: Final = 5.0  # seconds without an answer in which only the pauses of each request slow it down
_PROBING: Final = 0.5  # requests a second to a store that answers none
_BURST_RATE: Final = 6.0  # requests a second that are sent at least in the first seconds of refusals: it may be a burst
_BURST_TIME: Final = 20.0  # seconds of refusals from which on they are none, and without refusals until the next burst
_UNLIMITED: Final = 1e5  # requests a second from which on there is no limit
_AT_ONCE: Final = 0.05  # seconds whose requests may be sent at once


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


class Limit:
    """A limit on requests and bytes in flight. A request larger than all memory runs alone.

    At first four requests are sent, and each answer adds three to the limit, up to 256: hosts that start
    together send few that are refused. Afterwards, while requests are queued, the limit is increased by half on trial;
    if that yields more replies per second, it stays and is increased again. So a distant store gets the requests that
    its latency calls for, and a busy one no more than it can answer. If the replies that are ready at a time keep the
    loop busy for long, so that the other coroutines of its program wait, the limit is decreased by a quarter on trial;
    if that yields as many replies per second, it stays and is decreased again. A store that throttles more than one
    request in twenty is sent fewer a second (``Pace``).

    Args:
      requests: the maximum; 0 to adapt it from 256 on, between 32 and 2,048. Never more than half of the file
        descriptors that the process may have, as each request needs one.
      memory: bytes of the replies in flight.
    """

    def __init__(self, requests: int, memory: int) -> None:
        room = max(_FEWEST, descriptors() // 2)
        if requests > room:
            logger.warning('concurrency=%d needs more open files than `ulimit -n` allows: using %d', requests, room)
        self._goal = min(requests or _FIRST, room)  # of the start; 0 once it is reached
        self.capacity = self._before = min(_START, self._goal)
        self._most = min(requests or _MOST, room)
        self._running = 0
        self._free = memory
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._failed: collections.deque[_Waiter] = collections.deque()  # those that wait again
        self._adapts = not requests
        # the measurement window
        self._began = 0.0
        self._replies = 0
        self._crowded = False
        self._turns = self._long_turns = 0  # of the loop, measured in the window
        self._measured = 0.0  # time of the last measurement of a turn
        self._last = float('-inf')  # time of the last successful reply
        self._settling = False  # True until each request in flight was sent after the last change
        self._rate: float | None = None  # replies per second before the last change
        self._again = 0.0  # time of the next change
        self._patience = _PATIENCE[0]
        self._second = float('-inf')  # start of the current second
        self._answered = self._answered_before = self._refused = 0
        self._pace: Pace | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the next request that the pace permits

    @property
    def rate(self) -> float:
        """The requests a second that are permitted; infinity unless the store throttles."""
        return float('inf') if self._pace is None else self._pace.rate(time.monotonic())

    def admit(self, request: Waiting) -> bool:
        """Return whether a request has a slot. If not, it is queued, and told when it has one."""
        if self._running < self.capacity and not self._waiting and not self._failed and self._take(request):
            return True
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

    def release(self, weight: int) -> None:
        self._running -= 1
        self._free += weight
        if self._waiting or self._failed:
            self.fill()

    def succeeded(self, now: float) -> None:
        """Record a successful reply at this time, in seconds."""
        if self._pace is not None:
            self._pace.succeeded(now)
            if self._pace.rate(now) > _UNLIMITED:
                self._pace = None
        if now - self._last > _WINDOW:  # no reply for a while
            self._open_window(now)
        self._last = now
        self._replies += 1
        if now - self._second > _PAUSE:
            self._turn(now)
        self._answered += 1
        if self._waiting or self._failed:
            self._crowded = True
        if self._goal:
            self._grow(now)
        elif self._replies >= self.capacity:
            if self._settling:  # these replies are to the requests that were in flight when the limit changed
                self._settling = False
                self._open_window(now)
            elif now - self._began > _WINDOW / 2:
                before = self.capacity
                self._look(now, self._replies / (now - self._began))
                self._settling = self.capacity != before
                self._open_window(now)

    def _grow(self, now: float) -> None:
        self.capacity = self._before = min(self._goal, self.capacity + _MORE)
        if self.capacity == self._goal:
            self._goal = 0
            self._open_window(now)

    def _open_window(self, now: float) -> None:
        self._began = now
        self._replies = 0
        self._crowded = False
        self._turns = 0
        self._long_turns = 0

    def measure_turn(self, now: float) -> None:
        """Measure the turn of the loop in which a reply ended, if none was measured for a while."""
        if self._adapts and now - self._measured > _EVERY:
            self._measured = now
            started = time.thread_time()
            asyncio.get_running_loop().call_soon(lambda: self.turned(time.thread_time() - started))

    def turned(self, seconds: float) -> None:
        self._turns += 1
        self._long_turns += seconds > _LONG

    def _look(self, now: float, rate: float) -> None:
        """Change the limit if more requests may yield more replies, or fewer as many; revert a change that did not."""
        busy = self._long_turns * 2 > self._turns
        if not (self._crowded or busy) or self._pace is not None:
            return
        before, ceiling = self._before, self.capacity
        self._before = ceiling
        if self._rate is not None and rate < self._rate * (_BETTER if ceiling > before else _AS_GOOD):
            self.capacity = before
            self._rate = None
            self._again = now + _RELIEF
            if ceiling > before:
                self._again = now + self._patience
                self._patience = min(_PATIENCE[1], 2 * self._patience)
        elif now >= self._again and busy and ceiling > _BUSY:
            self.capacity, self._rate = max(_BUSY, ceiling * 3 // 4), rate
        elif now >= self._again and not busy and ceiling < self._most:
            self.capacity, self._rate = min(self._most, ceiling * 3 // 2), rate
        else:
            self._rate = None
        self.fill()

    def throttled(self, now: float) -> bool:
        """Record a throttling reply. Returns whether the throttling rate justifies slowing down."""
        if now - self._second > _PAUSE:
            self._turn(now)
        self._refused += 1
        answers = self._answered + self._answered_before
        if self._pace is None:
            normal = _HEARD * (self._refused + answers)
            if self._refused < normal:
                return False
            if self._goal:
                self.capacity = min(_START, self._goal)
            if self._refused < normal + _SURE * math.sqrt(normal):
                return True  # it may be chance, and the pauses of the requests are enough
        seconds = max(_AT_ONCE, now - self._second) + (_PAUSE if self._answered_before else 0.0)
        if self._pace is None:
            self._pace = Pace(now, answers / seconds if seconds >= _PAUSE else 0.0)
        self._pace.refused(now, answers, self._refused, seconds)
        return True

    def _turn(self, now: float) -> None:
        """Start a new window of answers and refusals, after a second."""
        self._answered_before = self._answered if now - self._second < 2 * _PAUSE else 0
        self._second = now
        self._answered = 0
        self._refused = 0

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
        if self._pace is not None and (seconds := self._pace.take(time.monotonic())) > 0:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(seconds, self._due)
            return False
        self._running += 1
        self._free -= request.weight
        return True

    def _due(self) -> None:
        self._timer = None
        self.fill()


class Pace:
    """The rate of requests to a store that throttles.

    Each refusal takes a part of the rate, in a second no more than a fifth of it; if most requests are refused, the
    rate of answers is left. The rate grows by some percent a second, and by more the longer no request was refused, but
    only while the store answers. Once it has refused everything for a while, the rate is halved each second, down to
    ``_PROBING``, or in the first 20 seconds of refusals, which may be a burst, to that of the equal share of a thousand
    hosts; its answers bring it back, doubling it each second. After an outage, however short, the rate doubles
    each second up to half of the former one. At first, the rate of the last second or two may be known.
    """

    def __init__(self, now: float, known: float = 0.0) -> None:
        self._rate = _UNLIMITED  # at the last answer or refusal
        self._answered, self._heard = now, now  # times of that, and of the last answer
        self._grown = 0.0  # seconds of growth since the last refusal
        self._least, self._second = 0.0, float('-inf')  # what refusals leave of the rate, and when that was determined
        self._ramp = float('inf')  # the rate after a time without answers
        self._row = 0  # refusals since the last answer
        self._known = known  # the rate at the last answer, but for the answers after an outage
        self._former = 0.0  # the rate up to which it doubles
        self._began = self._refused = now  # times of the first refusal of a burst, and of the last one
        self._tokens, self._filled = 0.0, now

    def rate(self, now: float) -> float:
        least = _BURST_RATE if now - self._began < _BURST_TIME else _PROBING
        return max(least, min(self._ramp, self._increased(now)))

    def _increased(self, now: float) -> float:
        seconds = min(_PAUSE, now - self._answered)
        if self._rate < self._former:
            return min(self._former, self._rate * 2**seconds)
        few, root, many, power = _UNREFUSED
        faster = max(few * math.pow(self._rate, root), many * math.pow(self._rate, power))
        added = _ADDED[0] * math.pow(self._rate, _ADDED[1]) + faster * (self._grown + seconds) ** 2
        return min(2 * _UNLIMITED, self._rate + added * seconds)

    def refused(self, now: float, answers: int, refusals: int, seconds: float) -> None:
        """Reduce the rate for a refusal, given the answers and refusals of the last seconds."""
        if now - self._refused > _BURST_TIME:
            self._began = now
        self._refused = now
        rate = self.rate(now)
        self._row += 1
        if self._row >= _OUTAGE:
            self._former = max(self._former, self._known / 2)
        elif _HEARD * (refusals + answers) < refusals < answers:
            self._former = 0.0
        if now - self._second >= _PAUSE:
            if not self._least and seconds < _PAUSE:  # too short a time to judge by
                self._ramp = max(1, answers) / max(_SHORT, seconds)
                return
            if not answers and now - self._heard < _SILENCE:
                return
            self._second = now
            if not answers:
                self._ramp = max(_PROBING, min(self._ramp, refusals / seconds) / 2)
            elif not self._least or refusals > max(_FEW, answers):
                rate = self._least = answers / seconds
            else:
                rate = min(rate, (answers + refusals) / seconds / _REDUCED)
                self._least = _REDUCED * rate
        if answers and self._least:
            self._rate = max(self._least, rate - _TAKEN[0] * math.pow(rate, _TAKEN[1]))
        self._answered, self._grown = now, 0.0

    def succeeded(self, now: float) -> None:
        self._rate = self._increased(now)
        self._row = 0
        if self._least and self._rate >= self._former:
            self._known = self._rate
        self._grown += min(_PAUSE, now - self._answered)
        self._answered = self._heard = now
        self._ramp += 1.0

    def take(self, now: float) -> float:
        """Take the permission for a request; returns the seconds until there is one, or 0 if it is taken."""
        rate = self.rate(now)
        self._tokens = min(max(1.0, rate * _AT_ONCE), self._tokens + (now - self._filled) * rate)
        self._filled = now
        if self._tokens < 0.999:  # not 1: the time until then may be less than the clock resolves
            return (1 - self._tokens) / rate
        self._tokens -= 1
        return 0.0


class Budget:
    """A retry budget shared by all requests to a store: a retry takes tokens, and a success returns them.

    As in the standard mode of AWS's clients: 500 tokens, 5 for a retry and 10 after a timeout. A retry that finds too
    few tokens waits until enough are returned or refilled, instead of failing: a broken store gets a few retries a
    second, however many requests wait, until their time is up.
    """

    def __init__(self) -> None:
        self._tokens = self._most = 500.0
        self.spent = False  # True if retries have taken tokens that are not returned yet, or wait for some
        self._waiting: collections.deque[tuple[float, asyncio.Future[None]]] = collections.deque()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, cost: float) -> None:
        self.spent = True
        if self._tokens >= cost and not self._waiting:
            self._tokens -= cost
            return
        future = asyncio.get_running_loop().create_future()
        entry = (cost, future)
        self._waiting.append(entry)
        self._drip()
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled():
                self.give(cost)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(entry)
            raise

    def give(self, tokens: float) -> None:
        """Return tokens, and admit the retries that wait for them."""
        if self._tokens < self._most:
            self._tokens = min(self._most, self._tokens + tokens)
        while self._waiting and self._tokens >= self._waiting[0][0]:
            cost, future = self._waiting.popleft()
            if not future.done():
                self._tokens -= cost
                future.set_result(None)
        self.spent = bool(self._waiting) or self._tokens < self._most

    def _drip(self) -> None:
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_DRIP, self._dripped)

    def _dripped(self) -> None:
        self._timer = None
        self.give(5.0)
        self._drip()


class Pauses:
    """Throttled requests that wait before they are sent again: each success wakes one of them.

    So they return as fast as the store answers again, and no faster; until then, each waits for its full time.
    """

    def __init__(self) -> None:
        self.waiting: dict[asyncio.Future[None], None] = {}

    async def wait(self, seconds: float) -> bool:
        """Wait for at most ``seconds``. Returns whether a success ended the wait."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting[future] = None
        try:
            await asyncio.wait([future], timeout=seconds)
            return future.done()
        finally:
            self.waiting.pop(future, None)

    def succeeded(self) -> None:
        """Record a success: wake the request that has waited longest."""
        if self.waiting:
            future = next(iter(self.waiting))
            del self.waiting[future]
            future.set_result(None)
