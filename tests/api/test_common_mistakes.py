"""Mistakes that are easy to make: each is an error that names what was given, and the remedy."""

import asyncio
import copy
import importlib
import inspect
import itertools
import operator
import pathlib
import threading
from collections import abc

import numpy as np
import pandas
import pyarrow
import pytest

import granular
from granular import MapDataset
from granular.errors import (
    AlreadyExistsError,
    DatapointError,
    DatapointKeysError,
    GranularError,
    InvalidArgumentError,
    OutOfRangeError,
    StateError,
    UnknownArgumentError,
    UnknownKeyError,
    UnknownSchemeError,
    UnknownTypeError,
)
from granular.grain import MultiprocessingOptions
from granular.grain.experimental import DatasetOptions, ParquetIterDataset, TFRecordIterDataset
from granular.grain.sharding import ShardByJaxProcess
from granular.grain.sources import SharedMemoryDataSource

dataset = MapDataset.range(10)


class OfDtype(granular.grain.transforms.Map):
    def map(self, element):
        return element

    def output_spec(self, spec):
        return {'x': np.int64}


def hugging_face_stream():
    import datasets

    return datasets.Dataset.from_dict({'x': [1]}).to_iterable_dataset()


def test_remedies_for_streams_and_foreign_files_help(tmp_path):
    granular.convert(hugging_face_stream(), tmp_path / 'converted')
    assert list(MapDataset.source(granular.open(tmp_path / 'converted'))) == [{'x': 1}]
    assert list(MapDataset.zip([dataset, dataset])[:2]) == [(0, 0), (1, 1)]
    (tmp_path / 'other').mkdir()
    (tmp_path / 'other' / 'notes.txt').write_text('text')
    with pytest.raises(AlreadyExistsError, match=r"\['notes.txt'\]: choose another folder, or remove them$"):
        granular.DatasetWriter(tmp_path / 'other', {'x': 'int'})
    (tmp_path / 'other' / 'notes.txt').unlink()
    granular.DatasetWriter(tmp_path / 'other', {'x': 'int'}).close()


MISTAKES = {
    'spec_that_is_a_dtype': (
        lambda: granular.grain.experimental.get_element_spec(dataset.map(OfDtype())),
        r'OfDtype.output_spec: expected a granular.grain.experimental.ShapeDtypeStruct.* got <class .numpy.int64',
    ),
    'streaming_dataset_of_hugging_face': (
        lambda: MapDataset.source(hugging_face_stream()),
        r'IterableDataset has no length: it is a stream: make a dataset of it by granular.convert\(stream, directory',
    ),
    'datasets_by_position': (lambda: MapDataset.zip(dataset, dataset), 'got 2 by position: pass a list of datasets$'),
    'pathlib_on_an_address': (
        lambda: granular.DatasetWriter(pathlib.Path('s3://bucket/data'), {'x': 'int'}),
        r"'s3:/bucket/data': expected an address that begins with s3:// \(pathlib.Path drops a slash\): pass it as a",
    ),
    'address_without_a_colon': (
        lambda: granular.DatasetWriter('s3//bucket/data', {'x': 'int'}),
        r"'s3//bucket/data': expected an address that begins with s3:// .*; a local path of this name begins with ./$",
    ),
    'space_before_an_address': (
        lambda: granular.Path(' gs://bucket'),
        "' gs://bucket': expected an address that",
    ),
    'number_as_a_header': (
        lambda: granular.Path('http://localhost/x', headers={'X-Tenant': 5}),
        "http://localhost: expected text for header 'X-Tenant', got int$",
    ),
    'text_for_headers': (
        lambda: granular.Path('http://localhost/x', headers='X-Tenant: 5'),
        r'http://localhost: expected headers=\{name: value\}, got str$',
    ),
    'nested_indices': (
        lambda: dataset.fetch([[1, 2], [3]]),
        r'expected a 1-D sequence of integers, got \[\[1, 2\], \[3\]\]$',
    ),
    'booleans_among_indices': (
        lambda: dataset.fetch([True, 2]),
        r'expected a 1-D sequence of integers, got booleans in \[True, 2\]$',
    ),
    'one_field_to_select': (lambda: dataset.select(5), '^fields: expected a sequence of keys, got 5$'),
    'parts_of_a_sequence_to_select': (
        lambda: dataset.select({'x': slice(0, 2)}),
        r"^fields: expected a sequence of keys, got \{'x': slice\(0, 2, None\)\}$",
    ),
    'number_joined_to_a_path': (lambda: granular.Path('x') / 5, '^x: expected str to join, got int$'),
    'number_as_a_name': (lambda: granular.Path('x').with_name(5), '^x: expected str, got int$'),
    'number_as_a_suffix': (lambda: granular.Path('x').with_suffix(5), '^x: expected str, got int$'),
    'bytes_as_a_pattern': (lambda: granular.Path('x').match(b'*'), '^x: expected str, got bytes$'),
    'bytes_as_text': (lambda: granular.Path('x').write_text(b'text'), '^x: expected str, got bytes$'),
    'number_of_items': (lambda: granular.progress(5), '^progress: expected items to iterate over, got 5$'),
    'number_of_datasets': (
        lambda: granular.kappadata.KDConcatDataset(5),
        '^KDConcatDataset: expected one dataset or more, got 5$',
    ),
    'number_of_sources': (lambda: granular.sources.Interleave(5), '^expected one source or more, got 5$'),
    'fields_of_labels': (
        lambda: dataset.oversample(['label']),
        r"expected the name of a field, got \['label'\]$",
    ),
    'one_label': (
        lambda: granular.filters.by_class(3, [3]),
        '^labels: expected a sequence with the label of each datapoint, got 3$',
    ),
    'labels_without_an_order': (
        lambda: granular.filters.oversampled(iter([0, 1])),
        '^labels: expected a sequence with the label of each datapoint, got <',
    ),
    'fractional_index': (lambda: dataset.fetch([1.5]), 'expected a 1-D sequence of integers, got float64 of shape'),
    'mask_in_fetch': (
        lambda: dataset.fetch([True] * 10),
        r'expected a 1-D sequence of integers, got bool of .*: numpy.flatnonzero\(...\) makes indices of a mask$',
    ),
    'reader_for_torch': (
        lambda: importlib.import_module('granular.integrations.torch').IterableDataset([1, 2]),
        r'expected a MapDataset or an IterDataset, got list: pass MapDataset.source\(...\)',
    ),
    'one_index_in_fetch': (lambda: dataset.fetch(3), r'expected a 1-D sequence of integers, got 3: pass \[3\]$'),
    'key_as_index': (
        lambda: dataset['label'],
        r"expected an integer as index, got 'label': select\(\['label'\]\) of a MapDataset chooses keys$",
    ),
    'class_as_a_type': (
        lambda: granular.DatasetWriter('data', {'x': int}),
        r"""got <class 'int'>: pass 'int'$""",
    ),
    'class_of_numpy_as_a_type': (
        lambda: granular.DatasetWriter('data', {'x': np.float32}),
        r"""got <class 'numpy.float32'>: pass 'float'$""",
    ),
    'mode_over_a_cache': (
        lambda: granular.kappadata.ModeWrapper(granular.SharedMemoryCache([{'x': 1}]), 'x'),
        '^SharedMemoryCache has no fields: expected .*, or a reader; a cache goes around a ModeWrapper$',
    ),
    'table_as_source': (
        lambda: MapDataset.source(pandas.DataFrame({0: [1, 2]})),
        r"^DataFrame has columns by index, not rows: pass its to_dict\('records'\)$",
    ),
    'table_to_convert': (
        lambda: granular.convert(pyarrow.table({'x': [1]}), 'data'),
        r'^Table has columns by index, not rows: pass its to_pylist\(\)$',
    ),
    'file_of_a_state': (
        lambda: granular.load_state(__file__),
        'contains no state: process_0-of-1.json is not there: it is a file: pass the folder that save_state wrote$',
    ),
    'length_of_rows': (lambda: dataset.pack(seq_len=8), r"for seq_len, pass length, such as \{'tokens': 2048\}$"),
    'tokens_of_a_batch': (
        lambda: dataset.batch_by_size('x', max_tokens=8),
        r'^MapDataset.batch_by_size: .*: for max_tokens, pass max_size$',
    ),
    'several_datasets_to_open': (
        lambda: granular.open(['first', 'second']),
        'or format; MapDataset.concatenate joins datasets, and `granular convert` makes a dataset of images$',
    ),
    'option_of_a_tensor': (
        lambda: granular.Loader(dataset, 2, device='cuda'),
        r'for device, pass granular.integrations.torch.Batches\(loader, device=...\)$',
    ),
    'values_to_add': (
        lambda: granular.rewrite('data', 'other', add={}),
        r"for add, pass values, such as values=\{'embedding': array\}$",
    ),
    'batches_of_parquet': (
        lambda: ParquetIterDataset('x.parquet', batch_size=8),
        r'for batch_size, pass nothing, and call batch\(64\)$',
    ),
    'indices_as_index': (lambda: dataset[[1, 2]], r'expected an integer as index, got \[1, 2\]: fetch\(...\) reads'),
    'tensor_for_an_array': (
        lambda: granular.encoders['array']([1, 2]),
        r'expected a numpy array, got list: numpy.asarray\(...\) makes one$',
    ),
    'channels_first': (
        lambda: granular.encoders['jpg'](np.zeros((3, 8, 9), np.uint8)),
        r'got uint8 of shape \(3, 8, 9\): array.transpose\(1, 2, 0\) moves the channels$',
    ),
    'image_of_floats': (
        lambda: granular.encoders['png'](np.zeros((8, 9, 3))),
        r'got float64 of shape \(8, 9, 3\): \(255 \* array\).astype\(numpy.uint8\) converts values',
    ),
    'images_to_open': (
        lambda: granular.open(['1.jpg', '2.jpg']),
        'got .jpg: .*`granular convert` makes a dataset of images$',
    ),
    'one_class_to_filter': (
        lambda: dataset.filter_classes(valid_classes=3),
        r'^valid_classes: expected a 1-D sequence of classes, got 3: pass \[3\]$',
    ),
    'classes_in_place_of_a_field': (
        lambda: dataset.filter_classes([3]),
        r'expected either valid_classes or invalid_classes, such as valid_classes=\[0, 3\]$',
    ),
    'one_dataset_to_mix': (lambda: MapDataset.mix(dataset), 'expected a list of MapDatasets, got <MapDataset of 10'),
    'no_list_to_zip': (lambda: MapDataset.zip(None), 'expected a list of MapDatasets, got None$'),
    'no_list_of_streams_to_zip': (
        lambda: granular.IterDataset.zip(5),
        'expected a list of streams or MapDatasets, got 5$',
    ),
    'datasets_to_zip_without_a_list': (
        lambda: MapDataset.zip(dataset, dataset),
        '^MapDataset.zip: expected datasets, got 2 by position: pass a list of datasets$',
    ),
    'option_by_position': (
        lambda: dataset.batch(2, True),
        '^MapDataset.batch: expected batch_size, and drop_remainder, batch_fn by name, got 2 by position$',
    ),
    'dataset_by_position': (
        lambda: granular.grain.DataLoader(dataset),
        '^DataLoader: expected data_source, sampler, .*start_method by name, got 1 by position$',
    ),
    'number_to_slice': (
        lambda: dataset.slice(10),
        r'^slice: expected a 1-D sequence of integers, got 10: pass \[10\]$',
    ),
    'web_server_to_write_to': (
        lambda: granular.Path('http://127.0.0.1/data').mkdir(),
        'does not support creating folders: it is read-only, unlike a disk, s3://, gs:// and az://$',
    ),
    'audio_in_a_loader': (
        lambda: next(granular.Loader([{'a': granular.formats.Audio(np.zeros((9, 1), np.int16), 16000)}] * 4, 4)),
        "step 0, key 'a': expected a number or an array .*, got Audio with parts samples, rate: make each",
    ),
    **{
        f'type_{other}': (
            lambda other=other: granular.DatasetWriter('data', {'x': other}),
            f"key 'x' has type '{other}', expected one of: msgpack, .*; for {other}, pass {ours}$",
        )
        for other, ours in {
            'jpeg': 'jpg',
            'float32': 'float',
            'string': 'utf8',
            'int64': 'int',
            'text': 'utf8',
            'image': 'jpg or png',
            'ndarray': 'array',
        }.items()
    },
    'tiff_as_an_image': (
        lambda: granular.formats.encode_image_file(b'II*\0' + bytes(9)),
        'a TIFF image, which no type of images takes: convert it to PNG$',
    ),
    'names_to_mix': (
        lambda: MapDataset.mix({'web': dataset}),
        r"expected a list of MapDatasets, got names \['web'\]: IterDataset.mix takes them$",
    ),
    'stream_to_mix': (
        lambda: MapDataset.mix([dataset, dataset.to_iter_dataset()]),
        'dataset 1: expected a MapDataset, got <IterDataset: .*>: IterDataset has mix and zip of streams',
    ),
    'nothing_to_repeat_without_end': (
        lambda: dataset.slice([]).shuffle(seed=0).repeat(),
        r'repeat: the dataset is empty, and so would be its endless repetition: shuffle\(seed=0',
    ),
    'number_as_read_options': (
        lambda: dataset.to_iter_dataset(16),
        'read_options: expected a granular.ReadOptions, got 16',
    ),
    'tuple_as_shard_options': (
        lambda: dataset.to_iter_dataset(shard_options=(0, 2)),
        r'shard_options: expected a granular.ShardOptions, got \(0, 2\)',
    ),
    'tuple_as_shard_options_of_a_sampler': (
        lambda: granular.grain.samplers.IndexSampler(10, (0, 2)),
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
    'stream_in_memory': (
        lambda: SharedMemoryDataSource(dataset.to_iter_dataset()),
        r'elements: expected a sequence, got IterDataset: pass list\(...\) of it$',
    ),
    'set_in_memory': (lambda: SharedMemoryDataSource({1, 2}), r'got set: pass list\(...\) of it$'),
    'stream_to_pad': (
        lambda: granular.grain.experimental.batch_and_pad(dataset.to_iter_dataset(), batch_size=64),
        r'batch_and_pad: expected a list of elements, got IterDataset: pass it as batch_fn: batch\(64, batch_fn=',
    ),
    'option_of_another_library_in_a_path': (
        lambda: granular.Path('s3://bucket/data', endpoint='http://localhost'),
        r"s3://bucket: unknown options \['endpoint'\]: expected some of .*endpoint_url",
    ),
    'filter_before_a_loader': (
        lambda: granular.Loader(dataset.map(lambda i: {'i': i}).filter(lambda one: one['i'] % 2), 2),
        r'the source drops datapoints, by filter, .*: use dataset.to_iter_dataset\(\).batch\(64\)',
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
    'one_argument_of_on_error': (
        lambda: list(dataset.map(lambda i: 1 // 0).to_iter_dataset(on_error=lambda error: None)),
        r'on_error calls fn\(index, error\), which .*lambda.*\(error\) does not accept: too many positional',
    ),
    'mapping_in_memory': (
        lambda: SharedMemoryDataSource({'a': [1]}),
        r'^elements: expected a sequence, got dict: pass a list of its values, or \[it\]$',
    ),
    'processes_to_prefetch': (
        lambda: dataset.to_iter_dataset().prefetch(MultiprocessingOptions(2)),
        '^buffer_size: expected an integer, got MultiprocessingOptions.*: mp_prefetch takes it$',
    ),
    'seed_of_a_loader': (
        lambda: granular.Loader(dataset, 2, seed=3),
        r'for seed, pass sources.Epochs\(source, seed=0\), or MapDataset.shuffle\(seed=0\), as the source$',
    ),
    'condition_to_rewrite': (
        lambda: granular.rewrite('data', 'other', filter=bool),
        '^rewrite: .* for filter, pass keep, such as keep=lambda label: label < 10$',
    ),
    'text_joined_to_an_address': (
        lambda: 'data' / granular.Path('s3://bucket', anon=True),
        '^s3://bucket: has no path on the local disk$',
    ),
    'state_of_a_loader_for_a_stream': (
        lambda: iter(dataset.to_iter_dataset()).load_state_dict(granular.Loader(dataset, 2).save()),
        r'^expected what state_dict\(\) of a stream or .* got the state of a Loader at step 0: load it into a Loader',
    ),
    'state_of_a_stream_for_a_loader': (
        lambda: granular.Loader(dataset, 2).load(iter(dataset.to_iter_dataset()).state_dict()),
        '^expected what .* of a Loader or .*, got the state of a stream: load it into an iterator of the stream',
    ),
    'no_state': (
        lambda: iter(dataset.to_iter_dataset()).load_state_dict({'epoch': 3, 'model': [1] * 100}),
        r"returned, got a dict with the keys \['epoch', 'model'\]$",
    ),
    'array_for_an_integer': (
        lambda: granular.encoders['int'](np.array(3)),
        r'^expected an integer, got ndarray: its item\(\) is a number$',
    ),
    'columns_to_convert': (
        lambda: granular.convert([{'x': 1}], 'data', columns=['x']),
        r"^convert: no arguments \['columns'\]: for columns, pass spec, with the types by key; to choose keys, pass",
    ),
    'percentages': (
        lambda: dataset.percent(to_percent=80),
        'expected from_percent and to_percent from 0 to 1',
    ),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_a_mistake_is_an_error_with_a_remedy(name):
    function, message = MISTAKES[name]
    with pytest.raises(GranularError, match=message):
        function()


def test_secrets_of_an_invalid_endpoint_are_not_shown():
    with pytest.raises(InvalidArgumentError, match='without credentials$') as caught:
        granular.Path('s3://bucket', endpoint_url='http://user:password@host', anon=True).exists()
    assert 'password' not in str(caught.value)


def test_an_iterator_in_place_of_its_state_is_an_error_with_the_method(tmp_path):
    with iter(dataset.to_iter_dataset()) as iterator:
        with pytest.raises(StateError, match=r'not plain JSON: .*: pass what its state_dict\(\) returns$'):
            granular.save_state(tmp_path, iterator)


@pytest.mark.parametrize('mix', [MapDataset.mix, granular.IterDataset.mix])
@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ({'weights': [1, -1]}, r'expected 2 weights >= 0, one or more of them > 0 and each below .*, got \[1, -1\]$'),
        ({'weights': [0, 0]}, r'expected 2 weights >= 0, one or more of them > 0 and each below .*, got \[0, 0\]$'),
        ({'weights': [1e308, 1]}, r'> 0 and each below 1e300 times any other, got \[1e\+308, 1\]'),
        ({'probabilities': [1, 2]}, r"Dataset.mix: no arguments \['probabilities'\]: for probabilities, pass weights$"),
    ],
)
def test_weights_that_a_mix_does_not_take_are_answered(mix, given, message):
    with pytest.raises(InvalidArgumentError, match=message):
        mix([dataset, dataset], **given)


@pytest.mark.parametrize('mix', [MapDataset.mix, granular.IterDataset.mix])
def test_state_of_a_mix_of_other_weights_names_the_mix_that_takes_them(mix):
    sources = [dataset, dataset] if mix == MapDataset.mix else [dataset.to_iter_dataset(), dataset.to_iter_dataset()]
    before, after = (mix(sources, weights) for weights in ([1, 2], [2, 1]))
    with iter(before) as iterator:
        state = iterator.get_state()
    with iter(after) as iterator, pytest.raises(StateError, match=r"is 'mix .* 200:100' .* IterDataset.mix with names"):
        iterator.set_state(state)


def test_a_number_in_place_of_a_shard_is_an_error(tmp_path):
    for call in (lambda: granular.save_state(tmp_path, {'step': 1}, 3), lambda: granular.load_state(tmp_path, 3)):
        with pytest.raises(InvalidArgumentError, match='shard_options: expected a granular.ShardOptions, got 3'):
            call()


def test_a_stream_in_place_of_a_source_is_an_error():
    for load in (
        granular.grain.load,
        lambda it: granular.grain.DataLoader(data_source=it, sampler=granular.grain.samplers.SequentialSampler(1)),
    ):
        with pytest.raises(InvalidArgumentError, match='IterDataset is not a source: .*iterate over a stream itself'):
            load(dataset.to_iter_dataset())


def test_an_unknown_scheme_is_an_error_with_the_known_ones():
    with pytest.raises(UnknownSchemeError, match="unknown scheme 's4': expected s3, gs, az, hf, http, https, or"):
        granular.Path('s4://bucket/data')


@pytest.mark.parametrize('kind', ['int', 'i64', 'float', 'bool'])
def test_a_tensor_in_place_of_a_number_is_an_error_with_its_key_and_the_number_of_the_datapoint(tmp_path, kind):
    import torch

    with granular.DatasetWriter(tmp_path / 'data', {'label': kind}) as writer:
        writer.append({'label': kind == 'bool' or 1})
        with pytest.raises(DatapointError, match=r"datapoint 1, key 'label': .*got Tensor: its item\(\) is a number$"):
            writer.append({'label': torch.tensor(3)})
        with pytest.raises(DatapointError, match='got Tensor$'):
            writer.append({'label': torch.tensor([3, 4])})


def test_a_datapoint_with_other_keys_is_an_error_with_those_keys_alone(tmp_path):
    with granular.DatasetWriter(tmp_path / 'data', {'a': 'int', 'b': 'utf8'}) as writer:
        with pytest.raises(DatapointKeysError, match=r"datapoint 0: missing keys \['b'\]$"):
            writer.append({'a': 1})
        with pytest.raises(DatapointKeysError, match=r"keys \['a', 'b'\]: datapoint 0: unknown keys \['c'\]$"):
            writer.append({'a': 1, 'b': 'x', 'c': 2})
    assert issubclass(DatapointKeysError, DatapointError) and issubclass(DatapointKeysError, UnknownKeyError)


@pytest.mark.parametrize('cls', [granular.Loader, granular.aio.Loader, granular.grain.DataLoader])
@pytest.mark.parametrize(
    'name',
    ['batch_size', 'num_workers', 'prefetch_factor', 'pin_memory', 'drop_last', 'shuffle', 'collate_fn', 'dataset'],
)
def test_arguments_of_torch_are_answered_with_ours(cls, name):
    arguments = (
        {'source': [1], 'batch': 2} if cls is not granular.grain.DataLoader else {'data_source': [1], 'sampler': 1}
    )
    with pytest.raises(InvalidArgumentError, match=rf"Loader: no arguments \['{name}'\]: for {name}, pass \w+"):
        cls(**arguments, **{name: 4})
    with pytest.raises(UnknownArgumentError, match=rf"Loader: no arguments \['{name[:-1]}_'\]"):
        cls(**arguments, **{f'{name[:-1]}_': 4})


@pytest.mark.parametrize('cls', [granular.ShardedDatasetWriter, granular.aio.ShardedDatasetWriter])
@pytest.mark.parametrize('name', ['out', 'columns', 'size_limit', 'maxcount', 'shard_size', 'overwrite', 'mode'])
def test_arguments_of_other_writers_are_answered_with_ours(cls, name, tmp_path):
    with pytest.raises(InvalidArgumentError, match=rf"Writer: no arguments \['{name}'\]: for {name}, pass \w+"):
        cls(**{name: tmp_path / 'x'})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('kind', [MapDataset, granular.aio.MapDataset])
@pytest.mark.parametrize(
    ('method', 'name', 'ours'),
    [
        ('map', 'num_parallel_calls', r'nothing: .* mp_prefetch\(8\)'),
        ('map', 'on_error', "on_error='skip' to to_iter_dataset"),
        ('map', 'batched', r'nothing, and call map after batch\(64\)'),
        ('map', 'fn', 'transform'),
        ('map_with_index', 'function', 'transform'),
        ('random_map', 'func', 'transform'),
        ('flat_map', 'function', 'transform'),
        ('filter', 'predicate', 'transform'),
        ('repeat', 'count', 'num_epochs'),
        ('window_shuffle', 'buffer_size', 'window_size'),
        ('limit', 'n', 'count'),
        ('prefetch', 'prefetch_factor', 'buffer_size'),
        ('prefetch', 'num_workers', r'nothing: mp_prefetch\(8\)'),
        ('rebatch', 'drop_last', 'drop_remainder'),
        ('batch', 'batch', 'batch_size'),
        ('batch', 'drop_last', 'drop_remainder'),
        ('batch', 'collate_fn', 'batch_fn'),
        ('batch', 'shuffle', r'nothing, and call shuffle\(seed=0\)'),
        ('batch', 'num_workers', r'nothing: .* mp_prefetch\(8\)'),
        ('shuffle', 'reshuffle_each_iteration', r'nothing, and call repeat\(\) after it'),
        ('to_iter_dataset', 'shard', 'shard_options'),
        ('shuffle', 'buffer_size', 'nothing: .* window_shuffle'),
        ('to_iter_dataset', 'batch_size', r'nothing, and call batch\(64\)'),
        ('to_iter_dataset', 'shuffle', r'nothing, and call shuffle\(seed=0\)'),
        ('to_iter_dataset', 'num_workers', r'nothing: .* mp_prefetch\(8\)'),
        ('to_iter_dataset', 'prefetch_factor', r'read_options=granular.ReadOptions\(prefetch_buffer_size='),
        ('to_iter_dataset', 'pin_memory', 'nothing, .* granular.integrations.torch.Batches'),
        ('to_iter_dataset', 'rank', r'shard_options=granular.ShardOptions\(rank, world_size\)'),
        ('to_iter_dataset', 'world_size', r'shard_options=granular.ShardOptions\(rank, world_size\)'),
    ],
)
def test_arguments_of_other_libraries_are_answered_by_operations(kind, method, name, ours):
    positional = {'batch': [2], 'map': [abs]}.get(method, [])
    chain = kind.range(4)
    for one in [one for one in (chain, chain.to_iter_dataset()) if method in dir(one)]:
        with pytest.raises(
            InvalidArgumentError, match=rf"Dataset\.{method}: no .* \['{name}'\]: for {name}, pass {ours}"
        ):
            getattr(one, method)(*positional, **{name: 2})
        with pytest.raises(UnknownArgumentError, match=rf"Dataset\.{method}: no arguments \['zz'\]: expected some of"):
            getattr(one, method)(*positional, zz=4)


SHARD = r'shard_options=granular.ShardOptions\(rank, world_size\), or'
ANSWERED = {
    'ShardOptions': (
        lambda **given: granular.ShardOptions(**{'shard_index': 0, 'shard_count': 1} | given),
        {'rank': 'shard_index', 'world_size': 'shard_count', 'num_replicas': 'shard_count', 'index': 'shard_index',
         'shard_id': 'shard_index', 'num_shards': 'shard_count', 'process_index': 'shard_index',
         'process_count': 'shard_count', 'drop_last': 'drop_remainder'},
    ),
    'ReadOptions': (
        granular.ReadOptions,
        {'num_workers': r'num_threads; mp_prefetch\(8\)', 'buffer_size': 'prefetch_buffer_size',
         'prefetch': 'prefetch_buffer_size', 'prefetch_factor': 'prefetch_buffer_size'},
    ),
    'MultiprocessingOptions': (
        MultiprocessingOptions,
        {'num_processes': 'num_workers', 'prefetch_factor': 'per_worker_buffer_size',
         'multiprocessing_context': 'start_method=', 'enable_profiling': '.*stage_timing=True'},
    ),
    'Batch': (
        lambda **given: granular.grain.transforms.Batch(2, **given),
        {'drop_last': 'drop_remainder', 'collate_fn': 'batch_fn'},
    ),
    'IndexSampler': (
        lambda **given: granular.grain.samplers.IndexSampler(9, **given),
        {**dict.fromkeys(('rank', 'world_size', 'shard_index'), SHARD), 'weights': r'nothing: .*MapDataset.mix\('},
    ),
    'SequentialSampler': (
        lambda **given: granular.grain.samplers.SequentialSampler(9, **given),
        dict.fromkeys(('rank', 'num_replicas'), SHARD),
    ),
    'DataLoader': (
        lambda **given: granular.grain.DataLoader(data_source=[1], sampler=1, **given),
        dict.fromkeys(('rank', 'world_size'), SHARD),
    ),
    'Loader': (lambda **given: granular.Loader([1], 1, **given), {'rank': 'shard_id', 'world_size': 'num_shards'}),
    'IOConfig': (
        granular.IOConfig,
        {'timeout': 'connect_timeout, ', 'cache': 'cache_dir', 'max_retries': 'attempts', 'max_workers': 'concurrency'},
    ),
    'Batches': (
        lambda **given: importlib.import_module('granular.integrations.torch').Batches([], **given),
        {'pin_memory': "device='cuda'", 'batch_size': r'to_iter_dataset\(\).batch\(64\)',
         'shuffle': r'shuffle\(seed=0\)'},
    ),
    'convert': (
        lambda **given: granular.convert([{'x': 1}], 'data', **given),
        {'num_workers': 'parallel', 'overwrite': 'nothing: no dataset is overwritten', 'columns': 'spec, '},
    ),
    'rewrite': (
        lambda **given: granular.rewrite('data', 'other', **given),
        {'workers': 'parallel', 'mode': 'nothing: no dataset is overwritten', 'columns': 'drop, '},
    ),
    'IterableDataset': (
        lambda **given: importlib.import_module('granular.integrations.torch').IterableDataset(dataset, **given),
        {'batch_size': r'nothing, and call batch\(64\)', 'shuffle': r'nothing, and call shuffle\(', 'rank': SHARD},
    ),
    'IterDataset.mp_prefetch': (dataset.to_iter_dataset().mp_prefetch, {'num_workers': 'the number alone'}),
}  # fmt: skip


@pytest.mark.parametrize('name', ANSWERED)
def test_arguments_of_other_libraries_are_answered_by_options_and_samplers(name):
    make, answers = ANSWERED[name]
    for argument, ours in answers.items():
        with pytest.raises(
            InvalidArgumentError, match=rf"^{name}: no .* \['{argument}'\]: for {argument}, pass {ours}"
        ):
            make(**{argument: 2})
    with pytest.raises(UnknownArgumentError, match=rf"^{name}: no arguments \['zz'\]: expected some of \['"):
        make(zz=4)


# Base classes, and datasets that have constructors of other names.
MADE = {'DatasetIterator', 'IterDataset', 'MapDataset'}
OF_GRAIN = (
    DatasetOptions, MultiprocessingOptions, ParquetIterDataset, ShardByJaxProcess, SharedMemoryDataSource,
    TFRecordIterDataset,
)  # fmt: skip
PUBLIC = {
    **{name: getattr(granular, name) for name in granular.__all__ if name not in MADE},
    **{cls.__name__: cls for cls in OF_GRAIN},
    **{f'MapDataset.{name}': getattr(dataset, name) for name in ('percent', 'filter_classes', 'oversample', 'batch')},
    **{f'IterDataset.{name}': getattr(granular.IterDataset, name) for name in ('interleave', 'zip', 'mix')},
    'IterDataset.pack': dataset.to_iter_dataset().pack,
    'Path.mkdir': granular.Path('x').mkdir,
    'Path.read_range': granular.Path('x').read_range,
    **{f'aio.{name}': getattr(granular.aio, name) for name in granular.aio.__all__ if name not in MADE},
}


def arguments_of(function):
    """Return the names of the arguments of a function, those of a class and its constructor; none if it takes any."""
    if not callable(function) or (isinstance(function, type) and issubclass(function, Exception)):
        return []
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    takes_any = any(parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) for parameter in parameters)
    return [] if takes_any else [parameter.name for parameter in parameters]


@pytest.mark.parametrize('name', [name for name, one in PUBLIC.items() if arguments_of(one)])
def test_misspelt_arguments_of_public_names_are_answered_with_their_names(name):
    for argument in arguments_of(PUBLIC[name])[-2:]:
        misspelt = f'{argument}s'
        if misspelt in arguments_of(PUBLIC[name]):
            continue
        owner = name.removeprefix('aio.')
        with pytest.raises(
            UnknownArgumentError, match=rf"^{owner}: no .* \['{misspelt}'\]: for {misspelt}, pass {argument}"
        ):
            result = PUBLIC[name](**{misspelt: 1})
            asyncio.run(result)
    assert issubclass(UnknownArgumentError, InvalidArgumentError) and issubclass(UnknownArgumentError, TypeError)


def test_type_error_of_a_function_is_not_taken_for_an_unknown_argument():
    with pytest.raises(TypeError, match='missing 1 required positional argument') as caught:
        granular.Loader(source=[1])
    assert not isinstance(caught.value, granular.GranularError)

    class Rows(granular.DataSource):
        def __init__(self, *rows):
            sum(rows)

    with pytest.raises(TypeError, match='unsupported operand'):
        Rows('a', 'b')


def test_number_alone_is_the_seed_of_a_shuffle_of_all_elements():
    assert list(dataset.shuffle(1000)) == list(dataset.shuffle(seed=1000))
    for name, ours in {'shuffle': 'call shuffle before to_iter_dataset', 'to_iter_dataset': 'it is a stream'}.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': {ours}"):
            operator.attrgetter(name)(dataset.to_iter_dataset())


@pytest.mark.parametrize('kind', [MapDataset, granular.aio.MapDataset])
def test_operations_of_the_other_kind_of_dataset_are_answered(kind):
    chain = kind.range(4)
    stream = chain.to_iter_dataset()
    names = (
        {name for name in dir(type(chain)) if name[0] != '_'},
        {name for name in dir(type(stream)) if name[0] != '_'},
    )
    beginnings = {'source', 'range', 'select_from_datasets', 'aio', 'node', 'parents'}  # and what is not an operation
    for one, missing in ((chain, names[1] - names[0]), (stream, names[0] - names[1] - beginnings)):
        others = {'split', 'enumerate'} if one is chain else {'skip'}
        elsewhere = {'take', 'unbatch', 'shard', 'padded_batch', 'with_format', 'set_epoch', 'element_spec'}
        of_iterators = {'get_state', 'load_state_dict', 'stats'}
        for name in {*missing, *others, *elsewhere, *of_iterators} - {'set_slice', 'with_options'}:
            with pytest.raises(AttributeError, match=rf"'{type(one).__name__}' object has no attribute '{name}': \w+"):
                getattr(one, name)
        with pytest.raises(AttributeError, match="no attribute 'x'$"):
            operator.attrgetter('x')(one)


@pytest.mark.parametrize(
    'module',
    [granular, granular.aio, granular.grain, granular.grain.experimental, granular.grain.python, granular.kappadata],
)
def test_names_of_other_libraries_are_answered_with_those_of_the_package(module):
    names = {
        granular: {'DataLoader': 'granular.Loader loads', 'load_dataset': r'granular.open\(path\)',
                   'IterableDataset': 'it is in granular.integrations.torch',
                   'save': r'granular.save_state\(path, state\)',
                   'DatasetIterator': 'it is in granular.grain', 'experimental': 'it is in granular.grain',
                   'DatasetOptions': 'it is in granular.grain.experimental',
                   'NoSharding': 'it is in granular.grain.sharding',
                   'IndexSampler': 'it is in granular.grain.samplers', 'Batch': 'it is in granular.grain.transforms',
                   'SharedMemoryDataSource': 'it is in granular.grain.sources',
                   'InMemoryDataSource': 'it is in granular.grain.python',
                   **dict.fromkeys(('ModeWrapper', 'PercentFilterWrapper'), 'it is in granular.kappadata')},
        granular.aio: {'TFRecordIterDataset': 'it is in granular.grain.experimental'},
        granular.grain: {'SharedMemoryArray': r'mp_prefetch\(8\) passes', 'ShardOptions': 'it is in granular',
                         'DatasetOptions': 'it is in granular.grain.experimental'},
        granular.grain.experimental: {'SequentialSampler': 'it is in granular.grain.samplers'},
        granular.grain.python: {'Windows': 'it is in granular'},
        granular.kappadata: {'OneHotWrapper': 'a KDWrapper with getitem_class', 'RedisDataset': 'granular.RedisCache',
                             'XTransformWrapper': 'a KDWrapper with a method of the field'},
    }[module]  # fmt: skip
    for name, answer in {**names, 'zz': ''}.items():
        expected = f'^module {module.__name__!r} has no attribute {name!r}{answer and ": "}{answer}'
        with pytest.raises(AttributeError, match=expected if answer else f'{expected}$'):
            getattr(module, name)


def test_methods_of_other_libraries_are_answered_by_readers_writers_and_iterators(tmp_path):
    with granular.DatasetWriter(tmp_path / 'x', {'label': 'int'}) as writer:
        writer.append({'label': 1})
    with granular.DatasetReader(tmp_path / 'x') as reader, iter(dataset.to_iter_dataset()) as iterator:
        answers = {
            writer: {'write': r'call append\(datapoint\)', 'finish': 'close it'},
            reader: {'num_rows': r'len\(reader\)',
                     **dict.fromkeys(('shuffle', 'batch', 'subset'), r'granular.MapDataset.source\(reader\) has op'),
                     **dict.fromkeys(('keys', 'schema'), 'the spec of a reader')},
            iterator: {'save': r'call state_dict\(\)', 'load': r'call load_state_dict\(state\)'},
        }  # fmt: skip
        for one, names in answers.items():
            for same in {one, getattr(one, 'aio', one)}:
                for name, answer in names.items():
                    with pytest.raises(AttributeError, match=f'no attribute {name!r}: {answer}'):
                        getattr(same, name)
                with pytest.raises(AttributeError, match="no attribute 'zz'$"):
                    operator.attrgetter('zz')(same)


async def test_use_of_the_async_api_without_await_is_answered(tmp_path):
    async with granular.aio.DatasetWriter(tmp_path / 'x', {'label': 'int'}) as writer:
        await writer.append({'label': 1})
    reader = granular.aio.DatasetReader(tmp_path / 'x')
    opening = granular.aio.open(tmp_path / 'x')
    for one in (writer, reader, opening):
        with pytest.raises(InvalidArgumentError, match='of the async API: enter it by `async with`$'), one:
            pass
    for ask in (len, list, operator.itemgetter(0)):
        with pytest.raises(InvalidArgumentError, match=r'opens: use `reader = await ...` or `async with'):
            ask(opening)
    assert bool(opening)
    async with opening as opened:
        assert len(opened) == 1


async def test_for_over_a_stream_of_the_async_api_in_a_running_loop_is_answered():
    mapped = granular.aio.MapDataset.range(6).map(abs)
    chain = mapped.to_iter_dataset()
    mix = granular.IterDataset.mix([dataset.to_iter_dataset(), mapped])
    for stream in (chain, chain.filter(bool).batch(2), chain.mp_prefetch(2), mix, copy.copy(chain), chain.repeat()):
        with pytest.raises(InvalidArgumentError, match=r'^a stream of granular.aio: use `async for`'):
            list(stream)
    assert [x async for x in chain] == await asyncio.to_thread(list, chain) == list(range(6))
    assert list(dataset.to_iter_dataset()) == list(range(10))  # as in a notebook


KINDS = tuple(getattr(abc, name) for name in abc.__all__ if name not in ('Hashable', 'ByteString', 'Buffer'))


@pytest.mark.parametrize('kind', [MapDataset, granular.aio.MapDataset])
def test_index_of_a_stream_is_answered_and_it_remains_an_iterable_alone(kind):
    stream = kind.range(3).to_iter_dataset()
    for index in (0, -1, slice(2), 'label'):
        with pytest.raises(
            InvalidArgumentError, match=r'a stream has no indices, .*before to_iter_dataset\(\); for torch'
        ):
            stream[index]
    assert {kind for kind in KINDS if isinstance(stream, kind)} == {abc.Iterable, abc.AsyncIterable}
    assert not isinstance(stream, granular.grain.sources.RandomAccessDataSource)
    assert (bool(stream), operator.length_hint(stream, 7), list(stream), 2 in stream) == (True, 7, [0, 1, 2], True)
    assert (np.asarray(stream).shape, inspect.isgenerator(stream)) == ((), False)
    for call in (len, next, reversed):
        with pytest.raises(TypeError):
            call(stream)


ASYNC = {name for name in granular.aio.__all__ if hasattr(getattr(granular.aio, name), 'get')}


@pytest.mark.parametrize('name', sorted(ASYNC - {'Path'}))
def test_index_of_the_async_api_is_answered_with_get(name):
    kind = getattr(granular.aio, name)
    one = object.__new__(kind)
    for ask in (lambda: one[3], lambda: one['label'], lambda: next(iter(one)), lambda: 3 in one):
        with pytest.raises(InvalidArgumentError, match=rf'^{name}: elements are awaited: use `await x.get\('):
            ask()


@pytest.mark.parametrize('scheme', ['s3://b', 'gs://b', 'http://b', 'az://b', 'hf://datasets/b/c'])
def test_unknown_options_of_stores_are_refused_where_they_are_written(scheme):
    with pytest.raises(InvalidArgumentError, match=r"unknown options \['endpoint'\]: expected some of"):
        granular.Path(f'{scheme}/x', endpoint='http://localhost')


@pytest.mark.parametrize(
    ('scheme', 'library', 'names'),
    [
        (
            's3://b', 'boto3',
            {'aws_access_key_id': 'key', 'aws_secret_access_key': 'secret', 'aws_session_token': 'token',
             'region_name': 'region', 'profile_name': 'profile', 'verify': 'tls_verify'},
        ),
        ('s3://b', 's3fs', {'username': 'key', 'password': 'secret', 'use_ssl': 'endpoint_url'}),
        (
            's3://b', 'pyarrow',
            {'access_key': 'key', 'secret_key': 'secret', 'session_token': 'token', 'anonymous': 'anon',
             'endpoint_override': 'endpoint_url', 'scheme': 'endpoint_url'},
        ),
        (
            's3://b', 'obstore',
            {'access_key_id': 'key', 'secret_access_key': 'secret', 'endpoint': 'endpoint_url',
             'skip_signature': 'anon', 'allow_http': 'endpoint_url'},
        ),
        ('gs://b', 'google-cloud-storage', {'credentials': 'token', 'project_id': 'project'}),
        ('gs://b', 'pyarrow', {'access_token': 'token', 'anonymous': 'anon', 'endpoint_override': 'endpoint_url'}),
        ('gs://b', 'obstore', {'service_account_path': 'token', 'service_account': 'token'}),
        ('az://b', 'azure-storage-blob', {'account_url': 'endpoint_url'}),
        ('az://b', 'pyarrow', {'blob_storage_authority': 'account_host'}),
        ('az://b', 'obstore', {'access_key': 'account_key', 'sas_key': 'sas_token'}),
        ('hf://datasets/b/c', 'huggingface_hub', {'use_auth_token': 'token', 'endpoint': 'endpoint_url'}),
    ],
)  # fmt: skip
def test_options_of_other_libraries_are_answered_with_those_of_the_store(scheme, library, names):
    with pytest.raises(InvalidArgumentError, match='unknown options') as caught:
        granular.Path(f'{scheme}/x', **dict.fromkeys(names, 'private'))
    for name, ours in names.items():
        assert f'for {name}, pass {ours}' in str(caught.value)
    assert 'private' not in str(caught.value)
    with pytest.raises(InvalidArgumentError, match=r"unknown options \['key_'\]: expected some of \[.*\]$"):
        granular.Path(f'{scheme}/x', key_=1)


def test_errors_are_names_of_the_package():
    for name in vars(granular.errors):
        if name.endswith('Error'):
            assert getattr(granular, name) is getattr(granular.errors, name)


def test_unknown_fields_are_refused_where_they_are_selected(tmp_path):
    with granular.DatasetWriter(tmp_path / 'x', {'label': 'int'}) as writer:
        writer.append({'label': 1})
    with granular.DatasetReader(tmp_path / 'x') as reader:
        for refused in (
            lambda: MapDataset.source(reader).select(['lable']),
            lambda: MapDataset.source(reader).oversample('lable'),
            lambda: MapDataset.source(reader).filter_classes('lable', [1]),
        ):
            with pytest.raises(UnknownKeyError, match=r"unknown fields \['lable'\]: the spec has \['label'\]"):
                refused()
        selections = MapDataset.source(reader)
        reads = (reader.__getitem__, lambda i: reader.fetch([0, i]), lambda i: selections.subset([0, i]))
        for index, read in itertools.product((1, -2), reads):
            with pytest.raises(OutOfRangeError, match=f'index {index} is out of range: expected -1 to 0'):
                read(index)


def test_more_indices_than_memory_are_refused_by_the_first_that_is_wrong(tmp_path):
    with granular.DatasetWriter(tmp_path / 'x', {'label': 'int'}) as writer:
        writer.append({'label': 1})
    with granular.DatasetReader(tmp_path / 'x') as reader:
        assert reader.fetch(range(-1, 1)) == [{'label': 1}] * 2
        for indices, first in ((range(10**15), 1), (range(0, -(10**15), -1), -2)):
            with pytest.raises(OutOfRangeError, match=f'index {first} is out of range'):
                reader.fetch(indices)
    with pytest.raises(InvalidArgumentError, match=r'expected indices that fit into memory, got range\(0, 10{15}\)'):
        dataset.repeat().fetch(range(10**15))


def test_stage_that_does_not_pickle_is_named():
    lock = threading.Lock()

    def locked(number):
        return number, lock

    stream = dataset.map(abs).map(locked).map(len).to_iter_dataset()
    with iter(stream.mp_prefetch(MultiprocessingOptions(1))) as iterator:
        with pytest.raises(InvalidArgumentError, match=r'functions that pickle, map\(.*locked\) does not: TypeError'):
            next(iterator)


@pytest.mark.parametrize('workers', [{}, {'workers': 1, 'mp': 'fork'}])
@pytest.mark.filterwarnings('ignore:.*multi-threaded.*:DeprecationWarning')
def test_texts_of_any_length_are_batched(workers):
    texts = ['a', 'longer', '', 'ä' * 300, 'b', 'c']
    with granular.Loader([{'text': text, 'data': text.encode()} for text in texts], 3, **workers) as loader:
        batches = list(loader)
    assert [text for batch in batches for text in batch['text'].tolist()] == texts
    assert [data for batch in batches for data in batch['data'].tolist()] == [text.encode() for text in texts]
    with granular.Loader([{'text': 'a'}, {'text': 1}], 2) as loader, pytest.raises(DatapointError, match="key 'text'"):
        next(loader)


@pytest.mark.parametrize('datapoints', [[{'a': [1]}, {'a': [1, 2]}], [{'a': 1}, {'b': 1}], [{'a': 1}, {'a': 'x'}]])
def test_datapoints_that_do_not_fit_a_batch_are_an_error_with_the_remedy(datapoints):
    with pytest.raises(DatapointError, match='datapoint 1 of a batch .*: make them equal in a map, or pass batch_fn'):
        list(MapDataset.source(datapoints).to_iter_dataset().batch(2))


def test_a_reader_without_functions_says_where_they_are(tmp_path):
    with granular.DatasetWriter(tmp_path / 'data', {'a': 'int'}) as writer:
        writer.append({'a': 1})
    with pytest.raises(UnknownTypeError, match=r"key 'a' has type 'int', expected one of: none, .*granular.decoders"):
        granular.open(tmp_path / 'data', {})
    with pytest.raises(UnknownTypeError, match=r"of: png: pass {\*\*granular.decoders, ...}, which has 'int'$"):
        granular.open(tmp_path / 'data', {'png': None})


def test_a_rank_of_torchrun_without_a_process_group_is_an_error(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(InvalidArgumentError, match=r'one of 2 processes .*: call torch.distributed.init_process_group'):
        granular.ShardByTorchRank().shard_index  # noqa: B018 - the rank is asked for where it is used
    monkeypatch.setenv('WORLD_SIZE', '1')
    assert granular.ShardByTorchRank().shard_count == 1


def test_a_source_without_a_length_names_remedies_that_help():
    class Endless:
        def __getitem__(self, index):
            return 2 * index

    class Sized(Endless):
        def __len__(self):
            return 5

    for call in (lambda: MapDataset.source(Endless()).shuffle(seed=0), lambda: granular.sources.Epochs(Endless())):
        with pytest.raises(
            InvalidArgumentError, match='Endless has no length: give it a __len__, or pass length= to sou'
        ):
            call()
    assert list(MapDataset.source(Sized())) == [0, 2, 4, 6, 8]
    epochs = granular.sources.Epochs(Endless(), length=3, shuffle=False)
    assert [epochs[step] for step in range(4)] == [0, 2, 4, 0]
