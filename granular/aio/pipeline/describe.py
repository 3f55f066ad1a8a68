"""Text descriptions of pipelines, one stage per line, from the source to the output."""

import re
from collections.abc import Sequence
from typing import Any, Final

from granular.errors import StateError
from granular.shuffle import Blocks

_ENDLESS: Final = 1 << 62


def iter_stages(stage: Any, depth: int = 0, names: bool = False) -> list[tuple[int, str, str]]:
    """Return depth, description and length of a stage and of all stages before it.

    With ``names``, a mix by name stands for all of its stages.
    """
    if names and getattr(stage, 'named', False):
        return [(depth, 'mix by name', '')]
    out: list[tuple[int, str, str]] = []
    if len(stage.parents) == 1:
        out += iter_stages(stage.parents[0], depth, names)
    else:
        for parent in stage.parents:
            out += iter_stages(parent, depth + 1, names)
    description = stage.describe()
    if out and out[-1][1] == description:  # a root has the description of the source that it wraps
        return out
    return [*out, (depth, description, _length(stage))]


def _length(stage: Any) -> str:
    try:
        length = len(stage)
    except (TypeError, ValueError):
        return '∞' if getattr(stage, 'endless', False) else ''
    return '∞' if length > _ENDLESS else f'{length:,}'


def format_pipeline(stage: Any) -> str:
    """Format a pipeline for printing."""
    lines = [('  ' * depth + description, length) for depth, description, length in iter_stages(stage)]
    width = max(len(description) for description, _ in lines)
    length_width = max(len(length) for _, length in lines)
    return '\n'.join(f'{description:<{width}}  {length:>{length_width}}'.rstrip() for description, length in lines)


def times(stage: Any) -> list[tuple[str, int, float]]:
    """Return description, element count, and seconds summed over all threads for each stage that was timed."""
    entries = [entry for parent in stage.parents for entry in times(parent)]
    count = getattr(stage, '_made', 0)
    return [*entries, (stage.describe(), count, stage._spent)] if count else entries


def fingerprint(stage: Any) -> list[str]:
    """Return a readable line per stage; two pipelines with different lines are different pipelines.

    The streams of a mix by name are left out: its state has their fingerprints.
    """
    return ['  ' * depth + description for depth, description, _ in iter_stages(stage, names=True)]


def resizable_stages(stage: Any) -> int:
    """Return the number of last stages of a stream whose sizes of batches and buffers no state depends on."""
    count = 0
    while getattr(stage, 'transparent', False):
        count, stage = count + 1, stage.parents[0]
    return count


def _without_size(line: str) -> str:
    return re.sub(r'^(batch|prefetch)\(\d+', r'\1(', line)


def check_fingerprint(state_lines: Any, own_lines: Sequence[str], resizable: int = 0) -> None:
    """Check that a state belongs to this pipeline.

    Args:
      state_lines, own_lines: fingerprints; None for a state without one.
      resizable: number of last stages whose sizes of batches and buffers may differ.

    Raises:
      StateError: if it does not; the message names the first stage that differs.
    """
    if state_lines is None or list(state_lines) == list(own_lines):
        return
    fixed = len(own_lines) - resizable
    for i in range(max(len(state_lines), len(own_lines))):
        saved, current = (lines[i] if i < len(lines) else 'nothing' for lines in (state_lines, own_lines))
        if saved != current and not (i >= fixed and _without_size(saved) == _without_size(current)):
            raise StateError(
                f'the state belongs to another pipeline: stage {i + 1} was {saved.strip()!r}, '
                f'and is {current.strip()!r} in this one{_reason(saved, current)}'
            )


def _reason(saved: str, current: str) -> str:
    old = 'Blocks(' in saved and 'stratified' in current and 'stratified' not in saved
    return ': before granular had stratified windows, Blocks was another order; restart the epoch' if old else ''


def block_orders(stage: Any) -> list[str]:
    """Return the orders of blocks in a pipeline, from the source to the output, with their settings."""
    orders = [order for parent in stage.parents for order in block_orders(parent)]
    order = getattr(stage, 'order', None)
    return [*orders, repr(order)] if isinstance(order, Blocks) else orders
