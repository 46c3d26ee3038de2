"""Pages of keys and values for PagedAttention, and what a step is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.runners.base import KVCompaction, KVShape
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.openvino.factory import QUANTIZED_TOLERANCE, take_over
from draftwood_model_runner.runners.openvino.pages import (
    PAGE_SIZE,
    KVPages,
    PageLayout,
    paired,
    step_inputs,
)
from draftwood_strategies.draft import EMPTY_TREE
from tests.model_runner.families import HAS_AMX, VOCAB, tiny
from tests.model_runner.runners.openvino.bfloat16 import needs_bfloat16
from tests.strategies.arrays import ids

SHAPES = (KVShape(3, 4, 5), KVShape(1, 6, 2), KVShape(3, 4, 5))
LAYOUT = PageLayout(SHAPES, "float32")


SLOTS = 3 * PAGE_SIZE


@given(st.permutations(range(SLOTS)), st.integers(0, SLOTS // 2))
def test_entries_move_from_slot_to_slot(order: list[int], count: int) -> None:
    kv = KVPages(LAYOUT, SLOTS)
    for slot in range(SLOTS):
        for keys, values in zip(kv.keys, kv.values, strict=True):
            keys[slot // PAGE_SIZE, :, slot % PAGE_SIZE] = slot
            values[slot // PAGE_SIZE, :, slot % PAGE_SIZE] = -slot
    targets, sources = order[:count], order[count : 2 * count]
    kv.move(KVCompaction(*(np.array(part, np.int32) for part in (sources, targets, [0, len(sources)]))))
    moved = dict(zip(targets, sources, strict=True))
    expected = [moved.get(slot, slot) for slot in range(SLOTS)]
    for keys, values in zip(kv.keys, kv.values, strict=True):
        assert keys[:, -1, :, -1].ravel().tolist() == expected
        assert values[:, 0, :, -1].ravel().tolist() == [-slot for slot in expected]


def test_memory_that_there_is_not_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", zeros)
    with pytest.raises(InvalidValueError, match="64 is not allowed") as caught:
        KVPages(LAYOUT, 64)
    assert caught.value.field == "kv_cache_tokens"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_costs_what_the_layout_reports(dtype: str) -> None:
    kv = KVPages(PageLayout(SHAPES, dtype), PAGE_SIZE + 1)
    assert kv.pages == 2
    assert kv.layout.bytes_per_token * 2 * PAGE_SIZE == sum(layer.nbytes for layer in (*kv.keys, *kv.values))
    assert [tensor.byte_size for tensor in kv.tensors().values()] == [layer.nbytes for layer in (*kv.keys, *kv.values)]


def test_each_single_token_is_followed_by_itself() -> None:
    tokens = np.arange(3, dtype=np.int32)
    batch = lay_out(
        [
            BatchRow(ids(7), 5, tokens[:1], EMPTY_TREE, logits_from=0),
            BatchRow(ids(4, 2), PAGE_SIZE, tokens, EMPTY_TREE, logits_from=2),
            BatchRow(ids(3), PAGE_SIZE - 1, tokens[:1], EMPTY_TREE, logits_from=0),
            BatchRow(ids(6, 8), PAGE_SIZE - 1, tokens[:1], EMPTY_TREE, logits_from=0),
        ]
    )
    inputs = paired(batch, step_inputs(batch), spare_page=9)
    assert inputs["attention_rows"].tolist() == [0, 0, 1, 2, 3, 4, 4, 5, 5]
    assert inputs["token_rows"].tolist() == [0, 2, 3, 4, 5, 7]
    assert inputs["subsequence_begins"].tolist() == [0, 2, 5, 7, 9]
    assert inputs["block_indices"].tolist() == [7, 4, 2, 3, 9, 6, 8]
    assert inputs["block_indices_begins"].tolist() == [0, 1, 3, 5, 7]
    assert inputs["max_context_len"] == PAGE_SIZE + 3
    assert inputs["input_ids"].shape == (6, 1)
    assert {inputs[name].dtype for name in ("attention_rows", "token_rows", "block_indices")} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    "width",
    [pytest.param(1, marks=pytest.mark.skipif(HAS_AMX, reason="up to four tokens take another kernel with AMX")), 5],
)
@pytest.mark.parametrize("weights", ["int8", "int4"])
@needs_bfloat16
def test_steps_of_any_width_have_the_same_logits(weights: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the end of the last page of the sequence and of the memory."""
    # 4 bits change the logits of random weights more than those of trained ones, which is not what is tested here.
    monkeypatch.setitem(QUANTIZED_TOLERANCE, "int4", 1.0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # multiples of the groups of activations
    module = tiny("llama", **sizes).to(torch.bfloat16)
    factory = take_over(module, max_context=128, weights=weights)
    runner = factory.runner(2 * PAGE_SIZE, 1)
    assert runner.pages == 2
    tokens = np.random.default_rng(0).integers(0, VOCAB, 2 * PAGE_SIZE, np.int32)
    chain = runner.step(lay_out([BatchRow(ids(0, 1), 0, tokens, EMPTY_TREE, logits_from=0)]), 0).logits.copy()
    for at in range(0, tokens.size - width + 1, width):
        used = ids(1, 0)[: (at + width - 1) // PAGE_SIZE + 1]
        batch = lay_out([BatchRow(used, at, tokens[at : at + width], EMPTY_TREE, logits_from=0)])
        logits = runner.step(batch, 0).logits
        assert logits.shape == (width, VOCAB)
        # Another kernel rounds otherwise: the difference is 0.1 then, see docs/decisions/quantized-weights.md.
        assert np.allclose(logits, chain[at : at + width], atol=1e-3, rtol=1e-3)
