"""Files whose names are odd: patterns, escapes, control characters, bytes that are not UTF-8, the greatest length."""

import pytest

import granular
from tests.support.files import FORMATS, numbers_in, write_numbers

NAMES = ['x[1]', '{a,b}', 'a#b?c', '%41', 'a b\n', '*', '~', '-x', '.hidden', 'a\\b', '$HOME', '\udcff', 'x' * 240]


@pytest.mark.parametrize('suffix', FORMATS)
def test_files_with_odd_names_are_opened_and_converted(suffix, tmp_path):
    for number, name in enumerate(NAMES):
        file = tmp_path / f'{name}.{suffix}'
        write_numbers(file, suffix, range(5))
        with granular.open(str(file)) as source:
            assert numbers_in(source) == list(range(5)), name
        granular.convert(str(file), tmp_path / name / 'data', shardlen=2)
        granular.copy_to_local(tmp_path / name / 'data', tmp_path / name / f'copy {number}')
        with granular.ShardedDatasetReader(tmp_path / name / f'copy {number}', granular.decoders) as reader:
            assert numbers_in(reader) == list(range(5)), name
