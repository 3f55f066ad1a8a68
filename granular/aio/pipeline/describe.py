"""Text descriptions of pipelines, one stage per line, from the source to the output."""

import difflib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from granular._support.text import AT_EPOCH, logger
from granular.aio.pipeline.changes import BatchSize, declaration
from granular.aio.pipeline.lines import Applied, Line, changes_between, is_declared, only_bytes_differ
from granular.aio.pipeline.orders import Blocks
from granular.errors import ClosedError, StateError

_ENDLESS: Final = 1 << 62
_INFINITE: Final = '∞'
_SHOWN: Final = 5  # stages that differ, in a message


def _listed(stage: Any, depth: int = 0, states: bool = False) -> Iterator[tuple[int, Any]]:
    """Yield depth and stage of a stage and of all stages before it.

    With ``states``, a mix by name stands for all of its stages, and those without a state are left out.
    """
    stage = getattr(stage, 'untraced', stage)
    if states and getattr(stage, 'named', False):
        yield depth, stage
        return
    below = depth if len(stage.parents) == 1 else depth + 1
    for parent in stage.parents:
        yield from _listed(parent, below, states)
    if getattr(stage, 'unlisted', False) and stage.describe() == stage.parents[0].describe():
        return
    if not (states and getattr(stage, 'stateless', False)):
        yield depth, stage


def _length(stage: Any) -> int | None:
    """Return the length of a stage; None if it has none, or is not open."""
    try:
        return len(stage)
    except (TypeError, ValueError, ClosedError):
        return _ENDLESS if getattr(stage, 'endless', False) else None


def format_pipeline(stage: Any) -> str:
    lines = []
    for depth, listed in _listed(stage):
        length = _length(listed)
        shown = '' if length is None else _INFINITE if length >= _ENDLESS else f'{length:,}'
        lines.append(('  ' * depth + listed.describe(), shown))
    width = max(len(description) for description, _ in lines)
    length_width = max(len(length) for _, length in lines)
    return '\n'.join(f'{description:<{width}}  {length:>{length_width}}'.rstrip() for description, length in lines)


def lines_of(stage: Any) -> list[Line]:
    """Return the line of each stage; two pipelines with different lines are different pipelines.

    The streams of a mix by name are left out: its state has their lines. Data sources have their lengths, and their
    bytes if they are files.
    """
    lines = []
    for depth, listed in _listed(stage, states=True):
        if getattr(listed, 'named', False):
            lines.append(Line('mix by name').indented(depth))
            continue
        line, length = listed.line(), _length(listed)
        if getattr(listed, 'measures_root', False) and length is not None and length < _ENDLESS:
            line = line.changed(elements=length, bytes=listed.file_bytes())
        lines.append(line.indented(depth))
    return lines


def saved_lines(stage: Any) -> list[Any]:
    """Return the lines of a pipeline as states have them: plain JSON."""
    return [line.saved() for line in lines_of(stage)]


def fingerprint(stage: Any) -> list[str]:
    """Return the lines of a pipeline as texts."""
    return [str(line) for line in lines_of(stage)]


def resizable_stages(stage: Any) -> int:
    """Return the number of last stages of a stream, in its lines, whose sizes of batches no state depends on."""
    count = 0
    while getattr(stage := getattr(stage, 'untraced', stage), 'transparent', False):
        listed = not (getattr(stage, 'unlisted', False) or getattr(stage, 'stateless', False))
        count, stage = count + listed, stage.parents[0]
    return count


def check_lines(saved: Any, own: Sequence[Line], changes: Sequence[Any], resizable: int = 0) -> list[Applied]:
    """Check that a state belongs to a pipeline.

    Args:
      saved: the lines that the state has; None, of which there are none, fit any pipeline.
      own: those of the pipeline.
      changes: those that are declared.
      resizable: number of last stages whose sizes of batches may differ.

    Returns:
      The declared changes that were made.

    Raises:
      StateError: which names the stages that differ, and how such a change is declared.
    """
    if saved is None or saved == [line.saved() for line in own]:
        return []
    if not isinstance(saved, list | tuple):
        raise StateError(
            f'expected the lines of a pipeline such as {[line.saved() for line in own]}, got {saved!r:.200}'
        )
    applied, declared, unknown, differences = list[Applied](), list[Any](), False, []
    for number, was, now in _pairs(list(map(Line.of, saved)), own):
        found = changes_between(was, now)
        if found and number > len(own) - resizable:
            found = [change for change in found if not isinstance(change, BatchSize)]
        applied += [Applied(change, was, now) for change in found or () if is_declared(change, now, changes)]
        declared += found or ()
        unknown = unknown or found is None
        if found is None or not all(is_declared(change, now, changes) for change in found):
            shown = [repr('nothing' if line is None else line.text) for line in (was, now)]
            reason = _reason(was, now)
            differences.append(f'stage {number} was {shown[0]}, and is {shown[1]} in this one{reason}')
    if differences:
        more = f'; and {len(differences) - _SHOWN} more stages' if len(differences) > _SHOWN else ''
        remedy = f'continue with the pipeline that saved it, or {AT_EPOCH}'
        if not unknown:
            remedy = f'if this is meant, pass {declaration(declared)}'
        raise StateError(f'the state belongs to another pipeline: {"; ".join(differences[:_SHOWN])}{more}: {remedy}')
    if sum('batch_size' in line.arguments for line in own) > 1:
        for made in applied:
            if isinstance(made.change, BatchSize):
                raise StateError(f'{made.change!r} is declared, and several stages make batches: change one at a time')
    for change, was, now in applied:
        logger.info('the state was saved with %r, this pipeline has %r: declared by %r', str(was), str(now), change)
    return applied


def _pairs(saved: Sequence[Line], own: Sequence[Line]) -> Iterator[tuple[int, Line | None, Line | None]]:
    """Yield the number of each stage with its lines in a state and in a pipeline, None for none."""
    before, after = ([line.key() for line in lines] for lines in (saved, own))
    for _, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        for number, (was, now) in enumerate(itertools.zip_longest(saved[a:b], own[c:d]), c + 1):
            yield number, was, now


def check_size(saved: Any, size: int, files: str) -> None:
    """Check that files have as many bytes as a state says; None if they were not open."""
    if saved is not None and saved != size:
        raise StateError(
            f'{files}: {size} bytes, the state was saved with {saved!r:.100}: continue with the files of then, or '
            f'without a state, from the start'
        )


def _reason(was: Line | None, now: Line | None) -> str:
    if was is None or now is None:
        return ''
    if only_bytes_differ(was, now):
        return ' (with other bytes: if they are meant, set_next_index(step) continues without the state)'
    if all(line.text.startswith('mix of ') for line in (was, now)):
        return ' (weights may change in states of IterDataset.mix with names)'
    if all(line.text.startswith('pack(') and not line.arguments for line in (was, now)):
        return ' (planned rows keep their length and documents, unlike those that pack of a stream makes)'
    return ''


def block_orders(stage: Any) -> list[str]:
    """Return the orders of blocks in a pipeline, from the source to the output, with their settings."""
    orders = [order for parent in stage.parents for order in block_orders(parent)]
    order = getattr(stage, 'order', None)
    return [*orders, repr(order)] if isinstance(order, Blocks) else orders
