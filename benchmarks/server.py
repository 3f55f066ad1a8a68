"""A bucket as a benchmark needs it: a folder over HTTP with ranges, each reply delayed, in a process of its own.

Run as ``python -m benchmarks.server FOLDER DELAY``; it prints its port. Its delays run side by
side, as a store's do.
"""

import asyncio
import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

_FOUND = b'HTTP/1.1 %d OK\r\nContent-Length: %d\r\nContent-Type: %s\r\nETag: "%s"\r\n%s\r\n'


class Answering(asyncio.Protocol):
    """One connection."""

    def __init__(self, folder: pathlib.Path, delay: float, files: dict[str, tuple[int, int, bytes]]) -> None:
        self._folder, self._delay, self._files = folder, delay, files
        self._buffer = b''
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b'\r\n\r\n')) >= 0:
            head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
            asyncio.get_running_loop().call_later(self._delay, self._answer, head)

    def _answer(self, head: bytes) -> None:
        first, *lines = head.decode().split('\r\n')
        method, path, _ = first.split(' ')
        wanted = next((line[13:] for line in lines if line[:6].lower() == 'range:'), None)
        place = self._folder / path.strip('/')
        if path not in self._files:
            if place.is_dir():
                names = (f'<a href="{p.name}{"/" * p.is_dir()}">x</a>' for p in sorted(place.iterdir()))
                page = '\n'.join(names).encode()
                self._transport.write(_FOUND % (200, len(page), b'text/html', b'x', b'') + page)
                return
            if not place.is_file():
                self._transport.write(b'HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n')
                return
            fd = os.open(place, os.O_RDONLY)
            self._files[path] = fd, os.fstat(fd).st_size, b'%x' % os.fstat(fd).st_mtime_ns
        fd, size, etag = self._files[path]
        start, stop, status, extra = 0, size, 200, b''
        if wanted is not None:
            left, _, right = wanted.strip().removeprefix('bytes=').partition('-')
            start = int(left) if left else max(0, size - int(right))
            stop = min(int(right) + 1, size) if left and right else size
            status, extra = 206, b'Content-Range: bytes %d-%d/%d\r\n' % (start, stop - 1, size)
        body = b'' if method == 'HEAD' else os.pread(fd, stop - start, start)
        self._transport.write(_FOUND % (status, stop - start, b'application/octet-stream', etag, extra) + body)


async def serve(folder: pathlib.Path, delay: float) -> None:
    """Serve until killed."""
    files: dict[str, tuple[int, int, bytes]] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answering(folder, delay, files), '127.0.0.1', 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.contextmanager
def serving(folder: str | os.PathLike[str], delay: float) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, '-m', 'benchmarks.server', os.fspath(folder), str(delay)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f'http://127.0.0.1:{int(process.stdout.readline())}'
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


if __name__ == '__main__':
    try:
        import uvloop as loops
    except ImportError:
        loops = asyncio  # type: ignore[assignment]
    with contextlib.suppress(KeyboardInterrupt):
        loops.run(serve(pathlib.Path(sys.argv[1]), float(sys.argv[2])))
