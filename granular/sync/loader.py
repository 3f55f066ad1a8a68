"""The sync API of :mod:`granular.aio.loader.loader`."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from granular._other_names import Unindexed
from granular.aio.execution.prefetch import END
from granular.aio.loader import loader as core
from granular.aio.loader.collate import Batch, Spec
from granular.aio.runtime.bridge import run, run_close
from granular.aio.runtime.lifecycle import Closing
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.nesting import refuse_within
from granular.aio.runtime.user_functions import computing
from granular.sync.base import constructing, sync_doc


class Loader(Unindexed, core.LoaderHandle, Closing):
    __doc__ = sync_doc(core.Loader)

    aio: core.Loader
    _no_index: ClassVar = (
        'batches have no indices, only `for`: for torch, pass it to granular.integrations.torch.Batches, or its source '
        'to a DataLoader'
    )

    @constructing(core.Loader)
    def __init__(self) -> None: ...

    def _open(self, counterpart: core.Loader) -> None:
        self.aio, self._core = counterpart, core.running_part(counterpart)

    @property
    def spec(self) -> Spec:
        """The dtype and shape of each key of a datapoint, determined from the first datapoint."""
        return run(self._core.spec())

    def __iter__(self) -> Self:
        self._core.begin_epoch()
        return self

    def __next__(self) -> Batch:
        core = self._core
        if core.is_expected() and not computing.get():
            refuse_within(self._next_code, self)
        try:
            batch: Any = run(core.take())
            if batch is END:
                raise StopIteration
            result: Batch = batch
            core.ahead.received()
            core.received()
        except BaseException:
            core.take_back()
            raise
        return result

    _next_code: ClassVar = __next__.__code__

    def load(self, state: Mapping[str, Any], strict: bool = True) -> None:
        refuse_within(self._next_code, self)
        run(self._load(state, strict))

    async def _load(self, state: Mapping[str, Any], strict: bool) -> None:
        await ensure_event_loop()  # tasks may only be touched on their loop
        self.aio.load(state, strict)

    load_state_dict = load

    def close(self) -> None:
        """Close the loader: stop its fetches, threads and processes. Closing twice is allowed."""
        run_close(self._core.aclose())
