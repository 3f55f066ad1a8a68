"""OpenTelemetry (extra ``opentelemetry``): the metrics of :mod:`granular.metrics` as observable instruments.

::

    import opentelemetry.metrics

    instrument(opentelemetry.metrics.get_meter('training'))

Each name begins with ``granular.``, such as ``granular.requests`` with the attributes ``store`` and ``outcome``.
OpenTelemetry has no observable histograms, so a histogram such as ``granular.first_byte`` becomes two counters:
``granular.first_byte``, of seconds, and ``granular.first_byte.bucket``, the number of times up to the attribute ``le``,
as in Prometheus.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from granular import metrics
from granular._support.lazy import import_extra

__all__ = ['instrument']

_api: Any = import_extra('opentelemetry.metrics', 'opentelemetry')


def instrument(meter: Any) -> None:
    """Create observable instruments for all metrics of this process and of its worker processes.

    Call it once for a meter: the instruments are read whenever its provider collects.

    Args:
      meter: an ``opentelemetry.metrics.Meter``.
    """
    for sample in metrics.samples():
        name, unit = f'granular.{sample.name}', {'seconds': 's', 'bytes': 'By'}.get(sample.unit, '1')
        create = meter.create_observable_up_down_counter if sample.kind == 'gauge' else meter.create_observable_counter
        create(name, [_callback(sample.name, _values)], unit, sample.description)
        if sample.kind == 'histogram':
            create(f'{name}.bucket', [_callback(sample.name, _buckets)], '1', f'{sample.description} By upper bound.')


def _callback(name: str, observe: Callable[[metrics.Sample], Iterator[Any]]) -> Callable[[Any], Iterable[Any]]:
    def read(options: Any) -> Iterable[Any]:
        return list(observe(next(sample for sample in metrics.samples() if sample.name == name)))

    return read


def _values(sample: metrics.Sample) -> Iterator[Any]:
    for labels, value in sample.values.items():
        attributes = dict(zip(sample.labels, labels, strict=True))
        yield _api.Observation(value.sum if sample.kind == 'histogram' else value, attributes)


def _buckets(sample: metrics.Sample) -> Iterator[Any]:
    for labels, histogram in sample.values.items():
        attributes = dict(zip(sample.labels, labels, strict=True))
        for bound, count in histogram.cumulative():
            yield _api.Observation(count, {**attributes, 'le': bound})
