"""Text descriptions of pipelines, one stage per line, from the source to the output."""

import difflib
import itertools
import re
from collections.abc import Sequence
from typing import Any, Final

from granular._support.text import logger
from granular.changes import Applied, BatchSize, change_between, declaration
from granular.errors import ClosedError, StateError
from granular.shuffle import Blocks

_ENDLESS: Final = 1 << 62
_INFINITE: Final = '∞'
_DETAILS: Final = (  # which lines may lack, the latest first
    re.compile(r', \d+ bytes$'),
    re.compile(r' of \d+(, \d+ bytes)?$|, CRC32C [0-9a-f]{8}(?=\)?$)'),
)
_UNUSED_SEED: Final = re.compile(r'seed=\d+, (?=Sequential\(\))')
_SHOWN: Final = 5  # stages that differ, in a message


def iter_stages(stage: Any, depth: int = 0, names: bool = False) -> list[tuple[int, str, str]]:
    """Return depth, description and length of a stage and of all stages before it.

    With ``names``, for states, a mix by name stands for all of its stages, those without a state are left out, and data
    sources have their lengths, and their bytes if they are files.
    """
    stage = getattr(stage, 'untraced', stage)
    if names and getattr(stage, 'named', False):
        return [(depth, 'mix by name', '')]
    below = depth if len(stage.parents) == 1 else depth + 1
    out = [row for parent in stage.parents for row in iter_stages(parent, below, names)]
    description, length = stage.describe(), _length(stage)
    if getattr(stage, 'unlisted', False) and description == stage.parents[0].describe():
        return out
    if names and getattr(stage, 'stateless', False):
        return out
    if names and length and length != _INFINITE and getattr(stage, 'measures_root', False):
        description += f' of {length.replace(",", "")}'
        if (size := stage.file_bytes()) is not None:
            description += f', {size} bytes'
    return [*out, (depth, description, length)]


def _length(stage: Any) -> str:
    try:
        length = len(stage)
    except (TypeError, ValueError, ClosedError):
        return _INFINITE if getattr(stage, 'endless', False) else ''
    return _INFINITE if length > _ENDLESS else f'{length:,}'


def format_pipeline(stage: Any) -> str:
    lines = [('  ' * depth + description, length) for depth, description, length in iter_stages(stage)]
    width = max(len(description) for description, _ in lines)
    length_width = max(len(length) for _, length in lines)
    return '\n'.join(f'{description:<{width}}  {length:>{length_width}}'.rstrip() for description, length in lines)


def fingerprint(stage: Any) -> list[str]:
    """Return a readable line per stage; two pipelines with different lines are different pipelines.

    The streams of a mix by name are left out: its state has their fingerprints.
    """
    return ['  ' * depth + description for depth, description, _ in iter_stages(stage, names=True)]


def resizable_stages(stage: Any) -> int:
    """Return the number of last stages of a stream, in its fingerprint, whose sizes of batches no state depends on."""
    count = 0
    while getattr(stage := getattr(stage, 'untraced', stage), 'transparent', False):
        listed = not (getattr(stage, 'unlisted', False) or getattr(stage, 'stateless', False))
        count, stage = count + listed, stage.parents[0]
    return count


def _without_size(line: str) -> str:
    """Return the line of one of the last stages without the size of batches, which a state does not depend on."""
    return re.sub(r'^batch\(\d+', 'batch(', line)


def _differ_in_detail_only(saved: str, current: str) -> bool:
    """Return whether one of two lines lacks details, as that of a reader before it opens."""
    bare = ((detail.sub('', saved), detail.sub('', current)) for detail in _DETAILS)
    return any(was == now and (saved == was) != (current == now) for was, now in bare)


def check_fingerprint(
    state_lines: Any, own_lines: Sequence[str], changes: Sequence[Any], resizable: int = 0
) -> list[Applied]:
    """Check that a state, of which ``state_lines`` are the fingerprint, belongs to this pipeline; None fits any.

    Args:
      changes: those that are declared.
      resizable: number of last stages whose sizes of batches may differ.

    Returns:
      The declared changes that were made.

    Raises:
      StateError: which names the stages that differ, and how such a change is declared.
    """
    if state_lines is None or state_lines == own_lines:
        return []
    if not isinstance(state_lines, list | tuple):
        raise StateError(f'expected the lines of a pipeline such as {list(own_lines)}, got {state_lines!r:.200}')
    saved, current = [_UNUSED_SEED.sub('seed=0, ', str(line)) for line in state_lines], list(own_lines)
    if len(saved) == len(current):
        for i, (was, now) in enumerate(zip(saved, current, strict=True)):
            resized = i >= len(current) - resizable and _without_size(was) == _without_size(now)
            if resized or _differ_in_detail_only(was, now):
                saved[i] = now
    applied, undeclared, unknown, differences = [], [], False, []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, saved, current, autojunk=False).get_opcodes():
        if kind == 'equal':
            continue
        pairs = itertools.zip_longest(saved[a:b], current[c:d], fillvalue='')
        for number, (was, now) in enumerate(pairs, c + 1):
            change = change_between(was.strip(), now.strip())
            if change in changes:
                applied.append(Applied(change, was.strip(), now.strip()))
                continue
            shown, reason = [repr(line.strip() or 'nothing') for line in (was, now)], _reason(was, now)
            differences.append(f'stage {number} was {shown[0]}, and is {shown[1]} in this one{reason}')
            unknown = unknown or change is None
            undeclared.append(change)
    if differences:
        more = f'; and {len(differences) - _SHOWN} more stages' if len(differences) > _SHOWN else ''
        remedy = 'continue with the pipeline that saved it, or from the start of an epoch'
        if not unknown:
            remedy = f'if this is meant, pass {declaration(undeclared)}'
        raise StateError(f'the state belongs to another pipeline: {"; ".join(differences[:_SHOWN])}{more}: {remedy}')
    if sum(line.strip().startswith('batch(') for line in current) > 1:
        for made in applied:
            if isinstance(made.change, BatchSize):
                raise StateError(f'{made.change!r} is declared, and several stages make batches: change one at a time')
    for change, was, now in applied:
        logger.info('the state was saved with %r, this pipeline has %r: declared by %r', was, now, change)
    return applied


def check_size(saved: Any, size: int, files: str) -> None:
    """Check that files have as many bytes as a state says; None if they were not open."""
    if saved is not None and saved != size:
        raise StateError(
            f'{files}: {size} bytes, the state was saved with {saved!r:.100}: continue with the files of then, or from '
            f'the start of an epoch'
        )


def _reason(saved: str, current: str) -> str:
    mixes = all(line.lstrip().startswith('mix of ') for line in (saved, current))
    return ' (weights may change in states of IterDataset.mix with names)' if mixes else ''


def block_orders(stage: Any) -> list[str]:
    """Return the orders of blocks in a pipeline, from the source to the output, with their settings."""
    orders = [order for parent in stage.parents for order in block_orders(parent)]
    order = getattr(stage, 'order', None)
    return [*orders, repr(order)] if isinstance(order, Blocks) else orders
