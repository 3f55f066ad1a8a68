"""The table of docs/states.md is that of the code."""

import inspect
import pathlib
import re

from granular import IterDataset
from granular.aio.pipeline.position import FITS, Fit

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'states.md'


# No stages of their own, or listed as one of the others.
OTHERS = {'apply', 'pipe', 'seed', 'set_slice', 'with_options', 'mp_prefetch', 'map_with_index', 'random_map'}


def test_page_has_the_stages_of_the_code():
    found = re.search(r'<!-- fits -->\n(.*)<!-- /fits -->', PAGE.read_text(), re.S)
    assert found is not None
    fits = {name: Fit() for name, member in inspect.getmembers(IterDataset, callable) if name[0] != '_'}
    rows = []
    for name, fit in sorted({**fits, **FITS}.items()):
        if name not in OTHERS:
            hosts = 'no' if not fit.in_step else f'unless it holds {fit.holds}' if fit.holds else 'yes'
            rows.append(f'| {name} | {hosts} | {"yes" if fit.weights else "no"} | {fit.remedy} |\n')
    assert found[1] == ''.join(rows)
