"""``grain.transforms``: functions of elements, as objects."""

from granular.aio.pipeline.transforms import Batch, Transformation
from granular.aio.pipeline.transforms import FilterTransform as Filter
from granular.aio.pipeline.transforms import MapTransform as Map
from granular.aio.pipeline.transforms import MapWithIndexTransform as MapWithIndex
from granular.aio.pipeline.transforms import RandomMapTransform as RandomMap

__all__ = [
    'Batch',
    'Filter',
    'Map',
    'MapWithIndex',
    'RandomMap',
    'Transformation',
]
