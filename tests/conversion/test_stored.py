"""Conversions of datasets, whose records are copied as they are stored, and checks by decoders."""

import numpy as np
import pytest

import granular
from granular import aio
from granular.errors import AlreadyExistsError, DecodeError, GranularError, InvalidArgumentError

SPEC = {'image': 'jpg', 'n': 'int', 'texts': 'utf8[]'}
DAMAGED = (3, 9, 20)
COUNT = 30


@pytest.fixture(scope='module')
def source(tmp_path_factory):
    """A sharded dataset with images that were cut short before they were written."""
    folder = tmp_path_factory.mktemp('stored') / 'source'
    with granular.ShardedDatasetWriter(folder, SPEC, shardlen=7) as writer:
        for n in range(COUNT):
            image = granular.encoders['jpg'](np.random.default_rng(n).integers(0, 255, (24, 32, 3), np.uint8))
            image = image[: len(image) // 2] if n in DAMAGED else image
            writer.append({'image': image, 'n': n, 'texts': [f'text {n}'] * (n % 3)})
    return folder


def records(folder):
    with granular.open(folder, None) as reader:
        return reader.spec, reader.fetch(range(len(reader)))


def intact(folder):
    spec, rows = records(folder)
    return spec, [row for n, row in enumerate(rows) if n not in DAMAGED]


@pytest.mark.parametrize('shardlen', [None, 4, 100])
def test_records_are_the_same_bytes(shardlen, source, tmp_path):
    done = granular.convert(source, tmp_path / 'all', shardlen=shardlen)
    assert (done.format, done.source, done.spec, done.datapoints) == ('granular', f'{source}', SPEC, COUNT)
    with granular.open(source, None) as raw:  # whose records are not checked either
        granular.convert(raw, tmp_path / 'same', shardlen=shardlen)
    assert records(tmp_path / 'all') == records(tmp_path / 'same') == records(source)
    assert granular.verify(tmp_path / 'all').problems == []


async def test_readers_of_both_apis_leave_out_what_their_decoders_reject(source, tmp_path):
    with granular.open(source) as reader:
        done = granular.convert(reader, tmp_path / 'sync', on_error='skip', shardlen=4)
        assert (done.datapoints, done.missing, len(done.skipped)) == (COUNT - 3, 3, 3)
        with pytest.raises(DecodeError, match="datapoint 3, key 'image'"):
            granular.convert(reader, tmp_path / 'stopped')
    async with await aio.open(source) as reader:
        await aio.convert(reader, tmp_path / 'async', on_error='skip')
    assert records(tmp_path / 'sync') == records(tmp_path / 'async') == intact(source)
    assert not (tmp_path / 'stopped').exists()


def test_decoders_check_any_source(source, tmp_path):
    options = {'on_error': 'skip', 'decoders': granular.decoders, 'shardlen': 10}
    assert granular.convert(source, tmp_path / 'clean', **options).missing == 3
    assert records(tmp_path / 'clean') == intact(source)
    again = granular.convert(source, tmp_path / 'clean', **options)
    assert (again.found, again.missing, again.skipped) == (COUNT - 3, 3, {})
    with pytest.raises(AlreadyExistsError, match='decoded'):
        granular.convert(source, tmp_path / 'clean', on_error='skip', shardlen=10)
    for n, row in enumerate(records(source)[1]):
        file = tmp_path / 'images' / 'any' / f'{n:02}.jpg'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(row['image'])
    assert granular.convert(tmp_path / 'images', tmp_path / 'kept', on_error='skip').datapoints == COUNT
    done = granular.convert(tmp_path / 'images', tmp_path / 'checked', **options)
    assert sorted(done.skipped) == [f'{tmp_path}/images/any/{n:02}.jpg' for n in DAMAGED]


CHOOSING = {
    'slice': lambda data: data[10:25],
    'subset': lambda data: data.subset([2, 5, 2, -1]),
    'shuffle': lambda data: data.seed(0).shuffle(),
    'blocks': lambda data: data.shuffle(seed=1, order=granular.shuffle.Blocks()),
    'repeat': lambda data: data[:4].repeat(2),
    'concatenate': lambda data: granular.MapDataset.concatenate([data[:5], data[7:9]]),
    'mix': lambda data: granular.MapDataset.mix([data[:5], data[10:15]]),
    'classes': lambda data: data.filter_classes('n', valid_classes=[4, 5, 6]),
}


@pytest.mark.parametrize('how', CHOOSING)
def test_records_that_a_pipeline_chooses_are_copied(how, source, tmp_path):
    with granular.open(source, None) as raw, granular.open(source) as reader:
        chosen = CHOOSING[how](granular.MapDataset.source(reader))
        expected = list(CHOOSING[how](granular.MapDataset.source(raw))) if how != 'classes' else raw.fetch([4, 5, 6])
        done = granular.convert(chosen, tmp_path / 'out', shardlen=4, decoders={})
    assert (done.format, done.spec, done.datapoints) == ('source', SPEC, len(expected))
    assert records(tmp_path / 'out')[1] == expected


def test_values_are_converted_where_a_pipeline_or_the_spec_changes_them(source, tmp_path):
    with granular.DatasetWriter(tmp_path / 'other', {'n': 'int'}) as writer:
        writer.append({'n': 1})
    with granular.open(source) as reader, granular.open(tmp_path / 'other') as other:
        data = granular.MapDataset.source(reader)
        whole = data.subset([n for n in range(COUNT) if n not in DAMAGED])
        mapped = granular.convert(whole.map(lambda datapoint: {'n': datapoint['n']}), tmp_path / 'mapped')
        assert mapped.spec == {'n': 'int'}
        assert granular.convert(whole, tmp_path / 'png', spec={'image': 'png'}).spec == {
            **SPEC,
            'image': 'png',
            'texts': 'msgpack',
        }
        assert granular.convert(data.select(['n']), tmp_path / 'selected').spec == {'n': 'int'}
        both = granular.MapDataset.concatenate([data.select(['n']), granular.MapDataset.source(other)])
        assert granular.convert(both, tmp_path / 'both').datapoints == COUNT + 1
        for target in (source, tmp_path / 'other' / 'inner'):
            with pytest.raises(InvalidArgumentError, match='cannot be converted into itself'):
                granular.convert(granular.MapDataset.source(reader if target == source else other)[:1], target)


def test_values_of_other_decoders_are_converted(source, tmp_path):
    decoders = {**granular.decoders, 'jpg': len}
    with granular.open(source, decoders) as reader:
        done = granular.convert(reader, tmp_path / 'lengths')
    assert (done.format, done.spec['image']) == ('source', 'int')


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'spec': {'image': 'bytes'}}, 'copied as they are stored'),
        ({'spec': {'other': 'int'}}, 'copied as they are stored'),
        ({'encoders': {'jpg': bytes}}, 'copied as they are stored'),
        ({'layout': 'columns'}, 'does not support sequences'),
        ({'decoders': 5}, 'expected a mapping of functions'),
    ],
)
def test_what_would_change_stored_records_is_refused(options, message, source, tmp_path):
    with pytest.raises(GranularError, match=message):
        granular.convert(source, tmp_path / 'out', **options)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize('inner', ['', 'out', 'any/out'])
def test_folder_is_not_converted_into_itself(inner, source, tmp_path):
    file = tmp_path / 'images' / 'any' / '1.jpg'
    file.parent.mkdir(parents=True)
    file.write_bytes(records(source)[1][0]['image'])
    with pytest.raises(InvalidArgumentError, match='cannot be converted into itself'):
        granular.convert(tmp_path / 'images', tmp_path / 'images' / inner)
    for target in (source / inner, granular.Path(source / inner, config=granular.IOConfig(max_gap=1))):
        with pytest.raises(InvalidArgumentError, match='cannot be converted into itself'):
            granular.convert(source, target)
    assert [path.name for path in (tmp_path / 'images').rglob('*')] == ['any', '1.jpg']
