"""The functions of the sync API: each calls its async counterpart and waits for the result."""

import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, ParamSpec, TypeVar

from granular._support.other_names import answering
from granular.aio.conversion import convert as conversion
from granular.aio.conversion import local_copy
from granular.aio.conversion import rewrite as rewriting
from granular.aio.datasets import build_index as indexing
from granular.aio.datasets import clean as cleaning
from granular.aio.datasets import verify as verification
from granular.aio.paths.pure import AnyPath
from granular.aio.pipeline import spec
from granular.aio.pipeline.loader import checkpoints
from granular.aio.pipeline.shards import ShardOptions
from granular.aio.runtime.portal import run
from granular.sync.base import documented_by, sync_doc
from granular.sync.path import Path

P = ParamSpec('P')
R = TypeVar('R')


def _blocking(function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, R]:
    """Make a sync function of an async one, with its types, signature and docstring."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return run(function(*args, **kwargs))

    call.__module__, call.__doc__ = __name__, sync_doc(function)
    return call


build_index: Final = _blocking(indexing.build_index)
clean: Final = _blocking(cleaning.clean)
convert: Final = _blocking(conversion.convert)
copy_to_local: Final = _blocking(local_copy.copy_to_local)
get_element_spec: Final = _blocking(spec.get_element_spec)
load_state: Final = _blocking(checkpoints.load_state)
rewrite: Final = _blocking(rewriting.rewrite)
verify: Final = _blocking(verification.verify)


@answering()
@documented_by(checkpoints.save_state)
def save_state(directory: AnyPath, state: Mapping[str, Any], process: ShardOptions | None = None) -> Path:
    return Path(run(checkpoints.save_state(directory, state, process)))
