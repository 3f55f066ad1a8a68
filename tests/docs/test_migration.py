"""The tables of the migration page: every public name of Grain and KappaData is there, and ours beside them exist."""

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


def rows(package='Grain'):
    """Yield the module, a package's names and our column for each row of its tables."""
    section = (ROOT / 'docs/migration.md').read_text().split(f'### Every public name of {package}')[1].split('\n## ')[0]
    for part in section.split('#### `')[1:]:
        module, table = part.split('`', 1)
        for line in re.findall(r'^\| (`.*) \|$', table, re.MULTILINE):
            theirs, ours = line.split(' | ')
            yield module, re.findall(r'`(\w+)`', theirs), ours


def test_every_public_name_of_grain_is_listed(grain):
    listed = {}
    for module, names, ours in rows():
        assert ours
        listed.setdefault(module, []).extend(names)
    listed['grain.checkpoint'] = [name for name in listed['grain.checkpoint'] if name not in OPTIONAL]
    assert {module: sorted(names) for module, names in listed.items()} == {
        module: sorted(set(names) - OPTIONAL) for module, names in grain.run(NAMES).items()
    }


def test_every_public_name_of_kappadata_is_listed(kappadata):
    listed, public = {}, {}
    for module, names, ours in rows('KappaData'):
        assert ours
        listed.setdefault(module, []).extend(names)
    for version in kappadata.VERSIONS:
        for module, names in kappadata.run(version, KAPPADATA).items():
            public.setdefault(module, set()).update(names)
    assert {module: sorted(names) for module, names in listed.items()} == {
        module: sorted(names) for module, names in public.items()
    }


@pytest.mark.parametrize(('package', 'count'), [('Grain', 60), ('KappaData', 30)])
def test_our_names_exist(package, count):
    names = [name for _, _, ours in rows(package) for name in re.findall(r'`granular\.([\w.]+)`', ours)]
    assert len(names) > count
    for name in names:
        if name.startswith('integrations.'):
            importlib.import_module(f'granular.{name}')
            continue
        owner = granular
        for part in name.split('.'):
            owner = getattr(owner, part)
