"""Names that the user gives: of the classes of a key, and of functions that return the text of its tokens."""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from granular.errors import DecodeError, InvalidArgumentError
from granular.formats.codecs.arrays import array_of, dtype_text
from granular.view.kinds import MAGIC, family_of
from granular.view.previews import CHARS, LINE, array_head, detail, head_size, line
from granular.view.sources import Value, reason

Detokenize = Callable[[list[int]], str]

_MANY: Final = 100_000  # classes


class Names:
    """Shows values, with the names that the user gave; raise ``InvalidArgumentError`` if a file or function is missing.

    Args:
      classes: by key, a file with the name of a class in each line: the first is class 0.
      tokenizers: by key, ``MODULE:FUNCTION``, which returns the text of a list of tokens.
    """

    def __init__(self, classes: dict[str, str] | None = None, tokenizers: dict[str, str] | None = None) -> None:
        self.classes = {key: _read_classes(path) for key, path in (classes or {}).items()}
        self.tokenizers = {key: _import_function(name) for key, name in (tokenizers or {}).items()}

    def family(self, key: str, kind: str) -> str:
        """Return how the values of a key are shown: tokens are text."""
        return 'text' if key in self.tokenizers and kind == 'array' else family_of(kind)

    def name(self, key: str, value: Any) -> str:
        names = self.classes.get(key, ())
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else ''

    def head_size(self, key: str, value: Value, most: int) -> int:
        """Return how many bytes of a value are read to describe it."""
        return min(value.size, most) if key in self.tokenizers else head_size(value, most)

    def line(self, key: str, value: Value, head: bytes) -> dict[str, Any]:
        """Return a value as a line, as ``previews.line`` does, with the ``name`` of a class."""
        return self._named(key, value, head, line(value, head[:LINE]), CHARS)

    def detail(self, key: str, value: Value, head: bytes) -> dict[str, Any]:
        """Return a value with all of its text, as ``previews.detail`` does."""
        out = self._named(key, value, head, detail(value, head), None)
        return {**out, 'full': out['text'], 'cut': len(head) < value.size} if 'tokens' in out else out

    def _named(self, key: str, value: Value, head: bytes, out: dict[str, Any], chars: int | None) -> dict[str, Any]:
        if key in self.classes and family_of(value.kind) == 'number' and 'text' in out:
            text = out['text']
            out['name'] = self.name(key, int(text)) if text.lstrip('-').isdigit() else ''
        if key in self.tokenizers and family_of(value.kind, head[:MAGIC], value.size) == 'array' and 'text' in out:
            try:
                text = self.text(key, head, value.size)[:chars]
                return {**out, 'family': 'text', 'tokens': out['text'], 'text': text}
            except Exception as error:  # a user's function may raise anything: the other values are shown
                return {**out, 'error': reason(error)}
        return out

    def text(self, key: str, head: bytes, size: int) -> str:
        """Return the text of an encoded array of tokens, or of those in its first bytes."""
        dtype, _, start = array_head(head, size)
        if dtype.kind not in 'iu':
            raise DecodeError(f'tokenizer of {key!r}: expected an array of integers, got {dtype}')
        count = (len(head) - start) // dtype.itemsize
        tokens = array_of(dtype_text(dtype), [count], head[start : start + count * dtype.itemsize])
        return str(self.tokenizers[key](np.asarray(tokens).tolist()))


def _read_classes(path: str) -> Sequence[str]:
    try:
        with open(os.path.expanduser(path), encoding='utf-8-sig') as file:
            names = [line.removesuffix('\n') for line in file]  # splitlines() divides them also at other characters
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f'{path}: expected a file with the name of a class in each line: {error}') from error
    if len(names) > _MANY:
        raise InvalidArgumentError(f'{path}: expected at most {_MANY:,} classes, got {len(names):,}')
    return names


def _import_function(name: str) -> Detokenize:
    module, _, function = name.partition(':')
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as ``python -m`` does, but behind what is installed
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:  # a module may raise anything
        raise InvalidArgumentError(
            f'{name}: expected MODULE:FUNCTION, in this folder or installed: {error!r}'
        ) from error
    if not callable(found):
        raise InvalidArgumentError(f'{name}: expected a function, got {found!r:.80}')
    return found  # type: ignore[no-any-return]
