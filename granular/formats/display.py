"""Descriptions of datapoints in HTML, for notebooks. All text in them is escaped."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from granular._support.lazy import import_if_installed
from granular.formats.codecs.images import encode_image

_SIDE: Final = 96  # pixels of a thumbnail
_TEXT: Final = 80  # characters of a value
_PARTS: Final = 4  # entries of a list

T = TypeVar('T')


class Samples(list[T]):
    """A list of datapoints or records that notebooks show as a table, with thumbnails of images."""

    def _repr_html_(self) -> str:
        return html_table(self)


def html_table(datapoints: Sequence[Any]) -> str:
    rows = [datapoint if isinstance(datapoint, Mapping) else {'record': datapoint} for datapoint in datapoints]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = ''.join(f'<th>{_text(key)}</th>' for key in keys)
    cells = ([_value(row[key]) if key in row else '' for key in keys] for row in rows)
    body = ''.join(f'<tr>{"".join(f"<td>{cell}</td>" for cell in row)}</tr>' for row in cells)
    return f'<table><tr>{head}</tr>{body}</table>'


def html_summary(title: str, facts: Iterable[tuple[str, Any]], datapoints: Sequence[Any]) -> str:
    rows = ''.join(f'<tr><th>{_text(name)}</th><td>{_fact(name, value)}</td></tr>' for name, value in facts)
    return f'<p><b>{_text(title)}</b></p><table>{rows}</table>{html_table(datapoints) if datapoints else ""}'


def html_lines(text: str) -> str:
    return f'<pre>{html.escape(text)}</pre>'


def _fact(name: str, value: Any) -> str:
    text = f'{value:,}' if isinstance(value, int) else str(value)
    return html.escape(f'{text} bytes' if name == 'size' else text)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return html.escape(text if len(text) <= _TEXT else f'{text[:_TEXT]}…')


def _value(value: Any) -> str:
    if isinstance(value, np.ndarray):
        image = value.dtype == np.uint8 and value.size > 0 and (value.ndim == 2 or value.shape[2:] in ((3,), (4,)))
        if image and import_if_installed('PIL.Image') is not None:
            return _thumbnail(value)
        return _text(f'{value.dtype} of shape {value.shape}')
    if isinstance(value, bytes):
        return _text(f'{len(value)} bytes')
    if isinstance(value, list) and len(value) > 1:
        return f'{len(value)} values: {_value(value[0])}, …'
    return _text(value)


def _thumbnail(image: NDArray[Any]) -> str:
    step = -(-max(image.shape[:2]) // _SIDE)
    data = base64.b64encode(encode_image(np.ascontiguousarray(image[::step, ::step]), format='png')).decode()
    return f'<img src="data:image/png;base64,{data}" title="{image.shape[1]} by {image.shape[0]}">'


def outline(value: Any) -> str:
    """Describe an element in one line: arrays by dtype and shape, other values by the beginning of their text."""
    if isinstance(value, Mapping):
        return f'{{{", ".join(f"{key!r}: {outline(part)}" for key, part in value.items())}}}'
    if isinstance(value, list | tuple):
        parts = ', '.join(outline(part) for part in value[:_PARTS]) + (', ...' if len(value) > _PARTS else '')
        return f'[{parts}]' if isinstance(value, list) else f'({parts})'
    if getattr(value, 'shape', ()):
        return f'{value.dtype}{list(value.shape)}'
    return f'{value!r:.60}'
