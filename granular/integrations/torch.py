"""PyTorch (extra ``torch``): streams as an iterable dataset, and batches as tensors.

Readers and MapDatasets need nothing from here: a ``torch.utils.data.DataLoader`` takes them as they are, and asks for
each batch at once, by ``__getitems__``.
"""

from collections.abc import Mapping
from typing import Any

from granular._lazy import need
from granular.aio.pipeline.iter_dataset import IterOperations
from granular.aio.pipeline.nodes.operations import MapOperations
from granular.aio.pipeline.transforms import ReadOptions, ShardByTorchRank, ShardOptions
from granular.errors import InvalidArgumentError, StateError
from granular.integrations import batches as core
from granular.sync.pipeline import DatasetIterator, IterDataset

torch = need('torch', 'torch')
data = need('torch.utils.data', 'torch')
_Base: Any = data.IterableDataset


class IterableDataset(_Base):  # type: ignore[misc]
    """A stream for ``torch.utils.data.DataLoader``: each element comes once, over all ranks and their workers.

    Elements go to ranks and workers in turn. Over a dataset that was batched (``DataLoader(..., batch_size=None)``),
    these are whole batches, and a rank gets the same ones in the same order from any number of workers.

    It reads ahead in each worker process, up to the limits of ``read_options``. torchdata's ``StatefulDataLoader``
    saves and restores it between any two batches, with the same number of workers.

    Args:
      dataset: a MapDataset or an IterDataset. A stream that has a shard of its own
        (``to_iter_dataset(shard_options=)``) is divided among the workers alone.
      shard_options: which rank this is; by default that of ``torch.distributed``. Pass
        ``ShardByTorchRank(drop_remainder=True)`` where all ranks must take as many steps.
      read_options: how far to read ahead, of a MapDataset.

    Raises:
      InvalidArgumentError: if it is no dataset of granular, or (while iterating) one that cannot be divided, or that
        has processes of its own by ``mp_prefetch`` in a worker.
    """

    def __init__(
        self,
        dataset: MapOperations | IterOperations,
        shard_options: ShardOptions | None = None,
        read_options: ReadOptions | None = None,
    ) -> None:
        super().__init__()
        if isinstance(dataset, MapOperations):
            dataset = dataset.to_iter_dataset(read_options)
        elif read_options is not None:
            raise InvalidArgumentError('read_options are those of to_iter_dataset: a stream has them already')
        if not isinstance(dataset, IterOperations):
            raise InvalidArgumentError(f'{type(dataset).__name__} is no MapDataset or IterDataset')
        self._stream = dataset._stream
        own = any(root.shard.shard_count > 1 for root in self._stream.roots())
        if own and shard_options is not None:
            raise InvalidArgumentError('the stream has a shard already: pass shard_options once')
        self._rank = ShardOptions(0, 1) if own else shard_options
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Iterate another epoch of the dataset from now on: what is shuffled has another order there.

        Call it before each iteration of the DataLoader. Workers that persist do not hear of it; for them, and where one
        iteration is to be all of the training, ``repeat`` the dataset.
        """
        if not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgumentError(f'epoch is {epoch!r}: want an integer from 0 on')
        self._epoch = epoch

    def __iter__(self) -> DatasetIterator:
        stream = self._stream.at_epoch(self._epoch) if self._epoch else self._stream
        worker = data.get_worker_info()
        if worker and any(root.workers and root.workers.num_workers for root in stream.roots()):
            raise InvalidArgumentError(
                'workers of a DataLoader may have no processes, as mp_prefetch needs: leave out the one or the other'
            )
        for part in (self._rank or ShardByTorchRank(), ShardOptions(worker.id, worker.num_workers) if worker else None):
            if part is not None and part.shard_count > 1:
                stream = stream.sharded(part)
        return iter(IterDataset(stream))

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned is of no group, so it is told its rank. Before there is a group, nobody knows.
        group = torch.distributed
        known = group.is_available() and group.is_initialized()
        return {**self.__dict__, '_rank': ShardByTorchRank() if self._rank is None and known else self._rank}

    def state_dict(self) -> dict[str, int]:
        """Its epoch. Where it stands within the epoch is the state of an iterator."""
        return {'epoch': self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the epoch of a state.

        Raises:
          StateError: if it is none.
        """
        if not isinstance(state.get('epoch'), int):
            raise StateError(f'want a state such as {self.state_dict()}, got {dict(state)}')
        self.set_epoch(state['epoch'])


def to_torch(batch: Any, device: Any = None, pin_memory: bool | None = None) -> Any:
    """A batch of numpy arrays, in dicts, lists and tuples, as tensors that share their memory.

    What is no array of numbers stays as it is.

    Args:
      batch: of a Loader, a MapDataset or a stream.
      device: where to move it, without waiting until it is there if the memory is pinned.
      pin_memory: whether to copy it to memory that a device can read by itself; by default if it is to be moved to one.
        Without an accelerator, it never is.
    """
    pin = (device is not None if pin_memory is None else pin_memory) and has_accelerator()

    def place(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.pin_memory() if pin and value.device.type == 'cpu' else value
            return value if device is None else value.to(device, non_blocking=True)
        if isinstance(value, Mapping):
            return {key: place(part) for key, part in value.items()}
        if isinstance(value, tuple) and hasattr(value, '_fields'):
            return type(value)(*map(place, value))
        return type(value)(map(place, value)) if isinstance(value, list | tuple) else value

    found = data.default_convert(batch)
    return place(found) if pin or device is not None else found


def has_accelerator() -> bool:
    """Whether torch has a device that pinned memory is of use to."""
    accelerator = getattr(torch, 'accelerator', None)  # since torch 2.6
    return bool(torch.cuda.is_available() if accelerator is None else accelerator.is_available())


class Batches(core.Batches):
    """Batches of a Loader as tensors; with a device, the next one is on its way there while this one is used.

    ::

        for batch in Batches(granular.Loader(source, 64), device='cuda'):
            loss = model(batch['image'])

    It has the loader's states (``state_dict``, ``load_state_dict``), which do not count what is on its way, and closes
    the loader.

    Args:
      batches: a :class:`granular.Loader`, or anything to iterate.
      device: where to move them; by default they stay where they are, and share the loader's memory.
      buffer: batches that are on their way to the device. They count for a Loader's ``recycle_after``.
    """

    def __init__(self, batches: Any, device: Any = None, buffer: int = 1) -> None:
        super().__init__(batches, buffer if device is not None else 0)
        self._device = device

    def _convert(self, batch: Any) -> Any:
        return to_torch(batch, self._device)
