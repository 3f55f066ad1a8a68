"""WebDataset tar files: samples, headers, members and decoders, compared with tarfile and webdataset."""

import io
import tarfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular.errors import (
    CorruptError,
    DecodeError,
    InvalidArgumentError,
    UnknownKeyError,
    UnsupportedError,
)
from tests.support.requests import requests, steady
from tests.support.tables import examples

DECODERS = {'cls': int, 'txt': granular.decoders['utf8'], 'png': len}


def archive(members, format=tarfile.GNU_FORMAT, **options):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode='w', format=format, **options) as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return stream.getvalue()


def sample(i):
    image = bytes([i % 256, 0]) * (i * 37 % 400)
    return {'__key__': f'{i:04d}', 'img': image, 'cls': str(i).encode(), 'txt': b'caf\xc3\xa9'}


def samples(count=100, first=0):
    return [
        (f'{datapoint["__key__"]}.{field}', datapoint[field])
        for datapoint in map(sample, range(first, first + count))
        for field in ('img', 'cls', 'txt')
    ]


def write(path, count=100, first=0, **options):
    path.write_bytes(archive(samples(count, first), **options))
    return path


def test_samples_have_fields_of_which_some_are_read(root):
    paths = [write(root / f'{i}.tar', 40, 40 * i) for i in range(3)]
    with granular.WebDatasetDataSource(paths) as source:
        assert source.fields == ('__key__', 'img', 'cls', 'txt')
        assert source.size == sum(path.stat().size for path in paths)
        assert list(source) == list(map(sample, range(120)))
        assert source[38:42, ['cls', '__key__']] == {
            'cls': [b'38', b'39', b'40', b'41'], '__key__': ['0038', '0039', '0040', '0041']
        }  # fmt: skip
        with pytest.raises(UnknownKeyError, match='nothing'):
            source[0, 'nothing']


@pytest.mark.parametrize('format', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_headers_equal_those_of_tarfile(tmp_path, format):
    folder = 'd' * 90
    names = [f'{folder}/{"n" * (i % 60)}/k{i:03d}.x' for i in range(50)]
    if format != tarfile.USTAR_FORMAT:
        names += [f'{folder}/{folder}/{"l" * (50 * i)}.y' for i in range(1, 20)] + [f'grüße/ф{i}.z' for i in range(5)]
    path = tmp_path / 'x.tar'
    path.write_bytes(archive([(name, name.encode() * 3) for name in names], format))
    source = granular.WebDatasetDataSource(path)
    with tarfile.open(path) as tar:
        assert tar.getnames() == names
    for name, datapoint in zip(names, source, strict=True):
        key, _, field = name.rpartition('.')
        assert datapoint == {'__key__': key, field: name.encode() * 3}


def test_members_are_grouped_as_by_webdataset(tmp_path):
    folder, link, long = tarfile.TarInfo('sub'), tarfile.TarInfo('a.link'), tarfile.TarInfo('pax.x')
    folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, 'a.txt'
    long.pax_headers = {'path': 'sub/given.name.TXT', 'comment': 'c' * 9000, 'size': '3'}
    members = [
        (folder, b''), ('a.txt', b'1'), (link, b''), ('a.seg.PNG', b'22'), ('b', b'no field'), ('.hidden', b''),
        ('__meta__/a.json', b'{}'), ('sub/a.txt', b'3'), ('sub.d/a.txt', b'4'), ('a.txt', b'5'), ('e.', b''),
        (long, b'six'),
    ]  # fmt: skip
    path = tmp_path / 'x.tar'
    path.write_bytes(archive(members, tarfile.PAX_FORMAT))
    assert list(granular.WebDatasetDataSource(path)) == [
        {'__key__': 'a', 'txt': b'1', 'seg.png': b'22'}, {'__key__': 'sub/a', 'txt': b'3'},
        {'__key__': 'sub.d/a', 'txt': b'4'}, {'__key__': 'a', 'txt': b'5'}, {'__key__': 'e', '': b''},
        {'__key__': 'sub/given', 'name.txt': b'six'},
    ]  # fmt: skip
    source = granular.WebDatasetDataSource(path, DECODERS)
    assert source[0] == {'__key__': 'a', 'txt': '1', 'seg.png': 2}
    assert source.fetch([1, 0], ['seg.png']) == [{}, {'seg.png': 2}]
    with pytest.raises(UnknownKeyError, match=r"datapoint 1 has no 'seg\.png'"):
        source[0:2, ['txt', 'seg.png']]
    path.write_bytes(archive([('a.txt', b'1'), ('a.TXT', b'2')]))
    with pytest.raises(CorruptError, match="'a' has 'txt' twice"):
        granular.WebDatasetDataSource(path)


@pytest.mark.parametrize(
    ('kind', 'body'),
    [(tarfile.LNKTYPE, 0), (tarfile.SYMTYPE, 0), (tarfile.DIRTYPE, 0), (tarfile.FIFOTYPE, 0), (tarfile.CHRTYPE, 0),
     (b'D', 2), (b'Z', 2)],
)  # fmt: skip
def test_members_have_a_body_as_for_tarfile(tmp_path, kind, body):
    other = tarfile.TarInfo('other')
    other.type, other.size = kind, 900
    first, last = (archive([(f'{name}.txt', name.encode())])[:1024] for name in 'ab')
    path = tmp_path / 'x.tar'
    path.write_bytes(first + other.tobuf(tarfile.GNU_FORMAT) + b'x' * 512 * body + last + bytes(1024))
    with tarfile.open(path) as tar:
        assert tar.getnames() == ['a.txt', 'other', 'b.txt']
    assert [datapoint['txt'] for datapoint in granular.WebDatasetDataSource(path)] == [b'a', b'b']


def test_decoders_by_extension(tmp_path):
    path = write(granular.Path(tmp_path / 'x.tar'))
    source = granular.WebDatasetDataSource(path, DECODERS)
    assert source[7, ('cls', 'txt')] == {'cls': 7, 'txt': 'café'}
    dataset = granular.MapDataset.source(source).select(['cls']).shuffle(seed=1).batch(10)
    assert sorted(np.concatenate([batch['cls'] for batch in dataset])) == list(range(100))
    with pytest.raises(DecodeError, match=r"x\.tar: datapoint '.*', key 'img'"):
        granular.WebDatasetDataSource(path, {'img': int})[3]
    for wrong in (3, {'cls': 3}):
        with pytest.raises(InvalidArgumentError):
            granular.WebDatasetDataSource(path, wrong)


@pytest.fixture(scope='module')
def several(tmp_path_factory):
    folder = granular.Path(tmp_path_factory.mktemp('several'))
    return [write(folder / f'{i}', count, first) for i, (count, first) in enumerate([(7, 0), (0, 7), (20, 7), (1, 27)])]


@settings(max_examples=examples(40))
@given(st.lists(st.integers(-28, 27), max_size=40), st.sampled_from([None, ('cls',), ('__key__', 'img'), ()]))
def test_any_indices_are_fetched(several, indices, mask):
    with granular.WebDatasetDataSource(several) as source:
        datapoints = [sample(i % 28) for i in indices]
        assert source.fetch(indices, mask) == [
            datapoint if mask is None else {key: datapoint[key] for key in mask} for datapoint in datapoints
        ]


def test_only_selected_members_are_read(fakegcs):
    path = write(steady(fakegcs, max_gap=0) / 'x.tar')
    source, count, size = requests(lambda: granular.WebDatasetDataSource(path))
    assert count <= 3 and size <= path.stat().size
    chosen = granular.MapDataset.source(source).select(['cls'])
    result, count, size = requests(lambda: chosen.fetch([3, 50, 99]))
    assert result == [{'cls': b'3'}, {'cls': b'50'}, {'cls': b'99'}]
    assert (count, size) == (3, 5)
    assert requests(lambda: source.fetch([3, 4], ['__key__'])) == ([{'__key__': '0003'}, {'__key__': '0004'}], 0, 0)


def test_scanning_headers_skips_large_members(tmp_path):
    path = tmp_path / 'x.tar'
    path.write_bytes(archive([(f'{i}.bin', bytes(20 << 20)) for i in range(4)] + [('l' * 6000 + '.x', b'1')]))
    source, _, size = requests(lambda: granular.WebDatasetDataSource(path))
    assert size < 20 << 20
    assert len(source) == 5 and len(source[3]['bin']) == 20 << 20
    assert source[4]['__key__'] == 'l' * 6000


def test_damaged_files_are_errors(tmp_path, caplog):
    intact, path = archive(samples(20)), granular.Path(tmp_path / 'damaged.tar')
    with tarfile.open(fileobj=io.BytesIO(intact)) as tar:
        headers = [info.offset for info in tar]
    damaged = [intact[: at + 100] for at in headers[1:9]] + [intact[: headers[-1] + 513], b'', b'x' * 100, b'x' * 5000]
    damaged += [intact[:at] + b'\xff' * 20 + intact[at + 20 :] for at in headers[3:9]]
    damaged += [intact[: headers[5] + 124] + b'77777777777\0' + intact[headers[5] + 136 :]]
    pax = archive([(info, b'') for info in [tarfile.TarInfo('é' * 200)]], tarfile.PAX_FORMAT)
    damaged += [pax[:512] + b'999 ' + pax[516:], pax[:512] + b'xyz ' + pax[516:]]
    long = tarfile.TarInfo('a.x')
    long.pax_headers = {'size': '9' * 5000}
    damaged += [archive([(long, b'')], tarfile.PAX_FORMAT)]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CorruptError, match=r'damaged\.tar'):
            granular.WebDatasetDataSource(path)
    path.write_bytes(intact[: headers[30]])
    assert len(granular.WebDatasetDataSource(path)) == 10
    assert 'may have been truncated' in caplog.text


@pytest.mark.parametrize(('mode', 'name'), [('w:gz', 'gzip'), ('w:bz2', 'bzip2'), ('w:xz', 'xz')])
def test_compressed_files_are_rejected(tmp_path, mode, name):
    with tarfile.open(tmp_path / 'x.tar', mode) as tar:
        tar.addfile(tarfile.TarInfo('a.txt'))
    with pytest.raises(UnsupportedError, match=rf'x\.tar.*{name}'):
        granular.WebDatasetDataSource(tmp_path / 'x.tar')
