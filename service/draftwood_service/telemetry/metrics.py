"""The instruments: histograms and counters of requests and calls, and what is observed of a server.

The load is shown under vLLM's names as well, for endpoint pickers and autoscalers that know no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from draftwood_service.telemetry import names
from draftwood_service.telemetry.base import RequestRecord
from draftwood_service.telemetry.names import Kind, Metric
from draftwood_service.telemetry.observed import OBSERVED, Observed


class Metrics:
    """The instruments of a service.

    Args:
        tenants: that are shown by name; the requests of others have no label of a tenant.

    Attributes:
        model, engine: names of the served model and of what runs it; "" until they are known.
    """

    def __init__(self, meter: Meter, tenants: frozenset[str]) -> None:
        self._meter = meter
        self._tenants = tenants
        self._instruments: dict[Metric, Any] = {metric: self._recorded(metric) for metric in names.RECORDED}
        self.model = self.engine = ""

    def observe(self, observed: Observed) -> None:
        """Collects the metrics of a server from now on."""
        for metric in OBSERVED:
            gauge = metric.kind is Kind.GAUGE
            make: Any = self._meter.create_observable_gauge if gauge else self._meter.create_observable_counter
            make(metric.name, [partial(_read, observed, metric)], metric.unit, metric.description)

    def call(self, method: str, code: str, seconds: float) -> None:
        attributes = {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method, names.RPC_STATUS: code}
        if code != "OK":
            attributes[names.ERROR_TYPE] = code
        self._instruments[names.CALL_DURATION].record(seconds, attributes)

    def request(self, record: RequestRecord) -> None:
        attributes, stats = self.attributes(record), record.stats
        values = [(names.REQUEST_DURATION, record.seconds)]
        if stats.first_scheduled_at:
            values.append((names.QUEUE_TIME, stats.first_scheduled_at - stats.arrived_at))
        if stats.first_token_at:
            values.append((names.PREFILL_TIME, stats.first_token_at - stats.first_scheduled_at))
            values.append((names.TIME_TO_FIRST_TOKEN, stats.first_token_at - stats.arrived_at))
        if stats.finished_at and record.output_tokens > 1:
            seconds = (stats.finished_at - stats.first_token_at) / (record.output_tokens - 1)
            values.append((names.TIME_PER_OUTPUT_TOKEN, seconds))
        for metric, value in values:
            self._instruments[metric].record(max(value, 0.0), attributes)
        if record.request is not None:
            self._instruments[names.USED_INPUT_TOKENS].add(int(record.request.prompt.size), attributes)
            self._instruments[names.USED_OUTPUT_TOKENS].add(record.output_tokens, attributes)

    def attributes(self, record: RequestRecord) -> dict[str, str]:
        """Attributes of the data points of a request."""
        attributes = {names.OPERATION: record.operation, names.PROVIDER: "draftwood", names.MODEL: self.model}
        attributes[names.ENGINE] = self.engine
        if record.request is not None:
            drafts = record.request.drafting.max_nodes > 0
            attributes[names.STRATEGY] = record.request.drafting.strategy if drafts else "none"
            if record.request.arm:
                attributes[names.ARM] = record.request.arm
        if record.tenant in self._tenants:
            attributes[names.TENANT] = record.tenant
        if record.error:
            attributes[names.ERROR_TYPE] = record.error
        return attributes

    def _recorded(self, metric: Metric) -> Any:
        if metric.kind is Kind.COUNTER:
            return self._meter.create_counter(metric.name, metric.unit, metric.description)
        return self._meter.create_histogram(
            metric.name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=metric.buckets
        )


def _read(observed: Observed, metric: Metric, options: CallbackOptions) -> Iterator[Observation]:
    for value, attributes in observed.points(metric):
        yield Observation(value, attributes)


_BY_NAME = {metric.name: metric for metric in OBSERVED}
ALIASES = {
    "vllm:num_requests_waiting": _BY_NAME["draftwood.requests.waiting"],
    "vllm:num_requests_running": _BY_NAME["draftwood.requests.running"],
    "vllm:kv_cache_usage_perc": _BY_NAME["draftwood.kv_cache.utilization"],
}
"""OpenTelemetry's names have no colons, so these are for Prometheus alone."""


class VllmNames(Collector):
    """Reads the same values at each collection.

    Args:
        model: name of the served model, which vLLM's metrics have as a label.
    """

    def __init__(self, observed: Observed, model: str) -> None:
        self._observed = observed
        self._model = model

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for alias, metric in ALIASES.items():
            family = GaugeMetricFamily(alias, f"{metric.description}: {metric.name}", labels=("model_name",))
            for value, _ in self._observed.points(metric):
                family.add_metric((self._model,), value)
            yield family
