"""The targets of fuzzing: functions that read bytes as a reader would, and fail if the answer is not a right one.

A right answer is the value that a plain reading of docs/format.md gives, or an error of granular's tree. The same
functions serve hypothesis (tests/robustness/test_hostile.py) and atheris (``python -m tests.robustness.fuzz``).
"""

import functools
import json
import os
import struct
import tempfile
import zlib
from collections.abc import Callable

import msgpack
import numpy as np

import granular
from granular import aio
from granular.aio.bags import index_cache as snapshots
from granular.aio.datasets.index import DatasetIndex
from granular.aio.http import messages as http1
from granular.aio.http.messages import ProtocolError
from granular.aio.http.reply import Reply
from granular.aio.runtime.portal import run
from granular.errors import GranularError
from granular.formats import checksums, dataset_index, layout
from granular.grain.experimental import TFRecordIterDataset
from tests.support import examples

Target = Callable[[bytes], None]
TYPES = {'a': 'int', 'b': 'utf8[]', 'c': 'bytes'}


@functools.cache
def _kept() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix='fuzz-', dir='/dev/shm' if os.path.isdir('/dev/shm') else None)


def folder() -> str:
    """A place for files, in memory where there is one."""
    return _kept().name


def write(name: str, data: bytes) -> str:
    path = os.path.join(folder(), name)
    with open(path, 'wb') as file:
        file.write(data)
    return path


def parts(data: bytes, count: int) -> list[bytes]:
    """Bytes divided into several, each after its length in two bytes."""
    out = []
    for _ in range(count - 1):
        size = int.from_bytes(data[:2], 'little')
        out.append(data[2 : 2 + size])
        data = data[2 + size :]
    return [*out, data]


def join(*pieces: bytes) -> bytes:
    """Join pieces as ``parts`` divides them."""
    return b''.join(len(piece).to_bytes(2, 'little') + piece for piece in pieces[:-1]) + pieces[-1]


# --- bags


def single(data: bytes) -> list[bytes] | None:
    """The records of a bag of version 1 or 2, as docs/format.md has it; None if it is none."""
    if not data:
        return []
    if len(data) < 8:
        return None
    start = int.from_bytes(data[-8:], 'little')
    if start > len(data) - 8 or (len(data) - start) % 8:
        return None
    limits = [number for (number,) in struct.iter_unpack('<Q', data[start:])]
    return between(data[:start], limits if limits[0] == 0 else [0, *limits])


def double(data: bytes, index: bytes) -> list[bytes] | None:
    """The records of a bag of version 3; None if it is none."""
    return between(data, [0, *(n for (n,) in struct.iter_unpack('<Q', index[: len(index) // 8 * 8]))])


def between(data: bytes, limits: list[int]) -> list[bytes] | None:
    if limits != sorted(limits) or limits[-1] > len(data):
        return None
    return [data[left:right] for left, right in zip(limits, limits[1:], strict=False)]


def records_of(*args: object, **options: object) -> list[bytes] | None:
    async def read() -> list[bytes]:
        async with aio.BagReader(*args, **options) as reader:  # type: ignore[arg-type]
            found = await reader.fetch(range(len(reader)))
            assert found == [await reader.get(i) for i in range(len(reader))]
            assert reader.size >= sum(map(len, found))
            return found

    try:
        return run(read())
    except GranularError:
        return None


def bag(data: bytes) -> None:
    expected = single(data)
    assert records_of(data) == expected
    path = write('x.bag', data)
    assert records_of(path) == expected
    assert records_of(path, cache_data=True) == expected
    # Without the table, only the limits that are used are looked at.
    found = records_of(path, cache_index=False)
    assert expected is None or found == expected


def bag3(data: bytes) -> None:
    index, data = parts(data, 2)
    expected = double(data, index)
    assert records_of(data, index=index) == expected
    path, beside = write('y.bag', data), write('y.idx', index)
    assert records_of(path, index=beside) == records_of(path) == expected
    found = records_of(path, index=beside, cache_index=False)
    assert expected is None or found == expected


# --- datasets


def spec(data: bytes) -> None:
    try:
        found = layout.parse_spec(data, 'spec.json')
    except GranularError:
        return
    assert found == json.loads(data)
    for key, kind in found.items():
        path = os.path.normpath(os.path.join('/root/dataset', f'{key}.bag'))
        assert os.path.dirname(path) == '/root/dataset'
        assert '\0' not in key and '\\' not in key
        assert isinstance(kind, str)


def shards(data: bytes) -> None:
    name = data.decode(errors='replace')
    number = layout.shard_number(name)
    assert number is None or layout.shard_name(number) == name


def refs(data: bytes) -> None:
    try:
        first, count = layout.unpack_refs([data], TYPES, 'refs.bag')
    except GranularError:
        return
    assert first.shape == count.shape == (1, 3)
    a, b, c = msgpack.unpackb(data)
    assert first.tolist() == [[a, (tuple(b) or (0, 0))[0], c]]
    assert count.tolist() == [[1, (tuple(b) or (0, 0))[1], 1]]


def dataset(data: bytes) -> None:
    """A whole folder in the refs layout."""
    root = os.path.join(folder(), 'dataset')
    os.makedirs(root, exist_ok=True)
    content, references, *bags = parts(data, 5)
    write('dataset/spec.json', content)
    write('dataset/refs.bag', references)
    for key, piece in zip(TYPES, bags, strict=True):
        write(f'dataset/{key}.bag', piece)
    for options in ({}, {'cache_keys': ('refs',)}, {'cache_index': False}):
        try:
            with granular.DatasetReader(root, granular.decoders, **options) as reader:
                points = reader.fetch(range(len(reader)))
                assert points == [reader[i] for i in range(len(reader))]
                for i in range(len(reader)):
                    reader.available(i)
        except GranularError:
            pass


def columns(data: bytes) -> None:
    """A whole folder in the columns layout."""
    root = os.path.join(folder(), 'columns')
    os.makedirs(root, exist_ok=True)
    content, *files = parts(data, 5)
    write('columns/spec.json', content)
    for name, piece in zip(('a.bag', 'a.idx', 'c.bag', 'c.idx'), files, strict=True):
        write(f'columns/{name}', piece)
    try:
        with granular.DatasetReader(root, None) as reader:
            if reader.layout == 'columns':
                assert reader.fetch(range(len(reader))) == [reader[i] for i in range(len(reader))]
    except GranularError:
        pass
    except RuntimeWarning:  # columns of different length: the tests make errors of warnings
        pass


# --- index caches and block caches


def sums(data: bytes) -> None:
    count, data = data[0] if data else 0, data[1:]
    try:
        found = checksums.load(data, count, 'x.crc')
    except GranularError:
        assert len(data) < 4 * count
        return
    assert found.tolist() == [number for (number,) in struct.iter_unpack('<I', data[: 4 * count])]


def snapshot(data: bytes) -> None:
    magic = snapshots.MAGIC
    for content in (data, magic + data, magic + zlib.crc32(data).to_bytes(8, 'little') + data):
        found = snapshots.load_tables(write('x.index', content), 's3://bucket/data', snapshots.folders_of)
        for state in (found or {}).values():
            assert type(state.spec.data) is bytes
            for known in state.bags.values():
                limits = known.limits.tolist()
                assert limits[0] == 0 and limits == sorted(limits) and limits[-1] <= known.datasize <= known.size


# --- indices of sharded datasets


@functools.cache
def _indexed() -> tuple[str, list[dict[str, object]], bytes]:
    """A sharded dataset with an index, its datapoints, and the index, which the targets overwrite."""
    root = os.path.join(folder(), 'indexed')
    points: list[dict[str, object]] = [{'a': i, 'b': ['x'] * (i % 3), 'c': bytes(i * 7)} for i in range(200)]
    with granular.ShardedDatasetWriter(root, TYPES, granular.encoders, shardlen=150, index=True) as writer:
        for datapoint in points:
            writer.append(datapoint)
    return root, points, _read(f'indexed/000000/{dataset_index.NAME}')


def index(data: bytes) -> None:
    """An index file beside shards: the datapoints are right, or there is an error."""
    root, points, _ = _indexed()
    write(f'indexed/000000/{dataset_index.NAME}', data)
    try:
        with granular.ShardedDatasetReader(root, granular.decoders, cache_index=len(data) % 2 == 0) as reader:
            assert reader.fetch(range(len(reader))) == points
            assert reader[-1] == points[-1]
    except GranularError:
        pass


def signed_index(data: bytes) -> None:
    """An index file whose checksums are right: what is read of it in several ways is the same, or there is an error."""
    pages, content = parts(data, 2)
    pages = pages[: len(pages) // 8 * 8]
    start = len(dataset_index.MAGIC) + len(pages)
    file = dataset_index.MAGIC + pages
    try:
        directory = dataset_index.parse_directory(content, start, 'it')
    except GranularError:
        return
    directory.pages = directory.pages.copy()
    for row in directory.pages:
        row['checksum'] = checksums.crc32c(file[row['offset'] : row['offset'] + 8 * row['words']])
    assert directory.rows.shape == (len(directory.rows), len(directory.bags))
    content = dataset_index.dump_directory(directory)
    path = write('signed', file + content + dataset_index.dump_footer(content, start))

    async def read(whole: bool) -> tuple[list[int], list[int]] | None:
        try:
            tables = await DatasetIndex.read_file(aio.Path(path), whole)
            counts = directory.counts().ravel()
            numbers = np.flatnonzero(counts)
            ends = counts[numbers] - 1
            lefts, rights = await tables.read(np.repeat(numbers, 2), np.stack([0 * ends, ends], 1).ravel())
        except GranularError:
            return None
        if whole:
            last = zip(numbers.tolist(), ends.tolist(), strict=True)
            pairs = [tables.read_one(n, i) for n, end in last for i in (0, end)]
            wrapped = np.array([[n % 2**64 for n in pair] for pair in pairs], np.uint64).astype(np.int64)
            assert wrapped.reshape(-1, 2).T.tolist() == [lefts.tolist(), rights.tolist()]
        return lefts.tolist(), rights.tolist()

    whole, paged = run(read(True)), run(read(False))
    assert whole is None or whole == paged


# --- TFRecord files


def framed(data: bytes) -> list[bytes] | None:
    """The records of a TFRecord file; None if it is none."""
    found, at = [], 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], 'little')
        found.append(data[at + 12 : at + 12 + size])
        if at + size + 16 > len(data) or examples.frame(found[-1]) != data[at : at + size + 16]:
            return None
        at += size + 16
    return found


def sealed(data: bytes) -> bytes:
    """The same bytes with right checksums, as far as they are records."""
    out, at = bytearray(data), 0
    while at + 12 <= len(out):
        size = int.from_bytes(out[at : at + 8], 'little')
        out[at + 8 : at + 12] = examples.masked(bytes(out[at : at + 8]))
        if at + size + 16 <= len(out):
            out[at + size + 12 : at + size + 16] = examples.masked(bytes(out[at + 12 : at + size + 12]))
        at += size + 16
    return bytes(out)


def tfrecord(data: bytes) -> None:
    for content in (data, sealed(data)):
        expected = framed(content)
        path = write('x.tfrecord', content)
        for read in (_at_random, _in_order):
            assert read(path) == expected or content[:1] in (b'\x1f', b'\x78')
        write('x.tfrecord', zlib.compress(content, 1))
        assert _in_order(path) == expected
    _in_order(write('x.tfrecord', b'\x1f\x8b\x08' + data))


def _at_random(path: str) -> list[bytes] | None:
    try:
        with granular.TFRecordDataSource(path) as source:
            return source.fetch(range(len(source)))
    except GranularError:
        return None


def _in_order(path: str) -> list[bytes] | None:
    try:
        return list(TFRecordIterDataset(path))
    except GranularError:
        return None


def example(data: bytes) -> None:
    try:
        found = granular.formats.decode_example(data)
    except GranularError:
        return
    expected = examples.decode(data)
    assert expected is not None and found.keys() == expected.keys()
    for name, value in found.items():
        if value is None:
            assert expected[name] is None
            continue
        kind, values = expected[name]
        if kind == 'bytes_list':
            assert value == values
        else:
            assert value.tobytes() == np.array(values, 'f4' if kind == 'float_list' else 'i8').tobytes()


# --- values


def decoder(kind: str, data: bytes) -> None:
    try:
        value = granular.decoders[kind](data)
    except GranularError:
        return
    if kind in ('bytes', 'utf8'):
        assert (value if kind == 'bytes' else value.encode()) == data
    elif kind in ('int', 'i64', 'u64'):
        assert value == int.from_bytes(data, 'little', signed=kind != 'u64')
    elif kind == 'array':
        dtype, shape, content = msgpack.unpackb(data)
        assert value.dtype == np.dtype(dtype) or not value.nbytes or not content
        assert list(value.shape) == shape
        assert not np.dtype(dtype).itemsize or value.tobytes() == content
        repr(value)
    elif kind in ('jpg', 'png'):
        assert value.dtype != object and value.ndim in (2, 3)
    elif kind in ('wav', 'flac'):
        assert value.samples.ndim == 2 and value.samples.size and value.rate > 0
    elif kind in ('mp4', 'webm'):
        assert value.dtype == np.uint8 and value.ndim == 4


# --- replies of servers


def http(data: bytes) -> None:
    head, body = parts(data, 2)
    try:
        found = http1.parse(head)
        assert 0 <= found.status <= 999
        assert found.length is None or found.length >= 0
    except ProtocolError:
        pass
    chunks = http1.Chunks()
    try:
        for at in range(0, len(body), 7):
            assert sum(map(len, chunks.feed(memoryview(body)[at : at + 7]))) <= len(body)
    except ProtocolError:
        pass


targets: dict[str, Target] = {
    **{fn.__name__: fn for fn in (bag, bag3, spec, shards, refs, dataset, columns, sums, snapshot, http)},
    **{fn.__name__: fn for fn in (index, signed_index, tfrecord, example)},
    **{kind: functools.partial(decoder, kind) for kind in granular.decoders},
}


# --- valid seeds


@functools.cache
def seeds() -> dict[str, list[bytes]]:
    """Of each target, some bytes that it reads."""
    records = [b'first', b'', b'third' * 3]
    ends = np.cumsum([len(record) for record in records])
    body = b''.join(records)
    out: dict[str, list[bytes]] = {
        'bag': [b'', bytes(8), body + layout.table_of(ends, 1), body + layout.table_of(ends, 2)],
        'bag3': [join(layout.table_of(ends, 3), body), join(b'', b'')],
        'spec': [layout.dump_spec(TYPES), b'{"../x": "int"}', b'{"/x": "int", "": "x"}'],
        'shards': [b'000000', b'000017', b'1000000', '٠٠٠٠٠٠'.encode()],
        'refs': [layout.pack_refs([3, [5, 2], 3]), layout.pack_refs([0, [], 2**40])],
        'sums': [b'\x02' + bytes(range(8))],
        'tfrecord': [b''.join(map(examples.frame, records)), examples.frame(b'')],
        'example': [examples.encode({'a': [1, -2, 300], 'b': [0.5], 'c': [b'x', b''], 'd': None}), b''],
        'http': [
            join(
                b'HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nETag: "x"',
                b'5;a=b\r\nhello\r\n0\r\nX: y\r\n\r\n',
            )
        ],
    }
    root = os.path.join(folder(), 'seed')
    with granular.DatasetWriter(root, TYPES, granular.encoders) as writer:
        for i in range(3):
            writer.append({'a': i, 'b': ['x'] * i, 'c': bytes(i)})
    out['dataset'] = [join(*(_read(f'seed/{name}') for name in ('spec.json', 'refs.bag', 'a.bag', 'b.bag', 'c.bag')))]
    root = os.path.join(folder(), 'seed3')
    with granular.DatasetWriter(root, {'a': 'int', 'c': 'bytes'}, granular.encoders, layout='columns') as writer:
        for i in range(3):
            writer.append({'a': i, 'c': bytes(i)})
    names = ('spec.json', 'a.bag', 'a.idx', 'c.bag', 'c.idx')
    out['columns'] = [join(*(_read(f'seed3/{name}') for name in names))]
    state = snapshots.BagState(2, 1000, 900, '"pin"', '', np.array([0, 5, 900]))
    spec = Reply(b'{}', 0, 2, '"pin"', 'Mon, 23 Nov 2026 10:00:00 GMT', 'Mon, 23 Nov 2026 11:00:00 GMT')
    path = os.path.join(folder(), 'x.index')
    snapshots.save_tables(
        path, 's3://bucket/data', *snapshots.rows_of({'': snapshots.FolderState(spec, {'a': state, 'b': state})})
    )
    _, _, content = _indexed()
    footer = dataset_index.parse_footer(content, len(content), 'it')
    out['index'] = [content]
    out['signed_index'] = [
        join(
            content[len(dataset_index.MAGIC) : footer.start],
            content[footer.start : -dataset_index.FOOTER],
        )
    ]
    out['snapshot'] = [_read('x.index')[snapshots.SUM :], _read('x.index')]
    values: dict[str, list[object]] = {
        'bytes': [b'abc'],
        'utf8': ['abc', 'grüße'],
        'int': [0, -5, 2**100],
        'i64': [-3],
        'u64': [2**63],
        'msgpack': [{'a': [1, 2.5, None, b'x'], 3: {}}],
        'array': [np.arange(6.0).reshape(2, 3), np.array(['a', 'bc']), np.array(0, 'M8[ns]'), np.zeros((0, 3), 'i2')],
        'tree': [{'a': [np.arange(3), 'x'], 'b': {'c': np.zeros((2, 2), 'f2')}}],
        'jpg': [np.zeros((4, 6, 3), np.uint8), np.arange(64, dtype=np.uint8).reshape(8, 8)],
        'png': [np.zeros((4, 6, 3), np.uint8), np.ones((3, 3, 4), np.uint8)],
        'wav': [(np.arange(40, dtype=np.int16).reshape(20, 2), 8000), (np.zeros(30, np.float32), 44100)],
        'flac': [(np.arange(400, dtype=np.int16).reshape(200, 2), 8000), (np.zeros(30, np.int32), 44100)],
        'mp4': [np.zeros((2, 16, 16, 3), np.uint8)],
        'webm': [np.zeros((2, 16, 16, 3), np.uint8)],
    }
    for kind, found in values.items():
        out[kind] = [granular.encoders[kind](value) for value in found]
    return out


def _read(name: str) -> bytes:
    with open(os.path.join(folder(), name), 'rb') as file:
        return file.read()
