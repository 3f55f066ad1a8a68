"""Each store raises granular's errors only, whatever the operation and whatever fails."""

import asyncio
import gc
import time

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import granular
from granular import aio
from granular.aio.stores.multipart import PartWriter
from granular.errors import GranularError, InvalidArgumentError, NotFoundError, StoreError
from tests.support.servers import free_ports

CONFIG = granular.IOConfig(attempts=1)


async def listed(items):
    return [item async for item in items]


async def opened(path, mode):
    async with await path.open(mode) as file:
        return await (file.read() if mode == 'rb' else file.write(b'x'))


async def written(path):
    async with aio.DatasetWriter(path, {'i': 'int'}, granular.encoders) as writer:
        await writer.append({'i': 1})


OPERATIONS = {
    'stat': lambda path: path.stat(),
    'exists': lambda path: path.exists(),
    'is_file': lambda path: path.is_file(),
    'is_dir': lambda path: path.is_dir(),
    'read_bytes': lambda path: path.read_bytes(),
    'read_text': lambda path: path.read_text(),
    'read_range': lambda path: path.read_range(2, 9),
    'read_end': lambda path: path.read_range(-9),
    'read_ranges': lambda path: path.read_ranges([0, 5], [2, 9]),
    'write_bytes': lambda path: path.write_bytes(b'x'),
    'open': lambda path: opened(path, 'rb'),
    'open_to_write': lambda path: opened(path, 'wb'),
    'mkdir': lambda path: path.mkdir(),
    'mkdir_parents': lambda path: path.mkdir(parents=True, exist_ok=True),
    'unlink': lambda path: path.unlink(),
    'rmtree': lambda path: path.rmtree(),
    'copy': lambda path: path.copy(path.parent / 'copied'),
    'copy_to_memory': lambda path: path.copy(f'memory://copied-{time.time_ns()}'),
    'copy_from_memory': lambda path: aio.Path('memory://source').copy(path),
    'iterdir': lambda path: listed(path.iterdir()),
    'glob': lambda path: listed(path.glob('*')),
    'rglob': lambda path: listed(path.rglob('*')),
    'walk': lambda path: listed(path.walk()),
    'bag': aio.BagReader.open,
    'dataset': aio.DatasetReader.open,
    'shards': aio.ShardedDatasetReader.open,
    'find_out': aio.open,
    'write_dataset': written,
    'clean': aio.clean,
}
# What is at a path, and its name in a folder that has a file.
PLACES = {
    'missing': 'missing',
    'missing folder': 'missing/deep/in',
    'a file as a folder': 'file/in',
    'a file': 'file',
    'a folder': '',
    'a name too long': 'n' * 2000,
    'a null': 'a\0b',
    'no text': 'a\ud800b',
}


async def foreign_errors(folder, name, some=lambda number: True):
    """Return the exceptions that are not granular's of operations on a path, which is made anew for each."""
    foreign = {}
    for number, (operation, run) in enumerate(OPERATIONS.items()):
        if not some(number):
            continue
        try:
            await asyncio.wait_for(run(folder / name if name else folder), 60)
        except GranularError:
            pass
        except Exception as error:
            foreign[name, operation] = repr(error)
    return foreign


@pytest.fixture(params=['local', 'memory', 'moto', 'fakegcs', 'azurite'])
def folders(request, tmp_path):
    """Return an empty folder, and n for one operation in n on each path, where operations are requests."""
    match request.param:
        case 'local':
            return aio.Path(tmp_path), 0
        case 'memory':
            return aio.Path(f'memory://odd-{time.time_ns()}'), 0
        case name:
            server = request.getfixturevalue(name)
            # One attempt, because Azurite answers 500 to a null in a name.
            return aio.Path(str(server.place()), config=CONFIG, **server.options), 8 if name == 'azurite' else 4


async def test_operations_on_odd_paths(folders):
    root, share = folders
    for number, name in enumerate(PLACES.values()):
        folder = root / f'{number}'
        await folder.mkdir()
        await (folder / 'file').write_bytes(b'content')
        # Each operation on two of the paths or one, where it takes a request.
        some = (lambda i, number=number: (i + number) % share == 0) if share else (lambda i: True)
        assert not await foreign_errors(folder, name, some)


async def test_operations_on_a_web_server(http):
    folder = aio.Path(http.place())
    for name in PLACES.values():
        assert not await foreign_errors(folder, name)


@pytest.mark.parametrize('scheme', ['s3', 'gs', 'az', 'http'])
async def test_operations_on_a_server_that_is_not_there(scheme):
    endpoint = f'127.0.0.1:{free_ports(1)[0]}'
    logins = {
        's3': {'key': 'k', 'secret': 's', 'region': 'r'},
        'gs': {'token': 'anon'},
        'az': {'anon': True},
        'http': {},
    }
    options = logins[scheme]
    options |= {'endpoint_url': f'http://{endpoint}'} if scheme != 'http' else {}
    folder = aio.Path(f'{scheme}://{endpoint if scheme == "http" else "bucket"}/folder', config=CONFIG, **options)
    assert not await foreign_errors(folder, 'file')


class OddError(Exception):
    """An exception whose text cannot be had."""

    def __str__(self):
        raise ValueError('no text')


class RaisingFileSystem(MemoryFileSystem):
    """A file system each of whose methods raises the same exception."""

    protocol = 'raising'
    cachable = False
    error: BaseException = OSError()

    def _raise(self, *args, **kwargs):
        raise self.error

    info = ls = cat_file = makedirs = mkdir = rmdir = rm = rm_file = cp_file = open = exists = isfile = _raise


@pytest.fixture
def raising():
    fsspec.register_implementation('raising', RaisingFileSystem, clobber=True)
    return aio.Path('raising://folder')


@pytest.mark.parametrize(
    'error',
    [
        KeyError('x'), ValueError(), RuntimeError('closed'), NotImplementedError(), OSError(5, 'i/o'), OSError(),
        FileNotFoundError('x'), PermissionError(13, 'no'), NotADirectoryError(), TimeoutError(), ConnectionError('x'),
        TimeoutError(), UnicodeDecodeError('utf-8', b'x', 0, 1, 'bad'), ZeroDivisionError(), MemoryError(),
        StopIteration(), StopAsyncIteration(), AttributeError('x'), AssertionError(), ImportError('x'), OddError(),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_exceptions_of_a_file_system_become_those_of_granular(raising, monkeypatch, error):
    monkeypatch.setattr(RaisingFileSystem, 'error', error)
    assert not await foreign_errors(raising, 'file')
    with pytest.raises(GranularError, match=r'raising://folder/file') as caught:
        await (raising / 'file').read_bytes()
    assert caught.value.__cause__ is error
    assert type(caught.value) is not GranularError


async def test_credentials_in_messages_of_a_file_system_are_hidden(raising, monkeypatch):
    message = 'GET https://host/key?X-Amz-Signature=0123456789abcdef failed'
    monkeypatch.setattr(RaisingFileSystem, 'error', RuntimeError(message))
    with pytest.raises(StoreError, match='RuntimeError') as caught:
        await (raising / 'file').read_bytes()
    assert '0123456789abcdef' not in str(caught.value)


class ParticularFileSystem(MemoryFileSystem):
    protocol = 'particular'
    cachable = False

    def __init__(self, size=1, **kwargs):
        super().__init__(**kwargs)
        if size == 0:
            raise KeyError(size)
        self.size = int(size)


def test_options_that_do_not_fit_a_file_system_are_errors():
    fsspec.register_implementation('particular', ParticularFileSystem, clobber=True)
    with pytest.raises(InvalidArgumentError, match=r'particular://.* options do not fit: ValueError: invalid'):
        granular.Path('particular://folder', size='much')
    with pytest.raises(StoreError, match=r'particular://.*KeyError: 0'):
        granular.Path('particular://folder', size=0)


def test_names_that_cannot_be_encoded_are_refused_outside_of_local_disks(tmp_path):
    name = 'caf\udce9'  # as the system returns the name of a file in Latin-1
    with pytest.raises(InvalidArgumentError, match='not valid Unicode'):
        granular.Path(f's3://bucket/{name}')
    with pytest.raises(InvalidArgumentError, match='not valid Unicode'):
        granular.Path('s3://bucket') / name
    with pytest.raises(NotFoundError):
        (granular.Path(tmp_path) / name).read_bytes()
    (granular.Path(tmp_path) / name).write_bytes(b'x')
    assert (granular.Path(tmp_path) / name).read_bytes() == b'x'


class FailingParts(PartWriter):
    """An upload whose first parts all fail at the same moment."""

    def __init__(self):
        super().__init__(granular.Path('/folder').aio.store, 'key', new=False, parallel=2)
        self._part_size = 1
        self.fail = asyncio.Event()

    async def send(self, number, data, last):
        if number == 1:
            self.fail.set()
        await self.fail.wait()
        raise StoreError(f'part {number}')

    async def start(self):
        pass

    finish = discard = start

    async def put(self, data):
        raise NotImplementedError


async def test_parts_that_fail_together_are_one_error():
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context['message']))
    writer = FailingParts()
    with pytest.raises(StoreError, match='part'):
        await writer.write(b'four')
    await writer.abort()
    gc.collect()
    assert reported == []
