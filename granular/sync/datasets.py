"""Datasets, with I/O that blocks: the synchronous face of :mod:`granular.aio.datasets.reader`."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsIndex

from granular.aio.datasets import reader as core
from granular.aio.datasets import writer as corewriter
from granular.aio.datasets.codec import Decoder, Encoder
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.bridge import run
from granular.formats.layout import Layout
from granular.sync.base import A, Face, Rows


class Datasets(Rows[A]):
    """What readers of one dataset and of several shards have in common."""

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        return self.aio.spec  # type: ignore[no-any-return]

    @property
    def layout(self) -> str:
        """``'refs'`` or ``'columns'``."""
        return self.aio.layout  # type: ignore[no-any-return]

    def available(self, index: SupportsIndex) -> dict[str, bool | range]:
        """What a mask can ask of a datapoint: True, or for a sequence the range of its values."""
        return run(self.aio.available(index))


class DatasetReader(Datasets[core.DatasetReader]):
    """Random access to the datapoints of a dataset of either layout.

    ``reader[i]``, ``reader[-1]``, ``reader[i, {'frames': range(3, 9)}]``, ``reader[i, ('title',)]``, ``reader[10:20]``.
    Memory: 8 bytes per key and datapoint with ``cache_index``, and the bags of ``cache_keys``.

    Args:
      directory: the dataset's folder: a string, a path, or a path object of somebody else's.
      decoders: by type, the function that makes a value of a record's bytes; None for raw bytes.
      cache_index: keep the tables, so that a read is one request per value. Without it only the limits needed are read.
      cache_keys: keys whose bags are kept in memory; ``'refs'`` keeps the references of the refs layout.
      parallel: accepted for code written for granular 0.21; reads are always concurrent.
      verify: check each record against its checksum, which the writer must have kept. Memory: 4 bytes a record.
    """

    aio: core.DatasetReader

    def __init__(
        self,
        directory: PurePath | str | os.PathLike[str] | Any,
        decoders: Mapping[str, Decoder | Any] | None,
        cache_index: bool = True,
        cache_keys: Sequence[str] = (),
        parallel: bool = False,
        verify: bool = False,
    ) -> None:
        self._open(core.DatasetReader(directory, decoders, cache_index, cache_keys, parallel, verify))


class Appending(Face[A]):
    """What writers of one dataset and of several shards have in common."""

    aio: Any

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        return self.aio.spec  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Bytes of what was written."""
        return self.aio.size  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.aio)

    @property
    def found(self) -> int:
        """Datapoints that were there when it was opened: go on with those that follow.

        Of a sharded dataset, those of this writer's own shards.
        """
        return self.aio.found  # type: ignore[no-any-return]

    def append(self, datapoint: Mapping[str, Any], flush: bool = True) -> int:
        """Append a datapoint; returns its index. All of its values are encoded before any of them is written.

        Args:
          datapoint: a value for each key of the spec; for a sequence any iterable of values.
          flush: hand it on now. To a bucket, bytes go in parts, whenever one is full.

        Raises:
          DatapointError: if its keys are not those of the spec.
          EncodeError: if an encoder refuses a value.
        """
        return run(self.aio.append(datapoint, flush))  # type: ignore[no-any-return]

    def flush(self) -> None:
        """Hand on what was appended."""
        run(self.aio.flush())


class DatasetWriter(Appending[corewriter.DatasetWriter]):
    """Appends datapoints to a new dataset, or to a local one in the columns layout.

    ``spec.json`` is written when the writer is closed. If its block ends with an error, what it wrote is removed. What
    a killed writer left is gone on with in the columns layout on a local disk, and begun anew elsewhere.

    Args:
      directory: the dataset's folder, which must hold no dataset; in the columns layout on a local disk it may, if the
        spec agrees, and is appended to.
      spec: the type of each key. In the refs layout, a type that ends in ``[]`` is a sequence.
      encoders: by type, the function that makes bytes of a value; None if the values are bytes.
      layout: ``'refs'``, which granular 0.21 writes, or ``'columns'``, which 0.22 and later write.
      resume: what to do with what a killed writer left. ``'check'``: in the columns layout on a local disk, that the
        datapoints appended next are those that it was writing. ``'discard'`` what it left half written; in a bucket,
        where nobody can know whether it still lives, this says that it does not.
      checksums: keep a CRC32C of each record, for readers that verify, in files that granular 0.21 and 0.24 ignore.
    """

    aio: corewriter.DatasetWriter

    def __init__(
        self,
        directory: PurePath | str | os.PathLike[str] | Any,
        spec: Mapping[str, str],
        encoders: Mapping[str, Encoder | Any] | None,
        layout: Layout = 'refs',
        resume: Literal['check', 'discard'] = 'check',
        checksums: bool = False,
    ) -> None:
        self._open(corewriter.DatasetWriter(directory, spec, encoders, layout, resume, checksums))
