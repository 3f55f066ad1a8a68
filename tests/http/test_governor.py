"""The governor, against stores that are simulated by latency, throughput and refusals."""

import asyncio
import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granular.aio.http.governor import Governor
from granular.aio.http.retry import jittered

MEMORY = 1 << 30


class Clock:
    """A clock that is set, not waited for."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Store:
    """A simulated store of fixed latency and throughput. Its clock is advanced, not waited for.

    The replies of a round trip come in one turn of the loop, each with its processor time.
    """

    def __init__(self, governor, latency, most, processing=0.0):
        self.governor, self.latency, self.most, self.processing, self.now = governor, latency, most, processing, 100.0

    async def run(self, seconds):
        """Request more than the limit admits; returns the replies per second at the end."""
        held = [asyncio.create_task(self.governor.acquire(1)) for _ in range(5000)]
        await asyncio.sleep(0)
        end, rate = self.now + seconds, 0.0
        while self.now < end:
            out = [task for task in held if task.done()]
            held = [task for task in held if not task.done()]
            round_trip = max(self.latency, len(out) / self.most)
            rate = len(out) / round_trip
            for i, _ in enumerate(out):
                self.now += round_trip / len(out)
                self.governor.answered(self.now)
                self.governor.release(1)
                if i % 50 == 0:
                    await asyncio.sleep(0)
            self.governor.turned(len(out) * self.processing)
            held += [asyncio.create_task(self.governor.acquire(1)) for _ in out]
            await asyncio.sleep(0)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        return rate


async def test_distant_store_gets_more_concurrent_requests():
    governor = Governor(0, MEMORY, time.monotonic)
    assert await Store(governor, 0.1, 15_000).run(6) > 10_000
    assert governor.capacity > 1000


async def test_saturated_store_gets_no_more_requests_than_it_answers():
    governor = Governor(0, MEMORY, time.monotonic)
    await Store(governor, 0.001, 10_000).run(4)
    assert governor.capacity == 256


async def test_busy_loop_gets_fewer_requests_if_these_yield_as_much():
    governor = Governor(0, MEMORY, time.monotonic)
    assert await Store(governor, 0.001, 10_000, processing=1e-4).run(3) == pytest.approx(10_000)
    assert governor.capacity == 32


async def test_busy_loop_gets_as_many_requests_as_the_latency_calls_for():
    governor = Governor(0, MEMORY, time.monotonic)
    assert await Store(governor, 0.025, 6000, processing=1e-4).run(3) > 5500
    assert governor.capacity < 200


async def test_fixed_concurrency_is_a_limit():
    governor = Governor(100, MEMORY, time.monotonic)
    await Store(governor, 0.1, 15_000).run(5)
    assert governor.capacity == 100


class Request:
    """A request that waits for its turn until it is withdrawn."""

    weight = 0

    def __init__(self):
        self.sent = self.withdrawn = False

    def admitted(self):
        self.sent = True


def throttled(rate, clock=None):
    """Return a governor whose store answered at a rate for two seconds, and then refused some of as many."""
    clock = clock or Clock()
    governor = Governor(0, MEMORY, clock)
    for number in range(2 * rate):
        clock.now = 100 + number / rate
        governor.answered(clock.now)
    while governor.rate == math.inf:
        governor.throttled(clock.now)
    return governor, clock


@given(
    rate=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 5), st.sampled_from(['answer', 'refuse', 'send', 'fail'])), max_size=60),
)
async def test_rate_is_positive_and_admits_no_more_than_it_says(rate, steps):
    governor, clock = throttled(rate)
    last, tokens = clock.now, 0.0
    for seconds, what in steps:
        clock.now += seconds
        before = governor.rate
        if what == 'answer':
            governor.answered(clock.now)
            assert governor.rate >= before
        elif what == 'refuse':
            governor.throttled(clock.now)
            assert 0.79 * before <= governor.rate <= before
        elif what == 'fail':
            governor.failed()
            assert governor.rate <= before
        else:
            tokens = min(max(1.0, 0.05 * before), tokens + (clock.now - last) * before)
            last, request = clock.now, Request()
            if governor.admit(request):
                governor.release(0)
                tokens -= 1
                assert tokens > -0.01
            request.withdrawn = True
            governor.fill()
        assert 0 < governor.rate < math.inf


@pytest.mark.parametrize('rate', [10, 55, 550, 5500])
def test_reduced_rate_returns_soon_and_then_exceeds_what_it_was(rate):
    governor, clock = throttled(rate)
    assert governor.rate == pytest.approx(rate, rel=0.1)
    governor.answered(clock.now)
    before = governor.rate
    for _ in range(2000):
        governor.throttled(clock.now)
    taken = min(0.2 * before, 0.5 * before**0.5)
    assert governor.rate == pytest.approx(before - taken)  # however many are refused before the next answer
    for number in range(20 * rate):
        governor.answered(clock.now + number / rate)
    assert governor.rate > 2 * rate


@pytest.mark.parametrize('rates', [(1500, 650, 25, 25), (200, 10), (30, 5, 5, 5)])
def test_hosts_of_unequal_rates_come_to_equal_ones(rates):
    chance, total = random.Random(0), sum(rates)
    governors = [throttled(rate)[0] for rate in rates]
    due, sums = [0.0] * len(rates), [0.0] * len(rates)
    for step in range(12_000):
        found = [min(governor.rate, total) for governor in governors]
        answered = min(1.0, total / sum(found))
        for number, (governor, rate) in enumerate(zip(governors, found, strict=True)):
            due[number] += rate / 100
            sums[number] += rate * (step >= 6000)
            while due[number] >= 1:
                due[number] -= 1
                now = 1000 + step / 100
                governor.answered(now) if chance.random() < answered else governor.throttled(now)
    assert sum(sums) ** 2 / len(sums) / sum(value**2 for value in sums) > 0.85


def test_store_that_answers_nothing_is_asked_rarely_until_it_answers_again():
    governor, clock = throttled(100)
    before = governor.rate
    for _ in range(80):
        governor.throttled(clock.now)
        governor.failed()
    assert governor.rate == before  # it may be only for a moment
    rates = []
    for _ in range(1000):
        governor.throttled(clock.now)
        governor.failed()
        rates.append(governor.rate)
    assert rates == sorted(rates, reverse=True)
    assert rates[30] <= 5
    assert rates[-1] < 0.5
    for _ in range(3):
        governor.answered(clock.now)
    assert governor.rate >= before


@pytest.mark.parametrize(('requests', 'refusals'), [(24, 3), (50, 1), (10, 9), (3, 30)])
def test_burst_of_refusals_is_over_in_twenty_seconds(requests, refusals):
    left, clock = [refusals] * requests, Clock()
    governor = Governor(0, MEMORY, clock)
    governor.answered(clock.now)
    for step in range(2000):
        clock.now, admitted = 100 + step / 100, governor.rate / 100
        while left and admitted > random.Random(step).random():
            admitted -= 1
            if left[0] > 0:
                governor.throttled(clock.now)
                governor.failed()
                left = [*left[1:], left[0] - 1]
            else:
                governor.answered(clock.now)
                left = left[1:]
    assert not left


async def test_bytes_are_bounded_in_order_of_arrival():
    governor = Governor(100, 1000, time.monotonic)
    for _ in range(2):
        await governor.acquire(400)
    large = asyncio.create_task(governor.acquire(5000))  # more than there is: alone
    small = asyncio.create_task(governor.acquire(1))
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done()  # it does not overtake
    governor.release(400)
    await asyncio.sleep(0)
    assert not large.done()
    governor.release(400)
    await asyncio.sleep(0)
    assert large.done()
    assert not small.done()
    governor.release(5000)
    await small


async def test_cancelled_waiter_is_skipped():
    governor = Governor(1, 1000, time.monotonic)
    await governor.acquire(10)
    first, second = (asyncio.create_task(governor.acquire(10)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    governor.release(10)
    await second


# --- failures


async def test_hundred_failures_are_sent_again_at_once_and_answers_permit_more():
    clock = Clock()
    governor = Governor(0, MEMORY, clock)

    def admitted():
        request = Request()
        if sent := governor.admit(request):
            governor.release(0)
        request.withdrawn = True
        governor.fill()
        return sent

    for _ in range(99):
        governor.failed()
        assert admitted()
    governor.failed()
    assert [admitted() for _ in range(3)] == [True, False, False]
    clock.now += 0.2  # five a second
    assert [admitted() for _ in range(3)] == [True, False, False]
    for _ in range(100):
        governor.failed()
    governor.answered(clock.now)
    assert all(admitted() for _ in range(100))


async def test_answer_ends_the_longest_pause():
    governor = Governor(0, MEMORY, Clock())
    pauses = [asyncio.create_task(governor.pause(seconds)) for seconds in (60, 60, 0.01, 60)]
    await asyncio.sleep(0)
    assert await pauses[2] is False
    governor.answered(100.0)
    assert await pauses[0] is True
    pauses[1].cancel()
    await asyncio.sleep(0)
    governor.answered(100.0)
    assert await pauses[3] is True
    governor.answered(100.0)  # nothing waits


@pytest.mark.parametrize(('share', 'limited'), [(0.01, False), (0.03, False), (0.2, True)])
@pytest.mark.parametrize('rate', [50, 5000])
def test_refusals_of_more_than_a_twentieth_are_throttling(rate, share, limited):
    governors = [Governor(100, MEMORY, time.monotonic) for _ in range(10)]
    for seed, governor in enumerate(governors):
        chance = random.Random(seed)
        for i in range(20_000):
            now = 10 + i / rate
            governor.throttled(now) if chance.random() < share else governor.answered(now)
    assert [governor.rate < math.inf for governor in governors] == [limited] * len(governors)


async def test_few_refusals_are_no_reason_to_wait_for_other_answers():
    governor = Governor(100, MEMORY, time.monotonic)
    for i in range(20_000):
        governor.answered(10 + i / 5000)
        assert i % 100 != 99 or not governor.throttled(10 + i / 5000)


async def test_requests_in_flight_grow_by_answers_until_the_store_refuses():
    governor = Governor(0, MEMORY, Clock())
    capacities = []
    for i in range(3):
        for _ in range(governor.capacity):
            governor.answered(100 + i / 100)
        capacities.append(governor.capacity)
    assert capacities == [16, 64, 256]
    governor = Governor(0, MEMORY, Clock())
    governor.answered(100.0)
    governor.throttled(100.01)
    governor.throttled(100.02)
    assert governor.capacity == 4
    assert governor.rate < 10


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 1 << 40))
def test_waits_before_retries_are_bounded_however_many_attempts_failed(first, cap, failures):
    assert 0 <= jittered(first, cap, failures) <= cap
    assert jittered(first, cap, 1) <= first
