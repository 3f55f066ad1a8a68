"""The sync API of :mod:`granular.aio.datasources.webdataset.source`."""

import os
from collections.abc import Sequence
from typing import Any

from granular.aio.datasources.webdataset import source as core
from granular.aio.datasources.webdataset.source import Decoders
from granular.aio.paths.pure import PurePath
from granular.sync.base import Rows


class WebDatasetDataSource(Rows[core.WebDatasetDataSource]):
    """Random access to the datapoints of WebDataset tar files, on a disk or in buckets, in the order given.

    ::

        source = granular.WebDatasetDataSource('s3://bucket/train-000.tar', granular.decoders)
        image = source[0]['jpg']
        datapoints = source.fetch([3, 1, 4], ('cls',))  # only these members are read

    A datapoint is a dict: ``'__key__'`` and an entry for each of its members. The field is the part of the member's
    name after the first dot, in lower case; the value is the member's bytes, decoded if there is a decoder. Consecutive
    members with the same name before that dot form a datapoint. As in WebDataset, other members are skipped: folders,
    links, hidden files, and names without a dot or within double underscores.

    Opening reads the headers once, of eight files at a time: with reads of 16 MiB that include the bodies, or with
    small reads from header to header where members are larger than 4 MiB on average. With ``IOConfig.index_cache`` the
    index of a file in a bucket is cached on the local disk, bound to the file's ETag or generation, and validated with
    one request. After that a batch reads only the byte ranges of the members wanted, from all files concurrently.

    Memory: 24 bytes per member, and 16 bytes plus the key per datapoint.

    Args:
      paths: a file, or a sequence of files, not compressed.
      decoders: by field, or by the part after its last dot, the function that decodes a member's bytes, such as
        ``granular.decoders``; fields without a decoder (by default all) are bytes.

    Raises:
      CorruptError: if a file is not a tar file, or is truncated.
      UnsupportedError: if it is compressed, or has sparse members.
    """

    aio: core.WebDatasetDataSource

    def __init__(self, paths: PurePath | str | os.PathLike[str] | Sequence[Any], decoders: Decoders = None) -> None:
        self._open(core.WebDatasetDataSource(paths, decoders))

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the datapoints, ``'__key__'`` first; a datapoint may lack some."""
        return self.aio.fields
