"""Conversion of OS and third-party exceptions to ``GranularError`` subclasses, and quotes for their messages."""

import errno
import os
from collections.abc import Callable, Mapping
from typing import Final

from granular._support.redact import hidden
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    GranularError,
    NotFoundError,
    StoreError,
    StoreTimeoutError,
)

Foreign = Callable[[str, Exception], GranularError | None]

_BY_TYPE: Final[tuple[tuple[type[Exception], type[GranularError], str], ...]] = (
    (FileNotFoundError, NotFoundError, 'no such file or folder'),
    (NotADirectoryError, NotFoundError, 'no such folder: this, or a part of its path, is a file'),
    (FileExistsError, AlreadyExistsError, 'exists already'),
    (PermissionError, AccessDeniedError, 'access denied: check the credentials and their rights'),
    (IsADirectoryError, StoreError, 'is a folder, not a file'),
    (TimeoutError, StoreTimeoutError, 'no answer in time'),
    (OSError, StoreError, 'failed'),
    (MemoryError, StoreError, 'no memory for what was asked for'),
)

_BY_ERRNO: Final[Mapping[int | None, tuple[type[GranularError], str]]] = {
    errno.ENOSPC: (StoreError, 'the disk is full'),
    errno.EDQUOT: (StoreError, 'the quota is used up'),
    errno.EFBIG: (StoreError, 'the file is larger than its file system or the process allows'),
    errno.ELOOP: (NotFoundError, 'no such file or folder: its links lead in a circle'),
    errno.EROFS: (AccessDeniedError, 'the file system is read-only'),
}


class translated:  # noqa: N801 - a context manager that reads like a function
    """Convert exceptions raised in the block to ``GranularError`` subclasses, with the path and the original as cause.

    Errors that are such already, and have no path, get it. An error that says no more than its class is no cause.

    Args:
      name: the path or address.
      foreign: converts an exception of a library, given the path; returns None if it does not know the exception.
    """

    __slots__ = ('_foreign', '_name')

    def __init__(self, name: str, foreign: Foreign | None = None) -> None:
        self._name, self._foreign = name, foreign

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, GranularError):
            error.path = error.path or self._name
        elif isinstance(error, Exception):
            converted = self._foreign(self._name, error) if self._foreign is not None else None
            converted = converted or _from_builtin(self._name, error)
            if converted is None:
                return
            converted.path = converted.path or self._name
            try:
                raise converted from (None if _is_plain(error) else error)
            finally:
                del converted, error  # otherwise the traceback keeps them, and all that their frames hold


def is_one_word(text: str) -> bool:
    """Return whether a key or token has only characters that a header may have, and no space."""
    return text.isascii() and text.isprintable() and ' ' not in text


def unreadable_credentials(name: str, error: Exception) -> GranularError | None:
    """Return the error for a file or a program with credentials that cannot be read; None for other exceptions."""
    if not isinstance(error, OSError) or isinstance(error, TimeoutError | ConnectionError):
        return None
    file = '' if error.filename is None else f'{error.filename!r:.300}: '
    return AccessDeniedError(
        f'{name}: no credentials: {file}{hidden(error.strerror or str(error))}: the file or the program that '
        f'provides them cannot be used'
    )


def untrusted(name: str, detail: str) -> GranularError:
    """Return the error for a server that issues credentials, whose certificate is not trusted."""
    return AccessDeniedError(
        f'{name}: no credentials: {detail}: if its authority is that of a company or proxy, pass its file as '
        f'tls_verify='
    )


def _is_plain(error: Exception) -> bool:
    """Return whether the message for the class of an error says all that the error does."""
    return (
        isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError | IsADirectoryError)
        and error.errno is not None
        and error.strerror == os.strerror(error.errno)
    )


def _from_builtin(name: str, error: Exception) -> GranularError | None:
    for builtin, kind, message in _BY_TYPE:
        if isinstance(error, builtin):
            if (number := getattr(error, 'errno', None)) in _BY_ERRNO:
                kind, message = _BY_ERRNO[number]
            elif kind is AccessDeniedError and '://' not in name:
                message = (
                    f'access denied to user {os.geteuid()}: check the owner and mode of it and of the folders above it'
                )
            # The text of an OSError may repeat the path, strerror does not; other exceptions only have their text.
            detail = '' if _is_plain(error) else hidden(getattr(error, 'strerror', None) or str(error))
            return kind(f'{name}: {message} ({detail})' if detail else f'{name}: {message}')
    return None


def quote_body(body: bytes) -> str:
    """Return the beginning of a reply's body for error messages, without the credentials that a server may quote."""
    return repr(' '.join(hidden(body[:400].decode(errors='replace')).split())[:120]) if body else 'nothing'
