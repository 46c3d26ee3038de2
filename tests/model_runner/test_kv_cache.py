from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner.kv_cache import KVCache, KVLayout

LAYOUT = KVLayout(2, 3, 4, 5, torch.float32, torch.device("cpu"))


@given(st.integers(0, 10), st.sets(st.integers(0, 19)).map(sorted))
def test_keeps_the_accepted_rows_in_order(committed: int, rows: list[int]) -> None:
    slab = KVCache(LAYOUT, 40).take(40)
    slab.keys.copy_(torch.arange(40).view(1, 1, 40, 1).expand_as(slab.keys))
    slab.values.copy_(-torch.arange(40).view(1, 1, 40, 1).expand_as(slab.values))
    slab.keep(committed, rows)
    expected = [*range(committed), *(committed + row for row in rows)]
    for layer in range(2):
        assert slab.keys[layer, 0, : len(expected), 0].tolist() == expected
        assert slab.values[layer, 2, : len(expected), 4].tolist() == [-row for row in expected]


def test_returned_memory_is_used_again_and_never_exceeds_the_capacity() -> None:
    cache = KVCache(LAYOUT, 100)
    first = cache.take(60)
    cache.give_back(first)
    assert cache.take(60) is first
    cache.give_back(first)
    second = cache.take(80)
    assert second is not first
    cache.give_back(second)
    assert cache.take(60) is not first
    assert cache.tokens_out == 60


def test_a_token_costs_what_the_layout_says() -> None:
    slab = KVCache(LAYOUT, 10).take(10)
    assert LAYOUT.bytes_per_token * 10 == slab.keys.nbytes + slab.values.nbytes
