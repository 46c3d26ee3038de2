"""A drafter that reads changes nothing of what a tenant's sequences share, and drafts from it all the same."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from draftwood_strategies import create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import Drafter, Feedback, SupportsReadOnly
from tests.strategies.arrays import ids

READABLE = ("trie", "recycling", "jacobi", "hybrid")
TEXT = np.arange(40, dtype=np.int32) % 13 + 1
OTHER = np.arange(40, dtype=np.int32) % 7 + 20


def write(drafter: Drafter, text: Int32Array, top_k: int) -> int:
    """Drafts and writes the text, two tokens a step; returns how many nodes were drafted."""
    drafted, last = 0, int(text[0])
    for at in range(1, len(text) - 1, 2):
        tree, accepted = drafter.propose(16), text[at : at + 2]
        drafted += len(tree)
        tokens = np.append(ids(last), tree.tokens).astype(np.int32)
        parents = np.append(ids(-1), tree.parents + 1).astype(np.int32)
        predictions = np.full(tokens.size, accepted[0], np.int32)
        top = np.tile(np.append(accepted, np.arange(100, 100 + max(top_k - 2, 0))).astype(np.int32), (tokens.size, 1))
        drafter.observe(accepted, Feedback(tokens, parents, predictions, top[:, :top_k] if top_k else None))
        last = int(accepted[-1])
    drafter.close()
    return drafted


def shared(strategy: Any) -> bytes:
    """All that its sequences share, bit for bit."""
    if hasattr(strategy, "parts"):
        parts = [shared(part) for part in strategy.parts.values()]
        return pickle.dumps([*parts, *strategy.mixture.weights, strategy.mixture.table.rows])
    if hasattr(strategy, "memory"):
        return pickle.dumps([[sequence.tolist() for sequence in strategy.sequences()], *strategy.weights])
    if hasattr(strategy, "pool"):
        return pickle.dumps([[*strategy.pool._rests.items()], vars(strategy.rates)])
    return pickle.dumps([strategy.successors.rows, *strategy.mixture.weights])


@pytest.mark.parametrize("name", READABLE)
def test_what_is_learned_is_drafted_from_read_only_and_by_no_other_tenant(name: str) -> None:
    strategy, other = create(name), create(name)
    fresh = shared(other)
    write(strategy.start(TEXT[:5]), TEXT, strategy.top_k)
    before = shared(strategy)
    assert isinstance(strategy, SupportsReadOnly)
    assert write(strategy.start_read_only(TEXT[:2]), TEXT, strategy.top_k) > 0
    write(strategy.start_read_only(OTHER[:5]), OTHER, strategy.top_k)
    assert shared(strategy) == before
    write(strategy.start(OTHER[:5]), OTHER, strategy.top_k)
    assert shared(strategy) != before
    assert shared(other) == shared(create(name)) == fresh
