"""What becomes of sequences when the device fails."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import DeviceLostError, DeviceMemoryError, ModelError, UnsupportedRunnerError
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.base import KVCompaction
from draftwood_model_runner.runners.device_errors import device_errors
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.families import VOCAB, greedy, served, torch_factory
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import batch_of, engine_of, run

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
    found = batch_of(PROMPTS[:count], StopParams(10), strategy=oracle, max_draft_nodes=8)
    for sequence in found:
        engine.add(sequence)
    return found


def test_out_of_memory_in_mid_stream_changes_no_token(engine_with: Any) -> None:
    engine = engine_with(None, None, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    sequences = sequences_of(engine, 4)
    most = []
    while engine.has_work:
        engine.step()
        engine.check()
        most.append(engine.running)
    assert max(most[:2]) == 4
    assert max(most[2:]) == 2
    assert [one.output for one in sequences] == [greedy("llama", prompt, 10) for prompt in PROMPTS]
    assert sum(one.stats.preemptions for one in sequences) == 2


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


def keep_fails(engine: Engine, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    memory: Any = engine._runner
    monkeypatch.setattr(memory._kv, "move", failing_with([error] * 100))


def test_a_device_lost_while_accepted_tokens_move_ends_the_engine(
    engine_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with()
    keep_fails(engine, torch.AcceleratorError(LOST), monkeypatch)
    sequences_of(engine, 4)
    with pytest.raises(DeviceLostError, match="failed in moving keys and values: CUDA error"):
        run(engine)


def test_without_memory_to_move_accepted_tokens_sequences_end(
    engine_with: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they would have written is lost, so no smaller step can go on from there."""
    engine = engine_with()
    keep_fails(engine, torch.OutOfMemoryError("CUDA out of memory"), monkeypatch)
    sequences = sequences_of(engine, 4)
    errors = [output.finish.error for output in run(engine) if output.finish is not None]
    assert any(isinstance(error, ModelError) for error in errors)
    for sequence, error in zip(sequences, errors, strict=True):
        answer = greedy("llama", tuple(sequence.request.prompt.tolist()), 10)
        assert sequence.output == answer[: len(sequence.output)]
        assert error is None or isinstance(error, ModelError)


@pytest.mark.gpu_sim
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError(LOST), DeviceLostError),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), DeviceLostError),
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError),
    ],
)
def test_the_cuda_runner_tells_of_errors_while_it_moves(
    error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwood_model_runner.runners.cuda.device.launching import require_triton

    try:
        require_triton(torch.device("cpu"))
    except UnsupportedRunnerError as missing:
        pytest.skip(str(missing))
    from draftwood_model_runner.runners.cuda import runner as cuda

    runner = served("llama", "cuda").factory.runner(64)
    monkeypatch.setattr(cuda, "move", failing_with([error]))
    one = np.zeros(1, np.int32)
    with pytest.raises(kind, match="moving keys and values"):
        runner.compact_kv(KVCompaction(one, one, np.array([0, 1], np.int32)))


def test_errors_of_no_device_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes do not match$"), device_errors("a step"):
        raise RuntimeError("shapes do not match")
