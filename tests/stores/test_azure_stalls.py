"""Azure: servers that take or send data too slowly, or no longer."""

import asyncio

import pytest

import granular
from granular.errors import StoreTimeoutError
from tests.support.loop_server import LoopServer, read_head
from tests.support.small_parts import PART, small_parts

SIZE = 40_000
BODY = b'<?xml version="1.0"?>'.ljust(SIZE)  # of a blob, and the beginning of a listing


class SlowServer(LoopServer):
    """A server that takes no more of a body than fits into buffers, and sends pieces of its own with pauses between."""

    piece, pause = 1, 0.05  # bytes and seconds

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            method, _, _ = await read_head(reader)
            if method == 'PUT':
                await asyncio.sleep(60)
            lines = [
                'HTTP/1.1 206 Partial Content', f'Content-Length: {SIZE}', f'Content-Range: bytes 0-{SIZE - 1}/{SIZE}',
                'ETag: "0x1"', 'Last-Modified: Fri, 27 Nov 2026 16:00:00 GMT', 'x-ms-blob-type: BlockBlob',
            ]  # fmt: skip
            writer.write('\r\n'.join([*lines, '', '']).encode())
            for start in range(0, SIZE, self.piece):
                writer.write(BODY[start : start + self.piece])
                await writer.drain()
                await asyncio.sleep(self.pause)


@pytest.fixture
def server():
    with SlowServer() as server:
        yield server


def path_on(server: LoopServer, **settings: float) -> granular.Path:
    config = small_parts(granular.IOConfig(backoff=0.001, backoff_cap=0.01, **settings))
    return granular.Path('az://container/x', config=config, endpoint_url=f'{server.endpoint}/name', account_key='YWJj')


@pytest.mark.parametrize('request_of', ['range', 'listing', 'upload', 'upload in parts'])
def test_request_slower_than_the_minimal_rate_fails(server, request_of):
    path = path_on(
        server, attempts=2, connect_timeout=1, first_byte_timeout=0.5, read_timeout=0.5, min_rate=32 << 20, hedge=0
    )
    calls = {
        'range': lambda: path.read_range(0, SIZE),
        'listing': lambda: list(path.parent.iterdir()),
        'upload': lambda: path.write_bytes(bytes(PART)),
        'upload in parts': lambda: path.write_bytes(bytes(100 * PART)),
    }
    with pytest.raises(StoreTimeoutError, match='no answer'):
        calls[request_of]()


def test_slow_reply_above_the_minimal_rate_is_read(server):
    server.piece = 2000
    path = path_on(server, read_timeout=0.25, first_byte_timeout=5, min_rate=100)
    assert path.read_range(0, SIZE) == BODY
