"""Lightning: epochs and exact positions of a ``StatefulDataLoader`` under its Trainer.

A :class:`granular.Loader`, and ``Batches`` of one, need nothing: Lightning saves their states, and tells them epochs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from granular.errors import InvalidArgumentError

__all__ = ['Resumable']


class Resumable:
    """A ``StatefulDataLoader`` for a Lightning Trainer, which tells epochs to samplers alone, not to datasets.

    ::

        iterable = granular.integrations.torch.IterableDataset(dataset)
        loader = Resumable(StatefulDataLoader(iterable, batch_size=None, num_workers=2))

    Pass it to ``Trainer.fit``. Each epoch has another order, and training continues from a checkpoint after the last
    batch of the step.

    Args:
      loader: a DataLoader with ``state_dict``, whose dataset has ``set_epoch``.

    Raises:
      InvalidArgumentError: if they have not.
    """

    def __init__(self, loader: Any) -> None:
        missing = [name for name in ('state_dict', 'load_state_dict', 'dataset') if not hasattr(loader, name)]
        if missing or not hasattr(loader.dataset, 'set_epoch'):
            raise InvalidArgumentError(
                f'Resumable: expected a StatefulDataLoader of an IterableDataset of granular, got '
                f'{type(loader).__name__} without {missing or ["dataset.set_epoch"]}'
            )
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader  # which begins with the first batch: Lightning tells the epoch after `iter`

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return True

    @property
    def batch_sampler(self) -> Self:
        """This object, where Lightning looks for a sampler."""
        return self

    sampler = batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be an epoch."""
        self._loader.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the loader."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of the loader."""
        self._loader.load_state_dict(state)
