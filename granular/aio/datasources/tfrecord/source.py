"""Reads TFRecord files at random: indexed once, then read by range requests."""

from typing import Final

from granular._support.indexing import Ints
from granular.aio.datasources.indexed_files import IndexedFiles, SequenceSource
from granular.aio.datasources.scanning import index_files
from granular.aio.datasources.tfrecord.index import Index, Scanner
from granular.aio.runtime.threads import offload
from granular.config import MiB
from granular.formats.tfrecord import OVERHEAD, check_data

_INLINE: Final = MiB  # up to this many bytes of records, checksums are computed on the event loop
_FOOTER: Final = 4


class TFRecordDataSource(SequenceSource[bytes], IndexedFiles[Index, bytes]):
    """Random access to the records of TFRecord files, on a disk or in buckets, in the order given.

    ::

        async with granular.aio.TFRecordDataSource('s3://bucket/train.tfrecord') as source:
            record = await source.get(0)
            last_ten = await source.get(slice(-10, None))
            records = await source.fetch([3, 1, 4])

    Records are bytes; ``granular.formats.decode_example`` returns the features of those that are a
    ``tf.train.Example``. TensorFlow is not needed.

    TFRecord files have no index, so opening reads the headers once, of eight files at a time: with reads of 16 MiB that
    include the data, or with small reads from header to header where records are larger than 4 MiB on average. With
    ``IOConfig.index_cache`` the index of a file in a bucket is cached on the local disk, bound to the file's ETag or
    generation, and validated with one request. After that a batch reads only the byte ranges of its records, from all
    files concurrently.

    Both checksums of a record are checked: that of its length while the file is indexed, that of its data at each read.
    A file is pinned to the version that was indexed. Memory: 8 bytes per record.

    Args:
      paths: a file, a folder, a pattern, or a sequence of files, not compressed. ``TFRecordIterDataset`` reads
        compressed files, in order.
      split: the split to read, such as ``'train'``, of a folder or pattern that has files of several.

    Raises:
      CorruptRecordError: if a checksum is wrong, or a file is truncated or is not a TFRecord file.
      UnsupportedError: if it is compressed.
    """

    _format = 'tfrecord'

    async def _read_file_indices(self) -> list[Index]:
        return await index_files(self.paths, Index, Scanner)

    async def _reading(self) -> tuple[int, bool]:
        size, local = await super()._reading()
        return size - OVERHEAD * len(self), local

    async def _read_all(self, positions: Ints) -> list[bytes]:
        owners, numbers = self._locate(positions)
        raw = await self._read_items(owners, numbers, Index.limits)
        if sum(map(len, raw)) <= _INLINE:
            return self._checked(raw, owners, numbers)
        return await offload(self._checked, raw, owners, numbers)

    def _checked(self, raw: list[bytes], owners: Ints, numbers: Ints) -> list[bytes]:
        return [
            check_data(piece[:-_FOOTER], piece[-_FOOTER:], number, f'{self.paths[owner]}')
            for piece, owner, number in zip(raw, owners.tolist(), numbers.tolist(), strict=True)
        ]
