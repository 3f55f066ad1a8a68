"""Convert records into a sharded dataset; resumable after a crash."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Literal, get_args

from granular._support.indexing import check_integer
from granular._support.other_names import answering
from granular.aio.conversion.infer import RecordMapping
from granular.aio.conversion.megatron import write_tokens
from granular.aio.conversion.on_ray import RayShards
from granular.aio.conversion.record_source import Format, ReadAhead, Reading, RecordSource, open_source
from granular.aio.conversion.shard_writer import ShardWriter
from granular.aio.conversion.stored import StoredMapping, checks_of
from granular.aio.datasets.clean import CONVERSION
from granular.aio.datasets.codec import Decoders, Encoders, fields_of
from granular.aio.datasets.shards import listed_shards, missing_shard, shards_in
from granular.aio.datasets.writer import DatasetWriter
from granular.aio.datasources.discovery.names import format_of, pair_of
from granular.aio.paths.claims import Claim
from granular.aio.paths.file import Progress
from granular.aio.paths.path import Path
from granular.aio.paths.pure import AnyPath
from granular.aio.pipeline.execution.failures import capturing
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.progress import ProgressReport
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.local.writing import final_name, remove_leftovers
from granular.errors import AlreadyExistsError, CorruptDatasetError, InvalidArgumentError, NotFoundError
from granular.formats.base import parse_json
from granular.formats.layout import Layout, shard_name

PLAN: Final = f'{shard_name(0)}/{CONVERSION}'
"""The file that records the source and the settings, so that a resumed run uses the same. It is in the folder of the
first shard because granular 0.21 and 0.24 take every name beside the shards for a shard."""

Engine = Literal['local', 'ray']

_SHARDLEN: Final = 10_000  # datapoints per shard, by default
_PARALLEL: Final = 8  # shards that one process writes at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion, or with ``dry_run`` its plan.

    Attributes:
      source: its address, or the type of the object.
      format: ``'granular'``, ``'parquet'``, ``'arrayrecord'``, ``'tfrecord'``, ``'webdataset'``, ``'megatron'``,
        ``'images'``, ``'huggingface'``, ``'source'`` for an object with random access, or ``'iterable'``.
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


@answering()
async def convert(
    source: Any,
    directory: AnyPath,
    *,
    format: Format | None = None,
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

    With ``engine='ray'`` (extra ``ray``), each shard is a task of the Ray cluster that this process is connected to, or
    of a new local one. The dataset is the same, byte for byte. The source needs random access, and the workers must
    reach source and folder by the same address, with credentials from their environment.

    Args:
      source: a path, address or pattern (``data/*.parquet``) of Parquet, ArrayRecord, TFRecord, WebDataset, Megatron or
        Hugging Face arrow files, or a list of them; a folder of them, of images in one folder per class (``image``,
        ``label``, ``class``) or with a ``metadata.csv``, of ``save_to_disk``, or of a dataset of granular; a source as
        for ``MapDataset.source``; a Hugging Face dataset; a sync or async iterable, which must yield the same records
        again for a resumed run.
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
            result = await _Work(opened, writer, parallel, progress, ray, digests).run(result)
    return dataclasses.replace(result, seconds=time.perf_counter() - began)


class _Work:
    def __init__(
        self,
        source: RecordSource,
        writer: ShardWriter,
        parallel: int | None,
        progress: Progress | None,
        ray: RayShards | None,
        sample: dict[str, str],
    ) -> None:
        self._source = source
        self._writer = writer
        self._directory = writer.directory
        self._parallel = parallel
        self._report = ProgressReport(progress)
        self._ray = ray
        self._sample = sample
        self._claim: Claim | None = None
        self._locked = contextlib.ExitStack()  # keeps copies and writers without shards out of the folder, on a disk
        self._lengths: dict[int, int] = {}  # of the finished shards
        self._is_new = self._owns_folder = False  # True if this conversion has begun it, and created its folder
        self._found = self._bytes = self._missing = 0  # missing: the records without a datapoint
        self._shards = self._records = 0  # of a source without random access, so far

    async def run(self, plan: Conversion) -> Conversion:
        store = self._directory.store
        if store.local or not store.conditional or self._writer.shardlen is None:  # its writer looks for claims
            with self._locked:
                return await self._run(plan)
        self._claim = claim = Claim(self._directory, 0, 1, 'conversions')  # a killed run is resumed on any machine
        await claim.take()
        async with claim.releasing():
            return await self._run(plan)

    async def _run(self, plan: Conversion) -> Conversion:
        source = self._source.source
        try:
            await self._find_shards()
            shards, records = await (self._convert_stream() if source is None else self._convert_indexed(source))
        except AlreadyExistsError:
            raise  # the shards are those of another conversion, which may be running
        except Exception:
            await self._tidy()
            raise
        written = dataclasses.replace(plan, shards=shards, datapoints=records - self._missing, found=self._found)
        skipped = self._writer.skipped
        return dataclasses.replace(written, bytes=self._bytes, skipped=skipped, missing=self._missing)

    async def _find_shards(self) -> None:
        """Find the finished shards, and check that they belong to the same conversion."""
        if self._directory.store.has_folders:
            self._owns_folder = not await self._directory.exists()
        await self._directory.mkdir(parents=True, exist_ok=True)
        if isinstance(store := self._directory.store, LocalStore) and self._writer.shardlen is not None:
            self._locked.callback((await store.lock_folder(self._directory.key, shared=True)).release)
        numbers = []
        if self._writer.shardlen is None:
            numbers = [0] if await self._directory.store.has_files(self._directory.key) else []
        else:
            with contextlib.suppress(NotFoundError):  # a bucket has no empty folders
                numbers = await shards_in(self._directory)
        existing = await self._check_plan(numbers)

        async def read_length(number: int) -> None:
            if (length := await self._writer.length_of(number)) is not None:
                self._lengths[number] = length

        await for_each(numbers, read_length, 16)
        await self._check_sample(existing)

    async def _check_sample(self, plan: dict[str, Any]) -> None:
        """Compare the sampled records with those of a plan, but for bad ones, which may be repaired, and add them."""
        before, length = plan['sample'], self._writer.shardlen
        for index in before.keys() & self._sample.keys():
            shard = 0 if length is None else int(index) // length
            if before[index] != self._sample[index] and (before[index] or shard in self._lengths):
                raise AlreadyExistsError(
                    f'{self._directory}: has another record {index} than {self._source.name}: was begun as another '
                    f'conversion: choose another folder, or remove this one'
                )
        plan['sample'] = {**before, **self._sample}
        if plan['sample'] != before:
            await self._write_plan(plan)

    async def _check_plan(self, numbers: list[int]) -> dict[str, Any]:
        """Write the plan, or check that the existing one is the same, but for its sample. Return it."""
        plan = {
            'source': self._source.name, 'format': self._source.format, 'size': self._source.size,
            'records': None if self._source.source is None else len(self._source), 'shardlen': self._writer.shardlen,
            'spec': self._writer.mapping.spec, 'layout': self._writer.layout, 'checksums': self._writer.checksums,
            'skip': self._writer.skip or None, 'decoded': self._writer.decoded or None, 'files': self._source.files,
        }  # fmt: skip
        try:
            existing = parse_json(await self._plan_path.read_bytes())
            sample = {**existing['sample']}
        except NotFoundError:
            if numbers and 0 not in numbers:
                rest = f'record of the conversion: remove the other {len(numbers)} shards, and convert again'
                raise missing_shard(f'{self._directory}', 0, f', and with it the {rest}') from None
            if await self._is_used(numbers) or await (self._directory / 'spec.json').exists():
                raise AlreadyExistsError(
                    f'{self._directory}: has data that convert did not write: choose another folder, or remove it'
                ) from None
            self._is_new, plan['sample'] = True, self._sample
            await self._write_plan(plan)
            return plan
        except (ValueError, TypeError, KeyError) as error:
            raise CorruptDatasetError(f'{self._plan_path}: was not written by convert') from error
        if differ := [name for name in plan if existing.get(name) != plan[name]]:
            names = ['source'] if 'source' in differ else differ  # the rest follows from another source
            differences = ', '.join(f'{name} {existing.get(name)!r}, not {plan[name]!r}' for name in names)
            raise AlreadyExistsError(
                f'{self._directory}: was begun as another conversion, with {differences}: pass the same, choose '
                f'another folder, or remove this one'
            )
        plan['sample'] = sample
        return plan

    async def _tidy(self) -> None:
        """Remove the empty folders that an error left, and then the plan if nothing else is left."""
        store, first, sharded = self._directory.store, self._writer.folder(0), self._writer.shardlen is not None
        with contextlib.suppress(NotFoundError):
            for number in await listed_shards(self._directory) if sharded and store.has_folders else ():
                await store.delete_empty(self._writer.folder(number).key)
            if self._is_new and not await self._is_used(await shards_in(self._directory) if sharded else [0]):
                await store.delete([self._plan_path.key])
                if sharded and store.has_folders:
                    await store.delete_empty(first.key)
                if self._owns_folder:
                    await store.delete_empty(self._directory.key)

    async def _is_used(self, numbers: list[int]) -> bool:
        """Return whether there are shards, apart from a folder of the first one with nothing but a plan."""
        if numbers != [0]:
            return bool(numbers)
        first = self._writer.folder(0)
        names = [entry.name async for entry in first.store.scan(first.key)]
        return any(CONVERSION not in (name, final_name(name)) for name in names)

    @property
    def _plan_path(self) -> Path:
        return self._writer.folder(0) / CONVERSION

    async def _write_plan(self, plan: dict[str, Any]) -> None:
        path = self._plan_path
        if path.store.local:
            await path.parent.mkdir(exist_ok=True)
            await offload(remove_leftovers, path.key)
        await path.write_text(f'{json.dumps(plan, sort_keys=True)}\n')

    # --- shared by both kinds of sources

    async def _is_finished(self, number: int, expected: int) -> bool:
        """Return whether a shard is finished; raise ``CorruptDatasetError`` if it has another number of records."""
        length = self._lengths.get(number)
        if length is None:
            return False
        if length != expected and not (self._writer.skip and length < expected):
            raise CorruptDatasetError(
                f'{self._writer.folder(number)}: has {length} datapoints, expected {expected} from '
                f'{self._source.name}: the source has changed'
            )
        self._found += length
        self._missing += expected - length
        await self._report.add(expected)
        return True

    # --- sources with random access

    async def _convert_indexed(self, source: Source) -> tuple[int, int]:
        count = len(self._source)
        ranges = self._writer.ranges(count)
        self._check_surplus(shards := len(ranges), count)
        if self._ray is not None:
            left = {
                number: (first, end)
                for number, (first, end) in ranges.items()
                if not await self._is_finished(number, end - first)
            }
            await self._ray.write(left, self._parallel, self._count, self._claim)
            return shards, count
        finished = asyncio.Semaphore(0)  # counts the shards after the first one

        async def convert_shard(number: int) -> None:
            start, stop = ranges[number]
            if not await self._is_finished(number, stop - start):
                writer = await self._writer.start(source, number, start, stop, self._report.add)
                async with writer:
                    for _ in range(0 if number else shards - 1):
                        await finished.acquire()
                self._bytes += writer.size
                self._missing += stop - start - len(writer)
            if number:
                finished.release()

        # The first shard last: without it, this is not a dataset.
        await for_each(ranges, convert_shard, self._parallel or _PARALLEL)
        return shards, count

    async def _count(self, records: int, found: int, size: int) -> None:
        self._found += found
        self._bytes += size
        await self._report.add(records)

    def _check_surplus(self, shards: int, records: int) -> None:
        if surplus := sorted(number for number in self._lengths if number >= shards):
            raise CorruptDatasetError(
                f'{self._writer.folder(surplus[0])}: exists, but {records} records fill {shards} shards'
            )

    # --- sources without random access

    async def _convert_stream(self) -> tuple[int, int]:
        first, errors = None if 0 in self._lengths else await self._writer.open(0), list[Exception]()

        async def publish(writer: DatasetWriter) -> None:
            try:
                await writer.aclose()
                self._bytes += writer.size
            except Exception as error:
                errors.append(error)

        async with (
            contextlib.nullcontext() if first is None else first,  # published last: without it, this is not a dataset
            contextlib.aclosing(ReadAhead(self._source.stream(self._writer.chunk))) as records,
            contextlib.aclosing(self._fill_shards(records, first, errors)) as filled,
        ):
            await for_each(filled, publish, self._parallel or _PARALLEL)
            if errors:
                del errors[1:]  # the tracebacks of errors refer to this frame
                raise errors.pop()
            self._check_surplus(self._shards, self._records)
        self._bytes += 0 if first is None else first.size
        return self._shards, self._records

    async def _fill_shards(
        self, records: ReadAhead, first: DatasetWriter | None, errors: list[Exception]
    ) -> AsyncGenerator[DatasetWriter, None]:
        """Fill shards with all records, except those of finished shards; yield those after the first one.

        It ends with an error, which is returned in the list, as is that of a shard that is published: it is raised once
        the other shards that are full are published.
        """
        try:
            while not errors and (await records.more() or not self._shards):
                number = self._shards
                if number in self._lengths:
                    count = await self._take(records)
                    await self._is_finished(number, count)
                else:
                    writer = await self._writer.open(number) if first is None or number else first
                    try:
                        count = await self._take(records, writer)
                    except BaseException:
                        await writer.abort()
                        raise
                    self._missing += count - len(writer)
                    if number:
                        yield writer
                self._records += count
                self._shards += 1
        except Exception as error:
            errors.append(error)

    async def _take(self, records: ReadAhead, writer: DatasetWriter | None = None) -> int:
        """Take the records of a shard, write them unless it is finished, and return their number."""
        count, most, shardlen = 0, self._writer.chunk, self._writer.shardlen
        while chunk := await records.take(most if shardlen is None else min(most, shardlen - count)):
            if writer is not None:
                await self._writer.write(writer, chunk, self._records + count, self._report.add)
            count += len(chunk)
        return count
