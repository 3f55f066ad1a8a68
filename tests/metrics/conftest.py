"""Metrics of a test begin without those of other tests, whose servers have used up the labels."""

import pytest

from granular import metrics


@pytest.fixture(autouse=True)
def few_labels():
    for each in (metrics.counters, metrics._ended):
        for label in each.stores.keys() - {'file'}:
            del each.stores[label]
        each.stages.clear()
