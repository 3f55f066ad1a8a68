"""Answers to the names that arguments and methods have in other libraries, or in another place of this one."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from granular.errors import InvalidArgumentError

Function = TypeVar('Function', bound=Callable[..., Any])


def answering(**answers: str) -> Callable[[Function], Function]:
    """Make a function, or the constructor of a class, answer names of arguments that it does not have.

    Args:
      answers: what to pass instead, by name.
    """

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


BATCH_ARGUMENTS = {
    'drop_last': 'drop_remainder',
    'collate_fn': 'batch_fn',
    'shuffle': 'nothing, and call shuffle(seed=0) of a MapDataset before batch',
}
SHARD_ARGUMENTS = {
    **dict.fromkeys(('rank', 'index', 'shard_id', 'process_index'), 'shard_index'),
    **dict.fromkeys(('world_size', 'num_replicas', 'num_shards', 'process_count'), 'shard_count'),
    'drop_last': 'drop_remainder',
}
RANK_ARGUMENTS = dict.fromkeys(
    ('rank', 'world_size', 'num_replicas', 'shard_index', 'shard_count'),
    'shard_options=granular.ShardOptions(rank, world_size), or granular.ShardByTorchRank()',
)


class Answering:
    """A class that answers names of methods that it does not have."""

    _answers: ClassVar[Mapping[str, str]] = {}
    """What to write instead, by name."""

    if not TYPE_CHECKING:  # type checkers would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            answer = f': {self._answers[name]}' if name in self._answers else ''
            raise AttributeError(
                f'{type(self).__name__!r} object has no attribute {name!r}{answer}', name=name, obj=self
            )


class Elementless:
    """Base of datasets of fields, which have no elements, unless a subclass has a ``__getitem__`` of its own."""

    def __getitem__(self, index: Any) -> Any:
        mode = ' '.join(getattr(self, 'fields', None) or ('x', 'y'))
        raise InvalidArgumentError(
            f'{type(self).__name__} has fields, but no elements: load them with ModeWrapper(dataset, mode={mode!r})'
        )


STREAMS_ALONE = dict.fromkeys(
    ('limit', 'rebatch', 'cache', 'pack', 'interleave', 'prefetch', 'mp_prefetch'), 'call to_iter_dataset() before it'
)
DATASETS_ALONE = dict.fromkeys(
    (
        'select',
        'slice',
        'subset',
        'percent',
        'filter_classes',
        'oversample',
        'concatenate',
        'fetch',
        'get',
        'to_iter_dataset',
    ),
    'call it before to_iter_dataset()',
)
ITERATORS_ALONE = dict.fromkeys(
    ('get_state', 'set_state', 'state_dict', 'load_state_dict', 'set_next_index', 'stats', 'errors', 'close'),
    'it belongs to an iterator: `with iter(stream) as iterator`',
)
