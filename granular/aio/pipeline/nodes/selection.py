"""Selection of datapoints by class: labels are read once, through their field, and only the indices are stored."""

import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np

from granular._support.indexing import Ints, check_field
from granular._support.text import logger
from granular.aio.pipeline import filters
from granular.aio.pipeline.nodes.combinations import Concatenate
from granular.aio.pipeline.nodes.elements import Element, selected
from granular.aio.pipeline.nodes.indices import Repeat, Seeded, Slice, Wrapped, check_finite
from granular.aio.pipeline.nodes.source import Source
from granular.aio.runtime.threads import offload
from granular.errors import InvalidArgumentError

_PAGE: Final = 1 << 17  # labels per fan-out
_LISTED: Final = 10  # classes to list in a description; more consecutive integers are shown as a range

_labels: weakref.WeakKeyDictionary[Source, dict[Any, filters.Labels]] = weakref.WeakKeyDictionary()


class ClassSelection(Slice):
    """Datapoints selected by their labels: in all epochs those of the first one, if the order of the source changes."""

    keeps_turns = False  # those of one class may all be of one dataset

    def __init__(self, parent: Source, part: Ints, description: str) -> None:
        super().__init__(parent, part)
        self.passes_epochs = False  # it chooses in the first one, or there are no others
        self._description, self._recurs = description, _recurs(parent)

    def _lookup(self, indices: Ints) -> Ints:
        return super()._lookup(indices if self._recurs or not len(self) else indices % len(self))

    def describe(self) -> str:
        return self._description


def warn_of_other_elements(source: Source) -> None:
    """Log a warning for each selection of a source that has other elements in each epoch."""
    if isinstance(source, Slice) and (stage := source.varying()) is not None:
        logger.warning(
            'repeat: %s is a selection behind %s, and has other elements in each epoch: slice before shuffle',
            source.describe(),
            stage.describe(),
        )
        return
    for parent in source.parents if source.passes_epochs else ():
        warn_of_other_elements(parent)


async def filtered(
    node: Source, field: Any, valid_classes: Any, invalid_classes: Any, labels: filters.Labels | None = None
) -> ClassSelection:
    """Select the datapoints of some classes, given the labels or by reading them."""
    description = f'filter_classes({field!r}, {describe_classes(valid_classes, invalid_classes)})'
    return await _chosen(node, field, labels, description, filters.by_class, valid_classes, invalid_classes)


async def oversampled(
    node: Source, field: Any, strategy: filters.Strategy, unlabeled: Any, labels: filters.Labels | None = None
) -> ClassSelection:
    """Repeat the datapoints of rare classes, given the labels or by reading them."""
    description = f'oversample({field!r}, {strategy!r}{describe_unlabeled(unlabeled)})'
    return await _chosen(node, field, labels, description, filters.oversampled, strategy, unlabeled)


async def _chosen(
    node: Source, field: Any, labels: filters.Labels | None, description: str, choose: Any, *args: Any
) -> ClassSelection:
    if labels is None:
        labels = await labels_of(node, field)
    indices = await offload(choose, labels, *args, field)
    chosen = ClassSelection(node, indices, description)
    _labels[chosen] = {field: labels[indices]}
    return chosen


def describe_unlabeled(label: Any) -> str:
    """Describe the label of datapoints without a class, for a printed pipeline; '' for the usual one."""
    return '' if label == -1 else f', unlabeled={label!r}'


def describe_classes(valid_classes: Any, invalid_classes: Any) -> str:
    """Describe a choice of classes, for a printed pipeline."""
    valid, classes = filters.chosen_classes(valid_classes, invalid_classes)
    listed: list[Any] = classes.tolist()
    whole = len(listed) > _LISTED and classes.dtype.kind == 'i' and listed[-1] - listed[0] == len(listed) - 1
    shown = range(listed[0], listed[-1] + 1) if whole else listed
    return f'{"" if valid else "in"}valid_classes={shown}'


async def labels_of(node: Source, field: Any) -> filters.Labels:
    """Return the labels of one epoch; they are read once per node."""
    check_finite(node, 'selection by class', 'select classes before repeat()')
    if node.sparse:
        raise InvalidArgumentError('elements removed by a filter have no class: select classes before filter()')
    labels_by_field = _labels.setdefault(node, {})
    if check_field(field) not in labels_by_field:
        source = selected(node, [field])

        async def read(indices: Ints) -> list[Any]:
            return [datapoint[field] for datapoint in await source.fetch(indices)]

        labels_by_field[field] = await read_labels(read, len(node), str(field))
    return labels_by_field[field]


async def read_labels(
    read: Callable[[Ints], Coroutine[Any, Any, list[Any]]], length: int, field: str
) -> filters.Labels:
    """Read all labels, 131,072 per fan-out. Memory: the raw labels of one fan-out, and 8 bytes per integer label."""
    pages = [
        await offload(filters.as_labels, await read(np.arange(at, min(at + _PAGE, length))), field)
        for at in range(0, length, _PAGE)
    ]
    if len({page.dtype.kind for page in pages}) > 1:
        raise InvalidArgumentError(f'{field}: some labels are integers, others strings or sequences')
    return np.concatenate(pages) if pages else filters.as_labels([], field)


def _recurs(node: Source) -> bool:
    """Return whether index ``len + i`` is the same datapoint as index ``i``, up to random transformations."""
    if isinstance(node, Wrapped | ClassSelection):
        return True
    return isinstance(node, Slice | Seeded | Repeat | Concatenate | Element) and all(map(_recurs, node.parents))
