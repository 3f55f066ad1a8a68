"""Write the shards of a dataset from ranges of the records of a source."""

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import msgpack

from granular.aio.datasets.codec import Field, decode_now, describe_error, encode_now, keys_error, raw
from granular.aio.datasets.sharded_writer import length_of_shard
from granular.aio.datasets.writer import DatasetWriter, write_anew
from granular.aio.paths.path import Path
from granular.aio.pipeline.execution.failures import Failure, of_datapoint
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.lifecycle import ensure_open
from granular.aio.runtime.readahead import whole_pages
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import AlreadyExistsError, EncodeError, StoreError
from granular.formats.layout import Layout, shard_name

_CHUNK: Final = 4 * MiB
_MAX_CHUNK: Final = 512  # records read at a time

Tell = Callable[[int], Awaitable[None]]
"""Awaited with a number of records that were written."""


class Mapper(Protocol):
    """The mapping from records to datapoints."""

    spec: dict[str, str]  # sorted by key
    mean: int  # the mean size of a record in bytes

    def datapoint(self, record: Any) -> Mapping[str, Any]: ...


class ShardWriter:
    """Writes shards. Every shard is the same, byte for byte, whichever process writes it; it can be pickled.

    A shard has ``shardlen`` datapoints; None is for one dataset without shards. With ``skip``, records that do not fit
    the spec are left out, and a shard has fewer datapoints than records. ``hints`` are the remedies for values that the
    encoder rejects, by key; ``checks`` the fields with decoders, which must accept each record.
    """

    def __init__(
        self,
        directory: Path,
        mapping: Mapper,
        fields: Sequence[Field],
        shardlen: int | None,
        layout: Layout,
        checksums: bool,
        name: str,
        hints: Mapping[str, str] | None = None,
        skip: bool = False,
        checks: Sequence[Field] = (),
    ) -> None:
        self.directory = directory
        self.mapping = mapping
        self._fields = fields
        self.shardlen = shardlen
        self.layout = layout
        self.checksums = checksums
        self._name = name
        self._hints = hints or {}
        self._checks = checks
        self.skip, self.skipped = skip, dict[str, str]()  # the reasons, by file or number
        self.has_copies = False  # True if several processes may write the same shard at the same time
        self.guarded = False  # True if another process has locked the folder of the shards for this one
        self.chunk = max(1, min(_MAX_CHUNK, _CHUNK // mapping.mean))  # records read at a time

    @property
    def decoded(self) -> list[str]:
        """The keys of which each record is decoded as a check."""
        return [check.key for check in self._checks if check.fn is not raw]

    @property
    def is_sharded(self) -> bool:
        return self.shardlen is not None

    def shard_of(self, record: int) -> int:
        return 0 if self.shardlen is None else record // self.shardlen

    def folder(self, number: int) -> Path:
        return self.directory if self.shardlen is None else self.directory / shard_name(number)

    def ranges(self, records: int) -> dict[int, tuple[int, int]]:
        """Return the first record of each shard and the one after the last; shard 0 comes last."""
        length = self.shardlen or max(1, records)
        numbers = (*range(1, -(-records // length)), 0)
        return {number: (number * length, min(records, (number + 1) * length)) for number in numbers}

    async def length_of(self, number: int) -> int | None:
        """Return the number of datapoints of a shard; None if it is not finished."""
        return await length_of_shard(self.folder(number), self.mapping.spec, self.layout)

    async def open(self, number: int) -> DatasetWriter:
        """Start a shard. One that a killed process left unfinished is written again, with the same bytes."""
        writer = DatasetWriter(self.folder(number), self.mapping.spec, None, self.layout, 'discard', self.checksums)
        write_anew(writer, self.guarded, self.has_copies)
        await ensure_open(writer)
        if len(writer):
            await writer.abort()
            raise AlreadyExistsError(f'{writer.directory}: another writer has finished it first')
        return writer

    async def start(self, source: Source, number: int, start: int, stop: int, tell: Tell) -> DatasetWriter:
        """Write a shard from a range of records, read ahead, and return its writer: close it to publish the shard."""
        writer = await self.open(number)
        try:
            async with contextlib.aclosing(whole_pages(source.fetch, stop, self.chunk, 2, start)) as chunks:
                async for records in chunks:
                    await self.write(writer, records, start, tell)
                    start += self.chunk
        except BaseException:
            await writer.abort()
            raise
        return writer

    async def write(self, writer: DatasetWriter, records: list[Any], first: int, tell: Tell) -> None:
        """Append records, of which the first one has number ``first`` in the source."""
        for datapoint in await offload(self._encode, records, first):
            await writer.append(datapoint, flush=False)
        await tell(len(records))

    def digests(self, records: Sequence[Any]) -> list[str]:
        """Return a digest of each record as it is written; an empty one of a record that does not fit."""
        out = []
        for record in records:
            out.append('')
            with contextlib.suppress(Exception):  # it is skipped, or an error, once it is written
                encoded = msgpack.packb(sorted(self._encode_one(record, 0).items()))
                out[-1] = hashlib.sha256(encoded).hexdigest()[:16]
        return out

    def _encode(self, records: list[Any], first: int) -> list[dict[str, Any]]:
        out = []
        for number, record in enumerate(records, first):
            try:
                out.append(self._encode_one(record, number))
            except Exception as error:
                if not self.skip or not of_datapoint(error) or isinstance(error, StoreError):
                    raise
                self.skipped[getattr(record, 'path', f'datapoint {number}')] = describe_error(error)
        return out

    def _encode_one(self, record: Any, number: int) -> dict[str, Any]:
        if isinstance(record, Failure):
            raise record.release()
        spec, name = self.mapping.spec, getattr(record, 'path', self._name)
        datapoint = self.mapping.datapoint(record)
        if datapoint.keys() != spec.keys():
            hint = ": a key that is often missing can have the type 'msgpack', given with spec"
            raise keys_error(spec, datapoint, name, number, hint)
        try:
            encoded = encode_now(self._fields, datapoint, name, number)
        except EncodeError as error:
            hint = '' if self.skip else self._hints.get(error.key or '', '')
            raise EncodeError(f'{error}{hint}', path=name, key=error.key, index=number) from error.__cause__
        for check, records in zip(self._checks, encoded, strict=bool(self._checks)):
            decode_now(check, records, lambda _, __: (name, number))
        pairs = zip(self._fields, encoded, strict=True)
        return {field.key: values if field.many else values[0] for field, values in pairs}
