"""What all of the synchronous face shares: an asynchronous twin in ``.aio``, closing, and ``with``."""

from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from granular.aio.lifecycle import Opened
from granular.bridge import run

A = TypeVar('A', bound=Opened)


class Face(Generic[A]):
    """Something opened when it is made, whose methods block.

    Attributes:
      aio: the asynchronous twin, which does the work.
    """

    aio: A

    def _open(self, twin: A) -> None:
        self.aio = twin
        run(twin._ensure_open())

    def __repr__(self) -> str:
        return repr(self.aio)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self.aio.closed

    def close(self) -> None:
        """Close it; more than once is no error."""
        run(self.aio.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run(self.aio.aclose() if kind is None else self.aio.abort())


class Reader(Face[A]):
    """A reader pickles to its address and options, and is opened again where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.aio.__reduce__()[1]
