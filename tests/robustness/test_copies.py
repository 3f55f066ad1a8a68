"""Copies of iterators and writers, and writers that a fork copies: independent, or refused; never a second owner."""

import copy
import gc
import itertools
import json
import pickle

import pytest

import granular
from granular import aio
from granular.errors import UnsupportedError
from tests.support.tables import cover

COPIES = {'pickle': lambda x: pickle.loads(pickle.dumps(x)), 'copy': copy.copy, 'deepcopy': copy.deepcopy}
SMALL = granular.ReadOptions(2, 4)


def source(api):
    return api.MapDataset.range(64)


# Both APIs have the same names. Each has the numbers from 0 on, one by one or in batches.
ITERATORS = {
    'stream': lambda api: source(api).to_iter_dataset(SMALL),
    'prefetch': lambda api: source(api).to_iter_dataset(SMALL).prefetch(2),
    'mixture': lambda api: api.IterDataset.mix([source(api).to_iter_dataset(SMALL)]),
    'data loader': lambda api: granular.grain.DataLoader(
        data_source=range(64), sampler=granular.grain.samplers.SequentialSampler(64)
    ),
    'loader': lambda api: api.Loader(source(api).map(lambda x: {'x': x}), 1),
}


def batches(api):
    from granular.integrations.torch import Batches

    return Batches(source(api).map(lambda x: {'x': x}).to_iter_dataset(SMALL).batch(1))


def value(element):
    return int(element['x'][0] if isinstance(element, dict) else element)


@pytest.mark.parametrize(('kind', 'method'), list(itertools.product([*ITERATORS, 'batches'], ['copy', 'deepcopy'])))
def test_copied_iterator_does_not_depend_on_its_original(kind, method):
    original = batches(granular) if kind == 'batches' else iter(ITERATORS[kind](granular))
    twin = COPIES[method](original)
    assert [value(next(original)) for _ in range(3)] == [0, 1, 2]
    assert [value(next(twin)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UnsupportedError, match='neither pickled nor copied'):
        COPIES[method](original)
    assert value(next(original)) == 3
    del original
    gc.collect()
    assert value(next(twin)) == 3
    twin.close()


@pytest.mark.parametrize(('kind', 'method'), list(itertools.product(ITERATORS, ['copy', 'deepcopy'])))
async def test_copied_async_iterator_does_not_depend_on_its_original(kind, method):
    original = aiter(ITERATORS[kind](aio))
    twin = COPIES[method](original)
    assert [value(await anext(original)) for _ in range(3)] == [0, 1, 2]
    assert [value(await anext(twin)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UnsupportedError, match='neither pickled nor copied'):
        COPIES[method](original)
    await original.aclose()
    assert value(await anext(twin)) == 3
    await twin.aclose()


@pytest.fixture
def folder(tmp_path):
    path = granular.Path(tmp_path)
    with granular.DatasetWriter(path / 'data', {'x': 'int'}) as writer:
        for i in range(3):
            writer.append({'x': i})
    return path


@pytest.mark.parametrize('method', COPIES)
def test_copied_loader_of_a_reader_knows_its_length(folder, method):
    with granular.DatasetReader(folder / 'data', granular.decoders) as reader:
        twin = COPIES[method](granular.Loader(reader, 1))
        assert len(twin) == len(reader)
        assert [value(batch) for batch in twin] == [datapoint['x'] for datapoint in reader]
        twin.close()


PLACES = {
    'reader': (lambda folder: iter(granular.DatasetReader(folder / 'data')), 3),
    'bag': (lambda folder: iter(granular.BagReader(folder / 'data' / 'x.bag')), 3),
    'iterdir': (lambda folder: folder.iterdir(), 1),
    'glob': (lambda folder: folder.glob('data/x.*'), 2),
    'walk': (lambda folder: folder.walk(), 2),
}


@pytest.mark.parametrize(('kind', 'method'), list(itertools.product(PLACES, COPIES)))
def test_iterators_of_readers_and_folders_are_not_copied(kind, method, folder):
    make, count = PLACES[kind]
    items = make(folder)
    for left in (count, count - 1):
        with pytest.raises(UnsupportedError, match='neither pickled nor copied'):
            COPIES[method](items)
        if left == count:
            next(items)
    assert len(list(items)) == count - 1


# --- writers

WRITERS = {
    'refs': lambda api, path: api.DatasetWriter(path / 'data', {'x': 'int'}),
    'columns': lambda api, path: api.DatasetWriter(path / 'data', {'x': 'int'}, layout='columns'),
    'shards': lambda api, path: api.ShardedDatasetWriter(path / 'data', {'x': 'int'}, shardlen=2),
    'bag': lambda api, path: api.BagWriter(path / 'x.bag'),
    'growing bag': lambda api, path: api.BagWriter(path / 'x.bag', version=3),
}


@pytest.mark.parametrize(('kind', 'method'), list(itertools.product(WRITERS, COPIES)))
async def test_writers_are_not_copied(kind, method, tmp_path):
    writer = WRITERS[kind](aio, aio.Path(tmp_path))
    point = b'1' if 'bag' in kind else {'x': 1}
    for step in (writer.__aenter__, lambda: writer.append(point), writer.aclose):
        with pytest.raises(UnsupportedError, match='open another writer in each process'):
            COPIES[method](writer)
        await step()


FORKED = """
import gc, json, os, sys
import granular

kind, action = sys.argv[3:]
root = granular.Path(sys.argv[1], **json.loads(sys.argv[2]))
WRITERS = {
    'refs': lambda: granular.DatasetWriter(path / 'data', {'x': 'utf8'}),
    'columns': lambda: granular.DatasetWriter(path / 'data', {'x': 'utf8'}, layout='columns'),
    'shards': lambda: granular.ShardedDatasetWriter(path / 'data', {'x': 'utf8'}, shardlen=2),
    'bag': lambda: granular.BagWriter(path / 'x.bag'),
    'growing bag': lambda: granular.BagWriter(path / 'x.bag', version=3),
    'file': lambda: (path / 'x').open('wb'),
}


def add(writer, text):
    if kind == 'file':
        writer.write(text.encode())
    else:
        writer.append(text.encode() if 'bag' in kind else {'x': text}, flush)


def refused(call):
    try:
        call()
    except granular.errors.ClosedError as error:
        assert 'belongs to the process that this one was forked from' in str(error), error
    else:
        assert kind == 'file', 'not refused'  # whose copy in a child writes nowhere


def contents():
    if kind == 'file':
        return (path / 'x').read_bytes().decode()
    with granular.BagReader(path / 'x.bag') if 'bag' in kind else granular.open(path / 'data') as reader:
        return ''.join(x.decode() if isinstance(x, bytes) else x['x'] for x in reader)


def fork(work):
    pid = os.fork()
    if not pid:
        work()
        sys.exit(0)  # which ends the interpreter, with all its objects
    assert os.waitpid(pid, 0)[1] == 0


def act():
    global writer
    if action == 'append':
        refused(lambda: add(writer, 'child'))
    elif action == 'close':
        refused(writer.close)
    elif action == 'abort':
        try:
            with writer:
                raise ValueError
        except ValueError:
            pass
    elif action == 'drop':
        del writer
        gc.collect()
    elif action == 'fork':
        fork(lambda: None)


for flush in (True, False):
    path = root / f'{flush}'
    path.mkdir()
    writer = WRITERS[kind]()
    fork(act)
    add(writer, 'first ')
    fork(act)
    add(writer, 'second ' * 9)
    fork(act)
    writer.close()
    assert contents() == 'first ' + 'second ' * 9, contents()
print('done')
"""

KINDS = [*WRITERS, 'file']
ACTIONS = ['exit', 'drop', 'abort', 'append', 'close', 'fork']


@pytest.mark.parametrize(
    ('store', 'kind', 'action'),
    [('local', *pair) for pair in cover([KINDS], [ACTIONS])]
    + [('bucket', *pair) for pair in cover([KINDS], [ACTIONS[1:] + ACTIONS[:1]])],
)
def test_writers_outlive_what_forked_children_do_with_them(interpreter, request, tmp_path, store, kind, action):
    server = request.getfixturevalue('fakegcs') if store == 'bucket' else None
    place, options = (tmp_path, {}) if server is None else (server.place(), server.options)
    done = interpreter.run(FORKED, f'{place}', json.dumps(options), kind, action)
    assert (done.returncode, done.stdout, done.stderr) == (0, 'done\n', ''), done.stderr
