"""ModeWrapper loads selected fields of a dataset."""

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Final, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike

from granular._support.indexing import index_of, indices_of
from granular._support.other_names import Awaited
from granular.aio.pipeline.describe import format_pipeline
from granular.aio.pipeline.fields.fields import fields_of, original
from granular.aio.pipeline.fields.interface import ALL, MANY, ONE, Ctx, check_fields, load_fields
from granular.aio.pipeline.fields.navigation import Disposable
from granular.aio.pipeline.map_dataset import MapDataset
from granular.aio.pipeline.nodes.adapters import Fetching
from granular.aio.pipeline.nodes.source import Source
from granular.errors import InvalidArgumentError, UnknownKeyError

_CTX: Final = 'ctx.'
_INDEX: Final = 'index'


class ModeWrapper(Awaited, Disposable):
    """Load the fields that a mode names, in its order, and no other fields.

    ::

        dataset = ModeWrapper(reader, mode='index image label')
        index, image, label = await dataset.get(0)

    A datapoint is the value of the field if the mode names one field, and a tuple of values otherwise; with
    ``return_ctx``, it is a pair of this and the dict (``ctx``) of the datapoint. A batch is loaded field by field; from
    a reader, in one fan-out over these keys. Memory: the datapoints of one fetch, and during iteration the read-ahead
    of the stream.

    Besides the fields of the dataset, a mode may name ``index``, the index of the datapoint counted from 0, and
    ``ctx.name``, the value that field methods stored in the dict under that name. Every datapoint has a new dict,
    returned or not, so that methods can rely on it; KappaData passes None if the dict is not returned.

    Attributes:
      dataset: the wrapped dataset, as it was passed.

    Args:
      dataset: a dataset of fields, a reader, whose fields are its keys, or a MapDataset of dicts.
      mode: field names separated by spaces, or a sequence of names. A repeated name is loaded repeatedly.
      return_ctx: True to return the dict with each datapoint.

    Raises:
      UnknownKeyError: if a field does not exist; the message lists the existing ones.
    """

    def __init__(self, dataset: Any, mode: str | Sequence[str], return_ctx: bool = False) -> None:
        self._fields = fields_of(dataset)
        self.dataset = original(dataset)
        self._items = tuple(mode.split() if isinstance(mode, str) else mode if isinstance(mode, Iterable) else ())
        if not self._items or not all(isinstance(item, str) for item in self._items):
            raise InvalidArgumentError(f'mode: expected names of fields, such as "x y", got {mode!r}')
        self._loaded = [item for item in self._items if item != _INDEX and not item.startswith(_CTX)]
        check_fields(self._fields, self._loaded, (_INDEX,))
        self._return_ctx = return_ctx

    @property
    def mode(self) -> str:
        """Field names, separated by spaces."""
        return ' '.join(self._items)

    @property
    def return_ctx(self) -> bool:
        """True if each datapoint is returned with its dict."""
        return self._return_ctx

    @property
    def node(self) -> Source:
        """The source for pipelines and loaders."""
        return _Loading(self)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        more = ', return_ctx=True' if self._return_ctx else ''
        return f'ModeWrapper({self._fields!r}, {self.mode!r}{more})'

    def __str__(self) -> str:
        return format_pipeline(self.node)

    def _wraps(self) -> Sequence[Any]:
        return (self.dataset,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith('_') or name == 'dataset':
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        if name.startswith((ONE, MANY, ALL)):
            return getattr(self._fields, name)
        return self._inherited(name)

    async def get(self, index: SupportsIndex | slice | Sequence[SupportsIndex]) -> Any:
        """Return a datapoint, or a list of datapoints for a slice or a list of indices.

        Raises:
          OutOfRangeError: an ``IndexError``, if the index is out of range.
        """
        if isinstance(index, slice | Sequence) or (isinstance(index, np.ndarray) and index.ndim):
            return await self.fetch(indices_of(index, len(self), 'ModeWrapper'))
        return (await self.fetch([index_of(index, len(self), 'ModeWrapper')]))[0]

    async def fetch(self, indices: ArrayLike | slice) -> list[Any]:
        """Return many datapoints, in the order of the indices, loading each field for all of them at once.

        Args:
          indices: a 1-D sequence of integers in any order, repeated or negative; or a slice or range.
        """
        positions = indices_of(indices, len(self), 'ModeWrapper')
        ctxs: list[Ctx] = [{} for _ in positions]
        loaded = iter(await load_fields(self._fields, self._loaded, positions, ctxs) if self._loaded else [])
        columns = [
            positions.tolist() if item == _INDEX else _ctx_values(item, ctxs) if item.startswith(_CTX) else next(loaded)
            for item in self._items
        ]
        samples = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
        return list(zip(samples, ctxs, strict=True)) if self._return_ctx else samples

    def __aiter__(self) -> AsyncIterator[Any]:
        stream: Any = MapDataset.source(self).to_iter_dataset(allow_nones=True)
        return aiter(stream)


class _Loading(Fetching):
    """A ModeWrapper as a stage of a pipeline."""

    def __init__(self, wrapper: ModeWrapper) -> None:
        super().__init__(wrapper)
        self.parents: tuple[Any, ...] = (wrapper._fields,)
        self._description = f'ModeWrapper({wrapper.mode!r}{", return_ctx=True" if wrapper.return_ctx else ""})'

    def describe(self) -> str:
        return self._description


def _ctx_values(item: str, ctxs: Sequence[Ctx]) -> list[Any]:
    name = item.removeprefix(_CTX)
    for ctx in ctxs:
        if name not in ctx:
            raise UnknownKeyError(
                f'{item}: no field method stored {name!r} in the dict of the datapoint, which contains {list(ctx)}'
            )
    return [ctx[name] for ctx in ctxs]
