"""The sync API of :mod:`granular.aio.datasources.token_windows`."""

from collections.abc import Iterator
from typing import Any, SupportsIndex, overload

import numpy as np

from granular.aio.datasources import token_windows as core
from granular.aio.runtime.bridge import run
from granular.sync.base import Batched, Reader, blocking, constructing, passed_on, sync_doc
from granular.sync.iteration import Iteration


class TokenWindows(Reader[core.TokenWindows, core.Window], Batched):
    __doc__ = sync_doc(core.TokenWindows)

    aio: core.TokenWindows

    @constructing(core.TokenWindows)
    def __init__(self) -> None: ...

    dtype: np.dtype[Any] = passed_on(core.TokenWindows.dtype)

    @overload
    def get(self, index: SupportsIndex) -> core.Window: ...
    @overload
    def get(self, index: slice | range) -> list[core.Window]: ...
    def get(self, index: SupportsIndex | slice | range) -> Any:
        """Return the window at an index, negative from the end, or the windows of a slice; like ``windows[index]``.

        Raises:
          OutOfRangeError: an ``IndexError``.
        """
        return run(self.aio.get(index))

    __getitem__ = get

    fetch = blocking(core.TokenWindows.fetch)

    def __iter__(self) -> Iterator[core.Window]:
        return Iteration(self.aio.__aiter__)
