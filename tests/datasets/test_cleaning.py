"""Cleaning removes leftovers of killed writers, and nothing else."""

import contextlib
import email.utils
import fcntl
import itertools
import json
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import granular
from granular import aio, cli
from granular.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from tests.datasets.test_writers import SPEC, fill, point
from tests.support.fault_proxy import FaultProxy
from tests.support.uploads import abandon_upload

OLD = time.time() - 7200
LATER = email.utils.formatdate(time.time() + 7200, usegmt=True).encode()


def write(folder, shards=3):
    with granular.ShardedDatasetWriter(folder, SPEC, granular.encoders, shardlen=5) as writer:
        fill(writer, 5 * shards)


def names(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob('*') if path.is_file())


def found(folder, **kwargs):
    return sorted((os.path.relpath(x.path, str(folder)), x.kind) for x in granular.clean(folder, **kwargs))


def whole(folder, count):
    # Shard by shard, as SeaweedFS goes on listing folders from which all was deleted.
    for first in range(0, count, 5):
        with granular.DatasetReader(folder / f'{first // 5:06}', granular.decoders) as reader:
            assert list(reader) == [point(i) for i in range(first, min(first + 5, count))]


def test_clean_removes_incomplete_shards_in_every_store(root):
    """The last shard has no spec.json and is removed; complete shards and foreign files stay."""
    write(root / 'ds')
    (root / 'ds' / 'notes.txt').write_text('mine')
    with granular.DatasetWriter(root / 'one', SPEC, granular.encoders, layout='columns') as writer:
        fill(writer, 3)
    with granular.BagWriter(root / 'bags' / '000000' / 'a.bag') if not root.store.local else noop() as bag:
        if bag is not None:
            bag.append(b'x')
    before = names(root)
    assert granular.clean(root, older=0, remove=True) == []
    (root / 'ds' / '000002' / 'spec.json').unlink()
    shard = [(f'ds/000002/{name}{end}', 'bag') for name in ('n', 'refs', 'x') for end in ('.bag', '.crc')]
    assert granular.clean(root) == []  # too young
    assert found(root, older=0) == shard
    assert [x for x in before if '000002/spec' not in x] == names(root)
    assert found(root, older=0, remove=True) == shard
    assert names(root) == [x for x in before if '000002' not in x]
    assert found(root, older=0) == []
    whole(root / 'ds', 10)
    if not root.store.local:
        assert found(root, older=0, bags=True) == [(f'bags/000000/a{end}', 'bag') for end in ('.bag', '.crc')]


class noop:
    def __enter__(self):
        return None

    def __exit__(self, *args):
        pass


def test_clean_stays_within_its_folder(root):
    for name in ('a', 'a-b', 'ab'):
        write(root / name, 2)
        (root / name / '000001' / 'spec.json').unlink()
    assert {folder.split('/')[0] for folder, _ in found(root, older=0)} == {'a', 'a-b', 'ab'}
    granular.clean(root / 'a', remove=True, older=0)
    assert {folder.split('/')[0] for folder, _ in found(root, older=0)} == {'a-b', 'ab'}
    whole(root / 'a', 5)
    with pytest.raises(InvalidArgumentError, match='file'):
        granular.clean(root / 'a' / '000000' / 'x.bag')


@pytest.mark.parametrize('store', ['moto', 'seaweed'])
def test_unfinished_uploads_are_removed(request, store):
    root = request.getfixturevalue(store).new_bucket()
    write(root / 'ds', 1)
    for name in ('ds/000001/x.bag', 'ds-2/x.bag', 'ds', 'ds/000000/y.bag'):
        abandon_upload(root / name, 9 << 20)
    uploads = [('000000/y.bag', 'upload'), ('000001/x.bag', 'upload'), ('.', 'upload')]
    if store == 'seaweed':
        assert granular.clean(root / 'ds') == []  # moto says that all began in 2010, but knows when parts came
    assert found(root / 'ds', older=0) == sorted(uploads)
    assert all(x.size == 8 << 20 for x in granular.clean(root / 'ds', older=0))
    assert found(root / 'ds', older=0, remove=True) == sorted(uploads)
    assert found(root, older=0) == [('ds-2/x.bag', 'upload')]
    assert found(root, older=0, remove=True) == [('ds-2/x.bag', 'upload')]
    assert found(root, older=0) == []
    whole(root / 'ds', 5)


class LateProxy(FaultProxy):
    """A proxy of a server whose clock is two hours ahead of the times of its objects."""

    async def _forward(self, request):
        reply = await super()._forward(request)
        return re.sub(rb'(?im)^(date: )[^\r]*', rb'\g<1>' + LATER, reply)


def test_the_mark_of_a_killed_cleaner_is_named_and_removed_after_an_hour(moto):
    """Until then, a writer could lose its bags to it, whatever ``older`` is."""
    folder = moto.place()
    mark = folder / 'ds' / '.removal.0123456789abcdef'
    mark.write_bytes(b'')
    for resume in ('check', 'discard'):
        with pytest.raises(AlreadyExistsError, match=f'`granular clean` .* remove {mark.name}'):
            granular.DatasetWriter(folder / 'ds', SPEC, resume=resume)
    assert granular.clean(folder, older=0, remove=True) == []
    with LateProxy(moto.endpoint) as proxy:
        later = granular.Path(f'{folder}', endpoint_url=proxy.endpoint, key='k', secret='s')
        assert found(later, older=0, remove=True) == [(f'ds/{mark.name}', 'draft')]
    with granular.DatasetWriter(folder / 'ds', SPEC, granular.encoders) as writer:
        fill(writer, 1)


def test_temporary_files_on_a_disk_are_removed(tmp_path):
    root = granular.Path(tmp_path)
    write(root / 'ds', 2)
    remaining = names(root)
    drafts = ['ds/.a.bag.0123abcd.part', 'ds/000000/.x.bag.00000000.part', f'{"0" * 40}.index.01234567.tmp']
    others = ['.hidden.part', 'ds/x.part', 'ds/000000/.x.bag.0000000.part']
    for name in drafts + others:
        (tmp_path / name).write_bytes(b'123')
    assert found(root) == []
    for name in drafts + others:
        os.utime(tmp_path / name, (OLD, OLD))
    assert found(root) == sorted((name, 'draft') for name in drafts)
    with open(tmp_path / 'ds' / '.a.bag.0123abcd.part', 'rb') as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as a living writer, however old
        assert found(root) == sorted((name, 'draft') for name in drafts[1:])
    assert len(granular.clean(root, remove=True)) == 3
    assert names(root) == sorted(remaining + others)


@pytest.mark.parametrize('finished', [0, 2])
def test_one_call_removes_all_that_a_killed_writer_of_shards_left(tmp_path, finished):
    """The unfinished shard, and the folder of the next one, which has nothing but temporary files."""
    write(tmp_path, finished)
    before = names(tmp_path)
    for number, file in ((finished, 'refs.bag'), (finished + 1, '.refs.bag.01234567.part')):
        (tmp_path / f'{number:06}').mkdir()
        (tmp_path / f'{number:06}' / file).write_bytes(b'x')
    expected = [(f'{finished:06}/refs.bag', 'bag'), (f'{finished + 1:06}/.refs.bag.01234567.part', 'draft')]
    assert found(tmp_path, older=0) == found(tmp_path, older=0, remove=True) == expected
    assert found(tmp_path, older=0) == []
    assert names(tmp_path) == before
    assert len(os.listdir(tmp_path)) == finished
    write(tmp_path, 1)


@pytest.mark.parametrize('folder', ['bucket', 'bucket/ds', '.', 'ds'])
def test_parts_beside_a_finished_dataset_are_removed_and_nothing_else(folder, request, tmp_path, monkeypatch):
    if folder.startswith('bucket'):
        bucket = request.getfixturevalue('fakegcs').new_bucket()
        root = bucket / 'ds' if folder == 'bucket/ds' else bucket
    else:
        monkeypatch.chdir(tmp_path)
        root = granular.Path(folder)
    write(root)
    before = names(root)
    parts = root / '.parts.0123456789abcdef'
    if root.store.local:
        parts.mkdir()
    (parts / 'a.bag').write_bytes(b'abc')
    for remove in (False, True):
        leftovers = granular.clean(root, older=0, remove=remove)
        assert [(one.path, one.kind) for one in leftovers] == [(str(parts / 'a.bag'), 'part')]
    assert names(root) == before


def test_record_of_a_running_conversion_is_kept(tmp_path):
    writing, cleaned = threading.Event(), threading.Event()

    def gated(i):
        if i == 15:  # of shard 1, the first one that is written
            writing.set()
            assert cleaned.wait(60)
        return {'n': i}

    source = granular.MapDataset.source(range(30)).map(gated)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(granular.convert, source, tmp_path / 'ds', shardlen=10, parallel=1, sample=2)
        try:
            assert writing.wait(60)
            before = names(granular.Path(tmp_path))
            for folder in (tmp_path, tmp_path / 'ds', tmp_path / 'ds' / '000000'):
                assert granular.clean(folder, older=0, remove=True) == []
            assert names(granular.Path(tmp_path)) == before
        finally:
            cleaned.set()
        assert done.result().datapoints == 30
    assert granular.convert(source, tmp_path / 'ds', shardlen=10, sample=2).found == 30


def test_files_of_an_open_writer_are_kept(tmp_path):
    root = granular.Path(tmp_path)
    for layout in ('refs', 'columns'):
        writer = granular.ShardedDatasetWriter(root / layout, SPEC, granular.encoders, 5, layout=layout)
        fill(writer, 12)
        with granular.BagWriter(root / 'a.bag') as bag:
            bag.append(b'x')
            assert found(root, older=0, remove=True, bags=True) == []
        writer.close()
        whole(root / layout, 12)
        (root / 'a.bag').unlink()


def test_clean_keeps_a_temporary_file_that_its_writer_has_not_locked_yet(tmp_path, monkeypatch):
    cleaned = []

    def clean_first(fd, operation):
        if not cleaned:
            cleaned.append(None)  # as cleaning locks files, too
            cleaned[0] = found(tmp_path, older=0, remove=True)
        return lock(fd, operation)

    lock = fcntl.flock
    monkeypatch.setattr(fcntl, 'flock', clean_first)
    granular.Path(tmp_path / 'x.bag').write_bytes(b'content')
    ((_, kind),) = cleaned[0]
    assert kind == 'draft'
    assert os.listdir(tmp_path) == ['x.bag']
    assert (tmp_path / 'x.bag').read_bytes() == b'content'


def test_clean_keeps_a_temporary_file_that_its_writer_locks_meanwhile(tmp_path, monkeypatch):
    with granular.Path(tmp_path / 'x.bag').open('wb') as file:
        monkeypatch.setattr('granular.aio.datasets.clean.is_locked', lambda path: False)
        assert len(os.listdir(tmp_path)) == 1
        assert found(tmp_path, older=0, remove=True) == []
        file.write(b'content')
    assert (tmp_path / 'x.bag').read_bytes() == b'content'


def test_writers_are_not_disturbed_by_a_process_that_cleans(tmp_path):
    """Each of the writers finds that its temporary file was looked at, or removed, before it was locked."""
    ended = threading.Event()

    def clean():
        while not ended.is_set():
            granular.clean(tmp_path, older=0, remove=True)

    with ThreadPoolExecutor(1) as pool:
        cleaning = pool.submit(clean)
        for i in range(40):
            (granular.Path(tmp_path) / f'{i % 5}.bag').write_bytes(b'%d' % i)
        ended.set()
        cleaning.result()
    assert [(tmp_path / f'{i}.bag').read_bytes() for i in range(5)] == [b'%d' % i for i in range(35, 40)]
    assert len(os.listdir(tmp_path)) == 5


@pytest.mark.parametrize('kind', ['shards', 'columns', 'one shard', 'nested'])
@pytest.mark.parametrize('local', [False, True])
def test_a_copy_beside_a_process_that_cleans_is_complete_or_fails(tmp_path, kind, local):
    if kind == 'columns':
        with granular.DatasetWriter(tmp_path / 'source', SPEC, granular.encoders, layout='columns') as writer:
            fill(writer, 25)
    else:
        write(granular.Path(tmp_path / 'source' / ('inner/ds' if kind == 'nested' else '')), 5)
    source = granular.Path(tmp_path / 'source' / ('000001' if kind == 'one shard' else ''))
    ended = threading.Event()

    def clean():
        while not ended.is_set():
            with contextlib.suppress(NotFoundError):
                granular.clean(tmp_path / 'target', older=0, remove=True, bags=True)

    copies = 0
    (tmp_path / 'target').mkdir()
    with ThreadPoolExecutor(1) as pool:
        cleaning = pool.submit(clean)
        try:
            deadline = time.monotonic() + 60
            for number in itertools.count():
                if copies == 12 or time.monotonic() > deadline:
                    break
                target = granular.Path(
                    tmp_path / 'target' / f'{number}' / ('000001' if kind == 'one shard' else 'copy')
                )
                inner = target / 'inner' / 'ds' if kind == 'nested' else target
                with contextlib.suppress(AlreadyExistsError, NotFoundError):  # a copy that fails says so
                    if local:
                        granular.copy_to_local(source, target)
                    else:
                        source.copy(target)
                    copies += 1
                    with granular.open(inner, granular.decoders) as reader:
                        assert len(list(reader)) == (5 if kind == 'one shard' else 25)
        finally:
            ended.set()
        cleaning.result()
    assert copies


def test_empty_shard_folders_are_removed_and_links_not_followed(tmp_path):
    root = granular.Path(tmp_path)
    write(root / 'ds', 1)
    write(root / 'elsewhere', 2)
    (tmp_path / 'elsewhere' / '000001' / 'spec.json').unlink()
    (tmp_path / 'ds' / '000001').mkdir()
    (tmp_path / 'ds' / '000002').symlink_to(tmp_path / 'elsewhere' / '000001')
    (tmp_path / 'ds' / 'other').mkdir()
    assert found(root / 'ds', older=0) == [('000001', 'folder')]
    assert found(root / 'ds', older=0, remove=True) == [('000001', 'folder')]
    assert sorted(os.listdir(tmp_path / 'ds')) == ['000000', '000002', 'other']
    assert 'x.bag' in os.listdir(tmp_path / 'elsewhere' / '000001')
    with pytest.raises(NotFoundError):
        granular.clean(root / 'nowhere')
    for older in (-1, float('nan'), 'an hour'):
        with pytest.raises(InvalidArgumentError, match='older'):
            granular.clean(root, older=older)


async def test_async_clean_lists_leftovers(tmp_path):
    write(granular.Path(tmp_path) / 'ds', 2)
    (tmp_path / 'ds' / '000001' / 'spec.json').unlink()
    left = await aio.clean(tmp_path / 'ds', older=0)
    files = [f'{name}{end}' for name in ('n', 'refs', 'x') for end in ('.bag', '.crc')]
    assert [(os.path.basename(x.path), x.kind) for x in left] == [(name, 'bag') for name in files]


def test_clean_command(tmp_path, monkeypatch, capsys):
    def call(*args):
        monkeypatch.setattr('sys.argv', ['granular', 'clean', str(tmp_path), *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        return capsys.readouterr()

    write(granular.Path(tmp_path) / 'ds', 2)
    (tmp_path / 'ds' / '000001' / 'spec.json').unlink()
    assert call().out == ''
    out, err = call('--older', '0')
    assert out.count('\n') == 6
    assert 'refs.bag' in out
    assert '--remove' in err
    assert len(json.loads(call('--older', '0', '--json').out)) == 6
    assert 'removed' in call('--older', '0', '--remove').err
    assert call('--older', '0') == ('', 'nothing found\n')
    whole(granular.Path(tmp_path) / 'ds', 5)
