"""The sync API of :mod:`granular.aio.datasources.webdataset.source`."""

from granular._typing import Datapoint_co
from granular.aio.datasources.webdataset import source as core
from granular.sync.base import DatapointReader, constructing, sync_doc


class WebDatasetDataSource(DatapointReader[core.WebDatasetDataSource[Datapoint_co], Datapoint_co]):
    __doc__ = sync_doc(core.WebDatasetDataSource)

    aio: core.WebDatasetDataSource[Datapoint_co]

    @constructing(core.WebDatasetDataSource)
    def __init__(self) -> None: ...

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the datapoints, ``'__key__'`` first; a datapoint may lack some."""
        return self.aio.fields
