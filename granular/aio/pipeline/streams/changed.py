"""Positions of states in a pipeline that was changed since, as it is declared."""

from typing import NoReturn

from granular.aio.pipeline.changes import BatchSize, Excluded, Grown
from granular.aio.pipeline.lines import Applied
from granular.aio.pipeline.nodes.batches import Batch
from granular.aio.pipeline.nodes.blocks import BlockBuffer
from granular.aio.pipeline.nodes.elements import Excluded as Excluding
from granular.aio.pipeline.nodes.elements import Handled
from granular.aio.pipeline.nodes.indices import Repeat, Seeded, Shuffle, WindowShuffle, Wrapped
from granular.aio.pipeline.nodes.source import Source, all_stages
from granular.aio.pipeline.position import RestoreRules, of_former
from granular.errors import StateError


def position_after(rules: RestoreRules, source: Source, position: int) -> int:
    """Return the position in a source of one that was saved before the changes; raise ``StateError`` if there is none.

    A pack compares the documents that it holds; other stages cannot tell that elements were excluded.
    """
    rules.check_held(BatchSize, Grown, *([] if rules.kind == 'pack' else [Excluded]))
    for made in rules.applied:
        if isinstance(made.change, BatchSize) and any(isinstance(stage, Batch) for stage in all_stages(source)):
            position = _rebatched(made, source, position)
        elif isinstance(made.change, Grown) and _reads(made.change, source):
            position = _in_grown(made, source, position)
    return position


def _refuse(made: Applied, reason: str, remedy: str = '') -> NoReturn:
    raise StateError(f'{made.change!r} is declared, and {reason}: load a state where this is not so{remedy}')


def _rebatched(made: Applied, source: Source, position: int) -> int:
    while source.elementwise or isinstance(source, Repeat | Seeded | Handled):
        source = source.parents[0]
    if not isinstance(source, Batch):
        _refuse(made, f'its batches are chosen by {source.describe()}')
    length, size = source.source_length, _before(made, 'batch_size')
    epoch, number = divmod(position, max(1, length // size if source.drop_remainder else -(-length // size)))
    place = min(number * size, length)
    if place % source.size:
        _refuse(made, f'{place} elements of an epoch were taken, which are no multiple of {source.size}')
    return epoch * len(source) + place // source.size


def _in_grown(made: Applied, source: Source, position: int) -> int:
    length = _before(made, 'elements')
    epoch, place = divmod(position, max(1, length))
    kinds = (BlockBuffer, Excluding, Handled, Repeat, Seeded, Shuffle, WindowShuffle, Wrapped)
    while source.parents and (source.elementwise or isinstance(source, kinds)):
        source = source.parents[0]
    if source.parents:
        _refuse(made, f'{source.describe()} then has other elements: make a stream of each source, and mix these')
    if place:
        reason = f'{place} of the {length} elements of epoch {epoch} were taken: the new ones begin with an epoch'
        _refuse(made, reason, f', or {of_former(made.change, made.was)}')
    return epoch * int(made.change.elements)


def _reads(change: Grown, source: Source) -> bool:
    stages = [stage for stage in all_stages(source) if not stage.parents]
    return any(stage.line().arguments.get('source') == change.source for stage in stages)


def _before(made: Applied, name: str) -> int:
    """Return a number in the line of the state."""
    return 0 if made.was is None else int(made.was.arguments[name])
