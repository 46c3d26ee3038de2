"""Refuses requests for what the engine of this server cannot do. Knows no engine."""

from __future__ import annotations

from draftwood_model_runner.engine_config import Abilities
from draftwood_model_runner.request import GrammarKind, SamplingParams
from draftwood_service.errors import UnsupportedByEngineError


def check_sampling(sampling: SamplingParams, abilities: Abilities) -> None:
    """Checks the sampling of a request, defaults included. Raises UnsupportedByEngineError."""
    if sampling.min_p and sampling.temperature and not abilities.min_p:
        raise UnsupportedByEngineError("sampling.min_p", sampling.min_p, abilities.engine, "use top_p or top_k")
    if sampling.logit_bias and not abilities.logit_bias:
        raise UnsupportedByEngineError("sampling.logit_bias", None, abilities.engine, "it must be empty")
    if sampling.temperature > abilities.max_temperature:
        allowed = f"it must be at most {abilities.max_temperature:g}"
        raise UnsupportedByEngineError("sampling.temperature", sampling.temperature, abilities.engine, allowed)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if abs(value) > abilities.max_penalty:
            allowed = f"it must lie in [{-abilities.max_penalty:g}, {abilities.max_penalty:g}]"
            raise UnsupportedByEngineError(f"sampling.{name}", value, abilities.engine, allowed)
    if sampling.logprobs is not None and sampling.logprobs > abilities.max_logprobs:
        allowed = f"it must be at most {abilities.max_logprobs}"
        raise UnsupportedByEngineError("output.top_logprobs", sampling.logprobs, abilities.engine, allowed)


def check_trees(draft_trees: bool, abilities: Abilities) -> None:
    """Raises UnsupportedByEngineError if drafts are to be shown and cannot be."""
    if draft_trees and not abilities.draft_trees:
        raise UnsupportedByEngineError("output.draft_trees", None, abilities.engine, "it must be false")


def check_format(kind: GrammarKind, abilities: Abilities) -> None:
    """Raises UnsupportedByEngineError if answers cannot follow formats of a kind."""
    if kind.value not in abilities.formats:
        known = ", ".join(abilities.formats) or "none"
        raise UnsupportedByEngineError(f"format.{kind.value}", None, abilities.engine, f"formats that it has: {known}")
