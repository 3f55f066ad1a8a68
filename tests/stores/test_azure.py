"""Azure Blob Storage, against Azurite: what is particular to it, faults of the connection, and credentials."""

import asyncio
import datetime
import logging
import pickle
import time
import traceback

import pytest

import granular
from granular import aio
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BadReplyError,
    BucketNotFoundError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
    StoreError,
    StoreTimeoutError,
)
from tests.support.fault_proxy import FaultProxy
from tests.support.servers import free_ports
from tests.support.small_parts import PART, small_parts

CONFIG = small_parts(granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=3))
DATA = bytes(range(256)) * 400


@pytest.fixture
def folder(azurite):
    return granular.Path(str(azurite.place()), config=CONFIG, **azurite.options)


@pytest.fixture
def proxy(azurite):
    with FaultProxy(azurite.endpoint) as proxy:
        yield proxy


def through(proxy, path, config=CONFIG, **options):
    """Return a path whose requests go through a proxy."""
    store = path.aio.store
    endpoint = f'{proxy.endpoint}/{store.options["endpoint_url"].rpartition("/")[2]}'
    return granular.Path(str(path), config=config, **{**store.options, 'endpoint_url': endpoint, **options})


def sas(azurite, path, hours=1):
    """Return a token for reading and listing the container of a path."""
    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    now = datetime.datetime.now(datetime.UTC)
    return generate_container_sas(
        azurite.account,
        path.aio.store.root.partition('://')[2],
        account_key=azurite.key,
        permission=ContainerSasPermissions(read=True, list=True),
        start=now - datetime.timedelta(hours=2),
        expiry=now + datetime.timedelta(hours=hours),
    )


# --- paths


def test_files_and_folders(folder):
    small, large = folder / 'a' / 'small', folder / 'a' / 'b' / 'large'
    content = DATA * 52  # two blocks, and two requests
    small.write_bytes(DATA)
    large.write_bytes(content)
    (folder / 'a2' / 'empty').write_bytes(b'')
    assert (
        small.read_bytes() == DATA and large.read_bytes() == content and (folder / 'a2' / 'empty').read_bytes() == b''
    )
    assert small.read_range(len(DATA) - 5) == DATA[-5:]
    assert large.read_ranges([0, 5_300_000, 5], [3, 5_300_100, 5_200_000]) == [
        content[:3], content[5_300_000:5_300_100], content[5:5_200_000]
    ]  # fmt: skip
    with pytest.raises(OutOfRangeError, match=r'bytes 5 to 102401 were requested, but it has 102400'):
        small.read_range(5, len(DATA) + 1)
    with pytest.raises(OutOfRangeError, match=r'but it has 102400'):
        small.read_range(len(DATA) + 9, len(DATA) + 10)
    assert [path.name for path in folder.iterdir()] == ['a', 'a2']
    assert [str(path.relative_to(folder)) for path in folder.rglob('*')] == [
        'a', 'a/b', 'a/b/large', 'a/small', 'a2', 'a2/empty'
    ]  # fmt: skip
    assert (folder / 'a').is_dir() and small.is_file() and not (folder / 'missing').exists()
    assert small.stat().size == len(DATA) and small.stat().version
    small.copy(folder / 'copied')
    assert (folder / 'copied').read_bytes() == DATA
    (folder / 'copied').unlink()
    with pytest.raises(NotFoundError, match='no such'):
        (folder / 'copied').unlink()
    (folder / 'a').rmtree()
    assert [str(path.relative_to(folder)) for path in folder.rglob('*')] == ['a2', 'a2/empty']
    with pytest.raises(NotFoundError, match='no such folder'):
        (folder / 'a').rmtree()


def test_blobs_that_mark_folders(folder, azurite):
    # As accounts with a hierarchical namespace list their folders.
    from azure.storage.blob import BlobServiceClient

    (folder / 'dir' / 'x').write_bytes(b'x')
    store, key = folder.aio.store, folder.aio.key
    with BlobServiceClient.from_connection_string(azurite.connection_string) as service:
        container = service.get_container_client(store.root.partition('://')[2])
        for name in ('dir', 'void', 'slash/'):
            container.upload_blob(f'{key}/{name}', b'', metadata={'hdi_isfolder': 'true'})
    assert (folder / 'slash').is_dir() and not list((folder / 'slash').iterdir())
    assert (folder / 'dir').is_dir() and (folder / 'void').is_dir() and not (folder / 'void').is_file()
    assert [(path.name, path.is_dir()) for path in folder.iterdir()] == [('dir', True), ('slash', True), ('void', True)]
    assert [path.name for path in folder.rglob('*') if path.is_file()] == ['x']
    folder.rmtree()
    assert not folder.exists()


def test_a_blob_and_a_folder_of_one_name_are_both_listed(folder, azurite, monkeypatch):
    from azure.storage.blob import BlobServiceClient

    monkeypatch.setattr('granular.aio.stores.azure.store.PAGE', 1)
    for name in ('a', 'a/x', 'b-', 'b/x', 'c//x'):
        (folder / name).write_bytes(name.encode())
    store, key = folder.aio.store, folder.aio.key
    with BlobServiceClient.from_connection_string(azurite.connection_string) as service:
        container = service.get_container_client(store.root.partition('://')[2])
        container.upload_blob(f'{key}/b', b'', metadata={'hdi_isfolder': 'true'})  # two pages before the folder itself
    assert sorted(path.name for path in folder.iterdir()) == ['a', 'a', 'b', 'b-', 'c']
    assert sorted(str(path / file) for path, _, files in folder.walk() for file in files) == [
        f'{folder}/{name}' for name in ('a', 'a/x', 'b-', 'b/x', 'c//x')
    ]


@pytest.mark.parametrize('name', ['a/../x', './x', 'a\\x', '..'])
def test_names_that_azure_takes_for_those_of_other_blobs_are_refused(folder, name):
    (folder / 'a' / 'x').write_bytes(b'a')
    (folder / 'x').write_bytes(b'x')
    path = folder / name
    for call in (
        path.read_bytes,
        lambda: path.read_ranges([0, 0], [1, 1]),
        path.exists,
        lambda: path.write_bytes(b'other'),
        lambda: path.unlink(missing_ok=True),
        lambda: (folder / 'x').copy(path),
        lambda: path.copy(folder / 'y'),
    ):
        with pytest.raises(InvalidArgumentError, match='blobs have no names with'):
            call()
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob('*')) == ['a', 'a/x', 'x']
    assert (folder / 'x').read_bytes() == b'x' and (folder / 'a' / 'x').read_bytes() == b'a'


def test_containers(azurite):
    container = azurite.new_bucket()
    with pytest.raises(AlreadyExistsError):
        container.mkdir()
    container.mkdir(exist_ok=True)
    assert container.is_dir() and list(container.iterdir()) == []
    missing = granular.Path('az://missing/x', config=CONFIG, **azurite.options)
    for call in (missing.read_bytes, missing.stat, lambda: missing.write_bytes(b'x'), lambda: list(missing.iterdir())):
        with pytest.raises(BucketNotFoundError, match=r'^az://missing/x: no such container'):
            call()


@pytest.mark.parametrize('exist_ok', [False, True])
@pytest.mark.parametrize('fault', ['after reset', 'after status 503', 'after half', 'reset', 'status 503'])
def test_container_is_created_despite_a_lost_reply(folder, proxy, fault, exist_ok):
    container = through(proxy, granular.Path(f'az://made-{time.time_ns()}', **folder.aio.store.options))
    lost = iter([fault])
    proxy.plan = lambda call: next(lost, '') if call.method == 'PUT' else ''
    container.mkdir(exist_ok=exist_ok)
    assert proxy.faults == [fault]
    (container / 'x').write_bytes(b'1')
    with pytest.raises(AlreadyExistsError, match='exists already'):
        container.mkdir()


def test_container_is_not_taken_for_an_existing_one_where_its_creation_is_refused(folder, proxy):
    container = through(proxy, granular.Path('az://refused', **folder.aio.store.options))
    proxy.plan = lambda call: 'status 409' if call.method == 'PUT' else ''  # as while it is being deleted
    with pytest.raises(StoreError, match=r'^az://refused: status 409'):
        container.mkdir(exist_ok=True)


# --- datasets


def test_a_sharded_dataset_is_written_resumed_and_loaded(folder):
    spec, points = {'i': 'int', 'x': 'bytes'}, [{'i': i, 'x': bytes([i]) * 500} for i in range(30)]

    def write(stop):
        with granular.ShardedDatasetWriter(folder / 'ds', spec, granular.encoders, shardlen=10) as writer:
            for point in points[writer.found : stop]:
                writer.append(point)
            if stop < len(points):
                raise KeyError('killed')

    with pytest.raises(KeyError):
        write(25)
    write(30)
    with granular.ShardedDatasetReader(folder / 'ds', granular.decoders) as reader:
        assert reader.fetch(range(30)) == points
        before = granular.io_stats()['requests']
        assert reader.fetch(range(20)) == points[:20]
        # Neighbouring records are read together: 40 of them by a few requests.
        assert granular.io_stats()['requests'] - before <= 8
        with granular.Loader(granular.sources.Epochs(reader, seed=1), batch=10) as loader:
            batches = iter(loader)
            numbers = [number for _ in range(3) for number in next(batches)['i'].tolist()]
    assert sorted(numbers) == list(range(30))


def test_a_replaced_blob_is_never_mixed(folder):
    path = folder / 'x.bag'

    def write(byte):
        path.unlink() if path.exists() else None
        with granular.BagWriter(path) as writer:
            for _ in range(50):
                writer.append(bytes([byte]) * 1000)

    write(1)
    with granular.BagReader(path) as reader:
        assert reader[7] == b'\1' * 1000
        write(2)
        for call in (lambda: reader[8], lambda: reader.fetch(range(50)), lambda: reader[49]):
            with pytest.raises(ObjectChangedError, match=r'^az://test-\w+/\w+/x\.bag: it was replaced'):
                call()
    write(1)  # the same bytes have another version
    version = path.stat().version
    write(1)
    with pytest.raises(ObjectChangedError):
        path.read_ranges([0], [9], version=version)


async def test_one_of_several_writers_of_a_new_blob_succeeds(folder):
    store, key = folder.aio.store, folder.aio.key

    async def write(number, size):
        writer = await store.open_writer(f'{key}/new', new=True)
        await writer.write(bytes([number]) * size)
        try:
            await writer.close()
        except AlreadyExistsError:
            return None
        assert writer.version == (await store.stat(f'{key}/new')).version
        return bytes([number]) * size

    written = [data for data in await asyncio.gather(*(write(i, PART + 1 if i % 2 else 100) for i in range(4))) if data]
    assert len(written) == 1
    assert await (folder.aio / 'new').read_bytes() == written[0]
    await aio.aclose()


# --- faults


FAULTS = ['reset', 'status 503', 'after reset', 'after half', 'page html']


@pytest.mark.parametrize('fault', FAULTS)
def test_requests_that_fail_once_are_repeated(folder, proxy, fault):
    requests = set()

    def plan(call):
        request = call.method, call.path, str(call.query), call.headers.get('x-ms-range')
        # The SDK waits for a second after half a body.
        if request in requests or (fault == 'after half' and proxy.faults):
            return ''
        requests.add(request)
        return fault

    proxy.plan = plan
    path = through(proxy, folder / 'x')
    data = DATA * 52
    path.write_bytes(data)
    assert path.read_range(100, 90_000) == data[100:90_000]
    assert path.read_ranges([0, 4_900_000], [70_000, 5_300_000]) == [data[:70_000], data[4_900_000:5_300_000]]
    assert [entry.name for entry in path.parent.iterdir()] == ['x']
    assert path.stat().size == len(data)
    assert proxy.faults


@pytest.mark.parametrize('size', [100, PART + 1])
@pytest.mark.parametrize('fault', ['after reset', 'status 409'])
async def test_a_new_blob_whose_reply_is_lost_or_false_is_published(folder, proxy, size, fault):
    lost = []

    def plan(call):
        publishes = call.method == 'PUT' and call.query.get('comp', 'blocklist') == 'blocklist'
        if publishes and not lost:
            lost.append(call)
            return fault
        return ''

    proxy.plan = plan
    path = through(proxy, folder / 'x').aio
    writer = await path.store.open_writer(path.key, new=True)
    await writer.write(bytes(size))
    await writer.close()
    stat = await path.stat()
    assert lost and (stat.size, stat.version) == (size, writer.version)
    await aio.aclose()


@pytest.mark.parametrize(
    ('fault', 'kind', 'message'),
    [
        ('status 503', StoreError, 'status 503'),
        ('reset', StoreError, 'ConnectionError: Server disconnected'),
        ('hang', StoreTimeoutError, 'no answer'),
        ('page html', GranularError, 'az://'),
        ('after cut', GranularError, 'az://'),
        ('status 403', AccessDeniedError, 'access denied'),
        ('status 412', ObjectChangedError, 'it was replaced'),
        ('status 404', BadReplyError, 'status 404 without x-ms-error-code'),
    ],
)
def test_lasting_faults_are_errors(folder, proxy, fault, kind, message):
    (folder / 'x').write_bytes(DATA)
    proxy.plan = lambda call: fault
    config = granular.IOConfig(
        backoff=0.001, backoff_cap=0.01, attempts=2, first_byte_timeout=0.1, read_timeout=0.1, retry_time=0.2
    )
    path = through(proxy, folder / 'x', config)
    for call in (lambda: path.read_range(5, 5000), path.stat, lambda: path.write_bytes(b'x')):
        if fault == 'after cut' and call is not path.stat:
            continue
        with pytest.raises(kind, match=message) as caught:
            call()
        assert str(caught.value).startswith(str(path))


def test_ranges_that_are_refused_although_the_blob_has_them_are_an_error(folder, proxy):
    (folder / 'x').write_bytes(DATA)
    proxy.plan = lambda call: 'status 416' if call.method == 'GET' else ''
    for read in (through(proxy, folder / 'x').read_bytes, lambda: through(proxy, folder / 'x').read_range(5, 10)):
        proxy.calls.clear()
        with pytest.raises(BadReplyError, match=r'/x: status 416 for bytes \d .*, which has them'):
            read()
        assert len(proxy.calls) < 10


def cancelled():
    return sum(store.failures.get('cancelled', 0) for store in granular.metrics.snapshot().stores.values())


async def test_a_cancelled_read_ends_its_request(folder, proxy):
    await (folder.aio / 'x').write_bytes(DATA)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def plan(call):
        loop.call_soon_threadsafe(asked.set)
        return 'hang'

    proxy.plan = plan
    path, before = through(proxy, folder / 'x').aio, cancelled()
    task = asyncio.ensure_future(path.read_ranges([0, 90_000], [5, 99_000]))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert granular.io_stats()['in_flight'] == 0
    assert cancelled() > before
    proxy.plan = lambda call: ''
    assert await path.read_bytes() == DATA
    await aio.aclose()


def test_a_server_that_is_not_there(azurite):
    endpoint = f'http://127.0.0.1:{free_ports(1)[0]}/{azurite.account}'
    config = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=2, connect_timeout=1)
    path = granular.Path('az://some-container/x', config=config, endpoint_url=endpoint, account_key=azurite.key)
    with pytest.raises(StoreError, match=r'^az://some-container/x: .*check its address'):
        path.read_bytes()


# --- credentials


SECRET = 'cGxhbnRlZC1zZWNyZXQtb2YtYW4tYWNjb3VudA=='


@pytest.fixture
def logged():
    lines, logger, handler = [], logging.getLogger('granular'), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def test_refused_credentials(folder, azurite, logged):
    path = folder / 'x'
    path.write_bytes(DATA)
    endpoint = {'endpoint_url': azurite.endpoint}
    expired, valid = sas(azurite, folder, -1), sas(azurite, folder)
    assert granular.Path(str(path), sas_token=valid, **endpoint).read_bytes() == DATA
    assert granular.Path(str(path), sas_token=f'?{valid}', **endpoint).stat().size == len(DATA)
    assert granular.Path(str(folder), sas_token=valid, **endpoint).is_dir()
    for options in (
        {'account_key': SECRET, **endpoint},
        {'sas_token': expired, **endpoint},
        {'anon': True, **endpoint},
        {'connection_string': f'BlobEndpoint={azurite.endpoint};AccountName={azurite.account};AccountKey={SECRET}'},
        {'endpoint_url': azurite.endpoint.replace(azurite.account, 'another'), 'account_key': SECRET},
    ):
        refused = granular.Path(str(path), config=CONFIG, **options)
        for operation, *values in (('read_bytes',), ('stat',), ('write_bytes', b'x'), ('read_range', 1, 5)):
            with pytest.raises(GranularError, match=f'^{path}') as caught:
                getattr(refused, operation)(*values)
            text = ''.join(traceback.format_exception(caught.value)) + repr(refused) + repr(refused.store) + str(logged)
            assert SECRET not in text and expired.rpartition('sig=')[2] not in text
            if 'another' not in options.get('endpoint_url', ''):
                assert isinstance(caught.value, AccessDeniedError)


def test_credentials_are_not_pickled(folder, azurite, monkeypatch):
    (folder / 'x').write_bytes(DATA)
    token = sas(azurite, folder)
    string = f'BlobEndpoint={azurite.endpoint};SharedAccessSignature={token}'
    for options in (
        azurite.options,
        {'sas_token': token, 'endpoint_url': azurite.endpoint},
        {'connection_string': azurite.connection_string},
        {'connection_string': string},
    ):
        path = granular.Path(str(folder / 'x'), **options)
        content = pickle.dumps(path)
        assert azurite.key.encode() not in content and token.rpartition('sig=')[2].encode() not in content
        back = pickle.loads(content)
        assert str(back) == str(path)
        with monkeypatch.context() as patch:
            # Another process takes the credentials from its environment, and stays with the account.
            patch.setenv('AZURE_STORAGE_ACCOUNT_KEY', azurite.key)
            assert pickle.loads(content).read_bytes() == DATA
        with monkeypatch.context() as patch:
            patch.setenv('AZURE_STORAGE_CONNECTION_STRING', azurite.connection_string)
            assert pickle.loads(content).read_bytes() == DATA
            patch.setenv('AZURE_STORAGE_CONNECTION_STRING', 'AccountName=another;AccountKey=' + SECRET)
            with pytest.raises(InvalidArgumentError, match='AZURE_STORAGE_CONNECTION_STRING is set'):
                pickle.loads(content).read_bytes()


def test_the_environment_names_the_account(folder, azurite, monkeypatch):
    (folder / 'x').write_bytes(DATA)
    monkeypatch.setenv('AZURE_STORAGE_CONNECTION_STRING', azurite.connection_string)
    path = granular.Path(str(folder / 'x'))
    assert path.read_bytes() == DATA
    monkeypatch.setenv('AZURE_STORAGE_CONNECTION_STRING', azurite.connection_string.replace('127.0.0.1', 'localhost'))
    assert granular.Path(str(folder / 'x')) != path
    monkeypatch.delenv('AZURE_STORAGE_CONNECTION_STRING')
    with pytest.raises(InvalidArgumentError, match=r'expected account_name, connection_string or AZURE_'):
        granular.Path(str(folder / 'x')).read_bytes()


@pytest.mark.parametrize(
    ('url', 'options', 'message'),
    [
        ('az://', {}, 'expected a container'),
        ('az://a:pass-word@host/x', {}, 'pass credentials as options'),
        ('az://box/x', {'acount_name': 'a'}, 'unknown options'),
        ('abfs://box@one.dfs.core.windows.net/x', {'account_name': 'two'}, 'expected one storage account, got'),
        ('az://box/x', {'connection_string': 'AccountName=a;AccountKey=b', 'account_name': 'two'}, 'got a and two'),
    ],
)
def test_addresses_and_options_that_do_not_fit(url, options, message):
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        granular.Path(url, **options)
    assert 'pass-word' not in str(caught.value)


def test_the_container_of_an_address_is_shown_whole():
    url = 'abfss://my-data@account.dfs.core.windows.net/train/x.bag'
    path = granular.Path(url, anon=True)
    assert (str(path), f'{path}', repr(path)) == (url, url, f'Path({url!r})')
    assert repr(path.store) == "AzureStore('abfss://my-data@account.dfs.core.windows.net')"
    assert path == granular.Path(url, anon=True, account_name='account')
    assert path != granular.Path(url.replace('account', 'other'), anon=True)
    assert path.store.fingerprint != granular.Path(url.replace('account', 'other'), anon=True).store.fingerprint
