"""What the machine has for a runner, and what becomes of sequences when the device fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import (
    DeviceLostError,
    DeviceMemoryError,
    InvalidValueError,
    ModelError,
)
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners import machine as kv_capacity
from draftwood_model_runner.runners.machine import default_capacity, device_errors, gains_over_float32, state_capacity
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.families import VOCAB, greedy, served, torch_factory
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import batch_of, engine_of, run


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("flags\t\t: fpu avx512f avx512_vnni avx512_bf16\nbugs : none", ["--dtype bfloat16", "--weights int4"]),
        ("flags\t\t: fpu avx2 avx_vnni", ["--weights int4"]),
        ("flags\t\t: fpu amx_bf16", ["--dtype bfloat16"]),
        ("flags\t\t: fpu avx2", []),
        ("Features : fp asimd bf16", []),
    ],
)
def test_options_that_the_instructions_make_faster(text: str, options: list[str], tmp_path: Path) -> None:
    """None where the system does not say."""
    cpuinfo = tmp_path / "cpuinfo"
    assert gains_over_float32(cpuinfo) == {}
    cpuinfo.write_text(f"processor : 0\n{text}\n")
    gains = gains_over_float32(cpuinfo)
    assert [*gains] == options
    assert all(gain > 1 for gain in gains.values())


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
    """One sequence runs however large they are."""
    monkeypatch.setattr(kv_capacity, "free_bytes", lambda _: 100_000)
    with_states = default_capacity(100, CPU, 100, 30, bytes_per_sequence=400)
    assert 100 <= with_states < 500
    capacity = state_capacity(400, with_states * 100, CPU)
    assert capacity.sequences >= 30
    assert with_states * 100 + capacity.sequences * 400 + capacity.kept_bytes <= 90_000
    assert state_capacity(10**9, 50_000, CPU).sequences == 1


PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3, 1, 2), (4, 4, 4), (5, 6), (7,))


LOST = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"


def failing_with(errors: list[Exception | None]) -> Any:
    """Raises one of these at each call, if it is not None."""

    def fails(*arguments: Any) -> None:
        if errors and (error := errors.pop(0)) is not None:
            raise error

    return fails


@pytest.fixture
def engine_with() -> Iterator[Any]:
    """Engines of the torch runner whose model raises these errors in its first steps, computing those of None."""
    handles = []

    def made(*errors: Exception | None) -> Engine:
        engine = engine_of(served("llama"), 8, max_running=4)
        module = torch_factory(served("llama")).module
        handles.append(module.register_forward_pre_hook(failing_with([*errors])))
        return engine

    yield made
    for handle in handles:
        handle.remove()


def sequences_of(engine: Engine, count: int) -> list[Sequence]:
    oracle = OracleStrategy({prompt: greedy("llama", prompt, 10) for prompt in PROMPTS}, VOCAB, seed=1)
    actual = batch_of(PROMPTS[:count], StopParams(10), strategy=oracle, max_draft_nodes=8)
    for sequence in actual:
        engine.add(sequence)
    return actual


def test_out_of_memory_in_mid_stream_changes_no_token(engine_with: Any) -> None:
    engine = engine_with(None, None, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    sequences = sequences_of(engine, 4)
    running = []
    while engine.has_work:
        engine.step()
        engine.check()
        running.append(engine.running)
    assert max(running[:2]) == 4
    assert max(running[2:]) == 2
    assert [sequence.output for sequence in sequences] == [greedy("llama", prompt, 10) for prompt in PROMPTS]
    assert sum(sequence.stats.preemptions for sequence in sequences) == 2


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_a_sequence_that_fits_in_no_step_ends(engine_with: Any, error: Exception) -> None:
    engine = engine_with(error)
    sequences_of(engine, 1)
    [output] = engine.step()
    assert output.finish is not None
    assert isinstance(output.finish.error, ModelError)
    assert isinstance(output.finish.error.__cause__, DeviceMemoryError)
    engine.check()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(LOST),
        torch.AcceleratorError(LOST),
        RuntimeError("CUDA driver error: unknown error"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    ],
)
def test_an_error_that_stays_leaves_the_engine(engine_with: Any, error: Exception) -> None:
    engine = engine_with(None, error)
    sequences_of(engine, 2)
    engine.step()
    first = str(error).partition("\n")[0]
    with pytest.raises(DeviceLostError, match=rf"failed in a step of \d+ tokens: {re.escape(first)}$"):
        engine.step()


def break_moving(engine: Engine, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = engine._runner
    monkeypatch.setattr(memory._kv, "move", failing_with([error] * 100))


def test_a_device_lost_while_accepted_tokens_move_ends_the_engine(
    engine_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with()
    break_moving(engine, torch.AcceleratorError(LOST), monkeypatch)
    sequences_of(engine, 4)
    with pytest.raises(DeviceLostError, match="failed in moving keys and values: CUDA error"):
        run(engine)


def test_without_memory_to_move_accepted_tokens_sequences_end(
    engine_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they would have written is lost, so no smaller step can go on from there."""
    engine = engine_with()
    break_moving(engine, torch.OutOfMemoryError("CUDA out of memory"), monkeypatch)
    sequences = sequences_of(engine, 4)
    errors = [output.finish.error for output in run(engine) if output.finish is not None]
    assert any(isinstance(error, ModelError) for error in errors)
    for sequence, error, prompt in zip(sequences, errors, PROMPTS, strict=True):
        assert sequence.output == greedy("llama", prompt, 10)[: len(sequence.output)]
        assert error is None or isinstance(error, ModelError)


def test_errors_of_no_device_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes do not match$"), device_errors("a step"):
        raise RuntimeError("shapes do not match")
