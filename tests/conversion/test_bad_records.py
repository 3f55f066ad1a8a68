"""Records that do not fit: named with their files, skipped, and what an error leaves behind."""

import os
import shutil

import numpy as np
import pytest

import granular
from granular.errors import CorruptDatasetError, DatapointError, EncodeError, InvalidArgumentError, NotFoundError

BAD = {3: b'not an image', 17: b'', 44: b'<html>'}  # by number


def image_folder(root, count=60, bad=BAD):
    """Write images in two classes, of which some files are bad; return the paths of these."""
    for i in range(count):
        file = root / ('cat' if i < count // 2 else 'dog') / f'{i:03}.png'
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bad[i] if i in bad else granular.encoders['png'](np.full((2, 3), i, np.uint8)))
    return [root / ('cat' if i < count // 2 else 'dog') / f'{i:03}.png' for i in bad]


def labels(folder):
    with granular.ShardedDatasetReader(folder, granular.decoders) as reader:
        return [one['image'][0, 0] if 'image' in one else one['n'] for one in reader]


@pytest.mark.parametrize('spec', [None, {'image': 'png'}])
def test_bad_files_of_the_sample_are_named_before_anything_is_written(spec, tmp_path):
    bad = image_folder(tmp_path / 'images')
    with pytest.raises(EncodeError, match="key 'image': 3 of 60 sampled files are not a JPEG, PNG") as caught:
        granular.convert(tmp_path / 'images', tmp_path / 'out', spec=spec)
    assert all(f'{path} ' in str(caught.value) for path in bad)
    assert ('was inferred' in str(caught.value)) == (spec is None)
    assert "skip it (on_error='skip', or --on-error skip)" in str(caught.value)
    assert (caught.value.key, caught.value.path) == ('image', f'{bad[0]}')
    assert os.listdir(tmp_path) == ['images']


@pytest.mark.parametrize('spec', [None, {'image': 'png'}])
def test_bad_file_behind_the_sample_is_named(spec, tmp_path):
    bad = image_folder(tmp_path / 'images', bad={44: b'<html>'})
    with pytest.raises(EncodeError, match='datapoint 44') as caught:
        granular.convert(tmp_path / 'images', tmp_path / 'out', spec=spec, sample=2)
    assert str(caught.value).startswith(f'{bad[0]}: ')
    assert ('was inferred' in str(caught.value)) == (spec is None)
    assert (caught.value.key, caught.value.path, caught.value.index) == ('image', f'{bad[0]}', 44)


def test_images_beside_the_folders_of_classes_are_left_out_with_a_warning(tmp_path, caplog):
    image_folder(tmp_path / 'images', 4, {})
    for name in ('b.png', 'a.jpg', '.hidden.png', 'notes.txt', 'cat/x.HEIC', 'cat/y.HEIC', 'dog/photo'):
        (tmp_path / 'images' / name).write_bytes(b'')
    assert granular.convert(tmp_path / 'images', tmp_path / 'out').datapoints == 4
    [message] = caplog.messages
    for part in (
        'images: left out 7 files: ',
        '.hidden.png (hidden)',
        'cat/x.HEIC, cat/y.HEIC, dog/photo and 1 more (of no format that is read)',
        'a.jpg, b.png (in no folder of a class: move them into one)',
    ):
        assert part in message


def test_folders_of_classes_in_those_of_splits_are_refused_without_the_split(tmp_path):
    for split in ('train', 'test'):
        image_folder(tmp_path / 'images' / split, 4, {})
    with pytest.raises(InvalidArgumentError, match=r"of the splits 'test' \(test/cat/.*, 'train' .*split='train'"):
        granular.convert(tmp_path / 'images', tmp_path / 'all')
    assert granular.convert(tmp_path / 'images', tmp_path / 'all', split='train').datapoints == 4
    assert granular.convert(tmp_path / 'images' / 'train', tmp_path / 'train').datapoints == 4
    for name in ('all', 'train'):
        with granular.open(tmp_path / name) as reader:
            assert [one['class'] for one in reader] == ['cat', 'cat', 'dog', 'dog']


def test_names_of_files_are_kept_in_a_key_that_the_spec_names(tmp_path):
    image_folder(tmp_path / 'images', 12, {4: b'<html>'})
    done = granular.convert(tmp_path / 'images', tmp_path / 'out', spec={'file': 'utf8'}, on_error='skip', shardlen=5)
    assert done.spec['file'] == 'utf8'
    with granular.open(tmp_path / 'out') as reader:
        for datapoint in reader:
            file = tmp_path / 'images' / datapoint['file']
            assert granular.decoders['png'](file.read_bytes()).tolist() == datapoint['image'].tolist()
            assert file.parent.name == datapoint['class']
        assert len({datapoint['file'] for datapoint in reader}) == 11
    assert granular.convert(tmp_path / 'images', tmp_path / 'none', on_error='skip').spec.keys() == {
        'image', 'label', 'class',
    }  # fmt: skip


@pytest.mark.parametrize(('kind', 'values'), [('utf8', [b'\xc3\xa4', 'b']), ('utf8[]', [[b'a', 'b'], ()])])
def test_bytes_are_text_where_the_spec_says_so(kind, values, tmp_path):
    records = [{'name': value} for value in values]
    granular.convert(records, tmp_path / 'out', spec={'name': kind})
    with granular.open(tmp_path / 'out') as reader:
        assert [datapoint['name'] for datapoint in reader] == (['ä', 'b'] if kind == 'utf8' else [['a', 'b'], []])
    bad = b'\xff' if kind == 'utf8' else [b'\xff']
    with pytest.raises(
        EncodeError, match=r'datapoint 2.*or pass name=bytes(\[\])? for bytes that are not UTF-8 \(spec'
    ):
        granular.convert([*records, {'name': bad}], tmp_path / 'bad', spec={'name': kind})


def test_names_of_files_and_majorities_decide_about_images(tmp_path):
    image_folder(tmp_path / 'images', 4, {0: b'a', 1: b'b', 2: b'c'})
    done = granular.convert(tmp_path / 'images', tmp_path / 'named', on_error='skip')
    assert (done.spec['image'], done.reasons['image']) == ('png', 'of 4 sampled: 3 bytes, 1 png')
    assert (done.datapoints, labels(tmp_path / 'named')) == (1, [3])
    png = granular.encoders['png'](np.zeros((2, 2), np.uint8))
    done = granular.convert([{'x': png}, {'x': b'?'}], tmp_path / 'even')
    assert (done.spec, done.reasons) == ({'x': 'bytes'}, {'x': 'of 2 sampled: 1 png, 1 bytes'})
    with pytest.raises(EncodeError, match=r'1 of 3 sampled files.*record 2 of the sample \(1 bytes that begin with'):
        granular.convert([{'x': png}, {'x': png}, {'x': b'?'}], tmp_path / 'most')
    assert granular.convert([{'x': png}, {'x': b'?'}], tmp_path / 'given', spec={'x': 'bytes'}).reasons == {
        'x': 'given'
    }


@pytest.mark.parametrize('shardlen', [7, 1000, None])
@pytest.mark.parametrize('layout', ['refs', 'columns'])
def test_records_that_do_not_fit_are_skipped_and_listed(shardlen, layout, tmp_path):
    records = [{'n': 'text' if i in (5, 21) else i, **({} if i != 30 else {'m': 1})} for i in range(40)]
    expected = [i for i in range(40) if i not in (5, 21, 30)]
    options = {'shardlen': shardlen, 'layout': layout, 'spec': {'n': 'int'}, 'on_error': 'skip', 'sample': 3}
    for name, source in (('indexed', lambda: records), ('stream', lambda: iter(records))):
        done = granular.convert(source(), tmp_path / name, **options)
        assert done.datapoints == len(expected)
        assert sorted(done.skipped) == ['datapoint 21', 'datapoint 30', 'datapoint 5']
        assert 'expected an integer, got str' in done.skipped['datapoint 5']
        with granular.open(tmp_path / name) as reader:
            assert [one['n'] for one in reader] == expected
        again = granular.convert(source(), tmp_path / name, **options)
        assert (again.found, again.bytes) == (len(expected), 0)
        if shardlen == 7:  # a shard that is missing is written again, the same
            shutil.copytree(tmp_path / name, tmp_path / 'whole')
            shutil.rmtree(tmp_path / name / '000003')
            assert list(granular.convert(source(), tmp_path / name, **options).skipped) == ['datapoint 21']
            for file in sorted((tmp_path / 'whole' / '000003').iterdir()):
                assert (tmp_path / name / '000003' / file.name).read_bytes() == file.read_bytes()
            shutil.rmtree(tmp_path / 'whole')


@pytest.mark.parametrize(('former', 'on_error'), [('text', 'skip'), (7000, 'raise')])
@pytest.mark.parametrize('shardlen', [10, None])
@pytest.mark.parametrize('kind', [list, iter])
def test_record_that_was_repaired_is_in_a_shard_that_was_not_finished(former, on_error, shardlen, kind, tmp_path):
    records = [{'n': former if i == 7 else i} for i in range(40)]
    options = {'shardlen': shardlen, 'layout': 'columns', 'spec': {'n': 'int'}, 'on_error': on_error, 'sample': 2}
    granular.convert(kind(records), tmp_path / 'out', **options)
    (tmp_path / 'out' / ('spec.json' if shardlen is None else '000000/spec.json')).unlink()
    records[7] = {'n': 7}
    done = granular.convert(kind(records), tmp_path / 'out', **options)
    assert (done.datapoints, done.found) == (40, 0 if shardlen is None else 30)
    with granular.open(tmp_path / 'out') as reader:
        assert [one['n'] for one in reader] == list(range(40))


def test_datapoints_that_a_source_cannot_read_are_skipped(tmp_path):
    def odd(i):
        if i == 9:
            raise ValueError('broken')
        return {'n': i}

    source = granular.MapDataset.source(range(20)).map(odd)
    with pytest.raises(ValueError, match='broken'):
        granular.convert(source, tmp_path / 'out', shardlen=5)
    done = granular.convert(source, tmp_path / 'skipped', shardlen=5, on_error='skip')
    assert (done.datapoints, list(done.skipped)) == (19, ['datapoint 9'])
    assert labels(tmp_path / 'skipped') == [i for i in range(20) if i != 9]


def test_invalid_policies_are_refused(tmp_path):
    for options in ({'on_error': 'ignore'}, {'on_error': 'skip', 'engine': 'ray'}):
        with pytest.raises(InvalidArgumentError, match="on_error: expected 'raise'"):
            granular.convert([{'n': 1}], tmp_path / 'x', **options)


@pytest.mark.parametrize('kind', ['indexed', 'stream'])
@pytest.mark.parametrize('bad', [0, 14, 39])
def test_error_leaves_finished_shards_or_nothing(kind, bad, granular_cli, tmp_path):
    records = [{'n': 'text' if i == bad else i} for i in range(40)]
    source = records if kind == 'indexed' else iter(records)
    with pytest.raises(DatapointError):
        granular.convert(source, tmp_path / 'out', shardlen=10, parallel=2, spec={'n': 'int'})
    if not (tmp_path / 'out').exists():
        return
    finished = [path.parent for path in (tmp_path / 'out').rglob('spec.json')]
    assert finished
    folders = set((tmp_path / 'out').iterdir())
    assert folders == {*finished, tmp_path / 'out' / '000000'}
    with pytest.raises((NotFoundError, CorruptDatasetError)):  # of the first shard, or of one before the finished ones
        granular.open(tmp_path / 'out')
    code, _, err = granular_cli('info', tmp_path / 'out')
    assert (code, f'an unfinished conversion, with {len(finished)} finished shards' in err) == (1, True)
    records[bad] = {'n': bad}
    granular.convert(records if kind == 'indexed' else iter(records), tmp_path / 'out', shardlen=10)
    assert labels(tmp_path / 'out') == list(range(40))


def test_killed_conversion_without_a_finished_shard_is_listed_by_clean(tmp_path):
    granular.convert([{'n': i} for i in range(10)], tmp_path / 'out', shardlen=5)
    shutil.rmtree(tmp_path / 'out' / '000001')
    (tmp_path / 'out' / '000001').mkdir()
    for file in (tmp_path / 'out' / '000000').iterdir():
        if file.name != '.granular-conversion':
            file.unlink()
    leftovers = [(os.path.relpath(one.path, tmp_path / 'out'), one.kind) for one in granular.clean(tmp_path, older=0)]
    assert leftovers == [('000000/.granular-conversion', 'draft'), ('000001', 'folder')]
    granular.clean(tmp_path, remove=True, older=0)
    assert list((tmp_path / 'out').iterdir()) == []


def test_command_reports_types_with_reasons_and_skipped_files(granular_cli, tmp_path):
    bad = image_folder(tmp_path / 'images')
    code, out, err = granular_cli('convert', tmp_path / 'images', tmp_path / 'out')
    assert (code, out) == (1, '')
    assert all(f'{path}' in err for path in bad)
    code, out, err = granular_cli('convert', tmp_path / 'images', tmp_path / 'out', '--on-error', 'skip')
    assert code == 0
    assert 'image: png (of 60 sampled: 57 png, 3 bytes)\n' in out
    assert '57 datapoints' in out
    assert '3 records skipped' in out
    assert [line.split(': ')[0] for line in err.splitlines()] == [f'skipped {path}' for path in bad]
    assert 'expected' in granular_cli('convert', tmp_path / 'images', tmp_path / 'out', '--on-error', 'x')[2]
