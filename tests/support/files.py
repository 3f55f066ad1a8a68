"""Files of each format with the same numbers."""

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from granular.formats import decode_example
from tests.support.examples import encode, frame


def _parquet(numbers: Sequence[int]) -> bytes:
    stream = io.BytesIO()
    parquet.write_table(pyarrow.table({'n': list(numbers)}), stream)
    return stream.getvalue()


def _tfrecord(numbers: Sequence[int]) -> bytes:
    return b''.join(frame(encode({'n': [number]})) for number in numbers)


def _tar(numbers: Sequence[int]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode='w') as tar:
        for i, number in enumerate(numbers):
            member = tarfile.TarInfo(f'{i:06}.n')
            member.size = len(data := b'%d' % number)
            tar.addfile(member, io.BytesIO(data))
    return stream.getvalue()


def _arrayrecord(numbers: Sequence[int]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        name = os.path.join(folder, 'x')
        writer = ArrayRecordWriter(name, 'group_size:1')
        for number in numbers:
            writer.write(b'n %d' % number)
        writer.close()
        with open(name, 'rb') as file:
            return file.read()


FILES: dict[str, Callable[[Sequence[int]], bytes]] = {
    'parquet': _parquet, 'tfrecord': _tfrecord, 'tar': _tar, 'array_record': _arrayrecord,
}  # fmt: skip
"""The bytes of a file with these numbers, by the suffix of its name."""


def numbers_in(reader: Any) -> list[int]:
    """Return the numbers of a file, of a reader or of the dataset that it was converted to."""

    def number(datapoint: Any) -> int:
        if isinstance(datapoint, dict):
            datapoint = datapoint['n'] if 'n' in datapoint else datapoint['data']
        elif not datapoint.startswith(b'n '):
            datapoint = decode_example(datapoint)['n'][0]
        return int(datapoint.removeprefix(b'n ') if isinstance(datapoint, bytes) else datapoint)

    return [number(datapoint) for datapoint in reader]
