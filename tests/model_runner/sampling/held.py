"""Answers that are held to a grammar: by transformers' own `generate`, and by an engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.request import GrammarKind, SamplingParams, StopParams
from draftwood_model_runner.sequence import Grammar, Sequence
from draftwood_strategies import Strategy
from tests.model_runner.families import generate
from tests.model_runner.sequences import make_sequence, run


def allowed_by(state: Grammar, vocab: int) -> list[bool]:
    """Which tokens may come next."""
    scores = np.zeros(vocab, np.float32)
    state.mask(scores)
    allowed: list[bool] = np.isfinite(scores).tolist()
    return allowed


def held_answer(
    model: LoadedModel, plain: Any, kind: GrammarKind, text: str, prompt: tuple[int, ...], most: int
) -> list[int]:
    """What `generate` writes when every step is held to the grammar, compiled anew and read from its beginning."""

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        state = model.grammars.compile(kind, text)
        for token in ids[len(prompt) :].tolist():
            state.accept(token)
        return np.flatnonzero(allowed_by(state, model.vocab_size)).tolist()

    return generate(plain, prompt, most, prefix_allowed_tokens_fn=allowed)


def drafted_answer(
    engine: Engine,
    kind: GrammarKind,
    text: str,
    prompt: tuple[int, ...],
    most: int,
    strategy: Strategy | None,
    nodes: int,
    **sampling: Any,
) -> tuple[Sequence, str]:
    """What an engine writes under the grammar, and its text."""
    grammar = engine.model.grammars.compile(kind, text)
    params, stop = SamplingParams(**sampling), StopParams(most)
    sequence = make_sequence("r", prompt, stop, params, strategy=strategy, max_draft_nodes=nodes, grammar=grammar)
    outputs = run(engine, sequence)
    assert all(output.finish is None or output.finish.error is None for output in outputs)
    assert sequence.stats.drafting_disabled_reason == ""
    return sequence, "".join("".join(output.texts) for output in outputs)
