"""Streams as an iterable dataset of torch: which part each process reads, epochs, and states."""

import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from granular._support.indexing import check_integer
from granular._support.lazy import import_extra
from granular._support.other_names import answering
from granular._support.text import logger
from granular.aio.pipeline.blocking_iterator import DatasetIterator
from granular.aio.pipeline.execution.failures import OnError
from granular.aio.pipeline.iter_dataset import IterDataset, stream_of
from granular.aio.pipeline.map_dataset import MapOperations
from granular.aio.pipeline.position import VERSION, check_plain, check_version
from granular.aio.pipeline.shards import RANK_ARGUMENTS, ShardByTorchRank, ShardOptions, as_shard
from granular.aio.pipeline.streams.flow import number_of
from granular.aio.pipeline.streams.stream import Stream
from granular.aio.pipeline.transforms import ReadOptions
from granular.aio.runtime.portal import run
from granular.errors import GranularError, InvalidArgumentError, StateError, UnsupportedError

torch = import_extra('torch', 'torch')
data = import_extra('torch.utils.data', 'torch')
_Base: Any = data.IterableDataset


class IterableDataset(_Base):  # type: ignore[misc]
    """A stream for ``torch.utils.data.DataLoader``: each element is returned once, over all ranks and their workers.

    ::

        dataset = granular.MapDataset.source(reader).shuffle(seed=1).batch(64)
        loader = torch.utils.data.DataLoader(IterableDataset(dataset), batch_size=None, num_workers=2)

    Elements are assigned to ranks and workers in turn. Those of a batched MapDataset are whole batches (hence
    ``batch_size=None``), and a rank gets the same ones in the same order from any number of workers. ``batch`` of a
    stream combines the elements of each worker.

    Each worker process prefetches, up to the limits of ``read_options``. torchdata's ``StatefulDataLoader`` saves and
    restores it between any two batches, with the same number of workers.

    It has a length, the number of batches of this rank, if it is a batched MapDataset whose elements are all kept.

    Args:
      dataset: a MapDataset or an IterDataset. A stream that has a shard of its own
        (``to_iter_dataset(shard_options=)``) is divided among the workers only.
      shard_options: the shard of this rank, by default ``ShardByTorchRank()``; asked for when it is iterated. Pass
        ``ShardByTorchRank(drop_remainder=True)`` where all ranks must take equally many steps, and
        ``granular.grain.sharding.NoSharding()`` where something else divides the elements, as Accelerate's ``prepare``
        does.
      read_options: the limits of the prefetch, for a MapDataset.
      on_error: as for ``to_iter_dataset``, for a MapDataset. An element of a batched one is a whole batch: to leave out
        single datapoints, pass ``dataset.to_iter_dataset(on_error='skip').batch(64)``.
      sized: True to have a length also if the elements are single ones: their number for this rank. Not with
        ``batch_size`` and workers, each of which may end with a smaller batch: there are then more batches than torch
        expects.

    Raises:
      InvalidArgumentError: if it is not a dataset of granular, or (while iterating) if it cannot be divided, is divided
        already, or is to be divided by Accelerate as well; or if it has processes of its own by ``mp_prefetch`` in a
        worker.
    """

    @answering(
        **RANK_ARGUMENTS,
        batch_size='nothing, and call batch(64) of the dataset',
        shuffle='nothing, and call shuffle(seed=0) of the dataset',
    )
    def __init__(
        self,
        dataset: MapOperations | IterDataset,
        shard_options: ShardOptions | None = None,
        read_options: ReadOptions | None = None,
        on_error: OnError = 'raise',
        *,
        sized: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(dataset, MapOperations):
            dataset = dataset.to_iter_dataset(read_options, on_error=on_error)
        elif read_options is not None or on_error != 'raise':
            raise InvalidArgumentError(
                'read_options and on_error are those of to_iter_dataset: a stream has them already'
            )
        if not isinstance(dataset, IterDataset):
            raise InvalidArgumentError(
                f'expected a MapDataset or an IterDataset, got {type(dataset).__name__}: pass MapDataset.source(...)'
            )
        self._stream = stream_of(dataset).keep_selections()
        self._is_given = shard_options is not None
        self._rank = ShardByTorchRank() if shard_options is None else as_shard(shard_options)
        self._sized = sized
        self._epoch = _SharedNumber()
        self._asked: int | None = None  # the epoch that was set since the last iteration began
        self._loaded: Mapping[str, Any] | None = None  # the state to continue from, while it may be
        self._is_spent = False  # True once its last element was returned: only setting its epoch returns to it
        self._last: Any = None  # a weak reference to the last iterator

    def set_epoch(self, epoch: int) -> None:
        """Iterate another epoch of the dataset from now on, in which shuffled elements have another order.

        Call it before each iteration of the DataLoader; workers see it, persistent ones too. The iteration begins at
        the loaded state if that is in this epoch.

        Raises:
          InvalidArgumentError: if the dataset is repeated infinitely, and so has no other epoch.
        """
        asked = check_integer('epoch', epoch, 0)
        self._stream.at_epoch(asked)
        self._asked = self._epoch.value = asked

    def __iter__(self) -> Iterator[Any]:
        self._check_driver()
        epoch, worker = self._epoch.value, data.get_worker_info()
        stream = self._stream.at_epoch(epoch)
        if worker and any(root.workers and root.workers.num_workers for root in stream.roots()):
            raise InvalidArgumentError(
                'workers of a DataLoader may have no processes, as mp_prefetch needs: leave out the one or the other'
            )
        stream, ranks = self._of_rank(stream, worker.num_workers if worker else 1)
        if worker and worker.num_workers > 1:
            stream = stream.sharded(ShardOptions(worker.id, worker.num_workers))
        elements = _Elements(self, stream, epoch, ranks, worker.num_workers if worker else 1)
        is_due = self._asked is not None or not self._is_spent
        if self._loaded is not None and self._loaded['epoch'] == epoch and is_due:
            elements.resume(self._loaded, anew=self._asked is None and not self._loaded.get('counted'))
        self._asked, self._last = None, weakref.ref(elements)
        return elements

    def _of_rank(self, stream: Stream, workers: int) -> tuple[Stream, int]:
        """Return the part of this rank, and the number of parts: it is divided once, here or by the stream itself."""
        rank = self._rank
        if rank.shard_count * workers == 1:
            return stream, 1
        parts = run(stream.divisions())
        if len(parts) > 1:
            raise InvalidArgumentError(
                f'some of the streams are divided into {max(parts)} shards, others into {min(parts)}: pass the same '
                f'shard_options to each, or to none of them and to IterableDataset'
            )
        (own,) = parts
        stream = stream.expecting(own)  # also of streams that are made later
        if own > 1:
            if self._is_given and rank.shard_count > 1:
                raise InvalidArgumentError('the stream has a shard already: pass shard_options once')
            return stream, own
        return (stream if rank.shard_count == 1 else stream.sharded(rank)), rank.shard_count

    def _check_driver(self) -> None:
        """Refuse to divide what Accelerate divides, or has its main process read for all."""
        if self._is_given or (state := sys.modules.get('accelerate.state')) is None or not state.is_initialized():
            return
        if (count := state.AcceleratorState().num_processes) > 1:
            raise InvalidArgumentError(
                f'Accelerate runs {count} processes, and divides an iterable dataset that it prepares: pass '
                f'IterableDataset(dataset, granular.grain.sharding.NoSharding()) to accelerator.prepare and to the '
                f'Trainer, or IterableDataset(dataset, ShardByTorchRank()) to a DataLoader that is not prepared'
            )

    def __len__(self) -> int:
        """Return the number of batches of this rank; with ``sized``, of elements.

        Raises:
          TypeError: if the number is not known.
        """
        read = self._stream.merged()
        if read is None or not (self._sized or read.is_batched):
            raise TypeError(
                f'{type(self).__name__} has no length: only a batched MapDataset has, as in '
                f'IterableDataset(dataset.batch(64)), or one of single elements with sized=True'
            )
        try:
            own = read.hosts > 1
            return int((read if own or self._rank.shard_count == 1 else read.sharded(self._rank)).length())
        except InvalidArgumentError as error:
            raise TypeError(f'{type(self).__name__} has no length: {error}') from error

    def __bool__(self) -> bool:
        return True

    def __getstate__(self) -> dict[str, Any]:
        self._check_driver()  # in a spawned worker, Accelerate is not active
        return {**self.__dict__, '_last': None}

    def state_dict(self, num_samples: int | None = None, from_beginning: bool | None = None) -> dict[str, Any]:
        """Return the epoch, and the position of this process's last iterator, from which the next iteration continues.

        Once an iterator has ended, or if there is none, it is the start of the epoch. In a program whose DataLoader has
        workers, the positions are theirs: save a ``StatefulDataLoader``.

        Args:
          num_samples, from_beginning: those of Composer; the position follows from the iterator.

        Raises:
          UnsupportedError: for Composer, if elements were read in worker processes.
        """
        last = None if self._last is None else self._last()
        if last is not None and not last.ended:
            state: dict[str, Any] = last.state_dict()
            return state if num_samples is None else {**state, 'counted': True}
        if last is None and num_samples:
            raise UnsupportedError(
                f'Composer has taken {num_samples} samples, of which this process has read none: pass num_workers=0 to '
                f'the DataLoader'
            )
        if last is None and self._loaded is not None and self._loaded['epoch'] == self._epoch.value:
            return dict(self._loaded)
        return {'version': VERSION, 'epoch': self._epoch.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state: the next iteration does, unless a later epoch was set.

        Raises:
          StateError: if it is not a state; in the iteration, if it is that of another pipeline, or of another number
            of workers.
        """
        check_plain(state)
        epoch = number_of(state, 'epoch')
        check_version(state)
        self._loaded = dict(state) if 'state' in state and not state.get('ended') else None
        if self._asked is None or self._asked <= epoch:
            self._epoch.value = epoch
        elif self._loaded is not None:  # else the epoch had ended
            logger.warning('the state is in epoch %s, epoch %s was set, which begins', epoch, self._asked)
        self._last, self._is_spent = None, False

    def taken(self, count: int, is_last: bool) -> None:
        """Note that an iterator has returned so many elements, or its end, 0: the loaded state was continued from."""
        self._is_spent = is_last
        if count != 1:  # which may have been a look at a first batch
            self._loaded = None


class _Elements(DatasetIterator[Any]):
    """The elements of this process, with states that name the epoch, and how many ranks and workers there were."""

    def __init__(self, dataset: IterableDataset, stream: Stream, epoch: int, ranks: int, workers: int) -> None:
        super().__init__(stream)
        self._stream = stream
        self._dataset, self._parts = dataset, {'epoch': epoch, 'ranks': ranks, 'workers': workers}
        self._count = 0
        self._begins_anew: dict[str, Any] | None = None  # where to begin if the state that was loaded has no rest
        self._refused: StateError | None = None  # why nothing is returned
        self.ended = False

    def __next__(self) -> Any:
        if self._refused is not None:
            raise self._refused
        try:
            element = super().__next__()
        except StopIteration:
            if self._begins_anew is None:
                self.ended = True
                self._dataset.taken(0, True)
                raise
            first, self._begins_anew = self._begins_anew, None
            self.set_state(first)
            return next(self)
        if self._count < 2:
            self._count += 1
            self._begins_anew = None
            self._dataset.taken(self._count, self._is_last())
        return element

    def _is_last(self) -> bool:
        """Return whether no element follows, as far as this is known."""
        try:
            return self.get_next_index() >= self._stream.length()
        except GranularError:  # its elements have no numbers
            return False

    def resume(self, state: Mapping[str, Any], anew: bool) -> None:
        """Continue from a state; from the end of an epoch begin anew, so that no iteration is empty, or return nothing.

        It is empty for a program that counts epochs itself: that sets the epoch, or is Composer.
        """
        first = self.get_state()
        self._restore(state)
        self._begins_anew = first if anew else None

    def state_dict(self) -> dict[str, Any]:
        return {**self.get_state(), **self._parts, **({'ended': True} if self.ended else {})}

    def load_state_dict(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        check_plain(state)
        if isinstance(state, Mapping) and 'epoch' in state and state['epoch'] != self._parts['epoch']:
            self._refused = self._refusal(state)
            return
        self._restore(state, changes)
        self._begins_anew = self._refused = None

    def _refusal(self, state: Mapping[str, Any]) -> StateError | None:
        """Return why the epoch that was set cannot begin with a state of another one, as far as that had not ended.

        torchdata would ask first for a batch of the worker whose turn it was there. Where the epoch had ended, it makes
        an iterator of the state, too, but takes nothing from it.
        """
        workers, epoch = self._parts['workers'], self._parts['epoch']
        if workers == 1:
            return None
        return StateError(
            f'the state is in epoch {state["epoch"]}, epoch {epoch} was set, which {workers} workers would begin in '
            f'another order: begin an epoch without a state, or set epoch {state["epoch"]} to continue it'
        )

    def _restore(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        saved = {name: state.get(name) for name in ('ranks', 'workers')}
        own = {name: self._parts[name] for name in saved}
        if saved != own and (own['workers'] > 1 or saved['workers'] not in (None, 1)):
            raise StateError(
                f'the state was saved with {_shown(saved)}, this is one of {_shown(own)}, and workers do not advance '
                f'equally: continue with as many of both, or save and load with num_workers=0'
            )
        self.set_state(state, changes)


def _shown(parts: Mapping[str, Any]) -> str:
    return f'{parts["ranks"] or "unknown"} ranks and {parts["workers"] or "unknown"} workers each'


class _SharedNumber:
    """A number that forked and spawned workers share with the process that they were started from."""

    def __init__(self, value: int = 0) -> None:
        self._memory: Any = torch.tensor([value], dtype=torch.int64).share_memory_()

    @property
    def value(self) -> int:
        return int(self._memory[0])

    @value.setter
    def value(self, value: int) -> None:
        self._memory[0] = value
