"""The sync API of ArrayRecord files."""

from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, cast, overload

from granular.aio.datasources.arrayrecord import source as core
from granular.aio.runtime.bridge import run
from granular.sync.base import Batched, Reader
from granular.sync.iteration import Iteration


class ArrayRecordDataSource(Reader[core.ArrayRecordDataSource], Batched):
    """Random access to the records of ArrayRecord files, on a disk or in buckets, in the order given.

    ``source[i]``, ``source[-1]``, ``source[10:20]``, ``source.fetch([3, 1, 4])``.

    All chunks that a batch needs are read by one fan-out of byte ranges, of all files, and each is decompressed once,
    in threads. The package ``array_record`` is not needed. Opening takes one request a file, of 128 KiB, or two if it
    has thousands of chunks; a file whose records are given as ``FileInstruction`` or ``path[a:b]`` is opened when it is
    first read. It pickles to its addresses and the lengths that it knows.

    Files may have any ``group_size``, not compressed, or by brotli or zstd. Of a batch in random order each record
    costs reading and decompressing its whole group. Memory: 8 bytes a chunk, some 250 while its file is opened; and
    while a batch is read its chunks, of which as many are decompressed at a time as there are threads.

    All sizes, counts and offsets are checked, against each other and the file's size, and a file is pinned to the ETag
    or generation that it was opened with. The hashes in the files (HighwayHash) are not checked: a record that was
    damaged on the disk comes as it is, unless it is compressed and cannot be decompressed to its size.

    Args:
      paths: a file, or a sequence of files: addresses, paths, such with the records wanted behind them
        (``'s3://bucket/train.array_record[100:200]'``), or objects with ``filename``, ``skip``, ``take`` and
        ``examples_in_shard``, as TensorFlow Datasets has them.

    Raises:
      CorruptError: if a file is no ArrayRecord file, or damaged.
      UnsupportedError: if its chunks are transposed, or compressed by snappy.
      OutOfRangeError: if a file has fewer records than were asked for.
    """

    aio: core.ArrayRecordDataSource

    def __init__(self, paths: core.Place | Sequence[core.Place] | Any) -> None:
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
        """The record at an index, negative from the end, or the records of a slice.

        Raises:
          OutOfRangeError: an ``IndexError``.
        """
        return cast(bytes | list[bytes], run(self.aio.get(index)))

    def fetch(self, indices: Any) -> list[bytes]:
        """Many records in one fan-out over all files.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.

        Returns:
          The records, in the order asked.
        """
        return run(self.aio.fetch(indices))

    def __iter__(self) -> Iterator[bytes]:
        return Iteration(self.aio.__aiter__)
