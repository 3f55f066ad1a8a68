"""Pipelines with names, whose states each release saves: they may be added to, but never changed."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import granular
from granular import IterDataset, MapDataset, ReadOptions, ShardOptions, shuffle, sources
from granular.grain import MultiprocessingOptions
from tests.pipeline.compositions import functions as f
from tests.pipeline.compositions.atoms import Stream

WEIGHTS: Final = {'a': 3.0, 'b': 2.0, 'c': 1.0}


def source(stream: int = 0, length: int = 24, documents: bool = False) -> Any:
    return MapDataset.source(Stream(stream, length, documents))


def read(stream: int = 0, length: int = 24) -> Any:
    return source(stream, length).to_iter_dataset()


def documents(stream: int = 0, length: int = 24) -> Any:
    return source(stream, length, documents=True).to_iter_dataset()


def packed(**options: Any) -> Any:
    options = {'length': {'tokens': 11, 'ids': 11}, 'num_packing_bins': 3, **options}
    return documents().pack(options.pop('length'), **options)


def part(number: int) -> Any:
    """One of the files of an interleaved dataset."""
    return read(number, 3 + 2 * (number % 3))


class Turns:
    """A selection map: two of the first dataset, then one of the second."""

    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> tuple[int, int]:
        turn, place = divmod(index, 3)
        return (1, turn) if place == 2 else (0, 2 * turn + place)


def mixed(weights: Mapping[str, float] = WEIGHTS) -> Any:
    """A mix by name. Its streams have stages of their own, one of them in front of the mix holds elements back."""
    streams = {'a': read(0, 40), 'b': read(1, 40).window_shuffle(4, 2), 'c': source(2, 40).shuffle(3).to_iter_dataset()}
    return IterDataset.mix({name: streams[name] for name in weights}, weights)


def texts(weights: Mapping[str, float] = WEIGHTS) -> Any:
    return IterDataset.mix({name: documents(i, 30) for i, name in enumerate(WEIGHTS) if name in weights}, weights)


FIRST_FIT: Final = {'split_long': True, 'shuffle_bins': True, 'seed': 3}

MAPS: Final[dict[str, Callable[[], Any]]] = {
    'source': source,
    'range': lambda: MapDataset.range(1, 22, 2),
    'shuffle': lambda: source().shuffle(1),
    'shuffle Permutation': lambda: source().shuffle(1, shuffle.Permutation()),
    'shuffle Blocks': lambda: source().shuffle(1, shuffle.Blocks(2, 3)),
    'map window_shuffle': lambda: source().window_shuffle(5, 1),
    'slice': lambda: source()[3:20:2],
    'subset': lambda: source().subset([3, 1, 4, 1, 5, 9, 2, 6]),
    'percent': lambda: source().percent(0.25, 0.75),
    'map repeat': lambda: source(0, 9).shuffle(1).repeat(3),
    'map map': lambda: source().map(f.keep),
    'map random_map': lambda: source().seed(7).random_map(f.at_random),
    'map map_with_index': lambda: source().map_with_index(f.with_index),
    'map filter': lambda: source().filter(f.is_kept),
    'map flat_map': lambda: source().flat_map(f.parts, max_fan_out=4),
    'map batch': lambda: source(0, 26).batch(4),
    'map mix': lambda: MapDataset.mix([source(0), source(1)], [2, 1]),
    'concatenate': lambda: MapDataset.concatenate([source(0, 7), source(1, 9)]).shuffle(3),
    'map zip': lambda: MapDataset.zip([source(0), source(1)]),
    'select_from_datasets': lambda: MapDataset.select_from_datasets([source(0), source(1)], Turns()),
    'filter_classes': lambda: source(0, 24, True).filter_classes('label', valid_classes=[0, 1]),
    'oversample': lambda: source(0, 12, True).oversample('label'),
    'chain': lambda: source().seed(3).shuffle().filter(f.is_kept).map(f.keep).repeat(2).random_map(f.at_random),
}

STREAMS: Final[dict[str, Callable[[], Any]]] = {
    'read': read,
    'options': lambda: source().to_iter_dataset(ReadOptions(num_threads=2, prefetch_buffer_size=3)),
    'allow_nones': lambda: source().filter(f.is_kept).to_iter_dataset(allow_nones=True),
    'on_error': lambda: source().map(f.fails_for_some).to_iter_dataset(on_error='skip'),
    'map': lambda: read().map(f.keep),
    'random_map': lambda: read().seed(7).random_map(f.at_random),
    'map_with_index': lambda: read().filter(f.is_kept).map_with_index(f.with_index),
    'filter': lambda: read().filter(f.is_kept),
    'flat_map': lambda: read().flat_map(f.parts),
    'batch': lambda: read(0, 26).batch(4),
    'batch drop_remainder': lambda: read(0, 26).batch(4, drop_remainder=True),
    'rebatch': lambda: read(0, 26).batch(4).rebatch(3),
    'rebatch to larger': lambda: read(0, 26).batch(4).rebatch(7),
    'repeat': lambda: read(0, 9).repeat(3),
    'limit': lambda: read().repeat().limit(50),
    'cache': lambda: read(0, 9).cache().repeat(3),
    'window_shuffle': lambda: read().window_shuffle(5, 1),
    'prefetch': lambda: read().prefetch(3),
    'mp_prefetch': lambda: read(0, 100).map(f.keep).mp_prefetch(MultiprocessingOptions(1, 2, 'fork')),
    'first_fit': packed,
    'first_fit split_long': lambda: packed(length={'tokens': 5}, **FIRST_FIT),
    'first_fit max_segments': lambda: packed(max_segments=2, alignment=2, padding={'ids': -1}),
    'best_fit': lambda: packed(strategy='best_fit', meta_features=['label']),
    'concat_then_split': lambda: packed(strategy='concat_then_split', bos={'ids': -1}),
    'pack of rows of one process': lambda: packed(shard_options=ShardOptions(0, 1)),
    'mix': lambda: IterDataset.mix([read(0), read(1, 50)], [1, 3]),
    'mix by name': mixed,
    'interleave': lambda: IterDataset.interleave([part(i) for i in range(5)], 2),
    'interleave lazily': lambda: IterDataset.interleave(MapDataset.range(6).shuffle(1).map(part), 3),
    'zip': lambda: IterDataset.zip([read(0), read(1)]),
    'zip not strict': lambda: IterDataset.zip([read(0), read(1, 9)], strict=False),
    'window_shuffle, batch': lambda: read().window_shuffle(7, 1).batch(4),
    'batch, window_shuffle': lambda: read().batch(2).window_shuffle(4, 1),
    'window_shuffle twice': lambda: read().window_shuffle(4, 1).window_shuffle(6, 2),
    'flat_map, window_shuffle, batch': lambda: read(0, 12).flat_map(f.parts).window_shuffle(5, 1).batch(4),
    'flat_map twice': lambda: read(0, 8).flat_map(f.parts).flat_map(f.parts),
    'filter, batch, rebatch': lambda: read(0, 40).filter(f.is_kept).batch(4).rebatch(3),
    'filter twice': lambda: read(0, 40).map(f.keep).filter(f.is_kept).flat_map(f.parts).filter(f.is_kept),
    'cache, window_shuffle, repeat': lambda: read(0, 9).cache().window_shuffle(4, 1).repeat(3).batch(5),
    'window_shuffle, cache, repeat': lambda: read(0, 9).window_shuffle(4, 1).cache().repeat(3),
    'repeat, random_map': lambda: read(0, 9).repeat(3).seed(3).random_map(f.at_random),
    'pack, batch': lambda: packed().batch(2),
    'pack, window_shuffle': lambda: packed().window_shuffle(3, 1),
    'window_shuffle, pack': lambda: documents().window_shuffle(5, 1).pack({'tokens': 9}, num_packing_bins=2),
    'flat_map, pack': lambda: documents().flat_map(f.parts).pack({'tokens': 9}, strategy='best_fit'),
    'pack, flat_map, batch': lambda: packed().flat_map(f.singles).batch(6),
    'interleave, filter, batch': lambda: (
        IterDataset.interleave([part(i) for i in range(5)], 2).filter(f.is_kept).batch(3)
    ),
    'interleave of windows': lambda: IterDataset.interleave([part(i).window_shuffle(3, i) for i in range(5)], 2),
    'mix of mixes': lambda: IterDataset.mix([IterDataset.mix([read(0), read(1)]), read(2).batch(1).map(f.keep)]),
    'zip of mix and windows': lambda: IterDataset.zip(
        [IterDataset.mix([read(0), read(1)]), read(2, 30).window_shuffle(4, 1)], strict=False
    ),
    'mix by name, window_shuffle': lambda: mixed().window_shuffle(6, 1),
    'mix by name, batch': lambda: mixed().batch(4),
    'mix by name, batch, rebatch': lambda: mixed().batch(4).rebatch(3),
    'mix by name, flat_map': lambda: mixed().flat_map(f.parts),
    'mix by name, filter, cache, repeat': lambda: mixed().filter(f.is_kept).cache().repeat(2),
    'mix by name, pack': lambda: texts().pack({'tokens': 9}, num_packing_bins=3),
    'mix by name, pack, window_shuffle, batch': lambda: (
        texts().pack({'tokens': 9}, strategy='concat_then_split').window_shuffle(4, 1).batch(2)
    ),
    'mix by name of mixes by name': lambda: IterDataset.mix({'m': mixed(), 'd': read(7, 30)}, {'m': 2, 'd': 1}),
}

OTHER_WEIGHTS: Final[dict[str, Callable[[Mapping[str, float]], Any]]] = {
    'weights': mixed,
    'weights, window_shuffle': lambda weights: mixed(weights).window_shuffle(6, 1),
    'weights, batch': lambda weights: mixed(weights).batch(4),
    'weights, pack': lambda weights: texts(weights).pack({'tokens': 9}, num_packing_bins=3),
}


def sharded(shard: ShardOptions, stream: int = 0, length: int = 48, documents: bool = False) -> Any:
    return source(stream, length, documents).shuffle(1).to_iter_dataset(shard_options=shard)


OTHER_HOSTS: Final[dict[str, Callable[[ShardOptions], Any]]] = {
    'hosts': sharded,
    'hosts, batch': lambda shard: sharded(shard).batch(3),
    'hosts, filter': lambda shard: sharded(shard).filter(f.is_kept),
    'hosts, window_shuffle': lambda shard: sharded(shard).window_shuffle(5, 1),
    'hosts, flat_map': lambda shard: sharded(shard).flat_map(f.parts),
    'hosts, cache': lambda shard: sharded(shard).cache().repeat(2),
    'hosts, rebatch': lambda shard: sharded(shard).batch(4).rebatch(3),
    'hosts, pack': lambda shard: sharded(shard, documents=True).pack({'tokens': 9}, num_packing_bins=2),
    'hosts, mix': lambda shard: IterDataset.mix([sharded(shard), sharded(shard, 1)]),
    'pack of shards': lambda shard: documents().pack({'tokens': 9}, num_packing_bins=2, shard_options=shard),
}

Fetched = Callable[..., Any]

LOADERS: Final[dict[str, Callable[[], Any]]] = {
    'Epochs': lambda: sources.Epochs(datapoints(), seed=1),
    'Epochs in order': lambda: sources.Epochs(datapoints(), shuffle=False),
    'Epochs of Blocks': lambda: sources.Epochs(datapoints(), shuffle=shuffle.Blocks(2, 3), seed=1),
    'Sample': lambda: sources.Sample(datapoints(), seed=1),
    'Truncate': lambda: sources.Truncate(datapoints(), 7),
    'Transform': lambda: sources.Transform(sources.Epochs(datapoints(), seed=1), f.with_seed, seed=3),
    'Mix': lambda: sources.Mix([sources.Epochs(datapoints()), sources.Epochs(datapoints(1))], [2, 1], seed=3),
    'Interleave': lambda: sources.Interleave([sources.Epochs(datapoints()), sources.Epochs(datapoints(1))]),
    'MapDataset': lambda: MapDataset.source(datapoints()).shuffle(1).map(f.keep),
    'MapDataset repeated': lambda: MapDataset.source(datapoints()).shuffle(1).repeat(2),
    'MapDataset endless': lambda: MapDataset.source(datapoints()).shuffle(1).repeat(),
}


def datapoints(stream: int = 0) -> Any:
    return source(stream).map(f.as_datapoint)


class Backwards:
    """A sampler of a program's own."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> granular.grain.RecordMetadata:
        return granular.grain.RecordMetadata(index, 23 - index)

    def __repr__(self) -> str:
        return 'Backwards()'


class Keep(granular.grain.transforms.Map[Any, Any]):
    def map(self, element: Any) -> Any:
        return f.keep(element)


class AtRandom(granular.grain.transforms.RandomMap[Any, Any]):
    def random_map(self, element: Any, rng: Any) -> Any:
        return f.at_random(element, rng)


class IsKept(granular.grain.transforms.Filter[Any]):
    def filter(self, element: Any) -> bool:
        return f.is_kept(element)


class Parts(granular.grain.experimental.FlatMapTransform[Any, Any]):
    max_fan_out = 4

    def flat_map(self, element: Any) -> list[Any]:
        return f.parts(element)


def loaded(sampler: Any, operations: list[Any]) -> granular.grain.DataLoader:
    return granular.grain.DataLoader(data_source=Stream(0, 24), sampler=sampler, operations=operations)


def shuffled() -> granular.grain.samplers.IndexSampler:
    return granular.grain.samplers.IndexSampler(24, shuffle=True, num_epochs=2, seed=1)


DATA_LOADERS: Final[dict[str, Callable[[], granular.grain.DataLoader]]] = {
    'SequentialSampler': lambda: loaded(granular.grain.samplers.SequentialSampler(24), []),
    'IndexSampler': lambda: loaded(granular.grain.samplers.IndexSampler(24, num_epochs=2), []),
    'IndexSampler shuffled': lambda: loaded(shuffled(), []),
    'sampler of a program': lambda: loaded(Backwards(), [Keep()]),
    'operations': lambda: loaded(shuffled(), [Keep(), AtRandom(), IsKept(), granular.grain.transforms.Batch(4)]),
    'operations behind flat_map': lambda: loaded(shuffled(), [IsKept(), Parts(), granular.grain.transforms.Batch(5)]),
    'load': lambda: granular.grain.load(
        Stream(0, 24), num_epochs=2, shuffle=True, seed=3, transformations=[f.keep], batch_size=5
    ),
}
