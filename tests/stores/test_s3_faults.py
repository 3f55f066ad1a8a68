"""Every operation on an S3 bucket, under wrong and lost replies.

Each operation gives the correct result, or a granular error, in bounded time. Listings are never short, and objects
that are reported as written or deleted are.
"""

import asyncio
import base64
import contextlib
import dataclasses
import datetime
import functools
import hashlib
import importlib.machinery
import importlib.util
import itertools
import re
import ssl
import subprocess
import sys
import time

import pytest
import trustme

import granular
from granular import aio
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    BadReplyError,
    GranularError,
    InvalidArgumentError,
    MissingExtraError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from granular.formats.checksums import crc32c
from tests.support.amazon import place_regions
from tests.support.credentials import AmazonKeys
from tests.support.s3_faults import Answer, S3Proxy
from tests.support.servers import TLSProxy
from tests.support.small_parts import PART, small_parts, taken_by_moto
from tests.support.tables import cover, each_value, pairwise
from tests.support.uploads import abandon_upload, publish, unfinished_uploads

BOUND = 50.0  # seconds: a reply that hangs takes a minute
USUAL_PARTS = granular.IOConfig(
    backoff=0.001, backoff_cap=0.02, connect_timeout=2.0, first_byte_timeout=5.0, read_timeout=5.0, attempts=4,
    hedge=0.0, part_size=5 << 20,
)  # fmt: skip
QUICK = small_parts(USUAL_PARTS)
TWO_ATTEMPTS = small_parts(dataclasses.replace(USUAL_PARTS, attempts=2, retry_time=0.2))
IMPATIENT = small_parts(
    dataclasses.replace(USUAL_PARTS, attempts=2, retry_time=0.2, first_byte_timeout=0.5, read_timeout=0.5)
)
FILES = {name: name.encode() for name in ('a0', 'a1', 'a2', 'a3', 'sub/b0', 'sub/b1')}
SHARDS = 5
PAGE = 2  # keys: each listing has several pages
LARGE = bytes(i * 7 % 251 for i in range(1 << 16)) * 5  # two small parts
LARGER = LARGE * 17  # two usual parts
COPIED = {'x': b'small', 'y': LARGE}

numbers = itertools.count()


@pytest.fixture(scope='module')
def server(moto):
    with taken_by_moto(), S3Proxy(moto.endpoint, PAGE) as server:
        yield server


@pytest.fixture(scope='module')
def other_host():
    """Another host, which no request may reach."""
    with S3Proxy('http://127.0.0.1:9') as server:
        yield server


@pytest.fixture(autouse=True)
def checksums(monkeypatch):
    """Provide moto with CRC32C: without this package it computes a CRC32."""
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec('crc32c', None))
    monkeypatch.setattr(module, 'crc32c', crc32c, raising=False)
    monkeypatch.setitem(sys.modules, 'crc32c', module)


@pytest.fixture(autouse=True)
def forget_faults(server, other_host):
    yield
    server.settle()
    server.clear()
    server.opaque_etags = server.no_etags = server.aged = False
    assert other_host.kinds == []


@pytest.fixture(scope='module')
def shared(moto):
    """A folder of files that no test changes."""
    return write_files(moto.place())


def write_files(folder):
    for name, data in FILES.items():
        (folder / 'in' / name).write_bytes(data)
    with granular.ShardedDatasetWriter(
        folder / 'shards', {'n': 'int'}, granular.encoders, 1, layout='columns'
    ) as writer:
        for i in range(SHARDS):
            writer.append({'n': i})
    return folder


class Case:
    """A folder, seen through the fault proxy and directly.

    Args:
      secret: of a client of its own.
      operation: the operation of the case; operations that only read share files, others have their own.
    """

    def __init__(self, server, moto, shared, tmp_path, secret, operation, config=QUICK):
        self.server, self.tmp_path = server, tmp_path / str(next(numbers))
        self.tmp_path.mkdir()
        self.direct = moto.place()
        self.files = FILES if operation is removing else {name: FILES[name] for name in ('a0', 'a1')}
        if operation in CHANGING:
            for name, data in self.files.items():
                (self.direct / 'in' / name).write_bytes(data)
        options = {'endpoint_url': server.endpoint, 'key': 'KEY', 'secret': secret, 'token': 'TOKEN', 'config': config}
        self.options = options
        self.root = granular.Path(str(self.direct), **options)
        folder = self.direct if operation in CHANGING else shared
        self.folder = granular.Path(str(folder), **options) / ('shards' if operation is opening_shards else 'in')
        server.kinds.clear()
        server.requests.clear()

    def reopen(self, **options):
        """Replace the options of the folder."""
        self.options = options
        self.root, self.folder = (granular.Path(str(path), **options) for path in (self.root, self.folder))


def contents(root):
    """Return the files of a folder by its listing."""
    return {
        str((folder / name).relative_to(root)): (folder / name).read_bytes()
        for folder, _, names in root.walk()
        for name in names
    }


def local_contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob('*') if file.is_file()}


def relative(case, paths):
    return sorted(str(path.relative_to(case.folder)) for path in paths)


# --- the operations: each is carried out and then verified


def stat(case):
    assert (case.folder / 'a1').stat().size == len(FILES['a1'])


def stat_of_a_folder(case):
    assert case.folder.stat().is_dir


def exists(case):
    assert (case.folder / 'a1').exists()
    assert not (case.folder / 'none').exists()


def listing(case):
    assert relative(case, case.folder.iterdir()) == ['a0', 'a1', 'a2', 'a3', 'sub']


def globbing(case):
    assert relative(case, case.folder.glob('s*/b*')) == ['sub/b0', 'sub/b1']


def globbing_all(case):
    assert relative(case, case.folder.rglob('*')) == sorted([*FILES, 'sub'])


def walking(case):
    assert [(len(folders), len(files)) for _, folders, files in case.folder.walk()] == [(1, 4), (0, 2)]


def opening_shards(case):
    with granular.ShardedDatasetReader(case.folder, granular.decoders) as reader:
        assert [point['n'] for point in reader] == list(range(SHARDS))


def copying(case):
    case.folder.copy(case.root / 'copy')
    assert contents(case.direct / 'copy') == FILES


def copying_here(case):
    target = case.tmp_path / 'copy'
    granular.copy_to_local(case.folder, target)
    copied = local_contents(target)
    copied.pop('.granular-copy.json')
    assert copied == FILES


def copying_there(case):
    (case.tmp_path / 'from').mkdir(exist_ok=True)
    for name, data in COPIED.items():
        (case.tmp_path / 'from' / name).write_bytes(data)
    granular.Path(case.tmp_path / 'from').copy(case.root / 'copy')
    assert contents(case.direct / 'copy') == COPIED


def removing(case):
    case.folder.rmtree()
    assert not (case.direct / 'in').exists()


def unlinking(case):
    (case.folder / 'a1').unlink()
    assert not (case.direct / 'in' / 'a1').exists()
    assert (case.direct / 'in' / 'a0').exists()


def writing(case):
    (case.folder / 'a1').write_bytes(b'another')
    assert (case.direct / 'in' / 'a1').read_bytes() == b'another'


def writing_in_parts(case):
    (case.folder / 'a1').write_bytes(LARGE)
    assert (case.direct / 'in' / 'a1').read_bytes() == LARGE


def publishing(case, data=b'new'):
    publish(case.folder / 'new', data)
    assert (case.direct / 'in' / 'new').read_bytes() == data


def publishing_in_parts(case):
    publishing(case, LARGE)


def a_bucket(case):
    name = f's3://bucket-{next(numbers)}-{time.time_ns()}'
    granular.Path(name, **case.options).mkdir()
    (granular.Path(name, **case.direct.store.options) / 'x').write_bytes(b'x')


OPERATIONS = {  # with the kinds of their requests
    stat: ['head'],
    stat_of_a_folder: ['head', 'list'],
    exists: ['head', 'list'],
    listing: ['list'],
    globbing: ['list'],
    globbing_all: ['list'],
    walking: ['list'],
    opening_shards: ['list'],
    copying: ['list', 'head', 'copy'],
    copying_here: ['list', 'head', 'get'],
    copying_there: ['join', 'head'],
    removing: ['list', 'deletes'],
    unlinking: ['head', 'delete'],
    writing: ['put', 'head'],
    writing_in_parts: ['begin', 'part', 'join', 'head'],
    publishing: ['put', 'head'],
    publishing_in_parts: ['join', 'head'],
    a_bucket: ['list', 'bucket'],
}
CHANGING = {removing, unlinking, writing, writing_in_parts, publishing, publishing_in_parts}
REQUESTS = [(operation, kind) for operation, kinds in OPERATIONS.items() for kind in kinds]
LISTINGS = [request for request in REQUESTS if request[1] == 'list']
LOOKUPS = [request for request in REQUESTS if request[1] in ('head', 'get')]
CHANGES = [request for request in REQUESTS if request[1] not in ('list', 'head', 'get')]
# Families of faults. Each fault is a script: its last line is the fault.
UNUSABLE = [['empty'], ['html'], ['error'], ['cut']]
INTERRUPTED = [['reset'], [('status', 500)]]
CARRIED_OUT = [['late_error'], ['lost_html'], ['lost']]  # but with a wrong reply, or none
STAYING = [
    [['hang']],
    [[('status', 404, b'<html>none</html>')], [('status', 200, b'<!DOCTYPE x [<!ENTITY y "z">]><x/>')]],
]
PAGED = ['first_page', 'same_token', 'no_token']


def on_pages(faults):
    """Return the faults on the first page of a listing, and on the second one."""
    return [['good'] * page + fault for page in (0, 1) for fault in faults]


FAULTS = [
    *cover([LISTINGS], [on_pages(UNUSABLE), on_pages(INTERRUPTED)]),
    *cover([LOOKUPS], [UNUSABLE, INTERRUPTED]),
    *cover([CHANGES], [UNUSABLE, INTERRUPTED, CARRIED_OUT]),
]


def name_of(value):
    """Return the name of a case: the operation and the kind of its request, or the last line of a script."""
    if isinstance(value, tuple):
        return f'{value[0].__name__}-{value[1]}'
    return str(value[-1]) + (' on the second page' if len(value) > 1 else '')


@pytest.fixture
def new_case(server, moto, shared, tmp_path):
    """Create the case of an operation."""
    return functools.partial(Case, server, moto, shared, tmp_path, str(next(numbers)))


@pytest.mark.parametrize(('request_kind', 'script'), FAULTS, ids=name_of)
def test_passing_fault_does_no_harm(server, new_case, request_kind, script):
    operation, kind = request_kind
    case = new_case(operation)
    server.plan(kind, script)
    operation(case)


@pytest.mark.parametrize(('request_kind', 'script'), FAULTS + cover([LISTINGS, LOOKUPS, CHANGES], STAYING), ids=name_of)
def test_lasting_fault_is_an_error_in_bounded_time(server, new_case, request_kind, script):
    operation, kind = request_kind
    fault = script[-1]
    case = new_case(operation, config=IMPATIENT if fault == 'hang' else TWO_ATTEMPTS)
    server.plan(kind, script[:-1], fault)
    began = time.monotonic()
    try:
        operation(case)
    except GranularError as error:
        assert 's3://' in str(error)
        assert 'TOKEN' not in f'{error} {getattr(error, "__notes__", "")}'
        assert fault != 'hang' or isinstance(error, TimeoutError)
    else:
        assert fault != 'hang'
    assert time.monotonic() - began < BOUND


LONG = [(copying, 'copy', 'error'), (writing_in_parts, 'join', 'error'), (removing, 'deletes', 'error')]
LONG += [(removing, 'deletes', 'undeleted'), (listing, 'list', 'error')]


@pytest.mark.parametrize('code', ['SlowDown', 'InternalError', 'ServiceUnavailable', 'AccessDenied'])
@pytest.mark.parametrize(('operation', 'kind', 'fault'), LONG)
def test_error_within_status_200_counts_as_its_own_status(server, new_case, operation, kind, fault, code):
    case = new_case(operation, config=small_parts(dataclasses.replace(USUAL_PARTS, attempts=6)))
    server.plan(kind, [(fault, code)] * 4)
    if code != 'AccessDenied':
        operation(case)  # a wrong reply is tried twice alone
        assert server.kinds.count(kind) >= 5
        return
    with pytest.raises(StoreError, match=code):
        operation(case)


@pytest.mark.parametrize('fault', PAGED)
@pytest.mark.parametrize('operation', [listing, globbing_all, walking, opening_shards, copying, copying_here, removing])
def test_listing_without_progress_is_an_error(server, new_case, operation, fault):
    case = new_case(operation)
    server.plan('list', stays=fault)
    with pytest.raises(BadReplyError):
        operation(case)
    assert server.kinds.count('list') < 12


@pytest.mark.parametrize(('operation', 'kind'), each_value(REQUESTS))
def test_redirect_is_not_followed(server, other_host, new_case, operation, kind):
    case = new_case(operation)
    server.plan(kind, stays=('redirect', other_host.endpoint))
    with pytest.raises(StoreError):
        operation(case)
    assert other_host.kinds == []


# --- verification of writes


@pytest.mark.parametrize('fault', ['drops_byte', 'flips_byte', 'forgets'])
@pytest.mark.parametrize(
    ('operation', 'kind'),
    [(writing, 'put'), (publishing, 'put'), (writing_in_parts, 'part'), (publishing_in_parts, 'part'),
     (copying_there, 'part'), (copying_there, 'put')],
)  # fmt: skip
def test_upload_that_the_store_lost_or_damaged_is_an_error(server, new_case, operation, kind, fault):
    case = new_case(operation)
    server.aged = fault == 'forgets'
    server.plan(kind, stays=fault)
    with pytest.raises(StoreError):
        operation(case)
    # Nothing that is broken is left under a new name. The other file of a copy may be complete.
    assert not (case.direct / 'in' / 'new').exists()
    for name, data in COPIED.items():
        path = case.direct / 'copy' / name
        assert not path.exists() or path.read_bytes() == data


def test_completion_without_effect_is_an_error(server, new_case):
    for operation in (writing_in_parts, publishing_in_parts):
        case = new_case(operation)
        server.plan('join', stays='forgets')
        with pytest.raises(StoreError):
            operation(case)
        assert (case.direct / 'in' / 'a1').read_bytes() == FILES['a1']


@pytest.mark.parametrize(
    'operation', [writing, publishing, writing_in_parts, publishing_in_parts, copying, copying_there]
)
def test_upload_without_md5_etags_is_verified_by_reading_back(server, new_case, operation):
    case = new_case(operation)
    server.opaque_etags = True
    operation(case)
    server.plan('part', stays='flips_byte')
    server.plan('put', stays='flips_byte')
    if operation is not copying:
        with pytest.raises(StoreError):
            operation(new_case(operation))


def test_damaged_object_is_withdrawn_where_its_upload_may_not_be_aborted(server, new_case):
    case = new_case(publishing_in_parts)
    server.opaque_etags = True
    server.plan('part', stays='flips_byte')
    server.plan('abort', [('status', 403, b'<Error><Code>AccessDenied</Code></Error>')])
    with pytest.raises(AccessDeniedError):
        publishing_in_parts(case)
    assert not (case.direct / 'in' / 'new').exists()


def test_byte_damaged_once_is_sent_again(server, new_case):
    for operation, kind in ((writing, 'put'), (writing_in_parts, 'part'), (publishing_in_parts, 'part')):
        server.plan(kind, ['flips_byte'])
        operation(new_case(operation))


# --- conditional writes


# By the kind of the request that publishes it. SeaweedFS takes no small parts.
CONTENT = {('moto', 'put'): b'new', ('moto', 'join'): LARGE, ('seaweed', 'put'): b'new', ('seaweed', 'join'): LARGER}
PARTS = {'moto': QUICK, 'seaweed': USUAL_PARTS}
LOST = (['lost'], ['lost', 'lost'], ['lost_html'], ['late_error'], ['lost', 'reset', 'lost'])


@contextlib.contextmanager
def new_object(request, store):
    """Yield a proxy before a store, an empty folder, and the path of an object in it through the proxy."""
    backend = request.getfixturevalue(store)
    with S3Proxy(backend.endpoint) as server:
        folder = backend.place()
        options = {**backend.options, 'endpoint_url': server.endpoint, 'config': PARTS[store]}
        yield server, folder, granular.Path(str(folder / 'new'), **options)


@pytest.mark.parametrize(
    ('store', 'kind', 'faults'), pairwise(itertools.product(PARTS, ['put', 'join'], LOST)), ids=str
)
def test_publication_with_a_lost_reply_succeeds(request, store, kind, faults):
    data = CONTENT[store, kind]
    with new_object(request, store) as (server, folder, proxied):
        server.plan(kind, faults)
        publish(proxied, data)
        assert (folder / 'new').read_bytes() == data


@pytest.mark.parametrize(
    ('store', 'kind', 'faults'),
    pairwise(itertools.product(PARTS, ['put', 'join'], [[], ['lost'], ['reset', 'lost']])),
    ids=str,
)
def test_publication_of_another_writer_is_kept(request, store, kind, faults):
    data = CONTENT[store, kind]
    with new_object(request, store) as (server, folder, proxied):
        (folder / 'new').write_bytes(b'theirs')
        server.plan(kind, faults)
        with pytest.raises(AlreadyExistsError):
            publish(proxied, data)
        assert (folder / 'new').read_bytes() == b'theirs'
        assert [path.name for path in folder.iterdir()] == ['new']


@pytest.mark.parametrize(
    ('layout', 'kind'), cover([['refs', 'columns']], [['put', 'begin', 'part', 'join', 'head', 'list']])
)
def test_dataset_is_written_despite_lost_replies(server, moto, layout, kind):
    folder = moto.place()
    proxied = granular.Path(str(folder), endpoint_url=server.endpoint, key='KEY', secret='x', config=QUICK)
    server.plan(kind, ['lost', 'good'] * 20)
    with granular.DatasetWriter(proxied / 'ds', {'x': 'bytes'}, granular.encoders, layout=layout) as writer:
        for i in range(2):
            writer.append({'x': LARGE[i:]})
    with granular.DatasetReader(folder / 'ds', granular.decoders) as reader:
        assert [point['x'] for point in reader] == [LARGE, LARGE[1:]]


def test_last_writer_wins_without_an_error(server, new_case):
    """The first writer reports success although its object is replaced at once."""
    case = new_case(writing)
    forward = server.forward

    async def overwritten(request):
        answer = await forward(request)
        if request.kind == 'put':
            await forward(request._replace(body=b'theirs', headers={
                **request.headers, 'content-length': '6', 'x-amz-meta-granular-writer': 'theirs', 'content-md5': '',
            }))  # fmt: skip
        return answer

    server.forward = overwritten
    try:
        (case.folder / 'a1').write_bytes(b'mine')
    finally:
        del server.forward
    assert (case.direct / 'in' / 'a1').read_bytes() == b'theirs'


# --- recoverable errors and refusals


RECOVERIES = cover([LISTINGS, LOOKUPS, CHANGES], [['credentials', 'clock', 'region']])


def recovering(cause):
    """Return the operations, each with the kind of a request, that a recoverable error is tried with."""
    return [request for request, word in RECOVERIES if word == cause]


@pytest.mark.parametrize(('operation', 'kind'), recovering('credentials'))
def test_expired_credentials_are_renewed(server, new_case, tmp_path, monkeypatch, operation, kind):
    keys = AmazonKeys(tmp_path / 'credentials')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(keys.file))
    case = new_case(operation)
    case.reopen(endpoint_url=server.endpoint, config=QUICK)
    server.renew = keys.renew
    server.plan(kind, ['expire'])
    operation(case)


@pytest.mark.parametrize('operation', dict(recovering('clock')))
def test_clock_skew_is_corrected(server, new_case, operation, monkeypatch):
    case = new_case(operation)
    monkeypatch.setattr(server, 'clock', datetime.timedelta(hours=-3))
    operation(case)


async def test_clock_skew_of_many_requests_is_logged_once(server, moto, monkeypatch, caplog):
    path = aio.Path(moto.place() / 'x')
    await path.write_bytes(b'x')
    skewed = aio.Path(str(path), endpoint_url=server.endpoint, key='KEY', secret=str(next(numbers)), config=QUICK)
    monkeypatch.setattr(server, 'clock', datetime.timedelta(hours=-3))
    assert await asyncio.gather(*(skewed.read_bytes() for _ in range(4))) == [b'x'] * 4
    assert len(server.kinds) > 5  # several of them were refused
    assert caplog.text.count("this machine's clock is") == 1


@pytest.mark.parametrize('operation', dict(recovering('region')))
def test_region_of_the_bucket_is_followed(server, moto, new_case, monkeypatch, operation):
    with S3Proxy(moto.endpoint) as wrong:
        wrong.region = 'eu-west-3'
        place_regions(monkeypatch, {'us-east-1': wrong, 'eu-west-3': server})
        case = new_case(operation)
        case.reopen(key='KEY', secret=str(next(numbers)), config=QUICK)
        operation(case)
        assert '/eu-west-3/s3/' in server.requests[-1].headers['authorization']
        assert wrong.kinds


def test_denied_access_is_an_error_of_every_operation(server, new_case):
    denied = ('status', 403, b'<Error><Code>AccessDenied</Code></Error>')
    for operation, kinds in OPERATIONS.items():
        case = new_case(operation)
        for kind in {*kinds, 'get'}:
            server.plan(kind, stays=denied)
        with pytest.raises(AccessDeniedError, match='denied .*: check the credentials and their rights, or pass'):
            operation(case)
        server.clear()


def test_objects_without_an_etag_have_no_version(server, new_case):
    case = new_case(writing)
    server.no_etags = True
    assert (case.folder / 'a1').stat().version is None
    assert (case.folder / 'a1').stat().modified == (case.direct / 'in' / 'a1').stat().modified
    writing(case)
    writing_in_parts(case)


@pytest.mark.parametrize('data', [b'new', LARGE], ids=['put', 'parts'])
def test_write_only_upload_is_verified_by_its_etag(server, new_case, data):
    denied = ('status', 403, b'<Error><Code>AccessDenied</Code></Error>')
    case = new_case(publishing)
    server.plan('head', stays=denied)
    server.plan('get', stays=denied)
    publishing(case, data)
    server.opaque_etags = True
    with pytest.raises(AccessDeniedError):
        publishing(new_case(publishing), data)


@pytest.mark.parametrize('data', [b'new', LARGE], ids=['put', 'parts'])
def test_existence_is_checked_first_without_conditional_writes(server, new_case, data):
    for kind in ('put', 'join'):
        server.plan(kind, stays='conditions_unknown')
    publishing(new_case(publishing), data)
    case = new_case(publishing)
    (case.direct / 'in' / 'new').write_bytes(b'theirs')
    with pytest.raises(AlreadyExistsError):
        publishing(case, data)
    assert (case.direct / 'in' / 'new').read_bytes() == b'theirs'


@pytest.mark.parametrize('code', [409, 412])
def test_conflict_without_an_object_is_retried(server, new_case, code):
    conflict = ('status', code, b'<Error><Code>ConditionalRequestConflict</Code></Error>')
    server.plan('put', [conflict])
    publishing(new_case(publishing))
    server.plan('put', stays=conflict)
    with pytest.raises(AlreadyExistsError):
        publishing(new_case(publishing))
    assert server.kinds.count('put') < 10


@pytest.mark.parametrize('code', ['BadDigest', 'RequestTimeout', 'IncompleteBody', 'ClientDisconnected'])
@pytest.mark.parametrize(('operation', 'kind'), [(writing, 'put'), (writing_in_parts, 'part')])
def test_body_that_the_server_rejects_as_damaged_is_sent_again(server, new_case, operation, kind, code):
    server.plan(kind, [('status', 400, f'<Error><Code>{code}</Code></Error>'.encode())])
    operation(new_case(operation))


def test_writes_carry_checksums(server, new_case):
    for operation, kind in ((writing, 'put'), (writing_in_parts, 'part'), (removing, 'deletes')):
        operation(new_case(operation))
        for request in server.requests:
            if request.kind == kind:
                assert request.headers['content-md5'] == base64.b64encode(hashlib.md5(request.body).digest()).decode()


# --- options


def every_operation(new_case, **options):
    for operation in OPERATIONS:
        case = new_case(operation)
        case.reopen(**{**case.options, **options})
        with contextlib.suppress(AccessDeniedError):  # moto refuses access to private objects
            operation(case)
        yield case.server.requests


def test_options_reach_every_request(server, new_case):
    for requests in every_operation(new_case, requester_pays=True, region='eu-west-3'):
        assert {request.headers['x-amz-request-payer'] for request in requests} == {'requester'}
        assert all('/eu-west-3/s3/' in request.headers['authorization'] for request in requests)
        assert {request.headers['x-amz-security-token'] for request in requests} == {'TOKEN'}
    for requests in every_operation(new_case, anon=True):
        assert not any({'authorization', 'x-amz-security-token'} & request.headers.keys() for request in requests)


def test_write_headers_come_from_s3_additional_kwargs(server, new_case):
    extra = {
        'ServerSideEncryption': 'aws:kms',
        'SSEKMSKeyId': 'mine',
        'BucketKeyEnabled': True,
        'StorageClass': 'GLACIER_IR',
    }
    for operation, kind in ((writing, 'put'), (writing_in_parts, 'begin'), (copying, 'copy')):
        case = new_case(operation)
        case.reopen(**case.options, s3_additional_kwargs=extra)
        operation(case)
        for request in [request for request in server.requests if request.kind == kind]:
            assert request.headers['x-amz-server-side-encryption'] == 'aws:kms'
            assert request.headers['x-amz-server-side-encryption-aws-kms-key-id'] == 'mine'
            assert request.headers['x-amz-server-side-encryption-bucket-key-enabled'] == 'true'
            assert request.headers['x-amz-storage-class'] == 'GLACIER_IR'
            assert request.headers['authorization'].count('x-amz-storage-class') == 1


@pytest.mark.parametrize('option', [{'client_kwargs': {'timeout': 3}}, {'config_kwargs': {'x': 1}}])
def test_unknown_options_are_named_in_the_error(moto, option):
    folder = granular.Path(str(moto.place()), **{**moto.options, **option})
    for ask in (folder.exists, lambda: folder.write_bytes(b'x'), folder.read_bytes):
        with pytest.raises(InvalidArgumentError, match='unknown .*expected some of'):
            ask()


def test_signatures_and_checksums_over_tls(seaweed, tmp_path):
    """A server that verifies signatures, and Content-MD5: over TLS, the body is not part of the signature."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / 'authority.pem'))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert('127.0.0.1').configure_cert(context)
    direct = seaweed.place()
    with TLSProxy(context, seaweed.endpoint) as tls:
        options = {**seaweed.options, 'endpoint_url': tls.endpoint, 'tls_verify': str(tmp_path / 'authority.pem')}
        folder = granular.Path(str(direct), **options, config=USUAL_PARTS)
        for name, data in {**FILES, 'large': LARGER}.items():
            (folder / name).write_bytes(data)
        (folder / 'large').copy(folder / 'copy')
        assert (direct / 'copy').read_bytes() == LARGER
        assert contents(folder) == contents(direct)
        folder.rmtree()
    assert not direct.exists()


def test_no_other_s3_library_is_imported(moto):
    """Buckets need neither s3fs nor aiobotocore, and local disks no botocore."""
    code = f"""
import sys
for name in ('s3fs', 'aiobotocore', 'boto3', 'fsspec'):
    sys.modules[name] = None
import granular
from granular import aio
granular.Path('/').exists()
assert 'botocore' not in sys.modules
root = granular.Path({str(moto.place())!r}, **{moto.options!r})
(root / 'small').write_bytes(b'x')
(root / 'large').write_bytes(bytes(9 << 20))
(root / 'large').copy(root / 'copy')
assert sorted(path.name for path in root.rglob('*')) == ['copy', 'large', 'small']
assert (root / 'copy').stat().size == 9 << 20 and (root / 'small').read_bytes() == b'x'
(root / 'small').unlink()
granular.clean(root)
root.rmtree()
assert not root.exists()
"""
    subprocess.run([sys.executable, '-c', code], check=True, timeout=250)


def test_missing_botocore_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, 'botocore.session', None)
    with pytest.raises(MissingExtraError, match=r'pip install .*\[s3\]'):
        granular.Path(f's3://bucket-{next(numbers)}/x', key='k', secret='x').read_bytes()


# --- copies and uploads


@pytest.mark.parametrize(('kind', 'fault'), cover([['begin', 'copy_part', 'join', 'head']], [['lost', 'error']]))
def test_large_objects_are_copied_in_parts_despite_faults(server, new_case, monkeypatch, kind, fault):
    monkeypatch.setattr('granular.aio.stores.s3.copying.MAX_COPY', PART)  # otherwise the object needs 5 GiB
    case = new_case(writing)
    (case.direct / 'large').write_bytes(LARGE)
    server.plan(kind, [fault])
    (case.root / 'large').copy(case.root / 'copy')
    assert server.kinds.count('copy_part') >= 2
    assert (case.direct / 'copy').read_bytes() == LARGE


def test_copy_in_parts_keeps_headers_that_the_options_have_too(seaweed, monkeypatch):
    monkeypatch.setattr('granular.aio.stores.s3.copying.MAX_COPY', 5 << 20)
    root = seaweed.place()

    def path(name, cache_control, content_type):
        extra = {'CacheControl': cache_control, 'ContentType': content_type}
        return granular.Path(str(root / name), **seaweed.options, s3_additional_kwargs=extra)

    async def headers(path):
        return (await (await path.store.client()).head(path.key)).headers

    path('large', 'no-store', 'text/plain').write_bytes(bytes(6 << 20))
    target = path('copy', 'no-cache', 'text/html')
    path('large', 'no-cache', 'text/html').copy(target)
    found = asyncio.run(headers(target.aio))
    assert (found['cache-control'], found['content-type']) == ('no-store', 'text/plain')


def test_source_replaced_while_it_is_copied_is_an_error(server, new_case, monkeypatch):
    changed = ('status', 412, b'<Error><Code>PreconditionFailed</Code></Error>')
    case = new_case(copying)
    server.plan('copy', stays=changed)
    with pytest.raises(ObjectChangedError):
        copying(case)
    assert all('x-amz-copy-source-if-match' in request.headers for request in server.requests if request.kind == 'copy')
    monkeypatch.setattr('granular.aio.stores.s3.copying.MAX_COPY', PART)
    (case.direct / 'large').write_bytes(LARGE)
    server.plan('copy_part', stays=changed)
    with pytest.raises(ObjectChangedError):
        (case.root / 'large').copy(case.root / 'copy')
    assert unfinished_uploads(case.direct) == []
    assert not (case.direct / 'copy').exists()


@pytest.mark.parametrize('operation', ['write', 'copy'])
def test_upload_that_is_cancelled_while_it_begins_is_aborted(server, new_case, monkeypatch, operation):
    monkeypatch.setattr('granular.aio.stores.s3.copying.MAX_COPY', PART)  # otherwise the object needs 5 GiB
    case, forward = new_case(writing), server.forward
    (case.direct / 'large').write_bytes(LARGE)

    async def cancelled():
        begun, loop = asyncio.Event(), asyncio.get_running_loop()

        async def late(request):
            answer = await forward(request)
            if request.kind == 'begin':
                loop.call_soon_threadsafe(begun.set)
                await asyncio.sleep(0.1)
            return answer

        monkeypatch.setattr(server, 'forward', late)
        path = aio.Path(case.root / 'large')
        call = path.write_bytes(LARGE) if operation == 'write' else path.copy(path.parent / 'copy')
        task = asyncio.create_task(call)
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(cancelled())
    monkeypatch.undo()
    assert unfinished_uploads(case.direct) == []


async def cancelled_at(server, call, kind):
    """Cancel a call once the server has carried out, and not yet answered, a request of that kind."""
    reached, loop, forward = asyncio.Event(), asyncio.get_running_loop(), server.forward

    async def late(request):
        answer = await forward(request)
        if request.kind == kind:
            loop.call_soon_threadsafe(reached.set)
            await asyncio.sleep(0.1)
        return answer

    server.forward = late
    try:
        task = asyncio.create_task(call)
        await reached.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    finally:
        del server.forward


@pytest.mark.parametrize(
    ('operation', 'kind'), [('put', 'put'), ('put', 'head'), ('join', 'join'), ('join', 'head'), ('copy', 'join')]
)
def test_cancelled_replacement_leaves_the_former_or_the_new_object(server, new_case, monkeypatch, operation, kind):
    monkeypatch.setattr('granular.aio.stores.s3.copying.MAX_COPY', PART)  # otherwise the object needs 5 GiB
    case = new_case(writing)
    data = b'small' if operation == 'put' else LARGE
    (case.direct / 'source').write_bytes(data)
    (case.direct / 'target').write_bytes(b'former')

    async def cancelled():
        source, target = aio.Path(case.root / 'source'), aio.Path(case.root / 'target')
        call = source.copy(target) if operation == 'copy' else target.write_bytes(data)
        await cancelled_at(server, call, kind)

    asyncio.run(cancelled())
    assert (case.direct / 'target').read_bytes() in (b'former', data)
    assert unfinished_uploads(case.direct) == []


@pytest.mark.parametrize('data', [b'small', LARGE], ids=['put', 'join'])
def test_replacement_that_cannot_be_verified_stays(server, new_case, data):
    case = new_case(writing, config=TWO_ATTEMPTS)
    server.plan('head', stays=('status', 500))
    with pytest.raises(StoreError):
        (case.folder / 'a1').write_bytes(data)
    assert (case.direct / 'in' / 'a1').read_bytes() == data


def test_new_object_of_a_cancelled_repetition_is_removed(server, new_case):
    case = new_case(publishing)
    server.plan('put', [('status', 409, b'<Error><Code>ConditionalRequestConflict</Code></Error>')])
    path = aio.Path(case.folder / 'new')
    asyncio.run(cancelled_at(server, path.store.write(path.key, b'new', new=True), 'put'))
    assert not (case.direct / 'in' / 'new').exists()


CLEANING = [
    *cover([['uploads', 'parts', 'abort']], [UNUSABLE, INTERRUPTED]),
    *cover([['abort']], [CARRIED_OUT]),
]


@pytest.mark.parametrize(('kind', 'script'), CLEANING, ids=str)
def test_passing_fault_does_not_keep_abandoned_uploads(server, new_case, kind, script):
    case = new_case(writing)
    abandon_upload(case.folder / 'x', PART + 1)
    server.plan(kind, script)
    removed = granular.clean(case.folder, older=0, remove=True)
    assert [(leftover.kind, leftover.size) for leftover in removed] == [('upload', PART)]
    assert unfinished_uploads(case.direct) == []


def test_pages_of_uploads_in_a_circle_are_an_error(server, new_case):
    case = new_case(writing)
    server.plan('uploads', stays='circles')
    with pytest.raises(BadReplyError, match='the markers of the next one'):
        granular.clean(case.folder, older=0)
    assert server.kinds.count('uploads') < 12


@pytest.mark.parametrize(
    ('kind', 'script'),
    cover([['uploads', 'parts', 'abort']], [UNUSABLE, INTERRUPTED, *STAYING]),
    ids=str,
)
def test_lasting_fault_of_cleaning_is_an_error(server, new_case, kind, script):
    fault = script[-1]
    case = new_case(writing)
    abandon_upload(case.folder / 'x', PART + 1)
    case.reopen(**{**case.options, 'config': IMPATIENT if fault == 'hang' else TWO_ATTEMPTS})
    server.plan(kind, stays=fault)
    if kind == 'abort' and fault == 'cut':  # the reply has no body
        granular.clean(case.folder, older=0, remove=True)
    else:
        with pytest.raises(StoreError):
            granular.clean(case.folder, older=0, remove=True)
    server.plan(kind)
    granular.clean(case.direct, older=0, remove=True)
    assert unfinished_uploads(case.direct) == []


# --- deleting


def test_objects_written_during_rmtree_are_deleted_too(server, new_case):
    case = new_case(removing)
    forward, late = server.forward, ['late1', 'late2']

    async def adding(request):
        if request.kind == 'deletes' and late:
            await asyncio.to_thread((case.direct / 'in' / late.pop()).write_bytes, b'x')
        return await forward(request)

    server.forward = adding
    try:
        removing(case)
    finally:
        del server.forward
    assert late == []


def test_deletion_without_effect_is_an_error(server, new_case):
    def reply(keys):
        return (
            b'<DeleteResult>' + b''.join(b'<Deleted><Key>%b</Key></Deleted>' % key for key in keys) + b'</DeleteResult>'
        )

    case = new_case(removing)

    async def lying(request):
        return Answer(200, {}, reply(re.findall(rb'<Key>([^<]*)</Key>', request.body)))

    server.lying = lying
    server.plan('deletes', stays='lying')
    with pytest.raises(StoreError, match='does not delete them'):
        removing(case)
    assert server.kinds.count('list') < 40
    del server.lying
    for body in (b'<DeleteResult></DeleteResult>', reply([b'in/a0']), reply([b'other'])):
        server.plan('deletes', stays=('status', 200, body))
        with pytest.raises(BadReplyError):
            removing(case)
    refused = b'<DeleteResult><Error><Key>%b</Key><Code>AccessDenied</Code></Error></DeleteResult>'
    server.plan('deletes', stays=('status', 200, refused % f'{case.folder.key}/a0'.encode()))
    with pytest.raises(StoreError, match='AccessDenied'):
        removing(case)


def test_missing_folder_is_not_found(server, new_case):
    case = new_case(listing)
    for ask in (
        lambda: list((case.root / 'none').iterdir()), (case.root / 'none').rmtree, (case.root / 'none').stat,
        lambda: (case.root / 'none').copy(case.tmp_path / 'x'), (case.root / 'none').unlink,
    ):  # fmt: skip
        with pytest.raises(NotFoundError):
            ask()
    assert list((case.root / 'none').glob('*')) == []


def test_bucket_removed_while_it_is_listed_is_an_error(server, new_case):
    case = new_case(listing)
    for operation in (listing, globbing_all, walking):
        server.plan('list', ['good'], ('status', 404, b'<Error><Code>NoSuchBucket</Code></Error>'))
        with pytest.raises(StoreError):
            operation(case)
