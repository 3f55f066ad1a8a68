"""Parquet files with encrypted columns: these are refused before pyarrow sees them, as it would end the process."""

import base64
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow.parquet import encryption

import granular
from granular.errors import GranularError, UnsupportedError
from granular.grain.experimental import ParquetIterDataset
from tests.view.serving import Served
from tests.view.test_server import ask

ROWS = 10
ENCRYPTED = {
    'one': {'column_keys': {'k': ['secret']}},
    'part of a struct': {'column_keys': {'k': ['struct.y']}},
    'all': {'column_keys': {'k': ['id', 'secret', 'struct.x', 'struct.y']}},
}


class Keys(encryption.KmsClient):
    """A service of keys that keeps none."""

    def __init__(self, config):
        super().__init__()

    def wrap_key(self, key, master):
        return base64.b64encode(key)

    def unwrap_key(self, key, master):
        return base64.b64decode(key)


def write(path, plaintext_footer=True, **options):
    rows = range(ROWS)
    columns = {'id': list(rows), 'secret': list(map(str, rows)), 'struct': [{'x': i, 'y': str(i)} for i in rows]}
    table = pa.table(columns)
    configuration = encryption.EncryptionConfiguration('footer', plaintext_footer=plaintext_footer, **options)
    connection = encryption.KmsConnectionConfig()
    properties = encryption.CryptoFactory(Keys).file_encryption_properties(connection, configuration)
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table, row_group_size=4)
    return path


@pytest.mark.parametrize('plain', [True, False])
@pytest.mark.parametrize('name', ENCRYPTED)
def test_files_with_encrypted_columns_are_refused(tmp_path, name, plain):
    path = write(tmp_path / 'x.parquet', plain, **ENCRYPTED[name])
    with pytest.raises(UnsupportedError, match=r'x\.parquet: .*encrypted.* write it again without encryption'):
        granular.ParquetDataSource(path, columns=['id'])
    with pytest.raises(UnsupportedError, match='encrypted'):
        list(ParquetIterDataset(path, columns=['id']))
    with Served(granular.Path(tmp_path)) as served:
        answer = ask(served, '/api/dataset', path='x.parquet')
        assert answer.status != 200
        assert 'encrypted' in str(answer.json)


def test_damaged_footer_of_an_encrypted_file_is_an_error(tmp_path):
    data = write(tmp_path / 'x.parquet', **ENCRYPTED['one']).read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], 'little')
    rng = random.Random(0)
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.randrange(footer, len(data))] = rng.randrange(256)
        (tmp_path / 'damaged.parquet').write_bytes(damaged)
        with pytest.raises(GranularError):
            granular.ParquetDataSource(tmp_path / 'damaged.parquet')
