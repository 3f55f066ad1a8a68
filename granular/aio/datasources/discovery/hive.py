"""Columns in the names of folders, such as ``day=3``, as ``pyarrow.dataset`` gives them (``partitioning='hive'``)."""

import re
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from granular.errors import InvalidArgumentError

_NULL: Final = '__HIVE_DEFAULT_PARTITION__'
_INTEGER: Final = re.compile('-?[0-9]+')
_LIMITS: Final = np.iinfo(np.int32)


def partitions_of(relatives: Sequence[str]) -> dict[str, list[Any]]:
    """Return the columns in the names of the folders of files, with a value for each file.

    Values are int32 if all of a column are, and otherwise text; None for a file without the folder.
    """
    found = [_keys_of(relative) for relative in relatives]
    names = dict.fromkeys(name for keys in found for name in keys)
    return {name: _typed([keys.get(name) for keys in found]) for name in names}


def _keys_of(relative: str) -> Mapping[str, str | None]:
    keys: dict[str, str | None] = {}
    for part in relative.split('/')[:-1]:
        name, is_key, value = part.partition('=')
        if is_key:
            name = _decoded(name, relative)
            if name in keys:
                raise InvalidArgumentError(f'{relative}: names the column {name!r} twice: pass hive=False')
            keys[name] = None if value == _NULL else _decoded(value, relative)
    return keys


def _decoded(text: str, relative: str) -> str:
    try:
        return urllib.parse.unquote(text, errors='strict')
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f'{relative}: {text!r} is not UTF-8: {error}: pass hive=False') from error


def _typed(values: list[str | None]) -> list[Any]:
    texts = [value for value in values if value is not None]
    if all(_INTEGER.fullmatch(text) and _LIMITS.min <= int(text) <= _LIMITS.max for text in texts):
        return [None if value is None else np.int32(value) for value in values]
    return list(values)
