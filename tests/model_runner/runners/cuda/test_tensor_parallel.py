"""Two ranks on CPUs write what one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading import model as sharded
from draftwood_model_runner.loading.model import BUNDLED_MODEL, LoadedModel, load_model
from draftwood_model_runner.request import SamplingParams, StopParams
from tests.model_runner.families import VOCAB, greedy, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.interpreting import interpret
from tests.model_runner.sequences import batch_of, engine_of, run

pytest.importorskip("accelerate", reason="sharded loading needs it")
pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks on CPUs need interpreted kernels"),
    pytest.mark.timeout(300),
]
PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3, 1, 2), (5,))
NEW_TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two heads of keys, so that each rank has one."""
    path: Path = tmp_path_factory.mktemp("model")
    tiny("llama", num_hidden_layers=1).save_pretrained(path)
    AutoTokenizer.from_pretrained(BUNDLED_MODEL).save_pretrained(path)
    return path


def load(folder: Path, ranks: int) -> LoadedModel:
    """The model among ranks that all interpret kernels as this process does."""
    interpret()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sharded, "run_worker", follow_interpreted)
        return load_model(str(folder), device="cpu", runner="cuda", tensor_parallel=ranks)


def follow_interpreted(*arguments: Any) -> None:
    interpret()
    sharded.run_worker(*arguments)


def answers(folder: Path, ranks: int) -> list[list[int]]:
    """Greedy with drafts; then sampled with a penalty, which each rank must choose alike, in halves in turn."""
    model = load(folder, ranks)
    engine = engine_of(model, 8, kv_cache_tokens=512)
    written = []
    sampled = SamplingParams(temperature=0.7, presence_penalty=0.5, seed=3)
    for params, most in ((SamplingParams(), None), (sampled, 1)):
        patched: Any = engine
        patched._microbatches.microbatch = lambda running, most=most: most
        known = {prompt: greedy("llama", prompt, NEW_TOKENS) for prompt in PROMPTS}
        oracle = OracleStrategy(known, VOCAB, seed=1)
        sequences = batch_of(PROMPTS, StopParams(NEW_TOKENS), params, strategy=oracle, max_draft_nodes=8)
        run(engine, *sequences)
        written += [sequence.output for sequence in sequences]
    assert model.fingerprint
    return [*written, [int(model.fingerprint, 16)]]


def test_two_ranks_write_what_one_does(folder: Path) -> None:
    """In a process of its own, as ranks join a process group for good."""
    code = (
        "import sys; from pathlib import Path; from tests.model_runner.runners.cuda import test_tensor_parallel as t;"
    )
    code += " print(t.answers(Path(sys.argv[1]), 2))"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == str(answers(folder, 1))


def test_a_lost_rank_ends_the_process(folder: Path) -> None:
    code = (
        "import sys, os, signal, time; from tests.model_runner.runners.cuda import test_tensor_parallel as t;"
        "model = t.load(sys.argv[1], 2);"
        "os.kill(model.factory._ranks._processes[0].pid, signal.SIGKILL); time.sleep(60)"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert done.returncode == 70
    assert "rank 1 of the model ended" in done.stderr


def test_heads_that_cannot_be_divided(folder: Path) -> None:
    with pytest.raises(InvalidValueError, match="num_attention_heads, which are 4"):
        load_model(str(folder), device="cpu", runner="cuda", tensor_parallel=3)
    with pytest.raises(InvalidValueError, match="1 with runner openvino"):
        load_model(str(folder), device="cpu", runner="openvino", tensor_parallel=2)
