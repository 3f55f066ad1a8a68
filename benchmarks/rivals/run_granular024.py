"""granular 0.24.2: its reader on the local disk, or its Loader over HTTP with elements.Path and 32 workers.

elements reads buckets through the clients of Google and TensorFlow, which nginx does not serve; its Path takes other
filesystems, so here it has one over http.client, with a connection per thread and a request per read.
"""

import http.client
import io
import sys
import threading
import time

import elements
import numpy as np
from measuring import job, tell
from timing import rate

local = threading.local()


def ask(host, path, headers, method='GET'):
    if getattr(local, 'link', None) is None:
        local.link = http.client.HTTPConnection(host)
    local.link.request(method, path, headers=headers)
    reply = local.link.getresponse()
    return reply, reply.read()


class File(io.RawIOBase):
    def __init__(self, host, path):
        self.host, self.path, self.at, self.size = host, path, 0, None

    def seekable(self):
        return True

    def readable(self):
        return True

    def length(self):
        if self.size is None:
            self.size = int(ask(self.host, self.path, {}, 'HEAD')[0].headers['Content-Length'])
        return self.size

    def seek(self, offset, whence=0):
        self.at = offset + (self.at if whence == 1 else self.length() if whence == 2 else 0)
        return self.at

    def tell(self):
        return self.at

    def read(self, size=-1):
        end = '' if size is None or size < 0 else self.at + size - 1
        if size == 0:
            return b''
        data = ask(self.host, self.path, {'Range': f'bytes={self.at}-{end}'})[1]
        self.at += len(data)
        return data

    def readinto(self, target):
        data = self.read(min(len(target), self.length() - self.at))
        target[: len(data)] = data
        return len(data)


class HTTPPath(elements.Path):
    __slots__ = ()

    def __init__(self, path):
        self._path = str(path)

    @property
    def split(self):
        host, _, path = self._path.removeprefix('http://').partition('/')
        return host, '/' + path

    @property
    def name(self):
        return self._path.rpartition('/')[2]

    @property
    def parent(self):
        return type(self)(self._path.rpartition('/')[0])

    def __truediv__(self, part):
        return type(self)(f'{self._path}/{part}')

    def exists(self):
        return ask(*self.split, {}, 'HEAD')[0].status == 200

    def open(self, mode='rb', buffering=-1):
        file = File(*self.split)
        return io.BufferedReader(file, buffering) if buffering > 0 else file

    def read(self, mode='r'):
        data = self.open().read()
        return data.decode() if mode == 'r' else data

    read_text = read

    def read_bytes(self):
        return self.read('rb')


elements.Path.filesystems.insert(0, (HTTPPath, lambda path: path.startswith('http://')))


def loader():
    import granular

    path = elements.Path(f'{job["url"]}/{job["path"]}')
    decoders = {**granular.decoders, 'bytes': bytes, 'utf8': text}  # its own decoders do not pickle
    decoders = {kind: decoders[kind] for kind in ('bytes', 'utf8', 'int')}
    reader = granular.DatasetReader(path, decoders, cache_index=True, cache_keys=('label', 'text'))
    source = granular.sources.Epochs(reader, shuffle=True, seed=0)
    source = granular.sources.Transform(source, sizes)
    items = granular.Loader(source, batch=64, workers=32)  # whose iterator cannot be iterated again
    tell(rate=rate(items, job['batches'], 64, job['warmup']))


def text(data):
    return data.decode()


def sizes(datapoint, seed=None):
    return {'size': np.int64(len(datapoint['data'])), 'label': np.int64(datapoint['label'])}


def reads():
    import granular

    reader = granular.DatasetReader(job['folder'], granular.decoders)
    order = job['order']
    best = 1e9
    for _ in range(3):
        started = time.perf_counter()
        for i in order:
            reader[i]
        best = min(best, time.perf_counter() - started)
    tell(rate=len(order) / best)


if __name__ == '__main__':
    loader() if sys.argv[1] == 'loader' else reads()
