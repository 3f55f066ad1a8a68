"""Known heads of replies match a head only if the full parser reads the same from it."""

import re

from hypothesis import given
from hypothesis import strategies as st

from granular.aio.http.known_heads import KnownHeads
from granular.aio.http.messages import ProtocolError, parse

NEEDED = ['Content-Length: 100', 'Content-Range: bytes 0-99/5000', 'ETag: "one"']
LINES = [
    *NEEDED, 'content-length: 100', 'Content-Length:100', 'Content-Length: 99', 'Content-Length: 1e2',
    'Content-Length: +5', 'Content-Range: bytes 10-109/5000', 'Content-Range: bytes */5000',
    'Content-Range: items 0-99/5000', 'ETag: "two"', 'ETag:  "one" ', 'Date: Sat, 21 Nov 2026 23:50:00 GMT',
    'Date: never', 'Server: nginx', 'X: ', 'Y', ' folded', '\tfolded', ': nameless', 'Connection: keep-alive',
    'Connection: close', 'Connection: Keep-Alive, Close', 'Transfer-Encoding: chunked', 'Content-Encoding: gzip',
    'Content-Encoding: identity', 'X-Goog-Stored-Content-Encoding: identity', 'X-Goog-Stored-Content-Encoding: gzip',
    'Last-Modified: \0', 'A: b\nC: d', 'A: b\rC: d', 'Vary: Accept-Encoding',
]  # fmt: skip
STATUS = ['HTTP/1.1 206 Partial Content', 'HTTP/1.1 200 OK', 'HTTP/1.0 206 Partial Content', 'HTTP/1.1 206 ']


def heads():
    lines = st.tuples(st.permutations(NEEDED), st.lists(st.sampled_from(LINES), max_size=4)).flatmap(
        lambda both: st.permutations([*both[0], *both[1]])
    )
    return st.tuples(st.sampled_from(STATUS), lines).map(lambda both: '\r\n'.join([both[0], *both[1], '']).encode())


def parsed(head):
    try:
        return parse(head[:-2])
    except ProtocolError:
        return None


def facts(head):
    """Return what the full parser reads from a head, if that is all there is to a range of a larger object."""
    reply = parsed(head)
    if reply is None or reply.status != 206 or reply.length is None or 'content-encoding' in reply.headers:
        return None
    match = re.fullmatch(r'bytes (\d+-\d+)/(\d+)', reply.headers.get('content-range', ''))
    if match is None or 'close' in reply.headers.get('connection', '').lower():
        return None
    return tuple(str(value).encode() for value in (match[1], match[2], reply.length, reply.headers.get('etag', '')))


@given(st.lists(heads(), min_size=1, max_size=20), st.lists(heads(), max_size=20))
def test_a_match_reads_what_the_parser_reads(learned, others):
    known = KnownHeads('etag')
    for head in learned:
        if (reply := parsed(head)) is not None:
            known.learn(head, reply)
    for head in learned + others:
        if (match := known.match(head)) is not None:
            assert match == facts(head)


def test_values_that_differ_match_the_same_pattern():
    known = KnownHeads('etag')
    head = b'HTTP/1.1 206 X\r\nDate: %b\r\nETag: "%b"\r\nContent-Length: %d\r\nContent-Range: bytes %b/%d\r\n'
    assert known.match(head % (b'now', b'a', 10, b'0-9', 50)) is None
    known.learn(head % (b'now', b'a', 10, b'0-9', 50), parsed(head % (b'now', b'a', 10, b'0-9', 50)))
    assert known.match(head % (b'later', b'b', 20, b'30-49', 99)) == (b'30-49', b'99', b'20', b'"b"')


def test_a_server_with_ever_other_headers_is_parsed_in_full():
    known = KnownHeads('etag')
    for i in range(100):
        head = f'HTTP/1.1 206 X\r\nX-{i}: 1\r\nETag: a\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/5\r\n'.encode()
        known.learn(head, parsed(head))
    assert known.match(head) is None
