"""The load of a server under vLLM's names as well, for endpoint pickers and autoscalers that know no others."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from draftwood_service.telemetry.observed import OBSERVED, Observed

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
