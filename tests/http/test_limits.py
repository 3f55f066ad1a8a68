"""Limits of requests in flight, against a store that is simulated by its latency and throughput."""

import asyncio
import math
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from granular.aio.http.limits import Budget, Limit, Pace
from granular.aio.http.retry import jittered


class Store:
    """A simulated store of fixed latency and throughput. Its clock is advanced, not waited for.

    The replies of a round trip come in one turn of the loop, each with its processor time.
    """

    def __init__(self, limit, latency, most, processing=0.0):
        self.limit, self.latency, self.most, self.processing, self.now = limit, latency, most, processing, 100.0

    async def run(self, seconds):
        """Request more than the limit admits; returns the replies per second at the end."""
        held = [asyncio.create_task(self.limit.acquire(1)) for _ in range(5000)]
        await asyncio.sleep(0)
        end, rate = self.now + seconds, 0.0
        while self.now < end:
            out = [task for task in held if task.done()]
            held = [task for task in held if not task.done()]
            round_trip = max(self.latency, len(out) / self.most)
            rate = len(out) / round_trip
            for i, _ in enumerate(out):
                self.now += round_trip / len(out)
                self.limit.succeeded(self.now)
                self.limit.release(1)
                if i % 50 == 0:
                    await asyncio.sleep(0)
            self.limit.turned(len(out) * self.processing)
            held += [asyncio.create_task(self.limit.acquire(1)) for _ in out]
            await asyncio.sleep(0)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        return rate


async def test_distant_store_gets_more_concurrent_requests():
    limit = Limit(0, 1 << 30)
    assert await Store(limit, 0.1, 15_000).run(6) > 10_000
    assert limit.capacity > 1000


async def test_saturated_store_gets_no_more_requests_than_it_answers():
    limit = Limit(0, 1 << 30)
    await Store(limit, 0.001, 10_000).run(4)
    assert limit.capacity == 256


async def test_busy_loop_gets_fewer_requests_if_these_yield_as_much():
    limit = Limit(0, 1 << 30)
    assert await Store(limit, 0.001, 10_000, processing=1e-4).run(3) == pytest.approx(10_000)
    assert limit.capacity == 32


async def test_busy_loop_gets_as_many_requests_as_the_latency_calls_for():
    limit = Limit(0, 1 << 30)
    assert await Store(limit, 0.025, 6000, processing=1e-4).run(3) > 5500
    assert limit.capacity < 200


async def test_fixed_concurrency_is_a_limit():
    limit = Limit(100, 1 << 30)
    await Store(limit, 0.1, 15_000).run(5)
    assert limit.capacity == 100


@given(
    rate=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 5), st.sampled_from(['answer', 'refuse', 'send'])), max_size=60),
)
def test_rate_is_positive_and_admits_no_more_than_it_says(rate, steps):
    pace, now, last, tokens = Pace(0.0), 0.0, 0.0, 1.0
    pace.refused(0.0, 2 * rate, 0, 2.0)
    for seconds, what in steps:
        now += seconds
        before = pace.rate(now)
        if what == 'answer':
            pace.succeeded(now)
            assert pace.rate(now) >= before
        elif what == 'refuse':
            pace.refused(now, int(before), int(before / 10), 1.0)
            assert pace.rate(now) <= max(before, 6.0)
        else:
            tokens = min(max(1.0, 0.05 * before), tokens + (now - last) * before)
            last = now
            admitted = pace.take(now) == 0
            assert not admitted or tokens >= 0.999 - 1e-6
            tokens -= admitted
        assert 0.5 <= pace.rate(now) < math.inf


def test_reduced_rate_returns_soon_and_then_exceeds_what_it_was():
    for rate in (10, 55, 550, 5500):
        pace = Pace(0.0)
        pace.refused(0.0, 2 * rate, 10, 2.0)
        assert pace.rate(0.0) == rate
        pace.refused(0.5, 1, 10, 1.0)  # of the same burst
        assert rate <= pace.rate(0.5) < 1.1 * rate
        before = pace.rate(1.5)
        for _ in range(2000):
            pace.refused(1.5, rate, rate / 2, 1.0)
        assert pace.rate(1.5) == pytest.approx(0.8 * before)  # however many are refused in a second
        assert pace.rate(60.0) < 1.2 * pace.rate(1.5)  # without answers
        for second in range(2, 121):
            pace.succeeded(float(second))
            assert second < 40 or pace.rate(second) >= rate
        assert pace.rate(120.0) >= 2 * rate


@pytest.mark.parametrize('rates', [(1500, 650, 25, 25), (200, 10), (30, 5, 5, 5)])
def test_hosts_of_unequal_rates_come_to_equal_ones(monkeypatch, rates):
    now, chance, total = 0.0, random.Random(0), sum(rates)
    monkeypatch.setattr(time, 'monotonic', lambda: now)
    limits = [Limit(0, 1 << 30) for _ in rates]
    for limit, rate in zip(limits, rates, strict=True):
        for number in range(max(160, 2 * rate)):  # 10 % are refused
            limit.throttled(number / rate) if number % 10 == 9 else limit.succeeded(number / rate)
    now = 1000.0
    due, sums = [0.0] * len(rates), [0.0] * len(rates)
    for step in range(12_000):
        now += 0.01
        found = [min(limit.rate, total) for limit in limits]
        answered = min(1.0, total / sum(found))
        for number, (limit, rate) in enumerate(zip(limits, found, strict=True)):
            due[number] += rate / 100
            sums[number] += rate * (step >= 6000)
            while due[number] >= 1:
                due[number] -= 1
                limit.succeeded(now) if chance.random() < answered else limit.throttled(now)
    assert sum(sums) ** 2 / len(sums) / sum(value**2 for value in sums) > 0.9


def test_store_that_answers_nothing_is_asked_rarely_until_it_answers_again():
    pace = Pace(0.0)
    pace.refused(0.0, 100, 10, 1.0)
    before = pace.rate(2.0)
    pace.refused(2.0, 0, 80, 1.0)
    assert pace.rate(2.0) == before  # only for a moment, maybe
    for second in range(5, 60):
        pace.refused(float(second), 0, 80, 1.0)
    assert pace.rate(60.0) == 0.5
    for number in range(2000):
        pace.succeeded(60.0 + number / 100)
    assert pace.rate(80.0) > 100


@pytest.mark.parametrize(('requests', 'refusals'), [(24, 3), (50, 1), (10, 9), (3, 30)])
def test_burst_of_refusals_is_over_in_twenty_seconds(monkeypatch, requests, refusals):
    now, left = 0.0, [refusals] * requests
    monkeypatch.setattr(time, 'monotonic', lambda: now)
    limit = Limit(0, 1 << 30)
    limit.succeeded(now)
    for step in range(2000):
        now, admitted = step / 100, limit.rate / 100
        while left and admitted > random.Random(step).random():
            admitted -= 1
            if left[0] > 0:
                limit.throttled(now)
                left = [*left[1:], left[0] - 1]
            else:
                limit.succeeded(now)
                left = left[1:]
    assert not left


def test_lasting_refusals_are_no_burst():
    pace = Pace(0.0)
    for second in range(300):
        pace.refused(float(second), 0, 80, 1.0)
        assert pace.rate(float(second)) >= (6.0 if second < 20 else 0.5)
    assert pace.rate(300.0) == 0.5
    pace.refused(400.0, 0, 80, 1.0)
    assert pace.rate(400.0) == 6.0


async def test_bytes_are_bounded_in_order_of_arrival():
    limit = Limit(100, 1000)
    for _ in range(2):
        await limit.acquire(400)
    large = asyncio.create_task(limit.acquire(5000))  # more than there is: alone
    small = asyncio.create_task(limit.acquire(1))
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done()  # it does not overtake
    limit.release(400)
    await asyncio.sleep(0)
    assert not large.done()
    limit.release(400)
    await asyncio.sleep(0)
    assert large.done()
    assert not small.done()
    limit.release(5000)
    await small


async def test_cancelled_waiter_is_skipped():
    limit = Limit(1, 1000)
    await limit.acquire(10)
    first, second = (asyncio.create_task(limit.acquire(10)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    limit.release(10)
    await second


# --- retries


async def test_budget_starts_with_a_hundred_retries_and_grows_with_successes():
    budget = Budget()
    admitted = [asyncio.create_task(budget.take(5)) for _ in range(100)]
    await asyncio.sleep(0)
    assert all(task.done() for task in admitted)
    waiting = [asyncio.create_task(budget.take(5)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    budget.give(10)
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, True, False]
    await waiting[2]  # its tokens drip in


async def test_cancelled_retry_takes_no_tokens():
    budget = Budget()
    for _ in range(100):
        await budget.take(5)
    first, second = (asyncio.create_task(budget.take(5)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    budget.give(5)
    await asyncio.sleep(0)
    assert second.done()


@pytest.mark.parametrize(('share', 'limited'), [(0.01, False), (0.03, False), (0.2, True)])
@pytest.mark.parametrize('rate', [50, 5000])
def test_refusals_of_more_than_a_twentieth_are_throttling(rate, share, limited):
    limits = [Limit(100, 1 << 30) for _ in range(10)]
    for seed, limit in enumerate(limits):
        chance = random.Random(seed)
        for i in range(20_000):
            now = 10 + i / rate
            limit.throttled(now) if chance.random() < share else limit.succeeded(now)
    assert [limit.rate < math.inf for limit in limits] == [limited] * len(limits)


async def test_few_refusals_are_no_reason_to_wait_for_other_answers():
    limit = Limit(100, 1 << 30)
    for i in range(20_000):
        limit.succeeded(10 + i / 5000)
        assert i % 100 != 99 or not limit.throttled(10 + i / 5000)


async def test_limit_of_requests_grows_by_answers_until_the_store_refuses():
    limit = Limit(0, 1 << 30)
    capacities = []
    for i in range(3):
        for _ in range(limit.capacity):
            limit.succeeded(10 + i / 100)
        capacities.append(limit.capacity)
    assert capacities == [16, 64, 256]
    limit = Limit(0, 1 << 30)
    limit.succeeded(10.0)
    limit.throttled(10.01)
    assert limit.capacity == 4
    limit.throttled(10.02)
    assert limit.rate < 10


@given(st.floats(0, 1e9), st.floats(0, 1e9), st.integers(1, 1 << 40))
def test_waits_before_retries_are_bounded_however_many_attempts_failed(first, cap, failures):
    assert 0 <= jittered(first, cap, failures) <= cap
    assert jittered(first, cap, 1) <= first
