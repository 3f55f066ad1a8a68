"""Datasets of Hugging Face as sources of a conversion: files as they are stored, values of the types of features."""

import io
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from granular import formats
from granular._lazy import import_extra
from granular._words import logger
from granular.aio.conversion.schema import Column, column_of
from granular.aio.datasources.parquet.arrow_values import values_of
from granular.errors import DecodeError, InvalidArgumentError
from granular.formats.codecs.audio import audio_type
from granular.formats.codecs.images import image_type

Row = dict[str, Any]
Converter = Callable[[Any], Any]

# Values of these types are the same in Python; others are read as their type in Arrow, as from Parquet files.
_SAME: Final = ('int64', 'bool', 'string', 'large_string', 'binary', 'large_binary', 'null')


class Features:
    """What a conversion makes of the features of a dataset.

    Images, sounds and videos are their files, unless an image is to have a mode: then it is an image of PIL. A file of
    an image that is not stored as it is, such as a TIFF, is an image of PIL, too.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self.columns: dict[str, Column] = {}
        self._name = name
        self._files: dict[str, Converter] = {}
        self._types: dict[str, Any] = {}  # in Arrow
        datasets = import_extra('datasets', 'huggingface')
        for field, feature in (dataset.features or {}).items():
            inner = getattr(feature, 'feature', None)
            if (convert := self._file_of(field, feature)) is not None:
                self.dataset = self.dataset.cast_column(field, _undecoded(feature))
                self._files[field] = convert
            elif inner is not None and (convert := self._file_of(field, inner)) is not None:
                self.dataset = self.dataset.cast_column(field, type(feature)(_undecoded(inner)))
                self._files[field] = _of_list(convert)
            elif isinstance(feature, datasets.ClassLabel):
                shown = f'{", ".join(feature.names):.1000}'
                logger.warning('%s: %r becomes the numbers of its classes, without their names: %s', name, field, shown)
                self._declare(field, feature.pa_type)
            elif isinstance(feature, datasets.Value):
                self._declare(field, feature.pa_type)
                if feature.dtype not in _SAME:
                    self._types[field] = feature.pa_type

    def _declare(self, field: str, kind: Any) -> None:
        data = getattr(self.dataset, 'data', None)
        if data is not None and field in data.column_names:  # of a stream, the sample decides
            has_nulls = data.column(field).null_count > 0
            self.columns[field] = column_of([kind], has_nulls, has_nulls)

    def _file_of(self, field: str, feature: Any) -> Converter | None:
        datasets = import_extra('datasets', 'huggingface')
        if isinstance(feature, datasets.Image):
            return None if feature.decode and feature.mode is not None else _image
        if isinstance(feature, datasets.Audio):
            return self._sound(field, feature)
        video = getattr(datasets, 'Video', None)
        return _bytes_of if video is not None and isinstance(feature, video) else None

    def _sound(self, field: str, feature: Any) -> Converter:
        rate, channels = feature.sampling_rate, getattr(feature, 'num_channels', None)
        if not feature.decode or (rate is None and channels is None):
            return _bytes_of

        def read(value: Any) -> Any:
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

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return rows with files in place of what they were read as, and values of the types of their features."""
        for field, convert in self._files.items():
            for row in rows:
                row[field] = convert(row[field])
        pa = import_extra('pyarrow', 'huggingface')
        for field, kind in self._types.items():
            for row, value in zip(rows, values_of(pa.array([row[field] for row in rows], kind)), strict=True):
                row[field] = value
        return list(rows)

    def stream(self) -> Iterator[Row]:
        return (self.rows([row])[0] for row in self.dataset)


class HuggingFaceRows:
    """A map-style dataset with the rows that a conversion reads."""

    def __init__(self, features: Features) -> None:
        self._features = features

    def __len__(self) -> int:
        return len(self._features.dataset)

    def __getitems__(self, indices: list[int]) -> list[Row]:
        return self._features.rows(self._features.dataset.__getitems__(indices))


def _undecoded(feature: Any) -> Any:
    return type(feature)(decode=False)


def _of_list(convert: Converter) -> Converter:
    return lambda values: None if values is None else [convert(value) for value in values]


def _bytes_of(value: Mapping[str, Any] | None) -> bytes | None:
    if value is None:
        return None
    data: bytes | None = value['bytes']
    return pathlib.Path(value['path']).read_bytes() if data is None else data


def _image(value: Mapping[str, Any] | None) -> Any:
    data = _bytes_of(value)
    if data is None or image_type(data):
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
