"""Google Cloud Storage under faults: each operation gives the correct result or an error, in bounded time."""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import threading
import time
import tracemalloc

import pytest

import granular
from granular import Path, aio
from granular.aio.stores import listing
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BadReplyError,
    ClosedError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from tests.support.credentials import google_key
from tests.support.faults import FaultServer
from tests.support.gcs_faults import GCSFaultProxy, contents, rewritten
from tests.support.small_parts import PART, small_parts
from tests.support.tables import cover
from tests.support.uploads import publish

USUAL_PARTS = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=4, first_byte_timeout=20, read_timeout=20)
CONFIG = small_parts(USUAL_PARTS)
LASTING = small_parts(dataclasses.replace(USUAL_PARTS, retry_time=0.2))
SILENT = small_parts(
    dataclasses.replace(USUAL_PARTS, retry_time=0.2, attempts=2, first_byte_timeout=0.1, read_timeout=0.1)
)
SMALL, LARGE = b'content', bytes(range(256)) * (11 << 8)  # one request, three parts
CONTENT = {'one request': SMALL, 'parts': LARGE}
FILES = {'a/1': b'one', 'a/2': b'two', 'a/3': b'three', 'a/b/4': b'four', 'c': b'five'}
BOUND = 50.0  # seconds: a reply that hangs takes a minute


@pytest.fixture(scope='module')
def other_host():
    """Another host, which no request may reach."""
    with FaultServer() as server:
        yield server
        assert server.connections == 0


@pytest.fixture
def proxy(fakegcs):
    with GCSFaultProxy(fakegcs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def root(proxy, fakegcs):
    return proxied(proxy, fakegcs.place())


def proxied(proxy, root, config=CONFIG):
    """Return a path in the emulator, reached through the proxy."""
    options = {**root.store.options, 'endpoint_url': proxy.endpoint}
    return granular.Path(str(root), config=config, **options)


def write_files(root):
    for name, data in FILES.items():
        (root / name).write_bytes(data)
    return root


def names(paths, root):
    return sorted(str(path).removeprefix(f'{root}/') for path in paths)


def tree(root):
    return {str(path).removeprefix(f'{root}/'): path.read_bytes() for path in root.rglob('*') if path.is_file()}


def copy_to_folder(root, folder, method):
    target = granular.Path(folder) / 'copy'
    getattr(root, method)(target)
    return tree(target)


TREE = sorted([*FILES, 'a', 'a/b'])
# Each operation, given the place through the proxy and a local folder, and what it must leave or return.
READS = {
    'stat': (lambda root, folder: (root / 'a' / '1').stat().size, 3),
    'stat of a folder': (lambda root, folder: (root / 'a').stat().is_dir, True),
    'exists': (lambda root, folder: [(root / name).exists() for name in ('c', 'a', 'none')], [True, True, False]),
    'iterdir': (lambda root, folder: names((root / 'a').iterdir(), root), ['a/1', 'a/2', 'a/3', 'a/b']),
    'glob': (lambda root, folder: names(root.glob('a/*'), root), ['a/1', 'a/2', 'a/3', 'a/b']),
    'rglob': (lambda root, folder: names(root.rglob('*'), root), TREE),
    'copy to a disk': (lambda root, folder: copy_to_folder(root, folder, 'copy'), FILES),
    'read': (lambda root, folder: (root / 'a' / 'b' / '4').read_bytes(), b'four'),
}
COPIED = {**FILES, **{f'd{name[1:]}': data for name, data in FILES.items() if name.startswith('a')}}
WRITES = {
    'copy': (lambda root, folder: (root / 'a').copy(root / 'd'), COPIED),
    'rmtree': (lambda root, folder: (root / 'a').rmtree(), {'c': b'five'}),
    'unlink': (lambda root, folder: (root / 'c').unlink(), {k: v for k, v in FILES.items() if k != 'c'}),
    'write': (lambda root, folder: (root / 'new').write_bytes(SMALL), {**FILES, 'new': SMALL}),
    'write in parts': (lambda root, folder: (root / 'new').write_bytes(LARGE), {**FILES, 'new': LARGE}),
    'publish': (lambda root, folder: publish(root / 'new', SMALL), {**FILES, 'new': SMALL}),
    'publish in parts': (lambda root, folder: publish(root / 'new', LARGE), {**FILES, 'new': LARGE}),
}  # fmt: skip
PASSING = (
    'page empty', 'page html', 'page json', 'page xml', 'after page empty', 'after page html', 'after page json', 'cut',
    'half', 'reset', 'after reset', 'status 500', 'after status 503', 'status 429',
)  # fmt: skip


def fail_request(number, fault):
    """Return a plan that fails the request of that number."""
    count = itertools.count()
    return lambda call: fault if next(count) == number else ''


# A status 404 that is not the store's own, of which reads of data and parts of uploads cannot be told apart.
MISSING = ('status 404', 'after status 404')
UNCHECKED = ('read', 'copy to a disk', 'write in parts', 'publish in parts')


@pytest.mark.parametrize('name', [*READS, *WRITES])
def test_operations_survive_one_fault_of_any_request(proxy, fakegcs, monkeypatch, tmp_path, name):
    monkeypatch.setattr('granular.aio.stores.gcs.store.PAGE', 2)  # otherwise a second page needs 1,001 objects
    call, expected = (READS | WRITES)[name]
    direct = write_files(fakegcs.place())
    call(proxied(proxy, direct), tmp_path / 'none')
    faults = PASSING if name in UNCHECKED else PASSING + MISSING
    for number, (position, fault) in enumerate(cover([range(len(proxy.calls))], [faults])):
        direct = direct if name in READS else write_files(fakegcs.place())
        proxy.plan, proxy.faults = fail_request(position, fault), []
        result = call(proxied(proxy, direct), tmp_path / str(number))
        assert proxy.faults == [fault]
        assert (result if name in READS else tree(direct)) == expected, (position, fault)


# Families of faults that stay.
UNUSABLE = ('page empty', 'page html', 'page json', 'after page html', 'cut')
STAYING = (UNUSABLE, ('reset', 'after reset', 'status 500'), ('status 404', 'redirect'), ('hang',))


@pytest.mark.parametrize(('name', 'fault'), cover([list(READS), list(WRITES)], STAYING))
def test_lasting_fault_is_an_error_and_loses_nothing(proxy, fakegcs, tmp_path, other_host, name, fault):
    call, expected = (READS | WRITES)[name]
    direct = write_files(fakegcs.place())
    root = proxied(proxy, direct, SILENT if fault == 'hang' else LASTING)
    word = f'redirect {other_host.endpoint}/x' if fault == 'redirect' else fault
    proxy.plan = lambda call: word
    began = time.monotonic()
    error = NotFoundError if (name, fault) == ('read', 'status 404') else StoreError
    with pytest.raises(error) as caught:
        call(root, tmp_path)
    assert time.monotonic() - began < BOUND
    assert str(root.parent) in str(caught.value)
    assert set(FILES.items()) <= set(tree(direct).items()) or name in ('rmtree', 'unlink')


@pytest.fixture(scope='module')
def large_folder(fakegcs):
    """A folder of more objects than a page of a listing holds."""
    root, count = fakegcs.place(), 1003

    async def main():
        async def write(first):
            for number in range(first, count, 16):
                await (granular.aio.Path(root) / f'{number:05}').write_bytes(b'x')

        await asyncio.gather(*(write(first) for first in range(16)))

    asyncio.run(main())
    return root


@pytest.mark.parametrize('fault', ['page empty', 'page html', 'page json', 'cut'])
def test_broken_second_page_is_not_the_end_of_a_listing(proxy, large_folder, fault):
    root = proxied(proxy, large_folder)
    assert len(list(root.iterdir())) == len(list(root.rglob('*'))) == 1003
    proxy.plan = lambda call: fault if 'pageToken' in call.query else ''
    for entries in (root.iterdir(), root.rglob('*')):
        with pytest.raises(BadReplyError):
            list(entries)


@pytest.mark.parametrize(
    ('name', 'fault'),
    cover(
        [['iterdir', 'glob', 'rglob'], ['copy', 'copy to a disk', 'rmtree']],
        [['page empty', 'page html', 'page json', 'cut']],
    ),
)
def test_no_operation_takes_a_broken_page_for_the_last(proxy, fakegcs, monkeypatch, tmp_path, name, fault):
    monkeypatch.setattr('granular.aio.stores.gcs.store.PAGE', 2)  # otherwise a second page needs 1,001 objects
    root = proxied(proxy, write_files(fakegcs.place()))
    proxy.plan = lambda call: fault if 'pageToken' in call.query else ''
    with pytest.raises(BadReplyError):
        (READS | WRITES)[name][0](root, tmp_path)


def edit_pages(change):
    """Return an edit of listing pages."""

    def edit(method, target, reply):
        if method == 'GET' and '/o?' in target:
            page = contents(reply)
            change(page)
            return rewritten(200, page)(method, target, reply)
        return reply

    return edit


@pytest.mark.parametrize('token', ['the same', 'another'])
def test_endlessly_repeated_page_is_an_error(proxy, root, monkeypatch, token):
    monkeypatch.setattr(listing, 'EMPTY_PAGES', 50)  # otherwise thousands of pages are requested
    write_files(root)
    count = itertools.count()
    proxy.edit = edit_pages(lambda page: page.update(nextPageToken='x' if token == 'the same' else f'x{next(count)}'))
    for call in (lambda: list(root.iterdir()), lambda: list(root.rglob('*')), root.rmtree):
        proxy.calls.clear()
        with pytest.raises(BadReplyError):
            call()
        assert len(proxy.calls) < 100


@pytest.mark.parametrize(
    'change',
    [lambda page: page['items'][0].update(name='elsewhere'), lambda page: page['items'][0].update(size='many'),
     lambda page: page['items'][0].update(generation=None), lambda page: page['items'].reverse(),
     lambda page: page.update(nextPageToken=7), lambda page: page.update(items='none'), lambda page: page.clear(),
     lambda page: page.update(kind='storage#object')],
)  # fmt: skip
def test_invalid_fields_of_a_listing_are_errors(proxy, root, change):
    write_files(root)
    proxy.edit = edit_pages(change)
    with pytest.raises(BadReplyError, match=str(root.store.root)):
        list(root.rglob('*'))


def test_objects_written_during_rmtree_are_deleted_too(proxy, fakegcs):
    direct = write_files(fakegcs.place())
    root = proxied(proxy, direct)
    late = iter(range(3))

    def plan(call):
        if (
            call.method == 'GET'
            and call.query.get('prefix', '').endswith('/a/')
            and (number := next(late, None)) is not None
        ):
            threading.Thread(target=(direct / 'a' / f'late{number}').write_bytes, args=(b'x',)).start()
            while not (direct / 'a' / f'late{number}').exists():
                time.sleep(0.001)
        return ''

    proxy.plan = plan
    (root / 'a').rmtree()
    assert tree(direct) == {'c': b'five'}


# --- resumable uploads


def fail_part(part, fault, again=()):
    """Return a plan that fails a part of an upload, and then the following requests."""
    faults = iter([fault, *again])
    parts = itertools.count()
    fail_request = False

    def plan(call):
        nonlocal fail_request
        if 'upload_id' not in call.query or call.method != 'PUT':
            return ''
        fail_request = fail_request or next(parts) == part
        return next(faults, '') if fail_request else ''

    return plan


INTERRUPTIONS = (
    ['reset'], ['after reset'], ['after reset', 'reset', 'after reset'], ['dropped'], ['after status 503'],
    ['status 500', 'status 503'], ['page empty'], ['page html'], ['after page json', '', 'after page html'],
    ['status 308'], ['status 308', 'status 308'], ['after status 308'],
)  # fmt: skip


@pytest.mark.parametrize(
    ('upload', 'faults'), cover([[(0, False), (2, False)], [(1, True), (2, True)]], [INTERRUPTIONS]), ids=str
)
def test_interrupted_uploads_resume(proxy, root, upload, faults):
    part, new = upload
    proxy.plan = fail_part(part, faults[0], faults[1:])
    (publish if new else Path.write_bytes)(root / 'x', LARGE)
    assert (root / 'x').read_bytes() == LARGE
    assert proxy.faults


@pytest.mark.parametrize('interrupted', ['cancelled', 'refused'])
async def test_file_with_a_failed_write_is_not_published(proxy, root, interrupted):
    path = aio.Path(root) / 'x'
    await path.write_bytes(SMALL)
    file = await path.open('wb')
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def plan(call):
        loop.call_soon_threadsafe(began.set)
        return 'hang' if interrupted == 'cancelled' else 'status 403'

    proxy.plan = plan
    if interrupted == 'cancelled':
        write = asyncio.ensure_future(file.write(LARGE))
        await began.wait()
        write.cancel()
        with pytest.raises(asyncio.CancelledError):
            await write
    else:
        with pytest.raises(AccessDeniedError):
            await file.write(LARGE)
    proxy.plan = lambda call: ''
    with pytest.raises(ClosedError, match='a write failed before'):
        await file.write(LARGE)
    with pytest.raises(ClosedError, match='not published'):
        await file.aclose()
    assert await path.read_bytes() == SMALL


def test_upload_resumes_with_a_renewed_token(proxy, fakegcs, tmp_path):
    tokens = []
    expired = iter(['', 'status 401'])

    def plan(call):
        tokens.append(call.headers['authorization'])
        return next(expired, '') if call.method == 'PUT' else ''

    proxy.plan = plan
    with FaultServer() as server:
        options = {'endpoint_url': proxy.endpoint, 'token': google_key(tmp_path, server), 'project': 'test'}
        path = Path(str(fakegcs.place() / 'x'), config=CONFIG, **options)
        path.write_bytes(LARGE)
        assert path.read_bytes() == LARGE
        assert server.tokens == 2
    assert proxy.faults == ['status 401']
    assert sorted(set(tokens)) == ['Bearer token-1', 'Bearer token-2']


def edit_parts(change, until=10**9):
    """Return an edit of the replies to upload parts."""
    count = itertools.count()

    def edit(method, target, reply):
        if method == 'PUT' and 'upload_id' in target and next(count) < until:
            return change(method, target, reply)
        return reply

    return edit


@pytest.mark.parametrize(
    ('change', 'error'),
    [(rewritten(308), StoreError), (rewritten(308, Range='bytes=0-262143'), StoreError),
     (rewritten(308, Range='bytes=0-x'), BadReplyError), (rewritten(308, Range='5'), BadReplyError),
     (rewritten(308, Range='bytes=0-99999999'), BadReplyError), (rewritten(200, {}), BadReplyError),
     (rewritten(200), BadReplyError), (rewritten(404), StoreError), (rewritten(410), StoreError),
     (rewritten(412), StoreError), (rewritten(400), StoreError)],
    ids=['nothing', 'no progress', 'no number', 'no range', 'too much', 'no object', 'empty', 'missing', 'gone',
         'taken', 'refused'],
)  # fmt: skip
@pytest.mark.parametrize('new', [False, True])
def test_uploads_without_progress_are_errors(proxy, fakegcs, root, change, error, new):
    forward = proxy.continue_upload

    async def lost(method, *args):
        return await forward(method, *args) if method == 'DELETE' else b'HTTP/1.1 500 X\r\n\r\n'

    proxy.continue_upload = lost  # nothing arrives, whatever the replies say
    proxy.edit = edit_parts(change)
    with pytest.raises(error, match=f'{root}/x'):
        (publish if new else Path.write_bytes)(root / 'x', LARGE)
    assert len(proxy.calls) < 40
    assert not (root / 'x').exists()
    assert not proxy.sessions


@pytest.mark.parametrize(
    'change', [rewritten(308), rewritten(308, Range='bytes=0-x'), rewritten(200), rewritten(200, {'error': {}}),
               rewritten(404), rewritten(410), rewritten(412), rewritten(500)],
    ids=['308', 'no number', 'empty', 'error', '404', '410', '412', '500'],
)  # fmt: skip
def test_complete_upload_succeeds_despite_wrong_replies(proxy, root, change):
    """The last part is stored, but each reply to its upload denies it."""

    def edit(method, target, reply):
        complete = any(session.reply for session in proxy.sessions.values())
        return change(method, target, reply) if complete and 'upload_id' in target else reply

    proxy.edit = edit
    publish(root / 'x', LARGE)
    assert (root / 'x').read_bytes() == LARGE


@pytest.mark.parametrize(('field', 'size'), cover([['size', 'crc32c', 'name', 'generation', 'kind']], [list(CONTENT)]))
def test_metadata_of_a_new_object_must_match(proxy, root, field, size):
    data = CONTENT[size]

    def edit(method, target, reply):
        if (
            ' 200 ' in reply[:15].decode()
            and method in ('PUT', 'POST', 'GET')
            and '"storage#object"' in reply.decode('latin-1')
        ):
            document = contents(reply)
            document[field] = {'size': '3', 'crc32c': 'AAAAAA=='}.get(field, 'x')
            return rewritten(200, document)(method, target, reply)
        return reply

    proxy.edit = edit
    with pytest.raises(BadReplyError, match=f'{root}/x'):
        (root / 'x').write_bytes(data)
    proxy.edit = lambda method, target, reply: reply


@pytest.mark.parametrize('data', [SMALL, LARGE], ids=['one request', 'parts'])
def test_byte_changed_in_transit_is_an_error(proxy, fakegcs, data):
    """The emulator verifies no checksums, so that granular must."""
    direct = fakegcs.place()
    root = proxied(proxy, direct)

    def damage(request):
        at = len(request) - 44
        if request.startswith(b'POST /upload') and b'uploadType=multipart' in request[:200]:
            return request[:at] + bytes([request[at] ^ 1]) + request[at + 1 :]
        return request

    proxy.damage = damage
    with pytest.raises(BadReplyError, match='crc32c'):
        (root / 'x').write_bytes(data)
    # It did not stay there either.
    assert not (direct / 'x').exists()


def test_attempts_without_progress_are_bounded(proxy, root):
    proxy.edit = edit_parts(rewritten(308))
    with pytest.raises(StoreError, match='no progress after 4 attempts'):
        (root / 'x').write_bytes(LARGE)
    assert len(proxy.calls) < 20


async def test_large_write_takes_the_memory_of_a_few_parts(fakegcs):
    file = granular.aio.Path(str(fakegcs.place() / 'x'), config=CONFIG, **fakegcs.options)
    data = random.Random(0).randbytes(64 * PART + 1)
    tracemalloc.start()
    try:
        await file.write_bytes(data)
        assert tracemalloc.get_traced_memory()[1] < 16 * PART
    finally:
        tracemalloc.stop()
    assert await file.read_bytes() == data


def test_upload_without_a_location_is_an_error(proxy, root):
    def edit(method, target, reply):
        return rewritten(200)(method, target, reply) if 'uploadType=resumable' in target else reply

    proxy.edit = edit
    with pytest.raises(BadReplyError, match='Location'):
        (root / 'x').write_bytes(LARGE)
    assert not (root / 'x').exists()


# --- publishing


@pytest.mark.parametrize(
    ('size', 'fault'),
    cover([list(CONTENT)], [['after reset', 'after page html', 'after page empty', 'after status 503']]),
)
def test_publication_with_a_lost_reply_succeeds_once(proxy, fakegcs, size, fault):
    data = CONTENT[size]
    direct = fakegcs.place()
    root = proxied(proxy, direct)

    def publishing(call):
        return call.query.get('uploadType') == 'multipart' or call.headers.get('content-range', '').endswith(
            f'/{len(data)}'
        )

    lost = iter([fault])
    proxy.plan = lambda call: next(lost, '') if publishing(call) else ''
    publish(root / 'x', data)
    assert proxy.faults == [fault]
    assert (direct / 'x').read_bytes() == data
    version = (direct / 'x').stat().version
    # Another writer of the same bytes is another writer.
    with pytest.raises(AlreadyExistsError, match=f'{root}/x'):
        publish(root / 'x', data)
    lost = iter([fault])
    with pytest.raises(AlreadyExistsError, match=f'{root}/x'):
        publish(root / 'x', data)
    assert (direct / 'x').stat().version == version


@pytest.mark.parametrize('data', [SMALL, LARGE], ids=['one request', 'parts'])
def test_one_of_several_racing_writers_succeeds(proxy, fakegcs, data):
    direct = fakegcs.place()
    started = threading.Barrier(4)
    done = []

    def write(number):
        content = bytes([number]) + data
        started.wait(60)
        with contextlib.suppress(AlreadyExistsError):
            publish(proxied(proxy, direct) / 'x', content)
            done.append(content)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 1
    assert (direct / 'x').read_bytes() == done[0]


def test_aborted_publication_keeps_the_object_of_another_writer(proxy, fakegcs):
    direct = fakegcs.place()
    root = proxied(proxy, direct)

    def plan(call):
        if call.headers.get('content-range', '').endswith(f'/{len(LARGE)}'):
            if not (direct / 'x').exists():
                (direct / 'x').write_bytes(b'another')
            return 'reset'
        return ''

    proxy.plan = plan
    with pytest.raises(GranularError):
        publish(root / 'x', LARGE)
    assert (direct / 'x').read_bytes() == b'another'


# --- copies and buckets


def test_copy_in_several_steps_sends_its_token(proxy, root):
    write_files(root)
    tokens = []

    def edit(method, target, reply):
        if '/rewriteTo/' not in target:
            return reply
        tokens.append(target.partition('rewriteToken=')[2])
        if len(tokens) < 3:
            document = {'kind': 'storage#rewriteResponse', 'totalBytesRewritten': str(len(tokens)), 'done': False}
            return rewritten(200, {**document, 'rewriteToken': f'token{len(tokens)}'})(method, target, reply)
        return reply

    proxy.edit = edit
    (root / 'c').copy(root / 'd')
    assert tokens == ['', 'token1', 'token2']
    assert (root / 'd').read_bytes() == b'five'


def test_copy_without_progress_is_an_error(proxy, root):
    write_files(root)
    document = {'kind': 'storage#rewriteResponse', 'totalBytesRewritten': '1', 'done': False, 'rewriteToken': 'x'}
    proxy.edit = lambda method, target, reply: (
        rewritten(200, document)(method, target, reply) if '/rewriteTo/' in target else reply
    )
    with pytest.raises(StoreError, match='no progress after'):
        (root / 'c').copy(root / 'd')
    assert len(proxy.calls) < 30


def test_object_replaced_while_it_is_copied_is_an_error(proxy, fakegcs):
    direct = write_files(fakegcs.place())

    def plan(call):
        if '/rewriteTo/' in call.path:
            (direct / 'c').write_bytes(b'replaced')
        return ''

    proxy.plan = plan
    root = proxied(proxy, direct)
    with pytest.raises(ObjectChangedError, match=f'{root}/c'):
        (root / 'c').copy(root / 'd')
    assert not (direct / 'd').exists()


@pytest.mark.parametrize('fault', list(itertools.chain(*STAYING)))
def test_failed_bucket_creation_is_an_error(proxy, fakegcs, other_host, fault):
    options = {**fakegcs.options, 'endpoint_url': proxy.endpoint}
    bucket = granular.Path(f'gs://test-unmade-{time.time_ns()}', config=SILENT, **options)
    word = f'redirect {other_host.endpoint}/x' if fault == 'redirect' else fault
    proxy.plan = lambda call: word
    for exist_ok in (False, True):
        with pytest.raises(StoreError, match=str(bucket)):
            bucket.mkdir(exist_ok=exist_ok)


@pytest.mark.parametrize('fault', ['after reset', 'after page html', 'after status 503', 'reset', 'page empty'])
@pytest.mark.parametrize('exist_ok', [False, True])
def test_bucket_is_created_despite_a_lost_reply(proxy, fakegcs, fault, exist_ok):
    options = {**fakegcs.options, 'endpoint_url': proxy.endpoint}
    bucket = granular.Path(f'gs://test-made-{time.time_ns()}', config=CONFIG, **options)
    lost = iter([fault])
    proxy.plan = lambda call: next(lost, '') if call.method == 'POST' else ''
    bucket.mkdir(exist_ok=exist_ok)
    assert proxy.faults == [fault]
    (bucket / 'x').write_bytes(b'1')
    with pytest.raises(AlreadyExistsError, match='exists already'):
        bucket.mkdir()


def test_missing_bucket_is_named_in_the_error(fakegcs):
    root = granular.Path('gs://test-none-at-all/x', config=CONFIG, **fakegcs.options)
    for call in (
        root.stat, root.read_bytes, lambda: list(root.iterdir()), root.rmtree,
        lambda: root.write_bytes(SMALL), lambda: root.write_bytes(LARGE), lambda: publish(root, SMALL),
    ):  # fmt: skip
        with pytest.raises(NotFoundError, match='gs://test-none-at-all'):
            call()
    root.unlink(missing_ok=True)


def test_unknown_options_are_named_in_the_error(fakegcs):
    with pytest.raises(
        InvalidArgumentError, match=r"unknown options \['block_size', 'retries'\]: expected some of ..anon', "
    ):
        granular.Path('gs://bucket/x', block_size=5, retries=1, **fakegcs.options)


def test_requester_pays_project_is_sent_with_every_request(proxy, fakegcs):
    root = proxied(proxy, write_files(fakegcs.place()))
    options = {**root.store.options, 'requester_pays': 'payer'}
    path = granular.Path(str(root), config=CONFIG, **options)
    queries = []
    proxy.plan = lambda call: queries.append(call.query.get('userProject')) or ''
    assert (path / 'c').read_bytes() == b'five'
    assert names(path.rglob('*'), path) == TREE
    (path / 'new').write_bytes(SMALL)
    (path / 'new').copy(path / 'other')
    (path / 'new').unlink()
    assert set(queries) == {'payer'}
