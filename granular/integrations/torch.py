"""PyTorch (extra ``torch``): streams as an iterable dataset, and batches as tensors.

Readers and MapDatasets need no adapter: a ``torch.utils.data.DataLoader`` accepts them directly and requests whole
batches with ``__getitems__``. ``Dataset`` skips those of their datapoints that fail.
"""

from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any, Final

import numpy as np

from granular._support.indexing import Ints, indices_of
from granular._support.lazy import import_extra, is_masked
from granular._support.other_names import answering
from granular.aio.pipeline.execution.failures import Errors, Failure, OnError, fetch_capturing
from granular.aio.pipeline.nodes.adapters import convert
from granular.aio.runtime.forking import each_after_fork
from granular.aio.runtime.portal import run
from granular.errors import DatapointError, InvalidArgumentError
from granular.integrations import batches as core
from granular.integrations.torch_iterable import IterableDataset

__all__ = ['Batches', 'Dataset', 'IterableDataset', 'has_accelerator', 'to_torch']

torch = import_extra('torch', 'torch')
data = import_extra('torch.utils.data', 'torch')
_Dataset: Any = data.Dataset


class Dataset(_Dataset):  # type: ignore[misc]
    """Datapoints for ``torch.utils.data.DataLoader`` by index, without those that fail.

    ::

        dataset = Dataset(granular.MapDataset.source(reader).map(lambda x: x['image'] / 255))
        loader = torch.utils.data.DataLoader(dataset, batch_size=64, shuffle=True)

    A batch with datapoints that fail, or were filtered out, is smaller. One that has no others is a ``DatapointError``,
    as a DataLoader cannot leave it out; an ``IterableDataset`` continues with the next datapoints. Each process logs
    the first failure of each reason, and how many there were when it ends.

    Args:
      source: a reader, a MapDataset or another source.
      on_error: 'skip', or a function of index and error that returns a replacement, or None to skip it.

    Attributes:
      errors: the failures of this process, with ``count`` and ``recent``.
    """

    def __init__(self, source: Any, on_error: OnError = 'skip') -> None:
        self._source, self._on_error = source, on_error
        self._node = convert(source)
        self.errors = Errors(on_error)
        _datasets.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._source, self._on_error)

    def __len__(self) -> int:
        return len(self._node)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        out = run(self._fetch(indices_of(indices, len(self._node), 'Dataset')), immediate=True)
        failed = [one for one in out if type(one) is Failure]
        if failed and not self.errors.count:  # in the process that has the failures, at its end
            Finalize(self, self.errors.summarise, exitpriority=0)
        first = failed[0].error if failed else None
        try:
            values = [self.errors.resolve(one) if type(one) is Failure else one for one in out]
            self.errors.report([(failure.index, failure.message) for failure in failed if failure.counts])
            rest = [value for value in values if value is not None]
            if not rest and values:
                why = f'{len(failed)}, failed' if failed else f'{len(values)}, were filtered out'
                raise DatapointError(
                    f'all datapoints of the batch, {why}, and a DataLoader cannot leave out a batch of a map-style '
                    f'dataset: return a replacement in on_error, or pass a stream, which continues with the next '
                    f"datapoints: IterableDataset(dataset.to_iter_dataset(on_error='skip').batch(64))"
                ) from first
            return rest
        finally:
            del first

    async def _fetch(self, indices: Ints) -> list[Any]:
        out = await fetch_capturing(self._node, indices)
        for one in out:
            if type(one) is Failure and self.errors.raises_for(one):
                raise one.release()
        return out


def _forget_failures(dataset: Dataset) -> None:
    dataset.errors = Errors(dataset._on_error)


_datasets: Final = each_after_fork(_forget_failures)


def to_torch(batch: Any, device: Any = None, pin_memory: bool | None = None) -> Any:
    """Convert a batch of numpy arrays, in dicts, lists and tuples, to tensors that share their memory.

    Read-only arrays, such as those behind ``cache``, are copied, and values that are not arrays of numbers returned
    unchanged.

    Args:
      batch: from a Loader, a MapDataset or a stream.
      device: the device to move it to; asynchronously if the memory is pinned.
      pin_memory: copy it to pinned memory, which a device can read directly; by default if a device is given. Has no
        effect without an accelerator.

    Raises:
      DatapointError: for an array of numbers whose type or layout in memory torch does not have.
    """
    device = None if device is None else _device_of(device, 'to_torch')
    pin = (device is not None if pin_memory is None else pin_memory) and has_accelerator()

    def place(path: str, value: Any) -> Any:
        has_numbers = _has_numbers(value)
        if has_numbers and isinstance(value, np.ndarray) and not value.flags.writeable:  # no tensor is read-only
            value = value.copy()
        try:
            tensor = torch.as_tensor(value) if has_numbers else value
        except (TypeError, ValueError) as error:
            raise DatapointError(
                f'{path}: {value.dtype} of shape {value.shape} cannot be a tensor: {error}: convert it in a map, or '
                f'leave it out with select(...)'
            ) from error
        if not isinstance(tensor, torch.Tensor):
            return tensor
        tensor = tensor.pin_memory() if pin and tensor.device.type == 'cpu' else tensor
        return tensor if device is None else tensor.to(device, non_blocking=True)

    return _map_leaves(place, batch)


def _device_of(device: Any, name: str) -> Any:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"{name}: device={device!r:.100}: pass 'cuda' or 'cpu': {error}") from None


def _has_numbers(value: Any) -> bool:
    """Return whether a value is an array or scalar of numbers, without a mask, which a tensor would lose."""
    if not isinstance(value, np.ndarray | np.generic) or is_masked(type(value)):
        return False
    return value.dtype.kind not in 'SUOMm' and value.dtype.type is not np.void


def _map_leaves(fn: Callable[[str, Any], Any], value: Any, path: str = 'batch') -> Any:
    """Return dicts, lists and tuples with the results of the function for the path and value of each leaf."""
    if isinstance(value, Mapping):
        return {key: _map_leaves(fn, part, f'{path}[{key!r}]') for key, part in value.items()}
    if not isinstance(value, list | tuple):
        return fn(path, value)
    parts = [_map_leaves(fn, part, f'{path}[{i}]') for i, part in enumerate(value)]
    return type(value)(*parts) if hasattr(value, '_fields') else type(value)(parts)


def has_accelerator() -> bool:
    """Return whether torch has a device that benefits from pinned memory."""
    accelerator = getattr(torch, 'accelerator', None)  # since torch 2.6
    return bool(torch.cuda.is_available() if accelerator is None else accelerator.is_available())


class Batches(core.Batches):
    """Batches of a Loader as tensors; with a device, the next one is transferred while the current one is used.

    ::

        for batch in Batches(granular.Loader(source, 64), device='cuda'):
            loss = model(batch['image'])

    A thread copies the next batch into pinned memory and from there, in a CUDA stream of its own, to a GPU. The stream
    that is current in ``next`` waits for the transfer, the program does not. The batches have the loader's states
    (``state_dict``, ``load_state_dict``), which do not count batches being transferred, and close the loader.

    Args:
      batches: a :class:`granular.Loader`, or any iterable of batches; other elements are converted one by one.
      device: the device to move them to; by default they stay in place and share the loader's memory.
      buffer: number of batches to transfer to the device ahead. They count for a Loader's ``recycle_after``,
        which must be as large on the CPU.

    Raises:
      InvalidArgumentError: for a ``recycle_after`` that is smaller, and a GPU that torch does not find.
    """

    @answering(
        pin_memory="device='cuda', which pins memory",
        non_blocking="device='cuda', which transfers ahead",
        **core.ANSWERS,
    )
    def __init__(self, batches: Any, device: Any = None, buffer: int = 1) -> None:
        super().__init__(batches, buffer if device is not None else 0)
        self._device = device
        self._stream: Any = None
        if device is None:
            return
        kind = _device_of(device, 'Batches').type
        if kind == 'cuda' and not torch.cuda.is_available():
            raise InvalidArgumentError(f"Batches: device={device!r}, but torch finds no GPU here: pass device='cpu'")
        if not buffer:
            return
        recycled = getattr(getattr(batches, 'aio', batches), 'recycle_after', False)
        if kind == 'cpu' and 0 < recycled < buffer:
            raise InvalidArgumentError(
                f'Batches: tensors on the CPU share the memory of the loader, which uses it again after recycle_after='
                f'{int(recycled)} batches, while buffer={buffer} are taken ahead: pass recycle_after={buffer} or more'
            )
        self._device = torch.empty(0, device=device).device  # 'cuda' alone is another GPU in another thread
        if kind == 'cuda':
            self._stream = torch.cuda.Stream(self._device)

    def _convert(self, batch: Any) -> Any:
        if self._stream is None:
            return to_torch(batch, self._device), None
        torch.cuda.set_device(self._device)  # of this thread, which would go back to the first GPU behind the stream
        with torch.cuda.stream(self._stream):
            return to_torch(batch, self._device), self._stream.record_event()

    def _hand_over(self, converted: Any) -> Any:
        batch, sent = converted
        if sent is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(sent)

            def record(path: str, value: Any) -> None:
                if isinstance(value, torch.Tensor):
                    value.record_stream(current)  # until then its memory is in use

            _map_leaves(record, batch)
        return batch
