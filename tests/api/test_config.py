"""Settings of IOConfig: environment variables, units and validation."""

import dataclasses
import fractions
import os
import subprocess
import sys

import numpy as np
import pytest

import granular
from granular.errors import InvalidArgumentError
from tests.support.faults import DATA, FaultServer


def test_every_setting_documents_its_variable_and_unit(monkeypatch):
    for field in dataclasses.fields(granular.IOConfig):
        assert field.metadata['variable'] == f'GRANULAR_{field.name.upper()}'
        assert any(
            word in field.metadata['doc'] for word in ('bytes', 'seconds', 'requests', 'times', 'parts', 'folder')
        )
    monkeypatch.setenv('GRANULAR_CONCURRENCY', '7')
    monkeypatch.setenv('GRANULAR_CONNECT_TIMEOUT', '1.5')
    config = granular.IOConfig()
    assert (config.concurrency, config.connect_timeout) == (7, 1.5)
    assert granular.IOConfig(concurrency=9).concurrency == 9
    assert granular.Path('memory://x').store.config == config


@pytest.mark.parametrize(
    'settings',
    [{'concurrency': -1}, {'memory': -1}, {'attempts': 0}, {'part_size': 1000}, {'max_gap': -2}, {'attempts': 1.5},
     {'concurrency': float('inf')}, {'memory': '1'}, {'hedge': float('nan')}, {'read_timeout': None},
     {'cache_dir': True}, {'index_cache': 5}, {'cache_dir': 's3://bucket/cache'}, {'index_cache': 'gs://bucket/cache'}],
    ids=str,
)  # fmt: skip
def test_invalid_settings_are_rejected(settings):
    with pytest.raises(InvalidArgumentError, match=next(iter(settings))):
        granular.IOConfig(**settings)


@pytest.mark.parametrize('number', [float, np.float64, np.int64, fractions.Fraction])
def test_numbers_of_any_type_are_settings(number, tmp_path):
    fields = [field for field in dataclasses.fields(granular.IOConfig) if field.type in (int, float)]
    given = {field.name: number(16 << 20) for field in fields}
    config = granular.IOConfig(**given, cache_dir=str(tmp_path))
    assert [type(getattr(config, field.name)) for field in fields] == [field.type for field in fields]
    with FaultServer() as server:
        path = granular.Path('s3://bucket/file', config=config, endpoint_url=server.endpoint, anon=True)
        assert path.read_ranges([5], [70_000], version='"one"') == [DATA[5:70_000]]


def test_environment_variable_that_is_not_a_number_is_rejected(monkeypatch):
    monkeypatch.setenv('GRANULAR_MEMORY', 'lots')
    with pytest.raises(InvalidArgumentError, match='GRANULAR_MEMORY'):
        granular.IOConfig()


def test_misspelled_environment_variables_are_logged():
    names = ('CONCURENCY', 'CACHE_SIZE', 'REDIS_URL', 'FULL_TRACEBACKS', 'TAIL')
    env = {**os.environ, **{f'GRANULAR_{name}': '1' for name in names}}
    command = [sys.executable, '-c', 'import granular.config']
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        'GRANULAR_CACHE_SIZE is not a setting: did you mean GRANULAR_CACHE_DIR or GRANULAR_CACHE_BYTES?',
        'GRANULAR_CONCURENCY is not a setting: did you mean GRANULAR_CONCURRENCY or GRANULAR_UPLOAD_CONCURRENCY?',
    ]


def test_folder_settings_accept_any_name(monkeypatch):
    monkeypatch.setenv('GRANULAR_INDEX_CACHE', '~/cache of mine')
    assert granular.IOConfig().index_cache == '~/cache of mine'
    assert granular.IOConfig(index_cache='').index_cache == ''
