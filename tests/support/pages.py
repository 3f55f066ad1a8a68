"""Run the code blocks of a documentation page, in order, as a user would.

``python -m tests.support.pages README.md`` runs a page in the working directory, and exits with an error at the first
block that fails. The tag of a block says how it is run:

- ``python`` runs in the namespace of its page. The comment behind a ``print(...)`` begins with the output.
- ``sh`` runs the commands that begin with ``granular`` or ``export``.
- ``console`` also compares the output of each ``$ granular`` command with the lines that follow it.
- Other tags are not run.

In expected output, ``...`` stands for anything.
"""

import builtins
import contextlib
import dataclasses
import doctest
import gzip
import io
import multiprocessing
import os
import pathlib
import re
import shlex
import sys
import tarfile
from unittest import mock

import click
import numpy as np
import pytest
import typer

import granular
from granular import cli
from granular.cli import edit, measuring, transfers  # noqa: F401 - which add commands
from granular.cli.commands import app
from tests import ROOT
from tests.support.forward_proxy import ForwardProxy, away

for name in granular.__all__:
    getattr(granular, name)  # import it before pages are forked

PROGRAMS = {'aws', 'cd', 'gcloud', 'git', 'make', 'pip', 'python', 'torchrun'}  # appear in examples and are not run


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block; ``line`` is the number of its first line of text, from 1."""

    tag: str
    line: int
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


def command_group():
    """Return the commands of ``granular``."""
    return typer.main.get_command(app)


def parse(words):
    """Parse a ``granular`` command without running it."""
    group = command_group()
    name, command, arguments = group.resolve_command(click.Context(group), words[1:])
    command.make_context(name, arguments)


def matches(expected, output):
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected.strip() + '\n', output.strip() + '\n', flags)


class EndOfExampleError(Exception):
    """Ends an example that loops forever; raised by a function that the setup of its page provides."""


class Runner:
    """Runs the blocks of one page.

    Args:
      page: the file.
      names: names that the page uses and does not define.
    """

    def __init__(self, page, names):
        self._page = page
        self._lines = page.read_text().splitlines()
        self._names = {'__name__': page.stem, 'print': self._print, **names}

    def run(self):
        for block in blocks(self._page):
            if block.tag == 'python':
                self._python(block)
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

    def _python(self, block):
        # Empty lines in front give tracebacks and ``_print`` the line numbers of the page.
        code = compile('\n' * (block.line - 1) + block.text, self._page, 'exec')
        with contextlib.suppress(EndOfExampleError):
            exec(code, self._names)

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
            os.environ.update([words[1].split('=', 1)])
            return ''
        if words[0] != 'granular':
            assert words[0] in PROGRAMS, words
            return ''
        if words[1] == 'demo':  # takes seconds, and runs in tests/cli
            parse(words)
            return ''
        output = io.StringIO()
        try:
            with mock.patch.object(sys, 'argv', words), contextlib.redirect_stdout(output):
                cli.main()
        except SystemExit as ended:
            assert not ended.code, shlex.join(words)
        return output.getvalue()


def readme():
    """Provide the dataset and the function of the first example, and images to convert."""
    spec = {'image': 'array', 'label': 'int'}
    with granular.ShardedDatasetWriter('s3://my-bucket/train', spec, granular.encoders, shardlen=60) as writer:
        for i in range(120):
            writer.append({'image': np.full((32, 32, 3), i, np.uint8), 'label': i})
    folder = pathlib.Path('images/cats')
    folder.mkdir(parents=True)
    (folder / '0.png').write_bytes(granular.encoders['png'](np.zeros((8, 8, 3), np.uint8)))
    rank = {'RANK': '0', 'WORLD_SIZE': '1', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '0'}  # as torchrun sets them
    os.environ.update(rank)
    steps = iter(range(3))

    def train(batch):
        assert {key: (array.shape, array.dtype) for key, array in batch.items()} == {
            'image': ((64, 32, 32, 3), np.uint8),
            'label': ((64,), np.int64),
        }
        if next(steps, None) is None:
            raise EndOfExampleError

    return {'train': train}


def sources():
    """Provide the files of other formats that the page reads."""
    import pyarrow
    from array_record.python.array_record_module import ArrayRecordWriter
    from pyarrow import parquet

    from tests.support.examples import encode, frame

    for part in range(2):
        records = ArrayRecordWriter(f'train-0000{part}-of-00002.array_record', 'group_size:1')
        for i in range(1000):
            records.write(b'record %d of file %d' % (i, part))
        records.close()
    examples = b''.join(frame(encode({'label': [label]})) for label in range(100))
    pathlib.Path('train.tfrecord').write_bytes(examples)
    pathlib.Path('train.tfrecord.gz').write_bytes(gzip.compress(examples))
    for name in ('a', 'b'):
        table = pyarrow.table({'id': range(1000), 'text': [f'row {i}' for i in range(1000)]})
        parquet.write_table(table, f'{name}.parquet', row_group_size=100)
        granular.Path(f'{name}.parquet').copy(f's3://my-bucket/{name}.parquet')
    with tarfile.open('train-000.tar', 'w') as tar:
        for i in range(10):
            for suffix, data in (('cls', b'%d' % i), ('png', granular.encoders['png'](np.zeros((8, 8, 3), np.uint8)))):
                pathlib.Path(f'{i:03}.{suffix}').write_bytes(data)
                tar.add(f'{i:03}.{suffix}')
    return {}


def others():
    """Provide a folder of images in folders by class."""
    for name in ('cat', 'dog'):
        pathlib.Path(f'images/{name}').mkdir(parents=True)
        for i in range(40):
            image = granular.encoders['png'](np.full((40 + i % 5, 48, 3), i, np.uint8))
            pathlib.Path(f'images/{name}/{i:02}.png').write_bytes(image)
    return {}


def credentials():
    """Provide a proxy, and the address of the bucket's server that is reached through it."""
    proxy, endpoint = ForwardProxy(pathlib.Path.cwd()), away(os.environ['AWS_ENDPOINT_URL'])

    def check():
        proxy.close()
        once = granular.IOConfig(retry_time=0)
        with pytest.raises(granular.errors.StoreError, match='through the proxy'):
            granular.Path('s3://my-bucket/hello.txt', endpoint_url=endpoint, config=once).read_bytes()

    return {'proxy_address': proxy.address, 'endpoint': endpoint, 'at_end': check}


SETUP = {
    'README.md': readme, 'sources.md': sources, 'others.md': others, 'moving.md': sources,
    'credentials.md': credentials,
}  # fmt: skip


def main():
    multiprocessing.set_start_method('fork', force=True)  # the functions of a page cannot be imported
    page = ROOT / sys.argv[1]
    names = SETUP.get(page.name, dict)()
    at_end = names.pop('at_end', None)
    runner = Runner(page, names)
    try:
        runner.run()
    finally:
        runner.close()
        if at_end is not None:
            at_end()


if __name__ == '__main__':
    main()
