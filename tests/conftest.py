"""Fixtures: servers and interpreters, one of each per run, and a check for blocked event loops."""

import asyncio
import contextlib
import gc
import os
import pathlib
import ssl
import sys
import threading
import time
from collections.abc import Iterator

import hypothesis
import pyarrow
import pytest
import trustme
from pyarrow import parquet

import granular
from granular import cli
from tests.support import seams, slow
from tests.support.hub import HubServer
from tests.support.interpreters import Interpreter
from tests.support.oracles import KappaData, Megatron, Oracle
from tests.support.servers import (
    AzuriteServer,
    FakeGCSServer,
    HTTPServer,
    MotoServer,
    RedisServer,
    SeaweedServer,
    Server,
)
from tests.support.tables import examples

# The S3 server of most tests is SeaweedFS: moto takes several times as long for a request, in the process of the tests.
# Tests of paths, of S3 replies, and of datasets in every store run against moto as well.
STORES = ('local', 'memory', 'seaweed', 'fakegcs')
BUCKETS = ('seaweed', 'fakegcs')
BLOCKED = 0.2  # seconds; no callback may block an event loop for longer

# They need packages that these tests do not have: make test-drivers.
collect_ignore = ['drivers']

# What these fixtures start takes seconds: their tests come first, so that no other process takes any of them over.
COSTLY = ('learning_interpreter', 'driver', 'azurite', 'oracle21', 'oracle24', 'grain', 'kappadata')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption('--write-slow', action='store_true', help=f'write {slow.LIST.name}, of a whole run')


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line('markers', f'slow: is in {slow.LIST.name}, and run by `make test-slow`')


_slow, _seconds = slow.listed(), []


def pytest_itemcollected(item: pytest.Item) -> None:
    if slow.function_of(item.nodeid) in _slow:
        item.add_marker('slow')


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == 'call':
        _seconds.append((report.nodeid, report.duration))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption('write_slow') and not hasattr(session.config, 'workerinput'):
        slow.LIST.write_text(''.join(f'{function}\n' for function in slow.slowest(_seconds)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collect tests without collecting garbage, which takes a sixth of the time and finds none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    """Return the place of the first of the costly fixtures that a test takes by name or parameter."""
    parameters = getattr(item, 'callspec', None)
    names = [*getattr(item, 'fixturenames', ()), *(parameters.params.values() if parameters else ())]
    return min((COSTLY.index(name) for name in names if isinstance(name, str) and name in COSTLY), default=len(COSTLY))


_imported = [0]  # the number of modules when objects were frozen last


def pytest_runtest_setup() -> None:
    """Freeze the objects of the packages that tests have imported: with them, each collection takes 0.1 s."""
    if len(sys.modules) > _imported[0] + 20:
        _imported[0] = len(sys.modules)
        gc.collect()
        gc.freeze()


def _work() -> float:
    """Return the processor time of a fixed piece of work, which grows where other processes take caches and clock."""
    start = time.thread_time()
    sum(range(500_000))
    return time.thread_time() - start


_USUAL = min(_work() for _ in range(5))

# The tests start hundreds of interpreters: none of them is to compile granular again.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
# Their threads would wait in loops for each other, on cores that other tests need.
os.environ |= {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1', 'GOMAXPROCS': '1'}
# Ray ends the whole process if a request to a cluster that was shut down has waited for so many seconds, 60 by default.
os.environ |= {'RAY_gcs_rpc_server_reconnect_timeout_s': '86400'}
sys.dont_write_bytecode = False

# A busy machine takes longer for an example: pytest limits the time of a whole test.
hypothesis.settings.register_profile(
    'tests',
    deadline=None,
    max_examples=examples(100),
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile('tests')


@pytest.fixture(scope='session', autouse=True)
def hermetic() -> Iterator[None]:
    """Remove credentials, addresses and settings of the environment."""
    patch = pytest.MonkeyPatch()
    for name in list(os.environ):
        if name.startswith(('AWS_', 'AZURE_', 'GOOGLE_', 'GRANULAR_', 'STORAGE_EMULATOR', 'GCS', 'HF_')):
            patch.delenv(name)
    patch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
    patch.setenv('NO_GCE_CHECK', 'true')
    for api in (granular, granular.aio):
        for name in api.__all__:
            getattr(api, name)  # compile lazy imports now, as this may block an event loop for long
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which servers have replied: those of this test may have the ports of earlier ones, and no outage."""
    seams.forget_servers(monkeypatch)


@pytest.fixture(autouse=True)
def unblocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test if one callback blocked its event loop for too long."""
    slow: list[str] = []
    collecting = [0.0, 0.0]  # start of a collection, and total seconds: with moto each takes half a second
    run, main = asyncio.Handle._run, threading.get_ident()

    def collector(phase: str, info: object) -> None:
        if phase == 'start':
            collecting[0] = time.thread_time()
        else:
            collecting[1] += time.thread_time() - collecting[0]

    def timed(self: asyncio.Handle) -> None:
        # A loop in another thread is that of a test server, or short-lived and of a worker thread: it blocks no work.
        if threading.get_ident() != main:
            run(self)
            return
        # The time of this thread only, as the machine may be busy, without garbage collection.
        start = time.thread_time() - collecting[1]
        run(self)
        seconds = time.thread_time() - collecting[1] - start
        if seconds > BLOCKED and seconds > BLOCKED * _work() / _USUAL:  # the machine may be slower now
            slow.append(f'{seconds:.2f} s in {self!r}')

    monkeypatch.setattr(asyncio.Handle, '_run', timed)
    gc.callbacks.append(collector)
    yield
    gc.callbacks.remove(collector)
    assert not slow, f'the event loop was blocked: {slow}'


@pytest.fixture(scope='session')
def authority() -> trustme.CA:
    """An authority of certificates, which no one trusts."""
    return trustme.CA()


@pytest.fixture
def certified(authority: trustme.CA) -> ssl.SSLContext:
    """The context of a server on this machine, with a certificate of the authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert('127.0.0.1').configure_cert(context)
    return context


@pytest.fixture
def bundle(authority: trustme.CA, tmp_path: pathlib.Path) -> str:
    """A file with the certificate of the authority."""
    authority.cert_pem.write_to_path(str(tmp_path / 'authority.pem'))
    return str(tmp_path / 'authority.pem')


@pytest.fixture(scope='session')
def moto() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture(scope='session')
def seaweed() -> Iterator[SeaweedServer]:
    with SeaweedServer() as server:
        yield server


@pytest.fixture(scope='session')
def fakegcs() -> Iterator[FakeGCSServer]:
    with FakeGCSServer() as server:
        yield server


@pytest.fixture(scope='session')
def azurite() -> Iterator[AzuriteServer]:
    with AzuriteServer() as server:
        yield server


@pytest.fixture
def user_buckets(seaweed: SeaweedServer, fakegcs: FakeGCSServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``s3://my-bucket`` and ``gs://my-bucket``, empty, with credentials in the environment."""
    monkeypatch.setenv('AWS_ENDPOINT_URL', seaweed.endpoint)
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', seaweed.options['key'])
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', seaweed.options['secret'])
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', fakegcs.endpoint)
    with _empty('s3://my-bucket'), _empty('gs://my-bucket'):
        yield


@pytest.fixture
def user_container(azurite: AzuriteServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``az://my-container``, empty, with credentials in the environment. Its server takes seconds to start."""
    monkeypatch.setenv('AZURE_STORAGE_CONNECTION_STRING', azurite.connection_string)
    with _empty('az://my-container'):
        yield


@contextlib.contextmanager
def _empty(name: str) -> Iterator[None]:
    bucket = granular.Path(name)
    bucket.mkdir(exist_ok=True)
    yield
    for path in bucket.rglob('*'):  # SeaweedFS lists folders for a while after their last file
        if path.is_file():
            path.unlink()


@pytest.fixture(scope='session')
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def user_repository(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """``hf://datasets/me/digits`` with a dataset and a Parquet file, on the branches main and v1."""
    folder = tmp_path_factory.mktemp('digits')
    with granular.DatasetWriter(folder / 'train', {'label': 'int'}) as writer:
        for label in range(100):
            writer.append({'label': label})
    (folder / 'parquet').mkdir()
    parquet.write_table(pyarrow.table({'x': list(range(10))}), folder / 'parquet' / '0.parquet')
    for branch in ('main', 'v1'):
        hub.commit('me/digits', folder, branch)
    monkeypatch.setenv('HF_ENDPOINT', hub.endpoint)


@pytest.fixture(scope='session')
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HTTPServer]:
    with HTTPServer(tmp_path_factory.mktemp('http')) as server:
        yield server


@pytest.fixture(params=STORES)
def root(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> granular.Path:
    """An empty folder in every kind of store."""
    return empty_folder(request, tmp_path)


def empty_folder(request: pytest.FixtureRequest, tmp_path: os.PathLike[str]) -> granular.Path:
    """Create an empty folder in the store that a fixture's parameter names."""
    if request.param == 'local':
        return granular.Path(tmp_path)
    if request.param == 'memory':
        return granular.Path(f'memory://{request.node.name.replace("[", "-").replace("]", "")}-{time.time_ns()}')
    server: Server = request.getfixturevalue(request.param)
    return server.place()


@pytest.fixture(params=BUCKETS)
def bucket(request: pytest.FixtureRequest) -> granular.Path:
    """An empty folder in a bucket of every kind of object store."""
    server: Server = request.getfixturevalue(request.param)
    return server.place()


@pytest.fixture(scope='session')
def oracle21() -> Iterator[Oracle]:
    with Oracle.granular('0.21.1') as oracle:
        yield oracle


@pytest.fixture(scope='session')
def oracle24() -> Iterator[Oracle]:
    with Oracle.granular('0.24.2') as oracle:
        yield oracle


@pytest.fixture(scope='session')
def grain() -> Iterator[Oracle]:
    with Oracle.grain() as oracle:
        yield oracle


@pytest.fixture(scope='session')
def kappadata() -> Iterator[KappaData]:
    with KappaData() as oracle:
        yield oracle


@pytest.fixture(scope='session')
def megatron() -> Iterator[Megatron]:
    with Megatron() as oracle:
        yield oracle


@pytest.fixture(scope='session')
def interpreter() -> Iterator[Interpreter]:
    """An interpreter in development mode, with warnings as errors. Each program imports granular itself."""
    with Interpreter('aiohttp', 'numpy') as interpreter:
        yield interpreter


@pytest.fixture(scope='session')
def learning_interpreter() -> Iterator[Interpreter]:
    """An interpreter for programs that need scikit-learn, PyTorch or an S3 server: each takes seconds to import."""
    modules = 'aiohttp', 'moto.moto_server.werkzeug_app', 'sklearn.datasets', 'torch._dynamo'
    with Interpreter(*modules, 'tests.support.pages', options=['-W', 'error']) as interpreter:
        yield interpreter


@pytest.fixture
def granular_cli(monkeypatch, capsys):
    def call(*args):
        monkeypatch.setattr(sys, 'argv', ['granular', *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call
