from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.runners.batch import BatchRow, Chains, lay_out, lay_out_trees
from draftwood_strategies import EMPTY_TREE, DraftTree
from draftwood_strategies.draft import DraftTrees
from tests.strategies.test_draft import paths, trees


@given(trees(), st.integers(1, 5), st.floats(0.0, 1.0))
def test_a_chain_goes_on_in_the_nodes_that_score_enough(tree: DraftTree, length: int, least: float) -> None:
    chain = np.arange(100, 100 + length, dtype=np.int32)
    pages = np.arange(8, dtype=np.int32)
    before = BatchRow(pages[:3], 3, chain[:2], EMPTY_TREE, logits_from=2)
    batch = lay_out([before, BatchRow(pages[3:], 50, chain, tree, logits_from=length - 1)], least)
    first = min(length, 2)
    tokens, parents, depths = batch.tokens[first:], batch.parents[first:], batch.positions[first:] - 50
    assert batch.cu_seqlens.tolist() == [0, first, batch.size]
    assert batch.context_lens.tolist() == [3, 50]
    assert batch.block_table.tolist() == list(range(8))
    assert batch.cu_blocks.tolist() == [0, 3, 8]
    assert batch.logit_rows.tolist() == list(range(first + length - 1, batch.size))
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    whole = tuple(chain.tolist())
    expected = [(*whole, *path) for path, score in paths(tree).items() if score >= least]
    assert found == [whole[: i + 1] for i in range(length)] + expected
    assert depths.tolist() == [len(path) - 1 for path in found]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 20)), min_size=1, max_size=4), st.sampled_from([1, 4, 32]))
def test_every_token_has_the_slot_of_its_place_in_the_page_table(rows: list[tuple[int, int]], page_size: int) -> None:
    order = np.random.default_rng(0).permutation(500).astype(np.int32)
    tables, expected = [], []
    for context, count in rows:
        needed = -(-(context + count) // page_size)
        tables.append(order[:needed])
        order = order[needed:]
        expected += [
            int(tables[-1][entry // page_size]) * page_size + entry % page_size
            for entry in range(context, context + count)
        ]
    batch = lay_out(
        [
            BatchRow(pages, context, np.zeros(count, np.int32), EMPTY_TREE, logits_from=count)
            for pages, (context, count) in zip(tables, rows, strict=True)
        ]
    )
    assert batch.slot_mapping(page_size).tolist() == expected
    assert batch.cu_blocks.tolist() == np.cumsum([0, *map(len, tables)]).tolist()


@given(st.lists(trees(12), min_size=1, max_size=4), st.integers(0, 5))
def test_trees_keep_their_first_levels(drafts: list[DraftTree], levels: int) -> None:
    n, zeros = len(drafts), np.zeros(len(drafts), np.int32)
    chains = Chains([np.arange(9, dtype=np.int32)] * n, zeros + 7, zeros + 99, np.arange(n + 1, dtype=np.int32), zeros)
    batch = lay_out_trees(chains, DraftTrees.of(drafts), zeros + levels, 0.0)
    for i, tree in enumerate(drafts):
        own = slice(batch.cu_seqlens[i] + 1, batch.cu_seqlens[i + 1])
        found = DraftTree(batch.tokens[own], batch.parents[own] - 1, np.zeros(own.stop - own.start, np.float32))
        assert list(paths(found)) == [path for path in paths(tree) if len(path) <= levels]
