"""The dashboard of learned memories, their store, the losslessness audit, quotas and access."""

from __future__ import annotations

from tools.monitoring.panels import Board, Graph, Query, per_second


def _hourly(metric: str, legend: str = "{{pod}}") -> Query:
    return Query(f"increase({metric}{{SELECT}}[1h])", legend)


MEMORY = Board(
    "draftwood-memory",
    "Draftwood / Memory and store",
    "Learned memories, the store that replicas share, audits, quotas and refused calls.",
    {
        "Store": [
            Graph(
                "Store up",
                "1 while the store answers, by replica. Requests never wait for it.",
                "short",
                [Query("draftwood_store_up{SELECT}", "{{pod}}")],
                most=1.0,
            ),
            Graph(
                "Lag",
                "From the end of an answer to the confirmation of its record by the store, of the latest one.",
                "s",
                [Query("draftwood_store_lag_seconds{SELECT}", "{{pod}}")],
            ),
            Graph(
                "Pending",
                "Records that the store has not confirmed. The outbox holds a million tokens for an hour.",
                "short",
                [Query("draftwood_store_pending{SELECT}", "{{pod}}")],
            ),
            Graph(
                "Failures and losses",
                "In the last hour: failed rounds with the store, records lost for a full outbox, unreadable values.",
                "short",
                [
                    _hourly("draftwood_store_failures_total", "{{pod}} failed rounds"),
                    _hourly("draftwood_memory_dropped_total", "{{pod}} dropped records"),
                    _hourly("draftwood_store_unreadable_total", "{{pod}} unreadable values"),
                ],
            ),
        ],
        "Memories": [
            Graph(
                "Memories",
                "Memories of tenants and arms in the process, by replica.",
                "short",
                [Query("draftwood_memory_memories{SELECT}", "{{pod}}")],
            ),
            Graph(
                "Tokens",
                "Tokens of these memories.",
                "short",
                [Query("draftwood_memory_tokens{SELECT}", "{{pod}}")],
            ),
            Graph(
                "Size",
                "Of their records and indexes.",
                "bytes",
                [Query("draftwood_memory_size_bytes{SELECT}", "{{pod}}")],
            ),
            Graph(
                "Learned records",
                "Records taken from answers a second.",
                "short",
                [Query("rate(draftwood_memory_learned_total{SELECT}[$__rate_interval])", "{{pod}}")],
            ),
            Graph(
                "Late and evicted",
                "In the last hour: requests that began before their memory was loaded, and evicted memories.",
                "short",
                [
                    _hourly("draftwood_memory_late_total", "{{pod}} late"),
                    _hourly("draftwood_memory_evicted_total", "{{pod}} evicted"),
                ],
            ),
        ],
        "Audits, quotas, access": [
            Graph(
                "Audited answers",
                "Answers decoded again without drafts a second, by outcome. `different` must stay 0.",
                "short",
                [per_second("draftwood_audit_answers_total", "{{draftwood_outcome}}", by=("draftwood_outcome",))],
                stacked=True,
            ),
            Graph(
                "Differences",
                "Answers since the start of each replica that were not those of plain decoding, ties apart.",
                "short",
                [
                    Query(
                        "sum by (pod, draftwood_strategy, draftwood_arm)"
                        ' (draftwood_audit_answers_total{draftwood_outcome="different", SELECT})',
                        "{{pod}} {{draftwood_strategy}} {{draftwood_arm}}",
                    )
                ],
            ),
            Graph(
                "Largest margin",
                "Of all differences that audits found, ties included: how far logits were apart.",
                "short",
                [
                    Query(
                        "max by (draftwood_strategy, draftwood_arm) (draftwood_audit_largest_margin{SELECT})",
                        "{{draftwood_strategy}} {{draftwood_arm}}",
                    )
                ],
            ),
            Graph(
                "Quotas without the store",
                "In the last hour: times that the store of the quotas went away, and requests admitted without it.",
                "short",
                [
                    _hourly("draftwood_quota_outages_total", "{{pod}} outages"),
                    _hourly("draftwood_quota_admitted_alone_total", "{{pod}} admitted alone"),
                ],
            ),
            Graph(
                "Requests over a quota",
                "Requests a second that a limit of their tenant refused.",
                "reqps",
                [
                    per_second(
                        "gen_ai_server_request_duration_seconds_count", "refused", where='error_type="quota_exceeded"'
                    )
                ],
            ),
            Graph(
                "Refused calls",
                "Calls a second without a valid credential, or without the role or tenant that they need.",
                "reqps",
                [per_second("draftwood_auth_refused_total", "{{draftwood_reason}}", by=("draftwood_reason",))],
            ),
        ],
    },
)
