"""Lightning: epochs and exact positions of a ``StatefulDataLoader`` under its Trainer.

A :class:`granular.Loader`, and ``Batches`` of one, need nothing: Lightning saves their states, and tells them epochs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from granular._support.indexing import check_integer
from granular.errors import InvalidArgumentError

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
        once. Of an endless stream, it is the Trainer's ``limit_train_batches``.

    Raises:
      InvalidArgumentError: if the loader has no states, no epochs, or no length.
    """

    def __init__(self, loader: Any, length: int | None = None) -> None:
        self._epochs: Any = loader if hasattr(loader, 'set_epoch') else getattr(loader, 'dataset', None)
        missing = [name for name in ('state_dict', 'load_state_dict') if not hasattr(loader, name)]
        if missing or not hasattr(self._epochs, 'set_epoch'):
            raise InvalidArgumentError(
                f'Resumable: expected a StatefulDataLoader of an IterableDataset of granular, got '
                f'{type(loader).__name__} without {missing or ["dataset.set_epoch"]}'
            )
        self._loader = loader
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
        self._epochs.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the loader."""
        self._loader.load_state_dict(state)
