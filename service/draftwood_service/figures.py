"""The counts of the engine that are shown: one table from a count to its metric and its field of a status.

`telemetry.observed` makes the metrics of it, and `rpc.status` fills the messages by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """A count.

    Attributes:
        source: attribute of `WorkCounts` or `MemoryCounters`.
        status: field of the messages in `status.proto` that have it; "" if none does.
        metric: name for OpenTelemetry.
        unit: of the metric, by UCUM.
        description: of the metric.
        counts_up: false for a value that also falls.
    """

    source: str
    status: str
    metric: str
    unit: str
    description: str
    counts_up: bool = True


WORK = (
    Figure("preemptions", "preemptions", "draftwood.preemptions", "{preemption}", "Slots taken from requests"),
    Figure("sequences", "requests", "draftwood.sequences", "{sequence}", "Samples of requests that began"),
    Figure("prompt_tokens", "", "draftwood.prompt.tokens", "{token}", "Prompt tokens"),
    Figure(
        "cached_prompt_tokens",
        "cached_prompt_tokens",
        "draftwood.prompt.cached_tokens",
        "{token}",
        "Of them, found in the prefix cache",
    ),
    Figure("written_tokens", "tokens", "draftwood.output.tokens", "{token}", "Tokens written"),
    Figure("decode_steps", "decode_steps", "draftwood.decode.steps", "{step}", "Requests' steps that wrote tokens"),
    Figure("drafts", "", "draftwood.drafts", "{draft}", "Draft trees that were verified"),
    Figure("proposed_tokens", "", "draftwood.draft.proposed_tokens", "{token}", "Draft tokens proposed"),
    Figure("draft_tokens", "draft_tokens", "draftwood.draft.tokens", "{token}", "Draft tokens verified"),
    Figure("accepted_tokens", "accepted_tokens", "draftwood.draft.accepted_tokens", "{token}", "Draft tokens accepted"),
    Figure("draft_seconds", "draft_duration", "draftwood.draft.time", "s", "Time in drafters"),
    Figure("disabled", "disabled", "draftwood.draft.disabled", "{sequence}", "Samples whose drafter failed or hung"),
    Figure(
        "suspensions", "", "draftwood.draft.suspended", "{suspension}", "Times that drafting paused as it was too slow"
    ),
)
"""Of the work for some sequences. `LoadStatus.prompt_tokens` is another count: those that were computed."""

MEMORY = (
    Figure("tenants", "memories", "draftwood.memory.memories", "{memory}", "Memories in the process", False),
    Figure("tokens", "memory_tokens", "draftwood.memory.tokens", "{token}", "Their tokens", False),
    Figure("resident_bytes", "memory_bytes", "draftwood.memory.size", "By", "Their records and indexes", False),
    Figure("evicted", "", "draftwood.memory.evicted", "{memory}", "Memories evicted from the process"),
    Figure(
        "late",
        "late_memories",
        "draftwood.memory.late",
        "{request}",
        "Requests that began before their memory was loaded",
    ),
    Figure("learned", "", "draftwood.memory.learned", "{record}", "Records taken from answers"),
    Figure("dropped", "dropped_records", "draftwood.memory.dropped", "{record}", "Records lost: the outbox was full"),
    Figure(
        "last_lag",
        "lag",
        "draftwood.store.lag",
        "s",
        "From an answer's end to its record's confirmation, latest",
        False,
    ),
    Figure(
        "outbox_records",
        "pending_records",
        "draftwood.store.pending",
        "{record}",
        "Records that the store has not confirmed",
        False,
    ),
    Figure("failures", "", "draftwood.store.failures", "{round}", "Rounds with the store that failed"),
    Figure("unreadable", "", "draftwood.store.unreadable", "{value}", "Values that could not be decoded"),
)
"""Of the memories in the engine's process."""


def status_fields(figures: Sequence[Figure], counts: object, message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message that the table knows, with their values.

    Args:
        counts: `WorkCounts` or `MemoryCounters`.
        message: the fields of its descriptor, by name.
    """
    values = {figure: getattr(counts, figure.source) for figure in figures if figure.status in message}
    return {
        figure.status: timedelta(seconds=value) if figure.unit == "s" else value for figure, value in values.items()
    }
