"""Drafting for several sequences: in one call the same drafts as one by one, and what they share but for readers."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies import EMPTY_TREE, DraftTree, Feedback, MalformedTreeError, create
from draftwood_strategies import threads as row_threads
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import BatchStrategy, Drafter, StepFeedback, SupportsReadOnly
from draftwood_strategies.draft import DraftTrees, checked_all
from tests.strategies.arrays import ids
from tests.strategies.test_draft import trees
from tests.strategies.toy_model import ToyModel

IN_BATCHES = ("trie", "recycling", "hybrid")
PROMPTS = ([1, 2], [3, 4, 5, 6, 7], [1, 2, 3], [9])
BUDGETS = np.array([16, 5, 40, 1], np.int32)


def joined(parts: list[Feedback]) -> StepFeedback:
    """The feedback of several sequences as that of a step."""
    return StepFeedback(
        tokens=np.concatenate([part.tokens for part in parts]),
        parents=np.concatenate([part.parents for part in parts]),
        predictions=np.concatenate([part.predictions for part in parts]),
        top_tokens=np.concatenate([part.top_tokens for part in parts if part.top_tokens is not None]),
        offsets=np.cumsum([0, *(part.tokens.size for part in parts)], dtype=np.int32),
    )


def same(one: DraftTree, other: DraftTree) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "parents", "scores"))


@pytest.mark.parametrize("name", IN_BATCHES)
@pytest.mark.parametrize("reading", [(), (1, 3)], ids=["all learn", "some read only"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_batch_drafts_and_learns_what_one_by_one_does(
    name: str, reading: tuple[int, ...], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_threads, "_usable_cpus", lambda: threads)
    monkeypatch.setattr(row_threads, "_NODES_TO_DRAFT", 1)
    batch, alone, model = create(name), create(name), ToyModel(vocab=12)
    assert isinstance(batch, BatchStrategy)

    def started(strategy: Any) -> list[Any]:
        methods = [strategy.start_read_only if i in reading else strategy.start for i in range(len(PROMPTS))]
        return [start(ids(*prompt)) for start, prompt in zip(methods, PROMPTS, strict=True)]

    drafters, singles, texts = started(batch), started(alone), [[*prompt] for prompt in PROMPTS]
    drafted = 0
    for step in range(60):
        # Not all sequences take part in every step, nor in the same order.
        rows = [i for i in range(len(PROMPTS)) if (step + i) % 5][:: 1 if step % 2 else -1]
        found = batch.propose_all([drafters[i] for i in rows], BUDGETS[rows])
        expected = [singles[i].propose(int(BUDGETS[i])) for i in rows]
        assert all(same(found[at], tree) for at, tree in enumerate(expected))
        drafted += found.tokens.size
        verified = [model.verify(texts[i], tree) for i, tree in zip(rows, expected, strict=True)]
        written = [np.array(accepted, np.int32) for accepted, _ in verified]
        offsets = np.cumsum([0, *map(len, written)], dtype=np.int32)
        feedback = joined([feedback for _, feedback in verified])
        batch.observe_all([drafters[i] for i in rows], np.concatenate(written), offsets, feedback)
        for i, tokens, (_, own) in zip(rows, written, verified, strict=True):
            singles[i].observe(tokens, own)
            texts[i] += tokens.tolist()
    assert drafted > 500
    if name == "hybrid":
        assert [drafter.by_source for drafter in drafters] == [single.by_source for single in singles]


@pytest.mark.parametrize("name", IN_BATCHES)
def test_many_sequences_grow_beyond_their_first_space(name: str) -> None:
    """Indexes, tables and drafts become larger in the middle of a batch."""
    strategy: Any = create(name)
    drafters = [strategy.start(ids(i)) for i in range(20)]
    random = np.random.default_rng(0)
    for budget in (2, 300):
        for _ in range(25):
            found = strategy.propose_all(drafters, np.full(20, budget, np.int32))
            checked_all(found, np.full(20, budget, np.int32), None)
            parts = [feedback_of(found[i], random) for i in range(20)]
            offsets = np.arange(0, 20 * 9 + 1, 9, dtype=np.int32)
            strategy.observe_all(drafters, random.integers(0, 40, 180, dtype=np.int32), offsets, joined(parts))


def feedback_of(tree: DraftTree, random: np.random.Generator) -> Feedback:
    top = random.integers(0, 40, (len(tree) + 1, 8), dtype=np.int32)
    parents = np.append(ids(-1), tree.parents + 1).astype(np.int32)
    return Feedback(np.append(ids(0), tree.tokens).astype(np.int32), parents, top[:, 0].copy(), top)


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [
        ([0.0, 2.0, 3.0], r"offsets must be a int32\[n\] array, not float64\[3\]"),
        ([0, 2], "offsets must delimit 2 trees of 3 nodes"),
        ([1, 2, 3], "offsets must delimit 2 trees of 3 nodes"),
        ([0, 3, 3], r"drafts have at most \[2, 2\] nodes, not \[3, 0\]"),
        ([0, 1, 3], "tree 1: a parent comes before its child and is at least -1, but node 1 has token 7, parent 1"),
    ],
)
def test_malformed_trees_are_refused(offsets: Any, problem: str) -> None:
    begins = np.array(offsets) if isinstance(offsets[0], float) else ids(*offsets)
    found: Any = DraftTrees(ids(5, 6, 7), ids(-1, -1, 1), np.full(3, 0.5, np.float32), begins)
    with pytest.raises(MalformedTreeError, match=problem):
        checked_all(found, ids(2, 2), 100)


@given(st.lists(trees(12), min_size=1, max_size=5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_trees_are_placed_in_the_rows_that_they_are_for(drafts: list[DraftTree], side: list[bool]) -> None:
    rows = range(len(drafts))
    parts = [[row for row in rows if side[row] is kept] for kept in (True, False)]
    pieces = [(part, DraftTrees.of([drafts[row] for row in part])) for part in parts if part]
    found = DraftTrees.scattered(pieces, len(drafts))
    assert all(same(found[row], drafts[row]) for row in rows)
    some = DraftTrees.scattered(pieces[:1], len(drafts) + 1)
    assert len(some) == len(drafts) + 1
    for row in range(len(some)):
        assert same(some[row], drafts[row] if row in pieces[0][0] else EMPTY_TREE)


@given(st.lists(trees(12), min_size=2, max_size=5), st.data())
def test_feedback_of_some_sequences_is_theirs(drafts: list[DraftTree], data: st.DataObject) -> None:
    random = np.random.default_rng(1)
    parts = [feedback_of(tree, random) for tree in drafts]
    chosen = data.draw(st.lists(st.integers(0, len(drafts) - 1), min_size=1, unique=True))
    found = joined(parts).part(chosen)
    for at, row in enumerate(chosen):
        own = found.feedback(at, 3)
        assert own.top_tokens is not None
        assert own.tokens.tolist() == parts[row].tokens.tolist()
        assert own.parents.tolist() == parts[row].parents.tolist()
        assert own.predictions.tolist() == parts[row].predictions.tolist()
        assert own.top_tokens.tolist() == parts[row].top_tokens[:, :3].tolist()  # type: ignore[index]
        assert found.feedback(at, 0).top_tokens is None


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
