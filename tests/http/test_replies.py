"""Replies that do not match their request, for every store and kind of read: correct bytes or a specific error."""

import asyncio
import base64
import collections
import hashlib
import itertools
import ssl
import threading
import time

import pytest
import trustme

import granular
from granular.errors import BadReplyError, GranularError, ObjectChangedError, OutOfRangeError, StoreError
from tests.support.event_loops import LOOPS, run_on
from tests.support.faults import DATA, FaultServer, md5_etag
from tests.support.seams import on_loop
from tests.support.tables import cover, pairwise

CONFIG = granular.IOConfig(
    backoff=0.001, backoff_cap=0.02, connect_timeout=5.0, first_byte_timeout=2.0, read_timeout=2.0, attempts=4,
    hedge=0.0, max_gap=0, retry_time=20.0,
)  # fmt: skip
FILES = {
    f'data/{name}': bytes((i * 7 + i // 256 + shift) % 251 for i in range(4000)) for shift, name in enumerate('abcd')
}
STORES = ('s3', 'gs', 'http')
numbers = itertools.count()


@pytest.fixture
def server():
    with FaultServer(files=FILES) as server:
        server.etag_of = md5_etag
        yield server


def folder(server, store, config=CONFIG, **options):
    """Return the folder of the files, in a bucket of its own."""
    if store == 'http':
        return granular.Path(f'{server.endpoint}/bucket/data', config=config, **options)
    options |= {'key': 'k', 'secret': 'x'} if store == 's3' else {'token': 'anon'}
    return granular.Path(f'{store}://b{next(numbers)}/data', endpoint_url=server.endpoint, config=config, **options)


def suffix(path, size=700):
    """Read the end of an object, as bag readers do."""

    async def read():
        return (await path.aio.store.read(path.aio.key, -size)).data

    return on_loop(read())


READS = {
    'whole': (lambda path: path.read_bytes(), slice(None)),
    'range': (lambda path: path.read_range(1000, 2500), slice(1000, 2500)),
    'suffix': (suffix, slice(-700, None)),
    'suffix of all': (lambda path: suffix(path, 5000), slice(None)),
}
WHOLE = ('whole', 'suffix of all')

# What comes of a fault that stays; one that strikes once is survived.
FAULTS = {
    'slid': BadReplyError,
    'squeezed': BadReplyError,
    'partial': BadReplyError,
    'twice': None,
    ('twice', 0.002): None,
    'bare': BadReplyError,
    'half': None,
}


def read_files(server, store, read, lines):
    """Read every file and compare."""
    call, part = READS[read]
    root = folder(server, store)
    server.script.extend(lines)
    for name in 'abcab':
        assert call(root / name) == FILES[f'data/{name}'][part], name


# Nothing in HTTP tells of a part of an object that it is of another place: that is what checksums of records are for.
CASES = pairwise(
    (store, fault, read)
    for store, fault, read in itertools.product(STORES, FAULTS, READS)
    if fault != 'slid' or read in WHOLE
)


@pytest.mark.parametrize(('store', 'fault', 'read'), CASES, ids=str)
def test_wrong_reply_is_never_accepted(server, store, read, fault):
    read_files(server, store, read, [fault])
    read_files(server, store, read, [fault, 'good', 'good', 'good', fault])
    if FAULTS[fault] is None or (fault == 'partial' and read != 'whole'):
        read_files(server, store, read, [fault] * 200)
    else:
        with pytest.raises(FAULTS[fault], match='data/a'):
            read_files(server, store, read, [fault] * 200)


# --- full objects


@pytest.mark.parametrize('start', [3999, 4000, 4001])
@pytest.mark.parametrize('store', STORES)
def test_range_behind_an_object_is_an_error_also_of_a_server_without_ranges(server, store, start):
    path = folder(server, store) / 'a'
    for line in ('good', 'whole'):
        server.script.append(line)
        if start < 4000:
            assert path.read_range(start) == FILES['data/a'][start:]
        else:
            with pytest.raises(OutOfRangeError):
                path.read_range(start)


@pytest.mark.parametrize('read', WHOLE)
def test_etags_that_never_match_are_ignored(server, read):
    server.etag_of, server.etag = None, f'"{"0123456789abcdef" * 2}"'
    read_files(server, 's3', read, [])
    count = len(server.ranges)
    assert count == 5 + 2  # two halves, once
    with pytest.raises(BadReplyError, match='the ETag says 0123456789abcdef'):
        read_files(server, 's3', read, ['slid', 'good', 'good', 'slid', 'good', 'good'])


def test_etags_are_compared_after_the_first_match(server):
    root = folder(server, 's3')
    assert (root / 'a').read_bytes() == FILES['data/a']
    count = len(server.ranges)
    server.etag_of, server.etag = None, f'"{"0123456789abcdef" * 2}"'
    with pytest.raises(BadReplyError, match='data/b.*MD5'):
        (root / 'b').read_bytes()
    assert len(server.ranges) == count + 2


@pytest.mark.parametrize(
    'header',
    [{}, {'x-amz-server-side-encryption': 'aws:kms'}, {'x-amz-server-side-encryption': 'aws:kms:dsse'},
     {'x-amz-server-side-encryption-customer-algorithm': 'AES256'}, {'x-amz-storage-class': 'EXPRESS_ONEZONE'},
     {'ETag': f'"{"0123456789abcdef" * 2}-3"'}, {'ETag': f'W/"{"0123456789abcdef" * 2}"'},
     {'x-amz-server-side-encryption': 'AES256'}],
    ids=str,
)  # fmt: skip
def test_etag_is_compared_only_where_s3_documents_an_md5(server, header):
    judged = not header or header.get('x-amz-server-side-encryption') == 'AES256'
    root = folder(server, 's3')
    assert (root / 'a').read_bytes() == FILES['data/a']  # its ETags are MD5s
    server.etag_of = None
    lines = {'ETag': f'"{"0123456789abcdef" * 2}"', **header, 'Content-Length': '4000'}
    head = 'HTTP/1.1 200 OK\r\n' + ''.join(f'{name}: {value}\r\n' for name, value in lines.items()) + '\r\n'
    server.script.extend([('raw', head.encode() + FILES['data/b'])] * 2)
    if judged:
        with pytest.raises(BadReplyError, match='MD5'):
            (root / 'b').read_bytes()
    else:
        assert (root / 'b').read_bytes() == FILES['data/b']
    assert server.ranges[-1] is None


def test_s3_reads_request_checksums(server):
    (folder(server, 's3') / 'a').read_bytes()
    assert server.heads[-1]['x-amz-checksum-mode'] == 'ENABLED'


def crc64nvme(data, before=0):
    """Compute a CRC64NVME by its definition."""
    value = before ^ 0xFFFFFFFFFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x9A6C9329AC4BC9B5 if value & 1 else 0)
    return value ^ 0xFFFFFFFFFFFFFFFF


def test_crc64nvme_is_compared_with_awscrt(server, monkeypatch):
    import sys
    import types

    from granular.aio.http import digests

    assert crc64nvme(b'123456789') == 0xAE8B14860A799888  # the check value of its definition
    module = types.ModuleType('awscrt.checksums')
    module.crc64nvme = crc64nvme
    monkeypatch.setitem(sys.modules, 'awscrt', types.ModuleType('awscrt'))
    monkeypatch.setitem(sys.modules, 'awscrt.checksums', module)
    monkeypatch.setattr(digests, 'DIGESTS', dict(digests.DIGESTS))  # what is found out about awscrt is cached
    digests.find_crc64nvme.cache_clear()
    value = base64.b64encode(crc64nvme(FILES['data/a']).to_bytes(8, 'big')).decode()
    head = (
        f'HTTP/1.1 200 OK\r\nContent-Length: 4000\r\nETag: "x-2"\r\nx-amz-checksum-crc64nvme: {value}\r\n\r\n'.encode()
    )
    root = folder(server, 's3')
    server.script.append(('raw', head + FILES['data/a']))
    assert (root / 'a').read_bytes() == FILES['data/a']
    server.script.extend([('raw', head + FILES['data/b'])] * 2)
    with pytest.raises(BadReplyError, match='crc64nvme'):
        (root / 'a').read_bytes()
    digests.find_crc64nvme.cache_clear()


# --- content codings


CODINGS = ('gzip', 'aws-chunked', 'aws-chunked,gzip', 'utf-8', 'identity', 'br')


@pytest.mark.parametrize(('store', 'read', 'encoding'), pairwise(itertools.product(STORES, READS, CODINGS)))
def test_object_stored_with_a_content_coding_is_returned_as_stored(server, store, read, encoding):
    server.encoding = encoding
    read_files(server, store, read, [])
    # That it is stored so is found out once for each object, where its store does not say so.
    proofs = [request for request in server.ranges if request == 'bytes=3999-3999' or request == 'bytes=2499-2499']
    assert len(proofs) == (3 if store != 'gs' and encoding not in ('aws-chunked', 'identity') else 0) or read in WHOLE


def test_content_coding_is_that_of_an_address_with_its_query(server):
    server.etag_of, server.encoding = None, 'gzip'
    server.files = {f'data/a?id={name}': bytes([name]) * 4000 for name in range(2)}
    first, second = (granular.Path(f'{server.endpoint}/bucket/data/a?id={name}', config=CONFIG) for name in range(2))
    assert first.read_range(0, 3000) == bytes(3000)
    server.encoding = ''
    server.script.append('squeezed')
    assert second.read_range(0, 3000) == bytes([1]) * 3000


def test_broken_read_of_an_object_with_a_content_coding_is_resumed(server):
    path, server.encoding = folder(server, 's3', granular.IOConfig(backoff=0.001)) / 'a', 'gzip'
    server.script.append('half')
    assert path.read_range(0, 3000) == FILES['data/a'][:3000]
    assert server.ranges[:2] == ['bytes=0-2999', 'bytes=1500-2999']
    assert len(server.ranges) == 3  # the last one asks for a byte, to learn that the object is stored so


def test_content_coding_that_changes_is_refused(server):
    root = folder(server, 's3')
    body = FILES['data/a'][:1000]
    head = b'HTTP/1.1 206 X\r\nETag: "%b"\r\nContent-Range: bytes 0-2999/4000\r\nContent-Length: 3000\r\n'
    head %= hashlib.md5(FILES['data/a']).hexdigest().encode()
    server.script.append(('raw', head + b'Content-Encoding: gzip\r\n\r\n' + body, True))
    assert (root / 'a').read_range(0, 3000) == FILES['data/a'][:3000]
    assert server.ranges[-3:] == ['bytes=0-2999', 'bytes=1000-2999', 'bytes=0-2999']


def test_length_of_a_chunked_object_is_verified(server):
    server.etag_of = None
    root = folder(server, 's3')
    server.script.append(('chunked', 1000))
    assert (root / 'a').read_bytes() == FILES['data/a']
    assert server.ranges == [None, 'bytes=3999-3999']
    server.script.append(('chunked', 1000, b'0\r\n\r\n'))
    assert (root / 'a').read_bytes() == FILES['data/a']
    short = b'HTTP/1.1 200 X\r\nETag: "one"\r\nTransfer-Encoding: chunked\r\n\r\n3e8\r\n%b\r\n0\r\n\r\n'
    server.script.append(('raw', short % FILES['data/a'][:1000]))
    assert (root / 'a').read_bytes() == FILES['data/a']
    server.script.append(('raw', short % FILES['data/a'][:1000]))
    assert suffix(root / 'a') == FILES['data/a'][-700:]


@pytest.mark.parametrize('ranges', [True, False])
def test_chunked_object_has_the_same_version_as_its_ranges(server, ranges):
    server.etag = server.etag_of = None
    path, data = folder(server, 'http') / 'a', FILES['data/a']

    def read(start, stop, version, modified):
        server.modified[''] = modified
        head = f'HTTP/1.1 200 X\r\nLast-Modified: {modified}\r\nTransfer-Encoding: chunked\r\n\r\nfa0\r\n'.encode()
        whole = ('raw', head + data + b'\r\n0\r\n\r\n')
        asked = [whole, 'good'] if stop is None else ['good']  # its last byte verifies the length
        server.script = collections.deque((asked if ranges else [whole] * 2) * 2)
        return on_loop(path.aio.store.read(path.aio.key, start, stop, version))

    before, after = 'Sun, 06 Nov 1994 08:49:37 GMT', 'Sun, 06 Nov 1994 08:49:38 GMT'
    version = read(0, None, None, before).version
    assert read(1000, 2500, version, before).data == data[1000:2500]
    with pytest.raises(ObjectChangedError, match=f'4000 bytes, {before} became .*4000 bytes, {after}'):
        read(1000, 2500, version, after)


# --- unsolicited bytes on a connection


def tls(tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / 'authority.pem'))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert('127.0.0.1').configure_cert(context)
    return context


class Talker:
    """A server that answers each request with a range of its own path, and then sends an unsolicited reply."""

    def __init__(self, more, pause=0.0, context=None):
        self.more, self.pause, self.context = more, pause, context
        self.connections = 0

    async def __aenter__(self):
        self.server = await asyncio.start_server(self.serve, '127.0.0.1', 0, ssl=self.context)
        self.endpoint = f'http{"s" if self.context else ""}://127.0.0.1:{self.server.sockets[0].getsockname()[1]}'
        self.writers = []
        return self

    async def __aexit__(self, *_):
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    def reply(self, path, number):
        body = path.encode().ljust(100)
        head = f'HTTP/1.1 206 X\r\nContent-Range: bytes 0-99/1000\r\nContent-Length: 100\r\nX-Id: {number}\r\n\r\n'
        return head.encode() + body

    async def serve(self, reader, writer):
        self.connections += 1
        self.writers.append(writer)
        try:
            for number in itertools.count():
                path = (await reader.readuntil(b'\r\n\r\n')).decode().split(' ')[1]
                first, second = self.reply(path, number), self.reply(path, number + (self.more == 'another') * 1000)
                if self.pause:
                    writer.write(first)
                    await writer.drain()
                    await asyncio.sleep(self.pause)
                    writer.write(second)
                else:
                    writer.write(first + second)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, ssl.SSLError):
            pass


# Of a reply that comes late, when the next request was sent already, only its being the same tells.
SECOND = [('same', 0.0), ('another', 0.0), ('same', 0.0005), ('same', 0.003), ('same', 0.02)]


@pytest.mark.parametrize(
    ('second', 'secure', 'loop'), pairwise(itertools.product(SECOND, [False, True], LOOPS)), ids=str
)
def test_second_reply_is_not_taken_for_the_next_request(loop, secure, second, tmp_path):
    more, pause = second

    async def main():
        async with Talker(more, pause, tls(tmp_path) if secure else None) as server:
            options = {'tls_verify': str(tmp_path / 'authority.pem')} if secure else {}
            root = granular.aio.Path(f'{server.endpoint}/', config=CONFIG, **options)
            for i in range(40):
                result = await (root / f'file-{i}').read_range(0, 100)
                assert result == f'/file-{i}'.encode().ljust(100), i
            await granular.aio.aclose()

    run_on(loop, main)


class Echo(FaultServer):
    """A server that repeats its reply to HEAD when the next request of the connection arrives."""

    async def good(self, writer, request, cut=None):
        if request.method == 'HEAD':
            writer.again = self._good_head(request, len(request.content))
        else:
            writer.write(writer.__dict__.pop('again', b''))
        await super().good(writer, request, cut)


def test_second_reply_to_head_does_not_corrupt_the_next_body(tmp_path):
    with Echo(files={'data/a': bytes(range(250))}) as server:
        with (folder(server, 's3') / 'a').open() as file:
            file.seek(100)
            assert file.read(50) == bytes(range(100, 150))
            assert file.read() == bytes(range(150, 250))
        assert server.connections == 2


@pytest.mark.parametrize('coding', ['', 'gzip'])
def test_length_of_head_does_not_replace_the_length_of_a_reply(coding):
    class Squeezing(FaultServer):
        async def good(self, writer, request, cut=None):
            if request.method == 'HEAD':
                writer.write(self._head(request, 200, 50, **({'Content_Encoding': coding} if coding else {})))
            else:
                await super().good(writer, request, cut)

    content = bytes(1000)
    for store in ('s3', 'http'):
        with Squeezing(files={'data/a': content}) as server:
            path = folder(server, store) / 'a'
            if coding:  # the length of what would be compressed on the way
                assert path.stat().size == 1000
                assert path.open().read() == content
            else:
                with path.open() as file, pytest.raises(ObjectChangedError, match='50 bytes became 1000'):
                    file.read()


def test_reply_of_another_version_is_retried_once(server):
    root = folder(server, 's3')
    version = f'"{hashlib.md5(FILES["data/a"]).hexdigest()}"'
    stray = b'HTTP/1.1 206 X\r\nETag: "other"\r\nContent-Range: bytes 0-9/4000\r\nContent-Length: 10\r\n\r\n0123456789'
    server.script.append(('raw', stray))
    assert (root / 'a').read_ranges([0], [10], version=version) == [FILES['data/a'][:10]]
    server.script.extend([('raw', stray)] * 2)
    with pytest.raises(ObjectChangedError, match='data/a'):
        (root / 'a').read_ranges([0], [10], version=version)


# --- malformed and endless heads


def test_reply_with_one_malformed_header_is_refused(server):
    path = folder(server, 's3', granular.IOConfig(backoff=0.001)) / 'a'
    etag = hashlib.md5(FILES['data/a']).hexdigest().encode()
    head = b'HTTP/1.1 206 X\r\nETag: "%b"\r\nContent-Range: bytes 5-8/%d\r\n' % (etag, len(FILES['data/a']))
    server.script.append(('raw', head + b'A: b\r\nContent-Length: 4\r\n\r\nfake'))
    assert path.read_range(5, 9) == b'fake'  # the others differ from this reply by one header
    for line in (
        b' A: b',
        b'\tA: b',
        b'A : b',
        b'A\t: b',
        b': b',
        b'A',
        b'A: b\nC: d',
        b'A: b\rC: d',
        b'A: \0',
        b'Content-Length: 5',
    ):
        server.script.append(('raw', head + line + b'\r\nContent-Length: 4\r\n\r\nfake'))
        assert path.read_range(5, 9) == FILES['data/a'][5:9], line


@pytest.mark.parametrize(
    'head',
    [b'HTTP/1.1 206 X\n\n', b'HTTP/1.1 206 X\nContent-Length: 3\n\nabc', b'HTTP/1.1 206 X\r\nA: b\nC: d\r\n\r\n',
     b'HTTP/1.1 206 X\r\nA: b\n\n', b'\n\n', b'HTTP/1.1 206 X\r\nA: b\rC: d\r\n\r\n',
     b'HTTP/1.1 206 X\r\nA: \0\r\n\r\n', b'<html>', b'H', b'HTTP/1.1 101 Y\r\n\r\n', b'HTTP/1.1 000 Y\r\n\r\n',
     b'HTTP/1.1 100 Continue\r\n\r\n' * 4000],
    ids=lambda head: repr(head[:40]),
)  # fmt: skip
def test_malformed_heads_are_refused_at_once(server, head):
    root = folder(server, 's3', granular.IOConfig(backoff=0.001, first_byte_timeout=60.0, read_timeout=60.0))
    if head == b'H':
        # Which may go on.
        root = folder(server, 's3', granular.IOConfig(backoff=0.001, first_byte_timeout=0.3, read_timeout=0.3))
    server.script.append(('raw', head))
    began = time.monotonic()
    assert (root / 'a').read_range(5, 9) == FILES['data/a'][5:9]
    assert time.monotonic() - began < 30


@pytest.mark.parametrize('piece', [b'X-More: x\r\n', b'HTTP/1.1 100 Continue\r\n\r\n', b'x'])
def test_slow_head_times_out(server, piece):
    async def drip(writer, request):
        writer.write(
            b'HTTP/1.1 206 X\r\n'
            if piece[:1] == b'X'
            else b'HTTP/1.1 100 X\r\n\r\n'
            if piece[:1] == b'H'
            else b'HTTP/1.'
        )
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    server.dripping = drip
    server.script.append('dripping')
    config = granular.IOConfig(backoff=0.001, first_byte_timeout=0.4, hedge=0.0)
    assert (folder(server, 's3', config) / 'a').read_range(5, 9) == FILES['data/a'][5:9]
    assert len(server.ranges) == 2


@pytest.mark.parametrize(
    'end', [b'0\r\n' + b'x: y\r\n' * 20_000, b'1;' + b'x' * 5000 + b'\r\n', b'+3\r\nabc\r\n', b'0x3\r\nabc\r\n']
)
def test_endless_chunk_framing_is_refused(server, end):
    server.script.append(('chunked', 100, end))
    assert (folder(server, 's3') / 'a').read_range(5, 900) == FILES['data/a'][5:900]


def test_small_chunks_do_not_block_the_loop(server):
    server.files = {'data/a': DATA}
    server.script.append(('chunked', 1))
    assert (folder(server, 's3') / 'a').read_range(0, 100_000) == DATA


# --- odd values

ODD = (
    '', ' ', '0', '-1', '1', '9' * 30, '9' * 5000, 'x', '\u00e9\u00ff', '\u00b2', 'a' * 60_000, '"', ',', '=', ';',
    '%00', '1 2', '+5', '1e9', '0x10', 'nan', 'inf', '*', 'bytes', 'bytes */*', 'bytes 0-0/0', 'bytes 9-5/4000',
    f'bytes 0-{"9" * 5000}/*', 'gzip', 'gzip, gzip', 'chunked', 'chunked, chunked', 'close, x', 'http://[', 'http://',
    '//', '//:x', 'http://a:b/', 'http://a b/', 'http://a:99999999/', f'http://{"a" * 300}.example/',
    'http://\u00e9/', 'javascript:x', 'file:///etc/passwd', 'ftp://a/', '?', '#', '/', 'Sun, 01 Jan 2034 10:00:00',
    'Sun, 01 Jan 99999999999 10:00:00 GMT', 'Sun, 99 Jan 2034 10:00:00 GMT', 'Sun, 01 Jan 9999 10:00:00 GMT',
    'Sun, 01 Jan 0001 10:00:00 +2359', 'Sun, 01 Jan 2034 10:00:00 +99999999999', 'crc32c=', 'crc32c=!!!!',
    'crc32c=\u00e9', 'md5=a-b', 'COMPOSITE', 'us-east-1', 'evil.example/', 'text/html; charset=x',
)  # fmt: skip
READ_HEADERS = (
    'Content-Length', 'Transfer-Encoding', 'Connection', 'Content-Range', 'Content-Encoding', 'ETag',
    'X-Goog-Generation', 'X-Goog-Hash', 'X-Goog-Stored-Content-Encoding', 'x-amz-checksum-crc32c',
    'x-amz-checksum-type', 'x-amz-bucket-region', 'x-amz-server-side-encryption', 'x-amz-storage-class',
    'Retry-After', 'Date', 'Location', 'Last-Modified', 'Content-Type',
)  # fmt: skip
STATUSES = {
    'Location': (302, 307), 'Date': (403,), 'Retry-After': (503, 429), 'x-amz-bucket-region': (301, 400),
    'Content-Range': (206, 416),
}  # fmt: skip


class Odd(FaultServer):
    """A server whose replies have one odd header, chosen by the key: ``data/<status>-<number of the value>``."""

    header = ''

    async def good(self, writer, request, cut=None):
        status, number = map(int, request.key.rpartition('/')[2].split('-'))
        request = request._replace(data=FILES['data/a'])
        status = status or (200 if request.range_header is None else 206)
        body = request.content if status in (200, 206) else b'<Error><Code>RequestTimeTooSkewed</Code></Error>'
        lines = {'Content-Length': str(len(body))}
        if request.google:
            lines['X-Goog-Generation'] = '1'
            lines['X-Goog-Hash'] = 'md5=' + base64.b64encode(hashlib.md5(request.body).digest()).decode()
        else:
            lines['ETag'] = f'"{hashlib.md5(request.body).hexdigest()}"'
        if status == 206:
            lines['Content-Range'] = request.content_range
        lines[self.header] = ODD[number]
        head = f'HTTP/1.1 {status} X\r\n' + ''.join(f'{name}: {value}\r\n' for name, value in lines.items()) + '\r\n'
        writer.write(head.encode('latin-1') + (b'' if request.method == 'HEAD' else body))
        if self.header in ('Content-Length', 'Transfer-Encoding'):
            await writer.drain()
            writer.close()


ODD_CONFIG = granular.IOConfig(
    backoff=0.001,
    backoff_cap=0.002,
    connect_timeout=1.0,
    first_byte_timeout=3.0,
    read_timeout=3.0,
    attempts=1,
    hedge=0.0,
)


async def check_odd(path, call, wanted, value):
    """Read and compare; a failure names the header value."""
    began = time.monotonic()
    try:
        result = await call(path.aio)
    except GranularError as error:
        assert len(str(error)) < 2000, value[:50]
    except Exception as error:
        raise AssertionError(f'{value[:50]!r}: {error!r}') from error
    else:
        assert result == wanted, value[:50]
    assert time.monotonic() - began < 60, value[:50]


async def is_stat(path):
    return (await path.stat()).size >= 0


@pytest.mark.parametrize('header', READ_HEADERS)
@pytest.mark.parametrize('store', STORES)
async def test_odd_headers_give_correct_bytes_or_a_granular_error(store, header):
    data = FILES['data/a']
    calls = [
        (lambda path: path.read_range(1000, 2500), data[1000:2500]),
        (lambda path: path.read_bytes(), data),
        (lambda path: path.read_ranges([0], [4000], version='"x"'), [data]),
    ]
    if store == 'http':
        calls.append((is_stat, True))
    with Odd(files={}) as server:
        server.header = header
        server.parse = lambda *args: FaultServer.parse(server, *args)._replace(data=b'')
        root = folder(server, store, ODD_CONFIG)
        await asyncio.gather(
            *(
                check_odd(root / f'{status}-{number}', call, expected, value)
                for status in (0, *STATUSES.get(header, ()))
                for (number, value), (call, expected) in cover([list(enumerate(ODD))], [calls])
            )
        )
        await granular.aio.aclose()


# --- progress, and throttling


@pytest.mark.parametrize(('store', 'read'), cover([STORES], [['whole', 'range', 'suffix']]))
def test_read_with_progress_renews_its_attempts(server, store, read):
    """The connection breaks more often than attempts are allowed, and often enough to exhaust the retry budget."""
    names = 'abcdefghijklmnopqrst'
    server.files = {f'data/{name}': DATA * 4 for name in names}
    config = granular.IOConfig(backoff=0.001, attempts=3, hedge=0.0, max_gap=0)
    root, part = folder(server, store, config), READS[read][1]
    server.script.extend(['half'] * 100_000)

    async def all_of_them():
        async def one(name):
            path = (root / name).aio
            if read == 'suffix':
                return (await path.store.read(path.key, -700)).data
            return await (path.read_bytes() if read == 'whole' else path.read_range(1000, 2500))

        try:
            return await asyncio.gather(*(one(name) for name in names))
        finally:
            await granular.aio.aclose()

    began = time.monotonic()
    assert asyncio.run(all_of_them()) == [(DATA * 4)[part]] * 20
    assert len(server.ranges) > 20 * 8
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(('least', 'ends'), [(0, False), (1 << 30, True)])
def test_slow_progress_renews_attempts_but_not_the_retry_time(server, least, ends):
    server.files = {'data/a': DATA}
    config = granular.IOConfig(backoff=0.2, attempts=3, hedge=0.0, min_rate=least, retry_time=0.3)
    server.script.extend(['half'] * 16)
    path = folder(server, 's3', config) / 'a'
    if ends:
        with pytest.raises(StoreError, match='closed|reset') as caught:
            path.read_range(0, 60_000)
        assert 'gave up after' in caught.value.__notes__[0]
    else:
        assert path.read_range(0, 60_000) == DATA[:60_000]


def test_single_bytes_are_not_progress(server):
    server.files = {'data/a': DATA}
    server.script.extend([('truncate', 1)] * 100)
    with pytest.raises(StoreError, match='data/a'):
        (folder(server, 's3') / 'a').read_range(0, 60_000)
    assert len(server.ranges) == CONFIG.attempts


@pytest.mark.parametrize('code', [429, 503])
def test_throttled_reads_resume_when_the_store_answers(server, code):
    server.files = {'data/a': DATA}
    server.script.extend([('status', code)] * 1000)
    config = granular.IOConfig(max_gap=0)
    path = folder(server, 's3', config) / 'a'
    starts = list(range(0, 96_000, 4000))
    answers = threading.Timer(1.0, server.script.clear)
    answers.start()
    assert path.read_ranges(starts, [start + 1000 for start in starts]) == [DATA[s : s + 1000] for s in starts]
    answers.join()
    assert 24 < len(server.ranges) < 24 + 30  # four at once, and a few a second while all are refused


def test_retry_after_is_not_shortened_by_successes(server):
    server.files = {'data/a': DATA}
    path = folder(server, 's3', granular.IOConfig(max_gap=0, backoff_cap=1.0)) / 'a'
    server.script.extend([('retry_after', 1), ('retry_after', 10**9)] + ['good'] * 20)
    starts = list(range(0, 60_000, 5000))
    began = time.monotonic()
    assert path.read_ranges(starts, [start + 10 for start in starts]) == [DATA[s : s + 10] for s in starts]
    assert time.monotonic() - began >= 1
