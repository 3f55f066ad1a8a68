"""Write the states of this release: ``python -m tests.pipeline.compositions.saved_states --write DIR``."""

import argparse
import json
import pathlib

from tests.pipeline.compositions.saved_states.cases import all_cases


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--write', metavar='DIR', type=pathlib.Path, required=True, help='new folder for the files')
    folder = parser.parse_args().write
    folder.mkdir(parents=True)
    count = 0
    for kind, cases in all_cases().items():
        lines = ',\n'.join(json.dumps(case) for case in cases)
        (folder / f'{kind}.json').write_text(f'[\n{lines}\n]\n')
        count += len(cases)
    print(f'{count} states in {folder}')


if __name__ == '__main__':
    main()
