"""Stores that are used through threads: file systems of fsspec, and path objects of other libraries."""

import threading
import time

import pytest

import granular
from granular.errors import AlreadyExistsError, NotFoundError


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
