"""Whatever is drafted, the tokens are those of transformers' own greedy `generate`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import draftwood_strategies
from draftwood_model_runner import draft_policy
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy
from draftwood_strategies import threads as row_threads
from draftwood_strategies.draft_engine import engine as guarded_batches
from draftwood_strategies.draft_engine.guard import GuardedDrafter
from tests import phrase_book
from tests.model_runner.beside import create_beside, served_beside
from tests.model_runner.families import FAMILIES, OPENVINO_FAMILIES, VOCAB, WINDOW, greedy, served, with_runners
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import batch_of, engine_of, run

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


def generate(
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
            sequences = generate(engine, batch, strategy, nodes, StopParams(NEW_TOKENS))
            assert [sequence.output for sequence in sequences] == [
                greedy(family, prompt, NEW_TOKENS) for prompt in batch
            ]


@pytest.mark.parametrize(("family", "runner"), with_runners(FAMILIES, OPENVINO_FAMILIES))
@given(prompts=prompts, seed=st.integers(0, 2**16), chunk=st.sampled_from([3, 16, 512]))
@few_examples
def test_trees_of_any_shape(family: str, runner: str, prompts: list[tuple[int, ...]], seed: int, chunk: int) -> None:
    """Deep paths, wrong branches, prompts in chunks, five sequences at different points of their lives."""
    answers = {prompt: greedy(family, prompt, NEW_TOKENS) for prompt in prompts}
    engine = fixed_engine(family, runner, prefill_chunk=chunk)
    oracle = OracleStrategy(answers, VOCAB, seed)
    sequences = generate(engine, prompts, oracle, 64, StopParams(NEW_TOKENS))
    assert [s.output for s in sequences] == list(answers.values())
    assert sum(s.stats.accepted_tokens for s in sequences) > NEW_TOKENS


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
    expected = [greedy("bundled", prompt, 50) for prompt in batch]
    texts = [[*prompt[-4:], *answer] for prompt, answer in zip(batch, expected, strict=True)]
    engine, strategy = fixed_engine("bundled", runner), phrase_book.create(name, texts)
    for _ in range(2):
        sequences = generate(engine, batch, strategy, 24, StopParams(50))
        assert [s.output for s in sequences] == expected
    if name != "none":
        assert sum(s.stats.accepted_tokens for s in sequences) > 0.5 * sum(map(len, expected))


SHORT = [(1, 2, 3, 1, 2, 3, 1), (4, 4, 4, 4), (5,)]
TALKERS = [(4, 4, 4, 4), (1, 2, 1, 2, 1)]


def long(size: int) -> tuple[int, ...]:
    return tuple(i % 7 + 1 for i in range(size))


@pytest.mark.parametrize("name", [*NAMES, "draft_model"])
@pytest.mark.parametrize(
    ("batch", "chunk", "patch"),
    [
        # After each draft two steps without one; what is written in them the drafter is told afterwards.
        pytest.param(SHORT, 512, "two pauses", id="asked now and then"),
        # Nothing is drafted while the long prompt is read in chunks; the other drafter starts after some tokens.
        pytest.param([TALKERS[0], long(40)], 8, "no skips", id="started in the middle of an answer"),
        # While the long prompt is read, the others write in every fourth step only, and draft in it.
        pytest.param([*TALKERS, long(50)], 6, "", id="steps skipped for a prompt"),
    ],
)
def test_drafters_that_are_not_asked_in_every_step(
    name: str, batch: list[tuple[int, ...]], chunk: int, patch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if patch == "two pauses":
        monkeypatch.setattr(guarded_batches, "pause_all", lambda accounts, can_drop_part: [2] * len(accounts))
    elif patch == "no skips":
        monkeypatch.setattr(draft_policy, "_WORTH_SKIPPING", math.inf)
    started: list[int] = []
    start = GuardedDrafter._start

    def noted(drafter: GuardedDrafter, strategy: Strategy) -> None:
        started.append(drafter.stats.decode_steps)
        start(drafter, strategy)

    monkeypatch.setattr(GuardedDrafter, "_start", noted)
    model = served_beside("llama") if name == "draft_model" else served("llama")
    engine = engine_of(model, 64, max_running=5, prefill_chunk=chunk, shared_prefill_chunk=min(chunk, 128))
    sequences = generate(engine, batch, create_beside(engine, name), 16, StopParams(NEW_TOKENS))
    assert [sequence.output for sequence in sequences] == [greedy("llama", prompt, NEW_TOKENS) for prompt in batch]
    if name in ("trie", "recycling", "hybrid", "draft_model"):
        assert sum(sequence.stats.draft_tokens for sequence in sequences) > 0
    if patch == "no skips" and name != "none":
        assert max(started) > 1


@pytest.mark.parametrize("name", ["trie", "hybrid"])
def test_drafts_that_several_threads_make(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of sequences as there are with hundreds of streams, here of two or three."""
    monkeypatch.setattr(row_threads, "_NODES_TO_DRAFT", 64)
    monkeypatch.setattr(row_threads, "_usable_cpus", lambda: 4)
    groups: list[int] = []
    in_threads = row_threads.in_threads

    def noted(calls: list[Any], threads: int) -> list[Any]:
        groups.append(len(calls))
        return in_threads(calls, threads)

    monkeypatch.setattr(row_threads, "in_threads", noted)
    batch: list[tuple[int, ...]] = [(i % 7 + 1, 2, 3, i // 7 + 1, 2, 3) for i in range(10)]
    expected = [greedy("llama", prompt, NEW_TOKENS) for prompt in batch]
    engine = engine_of(served("llama", "torch"), 64, max_running=len(batch))
    strategy = draftwood_strategies.create(name)
    for _ in range(2):
        sequences = generate(engine, batch, strategy, 32, StopParams(NEW_TOKENS))
        assert [sequence.output for sequence in sequences] == expected
    assert max(groups) == 4
    assert sum(sequence.stats.accepted_tokens for sequence in sequences) > NEW_TOKENS


@pytest.mark.system
@pytest.mark.parametrize("runner", ["torch", "openvino"])
def test_adaptive_budget_changes_no_token(runner: str) -> None:
    model = served("bundled", runner)
    engine = Engine(model, EngineConfig(max_draft_nodes=32))
    prompt = tuple(model.tokenizer.encode_chat([{"role": "user", "content": "cancel my order 4411"}]).tolist())
    strategy = draftwood_strategies.create("trie")
    for _ in range(3):
        [sequence] = generate(engine, [prompt], strategy, 32, StopParams(100))
        assert sequence.output == greedy("bundled", prompt, 100)
