"""Answers to the names that arguments have in other libraries."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from granular.errors import InvalidArgumentError

P = ParamSpec('P')
R = TypeVar('R')


def answering(**answers: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a constructor answer names of arguments that it does not have.

    Args:
      answers: what to pass instead, by name.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if unknown := [name for name in kwargs if name in answers]:
                parts = '; '.join(f'for {name}, pass {answers[name]}' for name in unknown)
                owner = function.__qualname__.removesuffix('.__init__')
                raise InvalidArgumentError(f'{owner}: no arguments {unknown}: {parts}')
            return function(*args, **kwargs)

        return call

    return decorate
