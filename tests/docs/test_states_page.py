"""The table of docs/states.md is that of the code."""

import inspect
import pathlib
import re

from granular import IterDataset
from granular.aio.pipeline.position import FITS

PAGE = pathlib.Path(__file__).parents[2] / 'docs' / 'states.md'


def test_page_has_the_table_of_the_code():
    found = re.search(r'<!-- fits -->\n(.*)<!-- /fits -->', PAGE.read_text(), re.S)
    assert found is not None
    rows = ['| stage of a stream | for states that fit other hosts |\n', '| --- | --- |\n']
    for name, fit in FITS.items():
        if fit.holds or not fit.in_step:
            rows.append(f'| {name}{f", while it holds {fit.holds}" if fit.in_step else ""} | {fit.remedy} |\n')
    assert found[1] == ''.join(rows)
    assert [name for name, fit in FITS.items() if not fit.weights] == ['subclass of IterDataset']


def test_each_operation_of_streams_is_in_the_table():
    others = {'apply', 'pipe', 'seed', 'set_slice', 'with_options', 'mp_prefetch'}  # no stages of their own
    operations = {
        name
        for name, member in inspect.getmembers(IterDataset)
        if not name.startswith('_') and callable(member) and name not in others
    }
    assert operations <= {name.partition(',')[0] for name in FITS} | {'map_with_index', 'random_map'}
