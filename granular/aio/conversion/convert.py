"""Convert records into a sharded dataset; resumable after a crash."""

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from granular.aio.conversion.infer import Fitting
from granular.aio.conversion.origins import Ahead, Format, Origin, origin_of
from granular.aio.datasets.claims import Claim
from granular.aio.datasets.codec import Encoder, encode_now, fields_of
from granular.aio.datasets.sharded_reader import shards_in
from granular.aio.datasets.sharded_writer import length_of_shard
from granular.aio.datasets.writer import DatasetWriter
from granular.aio.paths.path import Path, Progress
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import for_each, outcome, start_task
from granular.aio.runtime.threads import offload
from granular.aio.runtime.user_functions import call_user
from granular.aio.stores.local.writing import drop_drafts
from granular.config import MiB
from granular.errors import (
    AlreadyExistsError,
    CorruptDatasetError,
    DatapointError,
    EncodeError,
    NotFoundError,
)
from granular.formats.layout import Layout, shard_name
from granular.indexing import check_integer

PLAN: Final = 'conversion.json'
"""The file beside the shards that records the source and the settings, so that a resumed run uses the same."""

_CHUNK: Final = 4 * MiB
_MOST: Final = 512  # records read at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion, or with ``dry_run`` its plan.

    Attributes:
      source: its address, or the type of the object.
      format: ``'parquet'``, ``'arrayrecord'``, ``'webdataset'``, ``'images'``, ``'huggingface'``, ``'source'`` for an
        object with random access, or ``'iterable'``.
      spec: the type of each key.
      renamed: the keys of fields whose names cannot be keys, by field.
      records: the number of records; None if it is known only after the conversion.
      shards: the number of shards; None likewise.
      found: the records that had been converted by earlier runs.
      bytes: the bytes written by this call.
      seconds: the duration of this call.
    """

    source: str
    format: str
    spec: dict[str, str]
    renamed: dict[str, str]
    records: int | None
    shards: int | None
    found: int = 0
    bytes: int = 0
    seconds: float = 0.0


async def convert(
    source: Any,
    directory: Path | str | Any,
    *,
    format: Format | None = None,
    spec: Mapping[str, str] | None = None,
    encoders: Mapping[str, Encoder | Any] | None = None,
    shardlen: int | None = 10_000,
    layout: Layout = 'refs',
    checksums: bool = False,
    parallel: int = 8,
    sample: int = 128,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert records of another format into a dataset, in shards that are written in parallel.

    Started again after a crash, it resumes: finished shards are kept, and the dataset is byte for byte the one that a
    single run writes. The first shard is published last, so that a partial dataset cannot be read as a whole one.
    ``conversion.json`` beside the shards records the source and the settings. Run one conversion at a time: a second
    one on the same machine is refused, but one on another machine that writes to the same bucket is not detected.

    Types are inferred from a sample: integers are ``int``, text ``utf8``, bytes ``bytes`` (``jpg`` or ``png`` if they
    are an image file), arrays ``array``, PIL images ``png``, and other numbers, None, lists and mappings ``msgpack``
    (``tree`` if they hold arrays). Image files are stored as they are. A record that is not a mapping gets the key
    ``data``.

    Memory: up to ``parallel`` shards hold two reads of about 4 MiB (or one record) each, and their upload buffers. A
    source without random access is read by a single reader, which skips the records of finished shards.

    Args:
      source: a path, address or pattern (``data/*.parquet``) of Parquet, ArrayRecord, WebDataset or Hugging Face arrow
        files, or a list of them; a folder of them, of images in one folder per class (``image``, ``label``, ``class``),
        or of ``save_to_disk``; a source as for ``MapDataset.source``; a Hugging Face dataset; a sync or async iterable,
        which must yield the same records again for a resumed run.
      directory: the folder of the dataset: new, or that of an unfinished conversion.
      format: the format of the source, if its name does not tell.
      spec: types of some keys, which override the inferred ones.
      encoders: encoders of custom types.
      shardlen: datapoints per shard; None for one dataset without shards.
      layout, checksums: as for ``DatasetWriter``.
      parallel: shards written at a time.
      sample: records to infer types from.
      dry_run: write nothing.
      progress: called with the number of records written, or found to exist, since the last call.

    Returns:
      The result, with the spec and the counts.

    Raises:
      InvalidArgumentError: if the format of the source or a type for a key cannot be inferred.
      AlreadyExistsError: if the folder holds other data.
      EncodeError: if a record does not fit the types.

    Example::

        done = await granular.aio.convert('s3://bucket/*.parquet', './train', shardlen=1000)
        print(done.records, done.shards, done.spec)
    """
    began = time.perf_counter()
    await ensure_event_loop()
    for name, number in (('shardlen', shardlen), ('parallel', parallel), ('sample', sample)):
        if number is not None:
            check_integer(name, number, 1)
    async with contextlib.aclosing(await origin_of(source, format)) as origin:
        fitting = Fitting(await origin.sample(sample), spec, layout, origin.name)
        place, used = Path(directory), fitting.encoders(encoders)
        work = _Work(origin, place, fitting, used, shardlen, layout, checksums, parallel, progress)
        records = None if origin.source is None else len(origin)
        shards = 1 if shardlen is None else None if records is None else max(1, -(-records // shardlen))
        done = Conversion(origin.name, origin.format, fitting.spec, fitting.renamed, records, shards)
        if not dry_run:
            done = await work.run(done)
    return dataclasses.replace(done, seconds=time.perf_counter() - began)


class _Work:
    """A running conversion."""

    def __init__(
        self,
        origin: Origin,
        place: Path,
        fitting: Fitting,
        encoders: Mapping[str, Any],
        shardlen: int | None,
        layout: Layout,
        checksums: bool,
        parallel: int,
        progress: Progress | None,
    ) -> None:
        self._origin, self._place, self._fitting = origin, place, fitting
        self._fields = fields_of(fitting.spec, encoders, layout, f'{place}')
        self._shardlen, self._layout, self._checksums, self._parallel = shardlen, layout, checksums, parallel
        self._report = progress
        self._chunk = max(1, min(_MOST, _CHUNK // fitting.mean))
        self._lengths: dict[int, int] = {}  # of the finished shards
        self._found = self._bytes = 0

    async def run(self, plan: Conversion) -> Conversion:
        store = self._place.store
        if self._shardlen is None or store.local or not store.conditional:
            return await self._run(plan)
        claim = Claim(self._place, 0, 1, 'unknown')  # because a killed run is resumed on any machine
        await claim.take()
        try:
            return await self._run(plan)
        finally:
            await claim.release()

    async def _run(self, plan: Conversion) -> Conversion:
        await self._look()
        source = self._origin.source
        shards, records = await (self._one_by_one() if source is None else self._at_random(source))
        return dataclasses.replace(plan, shards=shards, records=records, found=self._found, bytes=self._bytes)

    async def _look(self) -> None:
        """Find the finished shards, and check that they belong to the same conversion."""
        place, spec = self._place, self._fitting.spec
        await place.mkdir(parents=True, exist_ok=True)
        if self._shardlen is None:
            if (length := await length_of_shard(place, spec, self._layout)) is not None:
                self._lengths[0] = length
            return
        plan = {
            'source': self._origin.name, 'format': self._origin.format, 'size': self._origin.size,
            'records': None if self._origin.source is None else len(self._origin), 'shardlen': self._shardlen,
            'spec': spec, 'layout': self._layout, 'checksums': self._checksums,
        }  # fmt: skip
        try:
            numbers = await shards_in(place)
        except NotFoundError:
            numbers = []  # a bucket has no empty folders
        try:
            there = json.loads(await (place / PLAN).read_bytes())
        except NotFoundError:
            if numbers or await (place / 'spec.json').exists():
                raise AlreadyExistsError(
                    f'{place}: holds a dataset that convert did not write: choose another folder, or remove it'
                ) from None
            if place.store.local:
                await offload(drop_drafts, (place / PLAN).key)
            await (place / PLAN).write_text(f'{json.dumps(plan, sort_keys=True)}\n')
        except ValueError as error:
            raise CorruptDatasetError(f'{place / PLAN}: is none that convert writes') from error
        else:
            if differ := [name for name in plan if not isinstance(there, dict) or there.get(name) != plan[name]]:
                said = ', '.join(f'{name} {there.get(name)!r}, not {plan[name]!r}' for name in differ)
                raise AlreadyExistsError(f'{place}: was begun as another conversion, with {said}')

        async def look(number: int) -> None:
            length = await length_of_shard(place / shard_name(number), spec, self._layout)
            if length is not None:
                self._lengths[number] = length

        async def each() -> AsyncIterator[int]:
            for number in numbers:
                yield number

        await for_each(each(), look, 16)

    # --- shared by both kinds of sources

    def _folder(self, number: int) -> Path:
        return self._place if self._shardlen is None else self._place / shard_name(number)

    async def _open(self, number: int) -> DatasetWriter:
        # A killed run's unfinished shard is written again, with the same bytes.
        return await DatasetWriter.open(
            self._folder(number), self._fitting.spec, None, self._layout, 'discard', self._checksums
        )

    def _is_there(self, number: int, wanted: int) -> bool:
        """Return whether a shard is finished.

        Raises:
          CorruptDatasetError: if it is finished with another number of records.
        """
        length = self._lengths.get(number)
        if length is None:
            return False
        if length != wanted:
            raise CorruptDatasetError(
                f'{self._folder(number)}: has {length} datapoints, but {wanted} of {self._origin.name} belong there: '
                f'the source has changed'
            )
        self._found += length
        self._tell(length)
        return True

    async def _write(self, writer: DatasetWriter, records: list[Any], first: int) -> None:
        """Append records, the first of which has number ``first`` in the source. They are encoded in a thread."""
        for point in await offload(self._encode, records, first):
            await writer.append(point, flush=False)
        self._tell(len(records))

    def _encode(self, records: list[Any], first: int) -> list[dict[str, Any]]:
        """Return the encoded records, by key."""
        out, spec, name = [], self._fitting.spec, self._origin.name
        for number, record in enumerate(records, first):
            point = self._fitting.point(record)
            if point.keys() != spec.keys():
                missing, extra = sorted(spec.keys() - point.keys()), sorted(point.keys() - spec.keys())
                raise DatapointError(
                    f'{name}: datapoint {number}: keys are missing {missing} or too many {extra}: a key that is often '
                    f"missing can have the type 'msgpack', given with spec"
                )
            try:
                encoded = encode_now(self._fields, point, name, number)
            except EncodeError as error:
                raise EncodeError(f'{error}: its type was seen in other records: give another with spec') from error
            pairs = zip(self._fields, encoded, strict=True)
            out.append({field.key: values if field.many else values[0] for field, values in pairs})
        return out

    def _tell(self, records: int) -> None:
        if self._report is not None and records:
            call_user(self._report, records)

    # --- sources with random access

    async def _at_random(self, source: Source) -> tuple[int, int]:
        count, length = len(self._origin), self._shardlen or max(1, len(self._origin))
        shards = max(1, -(-count // length))
        if more := sorted(number for number in self._lengths if number >= shards):
            raise CorruptDatasetError(f'{self._folder(more[0])}: is there, but {count} records fill {shards} shards')
        others = asyncio.Semaphore(0)

        async def shard(number: int) -> None:
            start, stop = number * length, min(count, (number + 1) * length)
            if not self._is_there(number, stop - start):
                async with await self._open(number) as writer:
                    self._found += len(writer)
                    self._tell(len(writer))
                    await self._fill(source, writer, start + len(writer), stop)
                    if not number:
                        for _ in range(shards - 1):
                            await others.acquire()
                self._bytes += writer.size
            if number:
                others.release()

        async def numbers() -> AsyncIterator[int]:
            for number in (*range(1, shards), 0):  # the first at the end: without it, this is not a dataset
                yield number

        await for_each(numbers(), shard, self._parallel)
        return shards, count

    async def _fill(self, source: Source, writer: DatasetWriter, start: int, stop: int) -> None:
        """Write records to a shard, and read the next ones meanwhile."""
        at, reading = start, None
        try:
            while at < stop:
                first, following = at, min(at + self._chunk, stop)
                records = await outcome(reading or source.fetch(range(first, following)))
                at = following
                more = range(at, min(at + self._chunk, stop))
                reading = start_task(source.fetch(more)) if more else None
                await self._write(writer, records, first)
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    # --- sources without random access

    async def _one_by_one(self) -> tuple[int, int]:
        number = count = 0
        opened: list[DatasetWriter] = []  # the writer of the current shard, and that of the first
        publishing: set[asyncio.Task[None]] = set()
        try:
            async with contextlib.aclosing(Ahead(self._origin.stream(self._chunk))) as records:
                while True:
                    if number in self._lengths:
                        passed = 0
                        while got := await records.take(self._left(passed)):
                            passed += len(got)
                        self._is_there(number, passed)
                        count += passed
                    else:
                        opened.append(writer := await self._open(number))
                        count += await self._pour(records, writer, count)
                        if number:
                            while len(publishing) >= self._parallel:
                                ended, publishing = await asyncio.wait(publishing, return_when='FIRST_COMPLETED')
                                for task in ended:
                                    task.result()
                            publishing.add(asyncio.create_task(self._publish(opened.pop())))
                    if not await records.more():
                        break
                    number += 1
            if more := sorted(other for other in self._lengths if other > number):
                raise CorruptDatasetError(f'{self._folder(more[0])}: is there, but {count} records end before it')
            await asyncio.gather(*publishing)
            while opened:  # the first at the end: without it, this is not a dataset
                await self._publish(opened.pop())
        except BaseException as error:
            for task in publishing:
                if not isinstance(error, Exception):
                    task.cancel()
            await asyncio.gather(*publishing, return_exceptions=True)  # full shards are published
            for writer in opened:
                await writer.abort()
            raise
        return number + 1, count

    def _left(self, count: int) -> int:
        """Return how many records to request next for a shard that has ``count``."""
        return self._chunk if self._shardlen is None else min(self._chunk, self._shardlen - count)

    async def _pour(self, records: Ahead, writer: DatasetWriter, first: int) -> int:
        """Fill a shard until it is full or the records end; return the number of its records."""
        count = there = len(writer)
        self._found += there
        self._tell(there)
        while there and (got := await records.take(min(there, self._chunk))):
            there -= len(got)
        if there:
            raise CorruptDatasetError(f'{writer.directory}: holds {count} datapoints, {there} more than there are')
        while got := await records.take(self._left(count)):
            await self._write(writer, got, first + count)
            count += len(got)
        return count

    async def _publish(self, writer: DatasetWriter) -> None:
        await writer.aclose()
        self._bytes += writer.size
