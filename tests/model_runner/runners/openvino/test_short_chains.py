"""Tokens of short chains as rows of their own: what a step is given then, and that the model computes the same."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.openvino import runner as runner_module
from draftwood_model_runner.runners.openvino.factory import take_over
from draftwood_model_runner.runners.openvino.kv_pages import PAGE_SIZE
from draftwood_model_runner.runners.openvino.short_chains import LONGEST, split_short_chains
from draftwood_strategies.draft import EMPTY_TREE, DraftTree
from tests.model_runner.families import VOCAB, tiny
from tests.strategies.arrays import ids


def test_each_token_of_a_short_chain_has_a_row_and_all_else_stays() -> None:
    tokens = np.arange(LONGEST + 1, dtype=np.int32)
    batch = lay_out(
        [
            BatchRow(ids(7, 4), PAGE_SIZE - 1, tokens[:2], EMPTY_TREE, logits_from=0),
            BatchRow(ids(5), 9, tokens, EMPTY_TREE, logits_from=LONGEST),
            BatchRow(ids(6), 3, tokens[:1], EMPTY_TREE, logits_from=0),
            BatchRow(ids(8), 3, tokens[:1], DraftTree.of([4, 5], [-1, -1]), logits_from=0),
        ]
    )
    split = split_short_chains(batch)
    assert split.cu_seqlens.tolist() == [0, 1, 2, LONGEST + 3, LONGEST + 4, LONGEST + 7]
    assert split.context_lens.tolist() == [PAGE_SIZE - 1, PAGE_SIZE, 9, 3, 3]
    assert split.cu_blocks.tolist() == [0, 2, 4, 5, 6, 7]
    assert split.block_table.tolist() == [7, 4, 7, 4, 5, 6, 8]
    assert split.parents.tolist() == [-1, -1, *range(-1, LONGEST), -1, -1, 0, 0]
    for name in ("tokens", "positions", "logit_rows"):
        assert getattr(split, name) is getattr(batch, name)
    assert batch.parents.tolist() == [-1, 0, *range(-1, LONGEST), -1, -1, 0, 0]


def test_nothing_is_copied_where_nothing_is_split() -> None:
    batch = lay_out([BatchRow(ids(0), 3, np.arange(LONGEST + 1, dtype=np.int32), EMPTY_TREE, logits_from=0)])
    assert split_short_chains(batch) is batch


@pytest.mark.parametrize("length", range(2, LONGEST + 1))
def test_the_model_computes_the_same(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the end of a page, beside a tree and a prompt; and what later tokens read of it is the same as well."""
    factory = take_over(tiny("llama"), max_context=128)
    random = np.random.default_rng(length)
    texts = random.integers(0, VOCAB, (3, PAGE_SIZE + 8), np.int32)
    tables = random.permutation(6).astype(np.int32).reshape(3, 2)
    context = PAGE_SIZE - 1
    tree = DraftTree.of(texts[1, context + 1 : context + 4], [-1, -1, 0])
    prompt = lay_out(
        [BatchRow(tables[i], 0, texts[i, :context], EMPTY_TREE, logits_from=context - 1) for i in range(2)]
    )
    step = lay_out(
        [
            BatchRow(tables[0], context, texts[0, context : context + length], EMPTY_TREE, logits_from=0),
            BatchRow(tables[1], context, texts[1, context : context + 1], tree, logits_from=0),
            BatchRow(tables[2], 0, texts[2], EMPTY_TREE, logits_from=0),
        ]
    )
    after = lay_out([BatchRow(tables[0], context + length, texts[0, -1:], EMPTY_TREE, logits_from=0)])

    def logits() -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        runner = factory.runner(6 * PAGE_SIZE, 1)
        return np.concatenate([runner.step(batch, 0).logits.copy() for batch in (prompt, step, after)])

    split = logits()
    rows = list[int]()

    def whole(batch: StepBatch) -> StepBatch:
        rows.append(batch.rows)
        return batch

    monkeypatch.setattr(runner_module, "split_short_chains", whole)
    assert np.allclose(split, logits(), atol=1e-4)
    assert rows == [2, 3, 1]
