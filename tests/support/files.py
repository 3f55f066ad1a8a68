"""Files of each format with the same records or numbers."""

import dataclasses
import io
import os
import struct
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

import granular
from granular import IterDataset
from granular.aio.datasources.discovery import names
from granular.formats import decode_example
from granular.grain.experimental import ParquetIterDataset, TFRecordIterDataset
from tests.support.examples import encode, frame


def _parquet(records: Sequence[Any]) -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({'n': list(records)}), stream, row_group_size=40)
    return stream.getvalue()


def _tar(records: Sequence[bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode='w') as tar:
        for i, record in enumerate(records):
            member = tarfile.TarInfo(f'{i:06}.n')
            member.size = len(record)
            tar.addfile(member, io.BytesIO(record))
    return stream.getvalue()


def _arrayrecord(records: Sequence[bytes]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, 'x')
        writer = ArrayRecordWriter(name, 'group_size:1')
        for record in records:
            writer.write(record)
        writer.close()
        with open(name, 'rb') as file:
            return file.read()


def megatron_index(
    lengths: Sequence[int], ends: Sequence[int] | None = None, modes: Sequence[int] | None = None, code: int = 1
) -> bytes:
    """Return an index of Megatron by the published layout, of sequences of so many tokens.

    Args:
      lengths: tokens of each sequence.
      ends: 0, and the number of sequences up to the end of each document; by default each document is one.
      modes: of each sequence.
      code: of the dtype of the tokens.
    """
    ends = range(len(lengths) + 1) if ends is None else ends
    item = (1, 1, 2, 4, 8, 8, 4, 2)[code - 1]
    pointers = item * (np.cumsum(lengths, dtype=np.int64) - lengths) if len(lengths) else []
    head = b'MMIDIDX\0\0' + struct.pack('<QBQQ', 1, code, len(lengths), len(ends))
    tables = [np.array(lengths, '<i4'), np.array(pointers, '<i8'), np.array(ends, '<i8')]
    return head + b''.join(map(bytes, tables)) + (b'' if modes is None else bytes(np.array(modes, np.int8)))


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of files that hold records.

    Attributes:
      source: the name of its data source.
      of_records: the bytes of a file with these records, each of which is bytes.
      record_of: the record of a number, in files of numbers.
      stream: the class of its stream; None if there is none.
      data_of: the bytes of the data, if they are in a second file.
    """

    source: str
    of_records: Callable[[Sequence[Any]], bytes]
    record_of: Callable[[int], Any]
    stream: Callable[..., IterDataset[Any]] | None = None
    data_of: Callable[[Sequence[Any]], bytes] | None = None

    def opener(self, api: Any = granular) -> Callable[..., Any]:
        """Return the class of its data source, or ``open`` if the class is not public."""
        return getattr(api, self.source, api.open)

    def files(self, name: str, records: Sequence[Any]) -> dict[str, bytes]:
        """Return the content of the files with these records by their names, of which this is the first."""
        if self.data_of is None:
            return {name: self.of_records(records)}
        index, data = names.pair_of(name)
        return {index: self.of_records(records), data: self.data_of(records)}

    def write(self, path: Any, records: Sequence[Any]) -> None:
        """Write files with these records, of which the first has this path."""
        for name, content in self.files(path.name, records).items():
            path.with_name(name).write_bytes(content)


FORMATS: Final = {
    'parquet': Format('ParquetDataSource', _parquet, int, ParquetIterDataset),
    'tfrecord': Format(
        'TFRecordDataSource',
        lambda records: b''.join(map(frame, records)),
        lambda number: encode({'n': [number]}),
        TFRecordIterDataset,
    ),
    'tar': Format('WebDatasetDataSource', _tar, lambda number: b'%d' % number),
    'array_record': Format('ArrayRecordDataSource', _arrayrecord, lambda number: b'n %d' % number),
    'idx': Format(
        'MegatronDataSource',
        lambda records: megatron_index([len(record) for record in records]),
        lambda number: b'n %d' % number,
        data_of=b''.join,
    ),
}
"""The formats of files by the suffix of their names: `tests/datasources/test_contract.py` holds for each."""
DECLARED: Final = set(names.FORMATS)
"""The formats that the library opens."""


def format_of(suffix: str) -> str:
    """Return the name by which the library opens the files with a suffix."""
    return names.format_of(f'x.{suffix}')


def _of_numbers(form: Format) -> Callable[[Sequence[int]], bytes]:
    return lambda numbers: form.of_records([form.record_of(number) for number in numbers])


FILES: Final = {suffix: _of_numbers(form) for suffix, form in FORMATS.items() if form.data_of is None}
"""The bytes of a file with these numbers, by the suffix of its name, of formats with one file."""


def files_of_numbers(suffix: str, name: str, numbers: Sequence[int]) -> dict[str, bytes]:
    """Return the content of the files with these numbers by their names, of which this is the first."""
    form = FORMATS[suffix]
    return form.files(name, [form.record_of(number) for number in numbers])


def write_numbers(path: Any, suffix: str, numbers: Sequence[int]) -> None:
    """Write files with these numbers, of which the first has this path."""
    form = FORMATS[suffix]
    form.write(path, [form.record_of(number) for number in numbers])


def record_in(datapoint: Any) -> bytes:
    """Return the record in a datapoint of any format."""
    record: Any = datapoint
    if isinstance(datapoint, dict):
        record = datapoint['tokens'].tobytes() if 'tokens' in datapoint else datapoint['n']
    return bytes(record)


def numbers_in(reader: Any) -> list[int]:
    """Return the numbers of a file, of a reader or of the dataset that it was converted to."""

    def number(datapoint: Any) -> int:
        if isinstance(datapoint, dict) and 'tokens' in datapoint:
            datapoint = datapoint['tokens'].tobytes()
        elif isinstance(datapoint, dict):
            datapoint = datapoint['n'] if 'n' in datapoint else datapoint['data']
        elif not datapoint.startswith(b'n '):
            datapoint = decode_example(datapoint)['n'][0]
        return int(datapoint.removeprefix(b'n ') if isinstance(datapoint, bytes) else datapoint)

    return [number(datapoint) for datapoint in reader]
