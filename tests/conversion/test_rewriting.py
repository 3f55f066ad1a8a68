"""Rewriting: the result equals that of the same change in plain Python, byte for byte, also after a kill."""

import asyncio
import contextlib
import itertools
import json
import pathlib
import shutil
import tempfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import granular
from granular import aio
from granular.errors import (
    AlreadyExistsError,
    CorruptRecordError,
    EncodeError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
    SpecError,
    UnknownKeyError,
)

SPEC = {'image': 'bytes', 'label': 'int', 'texts': 'utf8[]'}
TYPES = {**SPEC, 'embedding': 'array', 'class': 'int'}


def point(i, layout='refs'):
    out = {'image': bytes([i % 251]) * (i * 7919 % 300), 'label': i % 7}
    return {**out, 'texts': [f'text {i}'] * (i % 3)} if layout == 'refs' else out


def embedding(i):
    return np.arange(4, dtype=np.float32) + i


def spec_of(points, layout):
    keys = sorted(points[0]) if points else [key for key in SPEC if layout == 'refs' or key != 'texts']
    return {key: TYPES[key] for key in keys}


def write(folder, shards, layout='refs', checksums=True, spec=None):
    """Write a dataset whose shards have these datapoints; without shards, from a single list in a tuple."""
    spec = spec or spec_of([row for rows in shards for row in rows], layout)
    for number, rows in enumerate(shards):
        place = folder if isinstance(shards, tuple) else folder / f'{number:06}'
        with granular.DatasetWriter(place, spec, layout=layout, checksums=checksums) as writer:
            for row in rows:
                writer.append(row)
    return folder


def make(folder, lengths=(5, 3, 6), layout='refs', checksums=True):
    numbers = itertools.count()
    return write(folder, [[point(next(numbers), layout) for _ in range(n)] for n in lengths], layout, checksums)


def contents(root):
    """Return the files of a dataset, but for records of runs, and indices, which have versions of files."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob('*')
        if path.is_file() and not path.name.startswith('.')
    }


def rows_of(folder):
    with granular.open(folder) as reader:
        return reader.fetch(range(len(reader)))


def labels_of(folder):
    return [row['label'] for row in rows_of(folder)]


def bounds(count, shards, shardlen):
    if shards is not None:
        return [(count * i // shards, count * (i + 1) // shards) for i in range(shards)]
    return [(i, min(i + shardlen, count)) for i in range(0, count, shardlen)] or [(0, 0)]


@st.composite
def edits(draw):
    """A change: the lengths of the shards of each source, its layout, and the arguments of the call."""
    layout = draw(st.sampled_from(['refs', 'columns']))
    sources = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=2))
    count = sum(map(sum, sources))
    some = st.lists(st.integers(0, count - 1), unique=True, max_size=count)
    kind = draw(st.sampled_from(['all', 'indices', 'mask', 'function']))
    keep = {'all': None, 'indices': None, 'mask': None, 'function': draw(st.sets(st.integers(0, 6)))}[kind]
    if kind in ('indices', 'mask'):
        keep = draw(some)
    exclude = draw(st.none() | some)
    divided = draw(st.sampled_from([None, 'shards', 'shardlen']))
    if divided is None and kind == 'indices':
        keep = sorted(keep)
    names = ['image', 'label', *(['texts'] if layout == 'refs' else [])]
    drop = draw(st.lists(st.sampled_from(names), unique=True, max_size=len(names) - 1))
    rename = draw(st.booleans()) and 'label' not in drop
    relabel = 'label' not in drop and draw(st.sampled_from([None, 'table', 'some', 'function']))
    add = draw(st.sampled_from([None, 'table', 'function']))
    return layout, sources, kind, keep, exclude, divided, drop, rename, relabel, add


@given(edits(), st.integers(1, 5), st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_result_equals_the_same_change_in_plain_python(edit, number, checksums):
    layout, sources, kind, keep, exclude, divided, drop, rename, relabel, add = edit
    with tempfile.TemporaryDirectory(dir='/dev/shm' if pathlib.Path('/dev/shm').exists() else None) as temporary:
        root = granular.Path(temporary)
        folders = [make(root / f'{i}', lengths, layout, checksums) for i, lengths in enumerate(sources)]
        rows = [row for folder in folders for row in rows_of(folder)]
        owners = [i for i, length in enumerate(itertools.chain(*sources)) for _ in range(length)]
        count, options = len(rows), {}
        # The change in plain Python, and the arguments of the call.
        chosen = list(range(count))
        if kind == 'function':
            chosen = [i for i in chosen if rows[i]['label'] in keep]
            options['keep'] = lambda label: label in keep
        elif kind == 'mask':
            chosen = sorted(keep)
            options['keep'] = np.isin(np.arange(count), keep)
        elif kind == 'indices':
            chosen = options['keep'] = keep
        if exclude is not None:
            chosen, options['exclude'] = [i for i in chosen if i not in exclude], exclude
        changed = [dict(row) for row in rows]
        values = options['values'] = {}
        if relabel == 'table':
            values['label'] = [i * 3 for i in range(count)]
        elif relabel == 'some':
            values['label'] = {0: 70, count - 1: 71}
        elif relabel == 'function':
            values['label'] = lambda label, image: label + len(image)
        for i, row in enumerate(changed):
            if relabel == 'table':
                row['label'] = i * 3
            elif relabel == 'some':
                row['label'] = 71 if i == count - 1 else 70 if i == 0 else row['label']
            elif relabel == 'function':
                row['label'] += len(row['image'])
            if add:
                row['embedding'] = embedding(i if add == 'table' else rows[i]['label'])
        if add == 'table':
            values['embedding'] = np.array([embedding(i) for i in range(count)])
        elif add == 'function':
            values['embedding'] = lambda label: embedding(label)  # noqa: PLW0108
        spec = {key: kind for key, kind in spec_of(changed, layout).items() if key not in drop}
        if drop:
            options['drop'] = drop
        if rename:
            options['rename'] = {'label': 'class'}
            spec = {('class' if key == 'label' else key): kind for key, kind in spec.items()}
        if add:
            options['spec'] = {'embedding': 'array'}
        changed = [
            {('class' if rename and key == 'label' else key): value for key, value in row.items() if key not in drop}
            for row in changed
        ]
        if divided is not None:
            size = max(1, min(number, len(chosen))) if divided == 'shards' else number
            options[divided] = size
            parts = bounds(len(chosen), *((size, None) if divided == 'shards' else (None, size)))
            shards = [[changed[i] for i in chosen[start:stop]] for start, stop in parts]
        else:
            parts = itertools.groupby(chosen, key=lambda i: owners[i])
            shards = [[changed[i] for i in part] for _, part in parts] or [[]]
        done = granular.rewrite(folders, root / 'result', **options)
        assert (done.datapoints, done.shards, done.spec) == (len(chosen), len(shards), dict(sorted(spec.items())))
        write(root / 'expected', shards, layout, checksums, spec)
        assert contents(root / 'result') == contents(root / 'expected')
        assert granular.verify(root / 'result').problems == []


async def test_a_dataset_without_shards_stays_one_and_several_become_shards(tmp_path):
    first = write(tmp_path / 'first', ([point(0), point(1)],))
    second = write(tmp_path / 'second', ([point(2), point(3), point(4)],))
    await aio.rewrite(first, tmp_path / 'copy')
    assert contents(tmp_path / 'copy') == contents(first)
    for name, exclude in (('both', {-1}), ('from a list', [4, -1, 4])):
        done = await aio.rewrite([first, second], tmp_path / name, exclude=exclude)
        assert (done.datapoints, done.shards) == (4, 2)
        assert rows_of(tmp_path / name) == [point(i) for i in range(4)]
    await aio.rewrite(first, tmp_path / 'columns', layout='columns', drop=['texts'], checksums=False)
    assert rows_of(tmp_path / 'columns') == [point(i, 'columns') for i in range(2)]
    assert not list((tmp_path / 'columns').glob('*.crc'))


@pytest.mark.parametrize('server', ['seaweed', 'fakegcs'])
def test_a_bucket_copies_the_bags_that_stay(server, request, tmp_path):
    """An added key transfers its own bags, and not those of the pictures; the source is read as before."""
    root = request.getfixturevalue(server).new_bucket()
    rows = [{'image': np.random.default_rng(i).bytes(200_000), 'label': i} for i in range(12)]
    source = write(root / 'source', [rows[:6], rows[6:]], spec={'image': 'bytes', 'label': 'int'})
    granular.build_index(source)
    added = np.random.default_rng(0).random((12, 8))
    with granular.open(source) as reader:
        before = granular.io_stats()['bytes']
        done = granular.rewrite(source, root / 'result', values={'embedding': added})
        received = granular.io_stats()['bytes'] - before
        assert reader.fetch([7]) == rows[7:8]
    assert done.copied > 12 * 200_000
    assert received < 200_000  # two tails of bags, of 64 KiB, to build the index
    assert (root / 'result/000000/.granular-index').exists()
    found = rows_of(root / 'result')
    assert all(np.array_equal(row.pop('embedding'), value) for row, value in zip(found, added, strict=True))
    assert found == rows
    assert granular.verify(root / 'result').problems == []
    granular.rewrite(source, root / 'fewer', exclude=lambda label: label == 8, rename={'image': 'photo'})
    assert [row['label'] for row in rows_of(root / 'fewer')] == [i for i in range(12) if i != 8]
    left = b''.join(contents(root / 'fewer').values())
    assert rows[8]['image'] not in left
    assert rows[7]['image'] in left


PROGRAM = """
import json, sys
import numpy as np
import granular
source, target, options, edit = json.loads(sys.argv[1])
def progress(count):
    print(count, flush=True)
kind = {
    'subset': {'keep': np.arange(80)[np.arange(80) % 7 > 0], 'shardlen': 13},
    'relabel': {'values': {'label': lambda label: label * 2}, 'rename': {'image': 'photo'}},
    'add': {'values': {'more': np.arange(80)}, 'exclude': [50]},
}[edit]
granular.rewrite(
    granular.Path(source, **options), granular.Path(target, **options), parallel=2, progress=progress, **kind
)
"""


@pytest.mark.parametrize(
    ('store', 'edit', 'layout', 'kills'),
    [('local', 'subset', 'columns', 13), ('local', 'add', 'refs', 29), ('fakegcs', 'relabel', 'refs', 20)],
)
def test_a_killed_rewrite_is_continued(store, edit, layout, kills, request, tmp_path, interpreter):
    """The files equal those of a run that was not killed, after a kill at some number of datapoints."""
    root = granular.Path(tmp_path) if store == 'local' else request.getfixturevalue(store).new_bucket()
    source = make(root / 'source', [10] * 8, layout)

    def start(target):
        return interpreter.start(PROGRAM, json.dumps([str(source), str(target), root.store.options, edit]))

    with start(root / 'whole') as process:
        out, err = process.communicate()
        assert process.wait() == 0, err
    target, done = root / 'target', 0
    with start(target) as process:
        while done < kills:
            done += int(process.stdout.readline())
        process.kill()
        process.wait()
    with pytest.raises((granular.errors.CorruptDatasetError, NotFoundError)):
        granular.open(target)
    with start(target) as process:
        out, err = process.communicate()
        assert process.wait() == 0, err
    assert contents(target) == contents(root / 'whole')


def test_a_resumed_call_must_be_the_same(tmp_path):
    source = make(tmp_path / 'source')
    target, labels = tmp_path / 'target', np.arange(14)
    granular.rewrite(source, target, values={'label': labels})
    again = granular.rewrite(source, target, values={'label': labels.copy()})
    assert (again.found, again.bytes) == (14, 0)
    changed = labels.copy()
    changed[9] = 0
    for options, name in (
        ({'values': {'label': changed}}, 'values'), ({'values': {'label': {3: 1}}}, 'values'), ({}, 'values'),
        ({'values': {'label': labels}, 'exclude': [1]}, 'records'),
        ({'values': {'label': labels}, 'drop': ['texts']}, 'spec'),
        ({'values': {'label': labels}, 'shards': 3}, 'rows'),
    ):  # fmt: skip
        with pytest.raises(AlreadyExistsError, match=f'begun as another rewrite, with .*{name}'):
            granular.rewrite(source, target, **options)
    with pytest.raises(AlreadyExistsError, match='begun as another rewrite'):
        granular.rewrite(source, target, values={'label': lambda label: label + 1})
    shutil.rmtree(source)
    make(source, (5, 4, 5))
    with pytest.raises(AlreadyExistsError, match='begun as another rewrite, with files'):
        granular.rewrite(source, target, values={'label': labels})


def test_damage_in_the_source_is_found(tmp_path):
    """A record that is read is compared with its checksum; one of a bag that is copied keeps its checksum."""
    source = make(tmp_path / 'source')
    bag = source / '000001/image.bag'
    content = bytearray(bag.read_bytes())
    content[3] ^= 1
    bag.write_bytes(bytes(content))
    with pytest.raises(CorruptRecordError, match='000001/image.bag: record 0'):
        granular.rewrite(source, tmp_path / 'read', exclude=[6])
    assert not (tmp_path / 'read' / '000000' / 'spec.json').exists()
    granular.rewrite(source, tmp_path / 'copied', exclude=[0])
    assert len(granular.verify(tmp_path / 'copied').problems) == 1
    with pytest.raises(CorruptRecordError, match='000001/image.bag: record 0'):  # a whole shard, which is read
        granular.rewrite(source, tmp_path / 'columns', layout='columns', drop=['texts'])


async def test_of_two_calls_into_one_folder_none_takes_the_shards_of_the_other(tmp_path):
    source, target = make(tmp_path / 'source'), tmp_path / 'target'
    changes = [{'values': {'label': [number] * 14}} for number in (1, 2)]
    calls = [aio.rewrite(source, target, **change) for change in changes]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert any(isinstance(outcome, AlreadyExistsError) for outcome in outcomes)
    for number, change in enumerate(changes, 1):
        with contextlib.suppress(AlreadyExistsError):
            await aio.rewrite(source, target, **change)
            assert set(await asyncio.to_thread(labels_of, target)) == {number}


@pytest.mark.parametrize('change', [{}, {'keep': [1, 2]}, {'values': {'new': range(20)}}, {'layout': 'columns'}])
def test_damaged_references_are_found(change, tmp_path):
    """They would be followed to the record of another datapoint, which gets a checksum of its own in the result."""
    source = tmp_path / 'source'
    with granular.DatasetWriter(source, {'text': 'utf8'}) as writer:
        for i in range(20):
            writer.append({'text': f'{i}'})
    content = (source / 'refs.bag').read_bytes()
    with granular.BagReader(source / 'refs.bag') as bag:
        first, second = bag[1], bag[2]
    (source / 'refs.bag').write_bytes(content.replace(first, second, 1))
    with pytest.raises(CorruptRecordError, match='refs.bag: record 1'):
        granular.rewrite(source, tmp_path / 'changed', **change)


def test_checksums_are_added_and_left_out(tmp_path):
    source = make(tmp_path / 'source', checksums=False)
    granular.rewrite(source, tmp_path / 'same')
    assert contents(tmp_path / 'same') == contents(source)
    granular.rewrite(source, tmp_path / 'with', checksums=True)
    granular.rewrite(tmp_path / 'with', tmp_path / 'without', checksums=False)
    assert contents(tmp_path / 'with') == contents(make(tmp_path / 'expected'))
    assert contents(tmp_path / 'without') == contents(source)
    granular.rewrite([tmp_path / 'with', source], tmp_path / 'both')  # of which one has none to compare
    assert granular.verify(tmp_path / 'both').problems == []
    assert len(list((tmp_path / 'both').glob('*/image.crc'))) == 6


def test_new_values_come_from_any_source(tmp_path):
    source = make(tmp_path / 'source')
    with granular.open(source) as reader:
        doubled = granular.MapDataset.source(reader).map(lambda row: row['label'] * 2)
        granular.rewrite(source, tmp_path / 'target', values={'label': doubled, 'more': [f'{i}' for i in range(14)]})
    rows = rows_of(tmp_path / 'target')
    assert [row['label'] for row in rows] == [2 * point(i)['label'] for i in range(14)]
    assert [row['more'] for row in rows] == [f'{i}' for i in range(14)]
    granular.rewrite(source, tmp_path / 'some', values={'label': {-1: 20, 0: 30}})
    assert labels_of(tmp_path / 'some') == [30, *[point(i)['label'] for i in range(1, 13)], 20]
    numbers = [1 << 100] * 14
    granular.rewrite(source, tmp_path / 'large', values={'label': numbers})
    assert labels_of(tmp_path / 'large') == numbers
    granular.rewrite(source, tmp_path / 'texts', values={'texts': lambda texts: [*texts, 'end']})
    assert [row['texts'] for row in rows_of(tmp_path / 'texts')] == [[*point(i)['texts'], 'end'] for i in range(14)]


@pytest.mark.parametrize(('count', 'keys'), [(66_000, 1), (300, 20)])
def test_references_of_any_size_are_those_of_a_writer(count, keys, tmp_path):
    """Numbers of records and of keys beyond each limit at which msgpack takes more bytes."""
    spec = {**{f'key_{k:02}': 'bytes' for k in range(keys)}, 'texts': 'utf8[]'}
    rows = [{key: b'%d' % i if key < 'texts' else ['t'] * (i % 3) for key in spec} for i in range(count)]
    with granular.DatasetWriter(tmp_path / 'source', spec) as writer:
        for row in rows:
            writer.append(row, flush=False)
    granular.rewrite(tmp_path / 'source', tmp_path / 'same')
    assert contents(tmp_path / 'same') == contents(tmp_path / 'source')
    granular.rewrite(tmp_path / 'source', tmp_path / 'fewer', exclude=[100, -5])
    with granular.open(tmp_path / 'fewer') as reader:
        assert len(reader) == count - 2
        assert reader.fetch([0, 99, 100, 200, -5, -1]) == [rows[i] for i in (0, 99, 101, 201, -6, -1)]


EXTREMES = [0, 1, -1, 127, 128, -128, -129, 255, 1 << 15, (1 << 15) - 1, -(1 << 31), 1 << 31, (1 << 63) - 1, -(1 << 63)]
FLOATS = [0.0, -0.0, 1.5, np.nan, np.inf, -np.inf, 1e-40, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


@pytest.mark.parametrize(
    ('kind', 'values'),
    [
        ('int', np.array(EXTREMES)),
        ('int', np.arange(14, dtype=np.uint8) * 19),
        ('int', np.arange(14, dtype='>u4') << 28),
        ('int', np.arange(14, dtype=np.uint64) + (1 << 63)),  # one by one
        ('i64', np.array(EXTREMES)),
        ('u64', np.arange(14, dtype=np.uint64) + (1 << 63)),
        ('float', np.array(FLOATS)),
        ('float', np.array(FLOATS, np.float32)),
        ('float', np.array(FLOATS, '>f2')),
        ('bool', np.arange(14) % 3 == 0),
        ('array', np.arange(14, dtype=np.float32)),
        ('array', np.arange(28, dtype='>i2').reshape(14, 2)),
        ('array', np.asfortranarray(np.random.default_rng(0).random((14, 3, 100)))),
        ('array', np.zeros((14, 0))),
        ('array', np.arange(28).reshape(14, 2) % 3 == 0),
        ('array', np.arange(28).reshape(14, 2).astype(complex)),
        ('array', np.arange(28).reshape(14, 2).astype('M8[s]')),
        ('array', np.array([[f'{i}', 'x'] for i in range(14)])),
    ],
    ids=lambda value: f'{value.dtype.str}{value.shape[1:]}' if isinstance(value, np.ndarray) else value,
)
def test_values_of_an_array_are_stored_as_one_by_one(kind, values, tmp_path):
    source = make(tmp_path / 'source')
    for name, table in (('array', values), ('list', list(values)), ('function', lambda label: values[label])):
        options = {'keep': [0, 2, 3, 13], 'shards': 2} if name != 'function' else {}
        granular.rewrite(source, tmp_path / name, values={'new': table}, spec={'new': kind}, **options)
    assert contents(tmp_path / 'array') == contents(tmp_path / 'list')
    np.save(tmp_path / 'values.npy', values)
    table = np.load(tmp_path / 'values.npy', mmap_mode='r')
    granular.rewrite(
        source, tmp_path / 'mapped', values={'new': table}, spec={'new': kind}, keep=[0, 2, 3, 13], shards=2
    )
    assert contents(tmp_path / 'mapped') == contents(tmp_path / 'list')
    found = [row['new'] for row in rows_of(tmp_path / 'array')]
    assert np.array_equal(np.array(found), values[[0, 2, 3, 13]], equal_nan=values.dtype.kind == 'f')


def test_numbers_that_do_not_fit_are_refused(tmp_path):
    source = make(tmp_path / 'source')
    values = np.arange(14) - 3
    with pytest.raises(EncodeError, match=r"datapoint 0, key 'new': not encoded as 'u64'.*-3 does not fit"):
        granular.rewrite(source, tmp_path / 'target', values={'new': values}, spec={'new': 'u64'})
    masked = np.ma.masked_array(np.arange(28.0).reshape(14, 2), mask=[[False, True]] * 14)
    with pytest.raises(EncodeError, match='expected an array without a mask'):
        granular.rewrite(source, tmp_path / 'target', values={'new': masked}, spec={'new': 'array'})
    doubled = {**granular.encoders, 'int': lambda value: granular.encoders['int'](2 * value)}
    granular.rewrite(source, tmp_path / 'target', values={'new': np.arange(14)}, encoders=doubled)
    assert [row['new'] for row in rows_of(tmp_path / 'target')] == list(range(0, 28, 2))


MISTAKES = [
    ({'keep': [0, 14]}, OutOfRangeError, r'keep: .*source: index 14 is out of range: expected -14 to 13'),
    ({'keep': [3, 4, 3]}, InvalidArgumentError, r'keep: index 3 is there twice, at 0 and 2'),
    ({'keep': [4, 3]}, InvalidArgumentError, r'keep: index 3 comes after 4: .* pass shardlen or shards'),
    ({'keep': [True] * 3}, InvalidArgumentError, r'keep: has 3 booleans, and .*source has 14 datapoints'),
    ({'keep': 3}, InvalidArgumentError, r'expected a 1-D sequence of integers'),
    ({'keep': lambda lable: True}, UnknownKeyError, r"keep: its function has the parameters \['lable'\]"),
    ({'keep': lambda label: label}, InvalidArgumentError, r'keep: its function returned 0 for datapoint 0 of .*source'),
    ({'keep': lambda: True}, InvalidArgumentError, r'named after keys'),
    ({'values': {'label': [1, 2]}}, InvalidArgumentError, r"values\['label'\]: has 2 values, and .*source has 14"),
    ({'values': {'label': {14: 1}}}, OutOfRangeError, r"values\['label'\]: index 14 is out of range: .* has 14"),
    ({'values': {'label': {13: 1, -1: 2}}}, InvalidArgumentError, r'has two values for datapoint 13: -1 is it, too'),
    ({'values': {'a b': [1] * 14}}, SpecError, r"keys \['a b'\] cannot be file names"),
    ({'values': {'lable': {1: 1}}}, InvalidArgumentError, r"values\['lable'\]: has 1 values, none for datapoint 0"),
    (
        {'values': {'label': ['x'] * 14}},
        EncodeError,
        r"values\['label'\]: datapoint 0, key 'label': not encoded as 'int'",
    ),
    ({'values': {'label': {'a': 1}}}, InvalidArgumentError, r"values\['label'\]: expected indices as keys"),
    (
        {'values': {'label': granular.MapDataset.range(14).filter(lambda n: n > 3)}},
        InvalidArgumentError,
        r"values\['label'\]: leaves datapoints out by a filter: expected a value for each of the 14",
    ),
    ({'spec': {'label': 'utf8'}}, InvalidArgumentError, r"spec: \['label'\] have no new values"),
    ({'drop': ['lable']}, UnknownKeyError, r"drop: \['lable'\] are no keys of .*source"),
    ({'drop': 'label'}, InvalidArgumentError, r"drop: expected a list of keys such as \['.*'\], got 'label'"),
    ({'drop': None}, InvalidArgumentError, r"drop: expected a list of keys such as \['.*'\], got None"),
    ({'drop': list(SPEC)}, InvalidArgumentError, r'drop: leaves no key'),
    ({'values': {'label': None}}, InvalidArgumentError, r"values\['label'\]: NoneType is not a source"),
    ({'values': {'label': iter([1])}}, InvalidArgumentError, r"values\['label'\]: list_iterator is not a source"),
    ({'keep': [], 'shards': 3}, InvalidArgumentError, r'shards: expected at most one for each of the 0 datapoints'),
    (
        {'drop': ['label'], 'values': {'label': {}}},
        InvalidArgumentError,
        r"drop: \['label'\] are dropped, and named by",
    ),
    ({'rename': {'x': 'y'}}, UnknownKeyError, r"rename: \['x'\] are no keys"),
    ({'rename': {'label': 'image'}}, SpecError, r'rename: two keys of .*source would have one name'),
    ({'rename': {'label': 'A B'}}, SpecError, r"keys \['A B'\] cannot be file names"),
    ({'shards': 15}, InvalidArgumentError, r'shards'),
    ({'shards': 2, 'shardlen': 3}, InvalidArgumentError, r'shards, shardlen: expected one of them, got 2 and 3'),
    ({'layout': 'columns'}, SpecError, r"key 'texts' has type 'utf8\[\]'"),
]


def test_mistakes_are_named(tmp_path):
    source = make(tmp_path / 'source')
    for options, kind, message in MISTAKES:
        with pytest.raises(kind, match=message):
            granular.rewrite(source, tmp_path / 'target', **options)
    assert not (tmp_path / 'target').exists()


def test_an_error_of_a_function_names_the_datapoint(tmp_path):
    source = make(tmp_path / 'source')
    with pytest.raises(ZeroDivisionError) as raised:
        granular.rewrite(source, tmp_path / 'target', values={'label': lambda label: 1 // (label - 3)})
    assert raised.value.__notes__ == [f"values['label']: raised for datapoint 3 of {source}"]


def test_sources_must_fit(tmp_path):
    source = make(tmp_path / 'source')
    for target in (source, source / 'inner', tmp_path):
        with pytest.raises(InvalidArgumentError, match='a dataset is not rewritten in place'):
            granular.rewrite(source, target)
    other = write(tmp_path / 'other', ([{'image': b'', 'label': 1}],), spec={'image': 'bytes', 'label': 'i64'})
    with pytest.raises(
        SpecError, match=r"other: .*it has key 'label' of type 'i64'.* of type 'int' is what .*source has"
    ):
        granular.rewrite([source, other], tmp_path / 'target')
    (tmp_path / 'x.txt').write_text('x')
    with pytest.raises(NotFoundError):
        granular.rewrite(tmp_path / 'none', tmp_path / 'target')
    with pytest.raises(InvalidArgumentError, match='got an empty list'):
        granular.rewrite([], tmp_path / 'target')
    assert labels_of(source) == [point(i)['label'] for i in range(14)]
