"""The tables in docs/coming-from: every public name of Grain and KappaData is there, and ours beside them exist."""

import importlib
import re

import pytest

import granular
from tests import ROOT

NAMES = """
import importlib, inspect
out = {}
for module in ('', 'checkpoint', 'constants', 'experimental', 'multiprocessing', 'samplers', 'sharding', 'sources',
               'transforms'):
    name = f'grain.{module}'.rstrip('.')
    owner = importlib.import_module(name)
    out[name] = [key for key in dir(owner) if key[0] != '_' and not inspect.ismodule(getattr(owner, key))]
for name in ('MapDataset', 'IterDataset', 'DatasetIterator', 'DataLoader'):
    owner = getattr(grain, name)
    keys = {*dir(owner), *(key for kind in type(owner).__mro__ if 'grain' in kind.__module__ for key in vars(kind))}
    out[f'grain.{name}'] = [key for key in keys if key[0] != '_']
print(json.dumps(out))
"""

OPTIONAL = {'CheckpointSave', 'CheckpointRestore'}  # Grain has them only if Orbax is installed


KAPPADATA = """
modules = ['caching', 'collators', 'common', 'copying', 'errors', 'loading', 'transforms', 'utils', 'wrappers']
copying = ['copying.folder', 'copying.image_folder', 'copying.create_zips', 'copying.copying_utils',
           'copying.copy_folder_from_global_to_local']
found = {}
for module in ['', *modules, *copying]:
    try:
        owner = importlib.import_module(f'kappadata.{module}'.rstrip('.'))
    except ImportError:
        continue
    for name, value in vars(owner).items():
        if name[0] != '_' and not inspect.ismodule(value) and getattr(value, '__module__', '').startswith('kappadata'):
            kind = value.__module__.split('.')[1]
            found.setdefault(f'kappadata.{kind}' if kind in modules else 'kappadata', set()).add(name)
public = {key for key in dir(kappadata.KDDataset) if key[0] != '_'} - set(dir(__import__('torch').utils.data.Dataset))
found['kappadata.KDDataset'] = public
wrapper = __import__('kappadata.wrappers.mode_wrapper', fromlist=['ModeWrapper']).ModeWrapper
found['kappadata.ModeWrapper'] = {key for key in vars(wrapper) if key[0] != '_'} - public
print(json.dumps({key: sorted(names) for key, names in found.items()}))
"""


def rows(page):
    """Yield the module, the package's names and our column for each row of a page's table of all names.

    The names are None in a row that stands for all names of a module.
    """
    module = None
    for line in re.findall(r'^\| (.*) \|$', (ROOT / f'docs/coming-from/{page}.md').read_text(), re.MULTILINE):
        theirs, _, ours = line.partition(' | ')
        if title := re.match(r'\*\*`([\w.]+)`\*\*', theirs):
            module = title[1]
        elif module:
            yield module, None if theirs == 'all names' else re.findall(r'`(\w+)`', theirs), ours


def listed(page, public):
    """Return the names that a page lists for each module, and those of a whole module where a row stands for all."""
    found = {}
    for module, names, ours in rows(page):
        assert ours
        found.setdefault(module, []).extend(public[module] if names is None else names)
    return {module: sorted(names) for module, names in found.items()}


def test_every_public_name_of_grain_is_listed(grain):
    public = {module: sorted(set(names) - OPTIONAL) for module, names in grain.run(NAMES).items()}
    found = listed('grain', public)
    found['grain.checkpoint'] = [name for name in found['grain.checkpoint'] if name not in OPTIONAL]
    assert found == public


def test_every_public_name_of_kappadata_is_listed(kappadata):
    public = {}
    for version in kappadata.VERSIONS:
        for module, names in kappadata.run(version, KAPPADATA).items():
            public.setdefault(module, set()).update(names)
    public = {module: sorted(names) for module, names in public.items()}
    assert listed('kappadata', public) == public


def ours(page):
    """Yield the names of ours in a page's table. ``the same`` stands for theirs, of our class of the same name."""
    for module, theirs, cell in rows(page):
        yield from re.findall(r'`granular\.([\w.]+)`', cell)
        if cell.startswith('the same'):
            kind = module.rpartition('.')[2]
            owner = re.match(r'the same of `granular\.(\w+)`', cell) or re.match(r'([A-Z]\w+)', kind)
            yield from (f'{owner[1]}.{name}' if owner else name for name in theirs)


@pytest.mark.parametrize(('page', 'count'), [('grain', 90), ('kappadata', 45)])
def test_our_names_exist(page, count):
    names = list(ours(page))
    assert len(names) > count
    for name in names:
        if name.startswith('integrations.'):
            importlib.import_module(f'granular.{name}')
            continue
        owner = granular
        for part in name.split('.'):
            owner = getattr(owner, part)
