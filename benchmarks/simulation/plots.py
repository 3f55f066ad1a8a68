"""Plots of the answers: ``python -m benchmarks.simulation.plots FOLDER`` draws those that --out has written."""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

from benchmarks.bars import drawing


def draw(name: str, title: str, lines: Mapping[str, Sequence[float]], unit: str) -> None:
    """Draw lines over time into docs/plots."""
    paired = any(label.endswith('requests') for label in lines)
    with drawing(f'scale-{name}', title) as axes:
        for number, (label, line) in enumerate(lines.items()):
            style = ':' if label.endswith('requests') else '-'
            axes.plot(line, style, color=f'C{number // 2 if paired else number}', linewidth=1.2, label=label)
        axes.set_xlabel('seconds', fontsize=9)
        axes.set_ylabel(unit, fontsize=9)
        axes.set_ylim(0, 1.6 if unit.startswith('share') else None)
        axes.legend(fontsize=8, frameon=False)


if __name__ == '__main__':
    for file in sorted(pathlib.Path(sys.argv[1]).glob('*.json')):
        answer = json.loads(file.read_text())
        if answer['lines']:
            draw(file.stem, answer['title'], answer['lines'], answer['unit'])
