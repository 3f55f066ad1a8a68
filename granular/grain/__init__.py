"""The names of Google Grain 0.2, in its modules: a program for Grain changes its import alone.

::

    import granular.grain as grain

    dataset = grain.MapDataset.source(source).shuffle(seed=42).map(preprocess).batch(batch_size=2)

Elements, orders and errors are Grain's; the page "Coming from Grain" lists what differs, and what is absent. The
classes are those of :mod:`granular`: both can be used in one program.
"""

from typing import TYPE_CHECKING

from granular._support.lazy import lazy_names

if TYPE_CHECKING:
    from granular.aio.pipeline.blocking_iterator import DatasetIterator as DatasetIterator
    from granular.aio.pipeline.data_loader import DataLoader as DataLoader
    from granular.aio.pipeline.data_loader import load as load
    from granular.aio.pipeline.iter_dataset import IterDataset as IterDataset
    from granular.aio.pipeline.samplers import RecordMetadata as RecordMetadata
    from granular.aio.pipeline.transforms import MultiprocessingOptions as MultiprocessingOptions
    from granular.aio.pipeline.transforms import ReadOptions as ReadOptions
    from granular.grain import checkpoint as checkpoint
    from granular.grain import experimental as experimental
    from granular.grain import multiprocessing as multiprocessing
    from granular.grain import python as python
    from granular.grain import samplers as samplers
    from granular.grain import sharding as sharding
    from granular.grain import sources as sources
    from granular.grain import transforms as transforms
    from granular.grain.python import DataLoaderIterator as DataLoaderIterator
    from granular.sync.pipeline import MapDataset as MapDataset
else:
    lazy_names(
        __name__,
        {
            'granular.grain': ('checkpoint experimental multiprocessing python samplers sharding sources transforms'),
            'granular.aio.pipeline.blocking_iterator': 'DatasetIterator',
            'granular.grain.python': 'DataLoaderIterator',
            'granular.aio.pipeline.data_loader': 'DataLoader load',
            'granular.aio.pipeline.iter_dataset': 'IterDataset',
            'granular.aio.pipeline.samplers': 'RecordMetadata',
            'granular.aio.pipeline.transforms': 'MultiprocessingOptions ReadOptions',
            'granular.sync.pipeline': 'MapDataset',
        },
    )
