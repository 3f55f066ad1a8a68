"""The published releases of granular, each in an environment of its own: they read what we write, we read theirs."""

import json
import pathlib
import subprocess
import sys
from typing import Any

HOME = pathlib.Path(__file__).parent.parent / '.oracles'


class Oracle:
    """A release.

    Args:
      version: as on PyPI. Its environment is made if it is not there.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        home = HOME / version
        self._python = home / 'bin' / 'python'
        if not (home / 'ready').exists():
            subprocess.run([sys.executable, '-m', 'venv', home], check=True)
            packages = [f'granular=={version}', 'pillow', 'av']
            subprocess.run([self._python, '-m', 'pip', 'install', '-q', *packages], check=True)
            (home / 'ready').touch()

    def run(self, script: str, *args: str) -> Any:
        """Run a script there; what it prints is JSON."""
        prelude = 'import sys, json, granular, numpy as np\n'
        done = subprocess.run(
            [self._python, '-I', '-c', prelude + script, *args], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RuntimeError(f'granular {self.version}: {done.stderr[-3000:]}')
        return json.loads(done.stdout) if done.stdout.strip() else None
