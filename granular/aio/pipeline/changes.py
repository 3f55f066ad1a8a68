"""Changes of a pipeline, and their declarations, which are the public module :mod:`granular.changes`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from granular.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class RowLength:
    """Another length of the rows of a ``pack`` of a stream.

    ``concat_then_split`` continues at the exact token. Other strategies continue where no row of the last pack was
    given out, and are refused elsewhere. Planned rows of a MapDataset are refused: let an epoch end, and call
    ``set_next_index`` with the first row of the next one.

    ::

        changes = [granular.changes.RowLength({'tokens': 4096})]  # of load_state_dict

    Args:
      length: the new lengths, as ``pack`` has them.
    """

    length: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """Another size of the batches of a MapDataset, whose state is a number of batches.

    It is refused if the elements that were taken are no multiple of the new size. A stream that ends with ``batch``,
    and a Loader, continue with another size without a declaration.

    ::

        changes = [granular.changes.BatchSize(128)]  # of load_state_dict

    Args:
      batch_size: the new size.
    """

    batch_size: int


@dataclasses.dataclass(frozen=True)
class AugmentationSeed:
    """Another seed of a ``random_map``, from the next element on. The order of a shuffle stays.

    ::

        changes = [granular.changes.AugmentationSeed(7)]  # of load_state_dict

    Args:
      seed: the new seed.
    """

    seed: int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Grown:
    """A source that has more datapoints, from the next epoch on.

    The state must be at the end of an epoch of it. Within an epoch, and of a pack that holds some, copy the
    former datapoints by ``granular.rewrite(..., keep=range(n))``, declare :class:`Moved`, and mix the new ones as a
    stream that is :class:`Added`.

    ::

        changes = [granular.changes.Grown('Web', 150_000)]  # of load_state_dict

    Args:
      source: the description of the source, as a state has it.
      elements: the new number of its datapoints.
    """

    source: str
    elements: int


@dataclasses.dataclass(frozen=True)
class Moved:
    """A source at another address, such as a copy of the dataset, with as many datapoints and bytes.

    With other values, which have other bytes, continue by ``set_next_index``, without the state.

    ::

        changes = [granular.changes.Moved("DatasetReader('./copy')")]  # of load_state_dict

    Args:
      source: the new description of the source, as an error or ``describe_state`` names it.
    """

    source: str


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A function with another name, which returns the same elements.

    ::

        changes = [granular.changes.Renamed('map(tokenize_text)')]  # of load_state_dict

    Args:
      stage: the new description of the stage.
    """

    stage: str


@dataclasses.dataclass(frozen=True)
class Excluded:
    """Other datapoints that :meth:`granular.MapDataset.exclude` leaves out, of those that follow.

    What a stage holds must be the same when it is read again: a datapoint of a pack of which rows were given out is
    refused.

    ::

        changes = [granular.changes.Excluded()]  # of load_state_dict
    """


@dataclasses.dataclass(frozen=True)
class Removed:
    """A stream that ``IterDataset.mix`` of names does not have any more. No later stage may hold elements of it.

    ::

        changes = [granular.changes.Removed('books')]  # of load_state_dict

    Args:
      name: its name in the mix.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Added:
    """A stream that ``IterDataset.mix`` of names did not have: it begins.

    ::

        changes = [granular.changes.Added('code')]  # of load_state_dict

    Args:
      name: its name in the mix.
    """

    name: str


_KINDS: Final = (RowLength, BatchSize, AugmentationSeed, Grown, Moved, Renamed, Excluded, Removed, Added)


def declared(changes: Any) -> tuple[Any, ...]:
    """Return declared changes; raise ``InvalidArgumentError`` unless they are a sequence of those of this module."""
    example = 'expected a list such as changes=[granular.changes.Excluded()]'
    if isinstance(changes, str) or not isinstance(changes, Iterable):
        raise InvalidArgumentError(f'changes: {example}, got {changes!r:.100}')
    found = tuple(changes)
    for change in found:
        if not isinstance(change, _KINDS):
            raise InvalidArgumentError(f'changes: {example}, got {change!r:.100} in it')
    return found


def declaration(changes: Sequence[Any]) -> str:
    """Return the argument that declares changes."""
    return f'changes=[{", ".join(f"granular.changes.{change!r}" for change in changes)}]'
