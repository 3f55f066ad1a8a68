"""The sync API of the writers of :mod:`granular.aio.datasets`, which readers do not import."""

from granular._support.other_names import OF_WRITERS, OtherNames
from granular.aio.datasets import sharded_writer, writer
from granular.sync.base import A, SyncObject, blocking, constructing, passed_on


class Appending(OtherNames, SyncObject[A]):
    """Base of the writers of a single dataset and of a sharded one."""

    _answers = OF_WRITERS

    spec: dict[str, str] = passed_on(writer.DatasetWriter.spec)
    size: int = passed_on(writer.DatasetWriter.size)
    found: int = passed_on(sharded_writer.ShardedDatasetWriter.found)

    append = blocking(writer.DatasetWriter.append, immediate=True)
    flush = blocking(writer.DatasetWriter.flush, immediate=True)


class DatasetWriter(Appending[writer.DatasetWriter]):
    @constructing(writer.DatasetWriter)
    def __init__(self) -> None: ...


class ShardedDatasetWriter(Appending[sharded_writer.ShardedDatasetWriter]):
    @constructing(sharded_writer.ShardedDatasetWriter)
    def __init__(self) -> None: ...

    shards: int = passed_on(sharded_writer.ShardedDatasetWriter.shards)
