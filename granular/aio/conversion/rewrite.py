"""Rewrite datasets: choose datapoints, change keys, and divide into other shards, of records as they are stored."""

import contextlib
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np

from granular import formats
from granular._support.indexing import check_integer
from granular._support.other_names import CONVERSION_ARGUMENTS, answering
from granular.aio.conversion.changed_keys import ChangedKeys
from granular.aio.conversion.chosen import Chosen, choose, divide
from granular.aio.conversion.dataset_sources import DatasetSources
from granular.aio.conversion.rewritten_shards import RewrittenShards
from granular.aio.conversion.run import Run
from granular.aio.datasets.build_index import build_index
from granular.aio.datasets.codec import Decoders, Encoders
from granular.aio.paths.file import Progress
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError
from granular.formats.layout import Layout

_SAMPLE: Final = 128  # datapoints of which new values are computed first, for their types and to recognise the run


@dataclasses.dataclass(frozen=True, slots=True)
class Rewriting:
    """The result of ``rewrite``.

    Attributes:
      directory: the folder of the new dataset.
      spec: the type of each key.
      datapoints: the number of datapoints.
      shards: the number of shards; 1 for a dataset without shards.
      found: the datapoints that had been written by earlier runs.
      bytes: the bytes of the bags that this call wrote or copied.
      copied: those of them that were copied as whole bags, within a bucket by the store itself.
      seconds: the duration of this call.
    """

    directory: str
    spec: dict[str, str]
    datapoints: int
    shards: int
    found: int
    bytes: int
    copied: int
    seconds: float


@answering(
    **{**CONVERSION_ARGUMENTS, 'columns': 'drop, with the keys to leave out'},
    **dict.fromkeys(('filter', 'condition', 'predicate', 'where'), 'keep, such as keep=lambda label: label < 10'),
    **dict.fromkeys(('map', 'transform', 'function'), "values, such as values={'label': lambda label: label + 1}"),
    add="values, such as values={'embedding': array}",
)
async def rewrite(
    source: AnyPath | Sequence[AnyPath],
    directory: AnyPath,
    *,
    keep: Chosen = None,
    exclude: Chosen = None,
    values: Mapping[str, Any] | None = None,
    drop: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    spec: Mapping[str, str] | None = None,
    shards: int | None = None,
    shardlen: int | None = None,
    encoders: Encoders = None,
    decoders: Decoders = formats.decoders,
    layout: Layout | None = None,
    checksums: bool | None = None,
    parallel: int | None = None,
    progress: Progress | None = None,
) -> Rewriting:
    """Write a changed copy of a dataset, or of several behind each other, into another folder.

    Each change is one argument, and they combine. The index of a datapoint is always that in the source, and a key is
    named as in the source.

    ==================================  ============================================================
    subset                              ``keep=indices`` or ``keep=lambda label: label < 10``
    leave out, delete                   ``exclude=[3, 17]`` or ``exclude=lambda person: person in gone``
    concatenate                         ``rewrite([first, second], directory)``
    relabel                             ``values={'label': labels}``, ``values={'label': {17: 3}}``
                                        or ``values={'label': lambda label: names[label]}``
    add a key                           ``values={'embedding': array}``
    drop, rename keys                   ``drop=['caption']``, ``rename={'img': 'image'}``
    other shards                        ``shards=64`` or ``shardlen=1000``
    ==================================  ============================================================

    Records are copied as they are stored, and compared with their checksums, if they have any. A bag of which nothing
    changes is copied as a whole, within a bucket by the store itself: adding a key transfers the bags of this key, and
    the references of the refs layout. Readers of the source are not disturbed.

    By default, a shard of the result has what is kept of one shard, or of one dataset without shards; there is none
    for a shard of which nothing is kept. The records of a shard of which a part is kept, and with ``shards`` or
    ``shardlen`` those of all shards that are divided, are read and written.

    Started again after a crash, it resumes: finished shards are kept, and the first shard is published last, so that a
    partial dataset cannot be read as a whole one. ``000000/.granular-conversion`` records the settings, the versions of
    the bags of the source, and digests of the indices that are kept, of arrays and lists of new values, and of some
    values of functions and other sources; a call with other ones into the folder is refused. If a source has an index,
    the result gets one.

    Memory: 8 bytes for each datapoint that is kept, 4 for the checksum of each record that is read, and for each of
    ``parallel`` shards two reads of about 8 MiB (or one datapoint), and upload buffers.

    Args:
      source: the folder of a dataset, or a sequence of such folders, whose specs must be equal. Their datapoints lie
        behind each other.
      directory: the folder of the new dataset: new, or that of an unfinished call. It must not be a source, in one, or
        around one.
      keep: the datapoints to keep: indices, which may be negative, in the order in which they are written (another one
        than that of the source needs ``shards`` or ``shardlen``); booleans of shape ``(len(source),)``; or a function
        that returns a boolean. By default all.
      exclude: the datapoints to leave out, given likewise, in any order, also repeated, or as a set.
      values: the new values of a key, by key: an array, list, or other source as for ``MapDataset.source``, with a
        value for each datapoint of the source; a mapping from indices to values, which leaves the others as they are;
        or a function. The parameters of a function, here and above, are named after the keys of the source whose values
        it gets. It is called in threads, and must return the same again in a resumed call.
      drop: the keys to leave out.
      rename: the new names of keys, by key.
      spec: the types of new keys, which are inferred otherwise, as by ``convert``; and new types of keys that have
        new values.
      shards: the number of shards, of equal lengths, but for one datapoint.
      shardlen: the number of datapoints of a shard.
      encoders: encoders of custom types, of new values.
      decoders: the decoders of values that functions get.
      layout: the layout of the result; by default that of the source, or the first of them.
      checksums: True to write checksums, also if the source has none; False to write none; by default as the source,
        or the first of them.
      parallel: shards that are written at a time; by default 8.
      progress: called in a thread, with the number of datapoints written, or found to exist, since the last call.

    Returns:
      The result, with the spec and the counts.

    Raises:
      InvalidArgumentError: if the source is no dataset, lies in the folder, or is it; for indices to keep that repeat;
        if a table of values has another length than the source.
      OutOfRangeError: for an index out of range.
      UnknownKeyError: for a key that the source does not have.
      SpecError: if datasets that are concatenated have different specs, or a new name is no key, or is used twice.
      EncodeError: if a value does not fit its type.
      AlreadyExistsError: if the folder holds other data.

    Example::

        faces = np.array([3, 17])
        done = await granular.aio.rewrite('s3://bucket/train', 's3://bucket/train-2', exclude=faces)
        print(done.datapoints, done.shards, done.copied)
    """
    began = time.perf_counter()
    parallel = None if parallel is None else check_integer('parallel', parallel, 1)
    target = Path(directory)
    paths = [Path(path) for path in source] if isinstance(source, list | tuple) else [Path(source)]
    if not paths:
        raise InvalidArgumentError('source: expected a dataset, or a list of datasets, got an empty list')
    async with contextlib.AsyncExitStack() as stack:
        sources = await DatasetSources.open(paths, target, stack)
        checksums = sources.have_checksums if checksums is None else checksums
        keys = ChangedKeys(sources, values, drop, rename, spec, decoders)
        rows = await choose(sources, keep, exclude, decoders)
        ranges = divide(sources, rows, shards, shardlen)
        layout = layout or sources.layout
        places = np.unique(np.linspace(0, len(rows) - 1, _SAMPLE).astype(np.int64)) if len(rows) else rows
        sampled = await keys.infer(sources, rows[places], layout, encoders)
        digests = dict(zip(map(str, places.tolist()), sampled, strict=True)) if sampled else {}
        is_sharded = sources.is_sharded or shards is not None or shardlen is not None
        work = RewrittenShards(target, sources, rows, ranges, keys, is_sharded, layout, checksums)
        run = Run(work, await offload(work.plan), digests, progress, 'rewrite', 'rewrite')

        async def write() -> None:
            run.check_surplus(len(ranges), len(rows))
            await work.prepare(run.lengths)
            await run.write_shards(
                ranges, lambda number, first, end: work.start(number, first, end, run.report.add), parallel
            )

        await run.run(write)
        if is_sharded and await sources.have_index():
            await build_index(target)
    seconds = time.perf_counter() - began
    return Rewriting(f'{target}', keys.spec, len(rows), len(ranges), run.found, run.bytes, work.copied, seconds)
