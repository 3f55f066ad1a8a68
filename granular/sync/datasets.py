"""The sync API of the readers and writers of :mod:`granular.aio.datasets`."""

from typing import Any

from granular._typing import Datapoint_co
from granular.aio.datasets import reader, sharded_reader, sharded_writer, writer
from granular.sync.base import A, DatapointReader, SyncObject, blocking, constructing, sync_doc


class Datasets(DatapointReader[A, Datapoint_co]):
    """Base of the readers of a single dataset and of a sharded one."""

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        return self.aio.spec  # type: ignore[no-any-return]

    @property
    def layout(self) -> str:
        """The layout: ``'refs'`` or ``'columns'``."""
        return self.aio.layout  # type: ignore[no-any-return]

    available = blocking(reader.DatasetReader.available)


class DatasetReader(Datasets[reader.DatasetReader[Datapoint_co], Datapoint_co]):
    __doc__ = sync_doc(reader.DatasetReader)

    aio: reader.DatasetReader[Datapoint_co]

    @constructing(reader.DatasetReader)
    def __init__(self) -> None: ...


class ShardedDatasetReader(Datasets[sharded_reader.ShardedDatasetReader[Datapoint_co], Datapoint_co]):
    __doc__ = sync_doc(sharded_reader.ShardedDatasetReader)

    aio: sharded_reader.ShardedDatasetReader[Datapoint_co]

    @constructing(sharded_reader.ShardedDatasetReader)
    def __init__(self) -> None: ...

    @property
    def shards(self) -> int:
        """Number of shards that are read."""
        return self.aio.shards


class Appending(SyncObject[A]):
    """Base of the writers of a single dataset and of a sharded one."""

    aio: Any

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        return self.aio.spec  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Bytes written."""
        return self.aio.size  # type: ignore[no-any-return]

    @property
    def found(self) -> int:
        """Datapoints that existed when the writer was opened: resume with the ones that follow.

        For a sharded dataset, counts those of this writer's own shards.
        """
        return self.aio.found  # type: ignore[no-any-return]

    append = blocking(writer.DatasetWriter.append)
    flush = blocking(writer.DatasetWriter.flush)


class DatasetWriter(Appending[writer.DatasetWriter]):
    __doc__ = sync_doc(writer.DatasetWriter)

    aio: writer.DatasetWriter

    @constructing(writer.DatasetWriter)
    def __init__(self) -> None: ...


class ShardedDatasetWriter(Appending[sharded_writer.ShardedDatasetWriter]):
    __doc__ = sync_doc(sharded_writer.ShardedDatasetWriter)

    aio: sharded_writer.ShardedDatasetWriter

    @constructing(sharded_writer.ShardedDatasetWriter)
    def __init__(self) -> None: ...

    @property
    def shards(self) -> int:
        """Number of shards that this writer has started."""
        return self.aio.shards
