"""Malformed replies of a Redis server cost time, and never cause a wrong value or a foreign error."""

import concurrent.futures
import logging
import socket
import socketserver
import threading
import time

import pytest

import granular
from tests.support.caches import RecordingSource, label

NULL = b'_\r\n'  # of RESP 3, which redis-py asks for
GOOD = {b'HELLO': b'%1\r\n$5\r\nproto\r\n:3\r\n', b'EVAL': b':1\r\n'}


class ScriptedRedis(socketserver.ThreadingTCPServer):
    """A server that sends a fixed reply to one command, and stores values for the others."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, command, reply):
        super().__init__(('127.0.0.1', 0), Connection)
        self.command, self.reply = command, reply
        self.values, self.replies = {}, 0
        self.stopped = threading.Event()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return super().__enter__()

    def __exit__(self, *args):
        self.stopped.set()
        self.shutdown()
        super().__exit__(*args)

    @property
    def url(self):
        return f'redis://127.0.0.1:{self.server_address[1]}/0'


class Connection(socketserver.StreamRequestHandler):
    def handle(self):
        try:
            while line := self.rfile.readline():
                parts = []
                for _ in range(int(line[1:])):
                    size = int(self.rfile.readline()[1:])
                    parts.append(self.rfile.read(size + 2)[:-2])
                self.answer(*parts)
        except (OSError, ValueError):
            pass  # the client has disconnected

    def answer(self, name, *arguments):
        name, server = name.upper(), self.server
        if name == server.command:
            server.replies += 1
            reply = server.reply(server, arguments) if callable(server.reply) else server.reply
            if reply is None:
                server.stopped.wait(30)
            elif reply == b'':
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.wfile.write(reply)
        elif name == b'MGET':
            self.wfile.write(array(server, arguments))
        elif name == b'SET':
            if b'NX' not in arguments:
                server.values[arguments[0]] = arguments[1]
            self.wfile.write(b'+OK\r\n')
        else:
            self.wfile.write(GOOD.get(name, b'+OK\r\n'))


def array(server, keys):
    """Return a valid reply to MGET."""
    bodies = [server.values.get(key) for key in keys]
    return b'*%d\r\n' % len(keys) + b''.join(NULL if b is None else b'$%d\r\n%b\r\n' % (len(b), b) for b in bodies)


def of_others(server, keys):
    """Return a reply to MGET with the values of other keys."""
    return array(server, keys[1:] + keys[:1])


REPLIES = {
    'error': b'-ERR no\r\n',
    'an error that is not text': b'-\xff\xfe\r\n',
    'status': b'+OK\r\n',
    'a status that is not text': b'+\xff\xfe\r\n',
    'integer': b':5\r\n',
    'an integer that is none': b':five\r\n',
    'an empty integer': b':\r\n',
    'a huge integer': b':' + b'9' * 5000 + b'\r\n',
    'bytes': b'$3\r\nabc\r\n',
    'null': NULL,
    'a null of RESP 2': b'$-1\r\n',
    'a null array': b'*-1\r\n',
    'bytes of a negative length': b'$-5\r\n',
    'bytes of a length that is none': b'$x\r\n',
    'bytes of a huge length': b'$99999999999999999999\r\n',
    'bytes that are cut off': b'$100\r\nabc\r\n',
    'an empty array': b'*0\r\n',
    'a short array': b'*1\r\n' + NULL,
    'a long array': b'*9\r\n' + NULL * 9,
    'an array of integers': b'*4\r\n' + b':1\r\n' * 4,
    'an array of statuses': b'*4\r\n' + b'+x\r\n' * 4,
    'an array of errors': b'*4\r\n' + b'-ERR x\r\n' * 4,
    'an array of arrays': b'*4\r\n' + b'*1\r\n$1\r\na\r\n' * 4,
    'an array of a huge length': b'*99999999999999999999\r\n',
    'an array of a negative length': b'*-7\r\n',
    'an array of a length that is none': b'*x\r\n',
    'deeply nested': b'*1\r\n' * 5000 + b':1\r\n',
    'a double': b',1.5\r\n',
    'a double that is none': b',x\r\n',
    'a boolean': b'#t\r\n',
    'a map': b'%1\r\n+a\r\n+b\r\n',
    'a map of arrays': b'%1\r\n*0\r\n*0\r\n',
    'a set of arrays': b'~1\r\n*0\r\n',
    'a big number that is none': b'(x\r\n',
    'text with a format': b'=3\r\nab\r\n',
    'a push': b'>2\r\n+a\r\n+b\r\n',
    'another kind': b'?\r\n',
    'an empty line': b'\r\n',
    'no lines': b'\0' * 100,
    'HTTP': b'HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n',
    'values of other keys': of_others,
    'one reply more': lambda server, keys: array(server, keys) + array(server, keys[::-1]),
    'the end': b'',
    'silence': None,
}
COMMANDS = (b'MGET', b'SET', b'EVAL', b'CLIENT', b'HELLO')
# Complete replies: the cache may send the next command at once, without a pause.
WHOLE = ('error', 'status', 'integer', 'bytes', 'null', 'a null array', 'an empty array', 'a short array')
WHOLE += ('an array of integers', 'an array of errors', 'values of other keys', 'one reply more', 'the end')


@pytest.mark.parametrize('command', COMMANDS)
def test_malformed_replies_are_misses(command, tmp_path, caplog):
    def check(number, reply):
        retry = 0 if reply in WHOLE and command in (b'MGET', b'SET') else 60
        options = {'timeout': 0.1, 'wait': 0.02, 'retry': retry, 'fingerprint': 'x'}
        source = RecordingSource(tmp_path / str(number))
        with ScriptedRedis(command, REPLIES[reply]) as server:
            while not server.replies:  # a busy machine may run into a timeout before
                with granular.RedisCache(source, server.url, label, **options) as cache:
                    for _ in range(2):
                        assert cache.fetch([0, 1, 2, 3]) == [0, 1, 2, 3], reply
                        assert cache[5] == 5, reply
                    assert sum(cache.stats().values())

    replies = [reply for reply in REPLIES if command == b'MGET' or not callable(REPLIES[reply])]
    with caplog.at_level(logging.WARNING, 'granular'), concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert len(list(threads.map(check, range(len(replies)), replies))) == len(replies)
    assert not [record for record in caplog.records if record.exc_info]


def test_values_of_other_sources_are_misses(redis_server, tmp_path):
    import redis

    cache, keys = {}, {}
    with redis.Redis.from_url(redis_server.url) as client:
        for name in ('one', 'two'):
            cache[name] = granular.RedisCache(
                RecordingSource(tmp_path / name),
                redis_server.url,
                label,
                namespace=(space := f'odd-{time.time_ns()}'),
                fingerprint=name,
            )
            cache[name].fetch(range(4))
            keys[name] = sorted(client.keys(f'{space}:*'))
            assert len(keys[name]) == 4
        for one, two in zip(keys['one'], keys['two'], strict=True):
            client.set(two, client.get(one))  # valid, but of another source
        assert cache['two'].fetch(range(4)) == list(range(4))
        assert cache['two'].stats()['damaged'] == 4
    for reader in cache.values():
        reader.close()
