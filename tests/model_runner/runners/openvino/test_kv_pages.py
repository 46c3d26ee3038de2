"""KV memory of the OpenVINO runner: entries move from slot to slot, and cost what the layout says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.runners.base import KVCompaction, KVShape
from draftwood_model_runner.runners.openvino.kv_pages import PAGE_SIZE, KVPages, PageLayout

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
    assert [tensor.byte_size for tensor in kv.tensors().values()] == [one.nbytes for one in (*kv.keys, *kv.values)]
