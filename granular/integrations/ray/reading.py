"""Read datasets of granular as datasets of Ray."""

import contextlib
import functools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from granular._support.lazy import import_extra
from granular.aio.bags.identity import Identity
from granular.aio.bags.records import Adjacent
from granular.aio.conversion.on_ray import shared
from granular.aio.datasets.codec import Decoders
from granular.aio.datasets.reader import DatasetReader, columns_of, opened_files, pinned
from granular.aio.datasets.sharded_reader import columns_of_shards, compare_shards
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.pipeline.data_source import Mask
from granular.aio.pipeline.nodes.source import nbytes
from granular.aio.runtime.portal import run
from granular.aio.runtime.readahead import whole_pages
from granular.config import MiB
from granular.errors import InvalidArgumentError
from granular.formats.codecs import decoders as all_decoders
from granular.integrations.ray.concatenation import Concatenation
from granular.sync import datasets
from granular.sync.datasources import open as open_dataset
from granular.sync.iteration import Iteration

ray = import_extra('ray', 'ray')
data = import_extra('ray.data', 'ray')
blocks = import_extra('ray.data.block', 'ray')
arrow = import_extra('pyarrow', 'ray')
_Base: Any = data.Datasource

Columns = dict[str, list[Any] | Adjacent]

_PAGE: Final = 16 * MiB  # of decoded values that a read task hands to Ray at a time
_AHEAD: Final = 2  # pages in flight
_MAX_BUFFER: Final = (1 << 31) - 1  # bytes of an array of Arrow with offsets of 32 bits
_TASK: Final = 256 * MiB  # of decoded values in a read task
_SMALL_TASK: Final = 4 * MiB  # in a read task of a dataset that has few of them
_STUB: Final = '__bsp_stub'  # the column of rows without columns in Ray
_SAMPLE: Final = 16  # datapoints that are read to estimate sizes


def read(
    url: AnyPath, decoders: Decoders = all_decoders, fields: Mask = None, verify: bool = False, **options: Any
) -> Any:
    """Read a dataset, sharded or not, as a ``ray.data.Dataset`` in the dataset's order.

    ::

        dataset = granular.integrations.ray.read('s3://bucket/train', fields=['image', 'label'])
        for batch in dataset.iter_batches(batch_size=64):
            train_step(batch['image'], batch['label'])

    A read task takes a run of shards of at most about 256 MiB, or a part of a shard if there are fewer shards than
    tasks, and streams it: it holds three reads of about 16 MiB of decoded values, and the block that Ray fills
    (``target_max_block_size``). Tasks are smaller if the object stores of the cluster hold less than eight per CPU.
    Arrays become Ray's tensor columns, raw bytes share the memory into which they were read. The number of rows is
    known at once, and their size is estimated from 16 datapoints. ``select_columns`` right after it reads only these
    keys, and a ``limit`` that Ray passes on only as many rows. The rows keep their order, whichever task ends first
    (``preserve_order``, which ``dataset.context.execution_options`` can turn off).

    The dataset is pinned: a shard that was replaced since is an ``ObjectChangedError``. Workers take credentials from
    their environment, and must reach the data by the same address.

    Args:
      url: the folder of the dataset, which every node can reach.
      decoders: the decoder of each type; None for raw bytes.
      fields: the keys to read, or a mapping from keys to ranges of sequences; by default everything.
      verify: check the checksums of the records.
      options: further options of ``ray.data.read_datasource``, such as ``override_num_blocks`` or ``concurrency``.

    Raises:
      NotFoundError: if there is no dataset.
      UnknownKeyError: if ``fields`` has a key that the dataset does not have.
    """
    source = Datasource(url, decoders, fields, verify)
    if options.get('override_num_blocks') is None:
        options['override_num_blocks'] = _count_tasks(source.estimate_inmemory_data_size())
    dataset = data.read_datasource(source, **options)
    dataset.context.execution_options.preserve_order = True
    return dataset


def _count_tasks(size: int) -> int:
    """Return the number of read tasks for the bytes of all decoded values.

    By default, Ray makes 200 blocks or more, most of which would take less time than the pause of some 0.1 s between
    tasks. Tasks that run at the same time, in order, keep their blocks in the object store.
    """
    resources = ray.cluster_resources()
    processors = max(1, int(resources.get('CPU', 1)))
    most = min(_TASK, int(resources.get('object_store_memory', _TASK * 8)) // (8 * processors))
    return max(1, -(-size // max(_SMALL_TASK, most)), min(2 * processors, -(-size // _SMALL_TASK)))


class _Shard(NamedTuple):
    """A dataset without shards, or a shard, as it is sent to the workers."""

    folder: Path
    identity: Identity  # the versions of its files
    length: int  # the number of its datapoints
    sizes: Mapping[str, int]  # the bytes of each key


class Datasource(_Base):  # type: ignore[misc]
    """A dataset as a source of Ray Data; see :func:`read` for the arguments."""

    def __init__(
        self, url: AnyPath, decoders: Decoders = all_decoders, fields: Mask = None, verify: bool = False
    ) -> None:
        super().__init__()
        self._decoders, self._verify = decoders, verify
        self._projection_map: dict[str, str] | None = None
        with open_dataset(shared(Path(url)), decoders) as reader:
            if not isinstance(reader, datasets.DatasetReader | datasets.ShardedDatasetReader):
                raise InvalidArgumentError(
                    f'{url}: expected a dataset of granular, got files for {type(reader).__name__}: Ray reads other '
                    f'formats itself; or use granular.convert first'
                )
            self._name, spec = f'{url}', reader.spec
            run(compare_shards(reader.aio))
            chosen = columns_of_shards(reader.aio)[0].choose(fields)
            self._mask = {choice.field.key: choice.selection for choice in chosen}
            parts = reader.aio.readers if isinstance(reader, datasets.ShardedDatasetReader) else [reader.aio]
            self._shards = [
                _Shard(
                    part.directory,
                    opened_files(part),
                    len(part),
                    {key: columns_of(part).size_of([key]) for key in spec},
                )
                for part in parts
            ]
            indices = np.unique(np.linspace(0, len(reader) - 1, min(_SAMPLE, len(reader))).astype(np.int64))
            sample = reader.fetch(indices, mask=self._mask)
        # Means are kept by key, so that a projection knows its size.
        self._means = {key: sum(nbytes(one[key]) for one in sample) / max(1, len(sample)) for key in self._mask}

    def get_name(self) -> str:
        """Return the name of the read tasks."""
        return 'Granular'

    def supports_projection_pushdown(self) -> bool:
        """Return True: keys that are not selected are not read."""
        return True

    def estimate_inmemory_data_size(self) -> int:
        """Return the estimated size of the decoded values in bytes."""
        return int(self._mean() * sum(shard.length for shard in self._shards))

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[Any]:
        """Return the read tasks, each for a run of shards, or for a part of a shard if there are more tasks."""
        tasks, mask, mean = [], self._selected(), self._mean()
        for part in _runs(self._shards, parallelism):
            shards = self._shards[part.first : part.last]
            stop = part.stop if per_task_row_limit is None else min(part.stop, part.start + per_task_row_limit)
            metadata = blocks.BlockMetadata(
                num_rows=stop - part.start,
                size_bytes=int((stop - part.start) * mean),
                exec_stats=None,
                input_files=[f'{shard.folder}' for shard in shards],
            )
            work = functools.partial(_read, shards, part.start, stop, mask, mean, self._decoders, self._verify)
            tasks.append(data.ReadTask(work, metadata, per_task_row_limit=per_task_row_limit))
        return tasks

    def _selected(self) -> dict[str, Any]:
        return {
            key: part for key, part in self._mask.items() if self._projection_map is None or key in self._projection_map
        }

    def _mean(self) -> float:
        return sum(self._means[key] for key in self._selected())


class _Run(NamedTuple):
    # Its shards, without the last one, and its datapoints, counted from the first one of these shards.
    first: int
    last: int
    start: int
    stop: int


def _runs(shards: Sequence[_Shard], count: int) -> Iterator[_Run]:
    """Divide shards among at most ``count`` tasks, in order, by the number of datapoints."""
    stops = np.cumsum([shard.length for shard in shards])
    total = int(stops[-1])
    if not total:
        return
    edges = np.linspace(0, total, max(1, min(count, total)) + 1).astype(np.int64)
    if count <= len(shards):  # whole shards: move each edge to the nearest one of a shard
        ends = np.append(0, stops)
        right = np.searchsorted(ends, edges)
        lower, upper = ends[np.maximum(right - 1, 0)], ends[right]
        edges = np.where(edges - lower <= upper - edges, lower, upper)
    edges = np.unique(edges)
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        first = int(np.searchsorted(stops, start, side='right'))
        last = int(np.searchsorted(stops, stop, side='left')) + 1
        before = int(stops[first]) - shards[first].length
        yield _Run(first, last, start - before, stop - before)


def _read(
    shards: Sequence[_Shard],
    start: int,
    stop: int,
    mask: Mapping[str, Any],
    mean: float,
    decoders: Decoders,
    verify: bool,
) -> Iterator[Any]:
    if not mask:  # Ray counts rows by reading no columns
        yield blocks.BlockAccessor.batch_to_block({_STUB: [None] * (stop - start)})
        return
    source = Concatenation(functools.partial(_open, shards, decoders, verify), [shard.length for shard in shards])
    size = max(mean, sum(shard.sizes[key] for shard in shards for key in mask) / len(source))
    step = max(1, int(_PAGE / size))
    local = shards[0].folder.store.local
    with Iteration[list[Columns]](lambda page: _pages(source, start + page * step, stop, mask, step, local)) as chunks:
        for parts in chunks:
            yield _block(parts, list(mask))


async def _pages(
    source: Concatenation, start: int, stop: int, mask: Mapping[str, Any], step: int, local: bool
) -> AsyncIterator[list[Columns]]:
    """Yield the columns of ``step`` datapoints at a time, for each shard that has some of them."""

    async def fetch(indices: range) -> list[Columns]:
        return await source.fetch_buffers(range(start + indices.start, start + indices.stop), mask)

    try:
        async with contextlib.aclosing(whole_pages(fetch, stop - start, step, 0 if local else _AHEAD)) as pages:
            async for page in pages:
                yield page
    finally:
        await source.aclose()


def _block(parts: Sequence[Columns], keys: Sequence[str]) -> Any:
    arrays, lists = dict[str, Any](), dict[str, list[Any]]()
    for key in keys:
        columns = [part[key] for part in parts]
        buffers = [column for column in columns if isinstance(column, Adjacent)]
        if len(buffers) == len(columns) and sum(len(buffer.data) for buffer in buffers) <= _MAX_BUFFER:
            records = [_array(buffer) for buffer in buffers]
            arrays[key] = arrow.concat_arrays(records) if len(records) > 1 else records[0]  # concat_arrays copies
        else:
            split = (column.split() if isinstance(column, Adjacent) else column for column in columns)
            lists[key] = [value for values in split for value in values]
    if not arrays:
        return blocks.BlockAccessor.batch_to_block(lists)
    if lists:
        rest = blocks.BlockAccessor.for_block(blocks.BlockAccessor.batch_to_block(lists)).to_arrow()
        arrays |= zip(rest.column_names, rest.columns, strict=True)
    return arrow.table({key: arrays[key] for key in keys})


def _array(records: Adjacent) -> Any:
    """Return records as an array of Arrow that shares their bytes."""
    offsets = arrow.py_buffer(records.limits.astype(np.int32))
    return arrow.BinaryArray.from_buffers(
        arrow.binary(), len(records.limits) - 1, [None, offsets, arrow.py_buffer(records.data)]
    )


def _open(shards: Sequence[_Shard], decoders: Decoders, verify: bool, number: int) -> DatasetReader:
    shard = shards[number]
    return pinned(DatasetReader(shard.folder, decoders, verify=verify), shard.identity)
