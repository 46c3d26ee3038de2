from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model_runner.runners.batch import BatchRow, lay_out
from strategies import EMPTY_TREE, DraftTree
from tests.strategies.test_draft import paths, trees


@given(trees(), st.integers(1, 5), st.floats(0.0, 1.0))
def test_a_chain_goes_on_in_the_nodes_that_score_enough(tree: DraftTree, length: int, least: float) -> None:
    chain = np.arange(100, 100 + length, dtype=np.int32)
    before = BatchRow(8, 3, chain[:2], EMPTY_TREE, logits_from=2)
    batch = lay_out([before, BatchRow(9, 50, chain, tree, logits_from=length - 1)], least)
    first = min(length, 2)
    tokens, parents, depths = batch.tokens[first:], batch.parents[first:], batch.positions[first:] - 50
    assert batch.begins.tolist() == [0, first, batch.size]
    assert batch.contexts.tolist() == [3, 50]
    assert batch.regions.tolist() == [8, 9]
    assert batch.logit_rows.tolist() == list(range(first + length - 1, batch.size))
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    whole = tuple(chain.tolist())
    expected = [(*whole, *path) for path, score in paths(tree).items() if score >= least]
    assert found == [whole[: i + 1] for i in range(length)] + expected
    assert depths.tolist() == [len(path) - 1 for path in found]
