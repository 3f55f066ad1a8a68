"""What all of the synchronous face shares: an asynchronous twin in ``.aio``, closing, and ``with``."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, SupportsIndex, TypeVar

from granular.aio.runtime.bridge import run
from granular.aio.runtime.lifecycle import Opened
from granular.sync.iteration import Iteration

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
    """A reader pickles to its address and options, and is opened again where it is unpickled.

    What is opened there must be what was open here: if it was replaced meanwhile, it is an ``ObjectChangedError``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (type(self), self.aio)


def _reopened(kind: type[Reader[A]], twin: A) -> Reader[A]:
    reader = kind.__new__(kind)
    reader._open(twin)
    return reader


class Rows(Reader[A], Batched):
    """A reader of datapoints that are dicts, of which some fields can be read alone."""

    aio: Any

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.aio.size  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.aio)

    def __getitem__(self, index: SupportsIndex | slice | tuple[SupportsIndex | slice, Any]) -> Any:
        if isinstance(index, tuple):
            return run(self.aio.get(*index))
        return run(self.aio.get(index))

    def get(self, index: SupportsIndex | slice, mask: Any = None) -> Any:
        """A datapoint, or ``{key: [values]}`` for a slice; as ``reader[index, mask]``.

        Args:
          index: an integer, negative from the end, or a slice.
          mask: the keys wanted; of a dataset also a mapping from keys to True, or to the range of a sequence's values
            that is wanted, which is cut to the values that the sequence has.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index beyond the end, or a mask's range that begins there.
          UnknownKeyError: a ``KeyError``, for a key that there is not.
        """
        return run(self.aio.get(index, mask))

    def fetch(self, indices: Any, mask: Any = None) -> list[dict[str, Any]]:
        """Many datapoints in one fan-out: all their values are asked for at once, neighbours in one request.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
          mask: as for ``get``.

        Returns:
          The datapoints, in the order asked.
        """
        return run(self.aio.fetch(indices, mask))

    def copy(self) -> Self:
        """Another reader of the same place, with a life of its own, that shares what is cached."""
        twin = type(self).__new__(type(self))
        twin.aio = self.aio.copy()
        return twin

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return Iteration(self.aio.__aiter__)
