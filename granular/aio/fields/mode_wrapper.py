"""Loading some fields of a dataset, and no others."""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, SupportsIndex

from numpy.typing import ArrayLike

from granular.aio.fields.fields import Ctx, check_fields, fields_of
from granular.aio.pipeline.describe import rendered
from granular.aio.pipeline.map_dataset import MapDataset
from granular.aio.pipeline.nodes.source import Fetching, Source
from granular.errors import InvalidArgumentError, UnknownKeyError
from granular.indexing import index_of, indices_of

_CTX: Final = 'ctx.'
_INDEX: Final = 'index'


class ModeWrapper:
    """Loads those fields of each sample that a mode names, in its order, and nothing else.

    A sample is the value of the field if there is one, and a tuple of them if there are several; with ``return_ctx``
    the pair of that and the sample's dict. A batch is loaded field by field; of a reader, in one fan-out over these
    keys. In memory are the samples of one fetch, and while iterating those that a stream reads ahead.

    Beside the fields of the dataset, ``index`` is the index of the sample, from 0 on, and ``ctx.name`` what the loaders
    have put into its dict under that name. Every sample has a fresh dict, whether it is returned or not, so that
    loaders need not ask; KappaData passes None if it is not.

    Args:
      dataset: a dataset of fields, a reader, whose fields are its keys, or a MapDataset of dicts.
      mode: names of fields with spaces between them, or a sequence of names. A name may come twice: it is loaded twice.
      return_ctx: whether a sample comes with its dict.

    Raises:
      UnknownKeyError: for a field that there is not; it names those that there are.
    """

    def __init__(self, dataset: Any, mode: str | Sequence[str], return_ctx: bool = False) -> None:
        self._fields = fields_of(dataset)
        self._items = tuple(mode.split() if isinstance(mode, str) else mode)
        if not self._items or not all(isinstance(item, str) for item in self._items):
            raise InvalidArgumentError(f'the mode is {mode!r}: want names of fields, such as "x y"')
        self._loaded = [item for item in self._items if item != _INDEX and not item.startswith(_CTX)]
        check_fields(self._fields, self._loaded, (_INDEX,))
        self._return_ctx = return_ctx

    @property
    def mode(self) -> str:
        """The names of the fields, with spaces between them."""
        return ' '.join(self._items)

    @property
    def return_ctx(self) -> bool:
        """Whether a sample comes with its dict."""
        return self._return_ctx

    @property
    def node(self) -> Source:
        """The source that pipelines and loaders read."""
        return _Loading(self)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        more = ', return_ctx=True' if self._return_ctx else ''
        return f'ModeWrapper({self._fields!r}, {self.mode!r}{more})'

    def __str__(self) -> str:
        return rendered(self.node)

    async def get(self, index: SupportsIndex | slice) -> Any:
        """A sample, or a list of them for a slice.

        Raises:
          OutOfRangeError: an ``IndexError``, for an index beyond what is there.
        """
        if isinstance(index, slice):
            return await self.fetch(indices_of(index, len(self), 'ModeWrapper'))
        return (await self.fetch([index_of(index, len(self), 'ModeWrapper')]))[0]

    async def fetch(self, indices: ArrayLike | slice) -> list[Any]:
        """Many samples, in the order asked, each field of all of them at once.

        Args:
          indices: a 1-D sequence of integers, in any order, repeated or negative; or a slice or range.
        """
        places = indices_of(indices, len(self), 'ModeWrapper')
        ctxs: list[Ctx] = [{} for _ in places]
        found = iter(await self._fields.load(self._loaded, places, ctxs) if self._loaded else [])
        columns = [
            places.tolist() if item == _INDEX else _kept(item, ctxs) if item.startswith(_CTX) else next(found)
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
        self._said = f'ModeWrapper({wrapper.mode!r}{", return_ctx=True" if wrapper.return_ctx else ""})'

    def describe(self) -> str:
        return self._said


def _kept(item: str, ctxs: Sequence[Ctx]) -> list[Any]:
    name = item.removeprefix(_CTX)
    for ctx in ctxs:
        if name not in ctx:
            raise UnknownKeyError(
                f'{item}: no loader has put {name!r} into the dict of the sample, which has {sorted(ctx)}'
            )
    return [ctx[name] for ctx in ctxs]
