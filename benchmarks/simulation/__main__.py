"""Answer questions about many hosts: ``python -m benchmarks.simulation [--scale 0.2] [--only NAME ...] [--plot]``."""

import argparse
import dataclasses
import json
import pathlib
import tempfile

from benchmarks.simulation.plots import draw
from benchmarks.simulation.questions import QUESTIONS, ask


def main() -> None:
    """Print the figures; with --plot, draw the lines into docs/plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only', nargs='+', choices=QUESTIONS, default=list(QUESTIONS), metavar='NAME')
    parser.add_argument('--scale', type=float, default=1.0, help='hosts and rates as a share of the full size')
    parser.add_argument('--keep', type=pathlib.Path, help='a folder whose datasets are used again')
    parser.add_argument('--out', type=pathlib.Path, help='a folder for the figures and lines, as JSON')
    parser.add_argument('--plot', action='store_true', help='draw docs/plots/scale-NAME.svg, which needs matplotlib')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or pathlib.Path(temporary)
        for name, answer, seconds in ask(args.only, folder, args.scale):
            print(f'{name} ({seconds:.0f} s of processor time)')
            for case, figures in answer.figures.items():
                print(f'  {case}: ' + ', '.join(f'{key} {value:.3g}' for key, value in figures.items()), flush=True)
            if args.out:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f'{name}.json').write_text(
                    json.dumps({'title': QUESTIONS[name].__doc__, **dataclasses.asdict(answer)})
                )
            if args.plot and answer.lines:
                draw(name, QUESTIONS[name].__doc__ or '', answer.lines, answer.unit)


if __name__ == '__main__':
    main()
