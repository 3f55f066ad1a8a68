"""Each row and difference of docs/coming-from/granular-0.21.md holds: the code of the other release runs there."""

import json
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

import granular
from granular.errors import GranularError
from tests import ROOT
from tests.formats.test_images import png_of_16_bits

PAGE = (ROOT / 'docs/coming-from/granular-0.21.md').read_text()
FUNCTIONS = """
import multiprocessing, os, pathlib, sys
def values(reader):
    return [reader[i] for i in range(len(reader))]
def error(call):
    try:
        return repr(call())
    except Exception as error:
        return type(error).__name__
def quietly(call):  # workers print the traceback
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        return error(call)
    finally:
        os.dup2(out, 1)
def count(step):
    return {'x': step}
def batches(loader, number):
    loader = iter(loader)
    found = [next(loader)['x'].tolist() for _ in range(number)]
    return found, loader
"""


class Case(NamedTuple):
    """Code of another release, and of this one; each sets ``result``, of plain values.

    The folder ``path`` has a dataset of that release, ``new`` is the path of none.
    """

    there: str
    here: str
    differs: bool = False
    release: str = '0.21'


# By the beginning of the row, or of the difference.
CASES = {
    '| written for it |': Case(
        "granular.DatasetWriter(new, {'n': 'int'}, granular.encoders).close()\n"
        'result = sorted(file.name for file in pathlib.Path(new).iterdir())',
        "granular.DatasetWriter(new, {'n': 'int'}, granular.encoders, checksums=False).close()\n"
        'result = sorted(file.name for file in pathlib.Path(new).iterdir())',
    ),
    '| [layout]': Case(
        "granular.DatasetWriter(new, {'n': 'int'}, granular.encoders).close()\n"
        'result = sorted(file.name for file in pathlib.Path(new).iterdir())',
        "granular.DatasetWriter(new, {'n': 'int'}, granular.encoders, layout='columns', checksums=False).close()\n"
        'result = sorted(file.name for file in pathlib.Path(new).iterdir())',
        release='0.24',
    ),
    '| bags |': Case(
        'result = []\nfor version in (1, 2):\n'
        "    with granular.BagWriter(f'{new}{version}', version) as writer: writer.append(b'abc')\n"
        "    result.append(pathlib.Path(f'{new}{version}').read_bytes().hex())",
        'result = []\nfor version in (1, 2):\n'
        "    with granular.BagWriter(f'{new}{version}', version) as writer: writer.append(b'abc')\n"
        "    result.append(pathlib.Path(f'{new}{version}').read_bytes().hex())",
    ),
    '| sequences, such as': Case(
        "result = error(lambda: granular.DatasetWriter(new, {'t': 'utf8[]'}, granular.encoders))",
        "result = error(lambda: granular.DatasetWriter(new, {'t': 'utf8[]'}, granular.encoders, layout='columns'))",
        differs=True,
        release='0.24',
    ),
    '| `pathlib.Path`, `elements.Path` |': Case(
        'result = [values(granular.DatasetReader(pathlib.Path(path), granular.decoders))] * 3',
        'result = [values(granular.DatasetReader(make(path), granular.decoders)) '
        'for make in (str, granular.Path, pathlib.Path)]',
    ),
    '| 0.24: `BagReader(bag, idx)`': Case(
        "result = [list(map(bytes.hex, granular.BagReader(f'{path}/n.bag', f'{path}/n.idx')[0:9]))]\n"
        "result.append(list(map(bytes.hex, granular.BagReader(f'{path}/../old.bag', single_file=True)[0:9])))",
        "result = [list(map(bytes.hex, granular.BagReader(f'{path}/n.bag', index=f'{path}/n.idx')[0:9]))]\n"
        "result.append(list(map(bytes.hex, granular.BagReader(f'{path}/../old.bag')[0:9])))",
        release='0.24',
    ),
    '| 0.24: `BagWriter(bag, idx)` |': Case(
        "bag, idx = new + '.bag', new + '.idx'\n"
        "with granular.BagWriter(bag, idx) as writer: [writer.append(record) for record in (b'a', b'', b'bcd')]\n"
        'result = [pathlib.Path(file).read_bytes().hex() for file in (bag, idx)]',
        "bag, idx = new + '.bag', new + '.idx'\n"
        "with granular.BagWriter(bag, version=3) as writer: [writer.append(record) for record in (b'a', b'', b'bcd')]\n"
        'result = [pathlib.Path(file).read_bytes().hex() for file in (bag, idx)]',
        release='0.24',
    ),
    '| `DatasetReader(..., parallel=)` |': Case(
        'result = values(granular.DatasetReader(path, granular.decoders, parallel=True))',
        'result = values(granular.DatasetReader(path, granular.decoders, parallel=True))',
    ),
    '| 0.24: `DatasetReader(..., pool_name=)` |': Case(
        "result = values(granular.DatasetReader(path, granular.decoders, parallel=True, pool_name='x'))",
        'result = values(granular.DatasetReader(path, granular.decoders))',
        release='0.24',
    ),
    '| one `reader[i]` after the other |': Case(
        'reader = granular.DatasetReader(path, granular.decoders)\n'
        "result = [reader[i, {'n': True}] for i in (5, 0, 2)]",
        "reader = granular.DatasetReader(path, granular.decoders)\nresult = reader.fetch([5, 0, 2], {'n': True})",
    ),
    '| `Loader(..., workers=)`: processes |': Case(
        "fork = multiprocessing.get_context('fork')\n"
        'result, loader = batches(granular.Loader(count, 4, workers=2, mp=fork), 3)\nloader.close()',
        'result, loader = batches(granular.Loader(count, 4, workers=2), 3)\nloader.close()',
    ),
    '| `AssertionError` |': Case(
        "writer = granular.DatasetWriter(new, {'n': 'int'}, granular.encoders)\n"
        "result = error(lambda: writer.append({'m': 1}))",
        "writer = granular.DatasetWriter(new, {'n': 'int'}, granular.encoders)\n"
        "result = error(lambda: writer.append({'m': 1}))\nwriter.close()",
        differs=True,
    ),
    '- PNG files of 16 bits': Case(
        "point = granular.DatasetReader(path + '/../deep', granular.decoders)[0]\n"
        "result = [str(point['image'].dtype), type(point['number']).__name__, float(point['number'])]",
        "point = granular.DatasetReader(path + '/../deep', granular.decoders)[0]\n"
        "result = [str(point['image'].dtype), type(point['number']).__name__, float(point['number'])]",
        differs=True,
    ),
    '- `Epochs(seed=s)`': Case(
        'epochs = granular.sources.Epochs(list(range(9)), seed=5)\nresult = [int(epochs(i)) for i in range(20)]',
        'epochs = granular.sources.Epochs(list(range(9)), seed=0)\nresult = [int(epochs(i)) for i in range(20)]',
    ),
    '- A datapoint of another dtype': Case(
        "fork = multiprocessing.get_context('fork')\n"
        "source = lambda step: {'x': np.float64(0.5) if step else np.int64(7)}\n"
        'result, loader = batches(granular.Loader(source, 2, workers=1, mp=fork), 1)\nloader.close()',
        "source = lambda step: {'x': np.float64(0.5) if step else np.int64(7)}\n"
        'loader = granular.Loader(source, 2)\nresult = error(lambda: batches(loader, 1))\nloader.close()',
        differs=True,
    ),
    '- Over a finite source': Case(
        "fork = multiprocessing.get_context('fork')\n"
        "source = [{'x': i} for i in range(7)].__getitem__\n"
        'result = quietly(lambda: batches(granular.Loader(source, 2, prefetch=1, workers=1, mp=fork), 4))',
        "with granular.Loader([{'x': i} for i in range(7)], 2) as loader:\n"
        "    result = [batch['x'].tolist() for batch in loader]",
        differs=True,
    ),
    '- A dataset appears': Case(
        "writer = granular.DatasetWriter(new, {'n': 'int'}, granular.encoders)\n"
        "writer.append({'n': 1})\nresult = [pathlib.Path(new, 'spec.json').exists()]\nwriter.close()\n"
        "result.append(error(lambda: granular.DatasetWriter(new, {'n': 'int'}, granular.encoders)))",
        "writer = granular.DatasetWriter(new, {'n': 'int'}, granular.encoders)\n"
        "writer.append({'n': 1})\nresult = [pathlib.Path(new, 'spec.json').exists()]\nwriter.close()\n"
        "result.append(error(lambda: granular.DatasetWriter(new, {'n': 'int'}, granular.encoders)))",
        differs=True,
    ),
}
# What each side gives where they differ.
DIFFERENCES: dict[str, tuple[Any, Any]] = {
    '| sequences, such as': ('KeyError', 'SpecError'),
    '| `AssertionError` |': ('AssertionError', 'DatapointKeysError'),
    '- PNG files of 16 bits': (['uint8', 'ndarray', 1.5], ['uint16', 'float32', 1.5]),
    '- A datapoint of another dtype': ([[7, 0]], 'DatapointError'),
    '- Over a finite source': ('RuntimeError', [[0, 1], [2, 3], [4, 5]]),
    '- A dataset appears': ([True, 'AssertionError'], [False, 'AlreadyExistsError']),
}


def test_each_row_and_difference_of_the_page_has_a_case():
    rows = [row for row in re.findall(r'^\| .*|^- .*', PAGE, re.M) if not re.match(r'\| (---|there|\|)|\|  *\|', row)]
    rows = [row for row in rows if not row.startswith('| | ')]
    for row in rows:
        assert [name for name in CASES if row.startswith(name)], row
    for name in CASES:
        assert [row for row in rows if row.startswith(name)], name
    assert DIFFERENCES.keys() == {name for name, case in CASES.items() if case.differs}


@pytest.mark.parametrize('name', CASES)
def test_what_the_page_says_of_a_row(request, tmp_path, name):
    case = CASES[name]
    oracle = request.getfixturevalue('oracle21' if case.release == '0.21' else 'oracle24')
    layout = 'refs' if case.release == '0.21' else 'columns'
    with granular.DatasetWriter(tmp_path / 'ds', {'n': 'int', 't': 'utf8'}, granular.encoders, layout) as writer:
        for i in range(6):
            writer.append({'n': i, 't': f'{i}'})
    with granular.DatasetWriter(tmp_path / 'deep', {'image': 'png', 'number': 'array'}, granular.encoders) as writer:
        writer.append(
            {'image': png_of_16_bits(np.full((3, 4, 3), 1000, np.uint16), 2), 'number': np.array(1.5, np.float32)}
        )
    with granular.BagWriter(tmp_path / 'old.bag') as writer:
        writer.append(b'abc')
    prelude = f'{FUNCTIONS}path, new = {str(tmp_path / "ds")!r}, {str(tmp_path / "there")!r}\n'
    there = oracle.run(f'{prelude}{case.there}\nprint(json.dumps(plain(result)))')
    names: dict[str, Any] = {'granular': granular, 'np': np}
    exec(f'{FUNCTIONS}path, new = {str(tmp_path / "ds")!r}, {str(tmp_path / "here")!r}\n{case.here}', names)
    here = json.loads(json.dumps(names['result']))
    assert (there, here) == DIFFERENCES.get(name, (here, here))


def test_states_of_0_21_are_continued_and_read_ours(oracle21):
    there = """
fork = multiprocessing.get_context('fork')
epochs = granular.sources.Epochs([{'x': i} for i in range(17)])
loader = granular.Loader(epochs, 4, workers=1, mp=fork)
if len(sys.argv) > 1:
    loader.load(json.loads(sys.argv[1]))
found, loader = batches(loader, 3)
result = [found, loader.save()]
loader.close()
print(json.dumps(result))
"""
    source = granular.sources.Epochs([{'x': i} for i in range(17)], seed=0)
    first, state = oracle21.run(FUNCTIONS + there)
    with granular.Loader(source, 4) as loader:
        assert [next(loader)['x'].tolist() for _ in range(3)] == first
        saved = loader.save()
        assert saved['step'] == state['step'] == 12
    with granular.Loader(source, 4) as loader:
        loader.load(state)
        following = [next(loader)['x'].tolist() for _ in range(3)]
    assert oracle21.run(FUNCTIONS + there, json.dumps(saved))[0] == following


def test_loader_stays_at_a_batch_whose_source_failed():
    failing = [True]

    def source(step):
        if step == 5 and failing:
            raise GranularError(failing.pop())
        return {'x': step}

    with granular.Loader(source, 4) as loader:
        assert next(loader)['x'].tolist() == [0, 1, 2, 3]
        with pytest.raises(GranularError):
            next(loader)
        assert next(loader)['x'].tolist() == [4, 5, 6, 7]


def test_files_of_checksums_are_ignored_there(oracle21, tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'n': 'int'}, granular.encoders) as writer:
        writer.append({'n': 3})
    assert list(pathlib.Path(tmp_path / 'ds').glob('*.crc'))
    script = 'print(json.dumps(granular.DatasetReader(sys.argv[1], granular.decoders)[0]))'
    assert oracle21.run(script, str(tmp_path / 'ds')) == {'n': 3}
