"""What all of the synchronous face shares: an asynchronous twin in ``.aio``, closing, and ``with``."""

from collections.abc import Sequence
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


class Batched:
    """Something that the loaders of others can ask for many datapoints at once."""

    def fetch(self, indices: Any) -> list[Any]:
        """The datapoints at many indices, in the order asked, in one fan-out."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        # By this name PyTorch's loaders ask for a batch.
        return self.fetch(indices)

    def _getitems(self, indices: Sequence[int]) -> list[Any]:
        # By this name Grain's do.
        return self.fetch(indices)


class Reader(Face[A]):
    """A reader pickles to its address and options, and is opened again where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.aio.__reduce__()[1]
