"""Answers to the names that arguments and methods have in other libraries, or in another place of this one."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from granular.errors import InvalidArgumentError

Function = TypeVar('Function', bound=Callable[..., Any])


def answering(**answers: str) -> Callable[[Function], Function]:
    """Make a function, or a constructor, answer names of arguments that it does not have by what to pass instead."""

    def decorate(function: Function) -> Function:
        if isinstance(function, type):
            function.__init__ = decorate(function.__init__)  # type: ignore[misc]
            return function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if unknown := [name for name in kwargs if name in answers]:
                parts = '; '.join(f'for {name}, pass {answers[name]}' for name in unknown)
                owner = function.__qualname__.removesuffix('.__init__').replace('MapOperations', 'MapDataset')
                raise InvalidArgumentError(f'{owner}: no arguments {unknown}: {parts}')
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate


class Awaited:
    """Base of objects of the async API whose elements the sync API has by index."""

    if not TYPE_CHECKING:  # type checkers refuse an index by themselves

        def __getitem__(self, index):
            raise InvalidArgumentError(
                f'{type(self).__name__}: elements are awaited: use `await x.get({index!r:.50})`, `await x.fetch(...)` '
                f'or `async for`'
            )


class Elementless:
    """Base of datasets of fields, which have no elements, unless a subclass has a ``__getitem__`` of its own."""

    def __getitem__(self, index: Any) -> Any:
        mode = ' '.join(getattr(self, 'fields', None) or ('x', 'y'))
        raise InvalidArgumentError(
            f'{type(self).__name__} has fields, but no elements: load them with ModeWrapper(dataset, mode={mode!r})'
        )
