"""Recipes of docs/operations.md: other stores that speak S3, and data on the web."""

import functools
import http.server
import threading

import pytest

import granular
from granular.errors import ObjectChangedError, UnsupportedError

POINTS = [{'i': i, 'x': bytes([i]) * 300} for i in range(25)]


def write(path, points=POINTS):
    with granular.ShardedDatasetWriter(path, {'i': 'int', 'x': 'bytes'}, granular.encoders, shardlen=10) as writer:
        for point in points:
            writer.append(point)


@pytest.mark.parametrize('region', ['auto', 'us-east-1'], ids=['r2', 'minio'])
def test_settings_of_r2_and_minio(seaweed, region):
    path = granular.Path(str(seaweed.place() / 'ds'), **{**seaweed.options, 'region': region})
    write(path)
    with granular.ShardedDatasetReader(path, granular.decoders) as reader:
        assert reader.fetch(range(25)) == POINTS
    assert sorted(entry.name for entry in path.iterdir()) == ['000000', '000001', '000002']


class WithoutRanges(http.server.SimpleHTTPRequestHandler):
    """Python's own server, which has neither ranges nor ETags."""

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture(params=['with ranges', 'without ranges'])
def web(request, tmp_path):
    """Return a folder and the address at which it is on the web."""
    if request.param == 'with ranges':
        server = request.getfixturevalue('http')
        yield server.folder, server.endpoint
        return
    handler = functools.partial(WithoutRanges, directory=tmp_path)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield tmp_path, f'http://127.0.0.1:{server.server_port}'
        server.shutdown()
        thread.join()


def test_data_on_the_web(web):
    folder, url = web
    write(folder / 'ds')
    with granular.ShardedDatasetReader(f'{url}/ds', granular.decoders) as reader:
        assert reader.fetch(range(25)) == POINTS
    with granular.ShardedDatasetReader(f'{url}/ds', granular.decoders) as reader:
        shard = granular.Path(folder / 'ds' / '000001')
        shard.rmtree()
        write(folder / 'other', [{'i': 0, 'x': bytes(301)} for _ in range(10)])
        granular.Path(folder / 'other' / '000000').copy(shard)
        with pytest.raises(ObjectChangedError, match='it was replaced'):
            reader.fetch(range(10, 20))
        assert reader.fetch(range(10)) == POINTS[:10]
    with pytest.raises(UnsupportedError, match='does not support writing'):
        granular.Path(f'{url}/new').write_bytes(b'x')
