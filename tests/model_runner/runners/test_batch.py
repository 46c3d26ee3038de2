"""How a step is laid out, and where the keys and values of accepted draft tokens are once it is verified."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.runners.base import KVCompaction, compact
from draftwood_model_runner.runners.batch import BatchRow, BatchRows, lay_out, lay_out_trees
from draftwood_model_runner.sampling.verification import AcceptedPath
from draftwood_strategies import EMPTY_TREE, DraftTree
from draftwood_strategies.draft import DraftTrees
from tests.strategies.test_draft import paths, trees


@given(trees(), st.integers(1, 5), st.floats(0.0, 1.0))
def test_a_chain_goes_on_in_the_nodes_that_score_enough(tree: DraftTree, length: int, min_score: float) -> None:
    chain = np.arange(100, 100 + length, dtype=np.int32)
    pages = np.arange(8, dtype=np.int32)
    before = BatchRow(pages[:3], 3, chain[:2], EMPTY_TREE, logits_from=2)
    batch = lay_out([before, BatchRow(pages[3:], 50, chain, tree, logits_from=length - 1)], min_score)
    first = min(length, 2)
    tokens, parents, depths = batch.tokens[first:], batch.parents[first:], batch.positions[first:] - 50
    assert batch.cu_seqlens.tolist() == [0, first, batch.size]
    assert batch.context_lens.tolist() == [3, 50]
    assert batch.block_table.tolist() == list(range(8))
    assert batch.cu_blocks.tolist() == [0, 3, 8]
    assert batch.logit_rows.tolist() == list(range(first + length - 1, batch.size))
    actual: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        actual.append((*(actual[parent] if parent >= 0 else ()), token))
    whole = tuple(chain.tolist())
    expected = [(*whole, *path) for path, score in paths(tree).items() if score >= min_score]
    assert actual == [whole[: i + 1] for i in range(length)] + expected
    assert depths.tolist() == [len(path) - 1 for path in actual]


@given(st.lists(trees(12), min_size=1, max_size=4), st.integers(0, 5))
def test_trees_keep_their_first_levels(drafts: list[DraftTree], levels: int) -> None:
    n, zeros = len(drafts), np.zeros(len(drafts), np.int32)
    chains = BatchRows(
        [np.arange(9, dtype=np.int32)] * n, zeros + 7, zeros + 99, np.arange(n + 1, dtype=np.int32), zeros
    )
    batch = lay_out_trees(chains, DraftTrees.of(drafts), zeros + levels, 0.0)
    for i, tree in enumerate(drafts):
        of_tree = slice(batch.cu_seqlens[i] + 1, batch.cu_seqlens[i + 1])
        actual = DraftTree(
            batch.tokens[of_tree], batch.parents[of_tree] - 1, np.zeros(of_tree.stop - of_tree.start, np.float32)
        )
        assert list(paths(actual)) == [path for path in paths(tree) if len(path) <= levels]


PAGE_SIZE = 4


class Recorder:
    """Instead of a runner: keeps what is to be moved."""

    page_size = PAGE_SIZE

    def __init__(self) -> None:
        self.moves: list[KVCompaction] = []

    def compact_kv(self, moves: KVCompaction) -> None:
        self.moves.append(moves)


def path_to(tree: DraftTree, node: int) -> list[int]:
    """The nodes from the first level down to this one; none for -1."""
    return [*path_to(tree, int(tree.parents[node])), node] if node >= 0 else []


@st.composite
def verified_rows(draw: st.DrawFn) -> tuple[int, int, DraftTree, list[int] | None]:
    """Committed tokens, tokens beside the draft, the draft, and what is accepted of it; None: the prompt goes on."""
    context, chain = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        return context, chain, EMPTY_TREE, None
    tree = draw(trees(12))
    return context, chain, tree, path_to(tree, draw(st.integers(-1, len(tree) - 1)))


@given(st.lists(verified_rows(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_accepted_tokens_follow_committed_ones(
    rows: list[tuple[int, int, DraftTree, list[int] | None]], random: Any
) -> None:
    pages, tables, batch_rows = random.sample(range(100), 100), [], []
    for context, chain, tree, accepted in rows:
        needed = -(-(context + chain + len(tree)) // PAGE_SIZE)
        tables.append([pages.pop() for _ in range(needed)])
        logits_from = chain if accepted is None else chain - 1
        table = np.array(tables[-1], np.int32)
        batch_rows.append(BatchRow(table, context, np.zeros(chain, np.int32), tree, logits_from))

    def slot(row: int, place: int) -> int:
        return int(tables[row][place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE)

    kv = {
        slot(row, place): (row, place)
        for row, (context, chain, tree, _) in enumerate(rows)
        for place in range(context + chain + len(tree))
    }
    recorder: Any = Recorder()
    paths = {row: AcceptedPath([], verified[3]) for row, verified in enumerate(rows) if verified[3] is not None}
    compact(recorder, lay_out(batch_rows), paths)
    for moves in recorder.moves:
        sources, targets = moves.sources.tolist(), moves.targets.tolist()
        for begin, end in pairwise(moves.offsets.tolist()):
            assert len({kv[entry][0] for entry in sources[begin:end] + targets[begin:end]}) == 1  # of one sequence
        assert (moves.offsets[0], moves.offsets[-1]) == (0, len(sources))
        for source, target in zip(sources, targets, strict=True):
            assert source != target
            kv[target] = kv[source]
    for row, (context, chain, _, accepted) in enumerate(rows):
        kept = [*range(context + chain), *(context + chain + node for node in accepted or ())]
        assert [kv[slot(row, place)] for place in range(len(kept))] == [(row, place) for place in kept]
    moving = any(accepted and accepted != [*range(len(accepted))] for *_, accepted in rows)
    assert len(recorder.moves) == moving
