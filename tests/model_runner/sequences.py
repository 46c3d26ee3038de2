"""Sequences for tests, made in one call, and engines that run them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.output import Finish, StepOutput
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.sequence import Grammar, Sequence
from draftwood_strategies import Strategy
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.drafting import NO_DRAFTS, Drafting

GREEDY = SamplingParams()


def make_sequence(
    request_id: str,
    prompt: SequenceOf[int] | Int32Array,
    stop: StopParams,
    sampling: SamplingParams = GREEDY,
    *,
    strategy: Strategy | None = None,
    grammar: Grammar | None = None,
    strategy_name: str = NO_DRAFTS,
    max_draft_nodes: int = 0,
    **options: Any,
) -> Sequence:
    """A sequence that waits; `options` are further fields of its `Request`."""
    tokens = np.asarray(prompt, np.int32)
    drafting = Drafting(strategy_name, max_nodes=max_draft_nodes)
    request = Request(request_id=request_id, prompt=tokens, stop=stop, sampling=sampling, drafting=drafting, **options)
    return Sequence(request, strategy, grammar)


def batch_of(
    prompts: SequenceOf[SequenceOf[int] | Int32Array],
    stop: StopParams,
    sampling: SamplingParams = GREEDY,
    **options: Any,
) -> list[Sequence]:
    """A sequence for each prompt, with the prompts' numbers as ids; `options` are those of `make_sequence`."""
    return [make_sequence(str(i), prompt, stop, sampling, **options) for i, prompt in enumerate(prompts)]


def engine_of(model: LoadedModel, max_draft_nodes: int, **config: Any) -> Engine:
    """An engine that verifies as many nodes as a request allows, whatever they cost."""
    return Engine(model, EngineConfig(**{"adaptive_budget": False, "max_draft_nodes": max_draft_nodes, **config}))


def finish_of(outputs: SequenceOf[StepOutput]) -> Finish:
    """How the sequence of the last output ended."""
    finish = outputs[-1].finish
    assert finish is not None
    return finish


def run(engine: Engine, *sequences: Sequence) -> list[StepOutput]:
    """Runs these and what is in the engine already to the end; checks the engine after each step."""
    for sequence in sequences:
        engine.add(sequence)
    outputs = list[StepOutput]()
    while engine.has_work:
        outputs += engine.step()
        engine.check()
    return outputs
