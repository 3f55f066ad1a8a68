"""The sync API of :mod:`granular.aio.datasources.parquet`."""

import os
from collections.abc import Sequence
from typing import Any

from granular._typing import Datapoint_co
from granular.aio.datasources.parquet import source as core
from granular.aio.datasources.parquet.source import CACHE
from granular.aio.paths.pure import PurePath
from granular.sync.base import DatapointReader, sync_doc


class ParquetDataSource(DatapointReader[core.ParquetDataSource[Datapoint_co], Datapoint_co]):
    __doc__ = sync_doc(core.ParquetDataSource)

    aio: core.ParquetDataSource[Datapoint_co]

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
