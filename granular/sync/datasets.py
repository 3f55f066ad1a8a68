"""The sync API of the readers of :mod:`granular.aio.datasets`."""

from granular._support.typing import Datapoint_co
from granular.aio.datasets import reader, sharded_reader
from granular.sync.base import A, blocking, constructing, passed_on
from granular.sync.readers import DatapointReader


class Datasets(DatapointReader[A, Datapoint_co]):
    """Base of the readers of a single dataset and of a sharded one."""

    spec: dict[str, str] = passed_on(reader.DatasetReader.spec)
    layout: str = passed_on(reader.DatasetReader.layout)
    size: int = passed_on(reader.DatasetReader.size)

    available = blocking(reader.DatasetReader.available, immediate=True)
    sizes = blocking(reader.DatasetReader.sizes, immediate=True)


class DatasetReader(Datasets[reader.DatasetReader[Datapoint_co], Datapoint_co]):
    @constructing(reader.DatasetReader)
    def __init__(self) -> None: ...


class ShardedDatasetReader(Datasets[sharded_reader.ShardedDatasetReader[Datapoint_co], Datapoint_co]):
    @constructing(sharded_reader.ShardedDatasetReader)
    def __init__(self) -> None: ...

    shards: int = passed_on(sharded_reader.ShardedDatasetReader.shards)
