"""A pipeline as text: its stages, one to a line, from what is read to what comes out."""

from typing import Any, Final

_ENDLESS: Final = 1 << 62


def stages(stage: Any, depth: int = 0) -> list[tuple[int, str, str]]:
    """Depth, description and length of a stage and of all before it."""
    out: list[tuple[int, str, str]] = []
    if len(stage.parents) == 1:
        out += stages(stage.parents[0], depth)
    else:
        for parent in stage.parents:
            out += stages(parent, depth + 1)
    said = stage.describe()
    if out and out[-1][1] == said:  # a root and what it wraps
        return out
    return [*out, (depth, said, _length(stage))]


def _length(stage: Any) -> str:
    try:
        length = len(stage)
    except (TypeError, ValueError):
        return '∞' if getattr(stage, 'endless', False) else ''
    return '∞' if length > _ENDLESS else f'{length:,}'


def rendered(stage: Any) -> str:
    """As it is printed."""
    lines = [('  ' * depth + said, length) for depth, said, length in stages(stage)]
    width = max(len(said) for said, _ in lines)
    most = max(len(length) for _, length in lines)
    return '\n'.join(f'{said:<{width}}  {length:>{most}}'.rstrip() for said, length in lines)


def times(stage: Any) -> list[tuple[str, int, float]]:
    """Of each stage that was timed what it is, how much it made, and the seconds that this took over all threads."""
    found = [entry for parent in stage.parents for entry in times(parent)]
    made = getattr(stage, 'made', 0)
    return [*found, (stage.describe(), made, stage.spent)] if made else found


def fingerprint(stage: Any) -> list[str]:
    """What makes a pipeline another one, readable: a line for each stage."""
    return ['  ' * depth + said for depth, said, _ in stages(stage)]
