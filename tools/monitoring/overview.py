"""The dashboard of requests and of the engine."""

from __future__ import annotations

from tools.monitoring.panels import Board, Graph, Query, per_second, quantiles, ratio

OVERVIEW = Board(
    "draftwood-overview",
    "Draftwood / Overview",
    "Latency, throughput, errors, KV cache and the service's processes.",
    {
        "Requests": [
            Graph(
                "Requests",
                "Generate calls a second, by gRPC status.",
                "reqps",
                [
                    per_second(
                        "rpc_server_call_duration_seconds_count",
                        "{{rpc_response_status_code}}",
                        by=("rpc_response_status_code",),
                        where='rpc_method=~".*/Generate"',
                    )
                ],
                stacked=True,
            ),
            Graph(
                "Errors",
                "Requests a second that did not end well, by reason. `cancelled` is the caller's own.",
                "reqps",
                [
                    per_second(
                        "gen_ai_server_request_duration_seconds_count",
                        "{{error_type}}",
                        by=("error_type",),
                        where='error_type!=""',
                    )
                ],
                stacked=True,
            ),
            Graph(
                "Running and waiting",
                "Samples of requests in the engine, and how many may run at once.",
                "short",
                [
                    Query("sum(draftwood_requests_running{SELECT})", "running"),
                    Query("sum(draftwood_requests_waiting{SELECT})", "waiting"),
                    Query("sum(draftwood_slots{SELECT})", "slots"),
                ],
            ),
        ],
        "Latency": [
            Graph(
                "Time to first token",
                "From a request's arrival to its first token.",
                "s",
                quantiles("gen_ai_server_time_to_first_token_seconds"),
            ),
            Graph(
                "Time per output token",
                "Mean time of a token after the first one of a request.",
                "s",
                quantiles("gen_ai_server_time_per_output_token_seconds"),
            ),
            Graph(
                "Duration",
                "From a request's arrival to its end.",
                "s",
                quantiles("gen_ai_server_request_duration_seconds"),
            ),
            Graph(
                "Queue time",
                "From a request's arrival to its first step. High with free slots: the KV cache is full.",
                "s",
                quantiles("draftwood_queue_time_seconds"),
            ),
            Graph(
                "Prefill time",
                "From a request's first step to its first token.",
                "s",
                quantiles("draftwood_prefill_time_seconds"),
            ),
            Graph(
                "Event-loop lag",
                "Longest delay of the service's event loop in 10 s, by replica. Streams stutter by so much.",
                "s",
                [Query("draftwood_event_loop_lag_seconds{SELECT}", "{{pod}}")],
            ),
        ],
        "Throughput": [
            Graph(
                "Tokens",
                "Tokens a second: of answers, of prompts that were computed, and of prompts in the prefix cache.",
                "short",
                [
                    per_second("draftwood_output_tokens_total", "written"),
                    Query(
                        "sum(rate(draftwood_prompt_tokens_total{SELECT}[$__rate_interval])) "
                        "- sum(rate(draftwood_prompt_cached_tokens_total{SELECT}[$__rate_interval]))",
                        "prompts, computed",
                    ),
                    per_second("draftwood_prompt_cached_tokens_total", "prompts, cached"),
                ],
            ),
            Graph(
                "Tokens of tenants",
                "Tokens written a second, of the tenants that `metrics-tenants` names.",
                "short",
                [per_second("draftwood_tenant_output_tokens_total", "{{draftwood_tenant}}", by=("draftwood_tenant",))],
                stacked=True,
            ),
            Graph(
                "Steps",
                "Steps of the engine a second, by replica.",
                "short",
                [Query("rate(draftwood_engine_steps_total{SELECT}[$__rate_interval])", "{{pod}}")],
            ),
            Graph(
                "Busy",
                "Share of the time that the engine spends in steps, and in forward passes of the model, by replica.",
                "percentunit",
                [
                    Query("rate(draftwood_engine_step_time_seconds_total{SELECT}[$__rate_interval])", "{{pod}} steps"),
                    Query("rate(draftwood_engine_model_time_seconds_total{SELECT}[$__rate_interval])", "{{pod}} model"),
                ],
                most=1.0,
            ),
        ],
        "KV cache and health": [
            Graph(
                "KV cache",
                "Share of KV pages that requests hold, and that only the prefix cache keeps, by replica.",
                "percentunit",
                [
                    Query("draftwood_kv_cache_utilization{SELECT}", "{{pod}} held"),
                    Query(
                        'sum by (namespace, pod) (draftwood_kv_cache_pages{draftwood_state="cached", SELECT}) '
                        "/ sum by (namespace, pod) (draftwood_kv_cache_pages{SELECT})",
                        "{{pod}} cached",
                    ),
                ],
                most=1.0,
            ),
            Graph(
                "States",
                "Memory of recurrent layers' states, of requests and kept for prefixes, by replica; else 0.",
                "bytes",
                [Query("draftwood_states_size_bytes{SELECT}", "{{pod}} {{draftwood_state}}")],
            ),
            Graph(
                "Preemptions",
                "Slots taken from running requests a second, by replica. What they had is computed again.",
                "short",
                [per_second("draftwood_preemptions_total", "{{pod}}", by=("namespace", "pod"))],
            ),
            Graph(
                "Cached prompt tokens",
                "Share of prompt tokens that were found in the prefix cache.",
                "percentunit",
                [ratio("draftwood_prompt_cached_tokens_total", "draftwood_prompt_tokens_total", "cached")],
                most=1.0,
            ),
            Graph(
                "Serving",
                "Replicas that report SERVING, and all that are scraped.",
                "short",
                [
                    Query("sum(draftwood_serving{SELECT})", "serving"),
                    Query("count(draftwood_serving{SELECT})", "scraped"),
                ],
            ),
            Graph(
                "Engine restarts",
                "Engines started anew after one died, in the last hour, by replica.",
                "short",
                [Query("increase(draftwood_engine_restarts_total{SELECT}[1h])", "{{pod}}")],
            ),
            Graph(
                "Versions",
                "Replicas by version, model, runner and data type.",
                "short",
                [
                    Query(
                        "count by (draftwood_version, gen_ai_request_model, draftwood_runner, draftwood_dtype)"
                        " (draftwood_build{SELECT})",
                        "{{draftwood_version}} {{gen_ai_request_model}} {{draftwood_runner}} {{draftwood_dtype}}",
                    )
                ],
                stacked=True,
            ),
        ],
    },
)
