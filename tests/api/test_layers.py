"""Layers: imports point to lower layers only and form no cycle. docs/architecture.md shows the same list.

``python -m tests.api.test_layers`` prints the table for docs/architecture.md.
"""

import ast
import collections
import functools
import graphlib

import pytest

from tests import ROOT

PACKAGE = ROOT / 'granular'

# From top to bottom: a module imports from its own part, or from parts of lower layers.
LAYERS = (
    {'cli, __main__': 'commands, the demo, descriptions of datasets'},
    {
        '__init__, aio.__init__, changes, filters, grain, kappadata, shuffle, sources, aio.kappadata, aio.sources': (
            'public names: those of granular, of granular 0.21 (`sources`), of Grain and of KappaData'
        )
    },
    {
        'integrations': 'PyTorch, JAX, Grain, Orbax, Ray, fsspec: each imported by its users',
        'testing': 'servers and checks for tests',
        'view': 'the local web page of `granular view`',
    },
    {'sync': 'the sync API: blocking methods over the async core'},
    {'aio.conversion': 'conversion of other formats into sharded datasets, copies on the local disk, archives'},
    {'aio.datasources': 'files of other formats, windows over episodes, and `open`'},
    {'aio.datasets': 'specs, layouts, shards: readers, writers, verification, cleaning'},
    {
        'aio.bags': 'records and their limits',
        'aio.caches': 'datapoints in memory, in shared memory, in Redis',
    },
    {
        'aio.pipeline': (
            'from indices to batches: MapDataset, IterDataset, Loader, orders, fields, prefetching, worker processes'
        )
    },
    {'aio.paths': 'paths and files'},
    {'aio.stores': 'local disks, S3, GCS, Azure, HTTP, fsspec; range planning, fan-out, copies, the block cache'},
    {'aio.http': 'requests, retries, limits, connections, checks of replies'},
    {'aio.runtime': 'event loops, the portal from threads, tasks, lifecycles, memory for received data'},
    {
        'config': 'settings',
        'formats': 'encoders, decoders, tables, checksums: bytes to values and back',
        'metrics': 'counters and latency histograms',
    },
    {'_support, errors': 'errors, late imports, texts of messages, types, indices, names of other libraries'},
)


def modules():
    """Return the dotted name of each module, relative to the package, with its file."""
    for file in sorted(PACKAGE.rglob('*.py')):
        name = '.'.join(file.relative_to(PACKAGE).with_suffix('').parts)
        yield (name if name in ('__init__', 'aio.__init__') else name.removesuffix('.__init__')), file


MODULES = dict(modules())


def part_of(module):
    """Return the number of a module's layer and its part there: that with the longest prefix of the module's name."""
    named = [
        (len(name), number, part)
        for number, parts in enumerate(LAYERS)
        for part in parts
        for name in part.split(', ')
        if module == name or module.startswith(f'{name}.')
    ]
    return max(named)[1:] if named else None


def imported(file):
    """Return the modules that a file imports anywhere, except imports for type annotations only."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f'{node.module}.{alias.name}' for alias in node.names]
        else:
            continue
        for name in names:
            root, _, module = name.partition('.')
            if root == 'granular':
                yield module if module in MODULES else (module.rpartition('.')[0] or '__init__')


@functools.cache
def imports():
    """Return the modules that each module imports."""
    return {
        module: {'aio.__init__' if name == 'aio' else name for name in imported(file)} - {module}
        for module, file in MODULES.items()
    }


def test_every_module_belongs_to_a_layer():
    assert [module for module in MODULES if part_of(module) is None] == []


def test_imports_point_to_lower_layers_only():
    wrong = []
    for module, names in imports().items():
        number, part = part_of(module)
        for name in names:
            other_number, other = part_of(name)
            if other != part and other_number <= number:
                wrong.append(f'{module} imports {name}')
    assert wrong == []


@pytest.mark.parametrize('depth', ['modules', 'parts'])
def test_imports_form_no_cycle(depth):
    graph = collections.defaultdict(set)
    for module, names in imports().items():
        here = module if depth == 'modules' else part_of(module)[1]
        graph[here] |= {name if depth == 'modules' else part_of(name)[1] for name in names} - {here}
    graphlib.TopologicalSorter(graph).prepare()


def table():
    """Return the table of docs/architecture.md."""
    lines = ['| layer | parts |', '| --- | --- |']
    for number, parts in enumerate(LAYERS):
        subjects = '<br>'.join(
            f'`{part.replace(".", "/").replace(", ", "`, `")}`: {subject}' for part, subject in parts.items()
        )
        lines.append(f'| {len(LAYERS) - number} | {subjects} |')
    return '\n'.join(lines)


def test_architecture_page_shows_the_layers():
    assert table() in (ROOT / 'docs' / 'architecture.md').read_text()


if __name__ == '__main__':
    print(table())
