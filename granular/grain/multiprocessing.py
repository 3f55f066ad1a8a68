"""``grain.multiprocessing``: the options of worker processes."""

from granular.aio.pipeline.transforms import MultiprocessingOptions

__all__ = [
    'MultiprocessingOptions',
]
