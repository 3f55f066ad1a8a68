"""Files of each format with the same records or numbers."""

import dataclasses
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, Final

import pyarrow
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from granular.formats import decode_example
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


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of files that hold records.

    Attributes:
      source: the name of its data source.
      of_records: the bytes of a file with these records, each of which is bytes.
      record_of: the record of a number, in files of numbers.
      stream: the name of its stream; empty if there is none.
    """

    source: str
    of_records: Callable[[Sequence[Any]], bytes]
    record_of: Callable[[int], Any]
    stream: str = ''


FORMATS: Final = {
    'parquet': Format('ParquetDataSource', _parquet, int, 'ParquetIterDataset'),
    'tfrecord': Format(
        'TFRecordDataSource',
        lambda records: b''.join(map(frame, records)),
        lambda number: encode({'n': [number]}),
        'TFRecordIterDataset',
    ),
    'tar': Format('WebDatasetDataSource', _tar, lambda number: b'%d' % number),
    'array_record': Format('ArrayRecordDataSource', _arrayrecord, lambda number: b'n %d' % number),
}
"""The formats of files by the suffix of their names: `tests/datasources/test_contract.py` holds for each."""


def _of_numbers(form: Format) -> Callable[[Sequence[int]], bytes]:
    return lambda numbers: form.of_records([form.record_of(number) for number in numbers])


FILES: Final = {suffix: _of_numbers(form) for suffix, form in FORMATS.items()}
"""The bytes of a file with these numbers, by the suffix of its name."""


def record_in(datapoint: Any) -> bytes:
    """Return the record in a datapoint of any format."""
    record: bytes = datapoint['n'] if isinstance(datapoint, dict) else datapoint
    return record


def numbers_in(reader: Any) -> list[int]:
    """Return the numbers of a file, of a reader or of the dataset that it was converted to."""

    def number(datapoint: Any) -> int:
        if isinstance(datapoint, dict):
            datapoint = datapoint['n'] if 'n' in datapoint else datapoint['data']
        elif not datapoint.startswith(b'n '):
            datapoint = decode_example(datapoint)['n'][0]
        return int(datapoint.removeprefix(b'n ') if isinstance(datapoint, bytes) else datapoint)

    return [number(datapoint) for datapoint in reader]
