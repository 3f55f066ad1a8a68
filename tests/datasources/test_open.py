"""``granular.open`` and the errors that name it."""

import asyncio
import io
import re
import tarfile
import zlib

import numpy as np
import pyarrow
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

import granular
from granular import aio
from granular.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from tests.support.files import FILES, FORMATS, numbers_in, write_numbers

SPEC = {'image': 'png', 'label': 'int'}


def datapoint(i):
    return {'image': np.full((2, 2), i, np.uint8), 'label': i}


def write_dataset(folder, kind=granular.DatasetWriter, **options):
    with kind(folder, SPEC, **options) as writer:
        for i in range(10):
            writer.append(datapoint(i))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('open')
    write_dataset(folder / 'dataset')
    write_dataset(folder / 'columns', layout='columns')
    write_dataset(folder / 'sharded', granular.ShardedDatasetWriter, shardlen=4)
    (folder / 'files').mkdir()
    for number in range(2):
        parquet.write_table(pyarrow.table({'label': range(5)}), folder / 'files' / f'rows-{number}.parquet')
        writer = ArrayRecordWriter(str(folder / f'r.array_record-0000{number}-of-00002'), 'group_size:1')
        for i in range(5):
            writer.write(bytes([10 * number + i]))
        writer.close()
    with tarfile.open(folder / 'a.tar', 'w') as tar:
        for i in range(10):
            for suffix, data in (('png', granular.encoders['png'](datapoint(i)['image'])), ('cls', b'1')):
                info = tarfile.TarInfo(f'{i}.{suffix}')
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return folder


KINDS = {
    'dataset': 'DatasetReader',
    'columns': 'DatasetReader',
    'sharded': 'ShardedDatasetReader',
    'dataset/label.bag': 'BagReader',
    'files': 'ParquetDataSource',
    'files/rows-*.parquet': 'ParquetDataSource',
    'r.array_record-*': 'ArrayRecordDataSource',
    'a.tar': 'WebDatasetDataSource',
}


@pytest.mark.parametrize('name', KINDS)
async def test_open_gives_the_reader_of_what_is_there(folder, name):
    with granular.open(folder / name) as reader:
        assert type(reader) is getattr(granular, KINDS[name])
        assert len(reader) == 10
        first = reader.fetch([3])[0]
    for opening in aio.open(f'{folder / name}'), await aio.open(f'{folder / name}'):
        async with opening as twin:
            assert type(twin) is getattr(aio, KINDS[name])
            assert repr((await twin.fetch([3]))[0]) == repr(first)
        assert twin.closed
    twin = await asyncio.create_task(aio.open(f'{folder / name}'))
    await twin.aclose()


async def test_opening_that_fails_raises_its_error(tmp_path):
    with pytest.raises(NotFoundError):
        await aio.open(tmp_path / 'none')
    with pytest.raises(NotFoundError):
        async with aio.open(tmp_path / 'none'):
            raise AssertionError
    with pytest.raises(NotFoundError):
        async with aio.Path(tmp_path / 'none').open():
            raise AssertionError


def test_open_decodes_by_default(folder):
    assert granular.open(folder / 'sharded')[7]['image'].tolist() == [[7] * 2] * 2
    assert granular.open(folder / 'a.tar')[7]['png'].tolist() == [[7] * 2] * 2
    assert type(granular.open(folder / 'sharded', None)[7]['image']) is bytes


def test_open_in_a_bucket(bucket):
    write_dataset(bucket / 'dataset')
    write_dataset(bucket / 'sharded', granular.ShardedDatasetWriter, shardlen=4)
    for name in ('dataset', 'sharded', 'dataset/label.bag'):
        with granular.open(bucket / name, cache_index=False) as reader:
            assert (type(reader).__name__, len(reader)) == (KINDS[name], 10)


def test_open_of_an_object_of_unknown_format_says_so(bucket):
    (bucket / 'image.jpg').write_bytes(b'image')
    with pytest.raises(NotFoundError, match=r'image\.jpg: unknown format: expected a folder, or a name that'):
        granular.open(bucket / 'image.jpg')


def test_open_takes_the_files_of_a_list_in_their_order(folder):
    files = [folder / f'r.array_record-0000{number}-of-00002' for number in (1, 0)]
    with granular.open(files) as reader:
        assert [record[0] for record in reader] == [10, 11, 12, 13, 14, 0, 1, 2, 3, 4]


def test_open_passes_options(folder):
    with granular.open(folder / 'files', columns=['label']) as reader:
        assert reader.columns == ('label',)
    with pytest.raises(
        InvalidArgumentError, match=r"DatasetReader.*unknown options \['columns'\].*nothing, and call .*select\("
    ):
        granular.open(folder / 'dataset', columns=['label'])
    with pytest.raises(InvalidArgumentError, match=r"unknown options \['config'\].*belong to granular\.Path"):
        granular.open(folder / 'dataset', config=granular.IOConfig())
    with pytest.raises(InvalidArgumentError, match=r"BagReader.*unknown options \['decoders'\]"):
        granular.open(folder / 'dataset/label.bag', {'int': int})


@pytest.mark.parametrize('address', ['s3://no-such-bucket/x', 'https://127.0.0.1:1/x?sig=private'])
@pytest.mark.parametrize(
    ('options', 'remedy'),
    [({'key': 'private'}, 'options of the store, such as config'), ({'colums': ['a']}, 'for colums, pass columns;'),
     ({'cache_dir': 'x'}, r'pass granular.Path\(url, config=granular.IOConfig\(cache_dir=...\)\)'),
     ({'fields': ['a']}, r'nothing, and call MapDataset.source\(reader\).select\(keys\)'),
     ({'cache_index_': 1}, 'for cache_index_, pass cache_index or'), ({'other': 1}, r"some of \['cache_bytes'")],
)  # fmt: skip
def test_open_refuses_unknown_options_before_it_asks_the_store(address, options, remedy):
    for path in (address, [address]):
        with pytest.raises(InvalidArgumentError, match=f'unknown options .*{remedy}') as caught:
            granular.open(path, **options)
        assert 'private' not in str(caught.value)


@pytest.mark.parametrize(
    ('name', 'error', 'message'),
    [
        ('nothing', NotFoundError, 'nothing'),
        ('nothing.tar', NotFoundError, 'nothing.tar'),
        ('nothing-*.tar', NotFoundError, 'matches no files'),
        (
            'dataset/spec.json',
            NotFoundError,
            r'spec\.json: unknown format: expected a folder, or .*\.parquet',
        ),
        ('empty', NotFoundError, r'expected a dataset.*\.parquet.*got a folder of a: open one of them'),
        ('empty/a', NotFoundError, 'got an empty folder$'),
        ('killed', NotFoundError, 'killed: has no spec.json: a writer is writing this dataset, or left it unfinished'),
        (
            '',
            InvalidArgumentError,
            'got arrayrecord .r.array_record-.*, parquet .files/rows-0.parquet., .*pass format=',
        ),
        ([], InvalidArgumentError, 'expected files of one format.*got none'),
    ],
)
def test_open_says_what_it_expects(folder, name, error, message):
    (folder / 'empty' / 'a').mkdir(parents=True, exist_ok=True)
    (folder / 'killed').mkdir(exist_ok=True)
    (folder / 'killed' / '.label.bag.01234567.part').touch()
    with pytest.raises(error, match=message):
        granular.open(name if name == [] else folder / name)


def test_the_wrong_reader_of_a_dataset_names_the_right_one(bucket):
    write_dataset(bucket / 'dataset')
    write_dataset(bucket / 'sharded', granular.ShardedDatasetWriter, shardlen=4)
    message = r'sharded: is a sharded dataset: open it with ShardedDatasetReader, or with granular.open'
    with pytest.raises(NotFoundError, match=message):
        granular.DatasetReader(bucket / 'sharded')
    message = 'dataset: is a dataset without shards: open it with DatasetReader, or with granular.open'
    with pytest.raises(NotFoundError, match=message):
        granular.ShardedDatasetReader(bucket / 'dataset')


# A file of each, its content, and the remedy.
FOREIGN = {
    'mds': (
        'index.json',
        '{"shards": [{"format": "mds"}], "version": 2}',
        'is of streaming.StreamingDataset: convert it with granular.convert(streaming.StreamingDataset({mds}), TARGET)',
    ),
    'litdata': (
        'index.json',
        '{"chunks": [], "config": {}}',
        "is of litdata.StreamingDataset: convert it with granular.convert(litdata.StreamingDataset('{folder}'), T",
    ),
    'datasets': ('state.json', '{}', 'is of datasets.save_to_disk: convert it with `granular convert {folder} TARGET`'),
    'splits': (
        'dataset_dict.json',
        '{"splits": ["train", "test"]}',
        "is of datasets.save_to_disk, of ['test', 'train']: convert one with `granular convert {folder}/NAME TARGET`",
    ),
    'tar': ('train.tar.gz', '', 'a compressed tar file has no random access: decompress it to .tar'),
}


@pytest.mark.parametrize('place', ['disk', 'bucket'])
@pytest.mark.parametrize('name', FOREIGN)
def test_folders_of_other_libraries_name_the_remedy(name, place, tmp_path, fakegcs):
    folder = (granular.Path(tmp_path) if place == 'disk' else fakegcs.place()) / 'x'
    file, content, remedy = FOREIGN[name]
    folder.mkdir()
    (folder / file).write_text(content)
    for split in ('test', 'train') if name == 'splits' else ():
        (folder / split).mkdir()
        (folder / split / 'state.json').write_text('{}')
    mds = f"local='{folder}'" if place == 'disk' else f"remote='{folder}', local='x'"
    paths = [folder, folder / file, folder / '*.tar.gz', [folder / file]] if name == 'tar' else [folder]
    for path in paths:
        for call in (granular.open, lambda source: granular.convert(source, tmp_path / 'y')):
            if call is granular.open or name != 'datasets':  # which convert reads
                with pytest.raises(NotFoundError, match=re.escape(remedy.format(folder=folder, mds=mds))):
                    call(path)


@pytest.mark.parametrize('suffix', FORMATS)
def test_braces_stand_for_numbers_and_alternatives(suffix, tmp_path):
    for number in range(4):
        write_numbers(tmp_path / f'a-{number:03}.{suffix}', suffix, [10 * number, 10 * number + 1])
    pattern = tmp_path / f'a-{{001..003}}.{suffix}'
    with granular.open(pattern) as reader:
        assert numbers_in(reader) == [10, 11, 20, 21, 30, 31]
    assert granular.convert(pattern, tmp_path / 'out').datapoints == 6
    with granular.open(tmp_path / f'{{a-000,a-002}}.{suffix}') as reader:
        assert numbers_in(reader) == [0, 1, 20, 21]
    for braces in ('3..1', '0..9999999'):
        with pytest.raises(InvalidArgumentError, match='expected at most 1000000 ascending numbers'):
            granular.open(tmp_path / f'a-{{{braces}}}.{suffix}')


@pytest.mark.parametrize(
    ('pattern', 'numbers'),
    {
        'd/*/x-*.tar': [0, 1, 2, 3, 4, 5, 6, 7],
        'd/{a,b}/x-{0..1}.tar': [0, 1, 2, 3, 4, 5, 6, 7],
        '**/x-0.tar': [0, 1, 4, 5],
        'd/a/x-{{0..1},1}.tar': [0, 1, 2, 3],
        'd/{a}/x-{0..0}.tar': [0, 1],
        'e/[a]/x-*.tar': [0, 1],  # a folder of this name exists
    }.items(),
)
def test_patterns_of_folders_and_nested_braces(pattern, numbers, fakegcs, tmp_path):
    for root in (fakegcs.place(), granular.Path(tmp_path)):
        for number, name in enumerate(('d/a/x-0', 'd/a/x-1', 'd/b/x-0', 'd/b/x-1')):
            (root / f'{name}.tar').parent.mkdir(parents=True, exist_ok=True)
            (root / f'{name}.tar').write_bytes(FILES['tar']([2 * number, 2 * number + 1]))
        if pattern[0] == 'e':
            (root / 'e' / '[a]').mkdir(parents=True)
            (root / 'e' / '[a]' / 'x-0.tar').write_bytes(FILES['tar']([0, 1]))
        with granular.open(root / pattern) as reader:
            assert numbers_in(reader) == numbers


@pytest.mark.parametrize(
    ('pattern', 'message'),
    {
        'a-{000..003}.tar': "a-002.tar matches no files, beside 'a-000.tar', 'a-001.tar', 'a-003.tar'$",
        'a-{000,002}.tar': "a-002.tar matches no files, beside 'a-000.tar', 'a-001.tar', 'a-003.tar'$",
        'a-00?.tra': "matches no files, beside 'a-000.tar', 'a-001.tar', 'a-003.tar'$",
        'b-*.tar': "matches no files, beside 'a-000.tar', 'a-001.tar', 'a-003.tar', ...$",
        'c/*.tar': 'matches no files: the folder has none$',
        '{a,c}*/x.tar': r"a\*/x.tar matches no files, beside 'a-000.tar', 'a-001.tar', 'a-003.tar', ...$",
    }.items(),
)
@pytest.mark.parametrize('call', [granular.open, lambda files: granular.convert(files, 'converted')])
def test_pattern_without_a_file_names_what_is_there(call, pattern, message, fakegcs, tmp_path):
    for folder in (fakegcs.place(), granular.Path(tmp_path)):
        for name in ('a-000.tar', 'a-001.tar', 'a-003.tar', 'x.tar'):
            (folder / name).write_bytes(FILES['tar']([1]))
        with pytest.raises(NotFoundError, match=f'^{re.escape(str(folder / pattern))}: {message}'):
            call(folder / pattern)


def test_tfrecord_files_of_zlib_are_streamed(tmp_path):
    (tmp_path / 'a.tfrecord.zz').write_bytes(zlib.compress(FILES['tfrecord']([1, 2, 3])))
    with pytest.raises(UnsupportedError, match='TFRecordIterDataset'):
        granular.open(tmp_path / 'a.tfrecord.zz')
    assert granular.convert(tmp_path / 'a.tfrecord.zz', tmp_path / 'out').datapoints == 3
