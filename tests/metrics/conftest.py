"""Metrics of a test have labels of their own, although the servers of other tests have used up the usual number."""

import pytest

from granular import metrics


@pytest.fixture(autouse=True)
def more_labels(monkeypatch):
    used = max(len(each.stores) for each in (metrics.counters, metrics._ended))
    monkeypatch.setattr(metrics, 'MAX_LABELS', metrics.MAX_LABELS + used)
    metrics.counters.stages.clear()
    metrics._ended.stages.clear()
