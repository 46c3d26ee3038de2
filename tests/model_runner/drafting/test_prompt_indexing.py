"""Long prompts: no step of the engine indexes more than its budget, and the drafts are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import create
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.draft_engine.guard import MAX_INDEXED_TOKENS
from draftwood_strategies.jacobi import NgramPool
from draftwood_strategies.trie.phrase_index import PhraseIndex
from tests.memory.engines.toy_engine import let_drafting_pay
from tests.model_runner.drafting.costless import CostlessRunner, costless_model, make_texts
from tests.model_runner.sequences import engine_of, make_sequence

STRATEGIES = "trie", "jacobi", "hybrid", "hybrid of jacobi"
CONTEXT, PROMPT, SHORT = 101_000, 100_000, 64


def strategy_named(name: str) -> Any:
    return create("hybrid", sources="trie,jacobi,recycling") if name == "hybrid of jacobi" else create(name)


class Counted:
    """Tokens and n-grams of prompts that are indexed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = 0
        append, add_all = PhraseIndex.append, NgramPool.add_all

        def appending(index: PhraseIndex, writer: Any, tokens: Int32Array) -> None:
            self.tokens += tokens.shape[0]
            append(index, writer, tokens)

        def adding(pool: NgramPool, tokens: list[int], n: int) -> None:
            if len(tokens) > 256:  # else what was written, which is added in every step
                self.tokens += len(tokens) - n + 1
            add_all(pool, tokens, n)

        monkeypatch.setattr(PhraseIndex, "append", appending)
        monkeypatch.setattr(NgramPool, "add_all", adding)

    def of(self, engine: Engine) -> int:
        """In the engine's next step."""
        assert engine.has_work
        before = self.tokens
        engine.step()
        return self.tokens - before


@pytest.fixture(autouse=True)
def _drafting_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafting_pay(monkeypatch)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@pytest.fixture(scope="module")
def texts() -> Int32Array:
    texts = make_texts(4, CONTEXT, seed=1)
    texts[:, 0] = np.arange(4) + 100
    return texts


def engine_over(texts: Int32Array) -> Engine:
    model = costless_model(CostlessRunner(texts))
    return engine_of(model, 16, max_running=8, prefill_chunk=4096, shared_prefill_chunk=4096)


def added(engine: Engine, text: Int32Array, size: int, strategy: Any, answer: int = 600, **options: Any) -> Sequence:
    request_id, prompt = f"{engine.running + engine.waiting}", text[:size].copy()
    sequence = make_sequence(request_id, prompt, StopParams(answer), strategy=strategy, max_draft_nodes=16, **options)
    engine.add(sequence)
    return sequence


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_step_indexes_more_than_its_budget_and_others_draft(name: str, texts: Int32Array, counted: Counted) -> None:
    engine, strategy = engine_over(texts), strategy_named(name)
    first = added(engine, texts[1], PROMPT, strategy, answer=900)
    steps = 0
    while not first.stats.proposed_tokens:
        assert counted.of(engine) <= MAX_INDEXED_TOKENS
        steps += 1
    assert steps < 2 * PROMPT / MAX_INDEXED_TOKENS + 10  # as many as read it, and then as many as index what is left
    # The prompt of the next one is in the prefix cache, and read in one step.
    short, cached = added(engine, texts[0], SHORT, strategy), added(engine, texts[1], PROMPT, strategy)
    while not cached.stats.proposed_tokens:
        assert counted.of(engine) <= MAX_INDEXED_TOKENS + SHORT
        steps += 1
    assert short.stats.proposed_tokens > 0
    assert short.state.value != "finished"
    third, fourth = (added(engine, texts[number], PROMPT, strategy) for number in (2, 3))
    while not (third.stats.proposed_tokens and fourth.stats.proposed_tokens):
        assert counted.of(engine) <= MAX_INDEXED_TOKENS
    for one, text in ((short, texts[0]), (first, texts[1])):
        start = one.request.prompt.size
        assert one.output == text[start : start + len(one.output)].tolist()
    engine.close()


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("most", [1, 600])
def test_a_prompt_without_a_draft_is_not_indexed(name: str, most: int, texts: Int32Array, counted: Counted) -> None:
    engine, strategy = engine_over(texts), strategy_named(name)
    one = added(engine, texts[1], 4000, strategy, answer=most)
    engine.step()
    assert len(one.output) == 1
    engine.cancel(one)
    assert counted.tokens <= 4  # what it wrote, and a start mark
    engine.close()


def test_what_is_written_before_the_prompt_is_indexed_is_learned(texts: Int32Array) -> None:
    strategy: Any = create("trie")
    drafter = strategy.start(texts[1][:5000])
    drafter.index_prompt(100)
    drafter.observe(texts[1][5000:5010], None)
    drafter.close()
    assert [sequence.tolist() for sequence in strategy.sequences()] == [texts[1][5000:5010].tolist()]


@pytest.mark.parametrize("learn", ["outputs", "prompts", "both"])
@pytest.mark.parametrize("size", [1, 7, 100, 3000])
def test_pieces_make_the_same_drafts(learn: str, size: int, texts: Int32Array) -> None:
    whole: Any = create("hybrid", sources="trie,jacobi,recycling", learn=learn)
    pieces: Any = create("hybrid", sources="trie,jacobi,recycling", learn=learn)
    text, prompt = texts[1], 3000
    one, other = whole.start(text[:prompt]), pieces.start(text[:prompt])
    while other.index_prompt(size) == size:
        pass
    for at in range(prompt, prompt + 200, 4):
        tree, same = one.propose(16), other.propose(16)
        for field in ("tokens", "parents", "scores"):
            assert getattr(tree, field).tolist() == getattr(same, field).tolist()
        one.observe(text[at : at + 4], None)
        other.observe(text[at : at + 4], None)
    learned = [[sequence.tolist() for sequence in strategy.sequences()] for strategy in (whole, pieces)]
    assert learned[0] == learned[1]


def test_one_that_writes_meanwhile_drafts_as_if_it_had_not_waited(texts: Int32Array) -> None:
    text, prompt, found = texts[1], 3000, []
    for indexed_before in (prompt, 1000):
        strategy: Any = create("trie", learn="both")
        drafter = strategy.start(text[:prompt])
        drafter.index_prompt(indexed_before)
        drafter.observe(text[prompt : prompt + 30], None)
        tree = drafter.propose(16)
        found.append((tree.tokens.tolist(), tree.scores.tolist()))
    assert len(found[0][0]) > 0
    assert found[0] == found[1]
