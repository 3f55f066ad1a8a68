"""Tar files as WebDataset writes them, with I/O that blocks: the face of :mod:`granular.aio.datasources.tar`."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

from granular.aio.datasources import tar as core
from granular.aio.datasources.tar import Decoders, Fields
from granular.aio.purepath import PurePath
from granular.bridge import iterate, run
from granular.face import Reader


class WebDatasetDataSource(Reader[core.WebDatasetDataSource]):
    """Random access to the samples of tar files, on a disk or in buckets, in the order given.

    ``source[i]``, ``source[-1]``, ``source[10:20]``, ``source.fetch([3, 1, 4], ('cls',))``.

    A sample is a dict: ``'__key__'`` and, for each of its members, what follows the first dot of the member's name, in
    lower case, with the member's bytes, or what a decoder makes of them. Consecutive members with the same name before
    that dot make a sample; other members are left out, as WebDataset does: folders, links, hidden files, names without
    a dot or within double underscores.

    Opening reads the headers once, of eight files at a time: by reads of 16 MiB, bodies included, or by small ones from
    header to header where members have more than 4 MiB on average. With ``IOConfig.index_cache`` the index of a
    bucket's file is kept on the local disk, bound to its ETag or generation, and checked with one request. After that a
    batch is one fan-out of byte ranges, of all files, of nothing but the members wanted.

    Memory: 24 bytes a member, 16 a sample, and its key.

    Args:
      paths: a file, or a sequence of files, not compressed.
      decoders: by field, or by what follows its last dot, the function that makes a value of a member's bytes, such as
        ``granular.decoders``; fields that it does not have, and all of them by default, are bytes.

    Raises:
      CorruptError: if a file is no tar file, or is cut off.
      UnsupportedError: if it is compressed, or has members that are stored sparse.
    """

    aio: core.WebDatasetDataSource

    def __init__(self, paths: PurePath | str | os.PathLike[str] | Sequence[Any], decoders: Decoders = None) -> None:
        self._open(core.WebDatasetDataSource(paths, decoders))

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that samples have, ``'__key__'`` first; a sample may lack some."""
        return self.aio.fields

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.aio.size

    def __len__(self) -> int:
        return len(self.aio)

    def __getitem__(self, index: SupportsIndex | slice | tuple[SupportsIndex | slice, Fields]) -> Any:
        if isinstance(index, tuple):
            return run(self.aio.get(*index))
        return run(self.aio.get(index))

    def get(self, index: SupportsIndex | slice, mask: Fields = None) -> Any:
        """A sample, or ``{field: [values]}`` for a slice, of which each sample must have all fields.

        Args:
          index: an integer, negative from the end, or a slice.
          mask: the fields wanted; one that a sample does not have is missing from it.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index beyond what is there.
          UnknownKeyError: a ``KeyError``, for a field that no sample has.
        """
        return run(self.aio.get(index, mask))

    def fetch(self, indices: Any, mask: Fields = None) -> list[dict[str, Any]]:
        """Many samples in one fan-out over all files.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
          mask: as for ``get``.

        Returns:
          The samples, in the order asked.
        """
        return run(self.aio.fetch(indices, mask))

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        # By this name PyTorch's loaders ask for a batch.
        return self.fetch(indices)

    def _getitems(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        # By this name Grain's loaders ask for a batch.
        return self.fetch(indices)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iterate(self.aio.__aiter__)
