"""The recycling strategy, its table against a dictionary, and what fills the unused nodes of a draft."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies import DraftTree, Feedback, HybridStrategy, RecyclingStrategy
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.mixing.candidates import TABLE
from draftwood_strategies.mixing.drafting import MixedDraft, fill
from draftwood_strategies.successors import NOWHERE, ORDERS, WIDTH, SuccessorTable, extended, find
from tests.strategies.arrays import ids
from tests.strategies.test_draft import trees
from tests.strategies.toy_model import ToyModel, run

TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8)


def tops(*best: int) -> Int32Array:
    """For each node its most probable token, and seven tokens that never come."""
    return np.array([[token, *range(1000, 1007)] for token in best], np.int32)


def note_each_alone(table: SuccessorTable, count: int) -> None:
    """Every token below `count` after nothing, in order, followed by itself."""
    for token in range(count):
        tail = np.array([*[NOWHERE] * (ORDERS - 1), token], np.int32)
        table.update(tail, ids(token), ids(-1), np.full((1, WIDTH), token, np.int32))


def row_of(table: SuccessorTable, context: tuple[int, ...]) -> Int32Array | None:
    """The successors after `context`, the newest token last; None for an unknown one."""
    context_hash = 0
    for token in reversed(context):
        context_hash = int(extended(context_hash, token))
    row = find(table.rows, context_hash)
    return table.rows[row, :WIDTH] if row >= 0 else None


def test_a_table_begins_anew_once_its_clock_ends() -> None:
    """Its times have 32 bits, enough for some days of full load."""
    table, fresh = SuccessorTable(1 << 13), SuccessorTable(1 << 13)
    note_each_alone(table, 3000)
    table.struct.fields.state["clock"] = 2**31 - 1
    for one in (table, fresh):
        note_each_alone(one, 100)
    known, expected = ([row_of(one, (token,)) is not None for token in range(3000)] for one in (table, fresh))
    assert known == expected
    assert (table.contexts, int(table.struct.fields.state["clock"][0])) == (fresh.contexts, 100)


@given(TEXTS)
def test_the_table_has_what_a_dictionary_would(texts: list[list[int]]) -> None:
    """All contexts of one and two tokens, longer ones once the shorter one is known; the latest prediction counts."""
    table, expected = SuccessorTable(1 << 16), dict[tuple[int, ...], int]()
    for number, text in enumerate(texts):
        tail = np.full(ORDERS, NOWHERE, np.int32)
        tail[-1] = text[0]
        chain = np.arange(-1, len(text) - 1, dtype=np.int32)
        predicted = [100 * number + node for node in range(len(text))]
        table.update(tail, np.array(text, np.int32), chain, tops(*predicted))
        for node, token in enumerate(predicted):
            for order in range(1, min(ORDERS, node + 1) + 1):
                context = tuple(text[node + 1 - order : node + 1])
                known = context in expected
                expected[context] = token
                if order >= 2 and not known:
                    break
    found = {context: row_of(table, context) for context in expected}
    assert {context: int(row[0]) for context, row in found.items() if row is not None} == expected
    assert table.contexts == len(expected)


def test_the_table_grows_up_to_its_capacity_and_then_forgets_the_oldest() -> None:
    table = SuccessorTable(4096)
    smallest = table.nbytes
    note_each_alone(table, 20_000)
    assert smallest < table.nbytes <= 4096 * 44
    assert table.contexts <= 4096
    known = [row_of(table, (token,)) is not None for token in range(20_000)]
    assert all(known[-100:])
    assert sum(known[:2000]) < 0.05 * 2000


def test_growing_loses_little() -> None:
    table = SuccessorTable(1 << 16)
    note_each_alone(table, 10_000)
    rows = [row_of(table, (token,)) for token in range(10_000)]
    assert all(row is None or row[0] == token for token, row in enumerate(rows))
    assert sum(row is not None for row in rows) > 9_000


def test_a_prediction_at_a_rejected_node_is_drafted_later() -> None:
    strategy = RecyclingStrategy()
    drafter = strategy.start(ids(1))
    drafter.propose(4)
    # 5 is accepted; the branch 7 -> 8 is rejected, and the model predicts 9 after it.
    feedback = Feedback(ids(1, 7, 8), ids(-1, 0, 1), ids(5, 8, 9), tops(5, 8, 9))
    drafter.observe(ids(5), feedback)
    drafter.propose(4)
    drafter.observe(ids(8), Feedback(ids(5), ids(-1), ids(8), tops(8)))
    assert drafter.propose(1).tokens.tolist() == [9]


@pytest.mark.parametrize("budget", [1, 16, 200])
def test_on_a_model_of_two_tokens_context_it_learns_to_draft_everything(budget: int) -> None:
    model, strategy = ToyModel(), RecyclingStrategy()
    for seed in range(3):
        steps = run(model, strategy.start(ids(seed, 2)), [seed, 2], 600, budget)
    reached = np.mean(steps[-20:])
    assert reached > {1: 1.9, 16: 12.0, 200: 40.0}[budget]
    assert strategy.nbytes >= RecyclingStrategy().nbytes > 0


def test_the_rows_of_the_model_draft_for_all_tenants_and_none_writes_to_them() -> None:
    """A tenant's own row takes the place of the model's for this tenant alone."""
    model_table = SuccessorTable(1024)
    model_table.update(ids(NOWHERE, NOWHERE, NOWHERE, 1), ids(1), ids(-1), tops(5))
    rows = model_table.rows.copy()
    one, other = RecyclingStrategy(), RecyclingStrategy()
    for strategy in (one, other):
        strategy.set_model_table(rows)
    before = rows.copy()
    assert 5 in one.start(ids(1)).propose(8).tokens
    drafter = one.start(ids(1))
    drafter.propose(8)
    drafter.observe(ids(7), Feedback(ids(1), ids(-1), ids(7), tops(7)))
    assert {token: token in one.start(ids(1)).propose(8).tokens for token in (7, 5)} == {7: True, 5: False}
    assert {token: token in other.start(ids(1)).propose(8).tokens for token in (7, 5)} == {7: False, 5: True}
    np.testing.assert_array_equal(rows, before)


def filled(regular: DraftTree, top_tokens: list[list[int]], budget: int) -> tuple[DraftTree, Int32Array]:
    """A draft with the regular nodes, filled up to the budget, and the source of each node."""
    tokens, parents, sources = np.empty((3, budget), np.int32)
    draft, n = MixedDraft(tokens, parents, np.empty(budget, np.float32), sources), len(regular)
    draft.tokens[:n], draft.parents[:n], draft.scores[:n] = regular.tokens, regular.parents, regular.scores
    draft.sources[:n] = 0
    top = np.array(top_tokens, np.int32).reshape(len(top_tokens), len(top_tokens[0]) if top_tokens else 0)
    size = fill(top, draft, n, budget)
    tree = DraftTree(draft.tokens[:size], draft.parents[:size], draft.scores[:size])
    tree.check()
    return tree, draft.sources[:size]


@given(trees(10), st.lists(st.lists(st.integers(0, 12), min_size=3, max_size=3), max_size=30), st.integers(0, 40))
def test_filling_adds_nodes_and_keeps_regular_ones(regular: DraftTree, top_tokens: list[list[int]], spare: int) -> None:
    budget = len(regular) + spare
    tree, sources = filled(regular, top_tokens, budget)
    n = len(regular)
    assert tree.pruned(budget) is tree
    assert (tree.tokens[:n] == regular.tokens).all()
    assert (tree.parents[:n] == regular.parents).all()
    assert (tree.scores[:n] == regular.scores).all()
    assert (sources[n:] == TABLE).all()
    roots, tops = tree.tokens[tree.parents == -1].tolist(), {token for row in top_tokens for token in row}
    assert (tree.parents[n:] == -1).all()
    assert set(tree.tokens[n:].tolist()) <= tops
    assert len(tree) == budget or tops <= set(roots), "a node is left unused although there is a token for it"
    assert len(set(roots)) == len(roots)
    regular_chance = float(regular.scores[regular.parents == -1].sum())
    assert tree.scores[tree.parents == -1].sum() <= max(1.0, regular_chance) + 1e-5, "what regular nodes leave"


def test_tokens_of_better_ranks_come_first() -> None:
    tree, _ = filled(DraftTree.of([]), [[1, 2, 3], [1, 3, 2], [4, 3, 5]], 4)
    assert tree.tokens.tolist() == [1, 4, 2, 3]
    assert tree.scores == pytest.approx([0.07, 0.035, 0.07 / 3, 0.0175])


@pytest.mark.parametrize(("sources", "has_table"), [("recycling", True), ("trie", False)])
def test_an_unknown_context_is_drafted_from_the_latest_step_if_there_is_a_table(sources: str, has_table: bool) -> None:
    drafter, latest = HybridStrategy(sources=sources).start(ids(1)), set(range(10, 18))
    assert len(drafter.propose(8)) == 0, "there was no step yet"
    drafter.observe(ids(9), Feedback(ids(1), ids(-1), ids(9), np.arange(10, 18, dtype=np.int32)[None]))
    assert ({*drafter.propose(8).tokens.tolist()} == latest) is has_table, "the table has no row for 9"
    drafter.observe(ids(18), None)
    assert not {*drafter.propose(8).tokens.tolist()} & latest, "the latest step has no feedback"


def test_a_pruned_tree_and_feedback_without_top_tokens() -> None:
    strategy, model, text = RecyclingStrategy(), ToyModel(), [1, 2]
    drafter = strategy.start(ids(*text))
    for step in range(60):
        tree = drafter.propose(24)
        tree.check()
        accepted, feedback = model.verify(text, tree.pruned(step % 5), 0 if step % 7 == 3 else 8)
        drafter.observe(np.array(accepted, np.int32), feedback)
        text += accepted
