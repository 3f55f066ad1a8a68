"""A release rehearsal: ``make release-check``.

Builds the sdist and, from it, the wheel, checks them with twine, and installs the wheel without extras and with each
extra alone, on each Python that is found, where it is imported and reads a small dataset.

    make release-check ARGS='--pythons 3.11 3.13 --extras s3 gcs'
"""

import argparse
import glob
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PYTHONS = ('3.11', '3.12', '3.13', '3.14')
# Those of this repository: their packages are not for users.
OURS = {'bench', 'docs', 'fuzz', 'lint', 'test'}

PROGRAM = """
import importlib, importlib.util, os, sys, granular
for api in (granular, granular.aio):
    for name in api.__all__:
        getattr(api, name)
with granular.DatasetWriter('data', {'x': 'int', 'name': 'utf8'}) as writer:
    for x in range(10):
        writer.append({'x': x, 'name': f'{x}'})
with granular.open('data') as reader:
    assert reader.fetch([3, 1]) == [{'x': 3, 'name': '3'}, {'x': 1, 'name': '1'}]
import fsspec
assert fsspec.get_filesystem_class('granular+s3').__module__ == 'granular.integrations.fsspec'
"""
INSTALLED = """
assert granular.__version__ in os.environ['WHEEL'], (granular.__version__, os.environ['WHEEL'])
assert 'site-packages' in granular.__file__, granular.__file__
"""

# What an extra is for, beyond the import of ``granular.integrations`` of its name.
UNREACHABLE = """
try:
    granular.Path({address!r}, config=granular.IOConfig(attempts=1, retry_time=1), {options}).exists()
except granular.errors.StoreError:
    pass
"""
USES = {
    's3': UNREACHABLE.format(address='s3://b/x', options='endpoint_url="http://127.0.0.1:1", key="k", secret="s"'),
    'gcs': UNREACHABLE.format(address='gs://b/x', options='endpoint_url="https://127.0.0.1:1", token="t"'),
    'azure': UNREACHABLE.format(address='az://b/x', options='account_key="aw==", endpoint_url="http://127.0.0.1:1/a"'),
    'formats': 'import numpy; granular.encoders["jpg"](numpy.zeros((4, 4, 3), "uint8"))',
    'cli': 'import subprocess; subprocess.run([sys.executable, "-m", "granular", "info", "data"], check=True)',
    'view': 'import granular.view',
    'parquet': """
import pyarrow, pyarrow.parquet
pyarrow.parquet.write_table(pyarrow.table({'x': [1, 2]}), 'x.parquet')
assert granular.open('x.parquet')[1] == {'x': 2}
""",
    'speedups': 'import simplejpeg, uvloop',
    'arrayrecord': 'import brotli, zstandard',
    'all': 'import adlfs, botocore, brotli, google.auth, PIL, pyarrow, typer, zstandard',
    'huggingface': 'import datasets',
    'redis': 'granular.RedisCache',
}


def found_pythons() -> dict[str, str]:
    """Return the interpreters by version, from PATH and from pyenv."""
    found = {}
    folders = [*os.get_exec_path(), *glob.glob(os.path.expanduser('~/.pyenv/versions/*/bin'))]
    for version in PYTHONS:
        for path in (pathlib.Path(folder, f'python{version}') for folder in folders):
            if path.exists() and run([path, '-c', 'import venv']).returncode == 0:
                found[version] = str(path)
                break
    return found


def run(command, **options):
    command = [str(part) for part in command]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def must(command, **options):
    done = run(command, **options)
    if done.returncode:
        sys.exit(f'{" ".join(map(str, command))}\n{done.stdout}\n{done.stderr}')
    return done.stdout


def build(folder: pathlib.Path) -> pathlib.Path:
    """Build the sdist and the wheel, check them, and return the wheel."""
    tools = folder / 'tools'
    must([sys.executable, '-m', 'venv', tools])
    must([tools / 'bin' / 'python', '-m', 'pip', 'install', '-q', 'build', 'twine'])
    must([tools / 'bin' / 'python', '-m', 'build', '--outdir', folder / 'dist', ROOT])
    files = sorted((folder / 'dist').iterdir())
    print(must([tools / 'bin' / 'twine', '--no-color', 'check', '--strict', *files]).strip())
    return next(file for file in files if file.suffix == '.whl')


def check(python: str, wheel: pathlib.Path, extra: str, folder: pathlib.Path) -> str:
    """Install the wheel with an extra in an environment of its own, and use it. Return what failed, or nothing."""
    environment = folder / 'environment'
    shutil.rmtree(environment, ignore_errors=True)
    must([python, '-m', 'venv', '--without-pip', environment])
    binary = environment / 'bin' / 'python'
    pip = [folder / 'tools' / 'bin' / 'python', '-m', 'pip', '--disable-pip-version-check', '--python', binary]
    for command in (['install', '-q', f'{wheel}[{extra}]' if extra else wheel], ['check']):
        if (done := run([*pip, *command])).returncode:
            return f'pip {command[0]}: {last(done)}'
    program = PROGRAM + INSTALLED + USES.get(extra, '')
    if (ROOT / 'granular' / 'integrations' / f'{extra}.py').exists() or extra == 'ray':
        program += f'\nimportlib.import_module("granular.integrations.{extra}")\n'
    variables = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
    with tempfile.TemporaryDirectory() as place:
        done = run([binary, '-c', program], cwd=place, env={**variables, 'WHEEL': wheel.name})
    return last(done) if done.returncode else ''


def last(done) -> str:
    lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if 'WARNING' not in line]
    return lines[-1] if lines else f'status {done.returncode}'


def main() -> None:
    extras = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
    known = ['none', *sorted(extras.keys() - OURS)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--pythons', nargs='*', choices=PYTHONS, default=PYTHONS)
    parser.add_argument('--extras', nargs='*', choices=known, default=known)
    arguments = parser.parse_args()
    pythons = found_pythons()
    failed = []
    with tempfile.TemporaryDirectory(prefix='granular-release-') as name:
        wheel = build(pathlib.Path(name))
        for version in arguments.pythons:
            if version not in pythons:
                print(f'{version}  not found on this machine', flush=True)
                continue
            for extra in arguments.extras:
                start = time.monotonic()
                problem = check(pythons[version], wheel, '' if extra == 'none' else extra, pathlib.Path(name))
                failed += [f'{version} {extra}'] if problem else []
                print(f'{version}  {extra:<14}{time.monotonic() - start:5.0f} s  {problem or "ok"}', flush=True)
    sys.exit(f'failed: {", ".join(failed)}' if failed else 0)


if __name__ == '__main__':
    main()
