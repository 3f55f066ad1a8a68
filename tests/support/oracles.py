"""Published packages, each in its own environment: they read our files, and we read theirs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

from tests import ROOT
from tests.support.interpreters import Interpreter

HOME = ROOT / '.oracles'

# Values without numpy, for JSON.
_PLAIN = """
def plain(x):
    if isinstance(x, dict): return {k: plain(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)): return [plain(v) for v in x]
    return x.tolist() if hasattr(x, 'tolist') else x
"""


class Oracle:
    """A package in its own environment.

    Args:
      name: of its environment, which is made if it is not there.
      packages: what is installed there.
      module: that each script finds imported, beside ``plain``.
    """

    def __init__(self, name: str, packages: Sequence[str], module: str) -> None:
        self.name = name
        self._prelude = f'import sys, json, {module}, numpy as np\n{_PLAIN}'
        home = HOME / name
        if not (home / 'ready').exists():
            subprocess.run([sys.executable, '-m', 'venv', home], check=True)
            subprocess.run([home / 'bin' / 'python', '-m', 'pip', 'install', '-q', *packages], check=True)
            (home / 'ready').touch()
        self._interpreter = Interpreter(module, 'numpy', python=home / 'bin' / 'python', options=['-I'])

    @classmethod
    def granular(cls, version: str) -> 'Oracle':
        """A release of granular."""
        packages = [f'granular=={version}', 'pillow', 'av']
        return cls(version, packages, 'granular')

    @classmethod
    def grain(cls) -> 'Oracle':
        """Google Grain."""
        return cls('grain', ['grain==0.2.18'], 'grain')

    def run(self, script: str, *args: str) -> Any:
        """Run a script in the environment, and return the JSON that it prints."""
        done = self._interpreter.run(self._prelude + script, *args)
        if done.returncode:
            raise RuntimeError(f'{self.name}: {done.stderr[-3000:]}')
        return json.loads(done.stdout) if done.stdout.strip() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._interpreter.__exit__(None, None, None)


class KappaData:
    """Releases of KappaData in folders of their own, over the torch of the tests.

    What they require besides is replaced by empty modules: torchvision and timm, which only their transforms use, have
    no build for every torch.
    """

    VERSIONS = ('0.0.8', '1.4.15')

    def __init__(self) -> None:
        for version in self.VERSIONS:
            home = HOME / f'kappadata-{version}'
            if not (home / 'ready').exists():
                install = [sys.executable, '-m', 'pip', 'install', '-q', '--disable-pip-version-check', '--no-deps']
                subprocess.run([*install, '--target', home, f'kappadata=={version}'], check=True)
                (home / 'ready').touch()
        self._interpreter = Interpreter('torch', 'redis', 'PIL.Image', options=['-I'])

    def run(self, version: str, script: str, *args: str) -> Any:
        """Run a script that finds ``kappadata`` imported, and return the JSON that it prints."""
        done = self._interpreter.run(_ABSENT + script, str(HOME / f'kappadata-{version}'), *args)
        if done.returncode:
            raise RuntimeError(f'kappadata {version}: {done.stderr[-3000:]}')
        return json.loads(done.stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._interpreter.__exit__(None, None, None)


_ABSENT = """
import importlib, importlib.abc, importlib.machinery, inspect, json, sys, types

class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torchvision', 'timm', 'kappaschedules', 'joblib', 'einops'):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = make
        return module

    def exec_module(self, module):
        pass

def make(name):
    if name[0] == '_':
        raise AttributeError(name)
    return type(name, (), {})

sys.meta_path.insert(0, Absent())
sys.path.insert(0, sys.argv[1])

def initialize(self, dataset, indices):
    self.dataset, self.indices = dataset, indices

# As in the releases of torch that KappaData was written for: later ones refuse its subclasses of Subset.
import torch.utils.data
torch.utils.data.Subset.__init__ = initialize
import kappadata
"""
