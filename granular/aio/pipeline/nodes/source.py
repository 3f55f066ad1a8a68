"""Sources: the inputs of a pipeline, and the one protocol of all of its nodes, ``fetch`` of many indices."""

import abc
import operator
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Protocol, Self, SupportsIndex, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granular._support.indexing import Ints, indices_of
from granular._support.typing import Element_co
from granular.aio.pipeline.execution.failures import Failure, capturing, of_function, without_failures
from granular.aio.pipeline.lines import Line
from granular.aio.pipeline.nodes.patterns import Pattern
from granular.aio.runtime.threads import Calls, map_threads
from granular.aio.runtime.tracebacks import shorten
from granular.aio.runtime.user_functions import CONTROL, call_user, function_error, is_of_signal
from granular.errors import GranularError, InvalidArgumentError, OutOfRangeError
from granular.metrics import record_time, timing


@runtime_checkable
class RandomAccessDataSource(Protocol[Element_co]):
    """Anything that is readable by index: a list, an array, a reader, a map-style dataset of torch or Hugging Face.

    ::

        class Squares:
            def __len__(self):
                return 100

            def __getitem__(self, index):
                return index**2

        dataset = granular.MapDataset.source(Squares())
    """

    def __len__(self) -> int:
        """Return the number of datapoints."""
        ...

    def __getitem__(self, record_key: int, /) -> Element_co:
        """Return the datapoint at an index."""
        ...


class _Indexed(Protocol[Element_co]):
    def __getitem__(self, index: int, /) -> Element_co: ...


class _Fetching(Protocol[Element_co]):
    def fetch(self, indices: Any, /) -> Sequence[Element_co] | Awaitable[Sequence[Element_co]]: ...


T = TypeVar('T')
AnySource = _Indexed[T] | _Fetching[T] | Callable[[int], T]
"""A source of elements of a type, as :func:`convert` takes them."""


_NUMBERS: Final = frozenset((int, float, bool))


class Source(abc.ABC):
    """A lazy sequence of datapoints, fetched many at a time.

    Attributes:
      endless: True if every step >= 0 exists; otherwise only steps less than ``len`` exist.
      seed: seed of the order, part of the state of a loader; 0 if nothing is random.
      sparse: True if some datapoints may be None because a filter removed them.
      parents: the upstream sources.
    """

    _spent = 0.0  # seconds in this stage, over all threads and workers, while stage timing is enabled (timing.on)
    _made = 0  # datapoints, or batches, produced in that time
    endless = False
    seed = 0
    sparse = False
    unlisted = False  # True if it has the description of its parent, and is not listed beside it
    passes_epochs = False  # True if an epoch of it is made of the same epoch of its parents
    elementwise = False  # True if each datapoint is computed of the one at the same index of its parent
    varies = False  # True if it chooses other elements of its parents in each epoch, or in another order
    kept = False  # True if it chooses in each epoch as in the first one, because ``in_first_epoch`` made it
    parents: 'tuple[Source, ...]' = ()

    @abc.abstractmethod
    async def fetch(self, indices: ArrayLike) -> list[Any]:
        """Return the datapoints at the given steps, in the order of the steps."""

    async def fetch_undecoded(self, indices: ArrayLike) -> Calls[list[Any]] | None:
        """Read datapoints, and return the calls that decode them, for threads; None if they can only be fetched."""
        return None

    async def get(self, index: SupportsIndex) -> Any:
        """Return the datapoint at a step."""
        return without_failures(await self.fetch([operator.index(index)]))[0]

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def __repr__(self) -> str:
        return f'<{self.describe()}>'

    def describe(self) -> str:
        """Describe the stage in one line, for printed pipelines."""
        return self.parents[0].describe() if self.unlisted else type(self).__name__

    def line(self) -> Line:
        """Return the description of the stage, by which a state belongs to a pipeline."""
        return Line(self.describe())

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that decide which elements of its sources it chooses, plain JSON; {} if it has none."""
        return {}

    def user_functions(self) -> tuple[Any, ...]:
        """Return the functions of the user that the stage calls."""
        return (self.fn,) if hasattr(self, 'fn') else ()

    def select(self, fields: Sequence[str]) -> Self | None:
        """Return this source restricted to some fields, or None if it cannot read fields separately."""
        return None

    def keep_selections(self, warn: bool = True) -> 'Source':
        """Return this source with the same elements in each selection in all epochs; itself if it has them already.

        In ``dataset.shuffle(seed=0)[10:]``, index ``len + i`` is an element of the next epoch of the shuffle, which
        has others at these positions: here the stages beneath the selection choose as in their first epoch, and those
        after it, such as a later ``shuffle``, differ from epoch to epoch. The first epoch is the same, and so is the
        description, of which states are made. Stages beneath ``repeat``, which counts epochs itself, stay as they are.

        Call it once, when a loader is made that counts epochs: it logs a warning for each selection that it changes,
        unless ``warn`` is False.
        """
        return self

    def in_first_epoch(self) -> 'Source':
        """Return this source with the choices of its first epoch in all epochs; itself if it has no others.

        Random functions still differ from epoch to epoch.
        """
        return self

    def pattern(self) -> Pattern | None:
        """Return the pattern in which the elements of an epoch come from several datasets in turn; None if they come
        from one, in batches, or at random.
        """
        return None

    def owners(self, indices: Ints) -> Ints:
        """Return the number of the dataset of each index, from 0 to ``datasets`` of the pattern, if that is not 0."""
        return np.zeros_like(indices)

    async def nullable_keys(self) -> frozenset[str]:
        """Return the keys of which some values may be None, or of another type, as the source of the data tells.

        A function may change the values: behind it, no key is known to be one.
        """
        return frozenset()

    def stored_nbytes(self) -> float | None:
        """Return the mean size in bytes of a datapoint, as it is stored, or None if it is unknown."""
        return None

    async def measure(self, path: Sequence[str]) -> Ints | None:
        """Return the sizes of the value at a path of keys, one for each datapoint; None if they are not known."""
        return None

    async def parts(self, key: str, indices: Ints, begins: Ints, stops: Ints) -> list[NDArray[Any]] | None:
        """Return parts of the arrays of a key, without reading the rest; None if they can only be read whole."""
        return None

    def record_time(self, count: int, seconds: float) -> None:
        """Add to the time of the stage in which it produced so many datapoints or batches."""
        self._made += count
        self._spent += seconds
        record_time(self._metrics_label(), count, seconds)

    def spent_times(self) -> tuple[int, float]:
        """Return the number of datapoints or batches that were timed, and the seconds that they took."""
        return self._made, self._spent

    def _metrics_label(self) -> str:
        return self.describe()

    async def release(self) -> None:
        """Cancel read-ahead that has no consumer left, when a consumer ends."""
        for parent in self.parents:
            await parent.release()


def stages_of(stage: Any) -> Iterator[Any]:
    """Yield a stage and those before it, from the sources on; one that is read by several comes as many times."""
    for parent in stage.parents:
        yield from stages_of(parent)
    yield stage


async def nullable_keys_of(sources: Iterable[Any]) -> frozenset[str]:
    """Return the nullable keys of all of several sources or streams."""
    return frozenset[str]().union(*[await source.nullable_keys() for source in sources])


def varying_stage(source: Source) -> Source | None:
    """Return the last stage of a source that varies from epoch to epoch; None if all epochs have the same elements."""
    if source.varies:
        return source
    parents = source.parents if source.passes_epochs else ()
    return next((found for parent in parents if (found := varying_stage(parent)) is not None), None)


def all_stages(source: Source) -> list[Source]:
    """Return a source and those before it, without datasets of fields, each once, in an order of the pipeline alone."""
    stages: dict[int, Source] = {}
    pending = [source]
    while pending:
        stage = pending.pop()
        if id(stage) not in stages:
            stages[id(stage)] = stage
            pending += stage.parents
    return [stage for stage in stages.values() if isinstance(stage, Source)]


def parents_of(stage: Any) -> tuple[Any, ...]:
    """Return the sources of a stage; a dataset of fields, which chooses of others itself, counts as one without any."""
    return stage.parents if isinstance(stage, Source) else ()


def length_of(source: Any) -> int:
    """Return the length of a source; raise ``InvalidArgumentError`` if the source has no length."""
    try:
        return call_user(len, source)
    except GranularError as error:
        shorten(error)  # a pipeline asks each of its stages
        raise
    except TypeError:
        name = source.describe() if isinstance(source, Source) else type(source).__name__
        remedy = 'give it a __len__, or pass length= to sources.Epochs'
        if any(kind.__name__ == 'IterableDataset' for kind in type(source).__mro__):  # of torch or Hugging Face
            remedy = 'it is a stream: make a dataset of it by granular.convert(stream, directory), and open that'
        raise InvalidArgumentError(f'{name} has no length: {remedy}') from None
    except OverflowError:
        raise InvalidArgumentError(
            f'{type(source).__name__}: expected a length below 2**63: take a part of it'
        ) from None


async def map_in_threads(
    calls: Sequence[Callable[[Any, int], Any]],
    datapoints: Sequence[Any],
    doing: str,
    indices: Sequence[int],
    before: Calls[Any] | None = None,
) -> list[Any]:
    """Call user functions on each datapoint and its index, one after another, in threads. The calls in ``before``,
    which may fill in the datapoints, are made first.

    None and ``Failure`` pass through unchanged. Errors get a note that names the index, and the stage of the function.
    """
    capture = capturing.get()
    first, *rest = calls

    def single(i: int) -> Any:
        datapoint = datapoints[i]
        if datapoint is None or type(datapoint) is Failure:
            return datapoint
        try:
            return first(datapoint, indices[i])
        except BaseException as error:
            return failed(error, indices[i], first)

    def several(i: int) -> Any:
        datapoint, index = datapoints[i], indices[i]
        try:
            for fn in calls:
                if datapoint is None or type(datapoint) is Failure:
                    return datapoint
                datapoint = fn(datapoint, index)
        except BaseException as error:
            return failed(error, index, fn)
        return datapoint

    def failed(raised: BaseException, index: int, call: Any) -> Failure:
        error = function_error(raised) if isinstance(raised, CONTROL) and not is_of_signal(raised) else raised
        try:
            if is_of_signal(error):
                raise error
            stage = getattr(call, '__self__', None)
            where = f', in {stage.describe()}' if isinstance(stage, Source) else ''
            error.add_note(f'while {doing} the datapoint at index {index}{where}')
            if not capture or not of_function(error):
                raise error
            return Failure(index, error)
        finally:
            del raised, error  # their traceback refers to this frame, and so would keep all of them alive

    outer = capturing.set(False)  # fetches of the user's functions raise their errors
    try:
        return await map_threads(several if rest else single, len(indices), before)
    finally:
        capturing.reset(outer)


def timed(stage: Source, call: Callable[[Any, int], Any]) -> Callable[[Any, int], Any]:
    """Return a stage's function, wrapped to measure its time if stage timing is enabled."""
    if not timing.on:
        return call

    def counted(datapoint: Any, index: int) -> Any:
        began = time.perf_counter()
        try:
            return call(datapoint, index)
        finally:
            stage.record_time(1, time.perf_counter() - began)

    counted.__dict__['__self__'] = stage  # named by errors, as the stage of a method is
    return counted


def steps_of(indices: ArrayLike) -> Ints:
    """Convert steps, which are integers >= 0, to an array."""
    if isinstance(indices, slice):
        raise InvalidArgumentError(f'steps: expected integers, got {indices}')
    steps = indices_of(indices, np.iinfo(np.int64).max, 'steps')
    if (np.asarray(indices) < 0).any():
        raise OutOfRangeError('steps count from 0')
    return steps


def estimate_nbytes(datapoints: Sequence[Any]) -> int:
    """Estimate the size of datapoints in bytes, from a few of them."""
    few = datapoints[:: max(1, len(datapoints) // 4)]
    return sum(map(nbytes, few)) * len(datapoints) // max(1, len(few))


def nbytes(datapoint: Any) -> int:
    if (kind := type(datapoint)) in _NUMBERS:
        return 64
    if kind is dict or isinstance(datapoint, Mapping):
        return 64 + sum(map(nbytes, datapoint.values()))
    if isinstance(datapoint, bytes | bytearray | str):
        return 64 + len(datapoint)
    if isinstance(datapoint, list | tuple):
        return 64 + sum(map(nbytes, datapoint))
    try:
        size = getattr(datapoint, 'nbytes', 0)
    except Exception:  # of a sparse tensor, which cannot tell
        return 64
    return 64 + (size if isinstance(size, int) else 0)


def check_not_empty(node: Source, length: int, indices: Ints) -> None:
    """Raise ``OutOfRangeError`` for any index of a stage without elements, which has no epoch that it could be in."""
    if not length and len(indices):
        raise OutOfRangeError(f'index {indices[0]} is out of range: {node.describe()} has no elements')


class Node(Source):
    """A source that is computed from other sources."""

    divides = False  # True if the stage over a contiguous part of its source is that part of the stage
    selects = False  # True if its datapoints are those of its sources, which may be able to select fields
    passes_epochs = True
    keeps_turns = False  # True if its elements come from several datasets in turn when those of its source do

    def __init__(self, *parents: Source) -> None:
        self.parents = parents
        self.sparse: bool = any(parent.sparse for parent in parents)
        self.endless: bool = all(parent.endless for parent in parents)
        self.seed: int = next((parent.seed for parent in parents if parent.seed), 0)

    def __len__(self) -> int:
        return len(self.parents[0])

    def select(self, fields: Sequence[str]) -> Self | None:
        if not self.selects:
            return None
        narrowed = [source for parent in self.parents if (source := parent.select(fields)) is not None]
        return self.copy_over(*narrowed) if len(narrowed) == len(self.parents) else None

    async def nullable_keys(self) -> frozenset[str]:
        return await nullable_keys_of(self.parents) if self.selects else frozenset()

    def copy_over(self, *parents: Source) -> Self:
        """Return a copy of the stage over other sources."""
        return self.changed(parents=parents)

    def changed(self, **changes: Any) -> Self:
        """Return a copy of the stage with other attributes."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__, **changes)
        return copy

    def pattern(self) -> Pattern | None:
        return self.parents[0].pattern() if self.keeps_turns else None

    def owners(self, indices: Ints) -> Ints:
        return self.parents[0].owners(indices)

    def keep_selections(self, warn: bool = True) -> Source:
        return self._over([parent.keep_selections(warn) for parent in self.parents] if self.passes_epochs else ())

    def in_first_epoch(self) -> Source:
        stage = self._over([parent.in_first_epoch() for parent in self.parents] if self.passes_epochs else ())
        return stage.changed(varies=False, kept=True) if self.varies else stage

    def _over(self, parents: Sequence[Source]) -> Self:
        """Return the stage over other sources; itself for the same sources, and for none."""
        same = all(new is old for new, old in zip(parents, self.parents, strict=False))
        return self if same else self.copy_over(*parents)

    def stored_nbytes(self) -> float | None:
        return self.parents[0].stored_nbytes() if len(self.parents) == 1 else None
