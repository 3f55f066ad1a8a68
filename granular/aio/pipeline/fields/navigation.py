"""Navigation from a dataset of fields to the datasets that it wraps, under the names of KappaData."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any, Final, Self

from granular._support.other_names import Answering
from granular.aio.runtime.lifecycle import AsyncResource
from granular.aio.runtime.threads import call_or_await
from granular.errors import InvalidArgumentError, UnknownKeyError

_SHAPE: Final = 'getshape_'
_DIM: Final = 'getdim_'
# A data source is recognised by these names: passed on, they would read the wrapped dataset in place of its wrapper.
_PROTOCOL: Final = frozenset({'aio', 'endless', 'fetch', 'get', 'node', 'parents', 'seed', 'select', 'sparse'})


class Nested:
    """A dataset of fields, as the outermost of a chain of datasets."""

    def _wraps(self) -> Sequence[Any]:
        """Return the wrapped datasets, as the user passed them; none for the dataset that a chain begins with."""
        return ()

    def _listed(self) -> bool:
        """Return whether this is a wrapper, for ``all_wrappers``."""
        return True

    @property
    def root_dataset(self) -> Any:
        """The innermost dataset, for example a reader; that of the first dataset, if several are concatenated."""
        wrapped = self._wraps()
        return getattr(wrapped[0], 'root_dataset', wrapped[0]) if wrapped else self

    @property
    def all_wrappers(self) -> list[Any]:
        """All wrappers from the outermost one to the innermost one."""
        inner = [wrapper for dataset in self._wraps() for wrapper in getattr(dataset, 'all_wrappers', ())]
        return [self, *inner] if self._listed() else inner

    @property
    def all_wrapper_types(self) -> list[type]:
        """The classes of ``all_wrappers``."""
        return [type(wrapper) for wrapper in self.all_wrappers]

    def has_wrapper(self, wrapper: Any) -> bool:
        """Return whether an object is one of ``all_wrappers``."""
        return any(one is wrapper for one in self.all_wrappers)

    def has_wrapper_type(self, wrapper_type: type) -> bool:
        """Return whether one of ``all_wrappers`` is of exactly this class."""
        return wrapper_type in self.all_wrapper_types

    def get_wrappers_of_type(self, wrapper_type: type) -> list[Any]:
        """Return those of ``all_wrappers`` that are of exactly this class."""
        return [wrapper for wrapper in self.all_wrappers if type(wrapper) is wrapper_type]

    def get_wrapper_of_type(self, wrapper_type: type) -> Any:
        """Return the wrapper of exactly this class, or None; raise ``InvalidArgumentError`` if there are several."""
        wrappers = self.get_wrappers_of_type(wrapper_type)
        if len(wrappers) > 1:
            raise InvalidArgumentError(
                f'{self!r}: expected one {wrapper_type.__name__}, got {len(wrappers)}: use get_wrappers_of_type'
            )
        return wrappers[0] if wrappers else None

    def getshape(self, kind: str) -> tuple[int, ...]:
        """Return the shape of a field, for example ``(10,)`` for one of ten classes: the result of ``getshape_kind()``.
        Raise ``UnknownKeyError`` if no dataset defines that method.
        """
        method = getattr(self, f'{_SHAPE}{kind}', None)
        if method is None:
            raise UnknownKeyError(f'{self!r}: unknown shape of {kind!r}: expected a method {_SHAPE}{kind}')
        shape: tuple[int, ...] = method()
        return shape

    def getdim(self, kind: str) -> int:
        """Return the only dimension of a field's shape, for example the number of classes; like ``getdim_kind()``.
        Raise ``InvalidArgumentError`` if the shape has several dimensions.
        """
        shape = self.getshape(kind)
        if not isinstance(shape, tuple) or len(shape) != 1:
            raise InvalidArgumentError(f'{_SHAPE}{kind}: expected a tuple of one dimension, got {shape!r:.100}')
        return shape[0]

    def _inherited(self, name: str) -> Any:
        """Return an attribute of the first wrapped dataset that has it; of readers and pipelines no methods."""
        if name.startswith(_DIM) and hasattr(self, _SHAPE + name.removeprefix(_DIM)):
            return functools.partial(self.getdim, name.removeprefix(_DIM))
        if not name.startswith('_') and name not in _PROTOCOL:
            for dataset in self._wraps()[:1]:
                value = getattr(dataset, name, self)
                if value is not self and (_has_methods(dataset) or not callable(value)):
                    return value
        raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')


class Disposable(Answering, Nested):
    """A dataset of fields whose end is that of the datasets that it wraps."""

    async def dispose(self) -> None:
        """Dispose of the wrapped datasets: close those that are readers."""
        for dataset in self._wraps():
            await dispose_of(dataset)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.dispose()


async def dispose_of(dataset: Any) -> None:
    """Release the resources of a dataset: by its ``dispose``, or by closing it."""
    core = inspect.getattr_static(dataset, 'aio', dataset)  # bypass __getattr__, which may delegate to another object
    if isinstance(core, AsyncResource):
        await core.aclose()
        return
    target = core if isinstance(core, Nested) else dataset
    method = getattr(target, 'dispose', getattr(target, 'close', None))
    if method is not None:
        await call_or_await(method)


def _has_methods(dataset: Any) -> bool:
    return isinstance(dataset, Nested) or any(name.startswith('getitem_') for name in dir(dataset))
