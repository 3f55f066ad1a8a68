"""Listings and stats of web servers follow the rules of reads: redirects, timeouts, retries."""

import asyncio
import contextlib
import dataclasses
import ssl

import pytest
import trustme

import granular
from granular.errors import (
    AccessDeniedError,
    BadReplyError,
    CorruptBagError,
    NotFoundError,
    StoreError,
    StoreTimeoutError,
    UnsupportedError,
)
from tests.support.faults import DATA, FaultServer
from tests.support.loop_server import read_head
from tests.support.tables import cover

QUICK = granular.IOConfig(backoff=0.001, attempts=3, first_byte_timeout=0.5, read_timeout=0.5)
IMPATIENT = granular.IOConfig(backoff=0.001, attempts=3, first_byte_timeout=0.15, read_timeout=0.15)
BRIEF = dataclasses.replace(IMPATIENT, retry_time=0.5)
SECRETS = {'X-Api-Key': 'planted', 'Authorization': 'planted', 'Cookie': 'planted', 'User-Agent': 'mine'}


def page(*links, kind='text/html', body=None):
    text = (
        body or b'<html><body>' + b''.join(b'<a href="%b">x</a>' % link.encode() for link in links) + b'</body></html>'
    )
    return (
        'raw',
        b'HTTP/1.1 200 X\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b' % (kind.encode(), len(text), text),
    )


@pytest.fixture
def server():
    with FaultServer() as server:
        yield server


def open_bag(path):
    with contextlib.suppress(CorruptBagError):  # its bytes are no bag
        granular.BagReader(path)


OPERATIONS = {
    'read': (lambda path: path.read_range(10, 20), 'good'),
    'read all': (lambda path: path.read_bytes(), 'good'),
    'stat': (lambda path: path.stat(), 'good'),
    'exists': (lambda path: path.exists(), 'good'),
    'list': (lambda path: list(path.iterdir()), page('a')),
    'glob': (lambda path: list(path.glob('*')), page('a')),
    'walk': (lambda path: list(path.rglob('*')), page('a')),
    'is_dir': (lambda path: path.is_dir(), 'good'),
    'bag': (open_bag, 'good'),
}


@pytest.mark.parametrize(('name', 'status'), cover([list(OPERATIONS)], [[301, 302, 303, 307, 308]]))
def test_no_operation_sends_credentials_to_another_host(server, name, status):
    call, line = OPERATIONS[name]
    with FaultServer() as other:
        server.script.append(('status', status, 'X', {'Location': f'{other.endpoint}/object'}))
        other.script.append(line)
        call(granular.Path(f'{server.endpoint}/object', config=QUICK, headers=SECRETS))
        assert server.heads[0]['X-Api-Key'] == 'planted'
        assert 'planted' not in str(other.heads)
        assert other.heads[0]['User-Agent'] == 'mine'


@pytest.mark.parametrize('name', ['Host', 'user-agent', 'ACCEPT', 'accept-encoding'])
def test_given_header_replaces_that_of_the_library_in_any_case(server, name):
    granular.Path(f'{server.endpoint}/object', config=QUICK, headers={name: 'mine'}).read_bytes()
    values = [value for sent, value in server.heads[0].items() if sent.lower() == name.lower()]
    assert values == ['mine']


@pytest.mark.parametrize('name', OPERATIONS)
def test_no_operation_follows_a_redirect_from_tls_to_plain_http(name, tmp_path):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / 'authority.pem'))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert('127.0.0.1').configure_cert(context)
    with FaultServer(context) as server, FaultServer() as plain:
        server.script.extend([('redirect', f'{plain.endpoint}/object')] * 99)
        with pytest.raises(StoreError, match='from https to http'):
            OPERATIONS[name][0](
                granular.Path(f'{server.endpoint}/object', config=QUICK, tls_verify=str(tmp_path / 'authority.pem'))
            )
        assert plain.connections == 0


@pytest.mark.parametrize('name', OPERATIONS)
def test_every_operation_ends_at_circular_redirects(server, name):
    server.script.extend([('redirect', '/object')] * 99)
    with pytest.raises(BadReplyError, match='redirections'):
        OPERATIONS[name][0](granular.Path(f'{server.endpoint}/object', config=QUICK))


@pytest.mark.parametrize('name', ['list', 'glob', 'walk', 'stat', 'exists', 'is_dir'])
def test_listing_and_stat_time_out_and_are_retried(server, name):
    call, line = OPERATIONS[name]
    path, brief = (granular.Path(f'{server.endpoint}/object', config=config) for config in (IMPATIENT, BRIEF))
    for fault in ('reset', ('status', 503), 'hang', ('raw', b'HTTP/1.1 200 OK\n\n')):
        server.script.extend([fault, line])
        call(path)
        assert not server.script
    for fault, error in (('hang', StoreTimeoutError), ('reset', StoreError), (('status', 403), AccessDeniedError)):
        server.script.extend([fault] * 1000)
        with pytest.raises(error, match='pass headers= to' if error is AccessDeniedError else None):
            call(brief)
        server.script.clear()


LISTED = ['a', 'b c', 'd', 'sub', 'é']


@pytest.mark.parametrize(
    'links',
    [
        ['a', 'b%20c', 'd', '%C3%A9', 'sub/'],
        ['./a', 'b c', 'd', 'é', 'sub/'],
        ['/folder/a', '/folder/b%20c', '//HOST/folder/d', 'http://HOST/folder/%c3%a9', '/%66older/sub/'],
        ['../', '/', '..', '?C=N;O=D', '#top', 'a', 'a', 'b%20c', 'd#x', 'mailto:a@b', 'javascript:x()', 'http://else.where/folder/z',
         'http://[', '%2e%2e/', 'é', 'sub/deeper/file', '/other/x', ''],
    ],
)  # fmt: skip
def test_links_of_a_page_are_its_listing(server, links):
    host = server.endpoint.removeprefix('http://')
    server.script.append(page(*(link.replace('HOST', host) for link in links)))
    entries = list(granular.Path(f'{server.endpoint}/folder', config=QUICK).iterdir())
    assert [entry.name for entry in entries] == LISTED
    folder = granular.Path(f'{server.endpoint}/folder', config=QUICK)
    assert entries == [folder / name for name in LISTED]


@pytest.mark.parametrize(
    'markup',
    ['<![x', '<![CDATA[x', '<!x', '<!-- <a href="b"> -->', '<!--><!-- -->', '<?x?>', '</', '</ a', '</a <a href=b',
     '<a href=&#' + '9' * 5000 + ';', '<a href', '<a href=', "<p title='<a href=b>'", '<script>"<a href=b>"</SCRIPT',
     '<style><a href=b></style', '<title><a href=b></title', '<a name=b', '<area href=b', '<', '<3', '&#x110000;',
     '<a class="x" HREF = "a"'],
)  # fmt: skip
def test_malformed_pages_are_read_as_by_browsers(server, markup):
    server.script.append(page(body=f'<a href="a">a</a>{markup}><A HREF=\'&#99;\'>'.encode()))
    entries = list(granular.Path(f'{server.endpoint}/folder', config=QUICK).iterdir())
    assert [entry.name for entry in entries] == ['a', 'c']


def test_redirected_page_lists_the_requested_folder(server):
    with FaultServer() as other:
        server.script.append(('redirect', f'{other.endpoint}/folder/'))
        other.script.append(page('a', f'{other.endpoint}/folder/b'))
        path = granular.Path(f'{server.endpoint}/folder', config=QUICK)
        assert [str(entry) for entry in path.iterdir()] == [f'{server.endpoint}/folder/{name}' for name in 'ab']
        server.script.append(('redirect', f'{other.endpoint}/moved/to/'))
        other.script.append(page('a', '/moved/to/b', '/moved/c', '/folder/d'))
        assert [entry.name for entry in path.iterdir()] == ['a', 'b']
        server.script.append(('redirect', f'{other.endpoint}/login/'))
        other.script.append(page('/help', '/forgotten'))
        with pytest.raises(UnsupportedError, match=r'index .*braces .*list of files'):
            list(path.iterdir())


def test_pages_that_are_no_listing_name_the_ways_without_one(server):
    path = granular.Path(f'{server.endpoint}/folder', config=QUICK)
    script = page(body=b'<html><script>list()</script></html>')
    for call in (
        lambda: list(path.iterdir()),
        lambda: list(path.glob('*')),
        lambda: list(path.rglob('*')),
        lambda: list(path.walk()),
    ):
        for line in (
            script,
            page('/elsewhere'),
            page(kind='application/json', body=b'[]'),
            page(kind='text/plain', body=b'a'),
        ):
            server.script.append(line)
            with pytest.raises(UnsupportedError, match=r'index .*braces .*list of files'):
                call()
    for body in (b'<title>Index of /folder/</title>', b'<a href="../">../</a>', b'<h1>Directory listing for /</h1>'):
        server.script.append(page(body=body))
        assert list(path.iterdir()) == []


class Folders(FaultServer):
    """A server of a page of names without slashes, which redirects those of folders, and counts the HEAD requests."""

    def __init__(self, names, folders, slashless=False):
        super().__init__()
        self.names, self.folders, self.slashless, self.asked = names, folders, slashless, []

    async def serve(self, reader, writer):
        while True:
            method, target, _ = await read_head(reader)
            name = target.strip('/').rpartition('/')[2]
            slash = target.endswith('/')
            if method == 'HEAD':
                self.asked.append(name)
            if (name in self.folders or name == 'folder') and slash == self.slashless:
                moved = target.rstrip('/') + ('' if self.slashless else '/')
                writer.write(f'HTTP/1.1 301 X\r\nLocation: {moved}\r\nContent-Length: 0\r\n\r\n'.encode())
                continue
            base = '/folder/' if self.slashless else ''
            body = ''.join(f'<a href="{base}{name}">' for name in self.names).encode()
            head = f'HTTP/1.1 200 X\r\nContent-Type: text/html\r\nContent-Length: {len(body)}\r\n\r\n'
            writer.write(head.encode() + (b'' if method == 'HEAD' else body))


def test_entries_whose_kind_the_page_does_not_say_are_asked_for():
    files = [f'{i}.tar' for i in range(20)] + ['README']
    folders = ['000000', 'v1.0', 'v2.0', 'w.data', '.hidden']
    with Folders([*files, *folders], folders) as server:
        _, found, others = next(iter(granular.Path(f'{server.endpoint}/folder', config=QUICK).walk()))
    assert (sorted(found), sorted(others)) == (sorted(folders), sorted(files))
    assert {*server.asked} == {'0.tar', 'README', *folders}  # of the names that end alike, one


def test_folder_that_is_redirected_to_its_name_without_a_slash_has_what_its_page_links_to():
    with Folders(['a.tar', 'sub/', 'b.tar'], [], slashless=True) as server:
        names = [entry.name for entry in granular.Path(f'{server.endpoint}/folder', config=QUICK).iterdir()]
    assert names == ['a.tar', 'b.tar', 'sub']


NO_LISTINGS = {
    'nothing': (page(body=b' '), BadReplyError),
    'a page without its end': (page(body=b'<html><body><a href="a">a</a><a hr'), BadReplyError),
    'a page that ends with its connection': (
        ('raw', b'HTTP/1.1 200 X\r\nContent-Type: text/html\r\n\r\n<a href="a">', True),
        BadReplyError,
    ),
    'a compressed page': (page(kind='text/html\r\nContent-Encoding: gzip'), BadReplyError),
    'a part of a page': (
        ('raw', b'HTTP/1.1 206 X\r\nContent-Range: bytes 0-3/9\r\nContent-Length: 4\r\n\r\n<a h'),
        StoreError,
    ),
    'JSON': (page(kind='application/json', body=b'[]'), UnsupportedError),
    'a file': (page(kind='application/octet-stream', body=b'abc'), NotFoundError),
    'a name that none can have': (page('a%2Fb'), StoreError),
    'a page without end': (('raw', b'HTTP/1.1 200 X\r\nContent-Length: 99999999999\r\n\r\n<a'), BadReplyError),
}


@pytest.mark.parametrize('name', NO_LISTINGS)
def test_page_that_is_not_a_listing_is_an_error(server, name):
    line, error = NO_LISTINGS[name]
    server.script.extend([line] * 3)
    with pytest.raises(error, match='folder'):
        list(granular.Path(f'{server.endpoint}/folder', config=QUICK).iterdir())


def test_stat_gives_the_uncompressed_size(server):
    server.script.append(('raw', b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\nContent-Encoding: gzip\r\n\r\n'))
    assert granular.Path(f'{server.endpoint}/object', config=QUICK).stat().size == len(DATA)


@pytest.mark.parametrize('status', [403, 405, 501])
def test_servers_that_permit_only_get_have_stats(server, status):
    path = granular.Path(f'{server.endpoint}/object', config=QUICK)
    for _ in range(2):
        server.script.append(('raw', b'HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n' % status))
        assert path.stat().size == len(DATA)
    assert path.stat() == granular.Path(f'{server.endpoint}/object').stat()
    server.script.extend(('raw', b'HTTP/1.1 403 X\r\nContent-Length: %d\r\n\r\nx' % i) for i in range(2))
    with pytest.raises(AccessDeniedError):
        path.stat()


def test_presigned_addresses_are_opened_and_copied(seaweed, tmp_path):
    import botocore.session

    file = seaweed.place() / 'file'
    options = seaweed.options
    for content in (b'content', b''):
        file.write_bytes(content)
        client = botocore.session.Session().create_client(
            's3', 'us-east-1', endpoint_url=options['endpoint_url'], aws_access_key_id=options['key'],
            aws_secret_access_key=options['secret'],
        )  # fmt: skip
        _, _, bucket, key = str(file).split('/', 3)
        path = granular.Path(client.generate_presigned_url('get_object', Params={'Bucket': bucket, 'Key': key}))
        assert path.stat().size == len(content)
        with path.open() as opened:
            assert opened.read() == content
        assert path.copy(granular.Path(tmp_path / 'copy')).read_bytes() == content


async def test_large_pages_do_not_block_the_loop(server):
    server.script.append(page(*(f'file-{i:06}.txt' for i in range(60_000))))
    path = granular.aio.Path(f'{server.endpoint}/folder', config=QUICK)
    ticks = 0

    async def tick():
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert len([entry async for entry in path.iterdir()]) == 60_000
    ticking.cancel()
    assert ticks > 3
    await granular.aio.aclose()
