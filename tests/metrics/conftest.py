"""Metrics of a test have labels of their own, although the servers of other tests have used up the usual number."""

import pytest

from granular import metrics


@pytest.fixture(autouse=True)
def more_labels(monkeypatch):
    monkeypatch.setattr(metrics, 'MAX_LABELS', metrics.MAX_LABELS + len(metrics.snapshot().stores))
    metrics.reset()
