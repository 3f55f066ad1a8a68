"""The server of ``granular view``, asked over HTTP."""

import asyncio
import concurrent.futures
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import sys
import tarfile
import threading
import urllib.parse

import numpy as np
import PIL.Image
import psutil
import pyarrow
import pyarrow.parquet
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import granular
from granular.view.names import Names
from granular.view.search import Condition, search
from granular.view.sources import source_of
from granular.view.statistics import histograms
from tests.datasources.test_lerobot import LEFT, WRIST, write_v2
from tests.support.examples import frame
from tests.support.programs import INTERRUPTIBLE, program
from tests.support.servers import HTTPServer
from tests.view.example import HOSTILE, HOSTILE_HTML, SPEC, write_hostile
from tests.view.serving import Served


class Reply:
    def __init__(self, reply):
        self.status, self.headers, self.body = reply.status, reply.headers, reply.read()

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def files(self):
        """The list of facts and the files of a framed reply."""
        size = int.from_bytes(self.body[:4], 'little')
        entries, at, files = json.loads(self.body[4 : 4 + size]), 4 + size, []
        for entry in entries:
            files.append(self.body[at : at + entry['bytes']])
            at += entry['bytes']
        assert at == len(self.body)
        return entries, files


def ask(served, target, headers=(), method='GET', cookie=True, **query):
    """Send a request, with the cookie of the page unless it is left out."""
    host = served.origin.removeprefix('http://')
    connection = http.client.HTTPConnection(host, timeout=30)
    fields = {'Cookie': cookie_of(served)} if cookie else {}
    if query:
        target = f'{target}?{urllib.parse.urlencode(query, doseq=True)}'
    try:
        connection.request(method, target, headers={**fields, **dict(headers)})
        return Reply(connection.getresponse())
    finally:
        connection.close()


def cookie_of(served):
    if not hasattr(served, 'cookie'):
        served.cookie = ask(served, f'/?token={served.token}', cookie=False).headers['Set-Cookie'].partition(';')[0]
    return served.cookie


class UnregisteredFileSystem(MemoryFileSystem):
    protocol = 'unregistered'
    store = {}
    pseudo_dirs = ['']

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix('unregistered://'))


def test_a_file_system_that_was_passed_is_shown():
    fs = UnregisteredFileSystem()
    fs.pipe_file('/folder/note.txt', b'hello')
    with Served(granular.Path('unregistered://folder', fs=fs)) as served:
        assert [entry['name'] for entry in ask(served, '/api/folder').json['entries']] == ['note.txt']


# --- access


def test_link_gives_a_cookie_that_scripts_and_other_sites_cannot_use(served):
    reply = ask(served, f'/?token={served.token}', cookie=False)
    assert reply.status == 200
    parts = reply.headers['Set-Cookie'].split('; ')
    assert {'HttpOnly', 'SameSite=Strict', 'Path=/'} <= set(parts)
    assert served.token not in reply.body.decode()
    assert ask(served, '/', {'Cookie': parts[0]}, cookie=False).status == 200


@pytest.mark.parametrize(
    'target', ['/', '/?token=', '/?token=wrong', '/?token=%ff', '/static/main.js', '/api/folder', '/nothing']
)
def test_requests_without_the_token_are_refused(served, target):
    reply = ask(served, target, cookie=False)
    assert (reply.status, 'token' in reply.body.decode()) == (403, True)
    assert 'Set-Cookie' not in reply.headers


def test_token_is_taken_from_the_link_of_the_page_alone(served):
    assert ask(served, f'/api/folder?token={served.token}', cookie=False).status == 403


@pytest.mark.parametrize(
    'host',
    [
        'evil.example',
        'localhost.evil.example',
        '127.0.0.1.evil.example',
        '',
        'localhost@evil.example',
        'a:b',
        '0.0.0.0',
    ],
)
def test_other_hosts_are_refused(served, host):
    assert ask(served, '/api/folder', {'Host': host}).status == 403


@pytest.mark.parametrize('host', ['localhost', 'localhost:9999', '127.0.0.1:9999', '[::1]:9999'])
def test_loopback_hosts_are_served_behind_a_tunnel(served, host):
    assert ask(served, '/api/folder', {'Host': host, 'Origin': f'http://{host}'}).status == 200


@pytest.mark.parametrize(
    'headers',
    [
        {'Origin': 'http://evil.example'},
        {'Origin': 'null'},
        {'Origin': 'http://localhost:1'},
        {'Sec-Fetch-Site': 'cross-site'},
        {'Sec-Fetch-Site': 'same-site', 'Sec-Fetch-Mode': 'navigate'},
    ],
)
def test_requests_of_other_pages_are_refused(served, headers):
    assert ask(served, '/api/folder', headers).status == 403


@pytest.mark.parametrize('method', ['POST', 'PUT', 'DELETE', 'OPTIONS'])
def test_only_reads_are_allowed(served, method):
    assert ask(served, '/api/folder', method=method).status == 403


@pytest.mark.parametrize(
    'target',
    [
        '/',
        '/static/main.js',
        '/static/nothing.js',
        '/api/folder',
        '/api/folder?path=missing',
        '/nothing',
        '/api/media?path=train&key=image&index=0',
        '/api/media?path=train&key=caption&index=0',
        '/api/rows?path=train&start=x',
    ],
)
@pytest.mark.parametrize('cookie', [True, False])
def test_every_reply_has_a_strict_policy(served, target, cookie):
    headers = ask(served, target, cookie=cookie).headers
    policy = headers['Content-Security-Policy']
    assert policy.startswith("default-src 'none'") and 'unsafe' not in policy and '*' not in policy
    assert headers['X-Content-Type-Options'] == 'nosniff'
    assert headers['Cross-Origin-Resource-Policy'] == 'same-origin'
    assert (headers['Referrer-Policy'], headers['Cache-Control']) == ('no-referrer', 'no-store')


def test_page_uses_nothing_from_elsewhere(served):
    page = ask(served, '/').body.decode()
    assets = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert assets and all(asset.startswith('/static/') for asset in assets)
    assert 'style=' not in page and '<style' not in page and not re.search(r'<script(?![^>]* src=)|\son\w+=', page)
    assert [asset for asset in assets if ask(served, asset).status != 200] == []


@pytest.mark.parametrize(
    'path', ['..', 'train/../..', '/etc', 'a//b', '.', 'train/\0', 'train\\..', '{..}/x', '{.,a}{.,b}/*', '{,a}/x']
)
def test_paths_outside_of_the_root_are_refused(served, path):
    for name in ('folder', 'dataset'):
        assert ask(served, f'/api/{name}', path=path).status == 400


# --- content


def test_folder_lists_entries_and_recognises_datasets(served):
    root = ask(served, '/api/folder').json
    assert [entry['name'] for entry in root['entries']] == ['labels', 'notes', 'train']
    assert [ask(served, '/api/folder', path=name).json['kind'] for name in ('labels', 'notes', 'train')] == [
        'data',
        'folder',
        'data',
    ]
    assert ask(served, '/api/folder', path='missing').status == 404


def test_dataset_describes_keys_and_shards(served, example):
    facts = ask(served, '/api/dataset', path='train').json
    assert (facts['kind'], facts['length'], facts['lengths'], facts['layout']) == (
        'sharded dataset',
        120,
        [50, 50, 20],
        'refs',
    )
    assert {row['key']: row['type'] for row in facts['keys'] if row['key'] != 'refs'} == SPEC
    with granular.ShardedDatasetReader(example / 'train') as reader:
        assert facts['bytes'] == reader.size == sum(row['bytes'] for row in facts['keys'])


def test_rows_show_values_across_shards(served, example):
    rows = ask(served, '/api/rows', path='train', start=45, count=10).json
    assert rows['indices'] == list(range(45, 55))
    with granular.ShardedDatasetReader(example / 'train') as reader:
        for i, datapoint in enumerate(reader.fetch(range(45, 55))):
            cells = {key: cells[i] for key, cells in rows['columns'].items()}
            assert cells['caption']['text'] == datapoint['caption']
            assert (cells['label']['text'], cells['score']['text']) == (
                str(datapoint['label']),
                repr(datapoint['score']),
            )
            assert json.loads(cells['meta']['text']) == datapoint['meta']
            assert (cells['frames']['length'], cells['words']['length']) == (len(datapoint['frames']), 3)
            assert cells['depth']['text'].startswith('float32 48 x 64: ')
            assert (cells['image']['family'], cells['sound']['family'], cells['clip']['family']) == (
                'image',
                'audio',
                'video',
            )


def test_large_integers_are_not_rounded(served):
    values = ask(served, '/api/datapoint', path='train', index=7).json['values']
    box = next(value for value in values if value['key'] == 'box')
    assert box['tree'] == [
        'map',
        [['corners', ['array', 'int64 2 x 2: 7, 0, 11, 9']], ['id', ['number', str(2**60 + 7)]]],
        2,
    ]


def test_pictures_come_in_one_reply(served, example):
    entries, files = ask(served, '/api/pictures', path='train', key='image', side=64, at='0,49,50,119').files
    assert [entry['name'] for entry in entries] == [0, 49, 50, 119]
    with granular.ShardedDatasetReader(example / 'train') as reader:
        for index, entry, file in zip((0, 49, 50, 119), entries, files, strict=True):
            image = np.asarray(PIL.Image.open(io.BytesIO(file)))
            assert (entry['width'], entry['height'], image.shape) == (320, 240, (48, 64, 3))
            assert abs(image.mean((0, 1)) - reader[index]['image'].mean((0, 1))).max() < 4


def test_pictures_of_parts_of_sequences_arrays_and_videos(served):
    entries, files = ask(served, '/api/pictures', path='train', key='frames', index=6, **{'from': 4, 'count': 10}).files
    assert [entry['name'] for entry in entries] == [4, 5] and all(files)
    for key, note in (('depth', 'float32 48 x 64'), ('clip', '1.2 s')):
        entries, files = ask(served, '/api/pictures', path='train', key=key, at='3').files
        assert entries[0]['note'] == note and files[0][:4] in (b'\x89PNG', b'\xff\xd8\xff\xe0')


def test_values_of_a_sequence_are_read_in_parts(served):
    values = ask(served, '/api/values', path='train', key='words', index=3, **{'from': 1}).json['values']
    assert [value['text'] for value in values][1:] == ['3'] and len(values) == 2


def record(example, key, index):
    with granular.ShardedDatasetReader(example / 'train', None) as reader:
        return reader[index][key]


def test_media_are_served_by_their_magic_numbers(served, example):
    for key, media in (('image', 'image/jpeg'), ('clip', 'video/mp4'), ('sound', 'audio/wav')):
        reply = ask(served, '/api/media', path='train', key=key, index=60)
        assert (reply.status, reply.headers['Content-Type'], reply.body) == (200, media, record(example, key, 60))
        saved = ask(served, '/api/media', path='train', key=key, index=60, download=1)
        assert (saved.headers['Content-Type'], saved.headers['Content-Disposition']) == (
            'application/octet-stream',
            f'attachment; filename="60-{key}"',
        )


@pytest.mark.parametrize(
    'header, start, stop',
    [('bytes=0-', 0, None), ('bytes=10-19', 10, 20), ('bytes=-7', -7, None), ('bytes=4-99999999', 4, None)],
)
def test_media_have_ranges(served, example, header, start, stop):
    whole = record(example, 'clip', 1)
    reply = ask(served, '/api/media', {'Range': header}, path='train', key='clip', index=1)
    assert (reply.status, reply.body) == (206, whole[start:stop])
    first = start % len(whole)
    assert reply.headers['Content-Range'] == f'bytes {first}-{first + len(reply.body) - 1}/{len(whole)}'


@pytest.mark.parametrize('header', ['bytes=99999999-', 'bytes=9-2', 'lines=1-2', 'bytes=-'])
def test_ranges_that_cannot_be_satisfied(served, header):
    assert ask(served, '/api/media', {'Range': header}, path='train', key='clip', index=1).status == 416


def test_empty_value_has_no_ranges(tmp_path):
    with granular.DatasetWriter(tmp_path / 'empty', {'x': 'bytes'}) as writer:
        writer.append({'x': b''})
    with Served(granular.Path(tmp_path)) as served:
        statuses = [
            ask(served, '/api/media', headers, path='empty', key='x', index=0).status
            for headers in ({}, {'Range': 'bytes=0-'}, {'Range': 'bytes=0-9'}, {'Range': 'bytes=-1'})
        ]
    assert statuses == [200, 416, 416, 416]


def test_head_of_a_medium(served, example):
    reply = ask(served, '/api/media', method='HEAD', path='train', key='clip', index=1)
    assert (reply.status, reply.body, int(reply.headers['Content-Length'])) == (
        200,
        b'',
        len(record(example, 'clip', 1)),
    )


def test_histograms_name_the_sample(served):
    found = ask(served, '/api/histograms', path='train').json
    assert (found['sampled'], found['length']) == (120, 120)
    charts = {(row['key'], chart['title']): chart for row in found['keys'] for chart in row['charts']}
    assert charts['label', 'values']['bars'] == [[str(i), str(i), 12, ''] for i in range(10)]
    assert sum(bar[2] for bar in charts['score', 'values']['bars']) == 120
    assert [bar[2] for bar in charts['frames', 'values per sequence']['bars']] == [18, 17, 17, 17, 17, 17, 17]
    assert charts['frames', 'values per sequence']['padding']['8 buckets'] == '0.0%'


@pytest.mark.parametrize(
    'key, relation, text, expected',
    [
        ('label', '=', '3', range(3, 120, 10)),
        ('label', '>=', '8.5', range(9, 120, 10)),
        ('caption', 'has', 'NUMBER 11', [11, *range(110, 120)]),
        ('meta', 'has', 'unit 2', range(2, 120, 3)),
        ('label', '!=', '3', [i for i in range(120) if i % 10 != 3]),
    ],
)
def test_filter_finds_datapoints(served, key, relation, text, expected):
    found = ask(served, '/api/search', path='train', key=key, relation=relation, text=text).json
    assert (found['matches'], found['next'], found['skipped']) == (list(expected), 120, 0)


@pytest.mark.parametrize(
    'target, status',
    [
        ('rows?path=train&start=-1', 400),
        ('rows?path=train&at=1,x', 400),
        ('datapoint?path=train&index=120', 404),
        ('rows?path=train&key=no', 400),
        ('media?path=train&key=frames&index=0', 404),
        ('dataset?path=notes', 404),
        ('search?path=train&key=label&relation==&text=x', 400),
        ('search?path=train&key=frames&relation==&text=x', 400),
        ('pictures?path=train&key=image&at=9999', 404),
        ('plane?path=train&key=caption&index=0', 422),
    ],
)
def test_bad_requests_say_why(served, target, status):
    reply = ask(served, f'/api/{target}')
    assert reply.status == status and len(reply.json['error']) > 10


@pytest.mark.parametrize(
    'array',
    [
        np.arange(24.0).reshape(2, 3, 4),
        np.arange(6),
        np.float32(3),
        np.zeros((0, 4)),
        np.arange(36, dtype='u1').reshape(3, 4, 3),
        np.array([1.5, np.nan, np.inf]),
        np.array(['a', 'b']),
        np.full((2, 2), 1e308) * [[1, -1], [1, -1]],
        np.arange(8) * 1j,
    ],
)
def test_planes_of_arrays(tmp_path, array):
    with granular.DatasetWriter(tmp_path / 'arrays', {'a': 'array'}, granular.encoders) as writer:
        writer.append({'a': np.asarray(array)})
    array = np.asarray(array)
    with Served(granular.Path(tmp_path)) as served:
        (facts,), (file,) = ask(served, '/api/plane', path='arrays', key='a', index=0, plane=1).files
    assert (facts['dtype'], facts['shape']) == (str(array.dtype), list(array.shape))
    colours = array.dtype == np.uint8
    planes = array if colours else array.reshape(-1, *np.atleast_2d(array).shape[-2:]) if array.size else array
    plane = planes if colours else planes[min(1, len(planes) - 1)] if array.size else array
    if array.size and not colours:
        assert np.array_equal(
            np.array([complex(x) if array.dtype.kind == 'c' else x for x in facts['numbers']]).astype(array.dtype),
            plane.ravel(),
            equal_nan=array.dtype.kind == 'f',
        )
    if array.dtype.kind in 'iufb' and array.size:
        finite = plane[np.isfinite(plane)]
        assert (float(facts['least']), float(facts['greatest']), facts['strange']) == (
            finite.min(),
            finite.max(),
            plane.size - finite.size,
        )
        assert PIL.Image.open(io.BytesIO(file)).size == plane.shape[1::-1]


# --- hostile and damaged data


def test_nothing_in_a_dataset_is_served_as_a_type_that_runs(tmp_path):
    write_hostile(granular.Path(tmp_path))
    with Served(granular.Path(tmp_path)) as served:
        for key in ('image', 'text', 'page', 'vector', 'data', 'clip'):
            reply = ask(served, '/api/media', path='hostile', key=key, index=1)
            assert reply.headers['Content-Type'] == ('image/jpeg' if key == 'image' else 'application/octet-stream')
            assert reply.headers['Content-Security-Policy'] == "default-src 'none'; sandbox"
            assert reply.headers.get('Content-Disposition', '').startswith('attachment') == (key != 'image')
        assert ask(served, '/api/media', path='hostile', key='page', index=0).body == HOSTILE_HTML
        rows = ask(served, '/api/rows', path='hostile').json['columns']
        assert tuple(cell['text'] for cell in rows['text']) == HOSTILE
        entries, _ = ask(served, '/api/pictures', path='hostile', key='image', at='0,1').files
        assert all('cannot decode the image' in entry['error'] for entry in entries)


def test_damaged_values_spoil_only_themselves(tmp_path):
    encoders = dict.fromkeys(('int', 'utf8', 'array', 'json', 'tree', 'float', 'bool'), bytes)
    spec = {kind: kind for kind in encoders}
    with granular.DatasetWriter(tmp_path / 'damaged', spec, encoders) as writer:
        writer.append(
            {
                kind: granular.encoders[kind](value)
                for kind, value in (
                    ('int', 5),
                    ('utf8', 'fine'),
                    ('array', np.arange(3)),
                    ('json', [1]),
                    ('tree', [2]),
                    ('float', 0.5),
                    ('bool', True),
                )
            }
        )
        writer.append(dict.fromkeys(spec, b'\xff' * 40))
    with Served(granular.Path(tmp_path)) as served:
        columns = ask(served, '/api/rows', path='damaged').json['columns']
        assert {kind: ('error' in good, 'error' in bad) for kind, (good, bad) in columns.items()} == dict.fromkeys(
            spec, (False, True)
        )
        values = ask(served, '/api/datapoint', path='damaged', index=1).json['values']
        assert all(value['error'] for value in values)
        found = ask(served, '/api/histograms', path='damaged').json
        assert {row['key'] for row in found['keys'] if row['damaged']} == {'int', 'float', 'bool', 'utf8'}
        assert ask(served, '/api/search', path='damaged', key='int', relation='=', text='5').json['skipped'] == 1


def test_dataset_that_is_replaced_is_opened_again(tmp_path):
    def write(text):
        with granular.DatasetWriter(tmp_path / 'd', {'t': 'utf8'}, granular.encoders) as writer:
            writer.append({'t': text})

    write('old')
    with Served(granular.Path(tmp_path)) as served:
        assert ask(served, '/api/rows', path='d').json['columns']['t'][0]['text'] == 'old'
        granular.Path(tmp_path / 'd').rmtree()
        write('newer')
        replies = [ask(served, '/api/rows', path='d').json for _ in range(2)]
    assert 'columns' not in replies[0] or replies[0]['columns']['t'][0]['text'] == 'newer'
    assert replies[1]['columns']['t'][0]['text'] == 'newer'


def test_more_readers_than_stay_open_are_used_at_the_same_time(tmp_path, monkeypatch):
    close, wrong = granular.aio.DatasetReader.aclose, []

    async def close_later(reader):  # as a reader does that still has requests to cancel
        await asyncio.sleep(0.01)
        await close(reader)

    def read(seed):
        order = random.Random(seed)
        for _ in range(30):
            n = order.randrange(12)
            reply = ask(served, '/api/rows', path=f'{n}')
            if reply.status != 200 or reply.json['columns']['n'][0]['text'] != f'{n}':
                wrong.append(reply.body)

    for n in range(12):
        with granular.DatasetWriter(tmp_path / f'{n}', {'n': 'int'}) as writer:
            writer.append({'n': n})
    monkeypatch.setattr(granular.aio.DatasetReader, 'aclose', close_later)
    with Served(granular.Path(tmp_path)) as served, concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert wrong == []


# --- other formats


def test_files_of_other_formats(tmp_path):
    pa, pq = pyarrow, pyarrow.parquet
    pq.write_table(
        pa.table({'n': [1, 2, None], 'name': ['a', 'b', 'c'], '<b>': [[1], [], [2, 3]]}), tmp_path / 't.parquet'
    )
    with granular.BagWriter(tmp_path / 'r.bag') as writer:
        writer.append(b'hello')
        writer.append(HOSTILE_HTML)
    with Served(granular.Path(tmp_path)) as served:
        assert [entry['format'] for entry in ask(served, '/api/folder').json['entries']] == ['bag', '', 'parquet']
        columns = ask(served, '/api/rows', path='t.parquet').json['columns']
        assert [cell['text'] for cell in columns['n']] == ['1', '2', 'null']
        assert ask(served, '/api/search', path='t.parquet', key='n', relation='>', text='1').json['matches'] == [1]
        assert ask(served, '/api/dataset', path='r.bag').json['length'] == 2
        assert ask(served, '/api/media', path='r.bag', key='record', index=0).body == b'hello'
        assert (
            ask(served, '/api/media', path='r.bag', key='record', index=1).headers['Content-Type']
            == 'application/octet-stream'
        )


def test_episodes_of_lerobot_have_their_videos_and_images(tmp_path):
    write_v2(tmp_path / 'robots')
    left = (tmp_path / f'robots/videos/chunk-000/{LEFT}/episode_000001.mp4').read_bytes()
    with Served(granular.Path(tmp_path)) as served:
        assert ask(served, '/api/folder', path='robots').json['kind'] == 'data'
        facts = ask(served, '/api/dataset', path='robots').json
        assert (facts['kind'], facts['length']) == ('LeRobot', 3)
        types = {row['key']: (row['type'], row['family']) for row in facts['keys']}
        assert (types[LEFT], types[WRIST], types['reward']) == (
            ('mp4', 'video'),
            ('png[]', 'image'),
            ('array', 'array'),
        )
        reply = ask(served, '/api/media', path='robots', key=LEFT, index=1)
        assert (reply.headers['Content-Type'], reply.body) == ('video/mp4', left)
        entries, files = ask(
            served, '/api/pictures', path='robots', key=WRIST, index=1, **{'from': 3, 'count': 2}
        ).files
        assert [(entry['name'], entry['width'], entry['height']) for entry in entries] == [(3, 9, 8), (4, 9, 8)]
        assert len(files) == 2
        columns = ask(served, '/api/rows', path='robots').json['columns']
        assert [(cell['text'], cell['length']) for cell in columns['task']] == [
            ('task 0', 12), ('task 1', 20), ('task 0', 7),
        ]  # fmt: skip


def test_records_of_tfrecord_files(tmp_path):
    (tmp_path / 't.tfrecord').write_bytes(frame(b'first') + frame(b'second'))
    with Served(granular.Path(tmp_path)) as served:
        assert ask(served, '/api/dataset', path='t.tfrecord').json['kind'] == 'TFRecord'
        cells = ask(served, '/api/rows', path='t.tfrecord').json['columns']['record']
        assert [(cell['size'], cell['family']) for cell in cells] == [(5, 'bytes'), (6, 'bytes')]
        assert ask(served, '/api/media', path='t.tfrecord', key='record', index=1).body == b'second'
        assert ask(served, '/api/histograms', path='t.tfrecord').json['length'] == 2


async def test_lists_of_files_of_other_formats_hold_only_the_beginnings_of_values(tmp_path):
    with tarfile.open(tmp_path / 'a.tar', 'w') as tar:
        for i in range(40):
            for suffix, data in (('jpg', bytes(100_000)), ('cls', b'%d' % i)):
                member = tarfile.TarInfo(f'{i:03}.{suffix}')
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    source = await source_of(await granular.aio.open(str(tmp_path / 'a.tar'), None))
    located = await source.locate(['cls', 'jpg'], range(40), head=10)
    assert [row.values[0].data for row in located['cls']] == [b'%d' % i for i in range(40)]
    assert {(row.values[0].size, len(row.values[0].data)) for row in located['jpg']} == {(100_000, 10)}
    assert (await source.read([(located['jpg'][0].values[0], 0, 4)])) == [bytes(4)]
    held = []
    locate = source.locate

    async def watched(keys, indices, *args, **options):
        found = await locate(keys, indices, *args, **options)
        held.append(sum(len(value.data) for rows in found.values() for row in rows for value in row.values))
        return found

    source.locate = watched
    found = await histograms(source, Names())
    charts = {row['key']: row['charts'] for row in found['keys']}
    assert charts['jpg'][0]['bars'] == [['100000', '100000', 40, '']]
    assert (await search(source, Names(), [Condition('cls', '=', '7')], 0, 40))['matches'] == [7]
    await source.close()
    assert len(held) == 2 and max(held) < 10_000


# --- requests to the store, life and death


def test_page_of_thumbnails_is_one_fan_out(tmp_path):
    with granular.DatasetWriter(tmp_path / 'd', {'image': 'png', 'note': 'utf8'}, granular.encoders) as writer:
        for i in range(100):
            writer.append({'image': np.full((8, 8, 3), i, np.uint8), 'note': f'{i}'})
    with HTTPServer(tmp_path) as store, Served(granular.Path(f'{store.endpoint}/d')) as served:
        ask(served, '/api/rows', path='')
        store.requests.clear()
        entries, files = ask(served, '/api/pictures', path='', key='image', at=','.join(map(str, range(100)))).files
        assert len(files) == 100 and all(files)
        # References and their limits, limits and records: each in one request.
        assert len(store.requests) <= 4


def test_shards_that_are_not_those_of_the_index_are_read_by_their_own_tables(fakegcs, monkeypatch):
    monkeypatch.setattr('granular.aio.datasets.comparison.LISTED', 0)  # as in a large dataset
    folder, spec = fakegcs.place(), {'words': 'utf8[]', 'number': 'int'}
    with granular.ShardedDatasetWriter(folder, spec, granular.encoders, shardlen=2, index=True) as writer:
        for words in (['x'], ['y'], ['a', 'b'], ['c']):
            writer.append({'words': words, 'number': 1})
    (folder / '000001').rmtree()
    with granular.DatasetWriter(folder / '000001', spec, granular.encoders) as writer:
        for words in (['a'], ['b', 'c']):  # the same records, divided in another way
            writer.append({'words': words, 'number': 2})
    with Served(folder) as served:
        shown = ask(served, '/api/rows', path='', start=0, count=4).json['columns']
    assert [cell['length'] for cell in shown['words']] == [1, 1, 1, 2]
    assert [cell['text'] for cell in shown['words']] == ['x', 'y', 'a', 'b']
    assert [cell['text'] for cell in shown['number']] == ['1', '1', '2', '2']


def test_nothing_is_left_after_the_end(example, caplog):
    before = set(threading.enumerate())
    with Served(example) as served:
        ask(served, '/api/pictures', path='train', key='image', at='0,1')
        port = int(served.origin.rpartition(':')[2])
        # A browser leaves its connections open, and one in the middle of a reply.
        idle = socket.create_connection(('127.0.0.1', port))
        busy = http.client.HTTPConnection('127.0.0.1', port)
        busy.request('GET', '/api/media?path=train&key=clip&index=0', headers={'Cookie': cookie_of(served)})
    idle.close()
    busy.close()
    left = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in left if name.startswith('granular-view')]
    # Another process may have taken the port by now.
    listening = [one for one in psutil.net_connections('tcp') if one.pid == os.getpid() and one.status == 'LISTEN']
    assert port not in {one.laddr.port for one in listening}
    assert served.token not in caplog.text


def test_missing_path_is_an_error(example):
    with pytest.raises(granular.errors.NotFoundError, match='missing'), Served(example / 'missing'):
        pass


def test_command_prints_a_link_and_ends_with_an_interrupt(example):
    code = f"{INTERRUPTIBLE}import runpy; runpy.run_module('granular', run_name='__main__')"
    with program([sys.executable, '-c', code, 'view', f'{example}']) as process:
        link = process.stdout.readline().strip()
        assert re.fullmatch(r'http://127\.0\.0\.1:\d+/\?token=[\w-]{32}', link)
        connection = http.client.HTTPConnection(link[7:].partition('/')[0], timeout=30)
        connection.request('GET', link[link.index('/?') :])
        assert connection.getresponse().status == 200
        port = connection.port
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=250)
        connection.close()
    assert (process.returncode, out) == (130, '')
    assert 'token' not in err and 'Traceback' not in err
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(('127.0.0.1', port))


def test_port_in_use_is_an_error(example, served):
    port = served.origin.rpartition(':')[2]
    with pytest.raises(granular.errors.InvalidArgumentError, match=f'port {port} '), Served(example, int(port)):
        pass


def test_cmyk_is_shown_in_rgb_and_orientation_as_in_tiles(tmp_path):
    pixels = np.arange(24 * 16 * 4, dtype=np.uint32).reshape(16, 24, 4).astype(np.uint8)
    cmyk, turned = io.BytesIO(), io.BytesIO()
    PIL.Image.fromarray(pixels, 'CMYK').save(cmyk, 'JPEG')
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.fromarray(pixels[..., :3]).save(turned, 'JPEG', exif=exif)
    files = [cmyk.getvalue(), turned.getvalue()]
    with granular.DatasetWriter(tmp_path / 'x', {'image': 'jpg'}, {'jpg': bytes}) as writer:
        for file in files:
            writer.append({'image': file})
    with Served(granular.Path(tmp_path)) as served:
        shown = ask(served, '/api/media', path='x', key='image', index=0)
        assert shown.headers['Content-Type'] == 'image/png'
        expected = granular.formats.decode_image(files[0], mode='RGB')
        assert np.array_equal(np.asarray(PIL.Image.open(io.BytesIO(shown.body))), expected)
        assert ask(served, '/api/media', path='x', key='image', index=0, download=1).body == files[0]
        assert ask(served, '/api/media', path='x', key='image', index=1).body == files[1]
        assert b'image-orientation: none' in ask(served, '/static/detail.css').body
