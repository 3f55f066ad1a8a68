"""Prometheus (extra ``prometheus``): the metrics of :mod:`granular.metrics`, read when they are scraped.

::

    import prometheus_client

    prometheus_client.REGISTRY.register(Collector())

Each name begins with ``granular_``, such as ``granular_requests_total{store="s3://bucket",outcome="ok"}`` and
``granular_first_byte_seconds_bucket{store="s3://bucket",le="0.0625"}``.
"""

from collections.abc import Iterator
from typing import Any

from granular import metrics
from granular._support.lazy import import_extra

__all__ = ['Collector']

_core: Any = import_extra('prometheus_client.core', 'prometheus')
_registry: Any = import_extra('prometheus_client.registry', 'prometheus')


class Collector(_registry.Collector):  # type: ignore[misc]
    """Collects the metrics of this process and of its worker processes, for a registry of ``prometheus_client``.

    A scrape takes less than a millisecond. The registry of ``prometheus_client``'s multiprocess mode does not collect
    it: register it in each process that reads.
    """

    def collect(self) -> Iterator[Any]:
        """Yield the families of all metrics."""
        for sample in metrics.samples():
            name = '_'.join(filter(None, ('granular', sample.name, sample.unit)))
            make = getattr(_core, f'{sample.kind.capitalize()}MetricFamily')
            family = make(name, sample.description, labels=sample.labels)
            for labels, value in sample.values.items():
                if sample.kind == 'histogram':
                    family.add_metric(labels, value.cumulative(), value.sum)
                else:
                    family.add_metric(labels, value)
            yield family
