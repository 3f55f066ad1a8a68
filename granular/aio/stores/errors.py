"""Conversion of OS and third-party exceptions to ``GranularError`` subclasses."""

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from granular._redact import hidden
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    GranularError,
    NotFoundError,
    StoreError,
    StoreTimeoutError,
)

Foreign = Callable[[str, Exception], GranularError | None]

_BUILTIN: Final[tuple[tuple[type[Exception], type[GranularError], str], ...]] = (
    (FileNotFoundError, NotFoundError, 'there is nothing by this name'),
    (NotADirectoryError, NotFoundError, 'there is no such folder: a part of it is a file'),
    (FileExistsError, AlreadyExistsError, 'exists already'),
    (PermissionError, AccessDeniedError, 'access denied: check the credentials and their rights'),
    (IsADirectoryError, StoreError, 'is a folder, not a file'),
    (TimeoutError, StoreTimeoutError, 'no answer in time'),
    (OSError, StoreError, 'failed'),
)

_NUMBERED: Final[Mapping[int | None, tuple[type[GranularError], str]]] = {
    errno.ENOSPC: (StoreError, 'the disk is full'),
    errno.EDQUOT: (StoreError, 'the quota is used up'),
    errno.EFBIG: (StoreError, 'a file may not become so large here'),
    errno.EROFS: (AccessDeniedError, 'the file system is read-only'),
}


@contextlib.contextmanager
def translated(name: str, foreign: Foreign | None = None) -> Iterator[None]:
    """Convert exceptions raised in the block to ours, naming the path and keeping the original as the cause.

    Args:
      name: the path or address.
      foreign: converts an exception of a library, given the path; returns None if it does not know the exception.
    """
    try:
        yield
    except GranularError:
        raise
    except Exception as error:
        ours = foreign(name, error) if foreign is not None else None
        ours = ours or _of_builtin(name, error)
        if ours is None:
            raise
        raise ours from error


def _of_builtin(name: str, error: Exception) -> GranularError | None:
    for builtin, ours, says in _BUILTIN:
        if isinstance(error, builtin):
            if (number := getattr(error, 'errno', None)) in _NUMBERED:
                ours, says = _NUMBERED[number]
            # The text of an OSError may repeat the path, strerror does not; other exceptions only have their text.
            detail = hidden(getattr(error, 'strerror', None) or str(error))
            return ours(f'{name}: {says} ({detail})' if detail else f'{name}: {says}')
    return None
