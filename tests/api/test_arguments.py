"""Checks of integer arguments: one rule, and one text, for all of them."""

import functools

import numpy as np
import pytest

import granular
from granular import shuffle
from granular.errors import InvalidArgumentError
from granular.indexing import check_integer

dataset = granular.MapDataset.source(range(10))

ARGUMENTS = {
    'batch': functools.partial(granular.Loader, dataset),
    'batch_size': dataset.batch,
    'block': shuffle.Blocks,
    'cycle_length': functools.partial(granular.IterDataset.interleave, [dataset.to_iter_dataset()]),
    'num_epochs': dataset.repeat,
    'num_records': granular.IndexSampler,
    'prefetch_buffer_size': lambda value: granular.ReadOptions(prefetch_buffer_size=value),
    'seed': dataset.seed,
    'window_size': functools.partial(dataset.to_iter_dataset().window_shuffle, seed=0),
}


@pytest.mark.parametrize('value', [-1, 1.0, '1', True, None])
def test_a_checked_integer_is_within_its_limits_and_not_a_bool(value):
    with pytest.raises(InvalidArgumentError, match=rf'^size: expected an integer >= 0, got {value!r}$'):
        check_integer('size', value, 0)


def test_a_checked_integer_is_returned_as_an_int():
    assert type(check_integer('size', np.uint8(3), 1, 3)) is int
    with pytest.raises(InvalidArgumentError, match=r'^size: expected an integer from 1 to 3, got 4$'):
        check_integer('size', 4, 1, 3)


@pytest.mark.parametrize('name', ARGUMENTS)
def test_errors_name_the_argument(name):
    for value in (-1, True, 1.5):
        with pytest.raises(InvalidArgumentError, match=rf'^{name}: expected an integer .*, got {value}$'):
            ARGUMENTS[name](value)
