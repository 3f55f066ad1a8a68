"""The sync API of :mod:`granular.aio.datasources`."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from granular import formats
from granular._support.typing import Datapoint_co
from granular.aio.datasets.codec import Decoders
from granular.aio.datasources import detect, lerobot, windows
from granular.aio.datasources.arrayrecord import source as arrayrecord
from granular.aio.datasources.indexed_files import MaskedFiles
from granular.aio.datasources.megatron import source as megatron
from granular.aio.datasources.parquet import source as parquet
from granular.aio.datasources.tfrecord import source as tfrecord
from granular.aio.datasources.webdataset import source as webdataset
from granular.aio.paths.pure import AnyPath
from granular.aio.runtime.portal import run
from granular.sync.bags import BagReader
from granular.sync.base import Batched, blocking, constructing, documented_by, passed_on, reopened
from granular.sync.datasets import DatasetReader, ShardedDatasetReader
from granular.sync.readers import Copyable, DatapointReader, Reader, RecordReader


class ArrayRecordDataSource(RecordReader[arrayrecord.ArrayRecordDataSource, bytes], Batched):
    @constructing(arrayrecord.ArrayRecordDataSource)
    def __init__(self) -> None: ...


class LeRobotDataSource(DatapointReader[lerobot.LeRobotDataSource[Datapoint_co], Datapoint_co]):
    @constructing(lerobot.LeRobotDataSource)
    def __init__(self) -> None: ...

    fields: tuple[str, ...] = passed_on(lerobot.LeRobotDataSource.fields)
    size: int = passed_on(lerobot.LeRobotDataSource.size)
    fps: float = passed_on(lerobot.LeRobotDataSource.fps)
    sizes = blocking(lerobot.LeRobotDataSource.sizes, immediate=True)


class MegatronDataSource(DatapointReader[megatron.MegatronDataSource[Datapoint_co], Datapoint_co]):
    @constructing(megatron.MegatronDataSource)
    def __init__(self) -> None: ...

    fields: tuple[str, ...] = passed_on(megatron.MegatronDataSource.fields)
    size: int = passed_on(megatron.MegatronDataSource.size)
    dtype: np.dtype[Any] = passed_on(megatron.MegatronDataSource.dtype)
    sizes = blocking(megatron.MegatronDataSource.sizes, immediate=True)


class ParquetDataSource(DatapointReader[parquet.ParquetDataSource[Datapoint_co], Datapoint_co]):
    @constructing(parquet.ParquetDataSource)
    def __init__(self) -> None: ...

    columns: tuple[str, ...] = passed_on(parquet.ParquetDataSource.columns)
    size: int = passed_on(parquet.ParquetDataSource.size)


class TFRecordDataSource(RecordReader[tfrecord.TFRecordDataSource, bytes], Copyable, Batched):
    @constructing(tfrecord.TFRecordDataSource)
    def __init__(self) -> None: ...

    size: int = passed_on(tfrecord.TFRecordDataSource.size)


class WebDatasetDataSource(DatapointReader[webdataset.WebDatasetDataSource[Datapoint_co], Datapoint_co]):
    @constructing(webdataset.WebDatasetDataSource)
    def __init__(self) -> None: ...

    fields: tuple[str, ...] = passed_on(webdataset.WebDatasetDataSource.fields)
    size: int = passed_on(webdataset.WebDatasetDataSource.size)


class Windows(RecordReader[windows.Windows, windows.Window], Batched):
    @constructing(windows.Windows)
    def __init__(self) -> None: ...


Opened = DatasetReader | ShardedDatasetReader | Any
"""A reader of a dataset; Any stands for those of other files, so that programs use a dataset without a cast."""

_CLASSES: Final[Mapping[str, Any]] = {
    cls.__name__: cls for cls in (BagReader, *vars().values()) if isinstance(cls, type) and issubclass(cls, Reader)
}


@documented_by(detect.open)
def open(  # noqa: A001
    path: AnyPath | Sequence[AnyPath],
    decoders: Decoders = formats.decoders,
    *,
    format: str | None = None,
    split: str | None = None,
    fs: Any = None,
    **options: Any,
) -> Opened:
    opening = detect.open(path, decoders, format=format, split=split, fs=fs, **options)
    counterpart = run(opening.coroutine, immediate=True)
    if not type(counterpart).__module__.startswith('granular.'):  # of another package
        return cast(Opened, counterpart)
    general = DatapointReader if isinstance(counterpart, MaskedFiles) else RecordReader
    return cast(Opened, reopened(_CLASSES.get(type(counterpart).__name__, general), counterpart))
