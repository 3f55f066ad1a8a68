"""The programs of the release rehearsal run with the package as it is; the rehearsal installs it."""

import runpy
import subprocess
import sys

from tests import ROOT

CHECK = runpy.run_path(str(ROOT / '.ci' / 'release_check.py'))


def test_programs_of_all_extras_run(tmp_path):
    program = '\n'.join([CHECK['PROGRAM'], *CHECK['USES'].values()])
    done = subprocess.run([sys.executable, '-c', program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
