"""Real servers for tests and benchmarks, each a context manager on a free loopback port."""

import asyncio
import base64
import contextlib
import email.utils
import json
import math
import os
import pathlib
import random
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import granular
from granular import testing
from tests.support.loop_server import LoopServer, read_head

KEY, SECRET = 'granular-key', 'granular-secret'


def free_ports(count: int) -> list[int]:
    """Return free ports, below those that the system gives out, whose gRPC ports, 10000 above, are free as well."""
    found: list[int] = []
    # At random, as a port is free until a server has come up there, and other tests start servers at the same time.
    for port in random.SystemRandom().sample(range(15000, 22000), 1000):
        with contextlib.ExitStack() as stack:
            try:
                for candidate in (port, port + 10000):
                    probe = stack.enter_context(socket.socket())
                    probe.bind(('127.0.0.1', candidate))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError('no free ports')


class Server:
    """A server with an address, the options that open it, and new buckets on demand."""

    scheme: str
    endpoint: str
    options: dict[str, Any]
    _bucket: granular.Path | None = None

    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def place(self) -> granular.Path:
        """Return an empty folder in a bucket that tests share."""
        if self._bucket is None:
            self._bucket = self.new_bucket()
        return self._bucket / uuid.uuid4().hex[:12]

    def new_bucket(self) -> granular.Path:
        """Create a bucket."""
        bucket = granular.Path(f'{self.scheme}://test-{uuid.uuid4().hex[:12]}', **self.options)
        bucket.mkdir()
        return bucket

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ContextServer(Server):
    """A server that wraps a context manager of its options."""

    def context(self) -> contextlib.AbstractContextManager[dict[str, Any]]:
        raise NotImplementedError

    def start(self) -> None:
        self._stack = contextlib.ExitStack()
        self.options = self._stack.enter_context(self.context())
        self.endpoint = self.options['endpoint_url']

    def stop(self) -> None:
        self._stack.close()


class MotoServer(ContextServer):
    """S3 in memory, without verification of signatures."""

    scheme = 's3'
    context = staticmethod(testing.s3_server)


class FakeGCSServer(ContextServer):
    """Google Cloud Storage in memory: the JSON API."""

    scheme = 'gs'
    context = staticmethod(testing.gcs_server)

    def place(self) -> granular.Path:
        # It searches all objects of a bucket for each request.
        return self.new_bucket() / 'folder'


class SeaweedServer(ContextServer):
    """A real S3 server that verifies signatures."""

    scheme = 's3'

    @contextlib.contextmanager
    def context(self) -> Iterator[dict[str, Any]]:
        binary = pathlib.Path(sys.executable).parent / 'weed'
        master, volume, filer, s3 = free_ports(4)
        identity = {
            'name': 'tests',
            'credentials': [{'accessKey': KEY, 'secretKey': SECRET}],
            'actions': ['Admin', 'Read', 'Write', 'List', 'Tagging'],
        }
        endpoint = f'http://127.0.0.1:{s3}'
        with tempfile.TemporaryDirectory(prefix='granular-weed-', ignore_cleanup_errors=True) as folder:
            config = pathlib.Path(folder) / 's3.json'
            config.write_text(json.dumps({'identities': [identity]}))
            command = [
                str(binary), '-logtostderr=false', f'-logdir={folder}', 'server', f'-dir={folder}', '-ip=127.0.0.1',
                '-ip.bind=127.0.0.1', f'-master.port={master}', f'-volume.port={volume}', '-volume.max=200', '-filer',
                f'-filer.port={filer}', '-s3', f'-s3.port={s3}', f'-s3.config={config}', '-master.volumeSizeLimitMB=64',
                '-s3.port.iceberg=0', '-s3.port.lance=0',  # of which only one would run on a machine
                '-master.telemetry=false',
            ]  # fmt: skip
            environment = {**os.environ, 'WEED_MASTER_VOLUME_GROWTH_COPY_1': '1'}
            with testing.program(command, endpoint, cwd=folder, env=environment) as process:
                try:
                    yield {'endpoint_url': endpoint, 'key': KEY, 'secret': SECRET, 'region': 'us-east-1'}
                finally:
                    process.kill()  # ending by itself would take it seconds

    def new_bucket(self) -> granular.Path:
        # It answers before it can write.
        end = time.monotonic() + 40
        while True:
            try:
                bucket = super().new_bucket()
                (bucket / 'ready').write_bytes(b'1')
                (bucket / 'ready').unlink()
                return bucket
            except granular.errors.StoreError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)


class AzuriteServer(Server):
    """Azure Blob Storage in memory: Azurite, which verifies signatures. ``make azurite`` installs it from npm.

    Args:
      certificate: a file with the key and the certificate of a server that speaks TLS and also takes bearer tokens, of
        which it compares everything but the signature; None for plain HTTP.
    """

    scheme = 'az'
    account = 'granularaccount'
    key = base64.b64encode(b'granular-azure-account-key-of-64-bytes'.ljust(64, b'.')).decode()

    def __init__(self, certificate: pathlib.Path | None = None) -> None:
        self.port, self._certificate = 0, certificate  # a free port, which a second start uses again

    @property
    def connection_string(self) -> str:
        return f'BlobEndpoint={self.endpoint};AccountName={self.account};AccountKey={self.key}'

    def start(self) -> None:
        binary = pathlib.Path(__file__).parents[2] / '.azurite' / 'node_modules' / '.bin' / 'azurite-blob'
        command = [
            str(binary), '--blobHost', '127.0.0.1', '--blobPort', str(self.port), '--silent', '--skipApiVersionCheck',
            '--disableTelemetry', '--inMemoryPersistence', '--extentMemoryLimit', '1024',
        ]  # fmt: skip
        if self._certificate is not None:
            command += ['--oauth', 'basic', '--cert', str(self._certificate), '--key', str(self._certificate)]
        environment = {**os.environ, 'AZURITE_ACCOUNTS': f'{self.account}:{self.key}'}
        streams: dict[str, Any] = {'stdin': subprocess.DEVNULL, 'stdout': subprocess.PIPE, 'stderr': subprocess.DEVNULL}
        self._folder = tempfile.TemporaryDirectory(prefix='granular-azurite-')
        self.process = subprocess.Popen(command, cwd=self._folder.name, env=environment, text=True, **streams)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if 'successfully listen' in line:
                self.port = int(line.rpartition(':')[2])
                break
        else:
            self.stop()
            raise RuntimeError('azurite-blob ended before it listened')
        scheme = 'http' if self._certificate is None else 'https'
        self.endpoint = f'{scheme}://127.0.0.1:{self.port}/{self.account}'
        self.options = {'endpoint_url': self.endpoint, 'account_key': self.key}

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self._folder.cleanup()


class TLSProxy(LoopServer):
    """A TLS proxy in front of a plain server. ``endpoint`` is its address.

    Args:
      context: with its certificate.
      behind: the server's address.
    """

    def __init__(self, context: ssl.SSLContext, behind: str) -> None:
        super().__init__(context)
        self._behind = urllib.parse.urlsplit(behind)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, outer = await asyncio.open_connection(self._behind.hostname, self._behind.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            target.close()

        try:
            await asyncio.gather(pump(reader, outer), pump(inner, writer))
        finally:
            writer.transport.abort()
            outer.transport.abort()


class HTTPServer(LoopServer, Server):
    """A folder over HTTP, with ranges, ETags, a page of links for folders, a delay, and a list of the requests.

    Args:
      folder: the folder that is served.
      delay: seconds before each reply.
      bandwidth: bytes of bodies that it sends in a second, over all connections.

    Attributes:
      requests: method, path and Range header of each request.
      peak: the largest number of requests in flight.
    """

    scheme = 'http'

    def __init__(self, folder: str | os.PathLike[str], delay: float = 0.0, bandwidth: float = math.inf) -> None:
        super().__init__()
        self.folder = pathlib.Path(folder)
        self.delay, self.bandwidth = delay, bandwidth
        self._free = 0.0  # the time at which all bytes so far are sent
        self.requests: list[tuple[str, str, str | None]] = []
        self.peak = self._in_flight = 0
        self.options = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            method, target, headers = await read_head(reader)
            await reader.readexactly(int(headers.get('content-length', 0)))
            path = urllib.parse.unquote(target.partition('?')[0])
            self.requests.append((method, path, headers.get('range')))
            self._in_flight += 1
            self.peak = max(self.peak, self._in_flight)
            try:
                if self.delay:
                    await asyncio.sleep(self.delay)
                status, fields, body = self._reply(path, headers.get('range'))
                if self.bandwidth < math.inf:
                    self._free = max(self._free, self.loop.time()) + len(body) / self.bandwidth
                    await asyncio.sleep(self._free - self.loop.time())
            finally:
                self._in_flight -= 1
            fields = {**fields, 'Content-Length': str(len(body)), 'Date': email.utils.formatdate(usegmt=True)}
            head = f'HTTP/1.1 {status} X\r\n' + ''.join(f'{name}: {value}\r\n' for name, value in fields.items())
            writer.write(head.encode('latin-1') + b'\r\n' + (b'' if method == 'HEAD' else body))
            await writer.drain()

    def _reply(self, path: str, range_header: str | None) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body of a reply."""
        file = self.folder / path.strip('/')
        if file.is_dir():
            links = [f'<a href="{p.name}{"/" if p.is_dir() else ""}">{p.name}</a>' for p in sorted(file.iterdir())]
            return 200, {'Content-Type': 'text/html; charset=utf-8'}, '\n'.join(links).encode()
        if not file.is_file():
            return 404, {'Content-Type': 'text/plain'}, b'not found'
        stat = file.stat()
        size = stat.st_size
        headers = {
            'ETag': f'"{stat.st_mtime_ns:x}-{size:x}"',
            'Accept-Ranges': 'bytes',
            'Content-Type': 'application/octet-stream',
            'Last-Modified': email.utils.formatdate(stat.st_mtime, usegmt=True),
        }
        if range_header is None:
            return 200, headers, file.read_bytes()
        first, last = range_header.removeprefix('bytes=').split('-')
        start = max(0, size - int(last)) if not first else int(first)
        stop = size if not first or not last else min(int(last) + 1, size)
        if start >= stop:
            return 416, {'Content-Range': f'bytes */{size}'}, b''
        with open(file, 'rb') as opened:
            opened.seek(start)
            return 206, {**headers, 'Content-Range': f'bytes {start}-{stop - 1}/{size}'}, opened.read(stop - start)

    def new_bucket(self) -> granular.Path:
        folder = self.folder / f'test-{uuid.uuid4().hex[:12]}'
        folder.mkdir()
        return granular.Path(f'{self.endpoint}/{folder.name}')


class RedisServer:
    """Redis on a free port, in memory only. ``url`` is its address, with the password if it has one.

    Args:
      password: which clients must tell.
      options: more of its options, such as ``maxmemory=...``.
    """

    def __init__(self, password: str = '', **options: str) -> None:
        self._options = {'bind': '127.0.0.1', 'save': '', 'appendonly': 'no', 'requirepass': password, **options}
        self.port = free_ports(1)[0]
        self.url = f'redis://{f":{password}@" if password else ""}127.0.0.1:{self.port}/0'

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start an empty server, and wait until it answers."""
        command = ['/usr/bin/redis-server', '--port', str(self.port), '--dir', tempfile.gettempdir()]
        for name, value in self._options.items():
            command += [f'--{name}', value]
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', self.port), 1):
                return
            time.sleep(0.01)
        raise RuntimeError('redis-server does not answer')

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()
