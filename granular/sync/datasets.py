"""The sync API of the readers and writers of :mod:`granular.aio.datasets`."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from granular import formats
from granular._typing import Datapoint_co
from granular.aio.datasets import reader, sharded_reader, sharded_writer, writer
from granular.aio.datasets.codec import Decoder, Encoder
from granular.aio.paths.pure import PurePath
from granular.formats.layout import Layout
from granular.sync.base import A, DatapointReader, SyncObject, blocking, sync_doc


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

    def __init__(
        self,
        directory: PurePath | str | os.PathLike[str] | Any,
        decoders: Mapping[str, Decoder | Any] | None = formats.decoders,
        cache_index: bool = True,
        cache_keys: Sequence[str] = (),
        parallel: bool = False,
        verify: bool = False,
    ) -> None:
        self._open(reader.DatasetReader(directory, decoders, cache_index, cache_keys, parallel, verify))


class ShardedDatasetReader(Datasets[sharded_reader.ShardedDatasetReader[Datapoint_co], Datapoint_co]):
    __doc__ = sync_doc(sharded_reader.ShardedDatasetReader)

    aio: sharded_reader.ShardedDatasetReader[Datapoint_co]

    def __init__(
        self,
        directory: PurePath | str | os.PathLike[str] | Any,
        decoders: Mapping[str, Decoder | Any] | None = formats.decoders,
        cache_index: bool = True,
        cache_keys: Sequence[str] = (),
        parallel: bool = False,
        shardstart: int = 0,
        shardstep: int = 1,
        verify: bool = False,
        index: bool = True,
    ) -> None:
        args = directory, decoders, cache_index, cache_keys, parallel, shardstart, shardstep, verify, index
        self._open(sharded_reader.ShardedDatasetReader(*args))

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

    def __len__(self) -> int:
        return len(self.aio)

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

    def __init__(
        self,
        directory: PurePath | str | os.PathLike[str] | Any,
        spec: Mapping[str, str],
        encoders: Mapping[str, Encoder | Any] | None = formats.encoders,
        layout: Layout = 'refs',
        resume: Literal['check', 'discard'] = 'check',
        checksums: bool = True,
    ) -> None:
        self._open(writer.DatasetWriter(directory, spec, encoders, layout, resume, checksums))


class ShardedDatasetWriter(Appending[sharded_writer.ShardedDatasetWriter]):
    __doc__ = sync_doc(sharded_writer.ShardedDatasetWriter)

    aio: sharded_writer.ShardedDatasetWriter

    def __init__(
        self,
        directory: PurePath | str | os.PathLike[str] | Any,
        spec: Mapping[str, str],
        encoders: Mapping[str, Encoder | Any] | None = formats.encoders,
        shardlen: int | None = None,
        shardstart: int = 0,
        shardstep: int = 1,
        layout: Layout = 'refs',
        checksums: bool = True,
        resume: Literal['check', 'discard'] = 'check',
        index: bool = False,
    ) -> None:
        args = directory, spec, encoders, shardlen, shardstart, shardstep, layout, checksums, resume, index
        self._open(sharded_writer.ShardedDatasetWriter(*args))

    @property
    def shards(self) -> int:
        """Number of shards that this writer has started."""
        return self.aio.shards
