"""The sync API of :mod:`granular.aio.loader.loader`."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, cast

from granular.aio.execution.failures import OnError
from granular.aio.execution.prefetch import END
from granular.aio.loader import loader as core
from granular.aio.loader.collate import Batch, Spec
from granular.aio.runtime.bridge import run
from granular.aio.runtime.loops import ensure_event_loop


class Loader(core.LoaderHandle):
    """Batches of a source, in order; the same for the same seed and step, however they are fetched.

    ::

        source = granular.sources.Epochs(reader, shuffle=True, seed=0)
        with granular.Loader(source, batch=64) as loader:
            for batch in loader:
                train_step(batch['image'], batch['label'])  # arrays of shape (64, ...)

    Batches are fetched on the library's background loop while the training step runs. Batch ``k`` of shard ``s`` holds
    the source's steps from ``(k * num_shards + s) * batch`` on. Over an endless source (``Epochs``, ``Sample``)
    iteration never ends; over a finite one it ends with the last step that gives every shard a whole batch.

    Memory is bounded by ``prefetch + 1`` batches and the requests in flight for them.

    Args:
      source: a source, a reader, a callable, or any indexable object; its datapoints are dicts of numbers and arrays.
      batch: datapoints per batch.
      prefetch: number of batches to prefetch.
      workers: number of threads that decode and transform; reads run on the event loop. With ``mp``, number of
        processes.
      recycle_after: reuse a batch's memory after this many more batches were returned; False for new memory each time.
      shard_id, num_shards: this loader's index among several loaders, and their number. Each loader gets its own part
        of every global batch.
      mp: a start method ('spawn', 'forkserver', 'fork') or context of :mod:`multiprocessing`, to assemble batches in
        worker processes and return them through shared memory. The source and functions must pickle, unless forked.
      on_error: how to handle a datapoint that failed to load: 'raise', 'skip', which makes its batch smaller, or a
        function of step and error that returns a replacement, or None to skip it, or raises. Store errors are always
        raised.

    Raises (while iterating):
      DatapointError: for a datapoint whose keys, dtypes or shapes differ from those of the first. Values are never cast
        or truncated.
      Exception: any error of the source, unchanged, with a note of the step. The loader stays at the failed batch: to
        continue after it, ``load`` a later step.
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
        self._core = self.aio._core

    @property
    def spec(self) -> Spec:
        """The dtype and shape of each key of a datapoint, determined from the first datapoint."""
        return run(self._core.spec())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch, _ = run(self._core.take(), self._core.take_back)
        if batch is END:
            raise StopIteration
        return cast(Batch, batch)

    def load(self, state: Mapping[str, int]) -> None:
        run(self._load(state))

    async def _load(self, state: Mapping[str, int]) -> None:
        await ensure_event_loop()  # tasks may only be touched on their loop
        self.aio.load(state)

    load_state_dict = load

    def close(self) -> None:
        """Close the loader: stop its fetches, threads and processes. Closing twice is allowed."""
        run(self._core.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
