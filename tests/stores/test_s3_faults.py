"""Every operation on a bucket of S3, against answers that are none, and against replies that are lost.

Each operation gives the right result, or an error of the tree, in a bounded time; a listing is never short, and what is
reported as written or deleted is.
"""

import asyncio
import base64
import contextlib
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
from tests.support.credentials import AmazonKeys
from tests.support.s3_faults import Answer, S3Proxy
from tests.support.servers import TLSProxy

BOUND = 15.0  # seconds, on a busy machine
QUICK = granular.IOConfig(
    backoff=0.001, backoff_cap=0.02, connect_timeout=2.0, first_byte_timeout=5.0, read_timeout=5.0, attempts=4,
    hedge=0.0, part_size=5 << 20,
)  # fmt: skip
IMPATIENT = granular.IOConfig(
    backoff=0.001, backoff_cap=0.02, connect_timeout=2.0, first_byte_timeout=0.3, read_timeout=0.3, attempts=2,
    hedge=0.0, part_size=5 << 20,
)  # fmt: skip
FILES = {name: name.encode() for name in ('a0', 'a1', 'a2', 'a3', 'sub/b0', 'sub/b1')}
SHARDS = 5
PAGE = 2  # keys: each listing has several pages
LARGE = bytes(i * 7 % 251 for i in range(1 << 16)) * 82  # two parts

numbers = itertools.count()


@pytest.fixture(scope='module')
def server(moto):
    with S3Proxy(moto.endpoint, PAGE) as server:
        yield server


@pytest.fixture(scope='module')
def other():
    """Another host, to which nothing may be sent."""
    with S3Proxy('http://127.0.0.1:9') as server:
        yield server


@pytest.fixture(autouse=True)
def checksums(monkeypatch):
    """What moto takes for a CRC32C, which is a CRC32 without this package."""
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec('crc32c', None))
    monkeypatch.setattr(module, 'crc32c', crc32c, raising=False)
    monkeypatch.setitem(sys.modules, 'crc32c', module)


@pytest.fixture(autouse=True)
def calm(server, other):
    yield
    server._once.clear()
    server._stays.clear()
    server.odd_etags = server.no_etags = server.aged = False
    assert other.seen == []


@pytest.fixture(scope='module')
def shared(moto):
    """A folder of some files that nothing writes to."""
    return filled(moto.place())


def filled(place):
    for name, data in FILES.items():
        (place / 'in' / name).write_bytes(data)
    with granular.ShardedDatasetWriter(
        place / 'shards', {'n': 'int'}, granular.encoders, 1, layout='columns'
    ) as writer:
        for i in range(SHARDS):
            writer.append({'n': i})
    return place


class Case:
    """A folder, seen through the server of faults and directly.

    Args:
      secret: of a client of its own.
      operation: made for; one that only reads has the files of all, others have some of their own.
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
        place = self.direct if operation in CHANGING else shared
        self.place = granular.Path(str(place), **options) / ('shards' if operation is opening_shards else 'in')
        server.seen.clear()
        server.asked.clear()

    def reopen(self, **options):
        """See the folder with other options."""
        self.options = options
        self.root, self.place = (granular.Path(str(path), **options) for path in (self.root, self.place))


def contents(root):
    """The files of a folder, by its listing."""
    return {
        str((folder / name).relative_to(root)): (folder / name).read_bytes()
        for folder, _, names in root.walk()
        for name in names
    }


def local_contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob('*') if file.is_file()}


def relative(case, paths):
    return sorted(str(path.relative_to(case.place)) for path in paths)


# --- the operations: each is done, and then looked at


def stat(case):
    assert (case.place / 'a1').stat().size == len(FILES['a1'])


def stat_of_a_folder(case):
    assert case.place.stat().is_dir


def exists(case):
    assert (case.place / 'a1').exists()
    assert not (case.place / 'none').exists()


def listing(case):
    assert relative(case, case.place.iterdir()) == ['a0', 'a1', 'a2', 'a3', 'sub']


def globbing(case):
    assert relative(case, case.place.glob('s*/b*')) == ['sub/b0', 'sub/b1']


def globbing_all(case):
    assert relative(case, case.place.rglob('*')) == sorted([*FILES, 'sub'])


def walking(case):
    assert [(len(folders), len(files)) for _, folders, files in case.place.walk()] == [(1, 4), (0, 2)]


def opening_shards(case):
    with granular.ShardedDatasetReader(case.place, granular.decoders) as reader:
        assert [point['n'] for point in reader] == list(range(SHARDS))


def copying(case):
    case.place.copy(case.root / 'copy')
    assert contents(case.direct / 'copy') == FILES


def copying_here(case):
    target = case.tmp_path / 'copy'
    granular.copy_to_local(case.place, target)
    found = local_contents(target)
    found.pop('.granular-copy.json')
    assert found == FILES


def copying_there(case):
    (case.tmp_path / 'from').mkdir(exist_ok=True)
    (case.tmp_path / 'from' / 'x').write_bytes(b'small')
    (case.tmp_path / 'from' / 'y').write_bytes(LARGE)
    granular.Path(case.tmp_path / 'from').copy(case.root / 'copy')
    assert contents(case.direct / 'copy') == {'x': b'small', 'y': LARGE}


def removing(case):
    case.place.rmtree()
    assert not (case.direct / 'in').exists()


def unlinking(case):
    (case.place / 'a1').unlink()
    assert not (case.direct / 'in' / 'a1').exists()
    assert (case.direct / 'in' / 'a0').exists()


def writing(case):
    (case.place / 'a1').write_bytes(b'another')
    assert (case.direct / 'in' / 'a1').read_bytes() == b'another'


def writing_in_parts(case):
    (case.place / 'a1').write_bytes(LARGE)
    assert (case.direct / 'in' / 'a1').read_bytes() == LARGE


async def publish(path, data, mine=True):
    await granular.aio.runtime.loops.ensure_event_loop()
    writer = await path.store.open_writer(path.key, new=True)
    try:
        await writer.write(data)
        await writer.close()
    except BaseException:
        await writer.abort()
        raise


def publishing(case, data=b'new'):
    granular.aio.runtime.bridge.run(publish(case.place / 'new', data))
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
CASES = [(operation, kind) for operation, kinds in OPERATIONS.items() for kind in kinds]
IDS = [f'{operation.__name__}-{kind}' for operation, kind in CASES]
READING = ['empty', 'html', 'error', 'cut', 'reset', ('status', 500)]
CARRIED_OUT = ['late_error', 'lost_html', 'lost']  # and answered wrongly, or not at all
STAYING = ['hang', ('status', 404, b'<html>none</html>'), ('status', 200, b'<!DOCTYPE x [<!ENTITY y "z">]><x/>')]
PAGED = ['first_page', 'same_token', 'no_token']


@pytest.fixture
def new_case(server, moto, shared, tmp_path):
    """Makes a case for an operation."""
    return functools.partial(Case, server, moto, shared, tmp_path, str(next(numbers)))


def faults_of(kind):
    """The faults of a request of a kind, each with the number of requests that are answered well before it."""
    faults = READING + ([] if kind in ('list', 'head', 'get', 'uploads', 'parts') else CARRIED_OUT)
    return [(fault, skipped) for fault in faults for skipped in ((0, 1) if kind == 'list' else (0,))]


@pytest.mark.parametrize(('operation', 'kind'), CASES, ids=IDS)
def test_a_fault_that_passes_does_no_harm(server, new_case, operation, kind):
    for fault, skipped in faults_of(kind):
        made = new_case(operation)
        server.plan(kind, ['good'] * skipped + [fault])
        operation(made)


@pytest.mark.parametrize(('operation', 'kind'), CASES, ids=IDS)
def test_a_fault_that_stays_is_an_error(server, new_case, operation, kind):
    for fault, skipped in [*faults_of(kind), *((fault, 0) for fault in STAYING)]:
        made = new_case(operation, config=IMPATIENT)
        server.plan(kind, ['good'] * skipped, fault)
        began = time.monotonic()
        try:
            operation(made)
        except GranularError as error:
            assert 's3://' in str(error), (fault, error)
            assert 'TOKEN' not in f'{error} {getattr(error, "__notes__", "")}'
            assert fault != 'hang' or isinstance(error, TimeoutError)
        else:
            assert fault != 'hang'
        assert time.monotonic() - began < BOUND, fault


@pytest.mark.parametrize('fault', PAGED)
@pytest.mark.parametrize('operation', [listing, globbing_all, walking, opening_shards, copying, copying_here, removing])
def test_pages_that_do_not_go_on(server, new_case, operation, fault):
    made = new_case(operation)
    server.plan('list', stays=fault)
    with pytest.raises(BadReplyError):
        operation(made)
    assert server.seen.count('list') < 12


@pytest.mark.parametrize(('operation', 'kind'), CASES, ids=IDS)
def test_no_redirection_is_followed(server, other, new_case, operation, kind):
    made = new_case(operation)
    server.plan(kind, stays=('redirect', other.endpoint))
    with pytest.raises(StoreError):
        operation(made)
    assert other.seen == []


# --- what is written is there


@pytest.mark.parametrize('fault', ['drops_byte', 'flips_byte', 'forgets'])
@pytest.mark.parametrize(
    ('operation', 'kind'),
    [(writing, 'put'), (publishing, 'put'), (writing_in_parts, 'part'), (publishing_in_parts, 'part'),
     (copying_there, 'part'), (copying_there, 'put')],
)  # fmt: skip
def test_what_the_store_does_not_keep_is_an_error(server, new_case, operation, kind, fault):
    case = new_case(operation)
    server.aged = fault == 'forgets'
    server.plan(kind, stays=fault)
    with pytest.raises(StoreError):
        operation(case)
    # Nothing that is broken is left under a new name.
    assert not (case.direct / 'in' / 'new').exists()
    assert not (case.direct / 'copy' / 'y').exists()


def test_a_join_that_did_nothing_is_an_error(server, new_case):
    for operation in (writing_in_parts, publishing_in_parts):
        case = new_case(operation)
        server.plan('join', stays='forgets')
        with pytest.raises(StoreError):
            operation(case)
        assert (case.direct / 'in' / 'a1').read_bytes() == FILES['a1']


@pytest.mark.parametrize(
    'operation', [writing, publishing, writing_in_parts, publishing_in_parts, copying, copying_there]
)
def test_a_store_whose_etags_are_no_md5s_is_judged_by_what_it_gives_back(server, new_case, operation):
    case = new_case(operation)
    server.odd_etags = True
    operation(case)
    server.plan('part', stays='flips_byte')
    server.plan('put', stays='flips_byte')
    if operation is not copying:
        with pytest.raises(StoreError):
            operation(new_case(operation))


def test_a_byte_that_is_lost_once_is_sent_again(server, new_case):
    for operation, kind in ((writing, 'put'), (writing_in_parts, 'part'), (publishing_in_parts, 'part')):
        server.plan(kind, ['flips_byte'])
        operation(new_case(operation))


# --- publishing under a condition


@pytest.mark.parametrize('store', ['moto', 'seaweed'])
@pytest.mark.parametrize('data', [b'new', LARGE], ids=['put', 'parts'])
@pytest.mark.parametrize(
    'faults', [['lost'], ['lost', 'lost'], ['lost_html'], ['late_error'], ['lost', 'reset', 'lost']]
)
def test_a_publish_whose_reply_is_lost(request, tmp_path, store, data, faults):
    backend = request.getfixturevalue(store)
    with S3Proxy(backend.endpoint) as server:
        place = backend.place()
        mine = granular.Path(
            str(place / 'new'), **{**backend.options, 'endpoint_url': server.endpoint, 'config': QUICK}
        )
        server.plan('put' if data == b'new' else 'join', faults)
        granular.aio.runtime.bridge.run(publish(mine, data))
        assert (place / 'new').read_bytes() == data


@pytest.mark.parametrize('store', ['moto', 'seaweed'])
@pytest.mark.parametrize('data', [b'new', LARGE], ids=['put', 'parts'])
@pytest.mark.parametrize('faults', [[], ['lost'], ['reset', 'lost']])
def test_what_another_writer_has_published_stays(request, tmp_path, store, data, faults):
    backend = request.getfixturevalue(store)
    with S3Proxy(backend.endpoint) as server:
        place = backend.place()
        mine = granular.Path(
            str(place / 'new'), **{**backend.options, 'endpoint_url': server.endpoint, 'config': QUICK}
        )
        (place / 'new').write_bytes(b'theirs')
        server.plan('put' if data == b'new' else 'join', faults)
        with pytest.raises(AlreadyExistsError):
            granular.aio.runtime.bridge.run(publish(mine, data))
        assert (place / 'new').read_bytes() == b'theirs'
        assert [path.name for path in place.iterdir()] == ['new']


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_a_dataset_whose_replies_are_lost(server, moto, layout):
    for kind in ('put', 'begin', 'part', 'join', 'head', 'list'):
        place = moto.place()
        mine = granular.Path(str(place), endpoint_url=server.endpoint, key='KEY', secret='x', config=QUICK)
        server.plan(kind, ['lost', 'good'] * 20)
        with granular.DatasetWriter(mine / 'ds', {'x': 'bytes'}, granular.encoders, layout=layout) as writer:
            for i in range(2):
                writer.append({'x': LARGE[i:]})
        with granular.DatasetReader(place / 'ds', granular.decoders) as reader:
            assert [point['x'] for point in reader] == [LARGE, LARGE[1:]]


def test_an_object_that_is_replaced_after_it_was_written(server, new_case):
    """The last writer wins, and the one before is not told of a fault."""
    case = new_case(writing)
    forward = server.forward

    async def overwritten(asked):
        answer = await forward(asked)
        if asked.kind == 'put':
            await forward(asked._replace(body=b'theirs', headers={
                **asked.headers, 'content-length': '6', 'x-amz-meta-granular-writer': 'theirs', 'content-md5': '',
            }))  # fmt: skip
        return answer

    server.forward = overwritten
    try:
        (case.place / 'a1').write_bytes(b'mine')
    finally:
        del server.forward
    assert (case.direct / 'in' / 'a1').read_bytes() == b'theirs'


# --- what a store says of a request


@pytest.mark.parametrize(('operation', 'kind'), CASES, ids=IDS)
def test_credentials_that_expire_are_renewed(server, new_case, tmp_path, monkeypatch, operation, kind):
    keys = AmazonKeys(tmp_path / 'credentials')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(keys.file))
    case = new_case(operation)
    case.reopen(endpoint_url=server.endpoint, config=QUICK)
    server.renew = keys.renew
    server.plan(kind, ['expire'])
    operation(case)


@pytest.mark.parametrize('operation', OPERATIONS, ids=lambda operation: operation.__name__)
def test_a_clock_that_is_wrong_is_made_up_for(server, new_case, operation, monkeypatch):
    case = new_case(operation)
    monkeypatch.setattr(server, 'clock', datetime.timedelta(hours=-3))
    operation(case)


@pytest.mark.parametrize('operation', OPERATIONS, ids=lambda operation: operation.__name__)
def test_the_region_of_the_bucket_is_gone_to(server, moto, new_case, monkeypatch, operation):
    from granular.aio.stores.s3.client import S3Client

    with S3Proxy(moto.endpoint) as wrong:
        wrong.region = 'eu-west-3'
        places = {'us-east-1': wrong, 'eu-west-3': server}
        given = S3Client._address
        monkeypatch.setattr(
            S3Client,
            '_address',
            lambda self: given(self) if self._endpoint else f'{places[self.region].endpoint}/{self._store.bucket}',
        )
        case = new_case(operation)
        case.reopen(key='KEY', secret=str(next(numbers)), config=QUICK)
        operation(case)
        assert '/eu-west-3/s3/' in server.asked[-1].headers['authorization']
        assert wrong.seen


def test_denied_is_denied(server, new_case):
    denied = ('status', 403, b'<Error><Code>AccessDenied</Code></Error>')
    for operation, kinds in OPERATIONS.items():
        case = new_case(operation)
        for kind in {*kinds, 'get'}:
            server.plan(kind, stays=denied)
        with pytest.raises(AccessDeniedError, match='denied'):
            operation(case)
        server._stays.clear()


def test_objects_without_an_etag_have_no_version(server, new_case):
    case = new_case(writing)
    server.no_etags = True
    assert (case.place / 'a1').stat().version is None
    assert (case.place / 'a1').stat().modified == (case.direct / 'in' / 'a1').stat().modified
    writing(case)
    writing_in_parts(case)


@pytest.mark.parametrize('data', [b'new', LARGE], ids=['put', 'parts'])
def test_who_may_only_write_is_told_by_the_etag(server, new_case, data):
    denied = ('status', 403, b'<Error><Code>AccessDenied</Code></Error>')
    case = new_case(publishing)
    server.plan('head', stays=denied)
    server.plan('get', stays=denied)
    publishing(case, data)
    server.odd_etags = True
    with pytest.raises(AccessDeniedError):
        publishing(new_case(publishing), data)


@pytest.mark.parametrize('data', [b'new', LARGE], ids=['put', 'parts'])
def test_a_server_without_conditions_is_asked_first(server, new_case, data):
    for kind in ('put', 'join'):
        server.plan(kind, stays='conditions_unknown')
    publishing(new_case(publishing), data)
    case = new_case(publishing)
    (case.direct / 'in' / 'new').write_bytes(b'theirs')
    with pytest.raises(AlreadyExistsError):
        publishing(case, data)
    assert (case.direct / 'in' / 'new').read_bytes() == b'theirs'


@pytest.mark.parametrize('code', [409, 412])
def test_a_conflict_with_what_is_gone_is_tried_again(server, new_case, code):
    conflict = ('status', code, b'<Error><Code>ConditionalRequestConflict</Code></Error>')
    server.plan('put', [conflict])
    publishing(new_case(publishing))
    server.plan('put', stays=conflict)
    with pytest.raises(AlreadyExistsError):
        publishing(new_case(publishing))
    assert server.seen.count('put') < 10


@pytest.mark.parametrize('code', ['BadDigest', 'RequestTimeout', 'IncompleteBody'])
@pytest.mark.parametrize(('operation', 'kind'), [(writing, 'put'), (writing_in_parts, 'part')])
def test_a_body_that_was_damaged_on_the_way_is_sent_again(server, new_case, operation, kind, code):
    server.plan(kind, [('status', 400, f'<Error><Code>{code}</Code></Error>'.encode())])
    operation(new_case(operation))


def test_a_server_is_told_the_checksums(server, new_case):
    for operation, kind in ((writing, 'put'), (writing_in_parts, 'part'), (removing, 'deletes')):
        operation(new_case(operation))
        for asked in server.asked:
            if asked.kind == kind:
                assert asked.headers['content-md5'] == base64.b64encode(hashlib.md5(asked.body).digest()).decode()


# --- options


def every_operation(new_case, **options):
    for operation in OPERATIONS:
        case = new_case(operation)
        case.reopen(**{**case.options, **options})
        with contextlib.suppress(AccessDeniedError):  # moto refuses access to private objects
            operation(case)
        yield case.server.asked


def test_options_reach_every_request(server, new_case):
    for asked in every_operation(new_case, requester_pays=True, region='eu-west-3'):
        assert {request.headers['x-amz-request-payer'] for request in asked} == {'requester'}
        assert all('/eu-west-3/s3/' in request.headers['authorization'] for request in asked)
        assert {request.headers['x-amz-security-token'] for request in asked} == {'TOKEN'}
    for asked in every_operation(new_case, anon=True):
        assert not any({'authorization', 'x-amz-security-token'} & request.headers.keys() for request in asked)


def test_headers_of_what_is_written(server, new_case):
    given = {
        'ServerSideEncryption': 'aws:kms',
        'SSEKMSKeyId': 'mine',
        'BucketKeyEnabled': True,
        'StorageClass': 'GLACIER_IR',
    }
    for operation, kind in ((writing, 'put'), (writing_in_parts, 'begin'), (copying, 'copy')):
        case = new_case(operation)
        case.reopen(**case.options, s3_additional_kwargs=given)
        operation(case)
        for asked in [asked for asked in server.asked if asked.kind == kind]:
            assert asked.headers['x-amz-server-side-encryption'] == 'aws:kms'
            assert asked.headers['x-amz-server-side-encryption-aws-kms-key-id'] == 'mine'
            assert asked.headers['x-amz-server-side-encryption-bucket-key-enabled'] == 'true'
            assert asked.headers['x-amz-storage-class'] == 'GLACIER_IR'
            assert asked.headers['authorization'].count('x-amz-storage-class') == 1


@pytest.mark.parametrize('option', [{'key_id': 'x'}, {'client_kwargs': {'timeout': 3}}, {'config_kwargs': {'x': 1}}])
def test_unknown_options_are_named(moto, option):
    place = granular.Path(str(moto.place()), **{**moto.options, **option})
    for ask in (place.exists, lambda: place.write_bytes(b'x'), place.read_bytes):
        with pytest.raises(InvalidArgumentError, match='unknown .*expected some of'):
            ask()


def test_signed_bodies_over_tls(seaweed, tmp_path):
    """A server that verifies signatures, and Content-MD5: over TLS, the body is not part of the signature."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / 'authority.pem'))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert('127.0.0.1').configure_cert(context)
    direct = seaweed.place()
    with TLSProxy(context, seaweed.endpoint) as tls:
        options = {**seaweed.options, 'endpoint_url': tls.endpoint, 'tls_verify': str(tmp_path / 'authority.pem')}
        place = granular.Path(str(direct), **options, config=QUICK)
        for name, data in {**FILES, 'large': LARGE}.items():
            (place / name).write_bytes(data)
        (place / 'large').copy(place / 'copy')
        assert (direct / 'copy').read_bytes() == LARGE
        assert contents(place) == contents(direct)
        place.rmtree()
    assert not direct.exists()


def test_nothing_but_botocore_is_imported(moto):
    """Neither s3fs nor aiobotocore, whatever is done in a bucket, and botocore not for what is on a disk."""
    code = f"""
import sys
for name in ('s3fs', 'aiobotocore', 'boto3', 'fsspec'):
    sys.modules[name] = None
import granular
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
    subprocess.run([sys.executable, '-c', code], check=True, timeout=50)


def test_without_botocore_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'botocore.session', None)
    with pytest.raises(MissingExtraError, match=r'granular-stream\[s3\]'):
        granular.Path(f's3://bucket-{next(numbers)}/x', key='k', secret='x').read_bytes()


# --- copies and uploads


def test_large_objects_are_copied_in_parts(server, new_case, monkeypatch):
    monkeypatch.setattr('granular.aio.stores.s3.copying._MAX_COPY', 5 << 20)
    for fault in ('lost', 'error'):
        for kind in ('begin', 'copy_part', 'join', 'head'):
            case = new_case(writing)
            (case.direct / 'large').write_bytes(LARGE)
            server.plan(kind, [fault])
            (case.root / 'large').copy(case.root / 'copy')
            assert server.seen.count('copy_part') >= 2
            assert (case.direct / 'copy').read_bytes() == LARGE


def test_a_source_that_is_replaced_while_it_is_copied(server, new_case, monkeypatch):
    changed = ('status', 412, b'<Error><Code>PreconditionFailed</Code></Error>')
    case = new_case(copying)
    server.plan('copy', stays=changed)
    with pytest.raises(ObjectChangedError):
        copying(case)
    assert all('x-amz-copy-source-if-match' in asked.headers for asked in server.asked if asked.kind == 'copy')
    monkeypatch.setattr('granular.aio.stores.s3.copying._MAX_COPY', 5 << 20)
    (case.direct / 'large').write_bytes(LARGE)
    server.plan('copy_part', stays=changed)
    with pytest.raises(ObjectChangedError):
        (case.root / 'large').copy(case.root / 'copy')
    assert uploads(case.direct) == []
    assert not (case.direct / 'copy').exists()


def uploads(path):
    async def listed():
        return [upload.key async for upload in path.store.uploads(path.key)]

    return granular.aio.runtime.bridge.run(listed())


async def left_behind(path, size):
    writer = await path.store.open_writer(path.key)
    await writer.write(bytes(size))
    while writer._tasks:
        await writer._finish_one()


@pytest.mark.parametrize('kind', ['uploads', 'parts', 'abort'])
def test_uploads_that_are_listed_and_dropped(server, new_case, kind):
    for fault in READING + (CARRIED_OUT if kind == 'abort' else []):
        case = new_case(writing)
        granular.aio.runtime.bridge.run(left_behind(case.place / 'x', 6 << 20))
        server.plan(kind, [fault])
        assert [(left.kind, left.size) for left in granular.clean(case.place, older=0, remove=True)] == [
            ('upload', 5 << 20)
        ]
        assert uploads(case.direct) == []
    for fault in READING + STAYING:
        case = new_case(writing, config=IMPATIENT)
        granular.aio.runtime.bridge.run(left_behind(case.place / 'x', 6 << 20))
        server.plan(kind, stays=fault)
        if kind == 'abort' and fault == 'cut':  # of no body
            granular.clean(case.place, older=0, remove=True)
        else:
            with pytest.raises(StoreError):
                granular.clean(case.place, older=0, remove=True)
        server.plan(kind)
        granular.clean(case.place, older=0, remove=True)
        assert uploads(case.direct) == []


# --- deleting


def test_objects_that_come_while_a_folder_is_deleted(server, new_case):
    case = new_case(removing)
    forward, late = server.forward, ['late1', 'late2']

    async def adding(asked):
        if asked.kind == 'deletes' and late:
            await asyncio.to_thread((case.direct / 'in' / late.pop()).write_bytes, b'x')
        return await forward(asked)

    server.forward = adding
    try:
        removing(case)
    finally:
        del server.forward
    assert late == []


def test_a_store_that_does_not_delete_is_an_error(server, new_case):
    def reply(keys):
        return (
            b'<DeleteResult>' + b''.join(b'<Deleted><Key>%b</Key></Deleted>' % key for key in keys) + b'</DeleteResult>'
        )

    case = new_case(removing)

    async def lying(asked):
        return Answer(200, {}, reply(re.findall(rb'<Key>([^<]*)</Key>', asked.body)))

    server.lying = lying
    server.plan('deletes', stays='lying')
    with pytest.raises(StoreError, match='does not delete them'):
        removing(case)
    assert server.seen.count('list') < 40
    del server.lying
    for body in (b'<DeleteResult></DeleteResult>', reply([b'in/a0']), reply([b'other'])):
        server.plan('deletes', stays=('status', 200, body))
        with pytest.raises(BadReplyError):
            removing(case)
    refused = b'<DeleteResult><Error><Key>%b</Key><Code>AccessDenied</Code></Error></DeleteResult>'
    server.plan('deletes', stays=('status', 200, refused % f'{case.place.key}/a0'.encode()))
    with pytest.raises(StoreError, match='AccessDenied'):
        removing(case)


def test_a_folder_that_is_not_there(server, new_case):
    case = new_case(listing)
    for ask in (
        lambda: list((case.root / 'none').iterdir()), (case.root / 'none').rmtree, (case.root / 'none').stat,
        lambda: (case.root / 'none').copy(case.tmp_path / 'x'), (case.root / 'none').unlink,
    ):  # fmt: skip
        with pytest.raises(NotFoundError):
            ask()
    assert list((case.root / 'none').glob('*')) == []


def test_a_bucket_that_vanishes_while_it_is_listed(server, new_case):
    case = new_case(listing)
    for operation in (listing, globbing_all, walking):
        server.plan('list', ['good'], ('status', 404, b'<Error><Code>NoSuchBucket</Code></Error>'))
        with pytest.raises(StoreError):
            operation(case)
