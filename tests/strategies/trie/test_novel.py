"""Tokens that no context predicts: how they are counted, and that they are drafted."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies import TrieStrategy, create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.trie.weights import COUNTED, count_miss, no_novel, novel_chance


def ids(*tokens: int) -> Int32Array:
    return np.array(tokens, np.int32)


@given(st.lists(st.integers(0, 30), max_size=80))
def test_counts_are_those_of_a_dictionary_whose_counts_decay(tokens: list[int]) -> None:
    novel = no_novel()
    expected = defaultdict[int, float](float)
    for token in tokens:
        count_miss(novel, token)
        for known in expected:
            expected[known] *= 0.999
        expected[token] += 1.0
    ranked, used = novel[:COUNTED], len(expected)
    found = dict(zip(ranked["token"][:used].tolist(), ranked["count"][:used].tolist(), strict=True))
    assert found == pytest.approx(dict(expected), rel=1e-4)
    assert (np.diff(ranked["count"]) <= 0).all()
    assert novel["count"][COUNTED] == pytest.approx(sum(expected.values()), rel=1e-4)
    assert sum(novel_chance(novel, rank) for rank in range(COUNTED)) < 1.0


def test_a_new_token_takes_the_place_of_the_least_frequent_one() -> None:
    novel = no_novel()
    for token in (5, 5, *range(100, 99 + COUNTED)):
        count_miss(novel, token)
    assert (novel["count"][:COUNTED] > 0).all()
    count_miss(novel, 6)
    assert {5, 6} <= set(novel["token"][:COUNTED].tolist())
    assert novel["count"][COUNTED] == pytest.approx(novel["count"][:COUNTED].sum(), rel=1e-4)


def test_tokens_that_no_context_predicts_are_drafted_after_an_unknown_context() -> None:
    """Three new words, then a comma, 7, again and again: no earlier context is like it."""
    strategy = TrieStrategy()
    drafter = strategy.start(ids(1))
    for word in range(100, 190, 3):
        drafter.propose(8)
        drafter.observe(ids(word, word + 1, word + 2), None)
        drafter.propose(8)
        drafter.observe(ids(7), None)
    tree = strategy.start(ids(997, 998, 999)).propose(8)
    first_level = tree.tokens[tree.parents == -1].tolist()
    assert first_level[0] == 7
    assert tree.scores[0] > 4 * tree.scores[tree.parents == -1][1]


def test_a_drafter_that_only_reads_counts_no_misses() -> None:
    strategy = TrieStrategy()
    drafter = strategy.start_read_only(ids(1, 100))
    drafter.propose(8)
    drafter.observe(ids(7), None)
    assert strategy.weights.novel["count"].sum() == 0


def test_a_hybrid_with_a_successor_table_leaves_the_guessing_to_it() -> None:
    parts = [create("hybrid", sources=sources).parts["trie"] for sources in ("trie,recycling", "trie")]  # type: ignore[attr-defined]
    assert [part.backs_off for part in parts] == [False, True]
