"""KV regions and the memory for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner.errors import KVAllocationError
from model_runner.runners.base import KVMoves
from model_runner.runners.torch.kv_cache import KVCache, KVLayout, KVRegion

LAYOUT = KVLayout(2, 3, 4, 5, torch.float32, torch.device("cpu"))


@given(st.integers(0, 10), st.sets(st.integers(0, 19)).map(sorted))
def test_keeps_the_accepted_rows_in_order(committed: int, rows: list[int]) -> None:
    cache = KVCache(LAYOUT, 80)
    others, number = cache.allocate(40), cache.allocate(40)
    for one in (others, number):
        region = cache.region(one)
        region.keys.copy_(torch.arange(40).view(1, 1, 40, 1).expand_as(region.keys))
        region.values.copy_(-torch.arange(40).view(1, 1, 40, 1).expand_as(region.values))
    moves = [(number, committed + row, committed + i) for i, row in enumerate(rows) if row != i]
    cache.move(KVMoves(*np.array(moves, np.int32).reshape(-1, 3).T))
    expected = [*range(committed), *(committed + row for row in rows)]
    region = cache.region(number)
    for layer in range(2):
        assert region.keys[layer, 0, : len(expected), 0].tolist() == expected
        assert region.values[layer, 2, : len(expected), 4].tolist() == [-row for row in expected]
    assert cache.region(others).keys[1, 1, :, 1].tolist() == [*range(40)]


def test_freed_memory_is_used_again_and_never_exceeds_the_capacity() -> None:
    cache = KVCache(LAYOUT, 100)
    first = cache.allocate(60)
    memory = cache.region(first)
    cache.free(first)
    again = cache.allocate(60)
    assert cache.region(again) is memory
    cache.free(again)
    second = cache.allocate(80)
    assert cache.region(second) is not memory
    cache.free(second)
    assert cache.region(cache.allocate(60)) is not memory
    assert cache.allocated_tokens == 60


def test_memory_that_the_device_does_not_have_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(LAYOUT, 100)
    cache.free(cache.allocate(30))

    def empty(layout: KVLayout, tokens: int) -> KVRegion:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(KVRegion, "empty", empty)
    cache.allocate(30)  # was kept
    with pytest.raises(KVAllocationError, match="40 tokens"):
        cache.allocate(40)
    assert cache.allocated_tokens == 30


def test_a_token_costs_what_the_layout_says() -> None:
    region = KVRegion.empty(LAYOUT, 10)
    assert LAYOUT.bytes_per_token * 10 == region.keys.nbytes + region.values.nbytes


def test_rows_are_copied_to_a_larger_region() -> None:
    cache = KVCache(LAYOUT, 30)
    small, large = cache.allocate(10), cache.allocate(20)
    for number, value in ((small, 1.0), (large, 2.0)):
        cache.region(number).keys.fill_(value)
        cache.region(number).values.fill_(-value)
    cache.copy(small, large, 7)
    assert cache.region(large).keys[1, 2, :, 3].tolist() == [1.0] * 7 + [2.0] * 13
    assert cache.region(large).values[0, 0, :, 4].tolist() == [-1.0] * 7 + [-2.0] * 13
