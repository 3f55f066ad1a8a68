"""Exporters: the exposition of prometheus-client, and the data points of OpenTelemetry's in-memory reader."""

import opentelemetry.sdk.metrics
import prometheus_client
import prometheus_client.parser
import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

import granular
import granular.integrations.opentelemetry
import granular.integrations.prometheus
from granular import metrics
from tests.support.servers import HTTPServer


@pytest.fixture
def place(tmp_path):
    (tmp_path / 'file').write_bytes(bytes(1000))
    with HTTPServer(tmp_path) as server:
        for start in range(0, 500, 100):
            granular.Path(f'{server.endpoint}/file').read_range(start, start + 10)
        next(iter(granular.MapDataset.source(range(3)).to_iter_dataset()))
        yield server.endpoint


def test_prometheus_exposes_every_metric(place):
    registry = prometheus_client.CollectorRegistry()
    registry.register(granular.integrations.prometheus.Collector())
    text = prometheus_client.generate_latest(registry).decode()
    families = {family.name: family for family in prometheus_client.parser.text_string_to_metric_families(text)}
    for sample in metrics.samples():
        name = '_'.join(filter(None, ('granular', sample.name, sample.unit)))
        assert families[name].type == sample.kind
        assert families[name].documentation == sample.description
    now = metrics.snapshot().stores[place]
    assert registry.get_sample_value('granular_requests_total', {'store': place, 'outcome': 'ok'}) == now.ok == 5
    assert registry.get_sample_value('granular_received_bytes_total', {'store': place}) == now.bytes == 50
    assert registry.get_sample_value('granular_requests_in_flight', {'store': place}) == 0
    assert registry.get_sample_value('granular_first_byte_seconds_count', {'store': place}) == now.first_byte.count
    assert registry.get_sample_value('granular_first_byte_seconds_sum', {'store': place}) == now.first_byte.sum
    buckets = [
        registry.get_sample_value('granular_first_byte_seconds_bucket', {'store': place, 'le': bound})
        for bound in (*map(str, metrics.BOUNDS), '+Inf')
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == now.first_byte.count >= 5
    assert registry.get_sample_value('granular_wait_seconds_count', {'iterator': 'stream'}) >= 1


def test_opentelemetry_collects_every_metric(place):
    reader = InMemoryMetricReader()
    provider = opentelemetry.sdk.metrics.MeterProvider([reader], shutdown_on_exit=False)
    granular.integrations.opentelemetry.instrument(provider.get_meter('training'))
    collected = {
        metric.name: {tuple(sorted(point.attributes.items())): point.value for point in metric.data.data_points}
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    provider.shutdown()
    now, store = metrics.snapshot().stores[place], ('store', place)
    assert collected['granular.requests'][('outcome', 'ok'), store] == now.ok == 5
    assert collected['granular.received'][(store,)] == 50
    assert collected['granular.requests_in_flight'][(store,)] == 0
    assert collected['granular.first_byte'][(store,)] == now.first_byte.sum
    assert collected['granular.first_byte.bucket'][('le', '+Inf'), store] == now.first_byte.count >= 5
    assert collected['granular.wait.bucket'][('iterator', 'stream'), ('le', '+Inf')] >= 1
    with_values = {sample.name for sample in metrics.samples() if sample.values}
    assert {name.split('.')[1] for name in collected} == with_values
