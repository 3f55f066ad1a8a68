"""Each code block of the README and of docs/ runs, in order, in an empty folder with empty buckets, as for a user.

The tag of a block says how it is tested:

- ``python`` runs in the namespace of its page. The comment behind a ``print(...)`` begins with what it prints.
- ``sh`` runs the commands that begin with ``granular`` or ``export``.
- ``console`` does so too, for lines that begin with ``$``, and compares what they print with the lines that follow.
- ``python no-run`` and ``sh no-run`` need what tests do not have: they are parsed, and counted in ``NOT_RUN``.
- ``text`` and file formats are not tested.

In expected output, ``...`` stands for anything.
"""

import ast
import builtins
import contextlib
import dataclasses
import doctest
import gc
import re
import shlex
import sys

import click
import numpy as np
import pytest
import typer

import granular
from granular import cli
from granular.cli import transfers  # noqa: F401 - which adds commands
from granular.cli.commands import app
from tests import ROOT

PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
LINKING = sorted([*ROOT.glob('*.md'), *(ROOT / 'docs').glob('*.md')])
FORMATS = {'text', 'toml', 'json', 'yaml'}
PROGRAMS = {'aws', 'cd', 'gcloud', 'git', 'make', 'pip', 'python', 'torchrun'}  # of which examples are not run
# Blocks tagged ``no-run``.
NOT_RUN = {'frameworks.md': 7, 'reliability.md': 1, 'sources.md': 19}


@dataclasses.dataclass(frozen=True)
class Block:
    tag: str
    line: int  # of its first line of text, from 1
    text: str


def blocks(page):
    """Yield the fenced blocks of a page."""
    lines = page.read_text().splitlines()
    start = None
    for number, line in enumerate(lines):
        if start is None and (match := re.match(r'`{3,}(.*)$', line)):
            start, tag = number + 1, match[1].strip()
        elif start is not None and re.match(r'`{3,}$', line):
            yield Block(tag, start + 1, '\n'.join(lines[start:number]) + '\n')
            start = None
    assert start is None, f'{page.name}:{start}: the block does not end'


def commands(block):
    """Yield the commands of a ``sh`` block as lists of words."""
    for line in block.text.replace('\\\n', ' ').splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def matches(expected, output):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected.strip() + '\n', output.strip() + '\n', flags)


def parse(words):
    """Parse a command without running it."""
    group = typer.main.get_command(app)
    name, command, arguments = group.resolve_command(click.Context(group), words[1:])
    command.make_context(name, arguments)


class EndOfExampleError(Exception):
    """Ends an example that loops forever; raised by a function that the setup of its page provides."""


class Runner:
    """Runs the blocks of one page.

    Args:
      page: the file.
      names: what the page's examples use and do not define.
    """

    def __init__(self, page, names, monkeypatch, capsys):
        self._page = page
        self._lines = page.read_text().splitlines()
        self._names = {'print': self._print, **names}
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def run(self, block):
        if block.tag == 'python':
            # Empty lines in front, so that tracebacks and ``_print`` see the line numbers of the page.
            code = compile('\n' * (block.line - 1) + block.text, self._page, 'exec')
            with contextlib.suppress(EndOfExampleError):  # which releases the loader, unlike pytest.raises
                exec(code, self._names)
        elif block.tag == 'sh':
            for words in commands(block):
                self._command(words)
        elif block.tag == 'console':
            for command, expected in re.findall(r'^\$ (.*)\n((?:(?!\$ ).*\n)*)', block.text, re.MULTILINE):
                output = self._command(shlex.split(command))
                assert not expected.strip() or matches(expected, output), f'{command} prints\n{output}'

    def close(self):
        """Close what the examples left open."""
        for value in list(self._names.values()):
            if type(value).__module__.startswith('granular.') and hasattr(value, 'close'):
                value.close()
        self._names.clear()

    def _print(self, *values, **options):
        builtins.print(*values, **options)
        line = sys._getframe(1).f_lineno
        if match := re.search(r'print\(.*\) +# (.*)$', self._lines[line - 1]):
            # An explanation may follow the output.
            ends = [*(end.start() for end in re.finditer(r'[:;,] ', match[1])), len(match[1])]
            output = ' '.join(map(str, values))
            assert any(matches(match[1][:end], output) for end in ends), f'{self._page.name}:{line} prints {output}'

    def _command(self, words):
        if words[0] == 'export':
            self._monkeypatch.setenv(*words[1].split('=', 1))
            return ''
        if words[0] != 'granular':
            assert words[0] in PROGRAMS, words
            return ''
        if words[1] == 'demo':  # takes seconds, and runs in tests/cli
            parse(words)
            return ''
        self._monkeypatch.setattr(sys, 'argv', words)
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output, errors = self._capsys.readouterr()
        assert not ended.value.code, f'{shlex.join(words)}: {errors}'
        return output


@pytest.fixture
def environment(user_buckets, tmp_path, monkeypatch):
    """An empty folder and empty buckets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.setenv('JAX_PLATFORMS', 'cpu')


def readme():
    """Provide the dataset and the function of the first example, and images to convert."""
    spec = {'image': 'array', 'label': 'int'}
    with granular.ShardedDatasetWriter('s3://my-bucket/train', spec, granular.encoders, shardlen=60) as writer:
        for i in range(120):
            writer.append({'image': np.full((32, 32, 3), i, np.uint8), 'label': i})
    image = granular.encoders['png'](np.zeros((8, 8, 3), np.uint8))
    (granular.Path('images') / 'cats').mkdir(parents=True)
    granular.Path('images/cats/0.png').write_bytes(image)
    steps = iter(range(3))

    def train(batch):
        assert {key: (array.shape, array.dtype) for key, array in batch.items()} == {
            'image': ((64, 32, 32, 3), np.uint8),
            'label': ((64,), np.int64),
        }
        if next(steps, None) is None:
            raise EndOfExampleError

    return {'train': train}


SETUP = {'README.md': readme}


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_examples_run(page, environment, monkeypatch, capsys):
    runner = Runner(page, SETUP.get(page.name, dict)(), monkeypatch, capsys)
    try:
        for block in blocks(page):
            runner.run(block)
    finally:
        runner.close()
        gc.collect()


@pytest.mark.parametrize('page', LINKING, ids=lambda page: page.name)
def test_blocks_have_tags(page):
    not_run = 0
    for block in blocks(page):
        assert block.tag.removesuffix(' no-run') in {'python', 'sh', 'console', *FORMATS}, f'{page.name}:{block.line}'
        if block.tag == 'python no-run':
            ast.parse(block.text)
        elif block.tag == 'sh no-run':
            for words in commands(block):
                if words[0] == 'granular':
                    parse(words)
        not_run += block.tag.endswith(' no-run')
    assert not_run == NOT_RUN.get(page.name, 0)


def anchors(page):
    """Return the anchors of a page's headings, as GitHub names them."""
    prose = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r'^#+ (.*)$', prose, re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('page', LINKING, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    for path, _, anchor in re.findall(r'\]\((?!https?:)([^)#]*)(#?)([^)]*)\)', page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f'{path}#{anchor}'


def test_the_readme_links_to_each_page():
    links = re.findall(r'\]\((docs/[^)#]*\.md)\)', (ROOT / 'README.md').read_text())
    assert {f'docs/{page.name}' for page in PAGES[1:]} <= set(links)
