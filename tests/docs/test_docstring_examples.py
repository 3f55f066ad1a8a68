"""Each example in a docstring runs, in a folder of its own, with the datasets and names that examples use.

An example is an indented block behind ``::``. It sees the names of its module and of its API, and ``names`` below.
"""

import ast
import asyncio
import contextlib
import gzip
import importlib
import inspect
import itertools
import os
import re
import tarfile
import textwrap
import traceback
import zipfile

import numpy as np
import pytest

import granular
from tests import ROOT
from tests.datasources.test_lerobot import write_v3
from tests.support.examples import encode, frame

DRAWN = re.compile(r'├|^[\w.-]+/$', re.MULTILINE)  # drawings of trees
# Examples that need what tests do not have; they are parsed.
NOT_RUN = {
    'granular.integrations.orbax', 'granular.integrations.ray.reading.read', 'granular.integrations.ray.writing.write',
    'granular.integrations.torch.Batches', 'granular.view.server.serve',
}  # fmt: skip

# What users of a module import.
IMPORTS = {
    'granular.cli.options': 'import typer\napp = typer.Typer()',
    'granular.integrations.grain': 'import grain',
    'granular.integrations.jax': 'import jax\nfrom jax.sharding import Mesh, NamedSharding, PartitionSpec',
    'granular.integrations.lightning': (
        'import granular.integrations.torch\nfrom torchdata.stateful_dataloader import StatefulDataLoader'
    ),
    'granular.integrations.torch': 'import torch.utils.data',
    'granular.sync.base': (
        'from granular.aio.bags import writer\nfrom granular.aio.paths import path as core\n'
        'from granular.aio.paths.pure import PurePath'
    ),
}


def written():
    """Yield the docstrings of modules with examples, each with its name and the name of its module."""
    for path in sorted((ROOT / 'granular').rglob('*.py')):
        module = '.'.join(path.relative_to(ROOT).with_suffix('').parts).removesuffix('.__init__')
        text = path.read_text()
        pending = [(module, ast.parse(text))] if '::\n' in text else []
        while pending:
            name, node = pending.pop()
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if '::\n' in (docstring := ast.get_docstring(node, clean=False) or ''):
                    yield name, module, docstring
                pending += [(f'{name}.{child.name}', child) for child in node.body if hasattr(child, 'name')]


def derived():
    """Yield the docstrings of public objects, some of which the sync API derives from those of the async API."""
    for name in granular.__all__:
        value = getattr(granular, name)
        if callable(value):
            yield f'granular.{name}', 'granular', inspect.getdoc(value) or ''
        if inspect.isclass(value):
            for attribute, member in inspect.getmembers(value, callable):
                if not attribute.startswith('_'):
                    yield f'granular.{name}.{attribute}', 'granular', inspect.getdoc(member) or ''


def examples(docstring):
    """Yield the indented blocks behind ``::``."""
    if '::' not in docstring:
        return
    lines = inspect.cleandoc(docstring).splitlines()
    for number, line in enumerate(lines):
        if line.endswith('::'):
            margin = len(line) - len(line.lstrip())
            block = []
            for following in lines[number + 1 :]:
                if following.strip() and len(following) - len(following.lstrip()) <= margin:
                    break
                block.append(following)
            yield textwrap.dedent('\n'.join(block)).strip()


def collect():
    """Return a test case for each example, once for each API that shows it."""
    cases = {}
    for name, module, docstring in itertools.chain(written(), derived()):
        for number, example in enumerate(examples(docstring)):
            if not DRAWN.search(example):
                case = pytest.param(name, module, example, id=f'{name}-{number}' if number else name)
                cases.setdefault((module.startswith('granular.aio'), example), case)
    return list(cases.values())


class EndOfExampleError(Exception):
    """Ends an example that loops forever."""


@pytest.fixture(scope='module')
def store(seaweed, tmp_path_factory):
    """Write what the examples read to ``s3://bucket``; it is found through the environment."""
    import pyarrow
    from array_record.python.array_record_module import ArrayRecordWriter
    from pyarrow import parquet

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('AWS_ENDPOINT_URL', seaweed.endpoint)
        patch.setenv('AWS_ACCESS_KEY_ID', seaweed.options['key'])
        patch.setenv('AWS_SECRET_ACCESS_KEY', seaweed.options['secret'])
        folder = tmp_path_factory.mktemp('store')
        image = np.zeros((8, 8, 3), np.uint8)
        spec = {'title': 'utf8', 'image': 'array', 'label': 'int', 'frames': 'array[]'}
        for name in ('data', 'digits', 'train'):
            kind = granular.ShardedDatasetWriter if name == 'train' else granular.DatasetWriter
            with kind(folder / name, spec, granular.encoders) as writer:
                for i in range(100):
                    frames = [image] * 9 if i == 0 else []
                    writer.append({'title': f'{i}', 'image': image, 'label': i % 10, 'frames': frames})
        with granular.DatasetWriter(folder / 'books', {'tokens': 'array'}, granular.encoders) as writer:
            writer.append({'tokens': np.zeros(100_000, np.int32)})
        robot = {'state': np.zeros((30, 7)), 'action': np.zeros((30, 7)), 'camera': [image] * 30, 'task': 'stack'}
        with granular.DatasetWriter(
            folder / 'robots', {'state': 'array', 'action': 'array', 'camera': 'png[]', 'task': 'utf8'}
        ) as writer:
            writer.append(robot)
        write_v3(folder / 'pusht')
        with zipfile.ZipFile(folder / 'train.zip', 'w') as archive:
            for path in (folder / 'data').iterdir():
                archive.write(path, path.name)
        with tarfile.open(folder / 'train-000.tar', 'w') as tar:
            for i in range(5):
                for suffix, data in (('cls', b'1'), ('jpg', granular.encoders['jpg'](image))):
                    (folder / f'{i}.{suffix}').write_bytes(data)
                    tar.add(folder / f'{i}.{suffix}', f'{i}.{suffix}')
        table = pyarrow.table({'title': ['a', 'b', 'c', 'd', 'e'], 'label': range(5)})
        for name in ('a', 'b', 'train'):
            parquet.write_table(table, folder / f'{name}.parquet')
            records = ArrayRecordWriter(str(folder / f'{name}.array_record'), 'group_size:1')
            for i in range(100):
                records.write(b'%d' % i)
            records.close()
        examples = b''.join(frame(encode({'label': [i]})) for i in range(50))
        (folder / 'train.tfrecord').write_bytes(examples)
        (folder / 'train.tfrecord.gz').write_bytes(gzip.compress(examples))
        granular.convert([np.arange(9, dtype=np.uint16)] * 5, folder / 'corpus.idx')
        bucket = granular.Path('s3://bucket')
        bucket.mkdir(exist_ok=True)
        granular.Path(folder).copy(bucket)
        yield
        for path in bucket.rglob('*'):  # SeaweedFS lists folders for a while after their last file
            if path.is_file():
                path.unlink()


@pytest.fixture(scope='module')
def dataset(tmp_path_factory):
    """A dataset on the local disk of a thousand images and labels."""
    folder = tmp_path_factory.mktemp('dataset')
    with granular.DatasetWriter(folder, {'image': 'array', 'label': 'int'}, granular.encoders) as writer:
        for i in range(1000):
            writer.append({'image': np.full((8, 8), i % 256, np.uint8), 'label': i % 10})
    return folder


def names(api, folder):
    """Return the names that examples use and do not define, for an API."""
    steps = iter(range(3))

    def train_step(*batch):
        if next(steps, None) is None:
            raise EndOfExampleError

    reader = granular.DatasetReader(folder, granular.decoders)
    dataset = api.MapDataset.source(reader)
    image = np.zeros((8, 8, 3), np.uint8)
    return {
        'granular': granular,
        'np': np,
        'reader': reader,
        'source': api.sources.Epochs(reader),
        'loader': api.Loader(reader, batch=64),
        'dataset': dataset,
        'stream': dataset.to_iter_dataset(),
        'train_step': train_step,
        'preprocess': lambda datapoint: datapoint,
        'decode': lambda datapoint: datapoint,
        'is_valid': lambda datapoint: datapoint['label'] < 5,
        'spec': {'label': 'int'},
        'datapoints': [{'label': 1}, {'label': 2}],
        'elements': [1, 2, 3],
        'titles': ['first', 'second'],
        'photos': [(image, 1, ['a photo'])],
        'state': None,
        'web': dataset,
        'books': dataset,
        'iterator': aiter(dataset.to_iter_dataset()) if api is granular.aio else iter(dataset.to_iter_dataset()),
    }


def run(code, values):
    """Run an example, and close what it leaves open."""
    with contextlib.suppress(EndOfExampleError):
        exec(code, values)
    for value in opened(values):
        if hasattr(value, 'close'):
            value.close()


async def run_async(code, values):
    """Run an example that awaits, and close what it leaves open."""
    with contextlib.suppress(EndOfExampleError):
        await eval(code, values)
    for value in opened(values):
        if hasattr(value, 'aclose'):
            await value.aclose()


def opened(values):
    return [value for value in values.values() if type(value).__module__.startswith('granular.')]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize(('name', 'module', 'example'), collect())
def test_examples_run(name, module, example, store, dataset, tmp_path, monkeypatch):
    code = compile(example, f'the example of {name}', 'exec', ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if name in NOT_RUN:
        return
    monkeypatch.chdir(tmp_path)
    if 'jax' in f'{module} {example}'.lower():
        in_child(lambda: run_example(code, module, dataset))  # this process may fork no more once JAX is imported
    else:
        run_example(code, module, dataset)


def in_child(fn):
    """Call a function in a forked process, which must succeed."""
    child = os.fork()
    if not child:
        try:
            fn()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def run_example(code, module, dataset):
    api = granular.aio if module.startswith('granular.aio') else granular
    public = {public: getattr(api, public) for public in api.__all__}
    values = {**public, **vars(importlib.import_module(module)), **names(api, dataset)}
    exec(IMPORTS.get(module, ''), values)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(run_async(code, values))
    else:
        run(code, values)


@pytest.mark.parametrize('api', [granular, granular.aio], ids=lambda api: api.__name__)
def test_public_names_have_examples(api):
    public = {name: getattr(api, name) for name in api.__all__}
    assert [name for name, value in public.items() if callable(value) and '::\n' not in value.__doc__] == []
