"""The dashboard of drafts: what they gain and what they cost."""

from __future__ import annotations

from tools.monitoring.panels import Board, Graph, Query, per_second, ratio

_LENGTH = ("draftwood_output_tokens_total", "draftwood_decode_steps_total")

DRAFTING = Board(
    "draftwood-drafting",
    "Draftwood / Drafting",
    "Acceptance length, accepted draft tokens, budget and cost of drafting.",
    {
        "Gain": [
            Graph(
                "Acceptance length",
                "Tokens that a decoding step of a request writes. 1 is plain decoding.",
                "short",
                [ratio(*_LENGTH, "all")],
            ),
            Graph(
                "Acceptance length by strategy and arm",
                "A request with drafting off counts, with length 1, under the strategy that it would have had.",
                "short",
                [
                    ratio(
                        *_LENGTH,
                        "{{draftwood_strategy}} {{draftwood_arm}}",
                        by=("draftwood_strategy", "draftwood_arm"),
                    )
                ],
            ),
            Graph(
                "Acceptance length of tenants",
                "Of the tenants that `metrics-tenants` names.",
                "short",
                [
                    ratio(
                        "draftwood_tenant_output_tokens_total",
                        "draftwood_tenant_decode_steps_total",
                        "{{draftwood_tenant}}",
                        by=("draftwood_tenant",),
                    )
                ],
            ),
            Graph(
                "Acceptance length against last week",
                "The last hour over the same hour a week ago. DraftwoodAcceptanceDrift fires below 80%.",
                "percentunit",
                [
                    Query(
                        "sum(rate(draftwood_output_tokens_total{SELECT}[1h]))"
                        " / sum(rate(draftwood_decode_steps_total{SELECT}[1h]))"
                        " / (sum(rate(draftwood_output_tokens_total{SELECT}[1h] offset 1w))"
                        " / sum(rate(draftwood_decode_steps_total{SELECT}[1h] offset 1w)))",
                        "of last week's",
                    )
                ],
            ),
        ],
        "Draft tokens": [
            Graph(
                "Accepted share by strategy and arm",
                "Of the draft tokens that were verified.",
                "percentunit",
                [
                    ratio(
                        "draftwood_draft_accepted_tokens_total",
                        "draftwood_draft_tokens_total",
                        "{{draftwood_strategy}} {{draftwood_arm}}",
                        by=("draftwood_strategy", "draftwood_arm"),
                    )
                ],
                most=1.0,
            ),
            Graph(
                "Accepted share by source",
                "Of the verified draft tokens of each source, such as trie, recycling, or the output's format.",
                "percentunit",
                [
                    ratio(
                        "draftwood_draft_source_accepted_tokens_total",
                        "draftwood_draft_source_tokens_total",
                        "{{draftwood_draft_source}}",
                        by=("draftwood_draft_source",),
                    )
                ],
                most=1.0,
            ),
            Graph(
                "Accepted by source",
                "Accepted draft tokens a second, by source.",
                "short",
                [
                    per_second(
                        "draftwood_draft_source_accepted_tokens_total",
                        "{{draftwood_draft_source}}",
                        by=("draftwood_draft_source",),
                    )
                ],
                stacked=True,
            ),
            Graph(
                "Accepted by depth",
                "Share of decoding steps in which the draft token of a depth was accepted: how far drafts hold.",
                "percentunit",
                [
                    Query(
                        "sum by (draftwood_draft_depth)"
                        " (rate(draftwood_draft_accepted_by_depth_total{SELECT}[$__rate_interval]))"
                        " / on() group_left() sum(rate(draftwood_decode_steps_total{SELECT}[$__rate_interval]))",
                        "depth {{draftwood_draft_depth}}",
                    )
                ],
            ),
            Graph(
                "Proposed, verified, accepted",
                "Draft tokens a second.",
                "short",
                [
                    per_second("draftwood_draft_proposed_tokens_total", "proposed"),
                    per_second("draftwood_draft_tokens_total", "verified"),
                    per_second("draftwood_draft_accepted_tokens_total", "accepted"),
                ],
            ),
        ],
        "Budget and cost": [
            Graph(
                "Budget",
                "Draft tokens that a decoding step of a request verifies. It falls when more requests share a step.",
                "short",
                [Query("draftwood_draft_budget{SELECT}", "{{pod}}")],
            ),
            Graph(
                "Steps with drafts",
                "Share of the decoding steps of requests that verified a draft.",
                "percentunit",
                [ratio("draftwood_drafts_total", "draftwood_decode_steps_total", "with drafts")],
                most=1.0,
            ),
            Graph(
                "Time in drafters",
                "Share of the engine's step time that strategies take, by replica.",
                "percentunit",
                [
                    ratio(
                        "draftwood_draft_time_seconds_total",
                        "draftwood_engine_step_time_seconds_total",
                        "{{pod}}",
                        by=("namespace", "pod"),
                    )
                ],
                most=1.0,
            ),
            Graph(
                "Time of a draft",
                "In the strategy, by strategy and arm.",
                "s",
                [
                    ratio(
                        "draftwood_draft_time_seconds_total",
                        "draftwood_decode_steps_total",
                        "{{draftwood_strategy}} {{draftwood_arm}}",
                        by=("draftwood_strategy", "draftwood_arm"),
                    )
                ],
            ),
            Graph(
                "Drafting switched off",
                "Requests in the last hour whose strategy failed or was too slow, by strategy and arm.",
                "short",
                [
                    Query(
                        "sum by (draftwood_strategy, draftwood_arm)"
                        " (increase(draftwood_draft_disabled_total{SELECT}[1h]))",
                        "{{draftwood_strategy}} {{draftwood_arm}}",
                    )
                ],
            ),
        ],
    },
)
