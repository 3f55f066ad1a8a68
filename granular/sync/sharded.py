"""Sharded datasets, with I/O that blocks: the synchronous face of :mod:`granular.aio.datasets.sharded_reader`."""

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

    Opening lists the folder and then opens all shards at once. Arguments and memory are those of ``DatasetReader``.
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
        """How many shards are read."""
        return self.aio.shards


class ShardedDatasetWriter(Appending[corewriter.ShardedDatasetWriter]):
    """Appends datapoints to shards of ``shardlen`` datapoints, one after the other.

    Opened again, it goes on behind the last of its shards; one that is not full is filled if it is a local dataset in
    the columns layout, and left as it is otherwise. One that a killed writer left without a ``spec.json`` is gone on
    with or begun anew, as ``DatasetWriter`` does; ``found`` says which datapoints to go on with. No shard that has a
    ``spec.json`` is ever overwritten.

    Writers of the same shards exclude each other. In a bucket, a small object ``.writer.<start>.<step>.json`` beside
    the shards says that a writer is at work, and is removed when it is closed. One that a killed writer left is taken
    over on the same machine, and elsewhere with ``resume='discard'``.

    Args:
      directory: the folder of the shards; it may exist.
      spec, encoders, layout, checksums, resume: as for ``DatasetWriter``.
      shardlen: datapoints in a shard; None for a single shard without end.
      shardstart: the first shard to write, as one of several writers.
      shardstep: how many shards lie between two of this writer's.
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
        """How many shards this writer has begun."""
        return self.aio.shards
