"""Hostile data take time in proportion to their size: each of these would take many minutes if it were quadratic."""

import gzip

import pytest

import granular
from granular.formats import decode_example
from granular.grain.experimental import TFRecordIterDataset
from tests.stores.test_http_store import page
from tests.support.examples import frame
from tests.support.faults import FaultServer

pytestmark = pytest.mark.timeout(60)

LISTS = {'bytes': (1, b'\x0a\x00'), 'floats': (2, b'\x0a\x04\0\0\0\0'), 'integers': (3, b'\x08\x05')}


def message(number, body):
    """A field of protobuf with a message."""
    size, length = len(body), b''
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + body


@pytest.mark.parametrize(('kind', 'part'), [*((kind, 'list') for kind in LISTS), ('bytes', 'feature')])
def test_example_of_many_parts(kind, part):
    number, value = LISTS[kind]
    count = 400_000
    entry = message(2, message(number, value) * count) if part == 'list' else message(2, message(number, value)) * count
    features = decode_example(message(1, message(1, message(1, b'name') + entry)))
    assert {name: len(values) for name, values in features.items()} == {'name': count}


@pytest.mark.parametrize('name', ['empty', 'empty, padded', 'small'])
def test_compressed_file_of_many_members(tmp_path, name):
    record = frame(b'x' * 100)
    count = 300_000 if name == 'small' else 600_000
    parts = {'empty': [b''], 'empty, padded': [b''], 'small': [record[:60], record[60:]]}[name]
    padding = b'\0\0' if 'padded' in name else b''
    members = b''.join(gzip.compress(part) + padding for part in parts)
    count //= len(parts)
    (tmp_path / 'x').write_bytes(gzip.compress(record) + members * count + gzip.compress(record))
    read = sum(1 for _ in TFRecordIterDataset(tmp_path / 'x'))
    assert read == 2 + (count if name == 'small' else 0)


PAGES = (
    '<a ', '<a href="', '<', '<!--', '<!-->', '<!', '<![', '<![x', '<![CDATA[', '<?', '</', '</a', '<script>',
    '<a x="', "<a x='\"", '<a =', '<a/', '<a b =', '<a b', '<a href=&#', '&', '&#', '<a href="b" ', '<a href=b>',
    '<a href="?x">', '<a href="../">', '<svg><', '<title><a',
)  # fmt: skip


@pytest.mark.parametrize('part', PAGES)
def test_page_of_many_parts(part):
    body = f'<a href="a">{part * (1_000_000 // len(part))}'.encode()
    with FaultServer() as server:
        server.script.append(page(body=body))
        names = {path.name for path in granular.Path(f'{server.endpoint}/folder').iterdir()}
    assert names == {'a', 'b'} if part == '<a href=b>' else names == {'a'}


@pytest.mark.parametrize('pattern', ['*a' * 30 + 'b', '*a*?' * 20 + '[!a]*'])
def test_pattern_of_many_stars(pattern, tmp_path):
    (tmp_path / ('a' * 250)).touch()
    assert list(granular.Path(tmp_path).glob(pattern)) == []
