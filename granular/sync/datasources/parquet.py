"""The sync API of :mod:`granular.aio.datasources.parquet`."""

import os
from collections.abc import Sequence
from typing import Any

from granular.aio.datasources.parquet import source as core
from granular.aio.datasources.parquet import stream
from granular.aio.datasources.parquet.source import CACHE
from granular.aio.datasources.parquet.stream import CYCLE, READ_AHEAD, parquet_stream
from granular.aio.execution.failures import OnError
from granular.aio.paths.pure import PurePath
from granular.aio.pipeline.streams.streams import Stream
from granular.aio.pipeline.transforms import ReadOptions
from granular.sync.base import DatapointReader, sync_doc
from granular.sync.pipeline import IterDataset


class ParquetDataSource(DatapointReader[core.ParquetDataSource]):
    __doc__ = sync_doc(core.ParquetDataSource)

    aio: core.ParquetDataSource

    def __init__(
        self,
        paths: PurePath | str | os.PathLike[str] | Sequence[Any],
        columns: Sequence[str] | None = None,
        cache_bytes: int = CACHE,
    ) -> None:
        self._open(core.ParquetDataSource(paths, columns, cache_bytes))

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a row's columns."""
        return self.aio.columns


class ParquetIterDataset(IterDataset):
    __doc__ = sync_doc(stream.ParquetIterDataset)

    def __init__(
        self,
        paths: PurePath | str | os.PathLike[str] | Sequence[Any],
        columns: Sequence[str] | None = None,
        *,
        cycle_length: int = CYCLE,
        read_ahead: int = READ_AHEAD,
        read_options: ReadOptions | None = None,
        on_error: OnError = 'raise',
    ) -> None:
        super().__init__(parquet_stream(paths, columns, cycle_length, read_ahead, read_options, on_error))

    def _derive(self, stream: Stream) -> Any:
        return IterDataset(stream)
