"""The lock of what event loops and threads share."""

import asyncio
import threading

from granular.aio.runtime.lock import Lock
from tests.support.programs import run_in_child


def test_lock_across_loops_is_fair_and_survives_closed_loops():
    lock, order = Lock(), []

    async def enter(i):
        async with lock.turn():
            order.append(i)
            await asyncio.sleep(0)

    async def several():
        await asyncio.gather(*map(enter, range(5)))

    asyncio.run(several())
    assert order == [0, 1, 2, 3, 4]

    async def holds():
        async with lock.turn():
            await asyncio.sleep(60)

    loop = asyncio.new_event_loop()
    task = loop.create_task(holds())
    loop.run_until_complete(asyncio.sleep(0))
    assert lock.queue
    loop.close()  # under the one that holds it
    asyncio.run(asyncio.wait_for(enter(5), 20))
    assert order[-1] == 5
    task._log_destroy_pending = False


def test_forked_child_does_not_inherit_locks_of_threads():
    lock, within, release = Lock(), threading.Event(), threading.Event()

    async def hold():
        async with lock.turn():
            within.set()
            release.wait(30)

    async def enter():
        async with lock.turn():
            return True

    thread = threading.Thread(target=asyncio.run, args=[hold()])
    thread.start()
    within.wait(30)
    try:
        assert run_in_child(lambda: asyncio.run(enter())) == 0
    finally:
        release.set()
        thread.join()
