"""The table of docs/states.md is that of the code."""

import pathlib
import re

from tests.support.seams import FITS

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'states.md'


def test_page_has_the_stages_of_the_code():
    found = re.search(r'<!-- fits -->\n(.*)<!-- /fits -->', PAGE.read_text(), re.S)
    assert found is not None
    rows = ['| stage of a stream | for states that fit other hosts |\n', '| --- | --- |\n']
    for name, fit in sorted(FITS.items()):
        if fit.holds or not fit.in_step:
            rows.append(f'| {name}{f", while it holds {fit.holds}" if fit.in_step else ""} | {fit.remedy} |\n')
    assert found[1] == ''.join(rows)
    assert [name for name, fit in FITS.items() if not fit.weights] == ['subclass of IterDataset']
