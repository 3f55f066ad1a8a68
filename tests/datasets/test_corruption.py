"""Wrong bytes received once are requested again; a corrupt file is an error that names it."""

import contextlib
import os
import re

import pytest

import granular
from granular.errors import CorruptBagError, CorruptDatasetError, CorruptError
from tests.support.faults import FaultServer

COUNT = 4
STORES = ('s3', 'gs', 'http')
LAYOUTS = {'refs': {'x': 'utf8', 'y': 'utf8[]'}, 'columns': {'x': 'utf8', 'y': 'utf8'}}


def point(layout, index):
    text = f'text {index}'
    return {'x': text, 'y': [text] * index if layout == 'refs' else text}


@pytest.fixture(scope='module')
def contents(tmp_path_factory):
    result = {}
    for layout, spec in LAYOUTS.items():
        folder = tmp_path_factory.mktemp('contents') / layout
        with granular.DatasetWriter(folder, spec, granular.encoders, layout=layout) as writer:
            for i in range(COUNT):
                writer.append(point(layout, i))
        result[layout] = {f'ds/{path.name}': path.read_bytes() for path in folder.iterdir()}
    return result


@contextlib.contextmanager
def served(files, store, monkeypatch):
    with FaultServer(files=files) as server:
        if store == 'gs':
            server.etag = '1'
        config = granular.IOConfig(backoff=0.001)
        options = {'s3': {'key': 'k', 'secret': 'x'}, 'gs': {'token': 'anon'}, 'http': {}}[store]
        if store != 'http':
            options['endpoint_url'] = server.endpoint
        root = f'{server.endpoint}/b' if store == 'http' else f'{store}://b'
        yield server, granular.Path(f'{root}/ds', config=config, **options)


FILES = [
    *(('refs', file) for file in ('spec.json', 'refs.bag', 'x.bag', 'y.bag')),
    *(('columns', file) for file in ('spec.json', 'x.idx', 'y.idx')),
]


@pytest.mark.parametrize('options', [{}, {'cache_index': False}, {'cache_keys': ('x', 'y')}], ids=str)
@pytest.mark.parametrize(('layout', 'file'), FILES, ids=str)
@pytest.mark.parametrize('store', STORES)
def test_wrong_bytes_received_once_are_requested_again(contents, store, layout, file, options, monkeypatch):
    with served(contents[layout], store, monkeypatch) as (server, folder):
        server.aim = file
        server.script.append('garbled')
        with granular.DatasetReader(folder, granular.decoders, **options) as reader:
            assert not server.script
            assert list(reader) == [point(layout, i) for i in range(COUNT)]
            if file == 'spec.json':
                return
            # Without the tables, they are read along with the records; references are records themselves.
            for read in (lambda: reader.fetch(range(COUNT)), lambda: [reader[i] for i in range(COUNT)]):
                if not options.get('cache_keys') and (file == 'refs.bag' or not options.get('cache_index', True)):
                    server.aim = file
                    server.script.append('garbled' if file != 'x.bag' and file != 'y.bag' else 'good')
                    assert read() == [point(layout, i) for i in range(COUNT)]
                    assert not server.script


@pytest.mark.parametrize('options', [{}, {'cache_index': False}], ids=str)
@pytest.mark.parametrize(('layout', 'file'), FILES, ids=str)
@pytest.mark.parametrize('store', [*STORES, 'local'])
def test_corrupt_file_is_named_in_the_error(contents, store, layout, file, options, tmp_path, monkeypatch):
    files = dict(contents[layout])
    files[f'ds/{file}'] = bytes(255 - byte for byte in files[f'ds/{file}'])
    error = CorruptDatasetError if file == 'spec.json' else CorruptBagError

    def read(folder):
        with granular.DatasetReader(folder, granular.decoders, **options) as reader:
            return list(reader)

    with pytest.raises(error, match=re.escape(file.partition('.')[0])):
        if store == 'local':
            for name, data in files.items():
                (tmp_path / 'ds').mkdir(exist_ok=True)
                (tmp_path / name).write_bytes(data)
            read(tmp_path / 'ds')
        else:
            with served(files, store, monkeypatch) as (_, folder):
                read(folder)


def test_record_failing_its_checksum_once_is_read_again(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'utf8'}, granular.encoders, checksums=True) as writer:
        for i in range(COUNT):
            writer.append({'x': f'text {i}'})
    files = {f'ds/{path.name}': path.read_bytes() for path in (tmp_path / 'ds').iterdir()}
    with FaultServer(files=files) as server:
        with granular.DatasetReader(f'{server.endpoint}/b/ds', granular.decoders, verify=True) as reader:
            server.aim = 'x.bag'
            server.script.append('garbled')
            assert [point['x'] for point in reader.fetch(range(COUNT))] == [f'text {i}' for i in range(COUNT)]
            server.script.extend(['garbled'] * 2)
            with pytest.raises(CorruptError, match=r'x\.bag'):
                reader.fetch(range(COUNT))


def test_wrong_bytes_in_the_block_cache_are_replaced(contents, tmp_path):
    config = granular.IOConfig(cache_dir=str(tmp_path / 'blocks'), backoff=0.001)
    with FaultServer(files=contents['refs']) as server:
        folder = granular.Path(f'{server.endpoint}/b/ds', config=config)
        for _ in range(2):
            with granular.DatasetReader(folder, granular.decoders) as reader:
                server.aim = 'refs.bag'
                server.script.append('garbled')
                assert list(reader) == [point('refs', i) for i in range(COUNT)]
            server.script.clear()
    assert os.listdir(tmp_path / 'blocks')


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_verify_names_the_datapoint_of_the_whole_dataset(tmp_path, layout):
    spec = {'n': 'int', 'texts': 'utf8[]'} if layout == 'refs' else {'n': 'int', 'text': 'utf8'}
    with granular.ShardedDatasetWriter(tmp_path / 'x', spec, shardlen=3, layout=layout) as writer:
        for i in range(9):
            writer.append({'n': i, **({'texts': ['', 'a' * i, '']} if layout == 'refs' else {'text': 'a' * i})})
    (bag,) = (tmp_path / 'x' / '000002').glob('text*.bag')
    for data, index in ((b'aaaaaaa', 7), (b'aaaaaaaa', 8)):
        content = bag.read_bytes()
        at = content.index(b'a' * 6 + data) + 6
        bag.write_bytes(content[:at] + b'b' + content[at + 1 :])
        problem = granular.verify(tmp_path / 'x').problems[-1]
        assert problem.record == (3 * (index - 6) + 1 if layout == 'refs' else index - 6)
        assert problem.datapoint == index
    (tmp_path / 'x' / '000000' / 'spec.json').unlink()
    assert [problem.datapoint for problem in granular.verify(tmp_path / 'x').problems] == [None] * 3


def test_verify_names_the_datapoints_of_many_records(tmp_path):
    count = 600
    with granular.DatasetWriter(tmp_path, {'texts': 'utf8[]'}, checksums=False) as writer:
        for i in range(count // 2):
            writer.append({'texts': ['a', 'b'] if i % 3 else ['a', '', 'b', 'c'][: 2 * (i % 2) + 1]}, flush=False)
    problems = granular.verify(tmp_path, decoders={'utf8': int}).problems
    owners = [i for i in range(count // 2) for _ in range(2 if i % 3 else 2 * (i % 2) + 1)]
    assert [problem.datapoint for problem in problems] == owners


def test_verify_names_a_bag_that_has_lost_all_records(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', {'n': 'int'}, granular.encoders) as writer:
        writer.append({'n': 1})
    (tmp_path / 'ds' / 'refs.bag').write_bytes(b'')
    (problem,) = granular.verify(tmp_path / 'ds').problems
    assert problem.path == str(tmp_path / 'ds' / 'refs.crc')
    assert problem.message == 'has checksums of 1 records, and its bag has 0'


@pytest.mark.parametrize(('spec', 'layout'), [({'n': 'i64'}, 'refs'), ({'n': 'int'}, 'columns')])
def test_verify_names_a_shard_that_differs_from_the_first_one(spec, layout, tmp_path):
    for name, shard in (('000000', ({'n': 'int'}, 'refs')), ('000001', (spec, layout))):
        with granular.DatasetWriter(tmp_path / 'ds' / name, shard[0], granular.encoders, layout=shard[1]) as writer:
            writer.append({'n': 1})
    with pytest.raises(CorruptDatasetError):
        granular.ShardedDatasetReader(tmp_path / 'ds')
    (problem,) = granular.verify(tmp_path / 'ds').problems
    assert problem.path == str(tmp_path / 'ds' / '000001')
    assert problem.message.startswith(f'has spec {spec} in layout {layout!r}, but ')


def test_missing_references_of_sequences_are_named(tmp_path):
    with granular.DatasetWriter(tmp_path / 'ds', LAYOUTS['refs'], granular.encoders) as writer:
        writer.append(point('refs', 1))
    (tmp_path / 'ds' / 'refs.bag').unlink()
    with pytest.raises(CorruptDatasetError, match=r"key 'y' has type 'utf8\[\]', .* refs\.bag is missing"):
        granular.open(tmp_path / 'ds')
