import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest


@pytest.mark.parametrize('store', ['s3', 'gcs', 'local'])
def test_the_demo(store):
    command = [sys.executable, '-W', 'error', '-m', 'granular', 'demo', '--store', store]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    assert (done.returncode, done.stderr) == (0, '')
    assert 'reading 1,797 datapoints of 4 shards, 2 epochs' in done.stdout
    assert "restored at {'step': 1792, 'seed': 0}" in done.stdout
    assert 'every datapoint once, in different orders' in done.stdout
    saved, ranges = re.search(r'saved by coalescing\s+([\d,]+) of ([\d,]+)', done.stdout).groups()
    assert 0 < int(saved.replace(',', '')) < int(ranges.replace(',', ''))


def test_what_the_demo_keeps():
    command = [sys.executable, '-m', 'granular']
    done = subprocess.run(
        [*command, 'demo', '--store', 'local', '--keep'], capture_output=True, text=True, timeout=55, check=True
    )
    place = re.search(r'granular info (\S+)', done.stdout)[1]
    try:
        found = subprocess.run([*command, 'info', place, '--json'], capture_output=True, text=True, check=True)
        assert json.loads(found.stdout)['datapoints'] == 1797
    finally:
        shutil.rmtree(pathlib.Path(place).parent)
