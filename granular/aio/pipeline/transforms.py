"""Transformations as objects, options and shards: the words that users of Google Grain know."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from granular.errors import InvalidArgumentError, MissingExtraError


class MapTransform(abc.ABC):
    """A function of each element."""

    @abc.abstractmethod
    def map(self, element: Any) -> Any:
        """The element that takes its place."""


class MapWithIndexTransform(abc.ABC):
    """A function of each element and its index."""

    @abc.abstractmethod
    def map_with_index(self, index: int, element: Any) -> Any:
        """The element that takes its place."""


class RandomMapTransform(abc.ABC):
    """A function of each element and random numbers that belong to its index."""

    @abc.abstractmethod
    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        """The element that takes its place."""


class FilterTransform(abc.ABC):
    """Leaves out some elements."""

    @abc.abstractmethod
    def filter(self, element: Any) -> bool:
        """Whether it stays."""


class FlatMapTransform(abc.ABC):
    """Several elements for each one."""

    @abc.abstractmethod
    def flat_map(self, element: Any) -> Sequence[Any]:
        """The elements that take its place."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Batches of elements.

    Args:
      batch_size: elements in a batch.
      drop_remainder: whether to leave out a last batch that is smaller.
      batch_fn: makes a batch of a list of elements; by default each leaf of them is stacked.
    """

    batch_size: int
    drop_remainder: bool = False
    batch_fn: Callable[[Sequence[Any]], Any] | None = None


Transformation = (
    MapTransform | MapWithIndexTransform | RandomMapTransform | FilterTransform | FlatMapTransform | Batch
    | Callable[[Any], Any]
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """How far a stream reads ahead.

    Args:
      num_threads: threads that decode and transform. Reads need none.
      prefetch_buffer_size: elements that are read ahead at most; 0 for none.
      memory: bytes of elements that are read ahead at most, by the size of those that came; at least one chunk is.
    """

    num_threads: int = 16
    prefetch_buffer_size: int = 500
    memory: int = 512 << 20

    def __post_init__(self) -> None:
        for name in ('num_threads', 'prefetch_buffer_size', 'memory'):
            if not isinstance(value := getattr(self, name), int) or value < 0:
                raise InvalidArgumentError(f'{name} is {value!r}: want an integer from 0 on')


@dataclasses.dataclass(frozen=True)
class MultiprocessingOptions:
    """Worker processes.

    Args:
      num_workers: how many; 0 for none.
      per_worker_buffer_size: chunks or batches that each may have ready.
      start_method: 'spawn', 'forkserver' or 'fork'.
    """

    num_workers: int = 0
    per_worker_buffer_size: int = 2
    start_method: str = 'spawn'


@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """Which part of the data this process has.

    Args:
      shard_index: from 0 on.
      shard_count: how many parts there are.
      drop_remainder: whether all parts are equally long, and what is left over belongs to none.
    """

    shard_index: int
    shard_count: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        if self.shard_count < 1 or not 0 <= self.shard_index < self.shard_count:
            raise InvalidArgumentError(
                f'want 0 <= shard_index < shard_count, got {self.shard_index} and {self.shard_count}'
            )

    def split(self, records: int) -> tuple[int, int]:
        """Where this shard begins and ends, if each shard is contiguous; the first ones get what is left over."""
        each, over = divmod(records, self.shard_count)
        over = 0 if self.drop_remainder else over
        start = each * self.shard_index + min(self.shard_index, over)
        return start, start + each + (self.shard_index < over)


class NoSharding(ShardOptions):
    """All of the data."""

    def __init__(self) -> None:
        super().__init__(0, 1)


class ShardByJaxProcess(ShardOptions):
    """The part of this JAX process."""

    def __init__(self, drop_remainder: bool = False) -> None:
        try:
            import jax
        except ImportError:
            raise MissingExtraError("ShardByJaxProcess needs jax: pip install 'granular[jax]'") from None
        super().__init__(jax.process_index(), jax.process_count(), drop_remainder)


class ShardByTorchRank(ShardOptions):
    """The part of this rank of ``torch.distributed``; all of the data if no group was made."""

    def __init__(self, drop_remainder: bool = False) -> None:
        try:
            import torch.distributed as group
        except ImportError:
            raise MissingExtraError("ShardByTorchRank needs torch: pip install 'granular[torch]'") from None
        ready = group.is_available() and group.is_initialized()
        rank, size = (group.get_rank(), group.get_world_size()) if ready else (0, 1)
        super().__init__(rank, size, drop_remainder)


class RangeDataSource:
    """Numbers, as a data source: those of ``range(start, stop, step)``."""

    def __init__(self, start: int, stop: int, step: int) -> None:
        self._range = range(start, stop, step)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, record_key: int) -> int:
        return self._range[record_key]

    def __repr__(self) -> str:
        return f'RangeDataSource(start={self._range.start}, stop={self._range.stop}, step={self._range.step})'


def operation_of(transformation: Any) -> str:
    """The operation that a transformation is for: the name of its method, ``'batch'``, or ``'map'`` for a function.

    Raises:
      InvalidArgumentError: if it is none.
    """
    if isinstance(transformation, Batch):
        return 'batch'
    for name in ('map_with_index', 'random_map', 'flat_map', 'filter', 'map'):
        if callable(getattr(transformation, name, None)):
            return name
    if not callable(transformation):
        raise InvalidArgumentError(f'{transformation!r:.100} is no transformation')
    return 'map'


def apply(dataset: Any, transformations: Transformation | Sequence[Transformation]) -> Any:
    """A dataset of either kind, with transformations applied."""
    for step in transformations if isinstance(transformations, Sequence) else [transformations]:
        name = operation_of(step)
        if isinstance(step, Batch):
            dataset = dataset.batch(step.batch_size, drop_remainder=step.drop_remainder, batch_fn=step.batch_fn)
        elif hasattr(dataset, name):
            dataset = getattr(dataset, name)(step)
        else:
            raise InvalidArgumentError(f'{name} needs a stream: call to_iter_dataset() before it')
    return dataset
