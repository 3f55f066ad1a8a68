"""The recipes of CONTRIBUTING.md name what the code has, and do what they say."""

import ast
import importlib
import inspect
import re

import pytest

import granular
from granular import metrics
from tests import ROOT

PAGE = ' '.join((ROOT / 'CONTRIBUTING.md').read_text().split())
ROOTS = [ROOT, ROOT / 'granular', ROOT / 'granular/aio']
NAMED = [
    (name, file)
    for names, file in re.findall(r'((?:`\w+`(?:, | and | or )?)+) in `([\w/]+\.py)`', PAGE)
    for name in re.findall(r'\w+', re.sub(' and | or ', ' ', names))
]


def found(name):
    return next((root / name for root in ROOTS if (root / name).exists()), None)


def defined(file):
    """Return the names that a module defines or declares at its top."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        for target in [*getattr(node, 'targets', []), *filter(None, [getattr(node, 'target', None)])]:
            names.add(ast.unparse(target))
    return names


@pytest.mark.parametrize(('name', 'file'), NAMED, ids=lambda value: value)
def test_names_are_defined_in_their_files(name, file):
    assert name in defined(found(file))


def test_files_folders_commands_and_programs_exist():
    assert len(NAMED) > 10
    paths = re.findall(r'`((?:\w+/)+|[\w/]+\.py)`', PAGE)
    assert not [path for path in paths if not path.startswith('build/') and not found(path)]
    targets = re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    assert set(re.findall(r'`make ([\w-]+)', PAGE)) <= set(targets)
    for module in re.findall(r'`python -m ([\w.]+)', PAGE):
        assert importlib.util.find_spec(module)


def test_order_of_the_recipe_is_that_of_the_protocol():
    signatures = {
        name: f'{name}({", ".join([*inspect.signature(method).parameters][1:])})'
        for name, method in inspect.getmembers(granular.shuffle.Order, inspect.isfunction)
        if not name.startswith('_')
    }
    assert set(re.findall(r'`((?:lookup|is_ready)\([^`]*\))`', PAGE)) == set(signatures.values())

    class Backwards:
        def lookup(self, positions, length, seed, epoch):
            return length - 1 - positions

        def is_ready(self, length, seed, epoch):
            return True

    assert list(granular.MapDataset.range(4).shuffle(seed=0, order=Backwards())) == [3, 2, 1, 0]


def test_caches_compare_the_identity_of_a_data_source(redis_server):
    class Source(granular.DataSource):
        def __init__(self, values, identity):
            self.values, self.identity = values, lambda: identity

        def __len__(self):
            return len(self.values)

        def fetch(self, indices):
            return [self.values[i] for i in indices]

    def cached(values, identity):
        with granular.RedisCache(Source(values, identity), redis_server.url) as cache:
            return cache.fetch([0, 1])

    assert cached([1, 2], ('file', 'version 1')) == [1, 2]
    assert cached([3, 4], ('file', 'version 1')) == [1, 2]
    assert cached([3, 4], ('file', 'version 2')) == [3, 4]


def test_each_metric_is_in_the_table_of_the_operations_page():
    page = (ROOT / 'docs/operations.md').read_text()
    listed = {name for row in re.findall(r'^\| .*', page, re.MULTILINE) for name in re.findall(r'`(\w+)`', row)}
    assert {sample.name for sample in metrics.samples()} <= listed
