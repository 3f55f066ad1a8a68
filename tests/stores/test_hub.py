"""Repositories of the Hugging Face Hub: listings, reads at one commit, throttling, gated repositories, tokens."""

import asyncio
import hashlib
import logging
import multiprocessing
import pickle

import pyarrow
import pytest
from pyarrow import parquet

import granular
from granular.aio.stores import Request
from granular.errors import (
    AccessDeniedError,
    BadReplyError,
    BucketNotFoundError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    StoreError,
    UnsupportedError,
)
from tests.support.files import FORMATS, files_of_numbers, numbers_in

TOKEN = 'hf_permitted'
CONFIG = granular.IOConfig(attempts=3, backoff=0.001)
FILES = {
    'README.md': b'about',
    'data/a.bin': bytes(range(250)),
    'data/b c?.bin': b'odd name' * 50,
    'data/deep/er/c.txt': b'c',
    'empty': b'',
    **{f'many/{i}': b'%d' % i for i in range(8)},
}


@pytest.fixture
def server(hub):
    return hub


@pytest.fixture(autouse=True)
def environment(server, monkeypatch, tmp_path):
    monkeypatch.setenv('HF_ENDPOINT', server.endpoint)
    monkeypatch.setenv('HF_TOKEN', '')
    monkeypatch.setenv('HF_HOME', str(tmp_path / 'hf'))
    server.faults.clear()
    server.calls()


@pytest.fixture
def place(server):
    server.commit('me/files', FILES)
    return granular.Path('hf://datasets/me/files', config=CONFIG)


def names(path, pattern='**/*'):
    return sorted(str(found.relative_to(path)) for found in path.glob(pattern) if found.is_file())


def write(folder, first=0, shards=False):
    options = {'shardlen': 10} if shards else {}
    writer = granular.ShardedDatasetWriter if shards else granular.DatasetWriter
    with writer(folder, {'text': 'utf8', 'label': 'int'}, **options) as writing:
        for i in range(first, first + 30):
            writing.append({'text': f'text {i} ' * 20, 'label': i})


def test_files_are_listed_page_by_page(place):
    assert names(place) == sorted(FILES)
    assert sorted(path.name for path in place.iterdir()) == ['README.md', 'data', 'empty', 'many']
    assert sorted(path.name for path in (place / 'many').iterdir()) == [f'{i}' for i in range(8)]
    assert names(place, 'data/*.bin') == ['data/a.bin', 'data/b c?.bin']
    with pytest.raises(NotFoundError, match='files/nothing'):
        list((place / 'nothing').iterdir())


def test_a_tree_is_one_listing(place, server):
    assert set(FILES) < {str(path.relative_to(place)) for path in place.rglob('*')}
    assert all('/tree/' in call and 'recursive=true' in call for call in server.calls()[1:])


def test_files_and_folders_have_stats(place):
    assert (place / 'data/a.bin').stat().size == 250
    assert place.is_dir()
    assert (place / 'data' / 'deep').is_dir()
    assert (place / 'empty').is_file()
    assert not (place / 'data/x').exists()
    assert str(place / 'data') == 'hf://datasets/me/files/data'


def test_ranges_are_read_from_the_server_of_the_contents(place, server):
    file = place / 'data/a.bin'
    content = FILES['data/a.bin']
    assert file.read_range(3, 9) == content[3:9]
    calls = server.calls()
    assert [call.split('/')[-1] for call in calls[1:]] == ['a.bin', 'GET contents', 'GET contents']
    assert file.read_ranges([0, 200, 100], [2, 250, 101]) == [content[:2], content[200:], content[100:101]]
    assert set(server.calls()) == {'GET contents'}
    assert file.read_range(245) == content[245:]
    for name, data in FILES.items():
        assert (place / name).read_bytes() == data


EXPIRED = 403, {}, b'<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>'
READS = {
    'all': lambda path: path.read_bytes(),
    'a range': lambda path: path.read_range(0, 50),
    'ranges': lambda path: path.read_ranges([0, 200], [10, 210]),
}


@pytest.mark.parametrize('name', READS)
def test_expired_links_are_asked_for_again_once(place, server, name):
    path = next(path for path in place.rglob('*') if path.is_file() and path.stat().size > 300)
    expected = READS[name](path)
    server.contents.faults.append(EXPIRED)
    assert READS[name](path) == expected
    asked = len([request for request in server.requests if request[0] == 'HEAD'])
    server.contents.faults.extend([EXPIRED] * 20)
    with pytest.raises(granular.errors.AccessDeniedError):
        READS[name](path)
    assert len([request for request in server.requests if request[0] == 'HEAD']) == asked + 1
    server.contents.faults.clear()


def test_many_files_are_looked_up_concurrently(place):
    store = granular.aio.Path(str(place)).store
    requests = [Request(f'many/{i}', [0], [1]) for i in range(8)]
    assert asyncio.run(store.read_many(requests)) == [b'%d' % i for i in range(8)]
    assert asyncio.run(store.read_fresh(requests)) == [b'%d' % i for i in range(8)]


def test_a_cancelled_read_leaves_the_lookup_of_a_file_to_the_others(place, server):
    async def read():
        path = granular.aio.Path(str(place), config=CONFIG)
        await (path / 'README.md').read_bytes()
        reads = [asyncio.create_task((path / 'data/a.bin').read_range(0, 9)) for _ in range(2)]
        await asyncio.sleep(0)
        reads.pop().cancel()
        await asyncio.sleep(0)
        reads.append(asyncio.create_task((path / 'data/a.bin').read_range(0, 9)))
        return await asyncio.gather(*reads)

    assert asyncio.run(read()) == [FILES['data/a.bin'][:9]] * 2
    assert sum(call.startswith('HEAD') and call.endswith('/data/a.bin') for call in server.calls()) == 1


def test_each_file_is_checked_where_more_are_read_than_are_remembered(place, server, monkeypatch):
    monkeypatch.setattr('granular.aio.stores.hub.SIZES', 1)
    store, names = granular.aio.Path(str(place), config=CONFIG).store, ('data/a.bin', 'data/b c?.bin')
    read = asyncio.run(store.read_many([Request(name, [1], [9]) for name in names]))
    assert read == [FILES[name][1:9] for name in names]
    assert server.calls().count('GET contents') == 4  # each file is compared with its size before it is read


@pytest.mark.parametrize('shards', [False, True])
def test_datasets_are_read(server, tmp_path, shards):
    write(tmp_path / 'ds', shards=shards)
    server.commit('me/ds', tmp_path / 'ds')
    with granular.open('hf://datasets/me/ds', verify=True) as reader:
        assert type(reader) is (granular.ShardedDatasetReader if shards else granular.DatasetReader)
        assert reader[:]['label'] == list(range(30))
        assert reader.fetch([29, 3])[0] == {'text': 'text 29 ' * 20, 'label': 29}
    assert granular.verify('hf://datasets/me/ds').problems == []
    target = granular.Path(tmp_path) / 'copied'
    granular.Path('hf://datasets/me/ds').copy(target)
    assert granular.verify(target).datapoints == 30


def test_files_are_read_through_the_block_cache(server, tmp_path):
    config = granular.IOConfig(tail=4096, cache_dir=str(tmp_path / 'cache'))
    with granular.BagWriter(tmp_path / 'x.bag') as writer:
        for i in range(20_000):
            writer.append(b'%d' % i)
    content = (tmp_path / 'x.bag').read_bytes()
    server.commit('me/bag', {'x.bag': content})
    path = granular.Path('hf://datasets/me/bag/x.bag', config=config)
    version = f'"{hashlib.sha256(content).hexdigest()}"'
    assert path.read_ranges([7], [9], version=version) == [content[7:9]]  # of a version that no reply has told before
    with granular.BagReader(path) as reader:  # whose table is larger than what is read first
        assert reader.fetch([19_999, 0, 7000]) == [b'19999', b'0', b'7000']
    server.calls()
    assert path.read_ranges([7], [9], version=version) == [content[7:9]]
    assert 'GET contents' not in server.calls()


def test_parquet_is_read(server, tmp_path):
    parquet.write_table(pyarrow.table({'x': list(range(1000))}), tmp_path / 'train-0.parquet')
    server.commit('me/parquet', tmp_path)
    with granular.ParquetDataSource(list(granular.Path('hf://datasets/me/parquet').glob('*.parquet'))) as source:
        assert [row['x'] for row in source.fetch([999, 5])] == [999, 5]


@pytest.mark.parametrize('caches', [(), ('index_cache',), ('cache_dir',), ('index_cache', 'cache_dir')])
def test_everything_is_read_at_one_commit(server, tmp_path, caches):
    write(tmp_path / 'old')
    write(tmp_path / 'new', 100)
    old = server.commit('me/moving', tmp_path / 'old')
    config = granular.IOConfig(**{name: str(tmp_path / name) for name in caches})
    path = granular.Path('hf://datasets/me/moving', config=config)
    with granular.DatasetReader(path) as reader:
        assert reader[0]['label'] == 0
        new = server.commit('me/moving', tmp_path / 'new')
        with granular.DatasetReader(granular.Path('hf://datasets/me/moving', config=config)) as moved:
            assert moved[0]['label'] == 100
        assert reader.fetch(range(30))[29]['label'] == 29
        assert (path / 'label.bag').read_bytes() == (tmp_path / 'old' / 'label.bag').read_bytes()
        with pickle.loads(pickle.dumps(reader)) as copy:
            assert copy[5]['label'] == 5
    server.calls()
    for revision, first in (('', 100), (f'@{old}', 0), (f'@{new}', 100)):
        with granular.DatasetReader(f'hf://datasets/me/moving{revision}') as reader:
            assert reader[0]['label'] == first
        assert any('/revision/' in call for call in server.calls()) == (not revision)


@pytest.mark.parametrize('suffix', FORMATS)
def test_files_of_two_commits_are_two_files(server, suffix):
    name, paths = f'x.{suffix}', []
    for numbers in ([1, 2, 3], [4, 5, 6]):
        server.commit('me/twice', files_of_numbers(suffix, name, numbers))
        paths.append(granular.Path(f'hf://datasets/me/twice/{name}'))
        paths[-1].read_bytes()  # looks up the commit
    for files in (paths, paths[::-1]):
        with FORMATS[suffix].opener()(files) as source:
            assert sorted(numbers_in(source)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize('branch', ['dev', 'refs/convert/parquet', 'refs/pr/1'])
def test_revisions_are_read(server, branch):
    server.commit('me/branches', {'x': b'main'})
    server.commit('me/branches', {'x': b'branch'}, branch)
    for revision in (branch, branch.replace('/', '%2F')):
        assert granular.Path(f'hf://datasets/me/branches@{revision}/x').read_bytes() == b'branch'
    assert granular.Path('hf://datasets/me/branches/x').read_bytes() == b'main'


def child(path, connection):
    connection.send((path / 'x').read_bytes())


def test_processes_read_the_same_commit(server):
    server.commit('me/shared', {'x': b'old'})
    path = granular.Path('hf://datasets/me/shared')
    assert (path / 'x').exists()
    server.commit('me/shared', {'x': b'new'})
    context = multiprocessing.get_context('spawn')
    parent, connection = context.Pipe()
    process = context.Process(target=child, args=(path, connection))
    process.start()
    assert parent.recv() == b'old'
    process.join()


@pytest.mark.parametrize('headers', [{'Retry-After': '0'}, {'RateLimit': '"api";r=0;t=0'}])
def test_throttled_requests_are_retried(place, server, headers):
    assert (place / 'README.md').exists()
    reads = (place / 'README.md').read_bytes, (place / 'many' / '0').stat, lambda: list(place.iterdir())
    for read in reads if 'Retry-After' in headers else reads[:1]:
        server.faults[:] = [(429, headers, b'')]
        assert read()
        assert server.faults == []


def test_the_reset_of_a_rate_limit_is_awaited(place, server):
    assert (place / 'README.md').exists()
    for headers in ({'RateLimit': '"api";r=0;t=3600'}, {'Retry-After': '3600'}):
        server.faults[:] = [(429, headers, b'')]
        path = granular.Path(str(place), config=granular.IOConfig(attempts=5, retry_time=0.05)) / 'README.md'
        with pytest.raises(StoreError, match='429') as caught:
            path.read_bytes()
        assert server.faults == []
        assert not isinstance(caught.value, AccessDeniedError)


def test_throttling_that_does_not_end_is_an_error(place, server):
    server.faults[:] = [(429, {'Retry-After': '0'}, b'slow down')] * 3
    with pytest.raises(StoreError, match=r'hf://datasets/me/files.*status 429') as caught:
        (place / 'README.md').read_bytes()
    assert 'gave up after 3 attempts' in caught.value.__notes__[0]
    assert server.faults == []


@pytest.mark.parametrize('operation', ['read_bytes', 'stat', 'iterdir'])
def test_gated_repositories_name_the_remedy(server, operation, monkeypatch):
    server.commit('me/gated', {'x': b'secret', 'y/z': b''}, gated=True)
    for token, said in (('', 'no token was sent'), ('hf_other_token', 'may not read it')):
        monkeypatch.setenv('HF_TOKEN', token)
        path = granular.Path('hf://datasets/me/gated/x', config=CONFIG)
        with pytest.raises(AccessDeniedError, match=f'gated.*{said}.*/datasets/me/gated.*hf auth login'):
            list((path.parent / 'y').iterdir()) if operation == 'iterdir' else getattr(path, operation)()
    monkeypatch.setenv('HF_TOKEN', TOKEN)
    assert granular.Path('hf://datasets/me/gated/x').read_bytes() == b'secret'


def test_missing_repositories_and_revisions_are_named(server):
    server.commit('me/there', {'x': b'1'})
    with pytest.raises(AccessDeniedError, match='hf://datasets/me/nothing: .*does not exist'):
        granular.Path('hf://datasets/me/nothing/x').read_bytes()
    with pytest.raises(BucketNotFoundError, match='hf://datasets/me/nothing: no such repository'):
        granular.Path('hf://datasets/me/nothing/x', token=TOKEN).read_bytes()
    with pytest.raises(BucketNotFoundError, match='hf://datasets/me/there@nope: no such repository or revision'):
        granular.Path('hf://datasets/me/there@nope/x').read_bytes()
    with pytest.raises(NotFoundError, match=r'hf://datasets/me/there@[0-9a-f]{40}/y: no such object'):
        granular.Path('hf://datasets/me/there/y').read_bytes()


@pytest.mark.parametrize(
    'address', ['hf://', 'hf://datasets', 'hf://datasets/me', 'hf://datasets/me/a@/x', 'hf://a b/c/x']
)
def test_invalid_addresses_are_refused(address):
    with pytest.raises(InvalidArgumentError, match='expected hf://datasets/owner/name'):
        granular.Path(address)


def test_unknown_options_and_tokens_are_refused(place):
    with pytest.raises(InvalidArgumentError, match='unknown options'):
        granular.Path('hf://datasets/me/files', anon=True)
    with pytest.raises(InvalidArgumentError, match='expected a token or False, got int'):
        granular.Path('hf://datasets/me/files/x', token=7).read_bytes()


def test_repositories_are_read_only(place, tmp_path):
    with pytest.raises(UnsupportedError, match='does not support'):
        (place / 'x').write_bytes(b'x')
    with pytest.raises(UnsupportedError, match='does not support'):
        (place / 'README.md').unlink()
    with pytest.raises(UnsupportedError, match='does not support'):
        granular.DatasetWriter(place / 'new', {'x': 'int'})


def test_tokens_are_sent_to_the_hub_alone_and_shown_nowhere(server, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    write(tmp_path)
    server.commit('me/private', tmp_path, gated=True)
    path = granular.Path('hf://datasets/me/private', token=TOKEN, config=CONFIG)
    server.requests.clear()
    with granular.DatasetReader(path) as reader:
        assert reader[0]['label'] == 0
        content = pickle.dumps(reader) + pickle.dumps(path)
    assert {headers.get('authorization') for _, _, headers in server.requests} == {f'Bearer {TOKEN}'}
    assert all('authorization' not in headers for _, _, headers in server.contents.requests)
    server.tokens.discard(TOKEN)
    try:
        with pytest.raises(AccessDeniedError) as caught:
            granular.Path('hf://datasets/me/private/spec.json', token=TOKEN, config=CONFIG).read_bytes()
    finally:
        server.tokens.add(TOKEN)
    shown = [repr(path), repr(path.store), str(caught.value), repr(caught.value.__cause__), caplog.text, repr(content)]
    for secret in (TOKEN, 'signed-secret'):
        assert not any(secret in text for text in shown)


def test_the_login_of_huggingface_hub_is_used(server, monkeypatch):
    import huggingface_hub as hub

    monkeypatch.delenv('HF_TOKEN')
    monkeypatch.setattr(hub, 'get_token', lambda: TOKEN)  # it reads a file of the home folder
    server.commit('me/login', {'x': b'1'}, gated=True)
    assert granular.Path('hf://datasets/me/login/x').read_bytes() == b'1'
    with pytest.raises(AccessDeniedError, match='no token was sent'):
        granular.Path('hf://datasets/me/login/x', token=False).read_bytes()


@pytest.mark.parametrize(
    'fault',
    [
        (200, {}, b'<html>Sign in to continue</html>' * 9),
        (200, {'ETag': '"page"', 'Last-Modified': 'Sun, 06 Nov 1994 08:49:37 GMT'}, b'a page'),
        (200, {}, b''),
        (206, {'ETag': '"short"', 'Content-Range': 'bytes 0-0/1'}, b'\0'),
    ],
)
def test_replies_of_another_size_are_repeated(place, server, fault):
    file, content = place / 'data' / 'a.bin', FILES['data/a.bin']
    reads = {
        file.read_bytes: content,
        lambda: file.read_range(0, 9): content[:9],
        lambda: file.read_ranges([0, 7], [3, 250]): [content[:3], content[7:]],
    }
    for read, expected in reads.items():
        server.contents.faults[:] = [fault]
        assert read() == expected
        server.contents.faults[:] = [fault] * 4
        with pytest.raises(BadReplyError, match=r'data/a.bin: '):
            read()
        server.contents.faults.clear()
    with pytest.raises(OutOfRangeError, match='bytes 9 to 251 were requested, but it has 250'):
        file.read_range(9, 251)


@pytest.mark.parametrize(
    'fault',
    [
        (302, {'Location': 'http://127.0.0.1:1/login'}, b''),
        (200, {}, b'<html>Sign in to continue</html>'),
        (200, {'X-Repo-Commit': '0' * 40}, b'of another commit'),
        (404, {}, b'of a proxy'),
        (302, {'Location': 'http://127.0.0.1:1/x', 'X-Repo-Commit': 'COMMIT', 'X-Linked-Size': '9' * 5000}, b''),
        (302, {'Location': 'http://127.0.0.1:1/x', 'X-Repo-Commit': 'COMMIT', 'X-Linked-Size': '²'}, b''),
    ],
)
def test_pages_instead_of_answers_about_a_file_are_repeated(place, server, fault):
    file = place / 'data' / 'a.bin'
    assert place.exists()
    commit = str(file).partition('@')[2].partition('/')[0]
    fault = (fault[0], {name: value.replace('COMMIT', commit) for name, value in fault[1].items()}, fault[2])
    server.faults[:] = [fault]
    assert file.read_bytes() == FILES['data/a.bin']
    file = granular.Path(str(file), config=granular.IOConfig(attempts=4, backoff=0.001))  # that looks it up again
    assert file.exists()
    server.faults[:] = [fault] * 2
    with pytest.raises(BadReplyError, match='data/a.bin: expected'):
        file.read_bytes()


def test_renamed_repositories_are_followed_with_the_token(server, monkeypatch):
    monkeypatch.setenv('HF_TOKEN', TOKEN)
    commit = server.commit('me/renamed', {'x': b'large' * 50}, gated=True)
    path = granular.Path(f'hf://datasets/me/former@{commit}/x', config=CONFIG)
    server.faults[:] = [(307, {'Location': f'/datasets/me/renamed/resolve/{commit}/x'}, b'')]
    assert path.read_bytes() == b'large' * 50
    assert all('authorization' not in headers for _, _, headers in server.contents.requests)


def test_listing_that_repeats_a_page_is_an_error(place, server):
    assert place.exists()
    link = f'<{server.endpoint}/api/datasets/me/files/tree/main?cursor=1>; rel="next"'
    server.faults[:] = [(200, {'Link': link}, b'[]')] * 4
    with pytest.raises(BadReplyError, match='listed before'):
        list(place.iterdir())


def test_odd_answers_are_errors(place, server):
    for body in (b'[]', b'no JSON', b'{"sha": "main"}', b'{"sha": 7}'):
        path = granular.Path(str(place), config=CONFIG)
        for read in (path.stat, (path / 'README.md').read_bytes):
            server.faults[:] = [(200, {}, body)] * 2
            with pytest.raises(StoreError, match='hf://datasets/me/files: expected'):
                read()
    assert place.is_dir()
    for body in (b'{}', b'[{"type": "file", "path": "x"}]', b'[{"type": "file", "path": "other/x", "size": 1}]'):
        server.faults[:] = [(200, {}, body)] * 2
        with pytest.raises(StoreError, match='expected'):
            list((place / 'data').iterdir())
    server.faults[:] = [(200, {'Link': '<http://127.0.0.1:1/tree>; rel="next"'}, b'[]')] * 2
    with pytest.raises(StoreError, match='on another server'):
        list((place / 'data').iterdir())
