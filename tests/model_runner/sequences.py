"""Sequences for tests, made in one call of what a request asks and what the engine needs besides."""

from __future__ import annotations

from typing import Any

from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.sequence import Grammar, Sequence
from draftwood_strategies import Strategy
from draftwood_strategies.draft import Int32Array

GREEDY = SamplingParams()


def make_sequence(
    request_id: str,
    prompt: Int32Array,
    stop: StopParams,
    sampling: SamplingParams = GREEDY,
    *,
    strategy: Strategy | None = None,
    grammar: Grammar | None = None,
    **options: Any,
) -> Sequence:
    """A sequence that waits; `options` are further fields of its `Request`."""
    request = Request(request_id=request_id, prompt=prompt, stop=stop, sampling=sampling, **options)
    return Sequence(request, strategy, grammar)
