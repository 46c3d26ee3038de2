"""Verified and accepted nodes by source."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.draft import DraftTree
from draftwood_strategies.mixing.candidates import SOURCES
from draftwood_strategies.mixing.drafting import MixedDraft
from draftwood_strategies.mixing.learning import attribute
from tests.strategies.arrays import ids
from tests.strategies.test_draft import trees


def counted(drafted: DraftTree, sources: Int32Array, verified: DraftTree, accepted: Int32Array) -> list[list[int]]:
    """[source] -> nodes verified and accepted."""
    counts = np.zeros((2, SOURCES + 1), np.int64)
    tokens, parents = np.append(ids(99), verified.tokens), np.append(ids(-1), verified.parents + 1)
    draft = MixedDraft(drafted.tokens, drafted.parents, drafted.scores, sources)
    attribute(draft, len(drafted), True, tokens, parents, accepted, np.empty(len(drafted), np.int32), counts)
    found: list[list[int]] = counts.T.tolist()
    return found


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [
        ((5, 6, 9), [[2, 2], [1, 0]]),
        ((5, 6, 7), [[2, 2], [1, 1]]),
        ((5, 9), [[2, 1], [1, 0]]),
        ((9,), [[2, 0], [1, 0]]),
    ],
    ids=["two of three", "an end within the draft", "one", "none"],
)
def test_nodes_count_for_their_source(accepted: tuple[int, ...], expected: list[list[int]]) -> None:
    chain = DraftTree.of([5, 6, 7])
    assert counted(chain, ids(0, 0, 1), chain, ids(*accepted))[:2] == expected


def test_pruned_and_foreign_nodes_are_told_apart() -> None:
    """6 was pruned; 8 -> 5 was forced by a grammar, and only looks like the root's 5."""
    drafted = DraftTree.of([5, 6, 7], [-1, -1, 0])
    verified = DraftTree.of([8, 5, 5, 7], [-1, 0, -1, 2])
    counts = counted(drafted, ids(0, 1, 2), verified, ids(8, 5, 3))
    assert counts[:3] == [[1, 0], [0, 0], [1, 0]]


@given(trees(), st.integers(0, 20))
def test_every_verified_node_of_a_draft_has_one_source(drafted: DraftTree, budget: int) -> None:
    sources = np.arange(len(drafted), dtype=np.int32) % (SOURCES + 1)
    verified = drafted.pruned(budget)
    counts = counted(drafted, sources, verified, ids(10**6))
    assert sum(count[0] for count in counts) == len(verified)
    assert all(count[1] == 0 for count in counts)
