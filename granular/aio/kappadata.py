"""The async API of :mod:`granular.kappadata`: fields are coroutine functions, and what reads labels is awaited."""

from granular.aio.pipeline.fields.fields import KDDataset, KDWrapper
from granular.aio.pipeline.fields.mode_wrapper import ModeWrapper
from granular.aio.pipeline.fields.wrappers import (
    ClassFilterWrapper,
    KDConcatDataset,
    OversamplingWrapper,
    PercentFilterWrapper,
    RepeatWrapper,
    ShuffleWrapper,
    SubsetWrapper,
)

__all__ = [
    'ClassFilterWrapper',
    'KDConcatDataset',
    'KDDataset',
    'KDSubset',
    'KDWrapper',
    'ModeWrapper',
    'OversamplingWrapper',
    'PercentFilterWrapper',
    'RepeatWrapper',
    'ShuffleWrapper',
    'SubsetWrapper',
]

KDSubset = SubsetWrapper
