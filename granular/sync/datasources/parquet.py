"""The sync API of :mod:`granular.aio.datasources.parquet`."""

from granular._typing import Datapoint_co
from granular.aio.datasources.parquet import source as core
from granular.sync.base import DatapointReader, constructing, sync_doc


class ParquetDataSource(DatapointReader[core.ParquetDataSource[Datapoint_co], Datapoint_co]):
    __doc__ = sync_doc(core.ParquetDataSource)

    aio: core.ParquetDataSource[Datapoint_co]

    @constructing(core.ParquetDataSource)
    def __init__(self) -> None: ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of a row's columns."""
        return self.aio.columns
