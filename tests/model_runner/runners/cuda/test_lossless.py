"""The whole runner with interpreted kernels: its tokens are those of transformers' own `generate`, whatever is drafted.

Each step of a usual size is recorded when it first occurs. Every further one must repeat what was recorded, as a CUDA
graph would, see `recording`. What steps launch beside the model is compiled before the first request.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.errors import DeviceLostError, DeviceMemoryError
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.base import KVCompaction
from draftwood_model_runner.runners.cuda.memory import PAGE_SIZE
from draftwood_model_runner.runners.cuda.runner import CudaRunner, compile_sampling
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.families import VOCAB, generate, taken_over, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.runners.cuda.device import DEVICE, launched
from tests.model_runner.runners.test_machine import LOST, failing_with
from tests.model_runner.sequences import GREEDY, batch_of, engine_of
from tests.model_runner.sequences import run as run_all

NEW_TOKENS = 9
PROMPTS = ((1, 2, 3, 1, 2, 3), (5,), tuple(i % 7 + 1 for i in range(30)))
SLOW_FAMILIES = ("gemma2", "gpt-neox", "mistral-sliding", "phi", "qwen3")
LAYERS = {"gemma2": 2, "qwen2-sliding": 2}
"""Families whose layers differ; of others one layer is tried."""


def small(family: str) -> Any:
    return tiny(family, num_hidden_layers=LAYERS.get(family, 1))


@functools.cache
def served(family: str, runner: str = "cuda") -> LoadedModel:
    if runner == "torch":
        return taken_over(small(family), exact=False, runner="torch")
    return taken_over(small(family).to(DEVICE), runner=runner)


@functools.cache
def written(family: str, prompt: tuple[int, ...], **options: Any) -> list[int]:
    """What `generate` writes."""
    return generate(small(family), prompt, NEW_TOKENS, **options)


def run(
    model: LoadedModel,
    strategy: Any,
    sampling: SamplingParams = GREEDY,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS,
    grammar: RandomGrammar | None = None,
    outputs: list[StepOutput] | None = None,
    halves: bool = False,
    **config: Any,
) -> list[Sequence]:
    """All prompts at once, the last one under the grammar; asserts that nothing leaks and that steps were replayed as
    they were recorded. `outputs` gets those of all steps. With `halves`, steps have half of the sequences."""
    engine = engine_of(model, 12, max_running=3, prefill_chunk=16, **config)
    if halves:
        patched: Any = engine
        patched._microbatches.microbatch = lambda running: -(-running // 2)
    stop = StopParams(NEW_TOKENS, min_tokens=3)
    sequences = batch_of(prompts, stop, sampling, strategy=strategy, max_draft_nodes=12)
    sequences[-1].grammar = grammar
    actual = run_all(engine, *sequences)
    if outputs is not None:
        outputs += actual
    if isinstance(engine._runner, CudaRunner):
        graphs = engine._runner._graphs
        assert graphs is not None
        assert graphs.sizes
        assert graphs.reason == ""
    return sequences


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)])
def test_trees_of_any_shape(family: str) -> None:
    answers = {prompt: written(family, prompt) for prompt in PROMPTS}
    sequences = run(served(family), OracleStrategy(answers, VOCAB, seed=3))
    assert [sequence.output for sequence in sequences] == list(answers.values())
    assert sum(sequence.stats.accepted_tokens for sequence in sequences) > NEW_TOKENS


def test_penalties_on_the_device() -> None:
    """In steps of two halves in turn, each of which is in flight while the host works on the other."""
    expected = [written("llama", prompt, repetition_penalty=1.4) for prompt in PROMPTS]
    answers = dict(zip(PROMPTS, expected, strict=True))
    params = SamplingParams(repetition_penalty=1.4)
    sequences = run(served("llama"), OracleStrategy(answers, VOCAB, seed=1), params, halves=True)
    assert [sequence.output for sequence in sequences] == expected
    assert expected != [written("llama", prompt) for prompt in PROMPTS]
    assert sum(sequence.stats.accepted_tokens for sequence in sequences) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=1.5, top_p=0.7, presence_penalty=0.5, seed=2**63 + 1, logprobs=2),
    ],
)
def test_sampled(params: SamplingParams) -> None:
    """With drafts and without, and by the torch runner, whose tokens the host chooses."""
    plain = [sequence.output for sequence in run(served("llama", "torch"), None, params)]
    assert [sequence.output for sequence in run(served("llama"), None, params)] == plain
    oracle = OracleStrategy(dict(zip(PROMPTS, plain, strict=True)), VOCAB, seed=4)
    for halves in (False, True):
        sequences = run(served("llama"), oracle, params, halves=halves)
        assert [sequence.output for sequence in sequences] == plain
        assert sum(sequence.stats.accepted_tokens for sequence in sequences) > 0


def test_grammars_and_log_probabilities_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the torch runner, with the host's choices; some masks are not found in time."""
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=11, logprobs=3)
    theirs, ours = list[StepOutput](), list[StepOutput]()
    plain = run(served("llama", "torch"), None, params, grammar=RandomGrammar(VOCAB), outputs=theirs)
    answers = dict(zip(PROMPTS, (sequence.output for sequence in plain), strict=True))
    on_host = Counter[str]()
    for name in ("sample", "logprobs"):
        original = getattr(TokenSampler, name)

        def counted(*arguments: Any, name: str = name, original: Any = original) -> Any:
            on_host[name] += 1
            return original(*arguments)

        monkeypatch.setattr(TokenSampler, name, counted)
    oracle, some = OracleStrategy(answers, VOCAB, seed=7), RandomGrammar(VOCAB, known=4)
    sequences = run(served("llama"), oracle, params, grammar=some, outputs=ours)
    assert [sequence.output for sequence in sequences] == list(answers.values())
    assert sequences[-1].stats.accepted_tokens > 0
    assert 0 < on_host["sample"] == on_host["logprobs"] < len(sequences[-1].output)
    for expected, actual in zip(plain, sequences, strict=True):
        of_theirs, of_ours = (
            [logprob for step in steps if step.sequence is sequence for logprob in step.logprobs]
            for steps, sequence in ((theirs, expected), (ours, actual))
        )
        assert [logprob.top_token_ids for logprob in of_ours] == [logprob.top_token_ids for logprob in of_theirs]
        assert [logprob.logprob for logprob in of_ours] == pytest.approx(
            [logprob.logprob for logprob in of_theirs], abs=1e-4
        )


def test_constraints_that_only_the_host_knows() -> None:
    """Beside greedy sequences: the host moves keys and values of the ones, the device of the others."""
    module = small("llama")
    free = written("llama", PROMPTS[0])
    module.generation_config.suppress_tokens = [free[2], free[5]]
    model = taken_over(module.to(DEVICE), runner="cuda")
    expected = [written("llama", prompt, suppress_tokens=(free[2], free[5])) for prompt in PROMPTS]
    oracle = OracleStrategy(dict(zip(PROMPTS, expected, strict=True)), VOCAB, seed=5)
    sequences = run(model, oracle)
    assert [sequence.output for sequence in sequences] == expected
    assert sum(sequence.stats.accepted_tokens for sequence in sequences) > 0


def test_preemption_and_large_steps() -> None:
    """Too little memory for all at once; a prompt of more tokens than steps at fixed addresses hold."""
    prompts = (*PROMPTS, tuple(i % 11 + 1 for i in range(60)))
    answers = {prompt: written("llama", prompt) for prompt in prompts}
    sequences = run(served("llama"), OracleStrategy(answers, VOCAB, seed=6), prompts=prompts, kv_cache_tokens=256 + 12)
    assert [sequence.output for sequence in sequences] == list(answers.values())


ROOM = 2 * PAGE_SIZE if DEVICE.type == "cpu" else 256
"""Tokens; on a GPU, where a runner takes its first steps by itself, enough for trees of all sizes."""
BESIDE_THE_MODEL = {"adjust_scores", "sample_tokens", "accept_paths", "move_kv"}


def kernels_of(action: Any) -> set[tuple[str, tuple[tuple[str, Any], ...]]]:
    """Kernels beside the model that are launched, each with its constants."""
    with launched() as launches:
        action()
    names = ((launch.kernel.__name__, tuple(sorted(launch.constants.items()))) for launch in launches)
    return {(name, constants) for name, constants in names if name in BESIDE_THE_MODEL}


def compiled_with(kv_tokens: int) -> tuple[set[tuple[str, tuple[tuple[str, Any], ...]]], set[int]]:
    """What is compiled before the first request, and the sizes of trees among it."""
    runner = served("llama").factory.runner(kv_tokens)
    assert isinstance(runner, CudaRunner)
    compiled = kernels_of(lambda: compile_sampling(runner))
    assert {name for name, _ in compiled} == BESIDE_THE_MODEL
    return compiled, {dict(constants)["NODES"] for name, constants in compiled if name == "accept_paths"}


def test_no_request_needs_another_kernel() -> None:
    model = served("llama")
    compiled, sizes = compiled_with(ROOM)
    assert sizes == ({16, 32} if DEVICE.type == "cpu" else {16, 32, 64, 128, 256})
    answers = {prompt: [*range(1, 10)] for prompt in PROMPTS}
    sampled = SamplingParams(temperature=1.3, top_p=0.9, repetition_penalty=1.2, seed=11, logprobs=3)
    for params, grammar in ((GREEDY, None), (sampled, RandomGrammar(VOCAB))):
        oracle = OracleStrategy(answers, VOCAB, seed=7)
        needed = kernels_of(lambda: run(model, oracle, params, PROMPTS[:1], grammar))  # noqa: B023
        assert needed <= compiled
        assert {name for name, _ in needed} >= {"accept_paths", "move_kv"}
    assert compiled_with(PAGE_SIZE)[1] == {16}, "what a small memory holds"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError(LOST), DeviceLostError),
        (RuntimeError("Triton Error [CUDA]: device-side assert triggered"), DeviceLostError),
        (torch.OutOfMemoryError("CUDA out of memory"), DeviceMemoryError),
    ],
)
def test_errors_while_keys_and_values_move(
    error: Exception, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = served("llama").factory.runner(64)
    monkeypatch.setattr(runner._kv, "move", failing_with([error]))
    slot = np.zeros(1, np.int32)
    with pytest.raises(kind, match="moving keys and values"):
        runner.compact_kv(KVCompaction(slot, slot, np.array([0, 1], np.int32)))
