"""Base classes of the sync API: each object wraps an async counterpart in ``.aio`` and can be closed."""

import functools
import operator
import re
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar

from granular._support.other_names import refuse_unknown
from granular.aio.runtime.lifecycle import AsyncResource, Publishing, ensure_open
from granular.aio.runtime.portal import run, run_close
from granular.aio.runtime.tracebacks import shorten

A = TypeVar('A', bound=Any)
B = TypeVar('B', bound='Blocking')
S = TypeVar('S', bound='SyncObject[Any]')
P = ParamSpec('P')
R = TypeVar('R')
F = TypeVar('F', bound=Callable[..., Any])


_SPELLINGS: Final = (  # of the async API, and of the sync one
    (r'granular\.aio\.', 'granular.'),
    (r'await (\w+)\.get\((-?\w+)\)', r'\1[\2]'),
    (r'await ([A-Z]\w+)\.open\(', r'\1('),
    (r'async (with|for) ', r'\1 '),
    (r'await ', ''),
)


def sync_doc(thing: object) -> str:
    """Return the docstring of an object of the async API, with examples for the sync API."""
    doc = thing.__doc__ or ''
    for ours, theirs in _SPELLINGS:
        doc = re.sub(ours, theirs, doc)
    return doc


def documented_by(thing: object) -> Callable[[F], F]:
    """Give a function or method the docstring of its async counterpart, with examples for the sync API."""

    def decorate(function: F) -> F:
        function.__doc__ = sync_doc(thing)
        return function

    return decorate


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], immediate: bool = False
) -> Callable[Concatenate[Any, P], R]:
    """Make a sync method of an async one: it calls the method of that name of ``self.aio`` and waits for the result.

    The types, signature and docstring are those of the async method. It costs about 0.5 us a call more than a method
    that is written out. ``immediate`` is that of :func:`granular.aio.runtime.portal.run`.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            coroutine: Coroutine[Any, Any, R] = getattr(self.aio, name)(*args, **kwargs)
        except TypeError:
            refuse_unknown(method, (self, *args), kwargs, {})
            raise
        return run(coroutine, immediate=immediate)

    call.__doc__ = sync_doc(method)
    return call


def passed_on(member: Any) -> Any:
    """Make a property of the sync API of one of the async API, with its docstring; annotate it with its type."""
    return property(operator.attrgetter(f'aio.{member.fget.__name__}'), doc=sync_doc(member))


def constructing(core: Callable[P, Any]) -> Callable[[Callable[[Any], None]], Callable[Concatenate[Any, P], None]]:
    """Make the constructor of a ``Blocking`` class of that of its async counterpart, with its types and signature.

    It decorates an empty ``__init__``, because type checkers take no other assignment for a constructor. The class has
    the docstring of its counterpart, too, unless it has its own.
    """

    def decorate(_: Callable[[Any], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(getattr(core, '__init__'))  # noqa: B009 - which mypy refuses otherwise
        def construct(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            try:
                self._open(core(*args, **kwargs))
            except Exception as error:
                shorten(error)
                raise

        construct.__dict__['core'] = core
        return construct

    return decorate


class Blocking:
    """Base of the objects that block until their async counterpart has done the work."""

    aio: Any  # the async counterpart

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        core = getattr(cls.__init__, 'core', None)
        if core is not None and cls.__doc__ is None:
            cls.__doc__ = sync_doc(core)

    def _open(self, counterpart: Any) -> None:
        self.aio = counterpart

    def __len__(self) -> int:
        return len(self.aio)

    def __repr__(self) -> str:
        # The same in both APIs: pipelines describe their sources by it, so that a state fits readers of either.
        return repr(self.aio)


def wrapping(kind: type[B], counterpart: Any) -> B:
    """Return an object of the sync API, given its async counterpart, which opens when it is first used."""
    wrapped = kind.__new__(kind)
    wrapped.aio = counterpart
    return wrapped


class SyncObject(Blocking, Generic[A]):
    """Base of objects that open when they are constructed."""

    aio: A

    def _open(self, counterpart: A) -> None:
        self.aio = counterpart
        try:
            run(ensure_open(counterpart), immediate=self._changes_nothing)
        except BaseException:
            run(counterpart.abort(), immediate=self._changes_nothing)  # an interrupt may have come after it was opened
            raise

    closed: bool = passed_on(AsyncResource.closed)

    @property
    def _changes_nothing(self) -> bool:
        return not isinstance(self.aio, Publishing)

    def close(self) -> None:
        """Close the object. Closing it again has no effect."""
        if self._changes_nothing:
            run_close(self.aio.aclose())
        else:
            run(self.aio.aclose())  # what a writer publishes is awaited in any case

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            run(self.aio.aclose() if kind is None else self.aio.abort(), immediate=self._changes_nothing)
        except BaseException:
            run(self.aio.abort(), immediate=self._changes_nothing)  # an interrupt may have come before it was closed
            raise


class Batched:
    """Batch access under the names that PyTorch and Grain look for."""

    def fetch(self, indices: Any) -> list[Any]:
        """Return the elements at many indices, in the order requested, with concurrent reads."""
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:  # PyTorch's DataLoader gets a batch by it
        return self.fetch(indices)

    _getitems = __getitems__  # and Grain's loaders by this


def reopened(kind: type[S], counterpart: Any) -> S:
    """Return an open object of the sync API, given its async counterpart."""
    opened = kind.__new__(kind)
    opened._open(counterpart)
    return opened
