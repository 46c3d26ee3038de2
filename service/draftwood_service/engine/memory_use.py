"""From requests to the memory that they draft from and that learns their answers."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager

import numpy as np

from draftwood_memory import Memory, MemoryName, StrategyKey, StrategyUse, Terms
from draftwood_model_runner.request import MemoryTerms, Request
from draftwood_model_runner.sequence import Sequence


def terms_of(terms: MemoryTerms) -> Terms:
    """What a tenant's configuration says of its memory, as the memory takes it."""
    return Terms(terms.forked, terms.max_tokens, terms.max_bytes, terms.idle_ttl, terms.max_age)


def use_of(request: Request) -> StrategyUse:
    """Which memory and strategy a request drafts with."""
    key = StrategyKey(request.strategy_name, request.strategy_options)
    return StrategyUse(MemoryName(request.tenant, request.arm), key, terms_of(request.memory))


@contextmanager
def learning(memory: Memory, sequences: SequenceOf[Sequence]) -> Iterator[None]:
    """Around a request's samples, which share a memory and a strategy: their outputs are learned on exit."""
    first = sequences[0]
    prompt = first.request.prompt if first.request.memory.with_prompts else np.empty(0, np.int32)
    with memory.learning(use_of(first.request).memory, first.strategy) as scope:
        yield
        for sequence in sequences:
            if sequence.output:
                scope.learn(np.concatenate([prompt, np.array(sequence.output, np.int32)]))
