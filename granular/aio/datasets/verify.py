"""Read a whole dataset to check its integrity."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from granular._support.indexing import Ints
from granular._support.other_names import answering
from granular._support.text import counted
from granular.aio.bags.reader import BagReader
from granular.aio.bags.records import Rows, read_limits
from granular.aio.datasets.codec import Decoders, check_decoders, describe_error
from granular.aio.datasets.column_reads import checked_references, read_references
from granular.aio.datasets.columns import Columns
from granular.aio.datasets.dataset import Dataset, OpenOptions
from granular.aio.datasets.index import DatasetIndex, index_path
from granular.aio.datasets.picks import Picks
from granular.aio.datasets.reader import DatasetReader, columns_of, opened_files
from granular.aio.datasets.shards import UNFINISHED, claims_of, filled, no_dataset, shards_of
from granular.aio.paths.file import Progress
from granular.aio.paths.path import Path, has_optional
from granular.aio.paths.pure import AnyPath
from granular.aio.runtime.progress import ProgressReport
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.errors import CorruptError, NotFoundError, UnsupportedError
from granular.formats.base import Decoder
from granular.formats.checksums import SUFFIX, Sums, crc32c, load
from granular.formats.layout import Layout, element, shard_name

_SPAN = 1 << 15  # datapoints whose references are checked at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A difference between the data and what was written.

    Attributes:
      path: the file or folder.
      record: the index of the record in its file; None for the whole file or folder.
      message: the description.
      datapoint: the index in the whole dataset of the first datapoint that has the record; None if there is none, or if
        an earlier shard cannot be read.
    """

    path: str
    record: int | None
    message: str
    datapoint: int | None = None


@dataclasses.dataclass(slots=True)
class Report:
    """The result of ``verify``.

    Attributes:
      datapoints: the datapoints of all shards.
      records: the records that were read.
      checked: the records that were compared with a checksum.
      decoded: the records that were decoded.
      undecoded: the keys of which no record was decoded, as there is no decoder for their types.
      bytes: the bytes of the records.
      problems: the problems; empty for an intact dataset.
    """

    datapoints: int = 0
    records: int = 0
    checked: int = 0
    decoded: int = 0
    undecoded: list[str] = dataclasses.field(default_factory=list)
    bytes: int = 0
    problems: list[Problem] = dataclasses.field(default_factory=list)


@answering()
async def verify(path: AnyPath, progress: Progress | None = None, decoders: Decoders = None) -> Report:
    """Read a whole dataset, sharded or not, and check its structure, references, records, checksums and index.

    Checksums are those of the records as they were written: a file that was damaged before has a right one, and only
    ``decoders`` find it.

    Args:
      path: the folder.
      progress: called in a thread, with the number of bytes read since the last call.
      decoders: decode all records of these types, such as with ``granular.decoders``; by default, none.

    Returns:
      The report. Corrupt data is reported, not raised, and does not end the reading.

    Raises:
      NotFoundError: if there is no dataset.
      StoreError: if the store fails.

    Example::

        report = await granular.aio.verify('s3://bucket/digits')
        for problem in report.problems:
            print(problem.path, problem.record, problem.message)
    """
    root, report = Path(path), Report()
    functions = check_decoders(decoders)
    bytes_read = ProgressReport(progress, MiB)
    await root.store.ready()
    if await has_optional(root / 'spec.json'):
        await _verify_dataset(root, report, bytes_read, functions)
        await bytes_read.finish()
        return report
    entries = [entry async for entry in root.store.scan(root.key)]
    report.problems += [Problem(f'{root / name}', None, UNFINISHED) for name in claims_of(entries)]
    numbers = await filled(root, shards_of(entries))
    if not numbers:
        raise await no_dataset(root)
    expected, is_countable, first = 0, True, None
    for number in numbers:
        if number > expected:
            is_countable = False
            last = '' if number == expected + 1 else f', as are all up to {shard_name(number - 1)}'
            path = f'{root / shard_name(expected)}'
            report.problems.append(Problem(path, None, f'the shard is missing{last}'))
        folder = root / shard_name(number)
        columns = await _verify_dataset(folder, report, bytes_read, functions, is_countable)
        is_countable, first = is_countable and columns is not None, first or columns
        if columns is not None and first is not None:
            difference = columns.difference(first.spec, first.layout, first.name)
            report.problems += [] if difference is None else [Problem(f'{folder}', None, f'has {difference}')]
        expected = number + 1
    await bytes_read.finish()
    await _verify_index(root, numbers, report)
    return report


async def _verify_index(root: Path, numbers: Sequence[int], report: Report) -> None:
    """Compare the index of a sharded dataset, if there is one, with the tables of its shards."""
    path = index_path(root)
    if not await has_optional(path):
        return

    def add(message: str, shard: int | None = None) -> None:
        location = '' if shard is None else f'shard {shard_name(shard)}: '
        problem = f'{location}{message}: run `granular index {root}`'
        report.problems.append(Problem(f'{path}', None, problem))

    try:
        index = await DatasetIndex.read_file(path, whole=False)
    except (CorruptError, UnsupportedError) as error:
        add(f'is damaged: {error}')
        return
    if len(index) != len(numbers):
        add(f'has {counted(len(index), "shard")}, the dataset has {len(numbers)}')
    for number in numbers:
        if number >= len(index):
            continue
        reader = DatasetReader(root / shard_name(number), None)
        try:
            async with reader:
                if (difference := await _difference_of_index(index, number, reader)) is not None:
                    add(difference, number)
        except (CorruptError, NotFoundError) as error:
            add(f'cannot be compared: {error}', number)


async def _difference_of_index(index: DatasetIndex, shard: int, reader: DatasetReader) -> str | None:
    """Compare a shard with its part of an index; None if they agree."""
    columns, expected = columns_of(reader), index.directory
    if (difference := columns.difference(expected.spec, expected.layout, 'the index')) is not None:
        return f'has {difference}'
    files, indexed = opened_files(reader).files, index.file_identities(shard)
    for name, identity in files.items():
        if identity.size != indexed[name].size:  # the version of a copy is another one
            return f'{name} had {indexed[name].size} bytes when it was indexed, and has {identity.size} now'
    described = Dataset(reader.directory, OpenOptions())
    described.open_indexed(index, shard, [choice.field for choice in columns.choices])
    for key, bag in columns.bags.items():
        for indices in _spans(bag.length):
            own, other = [await read_limits(Rows.of(b, indices)) for b in (bag, described.columns.bags[key])]
            if not all(np.array_equal(*pair) for pair in zip(own, other, strict=True)):
                return f'{key}.bag has other limits than the index, of records {indices[0]} to {indices[-1]}'
    for indices in _spans(0 if columns.refs is None else columns.length):
        own, other = [await read_references(Picks.of(c, indices)) for c in (columns, described.columns)]
        filled = own[1] > 0  # an empty sequence has no first record
        if not np.array_equal(own[1], other[1]) or not np.array_equal(own[0][filled], other[0][filled]):
            return f'refs.bag has other references than the index, of datapoints {indices[0]} to {indices[-1]}'
    return None


def _spans(count: int) -> Iterator[Ints]:
    """Yield the indices of so many datapoints or records, some at a time."""
    return (np.arange(start, min(start + _SPAN, count)) for start in range(0, count, _SPAN))


async def _verify_dataset(
    folder: Path, report: Report, progress: ProgressReport, decoders: Mapping[str, Decoder], is_countable: bool = True
) -> Columns | None:
    """Verify a dataset or shard; ``is_countable`` if those before were counted. None if it cannot be opened."""
    try:
        reader = await DatasetReader.open(folder, None)
    except (CorruptError, NotFoundError) as error:
        report.problems.append(Problem(f'{folder}', None, str(error)))
        return None
    async with reader:
        report.datapoints += len(reader)
        first = report.datapoints - len(reader) if is_countable else None
        bags = reader.bags
        lengths = {key: len(bag) for key, bag in bags.items()}
        if reader.layout == 'columns' and len(set(lengths.values())) > 1:
            report.problems.append(Problem(f'{folder}', None, f'columns differ in length: {lengths}'))
        if reader.layout == 'refs':
            for indices in _spans(len(reader)):
                try:
                    await checked_references(columns_of(reader), indices)
                except CorruptError as error:
                    report.problems.append(Problem(f'{folder / "refs.bag"}', None, str(error)))
        for key, bag in bags.items():
            decoder = decoders.get(element(reader.spec[key])) if key in reader.spec else None
            if decoder is None and key in reader.spec and key not in report.undecoded:
                report.undecoded.append(key)
            start = len(report.problems)
            await _verify_bag(bag, folder / f'{key}.bag', report, progress, decoder, columns_of(reader).layout)
            if first is not None and len(report.problems) > start:
                records = [problem.record for problem in report.problems[start:] if problem.record is not None]
                owners = await _datapoints_of(columns_of(reader), key, records)
                for i, problem in enumerate(report.problems[start:], start):
                    if problem.record in owners:
                        report.problems[i] = dataclasses.replace(problem, datapoint=first + owners[problem.record])
        return columns_of(reader)


async def _datapoints_of(columns: Columns, key: str, records: Sequence[int]) -> dict[int | None, int]:
    """Return the first datapoint of a shard that has a record, for each of some records of a key, in order."""
    if columns.refs is None or key not in columns.spec:
        return {record: record for record in records}
    number, owners = list(columns.spec).index(key), dict[int | None, int]()
    with contextlib.suppress(CorruptError):  # of references, which is a problem of its own
        for indices in _spans(columns.length):
            firsts, counts = (numbers[:, number] for numbers in await read_references(Picks.of(columns, indices)))
            starts, stops = np.searchsorted(records, firsts), np.searchsorted(records, firsts + counts)
            for i in np.flatnonzero(starts < stops).tolist():
                for record in records[starts[i] : stops[i]]:
                    owners.setdefault(record, int(indices[i]))
    return owners


async def _verify_bag(
    bag: BagReader, path: Path, report: Report, progress: ProgressReport, decoder: Decoder | None, layout: Layout
) -> None:
    sums = await _read_sums(path.with_suffix(SUFFIX), len(bag), report, layout)

    def check(start: int, records: list[bytes]) -> list[tuple[int, str | None]]:
        return [(len(record), _problem_of(record, sums, i, decoder)) for i, record in enumerate(records, start)]

    async def read(indices: range) -> list[tuple[int, str | None]]:
        return await offload(check, indices.start, await bag.fetch(indices))

    index = 0
    async with contextlib.aclosing(pages(read, len(bag), bag.size, path.store.local)) as results:
        async for size, difference in results:
            report.records += 1
            report.checked += sums is not None
            report.decoded += decoder is not None
            report.bytes += size
            if difference is not None:
                report.problems.append(Problem(f'{path}', index, difference))
            index += 1
            await progress.add(size)


async def _read_sums(path: Path, records: int, report: Report, layout: Layout) -> Sums | None:
    """Return the checksums of a bag; None if it was written without any, or if they are damaged."""
    try:
        content = await path.read_bytes()
        if layout == 'refs' and len(content) > 4 * records:  # only columns grow, of which checksums may be ahead
            message = f'has checksums of {len(content) // 4} records, and its bag has {records}'
            report.problems.append(Problem(f'{path}', None, message))
        return load(content, records, f'{path}')
    except NotFoundError:
        return None
    except CorruptError as error:
        report.problems.append(Problem(f'{path}', None, str(error)))
        return None


def _problem_of(record: bytes, sums: Sums | None, index: int, decoder: Decoder | None) -> str | None:
    """Compare a record with its checksum, and decode it, as far as there are both; None if it is intact."""
    if sums is not None and (checksum := crc32c(record)) != sums[index]:
        return f'its checksum is {checksum:08x}, not {int(sums[index]):08x}'
    try:
        if decoder is not None:
            decoder(record)
    except MemoryError:
        raise
    except Exception as error:
        return f'is not decoded: {describe_error(error)}'
    return None
