"""Packages of others add a store, a format and a command by entry points."""

import os
import subprocess
import sys

import pytest

from tests import ROOT

PACKAGE = '''
import typer

from granular.aio.stores.local.store import LocalStore


class Shelf(LocalStore):
    """A store whose buckets are folders of the current one."""

    def __init__(self, root, config, options):
        super().__init__(root, config, options)
        self._folder = root.partition("://")[2]

    def _shelved(self, key):
        return f"{self._folder}/{key}"

    async def read(self, key, *args, **kwargs):
        return await super().read(self._shelved(key), *args, **kwargs)


class Lines:
    def __init__(self, path, encoding="utf-8"):
        with open(path, encoding=encoding) as file:
            self.lines = file.read().splitlines()

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return self.lines[index]


def count(path: str, twice: bool = False):
    typer.echo(len(Lines(path).lines) * (1 + twice))
'''
POINTS = """
[granular.stores]
shelf = shelf_plugin:Shelf

[granular.sources]
lines = shelf_plugin:Lines
broken = shelf_plugin:Missing

[granular.commands]
count = shelf_plugin:count
"""


@pytest.fixture
def run(tmp_path):
    installed = tmp_path / 'installed'
    for name in ('shelf', 'other'):
        info = installed / f'{name}-1.0.dist-info'
        info.mkdir(parents=True)
        (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n')
    (installed / 'shelf-1.0.dist-info/entry_points.txt').write_text(POINTS)
    (installed / 'shelf_plugin.py').write_text(PACKAGE)
    (tmp_path / 'books').mkdir()
    (tmp_path / 'books/a.lines').write_text('one\ntwo\nthree\n')
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(installed), str(ROOT)])}

    def run(*arguments):
        result = subprocess.run(
            [sys.executable, *arguments],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
            cwd=tmp_path,
            env=environment,
        )
        return result.stdout + result.stderr

    run.points = installed / 'other-1.0.dist-info/entry_points.txt'
    return run


def test_a_store_is_found_by_its_scheme(run):
    program = 'import granular; print(granular.Path("shelf://books/a.lines").read_bytes())'
    assert run('-c', program) == "b'one\\ntwo\\nthree\\n'\n"


def test_a_format_is_found_by_its_suffix_or_name(run):
    program = """
import asyncio, granular
lines = granular.open("books/a.lines")
print(granular.MapDataset.source(lines).batch(3)[0].tolist(), granular.open("books/a.lines", format="lines")[2])
print(len(asyncio.run(granular.aio.open("books/a.lines", encoding="ascii"))))
"""
    assert run('-c', program) == "['one', 'two', 'three'] three\n3\n"


def test_a_command_is_added(run):
    assert run('-m', 'granular', 'count', 'books/a.lines', '--twice') == '6\n'
    assert 'count' in run('-m', 'granular', '--help')


def test_what_cannot_be_imported_and_what_is_named_twice_are_errors(run):
    program = 'import granular; granular.open("x.broken")'
    assert "granular.sources: 'broken' is shelf_plugin:Missing, which cannot be imported" in run('-c', program)
    run.points.write_text('[granular.sources]\nlines = elsewhere:Lines\n')
    assert "'lines' is both " in run('-c', 'import granular; granular.open("x.lines")')
