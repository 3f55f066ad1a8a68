"""Plots of the answers: ``python -m benchmarks.simulation.plots FOLDER`` draws those that --out has written."""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

from benchmarks.bars import DOCS


def draw(name: str, title: str, lines: Mapping[str, Sequence[float]], unit: str) -> None:
    """Draw lines over time into docs/plots."""
    import matplotlib as mpl

    mpl.use('svg')
    mpl.rcParams['svg.hashsalt'] = 'granular'
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.2))
    highest = 1.6 if unit.startswith('share') else None
    for number, (label, line) in enumerate(lines.items()):
        style = ':' if label.endswith('requests') else '-'
        paired = any(other.endswith('requests') for other in lines)
        axes.plot(line, style, color=f'C{number // 2 if paired else number}', linewidth=1.2, label=label)
    axes.set_title(title, fontsize=10, loc='left')
    axes.set_xlabel('seconds', fontsize=9)
    axes.set_ylabel(unit, fontsize=9)
    axes.set_ylim(0, highest)
    axes.spines[['top', 'right']].set_visible(False)
    axes.tick_params(labelsize=9)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(DOCS / 'plots' / f'scale-{name}.svg', bbox_inches='tight', metadata={'Date': None})
    pyplot.close(figure)


if __name__ == '__main__':
    for file in sorted(pathlib.Path(sys.argv[1]).glob('*.json')):
        answer = json.loads(file.read_text())
        if answer['lines']:
            draw(file.stem, answer['title'], answer['lines'], answer['unit'])
