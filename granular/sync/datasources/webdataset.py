"""The sync API of tar files in the WebDataset format."""

import os
from collections.abc import Sequence
from typing import Any

from granular.aio.datasources.webdataset import source as core
from granular.aio.datasources.webdataset.source import Decoders
from granular.aio.paths.pure import PurePath
from granular.sync.base import Rows


class WebDatasetDataSource(Rows[core.WebDatasetDataSource]):
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
