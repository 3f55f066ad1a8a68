"""Errors carry the path, key, index and status that their message names, and pickle with them."""

import pickle
import time

import pytest

import granular
from granular import errors
from granular.errors import (
    AlreadyExistsError,
    CorruptRecordError,
    DecodeError,
    EncodeError,
    GranularError,
    NotFoundError,
    OutOfRangeError,
    StoreError,
)
from tests.support.faults import FaultServer

# Operations on a file that has 4 bytes or is missing, with the error and the status of the reply, if one refuses it.
OPERATIONS = {
    'read': ('missing', lambda path: path.read_bytes(), NotFoundError, 404),
    'read ranges': ('missing', lambda path: path.read_ranges([0, 9], [1, 10]), NotFoundError, 404),
    'open': ('missing', lambda path: path.open('rb').read(), NotFoundError, None),
    'stat': ('missing', lambda path: path.stat(), NotFoundError, None),
    'list': ('missing', lambda path: list(path.iterdir()), NotFoundError, None),
    'delete': ('missing', lambda path: path.unlink(), NotFoundError, None),
    'copy': ('missing', lambda path: path.copy(f'memory://copied-{time.time_ns()}'), NotFoundError, None),
    'read beyond the end': ('file', lambda path: path.read_range(2, 9), OutOfRangeError, None),
    'create again': ('file', lambda path: path.mkdir(), AlreadyExistsError, None),
    'bag': ('missing', granular.BagReader, NotFoundError, None),
    'dataset': ('missing', granular.DatasetReader, NotFoundError, None),
}
READ_ONLY = {'delete', 'create again'}


def raised_by(call, error=GranularError):
    """Return the error of a call, after it was pickled."""
    with pytest.raises(error) as caught:
        call()
    return pickle.loads(pickle.dumps(caught.value))


@pytest.mark.parametrize('store', ['local', 'memory', 'moto', 'seaweed', 'fakegcs', 'azurite', 'http'])
def test_errors_of_stores_have_path_and_status(store, request, tmp_path):
    match store:
        case 'local':
            folder = granular.Path(tmp_path)
        case 'memory':
            folder = granular.Path(f'memory://errors-{time.time_ns()}')
        case 'http':
            server = request.getfixturevalue('http')
            folder = server.place()
            served = server.folder / '/'.join(folder.parts[-2:])
            served.mkdir(parents=True)
            (served / 'file').write_bytes(b'1234')
        case _:
            folder = request.getfixturevalue(store).place()
    if store != 'http':
        folder.mkdir(parents=True, exist_ok=True)
        (folder / 'file').write_bytes(b'1234')
    wrong = {}
    for name, (file, call, kind, status) in OPERATIONS.items():
        if store == 'http' and name in READ_ONLY:
            continue
        error = raised_by(lambda call=call, file=file: call(folder / file), kind)
        expected = None if store in ('local', 'memory') else status
        if (error.path.rstrip('/'), error.status) != (f'{folder / file}', expected or error.status):
            wrong[name] = (error.path, error.status, str(error))
    assert not wrong


@pytest.mark.parametrize('status', [400, 401, 403, 404, 407, 410, 412, 429, 500, 503])
def test_errors_of_refused_requests_have_the_status(status):
    with FaultServer() as server:
        path = granular.Path(f'{server.endpoint}/x', config=granular.IOConfig(attempts=1, retry_time=0))
        server.script.extend([('status', status)] * 20)
        error = raised_by(path.read_bytes)
    assert (error.status, error.path) == (status, f'{path}')


def test_a_server_that_is_not_there_has_a_path_and_no_status():
    path = granular.Path('http://127.0.0.1:1/x', config=granular.IOConfig(attempts=1))
    error = raised_by(path.read_bytes, StoreError)
    assert (error.path, error.status) == (f'{path}', None)


def test_errors_of_records_have_path_key_and_index(tmp_path):
    path = granular.Path(tmp_path / 'data')
    with granular.DatasetWriter(path, {'i': 'int', 't': 'utf8'}, checksums=True) as writer:
        for i in range(9):
            writer.append({'i': i, 't': 'text'})
        error = raised_by(lambda: writer.append({'i': 'no number', 't': ''}), EncodeError)
        assert (error.path, error.key, error.index) == (f'{path}', 'i', 9)
    with granular.DatasetReader(path, {**granular.decoders, 'utf8': lambda record: 1 / 0}) as reader:
        for call in (lambda: reader[3], lambda: reader.fetch([3])):
            error = raised_by(call, DecodeError)
            assert (error.path, error.key, error.index) == (f'{path}', 't', 3)
        for call in (lambda: reader[9], lambda: reader.fetch([0, 9])):
            assert raised_by(call, OutOfRangeError).index == 9
    bag = next(iter(path.rglob('t.bag')))
    data = bytearray(bag.read_bytes())
    data[0] ^= 1
    bag.write_bytes(data)
    with granular.DatasetReader(path, granular.decoders, verify=True) as reader:
        error = raised_by(lambda: reader.fetch([0]), CorruptRecordError)
    assert (error.path, error.index) == (f'{bag}', 0)


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GranularError)]


@pytest.mark.parametrize('kind', KINDS)
def test_each_class_of_error_pickles_with_its_attributes(kind):
    error = raised_by(lambda: (_ for _ in ()).throw(kind('text', path='p', key='k', index=3, status=404)))
    assert (type(error), str(error), error.path, error.key, error.index, error.status) == (
        kind,
        'text',
        'p',
        'k',
        3,
        404,
    )
    plain = pickle.loads(pickle.dumps(kind('text')))
    assert (plain.path, plain.key, plain.index, plain.status) == (None,) * 4
