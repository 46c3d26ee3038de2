"""What is compiled before the first request."""

from __future__ import annotations

from typing import Any

from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.runners.cuda.first_steps import compile_sampling
from draftwood_model_runner.runners.cuda.kv_cache import PAGE_SIZE
from draftwood_model_runner.runners.cuda.runner import CudaRunner
from tests.model_runner.families import VOCAB
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.launched import launched
from tests.model_runner.runners.cuda.test_lossless import PROMPTS, run, served

ROOM = 2 * PAGE_SIZE if DEVICE.type == "cpu" else 256
"""Tokens; on a GPU, where a runner takes its first steps by itself, enough for trees of all sizes."""
BESIDE_THE_MODEL = {"adjust_scores", "sample_tokens", "accept_paths", "move_kv"}


def kernels_of(action: Any) -> set[tuple[str, tuple[tuple[str, Any], ...]]]:
    """Kernels beside the model that are launched, each with its constants."""
    with launched() as launches:
        action()
    names = ((one.kernel.__name__, tuple(sorted(one.constants.items()))) for one in launches)
    return {(name, constants) for name, constants in names if name in BESIDE_THE_MODEL}


def runner_of(kv_tokens: int) -> CudaRunner:
    runner = served("llama").factory.runner(kv_tokens)
    assert isinstance(runner, CudaRunner)
    return runner


def test_no_request_needs_another_kernel() -> None:
    model = served("llama")
    compiled = kernels_of(lambda: compile_sampling(runner_of(ROOM)))
    answers = {prompt: [*range(1, 10)] for prompt in PROMPTS}
    sampled = SamplingParams(temperature=1.3, top_p=0.9, repetition_penalty=1.2, seed=11, logprobs=3)
    for params, grammar in ((SamplingParams(temperature=0.0), None), (sampled, RandomGrammar(VOCAB))):
        oracle = OracleStrategy(answers, VOCAB, seed=7)
        needed = kernels_of(lambda: run(model, oracle, params, PROMPTS[:1], grammar))  # noqa: B023
        assert needed <= compiled
        assert {name for name, _ in needed} >= {"accept_paths", "move_kv"}
    assert {name for name, _ in compiled} == BESIDE_THE_MODEL
    sizes = {16, 32} if DEVICE.type == "cpu" else {16, 32, 64, 128, 256}
    assert {dict(constants)["NODES"] for name, constants in compiled if name == "accept_paths"} == sizes


def test_a_small_memory_holds_the_first_steps() -> None:
    compiled = kernels_of(lambda: compile_sampling(runner_of(PAGE_SIZE)))
    assert {name for name, _ in compiled} == BESIDE_THE_MODEL
    assert {dict(constants)["NODES"] for name, constants in compiled if name == "accept_paths"} == {16}
