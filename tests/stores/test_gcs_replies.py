"""Replies of the Google Cloud Storage JSON API: anything unexpected is an error, never a shorter result."""

import json

import numpy as np
import pytest

import granular
from granular.aio.http.messages import Head
from granular.aio.http.transport import Answer
from granular.aio.stores.gcs import replies as gcsreplies
from granular.aio.stores.listing import Listing
from granular.errors import BadReplyError
from tests.support.faults import FaultServer

OBJECT = {
    'kind': 'storage#object',
    'name': 'a/b',
    'size': '5',
    'generation': '17',
    'updated': '2026-11-21T20:11:49.52813Z',
    'crc32c': 'mnG7TA==',
    'md5Hash': 'XUFAKrxLKna5cZ2REBfFkg==',
    'metadata': {'granular-writer': 'token'},
}
BUCKET = {'kind': 'storage#bucket', 'name': 'bucket'}
REWRITE = {'kind': 'storage#rewriteResponse', 'totalBytesRewritten': '5', 'done': True, 'resource': OBJECT}
NO_DOCUMENT = (
    b'', b' ', b'null', b'true', b'7', b'"text"', b'[]', b'{"kind": "storage#obj', b'<html></html>', b'{}x',
    b'\xff\xfe\xfd', b'[' * 100_000, b'{"size": ' + b'9' * 10_000 + b'}',
    b'{"error": {"code": 503, "message": "Backend Error"}}', b'{"kind": "storage#objects", "error": "x"}',
)  # fmt: skip


def answer(body, status=200, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(Head(status, '', headers), data)


def parse_object(reply):
    return gcsreplies.resource_of(reply, 'gs://bucket/a/b', 'a/b')


def parse_page(reply):
    return gcsreplies.next_page(Listing('gs://bucket/a', 'a/', '/', True), reply)


PARSERS = {
    'object': parse_object,
    'page': parse_page,
    'bucket': lambda reply: gcsreplies.bucket_of(reply, 'gs://bucket', 'bucket'),
    'rewrite': lambda reply: gcsreplies.rewrite_of(reply, 'gs://bucket/x', 'a/b'),
    'deletion': lambda reply: gcsreplies.check_deleted(reply, 'gs://bucket/x'),
}
RIGHT = {
    'object': OBJECT,
    'page': {'kind': 'storage#objects', 'items': [OBJECT], 'prefixes': ['a/c/'], 'nextPageToken': 'next'},
    'bucket': BUCKET,
    'rewrite': REWRITE,
    'deletion': None,
}


@pytest.mark.parametrize('kind', PARSERS)
def test_valid_replies_are_accepted(kind):
    PARSERS[kind](answer(RIGHT[kind]))


@pytest.mark.parametrize('kind', PARSERS)
@pytest.mark.parametrize('body', NO_DOCUMENT, ids=lambda body: repr(body[:20]))
def test_unexpected_bodies_are_bad_replies(kind, body):
    if kind == 'deletion' and body == b'null':
        return
    with pytest.raises(BadReplyError, match='^gs://bucket'):
        PARSERS[kind](answer(body))


@pytest.mark.parametrize(
    'change',
    [{'kind': 'storage#objects'}, {'kind': 5}, {'name': 'a/other'}, {'name': None}, {'name': ''}, {'name': ['a/b']},
     {'size': None}, {'size': '-1'}, {'size': '1.5'}, {'size': 'x'}, {'size': True}, {'size': '9' * 30}, {'size': '٣'},
     {'generation': None}, {'generation': 17}, {'generation': 'x'}, {'generation': '-3'},
     {'updated': 'yesterday'}, {'updated': '2026-11-21T20:11:49'}, {'updated': 7}, {'updated': '99999-01-01T00:00:00Z'},
     {'crc32c': 'x'}, {'crc32c': 'mnG7'}, {'crc32c': None}, {'md5Hash': 'mnG7TA=='}, {'crc32c': 7}],
    ids=str,
)  # fmt: skip
def test_objects_with_invalid_fields_are_bad_replies(change):
    with pytest.raises(BadReplyError, match='^gs://bucket'):
        parse_object(answer({**OBJECT, **change}))


def test_object_fields_are_parsed():
    resource = parse_object(answer(OBJECT))
    assert (resource.size, resource.generation, resource.writer) == (5, '17', 'token')
    assert resource.digests == {'crc32c': '9a71bb4c', 'md5': '5d41402abc4b2a76b9719d911017c592'}
    assert resource.modified == pytest.approx(1795291909.52813)
    small = parse_object(answer({'name': 'a/b', 'size': 5, 'generation': '1', 'metadata': None}))
    assert (small.size, small.modified, small.digests, small.writer) == (5, None, {}, '')


@pytest.mark.parametrize(
    'page',
    [{'kind': 'storage#object'}, {'unknown': []}, {'items': {}}, {'items': None}, {'prefixes': 'a/c/'},
     {'nextPageToken': 7}, {'nextPageToken': None}, {'items': ['a/b']}, {'items': [{**OBJECT, 'name': 'b'}]},
     {'items': [{**OBJECT, 'name': 'a/b/c'}]}, {'items': [OBJECT, OBJECT]},
     {'items': [{**OBJECT, 'name': 'a/c'}, OBJECT]}, {'prefixes': ['b/']}, {'prefixes': ['a/c']}, {'prefixes': [7]},
     {'prefixes': ['a/d/', 'a/c/']}, {'items': [{**OBJECT, 'size': 'x'}]}],
    ids=str,
)  # fmt: skip
def test_pages_with_invalid_fields_are_bad_replies(page):
    with pytest.raises(BadReplyError, match='^gs://bucket/a'):
        parse_page(answer(page))


@pytest.mark.parametrize(
    'page', [{'kind': 'storage#objects'}, {'items': []}, {'kind': 'storage#objects', 'nextPageToken': ''}]
)
def test_empty_listings_are_accepted(page):
    listing = Listing('gs://bucket/a', 'a/', '/', True)
    assert gcsreplies.next_page(listing, answer(page)) == ([], [], '')
    assert listing.ended


def items(*names, **more):
    return answer({'kind': 'storage#objects', 'items': [{**OBJECT, 'name': name} for name in names], **more})


def test_repeated_page_is_a_bad_reply():
    listing = Listing('gs://bucket/a', 'a/', '', True)
    gcsreplies.next_page(listing, items('a/1', 'a/2', nextPageToken='x'))
    for again in (
        items('a/1', 'a/2', nextPageToken='y'),
        items('a/2', nextPageToken='z'),
        items('a/3', nextPageToken='x'),
    ):
        with pytest.raises(BadReplyError):
            gcsreplies.next_page(listing, again)
    # A reply that was refused leaves the listing as it was.
    assert listing.token == 'x'
    assert [item.key for item in gcsreplies.next_page(listing, items('a/3')).items] == ['a/3']
    assert listing.ended


def test_size_may_be_missing_where_a_checksum_proves_that_the_object_is_empty():
    body = {name: value for name, value in OBJECT.items() if name != 'size'}
    empty = {'crc32c': 'AAAAAA==', 'md5Hash': '1B2M2Y8AsgTpgAmY7PhCfg=='}
    assert parse_object(answer({**body, **empty})).size == 0
    for wrong in ({}, {**empty, 'crc32c': OBJECT['crc32c']}, {**empty, 'md5Hash': OBJECT['md5Hash']}):
        with pytest.raises(BadReplyError, match='size'):
            parse_object(answer({**body, **wrong}))


@pytest.mark.parametrize('store', ['s3', 'gs'])
def test_datasets_open_where_an_end_may_begin_before_the_object(store, tmp_path):
    """The replies of Google's storage-testbench."""
    with granular.ShardedDatasetWriter(tmp_path / 'data', {'x': 'array', 'none': 'bytes'}, shardlen=3) as writer:
        for i in range(9):
            writer.append({'x': np.arange(i), 'none': b''})
    files = {f'data/{path.relative_to(tmp_path / "data")}': path.read_bytes() for path in tmp_path.rglob('*.*')}
    files['data/empty'] = b''
    key = {'key': 'key', 'secret': 'secret'} if store == 's3' else {'token': 'anon'}
    config = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=2)
    with FaultServer(files=files) as server:
        root = granular.Path(f'{store}://bucket/data', endpoint_url=server.endpoint, config=config, **key)
        server.script.extend(['before_start'] * 1000)
        with granular.ShardedDatasetReader(root) as reader:
            assert [len(point['x']) for point in reader] == list(range(9))
        assert any((line or '').startswith('bytes=-') for line in server.ranges)
        server.script.clear()
        # Figures that do not agree prove nothing.
        server.script.extend([('before_start', more) for more in (-1, 1)] * 100)
        with pytest.raises(BadReplyError, match='Content-Range'):
            granular.BagReader(root / '000000' / 'x.bag')
        server.script.clear()


def test_listing_of_empty_pages_with_new_tokens_ends(monkeypatch):
    monkeypatch.setattr('granular.aio.stores.listing.EMPTY_PAGES', 50)  # otherwise thousands of pages are parsed
    listing = Listing('gs://bucket/a', 'a/', '/', True)
    page = {'kind': 'storage#objects', 'prefixes': ['a/c/']}
    assert gcsreplies.next_page(listing, answer({**page, 'nextPageToken': 'first'})).folders == ['a/c/']
    with pytest.raises(BadReplyError, match='without a new name'):
        for number in range(99):
            assert gcsreplies.next_page(listing, answer({**page, 'nextPageToken': str(number)})).folders == []


@pytest.mark.parametrize(
    'range_header',
    ['x', '', 'bytes=x', 'bytes=0-x', 'bytes=0-', 'bytes=5-9', 'bytes=0--1', 'bytes=0-' + '9' * 30, '0-5'],
)
def test_invalid_ranges_are_bad_replies(range_header):
    with pytest.raises(BadReplyError, match='^gs://bucket/x'):
        gcsreplies.persisted_size(answer(b'', 308, range=range_header), 'gs://bucket/x')


def test_range_header_gives_the_stored_size():
    assert gcsreplies.persisted_size(answer(b'', 308, range='bytes=0-262143'), 'x') == 262144
    assert gcsreplies.persisted_size(answer(b'', 308), 'x') == 0


@pytest.mark.parametrize(
    'location', ['', 'x', '/upload', 'http://[/x?upload_id=1', 'https://host', 'https://host/x?upload_id=', '//']
)
def test_invalid_upload_locations_are_bad_replies(location):
    with pytest.raises(BadReplyError, match='^gs://bucket/x'):
        gcsreplies.session_of(answer(b'', 200, location=location), 'gs://bucket/x')


def test_host_of_an_upload_location_is_ignored():
    session = gcsreplies.session_of(answer(b'', 200, location='https://elsewhere/upload/b?upload_id=7&name=x'), 'x')
    assert session == '/upload/b?upload_id=7&name=x'


@pytest.mark.parametrize(
    'change',
    [{'kind': 'storage#object'}, {'done': None}, {'done': 'true'}, {'done': False}, {'done': False, 'rewriteToken': 7},
     {'resource': None}, {'resource': {**OBJECT, 'name': 'a/c'}}, {'totalBytesRewritten': None}],
    ids=str,
)  # fmt: skip
def test_copies_in_unknown_states_are_bad_replies(change):
    with pytest.raises(BadReplyError, match='^gs://bucket'):
        PARSERS['rewrite'](answer({**REWRITE, **change}))
