"""Parsing of S3 replies: pages, heads and documents, without a server."""

import datetime
import json

import pytest

import granular
from granular.aio.http.messages import Head, http_date
from granular.aio.http.refusals import refusal
from granular.aio.http.transport import Answer
from granular.aio.stores.base import Entry
from granular.aio.stores.listing import Listing
from granular.aio.stores.s3 import documents, uploads
from granular.aio.stores.s3 import options as s3options
from granular.aio.stores.s3 import replies as s3replies
from granular.errors import BadReplyError, BucketNotFoundError, InvalidArgumentError, NotFoundError, StoreError

NAME = 's3://bucket/in'


def answer(body='', status=200, **headers):
    return Answer(Head(status, 'X', headers), body if isinstance(body, bytes) else body.encode())


def contents(*keys, size='3', time='2026-11-21T20:26:37.000Z'):
    return ''.join(
        f'<Contents><Key>{key}</Key><LastModified>{time}</LastModified><Size>{size}</Size></Contents>' for key in keys
    )


def page(inner, more=None, count=None, tag='ListBucketResult'):
    parts = [f'<IsTruncated>{"false" if more is None else "true"}</IsTruncated>', inner]
    parts += [] if more is None else [f'<NextContinuationToken>{more}</NextContinuationToken>']
    parts += [] if count is None else [f'<KeyCount>{count}</KeyCount>']
    return f'<?xml version="1.0"?><{tag} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{"".join(parts)}</{tag}>'


def listed(*bodies, prefix='in/', delimiter='', ordered=True):
    """Return the keys and folders of pages."""
    listing, names = Listing(NAME, prefix, delimiter, ordered), []
    for body in bodies:
        page = s3replies.next_page(listing, answer(body))
        names += [item.key for item in page.items] + list(page.folders)
    return names


def test_pages_are_parsed():
    assert listed(page(contents('in/a', 'in/b'), 't', 2), page(contents('in/c'), None, 1)) == ['in/a', 'in/b', 'in/c']
    folder = '<CommonPrefixes><Prefix>in/sub/</Prefix></CommonPrefixes>'
    assert listed(page(contents('in/', 'in/a') + folder, None, 3), delimiter='/') == ['in/', 'in/a', 'in/sub/']
    encoded = '<EncodingType>url</EncodingType><Prefix>in/a+%C3%A4</Prefix>'
    assert listed(page(encoded + contents('in/a+%C3%A4%01%2B')), prefix='in/a ä') == ['in/a ä\x01+']
    assert listed(page(''), page('')) == []
    assert listed(page(contents('in/a') + folder, None, 1), delimiter='/') == ['in/a', 'in/sub/']  # as Ceph counts
    raw = '<EncodingType>url</EncodingType><Prefix>in/a+b</Prefix>'
    assert listed(page(raw + contents('in/a%2Bb')), prefix='in/a+b') == ['in/a+b']
    item = s3replies.next_page(Listing(NAME, '', '', True), answer(page(contents('a', size='12')))).items[0]
    assert item == Entry('a', False, 12, datetime.datetime(2026, 11, 21, 20, 26, 37, tzinfo=datetime.UTC).timestamp())


BAD_PAGES = {
    'nothing': [''],
    'blanks': [' \n'],
    'HTML': ['<html><body>Log in</body></html>'],
    'HTML that is not XML': ['<!doctype html><p>Log in<br>'],
    'an error document': ['<Error><Code>InternalError</Code></Error>'],
    'half a document': [page(contents('in/a'))[:-30]],
    'a document and more': [page(contents('in/a')) * 2],
    'no UTF-8': [page(contents('in/a')).encode() + b'\xff'],
    'UTF-16': [page(contents('in/a')).encode('utf-16')],
    'entities': ['<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]>' + page(contents('in/&b;'))],
    'another root': [page(contents('in/a'), tag='ListPartsResult')],
    'no IsTruncated': [page('').replace('<IsTruncated>false</IsTruncated>', '')],
    'an odd IsTruncated': [page('').replace('false', 'maybe')],
    'more, without a token': [page(contents('in/a')).replace('false', 'true')],
    'more, with an empty token': [page(contents('in/a'), '')],
    'a key elsewhere': [page(contents('other/a'))],
    'another prefix': [page('<Prefix>other/</Prefix>')],
    'a count that does not fit': [page(contents('in/a'), None, 2)],
    'a count that is no number': [page(contents('in/a'), None, 'one')],
    'a size that is no number': [page(contents('in/a', size='-3'))],
    'a size without end': [page(contents('in/a', size='9' * 30))],
    'no size': [page('<Contents><Key>in/a</Key></Contents>')],
    'no key': [page('<Contents><Size>3</Size></Contents>')],
    'a time that is none': [page(contents('in/a', time='yesterday'))],
    'a time far away': [page(contents('in/a', time='99999-01-01T00:00:00Z'))],
    'a name that is no UTF-8': [page('<EncodingType>url</EncodingType>' + contents('in/%FF'))],
    'a folder where none was asked for': [page('<CommonPrefixes><Prefix>in/a/</Prefix></CommonPrefixes>')],
    'the same page': [page(contents('in/a'), 't'), page(contents('in/a'), 't')],
    'the same page with another token': [page(contents('in/a'), 't'), page(contents('in/a'), 'u')],
    'an earlier token': [page(contents('in/a'), 't'), page(contents('in/b'), 'u'), page(contents('in/c'), 't')],
    'an earlier page': [page(contents('in/a', 'in/b'), 't'), page(contents('in/c'), 'u'), page(contents('in/a'))],
    'a page out of order': [page(contents('in/c'), 't'), page(contents('in/b'))],
    'keys out of order': [page(contents('in/c', 'in/b'))],
    'a key twice': [page(contents('in/a', 'in/b'), 't'), page(contents('in/b', 'in/c'))],
}


@pytest.mark.parametrize('pages', BAD_PAGES.values(), ids=BAD_PAGES)
def test_invalid_pages_are_bad_replies(pages):
    with pytest.raises(BadReplyError, match=NAME):
        listed(*pages)


@pytest.mark.parametrize(
    'inner',
    [contents('in/sub/a'), '<CommonPrefixes><Prefix>in/sub</Prefix></CommonPrefixes>',
     '<CommonPrefixes><Prefix>in/a/b/</Prefix></CommonPrefixes>',
     '<CommonPrefixes><Prefix>a/</Prefix></CommonPrefixes>'],
)  # fmt: skip
def test_names_below_the_delimiter_are_bad_replies(inner):
    with pytest.raises(BadReplyError, match=NAME):
        listed(page(inner), delimiter='/')


def test_directory_buckets_may_list_in_any_order():
    pages = page(contents('in/c', 'in/b'), 't'), page(contents('in/a'))
    assert listed(*pages, ordered=False) == ['in/c', 'in/b', 'in/a']


def test_endless_empty_pages_are_an_error(monkeypatch):
    monkeypatch.setattr('granular.aio.stores.listing.EMPTY_PAGES', 50)  # otherwise thousands of pages are parsed
    assert listed(*(page('', f't{i}') for i in range(40)), page(contents('in/a'))) == ['in/a']
    with pytest.raises(BadReplyError, match='50 pages'):
        listed(*(page('', f't{i}') for i in range(99)))


@pytest.mark.parametrize(
    ('body', 'shown'),
    [
        ('<!DOCTYPE html><html><head><title>\n502 Bad\n Gateway</title><body>x</body></html>', '502 Bad Gateway'),
        ('<html><TITLE lang="en">A &amp; B</TITLE>', 'A & B'),
        ('<html><title></title><p>' + 'x' * 500, '<html><title></title><p>' + 'x' * 56),
        ('too busy ' * 50, ('too busy ' * 50)[:200]),
    ],
)
def test_pages_of_html_in_refusals_are_cut_to_their_titles(body, shown):
    error = refusal(answer(status=502).head, body.encode(), NAME).error
    assert str(error) == f'{NAME}: status 502, {shown}'


def test_path_of_an_endpoint_is_named_where_a_listing_is_not_found():
    reply = answer('<Error><Code>NoSuchKey</Code></Error>', 404)
    for endpoint in (None, 'http://host:1', 'http://host:1/'):
        with pytest.raises(BadReplyError, match='the error NoSuchKey$'):
            s3replies.next_page(Listing(NAME, '', '', True), reply, endpoint)
    with pytest.raises(BadReplyError, match='NoSuchKey: endpoint_url has the path /bucket, .* before the bucket$'):
        s3replies.next_page(Listing(NAME, '', '', True), reply, 'http://host:1/bucket')


@pytest.mark.parametrize(
    ('body', 'error'),
    [('<Error><Code>NoSuchBucket</Code></Error>', BucketNotFoundError), ('<html>404</html>', BadReplyError),
     ('', BadReplyError)],
)  # fmt: skip
def test_status_404_of_a_listing_is_not_found_only_for_a_missing_bucket(body, error):
    listing = Listing(NAME, 'in/', '', True)
    with pytest.raises(error):
        s3replies.next_page(listing, answer(body, 404))
    s3replies.next_page(listing, answer(page(contents('in/a'), 't')))
    with pytest.raises(StoreError) as caught:
        s3replies.next_page(listing, answer(body, 404))
    assert not isinstance(caught.value, NotFoundError)


ETAG = '"' + 'a' * 32 + '"'
DATE = 'Sat, 21 Nov 2026 20:26:37 GMT'


def test_heads_are_parsed():
    head = Head(200, 'OK', {'content-length': '5', 'etag': ETAG, 'last-modified': DATE})
    time = datetime.datetime(2026, 11, 21, 20, 26, 37, tzinfo=datetime.UTC).timestamp()
    assert s3replies.metadata_of(head, NAME)[:3] == (5, time, ETAG)
    assert s3replies.metadata_of(Head(200, 'OK', {'content-length': '5', 'last-modified': DATE}), NAME).version is None


@pytest.mark.parametrize(
    'headers',
    [{}, {'content-length': '5'}, {'etag': ETAG}, {'content-length': '5', 'etag': ''},
     *({'content-length': '5', 'etag': ETAG, 'last-modified': date} for date in
       ('', 'soon', '2026', 'Sat, 21 Nov 99999999999 20:26:37 GMT', 'Sat, 99 Nov 2026 20:26:37 GMT'))],
)  # fmt: skip
def test_invalid_heads_are_bad_replies(headers):
    with pytest.raises(BadReplyError, match=NAME):
        s3replies.metadata_of(Head(200, 'OK', headers), NAME)


@pytest.mark.parametrize(
    'date', ['', 'x', 'Sat, 21 Nov 99999999999 20:26:37 GMT', '1 2 3', 'Sat, 21 Nov 2026 20:26:37 -9999']
)
def test_invalid_times_are_ignored(date):
    assert http_date(date) is None or http_date(date).tzinfo is not None


def test_date_without_a_zone_is_utc():
    assert http_date('Sat, 21 Nov 2026 20:26:37 -0000') == http_date(DATE)


@pytest.mark.parametrize(
    ('headers', 'digests'),
    [
        ({'etag': ETAG}, {'md5': 'a' * 32}),
        ({'etag': f'"{"a" * 32}-7"'}, {'parts': 'a' * 32 + '-7'}),
        ({'etag': ETAG, 'x-amz-server-side-encryption': 'AES256'}, {'md5': 'a' * 32}),
        ({'etag': ETAG, 'x-amz-server-side-encryption': 'aws:kms'}, {}),
        ({'etag': ETAG, 'x-amz-server-side-encryption-customer-algorithm': 'AES256'}, {}),
        ({'etag': '"0x8D"'}, {}),
        ({'etag': '"x"', 'x-amz-checksum-crc32c': 'AAAAAQ=='}, {'crc32c': '00000001'}),
        ({'etag': '"x"', 'x-amz-checksum-crc32c': 'AAAAAQ==-3'}, {}),
        ({'etag': '"x"', 'x-amz-checksum-crc32c': 'AAAAAQ==', 'x-amz-checksum-type': 'COMPOSITE'}, {}),
        ({'etag': '"x"', 'x-amz-checksum-crc32c': 'nonsense'}, {}),
    ],
)
def test_checksums_of_an_object(headers, digests):
    metadata = s3replies.metadata_of(Head(200, 'OK', {'content-length': '1', **headers}), NAME)
    assert dict(metadata.content_info(True).digests) == digests
    assert 'md5' not in metadata.content_info(False).digests


@pytest.mark.parametrize(
    'take',
    [
        lambda reply: s3replies.written_etag(reply, NAME),
        lambda reply: s3replies.copied_part(reply, NAME, 'CopyObjectResult'),
        lambda reply: s3replies.upload_id(reply, NAME, 'in'),
        lambda reply: s3replies.joined_etag(reply, NAME, 'in'),
        lambda reply: uploads.uploads_page(reply, NAME, 'in', ()),
        lambda reply: uploads.parts_page(reply, NAME, 0),
        lambda reply: s3replies.check_deleted(reply, NAME, ['in']),
    ],
)
@pytest.mark.parametrize(
    'body',
    ['', '<html/>', '<Error><Code>InternalError</Code></Error>', '<CopyObjectResult/>', '<DeleteResult/>',
     '<InitiateMultipartUploadResult><Key>other</Key><UploadId>x</UploadId></InitiateMultipartUploadResult>',
     '<InitiateMultipartUploadResult><UploadId/></InitiateMultipartUploadResult>', '<CompleteMultipartUploadResult/>',
     '<CompleteMultipartUploadResult><Key>other</Key><ETag>"x"</ETag></CompleteMultipartUploadResult>',
     '<ListMultipartUploadsResult><IsTruncated>true</IsTruncated></ListMultipartUploadsResult>',
     '<ListMultipartUploadsResult/>', '<ListPartsResult/>',
     '<ListPartsResult><IsTruncated>true</IsTruncated><NextPartNumberMarker>0</NextPartNumberMarker></ListPartsResult>',
     '<DeleteResult><Deleted><Key>other</Key></Deleted></DeleteResult>',
     '<CopyObjectResult><ETag/></CopyObjectResult>'],
)  # fmt: skip
def test_unexpected_documents_are_bad_replies(take, body):
    with pytest.raises(BadReplyError, match=NAME):
        take(answer(body))


def test_upload_markers_must_advance():
    body = (
        '<ListMultipartUploadsResult><IsTruncated>true</IsTruncated><NextKeyMarker>in/b</NextKeyMarker>'
        '<NextUploadIdMarker>7</NextUploadIdMarker></ListMultipartUploadsResult>'
    )
    assert uploads.uploads_page(answer(body), NAME, 'in', ())[1] == ('in/b', '7')
    with pytest.raises(BadReplyError):
        uploads.uploads_page(answer(body), NAME, 'in', [('in/b', '7')])


def test_keys_that_xml_cannot_represent_are_refused():
    for key in ('a', 'ä/ö', 'a&b<c>', 'a\tb', 'a\nb', '\U0001f600'):
        assert documents.is_writable(key)
    for key in ('a\x01', 'a\rb', 'a\0', '\ufffe', '\ud800'):
        assert not documents.is_writable(key)
    assert b'a&amp;b&lt;c&gt;' in documents.delete_body(['a&b<c>'])


# --- options


@pytest.mark.parametrize(
    'endpoint',
    ['host:9', 'ftp://host', 'http://', 'https://user:pass@host', 'http://[::1', 'http://host:99999', 'http://host:x'],
)
def test_invalid_endpoints_are_refused(endpoint):
    with pytest.raises(InvalidArgumentError, match='s3://bucket: expected an endpoint_url'):
        granular.Path('s3://bucket/key', endpoint_url=endpoint, anon=True).read_bytes()


@pytest.mark.parametrize(
    ('options', 'known'),
    [
        ({'client_kwargs': {'region': 'x'}}, 'region_name'),
        ({'config_kwargs': {'addressing_style': 'path'}}, 's3'),
        ({'config_kwargs': {'s3': {'style': 'path'}}}, 'addressing_style'),
        ({'s3_additional_kwargs': {'Encryption': 'aws:kms'}}, 'ServerSideEncryption'),
        ({'key': 5, 'secret': 'x'}, 'text for key, got int'),
    ],
)
def test_unknown_options_are_refused(options, known):
    with pytest.raises(InvalidArgumentError, match=known):
        s3options.check('s3://bucket', options)


@pytest.mark.parametrize(
    'options',
    [
        {'client_kwargs': 5},
        {'config_kwargs': 'x'},
        {'config_kwargs': {'s3': 5}},
        {'config_kwargs': {'proxies': 'http://x'}},
        {'config_kwargs': {'proxies': {'http': 5}}},
        {'s3_additional_kwargs': [1]},
    ],
)
def test_options_of_other_types_are_refused(options):
    with pytest.raises(InvalidArgumentError, match='s3://bucket: expected a'):
        granular.Path('s3://bucket/key', **options)


@pytest.mark.parametrize('name', ['key', 'secret'])
def test_key_and_secret_without_the_other_are_refused(name, monkeypatch):
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'of the environment')
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'of the environment')
    path = granular.Path('s3://bucket/key', endpoint_url='http://127.0.0.1:1', **{name: 'x'})
    with pytest.raises(InvalidArgumentError, match=r's3://bucket: expected key= and secret= together, got'):
        path.read_bytes()
    token = granular.Path('s3://bucket/key', endpoint_url='http://127.0.0.1:1', token='x')
    with pytest.raises(InvalidArgumentError, match=r's3://bucket: expected key= and secret= with token='):
        token.read_bytes()
    s3options.check('s3://bucket', {'key': 'x', 'secret': 'y', 'token': 'z'})
    s3options.check('s3://bucket', {'key': None, 'secret': None})


@pytest.fixture
def provide(tmp_path, monkeypatch):
    """Make a command the only source of credentials; return an object whose server cannot be reached."""

    def set_command(command):
        (tmp_path / 'config').write_text(f'[default]\ncredential_process = {command}\n')
        for name in ('AWS_CONFIG_FILE', 'AWS_SHARED_CREDENTIALS_FILE'):
            monkeypatch.setenv(name, str(tmp_path / 'config'))
        for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_PROFILE'):
            monkeypatch.delenv(name, raising=False)
        config = granular.IOConfig(attempts=1)
        return granular.Path('s3://bucket/key', endpoint_url='http://127.0.0.1:1', config=config)

    return set_command


def test_credential_process_that_fails_is_an_error(provide):
    with pytest.raises(StoreError, match='s3://bucket'):
        provide('echo none').read_bytes()


def test_renewal_that_fails_before_credentials_expire_is_not_repeated_on_the_event_loop(provide, tmp_path):
    runs, expires = tmp_path / 'runs', datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=12)
    keys = {'Version': 1, 'AccessKeyId': 'x', 'SecretAccessKey': 'y', 'SessionToken': 'z', 'Expiration': f'{expires}'}
    (tmp_path / 'keys').write_text(json.dumps(keys))
    (tmp_path / 'run').write_text(f'echo >> {runs}\ncat {tmp_path}/keys && rm {tmp_path}/keys\n')
    with pytest.raises(StoreError, match='no connection'):
        provide(f'sh {tmp_path}/run').read_bytes()
    assert runs.read_text() == '\n' * 2  # the first, and the renewal in a thread
