"""The sync API of :mod:`granular.aio.datasources.webdataset.source`."""

import os
from collections.abc import Sequence
from typing import Any

from granular._typing import Datapoint_co
from granular.aio.datasources.webdataset import source as core
from granular.aio.datasources.webdataset.source import Decoders
from granular.aio.paths.pure import PurePath
from granular.sync.base import DatapointReader, sync_doc


class WebDatasetDataSource(DatapointReader[core.WebDatasetDataSource[Datapoint_co], Datapoint_co]):
    __doc__ = sync_doc(core.WebDatasetDataSource)

    aio: core.WebDatasetDataSource[Datapoint_co]

    def __init__(self, paths: PurePath | str | os.PathLike[str] | Sequence[Any], decoders: Decoders = None) -> None:
        self._open(core.WebDatasetDataSource(paths, decoders))

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the datapoints, ``'__key__'`` first; a datapoint may lack some."""
        return self.aio.fields
