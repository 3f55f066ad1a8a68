"""Parquet files with encrypted columns: these are refused before pyarrow sees them, and the others are read."""

import base64
import functools
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption

import granular
from granular.errors import GranularError, UnsupportedError
from tests.view.serving import Served
from tests.view.test_server import ask

ROWS = 10
COLUMNS = ('id', 'secret', 'a.b', 'struct', 'list', 'map')
LEAVES = ['id', 'secret', 'a.b', 'struct.x', 'struct.y', 'list.list.element', 'map.key_value.key']
ENCRYPTED = {
    'one': ({'column_keys': {'k': ['secret']}}, {'secret'}),
    'part of a struct': ({'column_keys': {'k': ['struct.y']}}, {'struct'}),
    'several': ({'column_keys': {'k': ['secret', 'list.list.element'], 'l': ['map.key_value.value']}},
                {'secret', 'list', 'map'}),
    'all': ({'column_keys': {'k': LEAVES}}, set(COLUMNS)),
}  # fmt: skip


@functools.cache
def table():
    """Return the table of each file. Making one imports pandas, if there is one."""
    rows = range(ROWS)
    structs, lists = [{'x': i, 'y': str(i)} for i in rows], [[i] * (i % 3) for i in rows]
    maps = pa.array([[('k', i)] for i in rows], pa.map_(pa.string(), pa.int64()))
    columns = [list(rows), [str(i) for i in rows], [1.5] * ROWS, structs, lists, maps]
    metadata = {'pandas': '{"a": null, "b": "l,L,|,"}'}
    return pa.table(dict(zip(COLUMNS, columns, strict=True))).replace_schema_metadata(metadata)


class Keys(encryption.KmsClient):
    """A service of keys that keeps none."""

    def __init__(self, config):
        super().__init__()

    def wrap_key(self, key, master):
        return base64.b64encode(key)

    def unwrap_key(self, key, master):
        return base64.b64decode(key)


def write(path, **options):
    factory = encryption.CryptoFactory(Keys)
    configuration = encryption.EncryptionConfiguration('footer', plaintext_footer=True, **options)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), configuration)
    with pq.ParquetWriter(path, table().schema, encryption_properties=properties) as writer:
        writer.write_table(table(), row_group_size=4)
    return path


@pytest.mark.parametrize('name', ENCRYPTED)
def test_encrypted_columns_are_refused_and_others_read(tmp_path, name):
    options, refused = ENCRYPTED[name]
    path = write(tmp_path / 'x.parquet', **options)
    readable = [column for column in COLUMNS if column not in refused]
    with granular.ParquetDataSource(path) as source:
        assert source.columns == COLUMNS
        for column in COLUMNS:
            if column in refused:
                with pytest.raises(
                    UnsupportedError, match=rf'x\.parquet: encrypted columns .*: {column!r}: read others'
                ):
                    source.fetch([1, 9], [column])
                with pytest.raises(UnsupportedError, match='encrypted'):
                    list(granular.ParquetIterDataset(path, columns=['id', column]))
            else:
                assert len(source.fetch([1, 9], [column])) == 2
        with pytest.raises(UnsupportedError, match='encrypted'):
            source[3]
    if readable:
        with granular.ParquetDataSource(path, columns=readable) as source:
            assert source[7]['id'] == 7
        assert len(list(granular.ParquetIterDataset(path, columns=readable))) == ROWS
    with Served(granular.Path(tmp_path)) as served:
        facts = ask(served, '/api/dataset', path='x.parquet').json
        assert [row['key'] for row in facts['keys']] == readable
        assert facts['kind'] == f'Parquet, without the encrypted {", ".join(sorted(refused))}'
        rows = ask(served, '/api/rows', path='x.parquet')
        assert rows.status == 200
        assert list(rows.json['columns']) == readable


def test_damaged_footer_of_an_encrypted_file_is_an_error_or_read(tmp_path):
    data = write(tmp_path / 'x.parquet', **ENCRYPTED['several'][0]).read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], 'little')
    rng = random.Random(0)
    failed = 0
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.randrange(footer, len(data))] = rng.randrange(256)
        (tmp_path / 'damaged.parquet').write_bytes(damaged)
        try:
            with granular.ParquetDataSource(tmp_path / 'damaged.parquet') as source:
                source.fetch([0, 9], ['id', 'a.b'])
        except GranularError:
            failed += 1
    assert 50 < failed < 300
