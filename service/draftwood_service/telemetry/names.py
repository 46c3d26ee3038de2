"""Every attribute, and the metrics that are recorded at the end of a request or call; `observed` has the others.

Names of OpenTelemetry's conventions where it has them, `draftwood.` beyond them.

The conventions for generative AI are in development, so that their names may change: they are written here alone.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
MODEL = "gen_ai.request.model"
RESPONSE_ID = "gen_ai.response.id"
FINISH_REASONS = "gen_ai.response.finish_reasons"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ERROR_TYPE = "error.type"
RPC_SYSTEM, RPC_METHOD, RPC_STATUS = "rpc.system.name", "rpc.method", "rpc.response.status_code"
STRATEGY, ARM, TENANT = "draftwood.strategy", "draftwood.arm", "draftwood.tenant"
SOURCE, DEPTH, STATE, OUTCOME, REASON = (
    "draftwood.draft.source",
    "draftwood.draft.depth",
    "draftwood.state",
    "draftwood.outcome",
    "draftwood.reason",
)
ACCEPTANCE_LENGTH = "draftwood.acceptance_length"
CACHED_TOKENS = "draftwood.prompt.cached_tokens"
VERSION, ENGINE, RUNNER, DTYPE = "draftwood.version", "draftwood.engine", "draftwood.runner", "draftwood.dtype"

_REQUEST = (OPERATION, PROVIDER, MODEL, ENGINE, STRATEGY, ARM, TENANT, ERROR_TYPE)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """A metric.

    Attributes:
        unit: by UCUM; braces hold what is counted.
        attributes: that its points may have.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _seconds(name: str, description: str, buckets: tuple[float, ...], attributes: tuple[str, ...] = _REQUEST) -> Metric:
    return Metric(name, Kind.HISTOGRAM, "s", description, attributes, buckets)


# The buckets of the conventions; those of the time per output token begin at 10 ms there.
REQUEST_DURATION = _seconds(
    "gen_ai.server.request.duration",
    "From a request's arrival to its end",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN = _seconds(
    "gen_ai.server.time_to_first_token",
    "From a request's arrival to its first token",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = _seconds(
    "gen_ai.server.time_per_output_token",
    "Mean time of a token after the first one of a request",
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
QUEUE_TIME = _seconds("draftwood.queue.time", "From arrival to the first step", _SHORT)
PREFILL_TIME = _seconds("draftwood.prefill.time", "From the first step to the first token", _SHORT)
USED_INPUT_TOKENS = Metric(INPUT_TOKENS, Kind.COUNTER, "{token}", "Prompt tokens of ended requests", _REQUEST)
USED_OUTPUT_TOKENS = Metric(OUTPUT_TOKENS, Kind.COUNTER, "{token}", "Tokens of their answers", _REQUEST)
CALL_DURATION = _seconds(
    "rpc.server.call.duration",
    "From the arrival of a call to its end",
    (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    (RPC_SYSTEM, RPC_METHOD, RPC_STATUS, ERROR_TYPE),
)
RECORDED = (
    REQUEST_DURATION,
    TIME_TO_FIRST_TOKEN,
    TIME_PER_OUTPUT_TOKEN,
    QUEUE_TIME,
    PREFILL_TIME,
    USED_INPUT_TOKENS,
    USED_OUTPUT_TOKENS,
    CALL_DURATION,
)
"""At the end of a request or call."""
