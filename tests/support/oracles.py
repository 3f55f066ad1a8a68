"""Published packages, each in an environment of its own: they read what we write, and we read theirs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests import ROOT

HOME = ROOT / '.oracles'


class Oracle:
    """A package.

    Args:
      name: of its environment, which is made if it is not there.
      packages: what is installed there.
      prelude: what each script begins with.
    """

    def __init__(self, name: str, packages: Sequence[str], prelude: str) -> None:
        self.name, self._prelude = name, prelude
        home = HOME / name
        self._python = home / 'bin' / 'python'
        if not (home / 'ready').exists():
            subprocess.run([sys.executable, '-m', 'venv', home], check=True)
            subprocess.run([self._python, '-m', 'pip', 'install', '-q', *packages], check=True)
            (home / 'ready').touch()

    @classmethod
    def granular(cls, version: str) -> 'Oracle':
        """A release of granular."""
        packages = [f'granular=={version}', 'pillow', 'av']
        return cls(version, packages, 'import sys, json, granular, numpy as np\n')

    @classmethod
    def grain(cls) -> 'Oracle':
        """Google Grain."""
        return cls('grain', ['grain==0.2.18'], 'import sys, json, grain, numpy as np\n')

    def run(self, script: str, *args: str) -> Any:
        """Run a script there; what it prints is JSON."""
        done = subprocess.run(
            [self._python, '-I', '-c', self._prelude + script, *args],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f'{self.name}: {done.stderr[-3000:]}')
        return json.loads(done.stdout) if done.stdout.strip() else None
