"""Running a coroutine on each kind of event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final

import uvloop

LOOPS: Final = {'asyncio': asyncio.new_event_loop, 'uvloop': uvloop.new_event_loop}


def run_on(kind: str, main: Callable[[], Awaitable[Any]]) -> Any:
    """Run a coroutine function on an event loop of its own, of a kind in ``LOOPS``."""
    with asyncio.Runner(loop_factory=LOOPS[kind]) as runner:
        return runner.run(main())
