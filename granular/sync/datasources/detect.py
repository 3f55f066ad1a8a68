"""The sync API of :mod:`granular.aio.datasources.detect`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from granular import formats
from granular.aio.datasets.codec import Decoders
from granular.aio.datasources import detect as core
from granular.aio.paths.pure import AnyPath
from granular.aio.runtime.bridge import run
from granular.sync.bags import BagReader
from granular.sync.base import reopened, sync_doc
from granular.sync.datasets import DatasetReader, ShardedDatasetReader
from granular.sync.datasources.arrayrecord import ArrayRecordDataSource
from granular.sync.datasources.parquet import ParquetDataSource
from granular.sync.datasources.tfrecord import TFRecordDataSource
from granular.sync.datasources.webdataset import WebDatasetDataSource

Opened = DatasetReader | ShardedDatasetReader | Any
"""A reader of a dataset; Any stands for those of other files, so that programs use a dataset without a cast."""

_CLASSES: Final[Mapping[str, Any]] = {
    cls.__name__: cls
    for cls in (
        *(DatasetReader, ShardedDatasetReader, BagReader),
        *(ArrayRecordDataSource, ParquetDataSource, TFRecordDataSource, WebDatasetDataSource),
    )
}


def open(  # noqa: A001
    path: AnyPath | Sequence[AnyPath],
    decoders: Decoders = formats.decoders,
    **options: Any,
) -> Opened:
    counterpart = run(core.open(path, decoders, **options))
    return cast(Opened, reopened(_CLASSES[type(counterpart).__name__], counterpart))


open.__doc__ = sync_doc(core.open)
