"""The sync API of :mod:`granular.aio.pipeline.loader.loader`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from numpy.typing import ArrayLike

from granular._support.other_names import Unindexed
from granular.aio.pipeline.execution.hand_over import exclusively
from granular.aio.pipeline.loader import loader as core
from granular.aio.pipeline.loader.collate import Batch, Spec
from granular.aio.pipeline.origins import Origins
from granular.aio.runtime.lifecycle import Closing
from granular.aio.runtime.portal import run, run_close
from granular.sync.base import constructing, documented_by, sync_doc


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
        self._core.driven = False
        self._core.begin_loop()
        return self

    def __next__(self) -> Batch:
        return self._core.__next__()  # type: ignore[no-any-return]

    def load_state_dict(self, state: Mapping[str, Any], changes: Sequence[Any] = ()) -> None:
        exclusively(self._core, lambda: self.aio.load_state_dict(state, changes))

    load = load_state_dict

    def set_next_index(self, index: int) -> None:
        exclusively(self._core, lambda: self.aio.set_next_index(index))

    @documented_by(core.LoaderHandle.indices)
    def indices(self, steps: ArrayLike) -> Origins:
        return self._core.flow.origins(steps)

    @documented_by(core.LoaderHandle.set_epoch)
    def set_epoch(self, epoch: int) -> None:
        exclusively(self._core, lambda: self.aio.set_epoch(epoch))

    def close(self) -> None:
        """Close the loader: stop its fetches, threads and processes. Closing twice is allowed."""
        run_close(self._core.aclose())
