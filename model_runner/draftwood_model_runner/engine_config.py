"""How an engine runs: its limits, and what it can do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from draftwood_model_runner.errors import InvalidValueError

RUNNERS = ("auto", "cuda", "openvino", "torch")
WEIGHTS = ("as-is", "int8", "int4")
"""Those after the first are quantized, by runner openvino."""
MODEL_CACHE_BYTES = 8 << 30
"""Of all converted models on disk, by default: one of 4 billion parameters in bfloat16, or several small ones."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs.

    Attributes:
        max_running: sequences in one step at most.
        max_draft_nodes: draft nodes of one sequence in one step at most.
        adaptive_budget: verify only the nodes that are worth their time by measured step times; otherwise all that a
            strategy proposes.
        prefill_chunk: prompt tokens of a step, over all sequences, if no sequence decodes.
        shared_prefill_chunk: the same if any does, so that a long prompt does not hold up the others' next tokens;
            no more than `prefill_chunk`.
        kv_cache_tokens: capacity of the KV cache, over live sequences and prefixes kept for reuse. None holds on CUDA
            `max_running` full contexts, or as much of that as fits four fifths of the memory that is free at start. On
            a CPU it holds `max_running` contexts of 4,096 tokens, in whole full contexts, or as much as fits half.
        prefix_cache: keep the KV of ended sequences while there is room, for later ones of the same tenant that begin
            with the same tokens.
        tenant_weights: a tenant's share of the engine next to the others', above 0; 1 for those not named. Read when
            a request of the tenant begins to wait, so that it may be a view of weights that change.
        threads: CPU threads of the model; None takes torch's default.
        steps_ahead: begin the next step while one is in flight, where the device drafts for it, or nothing does:
            asynchronous scheduling, as vLLM calls it.

    Raises:
        InvalidValueError: a value is outside its range.
    """

    max_running: int = 8
    max_draft_nodes: int = 48
    adaptive_budget: bool = True
    prefill_chunk: int = 512
    shared_prefill_chunk: int = 128
    kv_cache_tokens: int | None = None
    prefix_cache: bool = True
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    threads: int | None = None
    steps_ahead: bool = False

    def __post_init__(self) -> None:
        for name, minimum in (
            ("max_running", 1),
            ("max_draft_nodes", 0),
            ("prefill_chunk", 1),
            ("shared_prefill_chunk", 1),
            ("kv_cache_tokens", 1),
            ("threads", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise InvalidValueError(name, value, f"it must be at least {minimum}")
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise InvalidValueError(f"tenant_weights[{tenant!r}]", weight, "it must be above 0")


DRAFTWOOD = "draftwood"
"""The name of Draftwood's own engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What one engine can do. The defaults are those of Draftwood's own.

    Attributes:
        engine: its name, as in the setting `engine`.
        version: of the program that it runs in, if that is another one; else "".
        reproducible_seeds: the same seed gives the same tokens. Otherwise seeds choose nothing, and sampled answers
            have the distribution that was asked for.
        draft_trees: outputs show the verified drafts.
        branching_drafts: drafts are trees; otherwise each is one chain of tokens.
        min_p, logit_bias: of sampling.
        max_temperature, max_penalty: bounds of the temperature, and of presence and frequency penalties either way.
        max_logprobs: tokens reported beside each token that is written.
        formats: values of `GrammarKind`: grammars that an answer can follow.
        pauses: a request whose client does not read gives up its slot.
        preempts: a running request gives up its slot to one of a tenant that holds less for its weight.
        audits_samples: sampled answers are audited as well as greedy ones.
    """

    engine: str = DRAFTWOOD
    version: str = ""
    reproducible_seeds: bool = True
    draft_trees: bool = True
    branching_drafts: bool = True
    min_p: bool = True
    logit_bias: bool = True
    max_temperature: float = 100.0
    max_penalty: float = 100.0
    max_logprobs: int = 20
    formats: tuple[str, ...] = ("json_schema", "regex", "lark")
    pauses: bool = True
    preempts: bool = True
    audits_samples: bool = True


def check_runner(runner: str, exact: bool | None) -> None:
    """Raises InvalidValueError for a runner that does not exist, or that lacks the exact mode asked for."""
    if runner not in RUNNERS:
        raise InvalidValueError("runner", runner, f"it must be one of {', '.join(RUNNERS)}")
    if runner == "openvino" and exact:
        raise InvalidValueError("exact", exact, "the openvino runner has no exact mode; use runner torch")


def check_weights(weights: str, runner: str, exact: bool | None) -> None:
    """Raises InvalidValueError for weights that do not exist, or that no runner has with the other choices."""
    if weights not in WEIGHTS:
        raise InvalidValueError("weights", weights, f"it must be one of {', '.join(WEIGHTS)}")
    if weights != "as-is" and runner in ("cuda", "torch"):
        raise InvalidValueError(
            "weights", weights, f"it must be as-is with runner {runner}; {weights} needs runner openvino"
        )
    if weights != "as-is" and exact:
        raise InvalidValueError("weights", weights, f"it must be as-is in exact mode; {weights} needs runner openvino")


def no_head_reason(tensor_parallel: int) -> str:
    """Why no draft head can be computed beside a model with this option of `load_model`; "" if one can, by what is
    known before the model is loaded."""
    return f"tensor_parallel is {tensor_parallel}, and a draft head needs 1" if tensor_parallel > 1 else ""
