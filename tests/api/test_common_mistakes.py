"""Mistakes that are easy to make: each is an error that names what was given, and the remedy."""

import pathlib

import pytest

import granular
from granular import MapDataset
from granular.errors import (
    DatapointError,
    DatapointKeysError,
    InvalidArgumentError,
    UnknownKeyError,
    UnknownSchemeError,
)

dataset = MapDataset.range(10)

MISTAKES = {
    'pathlib_on_an_address': (
        lambda: granular.DatasetWriter(pathlib.Path('s3://bucket/data'), {'x': 'int'}),
        r"'s3:/bucket/data': expected an address that begins with s3:// \(pathlib.Path drops a slash\): pass it as a",
    ),
    'space_before_an_address': (
        lambda: granular.Path(' gs://bucket'),
        "' gs://bucket': expected an address that",
    ),
    'fractional_index': (lambda: dataset.fetch([1.5]), 'expected a 1-D sequence of integers, got float64 of shape'),
    'one_index_in_fetch': (lambda: dataset.fetch(3), r'expected a 1-D sequence of integers, got int64 of shape \(\)'),
    'key_as_index': (lambda: dataset['label'], "MapDataset: expected an integer as index, got 'label'$"),
    'indices_as_index': (lambda: dataset[[1, 2]], r'expected an integer as index, got \[1, 2\]: fetch\(...\) reads'),
    'one_dataset_to_mix': (lambda: MapDataset.mix(dataset), 'expected a list of MapDatasets, got <MapDataset of 10'),
    'number_as_read_options': (
        lambda: dataset.to_iter_dataset(16),
        'read_options: expected a granular.ReadOptions, got 16',
    ),
    'tuple_as_shard_options': (
        lambda: dataset.to_iter_dataset(shard_options=(0, 2)),
        r'shard_options: expected a granular.ShardOptions, got \(0, 2\)',
    ),
    'tuple_as_shard_options_of_a_sampler': (
        lambda: granular.IndexSampler(10, (0, 2)),
        r'shard_options: expected a granular.ShardOptions, got \(0, 2\)',
    ),
    'tuple_as_shard_options_of_packing': (
        lambda: dataset.to_iter_dataset().pack({'x': 4}, shard_options=(0, 2)),
        r'shard_options: expected a granular.ShardOptions, got \(0, 2\)',
    ),
    'generator_as_source': (
        lambda: granular.Loader((i for i in range(3)), 1),
        r'generator is not a source: .*: make a list of it, or a dataset with granular.convert\(...\)',
    ),
    'stream_in_a_loader': (
        lambda: granular.Loader(dataset.to_iter_dataset(), 1),
        r'IterDataset is not a source: .*: iterate over a stream itself, after its batch\(...\)',
    ),
    'text_in_a_config': (
        lambda: granular.IOConfig(concurrency='3'),
        "concurrency: expected an integer, got '3'",
    ),
    'endpoint_without_scheme': (
        lambda: granular.Path('s3://bucket', endpoint_url='127.0.0.1:9000', anon=True).exists(),
        r"expected an endpoint_url of http\(s\)://host, without credentials, got '127.0.0.1:9000'",
    ),
    'one_cache_key': (
        lambda: granular.ShardedDatasetReader('data', cache_keys='label'),
        r"cache_keys: expected a sequence of keys, got 'label': pass \('label',\)",
    ),
    'percentages': (
        lambda: dataset.percent(to_percent=80),
        'expected from_percent and to_percent from 0 to 1',
    ),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_is_an_error_with_a_remedy(name):
    function, message = MISTAKES[name]
    with pytest.raises(InvalidArgumentError, match=message):
        function()


def test_secrets_of_an_invalid_endpoint_are_not_shown():
    with pytest.raises(InvalidArgumentError, match='without credentials$') as caught:
        granular.Path('s3://bucket', endpoint_url='http://user:password@host', anon=True).exists()
    assert 'password' not in str(caught.value)


def test_an_unknown_scheme_is_an_error_with_the_known_ones():
    with pytest.raises(UnknownSchemeError, match="unknown scheme 's4': expected s3, gs, az, hf, http, https, or"):
        granular.Path('s4://bucket/data')


def test_a_datapoint_with_other_keys_is_an_error_with_those_keys_alone(tmp_path):
    with granular.DatasetWriter(tmp_path / 'data', {'a': 'int', 'b': 'utf8'}) as writer:
        with pytest.raises(DatapointKeysError, match=r"datapoint 0: missing keys \['b'\]$"):
            writer.append({'a': 1})
        with pytest.raises(DatapointKeysError, match=r"datapoint 0: unknown keys \['c'\]$"):
            writer.append({'a': 1, 'b': 'x', 'c': 2})
    assert issubclass(DatapointKeysError, DatapointError) and issubclass(DatapointKeysError, UnknownKeyError)
