"""The tables of the migration page: every public name of Grain is there, and our names beside them exist."""

import importlib
import re

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


def rows():
    """Yield the module, Grain's names and our column for each row of the tables."""
    section = (ROOT / 'docs/migration.md').read_text().split('### Every public name of Grain')[1].split('\n## ')[0]
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


def test_our_names_exist():
    names = [name for _, _, ours in rows() for name in re.findall(r'`granular\.([\w.]+)`', ours)]
    assert len(names) > 60
    for name in names:
        if name.startswith('integrations.'):
            importlib.import_module(f'granular.{name}')
            continue
        owner = granular
        for part in name.split('.'):
            owner = getattr(owner, part)
