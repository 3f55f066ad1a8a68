"""JAX (extra ``jax``): batches as global arrays over the devices of all processes."""

from typing import Any

import numpy as np

from granular._support.lazy import import_extra
from granular._support.other_names import answering
from granular.aio.pipeline.data_loader import DataLoader, dataset_of
from granular.aio.pipeline.iter_dataset import IterDataset
from granular.errors import DatapointError, InvalidArgumentError
from granular.integrations import batches as core

__all__ = ['Batches', 'device_put', 'to_jax']

jax = import_extra('jax', 'jax')
_enable_x64: Any = (jax if hasattr(jax, 'enable_x64') else import_extra('jax.experimental', 'jax')).enable_x64


def to_jax(batch: Any, sharding: Any) -> Any:
    """Convert a batch of numpy arrays, in any JAX tree, to global arrays.

    The batch is this process's part of the global arrays.

    Args:
      batch: arrays of shape (local batch, ...).
      sharding: the layout on the devices, such as ``NamedSharding(mesh, PartitionSpec('data'))``.

    Returns:
      The same tree of :class:`jax.Array` of shape (local batch times processes, ...), being transferred to the devices.

    Raises:
      DatapointError: for a leaf that is not an array of numbers, or whose length does not fit the devices; and for
        integers beyond 32 bits without ``jax_enable_x64``, which JAX would cut.
    """
    _checked(sharding)

    def place(path: Any, value: Any) -> Any:
        _refuse_to_cut(path, value)
        try:
            return jax.make_array_from_process_local_data(sharding, value)
        except (TypeError, ValueError) as error:
            description = f'{getattr(value, "dtype", type(value).__name__)} of shape {getattr(value, "shape", "()")}'
            raise DatapointError(
                f'{jax.tree_util.keystr(path)}: {description} cannot be placed on {sharding}: {error}'
                f'{_remedy(value, len(sharding.addressable_devices))}'
            ) from error

    return jax.tree_util.tree_map_with_path(place, batch)


def _checked(sharding: Any) -> Any:
    if not isinstance(sharding, jax.sharding.Sharding):
        raise InvalidArgumentError(
            f'expected a jax.sharding.Sharding, got {type(sharding).__name__}: pass '
            f"NamedSharding(mesh, PartitionSpec('data'))"
        )
    return sharding


def _refuse_to_cut(path: Any, value: Any) -> None:
    """Raise ``DatapointError`` for integers of which JAX would keep the lowest 32 bits."""
    kind = getattr(value, 'dtype', None)
    if kind not in (np.int64, np.uint64) or not np.size(value) or jax.config.jax_enable_x64:
        return
    limits = np.iinfo(np.int32 if kind == np.int64 else np.uint32)
    least, most = int(value.min()), int(value.max())
    if least < limits.min or most > limits.max:
        raise DatapointError(
            f'{jax.tree_util.keystr(path)}: JAX would cut {kind} from {least} to {most} to 32 bits: set '
            f'jax_enable_x64, or leave it out with select(...)'
        )


def _remedy(value: Any, devices: int) -> str:
    """Return what to do about a value that cannot be placed on devices; empty if it is not known."""
    if getattr(value, 'dtype', np.asarray(value).dtype).kind in 'OSTU':
        return ': leave it out with select(...), or make it numbers in a map'
    if not np.ndim(value):
        return ': call batch(...) of the stream'
    if len(value) % devices:
        return f': choose batch(n, drop_remainder=True) with a multiple of {devices}'
    return ''


def device_put(
    ds: IterDataset | DataLoader, device: Any = None, *, cpu_buffer_size: int = 4, device_buffer_size: int = 2
) -> IterDataset:
    """Transfer the elements of a stream to devices ahead of the consumer, as ``grain.experimental.device_put``.

    ::

        stream = granular.grain.load(reader, shuffle=True, seed=0, num_epochs=1, batch_size=64)
        for batch in device_put(stream, jax.devices()[0]):
            print(batch['label'].devices())

    States are those of the stream, and do not count elements that were transferred ahead. Unlike :class:`Batches`,
    which assembles the parts of all processes, each process transfers its own elements. Call it after ``mp_prefetch``.

    Args:
      ds: a stream, or a ``DataLoader``, of numbers and arrays in any JAX tree.
      device: a device, a sharding, or a tree of these, as for ``jax.device_put``; None for the default device.
      cpu_buffer_size: number of elements to compute ahead.
      device_buffer_size: number of elements to transfer ahead, in addition to the one in use.

    Raises:
      InvalidArgumentError: if it is not a stream.
      DatapointError: for a leaf that is not an array of numbers, or does not fit the device, or beyond 32 bits as for
        :func:`to_jax`.
    """
    stream = dataset_of(ds) if isinstance(ds, DataLoader) else ds
    if not isinstance(stream, IterDataset):
        raise InvalidArgumentError(
            f'expected an IterDataset, got {type(ds).__name__}: call to_iter_dataset() of a MapDataset'
        )
    return stream.prefetch(cpu_buffer_size).map(_Put(device)).prefetch(device_buffer_size)


class _Put:
    """Transfers an element to a device, in any thread, within the contexts of the thread that creates this."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._x64, self._default = jax.config.jax_enable_x64, jax.config.jax_default_device

    def __call__(self, element: Any) -> Any:
        try:
            with _enable_x64(self._x64), jax.default_device(self._default):
                jax.tree_util.tree_map_with_path(_refuse_to_cut, element)
                return jax.device_put(element, self._device)
        except DatapointError:
            raise
        except (TypeError, ValueError) as error:
            raise DatapointError(f'an element cannot be placed on {self._device}: {error}') from error


class Batches(core.Batches):
    """Batches of a Loader as global arrays; the next ones are transferred while the current one is used.

    ::

        sharding = NamedSharding(Mesh(jax.devices(), ('data',)), PartitionSpec('data'))
        shard = granular.grain.sharding.ShardByJaxProcess()
        loader = granular.Loader(source, 64, shard_id=shard.shard_index, num_shards=shard.shard_count)
        for batch in Batches(loader, sharding):
            state = train_step(state, batch)

    It has the loader's states (``state_dict``, ``load_state_dict``), which do not count batches being transferred, and
    closes the loader.

    Args:
      batches: a :class:`granular.Loader` without ``recycle_after``, because transfers read its memory later; or any
        iterable.
      sharding: the layout on the devices, a :class:`jax.sharding.Sharding`.
      buffer: number of batches to transfer ahead, which bounds the device memory in addition to the batch in use.

    Raises:
      InvalidArgumentError: for a Loader with ``recycle_after``.
    """

    @answering(**core.ANSWERS)
    def __init__(self, batches: Any, sharding: Any, buffer: int = 1) -> None:
        if getattr(getattr(batches, 'aio', batches), 'recycle_after', False):
            raise InvalidArgumentError(
                'the loader uses memory again that is still being read: pass recycle_after=False'
            )
        super().__init__(batches, buffer)
        self._sharding = _checked(sharding)

    def _prepare(self, batch: Any) -> Any:
        return batch, jax.config.jax_enable_x64

    def _convert(self, batch: Any) -> Any:
        batch, x64 = batch
        with _enable_x64(x64):  # a context of the consumer's thread may have changed it, for that thread alone
            return to_jax(batch, self._sharding)
