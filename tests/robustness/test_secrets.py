"""Planted credentials appear in nothing that the library shows or stores."""

import contextlib
import dataclasses
import json
import logging
import pickle
import sys
import traceback
import urllib.parse

import numpy as np
import pytest
from google.oauth2.credentials import Credentials

import granular
from granular import aio, cli
from granular.errors import GranularError
from tests.support.faults import FaultServer
from tests.support.seams import on_loop

KEY, SECRET, TOKEN = 'AKIAPLANTEDKEY', 'plantedsecret', 'plantedsessiontoken'
BEARER, SIGNATURE, USER, PASSWORD = 'ya29.plantedbearer', 'plantedsignature', 'planteduser', 'plantedpassword'
PLANTED = ('planted', 'PLANTED')
QUERY = (
    f'X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={KEY}%2F20260101&X-Amz-Security-Token={TOKEN}'
    f'&X-Amz-Signature={SIGNATURE}'
)
QUICK = granular.IOConfig(backoff=0.001, backoff_cap=0.01, attempts=2, retry_time=0.2)
IMPATIENT = dataclasses.replace(QUICK, first_byte_timeout=0.1, read_timeout=0.1)

ECHO = (
    f'GET /object?{QUERY} Authorization: Bearer {BEARER} x-amz-security-token: {TOKEN} '
    f'AWS4-HMAC-SHA256 Credential={KEY}/x, Signature={SIGNATURE}'
)
FAULTS = {
    'refused': [('status', 403)] * 3,
    'missing': [('status', 404)] * 3,
    'failing': [('status', 500)] * 1000,
    'throttling': [('status', 503, 'SlowDown')] * 1000,
    'expired': [('status', 401)] * 3,
    'reset': ['reset'] * 1000,
    'truncated': [('truncate', 10)] * 1000,
    'silent': ['hang'] * 1000,
    'nonsense': [('raw', b'SSH-2.0 planted by no one'.replace(b'planted', b'sent') + b'\r\n\r\n', True)] * 3,
    'replaced': ['good', 'replaced'],
    'elsewhere': [('redirect', f'/again?{QUERY}')] * 30,
    'quoting': [('raw', f'HTTP/1.1 400 X\r\nContent-Length: {len(ECHO)}\r\n\r\n{ECHO}'.encode())] * 3,
}


class Seen(logging.Handler):
    """A log handler that collects formatted records."""

    def __init__(self):
        super().__init__()
        self.text = ''
        self.setFormatter(logging.Formatter())

    def emit(self, record):
        self.text += self.format(record) + repr(record.args) + '\n'


@pytest.fixture
def logged():
    seen, logger = Seen(), logging.getLogger('granular')
    before = logger.level
    logger.addHandler(seen)
    logger.setLevel(logging.DEBUG)
    yield seen
    logger.setLevel(before)
    logger.removeHandler(seen)


def clean(text):
    """Return a text after checking that it holds no planted secret."""
    leaked = [text[max(0, text.index(word) - 80) :][:200] for word in PLANTED if word in text]
    assert not leaked, leaked
    return text


def places(endpoint, config=QUICK):
    """Return a path with credentials for each kind of store."""
    s3 = {'key': KEY, 'secret': SECRET, 'token': TOKEN, 'endpoint_url': endpoint}
    return {
        'presigned': granular.Path(f'{endpoint}/object?{QUERY}', config=config),
        'headers': granular.Path(f'{endpoint}/object', config=config, headers={'Authorization': f'Bearer {BEARER}'}),
        's3': granular.Path('s3://bucket/object', config=config, **s3),
        'gs': granular.Path('gs://bucket/object', config=config, endpoint_url=endpoint, token=Credentials(BEARER)),
    }


KINDS = ('presigned', 'headers', 's3', 'gs')


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('fault', FAULTS)
def test_failing_requests_reveal_no_secrets(fault, kind, logged):
    with FaultServer() as server:
        path = places(server.endpoint, IMPATIENT if fault == 'silent' else QUICK)[kind]
        calls = [
            lambda: path.read_range(10, 50),
            lambda: path.read_ranges([1, 70_000], [5, 90_000]),
            lambda: granular.BagReader(path),
            lambda: [path.read_range(at, at + 5) for at in (1, 2)],
        ]
        failed = 0
        for call in calls[: 1 if fault == 'silent' else None]:  # which takes its time
            server.script.clear()
            server.script.extend(FAULTS[fault])
            try:
                call()
            except GranularError as error:
                failed += 1
                clean(''.join(traceback.format_exception(error)))
                clean(repr(error) + str(error.args) + str(getattr(error, '__notes__', '')))
                clean(repr(pickle.loads(pickle.dumps(error))))
        assert failed or fault == 'replaced'
        # The credentials did travel, so that there was something to leak.
        assert any(word in line for head in server.heads for line in head.values() for word in PLANTED) or (
            kind == 'presigned'
        )
    clean(logged.text)
    clean(str(granular.io_stats()))


def test_reprs_states_and_pickles_reveal_no_secrets(tmp_path):
    with FaultServer() as server:
        for kind, path in places(server.endpoint).items():
            path.read_range(1, 5)
            client = on_loop(path.aio.store.client())
            target = on_loop(client.prepare(path.aio.key))
            reader = granular.aio.BagReader(path)
            for thing in (
                path, path.aio, path.parent, path.store, path.store.config, client, client.transport,
                client.transport.pool, target, reader, f'{path}', f'{path:>9}', [path], {path: path.store},
                granular.aio.DatasetReader(path, None), granular.aio.ShardedDatasetReader(path, None),
            ):  # fmt: skip
                clean(repr(thing))
            clean(''.join(map(repr, client.transport.pool.connections)))
            content = pickle.dumps((path, path.store, reader))
            back = pickle.loads(content)[0]
            if kind == 'presigned':
                # It is the address, and all that there is to open it with.
                assert str(back) == str(path) == f'{server.endpoint}/object?{QUERY}'
                assert back.read_range(1, 5) == path.read_range(1, 5)
                assert path.as_uri() == str(path)
            else:
                clean(repr(content))
                clean(str(back.as_uri()))
            assert (back == path) == (kind == 'presigned')


def test_loaders_reveal_no_secrets(moto, tmp_path, logged):
    options = {**moto.options, 'key': KEY, 'secret': SECRET, 'token': TOKEN}
    config = granular.IOConfig(index_cache=str(tmp_path / 'cache'))
    root = granular.Path(str(moto.place()), config=config, **options)
    with granular.DatasetWriter(root, {'x': 'array'}, granular.encoders) as writer:
        for i in range(8):
            writer.append({'x': np.arange(i, i + 3)})
    with granular.DatasetReader(root, granular.decoders) as reader:
        source = granular.sources.Epochs(reader, seed=3)
        with granular.Loader(source, 2) as loader:
            next(loader)
            clean(json.dumps(loader.save()) + repr(loader.stats()) + repr(loader) + repr(loader.aio) + repr(source))
            clean(repr(pickle.dumps(source)))
        clean(repr(pickle.dumps(reader)))
        clean(repr(reader) + repr(reader.aio.bags))
    files = list((tmp_path / 'cache').iterdir())
    assert files
    for file in files:
        clean(file.name + file.read_bytes().decode('latin-1'))
    clean(logged.text)
    clean(str(granular.io_stats()))


@pytest.mark.parametrize(
    'url',
    [f's3://{USER}:{PASSWORD}@bucket/x', f'https://{USER}:{PASSWORD}@host/x', f'gs://{PASSWORD}@bucket/x',
     f'nothing://{USER}:{PASSWORD}@host/x', f'ftp://{USER}:{PASSWORD}@127.0.0.1:1/x', f'sftp://{USER}:{PASSWORD}@host/x'],
)  # fmt: skip
def test_passwords_in_urls_are_not_revealed(url, logged):
    try:
        path = granular.Path(url)
    except GranularError as error:
        clean(''.join(traceback.format_exception(error)))
    else:
        assert str(path) == url
        clean(repr(path) + f'{path}')
    clean(logged.text)


ODD = (
    'plantedsecret/plantedrest', '/plantedpassword', 'planted/9000/planted',
    'planted?planted', 'planted#planted', 'planted@planted', 'planted:planted', 'planted/pass@planted', '//planted',
    'planted%2Fplanted', 'planted/?#@planted', '&planted=planted', '<planted>', "'planted'", '"planted', '[planted]',
    'planted\\planted', 'pläntedplanted/', '+planted/=',
)  # fmt: skip
SCHEMES = (
    's3',
    'gs',
    'http',
    'https',
    'hf',
    'az',
    'abfs',
    'abfss',
    'ftp',
    'sftp',
    'redis',
    'rediss',
    'nothing',
)


@pytest.mark.parametrize('scheme', SCHEMES)
@pytest.mark.parametrize('user', ['', 'user', KEY])
def test_odd_passwords_in_urls_are_not_revealed(scheme, user, logged, monkeypatch):
    for password in ODD:
        url = f'{scheme}://{user}:{password}@host/file.parquet'
        calls = [
            lambda url=url: clean(repr(granular.Path(url)) + f'{granular.Path(url)}'),
            lambda url=url: clean(repr(granular.Path(url).parent)),
            lambda url=url: granular.RedisCache([1], url, fingerprint='x'),
            lambda url=url: granular.Path('s3://bucket/x', endpoint_url=url, key=KEY, secret=SECRET, config=QUICK),
            lambda url=url: granular.Path('gs://bucket/x', endpoint_url=url, config=QUICK),
        ]
        for call in calls:
            try:
                call()
            except GranularError as error:
                clean(''.join(traceback.format_exception(error)))
    clean(logged.text)


@pytest.mark.parametrize('scheme', ['s3', 'gs'])
def test_passwords_in_endpoints_are_not_revealed(scheme):
    options = {'key': KEY, 'secret': SECRET} if scheme == 's3' else {}
    options['endpoint_url'] = f'http://{USER}:{PASSWORD}@127.0.0.1:1'
    path = granular.Path(f'{scheme}://bucket/x', config=QUICK, **options)
    with pytest.raises(GranularError) as caught:
        path.read_bytes()
    clean(''.join(traceback.format_exception(caught.value)))
    clean(repr(path) + repr(pickle.dumps(path)))


@pytest.mark.parametrize('command', [['info'], ['ls'], ['ls', '--json'], ['cat', '0'], ['verify'], ['copy', 'there']])
def test_command_line_reveals_no_secrets(command, monkeypatch, capsys, tmp_path, logged):
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', KEY)
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', SECRET)
    monkeypatch.setenv('AWS_SESSION_TOKEN', TOKEN)
    monkeypatch.setenv('GRANULAR_ATTEMPTS', '2')
    monkeypatch.setenv('GRANULAR_BACKOFF', '0.001')
    monkeypatch.chdir(tmp_path)
    name, *more = command
    with FaultServer() as server:
        for url in (
            f'{server.endpoint}/object?{QUERY}', f'https://{USER}:{PASSWORD}@127.0.0.1/object', f'nothing://{PASSWORD}@x/y',
        ):  # fmt: skip
            server.script.clear()
            server.script.extend([('status', 403)] * 1000)
            monkeypatch.setattr(sys, 'argv', ['granular', name, url, *more])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            out, err = capsys.readouterr()
            assert ended.value.code == 1
            clean(out + err)
    clean(logged.text)


async def test_async_api_reveals_no_secrets(logged):
    with FaultServer() as server:
        path = aio.Path(str(places(server.endpoint)['presigned']), config=QUICK)
        server.script.extend([('status', 500)] * 1000)
        with pytest.raises(GranularError) as caught:
            await asyncio_gathered(path)
        clean(''.join(traceback.format_exception(caught.value)))
        await aio.aclose()
    clean(logged.text)


async def asyncio_gathered(path):
    import asyncio

    return await asyncio.gather(*(path.read_range(i, i + 5) for i in range(3)))


CUSTOM = ('planted/custom+header value', 'plantedword')
QUOTED = {
    'page': lambda value: (400, {}, f'your request had x-api-key = {value} and that was wrong'),
    'html': lambda value: (400, {}, f'<html><b>{value}</b><i>{value.split()[0]}</i></html>'),
    'json': lambda value: (403, {}, json.dumps({'headers': {'X-Api-Key': value}})),
    'percent': lambda value: (404, {}, urllib.parse.quote(value, safe='')),
    'code': lambda value: (500, {}, f'<Error><Code>{value}</Code><Message>{value}</Message></Error>'),
    'content-range': lambda value: (206, {'Content-Range': value}, '0123456789'),
    'location': lambda value: (307, {'Location': f'/x/{urllib.parse.quote(value)}'}, ''),
    'coding': lambda value: (206, {'Transfer-Encoding': value}, ''),
    'length': lambda value: (200, {'Content-Length': value}, ''),
}


@pytest.mark.parametrize('custom', CUSTOM, ids=['text', 'word'])
@pytest.mark.parametrize('how', QUOTED)
def test_custom_headers_quoted_by_a_server_are_not_revealed(how, custom, logged):
    status, headers, body = QUOTED[how](custom)
    lines = {'Content-Length': str(len(body)), **headers}
    reply = f'HTTP/1.1 {status} {custom if how == "page" else "X"}\r\n'
    reply += ''.join(f'{name}: {value}\r\n' for name, value in lines.items()) + f'\r\n{body}'
    with FaultServer() as server:
        path = granular.Path(f'{server.endpoint}/object', config=QUICK, headers={'x-api-key': custom})
        for call in (lambda: path.read_range(10, 50), path.read_bytes, lambda: granular.BagReader(path), path.stat):
            server.script.clear()
            server.script.extend([('raw', reply.encode(), True)] * 1000)
            with contextlib.suppress(GranularError):
                call()
                continue
            # Raised again, to look at it with all that led to it.
            server.script.clear()
            server.script.extend([('raw', reply.encode(), True)] * 1000)
            with pytest.raises(GranularError) as failed:
                call()
            clean(''.join(traceback.format_exception(failed.value)))
            clean(repr(failed.value) + str(failed.value.args) + str(getattr(failed.value, '__notes__', '')))
        assert any(head.get('x-api-key') == custom for head in server.heads)
    clean(logged.text)
