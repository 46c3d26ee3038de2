"""The tokens of models of every kind are those of transformers' own `generate`, also with recurrent layers or attention
of other kinds: whatever is drafted, joins, ends early, is paused or preempted, or begins with a cached prefix."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
from transformers import TemperatureLogitsWarper
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.machine import StateCapacity
from draftwood_model_runner.runners.model_calls import cache_argument
from draftwood_model_runner.runners.torch import kv_cache
from draftwood_model_runner.sequence import Sequence, SequenceState
from tests.model_runner.families import (
    OPENVINO_FAMILIES,
    RANDOM_FAMILIES,
    Noise,
    generate_with_gaps,
    taken_over,
    tiny,
    torch_factory,
    with_runners,
)
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import GREEDY, batch_of, engine_of, make_sequence
from tests.model_runner.sequences import run as run_all
from tests.model_runner.small_models import ATTENTION, CONFIGS, VOCAB, tiny_attention, tiny_hybrid

CONTEXT, DRAFT = 128, 24
TIE = 1e-3
"""Difference of the two best logits, over the largest, that an answer needs at each step. What a form for one token
computes differs from one for several by up to 1.4e-4 of the largest (Qwen 3 Next, 360 tokens)."""
OFTEN = ("qwen3_next", "mamba", "zamba2", "lfm2", "qwen4_exp_text", "inkling_text")
"""Families of different kinds, which the ordinary suite tries; the others are tried by the slow tests."""

_TWO_HEADS: dict[str, Any] = {"num_hidden_layers": 2, "mamba_n_heads": 2, "mamba_d_head": 32}
SMALLER: dict[str, dict[str, Any]] = {
    "qwen3_next small": {
        "num_hidden_layers": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "bamba small": {**_TWO_HEADS, "attn_layer_indices": [1]},
    "granitemoehybrid small": {**_TWO_HEADS, "layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1 small": _TWO_HEADS,
}
"""What differs from the tiny models of these families, for interpreted kernels."""


class Case(NamedTuple):
    """A request: its prompt, how many tokens it asks for, the step in which it joins, and after how many tokens it is
    cancelled, if it is; and whose it is."""

    prompt: tuple[int, ...]
    new: int
    sampling: SamplingParams
    joins: int
    cancelled: int | None
    tenant: str
    priority: int


@functools.cache
def served(family: str, runner: str = "torch") -> LoadedModel:
    return taken_over(hybrid(family), name=family, runner=runner, max_context=CONTEXT, defaults="greedy")


class Written(NamedTuple):
    """What transformers' `generate` writes.

    Attributes:
        closest: the least difference between the two best scores of a step, over the largest logit there.
    """

    tokens: list[int]
    closest: float


@functools.cache
def generated(family: str, prompt: tuple[int, ...], new: int, sampling: SamplingParams = GREEDY) -> Written:
    """Greedy or with temperature."""
    warm = (TemperatureLogitsWarper(sampling.temperature), Noise(sampling.seed)) if sampling.temperature else ()
    tokens, gaps = generate_with_gaps(_reference(family), prompt, new, *warm)
    return Written(tokens, min(gaps) * (sampling.temperature or 1.0))


@functools.cache
def _reference(family: str) -> Any:
    return hybrid(family)


def hybrid(family: str) -> Any:
    """A random model of a family, the same each time."""
    if family in RANDOM_FAMILIES:
        return tiny(family)
    if family in SMALLER:
        return tiny_hybrid(family.removesuffix(" small"), **SMALLER[family])
    return tiny_hybrid(family) if family in CONFIGS else tiny_attention(family, VOCAB, CONTEXT)


def random_cases(family: str, random: np.random.Generator) -> list[Case]:
    """Five requests, of which some begin alike, and one is another's prompt with a little more. No step of an answer
    has two tokens that rounding may exchange: the logits of a form for one token differ from those of one for several,
    in transformers too."""
    common = random.integers(0, VOCAB, int(random.integers(1, 50))).tolist()
    cases: list[Case] = []
    while len(cases) < 5:
        own = random.integers(0, VOCAB, int(random.integers(1, 40))).tolist()
        prompt = common[: int(random.integers(0, len(common) + 1))] + own
        if cases and random.random() < 0.3:
            prompt = [*cases[-1].prompt, *own[:3]]
        new = int(random.integers(1, 30))
        case = Case(
            tuple(prompt[: CONTEXT - 40]),
            new,
            SamplingParams(temperature=0.8, seed=len(cases)) if random.random() < 0.3 else GREEDY,
            int(random.integers(0, 12)),
            int(random.integers(0, new)) if random.random() < 0.2 else None,
            str(random.choice(["a", "a", "a", "b"])),
            int(random.integers(-1, 2)),
        )
        if generated(family, case.prompt, new, case.sampling).closest >= TIE:
            cases.append(case)
    return cases


def run(model: LoadedModel, cases: list[Case], answers: list[list[int]], seed: int) -> tuple[list[Sequence], int]:
    """Runs the requests, interrupts some, in a memory that is too small for all; returns them, and how many tokens of
    their prompts were cached."""
    random = np.random.default_rng(seed)
    capacity = CONTEXT + DRAFT + 16 * int(random.integers(1, 8))
    options: dict[str, Any] = {"prefill_chunk": int(random.choice([5, 16, 512])), "kv_cache_tokens": capacity}
    engine = engine_of(model, DRAFT, max_running=4, **options)
    oracle = OracleStrategy(dict(zip([case.prompt for case in cases], answers, strict=True)), VOCAB, seed)
    drafts: dict[str, Any] = {"strategy": oracle, "max_draft_nodes": DRAFT}
    sequences = [
        make_sequence(str(i), prompt, StopParams(new), sampling, tenant=tenant, priority=priority, **drafts)
        for i, (prompt, new, sampling, _, _, tenant, priority) in enumerate(cases)
    ]
    waiting, joined = list(zip(sequences, cases, strict=True)), list[Sequence]()
    for step in range(2000):
        for sequence, case in [pair for pair in waiting if pair[1].joins <= step]:
            engine.add(sequence)
            joined.append(sequence)
            waiting.remove((sequence, case))
        if joined and random.random() < 0.2:  # it loses its states, as when it is preempted
            engine.pause(joined[-1])
        if random.random() < 0.3 or not engine.has_work:
            for sequence in joined:
                engine.resume(sequence)
        if not waiting and not engine.has_work:
            break
        engine.step()
        engine.check()
        for sequence, case in zip(sequences, cases, strict=True):
            if case.cancelled is not None and len(sequence.output) >= case.cancelled and case.joins <= step:
                engine.cancel(sequence)
    return sequences, sum(sequence.stats.cached_prompt_tokens for sequence in sequences)


def assert_lossless(family: str, seeds: range, runner: str = "torch") -> None:
    accepted = cached = interrupted = 0
    written = Counter[int]()
    for seed in seeds:
        cases = random_cases(family, np.random.default_rng(seed))
        answers = [generated(family, case.prompt, case.new, case.sampling).tokens for case in cases]
        sequences, hits = run(served(family, runner), cases, answers, seed)
        for sequence, case, answer in zip(sequences, cases, answers, strict=True):
            expected = answer[: len(sequence.output)] if case.cancelled is not None else answer
            assert sequence.output == expected, (seed, case)
            assert sequence.stats.drafting_disabled_reason == ""
            written.update(sequence.output)
        accepted += sum(sequence.stats.accepted_tokens for sequence in sequences)
        interrupted += sum(sequence.stats.preemptions + sequence.stats.pauses for sequence in sequences)
        cached += hits
    assert accepted > len(seeds)
    assert cached > 0
    assert interrupted > 0
    assert max(written.values()) < sum(written.values()) / 4, "a wrong state would write the same tokens"


BY_OPENVINO = [family for family in RANDOM_FAMILIES if family in OPENVINO_FAMILIES]


@pytest.mark.parametrize(("family", "runner"), with_runners([*OFTEN, *ATTENTION, *RANDOM_FAMILIES], BY_OPENVINO))
def test_a_few_requests_of_every_kind(family: str, runner: str) -> None:
    assert_lossless(family, range(4), runner)


def test_a_model_that_names_no_context_gets_one() -> None:
    module = tiny_hybrid("mamba")
    del module.config.max_position_embeddings
    model = taken_over(module)
    assert model.max_context == 32_768
    engine_of(model, DRAFT, max_running=2).close()


class EarlierCache:
    """A cache as recurrent layers use it before transformers 5.21: they read their states off `layers`."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        has_state = self._cache.has_previous_state(layer_idx, state_idx)
        return self._cache.layers[layer_idx].conv_states[state_idx] if has_state else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        has_state = self._cache.has_previous_state(layer_idx, state_idx)
        return self._cache.layers[layer_idx].recurrent_states[state_idx] if has_state else None

    def is_recording_past(self, layer_idx: int) -> Any:
        return self._cache.layers[layer_idx].record_past


def test_recurrent_layers_may_read_their_states_off_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    forward: Any = Qwen3NextGatedDeltaNet.forward
    signature, cache = inspect.signature(forward), str(cache_argument(forward))

    @functools.wraps(forward)
    def earlier(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if bound.arguments.get(cache) is not None:
            bound.arguments[cache] = EarlierCache(bound.arguments[cache])
        return forward(*bound.args, **bound.kwargs)

    prompts = [tuple(range(1, 10 + number)) for number in range(3)]
    expected = [generated("qwen3_next", prompt, 8).tokens for prompt in prompts]
    monkeypatch.setattr(Qwen3NextGatedDeltaNet, "forward", earlier)
    model = taken_over(hybrid("qwen3_next"), max_context=CONTEXT, defaults="greedy")
    oracle = OracleStrategy(dict(zip(prompts, expected, strict=True)), VOCAB, seed=0)
    sequences = batch_of(prompts, StopParams(8), strategy=oracle, max_draft_nodes=DRAFT)
    run_all(engine_of(model, DRAFT, max_running=3), *sequences)
    assert [one.output for one in sequences] == expected
    assert sum(one.stats.accepted_tokens for one in sequences) > 0


def test_sequences_beyond_the_memory_for_states_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("qwen3_next")
    monkeypatch.setattr(kv_cache, "state_capacity", lambda *_: StateCapacity(sequences=2, kept_bytes=0))
    engine = engine_of(model, DRAFT, max_running=5)
    prompts = [tuple(range(1, 10 + number)) for number in range(5)]
    sequences = batch_of(prompts, StopParams(8))
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        engine.step()
        assert sum(one.state is SequenceState.RUNNING for one in sequences) <= 2
    assert [one.output for one in sequences] == [generated("qwen3_next", prompt, 8).tokens for prompt in prompts]


def test_the_memory_of_states_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model, prompt = served("qwen3_next"), tuple(range(1, 50))
    per_sequence = torch_factory(model).layout.state_bytes
    with caplog.at_level("INFO"):
        engine = engine_of(model, DRAFT, max_running=3)
    assert f"states of 3 sequences, {6 * per_sequence / 1e9:.2f} GB" in caplog.text
    assert engine.state_use == (0, 0)
    engine.add(make_sequence("r", prompt, StopParams(8)))
    engine.step()
    assert engine.state_use == (per_sequence, per_sequence), "its own, and one at the end of its third page"
    run_all(engine)
    assert engine.state_use == (0, per_sequence)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("family", [*CONFIGS, *ATTENTION, "llama"])
def test_two_hundred_random_requests(family: str) -> None:
    assert_lossless(family, range(40))
