"""Converting other formats into datasets, with I/O that blocks."""

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
    """Convert records of another format into a dataset, in shards that are written in parallel.

    Started again after it was killed, it goes on: shards that are finished are left as they are, and the dataset is,
    byte for byte, what one run writes. Until the last shard is there the first one is not, so that half a dataset
    cannot be read as a whole. ``conversion.json`` beside the shards says what is converted. Run one at a time: a second
    one on the same machine is refused, but of one on another machine that writes to the same bucket nothing is known.

    The types of keys are inferred of a few records: whole numbers are ``int``, text ``utf8``, bytes ``bytes`` or, if
    they are an image file, ``jpg`` or ``png``, arrays ``array``, PIL images ``png``, and other numbers, None, lists and
    mappings ``msgpack`` (with arrays in them ``tree``). Image files are kept as they are. A record that is no mapping
    becomes the key ``data``.

    Up to ``parallel`` shards hold two reads of about 4 MiB (or one record) each, and what their uploads hold. A source
    that can only be read once is read by one, and what comes of finished shards is passed over.

    Args:
      source: a path, address or pattern (``data/*.parquet``) of Parquet, ArrayRecord or WebDataset files or of Hugging
        Face arrow files, or a list of such; a folder of them, of images in folders by class (``image``, ``label``,
        ``class``), or of ``save_to_disk``; a source as for ``MapDataset.source``; a Hugging Face dataset; an iterable,
        also an asynchronous one. An iterable must give the same again for a run that goes on.
      directory: the folder of the dataset, new or of a conversion that was not finished.
      format: what the source is, if its names do not say.
      spec: types of some keys, in place of those inferred.
      encoders: by type, for types of your own.
      shardlen: datapoints in a shard; None for one dataset without shards.
      layout, checksums: as for ``DatasetWriter``.
      parallel: shards that are written at a time.
      sample: records to infer types from.
      dry_run: write nothing.
      progress: called with the number of records that were written since, or were there, on the library's thread.

    Returns:
      What was converted.

    Raises:
      InvalidArgumentError: if nobody can tell what the source is, or what type fits a key.
      AlreadyExistsError: if the folder holds something else.
      EncodeError: if a record does not fit the types.
    """
    options: dict[str, Any] = {
        'format': format, 'spec': spec, 'encoders': encoders, 'shardlen': shardlen, 'layout': layout,
        'checksums': checksums, 'parallel': parallel, 'sample': sample, 'dry_run': dry_run, 'progress': progress,
    }  # fmt: skip
    return run(core.convert(source, directory, **options))
