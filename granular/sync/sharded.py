"""The sync API of :mod:`granular.aio.datasets.sharded_reader` and :mod:`granular.aio.datasets.sharded_writer`."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from granular.aio.datasets import sharded_reader as core
from granular.aio.datasets import sharded_writer as corewriter
from granular.aio.datasets.codec import Decoder, Encoder
from granular.aio.paths.pure import PurePath
from granular.formats.layout import Layout
from granular.sync.datasets import Appending, Datasets


class ShardedDatasetReader(Datasets[core.ShardedDatasetReader]):
    """Random access to the datapoints of all shards, or of every ``shardstep``-th from ``shardstart`` on.

    ::

        with granular.ShardedDatasetReader('s3://bucket/train', granular.decoders) as reader:
            print(reader.shards, len(reader))
            datapoints = reader.fetch([3, 1, 4])

    Opening lists the folder and then opens all shards concurrently. Arguments and memory are those of
    ``DatasetReader``.
    """

    aio: core.ShardedDatasetReader

    def __init__(
        self,
        directory: PurePath | str | os.PathLike[str] | Any,
        decoders: Mapping[str, Decoder | Any] | None,
        cache_index: bool = True,
        cache_keys: Sequence[str] = (),
        parallel: bool = False,
        shardstart: int = 0,
        shardstep: int = 1,
        verify: bool = False,
    ) -> None:
        args = directory, decoders, cache_index, cache_keys, parallel, shardstart, shardstep, verify
        self._open(core.ShardedDatasetReader(*args))

    @property
    def shards(self) -> int:
        """Number of shards that are read."""
        return self.aio.shards


class ShardedDatasetWriter(Appending[corewriter.ShardedDatasetWriter]):
    """Appends datapoints to shards of ``shardlen`` datapoints, one after the other.

    ::

        spec = {'image': 'jpg', 'label': 'int', 'captions': 'utf8[]'}
        with granular.ShardedDatasetWriter('./photos', spec, granular.encoders, shardlen=10_000) as writer:
            for image, label, captions in photos[writer.found :]:
                writer.append({'image': image, 'label': label, 'captions': captions})

    When reopened, the writer continues after the last of its shards. A partially filled shard is filled if it is a
    local dataset in the columns layout, and otherwise left as it is. A shard that a killed writer left without a
    ``spec.json`` is resumed or overwritten, as in ``DatasetWriter``; ``found`` is the number of datapoints to skip. A
    shard that has a ``spec.json`` is never overwritten.

    Writers of the same shards exclude each other. In a bucket, the writer holds a claim while it runs: a small object
    ``.writer.<start>.<step>.json`` beside the shards, removed when the writer is closed. The claim of a killed writer
    is taken over on the same machine, and elsewhere with ``resume='discard'``.

    Args:
      directory: the folder of the shards; it may exist.
      spec, encoders, layout, checksums, resume: as for ``DatasetWriter``.
      shardlen: datapoints per shard; None for a single shard without limit.
      shardstart: the first shard to write, for one of several writers.
      shardstep: distance between this writer's shards, for one of several writers.
    """

    aio: corewriter.ShardedDatasetWriter

    def __init__(
        self,
        directory: PurePath | str | os.PathLike[str] | Any,
        spec: Mapping[str, str],
        encoders: Mapping[str, Encoder | Any] | None,
        shardlen: int | None = None,
        shardstart: int = 0,
        shardstep: int = 1,
        layout: Layout = 'refs',
        checksums: bool = False,
        resume: Literal['check', 'discard'] = 'check',
    ) -> None:
        args = directory, spec, encoders, shardlen, shardstart, shardstep, layout, checksums, resume
        self._open(corewriter.ShardedDatasetWriter(*args))

    @property
    def shards(self) -> int:
        """Number of shards that this writer has started."""
        return self.aio.shards
