from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from model_runner.runners.batch import chain_with_tree
from strategies import DraftTree
from tests.strategies.test_draft import paths, trees


@given(trees(), st.integers(1, 5), st.floats(0.0, 1.0))
def test_a_chain_goes_on_in_the_nodes_that_score_enough(tree: DraftTree, length: int, least: float) -> None:
    chain = np.arange(100, 100 + length, dtype=np.int32)
    tokens, parents, depths = chain_with_tree(chain, tree, least)
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    whole = tuple(chain.tolist())
    expected = [(*whole, *path) for path, score in paths(tree).items() if score >= least]
    assert found == [whole[: i + 1] for i in range(length)] + expected
    assert depths.tolist() == [len(path) - 1 for path in found]
