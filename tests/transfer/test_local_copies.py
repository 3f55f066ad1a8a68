"""Local copies are made once, complete, with archives unpacked within their folder."""

import asyncio
import concurrent.futures
import fcntl
import gzip
import io
import json
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import uuid
import zipfile
import zlib

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import granular
from granular import aio
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    CorruptArchiveError,
    CorruptDatasetError,
    CorruptError,
    GranularError,
    InvalidArgumentError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
    UnsupportedError,
)
from tests.support.faults import FaultServer
from tests.support.servers import FakeGCSServer, HTTPServer

MARKER = '.granular-copy.json'
FILES = {'a/1.txt': b'one', 'a/2.txt': b'', 'b/c/3.bin': os.urandom(1 << 20), 'top': b'x' * 1000}
KINDS = ['zip', 'tar', 'tar.gz', 'tgz', 'tar.bz2', 'tar.xz', 'tar.zst']


def zipped(files, compression=zipfile.ZIP_DEFLATED):
    out = io.BytesIO()
    with zipfile.ZipFile(out, 'w', compression) as file:
        for name, data in files.items():
            file.writestr(name, data)
    return out.getvalue()


def tarred(members, mode='w', form=tarfile.DEFAULT_FORMAT):
    """A tar of files, given by name and content, or of members."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=form) as file:
        for name, data in members.items() if isinstance(members, dict) else members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if isinstance(data, bytes):
                info.size = len(data)
            file.addfile(info, io.BytesIO(data or b''))
    return out.getvalue()


def archived(kind, files):
    if kind == 'zip':
        return zipped(files)
    if kind == 'tar.zst':
        import zstandard

        return zstandard.compress(tarred(files))
    return tarred(files, {'tar': 'w', 'tar.gz': 'w:gz', 'tgz': 'w:gz', 'tar.bz2': 'w:bz2', 'tar.xz': 'w:xz'}[kind])


def member(name, kind, target='', **more):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    for key, value in more.items():
        setattr(info, key, value)
    return info, None


def contents(root):
    root = pathlib.Path(root)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob('*') if path.is_file() and path.name != MARKER
    }  # fmt: skip


@pytest.fixture
def local(tmp_path):
    return tmp_path / 'local'


@pytest.mark.parametrize('store', ['local', 'seaweed', 'fakegcs'])
def test_copy_is_complete_and_not_repeated(store, request, tmp_path, local):
    root = granular.Path(tmp_path / 'root') if store == 'local' else request.getfixturevalue(store).place()
    source = root / 'data'
    for name, data in FILES.items():
        if source.store.has_folders:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    target = local / 'x' / 'data'
    seen = []
    done = granular.copy_to_local(root, local / 'x', relative_path='data', progress=seen.append)
    assert contents(target) == FILES
    assert (done.path, done.was_copied, done.was_deleted, done.was_unpacked) == (f'{target}', True, False, False)
    assert (done.files, done.bytes, done.source_format) == (4, sum(map(len, FILES.values())), 'folder')
    assert done.seconds > 0
    assert sum(seen) == done.bytes
    # Complete: nothing happens, and no request is made.
    (target / 'top').unlink()
    source.rmtree()
    again = granular.copy_to_local(root, local / 'x', 'data')
    assert (again.was_copied, again.was_deleted, again.files, again.source_format) == (False, False, 0, '')
    assert not (target / 'top').exists()
    # Incomplete: cleared, and copied again.
    (source / 'new').parent.mkdir(parents=True, exist_ok=True)
    (source / 'new').write_bytes(b'new')
    marker = json.loads((target / MARKER).read_text())
    assert marker['state'] == 'complete'
    (target / MARKER).write_text(json.dumps({**marker, 'state': 'copying'}))
    (target / 'link').symlink_to('/etc')
    cleared = granular.copy_to_local(root, local / 'x', 'data')
    assert (cleared.was_copied, cleared.was_deleted, cleared.files) == (True, True, 1)
    assert contents(target) == {'new': b'new'}


@pytest.mark.parametrize('store', ['local', 'seaweed', 'fakegcs'])
@pytest.mark.parametrize('lacking', ['000000', '000001', '000001/spec.json'])
def test_unfinished_sharded_dataset_is_not_copied_as_complete(store, lacking, request, tmp_path, local):
    root = granular.Path(tmp_path / 'root') if store == 'local' else request.getfixturevalue(store).place() / 'data'

    with granular.ShardedDatasetWriter(root, {'n': 'int'}, granular.encoders, shardlen=2) as writer:
        for i in range(6):
            writer.append({'n': i})
    whole = granular.Path(tmp_path / 'whole')
    root.copy(whole)
    (root / lacking).unlink() if '/' in lacking else (root / lacking).rmtree()
    for _ in range(2):
        with pytest.raises(
            CorruptDatasetError, match=rf'shard {lacking[:6]} is missing or unfinished, of 3: copy it when'
        ):
            granular.copy_to_local(root, local)
    (whole / lacking).copy(root / lacking)
    assert granular.copy_to_local(root, local).was_deleted
    with granular.ShardedDatasetReader(local, granular.decoders) as reader:
        assert [point['n'] for point in reader] == [*range(6)]


def test_sharded_dataset_that_grows_meanwhile_is_not_copied_as_complete(tmp_path, local):
    root = tmp_path / 'root'
    with granular.ShardedDatasetWriter(root, {'n': 'int'}, granular.encoders, shardlen=2) as writer:
        for i in range(6):
            writer.append({'n': i})

    def grow(_):
        shutil.copytree(root / '000000', root / '000003', dirs_exist_ok=True)

    with pytest.raises(ObjectChangedError, match='had 3 shards when it was copied, and has 4 now: copy it again'):
        granular.copy_to_local(root, local, progress=grow)
    assert granular.copy_to_local(root, local).was_deleted
    assert len(granular.open(local)) == 8


def test_folder_of_the_user_is_left_unchanged(tmp_path, local):
    (tmp_path / 'source').mkdir()
    (tmp_path / 'source' / 'x').write_bytes(b'1')
    (local / 'mine').mkdir(parents=True)
    (local / 'mine' / 'file').write_bytes(b'mine')
    done = granular.copy_to_local(tmp_path / 'source', local / 'mine')
    assert (done.was_copied, contents(local / 'mine')) == (False, {'file': b'mine'})
    (local / 'empty').mkdir()
    (local / 'empty' / f'.{MARKER}.0123abcd.part').write_bytes(b'')  # of a process that was killed as it began
    assert granular.copy_to_local(tmp_path / 'source', local / 'empty').was_copied
    assert sorted(os.listdir(local / 'empty')) == [MARKER, 'x']
    (tmp_path / 'other').mkdir()
    with pytest.raises(AlreadyExistsError, match=r'is a copy of .*/source, not of .*/other'):
        granular.copy_to_local(tmp_path / 'other', local / 'empty')
    # The copy of a copy has a marker of its own.
    granular.copy_to_local(local / 'empty', local / 'again')
    assert json.loads((local / 'again' / MARKER).read_text())['source'] == str(local / 'empty')


@pytest.mark.parametrize('store', ['local', 'fakegcs'])
def test_folder_is_not_copied_onto_a_file_nor_a_file_onto_a_folder(store, request, tmp_path, local):
    root = granular.Path(tmp_path / 'root') if store == 'local' else request.getfixturevalue(store).place()
    if store == 'local':
        (root / 'data').mkdir(parents=True)
    (root / 'data' / 'x').write_bytes(b'1')
    (root / 'train.zip').write_bytes(zipped({'x': b'1'}))
    (local / 'empty').mkdir(parents=True)
    (local / 'file').write_bytes(b'mine')
    for name, kind in (('data', 'folder'), ('train.zip', 'zip archive to unpack')):
        with pytest.raises(AlreadyExistsError, match=rf'/file: is a file, and .*/{name} is a {kind}: remove the file'):
            granular.copy_to_local(root / name, local / 'file')
    with pytest.raises(AlreadyExistsError, match=r'/empty: is a folder, and .*/x is a file: .*, such as .*/empty/x$'):
        granular.copy_to_local(root / 'data' / 'x', local / 'empty')
    assert contents(local) == {'file': b'mine'}
    # A file is used, also after its source is gone, and where its store is not reached.
    once = granular.IOConfig(attempts=1)
    unreached = granular.Path('gs://bucket/x', endpoint_url='http://127.0.0.1:1', token='anon', config=once)
    for source in (root / 'data' / 'x', root / 'gone', unreached):
        assert not granular.copy_to_local(source, local / 'file').was_copied


def test_file_is_not_copied_onto_a_folder_of_the_user(tmp_path, local):
    (tmp_path / 'x').write_bytes(b'1')
    local.mkdir()
    (local / 'file').write_bytes(b'mine')
    with pytest.raises(AlreadyExistsError, match=r'is a folder, and .*/x is a file: pass the path of the copy, such'):
        granular.copy_to_local(tmp_path / 'x', local)
    assert contents(local) == {'file': b'mine'}


def test_copy_of_another_server_is_refused(fakegcs, local):
    with FakeGCSServer() as other:
        sources = [granular.Path('gs://twin/data', **server.options) for server in (fakegcs, other)]
        for number, source in enumerate(sources):
            source.parent.mkdir()
            (source / 'x').write_bytes(b'%d' % number)
        assert granular.copy_to_local(sources[0], local).was_copied
        assert not granular.copy_to_local(sources[0], local).was_copied
        with pytest.raises(AlreadyExistsError, match=f' at {fakegcs.endpoint}, not of .* at {other.endpoint}'):
            granular.copy_to_local(sources[1], local)
        marker = json.loads((local / MARKER).read_text())
        del marker['server']  # as earlier releases wrote it
        (local / MARKER).write_text(json.dumps(marker))
        assert not granular.copy_to_local(sources[1], local).was_copied


@pytest.mark.parametrize('unpack', [True, False])
def test_copy_with_archives_is_that_of_its_unpack(tmp_path, local, unpack):
    (tmp_path / 'source').mkdir()
    (tmp_path / 'source' / 'a.zip').write_bytes(zipped({'x': b'1'}))
    assert granular.copy_to_local(tmp_path / 'source', local, unpack=unpack).was_unpacked == unpack
    assert not granular.copy_to_local(tmp_path / 'source', local, unpack=unpack).was_copied
    with pytest.raises(AlreadyExistsError, match=f'was copied with unpack={unpack}, not {not unpack}'):
        granular.copy_to_local(tmp_path / 'source', local, unpack=not unpack)
    (tmp_path / 'source' / 'a.zip').rename(tmp_path / 'source' / 'plain')
    granular.copy_to_local(tmp_path / 'source', tmp_path / 'none', unpack=unpack)
    assert not granular.copy_to_local(tmp_path / 'source', tmp_path / 'none', unpack=not unpack).was_copied


def test_invalid_arguments_are_refused(tmp_path, fakegcs):
    (tmp_path / 'source').mkdir()
    with pytest.raises(InvalidArgumentError, match='not on a local disk'):
        granular.copy_to_local(tmp_path / 'source', fakegcs.place())
    for relative in ('../x', '/etc', '', 'a/../../b', b'x', 5):
        with pytest.raises(InvalidArgumentError, match='relative_path: expected'):
            granular.copy_to_local(tmp_path / 'source', tmp_path / 'target', relative)
    with pytest.raises(InvalidArgumentError, match='into itself'):
        granular.copy_to_local(tmp_path / 'source', tmp_path / 'source' / 'deep')
    with pytest.raises(NotFoundError, match=r'no such file or folder, nor an archive of this name \(.zip'):
        granular.copy_to_local(tmp_path / 'nothing', tmp_path / 'target')
    assert os.listdir(tmp_path) == ['source']


async def test_async_copy_of_a_single_file(fakegcs, local):
    bucket = fakegcs.place()
    await (bucket / 'file').aio.write_bytes(b'12345')
    local.mkdir()
    (local / '.file.0123abcd.part').write_bytes(b'12')  # of a process that was killed
    done = await aio.copy_to_local(bucket / 'file', local / 'file')
    assert (done.was_copied, done.was_deleted, done.files, done.bytes, done.source_format) == (True, True, 1, 5, 'file')
    assert not (await aio.copy_to_local(bucket / 'file', local / 'file')).was_copied
    assert os.listdir(local) == ['file']


@pytest.mark.parametrize('kind', KINDS)
def test_archives_are_unpacked(kind, tmp_path, local):
    (tmp_path / f'train.{kind}').write_bytes(archived(kind, FILES))
    seen = []
    done = granular.copy_to_local(tmp_path / f'train.{kind}', local / f'train.{kind}', progress=seen.append)
    assert contents(local / 'train') == FILES
    assert (done.path, done.was_copied, done.was_unpacked) == (f'{local / "train"}', True, True)
    assert (done.files, done.bytes) == (4, sum(map(len, FILES.values())))
    assert done.source_format == {'tgz': 'tar.gz'}.get(kind, kind)
    assert sum(seen) == (tmp_path / f'train.{kind}').stat().st_size
    assert not granular.copy_to_local(tmp_path, local, f'train.{kind}').was_copied
    # By its name without the ending, and from a folder of its name in it.
    (tmp_path / f'rooted.{kind}').write_bytes(archived(kind, {f'rooted/{name}': data for name, data in FILES.items()}))
    assert granular.copy_to_local(tmp_path, local, 'rooted').was_unpacked
    assert contents(local / 'rooted') == FILES
    granular.copy_to_local(tmp_path / f'rooted.{kind}', local / f'packed.{kind}', unpack=False)
    assert (local / f'packed.{kind}').read_bytes() == (tmp_path / f'rooted.{kind}').read_bytes()


@pytest.mark.parametrize('store', ['seaweed', 'fakegcs'])
def test_folder_of_archives_and_files_is_unpacked(store, request, local):
    """Each is unpacked beside its name; windows of 8 MiB are read of the large one."""
    bucket = request.getfixturevalue(store).place()
    large = {f'{i:03}': os.urandom(200_000) for i in range(60)}
    (bucket / 'train' / 'n01.zip').write_bytes(zipped(large, zipfile.ZIP_STORED))
    (bucket / 'train' / 'n02.tar').write_bytes(tarred({'n02/x': b'2', 'n02/n02': b'twice'}))
    (bucket / 'deep' / 'er' / 'n03.tar.gz').write_bytes(tarred(large, 'w:gz'))
    (bucket / 'labels.txt').write_bytes(b'0 1')
    seen = []
    done = granular.copy_to_local(bucket, local, progress=seen.append)
    assert contents(local) == {
        **{f'train/n01/{name}': data for name, data in large.items()},
        **{f'deep/er/n03/{name}': data for name, data in large.items()},
        'train/n02/x': b'2', 'train/n02/n02': b'twice', 'labels.txt': b'0 1',
    }  # fmt: skip
    assert (done.files, done.was_unpacked, done.source_format) == (123, True, 'folder')
    assert sum(seen) == sum((folder / name).stat().size for folder, _, names in bucket.walk() for name in names)
    assert done.bytes == sum(map(len, contents(local).values()))


def test_archive_of_a_web_server_is_unpacked(tmp_path, local):
    """A zip over HTTP, which has no listings."""
    (tmp_path / 'x.zip').write_bytes(zipped(FILES))
    with HTTPServer(str(tmp_path)) as server:
        assert granular.copy_to_local(f'{server.endpoint}/x.zip', local / 'x').source_format == 'zip'
    assert contents(local / 'x') == FILES


def test_conflicting_names_are_refused(tmp_path, local):
    for number, names in enumerate([('x.zip', 'x/file'), ('x.zip', 'x.tar'), ('x.zip', 'x'), ('x.zip', 'x/y/z')]):
        source = tmp_path / f'source{number}'
        for name in names:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(zipped({'1': b''}) if name.endswith('.zip') else tarred({'1': b''}))
        with pytest.raises((InvalidArgumentError, AlreadyExistsError, StoreError)):
            granular.copy_to_local(source, local / str(number))
        assert granular.copy_to_local(source, local / str(number), unpack=False).was_deleted


LINK, HARD, DIR = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
HOSTILE = {
    'up': [('../out', b'evil')],
    'up in the middle': [('a/../../out', b'evil')],
    'up and back': [('a/../b', b'evil')],
    'absolute': [('/tmp/granular-out', b'evil')],
    'not Unicode': [('a\udcff', b'evil')],
    'link out': [member('l', LINK, '../out')],
    'link to an absolute place': [member('l', LINK, '/etc/passwd')],
    'write through a link': [member('l', LINK, '..'), ('l/out', b'evil')],
    'links that go down and up': [member('a/b/l', LINK, '../..'), member('m', LINK, 'a/b/l/..')],
    'a loop of links': [member('a', LINK, 'b'), member('b', LINK, 'a')],
    'link over a file': [('a', b''), member('a', LINK, 'b')],
    'link over a folder': [('a/b', b''), member('a', LINK, 'c')],
    'hard link out': [member('h', HARD, '../secret')],
    'hard link to an absolute place': [member('h', HARD, '/etc/passwd')],
    'hard link to nothing': [member('h', HARD, 'nothing')],
    'hard link to a folder': [member('d', DIR), member('h', HARD, 'd')],
    'a device': [member('d', tarfile.CHRTYPE, devmajor=1, devminor=3)],
    'a block device': [member('d', tarfile.BLKTYPE)],
    'a pipe': [member('p', tarfile.FIFOTYPE)],
    'hard link over a folder': [('a', b''), ('b/c', b''), member('b', HARD, 'a')],
    'a file over a folder': [('a/b', b''), ('a', b'')],
    'a file as a folder': [('a', b''), ('a/b', b'')],
}


def test_archive_does_not_mark_its_copy_as_complete(tmp_path, local):
    source = tmp_path / 'x.tar'
    marker = json.dumps({'source': str(source), 'state': 'complete'}).encode()
    claim = [('a', marker), member(MARKER, HARD, 'a'), (MARKER, marker)]
    source.write_bytes(tarred([*claim, member('d', tarfile.FIFOTYPE)]))
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="member 'd' is not unpacked"):
            granular.copy_to_local(source, local / 'x')
    source.write_bytes(tarred(claim))
    assert granular.copy_to_local(source, local / 'x').was_deleted
    assert sorted(os.listdir(local / 'x')) == [MARKER, 'a']


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_tars_are_refused(name, tmp_path):
    (tmp_path / 'secret').write_bytes(b'secret')
    (tmp_path / 'evil.tar').write_bytes(tarred(HOSTILE[name]))
    (tmp_path / 'in').mkdir()
    with pytest.raises(InvalidArgumentError, match=r'evil.tar: member .* is not unpacked'):
        granular.copy_to_local(tmp_path / 'evil.tar', tmp_path / 'in' / 'data')
    assert sorted(os.listdir(tmp_path)) == ['evil.tar', 'in', 'secret']
    assert os.listdir(tmp_path / 'in') == ['data']
    assert not os.path.exists('/tmp/granular-out')
    assert not any(path.is_symlink() for path in (tmp_path / 'in').rglob('*') if name != 'link over a file')
    assert os.stat(tmp_path / 'secret').st_nlink == 1
    # It stays incomplete.
    with pytest.raises(InvalidArgumentError):
        granular.copy_to_local(tmp_path / 'evil.tar', tmp_path / 'in' / 'data')


def special(name, mode, content=b''):
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, mode << 16
    return info, content


@pytest.mark.parametrize(
    'files',
    [{'../out': b'evil'}, {'/tmp/granular-out': b'evil'}, {'a/../../out': b''},
     dict([special('l', stat.S_IFLNK, b'/etc')]), dict([special('l', stat.S_IFLNK, b'../..')]),
     dict([special('d', stat.S_IFCHR)]),
     dict([special('l', stat.S_IFLNK, b'x' * 5000)])],
)  # fmt: skip
def test_hostile_zips_are_refused(files, tmp_path):
    (tmp_path / 'evil.zip').write_bytes(zipped(files))
    with pytest.raises(InvalidArgumentError, match=r'evil.zip: member .* is not unpacked'):
        granular.copy_to_local(tmp_path / 'evil.zip', tmp_path / 'in' / 'data')
    assert sorted(os.listdir(tmp_path)) == ['evil.zip', 'in']
    assert not os.path.exists('/tmp/granular-out')


def test_links_within_the_archive_are_unpacked(tmp_path, local):
    members = [
        ('r/a/file', b'1'), member('r/link', LINK, 'a/file'), member('r/a/up', LINK, '../b/../link'),
        member('r/hard', HARD, 'r/a/file'), member('r/dir', LINK, 'a'),
        (member('r/run', tarfile.REGTYPE, mode=0o755)[0], b'#!/bin/sh\n'), ('./r/a/./dot', b'2'),
        ('r/a/file', b'replaced'), ('r/b/x', b''),
    ]  # fmt: skip
    (tmp_path / 'r.tar').write_bytes(tarred(members))
    granular.copy_to_local(tmp_path, local, 'r')
    root = local / 'r'
    assert (root / 'a' / 'up').read_bytes() == (root / 'link').read_bytes() == b'replaced'
    assert (root / 'hard').read_bytes() == b'1'
    assert (root / 'dir' / 'dot').read_bytes() == b'2'
    assert os.access(root / 'run', os.X_OK)
    assert not os.access(root / 'a' / 'file', os.X_OK)
    (tmp_path / 'z.zip').write_bytes(zipped(dict([special('x/l', stat.S_IFLNK, b'f'), ('x/f', b'3')])))
    granular.copy_to_local(tmp_path, local, 'z')
    assert os.readlink(local / 'z' / 'x' / 'l') == 'f'


@pytest.mark.parametrize('root', ['q', '.unpacked', 'n' * 250])
def test_single_root_is_left_out_whatever_is_in_it(root, tmp_path, local):
    names = [root, f'.{root}.unpacked'[:255], '.unpacked', '.unpacked_/x']
    (tmp_path / 'q.tar').write_bytes(tarred([(f'{root}/{name}', name.encode()) for name in names]))
    os.rename(tmp_path / 'q.tar', tmp_path / f'{root}.tar')
    granular.copy_to_local(tmp_path, local, root)
    written = {str(path.relative_to(local / root)) for path in (local / root).rglob('*') if path.is_file()}
    assert written == {*names, MARKER}
    for name in names:
        assert (local / root / name).read_text() == name


def declared(data, size):
    """Return a zip whose only member declares a wrong size, in its header and in the directory."""
    old = data.index(b'PK\x03\x04') + 22, data.index(b'PK\x01\x02') + 24
    out = bytearray(data)
    for at in old:
        out[at : at + 4] = size.to_bytes(4, 'little')
    return bytes(out)


SUMMED = tarred(FILES, 'w:gz')
BROKEN = {
    'cut.zip': zipped(FILES)[:-100],
    'cut.tar': tarred(FILES)[: 1 << 19],
    'cut.tgz': SUMMED[:-8],
    'summed.tgz': SUMMED[:-8] + bytes([SUMMED[-8] ^ 1]) + SUMMED[-7:],
    'flipped.zip': zipped(FILES, zipfile.ZIP_STORED).replace(b'one', b'two'),
    'longer.zip': declared(zipped({'x': b'y' * 1000}), 500),
    'shorter.zip': declared(zipped({'x': b'y' * 1000}), 2000),
    'none.zip': b'PK',
    'none.tar': b'x' * 10_000,
    'empty.tar': b'',
    'none.tar.zst': b'x' * 100,
    'none.tar.xz': b'x' * 100,
    'header.tgz': tarred([(member('x', tarfile.XHDTYPE)[0], bytes(5 << 20))], 'w:gz'),
}


@pytest.mark.parametrize('name', BROKEN)
def test_broken_archives_are_corrupt(name, tmp_path, local):
    (tmp_path / name).write_bytes(BROKEN[name])
    with pytest.raises(CorruptArchiveError, match=name) as broken:
        granular.copy_to_local(tmp_path / name, local / 'x')
    assert isinstance(broken.value, CorruptError)
    assert json.loads((local / 'x' / MARKER).read_text())['state'] == 'copying'


@pytest.mark.parametrize('mode', ['w', 'w:gz'])
@pytest.mark.parametrize('form', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_damaged_headers_of_tars_are_corrupt(form, mode, tmp_path, local):
    """Python's tarfile takes a damaged or truncated header for the end of the archive."""
    plain = bytes(tarred({f'{i:0120}/x': bytes([65 + i]) * 700 for i in range(3)}, form=form))
    headers = [at for at in range(0, len(plain), 512) if plain[at + 257 : at + 262] == b'ustar']
    broken = [plain[: at + 100] for at in headers[1:]]
    broken += [plain[: at + 9] + bytes([plain[at + 9] ^ 1]) + plain[at + 10 :] for at in headers]
    assert len(broken) >= 5
    for number, data in enumerate(broken):
        source = tmp_path / f'{number}.{"tar.gz" if mode == "w:gz" else "tar"}'
        source.write_bytes(gzip.compress(data) if mode == 'w:gz' else data)
        with pytest.raises(CorruptArchiveError, match=source.name):
            granular.copy_to_local(source, local / f'{number}')
        assert json.loads((local / f'{number}' / MARKER).read_text())['state'] == 'copying'


@pytest.mark.parametrize('kind', ['gz', 'zst'])
def test_compressed_tars_that_are_cut_anywhere_are_corrupt(kind, tmp_path, local):
    """Also between two members, and where a compressor has flushed."""
    import zstandard

    whole, data, cuts = tarred({'a': bytes(700), 'b': bytes(700), 'c': bytes(700)}), b'', []
    for name in ('first', 'second'):  # frames, or members of gzip
        compressor = zstandard.ZstdCompressor().compressobj() if kind == 'zst' else zlib.compressobj(wbits=31)
        flush = zstandard.COMPRESSOBJ_FLUSH_BLOCK if kind == 'zst' else zlib.Z_FULL_FLUSH
        part = whole[:1536] if name == 'first' else whole[1536:]
        for at in range(0, len(part), 512):
            data += compressor.compress(part[at : at + 512]) + compressor.flush(flush)
            cuts.append(len(data))
        data += compressor.flush()
    (tmp_path / f'x.tar.{kind}').write_bytes(data)
    assert granular.copy_to_local(tmp_path / f'x.tar.{kind}', local / 'x').files == 3
    for cut in cuts:
        (tmp_path / f'{cut}.tar.{kind}').write_bytes(data[:cut])
        with pytest.raises(CorruptArchiveError, match=f'{cut}.tar.{kind}'):
            granular.copy_to_local(tmp_path / f'{cut}.tar.{kind}', local / f'{cut}')


def test_tar_without_an_end_marker_is_logged(tmp_path, local, caplog):
    data = tarred({'a': bytes(700), 'b': bytes(700)})
    (tmp_path / 'x.tar').write_bytes(data[: 2 * 3 * 512])
    assert granular.copy_to_local(tmp_path / 'x.tar', local / 'x').files == 2
    assert "x.tar: has no end marker: it may have been truncated after 'b'" in caplog.text
    caplog.clear()
    (tmp_path / 'y.tar').write_bytes(data)
    assert granular.copy_to_local(tmp_path / 'y.tar', local / 'y').files == 2
    assert not caplog.text


def test_encrypted_and_unknown_archives_are_unsupported(tmp_path, local):
    data = bytearray(zipped({'x': b'y'}))
    for flag in (data.index(b'PK\x03\x04') + 6, data.index(b'PK\x01\x02') + 8):
        data[flag] |= 1
    (tmp_path / 'x.zip').write_bytes(data)
    with pytest.raises(UnsupportedError, match='encrypted'):
        granular.copy_to_local(tmp_path, local, 'x')
    data = bytearray(zipped({'x': b'y'}))
    for method in (data.index(b'PK\x03\x04') + 8, data.index(b'PK\x01\x02') + 10):
        data[method] = 97
    (tmp_path / 'y.zip').write_bytes(data)
    with pytest.raises(UnsupportedError, match='compression'):
        granular.copy_to_local(tmp_path, local, 'y')


def test_archive_larger_than_the_disk_is_refused(tmp_path, local):
    """An archive may declare more bytes than the disk has."""
    sparse = tarfile.TarInfo('zeros')
    sparse.size = 1 << 50
    (tmp_path / 'x.tar').write_bytes(sparse.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(StoreError, match="the disk is full: .*x.tar has 'zeros' of 1125899906842624 bytes"):
        granular.copy_to_local(tmp_path, local, 'x')
    (tmp_path / 'y.tgz').write_bytes(tarred({'a': bytes(1 << 20)}, 'w:gz'))
    (tmp_path / 'read-only').mkdir()
    program = (
        'import resource, sys, granular\n'
        'resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n'
        'try:\n    granular.copy_to_local(sys.argv[1], sys.argv[2])\n'
        'except granular.errors.StoreError as error:\n    print(error)\n'
    )
    command = [sys.executable, '-c', program, str(tmp_path / 'y.tgz'), str(local / 'y')]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 'the file is larger than its file system or the process allows' in done.stdout
    assert done.stderr == ''
    assert granular.copy_to_local(tmp_path / 'y.tgz', local / 'y').was_deleted
    with pytest.raises((AccessDeniedError, NotFoundError, StoreError)):
        granular.copy_to_local(tmp_path / 'y.tgz', '/proc/nowhere/y')


PROGRAM = """
import sys, granular
print('ready', flush=True)
sys.stdin.readline()
def progress(size):
    print('some', flush=True)
    sys.stdin.readline()
done = granular.copy_to_local(sys.argv[1], sys.argv[2], progress=progress)
print(done.was_copied, done.was_deleted, done.files, flush=True)
"""


def start(source, target):
    command = [sys.executable, '-c', PROGRAM, str(source), str(target)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_concurrent_processes_copy_once_despite_a_kill(tmp_path, local):
    """One copies, the other waits and finds it complete. If the first is killed, the next one copies."""
    files = {f'{i:04}': os.urandom(20_000) for i in range(1000)}
    (tmp_path / 'x.tar').write_bytes(tarred(files))
    first, second, third = (start(tmp_path / 'x.tar', local / 'x') for _ in range(3))
    assert all(process.stdout.readline() == 'ready\n' for process in (first, second, third))
    first.stdin.write('\n')
    first.stdin.flush()
    assert first.stdout.readline() == 'some\n'
    for process in (second, third):
        process.stdin.write('\n')
        process.stdin.flush()
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    with concurrent.futures.ThreadPoolExecutor() as threads:  # at once, as each waits for its input to end
        outcomes = sorted(out.splitlines()[-1] for out, _ in threads.map(subprocess.Popen.communicate, (second, third)))
    assert outcomes == ['False False 0', 'True True 1000']
    assert contents(local / 'x') == files


@pytest.mark.parametrize('moment', ['it found the folder', 'it found the lock'])
def test_waiting_copy_goes_on_whenever_the_other_one_ends(tmp_path, local, monkeypatch, moment):
    """Another process ends, and removes its lock, just when this one found that, or the folder of it."""
    (tmp_path / 'file').write_bytes(b'content')
    lock_folder = local / '.copy.copying'
    lock_folder.mkdir(parents=True)
    held = os.open(lock_folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    module, name = (os, 'mkdir') if moment == 'it found the folder' else (fcntl, 'flock')
    call, ended = getattr(module, name), []

    def found(*args, **kwargs):
        try:
            return call(*args, **kwargs)
        except (FileExistsError, BlockingIOError):
            if not ended:
                ended.append(True)
                (local / 'copy').write_bytes(b'content')
                lock_folder.rmdir()
                os.close(held)
            raise

    monkeypatch.setattr(module, name, found)
    done = granular.copy_to_local(tmp_path / 'file', local / 'copy')
    assert ended
    assert not done.was_copied
    assert os.listdir(local) == ['copy']


async def test_cancelled_copy_leaves_no_thread(tmp_path, local):
    data = await asyncio.to_thread(tarred, {str(i): bytes(1 << 20) for i in range(40)})
    await asyncio.to_thread((tmp_path / 'x.tar').write_bytes, data)
    loop, seen = asyncio.get_running_loop(), []

    def progress(size):
        seen.append(size)
        if len(seen) == 2:
            loop.call_soon_threadsafe(task.cancel)

    task = asyncio.create_task(aio.copy_to_local(tmp_path / 'x.tar', local / 'x', progress=progress))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [thread for thread in threading.enumerate() if 'unpack' in thread.name]
    assert 1 < len(os.listdir(local / 'x')) < 41
    done = await asyncio.gather(*(aio.copy_to_local(tmp_path / 'x.tar', local / 'x') for _ in range(4)))
    assert sorted((one.was_copied, one.was_deleted) for one in done) == [(False, False)] * 3 + [(True, True)]
    assert len(os.listdir(local / 'x')) == 41


@pytest.mark.parametrize(('kind', 'archive'), [('zip', zipped), ('tar', tarred)])
def test_error_of_progress_is_raised_as_itself(tmp_path, local, kind, archive):
    (tmp_path / f'x.{kind}').write_bytes(archive({'a': b'1' * 1000}))

    def progress(size):
        raise LookupError('mine')

    with pytest.raises(LookupError, match='mine'):
        granular.copy_to_local(tmp_path / f'x.{kind}', local / 'x', progress=progress)


@pytest.mark.parametrize('store', ['memory', 'http'])
def test_archive_without_a_version_that_is_replaced_while_it_is_read_is_an_error(store, local):
    before, after = (tarred({str(i): byte * (1 << 20) for i in range(24)}) for byte in (b'1', b'2'))
    with FaultServer(files={'x.tar': before}) as server:
        memory, name = MemoryFileSystem(), f'/{uuid.uuid4().hex}/x.tar'
        server.etag, server.modified[''] = None, 'Sun, 06 Nov 1994 08:49:37 GMT'
        memory.pipe(name, before)

        def replace(size):
            server.files, server.modified[''] = {'x.tar': after}, 'Sun, 06 Nov 1994 08:49:38 GMT'
            memory.pipe(name, after)

        source = f'memory:/{name}' if store == 'memory' else f'{server.endpoint}/bucket/x.tar'
        with pytest.raises(ObjectChangedError):
            granular.copy_to_local(source, local / 'x', progress=replace)
        copy = granular.copy_to_local(source, local / 'x')
    assert copy.was_deleted
    assert {path.read_bytes()[:1] for path in (local / 'x').glob('[0-9]*')} == {b'2'}


def test_archive_replaced_while_it_is_read_is_an_error(tmp_path, local):
    archive = tmp_path / 'x.tar'
    archive.write_bytes(tarred({str(i): bytes(1 << 20) for i in range(24)}))

    def replace(size):
        other = tmp_path / 'other'
        other.write_bytes(tarred({'x': bytes(30 << 20)}))
        os.replace(other, archive)
        os.utime(archive, ns=(1, 1))
        granular.aio.stores.local.files.files.forget(str(archive))

    with pytest.raises(GranularError):
        granular.copy_to_local(archive, local / 'x', progress=replace)
