"""Published packages, each in its own environment: they read our files, and we read theirs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Self

from tests import ROOT
from tests.support.interpreters import Interpreter

HOME = ROOT / '.oracles'


class Oracle:
    """A package in its own environment.

    Args:
      name: of its environment, which is made if it is not there.
      packages: what is installed there.
      module: that each script finds imported.
    """

    def __init__(self, name: str, packages: Sequence[str], module: str) -> None:
        self.name = name
        self._prelude = f'import sys, json, {module}, numpy as np\n'
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
