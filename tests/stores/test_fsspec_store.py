"""Stores that are used through threads: file systems of fsspec, and path objects of other libraries."""

import asyncio
import contextlib
import gc
import threading
import time
import weakref

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

import granular
from granular.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    NotFoundError,
    ObjectChangedError,
    StoreError,
    UnsupportedError,
)


@pytest.fixture(params=['memory', 'elements'])
def folder(request, tmp_path):
    if request.param == 'memory':
        return granular.aio.Path(f'memory://{tmp_path.name}-{time.time_ns()}')
    import elements

    return granular.aio.Path(elements.Path(tmp_path))


async def write(path, content, new):
    writer = await path.store.open_writer(path.key, new)
    await writer.write(content)
    await writer.close()


async def test_a_new_file_does_not_replace_an_existing_one(folder):
    await write(folder / 'x', b'first', True)
    with pytest.raises(AlreadyExistsError, match='exists already'):
        await write(folder / 'x', b'second', True)
    assert await (folder / 'x').read_bytes() == b'first'
    await write(folder / 'x', b'third', False)
    assert await (folder / 'x').read_bytes() == b'third'


async def test_a_new_file_is_created_when_its_writer_is_opened():
    folder = granular.aio.Path(f'memory://created-{time.time_ns()}')
    writer = await folder.store.open_writer((folder / 'x').key, True)
    with pytest.raises(AlreadyExistsError):
        await write(folder / 'x', b'late', True)
    await writer.write(b'early')
    await writer.close()
    assert await (folder / 'x').read_bytes() == b'early'


async def test_a_new_file_that_is_given_up_is_removed(folder):
    writer = await folder.store.open_writer((folder / 'x').key, True)
    await writer.write(bytes(2 << 20))
    await writer.abort()
    assert not await (folder / 'x').exists()
    await write(folder / 'x', b'new', True)
    assert await (folder / 'x').read_bytes() == b'new'


class UploadedFile(AbstractBufferedFile):
    """A file that appears when it is closed, also by the garbage collector."""

    def _initiate_upload(self):
        self.parts = []

    def _upload_chunk(self, final=False):
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.stop_at('close')
            with MemoryFileSystem._open(self.fs, self.path, 'wb') as file:
                file.write(b''.join(self.parts))

    def write(self, data):
        self.fs.stop_at('write')
        return super().write(data)


class StoppedFileSystem(MemoryFileSystem):
    """A file system of which one operation begins, and goes on when it is told to."""

    cachable = False
    stopped = ''
    opened = None

    def stop_at(self, operation):
        if operation == self.stopped:
            self.begun.set()
            self.go_on.wait(30)

    def _open(self, path, mode='rb', **options):
        if mode == 'rb':
            return super()._open(path, mode, **options)
        self.stop_at('open')
        file = UploadedFile(self, path, mode)
        self.opened = weakref.ref(file)
        return file

    def cp_file(self, path1, path2, **options):
        self.stop_at('copy')
        super().cp_file(path1, path2, **options)


async def cancelled(coro, fs, operation):
    """Cancel a coroutine during an operation of its file system, which goes on a moment later."""
    fs.stopped, fs.begun, fs.go_on, fs.opened = operation, threading.Event(), threading.Event(), None
    task = asyncio.create_task(coro)
    await asyncio.to_thread(fs.begun.wait, 30)
    task.cancel()
    asyncio.get_running_loop().call_later(0.05, fs.go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    fs.stopped = ''


@pytest.mark.parametrize('new', [False, True])
@pytest.mark.parametrize('operation', ['open', 'write', 'close'])
async def test_a_cancelled_write_publishes_no_part_of_its_bytes(operation, new):
    fs = StoppedFileSystem()
    path = granular.aio.Path(f'memory://cancelled-{time.time_ns()}/x', fs=fs)
    if not new:
        await path.write_bytes(b'old')

    async def write_parts():
        writer = await path.store.open_writer(path.key, new)
        try:
            await writer.write(bytes(2 << 20))
            await writer.write(bytes(1 << 20))
            await writer.close()
        except BaseException:
            await writer.abort()
            raise

    await cancelled(write_parts(), fs, operation)
    while fs.opened is None or ((file := fs.opened()) is not None and not file.closed):
        file = None
        gc.collect()  # closes the file, unless it was discarded
        await asyncio.sleep(0.01)
    content = None
    with contextlib.suppress(NotFoundError):
        content = await path.read_bytes()
    assert content in ((None,) if new else (b'old', bytes(3 << 20)))


async def test_a_cancelled_copy_does_not_replace_what_is_written_afterwards():
    fs = StoppedFileSystem()
    folder = granular.aio.Path(f'memory://cancelled-{time.time_ns()}', fs=fs)
    await (folder / 'x').write_bytes(b'copied')
    await cancelled((folder / 'x').copy(folder / 'y'), fs, 'copy')
    await (folder / 'y').write_bytes(b'written')
    await asyncio.to_thread(fs.go_on.wait, 30)
    assert await (folder / 'y').read_bytes() == b'written'


async def test_files_are_copied_where_the_file_system_cannot():
    class WithoutCopies(MemoryFileSystem):
        cp_file = AbstractFileSystem.cp_file

    folder = granular.aio.Path(f'memory://streamed-{time.time_ns()}', fs=WithoutCopies())
    await (folder / 'x').write_bytes(b'content')
    await (folder / 'x').copy(folder / 'y')
    assert await (folder / 'y').read_bytes() == b'content'


async def test_operations_that_a_file_system_lacks_are_unsupported():
    class ReadOnly(MemoryFileSystem):
        rm_file = _rm = AbstractFileSystem._rm

        def _open(self, path, mode='rb', **options):
            if mode != 'rb':
                raise NotImplementedError
            return super()._open(path, mode, **options)

    file = granular.aio.Path(f'memory://read-only-{time.time_ns()}/x', fs=ReadOnly())
    MemoryFileSystem().pipe_file(file.key, b'content')
    for operation in (file.unlink(), file.write_bytes(b'')):
        with pytest.raises(UnsupportedError, match='/x: its file system does not support this operation'):
            await operation
    assert await file.read_bytes() == b'content'


async def test_a_failed_deletion_names_its_file():
    class Guarded(MemoryFileSystem):
        def rm_file(self, path):
            if path.endswith('y'):
                raise PermissionError
            super().rm_file(path)

    folder = granular.aio.Path(f'memory://guarded-{time.time_ns()}', fs=Guarded())
    for name in 'xy':
        await (folder / name).write_bytes(b'')
    with pytest.raises(AccessDeniedError) as caught:
        await folder.store.delete([(folder / name).key for name in ('x', 'missing', 'y', 'z')])
    assert caught.value.path == f'{folder}/y'


async def test_a_file_of_unknown_size_is_an_error():
    class Unmeasured(MemoryFileSystem):
        def info(self, path, **options):
            return super().info(path) | {'size': None}

    path = granular.aio.Path(f'memory://unmeasured-{time.time_ns()}/x', fs=Unmeasured())
    MemoryFileSystem().pipe_file(path.key, b'x')
    for operation in (path.stat, path.open, path.read_bytes):
        with pytest.raises(StoreError, match='/x: its size is unknown') as caught:
            await operation()
        assert caught.value.path == f'{path}'


class ListingOnce(MemoryFileSystem):
    """A file system that keeps its listings, as those of FTP and GitHub do."""

    def ls(self, path, detail=True, **options):
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        return self.dircache[path] if detail else [info['name'] for info in self.dircache[path]]

    def info(self, path, **options):
        path = self._strip_protocol(path)
        known = [info for info in self.dircache.get(self._parent(path), ()) if info['name'] == path]
        return known[0] if known else super().info(path, **options)

    def invalidate_cache(self, path=None):
        self.dircache.pop(self._strip_protocol(path), None)


async def test_files_that_another_program_writes_are_listed():
    folder = granular.aio.Path(f'memory://listed-{time.time_ns()}', fs=ListingOnce())
    for content in (b'1', b'22'):
        MemoryFileSystem().pipe_file((folder / f'x{len(content)}').key, content)
        MemoryFileSystem().pipe_file((folder / 'y').key, content)
        assert (await (folder / 'y').stat()).size == len(content)
        found = {entry.name: entry.size async for entry in folder.store.scan(folder.key)}
        assert found == {'x1': 1, 'y': 1} if len(content) == 1 else {'x1': 1, 'x2': 2, 'y': 2}


async def test_ranges_of_a_file_that_is_replaced_between_them_are_not_mixed():
    class Replaced(MemoryFileSystem):
        lock, replaced, first, calls = threading.Lock(), threading.Event(), None, 0

        def info(self, path, **options):
            with self.lock:
                self.first = self.first or threading.get_ident()
            if self.first != threading.get_ident():
                self.replaced.wait(30)
                return super().info(path, **options)
            info = super().info(path, **options)
            self.calls += 1
            if self.calls == 2:  # the first range is read
                self.pipe_file(path, b'2' * 300_000)
                self.replaced.set()
            return info

    path = granular.aio.Path(f'memory://replaced-{time.time_ns()}/x', fs=Replaced())
    MemoryFileSystem().pipe_file(path.key, b'1' * 300_000)
    with pytest.raises(ObjectChangedError, match='it was replaced while it was being read') as caught:
        await path.read_ranges([0, 200_000], [10, 200_010])
    assert caught.value.path == f'{path}'


@pytest.mark.parametrize('name', ['x*', 'x[ab]', '?', '{q,r}'])
async def test_deleting_a_folder_takes_its_name_literally(name):
    root = granular.aio.Path(f'memory://literal-{time.time_ns()}')
    others = {'a*/f', 'q/f', 'r/f', 'xa/f', 'xb/f', 'xfile'}
    for other in {*others, f'{name}/f', f'{name}/g/{name}'}:
        await (root / other).write_bytes(b'')
    await (root / name).rmtree()
    assert {str(path.relative_to(root)) async for path in root.rglob('*') if await path.is_file()} == others
    assert not await (root / name).exists()
    with pytest.raises(NotFoundError):
        await (root / name).rmtree()


async def test_entries_are_sorted_off_the_event_loop(monkeypatch):
    """Sorting the entries of a large folder would block the loop."""
    folder = granular.aio.Path(f'memory://sorted-{time.time_ns()}')
    threads = set()

    class Listed:
        def __init__(self, key):
            self._key = key

        @property
        def key(self):
            threads.add(threading.get_ident())
            return self._key

    monkeypatch.setattr(folder.store, 'list_now', lambda key: [Listed('b'), Listed('a')])
    assert [entry._key async for entry in folder.store.scan(folder.key)] == ['a', 'b']
    assert threads
    assert threading.get_ident() not in threads
