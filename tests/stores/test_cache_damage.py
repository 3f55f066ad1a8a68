"""Cache folders after a power cut: random damage costs time and never returns wrong bytes."""

import asyncio
import os
import pathlib
import random
import shutil

import msgpack
import pytest

import granular
from tests.support.faults import FaultServer
from tests.support.seams import read_many
from tests.support.tables import FULL_TABLES

KiB, PAGE = 1024, 4096
TABLE = 64 * KiB  # bytes of the table that have entries of these objects; behind them is a hole
NAMELESS = ('lock', 'flights')  # files whose bytes mean nothing
SIZES = (1, 700, 65_535, 65_536, 65_537, 200_000, 300_000, 131_072)
SPEC = {'x': 'int', 'data': 'bytes'}


def contents(seed):
    """Return objects whose keys and sizes are the same for every seed."""
    return {f'file-{i}': random.Random(f'{seed} {i}').randbytes(size) for i, size in enumerate(SIZES)}


def read_blocks(server, folder, keys=None):
    """Read the objects through a block cache in a folder, in reads of different lengths."""
    config = granular.IOConfig(cache_dir=str(folder), hedge=0)
    bucket = granular.Path('s3://bucket', config=config, endpoint_url=server.endpoint, anon=True)
    out = {}
    for key in keys or server.files:
        size = len(server.files[key])
        limits = sorted({0, size, *range(0, size, 50_000), *range(65_536, size, 65_536)})
        out[key] = b''.join((bucket / key).read_ranges(limits[:-1], limits[1:], version=server.etag))
    return out


def copy_cache(folder, target):
    """Copy a cache folder, without the hole in its table."""
    for file in sorted(folder.rglob('*')):
        path = target / file.relative_to(folder)
        if file.is_dir():
            path.mkdir(parents=True, exist_ok=True)
        elif file.name == 'table':
            with open(file, 'rb') as opened:
                path.write_bytes(opened.read(TABLE))
            os.truncate(path, file.stat().st_size)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, path)
    return target


def fill_cache(tmp_path, name, seed):
    """Return a cache folder after half of the objects were read, and after all of them."""
    with FaultServer(files=contents(seed)) as server:
        read_blocks(server, tmp_path / name, list(server.files)[:4])
        early = copy_cache(tmp_path / name, tmp_path / f'{name}-early')
        read_blocks(server, tmp_path / name)
    return early, copy_cache(tmp_path / name, tmp_path / f'{name}-late')


@pytest.fixture(scope='module')
def caches(tmp_path_factory):
    """Early and late folders of two caches of the same keys and versions."""
    tmp_path = tmp_path_factory.mktemp('caches')
    return [*fill_cache(tmp_path, 'one', 1), *fill_cache(tmp_path, 'two', 2)]


def files_of(folder):
    return sorted(file for file in folder.rglob('*') if file.is_file() and not file.is_symlink())


def body_of(file):
    with open(file, 'rb') as opened:
        return opened.read(TABLE if file.name == 'table' else 4 << 20)  # one that is damaged may be a large hole


def overwrite(file, body, size=None):
    """Overwrite a file in place."""
    size = file.stat().st_size if size is None else size
    with open(file, 'r+b') as opened:
        opened.write(body)
    os.truncate(file, size)


def pages_of(dice, file):
    count = max(-(-len(body_of(file)) // PAGE), 1)
    # Those at the beginning of the table are the interesting ones.
    return [PAGE * dice.randrange(min(count, 4) if file.name == 'table' else count) for _ in range(dice.randint(1, 3))]


def patch(file, at, piece):
    body = body_of(file)
    overwrite(file, body[:at] + piece + body[at + len(piece) :], max(file.stat().st_size, at + len(piece)))


def delete(dice, file, others):
    file.unlink()


def zero(dice, file, others):
    overwrite(file, bytes(len(body_of(file))))


def zero_pages(dice, file, others):
    for at in pages_of(dice, file):
        patch(file, at, bytes(min(PAGE, max(len(body_of(file)) - at, 0))))


def truncate(dice, file, others):
    os.truncate(file, dice.randrange(len(body_of(file)) + 1))


def flip(dice, file, others):
    if body := bytearray(body_of(file)):
        for _ in range(dice.randint(1, 8)):
            near = dice.random() < 0.5
            body[dice.randrange(min(len(body), 4 * PAGE) if near else len(body))] ^= 1 << dice.randrange(8)
        overwrite(file, bytes(body))


def swap(dice, file, others):
    other = dice.choice([other for other in files_of(file.parent) if other.parent == file.parent])
    spare = file.with_name('spare')
    file.rename(spare)
    if other != file:
        other.rename(file)
    spare.rename(other)


def swap_pages(dice, file, others):
    left, right = (pages_of(dice, file) * 2)[:2]
    body = body_of(file)
    patch(file, left, body[right : right + PAGE])
    patch(file, right, body[left : left + PAGE])


def restore_old(dice, file, others):
    """Restore a file, or pages of it, from an earlier folder or from another cache."""
    other = dice.choice(others)
    siblings = [item for item in files_of(other) if item.parent.name == file.parent.name]
    siblings = [item for item in siblings if item.name not in NAMELESS]
    same = [item for item in siblings if item.name == file.name]
    source = dice.choice(same if same and dice.random() < 0.7 else siblings or [file])
    body = body_of(source)
    if dice.random() < 0.5:
        overwrite(file, body, source.stat().st_size)
    else:
        for at in pages_of(dice, file):
            patch(file, at, body[at : at + PAGE])


def hostile_words(dice, file, others):
    for _ in range(dice.randint(1, 8)):
        word = dice.choice([0, 1, 512, 1 << 24, (1 << 64) - 1, 1 << 63, dice.getrandbits(64), dice.getrandbits(28)])
        patch(file, 8 * dice.randrange(4 * PAGE // 8), word.to_bytes(8, 'little'))


def hostile_record(dice, file, others):
    number = dice.choice([0, -1, 1 << 40, (1 << 63) - 1, 514, 512, 1 << 31])
    rows = [msgpack.packb(value) for value in ((bytes(32), number, 514, ''), (1,), None, {'a': [[]]}, [number] * 4)]
    try:
        digest, size, base, url = msgpack.unpackb(body_of(file))
        rows += [msgpack.packb((digest, size, number, url)), msgpack.packb((digest, number, base, url))] * 4
        rows.append(msgpack.packb((digest, size, base + 2 * dice.randint(-9, 9), url)))
    except (ValueError, TypeError):
        pass
    overwrite(file, (row := dice.choice(rows)), len(row))


def link(dice, file, others):
    file.unlink()
    file.symlink_to(dice.choice([dice.choice(files_of(others[0])), pathlib.Path('/dev/zero'), file]))


def folder_instead(dice, file, others):
    file.unlink()
    file.mkdir()


def fifo(dice, file, others):
    file.unlink()
    os.mkfifo(file)


DAMAGES = (delete, zero, zero_pages, truncate, flip, swap, swap_pages, restore_old, hostile_words, hostile_record)
NODES = (link, folder_instead, fifo)  # which no power cut leaves, and of which some are refused


def files_by_folder(folder):
    """Return the files of a cache, grouped by folder."""
    files = [file for file in files_of(folder) if file.name not in NAMELESS]
    return [[file for file in files if file.parent == parent] for parent in {file.parent for file in files}]


@pytest.mark.parametrize('seed', range(24 if FULL_TABLES else 6))
def test_damaged_block_cache_never_returns_wrong_bytes(caches, tmp_path, seed):
    dice = random.Random(seed)
    with FaultServer(files=contents(1)) as server:
        # The identity of the server is part of that of objects: so the folder is filled anew, once for these.
        folder = tmp_path / 'cache'
        read_blocks(server, folder, list(server.files)[:4])
        early = copy_cache(folder, tmp_path / 'early')
        assert read_blocks(server, folder) == server.files
        late = copy_cache(folder, tmp_path / 'late')
        for i in range(8):
            target = copy_cache(dice.choice([early, late]), tmp_path / f'damaged-{i}')
            done = []
            for _ in range(dice.randint(1, 4)):
                if files := dice.choice(files_by_folder(target) or [[]]):
                    file, damage = dice.choice(files), dice.choice(DAMAGES)
                    done.append((damage.__name__, f'{file.relative_to(target)}'))
                    damage(dice, file, [early, *caches])
            for _ in range(2):  # the second time from what the first has mended
                assert read_blocks(server, target) == server.files, done
            assert sum(file.stat().st_blocks * 512 for file in files_of(target)) < 8 << 20, done


@pytest.mark.parametrize('name', ['table', 'objects', 'packs'])
@pytest.mark.parametrize('node', NODES)
def test_other_file_types_in_the_cache_are_survived(caches, tmp_path, node, name, caplog):
    with FaultServer(files=contents(1)) as server:
        folder = tmp_path / 'cache'
        read_blocks(server, folder)
        target = copy_cache(folder, tmp_path / 'damaged')
        (damaged, *_) = (file for file in files_of(target) if name in (file.name, file.parent.name))
        node(random.Random(1), damaged, caches)
        if name == 'table' and node is not folder_instead:
            with pytest.raises(granular.errors.AccessDeniedError, match='table'):
                read_blocks(server, target)
        else:
            assert read_blocks(server, target) == server.files


@pytest.mark.parametrize('cut', ['deleted', 'zeroed', 'first page unwritten', 'records of another area'])
def test_unwritten_tables_are_detected(tmp_path, cut):
    with FaultServer(files=contents(1)) as server:
        folder, target, keys = tmp_path / 'cache', tmp_path / 'cut', list(server.files)
        read_blocks(server, folder, keys[::2])
        copy_cache(folder, target)
        (table,) = target.glob('*/table')
        if cut == 'deleted':
            table.unlink()
        elif cut == 'zeroed':
            zero(None, table, None)
        elif cut == 'first page unwritten':
            patch(table, 0, bytes(PAGE))
        else:
            records = sorted(target.glob('*/objects/*'))
            rows = [msgpack.unpackb(record.read_bytes()) for record in records]
            for record, row, other in zip(records, rows, rows[1:] + rows[:1], strict=True):
                record.write_bytes(msgpack.packb((*row[:2], other[2], *row[3:])))
        # New objects come first, and take the room in the table that was that of others.
        assert read_blocks(server, target, keys[1::2] + keys[::2]) == server.files
        assert read_blocks(server, target, keys) == server.files


def test_objects_with_the_same_table_slot_are_distinguished(tmp_path):
    files = {name: bytes([i]) * 300_000 for i, name in enumerate('ab')}
    with FaultServer(files=files) as server:
        config = granular.IOConfig(cache_dir=str(tmp_path), hedge=0)
        bucket = granular.aio.Path('s3://bucket', config=config, endpoint_url=server.endpoint, anon=True)

        async def last(name):
            return (await (bucket / name).read_ranges([290_000], [300_000], version='"one"'))[0]

        async def main():
            await (bucket / 'a').read_ranges([0], [1], version='"one"')
            (table,) = tmp_path.glob('*/table')
            patch(table, 0, bytes(8))  # so that the next object has the room of this one
            await (bucket / 'b').read_ranges([0], [1], version='"one"')
            # In one read, and in two at once.
            both = await read_many(bucket, files, 100_000, 200_000, '"one"')
            assert both == [files[name][100_000:200_000] for name in files]
            assert await asyncio.gather(last('a'), last('b')) == [files[name][290_000:] for name in files]

        asyncio.run(main())


# --- the index cache


def write_datasets(folder):
    files, points = {}, {}
    for i in range(3):
        with granular.DatasetWriter(folder / f'ds-{i}', SPEC, granular.encoders) as writer:
            points[f'ds-{i}'] = [{'x': 10 * i + j, 'data': bytes([i]) * 100} for j in range(50)]
            for point in points[f'ds-{i}']:
                writer.append(point)
        files |= {f'ds-{i}/{file.name}': file.read_bytes() for file in (folder / f'ds-{i}').iterdir()}
    return files, points


def read_datasets(server, folder, names):
    config = granular.IOConfig(index_cache=str(folder), hedge=0)
    bucket = granular.Path('s3://bucket', config=config, endpoint_url=server.endpoint, anon=True)
    out = {}
    for name in names:
        with granular.DatasetReader(bucket / name, granular.decoders) as reader:
            out[name] = list(reader)
    return out


@pytest.mark.parametrize('seed', range(6 if FULL_TABLES else 3))
def test_damaged_index_cache_never_returns_wrong_datapoints(tmp_path, seed):
    dice = random.Random(seed)
    files, points = write_datasets(tmp_path / 'local')
    with FaultServer(files=files) as server:
        assert read_datasets(server, tmp_path / 'cache', points) == points
        for i in range(8):
            target = copy_cache(tmp_path / 'cache', tmp_path / f'damaged-{i}')
            done = []
            for _ in range(dice.randint(1, 3)):
                if files := files_of(target):
                    file, damage = dice.choice(files), dice.choice((*DAMAGES[:8], *NODES))
                    done.append((damage.__name__, file.name))
                    damage(dice, file, [tmp_path / 'cache'])
            for _ in range(2):
                assert read_datasets(server, target, points) == points, done
