"""Shards: which part of the data belongs to this process. The rank is asked for where it is used."""

import abc
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from granular._support.indexing import check_integer
from granular._support.lazy import import_extra
from granular._support.other_names import answering
from granular._support.text import logger
from granular.aio.pipeline.transforms import options_of
from granular.errors import InvalidArgumentError

RANK_ARGUMENTS: Final = dict.fromkeys(
    ('rank', 'world_size', 'num_replicas', 'shard_index', 'shard_count'),
    'shard_options=granular.ShardOptions(rank, world_size), or granular.ShardByTorchRank()',
)


@answering(
    **dict.fromkeys(('rank', 'index', 'shard_id', 'process_index'), 'shard_index'),
    **dict.fromkeys(('world_size', 'num_replicas', 'num_shards', 'process_count'), 'shard_count'),
    drop_last='drop_remainder',
)
@dataclasses.dataclass(frozen=True)
class ShardOptions:
    """The part of the data that belongs to this process.

    ::

        shard = granular.ShardOptions(shard_index=3, shard_count=8)  # the fourth of eight processes

    Args:
      shard_index: number of this part, from 0 on.
      shard_count: number of parts.
      drop_remainder: True to make all parts equally long and drop the remainder.
    """

    shard_index: int
    shard_count: int
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        count = check_integer('shard_count', self.shard_count, 1)
        index = check_integer('shard_index', self.shard_index, 0, count - 1)
        object.__setattr__(self, 'shard_count', count)
        object.__setattr__(self, 'shard_index', index)

    def split(self, records: int) -> tuple[int, int]:
        """Return start and end of this shard if shards are contiguous; the first shards share the remainder."""
        each, over = divmod(records, self.shard_count)
        over = 0 if self.drop_remainder else over
        start = each * self.shard_index + min(self.shard_index, over)
        return start, start + each + (self.shard_index < over)


class NoSharding(ShardOptions):
    """The whole data, without shards.

    ::

        sampler = granular.grain.samplers.SequentialSampler(1000, granular.grain.sharding.NoSharding())
    """

    def __init__(self) -> None:
        super().__init__(0, 1)


class _Asked(ShardOptions, abc.ABC):
    """A shard whose number is asked for at each use, as it may be described before there are ranks.

    Where there are, it is pickled as their ``ShardOptions``, since a worker process may not be one of the ranks.
    """

    def __init__(self, drop_remainder: bool) -> None:
        object.__setattr__(self, 'drop_remainder', bool(drop_remainder))

    @property
    def shard_index(self) -> int:
        return self._ask()[0]

    @property
    def shard_count(self) -> int:
        return self._ask()[1]

    @abc.abstractmethod
    def _ask(self) -> tuple[int, int]:
        """Return the number of this part, and the number of parts."""

    @abc.abstractmethod
    def _is_known(self) -> bool:
        """Return whether there are ranks."""

    def __repr__(self) -> str:
        return f'{type(self).__name__}({"drop_remainder=True" if self.drop_remainder else ""})'

    def __reduce__(self) -> tuple[Any, ...]:
        if self._is_known():
            return ShardOptions, (*self._ask(), self.drop_remainder)
        return type(self), (self.drop_remainder,)


class ShardByJaxProcess(_Asked):
    """The :class:`granular.ShardOptions` of this JAX process, asked for when it is used.

    ::

        stream = dataset.to_iter_dataset(shard_options=granular.grain.sharding.ShardByJaxProcess())
    """

    @answering()
    def __init__(self, drop_remainder: bool = False) -> None:
        super().__init__(drop_remainder)
        import_extra('jax', 'jax', 'ShardByJaxProcess needs jax')

    def _is_known(self) -> bool:
        return self._ask()[1] > 1

    def _ask(self) -> tuple[int, int]:
        jax = import_extra('jax', 'jax', 'ShardByJaxProcess needs jax')
        return jax.process_index(), jax.process_count()


class ShardByTorchRank(_Asked):
    """The :class:`ShardOptions` of this rank of ``torch.distributed``, asked for when it is used.

    ::

        stream = dataset.to_iter_dataset(shard_options=granular.ShardByTorchRank(drop_remainder=True))

    In a program without process groups there is one part. Ranks that work on the same data, as those of tensor,
    pipeline or context parallelism do, are one part: name those that have different data, by a group or by the
    dimensions of a mesh, as in ``ShardByTorchRank(mesh=mesh, dims=('dp',))``.

    Args:
      drop_remainder: as for ``ShardOptions``.
      group: a process group; the ranks in it have different data. By default all ranks.
      mesh: a ``torch.distributed.device_mesh.DeviceMesh``, instead of a group.
      dims: the names of the dimensions of the mesh along which ranks have different data; by default all.

    Raises:
      InvalidArgumentError: when it is used, in one of several processes (``WORLD_SIZE``) without a process group; and
        by a rank that is not in the group.
    """

    _group: Any
    _mesh: Any
    _dims: tuple[str, ...]

    @answering()
    def __init__(
        self, drop_remainder: bool = False, *, group: Any = None, mesh: Any = None, dims: Sequence[str] = ()
    ) -> None:
        super().__init__(drop_remainder)
        import_extra('torch.distributed', 'torch', 'ShardByTorchRank needs torch')
        dims = (dims,) if isinstance(dims, str) else tuple(dims)
        if mesh is None and dims:
            raise InvalidArgumentError(f'ShardByTorchRank: dims={dims!r:.100} are those of a mesh: pass mesh=')
        if mesh is not None:
            if group is not None:
                raise InvalidArgumentError('ShardByTorchRank: pass a group or a mesh, not both')
            names = mesh.mesh_dim_names
            if dims and (names is None or (unknown := [dim for dim in dims if dim not in names])):
                unknown = list(dims) if names is None else unknown
                raise InvalidArgumentError(f'ShardByTorchRank: unknown dimensions {unknown}: the mesh has {names}')
        vars(self).update(_group=group, _mesh=mesh, _dims=dims)

    def _is_known(self) -> bool:
        group = import_extra('torch.distributed', 'torch', 'ShardByTorchRank needs torch')
        return bool(group.is_available() and group.is_initialized())

    def _ask(self) -> tuple[int, int]:
        if not self._is_known():
            if os.environ.get('WORLD_SIZE', '1') != '1':  # of torchrun: each rank would read everything
                raise InvalidArgumentError(
                    f'ShardByTorchRank: this is one of {os.environ["WORLD_SIZE"]} processes (WORLD_SIZE), but no '
                    f'process group is initialized: call torch.distributed.init_process_group() first'
                )
            return 0, 1
        if self._mesh is not None:
            return self._ask_mesh()
        group = import_extra('torch.distributed', 'torch', 'ShardByTorchRank needs torch')
        index, count = group.get_rank(self._group), group.get_world_size(self._group)
        if index < 0:
            raise InvalidArgumentError(f'ShardByTorchRank: rank {group.get_rank()} is not in the group')
        return index, count

    def _ask_mesh(self) -> tuple[int, int]:
        place, shape, names = self._mesh.get_coordinate(), tuple(self._mesh.shape), self._mesh.mesh_dim_names
        if place is None:
            raise InvalidArgumentError('ShardByTorchRank: this rank is not in the mesh')
        index, count = 0, 1
        for at in [names.index(dim) for dim in self._dims] or range(len(shape)):
            index, count = index * shape[at] + place[at], count * shape[at]
        return index, count


def as_shard(options: Any) -> ShardOptions:
    """Return the argument ``shard_options``; None stands for the whole data. Options of Grain are converted."""
    return options_of('shard_options', NoSharding() if options is None else options, ShardOptions)


warned: Final[list[str]] = []


def warn_of_no_shard(what: str, remedy: str) -> None:
    """Log, once in a process, that each of several ranks reads everything."""
    if warned or (count := _ranks()) == 1:
        return
    warned.append(what)
    logger.warning(
        '%s has no shard, and this is one of %s ranks: each of them reads everything. To divide the data, %s',
        what,
        count,
        remedy,
    )


def _ranks() -> int:
    """Return the number of ranks of a launcher, or of the process group of torch."""
    world = os.environ.get('WORLD_SIZE', '1')
    if world != '1':
        return int(world) if world.isdecimal() else 1
    group = sys.modules.get('torch.distributed')
    ready = group is not None and group.is_available() and group.is_initialized()
    return int(group.get_world_size()) if group is not None and ready else 1
