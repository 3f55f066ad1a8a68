"""One meaning of an http(s) address: it is sent as it is given, and its query is no part of any name."""

import contextlib
import functools
import http.server
import io
import tarfile
import threading
import urllib.parse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, strategies

import granular
from granular.errors import GranularError, NotFoundError, ObjectChangedError
from tests.support.faults import DATA, FaultServer

ODD = [
    'a b',
    'dür',
    'a+b',
    'a%b',
    'a%20b',
    '100%',
    'x?y=1',
    'x#y',
    "it's (1)",
    'a=1&b;c,d@e:f!$*~',
    '{x}^|`"<>[0]',
    '日本',
]
QUERY = '?X-Sig=a%2Fb+c/d%20=&x-id=GetObject'
WORDS = strategies.text(strategies.characters(exclude_categories=('Cs', 'Cc'), exclude_characters='/'), min_size=1)


class Sent(http.server.BaseHTTPRequestHandler):
    """Notes the target of each request, and answers with it."""

    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        self.server.targets.append(self.path)
        body = self.path.encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        if self.command == 'GET':
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serving(handler):
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        server.targets, server.endpoint = [], f'http://127.0.0.1:{server.server_port}'
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope='module')
def echo():
    with serving(Sent) as server:
        yield server


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """A web server of a folder, with the listings that Python makes."""
    folder = tmp_path_factory.mktemp('web')

    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def log_message(self, *args):
            pass

    with serving(functools.partial(Quiet, directory=str(folder))) as server:
        server.folder = folder
        yield server


def test_missing_file_of_a_pattern_in_braces_is_named_where_nothing_may_be_listed(tmp_path):
    class Unlisted(http.server.SimpleHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def log_message(self, *args):
            pass

        def list_directory(self, path):
            self.send_error(403)

    for number in range(2):
        (tmp_path / f'x-{number}.tar').write_bytes(b'')
    with serving(functools.partial(Unlisted, directory=str(tmp_path))) as server:
        with pytest.raises(NotFoundError, match=r'x-.*\.tar: x-2\.tar matches no files$'):
            granular.open(f'{server.endpoint}/x-{{0..2}}.tar')


@pytest.mark.parametrize('query', ['', QUERY, '?a=b/'])
@pytest.mark.parametrize(
    'path',
    ['my%20file.bin', 'd%C3%BCr.bin', 'd%c3%bcr', 'a%2Bb%20%281%29', 'a+b', 'a%2Fb', '%41', 'a%25', 'x%3Fy', '%FF',
     "!$&'()*,;=:@-._~", 'a//b', '%E2%80%8B', 'a%0Ab'],
)  # fmt: skip
def test_address_is_sent_as_it_is_given(echo, path, query):
    sent = f'/{path}{query}'
    given = granular.Path(echo.endpoint + sent)
    assert given.read_bytes() == sent.encode()
    assert str(given) == given.as_uri() == echo.endpoint + sent
    assert granular.Path(given.as_uri()) == given


@given(WORDS, WORDS.filter(lambda name: name not in ('.', '..')))
def test_address_of_any_text_is_itself_again(folder, name):
    path = granular.Path(f'http://host/{folder}/{name}') if '?' not in folder + name else granular.Path('http://host/x')
    for one in (path, granular.Path('http://host') / folder / name):
        assert granular.Path(one.as_uri()) == one
        assert one.as_uri().isascii()
    assert (granular.Path('http://host') / folder / name).name == name
    assert granular.Path('http://host/x').with_name(name).name == name


@given(WORDS)
def test_uri_of_any_path_is_the_same_path(name):
    for root in ('/tmp', 's3://bucket', 'gs://bucket'):
        path = granular.Path(root) / name
        assert granular.Path(path.as_uri()) == path


@pytest.mark.parametrize(
    ('given', 'sent'), [('a b', 'a%20b'), ('dür', 'd%C3%BCr'), ('100%', '100%25'), ('{a}"', '%7Ba%7D%22')]
)
def test_characters_that_http_has_not_are_encoded(echo, given, sent):
    path = granular.Path(f'{echo.endpoint}/{given}?q={given}')
    assert (
        path.read_bytes().decode()
        == f'/{sent}?q={given.replace(" ", "%20").replace("ü", "%C3%BC").replace(chr(34), "%22")}'
    )
    assert granular.Path(f'{echo.endpoint}/{given}') == granular.Path(f'{echo.endpoint}/{sent}')


def test_query_is_no_part_of_a_name(echo):
    path = granular.Path(f'{echo.endpoint}/data/train.tar.gz{QUERY}')
    assert (path.name, path.stem, path.suffix) == ('train.tar.gz', 'train.tar', '.gz')
    assert path.parts[1:] == ('data', 'train.tar.gz')
    assert path.match('*.gz')
    assert str(path.relative_to(f'{echo.endpoint}/data')) == 'train.tar.gz'
    # What may be needed to read the files beside it goes along.
    assert path.with_name('x').read_bytes().decode() == f'/data/x{QUERY}'
    assert (path.parent / 'y z').read_bytes().decode() == f'/data/y%20z{QUERY}'
    assert path.with_suffix('.zip').name == 'train.tar.zip'
    assert QUERY not in f'{path}'
    assert granular.Path(f'{echo.endpoint}{QUERY}').read_bytes().decode() == f'/{QUERY}'


def test_files_of_a_web_server_have_the_names_of_its_disk(files, tmp_path):
    (files.folder / 'odd').mkdir()
    for name in ODD:
        (files.folder / 'odd' / name).write_text(name)
    folder = granular.Path(f'{files.endpoint}/odd')
    listed = list(folder.iterdir())
    assert sorted(path.name for path in listed) == sorted(ODD)
    for path in listed:
        assert path.read_text() == path.name
        assert path == folder / path.name
        assert granular.Path(str(path)) == path
    assert [path.name for path in folder.glob('a=*')] == ['a=1&b;c,d@e:f!$*~']
    assert sorted(path.name for path in granular.Path(files.endpoint).glob('odd/**/*')) == sorted(ODD)
    assert sorted(next(iter(folder.walk()))[2]) == sorted(ODD)
    folder.copy(tmp_path / 'copy')
    assert {path.name: path.read_text() for path in (tmp_path / 'copy').iterdir()} == {name: name for name in ODD}
    for name in ODD:
        escaped = urllib.parse.quote(name, safe='')
        assert granular.Path(f'{files.endpoint}/odd/{escaped}').read_text() == name


def presigned():
    table, archive = io.BytesIO(), io.BytesIO()
    pq.write_table(pa.table({'a': [1, 2, 3]}), table)
    with tarfile.open(fileobj=archive, mode='w') as tar:
        member = tarfile.TarInfo('0.txt')
        member.size = 5
        tar.addfile(member, io.BytesIO(b'hello'))
    return {'table.parquet': table.getvalue(), 'train.tar': archive.getvalue()}


def test_format_of_a_presigned_link_is_that_of_its_name(tmp_path):
    contents = presigned()
    query = 'X-Sig=a/b.txt'
    with FaultServer(files={f'{name}?{query}': data for name, data in contents.items()}) as server:
        for name, length in (('table.parquet', 3), ('train.tar', 1)):
            link = f'{server.endpoint}/x/{name}?{query}'
            with granular.open(link) as reader:
                assert len(reader) == length
            granular.convert(link, tmp_path / f'converted-{name}')
            with granular.open(tmp_path / f'converted-{name}') as reader:
                assert len(reader) == length
        copy = granular.copy_to_local(f'{server.endpoint}/x/train.tar?{query}', tmp_path / 'train')
        assert copy.was_unpacked
        assert (tmp_path / 'train' / '0.txt').read_text() == 'hello'


@pytest.mark.parametrize('location', ['/my file', '/d\u00c3\u00bcr', '/my%20file?q=a b', 'HOST/my file#top'])
def test_location_is_encoded_as_browsers_do(echo, location):
    with FaultServer() as server:
        location = location.replace('HOST', echo.endpoint)
        raw = f'HTTP/1.1 302 X\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n'.encode('latin-1')
        server.script.append(('raw', raw))
        expected = {'/my file': '/my%20file', '/d\u00c3\u00bcr': '/d%C3%BCr', '/my%20file?q=a b': '/my%20file?q=a%20b'}
        if 'HOST' in location or location.startswith('http'):
            assert granular.Path(f'{server.endpoint}/x').read_bytes() == b'/my%20file'
        else:
            assert granular.Path(f'{server.endpoint}/x').read_bytes() == DATA
            assert server.targets[-1] == expected[location]


@pytest.mark.parametrize(('kind', 'claimed'), [('http', 0), ('http', 1000), ('http', len(DATA) + 1), ('s3', 1000)])
def test_wrong_length_of_head_is_found_out(tmp_path, kind, claimed):
    class Wrong(FaultServer):
        async def good(self, writer, request, cut=None):
            if request.method == 'HEAD':
                writer.write(self._head(request, 200, claimed))
            else:
                await super().good(writer, request, cut)

    with Wrong(files={'a': DATA, 'a.tar': DATA}) as server:
        if kind == 'http':
            path = granular.Path(f'{server.endpoint}/bucket/a', config=granular.IOConfig(attempts=1))
        else:
            options = {'endpoint_url': server.endpoint, 'key': 'k', 'secret': 's'}
            path = granular.Path('s3://bucket/a', config=granular.IOConfig(attempts=1), **options)
        for number, copy in enumerate((path.copy, lambda target: granular.copy_to_local(path, target))):
            target = tmp_path / f'{number}'
            try:
                copy(target)
            except GranularError as error:
                assert claimed
                assert isinstance(error, ObjectChangedError) or claimed > len(DATA)
                assert not target.exists()
            else:
                assert target.read_bytes() == DATA
