"""The sync API of the readers and writers of :mod:`granular.aio.datasets`."""

from granular._support.typing import Datapoint_co
from granular.aio.datasets import reader, sharded_reader, sharded_writer, writer
from granular.sync.base import A, SyncObject, blocking, constructing, passed_on
from granular.sync.readers import DatapointReader


class Datasets(DatapointReader[A, Datapoint_co]):
    """Base of the readers of a single dataset and of a sharded one."""

    spec: dict[str, str] = passed_on(reader.DatasetReader.spec)
    layout: str = passed_on(reader.DatasetReader.layout)

    available = blocking(reader.DatasetReader.available, immediate=True)
    sizes = blocking(reader.DatasetReader.sizes, immediate=True)


class DatasetReader(Datasets[reader.DatasetReader[Datapoint_co], Datapoint_co]):
    @constructing(reader.DatasetReader)
    def __init__(self) -> None: ...


class ShardedDatasetReader(Datasets[sharded_reader.ShardedDatasetReader[Datapoint_co], Datapoint_co]):
    @constructing(sharded_reader.ShardedDatasetReader)
    def __init__(self) -> None: ...

    shards: int = passed_on(sharded_reader.ShardedDatasetReader.shards)


class Appending(SyncObject[A]):
    """Base of the writers of a single dataset and of a sharded one."""

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
