"""The sync API of :mod:`granular.aio.datasets.reader` and :mod:`granular.aio.datasets.writer`."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from granular.aio.datasets import reader as core
from granular.aio.datasets import writer as corewriter
from granular.aio.datasets.codec import Decoder, Encoder
from granular.aio.paths.pure import PurePath
from granular.aio.runtime.bridge import run
from granular.formats.layout import Layout
from granular.sync.base import A, Rows, SyncObject, blocking


class Datasets(Rows[A]):
    """Base of the readers of a single dataset and of a sharded one."""

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        return self.aio.spec  # type: ignore[no-any-return]

    @property
    def layout(self) -> str:
        """The layout: ``'refs'`` or ``'columns'``."""
        return self.aio.layout  # type: ignore[no-any-return]

    available = blocking(core.DatasetReader.available)


class DatasetReader(Datasets[core.DatasetReader]):
    """Random access to the datapoints of a dataset of either layout.

    ::

        with granular.DatasetReader('s3://bucket/data', granular.decoders) as reader:
            datapoint = reader[0]
            title = reader[-1, ('title',)]['title']
            frames = reader[0, {'frames': range(3, 9)}]
            datapoints = reader.fetch([3, 1, 4])

    Memory: 8 bytes per key and datapoint with ``cache_index``, and the bags of ``cache_keys``.

    Args:
      directory: the dataset's folder: a string, a path, or a path object of another library.
      decoders: by type, the function that decodes a record's bytes into a value; None for raw bytes.
      cache_index: keep the tables in memory, so that a read is one request per value. Otherwise only the limits needed
        are read.
      cache_keys: keys whose bags are kept in memory; ``'refs'`` keeps the references of the refs layout.
      parallel: accepted for code written for granular 0.21; reads are always concurrent.
      verify: check each record against its checksum, which the writer must have stored. Memory: 4 bytes per record.
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


class Appending(SyncObject[A]):
    """Base of the writers of a single dataset and of a sharded one."""

    aio: Any

    @property
    def spec(self) -> dict[str, str]:
        """The type of each key, sorted by key."""
        return self.aio.spec  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Bytes written."""
        return self.aio.size  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self.aio)

    @property
    def found(self) -> int:
        """Datapoints that existed when the writer was opened: resume with the ones that follow.

        For a sharded dataset, counts those of this writer's own shards.
        """
        return self.aio.found  # type: ignore[no-any-return]

    def append(self, datapoint: Mapping[str, Any], flush: bool = True) -> int:
        """Append a datapoint and return its index. All of its values are encoded before any of them is written.

        Args:
          datapoint: a value for each key of the spec; for a sequence any iterable of values.
          flush: flush at once. In a bucket, bytes are uploaded in parts, each when it is full.

        Raises:
          DatapointError: if its keys are not those of the spec.
          EncodeError: if an encoder rejects a value.
        """
        return run(self.aio.append(datapoint, flush))  # type: ignore[no-any-return]

    flush = blocking(corewriter.DatasetWriter.flush)


class DatasetWriter(Appending[corewriter.DatasetWriter]):
    """Appends datapoints to a new dataset, or to an existing local one in the columns layout.

    ::

        spec = {'image': 'jpg', 'label': 'int', 'captions': 'utf8[]'}
        with granular.DatasetWriter('s3://bucket/photos', spec, granular.encoders) as writer:
            for image, label, captions in photos:
                writer.append({'image': image, 'label': label, 'captions': captions})

    ``spec.json`` is written when the writer is closed. If the ``with`` block ends with an error, the written files are
    removed. Data left by a killed writer is resumed in the columns layout on a local disk, and overwritten elsewhere.

    Args:
      directory: the dataset's folder, which must not hold a dataset, except a local one in the columns layout with the
        same spec, which is appended to.
      spec: the type of each key. In the refs layout, a type that ends in ``[]`` is a sequence.
      encoders: by type, the function that encodes a value into bytes; None if the values are bytes.
      layout: ``'refs'``, which granular 0.21 writes, or ``'columns'``, which 0.22 and later write.
      resume: how to treat data left by a killed writer. ``'check'``: in the columns layout on a local disk, check that
        the datapoints appended next are the ones it was writing. ``'discard'``: remove partially written data; in a
        bucket, where a running writer cannot be detected, this asserts that the other writer is dead.
      checksums: store a CRC32C of each record, for readers that verify, in files that granular 0.21 and 0.24 ignore.
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
