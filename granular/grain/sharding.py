"""``grain.sharding``: which part of the data a process reads."""

from granular.aio.pipeline.shards import NoSharding, ShardByJaxProcess, ShardOptions

__all__ = [
    'NoSharding',
    'ShardByJaxProcess',
    'ShardOptions',
]
