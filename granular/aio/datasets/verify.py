"""Read a whole dataset to check its integrity."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from granular.aio.bags.reader import BagReader
from granular.aio.datasets.reader import DatasetReader
from granular.aio.datasets.sharded_reader import shards_in
from granular.aio.paths.path import Path
from granular.aio.runtime.readahead import pages
from granular.aio.runtime.threads import offload
from granular.errors import CorruptError, NotFoundError
from granular.formats.checksums import SUFFIX, Sums, crc32c, load
from granular.formats.layout import shard_name

_WINDOW = 1 << 15  # datapoints whose references are checked at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A difference between the data and what was written.

    Attributes:
      place: the file or folder.
      record: the index of the record; None for the whole file or folder.
      message: the description.
    """

    place: str
    record: int | None
    message: str


@dataclasses.dataclass(slots=True)
class Report:
    """The result of ``verify``.

    Attributes:
      datapoints: the datapoints of all shards.
      records: the records that were read.
      checked: the records that were compared with a checksum.
      bytes: the bytes of the records.
      problems: the problems; empty for an intact dataset.
    """

    datapoints: int = 0
    records: int = 0
    checked: int = 0
    bytes: int = 0
    problems: list[Problem] = dataclasses.field(default_factory=list)


async def verify(place: Path | str | Any, progress: Callable[[int], None] | None = None) -> Report:
    """Read a whole dataset, sharded or not, and check its structure, references, records and checksums.

    Args:
      place: the folder.
      progress: called with the number of bytes read since the last call.

    Returns:
      The report. Corrupt data is reported, not raised, and does not end the reading.

    Raises:
      NotFoundError: if there is no dataset.
      StoreError: if the store fails.

    Example::

        report = await granular.aio.verify('s3://bucket/digits')
        for problem in report.problems:
            print(problem.place, problem.record, problem.message)
    """
    root, report = Path(place), Report()
    await root.store.ready()
    if await (root / 'spec.json').exists():
        await _dataset(root, report, progress)
        return report
    numbers = await shards_in(root)
    if not numbers:
        raise NotFoundError(f'{root}: is no dataset: it has neither a spec.json nor shards')
    expected = 0
    for number in numbers:
        if number > expected:
            till = '' if number == expected + 1 else f', as are all to {shard_name(number - 1)}'
            place = f'{root / shard_name(expected)}'
            report.problems.append(Problem(place, None, f'the shard is missing{till}'))
        await _dataset(root / shard_name(number), report, progress)
        expected = number + 1
    return report


async def _dataset(folder: Path, report: Report, progress: Callable[[int], None] | None) -> None:
    try:
        reader = await DatasetReader.open(folder, None)
    except (CorruptError, NotFoundError) as error:
        report.problems.append(Problem(f'{folder}', None, str(error)))
        return
    async with reader:
        report.datapoints += len(reader)
        lengths = {key: len(bag) for key, bag in reader.bags.items()}
        if reader.layout == 'columns' and len(set(lengths.values())) > 1:
            report.problems.append(Problem(f'{folder}', None, f'columns differ in length: {lengths}'))
        if reader.layout == 'refs':
            await _references(reader, folder, report)
        for bag in reader.bags.values():
            await _bag(bag, report, progress)


async def _references(reader: DatasetReader, folder: Path, report: Report) -> None:
    """Check that the references of all datapoints point to existing records."""
    for start in range(0, len(reader), _WINDOW):
        try:
            await reader.check_references(range(start, min(start + _WINDOW, len(reader))))
        except CorruptError as error:
            report.problems.append(Problem(f'{folder / "refs.bag"}', None, str(error)))


async def _bag(bag: BagReader, report: Report, progress: Callable[[int], None] | None) -> None:
    place = bag.beside(SUFFIX)
    sums: Sums | None = None
    try:
        sums = load(await place.read_bytes(), len(bag), f'{place}')
    except NotFoundError:
        pass  # written without checksums
    except CorruptError as error:
        report.problems.append(Problem(f'{place}', None, str(error)))

    def check(start: int, records: list[bytes]) -> list[tuple[int, str | None]]:
        out: list[tuple[int, str | None]] = []
        for i, record in enumerate(records, start):
            found = None if sums is None else crc32c(record)
            wrong = sums is not None and found != sums[i]
            out.append((len(record), f'its checksum is {found:08x}, not {int(sums[i]):08x}' if wrong else None))  # type: ignore[index]
        return out

    async def look(places: range) -> list[tuple[int, str | None]]:
        return await offload(check, places.start, await bag.fetch(places))

    index = 0
    async with contextlib.aclosing(pages(look, len(bag), bag.size, place.store.local)) as found:
        async for size, wrong in found:
            report.records += 1
            report.checked += sums is not None
            report.bytes += size
            if wrong is not None:
                report.problems.append(Problem(bag.name, index, wrong))
            index += 1
            if progress is not None:
                progress(size)
