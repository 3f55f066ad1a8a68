"""Lightning: epochs and exact positions of a ``StatefulDataLoader`` under its Trainer.

A :class:`granular.Loader`, and ``Batches`` of one, need nothing: Lightning saves their states, and tells them epochs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from granular._support.indexing import check_integer
from granular.aio.pipeline.streams.flow import number_of
from granular.errors import InvalidArgumentError, StateError

__all__ = ['Resumable']


class Resumable:
    """A ``StatefulDataLoader``, or batches without a length, for a Lightning Trainer.

    Lightning tells epochs to samplers alone, not to datasets. And it reads one batch ahead of a loader without a
    length, before it saves the state: a resumed training would not see that batch. So this has a length.

    ::

        iterable = granular.integrations.torch.IterableDataset(dataset.batch(64))
        loader = Resumable(StatefulDataLoader(iterable, batch_size=None, num_workers=2))

    Pass it to ``Trainer.fit``. Each epoch has another order, and training continues from a checkpoint after the last
    batch of the step.

    Args:
      loader: a DataLoader with ``state_dict``, whose dataset has ``set_epoch``; or ``Batches`` of a stream.
      length: the number of batches of an epoch, where the loader does not know it, as behind a filter: count them
        once. Of a Loader of an endless source, it is the Trainer's ``limit_train_batches``. An endless stream has one
        epoch only.

    Raises:
      InvalidArgumentError: if the loader has no states, no epochs, or no length.
    """

    def __init__(self, loader: Any, length: int | None = None) -> None:
        has_epochs = hasattr(loader, 'set_epoch')
        missing = [name for name in ('state_dict', 'load_state_dict') if not hasattr(loader, name)]
        if missing or not (has_epochs or hasattr(getattr(loader, 'dataset', None), 'set_epoch')):
            raise InvalidArgumentError(
                f'Resumable: expected a StatefulDataLoader of an IterableDataset of granular, got '
                f'{type(loader).__name__} without {missing or ["dataset.set_epoch"]}'
            )
        self._loader = loader if has_epochs else _OfEpochs(loader)
        self._length = None if length is None else check_integer('length', length, 1)
        try:
            len(self)
        except TypeError as error:
            raise InvalidArgumentError(
                f'Resumable: {error}: Lightning reads one batch ahead of such a loader, which a resumed training would '
                f'not see: pass length=, the number of batches of an epoch'
            ) from None

    def __iter__(self) -> Iterator[Any]:
        # Begins with the first batch, as Lightning tells the epoch after `iter`. `yield from` would close the batches.
        for batch in self._loader:  # noqa: UP028
            yield batch

    def __len__(self) -> int:
        return len(self._loader) if self._length is None else self._length

    def __bool__(self) -> bool:
        return True

    @property
    def batch_sampler(self) -> Self:
        """This object, where Lightning looks for a sampler."""
        return self

    sampler = batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be an epoch."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the loader."""
        self._loader.load_state_dict(state)


class _OfEpochs:
    """A DataLoader with states that name the epoch: in another one it begins anew.

    With the state of an epoch that was left early, it would begin with the batch of the worker that followed there.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._epoch = 0  # of the last iteration
        self._asked: int | None = None  # the epoch that was set since it began
        self._loaded: Mapping[str, Any] | None = None  # the state to continue from

    def __iter__(self) -> Iterator[Any]:
        asked, loaded = self._asked, self._loaded
        self._asked = self._loaded = None
        if loaded is not None and asked in (None, loaded['epoch']):
            asked = loaded['epoch']
            self._loader.load_state_dict(loaded['loader'])
        self._epoch = self._epoch if asked is None else asked
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._loader.dataset.set_epoch(epoch)
        self._asked = epoch

    def state_dict(self) -> dict[str, Any]:
        return dict(self._loaded or {'epoch': self._epoch, 'loader': self._loader.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        number_of(state, 'epoch')
        if 'loader' not in state:
            raise StateError("the state has no 'loader': it is not one of Resumable around a DataLoader")
        self._loaded = state
