"""From a request to vLLM's: plain values of its `SamplingParams`, and the options of the plug-in."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from draftwood_memory.engines.options import TRUSTED
from draftwood_model_runner.request import Format, GrammarKind, Request
from draftwood_model_runner.sampling.generation_defaults import Constraints
from draftwood_model_runner.sampling.grammar_compilation import JSON_LAYOUT
from draftwood_service.engine.loaded import memory_overrides, repeat_key

_FIELDS = {GrammarKind.REGEX: "regex", GrammarKind.LARK: "grammar"}


def params_of(request: Request, eos_token_ids: frozenset[int], constraints: Constraints) -> dict[str, Any]:
    """Arguments of `core.sampling_params`.

    Seeds are left out: with drafts they reproduce nothing in vLLM, and its CPU build fails for a seeded request whose
    prompt is read in pieces.

    Args:
        eos_token_ids: of the model.
        constraints: of the model's generation config; they do not hold with a format.
    """
    sampling, stop = request.sampling, request.stop
    holds = request.format is None
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        "logprobs": sampling.logprobs,
        "max_tokens": stop.max_tokens,
        "min_tokens": stop.min_tokens,
        "ends": set(stop.token_ids if stop.ignore_eos else stop.token_ids | eos_token_ids),
        "forbidden": _forbidden(constraints) if holds else [],
        "grammar": None if request.format is None else _grammar(request.format),
        "extra_args": {TRUSTED: _drafting(request)},
    }


def _drafting(request: Request) -> dict[str, Any]:
    """As `draftwood_memory.engines.options.trusted_options` reads it."""
    return {
        "tenant": request.tenant,
        "strategy": request.strategy_name,
        "strategy_options": [[name, value] for name, value in request.strategy_options],
        "max_nodes": request.max_draft_nodes,
        "learns": request.learns,
        "arm": request.arm,
        "overrides": asdict(memory_overrides(request.memory)),
        "with_prompt": request.memory.with_prompts,
        "key": repeat_key(request),
        "sample": request.sample,
    }


def _forbidden(constraints: Constraints) -> list[list[int]]:
    return [*map(list, constraints.bad_words), *([token] for token in constraints.suppressed)]


def _grammar(chosen: Format) -> dict[str, str]:
    """The format as Draftwood's engine reads it."""
    if chosen.kind is not GrammarKind.JSON_SCHEMA:
        return {_FIELDS[chosen.kind]: chosen.text}
    schema = json.loads(chosen.text)
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {**JSON_LAYOUT, **schema.get("x-guidance", {})}}
    return {"json": json.dumps(schema)}
