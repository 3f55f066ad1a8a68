"""Published packages, each in its own environment: they read our files, and we read theirs."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
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


class Megatron:
    """Megatron's own reader and writer of datasets, in a folder of their own, over the torch of the tests."""

    def __init__(self) -> None:
        self._home = HOME / 'megatron-core-0.16.1'
        if not (self._home / 'ready').exists():
            # One build for every Python: what is compiled in it is not imported.
            wheel = ['--python-version', '3.11', '--platform', 'manylinux_2_28_x86_64', '--only-binary=:all:']
            install = [sys.executable, '-m', 'pip', 'install', '-q', '--disable-pip-version-check', '--no-deps', *wheel]
            subprocess.run([*install, '--target', self._home, 'megatron-core==0.16.1'], check=True)
            (self._home / 'ready').touch()
        self._interpreter = Interpreter('torch', options=['-I', '-W', 'ignore'])

    def write(self, folder: Any, datasets: Mapping[str, Sequence[Any]]) -> None:
        """Write datasets by their names, each of a dtype, documents of sequences of tokens, and True for modes.

        The mode of a sequence is its length.
        """
        self._run(_WRITE, str(folder), json.dumps(datasets))

    def read(self, folder: Any, names: Sequence[str]) -> Any:
        """Return datasets by their names: the dtype, the sequences, their modes, and the ends of the documents.

        Those with ``modes`` in their name have modes.
        """
        return json.loads(self._run(_READ, str(folder), *names))

    def _run(self, script: str, *args: str) -> str:
        done = self._interpreter.run(_MEGATRON + script, str(self._home), *args)
        if done.returncode:
            raise RuntimeError(f'megatron-core: {done.stderr[-3000:]}')
        return done.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._interpreter.__exit__(None, None, None)


# Without the rest of the package, which its module for datasets needs for a line of its log.
_MEGATRON = """
import json, sys, types
core, utils = types.ModuleType('megatron.core'), types.ModuleType('megatron.core.utils')
core.__path__, utils.log_single_rank = [f'{sys.argv[1]}/megatron/core'], lambda *args: None
sys.modules.update({'megatron.core': core, 'megatron.core.utils': utils})
sys.path.insert(0, sys.argv[1])
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
"""

_WRITE = """
for name, (dtype, documents, modes) in json.loads(sys.argv[3]).items():
    builder = IndexedDatasetBuilder(f'{sys.argv[2]}/{name}.bin', getattr(np, dtype), multimodal=modes)
    for document in documents:
        for tokens in document:
            builder.add_item(torch.tensor(tokens, dtype=torch.int64), len(tokens))
        builder.end_document()
    builder.finalize(f'{sys.argv[2]}/{name}.idx')
"""

_READ = """
out = {}
for name in sys.argv[3:]:
    modes = 'modes' in name
    dataset = IndexedDataset(f'{sys.argv[2]}/{name}', multimodal=modes, mmap=False)
    items = [dataset[i] for i in range(len(dataset))]
    out[name] = [
        str(np.dtype(dataset.index.dtype)), [(item[0] if modes else item).tolist() for item in items],
        [int(item[1]) for item in items] if modes else None, dataset.document_indices.tolist(),
    ]
print(json.dumps(out))
"""

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
