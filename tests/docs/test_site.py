"""The sources of the documentation site are complete; `make docs` builds it, with warnings as errors, and checks it."""

import ast
import re
import sys

import pytest

import granular
import granular.aio
from tests import ROOT
from tests.docs.test_documentation import anchors

DOCS = ROOT / 'docs'
MODULES = [
    'granular', 'granular.aio', 'granular.aio.sources', 'granular.changes', 'granular.config', 'granular.errors',
    'granular.filters',
    'granular.formats', 'granular.metrics',
    'granular.shuffle', 'granular.sources', 'granular.testing',
] + [
    f'granular.integrations.{path.stem}' for path in sorted((ROOT / 'granular/integrations').iterdir())
    if path.stem not in ('__init__', '__pycache__', 'batches', 'torch_iterable')
]  # fmt: skip
PEERS = {'granular.grain', 'granular.kappadata', 'granular.aio.kappadata'}  # whose names are mostly those of others
ENTRY = re.compile(
    r'^\.\. (auto\w+|py:\w+):: (granular\S+)$(?:\n\n   The same as :(?:py:)?\w+:`(\S+)`\.)?', re.MULTILINE
)
ENTRIES = [
    entry
    for page in sorted((DOCS / 'reference').glob('*.rst'))
    for entry in ENTRY.findall(page.read_text())
    if entry[0] != 'automodule'
]


def public(module):
    """Return the public names of a module: ``__all__``, or else the classes, functions and constants it defines."""
    if (listed := getattr(sys.modules.get(module), '__all__', None)) is not None:
        return set(listed)
    path = ROOT / module.replace('.', '/')
    body = ast.parse((path / '__init__.py' if path.is_dir() else path.with_suffix('.py')).read_text()).body
    names = []
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == '__all__':
                return set(ast.literal_eval(node.value))
            names.append(ast.unparse(target))
    return {name for name in names if re.fullmatch(r'[A-Za-z]\w*', name)}


def find(name):
    value = granular
    for part in name.split('.')[1:]:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize('module', MODULES)
def test_each_public_name_has_one_entry(module):
    names = {f'{module}.{name}' for name in public(module)} - {*MODULES, *PEERS}
    entries = [name for _, name, _ in ENTRIES if name.rpartition('.')[0] == module]
    assert sorted(entries) == sorted(names)


def test_first_page_of_the_reference_lists_all_names_of_the_package():
    listed = re.findall(r':py:(?:obj|mod):`~granular\.(\w+)`', (DOCS / 'reference/index.rst').read_text())
    assert sorted(listed) == sorted(granular.__all__)


def test_what_is_the_same_is_described_once():
    aliases = {name: original for _, name, original in ENTRIES if original}
    described = {name for _, name, original in ENTRIES if not original}
    assert set(aliases.values()) <= described
    for name, original in aliases.items():
        if 'integrations' not in name:
            assert find(name) is find(original), name
    values = [find(name) for name in described if not name.startswith(('granular.integrations.', 'granular.config.'))]
    values = [value for value in values if callable(value) and not hasattr(value, '__origin__')]
    assert len({id(value) for value in values}) == len(values)


def test_each_page_is_in_the_navigation():
    listed = set()
    for index in (DOCS / 'index.md', DOCS / 'reference/index.rst'):
        folder = index.parent.relative_to(DOCS)
        listed |= {str(folder / name) for name in re.findall(r'^ *([a-z][\w/.-]*)$', index.read_text(), re.MULTILINE)}
    pages = {path.relative_to(DOCS).with_suffix('') for path in [*DOCS.rglob('*.md'), *DOCS.rglob('*.rst')]}
    assert {str(page) for page in pages} - {'index'} == listed


def test_searches_lead_to_each_recipe_and_to_sections_that_exist():
    tree = ast.parse((DOCS / '_site/check.py').read_text())
    (searches,) = (ast.literal_eval(node.value) for node in tree.body if ast.unparse(node).startswith('SEARCHES ='))
    assert {'second epoch', 'skip corrupt images', 'grayscale', 'audio window', 'batch_size'} <= set(searches)
    pages = {address.partition('.html')[0] for address in searches.values()}
    assert {f'recipes/{path.stem}' for path in (DOCS / 'recipes').glob('*.md')} <= pages
    for address in searches.values():
        page, _, anchor = address.partition('.html')
        path = DOCS / f'{page}.md'
        assert not path.exists() or not anchor or anchor[1:] in anchors(path), address


def test_each_file_of_the_repository_that_pages_link_to_is_in_the_site():
    linked = {name for page in DOCS.glob('*.md') for name in re.findall(r'\]\(\.\./([\w.-]+)', page.read_text())}
    included = re.findall(r'\{(?:include|examples)\} (?:\.\./)+([\w.]+)', ''.join(
        page.read_text() for page in [DOCS / 'index.md', *(DOCS / 'project').glob('*.md')]
    ))  # fmt: skip
    assert linked | {path.name for path in ROOT.glob('*.md')} <= set(included)
