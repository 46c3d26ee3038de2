"""The whole runner with interpreted kernels: its tokens are those of transformers' own `generate`, whatever is drafted.

Each step of a usual size is recorded when it first occurs, and every further one must repeat what was recorded, as a
CUDA graph would: see `recording`.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import draftwood_strategies
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.loading.model import BUNDLED_MODEL, LoadedModel, adopt
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.cuda.runner import CudaRunner
from draftwood_model_runner.sampling.token_chooser import TokenChooser
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.families import VOCAB, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.sequences import GREEDY, make_sequence

NEW_TOKENS = 9
PROMPTS = ((1, 2, 3, 1, 2, 3), (5,), tuple(i % 7 + 1 for i in range(30)))
LAYERS = {"gemma2": 2, "qwen2-sliding": 2}
"""Families whose layers differ; of others one layer is tried."""


def small(family: str) -> Any:
    return tiny(family, num_hidden_layers=LAYERS.get(family, 1))


@functools.cache
def served(family: str, runner: str = "cuda") -> LoadedModel:
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(BUNDLED_MODEL))
    device = DEVICE if runner == "cuda" else "cpu"
    return adopt(
        small(family).to(device), tokenizer, name=family, exact=False if runner == "torch" else None, runner=runner
    )


@functools.cache
def written(family: str, prompt: tuple[int, ...], **options: Any) -> list[int]:
    """What `generate` writes."""
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = small(family).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


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
    engine = Engine(
        model, EngineConfig(max_draft_nodes=12, adaptive_budget=False, max_running=3, prefill_chunk=16, **config)
    )
    if halves:
        patched: Any = engine
        patched._overlap.microbatch = lambda running: -(-running // 2)
    stop = StopParams(NEW_TOKENS, min_tokens=3)
    sequences = [
        make_sequence(str(i), np.array(prompt, np.int32), stop, sampling, strategy=strategy, max_draft_nodes=12)
        for i, prompt in enumerate(prompts)
    ]
    sequences[-1].grammar = grammar
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(300):
        if not engine.has_work:
            break
        found = engine.step()
        if outputs is not None:
            outputs += found
        engine.check()
    assert not engine.has_work
    if isinstance(engine._runner, CudaRunner):
        graphs = engine._runner._graphs
        assert graphs is not None
        assert graphs.sizes
        assert graphs.reason == ""
    return sequences


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("gemma2", "gpt-neox", "mistral-sliding", "phi", "qwen3")
        ),
    ],
)
def test_trees_of_any_shape(family: str) -> None:
    answers = {prompt: written(family, prompt) for prompt in PROMPTS}
    sequences = run(served(family), OracleStrategy(answers, VOCAB, seed=3))
    assert [one.output for one in sequences] == list(answers.values())
    assert sum(one.stats.accepted_tokens for one in sequences) > NEW_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", "jacobi", "trie", "hybrid"])
def test_strategies(name: str) -> None:
    sequences = run(served("llama"), draftwood_strategies.create(name))
    assert [one.output for one in sequences] == [written("llama", prompt) for prompt in PROMPTS]
    assert [one.stats.drafting_disabled_reason for one in sequences] == [""] * 3


def test_penalties_on_the_device() -> None:
    """In steps of two halves in turn, each of which is in flight while the host works on the other."""
    expected = [written("llama", prompt, repetition_penalty=1.4) for prompt in PROMPTS]
    answers = dict(zip(PROMPTS, expected, strict=True))
    params = SamplingParams(repetition_penalty=1.4)
    sequences = run(served("llama"), OracleStrategy(answers, VOCAB, seed=1), params, halves=True)
    assert [one.output for one in sequences] == expected
    assert expected != [written("llama", prompt) for prompt in PROMPTS]
    assert sum(one.stats.accepted_tokens for one in sequences) > 0


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(SamplingParams(temperature=1.0, seed=7), marks=pytest.mark.slow),
        pytest.param(
            SamplingParams(temperature=1.5, top_p=0.7, presence_penalty=0.5, seed=2**63 + 1, logprobs=2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sampled(params: SamplingParams) -> None:
    """With drafts and without, and by the torch runner, whose tokens the host chooses."""
    plain = [one.output for one in run(served("llama", "torch"), None, params)]
    assert [one.output for one in run(served("llama"), None, params)] == plain
    oracle = OracleStrategy(dict(zip(PROMPTS, plain, strict=True)), VOCAB, seed=4)
    for halves in (False, True):
        sequences = run(served("llama"), oracle, params, halves=halves)
        assert [one.output for one in sequences] == plain
        assert sum(one.stats.accepted_tokens for one in sequences) > 0


def test_grammars_and_log_probabilities_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the torch runner, with the host's choices; some masks are not found in time."""
    params = SamplingParams(temperature=1.3, top_p=0.9, seed=11, logprobs=3)
    theirs, ours = list[StepOutput](), list[StepOutput]()
    plain = run(served("llama", "torch"), None, params, grammar=RandomGrammar(VOCAB), outputs=theirs)
    answers = dict(zip(PROMPTS, (one.output for one in plain), strict=True))
    on_host = Counter[str]()
    for name in ("pick", "logprobs"):
        original = getattr(TokenChooser, name)

        def counted(*arguments: Any, name: str = name, original: Any = original) -> Any:
            on_host[name] += 1
            return original(*arguments)

        monkeypatch.setattr(TokenChooser, name, counted)
    oracle, some = OracleStrategy(answers, VOCAB, seed=7), RandomGrammar(VOCAB, known=4)
    sequences = run(served("llama"), oracle, params, grammar=some, outputs=ours)
    assert [one.output for one in sequences] == list(answers.values())
    assert sequences[-1].stats.accepted_tokens > 0
    assert 0 < on_host["pick"] == on_host["logprobs"] < len(sequences[-1].output)
    for expected, found in zip(plain, sequences, strict=True):
        of_theirs, of_ours = (
            [logprob for one in steps if one.sequence is sequence for logprob in one.logprobs]
            for steps, sequence in ((theirs, expected), (ours, found))
        )
        assert [one.top_token_ids for one in of_ours] == [one.top_token_ids for one in of_theirs]
        assert [one.logprob for one in of_ours] == pytest.approx([one.logprob for one in of_theirs], abs=1e-4)


def test_constraints_that_only_the_host_knows() -> None:
    """Beside greedy sequences: the host moves keys and values of the ones, the device of the others."""
    module = small("llama")
    free = written("llama", PROMPTS[0])
    module.generation_config.suppress_tokens = [free[2], free[5]]
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(BUNDLED_MODEL))
    model = adopt(module.to(DEVICE), tokenizer, name="suppressed", runner="cuda")
    expected = [written("llama", prompt, suppress_tokens=(free[2], free[5])) for prompt in PROMPTS]
    oracle = OracleStrategy(dict(zip(PROMPTS, expected, strict=True)), VOCAB, seed=5)
    sequences = run(model, oracle)
    assert [one.output for one in sequences] == expected
    assert sum(one.stats.accepted_tokens for one in sequences) > 0


def test_preemption_and_large_steps() -> None:
    """Too little memory for all at once; a prompt of more tokens than steps at fixed addresses hold."""
    prompts = (*PROMPTS, tuple(i % 11 + 1 for i in range(60)))
    answers = {prompt: written("llama", prompt) for prompt in prompts}
    sequences = run(served("llama"), OracleStrategy(answers, VOCAB, seed=6), prompts=prompts, kv_cache_tokens=256 + 12)
    assert [one.output for one in sequences] == list(answers.values())
