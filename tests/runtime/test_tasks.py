"""Tasks, and coroutines of the user: exceptions that would end a loop, or a program, reach the caller."""

import asyncio

import pytest

from granular.aio.runtime.tasks import HeldError, gather, outcome, start_task
from granular.aio.runtime.user_functions import await_user
from granular.errors import FunctionError


async def raises(error):
    raise error


async def test_tasks_forward_exceptions_that_would_end_their_loop():
    for error in (SystemExit(3), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            await outcome(start_task(raises(error)))
        assert caught.value is error
        assert caught.value.__cause__ is None
        with pytest.raises(type(error)):
            await gather([raises(error), asyncio.sleep(60)])
        with pytest.raises(HeldError):
            await start_task(raises(error))


async def test_task_cancelled_before_its_start_logs_nothing():
    task = start_task(raises(LookupError()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outcome(task)


async def test_cancellation_of_the_caller_is_not_a_function_error():
    began = asyncio.Event()

    async def waits():
        began.set()
        await asyncio.sleep(60)

    task = asyncio.create_task(await_user(waits()))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(FunctionError, match='raised CancelledError'):
        await await_user(raises(asyncio.CancelledError()))
    for error in (StopIteration(1), StopAsyncIteration(1), GeneratorExit(1)):
        with pytest.raises(FunctionError) as caught:
            await await_user(raises(error))
        assert caught.value.__cause__ is error


def test_closed_coroutine_logs_nothing():
    coro = await_user(asyncio.sleep(0))
    coro.send(None)
    coro.close()
