"""Orders: the datapoint at each step as a pure function of seed and step, for whole arrays of steps at once."""

from granular.aio.pipeline.orders import MAX_SEED, Blocks, Index, Order, Permutation, Sequential, permute

__all__ = [
    'MAX_SEED',
    'Blocks',
    'Index',
    'Order',
    'Permutation',
    'Sequential',
    'permute',
]
