"""``granular view`` over a bucket at 25 ms: seconds to the first page, and the memory of the server.

::

    python -m benchmarks.viewing

The dataset has ten million datapoints (a picture, a label and a caption) in 100 shards, which are links to one. A first
page is what the browser asks for: the folder, the facts of the dataset, the lines of 100 datapoints and their
thumbnails. Then pages, a histogram, searches and details all over the dataset are read, and the largest memory is
reported.
"""

import http.client
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
from typing import Any

import numpy as np
import psutil

import granular
from benchmarks.nginx import serving

SHARDS, LENGTH = 100, 100_000


def write(folder: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 200, (50, 3))
    pictures = [granular.formats.encode_image(np.full((48, 64, 3), colour, np.uint8)) for colour in sizes]
    spec = {'image': 'jpg', 'label': 'int', 'caption': 'utf8'}
    with granular.ShardedDatasetWriter(folder / 'train', spec, granular.encoders, LENGTH) as writer:
        for i in range(LENGTH):
            writer.append({'image': pictures[i % 50], 'label': i % 1000, 'caption': f'caption {i}'})
    for shard in range(1, SHARDS):
        shutil.copytree(folder / 'train' / '000000', folder / 'train' / f'{shard:06}', copy_function=os.link)


class Server:
    """``granular view`` in a process of its own, and one client."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, '-m', 'granular', 'view', url]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        link = urllib.parse.urlsplit(self.process.stdout.readline().strip())
        self._client = http.client.HTTPConnection(link.netloc)
        self._client.request('GET', f'/?{link.query}')
        reply = self._client.getresponse()
        reply.read()
        self._cookie = reply.headers['Set-Cookie'].partition(';')[0]
        self._memory = psutil.Process(self.process.pid)
        self.peak = 0

    def ask(self, name: str, **query: Any) -> bytes:
        self._client.request('GET', f'/api/{name}?{urllib.parse.urlencode(query)}', headers={'Cookie': self._cookie})
        reply = self._client.getresponse()
        body = reply.read()
        assert reply.status == 200, body
        self.peak = max(self.peak, self._memory.memory_info().rss)
        return body

    def cpu(self) -> float:
        times = self._memory.cpu_times()
        return times.user + times.system

    def close(self) -> None:
        self._client.close()
        self.process.terminate()
        self.process.wait()


def first_page(server: Server, path: str) -> float:
    start = time.perf_counter()
    server.ask('folder', path=path)
    server.ask('dataset', path=path)
    server.ask('rows', path=path, start=0, count=100)
    server.ask('pictures', path=path, key='image', side=180, at=','.join(map(str, range(100))))
    return time.perf_counter() - start


def main() -> None:
    folder = pathlib.Path(tempfile.mkdtemp(prefix='granular-viewing-'))
    try:
        write(folder)
        with tempfile.TemporaryDirectory() as own, serving(folder, pathlib.Path(own)) as nginx:
            time.sleep(6)  # files that were written a moment ago are checked twice when they are opened
            seconds, busy = [], []
            for _ in range(3):
                server = Server(f'{nginx.delayed}/')
                before = server.cpu()
                seconds.append(first_page(server, 'train'))
                busy.append(server.cpu() - before)
                total = json.loads(server.ask('dataset', path='train'))['length']
                if len(seconds) < 3:
                    server.close()
            dice = random.Random(0)
            for _ in range(100):
                start = dice.randrange(total - 100)
                server.ask('rows', path='train', start=start, count=100)
                server.ask('pictures', path='train', key='image', at=','.join(map(str, range(start, start + 100))))
                server.ask('datapoint', path='train', index=start)
            server.ask('histograms', path='train')
            for _ in range(5):
                found = server.ask('search', path='train', key='caption', relation='has', text='zzz', **{'from': start})
                start = json.loads(found)['next']
            server.close()
        print(f'datapoints             {total:,} in {SHARDS} shards')
        print(f'first page at 25 ms    {min(seconds):.2f} s (of {", ".join(f"{s:.2f}" for s in seconds)})')
        print(f'CPU time of the server {min(busy):.2f} s')
        print(f'memory of the server   {server.peak / 1e6:.0f} MB')
    finally:
        shutil.rmtree(folder)


if __name__ == '__main__':
    main()
