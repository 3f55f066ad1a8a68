"""The tables in docs/coming-from: every public name of Grain and KappaData is there, or in our module of its name."""

import importlib.util
import inspect
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

ARGUMENTS = """
import importlib, inspect
out = {}
for module in ('', 'experimental', 'multiprocessing', 'samplers', 'sharding', 'sources', 'transforms'):
    owner = importlib.import_module(f'grain.{module}'.rstrip('.'))
    found = {key: value for key, value in vars(owner).items() if key[0] != '_' and key != 'DataLoaderIterator'}
    for kind in ('MapDataset', 'IterDataset'):
        methods = vars(found[kind]).items() if kind in found else ()
        found.update({f'{kind}.{key}': value for key, value in methods if key[0] != '_'})
    for key, value in found.items():
        try:
            parameters = inspect.signature(value).parameters.values()
        except (TypeError, ValueError):
            continue
        names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        out[f'grain.{module}.{key}'.replace('..', '.')] = [name for name in names if name[0] != '_' and name != 'self']
print(json.dumps(out))
"""

OPTIONAL = {'CheckpointSave', 'CheckpointRestore'}  # Grain has them only if Orbax is installed


KAPPADATA = """
import pkgutil
modules = ['caching', 'collators', 'common', 'copying', 'errors', 'loading', 'transforms', 'utils', 'wrappers']
wrappers = importlib.import_module('kappadata.wrappers').__path__
wrappers = [module.name.removeprefix('kappadata.') for module in pkgutil.walk_packages(wrappers, 'kappadata.wrappers.')]
copying = ['copying.folder', 'copying.image_folder', 'copying.create_zips', 'copying.copying_utils',
           'copying.copy_folder_from_global_to_local']
found = {}
for module in ['', *modules, *wrappers, *copying]:
    try:
        owner = importlib.import_module(f'kappadata.{module}'.rstrip('.'))
    except ImportError:
        continue
    for name, value in vars(owner).items():
        if module in wrappers and not name.endswith('Wrapper'):
            continue  # bases and messages
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
    """Yield the package's names and our column for each row of a page's table of names."""
    for line in re.findall(r'^\| (`.*) \|$', (ROOT / f'docs/coming-from/{page}.md').read_text(), re.MULTILINE):
        theirs, _, ours = line.partition(' | ')
        assert ours
        yield re.findall(r'`([\w.*]+)`', theirs), ours


def find(name):
    """Return an object of granular, by its name without ``granular.``; None for a module of integrations."""
    if name.startswith('integrations.'):  # not imported: where JAX is, no process may be forked
        assert importlib.util.find_spec(f'granular.{name}') is not None
        return None
    owner = granular
    for part in name.split('.'):
        owner = getattr(owner, part)
    return owner


def check_names(page, public, flat=False):
    """Check that each public name is listed or in our module, and that each listed name is public, and not in it.

    The methods of a class are listed with its name. Names of all modules are in one, if ``flat``.
    """
    listed = [name for names, _ in rows(page) for name in names]
    modules = {name.removesuffix('.*') for name in listed if name.endswith('.*')}
    assert len(set(listed)) == len(listed)
    known = {f'{module}.*' for module in modules & public.keys()}
    for module, names in public.items():
        kind = module.rpartition('.')[2]
        prefix = f'{kind}.' if kind[0].isupper() else ''
        known.update(prefix + name for name in names)
        for name in () if module in modules else names:
            if prefix + name not in listed:
                find(f'{page}.{prefix}{name}' if flat else f'{module}.{name}')
    assert set(listed) - OPTIONAL <= known


def test_every_public_name_of_grain_is_listed_or_the_same(grain):
    public = grain.run(NAMES)
    assert sum(map(len, public.values())) > 100
    check_names('grain', public)


def test_every_argument_of_grain_is_listed_or_the_same(grain):
    page = (ROOT / 'docs/coming-from/grain.md').read_text()
    missing, compared = {}, 0
    for name, arguments in grain.run(ARGUMENTS).items():
        try:
            ours = inspect.signature(find(name)).parameters
        except (AttributeError, TypeError, ValueError):
            continue  # listed, by the test above, or a type
        compared += 1
        if all(each.kind is not each.VAR_KEYWORD for each in ours.values()):
            missing[name] = [argument for argument in arguments if argument not in ours and f'`{argument}`' not in page]
    assert compared > 60
    assert {name: arguments for name, arguments in missing.items() if arguments} == {}


def test_every_public_name_of_kappadata_is_listed_or_the_same(kappadata):
    public = {}
    for version in kappadata.VERSIONS:
        for module, names in kappadata.run(version, KAPPADATA).items():
            public.setdefault(module, set()).update(names)
    assert sum(map(len, public.values())) > 150
    check_names('kappadata', public, flat=True)


@pytest.mark.parametrize(('page', 'count'), [('grain', 7), ('kappadata', 15)])
def test_our_names_exist(page, count):
    names = [name for _, ours in rows(page) for name in re.findall(r'`granular\.([\w.]+)`', ours)]
    assert len(names) > count
    for name in names:
        find(name)
