"""Whatever is drafted, and whichever way the engine goes, the tokens are those of transformers' own `generate`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import draftwood_strategies
from draftwood_model_runner import draft_policy
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sampling import verification
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy
from draftwood_strategies import threads as row_threads
from draftwood_strategies.draft_engine import engine as guarded_batches
from draftwood_strategies.draft_engine.guard import GuardedDrafter
from tests import phrase_book
from tests.model_runner.beside import assert_no_faults, create_beside, llama_with_head, served_beside
from tests.model_runner.families import (
    FAMILIES,
    VOCAB,
    WINDOW,
    expected,
    generate,
    greedy,
    reference,
    served,
    with_runners,
)
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.overlapping import overlap_halves
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.sampling.held import allowed_by
from tests.model_runner.sequences import GREEDY, batch_of, engine_of, make_sequence, run

NAMES = [*dict.fromkeys([*draftwood_strategies.strategy_names(), phrase_book.NAME])]
"""Every strategy, the example plugin among them."""
NEW_TOKENS = 20
BATCHES = ((0, 5), (1, 5), (7, 1), (64, 5), (64, 1))
"""Draft nodes, and how many sequences run together."""

# Few distinct tokens, so that phrases repeat and drafts are accepted; some prompts longer than the window.
prompts = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=3 * WINDOW).map(tuple), min_size=5, max_size=5, unique=True
)
few_examples = settings(
    max_examples=2, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors]
)


def answered(
    engine: Engine, batch: list[tuple[int, ...]], strategy: Strategy | None, nodes: int, stop: StopParams
) -> list[Sequence]:
    """All of `batch` at once, to the end; no drafter fails."""
    sequences = batch_of(batch, stop, strategy=strategy, max_draft_nodes=nodes)
    run(engine, *sequences)
    assert [sequence.stats.drafting_disabled_reason for sequence in sequences] == [""] * len(batch)
    return sequences


def fixed_engine(family: str, runner: str = "torch", **options: Any) -> Engine:
    return engine_of(served(family, runner), 64, max_running=5, **options)


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    phrase_book.install(monkeypatch)


_STAGE = {"llama": pytest.mark.system}
PAIRS = [
    pytest.param(family, runner, name, marks=() if name == "hybrid" else _STAGE.get(family, pytest.mark.slow))
    for family, runner in with_runners(FAMILIES, ["qwen3"])
    for name in NAMES
]
"""All; those of which other tests have the strategy and the family each, only among the slow tests."""


@pytest.mark.parametrize(("family", "runner", "name"), PAIRS)
@given(prompts=prompts)
@few_examples
def test_every_strategy_at_every_budget(family: str, runner: str, name: str, prompts: list[tuple[int, ...]]) -> None:
    engine = fixed_engine(family, runner)
    texts = [[*prompt, *greedy(family, prompt, NEW_TOKENS)] for prompt in prompts]
    wrong = [[*text[:-10], *reversed(text[-10:])] for text in texts]
    for nodes, batch_size in BATCHES:
        strategy = phrase_book.create(name, texts + wrong)
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            sequences = answered(engine, batch, strategy, nodes, StopParams(NEW_TOKENS))
            assert [sequence.output for sequence in sequences] == [
                greedy(family, prompt, NEW_TOKENS) for prompt in batch
            ]


@pytest.mark.parametrize(
    ("name", "runner"),
    [
        ("hybrid", "torch"),
        *(pytest.param(name, "openvino", marks=() if name == "hybrid" else pytest.mark.system) for name in NAMES),
    ],
)
def test_bundled_model_answers_questions(name: str, runner: str) -> None:
    """Real text: most of it is drafted and accepted the second time, and nothing changes."""
    model = served("bundled", runner)
    questions = ["where is my order", "i want a refund!!", "how do I change my adress"]
    batch = [tuple(model.tokenizer.encode_chat([{"role": "user", "content": q}]).tolist()) for q in questions]
    answers = [greedy("bundled", prompt, 50) for prompt in batch]
    texts = [[*prompt[-4:], *answer] for prompt, answer in zip(batch, answers, strict=True)]
    engine, strategy = fixed_engine("bundled", runner), phrase_book.create(name, texts)
    for _ in range(2):
        sequences = answered(engine, batch, strategy, 24, StopParams(50))
        assert [s.output for s in sequences] == answers
    if name != "none":
        assert sum(s.stats.accepted_tokens for s in sequences) > 0.5 * sum(map(len, answers))


WentThere: TypeAlias = Callable[[list[Sequence]], bool]
"""Whether sequences that ended went a certain way."""


class Path(NamedTuple):
    """A way through the engine that has code of its own.

    Attributes:
        lead: leads an engine there.
        config: of the engine.
        pauses: whether sequences pause and go on at random.
        without: drafters, kinds, and drafters with a kind, with which no engine goes there.
    """

    lead: Callable[[Engine, pytest.MonkeyPatch], WentThere]
    config: dict[str, Any]
    pauses: bool = False
    without: Collection[str] = ()


def into_preemptions(engine: Engine, patch: pytest.MonkeyPatch) -> WentThere:
    return lambda sequences: any(one.stats.preemptions for one in sequences)


def into_pauses(engine: Engine, patch: pytest.MonkeyPatch) -> WentThere:
    return lambda sequences: sum(one.stats.pauses for one in sequences) >= 3


def as_far_as_drafts_pay(engine: Engine, patch: pytest.MonkeyPatch) -> WentThere:
    return lambda sequences: engine._policy._step_times is not None


def asked_in_each_third_step(engine: Engine, patch: pytest.MonkeyPatch) -> WentThere:
    """What is written in the other steps the drafter is told afterwards."""
    patch.setattr(guarded_batches, "pause_all", lambda accounts, can_drop_part: [2] * len(accounts))
    return lambda sequences: all(2 * one.stats.drafts <= one.stats.decode_steps for one in sequences)


def started_in_the_middle(engine: Engine, patch: pytest.MonkeyPatch) -> WentThere:
    """Nothing is drafted while long prompts are read in chunks."""
    started, start = list[int](), GuardedDrafter._start

    def noted(drafter: GuardedDrafter, strategy: Strategy) -> None:
        started.append(drafter.stats.decode_steps)
        start(drafter, strategy)

    patch.setattr(draft_policy, "_WORTH_SKIPPING", math.inf)
    patch.setattr(GuardedDrafter, "_start", noted)
    return lambda sequences: max(started) > 1


def into_skipped_steps(engine: Engine, patch: pytest.MonkeyPatch) -> WentThere:
    """While a long prompt is read, others write in every fourth step only, and draft in it."""
    return lambda sequences: engine.counts.steps > max(one.stats.decode_steps for one in sequences)


def drafted_by_threads(engine: Engine, patch: pytest.MonkeyPatch) -> WentThere:
    """As with hundreds of streams."""
    patch.setattr(row_threads, "_NODES_TO_DRAFT", 8)
    patch.setattr(row_threads, "_usable_cpus", lambda: 4)
    return threads_noted(row_threads, patch)


def chosen_by_threads(engine: Engine, patch: pytest.MonkeyPatch) -> WentThere:
    """As with a large vocabulary."""
    patch.setattr(verification, "LEAST_NUMBERS", 1)
    noted = threads_noted(verification, patch)
    return lambda sequences: noted(sequences) or sequences[0].request.sampling == GREEDY


def threads_noted(module: Any, patch: pytest.MonkeyPatch) -> WentThere:
    """Whether work of the module went to several threads."""
    groups, in_threads = list[int](), module.in_threads

    def noted(calls: list[Any], threads: int) -> Any:
        groups.append(len(calls))
        return in_threads(calls, threads)

    patch.setattr(module, "in_threads", noted)
    return lambda sequences: max(groups, default=0) > 1


def in_halves(engine: Engine, patch: pytest.MonkeyPatch) -> WentThere:
    """Steps of two halves in turn; now and then a step of all sequences."""
    overlap_halves(engine, whole=0.2)
    return lambda sequences: engine.counts.microbatches > engine.counts.steps // 2


PROMPTS = [tuple(np.random.default_rng(i).integers(0, 9, 5 + 9 * i).tolist()) for i in range(6)]
STOP = StopParams(80)
PENALIZED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, seed=3)
KINDS = {"greedy": (GREEDY, False), "penalized": (PENALIZED, False), "formatted": (GREEDY, True)}
"""How tokens are chosen, and whether they are held to a grammar."""
DRAFTERS = (*(name for name in NAMES if name != "none"), "draft_model", "head", "oracle")
BESIDE: dict[str, Callable[[], LoadedModel]] = {
    "draft_model": lambda: served_beside("llama"),
    "head": llama_with_head,
}
"""The target of what drafts by a model."""
SCARCE = {"kv_cache_tokens": 280, "prefill_chunk": 50}
HOST_CHOOSES = {"penalized", "formatted"}
PATHS = {
    # Some are done before memory is short: a model that drafts for itself, and an oracle beside what a grammar forces.
    "preempted": Path(into_preemptions, SCARCE, without={"draft_model", "oracle formatted"}),
    "preempted without cached prefixes": Path(
        into_preemptions, {**SCARCE, "prefix_cache": False}, without={"draft_model", "oracle formatted"}
    ),
    "paused": Path(into_pauses, {**SCARCE, "max_running": 2, "prefill_chunk": 20}, pauses=True),
    "paused without cached prefixes": Path(
        into_pauses, {"kv_cache_tokens": 464, "max_running": 2, "prefix_cache": False}, pauses=True
    ),
    "as far as drafts pay": Path(as_far_as_drafts_pay, {"adaptive_budget": True}),
    # An oracle wants to hear of each step.
    "asked in each third step": Path(asked_in_each_third_step, {}, without={"oracle"}),
    "started in the middle": Path(started_in_the_middle, {"prefill_chunk": 8, "shared_prefill_chunk": 8}),
    "skipped steps": Path(into_skipped_steps, {"prefill_chunk": 6, "shared_prefill_chunk": 6}),
    "drafted by threads": Path(drafted_by_threads, {}, without={*DRAFTERS} - {"trie", "hybrid"}),
    "chosen by threads": Path(chosen_by_threads, {"threads": 3}),
    # Only what the device chooses for stays in flight, and the fake one has no models that draft.
    "in halves": Path(in_halves, {"max_running": 4, "prefill_chunk": 16}, without={*BESIDE, *HOST_CHOOSES}),
    "in halves, preempted and paused": Path(
        in_halves, {**SCARCE, "max_running": 4}, pauses=True, without={*BESIDE, *HOST_CHOOSES}
    ),
}
OFTEN = ("hybrid", "draft_model", "oracle")
"""What the fast tests draft by on each path."""


@functools.cache
def answer_to(prompt: tuple[int, ...], kind: str) -> list[int]:
    """What transformers' `generate` writes."""
    sampling, formatted = KINDS[kind]
    if not formatted:
        return expected("llama", prompt, sampling, STOP)

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        grammar = RandomGrammar(VOCAB)
        grammar.written = ids[len(prompt) :].tolist()
        return np.flatnonzero(allowed_by(grammar, VOCAB)).tolist()

    return generate(reference("llama"), prompt, STOP.max_tokens, prefix_allowed_tokens_fn=allowed)


def is_fast(path: str, name: str, kind: str) -> bool:
    if path.startswith("in halves") or path == "as far as drafts pay":
        return False
    if kind == "greedy" and path in ("asked in each third step", "started in the middle", "skipped steps"):
        return True
    return name == "hybrid" or (name in OFTEN and kind != "formatted")


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        pytest.param(path, name, kind, marks=() if is_fast(path, name, kind) else pytest.mark.system)
        for path in PATHS
        for name in DRAFTERS
        for kind in KINDS
        if not {name, kind, f"{name} {kind}"} & {*PATHS[path].without}
    ],
)
def test_every_path_through_the_engine(path: str, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sequence drafts nothing, and each further one four nodes more."""
    (lead, config, pauses, _), (sampling, formatted) = PATHS[path], KINDS[kind]
    answers, random = {prompt: answer_to(prompt, kind) for prompt in PROMPTS}, np.random.default_rng(0)
    model = BESIDE[name]() if name in BESIDE else served("llama")
    engine = engine_of(model, 24, **{"max_running": 6, **config})
    went_there = lead(engine, monkeypatch)
    strategy = OracleStrategy(answers, VOCAB, seed=1) if name == "oracle" else create_beside(engine, name)
    sequences = [
        make_sequence(
            str(i), prompt, STOP, sampling, strategy=strategy, max_draft_nodes=4 * i, tenant="ab"[i % 2],
            grammar=RandomGrammar(VOCAB) if formatted else None,
        )
        for i, prompt in enumerate(PROMPTS)
    ]  # fmt: skip
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(60 if pauses else 0):
        (engine.pause if random.random() < 0.4 else engine.resume)(sequences[random.integers(len(sequences))])
        engine.step()
        engine.check()
    for sequence in sequences:
        engine.resume(sequence)
    run(engine)
    assert [sequence.output for sequence in sequences] == [*answers.values()]
    assert_no_faults(sequences)
    assert went_there(sequences)
    if name in ("trie", "head", *OFTEN) and path != "as far as drafts pay":
        assert sum(sequence.stats.draft_tokens for sequence in sequences) > 0
