"""Every metric and attribute, once. Names of OpenTelemetry's conventions where it has them, `draftwood.` beyond them.

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
_DRAFT = (STRATEGY, ARM)
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


# The buckets of the conventions; those of the time per output token begin at 10 ms there.
REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    Kind.HISTOGRAM,
    "s",
    "From a request's arrival to its end",
    _REQUEST,
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    Kind.HISTOGRAM,
    "s",
    "From a request's arrival to its first token",
    _REQUEST,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    Kind.HISTOGRAM,
    "s",
    "Mean time of a token after the first one of a request",
    _REQUEST,
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
QUEUE_TIME = Metric("draftwood.queue.time", Kind.HISTOGRAM, "s", "From arrival to the first step", _REQUEST, _SHORT)
PREFILL_TIME = Metric(
    "draftwood.prefill.time", Kind.HISTOGRAM, "s", "From the first step to the first token", _REQUEST, _SHORT
)
USED_INPUT_TOKENS = Metric(INPUT_TOKENS, Kind.COUNTER, "{token}", "Prompt tokens of ended requests", _REQUEST)
USED_OUTPUT_TOKENS = Metric(OUTPUT_TOKENS, Kind.COUNTER, "{token}", "Tokens of their answers", _REQUEST)
CALL_DURATION = Metric(
    "rpc.server.call.duration",
    Kind.HISTOGRAM,
    "s",
    "From the arrival of a call to its end",
    (RPC_SYSTEM, RPC_METHOD, RPC_STATUS, ERROR_TYPE),
    (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
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

BUILD = Metric("draftwood.build", Kind.GAUGE, "1", "Always 1", (VERSION, MODEL, ENGINE, RUNNER, DTYPE))
SERVING = Metric("draftwood.serving", Kind.GAUGE, "1", "1 while health is SERVING, else 0")
SLOTS = Metric("draftwood.slots", Kind.GAUGE, "{request}", "Requests that can run at once")
RUNNING = Metric("draftwood.requests.running", Kind.GAUGE, "{request}", "Requests that run")
WAITING = Metric("draftwood.requests.waiting", Kind.GAUGE, "{request}", "Requests that wait for a slot")
STEPS = Metric("draftwood.engine.steps", Kind.COUNTER, "{step}", "Steps of the engine")
STEP_TIME = Metric("draftwood.engine.step_time", Kind.COUNTER, "s", "Time in them")
MODEL_TIME = Metric("draftwood.engine.model_time", Kind.COUNTER, "s", "Time in their forward passes")
RESTARTS = Metric("draftwood.engine.restarts", Kind.COUNTER, "{restart}", "Engines started anew after one died")
LOOP_LAG = Metric("draftwood.event_loop.lag", Kind.GAUGE, "s", "Longest delay of the event loop in the last 10 s")
KV_PAGES = Metric("draftwood.kv_cache.pages", Kind.GAUGE, "{page}", "Pages of KV memory: held, cached, free", (STATE,))
KV_UTILIZATION = Metric("draftwood.kv_cache.utilization", Kind.GAUGE, "1", "Share of the pages that requests hold")
PREEMPTIONS = Metric("draftwood.preemptions", Kind.COUNTER, "{preemption}", "Slots taken from requests", _DRAFT)
SEQUENCES = Metric("draftwood.sequences", Kind.COUNTER, "{sequence}", "Samples of requests that began", _DRAFT)
PROMPT_TOKENS = Metric("draftwood.prompt.tokens", Kind.COUNTER, "{token}", "Prompt tokens", _DRAFT)
PROMPT_CACHED = Metric(CACHED_TOKENS, Kind.COUNTER, "{token}", "Of them, found in the prefix cache", _DRAFT)
WRITTEN = Metric("draftwood.output.tokens", Kind.COUNTER, "{token}", "Tokens written", _DRAFT)
DECODE_STEPS = Metric("draftwood.decode.steps", Kind.COUNTER, "{step}", "Requests' steps that wrote tokens", _DRAFT)
DRAFTS = Metric("draftwood.drafts", Kind.COUNTER, "{draft}", "Draft trees that were verified", _DRAFT)
PROPOSED = Metric("draftwood.draft.proposed_tokens", Kind.COUNTER, "{token}", "Draft tokens proposed", _DRAFT)
VERIFIED = Metric("draftwood.draft.tokens", Kind.COUNTER, "{token}", "Draft tokens verified", _DRAFT)
ACCEPTED = Metric("draftwood.draft.accepted_tokens", Kind.COUNTER, "{token}", "Draft tokens accepted", _DRAFT)
BY_DEPTH = Metric(
    "draftwood.draft.accepted_by_depth",
    Kind.COUNTER,
    "{token}",
    "Draft tokens accepted at each depth of the tree; the last one counts all below it",
    (*_DRAFT, DEPTH),
)
SOURCE_VERIFIED = Metric(
    "draftwood.draft.source.tokens", Kind.COUNTER, "{token}", "Draft tokens verified, by what proposed them", (SOURCE,)
)
SOURCE_ACCEPTED = Metric(
    "draftwood.draft.source.accepted_tokens", Kind.COUNTER, "{token}", "Of them, those accepted", (SOURCE,)
)
BUDGET = Metric(
    "draftwood.draft.budget", Kind.GAUGE, "{token}", "Draft tokens verified by a request's step in the last second"
)
DRAFT_TIME = Metric("draftwood.draft.time", Kind.COUNTER, "s", "Time in drafters", _DRAFT)
DISABLED = Metric(
    "draftwood.draft.disabled", Kind.COUNTER, "{sequence}", "Samples whose drafter failed or hung", _DRAFT
)
SUSPENDED = Metric(
    "draftwood.draft.suspended", Kind.COUNTER, "{suspension}", "Times that drafting paused as it was too slow", _DRAFT
)
TENANT_RUNNING = Metric("draftwood.tenant.running", Kind.GAUGE, "{request}", "Requests that run", (TENANT,))
TENANT_WAITING = Metric("draftwood.tenant.waiting", Kind.GAUGE, "{request}", "Requests that wait for a slot", (TENANT,))
TENANT_WRITTEN = Metric("draftwood.tenant.output.tokens", Kind.COUNTER, "{token}", "Tokens written", (TENANT,))
TENANT_STEPS = Metric("draftwood.tenant.decode.steps", Kind.COUNTER, "{step}", "Steps that wrote tokens", (TENANT,))
MEMORIES = Metric("draftwood.memory.memories", Kind.GAUGE, "{memory}", "Memories in the process")
MEMORY_TOKENS = Metric("draftwood.memory.tokens", Kind.GAUGE, "{token}", "Their tokens")
MEMORY_BYTES = Metric("draftwood.memory.size", Kind.GAUGE, "By", "Their records and indexes")
EVICTED = Metric("draftwood.memory.evicted", Kind.COUNTER, "{memory}", "Memories evicted from the process")
LATE = Metric("draftwood.memory.late", Kind.COUNTER, "{request}", "Requests that began before their memory was loaded")
LEARNED = Metric("draftwood.memory.learned", Kind.COUNTER, "{record}", "Records taken from answers")
DROPPED = Metric("draftwood.memory.dropped", Kind.COUNTER, "{record}", "Records lost: the outbox was full")
STORE_UP = Metric("draftwood.store.up", Kind.GAUGE, "1", "1 while the store answers, else 0")
STORE_LAG = Metric("draftwood.store.lag", Kind.GAUGE, "s", "From an answer's end to its record's confirmation, latest")
STORE_PENDING = Metric("draftwood.store.pending", Kind.GAUGE, "{record}", "Records that the store has not confirmed")
STORE_FAILURES = Metric("draftwood.store.failures", Kind.COUNTER, "{round}", "Rounds with the store that failed")
STORE_UNREADABLE = Metric("draftwood.store.unreadable", Kind.COUNTER, "{value}", "Values that could not be decoded")
AUDITS = Metric(
    "draftwood.audit.answers",
    Kind.COUNTER,
    "{answer}",
    "Answers decoded again: same, tie, different, dropped, failed",
    (OUTCOME, *_DRAFT),
)
AUDIT_MARGIN = Metric("draftwood.audit.largest_margin", Kind.GAUGE, "1", "Of all differences that audits found", _DRAFT)
QUOTA_OUTAGES = Metric("draftwood.quota.outages", Kind.COUNTER, "{outage}", "Times that the quotas' store went away")
QUOTA_ALONE = Metric("draftwood.quota.admitted_alone", Kind.COUNTER, "{request}", "Requests admitted without it")
REFUSED = Metric("draftwood.auth.refused", Kind.COUNTER, "{call}", "Calls refused: unauthenticated, denied", (REASON,))
OBSERVED = (
    BUILD, SERVING, SLOTS, RUNNING, WAITING, STEPS, STEP_TIME, MODEL_TIME, RESTARTS, LOOP_LAG, KV_PAGES, KV_UTILIZATION,
    PREEMPTIONS, SEQUENCES, PROMPT_TOKENS, PROMPT_CACHED, WRITTEN, DECODE_STEPS, DRAFTS, PROPOSED, VERIFIED, ACCEPTED,
    BY_DEPTH, SOURCE_VERIFIED, SOURCE_ACCEPTED, BUDGET, DRAFT_TIME, DISABLED, SUSPENDED, TENANT_RUNNING, TENANT_WAITING,
    TENANT_WRITTEN, TENANT_STEPS, MEMORIES, MEMORY_TOKENS, MEMORY_BYTES, EVICTED, LATE, LEARNED, DROPPED, STORE_UP,
    STORE_LAG, STORE_PENDING, STORE_FAILURES, STORE_UNREADABLE, AUDITS, AUDIT_MARGIN, QUOTA_OUTAGES, QUOTA_ALONE,
    REFUSED,
)  # fmt: skip
"""Read when metrics are collected."""
