"""Copies on the local disk, with I/O that blocks."""

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
    """Have a copy on the local disk: made if there is none, cleared and made again if it is incomplete, else left.

    Archives (.zip, .tar, .tar.gz, .tgz, .tar.bz2, .tar.xz, .tar.zst) are unpacked as they come: ``train.zip`` becomes
    the folder ``train``, whether it is the source or lies in it. If all of an archive lies in one folder of its name,
    that one is left out. Of processes that ask at once one copies, and the others wait for it; should it die, the next
    one copies.

    A folder holds ``.granular-copy.json`` from before its first file on, which says whose copy it is and, at the end,
    that it is complete. A folder that has files and none of that was put there by somebody else, and is left as it is;
    so is a file, which appears whole.

    Args:
      src: the file, folder or archive. If there is none by this name, an archive of that name is taken.
      dst: what it becomes; of an archive, the ending is left out.
      relative: a path that is appended to both.
      unpack: whether to unpack archives; otherwise they are copied as they are.
      progress: called with the bytes of the source that were copied since, on a thread of the library.

    Returns:
      What it did.

    Raises:
      NotFoundError: if there is nothing to copy.
      AlreadyExistsError: if it is a copy of something else.
      InvalidArgumentError: if ``dst`` is on no disk, or if a name in the source leads out of it.
      CorruptArchiveError: if an archive is cut short or damaged.
      StoreError: if the disk is full; what is there is incomplete then.
    """
    return run(core.copy_to_local(src, dst, relative, unpack=unpack, progress=progress))
