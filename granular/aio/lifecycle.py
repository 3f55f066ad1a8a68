"""Opening and closing, the same way for everything that is opened: readers, writers, loaders."""

import abc
import asyncio
from types import TracebackType
from typing import Any, Self

from granular.errors import ClosedError


class Opened(abc.ABC):
    """Something that is opened once, by ``await X.open(...)``, ``async with X(...)`` or its first use, and closed."""

    def __init__(self) -> None:
        self._state = 'new'
        self._opening = asyncio.Lock()

    @classmethod
    async def open(cls, *args: Any, **kwargs: Any) -> Self:
        """Make one with the constructor's arguments and open it."""
        self = cls(*args, **kwargs)
        await self._ensure_open()
        return self

    @abc.abstractmethod
    async def _open(self) -> None: ...

    @abc.abstractmethod
    async def _close(self) -> None: ...

    async def _abort(self) -> None:
        await self._close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._state == 'closed'

    async def _ensure_open(self) -> None:
        if self._state != 'open':
            async with self._opening:
                if self._state == 'new':
                    await self._open()
                    self._state = 'open'
            self._check_open()

    def _check_open(self) -> None:
        if self._state != 'open':
            state = 'is closed' if self._state == 'closed' else 'is not open yet: use `await open(...)` or `async with`'
            raise ClosedError(f'{self!r} {state}')

    async def aclose(self) -> None:
        """Close it; more than once is no error."""
        state, self._state = self._state, 'closed'
        if state == 'open':
            await self._close()

    async def abort(self) -> None:
        """Close it after an error: what a writer has not published is dropped."""
        state, self._state = self._state, 'closed'
        if state == 'open':
            await self._abort()

    async def __aenter__(self) -> Self:
        await self._ensure_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.aclose()
        else:
            await self.abort()
