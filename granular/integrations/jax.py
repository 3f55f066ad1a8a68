"""JAX (extra ``jax``): batches as global arrays over the devices of all processes."""

from typing import Any

from granular._lazy import need
from granular.errors import DatapointError, InvalidArgumentError
from granular.integrations import batches as core

jax = need('jax', 'jax')


def to_jax(batch: Any, sharding: Any) -> Any:
    """A batch of numpy arrays, in any tree of JAX, as global arrays, of which it is this process's part.

    Args:
      batch: arrays of shape (local batch, ...).
      sharding: how they lie on devices, such as ``NamedSharding(mesh, PartitionSpec('data'))``.

    Returns:
      The same tree of :class:`jax.Array` of shape (local batch times processes, ...), on their way to the devices.

    Raises:
      DatapointError: for something that is no array of numbers, or not as long as the devices need it.
    """

    def make(path: Any, value: Any) -> Any:
        try:
            return jax.make_array_from_process_local_data(sharding, value)
        except (TypeError, ValueError) as error:
            said = f'{getattr(value, "dtype", type(value).__name__)} of shape {getattr(value, "shape", "()")}'
            raise DatapointError(
                f'{jax.tree_util.keystr(path)}: {said} makes no array on {sharding}: {error}'
            ) from error

    return jax.tree_util.tree_map_with_path(make, batch)


class Batches(core.Batches):
    """Batches of a Loader as global arrays; the next ones are on their way to the devices while this one is used.

    ::

        sharding = NamedSharding(Mesh(jax.devices(), ('data',)), PartitionSpec('data'))
        shard = granular.ShardByJaxProcess()
        loader = granular.Loader(source, 64, shard_id=shard.shard_index, num_shards=shard.shard_count)
        for batch in Batches(loader, sharding):
            state = train_step(state, batch)

    It has the loader's states (``state_dict``, ``load_state_dict``), which do not count what is on its way, and closes
    the loader.

    Args:
      batches: a :class:`granular.Loader` that uses no memory again, as transfers do not copy it at once; or anything to
        iterate.
      sharding: how they lie on devices: a :class:`jax.sharding.Sharding`.
      buffer: batches that are on their way, which bounds what is held on the devices beside the one in use.

    Raises:
      InvalidArgumentError: for a Loader with ``recycle_after``.
    """

    def __init__(self, batches: Any, sharding: Any, buffer: int = 1) -> None:
        if getattr(getattr(batches, 'aio', batches), 'recycle_after', False):
            raise InvalidArgumentError(
                'the loader uses memory again that is still being read: pass recycle_after=False'
            )
        if not isinstance(sharding, jax.sharding.Sharding):
            raise InvalidArgumentError(f'{type(sharding).__name__} is no jax.sharding.Sharding')
        super().__init__(batches, buffer)
        self._sharding = sharding

    def _convert(self, batch: Any) -> Any:
        return to_jax(batch, self._sharding)
