"""Reads tar files in the WebDataset format at random: indexed once, then read by range requests."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from granular._support.indexing import Ints
from granular._support.typing import Datapoint_co
from granular.aio.datasets import codec
from granular.aio.datasets.codec import Field
from granular.aio.datasources.arguments import Paths
from granular.aio.datasources.discovery.discover import Files
from granular.aio.datasources.indexed_files import MaskedFiles
from granular.aio.datasources.scanning import index_files
from granular.aio.datasources.webdataset.index import Index, Scanner
from granular.aio.datasources.webdataset.members import Decoders, decode_class, decoder_of
from granular.errors import InvalidArgumentError, UnknownKeyError

KEY: Final = '__key__'


class WebDatasetDataSource(MaskedFiles[Index, Datapoint_co]):
    """Random access to the datapoints of WebDataset tar files, on a disk or in buckets, in the order given.

    ::

        async with granular.aio.WebDatasetDataSource('s3://bucket/train-000.tar', granular.decoders) as source:
            image = (await source.get(0))['jpg']
            datapoints = await source.fetch([3, 1, 4], ('cls',))  # only these members are read

    A datapoint is a dict: ``'__key__'`` and an entry for each of its members. The field is the part of the member's
    name after the first dot, in lower case; the value is the member's bytes, decoded if there is a decoder. Consecutive
    members with the same name before that dot form a datapoint. As in WebDataset, other members are skipped: folders,
    links, hidden files, and names without a dot or within double underscores.

    Opening reads and caches the headers, as of ``TFRecordDataSource``. After that a batch reads only the byte ranges of
    the members wanted, from all files concurrently.

    Memory: 24 bytes per member, and 16 bytes plus the key per datapoint.

    Args:
      paths: a file, a folder, a pattern, or a sequence of files, not compressed.
      decoders: by field, or by the part after its last dot, the function that decodes a member's bytes, such as
        ``granular.decoders``; fields without a decoder (by default all) are bytes. The decoder of ``jpg`` also decodes
        ``jpeg``, that of ``png`` also ``webp``, ``gif`` and ``bmp``, that of ``mp4`` also ``mov`` and ``m4v``, that of
        ``webm`` also ``mkv``, and that of ``utf8`` also ``txt`` and ``text``. With one of ``array``, ``npy`` is an
        array; with one of ``int``, ``cls``, ``cls2`` and ``index`` are the number in the member's text, or the text.
        granular's own decoders of numbers, arrays and trees decode no members, which are bytes.
      split: the split to read, such as ``'train'``, of a folder or pattern that has files of several.

    Raises:
      CorruptError: if a file is not a tar file, or is truncated.
      UnsupportedError: if it is compressed, or has sparse members.
    """

    _format = 'webdataset'

    def __init__(self, paths: Paths | Files, decoders: Decoders = None, *, split: str | None = None) -> None:
        super().__init__(paths, split=split)
        if decoders is not None and not isinstance(decoders, Mapping):
            raise InvalidArgumentError(f'decoders: expected a mapping from fields to functions, got {decoders!r:.100}')
        self._decoders = decoders
        self._fields: dict[str, Field] = {}

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._files, self._decoders), {}

    async def _read_file_indices(self) -> list[Index]:
        return await index_files(self.paths, Index, Scanner)

    async def _open(self) -> None:
        await super()._open()
        names = dict.fromkeys(name for index in self._file_indices for name in index.fields)
        self._fields = {name: _field(name, self._decoders, self._name) for name in names}

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the datapoints, ``'__key__'`` first; a datapoint may lack some."""
        self._check_open()
        return KEY, *self._fields

    def _counts(self) -> dict[str, int]:
        """Return the number of members of each field."""
        counts: dict[str, int] = {}
        for index in self._file_indices:
            for name, count in zip(index.fields, np.bincount(index.field, minlength=len(index.fields)), strict=True):
                counts[name] = counts.get(name, 0) + int(count)
        return counts

    def identity(self) -> tuple[Any, ...]:
        return *super().identity(), list(self._fields)

    def user_functions(self) -> tuple[Any, ...]:
        return tuple(field.fn for field in self._fields.values())

    @property
    def _available(self) -> tuple[str, ...]:
        return self.fields

    async def _read_columns(self, positions: Ints, names: tuple[str, ...]) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in names}
        for position, datapoint in zip(positions.tolist(), await self._read_rows(positions, names), strict=True):
            for name, column in columns.items():
                if name not in datapoint:
                    raise UnknownKeyError(
                        f'{self._name}: datapoint {position} has no {name!r}: choose fields by a mask'
                    )
                column.append(datapoint[name])
        return columns

    async def _read_rows(self, positions: Ints, names: tuple[str, ...]) -> list[dict[str, Any]]:
        owners, numbers = self._locate(positions)
        datapoints: list[dict[str, Any]] = [{} for _ in positions]
        targets: dict[str, list[int]] = {name: [] for name in names if name != KEY}  # of the values of each field
        members: list[tuple[str, int, int]] = []  # field, target, member
        for i, (owner, number) in enumerate(zip(owners.tolist(), numbers.tolist(), strict=True)):
            index = self._file_indices[owner]
            if KEY in names:
                datapoints[i][KEY] = index.key(number)
            first, last = (int(index.stops[number - 1]) if number else 0), int(index.stops[number])
            for member in range(first, last):
                name = index.fields[index.field[member]]
                if name in targets:
                    members.append((name, i, member))
        owners_of_members = owners[np.array([i for _, i, _ in members], np.int64)]
        wanted = np.array([member for *_, member in members], np.int64)
        data = await self._read_items(owners_of_members, wanted, Index.limits)
        records: dict[str, list[bytes]] = {name: [] for name in targets}
        for (name, i, _), record in zip(members, data, strict=True):
            targets[name].append(i)
            records[name].append(record)

        def locate(field: Field, position: int) -> tuple[str, str]:
            i = targets[field.key][position]
            return f'{self.paths[owners[i]]}', self._file_indices[owners[i]].key(int(numbers[i]))

        values = await codec.decode_records([self._fields[name] for name in targets], list(records.values()), locate)
        for (name, field_targets), column in zip(targets.items(), values, strict=True):
            for i, value in zip(field_targets, column, strict=True):
                datapoints[i][name] = value
        return datapoints


def _field(name: str, decoders: Decoders, source: str) -> Field:
    fn = decoder_of(name, decoders)
    field = codec.field_of(name, name, False, fn, f'{source}: expected a function to decode field {name!r}')
    return field._replace(light=True) if fn is decode_class else field


def fields_with_gaps(source: WebDatasetDataSource[Any]) -> set[str]:
    """Return the fields of an open source that some datapoints lack."""
    return {name for name, count in source._counts().items() if count < len(source)}
