"""The identity of an opened reader, which goes along when the reader is pickled, so that it is opened as the same."""

import platform
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from granular.aio.stores import Store
from granular.errors import ObjectChangedError

R = TypeVar('R')


class FileIdentity(NamedTuple):
    """A file of a reader.

    Attributes:
      size: its bytes.
      version: its version; None for an empty file of a store that gives empty files none.
    """

    size: int
    version: str | None


class Identity(NamedTuple):
    """What a reader has opened.

    Attributes:
      host: the machine, if versions mean something on it alone, as those of local files do; empty otherwise.
      files: by name.
    """

    host: str
    files: Mapping[str, FileIdentity]

    @classmethod
    def of(cls, store: Store, files: Mapping[str, FileIdentity]) -> 'Identity':
        """The identity of what was opened in a store."""
        return cls(platform.node() if store.local else '', files)

    def check(self, opened: 'Identity', name: str) -> None:
        """That a reader which was opened again has what it had.

        On another machine, local files are compared by their sizes, as a copy has other versions.

        Raises:
          ObjectChangedError: naming the first file that differs.
        """
        for file in sorted({*self.files, *opened.files}):
            before, now = self.files.get(file), opened.files.get(file)
            if before is not None and now is not None and self.host != opened.host:
                before, now = before._replace(version=None), now._replace(version=None)
            if before != now:
                raise ObjectChangedError(
                    f'{name}: it was replaced since the reader was pickled: {file} was {_said(before)} and is '
                    f'{_said(now)} now: open it anew'
                )


def _said(file: FileIdentity | None) -> str:
    return 'not there' if file is None else f'of {file.size} bytes in version {file.version}'


def reopened(kind: type[R], args: tuple[Any, ...], options: Mapping[str, Any], identity: Identity | None) -> R:
    """A reader that is to open what it was when it was pickled, if it was open."""
    reader: Any = kind(*args, **options)
    reader.expected = identity
    return reader  # type: ignore[no-any-return]
