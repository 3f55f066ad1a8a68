"""Every fault in the middle of a dataset in an S3 or GCS bucket, through a path, a reader, a Loader and a stream.

The result is correct, or a specific error, in bounded time. ``test_faults.py`` checks the requests that are sent.
"""

import dataclasses
import email.utils
import itertools
import ssl
import time

import numpy as np
import pytest
import trustme

import granular
from granular.errors import (
    AccessDeniedError,
    BadReplyError,
    CorruptDatasetError,
    NotFoundError,
    ObjectChangedError,
    OutOfRangeError,
    StoreError,
    StoreTimeoutError,
)
from granular.grain import MultiprocessingOptions
from tests.support.credentials import AmazonKeys, google_key
from tests.support.faults import FaultServer
from tests.support.tables import cover

STORES, INTERFACES = ('s3', 'gs'), ('path', 'opening', 'reader', 'loader', 'stream')
COUNT, SIZE, BATCH = 24, 2000, 4
BOUND = 50.0  # seconds: a reply that hangs takes a minute
CONFIG = granular.IOConfig(
    backoff=0.001, backoff_cap=0.02, connect_timeout=1.0, first_byte_timeout=0.2, read_timeout=0.2, min_rate=20_000,
    attempts=4, hedge=0.0, max_gap=0,
)  # fmt: skip

# Faults that pass, by family: the lines of the server's script and the error; None for the right bytes.
FAMILIES = {
    'connection': {
        'a reset before the body': (['reset'], None),
        'a reset before any of the body came': ([('truncate', 0)], None),
        'a reset inside the body': ([('truncate', 100)], None),
        'a reset after the body': (['then_reset'], None),
        'a body that is cut off': ([('until_close', 100)], None),
        'a connection for each reply': (['then_close'] * 99, None),
        'a connection for each reply, with Connection: close': ([('then_close', 'close')] * 99, None),
    },
    'time': {
        'no reply': (['hang'], None),
        'a stall': ([('stall', 100)], None),
        'a slow drip': ([('drip', 0.002)], None),
        'a storm of 503': ([('status', 503)] * 3, None),
    },
    'range': {
        'a body too short': (['short'], None),
        'a body too long': (['long'], None),
        'a wrong Content-Range': (['shifted'], None),
        'no Content-Range': ([('ranged', None)], None),
        'all of the object for a range': (['whole'] * 9, None),
    },
    'document': {
        'an error in a 200': (['document'], None),
        '416': (['unsatisfiable'], {'path': OutOfRangeError, 'opening': None, 'reader': None}),
        'garbage': ([('raw', b'SSH-2.0-OpenSSH_9.2\r\n\r\n')], None),
        'garbage, and the end': ([('raw', b'\x16\x03\x01' * 50, True)], None),
    },
    'coding': {
        'chunks without a length': ([('chunked', 300)] * 9, None),
        'chunks that end early': ([('chunked', 300, b'0\r\n\r\n')], None),
        'all of it, compressed': ([('whole', 'gzip')], None),
        'a part, compressed on the way': (['zipped'], None),
    },
    'version': {
        'another object': (
            ['good', 'replaced'],
            {'path': ObjectChangedError, 'opening': None, 'reader': ObjectChangedError},
        ),
        'another object, after a reset': (
            [('truncate', 100), 'replaced'],
            # Opened again, as it was replaced: by objects that are no dataset.
            {'path': ObjectChangedError, 'opening': CorruptDatasetError, 'reader': ObjectChangedError},
        ),
        'expired credentials': (['expire'], None),
    },
}
PASSES = {name: fault for family in FAMILIES.values() for name, fault in family.items()}

# What stays, and the error.
STAYS = {
    'reset': StoreError,
    ('truncate', 0): StoreError,
    'hang': StoreTimeoutError,
    ('stall', 0): StoreTimeoutError,
    ('status', 503): StoreError,
    ('status', 403): AccessDeniedError,
    ('status', 401): AccessDeniedError,
    ('status', 404): NotFoundError,
    'short': BadReplyError,
    'long': BadReplyError,
    'shifted': BadReplyError,
    ('ranged', None): BadReplyError,
    'document': BadReplyError,
    'unsatisfiable': BadReplyError,
    ('whole', 'gzip'): BadReplyError,
    'zipped': BadReplyError,
    ('raw', b'SSH-2.0-OpenSSH_9.2\r\n\r\n'): BadReplyError,
}


def point(i):
    return {'data': np.random.default_rng(i).bytes(SIZE), 'label': i}


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    path = tmp_path_factory.mktemp('faults') / 'data'
    with granular.DatasetWriter(path, {'data': 'bytes', 'label': 'int'}, granular.encoders, layout='columns') as writer:
        for i in range(COUNT):
            writer.append(point(i), flush=False)
    return {f'data/{file.name}': file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope='module')
def running(files):
    with FaultServer(files=files) as server:
        # Written long ago: what is just written is asked for twice when it is opened.
        server.modified[''], server.date = email.utils.formatdate(0, usegmt=True), email.utils.formatdate(usegmt=True)
        yield server


@pytest.fixture
def server(running, files):
    yield running
    running.script.clear()
    running.hang_up()  # each test has clients of its own, which would keep theirs for a while
    running.files, running.etag, running.aim = files, '"one"', ''


@pytest.fixture
def path(server, request, tmp_path, monkeypatch):
    """The dataset in a bucket of its own, whose credentials the server renews."""
    return bucket(server, request.getfixturevalue('store'), tmp_path, monkeypatch)


buckets = itertools.count()


def bucket(server, store, tmp_path, monkeypatch, config=CONFIG):
    keys = AmazonKeys(tmp_path / 'credentials')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(keys.file))
    server.renew = keys.renew
    options = {} if store == 's3' else {'token': google_key(tmp_path, server)}
    return granular.Path(f'{store}://b{next(buckets)}/data', endpoint_url=server.endpoint, config=config, **options)


def through(interface, path, fault):
    """Read through one of the interfaces, and call ``fault`` in the middle. Returns whether the result is correct."""
    if interface == 'path':
        starts = [SIZE * i for i in range(0, COUNT, 3)]
        fault()
        result = (path / 'data.bag').read_ranges(starts, [start + SIZE for start in starts])
        return result == [point(i)['data'] for i in range(0, COUNT, 3)]
    if interface == 'opening':
        fault()
    with granular.DatasetReader(path, granular.decoders) as reader:
        if interface == 'loader':
            return batches(reader, fault)
        if interface in ('stream', 'workers'):
            return elements(reader, fault, worker=interface == 'workers')
        if interface == 'reader':
            fault()
        return reader.fetch(range(0, COUNT, 3)) == [point(i) for i in range(0, COUNT, 3)]


def batches(reader, fault):
    source = granular.sources.Transform(
        reader, lambda point, seed: {'data': np.frombuffer(point['data'], np.uint8), 'label': point['label']}
    )
    result = []
    with granular.Loader(source, BATCH, prefetch=0) as loader:
        for batch in loader:
            result += [{'data': d.tobytes(), 'label': x} for d, x in zip(batch['data'], batch['label'], strict=True)]
            if len(result) == BATCH:
                fault()
    return result == [point(i) for i in range(COUNT)]


def elements(reader, fault, worker):
    stream = granular.MapDataset.source(reader).to_iter_dataset(granular.ReadOptions(prefetch_buffer_size=BATCH))
    if worker:
        stream = stream.mp_prefetch(MultiprocessingOptions(num_workers=1, start_method='fork'))
    result = []
    with iter(stream) as iterator:
        if worker:
            fault()
        for element in iterator:
            result.append(element)
            if len(result) == BATCH and not worker:
                fault()
    return result == [point(i) for i in range(COUNT)]


def check(interface, path, fault, error):
    began = time.monotonic()
    if error is None:
        assert through(interface, path, fault)
    else:
        with pytest.raises(error) as caught:
            through(interface, path, fault)
        assert isinstance(caught.value, error)
        assert str(path.parent) in str(caught.value)
    assert time.monotonic() - began < BOUND


# Ways to read of the same kind, each in both stores.
GROUPS = [list(itertools.product(choice, STORES)) for choice in (['path'], ['opening'], ['reader', 'loader', 'stream'])]


@pytest.mark.parametrize(
    ('interface', 'store', 'fault'),
    [(*way, fault) for way, fault in cover(GROUPS, [list(family) for family in FAMILIES.values()])],
)
def test_passing_fault_is_survived(server, path, store, interface, fault):
    lines, errors = PASSES[fault]
    server.aim = 'data.idx' if interface == 'opening' else 'data.bag'
    error = None if errors is None else errors['reader' if interface in ('loader', 'stream') else interface]
    check(interface, path, lambda: server.script.extend(lines), error)
    assert len(server.script) < len(lines)


@pytest.mark.parametrize(
    ('store', 'fault'),
    cover([STORES], [['a reset inside the body', 'no reply', 'a wrong Content-Range', 'expired credentials']]),
)
def test_passing_faults_do_not_reach_the_parent_of_a_worker(server, path, store, fault):
    server.aim = 'data.bag'
    check('workers', path, lambda: server.script.extend(PASSES[fault][0]), None)
    assert not server.script


LASTING = (
    [('reader', line) for line in STAYS]
    + [('loader', ('stall', 0)), ('loader', ('status', 404)), ('path', 'document')]
    + [('stream', ('stall', 0)), ('stream', ('status', 404)), ('workers', 'reset'), ('workers', ('status', 404))]
)


@pytest.mark.parametrize(
    ('interface', 'line', 'store'), [(*row, store) for row, store in cover([LASTING], [STORES])], ids=str
)
def test_lasting_fault_is_an_error(server, path, store, interface, line):
    server.aim = 'data.bag'
    check(interface, path, lambda: server.script.extend([line] * 1000), STAYS[line])


def test_token_server_may_be_down_for_a_while(files, tmp_path, monkeypatch):
    with FaultServer(files=files) as server:
        server.tokenless = 2
        check('opening', bucket(server, 'gs', tmp_path, monkeypatch), int, None)
        assert server.tokens > 2


@pytest.mark.parametrize('store', STORES)
@pytest.mark.parametrize('interface', INTERFACES)
def test_redirect_is_not_followed(files, server, path, store, interface):
    with FaultServer(files=files) as other:
        line = ('redirect', f'{other.endpoint}/b/data/data.bag')
        check(interface, path, lambda: server.script.extend([line] * 1000), StoreError)
        assert other.connections == 0


@pytest.mark.parametrize('store', STORES)
@pytest.mark.parametrize('interface', INTERFACES)
def test_stopped_server_is_an_error(files, tmp_path, monkeypatch, store, interface):
    with FaultServer(files=files) as server:
        path = bucket(server, store, tmp_path, monkeypatch, dataclasses.replace(CONFIG, retry_time=0.5))
        check(interface, path, server.stop, StoreError)


@pytest.mark.parametrize('store', STORES)
@pytest.mark.parametrize('interface', ['path', 'opening'])
def test_unknown_host_is_an_error(store, interface):
    options = {'key': 'k', 'secret': 'x'} if store == 's3' else {'token': 'anon'}
    path = granular.Path(f'{store}://b/data', endpoint_url='http://no-such-host.invalid', config=CONFIG, **options)
    check(interface, path, int, StoreError)


@pytest.mark.parametrize('store', STORES)
@pytest.mark.parametrize('interface', ['path', 'opening'])
@pytest.mark.parametrize('who', ['another name', 'unknown issuer'])
def test_wrong_certificate_is_an_error(files, tmp_path, monkeypatch, store, interface, who):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / 'authority.pem'))
    monkeypatch.setenv('SSL_CERT_FILE', str(tmp_path / 'authority.pem'))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issuer, name = (authority, 'example.org') if who == 'another name' else (trustme.CA(), '127.0.0.1')
    issuer.issue_cert(name).configure_cert(context)
    options = {'key': 'k', 'secret': 'x'} if store == 's3' else {'token': 'anon'}
    with FaultServer(context, files) as server:
        path = granular.Path(f'{store}://b/data', endpoint_url=server.endpoint, config=CONFIG, **options)
        with pytest.raises(StoreError, match='(?i)certificate'):
            through(interface, path, int)
        assert server.ranges == []
