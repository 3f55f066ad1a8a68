"""The Loader: batches in order, prefetched, resumable at any step."""

import abc
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import MOST, MOST_WORKERS, check_integer
from granular._support.other_names import answering
from granular._support.text import AT_EPOCH, logger
from granular.aio.pipeline.changes import BatchSize, Grown, declared
from granular.aio.pipeline.describe import block_orders, check_lines, fingerprint, lines_of, saved_lines
from granular.aio.pipeline.execution.failures import OnError
from granular.aio.pipeline.execution.prefetch import END
from granular.aio.pipeline.lines import Applied
from granular.aio.pipeline.loader.collate import DROPPED, Batch, Spec
from granular.aio.pipeline.loader.running import Loading, RunningLoader
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.pipeline.nodes.indices import recurring
from granular.aio.pipeline.nodes.outlines import outline_of
from granular.aio.pipeline.nodes.source import Source
from granular.aio.pipeline.origins import Origins, Traceable
from granular.aio.pipeline.position import VERSION, check_plain, check_version, kind_of_state
from granular.aio.pipeline.summary import ExecutionSummary
from granular.aio.runtime.lifecycle import copied
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError, StateError


class LoaderHandle(Traceable):
    """Base of the loaders of both APIs: its running part is closed once the handle is dropped."""

    _core: RunningLoader
    __copy__ = copied

    def __len__(self) -> int:
        """Return the number of batches of an epoch of a finite source, for this shard.

        Raises:
          TypeError: if the source is endless.
          InvalidArgumentError: if the source has too few datapoints for one batch.
        """
        if (batches := self._core.flow.batches) is None:
            raise TypeError(f'{type(self).__name__} has no length: its source is endless')
        return batches

    def __repr__(self) -> str:
        return f'<{type(self).__name__}: batches of {self._core.flow.batch} from {self._core.flow.source.describe()}>'

    def __bool__(self) -> bool:
        return True

    @property
    def consumed(self) -> int:
        """Number of steps of the source before the next batch, over all shards and epochs: the ``'step'`` of the state.

        Batch ``k`` of an epoch, over all shards, is at step ``epoch * len(source) + k * batch``.
        """
        return self._core.position

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0 on: after the last batch of an epoch, the next one.

        That of an endless source is always 0.
        """
        return self._core.epoch

    @property
    def batch_sampler(self) -> 'EpochSampler':
        """An object with the loader's ``set_epoch``, where Lightning and others look for one: they call it before each
        epoch.
        """
        if self._core.flow.batches is None:
            warn_of_batch_ahead(type(self).__name__)
        return EpochSampler(self)

    @abc.abstractmethod
    def set_epoch(self, epoch: int) -> Any:
        """Let the next loop be an epoch of a finite source: from its first batch on, or from the loaded state on.

        ::

            for epoch in range(loader.epoch, 3):
                loader.set_epoch(epoch)
                async for batch in loader:
                    train_step(batch)

        The loop resumes a state that was loaded if the state is in this epoch, also after a look at the first batch.
        Without it, each loop is the next epoch. The loops of an endless source continue each other: it has one epoch.

        Args:
          epoch: the number of the epoch, from 0 on. The order of an epoch depends only on it and the seed.
        """

    def get_next_index(self) -> int:
        """Return the number of the next batch of this shard, from 0 on, over all epochs.

        Raises:
          StateError: if it is between two numbers, because the loader resumed from a state of another batch size or
            number of shards: ``set_next_index`` continues at a number.
        """
        return self._core.flow.number_at(self.consumed)

    @abc.abstractmethod
    def set_next_index(self, index: int) -> Any:
        """Continue with a batch, by its number over all epochs, as from a state; those before it are not read.

        ::

            loader.set_next_index(1234)  # batch 1234 of a training that began with this loader

        Args:
          index: the number of the batch, from 0 on.
        """

    @abc.abstractmethod
    def indices(self, steps: ArrayLike) -> Any:
        """Return which datapoints batches are made of, from lengths alone: nothing is read.

        ::

            following = loader.get_next_index()
            print(await loader.indices(range(following, following + 100)))  # those of the next 100 batches

        Args:
          steps: numbers of batches of this shard, from 0 on, over all epochs; an integer, a range or an array.

        Raises:
          InvalidArgumentError: as for ``indices`` of a MapDataset.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain JSON, the position of the next batch, independent of prefetched batches.

        :func:`granular.describe_state` says what it holds.
        After the last batch of an epoch, the next batch is the first one of the
        next epoch.
        """
        source, epochs = self._core.flow.source, self._core.flow.epochs_if_open()
        length = {} if epochs is None else {'length': epochs.length}
        return {
            'version': VERSION, 'step': self.consumed, **length, 'round': self._core.flow.turns.stride,
            'seed': source.seed, 'pipeline': saved_lines(source), 'stages': outline_of(source),
        }  # fmt: skip

    save = state_dict

    @abc.abstractmethod
    def load_state_dict(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> Any:
        """Continue from a state; also possible while iterating. Drops prefetched batches.

        A state of granular 0.21, ``{'step': ..., 'seed': ...}``, is compared by these.

        Args:
          state: from ``state_dict``.
          changes: what is different in this source, as :mod:`granular.changes` declares it.

        Raises:
          StateError: if this is not a state, or belongs to a different source, or was saved with a batch size that does
            not divide its place in the epoch; the message names the differences.
          InvalidArgumentError: if ``changes`` is not a list of changes.
        """

    def fingerprint(self) -> list[str]:
        """Return one line per stage; a state fits every loader with the same lines."""
        return [*fingerprint(self._core.flow.source), f'Loader(batch={self._core.flow.batch})']

    def stats(self) -> dict[str, float]:
        """Return counters of what was loaded, throughput, waiting times, and read-ahead.

        ``batches``, ``datapoints`` and ``bytes``; ``batches_per_second`` and ``bytes_per_second``; ``wait_seconds``
        that the consumer waited, and ``consumer_seconds`` that it spent itself, of which its thread computed
        ``consumer_cpu_seconds``; ``loop_cpu_seconds`` that the thread of the event loop computed; batches ``ready`` and
        ``in_flight``; failed datapoints (``errors``). What is loaded again after a state was loaded is counted again.

        If the two threads computed together almost all of the time, the Python interpreter is the limit, which runs one
        thread at a time: load in worker processes (``mp``). The log says so after 200 batches.
        """
        flow = self._core.flow
        ahead = flow.ahead
        ready, in_flight = ahead.counts()
        times = {'wait_seconds': ahead.waited, 'consumer_seconds': ahead.consumed}
        seconds = max(sum(times.values()), 1e-9)
        times |= {'consumer_cpu_seconds': ahead.consumer_cpu, 'loop_cpu_seconds': ahead.loop_cpu}
        counts = flow.counts
        rates = {'batches_per_second': counts.batches / seconds, 'bytes_per_second': counts.bytes / seconds}
        read_ahead = {'ready': ready, 'in_flight': in_flight}
        return {**counts._asdict(), **rates, **times, **read_ahead, 'errors': flow.errors.count}

    def execution_summary(self) -> ExecutionSummary:
        """Return where the time went: a table of reads, decoding, the stages of the source, and the consumer.

        The stages are timed from ``granular.metrics.time_stages()`` on.

        Returns:
          As ``execution_summary`` of the iterator of a stream, from the first batch on.

        Raises:
          InvalidArgumentError: if nothing was timed.
        """
        if len(summary := self._core.flow.summary()) == 1:
            raise InvalidArgumentError('nothing was timed: call granular.metrics.time_stages() before the first batch')
        return summary

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Step and message of failed datapoints, the last 1,000."""
        return list(self._core.flow.errors.recent)


def running_part(loader: LoaderHandle) -> RunningLoader:
    return loader._core


def remaining_batches(loader: LoaderHandle) -> int | None:
    """Return the number of batches that follow; None if the source is endless."""
    core = loader._core
    return None if (epochs := core.flow.epochs) is None else epochs.rounds(core.position)


def warn_of_batch_ahead(name: str) -> None:
    """Log what Lightning, which looks for samplers, does with batches that have no length."""
    if 'lightning' in sys.modules or 'pytorch_lightning' in sys.modules:
        logger.warning(
            '%s: has no length: Lightning reads one batch ahead of it, which a resumed training does not '
            'see: pass granular.integrations.lightning.Resumable(batches, length=n) to the Trainer',
            name,
        )


class EpochSampler:
    """Tells a loader its epochs: what Lightning looks for as the sampler of a loader."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    @property
    def sampler(self) -> 'EpochSampler':
        """This object, as the sampler of batches is that of elements."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Call ``set_epoch`` of the loader."""
        self._loader.set_epoch(epoch)


class Loader(LoaderHandle):
    """Load batches from a source, in an order that depends only on seed and step, however they are fetched.

    ::

        source = sources.Epochs(reader, shuffle=True, seed=0)
        async with Loader(source, batch=64) as loader:
            async for batch in loader:
                train_step(batch['image'], batch['label'])  # arrays of shape (64, ...)

    Batch ``k`` of shard ``s`` contains the source's steps from ``(k * num_shards + s) * batch`` on. Over an endless
    source (``Epochs``, ``Sample``) it never ends. Over a finite source one loop is one epoch, which ends with the last
    step that gives every shard a full batch: ``iter`` begins the next one, unless nothing was taken since the last
    ``iter``, ``load_state_dict`` or ``set_epoch``, or the last loop failed. A loop that is left is not continued. Each
    epoch of a ``shuffle`` has another order. Threads that share a loader share one iterator of it.

    Memory is bounded by ``memory`` and the two batches that the consumer may hold.

    Args:
      source: a source of ``sources``, a reader, a MapDataset, a sequence, or an object with ``fetch``; its datapoints
        are dicts of numbers, text and arrays. Texts of a batch may differ in length; bytes become an array of objects.
      batch: datapoints per batch.
      prefetch: maximum number of batches to fetch ahead.
      workers: threads that decode and transform; with ``mp``, processes, of which at most ``prefetch + 1`` are started,
        as each computes a whole batch. Reads run on the event loop and need no threads.
      recycle_after: reuse the memory of a batch after this many more batches were returned; False for fresh memory.
        With ``mp``, memory is reused as soon as no array uses it.
      shard_id, num_shards: number of this loader and number of loaders; each gets its own part of every global batch.
      mp: a start method ('spawn', 'forkserver', 'fork') or context of :mod:`multiprocessing`, to load batches in worker
        processes, which return them in shared memory. Unless forked, source and functions must be picklable.
      on_error: policy for a datapoint that fails: 'raise', 'skip', which makes its batch smaller, even empty, so
        that all hosts take the same steps, or a function of step and error that returns a replacement, returns None to
        skip the datapoint, or raises. Store errors are always raised.
      memory: maximum number of bytes of batches ahead, and of datapoints that are decoded for them at a time, in all
        worker processes together; at least one batch is loaded.

    Raises:
      InvalidArgumentError: while iterating, if the source has too few datapoints for one batch.
      DatapointError: if keys, dtypes or shapes of a datapoint differ from those of the first, or a list has values that
        an array cannot hold unchanged. Values are never cast or cut.
      Exception: errors of the source are raised unchanged, with a note that names the step. The loader stays at the
        batch that failed: load a later step to skip it.
      WorkerError: if a worker process died.
    """

    batch: int
    prefetch: int
    workers: int
    shard_id: int
    num_shards: int
    recycle_after: int | bool

    @answering(
        batch_size='batch',
        num_workers="workers, which are threads (mp='spawn' makes them processes)",
        prefetch_factor='prefetch, which counts batches',
        pin_memory="granular.integrations.torch.Batches(loader, device='cuda'), which pins memory",
        drop_last='nothing: a finite source ends with its last full batch',
        shuffle='sources.Epochs(source, shuffle=True), or MapDataset.shuffle, as the source',
        seed='sources.Epochs(source, seed=0), or MapDataset.shuffle(seed=0), as the source',
        sampler='MapDataset.slice(indices) as the source',
        collate_fn='MapDataset.batch(64, batch_fn=...) with to_iter_dataset() instead of a Loader',
        persistent_workers='nothing: workers persist',
        device='granular.integrations.torch.Batches(loader, device=...)',
        generator='MapDataset.shuffle(seed=0) as the source',
        timeout='nothing: requests end within IOConfig.retry_time',
        dataset='source',
        rank='shard_id',
        world_size='num_shards',
    )
    def __init__(
        self,
        source: Any,
        batch: int,
        prefetch: int = 8,
        workers: int = 32,
        recycle_after: int | bool = False,
        shard_id: int = 0,
        num_shards: int = 1,
        mp: Any = None,
        on_error: OnError = 'raise',
        memory: int = 2 << 30,
    ) -> None:
        batch, prefetch = check_integer('batch', batch, 1), check_integer('prefetch', prefetch, 0)
        workers = check_integer('workers', workers, 1, None if mp is None else MOST_WORKERS)
        if not isinstance(recycle_after, bool):
            recycle_after = check_integer('recycle_after', recycle_after, 0)
        if mp is not None:
            from granular.aio.pipeline.execution.workers import start_context

            mp = start_context(mp)
        num_shards, memory = check_integer('num_shards', num_shards, 1), check_integer('memory', memory, 0)
        shard_id = check_integer('shard_id', shard_id, 0, num_shards - 1)
        self.source: Source = recurring(convert(source)).keep_selections()
        if self.source.sparse and on_error == 'raise':
            raise InvalidArgumentError(DROPPED)
        self.batch = batch
        self.prefetch = prefetch
        self.workers = workers
        self.shard_id = shard_id
        self.num_shards = num_shards
        self.recycle_after = recycle_after
        flow = Loading(self.source, batch, prefetch, workers, recycle_after, shard_id, num_shards, mp, on_error, memory)
        self._core = RunningLoader(flow)
        self._core.close_with(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._core.close_with(self)

    def load_state_dict(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        check_plain(state)
        step = state.get('step') if isinstance(state, Mapping) else None
        if type(step) is not int or not 0 <= step < 1 << 63:
            remedy = ': load it into an iterator of the stream, or call set_next_index with the next batch'
            raise StateError(
                f'expected what state_dict() of a Loader or granular.load_state(path) returned, got '
                f'{kind_of_state(state)}{remedy if isinstance(state, Mapping) and "state" in state else ""}'
            )
        length = state.get('length')
        if length is not None and (type(length) is not int or not 1 <= length < 1 << 63):
            raise StateError(f'expected the length of an epoch, got {length!r:.100} in {state!r:.200}')
        if 'version' in state:  # those of granular 0.21 have none
            check_version(state)
        made = self._check_source(state, declared(changes))
        self._core.check()
        epochs = self._core.flow.epochs_if_open()
        own = length if epochs is None else epochs.length
        epoch, place = divmod(step, length or own or 1 << 63)
        if place % self.batch:
            raise StateError(
                f'the state was saved with another batch size: its step {place}{" of an epoch" if own else ""} is not '
                f"a multiple of this loader's {self.batch} datapoints per batch"
            )
        self._check_changes(made, place)
        described = self._core.flow.source.describe()
        if own is not None and place > own:
            raise StateError(f'the state is at step {step}, {described} has {own} datapoints')
        self._core.load(epoch * (own or 0) + place)

    load = load_state_dict

    def _check_source(self, state: Mapping[str, Any], changes: Sequence[Any]) -> list[Applied]:
        """Check that a state belongs to this source. Returns the declared changes that were made."""
        seed = state.get('seed', self.source.seed)
        if seed != self.source.seed and (self.source.seed or 'pipeline' not in state):  # the stages have seeds, too
            raise StateError(
                f'the state was saved with seed {seed}, this source has {self.source.seed}: pass the seed of the state'
            )
        if 'pipeline' in state:
            return check_lines(state['pipeline'], lines_of(self.source), changes)
        if orders := block_orders(self.source):
            raise StateError(
                f'the state is of granular 0.21, which has none of the orders {orders} of this source: continue with '
                f'another order, or {AT_EPOCH}'
            )
        return []

    def _check_changes(self, made: Sequence[Applied], place: int) -> None:
        """Refuse a change of the number of datapoints within an epoch."""
        for change, was, now in made:
            if isinstance(change, Grown | BatchSize) and place:
                raise StateError(
                    f'{change!r} is declared, {str(now)!r} in place of {str(was)!r}, and {place} datapoints of an '
                    f'epoch were taken, which it divides differently: load a state of the end of an epoch'
                )

    def set_next_index(self, index: int) -> None:
        number = check_integer('index', index, 0, MOST)
        self._core.load(int(self._core.flow.first_steps(np.array([number]))[0]))

    async def indices(self, steps: ArrayLike) -> Origins:
        return await offload(self._core.flow.origins, steps)

    def set_epoch(self, epoch: int) -> None:
        self._core.set_epoch(check_integer('epoch', epoch, 0))

    async def spec(self) -> Spec:
        """Return the dtype and shape of each key of a datapoint, determined from the first datapoint."""
        return await self._core.spec()

    def __aiter__(self) -> Self:
        self._core.begin_loop()
        return self

    async def __anext__(self) -> Batch:
        batch = await self._core.take()
        self._core.received(batch)
        if batch is END:
            raise StopAsyncIteration
        return cast(Batch, batch)

    async def aclose(self) -> None:
        """Close the loader: stop its fetches, threads and processes. Closing twice is allowed."""
        await self._core.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
