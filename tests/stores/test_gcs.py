"""Google Cloud Storage by hostile answers: each operation gives the right result or an error, in bounded time."""

import asyncio
import contextlib
import itertools
import threading
import time

import pytest

import granular
from granular import Path, aio
from granular.aio.runtime.bridge import run
from granular.aio.runtime.loops import ensure_event_loop
from granular.aio.runtime.tasks import gather
from granular.aio.stores.gcs import listing as gcslisting
from granular.aio.stores.gcs import store as gcs
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

CONFIG = granular.IOConfig(
    backoff=0.001, backoff_cap=0.01, attempts=4, part_size=5 << 20, first_byte_timeout=20, read_timeout=20
)
SILENT = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=2, first_byte_timeout=0.1, read_timeout=0.1)
SMALL, LARGE = b'content', bytes(range(256)) * (11 << 12)  # one request, three parts
FILES = {'a/1': b'one', 'a/2': b'two', 'a/3': b'three', 'a/b/4': b'four', 'c': b'five'}
BOUND = 20.0  # seconds


@pytest.fixture(scope='module')
def other():
    """A host that no request may reach."""
    with FaultServer() as server:
        yield server
        assert server.connections == 0


@pytest.fixture
def proxy(fakegcs):
    with GCSFaultProxy(fakegcs.endpoint) as proxy:
        yield proxy


@pytest.fixture
def place(proxy, fakegcs):
    return through(proxy, fakegcs.place())


def through(proxy, place, config=CONFIG):
    """A place in the emulator, reached through the proxy."""
    options = {**place.store.options, 'endpoint_url': proxy.endpoint}
    return granular.Path(str(place), config=config, **options)


def filled(place):
    for name, data in FILES.items():
        (place / name).write_bytes(data)
    return place


def names(paths, place):
    return sorted(str(path).removeprefix(f'{place}/') for path in paths)


def tree(place):
    return {str(path).removeprefix(f'{place}/'): path.read_bytes() for path in place.rglob('*') if path.is_file()}


def local(place, folder, method):
    target = granular.Path(folder) / 'copy'
    getattr(place, method)(target)
    return tree(target)


TREE = sorted([*FILES, 'a', 'a/b'])
# Each operation, given the place through the proxy and a local folder, and what it must leave or return.
READS = {
    'stat': (lambda place, folder: (place / 'a' / '1').stat().size, 3),
    'stat of a folder': (lambda place, folder: (place / 'a').stat().is_dir, True),
    'exists': (lambda place, folder: [(place / name).exists() for name in ('c', 'a', 'none')], [True, True, False]),
    'iterdir': (lambda place, folder: names((place / 'a').iterdir(), place), ['a/1', 'a/2', 'a/3', 'a/b']),
    'glob': (lambda place, folder: names(place.glob('a/*'), place), ['a/1', 'a/2', 'a/3', 'a/b']),
    'rglob': (lambda place, folder: names(place.rglob('*'), place), TREE),
    'copy to a disk': (lambda place, folder: local(place, folder, 'copy'), FILES),
    'read': (lambda place, folder: (place / 'a' / 'b' / '4').read_bytes(), b'four'),
}
COPIED = {**FILES, **{f'd{name[1:]}': data for name, data in FILES.items() if name.startswith('a')}}
WRITES = {
    'copy': (lambda place, folder: (place / 'a').copy(place / 'd'), COPIED),
    'rmtree': (lambda place, folder: (place / 'a').rmtree(), {'c': b'five'}),
    'unlink': (lambda place, folder: (place / 'c').unlink(), {k: v for k, v in FILES.items() if k != 'c'}),
    'write': (lambda place, folder: (place / 'new').write_bytes(SMALL), {**FILES, 'new': SMALL}),
    'write in parts': (lambda place, folder: (place / 'new').write_bytes(LARGE), {**FILES, 'new': LARGE}),
    'publish': (lambda place, folder: publish(place / 'new', SMALL), {**FILES, 'new': SMALL}),
    'publish in parts': (lambda place, folder: publish(place / 'new', LARGE), {**FILES, 'new': LARGE}),
}  # fmt: skip
PASSING = (
    'page empty', 'page html', 'page json', 'page xml', 'after page empty', 'after page html', 'after page json', 'cut',
    'half', 'reset', 'after reset', 'status 500', 'after status 503', 'status 429',
)  # fmt: skip


def publish(path, data):
    """Write a new object, which another writer may not have written."""

    async def write():
        await ensure_event_loop()
        writer = await path.store.open_writer(path.aio.key, True)
        try:
            await writer.write(data)
            await writer.close()
        except BaseException:
            await writer.abort()
            raise

    run(write())


def hit(number, fault):
    """A plan by which the request of that number fails."""
    count = itertools.count()
    return lambda call: fault if next(count) == number else ''


# A status 404 that is not the store's own, of which reads of data and parts of uploads cannot be told apart.
MISSING = ('status 404', 'after status 404')
UNCHECKED = ('read', 'copy to a disk', 'write in parts', 'publish in parts')


def turns(requests, faults):
    """Positions and faults: each position, and each fault, comes at least once."""
    for turn in range(max(requests, len(faults))):
        yield turn % requests, faults[(turn + turn // requests) % len(faults)]


@pytest.mark.parametrize('name', [*READS, *WRITES])
def test_operations_survive_a_fault_of_any_request(proxy, fakegcs, monkeypatch, tmp_path, name):
    monkeypatch.setattr(gcs, '_PAGE', 2)
    call, expected = (READS | WRITES)[name]
    direct = filled(fakegcs.place())
    call(through(proxy, direct), tmp_path / 'none')
    faults = PASSING if name in UNCHECKED else PASSING + MISSING
    for number, (position, fault) in enumerate(turns(len(proxy.calls), faults)):
        direct = direct if name in READS else filled(fakegcs.place())
        proxy.plan, proxy.faults = hit(position, fault), []
        result = call(through(proxy, direct), tmp_path / str(number))
        assert proxy.faults == [fault]
        assert (result if name in READS else tree(direct)) == expected, (position, fault)


STAYING = (
    'page empty',
    'page html',
    'page json',
    'after page html',
    'cut',
    'reset',
    'after reset',
    'status 500',
    'status 404',
    'redirect',
    'hang',
)


@pytest.mark.parametrize('fault', STAYING)
@pytest.mark.parametrize('name', [*READS, *WRITES])
def test_a_fault_that_stays_is_an_error_or_does_no_harm(proxy, fakegcs, tmp_path, other, name, fault):
    call, expected = (READS | WRITES)[name]
    direct = filled(fakegcs.place())
    place = through(proxy, direct, SILENT if fault == 'hang' else CONFIG)
    word = f'redirect {other.endpoint}/x' if fault == 'redirect' else fault
    proxy.plan = lambda call: word
    began = time.monotonic()
    error = NotFoundError if (name, fault) == ('read', 'status 404') else StoreError
    with pytest.raises(error) as caught:
        call(place, tmp_path)
    assert time.monotonic() - began < BOUND
    assert str(place.parent) in str(caught.value)
    assert set(FILES.items()) <= set(tree(direct).items()) or name in ('rmtree', 'unlink')


@pytest.fixture(scope='module')
def many(fakegcs):
    """A folder of more objects than a page of a listing holds."""
    place, count = fakegcs.place(), 1003

    async def main():
        async def write(first):
            for number in range(first, count, 16):
                await (granular.aio.Path(place) / f'{number:05}').write_bytes(b'x')

        await gather([write(first) for first in range(16)])

    asyncio.run(main())
    return place


@pytest.mark.parametrize('fault', ['page empty', 'page html', 'page json', 'cut'])
def test_the_second_page_is_not_taken_for_the_end(proxy, many, fault):
    place = through(proxy, many)
    assert len(list(place.iterdir())) == len(list(place.rglob('*'))) == 1003
    proxy.plan = lambda call: fault if 'pageToken' in call.query else ''
    for listing in (place.iterdir(), place.rglob('*')):
        with pytest.raises(BadReplyError):
            list(listing)


@pytest.mark.parametrize('fault', ['page empty', 'page html', 'page json', 'cut'])
@pytest.mark.parametrize('name', ['iterdir', 'glob', 'rglob', 'copy', 'copy to a disk', 'rmtree'])
def test_no_operation_takes_a_later_page_for_the_end(proxy, fakegcs, monkeypatch, tmp_path, name, fault):
    monkeypatch.setattr(gcs, '_PAGE', 2)
    place = through(proxy, filled(fakegcs.place()))
    proxy.plan = lambda call: fault if 'pageToken' in call.query else ''
    with pytest.raises(BadReplyError):
        (READS | WRITES)[name][0](place, tmp_path)


def edited(change):
    """An edit of the pages of listings."""

    def edit(method, target, reply):
        if method == 'GET' and '/o?' in target:
            page = contents(reply)
            change(page)
            return rewritten(200, page)(method, target, reply)
        return reply

    return edit


@pytest.mark.parametrize('token', ['the same', 'another'])
def test_the_same_page_for_ever_is_an_error(proxy, place, monkeypatch, token):
    monkeypatch.setattr(gcslisting, '_MAX_EMPTY_PAGES', 50)
    filled(place)
    count = itertools.count()
    proxy.edit = edited(lambda page: page.update(nextPageToken='x' if token == 'the same' else f'x{next(count)}'))
    for call in (lambda: list(place.iterdir()), lambda: list(place.rglob('*')), place.rmtree):
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
def test_odd_fields_of_a_listing_are_errors(proxy, place, change):
    filled(place)
    proxy.edit = edited(change)
    with pytest.raises(BadReplyError, match=str(place.store.root)):
        list(place.rglob('*'))


def test_objects_that_appear_while_a_folder_is_deleted_are_deleted_too(proxy, fakegcs):
    direct = filled(fakegcs.place())
    place = through(proxy, direct)
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
    (place / 'a').rmtree()
    assert tree(direct) == {'c': b'five'}


# --- resumable uploads


def during(part, fault, again=()):
    """A plan by which a part of an upload fails, and the requests after it as given."""
    faults = iter([fault, *again])
    parts = itertools.count()
    hit = False

    def plan(call):
        nonlocal hit
        if 'upload_id' not in call.query or call.method != 'PUT':
            return ''
        hit = hit or next(parts) == part
        return next(faults, '') if hit else ''

    return plan


@pytest.mark.parametrize(('part', 'new'), [(0, False), (1, True), (2, False), (2, True)])
@pytest.mark.parametrize(
    'faults',
    [['reset'], ['after reset'], ['after reset', 'reset', 'after reset'], ['dropped'], ['after status 503'],
     ['status 500', 'status 503'], ['page empty'], ['page html'], ['after page json', '', 'after page html'],
     ['status 308'], ['status 308', 'status 308'], ['after status 308']],
    ids=str,
)  # fmt: skip
def test_uploads_go_on_where_they_broke_off(proxy, place, faults, part, new):
    proxy.plan = during(part, faults[0], faults[1:])
    (publish if new else Path.write_bytes)(place / 'x', LARGE)
    assert (place / 'x').read_bytes() == LARGE
    assert proxy.faults


@pytest.mark.parametrize('interrupted', ['cancelled', 'refused'])
async def test_a_file_whose_write_did_not_end_is_not_published(proxy, place, interrupted):
    path = aio.Path(place) / 'x'
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


def test_an_upload_goes_on_with_a_new_token(proxy, fakegcs, tmp_path):
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


def parts_edited(change, until=10**9):
    """An edit of the replies to parts."""
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
def test_uploads_that_do_not_go_on_are_errors(proxy, fakegcs, place, change, error, new):
    forward = proxy._continue

    async def lost(method, *args):
        return await forward(method, *args) if method == 'DELETE' else b'HTTP/1.1 500 X\r\n\r\n'

    proxy._continue = lost  # nothing arrives, whatever the replies say
    proxy.edit = parts_edited(change)
    with pytest.raises(error, match=f'{place}/x'):
        (publish if new else Path.write_bytes)(place / 'x', LARGE)
    assert len(proxy.calls) < 40
    assert not (place / 'x').exists()
    assert not proxy.sessions


@pytest.mark.parametrize(
    'change', [rewritten(308), rewritten(308, Range='bytes=0-x'), rewritten(200), rewritten(200, {'error': {}}),
               rewritten(404), rewritten(410), rewritten(412), rewritten(500)],
    ids=['308', 'no number', 'empty', 'error', '404', '410', '412', '500'],
)  # fmt: skip
def test_uploads_that_are_complete_whatever_the_replies_say_are_no_errors(proxy, place, change):
    """The last part is stored, and each reply of its upload says otherwise."""

    def edit(method, target, reply):
        complete = any(session.reply for session in proxy.sessions.values())
        return change(method, target, reply) if complete and 'upload_id' in target else reply

    proxy.edit = edit
    publish(place / 'x', LARGE)
    assert (place / 'x').read_bytes() == LARGE


@pytest.mark.parametrize('data', [SMALL, LARGE], ids=['one request', 'parts'])
@pytest.mark.parametrize('field', ['size', 'crc32c', 'name', 'generation', 'kind'])
def test_what_the_store_says_of_a_new_object_must_agree(proxy, place, data, field):
    def edit(method, target, reply):
        if (
            ' 200 ' in reply[:15].decode()
            and method in ('PUT', 'POST', 'GET')
            and '"storage#object"' in reply.decode('latin-1')
        ):
            said = contents(reply)
            said[field] = {'size': '3', 'crc32c': 'AAAAAA=='}.get(field, 'x')
            return rewritten(200, said)(method, target, reply)
        return reply

    proxy.edit = edit
    with pytest.raises(BadReplyError, match=f'{place}/x'):
        (place / 'x').write_bytes(data)
    proxy.edit = lambda method, target, reply: reply


@pytest.mark.parametrize('data', [SMALL, LARGE], ids=['one request', 'parts'])
def test_a_byte_that_is_lost_on_the_way_is_an_error(proxy, fakegcs, data):
    """Below the checks that the store makes itself: the emulator makes none."""
    direct = fakegcs.place()
    place = through(proxy, direct)

    def damage(request):
        at = len(request) - 44
        if request.startswith(b'POST /upload') and b'uploadType=multipart' in request[:200]:
            return request[:at] + bytes([request[at] ^ 1]) + request[at + 1 :]
        return request

    proxy.damage = damage
    with pytest.raises(BadReplyError, match='crc32c'):
        (place / 'x').write_bytes(data)
    # It did not stay there either.
    assert not (direct / 'x').exists()


def test_many_attempts_without_progress_are_bounded(proxy, place):
    proxy.edit = parts_edited(rewritten(308))
    with pytest.raises(StoreError, match='no progress after 4 attempts'):
        (place / 'x').write_bytes(LARGE)
    assert len(proxy.calls) < 20


def test_an_upload_without_a_place_is_an_error(proxy, place):
    def edit(method, target, reply):
        return rewritten(200)(method, target, reply) if 'uploadType=resumable' in target else reply

    proxy.edit = edit
    with pytest.raises(BadReplyError, match='Location'):
        (place / 'x').write_bytes(LARGE)
    assert not (place / 'x').exists()


# --- publishing


@pytest.mark.parametrize('data', [SMALL, LARGE], ids=['one request', 'parts'])
@pytest.mark.parametrize('fault', ['after reset', 'after page html', 'after page empty', 'after status 503'])
def test_a_publication_whose_reply_is_lost_is_a_success_and_another_is_not(proxy, fakegcs, data, fault):
    direct = fakegcs.place()
    place = through(proxy, direct)

    def publishing(call):
        return call.query.get('uploadType') == 'multipart' or call.headers.get('content-range', '').endswith(
            f'/{len(data)}'
        )

    lost = iter([fault])
    proxy.plan = lambda call: next(lost, '') if publishing(call) else ''
    publish(place / 'x', data)
    assert proxy.faults == [fault]
    assert (direct / 'x').read_bytes() == data
    version = (direct / 'x').stat().version
    # Another writer of the same bytes is another writer.
    with pytest.raises(AlreadyExistsError, match=f'{place}/x'):
        publish(place / 'x', data)
    lost = iter([fault])
    with pytest.raises(AlreadyExistsError, match=f'{place}/x'):
        publish(place / 'x', data)
    assert (direct / 'x').stat().version == version


@pytest.mark.parametrize('data', [SMALL, LARGE], ids=['one request', 'parts'])
def test_of_writers_that_race_for_a_key_one_succeeds(proxy, fakegcs, data):
    direct = fakegcs.place()
    started = threading.Barrier(4)
    done = []

    def write(number):
        mine = bytes([number]) + data
        started.wait(20)
        with contextlib.suppress(AlreadyExistsError):
            publish(through(proxy, direct) / 'x', mine)
            done.append(mine)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(done) == 1
    assert (direct / 'x').read_bytes() == done[0]


def test_aborting_an_ambiguous_publication_leaves_the_object_of_another_writer(proxy, fakegcs):
    direct = fakegcs.place()
    place = through(proxy, direct)

    def plan(call):
        if call.headers.get('content-range', '').endswith(f'/{len(LARGE)}'):
            if not (direct / 'x').exists():
                (direct / 'x').write_bytes(b'another')
            return 'reset'
        return ''

    proxy.plan = plan
    with pytest.raises(GranularError):
        publish(place / 'x', LARGE)
    assert (direct / 'x').read_bytes() == b'another'


# --- copies and buckets


def test_a_copy_in_many_steps_goes_on_with_its_token(proxy, place):
    filled(place)
    tokens = []

    def edit(method, target, reply):
        if '/rewriteTo/' not in target:
            return reply
        tokens.append(target.partition('rewriteToken=')[2])
        if len(tokens) < 3:
            said = {'kind': 'storage#rewriteResponse', 'totalBytesRewritten': str(len(tokens)), 'done': False}
            return rewritten(200, {**said, 'rewriteToken': f'token{len(tokens)}'})(method, target, reply)
        return reply

    proxy.edit = edit
    (place / 'c').copy(place / 'd')
    assert tokens == ['', 'token1', 'token2']
    assert (place / 'd').read_bytes() == b'five'


def test_a_copy_that_makes_no_progress_is_an_error(proxy, place):
    filled(place)
    said = {'kind': 'storage#rewriteResponse', 'totalBytesRewritten': '1', 'done': False, 'rewriteToken': 'x'}
    proxy.edit = lambda method, target, reply: (
        rewritten(200, said)(method, target, reply) if '/rewriteTo/' in target else reply
    )
    with pytest.raises(StoreError, match='no progress after'):
        (place / 'c').copy(place / 'd')
    assert len(proxy.calls) < 30


def test_an_object_that_is_replaced_while_it_is_copied_is_an_error(proxy, fakegcs):
    direct = filled(fakegcs.place())

    def plan(call):
        if '/rewriteTo/' in call.path:
            (direct / 'c').write_bytes(b'replaced')
        return ''

    proxy.plan = plan
    place = through(proxy, direct)
    with pytest.raises(ObjectChangedError, match=f'{place}/c'):
        (place / 'c').copy(place / 'd')
    assert not (direct / 'd').exists()


@pytest.mark.parametrize('fault', STAYING)
def test_a_bucket_that_cannot_be_made_is_an_error(proxy, fakegcs, other, fault):
    options = {**fakegcs.options, 'endpoint_url': proxy.endpoint}
    bucket = granular.Path(f'gs://test-unmade-{time.time_ns()}', config=SILENT, **options)
    word = f'redirect {other.endpoint}/x' if fault == 'redirect' else fault
    proxy.plan = lambda call: word
    for exist_ok in (False, True):
        with pytest.raises(StoreError, match=str(bucket)):
            bucket.mkdir(exist_ok=exist_ok)


@pytest.mark.parametrize('fault', ['after reset', 'after page html', 'after status 503', 'reset', 'page empty'])
def test_a_bucket_is_made_whatever_becomes_of_the_reply(proxy, fakegcs, fault):
    options = {**fakegcs.options, 'endpoint_url': proxy.endpoint}
    bucket = granular.Path(f'gs://test-made-{time.time_ns()}', config=CONFIG, **options)
    lost = iter([fault])
    proxy.plan = lambda call: next(lost, '') if call.method == 'POST' else ''
    bucket.mkdir(exist_ok=True)
    assert proxy.faults == [fault]
    (bucket / 'x').write_bytes(b'1')
    with pytest.raises(AlreadyExistsError, match='exists already'):
        bucket.mkdir()


def test_a_missing_bucket_is_named(fakegcs):
    place = granular.Path('gs://test-none-at-all/x', config=CONFIG, **fakegcs.options)
    for call in (
        place.stat, place.read_bytes, lambda: list(place.iterdir()), place.rmtree,
        lambda: place.write_bytes(SMALL), lambda: place.write_bytes(LARGE), lambda: publish(place, SMALL),
    ):  # fmt: skip
        with pytest.raises(NotFoundError, match='gs://test-none-at-all'):
            call()
    place.unlink(missing_ok=True)


def test_unknown_options_are_named(fakegcs):
    place = granular.Path('gs://bucket/x', block_size=5, retries=1, **fakegcs.options)
    with pytest.raises(
        InvalidArgumentError, match=r"unknown options \['block_size', 'retries'\]: expected some of \['anon', "
    ):
        place.stat()


def test_requests_name_the_project_that_pays(proxy, fakegcs):
    place = through(proxy, filled(fakegcs.place()))
    options = {**place.store.options, 'requester_pays': 'payer'}
    path = granular.Path(str(place), config=CONFIG, **options)
    queries = []
    proxy.plan = lambda call: queries.append(call.query.get('userProject')) or ''
    assert (path / 'c').read_bytes() == b'five'
    assert names(path.rglob('*'), path) == TREE
    (path / 'new').write_bytes(SMALL)
    (path / 'new').copy(path / 'other')
    (path / 'new').unlink()
    assert set(queries) == {'payer'}
