"""The sync API of :mod:`granular.aio.transfer.local_copy`."""

import os
from typing import Any

from granular.aio.paths.path import Progress
from granular.aio.runtime.bridge import run
from granular.aio.transfer import local_copy as core
from granular.aio.transfer.local_copy import LocalCopy
from granular.sync.path import Path

__all__ = ['LocalCopy', 'copy_to_local']


def copy_to_local(
    src: Path | str | Any,
    dst: Path | str | Any,
    relative: str | os.PathLike[str] | None = None,
    *,
    unpack: bool = True,
    progress: Progress | None = None,
) -> LocalCopy:
    """Copy a file, folder or archive to the local disk, unless a complete copy exists.

    ::

        copy = granular.copy_to_local('s3://bucket/train.zip', './train')
        images = granular.Path(copy.path)

    An incomplete copy is deleted and copied again. Archives (.zip, .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz, .tar.zst)
    are unpacked while they are read: ``train.zip`` becomes the folder ``train``, whether it is the source or lies
    inside it. If all of an archive's files lie in one folder of the archive's name, that folder level is dropped. When
    several processes ask for the same copy, one copies and the others wait; if it dies, the next one copies.

    A folder contains ``.granular-copy.json`` from before its first file is written; it records the source and, at the
    end, that the copy is complete. A folder that has files but no ``.granular-copy.json`` was created by other means
    and is left as it is; so is an existing file, because files appear complete or not at all.

    Args:
      src: the file, folder or archive. If it does not exist, an archive of that name is used.
      dst: the destination; the suffix of an unpacked archive is dropped.
      relative: a path that is appended to both.
      unpack: unpack archives; otherwise they are copied as they are.
      progress: called with the number of source bytes copied since the last call, on a thread of the library.

    Returns:
      A summary of the copy.

    Raises:
      NotFoundError: if the source does not exist.
      AlreadyExistsError: if the destination is a copy of something else.
      InvalidArgumentError: if ``dst`` is not on a local disk, or if a name in the source escapes the source folder.
      CorruptArchiveError: if an archive is truncated or damaged.
      StoreError: if the disk is full; the copy is then incomplete.
    """
    return run(core.copy_to_local(src, dst, relative, unpack=unpack, progress=progress))
