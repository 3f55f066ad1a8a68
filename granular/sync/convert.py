"""The sync API of :mod:`granular.aio.convert`: convert other formats into datasets."""

from collections.abc import Mapping
from typing import Any

from granular.aio.conversion import convert as core
from granular.aio.conversion.convert import Conversion
from granular.aio.conversion.origins import Format
from granular.aio.datasets.codec import Encoder
from granular.aio.paths.path import Progress
from granular.aio.runtime.bridge import run
from granular.formats.layout import Layout
from granular.sync.path import Path

__all__ = ['Conversion', 'convert']


def convert(
    source: Any,
    directory: Path | str | Any,
    *,
    format: Format | None = None,
    spec: Mapping[str, str] | None = None,
    encoders: Mapping[str, Encoder | Any] | None = None,
    shardlen: int | None = 10_000,
    layout: Layout = 'refs',
    checksums: bool = False,
    parallel: int = 8,
    sample: int = 128,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Convert records of another format into a sharded dataset, writing shards in parallel.

    ::

        done = granular.convert('s3://bucket/*.parquet', './train', shardlen=10_000)
        print(done.records, done.shards)

    A killed conversion resumes when it is started again: finished shards are left as they are, and the result is byte
    for byte the same as that of a single run. The first shard is completed last, so that a partial dataset cannot be
    read as a whole one. ``conversion.json`` beside the shards records what is converted. Run one conversion at a time:
    a second one on the same machine is refused, but one on another machine that writes to the same bucket is not
    detected.

    The types of keys are inferred from a few records: whole numbers are ``int``, text ``utf8``, bytes ``bytes`` or, if
    they are an image file, ``jpg`` or ``png``, arrays ``array``, PIL images ``png``, and other numbers, None, lists and
    mappings ``msgpack`` (``tree`` if they contain arrays). Image files are copied unchanged. A record that is not a
    mapping becomes the key ``data``.

    Memory: for each of up to ``parallel`` shards two reads of about 4 MiB (or one record), and the buffers of its
    uploads. A source that can only be read once is read by a single task, which skips the records of finished shards.

    Args:
      source: a path, address or pattern (``data/*.parquet``) of Parquet, ArrayRecord or WebDataset files or of Hugging
        Face arrow files, or a list of such; a folder of them, of images in folders by class (``image``, ``label``,
        ``class``), or of ``save_to_disk``; a source as for ``MapDataset.source``; a Hugging Face dataset; a sync or
        async iterable. To resume, an iterable must yield the same records again.
      directory: the folder of the dataset, new or of an unfinished conversion.
      format: the source's format, if its names do not show it.
      spec: types of some keys, replacing the inferred ones.
      encoders: by type, for custom types.
      shardlen: datapoints per shard; None for one dataset without shards.
      layout, checksums: as for ``DatasetWriter``.
      parallel: shards that are written at a time.
      sample: records to infer types from.
      dry_run: write nothing.
      progress: called with the number of records written, or found already written, since the last call, on the
        library's thread.

    Returns:
      A summary of the conversion.

    Raises:
      InvalidArgumentError: if the source's format or a key's type cannot be determined.
      AlreadyExistsError: if the folder holds something else.
      EncodeError: if a record does not fit the types.
    """
    options: dict[str, Any] = {
        'format': format, 'spec': spec, 'encoders': encoders, 'shardlen': shardlen, 'layout': layout,
        'checksums': checksums, 'parallel': parallel, 'sample': sample, 'dry_run': dry_run, 'progress': progress,
    }  # fmt: skip
    return run(core.convert(source, directory, **options))
