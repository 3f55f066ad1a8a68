"""Reads the documents of datasets of Megatron at random: by their index, and range requests for their tokens."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular._support.indexing import Ints
from granular._support.typing import Datapoint_co
from granular.aio.bags.identity import FileIdentity
from granular.aio.datasources.arguments import Paths, names_in
from granular.aio.datasources.discovery.discover import Files
from granular.aio.datasources.discovery.names import pair_of
from granular.aio.datasources.indexed_files import MaskedFiles, bytes_from
from granular.aio.datasources.megatron.index import HEAD, Head, Index, parse
from granular.aio.paths.path import Path, has_optional
from granular.aio.runtime.tasks import for_each
from granular.aio.runtime.threads import offload
from granular.errors import CorruptDatasetError, InvalidArgumentError, NotFoundError

TOKENS: Final = 'tokens'
LENGTHS: Final = 'lengths'
MODES: Final = 'modes'
MODE: Final = 'mode'
_OPENED: Final = 8  # number of files that are opened concurrently


class MegatronDataSource(MaskedFiles[Index, Datapoint_co]):
    """Random access to the documents of Megatron's ``.idx`` and ``.bin`` files, on a disk or in buckets.

    ::

        async with granular.aio.MegatronDataSource('s3://bucket/corpus.idx') as source:
            tokens = (await source.get(0))['tokens']
            documents = await source.fetch([3, 1, 4])

    A datapoint is a dict of a document. ``tokens`` are those of all of its sequences, one behind the other, in an array
    of one dimension with the dtype of the file. There are two more fields only if the files have what they tell:
    ``lengths``, the tokens of each of its sequences, if documents have other numbers of sequences than one, and
    ``modes``, an int8 of each of them.

    Megatron divides tokens into sequences, and sequences into documents. BERT and T5 train on documents, of which the
    sequences are sentences. GPT trains on sequences, each of which is a document, unless the files were written with
    ``--split-sentences``. With ``sequences=True``, a datapoint is a sequence, and has ``tokens`` and ``mode``.

    Opening reads the index, in two requests per dataset, or more if it is larger than ``IOConfig.tail``. After that a
    batch reads only the bytes of its documents, from all files concurrently. A file is pinned to the version that was
    opened. The format has no checksums: index and data are compared by the numbers that they have in common. Memory: 8
    bytes per document, one for each mode, and where documents have several sequences 8 more, and 4 per sequence.

    Args:
      paths: a file ``x.idx`` or ``x.bin``, or ``x`` for both; a folder, a pattern, or a sequence of such files.
      sequences: True for a datapoint of each sequence.
      split: the split to read, such as ``'train'``, of a folder or pattern that has files of several.

    Raises:
      CorruptError: if an index is none of Megatron, is damaged, or does not fit its data.
      CorruptDatasetError: if a file has another dtype than the first, or only one of them has modes.
      UnsupportedError: if it is of another version, or of an unknown dtype.
      NotFoundError: if one of the two files does not exist.
    """

    _format = 'megatron'

    def __init__(self, paths: Paths | Files, *, sequences: bool = False, split: str | None = None) -> None:
        self._data: tuple[Path, ...] = ()
        super().__init__(paths, split=split)
        self._sequences = bool(sequences)
        self._fields: tuple[str, ...] = ()
        self._dtype = np.dtype(np.int32)

    def __repr__(self) -> str:
        # States compare it: a document is another element than a sequence.
        return super().__repr__().removesuffix(')') + (', sequences=True)' if self._sequences else ')')

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._files,), {'sequences': self._sequences}

    def _take(self, files: Files) -> None:
        super()._take(files)
        pairs = [pair_of_path(path) for path in files.paths]
        self.paths, self._data = tuple(index for index, _ in pairs), tuple(data for _, data in pairs)
        names: dict[Path, Path] = {}
        for given, index in zip(files.paths, self.paths, strict=True):
            if names.setdefault(index, given) != given:
                raise InvalidArgumentError(f'{names[index]} and {given} are of one dataset: pass one of them')

    @property
    def _data_paths(self) -> tuple[Path, ...]:
        return self._data

    async def _read_file_indices(self) -> list[Index]:
        for path in self.paths:
            await path.store.ready()
        indices: dict[int, Index] = {}

        async def read(number: int) -> None:
            indices[number] = await _read_index(self.paths[number], self._data[number], self._sequences)

        await for_each(range(len(self.paths)), read, _OPENED)
        return [indices[number] for number in range(len(self.paths))]

    async def _open(self) -> None:
        await super()._open()
        filled = [number for number, index in enumerate(self._file_indices) if index.sequence_count]
        first = self._file_indices[filled[0] if filled else 0]
        for number in filled:
            if (expected := _kind_of(first)) != (got := _kind_of(self._file_indices[number])):
                raise CorruptDatasetError(
                    f'{self.paths[number]}: expected {expected}, as {self.paths[filled[0]]} has, got {got}: pass a '
                    f'pattern or a list of files of one kind'
                )
        lengths = [LENGTHS] if any(index.ends is not None for index in self._file_indices) else []
        modes = [] if first.modes is None else [MODE if self._sequences else MODES]
        self._dtype, self._fields = first.dtype, (TOKENS, *lengths, *modes)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the datapoints, ``'tokens'`` first."""
        self._check_open()
        return self._fields

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the tokens."""
        self._check_open()
        return self._dtype

    @property
    def _available(self) -> tuple[str, ...]:
        return self.fields

    def identity(self) -> tuple[Any, ...]:
        return *super().identity(), self._sequences, [index.digest for index in self._file_indices]

    async def sizes(self, key: str) -> Ints:
        """Return the length of the array of each datapoint under a key, such as ``'tokens'``, in order.

        They are in the index: nothing is read.

        Raises:
          UnknownKeyError: if there is no such field, or its values are numbers.
        """
        await self._ensure_open()
        names_in([key], [name for name in self._fields if name != MODE], self._named, self._name)
        parts = [index.tokens() if key == TOKENS else index.sequences() for index in self._file_indices]
        return np.concatenate(parts)

    async def _array_parts(self, key: str, indices: Ints, begins: Ints, stops: Ints) -> list[NDArray[Any]] | None:
        await self._ensure_open()
        if key != TOKENS:
            return None
        parts = [np.zeros(0, self._dtype)] * len(indices)
        filled, width = np.flatnonzero(stops > begins), self._dtype.itemsize
        owners, numbers = self._locate(indices[filled])

        def limits(index: Index, chosen: Ints) -> tuple[Ints, Ints]:
            first, _ = index.limits(numbers[chosen])
            wanted = filled[chosen]
            return first + begins[wanted] * width, first + stops[wanted] * width

        for i, data in zip(
            filled.tolist(), await self._read_items(owners, np.arange(len(filled)), limits), strict=True
        ):
            parts[i] = np.frombuffer(data, self._dtype)
        return parts

    async def _read_rows(self, positions: Ints, names: tuple[str, ...]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [{} for _ in positions]
        for name, column in (await self._read_columns(positions, names)).items():
            for row, value in zip(rows, column, strict=True):
                row[name] = value
        return rows

    async def _read_columns(self, positions: Ints, names: tuple[str, ...]) -> dict[str, list[Any]]:
        owners, numbers = self._locate(positions)
        read = await self._read_items(owners, numbers, Index.limits) if TOKENS in names else []
        found = [
            (self._file_indices[owner], item) for owner, item in zip(owners.tolist(), numbers.tolist(), strict=True)
        ]
        columns: dict[str, Callable[[], list[Any]]] = {
            TOKENS: lambda: [np.frombuffer(data, self._dtype) for data in read],
            LENGTHS: lambda: [index.lengths_of(item).copy() for index, item in found],  # a user may change them
            MODES: lambda: [_modes_of(index)[index.sequences_of(item)].copy() for index, item in found],
            MODE: lambda: [_modes_of(index)[item] for index, item in found],
        }
        return {name: columns[name]() for name in names}


def _kind_of(index: Index) -> str:
    return f'tokens of {index.dtype} {"without" if index.modes is None else "with"} modes'


def _modes_of(index: Index) -> NDArray[np.int8]:
    return np.zeros(0, np.int8) if index.modes is None else index.modes  # of a file without sequences


def pair_of_path(path: Path) -> tuple[Path, Path]:
    """Return the index and the data of a dataset, by one of them or what their names begin with."""
    if not path.store.split_query(path.key)[0].strip('./'):
        return path, path  # the root of a store
    index, data = pair_of(path.name)
    return path.with_name(index), path.with_name(data)


async def index_beside(path: Path) -> Path | None:
    """Return the index of a dataset, by its data or by what the names of both begin with; None if there is none."""
    index = pair_of_path(path)[0]
    return index if index != path and await has_optional(index) else None


async def _read_index(path: Path, data: Path, by_sequence: bool) -> Index:
    # The data is looked at first, as it is written first: what it is read at later is of this version.
    try:
        end = await data.store.read(data.key, -1)
    except NotFoundError as error:
        raise await _missing(path, data) or error from None
    try:
        tail = await path.store.read(path.key, -path.store.config.tail)
    except NotFoundError:
        raise await _missing(data, path) or NotFoundError(f'{path}: does not exist', path=f'{path}') from None
    if tail.start:  # what its head claims is compared with its size before all of it is read
        head = await path.store.read(path.key, 0, HEAD.size, tail.version)
        Head.parse(head.data, tail.size, f'{path}')
    content = await bytes_from(path, tail, 0)
    file = FileIdentity(end.size, end.version)
    return await offload(parse, content, f'{path}', file, f'{data}', by_sequence)


async def _missing(path: Path, other: Path) -> NotFoundError | None:
    """Return the error for one of two files that does not exist, if the other one does."""
    if path == other or not await has_optional(path):
        return None
    return NotFoundError(f'{other}: does not exist, beside {path}: copy both files', path=f'{other}')
