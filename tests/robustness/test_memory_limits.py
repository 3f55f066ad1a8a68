"""Operations in a process whose memory is limited: the right data, or an error that says so; never a hang."""

import io
import json
import os
import subprocess
import sys

import numpy as np
import PIL.Image
import pyarrow
import pytest
from pyarrow import parquet

import granular
from granular.errors import GranularError, StoreError

COUNT, SIZE = 12, 2 << 20
LIMITS = [4, 30, 90]  # MiB that a process may allocate; with none at all, Python waits for its own threads

PROGRAM = f"""
import faulthandler, json, os, resource, sys
import numpy as np
import pandas  # which pyarrow imports later, and not without memory
import granular
from granular import MapDataset, aio
from granular.grain import MultiprocessingOptions
from granular.errors import GranularError

for api in (granular, aio):
    for name in api.__all__:
        getattr(api, name)
COUNT, SIZE = {COUNT}, {SIZE}

def datapoint(i):
    return {{'x': bytes([i]) * SIZE, 'n': i}}

def to_array(datapoint, seed):
    return {{**datapoint, 'x': np.frombuffer(datapoint['x'], np.uint8)}}

def check(datapoints):
    for i, datapoint in enumerate(datapoints):
        assert datapoint['n'] == i and bytes(datapoint['x']) == bytes([i]) * SIZE, 'other data'
    assert i == COUNT - 1, 'data is missing'

def read(folder):
    with granular.open(f'{{folder}}/data') as reader:
        check(reader)
        check(reader.fetch(range(COUNT)))

def load(folder):
    with granular.open(f'{{folder}}/data') as reader:
        source = granular.sources.Transform(granular.sources.Epochs(reader, shuffle=False), to_array)
        with granular.Loader(source, 2) as loader:
            batches = [next(loader) for _ in range(COUNT // 2)]
        check({{'n': batch['n'][i], 'x': batch['x'][i]}} for batch in batches for i in range(2))

def workers(folder):
    with granular.open(f'{{folder}}/data') as reader:
        check(MapDataset.source(reader).to_iter_dataset().mp_prefetch(MultiprocessingOptions(num_workers=2)))

def cached(folder):
    with granular.open(f'{{folder}}/data') as reader, granular.SharedMemoryCache(reader, max_bytes=64 << 20) as cache:
        for _ in range(2):
            check(cache[i] for i in range(COUNT))

def columns(folder):
    with granular.open(f'{{folder}}/data.parquet') as reader:
        check(reader)

def write(folder):
    with granular.DatasetWriter(f'{{folder}}/new', {{'x': 'bytes', 'n': 'int'}}) as writer:
        for i in range(COUNT):
            writer.append(datapoint(i))

def convert(folder):
    source = MapDataset.range(COUNT).map(datapoint)
    granular.convert(source, f'{{folder}}/new', spec={{'x': 'bytes', 'n': 'int'}}, shardlen=4)

def copy(folder):
    granular.copy_to_local(f'{{folder}}/data', f'{{folder}}/new')

def attempt(operation, folder, limit):
    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (limit << 20), resource.RLIM_INFINITY))
    try:
        globals()[operation](folder)
        outcome = 'done'
    except (GranularError, MemoryError) as error:
        outcome = 'refused'
    except BaseException as error:
        outcome = f'{{type(error).__name__}}: {{error}}'
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    print(json.dumps(outcome), flush=True)

for line in sys.stdin:
    child = os.fork()  # each attempt begins in the same state
    if not child:
        faulthandler.dump_traceback_later(20, exit=True)
        attempt(*json.loads(line))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        print(json.dumps(f'ended with status {{status}}'))
    print(flush=True)
"""


def datapoint(i):
    return {'x': bytes([i]) * SIZE, 'n': i}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('memory')
    with granular.ShardedDatasetWriter(folder / 'data', {'x': 'bytes', 'n': 'int'}, shardlen=4) as writer:
        for i in range(COUNT):
            writer.append(datapoint(i))
    rows = [datapoint(i) for i in range(COUNT)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / 'data.parquet', row_group_size=4)
    return folder


@pytest.fixture(scope='module')
def outcomes():
    """Return what becomes of an operation in a folder, with each of some limits: one outcome, unless it crashes."""
    with subprocess.Popen(
        [sys.executable, '-c', PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def outcomes(operation, folder, limits):
            found = []
            for limit in limits:
                print(json.dumps([operation, str(folder), limit]), file=process.stdin, flush=True)
                found += map(json.loads, iter(process.stdout.readline, '\n'))
            return found

        yield outcomes


@pytest.mark.parametrize('operation', ['read', 'load', 'workers', 'cached', 'columns'])
def test_readers_return_the_data_or_an_error_when_memory_is_short(operation, folder, outcomes):
    found = outcomes(operation, folder, [*LIMITS, 4000])
    assert found[-1] == 'done'
    assert set(found) <= {'done', 'refused'}, found


@pytest.mark.parametrize('operation', ['write', 'convert', 'copy'])
def test_writers_leave_a_whole_dataset_or_none_when_memory_is_short(operation, folder, tmp_path, outcomes):
    (tmp_path / 'data').symlink_to(folder / 'data')
    for limit in [*LIMITS, 4000]:
        (found,) = outcomes(operation, tmp_path, [limit])
        assert found in ('done', 'refused')
        try:
            with granular.open(tmp_path / 'new') as reader:
                assert [reader[i] for i in range(len(reader))] == [datapoint(i) for i in range(COUNT)]
            break
        except GranularError:
            assert found == 'refused'
    assert found == 'done'  # also in the folder in which others have ended early


def memory_error(*args, **kwargs):
    raise MemoryError('no more')


@pytest.mark.parametrize('kind', ['decoder', 'image', 'parquet'])
def test_datapoints_are_not_skipped_for_lack_of_memory(kind, tmp_path, folder, monkeypatch):
    if kind == 'parquet':
        monkeypatch.setattr(parquet.ParquetFile, 'read_row_group', memory_error)
        path, decoders = folder / 'data.parquet', None
    else:
        encoded = io.BytesIO()
        PIL.Image.new('RGB', (8, 8)).save(encoded, 'png')
        kinds = {'decoder': 'bytes', 'image': 'png'}
        path = tmp_path / 'data'
        with granular.DatasetWriter(path, {'x': kinds[kind]}, None) as writer:
            writer.append({'x': encoded.getvalue()})
        decoders = dict(granular.decoders)
        if kind == 'decoder':
            decoders['bytes'] = memory_error
        else:
            monkeypatch.setattr(np, 'array', memory_error)
    dataset = granular.MapDataset.source(granular.open(path, decoders))
    with pytest.raises((MemoryError, StoreError), match='no more'):
        list(dataset.to_iter_dataset(on_error='skip'))
    with pytest.raises((MemoryError, StoreError), match='no more'):
        granular.open(path, decoders)[0]


DECODING = """
import resource
import numpy as np
from granular import formats
from granular.formats import decoders, encoders, serialization
from granular.formats.codecs.images import pack_image

numbers = np.zeros(24 << 20, np.uint8)
cases = {kind: (decoders[kind], encoders[kind](numbers)) for kind in ('array', 'tree')}
cases['msgpack'] = decoders['msgpack'], encoders['msgpack'](bytes(numbers))
cases['wav'] = decoders['wav'], encoders['wav']((numbers.view(np.int16), 8000))
cases['pack_image'] = formats.unpack_image, pack_image(numbers)
cases['cache'] = serialization.decode, serialization.encode([numbers])
for decode, record in cases.values():
    decode(record)  # what it imports is there
for name, (decode, record) in cases.items():
    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
    try:
        outcome = type(decode(record))
    except Exception as error:
        outcome = type(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    print(name, outcome.__name__)
"""


def test_record_for_which_memory_is_short_is_not_damaged():
    environment = {**os.environ, 'MALLOC_MMAP_THRESHOLD_': '100000'}  # so that what was freed is not used again
    command = [sys.executable, '-c', DECODING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert {line.split()[1] for line in done.stdout.splitlines()} <= {'MemoryError', '_ArrayMemoryError'}, done.stdout
