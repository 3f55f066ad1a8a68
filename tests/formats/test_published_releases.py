"""Datasets and bags are exchanged with the published releases, in both directions."""

import asyncio
import json
import pathlib
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

import granular
from tests.support import interop_datapoints
from tests.support.interop_datapoints import datapoint, digest

SPEC = {
    'array': 'array', 'bytes': 'bytes', 'int': 'int', 'i64': 'i64', 'jpg': 'jpg', 'msgpack': 'msgpack', 'png': 'png',
    'tree': 'tree', 'u64': 'u64', 'utf8': 'utf8',
}  # fmt: skip
SEQUENCES = {'frames': 'png[]', 'texts': 'utf8[]', 'times': 'int[]'}

# The releases execute the source of the module that creates the datapoints.
SHARED = pathlib.Path(interop_datapoints.__file__).read_text()
COUNT = 7
READ = (
    SHARED
    + """
cls = granular.ShardedDatasetReader if sys.argv[2] == 'sharded' else granular.DatasetReader
with cls(sys.argv[1], granular.decoders) as reader:
    print(json.dumps({'spec': reader.spec, 'points': [digest(reader[i]) for i in range(len(reader))]}))
"""
)
WRITE = (
    SHARED
    + """
spec, sequences, sharded = json.loads(sys.argv[2]), sys.argv[3] == 'True', sys.argv[4] == 'sharded'
if sharded:
    writer = granular.ShardedDatasetWriter(sys.argv[1], spec, granular.encoders, shardlen=3)
else:
    writer = granular.DatasetWriter(sys.argv[1], spec, granular.encoders)
for i in range(int(sys.argv[5])):
    writer.append(datapoint(i, sequences))
writer.close()
"""
)


@pytest.fixture(params=['oracle21', 'oracle24'])
def release(request):
    oracle = request.getfixturevalue(request.param)
    if oracle.name == '0.21.1':
        return oracle, {**SPEC, **SEQUENCES}, 'refs'
    return oracle, SPEC, 'columns'


@pytest.mark.parametrize('count', [0, 1, COUNT])
@pytest.mark.parametrize('kind', ['plain', 'sharded'])
def test_published_releases_read_our_datasets(release, tmp_path, kind, count):
    oracle, spec, layout = release
    path = str(tmp_path / 'ds')
    if kind == 'sharded' and not count:
        pytest.raises(granular.errors.NotFoundError, granular.ShardedDatasetReader, path, None)
        return
    writer = (
        granular.ShardedDatasetWriter(path, spec, granular.encoders, shardlen=3, layout=layout)
        if kind == 'sharded'
        else granular.DatasetWriter(path, spec, granular.encoders, layout=layout)
    )
    with writer:
        for i in range(count):
            writer.append(datapoint(i, layout == 'refs'))
    reference = oracle.run(READ, path, kind)
    cls = granular.ShardedDatasetReader if kind == 'sharded' else granular.DatasetReader
    with cls(path, granular.decoders) as reader:
        assert reference['spec'] == reader.spec
        assert reference['points'] == json.loads(json.dumps([digest(point) for point in reader]))
        lossless = [key for key in spec if key != 'jpg']
        expected = [{key: datapoint(i, layout == 'refs')[key] for key in sorted(lossless)} for i in range(count)]
        points = reader.fetch(range(count), lossless)
    assert json.loads(json.dumps(digest(points))) == json.loads(json.dumps(digest(expected)))


ROWS = [{'n': i, 'text': f'row {i}'} for i in range(COUNT)]


def append(folder, layout, **options):
    with granular.ShardedDatasetWriter(
        folder, {'n': 'int', 'text': 'utf8'}, shardlen=3, layout=layout, **options
    ) as writer:
        for row in ROWS[writer.found :]:
            writer.append(row)


def append_later(folder, layout):
    with granular.ShardedDatasetWriter(folder, {'n': 'int', 'text': 'utf8'}, shardlen=3, layout=layout) as writer:
        for row in ROWS[:3]:
            writer.append(row)
    append(folder, layout)


def write_plain(folder, layout):
    with granular.DatasetWriter(folder, {'n': 'int', 'text': 'utf8'}, layout=layout) as writer:
        for row in ROWS:
            writer.append(row)


def make_table(folder):
    table = folder.with_name('table.parquet')
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), table)
    return table


def copy_of(folder, layout):
    source = folder.with_name('source')
    append(source, layout, index=True)
    return source


# What writes a dataset: every class, function and command.
WRITING = {
    'DatasetWriter': lambda folder, layout, cli: write_plain(folder, layout),
    'ShardedDatasetWriter': lambda folder, layout, cli: append(folder, layout),
    'ShardedDatasetWriter, appending': lambda folder, layout, cli: append_later(folder, layout),
    'ShardedDatasetWriter, index': lambda folder, layout, cli: append(folder, layout, index=True),
    'build_index': lambda folder, layout, cli: [append(folder, layout), granular.build_index(folder)],
    'convert': lambda folder, layout, cli: granular.convert(ROWS, folder, shardlen=3, layout=layout),
    'convert of an iterable': lambda folder, layout, cli: granular.convert(
        iter(ROWS), folder, shardlen=3, layout=layout
    ),
    'convert without shards': lambda folder, layout, cli: granular.convert(ROWS, folder, shardlen=None, layout=layout),
    'copy': lambda folder, layout, cli: granular.Path(copy_of(folder, layout)).copy(folder),
    'copy_to_local': lambda folder, layout, cli: granular.copy_to_local(copy_of(folder, layout), folder),
    'granular convert': lambda folder, layout, cli: cli(
        'convert', make_table(folder), folder, '--shardlen', 3, '--layout', layout
    ),
    'granular copy': lambda folder, layout, cli: cli('copy', copy_of(folder, layout), folder),
    'granular copy-to-local': lambda folder, layout, cli: cli('copy-to-local', copy_of(folder, layout), folder),
    'granular index': lambda folder, layout, cli: [append(folder, layout), cli('index', folder)],
    'granular clean': lambda folder, layout, cli: [append(folder, layout), cli('clean', folder, '--remove')],
}  # fmt: skip


@pytest.mark.parametrize('name', WRITING)
def test_published_releases_read_what_every_writer_makes(release, tmp_path, granular_cli, name):
    oracle, _, layout = release

    def cli(*args):
        code, _, err = granular_cli(*args)
        assert code == 0, err

    WRITING[name](tmp_path / 'ds', layout, cli)
    sharded = not (tmp_path / 'ds' / 'spec.json').exists()
    script = """
cls = granular.ShardedDatasetReader if sys.argv[2] == 'True' else granular.DatasetReader
with cls(sys.argv[1], granular.decoders) as reader:
    print(json.dumps([reader[i] for i in range(len(reader))]))
"""
    assert oracle.run(script, str(tmp_path / 'ds'), str(sharded)) == ROWS
    with (granular.ShardedDatasetReader if sharded else granular.DatasetReader)(tmp_path / 'ds') as reader:
        assert list(reader) == ROWS


@pytest.mark.parametrize('count', [0, 1, COUNT])
@pytest.mark.parametrize('kind', ['plain', 'sharded'])
def test_datasets_of_published_releases_are_read(release, tmp_path, kind, count):
    oracle, spec, layout = release
    if kind == 'sharded' and not count:
        return
    path = str(tmp_path / 'ds')
    oracle.run(WRITE, path, json.dumps(spec), str(layout == 'refs'), kind, str(count))
    cls = granular.ShardedDatasetReader if kind == 'sharded' else granular.DatasetReader
    with cls(path, granular.decoders) as reader:
        assert reader.layout == layout
        points = [digest(point) for point in reader]
        assert reader.size > 0 or not count
    assert json.loads(json.dumps(points)) == oracle.run(READ, path, kind)['points']
    assert len(points) == count


@pytest.mark.parametrize('version', [1, 2])
@pytest.mark.parametrize('records', [[], [b'a'], [b'abc', b'd', b'efgh' * 100]], ids=len)
def test_bags_are_exchanged_with_0_21(oracle21, tmp_path, version, records):
    path = str(tmp_path / 'x.bag')
    hexes = json.dumps([record.hex() for record in records])
    read = 'r = granular.BagReader(sys.argv[1]); print(json.dumps([r[i].hex() for i in range(len(r))])); r.close()'
    with granular.BagWriter(path, version) as writer:
        for record in records:
            writer.append(record)
    content = (tmp_path / 'x.bag').read_bytes()
    if content:  # 0.21 cannot map an empty file
        assert oracle21.run(read, path) == json.loads(hexes)
    (tmp_path / 'x.bag').unlink()
    script = """
w = granular.BagWriter(sys.argv[1], int(sys.argv[2]))
for record in json.loads(sys.argv[3]):
    w.append(bytes.fromhex(record))
w.close()
"""
    oracle21.run(script, path, str(version), hexes)
    assert (tmp_path / 'x.bag').read_bytes() == content
    with granular.BagReader(path) as reader:
        assert list(reader) == records
        assert reader.version == version


@pytest.mark.parametrize('records', [[], [b'', b'a', b''], [b'abc', b'd']], ids=len)
def test_bags_are_exchanged_with_0_24(oracle24, tmp_path, records):
    hexes = json.dumps([record.hex() for record in records])
    with granular.BagWriter(tmp_path / 'x.bag', 3) as writer:
        for record in records[:1]:
            writer.append(record)
    script = """
w = granular.BagWriter(sys.argv[1])
for record in json.loads(sys.argv[2])[1:]:
    w.append(bytes.fromhex(record))
w.close()
r = granular.BagReader(sys.argv[1])
print(json.dumps([r[i].hex() for i in range(len(r))]))
r.close()
"""
    assert oracle24.run(script, str(tmp_path / 'x.bag'), hexes) == json.loads(hexes)
    with granular.BagReader(tmp_path / 'x.bag') as reader:
        assert list(reader) == records
        assert reader.version == 3


@pytest.mark.parametrize('records', [[b''], [b'', b'a'], [b'', b'', b'b']], ids=len)
def test_empty_first_record_is_read_by_0_21(oracle21, tmp_path, records):
    with granular.BagWriter(tmp_path / 'x.bag') as writer:
        for record in records:
            writer.append(record)
    read = 'r = granular.BagReader(sys.argv[1]); print(json.dumps([r[i].hex() for i in range(len(r))])); r.close()'
    assert oracle21.run(read, str(tmp_path / 'x.bag')) == [record.hex() for record in records]


@pytest.mark.parametrize('kind', ['mp4', 'webm'])
def test_videos_are_exchanged_with_0_21(oracle21, tmp_path, kind):
    video = np.stack([np.full((32, 48, 3), 50 * i, np.uint8) for i in range(4)])
    with granular.DatasetWriter(tmp_path / 'ours', {'v': kind}, granular.encoders) as writer:
        writer.append({'v': video})
    script = """
v = granular.DatasetReader(sys.argv[1], granular.decoders)[0]['v']
video = np.stack([np.full((32, 48, 3), 50 * i, np.uint8) for i in range(4)])
with granular.DatasetWriter(sys.argv[2], {'v': sys.argv[3]}, granular.encoders) as w:
    w.append({'v': video})
print(json.dumps([list(v.shape), float(np.abs(v.astype(int) - video).mean())]))
"""
    shape, difference = oracle21.run(script, str(tmp_path / 'ours'), str(tmp_path / 'theirs'), kind)
    assert shape == [4, 32, 48, 3]
    assert difference < 8
    reference = granular.DatasetReader(tmp_path / 'theirs', granular.decoders)[0]['v']
    assert reference.shape == video.shape
    assert abs(reference.astype(int) - video).mean() < 8


def test_integers_that_0_21_reads_but_cannot_write(oracle21, tmp_path):
    values = [0, 127, 128, 255, 256, 32767, 32768, 2**31, -1, -128, -129, -(2**40), 2**100]
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'int'}, granular.encoders) as writer:
        for value in values:
            writer.append({'x': value})
    script = 'r = granular.DatasetReader(sys.argv[1], granular.decoders); print([r[i]["x"] for i in range(len(r))])'
    assert oracle21.run(script, str(tmp_path / 'ds')) == values


# --- behaviour that the tests of 0.21.1 rely on

CALLS = {
    'options of bags by position': """
def records(*args):
    with granular.BagReader(f'{path}/title.bag', *args) as reader:
        return [bytes(reader[i]).decode() for i in range(len(reader))]
result = [records(), records(True), records(False), records(True, True), records(False, True)]
""",
    'masks beyond the end': """
masks = [{'times': want} for want in (range(1, 10), range(0, 1), range(3, 9), slice(1, 10), range(3), True)]
with granular.DatasetReader(path, granular.decoders) as reader:
    result = [[[int(x) for x in reader[i, mask]['times']] for mask in masks] for i in (0, 2)]
""",
    'ranges of bags beyond the end': """
ranges = [range(0, 3), range(1, 10), range(2, 10**9), range(3, 3), range(3, 4), range(0, 0), slice(1, 10)]
result = []
for cached in (True, False):
    with granular.BagReader(f'{path}/title.bag', cached) as reader:
        result += [[bytes(record).decode() for record in reader[r]] for r in (*ranges, range(len(reader) - 1, 110))]
""",
    'masks that begin behind the end': """
def length(index, begin):
    with granular.DatasetReader(path, granular.decoders) as reader:
        try:
            return len(reader[index, {'times': range(begin, 10)}]['times'])
        except (AssertionError, IndexError):
            return 'error'
result = [length(index, begin) for index in (1, 2) for begin in range(6)]
""",
}


@pytest.mark.parametrize('call', CALLS)
def test_readers_return_the_values_of_0_21(oracle21, tmp_path, call):
    with granular.DatasetWriter(tmp_path / 'ds', {'title': 'utf8', 'times': 'int[]'}, granular.encoders) as writer:
        for count in (5, 0, 3, 4):
            writer.append({'title': f'{count} times', 'times': range(count)})
    path = str(tmp_path / 'ds')
    reference = oracle21.run(f'path = sys.argv[1]{CALLS[call]}print(json.dumps(result))', path)
    namespace: dict[str, Any] = {'path': path, 'granular': granular}
    exec(CALLS[call], namespace)
    assert namespace['result'] == reference


def test_every_read_method_clips_a_mask_alike(tmp_path):
    with granular.ShardedDatasetWriter(tmp_path, {'times': 'int[]'}, granular.encoders, shardlen=2) as writer:
        for count in (5, 0, 3, 4):
            writer.append({'times': range(count)})
    mask = {'times': range(1, 4)}
    expected = [{'times': [1, 2, 3]}, {'times': [1, 2]}, {'times': [1, 2, 3]}]
    with granular.ShardedDatasetReader(tmp_path, granular.decoders) as reader:
        assert [reader[i, mask] for i in (0, 2, 3)] == expected
        assert reader.fetch([0, 2, 3], mask) == expected
        assert reader[2:, mask] == {'times': [[1, 2], [1, 2, 3]]}

    async def read() -> list[Any]:
        async with granular.aio.ShardedDatasetReader(tmp_path, granular.decoders) as reader:
            return [await reader.get(0, mask), *await reader.fetch([2, 3], mask)]

    assert asyncio.run(read()) == expected


CONSUMED = """
def counts(shard, shards):
    loader = granular.Loader(source, batch=2, prefetch=2, workers=1, shard_id=shard, num_shards=shards)
    found = [loader.consumed]
    batches = iter(loader)
    for _ in range(2):
        next(batches)
        found.append(loader.consumed)
    loader.load({'step': 60})
    found += [loader.consumed, loader.save()['step']]
    next(batches)
    found.append(loader.consumed)
    loader.close()
    return found
"""


def test_loader_counts_consumed_datapoints_as_0_21(oracle21, tmp_path):
    (tmp_path / 'source.py').write_text('def source(step):\n    return {"x": step}\n')
    script = f"""
sys.path.insert(0, sys.argv[1])
from source import source
{CONSUMED}
if __name__ == '__main__':
    print(json.dumps([counts(0, 1), counts(1, 3)]))
"""
    reference = oracle21.run(script, str(tmp_path))
    namespace: dict[str, Any] = {'granular': granular, 'source': lambda step: {'x': step}}
    exec(f'{CONSUMED}result = [counts(0, 1), counts(1, 3)]', namespace)
    assert namespace['result'] == reference == [[0, 2, 4, 60, 60, 62], [0, 6, 12, 60, 60, 66]]

    async def count() -> list[int]:
        async with granular.aio.Loader(lambda step: {'x': step}, 2, shard_id=1, num_shards=3) as loader:
            before = loader.consumed
            await anext(loader)
            return [before, loader.consumed]

    assert asyncio.run(count()) == [0, 6]


@pytest.mark.parametrize('kind', ['float', 'bool', 'json'])
def test_published_releases_refuse_types_that_they_do_not_have(release, tmp_path, kind):
    oracle, _, layout = release
    with granular.DatasetWriter(tmp_path / 'ds', {'x': kind}, layout=layout) as writer:
        writer.append({'x': True} if kind == 'bool' else {'x': 1.5})
    code = """
import json, sys, granular
try:
    with granular.DatasetReader(sys.argv[1], granular.decoders) as reader:
        print(json.dumps(repr(reader[0])))
except KeyError as error:
    print(json.dumps(str(error)))
"""
    assert oracle.run(code, str(tmp_path / 'ds')) == f"'{kind}'"
