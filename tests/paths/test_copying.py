"""Copies are resumed, verified, complete or absent, and stay within their target."""

import asyncio
import contextlib
import errno
import os
import random
import threading
import uuid

import pytest

import granular
from granular import aio
from granular.aio.stores.multipart import PartWriter
from granular.errors import (
    AlreadyExistsError,
    BadReplyError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
)
from tests.datasets.test_writers import SPEC, fill, point
from tests.support.servers import HTTPServer


@pytest.fixture
def source(tmp_path):
    folder = granular.Path(tmp_path) / 'source'
    with granular.ShardedDatasetWriter(folder, SPEC, granular.encoders, shardlen=5) as writer:
        fill(writer, 15)
    (folder / 'large').write_bytes(os.urandom(1 << 20) * 9)  # an upload in parts
    (folder / 'empty').write_bytes(b'')
    return folder


@pytest.fixture
def written(monkeypatch):
    """The names of the files that were written, in any store, but for the claims of copies."""
    keys = []
    for store in (granular.aio.stores.local.store.LocalStore, *stores()):
        monkeypatch.setattr(store, 'open_writer', noting(store.open_writer, keys, 0))
        monkeypatch.setattr(store, 'copy_within', noting(store.copy_within, keys, 1))
    return keys


def stores():
    from granular.aio.stores.fsspec import FsspecStore
    from granular.aio.stores.gcs.store import GCSStore
    from granular.aio.stores.s3.store import S3Store

    return S3Store, GCSStore, FsspecStore


def noting(method, keys, folder):
    def noted(self, *args, **kwargs):
        name = args[folder].rpartition('/')[2]
        keys.extend([] if name.startswith('.writer.') else [name])
        return method(self, *args, **kwargs)

    return noted


def contents(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob('*') if path.is_file()}


def test_existing_files_are_not_copied_again(source, root, written):
    target, back = root / 'target', root / 'back'
    seen = []
    source.copy(target, progress=seen.append)
    assert contents(target) == contents(source)
    total, count = sum(seen), len(contents(source))
    checked = not str(root).startswith('memory')  # which has no checksums, so that its files are copied again
    written.clear()
    seen.clear()
    source.copy(target, progress=seen.append)
    assert (len(written), sum(seen)) == (0 if checked else count, total)
    (target / '000001' / 'n.bag').unlink()
    (target / '000002' / 'x.bag').write_bytes(bytes((target / '000002' / 'x.bag').stat().size))
    (target / 'large').write_bytes(bytes(9 << 20))
    written.clear()
    source.copy(target)
    if checked:
        # The specs go before what they stand for is replaced, and come back last.
        assert sorted(written) == ['large', 'n.bag', 'spec.json', 'spec.json', 'x.bag']
        assert written[-2:] == ['spec.json'] * 2
    assert contents(target) == contents(source)
    for _ in range(2):  # within the store
        written.clear()
        target.copy(back)
        assert contents(back) == contents(source)
    # moto, as S3, gives the copy of an upload in parts another kind of ETag.
    assert len(written) == (count if not checked else written.count('large'))
    written.clear()
    back.copy(source)
    assert contents(back) == contents(source)
    assert len(written) == (0 if checked else count)


def test_interrupted_copy_is_incomplete_and_resumes(source, bucket, monkeypatch, written):
    (bucket / '000000').mkdir(exist_ok=True)
    source.copy(bucket)
    (source / '000000' / 'x.bag').write_bytes((source / '000001' / 'x.bag').read_bytes() + b'more')
    put = PartWriter.close
    calls = []

    async def close(self):
        if '.writer.' not in self._key:
            calls.append(self)
            if len(calls) == 1:
                raise RuntimeError('on purpose')
        await put(self)

    monkeypatch.setattr(PartWriter, 'close', close)
    with pytest.raises(RuntimeError, match='on purpose'):
        source.copy(bucket)
    assert not (bucket / '000000' / 'spec.json').exists()
    assert (bucket / '000001' / 'spec.json').exists()
    written.clear()
    source.copy(bucket)
    assert written == ['x.bag', 'spec.json']
    assert contents(bucket) == contents(source)


def test_copy_replaces_what_killed_copies_of_its_files_left_on_a_disk(bucket, tmp_path):
    target, left = granular.Path(tmp_path) / 'target', '.{}.01234567.part'
    names = ['a', 'b/c', f'b/{left.format("d")}', 'b/d']
    for name in names:
        (bucket / name).write_bytes(name.encode())
    (target / 'b').mkdir(parents=True)
    for path in (target / left.format('a'), target / 'b' / left.format('c'), target / 'b' / left.format('d')):
        path.write_bytes(b'half')
    other = target / left.format('x')  # of a file that is not copied
    other.write_bytes(b'half')
    with (target / 'b' / 'c').open('wb') as file:  # another writer, which is alive
        file.write(b'late')
        bucket.copy(target)
    expected = {name: name.encode() for name in names} | {'b/c': b'late', other.name: b'half'}
    assert {
        f'{path.relative_to(target)}': path.read_bytes() for path in target.rglob('*') if path.is_file()
    } == expected
    (bucket / 'a').copy(target / 'x')
    assert not other.exists()
    (target / 'b' / left.format('d')).copy(target / 'b' / 'd')
    assert (target / 'b' / 'd').read_bytes() == names[2].encode()


def test_file_that_the_store_lost_is_an_error(source, bucket, monkeypatch):
    """A byte is lost on the way to the store."""
    put = PartWriter.write

    async def write(self, data):
        await put(self, bytes([data[0] ^ 1]) + bytes(data[1:]))

    monkeypatch.setattr(PartWriter, 'write', write)
    for name in ('000000/x.bag', 'large'):
        with pytest.raises(StoreError, match='expected .* bytes of crc32c'):
            (source / name).copy(bucket / 'target')
        assert not (bucket / 'target').exists()


def test_file_that_the_store_does_not_return_is_an_error(source, bucket, monkeypatch, tmp_path):
    """A byte is lost on the way from the store."""
    folder = bucket / 'x'
    (source / '000000' / 'x.bag').copy(folder)
    read = type(folder.store).read

    async def wrong(self, *args):
        reply = await read(self, *args)
        return reply._replace(data=bytes([reply.data[0] ^ 1]) + reply.data[1:])

    monkeypatch.setattr(type(folder.store), 'read', wrong)
    with pytest.raises(BadReplyError, match='as the store reports'):
        folder.copy(granular.Path(tmp_path) / 'copy')
    assert not (tmp_path / 'copy').exists()
    assert os.listdir(tmp_path) == ['source']


@pytest.mark.parametrize('failure', [OSError(errno.EXDEV, 'in the kernel'), 0, 1000])
def test_files_that_the_kernel_does_not_copy_are_read_and_written(tmp_path, monkeypatch, failure):
    content = random.Random(0).randbytes(20 << 20)
    (tmp_path / 'large').write_bytes(content)
    copied = os.copy_file_range

    def copy(source, target, count, *offsets):
        if isinstance(failure, OSError):
            raise failure
        return failure and copied(source, target, min(count, failure) if offsets[0] < 9000 else count, *offsets)

    monkeypatch.setattr(os, 'copy_file_range', copy)
    granular.Path(tmp_path / 'large').copy(tmp_path / 'copy')
    assert (tmp_path / 'copy').read_bytes() == content


@pytest.mark.skipif(not os.path.exists('/proc/self/mem'), reason='a file of Linux that cannot be read')
def test_error_of_a_source_that_cannot_be_read_names_it(tmp_path):
    with pytest.raises(StoreError, match='^/proc/self/mem: failed'):
        granular.Path('/proc/self/mem').copy(tmp_path / 'copy')
    assert list(tmp_path.iterdir()) == []


def test_empty_file_is_not_taken_for_a_folder_of_its_target(bucket, tmp_path):
    disk = granular.Path(tmp_path)
    for root in (bucket, disk):
        (root / 'folder').mkdir(parents=True, exist_ok=True)
        (root / 'folder' / 'x').write_bytes(b'x')
        (root / 'empty').write_bytes(b'')
    (bucket / 'empty').copy(bucket / 'folder')
    assert (bucket / 'folder').read_bytes() == b''
    with pytest.raises(StoreError, match='is a folder, not a file'):
        (disk / 'empty').copy(disk / 'folder')


@pytest.mark.parametrize('key', ['../out', 'a/../../out', './out', '/etc/out', 'a//out', 'a/./out'])
def test_names_outside_of_the_target_are_refused(moto, tmp_path, key):
    root = moto.place()
    granular.Path.of(root.store, f'{root.key}/{key}').write_bytes(b'evil')
    (tmp_path / 'in').mkdir()
    with pytest.raises(InvalidArgumentError) as refused:
        root.copy(granular.Path(tmp_path) / 'in' / 'target')
    assert repr(key) in str(refused.value)
    assert os.listdir(tmp_path) == ['in']
    assert not [name for _, _, names in os.walk(tmp_path) for name in names]
    assert not os.path.exists('/etc/out')
    if '.' not in key.split('/') and '..' not in key:
        other = moto.place()
        root.copy(other)  # a bucket can hold it
        assert granular.Path.of(other.store, f'{other.key}/{key}').read_bytes() == b'evil'


def test_linked_folder_is_not_written_through(source, tmp_path):
    (tmp_path / 'target').mkdir()
    (tmp_path / 'elsewhere').mkdir()
    (tmp_path / 'target' / '000001').symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(InvalidArgumentError, match='elsewhere, which lies outside'):
        source.copy(granular.Path(tmp_path) / 'target')
    assert os.listdir(tmp_path / 'elsewhere') == []


def test_linked_file_is_replaced_and_not_written_through(source, tmp_path):
    (tmp_path / 'mine').write_bytes(b'mine')
    (tmp_path / 'target').mkdir()
    (tmp_path / 'target' / 'large').symlink_to(tmp_path / 'mine')
    source.copy(granular.Path(tmp_path) / 'target')
    assert (tmp_path / 'mine').read_bytes() == b'mine'
    assert contents(granular.Path(tmp_path) / 'target') == contents(source)


def test_copy_from_a_web_server(source, tmp_path):
    with HTTPServer(str(source)) as server:
        granular.Path(f'{server.endpoint}/000001').copy(granular.Path(tmp_path) / 'copy')
    with granular.DatasetReader(tmp_path / 'copy', granular.decoders) as reader:
        assert list(reader) == [point(i) for i in range(5, 10)]


def test_copy_of_a_single_file(source, root, written):
    assert (source / 'large').copy(root / 'file') == root / 'file'
    written.clear()
    (source / 'large').copy(root / 'file')
    assert len(written) == (1 if str(root).startswith('memory') else 0)
    for folder in (source / 'large', root / 'file'):
        with pytest.raises(InvalidArgumentError, match='itself'):
            folder.copy(folder)
    with contextlib.suppress(GranularError):
        (source / 'nothing').copy(root / 'other')
    assert not (root / 'other').exists()
    with pytest.raises(NotFoundError):
        (source / 'nothing').copy(root / 'other')


@pytest.mark.parametrize('place', ['memory', 'local', 'fakegcs'])
def test_copy_onto_itself_is_refused_whatever_its_settings(request, tmp_path, place):
    memory = f'memory://{uuid.uuid4().hex}'
    root = request.getfixturevalue('fakegcs').place() if place == 'fakegcs' else granular.Path(memory)
    root = granular.Path(tmp_path) if place == 'local' else root
    content = os.urandom(1 << 20) * 9
    (root / 'folder' / 'file').parent.mkdir(parents=True)
    (root / 'folder' / 'file').write_bytes(content)
    twin = granular.Path(str(root), config=granular.IOConfig(attempts=2), **root.store.options)
    for name, target in (('folder', 'folder'), ('folder', 'folder/inner'), ('folder/file', 'folder/file')):
        with pytest.raises(InvalidArgumentError, match='cannot be copied'):
            (twin / name).copy(root / target)
    assert [path.name for path in (root / 'folder').iterdir()] == ['file']
    assert (root / 'folder' / 'file').read_bytes() == content


def test_folder_is_copied_to_the_same_address_on_another_server(moto, seaweed):
    address = f's3://same-{uuid.uuid4().hex}/folder'
    source, target = (granular.Path(address, **server.options) for server in (moto, seaweed))
    for folder in (source, target):
        folder.parent.mkdir()
    (source / 'file').write_bytes(b'content')
    source.copy(target)
    assert (target / 'file').read_bytes() == b'content'


@pytest.mark.parametrize('change', ['grows', 'shrinks', 'is rewritten'])
def test_file_changed_while_it_is_copied_is_an_error(tmp_path, bucket, change):
    source, size = tmp_path / 'file', 10 << 20  # an upload in parts
    source.write_bytes(bytes(size))
    times = []

    def meanwhile(done):
        times.append(done)
        if len(times) == 1:
            with open(source, 'r+b') as file:
                if change == 'is rewritten':
                    file.seek(size - 3)
                    file.write(b'new')
                else:
                    file.truncate(size + 1 if change == 'grows' else size - 1)

    with pytest.raises(GranularError, match='changed|replaced|bytes'):
        granular.Path(source).copy(bucket / 'file', progress=meanwhile)
    assert len(times) >= 1
    assert not (bucket / 'file').exists()
    granular.Path(source).copy(bucket / 'file')
    assert (bucket / 'file').read_bytes() == source.read_bytes()


@pytest.mark.parametrize('root', ['local', 'moto'], indirect=True)
@pytest.mark.parametrize(
    ('older', 'newer', 'stray'),
    [
        ({'layout': 'refs'}, {'layout': 'columns'}, 'refs.bag'),
        ({}, {'checksums': False}, '.crc'),
        ({'shardlen': 2}, {'shardlen': 5}, '00000[12]'),
        ({}, {'shardlen': 5, 'index': True}, 'spec.json'),
    ],
    ids=['another layout', 'checksums', 'more shards', 'no shards'],
)
def test_copy_is_not_mixed_with_another_dataset(root, tmp_path, older, newer, stray):
    target, source = root / 'target', granular.Path(tmp_path) / 'source'
    for folder, options, first in ((target, older, 0), (source, newer, 100)):
        writer = granular.ShardedDatasetWriter if 'shardlen' in options else granular.DatasetWriter
        with writer(folder, SPEC, granular.encoders, **options) as writing:
            fill(writing, 5, first)
    before = contents(target)
    for _ in range(2):  # nor when it is begun once more
        with pytest.raises(AlreadyExistsError, match=stray):
            source.copy(target)
        assert contents(target) == before
    target.rmtree()
    source.copy(target)
    with granular.open(target) as copied:
        assert list(copied) == [point(i) for i in range(100, 105)]


@pytest.mark.parametrize('root', ['local', 'moto'], indirect=True)
@pytest.mark.parametrize('unfinished', ['an empty folder', 'bags'])
def test_copy_of_unfinished_shards_is_not_mixed_with_others(root, tmp_path, unfinished):
    target, source = root / 'target', granular.Path(tmp_path) / 'source'
    for folder, count, first in ((target, 4, 0), (source, 2 if unfinished == 'an empty folder' else 4, 100)):
        with granular.ShardedDatasetWriter(folder, SPEC, granular.encoders, 2) as writer:
            fill(writer, count, first)
    (source / '000001').mkdir(exist_ok=True)  # as a writer leaves it that was killed there
    (source / '000001' / 'spec.json').unlink(missing_ok=True)
    for _ in range(2):
        with pytest.raises(AlreadyExistsError, match='000001 would be mixed'):
            source.copy(target)
    with granular.ShardedDatasetReader(target, granular.decoders) as reader:
        assert list(reader) == [point(i) for i in range(4)]


def test_copy_after_one_that_failed_is_not_mixed_with_other_shards(root, tmp_path):
    target, source = root / 'target', granular.Path(tmp_path) / 'source'
    for folder, count, first in ((target, 4, 0), (source, 2, 100)):
        with granular.ShardedDatasetWriter(folder, SPEC, granular.encoders, 2) as writer:
            fill(writer, count, first)
    (target / '000000' / 'spec.json').unlink()  # as a copy leaves it of which another file changed
    for _ in range(2):
        with pytest.raises(AlreadyExistsError, match='000001 would be mixed'):
            source.copy(target)


def test_shards_are_copied_beside_other_shards(tmp_path):
    target = granular.Path(tmp_path) / 'target'
    for start in (0, 1):
        source = granular.Path(tmp_path) / f'source-{start}'
        with granular.ShardedDatasetWriter(source, SPEC, granular.encoders, 2, start, 2) as writer:
            fill(writer, 4, 100 * start)
        source.copy(target)
        source.copy(target)
    with granular.ShardedDatasetReader(target, granular.decoders) as reader:
        assert list(reader) == [point(i) for i in (0, 1, 100, 101, 2, 3, 102, 103)]


def test_dataset_replaced_while_it_is_copied_is_not_completed(root, tmp_path):
    """Bags of both datasets would make one that never existed."""
    if str(root).startswith('memory'):
        root = granular.Path(tmp_path) / 'source'  # the listings of which tell times

    async def write(first, count):
        async with aio.DatasetWriter(root / 'ds', SPEC, granular.encoders) as writer:
            for i in range(first, first + count):
                await writer.append(point(i))

    async def replace():
        await (root / 'ds').aio.rmtree()
        await write(100, 7)

    asyncio.run(write(0, 5))
    times = []

    def meanwhile(done):
        times.append(done)
        if len(times) == 1:
            asyncio.run(replace())

    target = granular.Path(tmp_path) / 'target'
    with pytest.raises((ObjectChangedError, NotFoundError)):
        (root / 'ds').copy(target, progress=meanwhile)
    assert not (target / 'spec.json').exists()
    (root / 'ds').copy(target)
    with granular.DatasetReader(target, granular.decoders) as reader:
        assert list(reader) == [point(i) for i in range(100, 107)]


async def test_progress_is_called_off_the_event_loop(tmp_path):
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder' / 'a').write_bytes(b'12345')
    (tmp_path / 'folder' / 'b').write_bytes(bytes(9 << 20))
    calls, threads = [], set()

    def progress(size):
        calls.append(size)
        threads.add(threading.get_ident())

    source = aio.Path(tmp_path / 'folder')
    bucket = aio.Path(f'memory://{uuid.uuid4().hex}')
    for target in (tmp_path / 'copy', bucket):  # within a store, and from one to another
        await source.copy(target, progress=progress)
        assert sum(calls) == 5 + (9 << 20)
        await (source / 'a').copy(aio.Path(target) / 'c', progress=progress)
        assert sum(calls) == 10 + (9 << 20)
        calls.clear()
    assert threading.get_ident() not in threads


@pytest.mark.parametrize('target', ['folder', 'folder/inner', 'link/inner', 'link'])
def test_folder_is_not_copied_into_itself_by_another_name(tmp_path, monkeypatch, target):
    """Relative and absolute, and through a link."""
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder' / 'file').write_bytes(b'content')
    (tmp_path / 'link').symlink_to('folder')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match='cannot be copied into itself'):
        granular.Path('folder').copy(tmp_path / target)
    assert os.listdir('folder') == ['file']


def test_file_that_another_writer_replaces_after_a_copy_stays(tmp_path, bucket, monkeypatch):
    """It is not what was copied, and is not removed."""
    (bucket / 'file').write_bytes(b'content')
    replace = os.replace

    def published(old, new):
        replace(old, new)
        if str(new).endswith('copy'):
            (tmp_path / 'other').write_bytes(b'of another writer')
            replace(tmp_path / 'other', new)

    monkeypatch.setattr(os, 'replace', published)
    (bucket / 'file').copy(tmp_path / 'copy')
    assert (tmp_path / 'copy').read_bytes() == b'of another writer'


@pytest.mark.parametrize('within', [False, True])
def test_object_that_another_writer_replaces_after_a_copy_stays(within, tmp_path, bucket, monkeypatch):
    """It is not what was copied, which is an error, and is not removed."""
    source = (bucket if within else granular.Path(tmp_path)) / 'file'
    source.write_bytes(b'content')
    target = (bucket / 'copy').aio
    original = type(target.store).content_info

    async def replaced(self, key):
        if key == target.key:
            await target.write_bytes(b'of another writer')
        return await original(self, key)

    monkeypatch.setattr(type(target.store), 'content_info', replaced)
    with pytest.raises(StoreError, match=r'expected (a copy of .*, )?7 bytes'):
        source.copy(bucket / 'copy')
    assert (bucket / 'copy').read_bytes() == b'of another writer'
