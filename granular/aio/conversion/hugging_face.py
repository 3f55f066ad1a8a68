"""Datasets of Hugging Face as sources of a conversion: files as they are stored, values of the types of features."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from granular import formats
from granular._support.lazy import import_extra
from granular._support.text import logger
from granular.aio.conversion.schema import Column, column_of, has_nulls
from granular.errors import DecodeError, InvalidArgumentError
from granular.formats.arrow_values import values_of
from granular.formats.codecs.audio import audio_type
from granular.formats.codecs.images import image_type

Row = dict[str, Any]
Reader = Callable[[Any], list[Any]]
"""Returns the values of an array of Arrow."""

_BATCH: Final = 16  # rows of a stream that are read at a time
_ROWS: Final = 1000  # of a column that are looked at at a time


class Features:
    """Types and values that a conversion makes of the features of a dataset.

    Values are read from Arrow, as from Parquet files, whatever the format of the dataset. Images, sounds and videos
    are their files, unless an image is to have a mode: then it is an image of PIL. A file of an image that is not
    stored as it is, such as a TIFF, is an image of PIL, too. A dataset with a transform is read through it.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self.columns: dict[str, Column] = {}
        self._name = name
        self._readers: dict[str, Reader] = {}
        datasets = import_extra('datasets', 'huggingface')
        self._is_stream = isinstance(dataset, datasets.IterableDataset)
        self._as_rows = dataset.features is None if self._is_stream else dataset.format['type'] == 'custom'
        if self._as_rows:
            return
        self._tables = dataset.with_format('arrow')
        if not self._is_stream and not dataset.format['output_all_columns']:
            self._tables = dataset.with_format('arrow', columns=dataset.format['columns'])
        for field, feature in dataset.features.items():
            self._readers[field] = self._reader_of(field, feature) or values_of
            if isinstance(feature, datasets.ClassLabel):
                shown = f'{", ".join(feature.names):.1000}'
                logger.warning('%s: %r becomes the numbers of its classes, without their names: %s', name, field, shown)
            if not self._is_stream and field in dataset.data.column_names:  # of a stream, the sample decides
                self._declare(field, feature)

    def _declare(self, field: str, feature: Any) -> None:
        is_missing = self._selects(field, lambda column: column.null_count > 0)
        if _shape_of(feature) is not None:
            self.columns[field] = Column('array', is_missing)
        elif self._readers[field] is values_of:
            kind = self.dataset.data.column(field).type
            self.columns[field] = column_of([kind], is_missing, self._selects(field, has_nulls))
        else:
            self.columns[field] = Column('', is_missing)

    def _selects(self, field: str, is_true: Callable[[Any], bool]) -> bool:
        """Return whether something is true of a column, also of the rows of it that the dataset selects."""
        if not is_true(self.dataset.data.column(field)):
            return False
        tables = self.dataset.with_format('arrow', columns=[field]).iter(_ROWS)
        return any(is_true(table.column(field)) for table in tables)

    def _reader_of(self, field: str, feature: Any) -> Reader | None:
        """Return how to read a field that is or has files or arrays of a shape; None for others."""
        if (convert := self._file_of(field, feature)) is not None:
            return lambda array: [None if value is None else convert(value) for value in array.to_pylist()]
        if (shape := _shape_of(feature)) is not None:
            return lambda array: [_array_of(scalar, shape) for scalar in array.storage]
        if isinstance(feature, dict):
            inner = {name: self._reader_of(f'{field}.{name}', part) for name, part in feature.items()}
            return _of_structs(inner) if any(inner.values()) else None
        if (item := getattr(feature, 'feature', None)) is not None:
            read = self._reader_of(field, item)
            return None if read is None else lambda array: [read(one.values) if one.is_valid else None for one in array]
        return None

    def _file_of(self, field: str, feature: Any) -> Callable[[Mapping[str, Any]], Any] | None:
        datasets = import_extra('datasets', 'huggingface')
        if isinstance(feature, datasets.Image):
            return feature.decode_example if feature.decode and feature.mode is not None else _image
        if isinstance(feature, datasets.Audio):
            return self._sound(field, feature)
        return _bytes_of if hasattr(feature, 'decode_example') and hasattr(feature, 'embed_storage') else None

    def _sound(self, field: str, feature: Any) -> Callable[[Mapping[str, Any]], Any]:
        rate, channels = feature.sampling_rate, getattr(feature, 'num_channels', None)
        if not feature.decode or (rate is None and channels is None):
            return _bytes_of

        def read(value: Mapping[str, Any]) -> Any:
            data = _bytes_of(value)
            if data is not None and not _fits(data, rate, channels):
                demands = ', '.join(
                    f'{name}={demand}' for name, demand in (('sampling_rate', rate), ('num_channels', channels))
                    if demand is not None
                )  # fmt: skip
                raise InvalidArgumentError(
                    f'{self._name}: {field!r} is Audio({demands}), which its files are not: cast it to Audio() to keep '
                    f'the files, or convert a MapDataset with a map that resamples them'
                )
            return data

        return read

    def rows(self, indices: list[int]) -> list[Row]:
        """Return rows of a map-style dataset."""
        if self._as_rows:
            rows: list[Row] = self.dataset.__getitems__(indices)
            return rows
        return self._rows_of(self._tables[indices])

    def _rows_of(self, table: Any) -> list[Row]:
        names = table.column_names
        columns = [_values(self._readers.get(name, values_of), table.column(name)) for name in names]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]

    def stream(self) -> Iterator[Row]:
        """Yield the rows of a stream."""
        if self._as_rows:
            yield from self.dataset.with_format(None)
        else:
            for table in self._tables.iter(batch_size=_BATCH):
                yield from self._rows_of(table)


class HuggingFaceRows:
    """A map-style dataset with the rows that a conversion reads."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def __len__(self) -> int:
        return len(self._features.dataset)

    def __getitems__(self, indices: list[int]) -> list[Row]:
        return self._features.rows(indices)


def _values(read: Reader, column: Any) -> list[Any]:
    return [value for chunk in column.chunks for value in read(chunk)]


def _shape_of(feature: Any) -> Sequence[int] | None:
    """Return the shape of an array of several dimensions, of which the first may be -1; None for other features."""
    datasets = import_extra('datasets', 'huggingface')
    if isinstance(feature, datasets.Array2D | datasets.Array3D | datasets.Array4D | datasets.Array5D):
        return [-1 if length is None else length for length in feature.shape]
    return None


def _array_of(scalar: Any, shape: Sequence[int]) -> Any:
    if not scalar.is_valid:
        return None
    values, is_nested = scalar.values, import_extra('pyarrow', 'huggingface').types.is_nested
    while is_nested(values.type):
        values = values.flatten()
    return np.array(values.to_numpy(zero_copy_only=False)).reshape(shape)


def _of_structs(readers: Mapping[str, Reader | None]) -> Reader:
    def read(array: Any) -> list[Any]:
        names = [part.name for part in array.type]
        parts = [(readers[name] or values_of)(child) for name, child in zip(names, array.flatten(), strict=True)]
        rows: Iterable[Row] = (dict(zip(names, values, strict=True)) for values in zip(*parts, strict=True))
        return [row if scalar.is_valid else None for row, scalar in zip(rows, array, strict=True)]

    return read


def _bytes_of(value: Mapping[str, Any]) -> bytes:
    data: bytes | None = value['bytes']
    if data is not None:
        return data
    with import_extra('datasets.utils.file_utils', 'huggingface').xopen(value['path'], 'rb') as file:
        read: bytes = file.read()
    return read


def _image(value: Mapping[str, Any]) -> Any:
    data = _bytes_of(value)
    if image_type(data):
        return data
    pillow = import_extra('PIL.Image', 'formats')
    try:
        image = pillow.open(io.BytesIO(data))
        image.load()
    except Exception:  # Pillow's plugins raise anything: the file is bad, which the conversion reports
        return data
    return image


def _fits(data: bytes, rate: int | None, channels: int | None) -> bool:
    if not audio_type(data):
        return False
    try:
        sound = formats.decode_audio(data)
    except DecodeError:
        return True  # the file is bad, which the conversion reports where it decodes files
    return rate in (None, sound.rate) and channels in (None, sound.samples.shape[1])
