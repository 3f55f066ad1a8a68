"""The sync API of :mod:`granular.aio.datasources.parquet`."""

from granular._typing import Datapoint_co
from granular.aio.datasources.parquet import source as core
from granular.sync.base import DatapointReader, constructing, passed_on, sync_doc


class ParquetDataSource(DatapointReader[core.ParquetDataSource[Datapoint_co], Datapoint_co]):
    __doc__ = sync_doc(core.ParquetDataSource)

    aio: core.ParquetDataSource[Datapoint_co]

    @constructing(core.ParquetDataSource)
    def __init__(self) -> None: ...

    columns: tuple[str, ...] = passed_on(core.ParquetDataSource.columns)
