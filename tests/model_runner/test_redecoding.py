"""Answers are decoded again without drafts: clean ones are the same, and a token changed by a draft is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.output import ENDING_DIFFERS, Answer, Finish, FinishReason
from draftwood_model_runner.plain_decoding import PREFILL_TOKENS, Redecoding
from draftwood_model_runner.request import Format, GrammarKind, SamplingParams, StopParams
from draftwood_model_runner.sampling import verification
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_model_runner.sampling.verification import AcceptedPath
from draftwood_model_runner.sequence import Grammar, Sequence
from tests.model_runner.families import greedy, reference, served
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import GREEDY, engine_of, finish_of, make_sequence, run

PROMPT = tuple(i % 7 for i in range(40))
NEW_TOKENS = 40
STOP = StopParams(NEW_TOKENS)
RUNNERS = ("torch", "openvino")

CASES = (
    (SamplingParams(), STOP),
    (SamplingParams(temperature=1.0, seed=3), STOP),
    (SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=4), STOP),
    (SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logit_bias=((5, 1.0),)), STOP),
    (SamplingParams(temperature=1.0, seed=5), StopParams(NEW_TOKENS, min_tokens=9, token_ids=frozenset(range(60)))),
)


def made_engine(runner: str = "torch", family: str = "llama", **options: Any) -> Engine:
    return engine_of(served(family, runner), 32, **options)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = made_engine()
    yield engine
    engine.close()
    engine.check()


def drafted(
    engine: Engine,
    sampling: SamplingParams = GREEDY,
    stop: StopParams = STOP,
    prompt: tuple[int, ...] = PROMPT,
    grammar: Grammar | None = None,
    truth: list[int] | None = None,
    **options: Any,
) -> Answer:
    """An answer, written with drafts that are partly right; `truth` is what is written without them, if it is known."""

    def made(**drafts: Any) -> Sequence:
        copy = None if grammar is None else grammar.copy()
        return make_sequence("r", prompt, stop, sampling, grammar=copy, **drafts, **options)

    if truth is None:
        plain = made()
        run(engine, plain)
        truth = plain.output
    sequence = made(strategy=OracleStrategy({prompt: truth}, 256, 0), max_draft_nodes=32)
    finish = finish_of(run(engine, sequence))
    assert sequence.stats.accepted_tokens > 0
    return Answer(sequence.request, tuple(sequence.output), finish, grammar)


def decoded(engine: Engine, answer: Answer) -> Redecoding:
    """The answer decoded again, to its end."""
    redecoding = engine.redecode(answer)
    while not redecoding.done:
        redecoding.step()
    return redecoding


def assert_the_same(engine: Engine, answer: Answer) -> None:
    redecoding = decoded(engine, answer)
    assert redecoding.difference is None
    assert redecoding.sequence.output == [*answer.output]
    engine.check()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(("sampling", "stop"), CASES)
def test_answers_with_drafts_are_those_of_plain_decoding(
    runner: str, sampling: SamplingParams, stop: StopParams
) -> None:
    engine = made_engine(runner)
    for start in range(2):
        assert_the_same(engine, drafted(engine, sampling, stop, PROMPT[start:]))


@pytest.mark.parametrize("runner", RUNNERS)
def test_formats_and_stop_strings(runner: str) -> None:
    engine = made_engine(runner, "bundled")
    model = engine.model
    prompt = tuple(model.tokenizer.encode("The answer as JSON: ").tolist())
    schema = '{"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}'
    grammar = model.grammars.compile(GrammarKind.JSON_SCHEMA, schema)
    kind = Format(GrammarKind.JSON_SCHEMA, schema)
    answers = [drafted(engine, SamplingParams(temperature=1.0, seed=1), prompt=prompt, grammar=grammar, format=kind)]
    text = model.tokenizer.decode(drafted(engine, prompt=prompt).output)
    answers.append(drafted(engine, stop=StopParams(NEW_TOKENS, strings=(text[20:24],)), prompt=prompt))
    assert answers[1].finish.stop_string == text[20:24]
    for answer in answers:
        assert_the_same(engine, answer)


def test_a_token_changed_by_a_draft_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that goes wrong where a draft is accepted: the answer goes on from another token."""
    truth = greedy("llama", PROMPT, NEW_TOKENS)
    walk, changed = verification.walk_row, list[int]()

    def faulty(sampler: Any, feedback: Any, logits: Any, row: int) -> AcceptedPath:
        path = walk(sampler, feedback, logits, row)
        if path.nodes and not changed and written[0] > 5:
            changed.append(written[0] + len(path.token_ids) - 1)
            path.token_ids[-1] = int(logits[path.nodes[-1] + 1].argsort()[-2])
        written[0] += len(path.token_ids)
        return path

    written = [0]
    with monkeypatch.context() as patch:
        patch.setattr(TokenSampler, "follows_predictions", False)
        patch.setattr(verification, "walk_row", faulty)
        answer = drafted(engine, truth=truth)
    assert [*answer.output] != truth
    redecoding = decoded(engine, answer)
    assert redecoding.difference is not None
    [position] = changed
    assert redecoding.difference.position == position
    with torch.inference_mode():
        logits = reference("llama")(torch.tensor([[*PROMPT, *truth[:position]]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert redecoding.difference.margin == pytest.approx((best - second) / float(logits.abs().max()), rel=1e-3)


def test_another_end_is_found(engine: Engine) -> None:
    answer = drafted(engine)
    for changed in (
        Answer(answer.request, answer.output[:-1], answer.finish),
        Answer(answer.request, answer.output, Finish(FinishReason.STOP, stop_token_id=answer.output[-1])),
    ):
        redecoding = decoded(engine, changed)
        assert redecoding.difference is not None
        assert redecoding.difference.position == len(changed.output)
        assert redecoding.difference.margin == ENDING_DIFFERS


def test_a_forbidden_token_has_no_finite_margin(engine: Engine) -> None:
    answer = drafted(engine, stop=StopParams(NEW_TOKENS, min_tokens=9, token_ids=frozenset({200})))
    redecoding = decoded(engine, Answer(answer.request, (200, *answer.output[1:]), answer.finish))
    assert redecoding.difference is not None
    assert (redecoding.difference.position, redecoding.difference.margin) == (0, float("inf"))


def test_one_token_a_step_after_the_prompt(engine: Engine) -> None:
    redecoding, steps = engine.redecode(drafted(engine)), 0
    while not redecoding.done:
        redecoding.step()
        steps += 1
    assert steps == -(-len(PROMPT) // PREFILL_TOKENS) + NEW_TOKENS - 1


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_request_takes_the_pages_and_the_audit_goes_on(prefix_cache: bool) -> None:
    """The KV memory holds one context only: the audit gives its pages up to the request, and computes them again."""
    engine = made_engine(kv_cache_tokens=256 + 32, prefix_cache=prefix_cache)
    redecoding = engine.redecode(drafted(engine))
    for _ in range(20):
        redecoding.step()
    half = [*redecoding.sequence.output]
    assert 0 < len(half) < NEW_TOKENS
    assert redecoding.with_pages
    other = make_sequence("live", tuple(range(7, 207)), StopParams(49))
    engine.add(other)
    outputs = engine.step()
    assert outputs, "the prompt was computed in the first step"
    assert not redecoding.with_pages
    run(engine)
    assert other.output == greedy("llama", tuple(range(7, 207)), 49)
    assert redecoding.sequence.output == half
    while not redecoding.done:
        redecoding.step()
    assert redecoding.difference is None
    engine.close()
    engine.check()


def test_no_page_that_the_answer_wrote_is_read(engine: Engine) -> None:
    redecoding = engine.redecode(drafted(engine))
    redecoding.step()
    assert redecoding.sequence.committed == PREFILL_TOKENS
    redecoding.close()
    again = make_sequence("again", PROMPT, StopParams(1), tenant=redecoding.sequence.request.tenant)
    run(engine, again)
    assert again.stats.cached_prompt_tokens == 0


def test_another_one_ends_the_one_before(engine: Engine) -> None:
    answer = drafted(engine)
    first = engine.redecode(answer)
    first.step()
    assert_the_same(engine, answer)
    assert first.done
    assert not first.with_pages


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [(SamplingParams(), 0.1), (SamplingParams(temperature=0.5), None), (SamplingParams(temperature=1.0, top_k=1), 0.1)],
)
def test_margins(sampling: SamplingParams, expected: float | None) -> None:
    """Logits changed by the margin and a bit more choose the other token; by a bit less they do not."""
    logits = np.array([0.4, 0.3, 0.1, -0.2], np.float32)
    sampler = TokenSampler(make_sequence("r", (1,), StopParams(4), sampling), frozenset(), 4)
    picked = sampler.sample(logits, [])
    other = 1 if picked != 1 else 0
    margin = sampler.margin(logits, other) * 0.4
    if expected is not None:
        assert margin == pytest.approx(expected)
    toward = np.zeros(4, np.float32)
    toward[other] = 1.0
    assert sampler.sample(logits + toward * np.float32(margin + 1e-3), []) == other
    assert sampler.sample(logits + toward * np.float32(margin - 1e-3), []) == picked
