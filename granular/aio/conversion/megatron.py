"""Write records as a dataset of Megatron: its index, and its data."""

import array
import contextlib
import dataclasses
import os
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from granular.aio.conversion.record_source import ReadAhead, Reading, RecordSource, open_source
from granular.aio.datasources.detect import open as open_any
from granular.aio.datasources.megatron.index import CODES, dump
from granular.aio.datasources.megatron.source import LENGTHS, MODE, MODES, TOKENS, pair_of_path
from granular.aio.paths.file import Progress
from granular.aio.paths.path import Path
from granular.aio.paths.pure import PurePath
from granular.aio.pipeline.nodes import adapters
from granular.aio.pipeline.nodes.source import Source, nbytes
from granular.aio.runtime.lifecycle import AsyncResource
from granular.aio.runtime.progress import ProgressReport
from granular.aio.runtime.tasks import finish_within
from granular.aio.runtime.threads import offload
from granular.aio.stores.base import ObjectWriter
from granular.config import MiB
from granular.errors import AlreadyExistsError, DatapointError

_READ: Final = 4 * MiB  # bytes of records that are read at a time
_FIRST: Final = 64  # records that are read before their sizes are known
_MOST: Final = 1 << 16  # records that are read at a time
_KEYS: Final = frozenset((TOKENS, LENGTHS, MODES, MODE))
_LONGEST: Final = 2**31 - 1  # tokens of a sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """Summary of a written file: name and format of the source, documents, the dtype of their tokens, and bytes."""

    source: str
    format: str
    documents: int | None
    dtype: str
    bytes: int


async def write_tokens(
    source: Any, reading: Reading, target: Path, dry_run: bool, progress: Progress | None
) -> Written:
    """Write the records of a source, each a document, as a dataset of Megatron, whose index is the target.

    The data is published first, and removed if the index cannot be: so there is never an index without its data.

    Raises:
      AlreadyExistsError: if one of the two files exists.
      DatapointError: if a record has no tokens, or others than the first.
    """
    index, data = pair_of_path(target)
    for path in (index, data):
        if await path.exists():
            raise AlreadyExistsError(f'{path}: exists already: remove it, or write under another name', path=f'{path}')
    report, documents = ProgressReport(progress), _Documents(f'{target}')
    data_file, index_file = _File(data), _File(index)
    async with contextlib.AsyncExitStack() as stack:
        opened = await stack.enter_async_context(contextlib.aclosing(await _open_values(source, reading)))
        stream = opened.stream(_MOST) if opened.source is None else _chunks(opened.source)
        records = ReadAhead(stream)
        stack.push_async_callback(records.aclose)
        if dry_run:
            await offload(documents.add, await records.take(1))
            count = None if opened.source is None else len(opened)
            return Written(opened.name, opened.format, count, documents.dtype.name, 0)

        async def tokens() -> AsyncGenerator[bytes, None]:
            while taken := await records.take(_MOST):
                yield await offload(documents.add, taken)
                await report.add(len(taken))

        if data.store.local:
            await data.parent.mkdir(parents=True, exist_ok=True)
        try:
            await data_file.write(tokens())
        except BaseException:
            if data_file.is_published:  # before the caller was told that it was cancelled
                await data_file.remove()
            raise
        try:
            await index_file.write(_each(documents.index()))
        except BaseException as error:
            # The index may have been published before the caller was cancelled, or the store failed.
            if not index_file.is_published and (isinstance(error, AlreadyExistsError) or not await index.exists()):
                await data_file.remove()
            raise
    size = data_file.size + index_file.size
    return Written(opened.name, opened.format, len(documents.ends), documents.dtype.name, size)


class _File:
    """A new file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: ObjectWriter | None = None
        self.size = 0
        self.is_published = False

    async def write(self, parts: AsyncGenerator[bytes, None]) -> None:
        """Write the parts of the file, and publish it; if it fails, it may be published nevertheless."""
        writer = self._writer = await self._path.store.open_writer(self._path.key, new=True)
        try:
            async with contextlib.aclosing(parts):
                async for part in parts:
                    await writer.write(part)
                    self.size += len(part)
            await finish_within(self._publish(writer))
        except BaseException:
            await writer.abort()
            raise

    async def _publish(self, writer: ObjectWriter) -> None:
        await writer.close()
        self.is_published = True

    async def remove(self) -> None:
        """Remove the file after it was published."""
        if self._writer is not None and await self._writer.withdraw() is None:  # no other writer can have replaced it
            await self._path.store.delete([self._path.key])


async def _each(parts: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    while (part := await offload(next, parts, None)) is not None:
        yield part


async def _open_values(source: Any, reading: Reading) -> RecordSource:
    """Open the source that the user passed; of a dataset, its values are read."""
    several = isinstance(source, list | tuple) and source and all(isinstance(one, str | os.PathLike) for one in source)
    if several or isinstance(source, str | os.PathLike | PurePath):
        options: dict[str, Any] = {} if reading.hive else {'hive': False}
        reader: AsyncResource = await open_any(source, format=reading.format, split=reading.split, **options)
        name = f'{source[0]} and {len(source) - 1} more' if several else f'{Path(source)}'
        kind = type(reader).__name__.removesuffix('DataSource').lower()
        return RecordSource(
            name, 'granular' if kind.endswith('reader') else kind, adapters.convert(reader), opened=reader
        )
    opened = await open_source(source, dataclasses.replace(reading, values=True))
    if opened.stored is not None:
        opened.source = opened.values or adapters.convert(source)
    return opened


async def _chunks(source: Source) -> AsyncGenerator[list[Any], None]:
    start, count = 0, _FIRST
    while start < len(source):
        records = await source.fetch(np.arange(start, min(start + count, len(source))))
        start += len(records)
        count = min(max(1, _READ * len(records) // max(1, nbytes(records))), 4 * count, _MOST)
        yield records


class _Documents:
    """The index of documents so far: 8 bytes per sequence, and 8 per document."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.dtype = np.dtype(np.int32)
        self.ends = array.array('q')
        self._lengths = array.array('q')
        self._modes: array.array[int] | None = None

    def add(self, records: Sequence[Any]) -> bytes:
        """Add documents, and return the bytes of their tokens."""
        return b''.join([self._add(record) for record in records])

    def _add(self, record: Any) -> bytes:
        fields = record if isinstance(record, Mapping) else {TOKENS: record}
        if TOKENS not in fields or not fields.keys() <= _KEYS:
            raise self._problem(
                f"expected an array, or one under 'tokens' beside no other keys, got the keys {list(fields)!r:.200}: "
                f"choose it, as in MapDataset.source(...).map(lambda datapoint: {{'tokens': datapoint['text']}})"
            )
        tokens = self._tokens_of(fields[TOKENS])
        if not self.ends:
            self.dtype = tokens.dtype
            self._modes = array.array('b') if MODES in fields or MODE in fields else None
        if tokens.dtype != self.dtype:
            raise self._problem(f'expected tokens of {self.dtype}, as the first record has, got {tokens.dtype}')
        lengths = self._numbers_of(fields, LENGTHS, _LONGEST) if LENGTHS in fields else [len(tokens)]
        if sum(lengths) != len(tokens) or len(tokens) > _LONGEST * len(lengths):
            raise self._problem(f'expected lengths that add up to its {len(tokens)} tokens, got {lengths!r:.200}')
        modes = self._modes_of(fields)
        if self._modes is None and modes is not None:
            raise self._problem(f'expected no modes, as the first record has none, got {modes!r:.200}')
        if self._modes is not None and (modes is None or len(modes) != len(lengths)):
            raise self._problem(f'expected a mode for each of its {len(lengths)} sequences, got {modes!r:.200}')
        self._lengths.extend(lengths)
        if self._modes is not None and modes is not None:
            self._modes.extend(modes)
        self.ends.append(len(self._lengths))
        return tokens.tobytes()

    def _tokens_of(self, value: Any) -> NDArray[Any]:
        tokens = np.asarray(value) if hasattr(value, '__array__') else None
        if tokens is None or tokens.ndim != 1:
            got = type(value).__name__ if tokens is None else f'one of shape {tokens.shape}'
            raise self._problem(f'expected an array of tokens with one dimension, got {got}')
        for dtype in CODES.values():
            if (tokens.dtype.kind, tokens.dtype.itemsize) == (dtype.kind, dtype.itemsize):
                return tokens.astype(dtype, copy=False)
        known = ', '.join(dtype.name for dtype in CODES.values())
        raise self._problem(f'expected tokens of {known}, got {tokens.dtype}: convert them with astype')

    def _modes_of(self, fields: Mapping[str, Any]) -> list[int] | None:
        if MODE in fields:
            fields = {MODES: [fields[MODE]]}
        return self._numbers_of(fields, MODES, 127) if MODES in fields else None

    def _numbers_of(self, fields: Mapping[str, Any], key: str, most: int) -> list[int]:
        values = np.asarray(fields[key])
        least = -1 - most if key == MODES else 0
        is_good = values.ndim == 1 and (not len(values) or values.dtype.kind in 'iu')
        if not is_good or (len(values) and not least <= values.min() <= values.max() <= most):
            raise self._problem(f'{key}: expected integers from {least} to {most}, got {fields[key]!r:.200}')
        return [int(value) for value in values]

    def _problem(self, problem: str) -> DatapointError:
        number = len(self.ends)
        return DatapointError(f'{self._name}: record {number}: {problem}', path=self._name, index=number)

    def index(self) -> Iterator[bytes]:
        """Return the parts of the index."""
        modes = None if self._modes is None else np.frombuffer(self._modes, np.int8)
        lengths, ends = (np.array(numbers, np.int64) for numbers in (self._lengths, self.ends))
        return dump(self.dtype, lengths, ends, modes)
