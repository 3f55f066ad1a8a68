"""The sync API of :mod:`granular.aio.datasources.webdataset.source`."""

from granular._typing import Datapoint_co
from granular.aio.datasources.webdataset import source as core
from granular.sync.base import DatapointReader, constructing, passed_on, sync_doc


class WebDatasetDataSource(DatapointReader[core.WebDatasetDataSource[Datapoint_co], Datapoint_co]):
    __doc__ = sync_doc(core.WebDatasetDataSource)

    aio: core.WebDatasetDataSource[Datapoint_co]

    @constructing(core.WebDatasetDataSource)
    def __init__(self) -> None: ...

    fields: tuple[str, ...] = passed_on(core.WebDatasetDataSource.fields)
