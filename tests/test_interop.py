"""What the published releases write, we read; what we write, they read."""

import json
import pathlib

import numpy as np
import pytest

import granular
from tests import interop_datapoints
from tests.interop_datapoints import datapoint, digest

SPEC = {
    'array': 'array', 'bytes': 'bytes', 'int': 'int', 'i64': 'i64', 'jpg': 'jpg', 'msgpack': 'msgpack', 'png': 'png',
    'tree': 'tree', 'u64': 'u64', 'utf8': 'utf8',
}  # fmt: skip
SEQUENCES = {'frames': 'png[]', 'texts': 'utf8[]', 'times': 'int[]'}

# The releases get the text of what makes the datapoints.
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
def test_they_read_what_we_write(release, tmp_path, kind, count):
    oracle, spec, layout = release
    place = str(tmp_path / 'ds')
    if kind == 'sharded' and not count:
        pytest.raises(granular.errors.NotFoundError, granular.ShardedDatasetReader, place, None)
        return
    writer = (
        granular.ShardedDatasetWriter(place, spec, granular.encoders, shardlen=3, layout=layout)
        if kind == 'sharded'
        else granular.DatasetWriter(place, spec, granular.encoders, layout=layout)
    )
    with writer:
        for i in range(count):
            writer.append(datapoint(i, layout == 'refs'))
    found = oracle.run(READ, place, kind)
    cls = granular.ShardedDatasetReader if kind == 'sharded' else granular.DatasetReader
    with cls(place, granular.decoders) as reader:
        assert found['spec'] == reader.spec
        assert found['points'] == json.loads(json.dumps([digest(point) for point in reader]))
        lossless = [key for key in spec if key != 'jpg']
        expected = [{key: datapoint(i, layout == 'refs')[key] for key in sorted(lossless)} for i in range(count)]
        points = reader.fetch(range(count), lossless)
    assert json.loads(json.dumps(digest(points))) == json.loads(json.dumps(digest(expected)))


@pytest.mark.parametrize('count', [0, 1, COUNT])
@pytest.mark.parametrize('kind', ['plain', 'sharded'])
def test_we_read_what_they_write(release, tmp_path, kind, count):
    oracle, spec, layout = release
    if kind == 'sharded' and not count:
        return
    place = str(tmp_path / 'ds')
    oracle.run(WRITE, place, json.dumps(spec), str(layout == 'refs'), kind, str(count))
    cls = granular.ShardedDatasetReader if kind == 'sharded' else granular.DatasetReader
    with cls(place, granular.decoders) as reader:
        assert reader.layout == layout
        points = [digest(point) for point in reader]
        assert reader.size > 0 or not count
    assert json.loads(json.dumps(points)) == oracle.run(READ, place, kind)['points']
    assert len(points) == count


@pytest.mark.parametrize('version', [1, 2])
@pytest.mark.parametrize('records', [[], [b'a'], [b'abc', b'd', b'efgh' * 100]], ids=len)
def test_bags_of_0_21(oracle21, tmp_path, version, records):
    place = str(tmp_path / 'x.bag')
    hexes = json.dumps([record.hex() for record in records])
    read = 'r = granular.BagReader(sys.argv[1]); print(json.dumps([r[i].hex() for i in range(len(r))])); r.close()'
    with granular.BagWriter(place, version) as writer:
        for record in records:
            writer.append(record)
    ours = (tmp_path / 'x.bag').read_bytes()
    if ours:  # shared memory of no bytes fails there
        assert oracle21.run(read, place) == json.loads(hexes)
    (tmp_path / 'x.bag').unlink()
    script = """
w = granular.BagWriter(sys.argv[1], int(sys.argv[2]))
for record in json.loads(sys.argv[3]):
    w.append(bytes.fromhex(record))
w.close()
"""
    oracle21.run(script, place, str(version), hexes)
    assert (tmp_path / 'x.bag').read_bytes() == ours
    with granular.BagReader(place) as reader:
        assert list(reader) == records
        assert reader.version == version


@pytest.mark.parametrize('records', [[], [b'', b'a', b''], [b'abc', b'd']], ids=len)
def test_bags_of_0_24(oracle24, tmp_path, records):
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
def test_an_empty_first_record_is_read_by_0_21(oracle21, tmp_path, records):
    with granular.BagWriter(tmp_path / 'x.bag') as writer:
        for record in records:
            writer.append(record)
    read = 'r = granular.BagReader(sys.argv[1]); print(json.dumps([r[i].hex() for i in range(len(r))])); r.close()'
    assert oracle21.run(read, str(tmp_path / 'x.bag')) == [record.hex() for record in records]


@pytest.mark.parametrize('kind', ['mp4', 'webm'])
def test_videos(oracle21, tmp_path, kind):
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
    found = granular.DatasetReader(tmp_path / 'theirs', granular.decoders)[0]['v']
    assert found.shape == video.shape
    assert abs(found.astype(int) - video).mean() < 8


def test_integers_the_reference_reads_but_cannot_write(oracle21, tmp_path):
    values = [0, 127, 128, 255, 256, 32767, 32768, 2**31, -1, -128, -129, -(2**40), 2**100]
    with granular.DatasetWriter(tmp_path / 'ds', {'x': 'int'}, granular.encoders) as writer:
        for value in values:
            writer.append({'x': value})
    script = 'r = granular.DatasetReader(sys.argv[1], granular.decoders); print([r[i]["x"] for i in range(len(r))])'
    assert oracle21.run(script, str(tmp_path / 'ds')) == values
