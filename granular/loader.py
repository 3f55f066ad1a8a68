"""The loader of a training loop that blocks: the synchronous face of :mod:`granular.aio.loader`."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, cast

from granular.aio import loader as core
from granular.aio.assembly import Batch, Spec
from granular.aio.loops import need_loop
from granular.aio.pipeline.ahead import END
from granular.aio.pipeline.errors import OnError
from granular.bridge import run


class Loader:
    """Batches of a source, in order, the same for the same seed and step however they are fetched.

    They are fetched on the library's background loop while the training step runs. Batch ``k`` of shard ``s`` holds the
    source's steps from ``(k * num_shards + s) * batch`` on. Over an endless source (``Epochs``, ``Sample``) it goes on
    for ever; over a finite one it ends with the last step that gives every shard a whole batch.

    Memory is bounded by ``prefetch + 1`` batches and what is in flight for them.

    Args:
      source: a source, a reader, a callable, or anything that can be indexed; its datapoints are dicts of numbers and
        arrays.
      batch: datapoints in a batch.
      prefetch: batches that are fetched ahead.
      workers: threads that decode and transform. Reads need none: they are the event loop's. With ``mp``, processes.
      recycle_after: use the memory of a batch again after this many more were handed out; False for fresh memory.
      shard_id, num_shards: which of several loaders this is, each of which gets its own part of every global batch.
      mp: a start method ('spawn', 'forkserver', 'fork') or context of :mod:`multiprocessing`, to make batches in worker
        processes, which hand them over in shared memory. Source and functions must pickle, unless they are forked.
      on_error: what becomes of a datapoint that cannot be made: 'raise', 'skip', which makes its batch smaller, or a
        function of step and error, which gives one in its place, or None to skip it, or raises. What a store fails with
        is always raised.

    Raises (while iterating):
      DatapointError: for a datapoint whose keys, dtypes or shapes are not those of the first. Never is one cast or cut.
      Exception: what the source raised, as it was raised, with a note of the step. The loader stays at the batch that
        failed: to go on behind it, ``load`` a later step.
      WorkerError: if a worker process died.
    """

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
    ) -> None:
        self.aio = core.Loader(source, batch, prefetch, workers, recycle_after, shard_id, num_shards, mp, on_error)

    @property
    def spec(self) -> Spec:
        """Of each key the dtype and shape of a datapoint, learned from the first one."""
        return run(self.aio.spec())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch, _ = run(self.aio.take(), self.aio.take_back)
        if batch is END:
            raise StopIteration
        return cast(Batch, batch)

    @property
    def consumed(self) -> int:
        """The source's steps that lie before the next batch: those of all shards, as ``'step'`` of ``save``."""
        return self.aio.consumed

    def save(self) -> dict[str, int]:
        """The state: plain JSON, of the batch that comes next, whatever is prefetched."""
        return self.aio.save()

    def load(self, state: Mapping[str, int]) -> None:
        """Go on from a state, also while running: what was prefetched is dropped.

        Raises:
          StateError: if it is no state, or one of another seed or other batches.
        """
        run(self._load(state))

    async def _load(self, state: Mapping[str, int]) -> None:
        await need_loop()  # its tasks may only be touched there
        self.aio.load(state)

    state_dict = save
    load_state_dict = load

    def stats(self) -> dict[str, float]:
        """What was handed out, and how fast; who waited for whom; what is read ahead.

        Batches, datapoints and bytes; batches and bytes per second; seconds that the consumer waited, and seconds that
        it spent on its own; batches that are ready and in flight; datapoints that could not be made.
        """
        return self.aio.stats()

    def fingerprint(self) -> list[str]:
        """What it reads, a line for each stage: a state fits a loader with the same."""
        return self.aio.fingerprint()

    @property
    def errors(self) -> list[tuple[int, str]]:
        """Step and message of the datapoints that could not be made, the last thousand."""
        return self.aio.errors

    def close(self) -> None:
        """End: cancel what is being fetched, its threads and processes. More than once is no error."""
        run(self.aio.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
