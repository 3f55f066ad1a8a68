"""Checksums of records: written, verified by readers, and checked by verify."""

import json
import pathlib
import pickle

import google_crc32c
import numpy as np
import pytest

import granular
from granular.errors import AlreadyExistsError, CorruptBagError, CorruptRecordError

SPEC = {'x': 'bytes', 'n': 'int'}
LISTS = {'x': 'bytes', 'n': 'int', 'many': 'utf8[]'}


def make_datapoint(i, spec=SPEC):
    datapoint = {'x': bytes([i % 256]) * (i % 50 + 1), 'n': i}
    return datapoint | {'many': [f'{i}-{k}' for k in range(i % 3)]} if spec is LISTS else datapoint


def write(folder, layout, count=40, spec=SPEC, **options):
    with granular.DatasetWriter(folder, spec, granular.encoders, layout=layout, **options) as writer:
        for i in range(len(writer), count):
            writer.append(make_datapoint(i, spec), flush=i % 7 == 0)


def harm(path, at=-1):
    """Flip a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(('layout', 'spec'), [('refs', SPEC), ('refs', LISTS), ('columns', SPEC)])
def test_written_records_are_verified(root, layout, spec):
    folder = root / 'data'
    write(folder, layout, spec=spec)
    with granular.DatasetReader(folder, granular.decoders, verify=True) as reader:
        assert list(reader) == [make_datapoint(i, spec) for i in range(40)]
        assert reader[3] == make_datapoint(3, spec)
        assert reader.fetch([5, 5, -1]) == [make_datapoint(5, spec), make_datapoint(5, spec), make_datapoint(39, spec)]
    report = granular.verify(folder)
    assert (report.problems, report.datapoints) == ([], 40)
    assert report.checked == report.records >= 80


def test_checksum_file_holds_a_crc32c_per_record(tmp_path):
    write(tmp_path / 'data', 'columns', 5)
    data = (tmp_path / 'data' / 'x.crc').read_bytes()
    assert np.frombuffer(data, '<u4').tolist() == [google_crc32c.value(make_datapoint(i)['x']) for i in range(5)]


@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_changed_record_is_an_error(tmp_path, layout):
    write(tmp_path / 'data', layout)
    harm(tmp_path / 'data' / 'x.bag', 3)
    index = next(i for i in range(40) if sum(len(make_datapoint(k)['x']) for k in range(i + 1)) > 3)
    with granular.DatasetReader(tmp_path / 'data', granular.decoders, verify=True) as reader:
        with pytest.raises(CorruptRecordError, match=rf'x\.bag: record {index}: expected checksum \w{{8}}, got'):
            reader[index]
        with pytest.raises(CorruptRecordError):
            reader.fetch(range(10))
        assert reader[30] == make_datapoint(30)
    with granular.DatasetReader(tmp_path / 'data', granular.decoders) as reader:
        assert len(list(reader)) == 40
    (problem,) = granular.verify(tmp_path / 'data').problems
    assert (problem.path, problem.record) == (str(tmp_path / 'data' / 'x.bag'), index)


def test_cached_records_are_verified(tmp_path):
    write(tmp_path / 'data', 'refs')
    harm(tmp_path / 'data' / 'x.bag', 3)
    with granular.DatasetReader(tmp_path / 'data', granular.decoders, cache_keys=('x',), verify=True) as reader:
        with pytest.raises(CorruptRecordError):
            reader.fetch(range(10))


def test_verifying_readers_pickle(tmp_path):
    with granular.ShardedDatasetWriter(tmp_path / 's', SPEC, granular.encoders, shardlen=2) as writer:
        writer.append(make_datapoint(1))
    harm(tmp_path / 's' / '000000' / 'x.bag', 0)
    readers = [
        granular.ShardedDatasetReader(tmp_path / 's', granular.decoders, verify=True),
        granular.DatasetReader(tmp_path / 's' / '000000', granular.decoders, verify=True),
        granular.BagReader(tmp_path / 's' / '000000' / 'x.bag', verify=True),
    ]
    for reader in readers:
        with pickle.loads(pickle.dumps(reader)) as twin, pytest.raises(CorruptRecordError):
            twin[0]
        reader.close()


def test_verifying_without_checksums_is_an_error(tmp_path):
    with granular.DatasetWriter(tmp_path / 'data', SPEC, checksums=False) as writer:
        writer.append(make_datapoint(1))
    assert not list((tmp_path / 'data').glob('*.crc'))
    with pytest.raises(CorruptBagError, match='no checksums'):
        granular.DatasetReader(tmp_path / 'data', granular.decoders, verify=True)
    report = granular.verify(tmp_path / 'data')
    assert (report.problems, report.checked, report.records) == ([], 0, 3)


def test_too_few_checksums_are_an_error(tmp_path):
    write(tmp_path / 'data', 'refs')
    file = tmp_path / 'data' / 'x.crc'
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CorruptBagError, match='expected 40 checksums, .* got 39'):
        granular.DatasetReader(tmp_path / 'data', granular.decoders, verify=True)
    assert 'expected 40 checksums' in granular.verify(tmp_path / 'data').problems[0].message


@pytest.mark.parametrize('cut', [0, 1, 8, 400])
def test_appending_restores_checksums_lost_by_a_crash(tmp_path, cut):
    folder = tmp_path / 'data'
    write(folder, 'columns', 20)
    file = folder / 'x.crc'
    file.write_bytes(file.read_bytes()[: max(0, 80 - cut)])
    with granular.DatasetWriter(folder, SPEC, granular.encoders, layout='columns', checksums=False) as writer:
        for i in range(20, 30):
            writer.append(make_datapoint(i))
    with granular.DatasetReader(folder, granular.decoders, verify=True) as reader:
        assert list(reader) == [make_datapoint(i) for i in range(30)]


def test_appending_computes_missing_checksums_and_logs(tmp_path, caplog):
    folder = tmp_path / 'data'
    write(folder, 'columns', 20, checksums=False)
    assert not list(folder.glob('*.crc'))
    write(folder, 'columns', 25, checksums=False)
    assert (list(folder.glob('*.crc')), caplog.messages) == ([], [])
    write(folder, 'columns', 30)
    assert (
        sorted(caplog.messages)
        == [f'{folder}/{key}.bag: 25 of its 25 records have no checksum: reading them to compute it' for key in SPEC][
            ::-1
        ]
    )
    with granular.DatasetReader(folder, verify=True) as reader:
        assert list(reader) == [make_datapoint(i) for i in range(30)]


def test_missing_checksums_are_computed_chunk_by_chunk(tmp_path):
    records = [b'', bytes(9 << 20), b'', b'1', bytes(5 << 20), bytes(3 << 20), b'2' * (8 << 20), b'', b'']
    file = tmp_path / 'a.bag'
    for i, checksums in enumerate((False, True)):
        with granular.BagWriter(file, 3, checksums=checksums) as writer:
            for record in records[:: 1 - 2 * i]:
                writer.append(record)
    records += records[::-1]
    data = (tmp_path / 'a.crc').read_bytes()
    assert np.frombuffer(data, '<u4').tolist() == [google_crc32c.value(record) for record in records]
    file.write_bytes(file.read_bytes()[:-1] + b'x')
    (tmp_path / 'a.crc').unlink()
    with granular.BagWriter(file, 3) as writer:
        writer.append(b'3')
    with granular.BagReader(file, verify=True) as reader:
        assert len(reader) == len(records) + 1


def test_further_shards_of_a_dataset_without_checksums_are_logged(tmp_path, caplog):
    for count, checksums in ((4, False), (6, False), (8, True)):
        with granular.ShardedDatasetWriter(tmp_path, SPEC, shardlen=2, checksums=checksums) as writer:
            for i in range(writer.found, count):
                writer.append(make_datapoint(i))
    (message,) = caplog.messages
    assert message.startswith(f'{tmp_path}/000002: was written without checksums and is left so')
    with granular.ShardedDatasetWriter(tmp_path, SPEC, shardlen=2) as writer:
        writer.append(make_datapoint(writer.found))
    assert len(caplog.messages) == 1
    with pytest.raises(CorruptBagError, match='000000/.*no checksums.*checksums=False'):
        granular.ShardedDatasetReader(tmp_path, verify=True)
    report = granular.verify(tmp_path)
    assert (report.problems, report.records, report.checked) == ([], 27, 9)


def test_conversion_keeps_checksums_as_it_was_begun(tmp_path):
    records = [{'x': i} for i in range(10)]
    granular.convert(records, tmp_path / 'a', shardlen=3, checksums=False)
    assert not list((tmp_path / 'a').rglob('*.crc'))
    with pytest.raises(AlreadyExistsError, match='with checksums False, not True: pass the same'):
        granular.convert(records, tmp_path / 'a', shardlen=3)
    granular.convert(records, tmp_path / 'b', shardlen=3)
    assert granular.verify(tmp_path / 'b').checked == 20
    granular.Path(tmp_path / 'b').copy(tmp_path / 'c')
    assert granular.verify(tmp_path / 'c').checked == 20


def test_growing_bag_is_verified(tmp_path):
    with granular.BagWriter(tmp_path / 'a.bag', 3) as writer:
        for i in range(5):
            writer.append(bytes([i]))
            with granular.BagReader(tmp_path / 'a.bag', verify=True) as reader:
                assert list(reader) == [bytes([k]) for k in range(i + 1)]


def test_failed_writer_leaves_no_checksums(root):
    with pytest.raises(granular.errors.EncodeError):
        with granular.DatasetWriter(root / 'data', SPEC, granular.encoders) as writer:
            writer.append(make_datapoint(1))
            writer.append({'x': 'text', 'n': 1})
    assert not (root / 'data').exists()


def test_published_releases_read_datasets_with_checksums(tmp_path, oracle21, oracle24):
    spec = {'x': 'bytes', 'n': 'int'}
    for layout, oracle in (('refs', oracle21), ('columns', oracle24)):
        write(tmp_path / layout, layout, spec=spec)
        datapoint = oracle.run(
            'import granular, sys; r = granular.DatasetReader(sys.argv[1], granular.decoders); '
            'print(sum(r[i]["n"] for i in range(len(r))))',
            str(tmp_path / layout),
        )
        assert int(datapoint) == sum(range(40))


def test_checksums_continue_after_an_older_writer_appended(tmp_path, oracle24):
    folder = tmp_path / 'data'
    write(folder, 'columns', 10)
    oracle24.run(
        'import granular, sys\n'
        'with granular.DatasetWriter(sys.argv[1], {"x": "bytes", "n": "int"}, granular.encoders) as writer:\n'
        '  for i in range(10, 20): writer.append({"x": bytes([i % 256]) * (i % 50 + 1), "n": i})',
        str(folder),
    )
    assert (
        granular.verify(folder).problems[0].message.endswith('expected 20 checksums, one per record of its bag, got 10')
    )
    write(folder, 'columns', 30)
    with granular.DatasetReader(folder, verify=True) as reader:
        assert list(reader) == [make_datapoint(i) for i in range(30)]


def test_sharded_datasets_are_verified(root):
    with granular.ShardedDatasetWriter(root / 'data', SPEC, granular.encoders, shardlen=9) as writer:
        for i in range(30):
            writer.append(make_datapoint(i))
    with granular.ShardedDatasetReader(root / 'data', granular.decoders, verify=True) as reader:
        assert list(reader) == [make_datapoint(i) for i in range(30)]
    seen = []
    report = granular.verify(root / 'data', seen.append)
    assert (report.datapoints, report.problems) == (30, [])
    assert sum(seen) == report.bytes


def test_verify_continues_after_problems(tmp_path):
    folder = tmp_path / 'data'
    with granular.ShardedDatasetWriter(folder, SPEC, granular.encoders, shardlen=9) as writer:
        for i in range(45):
            writer.append(make_datapoint(i))
    (folder / '000001' / 'x.bag').write_bytes(b'no bag')
    harm(folder / '000002' / 'n.bag', 0)
    (folder / '000003' / 'n.bag').unlink()
    report = granular.verify(folder)
    assert [pathlib.Path(problem.path).relative_to(folder).parts[0] for problem in report.problems] == [
        '000001', '000002', '000003',
    ]  # fmt: skip
    assert report.problems[1].record == 0
    assert report.datapoints == 27


def test_verify_requires_a_dataset(tmp_path):
    with pytest.raises(granular.errors.NotFoundError, match='not a dataset'):
        granular.verify(tmp_path)


def test_verify_command_reports_problems(tmp_path, granular_cli):
    write(tmp_path / 'data', 'columns')
    code, out, _ = granular_cli('verify', tmp_path / 'data')
    assert code == 0
    assert 'no problems: 40 datapoints, 80 records, 80 compared with a checksum, 0 decoded' in out
    harm(tmp_path / 'data' / 'x.bag', 0)
    code, out, _ = granular_cli('verify', tmp_path / 'data', '--json')
    assert code == 1
    assert json.loads(out.splitlines()[-1])['problems'][0]['record'] == 0
    _, out, _ = granular_cli('verify', tmp_path / 'data')
    assert 'x.bag: record 0, of datapoint 0 of the dataset: its checksum is' in out
