"""Slabs and the memory for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_runner.errors import InvalidValueError
from model_runner.runners.torch import kv_cache, machine
from model_runner.runners.torch.kv_cache import KVCache, KVLayout, Slab, default_capacity

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


def test_rows_move_to_a_larger_slab() -> None:
    small, large = Slab.empty(LAYOUT, 10), Slab.empty(LAYOUT, 20)
    for slab, value in ((small, 1.0), (large, 2.0)):
        slab.keys.fill_(value)
        slab.values.fill_(-value)
    large.copy_rows(small, 7)
    assert large.keys[1, 2, :, 3].tolist() == [1.0] * 7 + [2.0] * 13
    assert large.values[0, 0, :, 4].tolist() == [-1.0] * 7 + [-2.0] * 13


def test_the_default_capacity_is_what_sequences_can_use_and_memory_affords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "free_bytes", lambda _: 1000 * LAYOUT.bytes_per_token)
    assert default_capacity(LAYOUT, 100, 3) == 300
    assert default_capacity(LAYOUT, 100, 30) == 500
    assert default_capacity(LAYOUT, 500, 30) == 500
    with pytest.raises(InvalidValueError, match="at most 500 tokens") as caught:
        default_capacity(LAYOUT, 501, 1)
    assert caught.value.field == "max_context"


def test_free_memory_is_the_lesser_of_the_machines_and_the_containers(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:   1500 kB\nHugePages_Total:  0\n")
    assert machine._machine_bytes(tmp_path / "meminfo") == 1500 * 1024
    assert machine._machine_bytes(tmp_path / "absent") > 2**20
    for name, text in (
        ("memory.max", "9000\n"),
        ("memory.current", "5000\n"),
        ("memory.stat", "anon 1\ninactive_file 2000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert machine._container_bytes(tmp_path) == 9000 - 5000 + 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine._container_bytes(tmp_path) == machine._container_bytes(tmp_path / "absent") == 2**63
    assert 0 < machine.free_bytes(torch.device("cpu")) < 2**63
