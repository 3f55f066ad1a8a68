"""Real servers, one of each per run, and a watch over event loops."""

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import granular
from granular import cli
from tests.support.oracles import Oracle
from tests.support.servers import FakeGCSServer, HTTPServer, MotoServer, RedisServer, SeaweedServer, Server

STORES = ('local', 'memory', 'moto', 'seaweed', 'fakegcs')
BUCKETS = ('moto', 'seaweed', 'fakegcs')
BLOCKED = 0.2  # seconds for which no callback may hold an event loop


@pytest.fixture(scope='session', autouse=True)
def hermetic() -> Iterator[None]:
    """Remove credentials, addresses and settings of the environment."""
    patch = pytest.MonkeyPatch()
    for name in list(os.environ):
        if name.startswith(('AWS_', 'GOOGLE_', 'GRANULAR_', 'STORAGE_EMULATOR', 'GCS')):
            patch.delenv(name)
    patch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
    patch.setenv('NO_GCE_CHECK', 'true')
    for face in (granular, granular.aio):
        for name in face.__all__:
            getattr(face, name)  # what is imported when it is asked for: compiling it takes a while
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def unblocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test whose event loop was held by one callback for too long."""
    slow: list[str] = []
    collecting = [0.0, 0.0]  # when it began, and seconds in all: half a second each, among moto's objects
    run = asyncio.Handle._run

    def collector(phase: str, info: object) -> None:
        if phase == 'start':
            collecting[0] = time.thread_time()
        else:
            collecting[1] += time.thread_time() - collecting[0]

    def timed(self: asyncio.Handle) -> None:
        # Of this thread alone, as the machine may be busy, and without the collector, who comes when he will.
        began = time.thread_time() - collecting[1]
        run(self)
        spent = time.thread_time() - collecting[1] - began
        # A client may be made under a short-lived loop of a worker thread, which blocks no other work.
        if spent > BLOCKED and threading.current_thread() is threading.main_thread():
            slow.append(f'{spent:.2f} s in {self!r}')

    monkeypatch.setattr(asyncio.Handle, '_run', timed)
    gc.callbacks.append(collector)
    yield
    gc.callbacks.remove(collector)
    assert not slow, f'the event loop was blocked: {slow}'


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


@pytest.fixture
def user_buckets(moto: MotoServer, fakegcs: FakeGCSServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``s3://my-bucket`` and ``gs://my-bucket``, empty, with credentials and addresses in the environment."""
    monkeypatch.setenv('AWS_ENDPOINT_URL', moto.endpoint)
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', moto.options['key'])
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', moto.options['secret'])
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', fakegcs.endpoint)
    buckets = [granular.Path('s3://my-bucket'), granular.Path('gs://my-bucket')]
    for bucket in buckets:
        bucket.mkdir(exist_ok=True)
    yield
    for bucket in buckets:
        for path in bucket.iterdir():
            path.rmtree() if path.is_dir() else path.unlink()


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
    """An empty place to write to, in every kind of store."""
    if request.param == 'local':
        return granular.Path(tmp_path)
    if request.param == 'memory':
        return granular.Path(f'memory://{request.node.name.replace("[", "-").replace("]", "")}-{time.time_ns()}')
    server: Server = request.getfixturevalue(request.param)
    return server.place()


@pytest.fixture(params=BUCKETS)
def bucket(request: pytest.FixtureRequest) -> granular.Path:
    """An empty place in a bucket, in every kind of object store."""
    server: Server = request.getfixturevalue(request.param)
    return server.place()


@pytest.fixture(scope='session')
def oracle21() -> Oracle:
    return Oracle.granular('0.21.1')


@pytest.fixture(scope='session')
def oracle24() -> Oracle:
    return Oracle.granular('0.24.2')


@pytest.fixture(scope='session')
def grain() -> Oracle:
    return Oracle.grain()


@pytest.fixture
def granular_cli(monkeypatch, capsys):
    def call(*args):
        monkeypatch.setattr(sys, 'argv', ['granular', *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return call
