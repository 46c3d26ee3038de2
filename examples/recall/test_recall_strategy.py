"""The strategy on its own: no server, no model, nothing of Draftwood."""

from __future__ import annotations

import numpy as np
import pytest

from recall_strategy import MATCHES, RecallStrategy


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_what_followed_in_the_same_text_is_drafted() -> None:
    drafter = RecallStrategy().start(ids(1, 2, 3, 4, 1, 2))
    tree = drafter.propose(8)
    assert tree.tokens.tolist() == [3, 4, 1, 2]
    assert tree.parents.tolist() == [-1, 0, 1, 2]
    assert (np.diff(tree.scores) < 0).all()
    drafter.observe(ids(3, 9), None)
    assert drafter.propose(8).tokens.size == 0


def test_an_answer_is_recalled_in_the_next_one_and_a_longer_match_decides() -> None:
    strategy = RecallStrategy()
    for answer in ([5, 6, 7, 8, 9], [6, 7, 1, 1]):
        drafter = strategy.start(ids(3))
        drafter.observe(ids(*answer), None)
        drafter.close()
    drafter = strategy.start(ids(3))
    drafter.observe(ids(4, 5, 6, 7), None)
    assert drafter.propose(8).tokens.tolist() == [1, 1]
    strategy.learn(ids(4, 5, 6, 7, 8, 9))
    assert drafter.propose(8).tokens.tolist() == [8, 9]


def test_two_memories_make_a_tree_with_one_node_for_what_they_share() -> None:
    strategy = RecallStrategy()
    strategy.learn(ids(1, 2, 3, 4))
    tree = strategy.start(ids(1, 2, 3, 5, 1, 2)).propose(8)
    assert tree.tokens.tolist() == [3, 5, 1, 2, 4]
    assert tree.parents.tolist() == [-1, 0, 1, 2, 0]
    assert strategy.start(ids(1, 2, 3, 5, 1, 2)).propose(2).tokens.tolist() == [3, 5]


def test_scores_follow_what_came_true() -> None:
    strategy = RecallStrategy()
    drafter = strategy.start(ids(1, 2, 3, 1, 2))
    before = float(drafter.propose(1).scores[0])
    for other in range(100):
        assert drafter.propose(1).tokens.size
        drafter.observe(ids(1000 + other, 1, 2), None)
    assert strategy.rates[min(MATCHES)] < before / 2


def test_a_request_that_may_not_be_learned_leaves_nothing() -> None:
    strategy = RecallStrategy()
    drafter = strategy.start_read_only(ids(1, 2, 3, 1, 2))
    assert drafter.propose(4).tokens.size
    drafter.observe(ids(9), None)
    drafter.close()
    assert (strategy.tokens, strategy.rates) == (0, RecallStrategy().rates)


def test_the_memory_is_bounded() -> None:
    strategy = RecallStrategy(capacity_tokens=1000)
    for start in range(0, 50_000, 100):
        strategy.learn(np.arange(start, start + 100, dtype=np.int32))
        assert strategy.tokens <= 1000
    assert strategy.start(ids(49_990, 49_991)).propose(1).tokens.tolist() == [49_992]


@pytest.mark.parametrize("option", [{"length": 0}, {"length": 257}, {"capacity_tokens": 999}])
def test_options_are_checked(option: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(option))}: .* is not allowed"):
        RecallStrategy(**option)
