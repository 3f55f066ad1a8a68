"""``grain.samplers``: the orders of a DataLoader."""

from granular.aio.pipeline.samplers import IndexSampler, SequentialSampler

__all__ = [
    'IndexSampler',
    'SequentialSampler',
]
