"""Datasets replaced while they are opened or read: all datapoints are of one dataset, or it is an error."""

import asyncio
import concurrent.futures
import email.utils
import hashlib
import itertools
import os
import pathlib
import pickle
import time

import pytest

import granular
from granular.aio.paths.path import Path
from granular.aio.stores.base import Entry
from granular.aio.stores.fsspec import FsspecStore
from granular.aio.stores.local.store import LocalStore
from granular.aio.stores.remote import RemoteStore
from granular.errors import CorruptBagError, GranularError, ObjectChangedError, UnsupportedError
from tests.support.faults import FaultServer, md5_etag
from tests.support.files import FORMATS, numbers_in, write_numbers
from tests.support.seams import pickled_for_worker
from tests.support.servers import KEY, SECRET
from tests.support.tables import pairwise

COUNT = 6
SHARDS = 2
KINDS = ('refs', 'columns', 'sharded refs', 'sharded columns')
MOMENTS = 40  # more than the requests of any opening


def point(name, index):
    return {key: f'{name} {key} {index}' for key in 'xy'}


def name_of(points):
    """Return the name of the dataset that has exactly these datapoints."""
    return next((name for name in ('a', 'b') if points == [point(name, i) for i in range(COUNT)]), f'mixed: {points}')


@pytest.fixture(scope='module')
def contents(tmp_path_factory):
    """The files of a dataset, by kind and name. Datasets of two names differ only in the bytes of their records."""

    def make(kind, name):
        root = tmp_path_factory.mktemp('contents') / 'ds'
        spec, layout = dict.fromkeys('xy', 'utf8'), kind.rpartition(' ')[2]
        if kind.startswith('sharded'):
            writer = granular.ShardedDatasetWriter(
                root, spec, granular.encoders, shardlen=COUNT // SHARDS, layout=layout
            )
        else:
            writer = granular.DatasetWriter(root, spec, granular.encoders, layout=layout)
        with writer:
            for i in range(COUNT):
                writer.append(point(name, i))
        files = [path for path in sorted(root.rglob('*')) if path.is_file()]
        return {str(path.relative_to(root)): path.read_bytes() for path in files}

    return {(kind, name): make(kind, name) for kind in KINDS for name in ('a', 'b')}


class Server:
    """Files on a web server."""

    def __init__(self, server, root):
        self.server, self.root, self.clock = server, root, time.time() - 3600

    def put(self, name, data):
        self.clock += 10
        self.server.files = {**self.server.files, f'ds/{name}': data}
        self.server.modified[f'ds/{name}'] = email.utils.formatdate(self.clock, usegmt=True)

    def remove(self, name):
        self.server.files = {key: data for key, data in self.server.files.items() if key != f'ds/{name}'}


class Folder:
    """Files on a disk or in a bucket."""

    def __init__(self, root):
        self.root = root

    def put(self, name, data):
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_bytes(data)

    def remove(self, name):
        (self.root / name).unlink()


@pytest.fixture
def put(request, tmp_path, store):
    """A folder in the store, with methods that write and remove its files."""
    if store == 'local':
        yield Folder(granular.Path(tmp_path / 'ds'))
    elif store == 'memory':
        yield Folder(granular.Path(f'memory://{tmp_path.name}-{time.time_ns()}/ds'))
    elif store.startswith('http'):
        with FaultServer(files={}) as server:
            server.etag = None
            server.date = email.utils.formatdate(usegmt=True)
            if store == 'http with ETags':
                server.etag_of = lambda data: f'"{hashlib.md5(data).hexdigest()}"'
            yield Server(server, granular.Path(f'{server.endpoint}/b/ds'))
    else:
        yield Folder(request.getfixturevalue(store).place() / 'ds')


def fill(put, content):
    for name, data in content.items():
        put.put(name, data)


def steps(put, before, after):
    """Return the steps by which granular replaces a dataset: specs are removed first and written last."""
    specs = [name for name in before if name.endswith('spec.json')]
    bags = [name for name in after if not name.endswith('spec.json')]
    return [
        *((put.remove, name) for name in specs),
        *((put.put, name, after[name]) for name in bags),
        *((put.put, name, after[name]) for name in specs),
    ]


class Interruption:
    """Steps that run right before the n-th request of a store and before the following ones.

    Requests go one after the other, so that it is the same each time.

    Args:
      begin: before which request it begins.
      steps: what happens.
      at_once: all of it at that time, or a step before each request.
    """

    def __init__(self, monkeypatch, begin, steps, at_once):
        self._begin, self._steps, self._at_once = begin, list(steps), at_once
        self.asked = 0
        self._lock = asyncio.Lock()
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        for kind in (LocalStore, RemoteStore, FsspecStore):
            monkeypatch.setattr(kind, 'read', self._around(kind.read))
        monkeypatch.setattr(LocalStore, 'check_version', self._around(LocalStore.check_version))
        monkeypatch.setattr(
            granular.aio.datasets.shard_opener,
            'shards_in',
            self._listing(granular.aio.datasets.shard_opener.shards_in),
        )

    def _around(self, call):
        async def read(store, *args, **options):
            async with self._lock:
                self._happen()
                return await call(store, *args, **options)

        return read

    def _listing(self, call):
        async def scan(directory):
            async with self._lock:
                self._happen()
            return await call(directory)

        return scan

    def _happen(self):
        self.asked += 1
        while self._steps and self.asked > self._begin:
            fn, *args = self._steps.pop(0)
            self._pool.submit(fn, *args).result()  # not awaited, as who asks may be cancelled
            if not self._at_once:
                break


async def open_async(kind, root, **options):
    reader = granular.aio.ShardedDatasetReader if kind.startswith('sharded') else granular.aio.DatasetReader
    return await reader.open(Path(root.aio), granular.decoders, **options)


def folder_entries(server):
    """Let a web server list the folder of its dataset."""

    async def entries(self, key):
        folder = key.partition('/')[2]
        entries = {name.removeprefix(f'{folder}/').partition('/') for name in server.files if name.startswith(folder)}
        return [Entry(f'{key}/{first}', bool(slash)) for first, slash, _ in sorted(entries)]

    return entries


@pytest.fixture(autouse=True)
def listings(request, monkeypatch):
    if 'put' in request.fixturenames and isinstance(put := request.getfixturevalue('put'), Server):
        monkeypatch.setattr(granular.aio.stores.http.HTTPStore, 'entries', folder_entries(put.server))


OPTIONS = ({}, {'cache_index': False}, {'cache_keys': ('x',)})
MODES = {'at once': True, 'step by step': False}
# Writing to buckets takes its time: there, not all moments are tried.
OPENINGS = pairwise(
    (*opening, mode)
    for mode in MODES
    for opening in [
        *(
            (store, kind, options, 1)
            for store in ('local', 'http with ETags')
            for kind in KINDS[:2]
            for options in OPTIONS
        ),
        *((store, kind, {}, 1) for store in ('local', 'http with ETags') for kind in KINDS[2:]),
        *((store, kind, {}, 1) for store in ('memory', 'http with Last-Modified') for kind in KINDS[:2]),
        *((store, kind, {}, 3) for store in ('seaweed', 'fakegcs') for kind in KINDS[:2]),
        *((store, 'sharded refs', {}, 8) for store in ('seaweed', 'fakegcs')),
    ]
)


@pytest.mark.parametrize(('store', 'kind', 'options', 'stride', 'mode'), OPENINGS, ids=str)
def test_dataset_replaced_during_open_is_not_mixed(store, put, contents, kind, options, stride, mode):
    at_once = MODES[mode]
    before, after = contents[kind, 'a'], contents[kind, 'b']
    outcomes = []
    for moment in range(0, MOMENTS, stride):
        fill(put, before)
        with pytest.MonkeyPatch.context() as patch:
            interruption = Interruption(patch, moment, steps(put, before, after), at_once)

            async def read():
                async with await open_async(kind, put.root, **options) as reader:
                    return await reader.fetch(range(len(reader)))

            try:
                outcomes.append(name_of(asyncio.run(read())))
            except GranularError as error:
                outcomes.append(type(error).__name__)
        if interruption.asked <= moment:
            break  # it was not interrupted
    assert not {i * stride: outcome for i, outcome in enumerate(outcomes) if outcome.startswith('mixed')}
    assert outcomes[0] == 'b' or not at_once
    assert outcomes[-1] == 'a'
    # If all of it happens between two requests, it can be opened; what was opened before cannot be read any more.
    errors = {'ObjectChangedError'} if at_once else {'ObjectChangedError', 'NotFoundError', 'CorruptDatasetError'}
    assert set(outcomes) <= {'a', 'b', *errors}


# --- replaced after it was opened


READS = {
    'get': lambda reader: [reader[i] for i in range(COUNT)],
    'fetch': lambda reader: reader.fetch(range(COUNT)),
    'slice': lambda reader: columns_as_points(reader[:]),
    'iteration': list,
    'a copy': lambda reader: reader.copy().fetch(range(COUNT)),
}


def columns_as_points(columns):
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def open_reader(kind, root, **options):
    reader = granular.ShardedDatasetReader if kind.startswith('sharded') else granular.DatasetReader
    return reader(root, granular.decoders, **options)


def read_name(reader, read='fetch'):
    try:
        return name_of(READS[read](reader))
    except ObjectChangedError:
        return 'ObjectChangedError'


@pytest.mark.parametrize(
    ('store', 'kind', 'count'), pairwise(itertools.product(['local', 'http with ETags', 'memory'], KINDS, [1, 3, 9]))
)
def test_dataset_replaced_after_open_is_unchanged_or_an_error(store, put, contents, kind, count):
    fill(put, contents[kind, 'a'])
    for options in OPTIONS:
        fill(put, contents[kind, 'a'])
        with open_reader(kind, put.root, **options) as reader:
            for fn, *args in steps(put, contents[kind, 'a'], contents[kind, 'b'])[:count]:
                fn(*args)
            for read in READS:
                assert read_name(reader, read) in ('a', 'ObjectChangedError')


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'store', ['local', 'seaweed', 'fakegcs', 'http with ETags', 'http with Last-Modified', 'memory']
)
def test_pickled_reader_opens_its_dataset_or_fails(store, put, contents, kind, monkeypatch):
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', KEY)  # a reader pickles without its credentials
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', SECRET)
    fill(put, contents[kind, 'a'])
    sent = []
    for options in OPTIONS:
        with open_reader(kind, put.root, **options) as reader:
            sent.append(pickle.dumps(reader))
            sent.append(pickled_for_worker(reader))  # with its index
    for content in sent:
        with pickle.loads(content) as twin:
            assert read_name(twin) == 'a'
    for fn, *args in steps(put, contents[kind, 'a'], contents[kind, 'b']):
        fn(*args)
    for content in sent:
        try:
            outcome = read_name(pickle.loads(content))
        except ObjectChangedError:
            continue
        assert outcome == 'ObjectChangedError'


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dumps', [pickle.dumps, pickled_for_worker])
async def test_reader_that_is_pickled_again_unopened_opens_its_dataset_or_fails(tmp_path, contents, kind, dumps):
    put = Folder(granular.Path(tmp_path / 'ds'))
    fill(put, contents[kind, 'a'])
    bags = [path for path in put.root.rglob('*.bag') if path.name != 'refs.bag']
    with open_reader(kind, put.root) as reader, granular.BagReader(bags[0]) as bag:
        unopened = [pickle.loads(dumps(opened.aio)) for opened in (reader, bag)]
        sent = list(map(dumps, unopened))
    for content in sent:
        async with pickle.loads(content) as twin:
            assert len(await twin.fetch([0])) == 1
    for fn, *args in steps(put, contents[kind, 'a'], contents[kind, 'b']):
        fn(*args)
    for content in sent:
        with pytest.raises(ObjectChangedError):
            await pickle.loads(content).fetch([0])


@pytest.fixture
def divided(seaweed, monkeypatch):
    """Write datasets of other records of the same bytes, to which S3 gives the same ETags, in one folder."""
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', KEY)
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', SECRET)
    root = seaweed.place() / 'ds'

    def write(kind, texts, indexed):
        if root.exists():
            root.rmtree()
        if kind == 'columns':
            writer = granular.DatasetWriter(root, {'x': 'utf8'}, granular.encoders, layout='columns')
        else:
            writer = granular.ShardedDatasetWriter(
                root, {'x': 'utf8'}, granular.encoders, shardlen=len(texts), layout='columns'
            )
        with writer:
            for text in texts:
                writer.append({'x': text})
        if indexed:
            granular.build_index(root)
        return root

    return write


@pytest.mark.parametrize(
    ('kind', 'indexed', 'then_indexed', 'cache_index'),
    pairwise(
        (kind, *options)
        for kind in ('columns', 'sharded columns')
        for options in itertools.product([False, True], repeat=3)
        if kind == 'sharded columns' or not any(options[:2])
    ),
)
def test_pickled_reader_refuses_the_same_bytes_divided_anew(divided, kind, indexed, then_indexed, cache_index):
    texts = ['xy', 'z', 'x', 'yz']
    root = divided(kind, texts, indexed)

    async def pickled():
        async with (
            await open_async(kind, root, cache_index=cache_index) as reader,
            granular.aio.BagReader(next(root.rglob('*.bag')).aio, cache_index) as bag,
        ):
            shards = [reader] if kind == 'columns' else [reader, *reader.readers]
            return [pickle.dumps(opened) for opened in (bag, *shards, shards[-1].bags['x'])]

    async def read(content):
        async with pickle.loads(content) as twin:
            values = await twin.fetch(range(len(twin)))
            return [value.decode() if isinstance(value, bytes) else value['x'] for value in values]

    sent = asyncio.run(pickled())
    sent += [pickle.dumps(pickle.loads(content)) for content in sent]  # which were not opened
    divided(kind, texts, then_indexed)
    assert [asyncio.run(read(content)) for content in sent] == [texts] * len(sent)
    for divided_anew in (['x', 'yz', 'xy', 'z'], ['xyzx', 'y', '', 'z']):
        divided(kind, divided_anew, then_indexed)
        for content in sent:
            with pytest.raises(ObjectChangedError, match='replaced since the reader was pickled'):
                asyncio.run(read(content))


async def read_all(content):
    async with pickle.loads(content) as copy:
        elements = await copy.fetch(range(len(copy)))
        async with pickle.loads(pickle.dumps(copy)) as another:
            assert await another.fetch(range(len(copy))) == elements
    return elements


@pytest.mark.parametrize('index', ['none', 'whole', 'outdated', 'built since', 'built of more since', 'removed since'])
@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_pickled_reader_opens_an_unchanged_dataset_whatever_it_keeps_in_memory(tmp_path, layout, index):
    def write(start, stop):
        with granular.ShardedDatasetWriter(
            tmp_path / 'ds', {'a': 'int', 'b': 'bytes'}, shardlen=10, layout=layout
        ) as writer:
            for i in range(start, stop):
                writer.append({'a': i, 'b': b'b' * i})

    write(0, 20)
    if index in ('whole', 'outdated', 'built of more since', 'removed since'):
        granular.build_index(tmp_path / 'ds')
    if index in ('outdated', 'built of more since'):
        write(20, 30)
    sent = []
    for keys, cache_index, verify in itertools.product(((), ('a',), ('a', 'b')), (True, False), (True, False)):
        options = {'cache_keys': keys, 'cache_index': cache_index, 'verify': verify}
        with granular.ShardedDatasetReader(tmp_path / 'ds', **options) as reader:
            shards = reader.aio.readers[-1:]
            expected = [list(reader), [reader[i] for i in range(len(reader) - len(shards[0]), len(reader))]]
            sent.append((options, [pickle.dumps(opened) for opened in (reader.aio, *shards)], expected))
    if index == 'removed since':
        for path in (tmp_path / 'ds').rglob('.granular-index*'):
            path.unlink()
    elif index.startswith('built'):
        granular.build_index(tmp_path / 'ds')
    for options, pickled, expected in sent:
        for content, elements in zip(pickled, expected, strict=True):
            assert asyncio.run(read_all(content)) == elements, options


def test_pickled_reader_of_another_machine_opens_a_copy(tmp_path, contents, monkeypatch):
    put = Folder(granular.Path(tmp_path / 'ds'))
    fill(put, contents['refs', 'a'])
    with open_reader('refs', put.root) as reader, granular.BagReader(put.root / 'x.bag') as bag:
        sent = [pickle.dumps(reader), pickle.dumps(bag)]
    fill(put, contents['refs', 'a'])
    for content in sent:
        with pytest.raises(ObjectChangedError, match='replaced since the reader was pickled'):
            pickle.loads(content)
    monkeypatch.setattr('platform.node', lambda: 'another')
    assert read_name(pickle.loads(sent[0])) == 'a'
    assert len(pickle.loads(sent[1])) == COUNT
    put.put('x.bag', contents['refs', 'a']['x.bag'] + bytes(8))
    for content in sent:
        with pytest.raises((ObjectChangedError, CorruptBagError)):
            pickle.loads(content)


def test_index_cache_of_some_shards_is_not_mixed_with_others(bucket, tmp_path, contents):
    config = granular.IOConfig(index_cache=str(tmp_path / 'cache'))
    put = Folder(granular.Path(str(bucket), config=config, **bucket.aio.store.options) / 'ds')
    kind = 'sharded refs'
    for steps_first, steps_then in itertools.permutations([(0, 1), (0, 2), (1, 2)], 2):
        fill(put, contents[kind, 'a'])
        open_reader(kind, put.root, shardstart=steps_first[0], shardstep=steps_first[1]).close()
        for fn, *args in steps(put, contents[kind, 'a'], contents[kind, 'b']):
            fn(*args)
        open_reader(kind, put.root, shardstart=steps_then[0], shardstep=steps_then[1]).close()
        outcomes = []
        for _ in range(2):
            with open_reader(kind, put.root) as reader:
                outcomes.append(read_name(reader))
        assert outcomes in (['b', 'b'], ['ObjectChangedError', 'b'])
        # Not one value of another dataset either.
        with open_reader(kind, put.root) as reader:
            assert [reader[i] for i in range(COUNT)] == [point('b', i) for i in range(COUNT)]


@pytest.mark.parametrize('kind', KINDS)
def test_index_cache_of_a_replaced_dataset_is_not_used(seaweed, tmp_path, contents, kind):
    config = granular.IOConfig(index_cache=str(tmp_path / 'cache'))
    root = seaweed.place()
    put = Folder(granular.Path(str(root), config=config, **root.aio.store.options) / 'ds')
    fill(put, contents[kind, 'a'])
    open_reader(kind, put.root).close()
    for fn, *args in steps(put, contents[kind, 'a'], contents[kind, 'b']):
        fn(*args)
    for _ in range(2):
        with open_reader(kind, put.root, cache_keys=('x', 'y')) as reader:  # which reads them when it is opened
            assert read_name(reader) == 'b'


@pytest.mark.parametrize('moment', ['between', 'behind'])
def test_shards_added_during_open_are_read_or_ignored(tmp_path, contents, moment, monkeypatch):
    kind = 'sharded refs'
    put = Folder(granular.Path(tmp_path / 'ds'))
    first = {name: data for name, data in contents[kind, 'a'].items() if name.startswith('000000')}
    fill(put, first)
    more = [(put.put, name, data) for name, data in contents[kind, 'a'].items() if name not in first]
    with pytest.MonkeyPatch.context() as patch:
        interruption = Interruption(patch, 1 if moment == 'between' else MOMENTS, more, True)

        async def read():
            async with await open_async(kind, put.root) as reader:
                return len(reader)

        assert asyncio.run(read()) == (COUNT if moment == 'between' else COUNT // SHARDS)
        assert interruption.asked < MOMENTS


# --- without versions


@pytest.mark.parametrize('kind', ['refs', 'columns', 'bag'])
def test_server_without_versions_is_refused(contents, kind):
    with FaultServer(files={}) as server:
        server.etag = None
        content = contents['refs' if kind == 'bag' else kind, 'a']
        server.files = {f'ds/{name}': data for name, data in content.items()}
        root = granular.Path(f'{server.endpoint}/b/ds')
        with pytest.raises(UnsupportedError, match='neither an ETag nor a Last-Modified'):
            if kind == 'bag':
                granular.BagReader(root / 'x.bag')
            else:
                granular.DatasetReader(root, granular.decoders)
        server.modified[''] = email.utils.formatdate(0, usegmt=True)
        assert read_name(open_reader(kind, root) if kind != 'bag' else open_reader('refs', root)) == 'a'


@pytest.mark.parametrize('cache_index', [True, False])
def test_changed_last_modified_is_a_replacement(contents, cache_index):
    with FaultServer(files={'x.bag': contents['refs', 'a']['x.bag']}) as server:
        server.etag, server.modified[''] = None, email.utils.formatdate(0, usegmt=True)
        with granular.BagReader(f'{server.endpoint}/b/x.bag', cache_index) as reader:
            assert reader[1] == b'a x 1'
            server.files = {'x.bag': contents['refs', 'b']['x.bag']}
            server.modified[''] = email.utils.formatdate(1, usegmt=True)
            with pytest.raises(ObjectChangedError, match='replaced'):
                reader.fetch([1, 2])


def test_substitute_versions_are_not_cached(contents, tmp_path):
    config = granular.IOConfig(index_cache=str(tmp_path / 'index'), cache_dir=str(tmp_path / 'blocks'))
    with FaultServer(files={}) as server:
        server.etag, server.modified[''] = None, email.utils.formatdate(0, usegmt=True)
        for name in ('a', 'b'):  # of the same time and size
            server.files = {f'ds/{file}': data for file, data in contents['refs', name].items()}
            for _ in range(2):
                with open_reader('refs', granular.Path(f'{server.endpoint}/b/ds', config=config)) as reader:
                    assert read_name(reader) == name


# --- local files that are written in place


def overwrite(path, data):
    stat = path.stat()
    with open(path, 'r+b') as file:
        file.write(data)
        file.truncate()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # as clocks of disks tell some milliseconds


def overwrite_with_the_same_time(path, data):
    """Overwrite a file as ``cp --preserve=timestamps`` does, once the clock of the disk has moved on."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        with open(path, 'r+b') as file:
            file.write(data)
            file.truncate()
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def rename_over(path, data):
    path.with_suffix('.new').write_bytes(data)
    path.with_suffix('.new').rename(path)


HARMS = {
    'overwritten': overwrite,
    'overwritten, with its former time': overwrite_with_the_same_time,
    'overwritten by a longer one': lambda path, other: overwrite(path, other + bytes(800)),
    'overwritten by a shorter one': lambda path, other: overwrite(path, other[:-9]),
    'cut': lambda path, other: os.truncate(path, 9),
    'emptied': lambda path, other: overwrite(path, b''),
    'renamed over': rename_over,
    'removed': lambda path, other: path.unlink(),
}


@pytest.mark.parametrize('harm', HARMS)
@pytest.mark.parametrize('kind', KINDS)
def test_local_files_written_in_place_are_detected(tmp_path, contents, kind, harm):
    put = Folder(granular.Path(tmp_path / 'ds'))
    # Of what was replaced, the file that was opened is open still.
    expected = 'a' if harm in ('renamed over', 'removed') else 'ObjectChangedError'

    def break_it(file):
        HARMS[harm](tmp_path / 'ds' / file, contents[kind, 'b'][file])

    async def read_async(options, file):
        async with await open_async(kind, put.root, **options) as reader:
            break_it(file)
            try:
                return name_of([await reader.get(i) for i in range(COUNT)])
            except ObjectChangedError:
                return 'ObjectChangedError'

    files = [name for name in contents[kind, 'a'] if name.endswith('x.bag')]
    for options, file in itertools.product(({}, {'cache_index': False}), files):
        fill(put, contents[kind, 'a'])
        with open_reader(kind, put.root, **options) as reader:
            break_it(file)
            assert {read_name(reader, read) for read in READS} == {expected}
        fill(put, contents[kind, 'a'])
        assert asyncio.run(read_async(options, file)) == expected


def change_rights(path):
    mode = path.stat().st_mode
    while path.stat().st_ctime_ns == path.stat().st_mtime_ns:
        path.chmod(mode ^ 0o111)
        path.chmod(mode ^ 0o011)


HARMLESS = {
    'rights': change_rights,
    'a link': lambda path: os.link(path, f'{path}.linked'),
    'both': lambda path: (change_rights(path), os.link(path, f'{path}.linked')),
}


@pytest.mark.parametrize('change', HARMLESS)
@pytest.mark.parametrize('kind', KINDS)
def test_readers_go_on_when_rights_and_links_change(tmp_path, contents, kind, change):
    put = Folder(granular.Path(tmp_path / 'ds'))
    fill(put, contents[kind, 'a'])
    with open_reader(kind, put.root) as reader:
        for file in contents[kind, 'a']:
            HARMLESS[change](tmp_path / 'ds' / file)
        assert {read_name(reader, read) for read in READS} == {'a'}


def write_texts(kind, layout):
    def write(path, numbers):
        # The records of all numbers have one size together, but other limits.
        with kind(path, {'n': 'utf8'}, layout=layout) as writer:
            for number in numbers:
                writer.append({'n': '0' * number + str(number)})

    return write


FORMER = {
    **{f'.{suffix}': lambda path, numbers, suffix=suffix: write_numbers(path, suffix, numbers) for suffix in FORMATS},
    **{
        f'-{kind.__name__}-{layout}': write_texts(kind, layout)
        for kind in (granular.DatasetWriter, granular.ShardedDatasetWriter)
        for layout in ('refs', 'columns')
    },
    '-indexed-refs': lambda path, numbers: (
        write_texts(granular.ShardedDatasetWriter, 'refs')(path, numbers),
        granular.build_index(path),
    ),
    '-indexed-columns': lambda path, numbers: (
        write_texts(granular.ShardedDatasetWriter, 'columns')(path, numbers),
        granular.build_index(path),
    ),
}


@pytest.mark.parametrize('kind', FORMER)
def test_file_with_the_former_time_is_another_one(tmp_path, kind):
    def files(name):
        path = tmp_path / f'{name}{kind}'
        found = [*path.rglob('*')] if path.is_dir() else [*tmp_path.glob(f'{name}.*')]
        files = [file for file in found if file.is_file() and file.name != '.granular-index']
        return {f'{file.relative_to(tmp_path)}'.removeprefix(name): file for file in files}

    for name, numbers in {'a': [5, 6, 7], 'b': [7, 5, 6]}.items():
        FORMER[kind](granular.Path(tmp_path / f'{name}{kind}'), numbers)
    before, after = files('a'), files('b')
    with granular.open(tmp_path / f'a{kind}') as reader:
        assert numbers_in(reader) == [5, 6, 7]
        pickled = pickle.dumps(reader)
    for name, file in before.items():
        assert file.stat().st_size == after[name].stat().st_size
        overwrite_with_the_same_time(file, after[name].read_bytes())
    with granular.open(tmp_path / f'a{kind}') as reader:
        assert numbers_in(reader) == [7, 5, 6]
    if not kind.startswith('.'):
        with pytest.raises(ObjectChangedError):
            numbers_in(pickle.loads(pickled))


@pytest.mark.parametrize(
    ('store', 'size', 'begun'),
    pairwise(itertools.product(['s3', 'http', 'memory', 'renamed', 'in place'], [0, 10, 100, 1000], [False, True])),
)
def test_file_replaced_while_open_is_not_mixed(tmp_path, store, size, begun):
    before, after = b'a' * 100, b'b' * size
    with FaultServer(files={'file': before}) as server:
        server.etag_of = md5_etag
        if store in ('renamed', 'in place'):
            path = granular.Path(tmp_path / 'file')
        elif store == 'memory':
            path = granular.Path(f'memory://{tmp_path.name}/file')
        elif store == 's3':
            path = granular.Path('s3://bucket/file', endpoint_url=server.endpoint, anon=True)
        else:
            path = granular.Path(f'{server.endpoint}/bucket/file')
        if store in ('memory', 'renamed', 'in place'):
            path.write_bytes(before)
        with path.open() as file:
            result = file.raw.read(5) if begun else b''
            if store == 'in place':
                overwrite(pathlib.Path(str(path)), after)
            elif store in ('memory', 'renamed'):
                path.write_bytes(after)
            else:
                server.files = {'file': after}
            try:
                result += file.read()
            except ObjectChangedError:
                assert store != 'renamed'
            else:
                assert result == (before if store == 'renamed' else after)
                assert len(result) == 100


def test_growing_local_file_is_read_to_its_initial_end(tmp_path):
    path = granular.Path(tmp_path / 'file')
    path.write_bytes(b'a' * 100)
    with path.open() as file:
        with open(path, 'ab') as more:
            more.write(b'b' * 100)
        assert file.read() == b'a' * 100


def test_growing_local_bag_stays_readable(tmp_path, contents):
    put = Folder(granular.Path(tmp_path / 'ds'))
    fill(put, contents['columns', 'a'])
    with open_reader('columns', put.root) as reader:
        with granular.DatasetWriter(put.root, dict.fromkeys('xy', 'utf8'), granular.encoders, layout='columns') as more:
            for i in range(3):
                more.append(point('a', COUNT + i))
                assert [read_name(reader, read) for read in READS] == ['a'] * len(READS)
        assert len(reader) == COUNT
    with open_reader('columns', put.root) as reader:
        assert len(reader) == COUNT + 3


# --- caches of datapoints


@pytest.mark.parametrize('options', OPTIONS, ids=str)
@pytest.mark.parametrize('kind', KINDS)
def test_redis_cache_does_not_return_datapoints_of_a_replaced_dataset(tmp_path, contents, kind, options, redis_server):
    put = Folder(granular.Path(tmp_path / 'ds'))
    for name in 'ab':
        fill(put, contents[kind, name])
        with open_reader(kind, put.root, **options) as reader:
            with granular.RedisCache(reader, redis_server.url, namespace=f'test-{tmp_path.name}') as cache:
                assert name_of(cache.fetch(range(COUNT))) == name


def test_readers_of_replaced_shards_are_told_at_once_each_time(moto):
    """A store that answers with another version than expected is not one that answers no request."""
    folder = moto.new_bucket() / 'ds'

    def write(name):
        for shard in range(12):
            with granular.DatasetWriter(folder / f'{shard:06}', {'x': 'utf8'}, granular.encoders) as writer:
                for i in range(12):
                    writer.append({'x': f'{name} {i}'})

    write('a')
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        assert len(reader.fetch(range(0, 20, 3))) == 7
        for shard in range(12):
            (folder / f'{shard:06}').rmtree()
        write('b')
        for _ in range(100):  # which would take minutes at the five requests a second that a silent store is sent
            with pytest.raises(ObjectChangedError):
                reader.fetch(range(144))
