"""What becomes of sequences when the device fails."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.errors import DeviceLostError, DeviceMemoryError, ModelError
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.cuda.device.errors import device_errors
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.families import VOCAB, greedy, served
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import make_sequence

PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3, 1, 2), (4, 4, 4), (5, 6), (7,))


def engine_with(*errors: Exception | None) -> Engine:
    """Its runner raises these in its first steps, and computes those for which it is None."""
    engine = Engine(served("llama"), EngineConfig(max_draft_nodes=8, adaptive_budget=False, max_running=4))
    waiting, step = list(errors), engine._runner.step

    def failing(*arguments: Any) -> Any:
        with device_errors("a step"):
            if waiting and (error := waiting.pop(0)) is not None:
                raise error
            return step(*arguments)

    monkeypatched: Any = engine._runner
    monkeypatched.step = failing
    return engine


def sequences_of(engine: Engine, count: int) -> list[Sequence]:
    answers = {prompt: greedy("llama", prompt, 10) for prompt in PROMPTS}
    oracle = OracleStrategy(answers, VOCAB, seed=1)
    found = [
        make_sequence(str(i), np.array(prompt, np.int32), StopParams(10), strategy=oracle, max_draft_nodes=8)
        for i, prompt in enumerate(PROMPTS[:count])
    ]
    for sequence in found:
        engine.add(sequence)
    return found


def test_out_of_memory_in_mid_stream_changes_no_token() -> None:
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
def test_a_sequence_that_fits_in_no_step_ends(error: Exception) -> None:
    engine = engine_with(error)
    sequences_of(engine, 1)
    [output] = engine.step()
    assert output.finish is not None
    assert isinstance(output.finish.error, ModelError)
    assert isinstance(output.finish.error.__cause__, DeviceMemoryError)
    engine.check()


@pytest.mark.parametrize("source", ["CUDA error", "Triton Error [CUDA]"])
def test_an_error_that_stays_leaves_the_engine(source: str) -> None:
    what = f"{source}: an illegal memory access was encountered"
    engine = engine_with(RuntimeError(f"{what}\nCUDA kernel errors might"))
    sequences_of(engine, 2)
    with pytest.raises(DeviceLostError, match=f"failed in a step: {re.escape(what)}$"):
        engine.step()


def test_other_errors_end_the_sequences_of_their_step() -> None:
    engine = engine_with(RuntimeError("shapes do not match"))
    sequences_of(engine, 2)
    errors = [output.finish.error for output in engine.step() if output.finish is not None]
    assert [type(error) for error in errors] == [ModelError] * 2
    assert not engine.has_work
    engine.check()
