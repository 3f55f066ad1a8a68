"""What is written twice for type checkers is current."""

import pytest

from tests import ROOT
from tests.api.written import written


@pytest.mark.parametrize(
    ('file', 'text'), [pytest.param(file, text, id=f'{file.relative_to(ROOT)}') for file, text in written()]
)
def test_file_is_current(file, text):
    assert file.read_text() == text, 'run `python -m tests.api.written`'
