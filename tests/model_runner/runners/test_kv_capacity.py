"""How many tokens of keys and values fit the memory of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.runners.capacity import kv_capacity
from draftwood_model_runner.runners.capacity.kv_capacity import default_capacity, state_capacity

CPU = torch.device("cpu")


def test_the_default_capacity_is_what_sequences_can_use_and_memory_affords(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_capacity, "free_bytes", lambda _: 100_000)
    assert default_capacity(100, CPU, 100, 3) == 300
    assert default_capacity(100, CPU, 100, 30) == 500
    assert default_capacity(100, CPU, 500, 30) == 500
    with pytest.raises(InvalidValueError, match="at most 500 tokens") as caught:
        default_capacity(100, CPU, 501, 1)
    assert caught.value.field == "max_context"


def test_free_memory_is_the_lesser_of_the_machines_and_the_containers(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  2000 kB\nMemAvailable:   1500 kB\nHugePages_Total:  0\n")
    assert kv_capacity._machine_bytes(tmp_path / "meminfo") == 1500 * 1024
    assert kv_capacity._machine_bytes(tmp_path / "absent") > 2**20
    for name, text in (
        ("memory.max", "9000\n"),
        ("memory.current", "5000\n"),
        ("memory.stat", "anon 1\ninactive_file 2000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert kv_capacity._container_bytes(tmp_path) == 9000 - 5000 + 2000
    (tmp_path / "memory.max").write_text("max\n")
    assert kv_capacity._container_bytes(tmp_path) == kv_capacity._container_bytes(tmp_path / "absent") == 2**63
    assert 0 < kv_capacity.free_bytes(CPU) < 2**63


def test_states_of_recurrent_layers_are_part_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_capacity, "free_bytes", lambda _: 100_000)
    assert default_capacity(100, CPU, 100, 30, bytes_per_sequence=0) == 500
    with_states = default_capacity(100, CPU, 100, 30, bytes_per_sequence=400)
    assert 100 <= with_states < 500
    capacity = state_capacity(400, with_states * 100, CPU)
    assert capacity.sequences >= 30
    assert with_states * 100 + capacity.sequences * 400 + capacity.kept_bytes <= 90_000


def test_one_sequence_runs_however_large_its_states_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_capacity, "free_bytes", lambda _: 100_000)
    assert state_capacity(10**9, 50_000, CPU).sequences == 1
