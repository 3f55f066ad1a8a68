"""The sync API of :mod:`granular.aio.datasources.arrayrecord.source`."""

from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, cast, overload

from granular.aio.datasources.arrayrecord import source as core
from granular.aio.runtime.bridge import run
from granular.sync.base import Batched, Reader
from granular.sync.iteration import Iteration


class ArrayRecordDataSource(Reader[core.ArrayRecordDataSource], Batched):
    """Random access to the records of ArrayRecord files, on a disk or in buckets, in the order given.

    ::

        source = granular.ArrayRecordDataSource(['s3://bucket/a.array_record', 's3://bucket/b.array_record[0:100]'])
        record, last_ten = source[0], source[-10:]
        records = source.fetch([3, 1, 4])

    All chunks that a batch needs are read from all files concurrently, and each is decompressed once, in threads. The
    package ``array_record`` is not needed. Opening takes one request of 128 KiB per file, or two if it has thousands of
    chunks. A file given as ``FileInstruction`` or ``path[a:b]`` is opened at its first read. The source pickles to its
    addresses and the lengths known so far.

    Files may have any ``group_size``, and may be uncompressed or compressed with brotli or zstd. In random order, each
    record costs reading and decompressing its whole group. Memory: 8 bytes per chunk, about 250 while its file is
    opened; and during a read the chunks of the batch, of which as many are decompressed at a time as there are threads.

    All sizes, counts and offsets are checked against each other and the file's size, and a file is pinned to the ETag
    or generation that it was opened with. The hashes in the files (HighwayHash) are not checked: a record that was
    damaged on the disk is returned as it is, unless it is compressed and does not decompress to its size.

    Args:
      paths: a file, or a sequence of files: addresses or paths, optionally followed by a range of records
        (``'s3://bucket/train.array_record[100:200]'``), or objects with ``filename``, ``skip``, ``take`` and
        ``examples_in_shard``, as in TensorFlow Datasets.

    Raises:
      CorruptError: if a file is not an ArrayRecord file, or is damaged.
      UnsupportedError: if its chunks are transposed, or compressed with snappy.
      OutOfRangeError: if a file has fewer records than requested.
    """

    aio: core.ArrayRecordDataSource

    def __init__(self, paths: core.FileSpec | Sequence[core.FileSpec] | Any) -> None:
        self._open(core.ArrayRecordDataSource(paths))

    def __len__(self) -> int:
        return len(self.aio)

    @overload
    def __getitem__(self, index: SupportsIndex) -> bytes: ...
    @overload
    def __getitem__(self, index: slice | range) -> list[bytes]: ...
    def __getitem__(self, index: SupportsIndex | slice | range) -> bytes | list[bytes]:
        return cast(bytes | list[bytes], run(self.aio.get(index)))

    def get(self, index: SupportsIndex | slice | range) -> bytes | list[bytes]:
        """Return the record at an index, negative from the end, or the records of a slice.

        Raises:
          OutOfRangeError: an ``IndexError``.
        """
        return cast(bytes | list[bytes], run(self.aio.get(index)))

    def fetch(self, indices: Any) -> list[bytes]:
        """Return many records, read from all files concurrently.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.

        Returns:
          The records, in the order requested.
        """
        return run(self.aio.fetch(indices))

    def __iter__(self) -> Iterator[bytes]:
        return Iteration(self.aio.__aiter__)
