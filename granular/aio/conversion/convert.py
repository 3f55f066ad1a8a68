"""Convert records into a sharded dataset; resumable after a crash."""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

from granular._support.indexing import check_integer
from granular._support.other_names import CONVERSION_ARGUMENTS, answering
from granular.aio.conversion.infer import RecordMapping
from granular.aio.conversion.megatron import write_tokens
from granular.aio.conversion.on_ray import RayShards
from granular.aio.conversion.record_source import Reading, RecordSource, open_source
from granular.aio.conversion.run import Run
from granular.aio.conversion.shard_writer import ShardWriter
from granular.aio.conversion.stored import StoredMapping, checks_of
from granular.aio.conversion.streamed import StreamedShards
from granular.aio.datasets.codec import Decoders, Encoders, fields_of
from granular.aio.datasources.discovery.names import format_of, pair_of
from granular.aio.paths.file import Progress
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.pipeline.execution.failures import capturing
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError
from granular.formats.layout import Layout

Engine = Literal['local', 'ray']

_SHARDLEN: Final = 10_000  # datapoints per shard, by default


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion, or with ``dry_run`` its plan.

    Attributes:
      source: its address, or the type of the object.
      format: ``'granular'``, ``'parquet'``, ``'arrayrecord'``, ``'tfrecord'``, ``'webdataset'``, ``'megatron'``,
        ``'lerobot'``, ``'images'``, ``'huggingface'``, ``'source'`` for an object with random access, or
        ``'iterable'``.
      spec: the type of each key.
      reasons: why each key has its type: what the sample has, or that it was given.
      renamed: the keys of fields whose names cannot be keys, by field.
      datapoints: the number of datapoints; None if it is known only after the conversion.
      shards: the number of shards; None likewise.
      found: the datapoints that had been written by earlier runs.
      skipped: the reason for each record that was skipped, by its file or number; of finished shards that were found,
        none.
      missing: all records that were skipped, also by earlier runs.
      bytes: the bytes written by this call.
      seconds: the duration of this call.
    """

    source: str
    format: str
    spec: dict[str, str]
    reasons: dict[str, str]
    renamed: dict[str, str]
    datapoints: int | None
    shards: int | None
    found: int = 0
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: int = 0
    bytes: int = 0
    seconds: float = 0.0


@answering(
    **{
        **CONVERSION_ARGUMENTS,
        'columns': 'spec, with the types by key; to choose keys, pass MapDataset.source(granular.open(source)).select('
        'keys)',
    }
)
async def convert(
    source: Any,
    directory: AnyPath,
    *,
    format: str | None = None,
    spec: Mapping[str, str] | None = None,
    encoders: Encoders = None,
    shardlen: int | None = _SHARDLEN,
    layout: Layout = 'refs',
    checksums: bool = True,
    parallel: int | None = None,
    sample: int = 128,
    on_error: Literal['raise', 'skip'] = 'raise',
    decoders: Decoders = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    engine: Engine = 'local',
    split: str | None = None,
    hive: bool = True,
    sizes: str | Sequence[str] = (),
) -> Conversion:
    """Convert records of another format into a dataset, in shards that are written in parallel.

    Started again after a crash, it resumes: finished shards are kept, and the dataset is byte for byte the one that a
    single run writes. The first shard is published last, so that a partial dataset cannot be read as a whole one.
    ``000000/.granular-conversion`` records the settings and the source: its address, length, size, and digests of the
    names of its files and of sampled records. Another conversion into the folder is refused; that further records
    changed is not detected.
    Run one conversion at a time: a second one on the same machine is refused, but one on another machine that writes to
    the same bucket is not detected.

    Types are those of the schema of Parquet files and of the features of Hugging Face datasets, with nulls as these
    count them, and otherwise inferred from a sample: Python's numbers, int64 and float64 are ``int``, ``float`` or
    ``bool``, other numbers, arrays, dates and durations ``array``, text ``utf8``, bytes ``bytes`` (``jpg``, ``png``,
    ``mp4``, ``webm``, ``wav`` or ``flac`` if most of them are such files, or images are named so), PIL images ``png``,
    lists of these files ``jpg[]`` and so on, and None, other lists and mappings ``msgpack`` (``tree`` if they hold
    arrays). Files are stored as they are, and so are the JSON files of WebDataset, as ``json``. A record that is not a
    mapping gets the key ``data``.

    A record that does not fit its type is an error that names it, and its file. Those of the sample are named
    together, before anything is written.

    The records of a dataset of granular are copied as they are stored, also those of a pipeline that only chooses
    among datapoints (slices, subsets, orders, concatenations and mixes of datasets of one spec), unless ``spec`` or
    ``encoders`` ask for others. A reader's own decoders check them, unless they
    are None; a reader with decoders other than those of granular is a source of values, as a MapDataset is.

    TFRecord files, also compressed ones, are of ``tf.train.Example``: features with one value in all of 64 sampled
    records are that value, other ones an array, or a list of bytes. A sequence of a ``SequenceExample`` is an array
    with a row for each step, or a list. To keep records as they are, pass a
    ``TFRecordDataSource``.

    Memory: up to ``parallel`` shards hold two reads of about 4 MiB (or one record) each, and their upload buffers. A
    source without random access is read by a single reader, which skips the records of finished shards.

    An episode of LeRobot is a datapoint, with an array or a list that has a value for each step, and an ``mp4`` of each
    camera: its file, or its frames as they are stored, cut out of a file of several episodes. To decode the frames,
    pass ``MapDataset.source(source)``.

    With ``engine='ray'`` (extra ``ray``), each shard is a task of the Ray cluster that this process is connected to, or
    of a new local one. The dataset is the same, byte for byte. The source needs random access, and the workers must
    reach source and folder by the same address, with credentials from their environment.

    Args:
      source: a path, address or pattern (``data/*.parquet``) of Parquet, ArrayRecord, TFRecord, WebDataset, Megatron or
        Hugging Face arrow files, or a list of them; a folder of them, of LeRobot, of images in one folder per class
        (``image``, ``label``, ``class``) or with a ``metadata.csv``, of ``save_to_disk``, or of a dataset of granular;
        a source as for ``MapDataset.source``; a Hugging Face dataset; a sync or async iterable, which must yield the
        same records again for a resumed run.
      directory: the folder of the dataset: new, or that of an unfinished conversion; or ``x.idx`` for the two files of
        a dataset of Megatron. Then each record is an array of tokens, or has one under ``tokens``, and is a document;
        it may have ``lengths`` and ``modes`` of its sequences, as those of a ``MegatronDataSource`` have. Both files
        are new. The data is published before the index.
      format: the format of the source, if its name does not tell.
      spec: types of some keys, or fields of the source, which override the inferred ones. ``utf8`` takes bytes, too.
        ``{'file': 'utf8'}`` adds the names of the files of images, within their folder.
      encoders: encoders of custom types.
      shardlen: datapoints per shard; None for one dataset without shards.
      layout, checksums: as for ``DatasetWriter``.
      parallel: shards written at a time; by default 8, and with Ray as many as the cluster has room for.
      sample: records to infer types from.
      on_error: ``'skip'`` leaves out records that do not fit, which the result lists; a shard then has fewer than
        ``shardlen`` datapoints. With Ray, only ``'raise'``.
      decoders: decode all values of these types as a check, such as with ``granular.decoders``, which finds damaged
        images: a value that is not decoded does not fit.
      dry_run: write nothing.
      progress: called in a thread, with the number of records written, or found to exist, since the last call; with
        Ray once per shard.
      split: the split to convert, such as ``'train'``, of a folder or pattern that has files of several.
      hive: False to ignore the columns in the names of folders of Parquet files, such as ``day=3``.
      sizes: keys of audio, lists or arrays, each of which gets a key of its sizes beside it, of type ``int``: with
        ``'audio'``, ``audio_size`` has the samples of each clip. Readers return them by ``reader.sizes('audio')``,
        and plans of batches take them by ``sizes='audio_size'``.
      engine: ``'local'`` writes the shards in this process, ``'ray'`` in the workers of a Ray cluster.

    Returns:
      The result, with the spec and the counts.

    Raises:
      InvalidArgumentError: if the format of the source or a type for a key cannot be inferred.
      AlreadyExistsError: if the folder holds other data.
      EncodeError: if a record does not fit the types.
      UnsupportedError: if an episode of LeRobot cannot be cut out of a video as it is stored; it names the episode.
      WorkerError: if a worker of Ray died again and again.

    Example::

        done = await granular.aio.convert('s3://bucket/*.parquet', './train', shardlen=1000)
        print(done.datapoints, done.shards, done.spec)
    """
    began = time.perf_counter()
    shardlen = None if shardlen is None else check_integer('shardlen', shardlen, 1)
    parallel = None if parallel is None else check_integer('parallel', parallel, 1)
    sample = check_integer('sample', sample, 1)
    for name, table in (('spec', spec), ('encoders', encoders)):
        if table is not None and not isinstance(table, Mapping):
            raise InvalidArgumentError(f'{name}: expected a mapping, got {type(table).__name__}')
    if engine not in get_args(Engine):
        raise InvalidArgumentError(f"engine: expected 'local' or 'ray', got {engine!r}")
    if on_error not in ('raise', 'skip') or (on_error, engine) == ('skip', 'ray'):
        raise InvalidArgumentError(f"on_error: expected 'raise', or without Ray 'skip', got {on_error!r}")
    skip = on_error == 'skip'
    reading = Reading(format, split, hive)
    index, data = pair_of(Path(directory).name)
    if data == Path(directory).name:
        raise InvalidArgumentError(f'{Path(directory)}: is the name of data of Megatron: pass {index} for both files')
    if format_of(Path(directory).name) == 'megatron':
        given = {
            'spec': spec, 'encoders': encoders, 'decoders': decoders, 'layout': layout != 'refs', 'parallel': parallel,
            'on_error': skip, 'checksums': not checksums, 'engine': engine != 'local',
            'shardlen': shardlen != _SHARDLEN, 'sizes': sizes,
        }  # fmt: skip
        if refused := [name for name, value in given.items() if value]:
            raise InvalidArgumentError(
                f'{Path(directory)}: files of Megatron have no {", ".join(refused)}: leave them out'
            )
        written = await write_tokens(source, reading, Path(directory), dry_run, progress)
        types, reasons = {'tokens': 'array'}, {'tokens': f'of {written.dtype}'}
        done = Conversion(written.source, written.format, types, reasons, {}, written.documents, 1, bytes=written.bytes)
        return dataclasses.replace(done, seconds=time.perf_counter() - began)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(capturing.reset, capturing.set(skip))
        opened = await stack.enter_async_context(
            contextlib.aclosing(await open_source(source, reading, Path(directory)))
        )
        if engine == 'ray' and opened.source is None:
            raise InvalidArgumentError(
                f"{opened.name}: has no random access, which engine='ray' needs to divide it among tasks: expected "
                f'files, a reader, a list or a MapDataset'
            )
        if opened.stored is not None and opened.values is not None:
            changed = {key: kind for key, kind in (spec or {}).items() if opened.stored.spec.get(key) != kind}
            if changed or encoders or sizes:  # which only values can have
                reading = dataclasses.replace(reading, values=True)
                opened.source, opened.stored = opened.values, None
        sampled = await opened.sample(sample)
        mapping: RecordMapping | StoredMapping
        if opened.stored is None:
            measured = (sizes,) if isinstance(sizes, str) else tuple(sizes)
            mapping = RecordMapping(sampled, spec, layout, opened.name, opened.images, opened.columns, measured)
        else:
            mapping = StoredMapping(opened.stored, sampled, spec, layout, sizes)
        if not skip:
            mapping.refuse_bad(sampled)
        fields = fields_of(mapping.spec, mapping.encoders(encoders), layout, f'{directory}')
        checks = checks_of(fields, decoders, opened.stored)
        records = None if opened.source is None else len(opened)
        shards = 1 if shardlen is None else None if records is None else max(1, -(-records // shardlen))
        result = Conversion(opened.name, opened.format, mapping.spec, mapping.reasons, mapping.renamed, records, shards)
        if not dry_run:
            options = (layout, checksums, opened.name, mapping.hints, skip, checks)
            writer = ShardWriter(Path(directory), mapping, fields, shardlen, *options)
            # In a thread, because it imports ray.
            ray = await offload(RayShards, writer, source, reading, opened) if engine == 'ray' else None
            digests = dict(zip(map(str, opened.sampled), await offload(writer.digests, sampled), strict=True))
            run = Run(writer, _plan_of(opened, writer), digests, progress)
            result = await _write(run, result, opened, writer, parallel, ray)
    return dataclasses.replace(result, seconds=time.perf_counter() - began)


def _plan_of(source: RecordSource, writer: ShardWriter) -> dict[str, Any]:
    return {
        'source': source.name, 'format': source.format, 'size': source.size,
        'records': None if source.source is None else len(source), 'shardlen': writer.shardlen,
        'spec': writer.mapping.spec, 'layout': writer.layout, 'checksums': writer.checksums,
        'skip': writer.skip or None, 'decoded': writer.decoded or None, 'files': source.files,
    }  # fmt: skip


async def _write(
    run: Run, plan: Conversion, source: RecordSource, writer: ShardWriter, parallel: int | None, ray: RayShards | None
) -> Conversion:
    """Write the shards that are not finished, and return the result."""
    records, counts = source.source, [0, 0]  # of shards and records

    async def count(number: int, found: int, size: int) -> None:
        run.found += found
        run.bytes += size
        await run.report.add(number)

    async def write_indexed(records: Source) -> None:
        ranges = writer.ranges(len(source))
        counts[:] = len(ranges), len(source)
        run.check_surplus(*counts)
        if ray is None:
            await run.write_shards(
                ranges, lambda number, first, end: writer.start(records, number, first, end, run.report.add), parallel
            )
            return
        left = {
            number: (first, end)
            for number, (first, end) in ranges.items()
            if not await run.is_finished(number, end - first)
        }
        await ray.write(left, parallel, count, run.guard)

    async def write() -> None:
        if records is not None:
            await write_indexed(records)
            return
        streamed = StreamedShards(source, writer, run)
        await streamed.write(parallel)
        counts[:] = streamed.count, streamed.records

    await run.run(write)
    shards, datapoints = counts[0], counts[1] - run.missing
    written = dataclasses.replace(plan, shards=shards, datapoints=datapoints, found=run.found)
    return dataclasses.replace(written, bytes=run.bytes, skipped=writer.skipped, missing=run.missing)
