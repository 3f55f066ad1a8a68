"""Positions of states in a pipeline that was changed since, as it is declared."""

from granular.aio.pipeline.nodes.blocks import BlockBuffer
from granular.aio.pipeline.nodes.elements import Batch, Handled
from granular.aio.pipeline.nodes.indices import Repeat, Seeded, Shuffle, WindowShuffle, Wrapped
from granular.aio.pipeline.nodes.source import Source, all_stages
from granular.aio.pipeline.position import RestoreRules
from granular.changes import Applied, BatchSize, Grown, count_in
from granular.errors import StateError


def position_after(made: Applied, source: Source, position: int, terms: RestoreRules) -> int:
    """Return the position in a source of one that was saved before a change; raise ``StateError`` if there is none."""
    change, refusal = made.change, ''
    if not isinstance(change, Grown | BatchSize):
        return position
    if terms.held:
        refusal = f'{terms.stage} holds elements that must be read again as they were'
    elif isinstance(change, BatchSize):
        if (batches := _batches_of(source)) is None:
            refusal = 'its batches are not all that follow its source and functions'
        else:
            length, size = batches.source_length, count_in(made.was)
            epoch, number = divmod(position, max(1, length // size if batches.drop_remainder else -(-length // size)))
            place = min(number * size, length)
            position = epoch * len(batches) + place // batches.size
            if place % batches.size:
                refusal = f'{place} elements of an epoch were taken, which are no multiple of {batches.size}'
    elif change.source in [stage.describe() for stage in all_stages(source) if not stage.parents]:
        length = count_in(made.was)
        epoch, place = divmod(position, length)
        position = epoch * change.elements
        if not _has_all(source):
            refusal = (
                'other elements are chosen of a source that has grown: make a stream of each source, and mix these'
            )
        elif place:
            refusal = f'{place} of the {length} elements of epoch {epoch} were taken: the new ones begin with an epoch'
    if refusal:
        raise StateError(f'{change!r} is declared, and {refusal}: load a state where this is not so')
    return position


def _has_all(source: Source) -> bool:
    """Return whether each epoch of a chain of stages has all elements of its only source."""
    kinds = (BlockBuffer, Handled, Repeat, Seeded, Shuffle, WindowShuffle, Wrapped)
    while source.parents and (source.elementwise or isinstance(source, kinds)):
        source = source.parents[0]
    return not source.parents


def _batches_of(source: Source) -> Batch | None:
    """Return the batches that a source consists of, in their order; None if there are none, or others."""
    while source.elementwise or isinstance(source, Repeat | Seeded | Handled):
        source = source.parents[0]
    return source if isinstance(source, Batch) else None
