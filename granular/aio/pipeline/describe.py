"""Text descriptions of pipelines, one stage per line, from the source to the output."""

from typing import Any, Final

_ENDLESS: Final = 1 << 62


def iter_stages(stage: Any, depth: int = 0) -> list[tuple[int, str, str]]:
    """Return depth, description and length of a stage and of all stages before it."""
    out: list[tuple[int, str, str]] = []
    if len(stage.parents) == 1:
        out += iter_stages(stage.parents[0], depth)
    else:
        for parent in stage.parents:
            out += iter_stages(parent, depth + 1)
    said = stage.describe()
    if out and out[-1][1] == said:  # a root has the description of the source that it wraps
        return out
    return [*out, (depth, said, _length(stage))]


def _length(stage: Any) -> str:
    try:
        length = len(stage)
    except (TypeError, ValueError):
        return '∞' if getattr(stage, 'endless', False) else ''
    return '∞' if length > _ENDLESS else f'{length:,}'


def format_pipeline(stage: Any) -> str:
    """Format a pipeline for printing."""
    lines = [('  ' * depth + said, length) for depth, said, length in iter_stages(stage)]
    width = max(len(said) for said, _ in lines)
    most = max(len(length) for _, length in lines)
    return '\n'.join(f'{said:<{width}}  {length:>{most}}'.rstrip() for said, length in lines)


def times(stage: Any) -> list[tuple[str, int, float]]:
    """Return description, element count, and seconds summed over all threads for each stage that was timed."""
    found = [entry for parent in stage.parents for entry in times(parent)]
    made = getattr(stage, '_made', 0)
    return [*found, (stage.describe(), made, stage._spent)] if made else found


def fingerprint(stage: Any) -> list[str]:
    """Return a readable line per stage; two pipelines with different lines are different pipelines."""
    return ['  ' * depth + said for depth, said, _ in iter_stages(stage)]
