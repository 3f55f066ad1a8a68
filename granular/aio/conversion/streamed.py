"""Convert a source without random access: its records fill one shard after the other."""

import contextlib
from collections.abc import AsyncGenerator

from granular.aio.conversion.record_source import ReadAhead, RecordSource
from granular.aio.conversion.run import PARALLEL, Run
from granular.aio.conversion.shard_writer import ShardWriter
from granular.aio.datasets.writer import DatasetWriter
from granular.aio.runtime.tasks import for_each


class StreamedShards:
    """The shards that the records of a source without random access fill in a run."""

    def __init__(self, source: RecordSource, writer: ShardWriter, run: Run) -> None:
        self._source = source
        self._writer = writer
        self._run = run
        self.count = self.records = 0  # of shards and records, so far

    async def write(self, parallel: int | None) -> None:
        """Write all shards that are not finished; the first one is published last."""
        writer, errors = self._writer, list[Exception]()
        first = None if 0 in self._run.lengths else await writer.open(0)

        async def publish(shard: DatasetWriter) -> None:
            try:
                await shard.aclose()
                self._run.bytes += shard.size
            except Exception as error:
                errors.append(error)

        async with (
            contextlib.nullcontext() if first is None else first,  # published last: without it, this is not a dataset
            contextlib.aclosing(ReadAhead(self._source.stream(writer.chunk))) as records,
            contextlib.aclosing(self._fill_shards(records, first, errors)) as filled,
        ):
            await for_each(filled, publish, parallel or PARALLEL)
            if errors:
                del errors[1:]  # the tracebacks of errors refer to this frame
                raise errors.pop()
            self._run.check_surplus(self.count, self.records)
        self._run.bytes += 0 if first is None else first.size

    async def _fill_shards(
        self, records: ReadAhead, first: DatasetWriter | None, errors: list[Exception]
    ) -> AsyncGenerator[DatasetWriter, None]:
        """Fill shards with all records, except those of finished shards; yield those after the first one.

        It ends with an error, which is returned in the list, as is that of a shard that is published: it is raised once
        the other shards that are full are published.
        """
        try:
            while not errors and (await records.more() or not self.count):
                number = self.count
                if number in self._run.lengths:
                    count = await self._take(records)
                    await self._run.is_finished(number, count)
                else:
                    writer = await self._writer.open(number) if first is None or number else first
                    try:
                        count = await self._take(records, writer)
                    except BaseException:
                        await writer.abort()
                        raise
                    self._run.missing += count - len(writer)
                    if number:
                        yield writer
                self.records += count
                self.count += 1
        except Exception as error:
            errors.append(error)

    async def _take(self, records: ReadAhead, writer: DatasetWriter | None = None) -> int:
        """Take the records of a shard, write them unless it is finished, and return their number."""
        count, most, shardlen = 0, self._writer.chunk, self._writer.shardlen
        while chunk := await records.take(most if shardlen is None else min(most, shardlen - count)):
            if writer is not None:
                await self._writer.write(writer, chunk, self.records + count, self._run.report.add)
            count += len(chunk)
        return count
