"""Structured output: every token is one that the grammar allows, drafted or not."""

from __future__ import annotations

import functools
import json
import re
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.request import GrammarKind, StopParams
from draftwood_model_runner.sampling import grammar
from draftwood_model_runner.sampling.grammar import GrammarState
from draftwood_model_runner.sampling.metadata import (
    UNKNOWN_MASK,
)
from draftwood_model_runner.sampling.token_sampler import TokenSampler, forbid
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy
from tests.model_runner.beside import NAMES as MODEL_DRAFTS
from tests.model_runner.beside import create_beside, served_beside
from tests.model_runner.families import reference, served
from tests.model_runner.sampling.held import allowed_by, drafted_answer, held_answer
from tests.model_runner.sequences import engine_of, make_sequence, run

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "intent": {"enum": ["cancel_order", "track_order", "get_refund"]},
            "order_number": {"type": "integer", "minimum": 0, "maximum": 9999},
            "urgent": {"type": "boolean"},
        },
        "required": ["intent", "order_number", "urgent"],
        "additionalProperties": False,
    }
)
REGEX = r"(I am sorry|Thank you)[a-z ,]{10,30}\. Ticket #[0-9]{4}"
LARK = 'start: "Order " NUMBER (", order " NUMBER)* "."\nNUMBER: /[0-9]{2}/'
GRAMMARS = {GrammarKind.JSON_SCHEMA: SCHEMA, GrammarKind.REGEX: REGEX, GrammarKind.LARK: LARK}
TEXTS = {
    GrammarKind.JSON_SCHEMA: (
        r'\{"intent": ?"(cancel_order|track_order|get_refund)", ?"order_number": ?\d{1,4}, ?"urgent": ?(true|false)\}'
    ),
    GrammarKind.REGEX: REGEX,
    GrammarKind.LARK: r"Order \d\d(, order \d\d)*\.",
}
"""What texts look like that follow each grammar."""


@functools.cache
def prompt() -> tuple[int, ...]:
    ids = served("bundled").tokenizer.encode_chat([{"role": "user", "content": "cancel order 4711, quick"}])
    return tuple(ids.tolist())


@functools.cache
def expected(kind: GrammarKind, max_tokens: int) -> list[int]:
    """What transformers' `generate` writes under the grammar."""
    return held_answer(served("bundled"), reference("bundled"), kind, GRAMMARS[kind], prompt(), max_tokens)


def answer(
    engine: Engine, kind: GrammarKind, strategy: Strategy | None, nodes: int, **sampling: float
) -> tuple[Sequence, str]:
    return drafted_answer(engine, kind, GRAMMARS[kind], prompt(), 80, strategy, nodes, **sampling)


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.set_num_threads(1)
    return engine_of(served("bundled"), 24)


@pytest.fixture(scope="module")
def beside() -> Engine:
    """With models that draft."""
    return engine_of(served_beside("bundled", "openvino"), 24)


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize(("models", "name"), [("engine", "hybrid"), *(("beside", name) for name in MODEL_DRAFTS)])
def test_the_answer_is_plain_decodings_with_any_draft(
    models: str, name: str, kind: GrammarKind, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(models)
    wanted = expected(kind, 80)
    strategy = create_beside(engine, name)
    sampled = set[tuple[int, ...]]()
    for nodes in (0, 3, 24):
        sequence, text = answer(engine, kind, strategy, nodes)
        assert sequence.output == wanted, nodes
        if len(wanted) < 80:
            assert re.fullmatch(TEXTS[kind], text)
        sequence, _ = answer(engine, kind, strategy, nodes, temperature=1.0, seed=5)
        sampled.add((*sequence.output,))
    assert len(sampled) == 1
    engine.check()


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_token_alone_is_allowed_as_the_mask_says(kind: GrammarKind) -> None:
    """At every place of a random text, also where another thread has computed the mask."""
    model, random = served("bundled"), np.random.default_rng(1)
    state = model.grammars.compile(kind, GRAMMARS[kind])
    for step in range(60):
        allowed = allowed_by(state.copy(), model.vocab_size)
        if step % 3 == 2 and not state.forced():
            state.pending = Future()
            state.pending.set_result(np.packbits(allowed, bitorder="little").tobytes())
        assert [state.allows(token) for token in range(model.vocab_size)] == allowed
        token = int(random.choice(np.flatnonzero(allowed)))
        if token in model.eos_token_ids:
            break
        state.accept(token)
        assert state.pending is None


def test_no_mask_where_a_most_probable_token_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = served("bundled")
    sequence = make_sequence("r", (1,), StopParams(9))
    sequence.grammar = model.grammars.compile(GrammarKind.REGEX, "(yes|no)")
    sampler = TokenSampler(sequence, model.eos_token_ids, model.vocab_size)
    logits = np.random.default_rng(0).standard_normal(model.vocab_size).astype(np.float32)
    order = np.argsort(-logits, kind="stable").tolist()
    with_mask = sampler.sample(logits, [])
    masks = []
    monkeypatch.setattr(GrammarState, "mask", lambda state, scores: masks.append(1))
    assert sampler.sample(logits, order) == with_mask
    assert masks == []
    sampler.sample(logits, order[:1])
    assert masks == [1]


def test_tokens_that_the_grammar_forces_are_drafted(engine: Engine) -> None:
    sequence, text = answer(engine, GrammarKind.JSON_SCHEMA, None, 24)
    assert re.fullmatch(TEXTS[GrammarKind.JSON_SCHEMA], text)
    assert sequence.stats.accepted_tokens > 0.3 * len(sequence.output)
    assert answer(engine, GrammarKind.JSON_SCHEMA, None, 0)[0].stats.draft_tokens == 0


def test_a_grammar_that_fails_to_draft_breaks_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: GrammarState) -> list[int]:
        raise RuntimeError("no idea")

    monkeypatch.setattr(GrammarState, "forced", fails)
    sequence, text = answer(engine, GrammarKind.JSON_SCHEMA, None, 24)
    assert re.fullmatch(TEXTS[GrammarKind.JSON_SCHEMA], text)
    assert sequence.output == expected(GrammarKind.JSON_SCHEMA, 80)
    assert sequence.stats.draft_tokens == 0


def test_a_grammar_that_becomes_too_complex_ends_its_answer_alone(engine: Engine) -> None:
    model = served("bundled")
    schema = json.dumps({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(600)}})
    grammars = [model.grammars.compile(GrammarKind.JSON_SCHEMA, text) for text in (schema, SCHEMA)]
    sequences = [make_sequence("r", prompt(), StopParams(20), grammar=grammar) for grammar in grammars]
    ends = [output.finish for output in run(engine, *sequences) if output.finish]
    assert isinstance(ends[0].error, InvalidValueError)
    assert ends[0].error.field == "format"
    assert "2000" in ends[0].error.allowed
    assert sequences[1].output == expected(GrammarKind.JSON_SCHEMA, 80)[:20]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.JSON_SCHEMA, '{"type": "objet"}'),
        (GrammarKind.REGEX, "(a"),
        (GrammarKind.LARK, "start: nothing"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(kind: GrammarKind, text: str) -> None:
    with pytest.raises(InvalidValueError, match=f"format.{kind.value}") as caught:
        served("bundled").grammars.compile(kind, text)
    assert caught.value.field == f"format.{kind.value}"
    assert str(caught.value).startswith(f"format.{kind.value}: not a valid ")


@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.REGEX])
def test_masks_of_a_draft_tree(kind: GrammarKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may come in plain decoding; no mask after nodes that are not allowed, nor where time runs out."""
    model = served("bundled")
    vocab, written = model.vocab_size, expected(kind, 200)[:-1]
    state, plain = (model.grammars.compile(kind, GRAMMARS[kind]) for _ in range(2))
    masks_of_path = [allowed_by(plain, vocab)]
    for token in written:
        plain.accept(token)
        masks_of_path.append(allowed_by(plain, vocab))
    assert masks_of_path[-1] == [token in model.eos_token_ids for token in range(vocab)]
    wrong = masks_of_path[0].index(False)
    tokens = np.array([0, *written, wrong, written[0], written[0], written[1]], np.int32)
    last = len(written)
    parents = np.array([-1, *range(last), 0, last + 1, 0, last + 3], np.int32)
    masks = state.masks(tokens, parents)
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab].astype(bool)
    assert masks.rows.tolist() == [*range(last + 1), UNKNOWN_MASK, UNKNOWN_MASK, last + 1, last + 2]
    assert bits.tolist() == [*masks_of_path, *masks_of_path[1:3]]
    assert allowed_by(state, vocab) == masks_of_path[0]
    monkeypatch.setattr(grammar, "_SLOW_SECONDS", -1.0)
    assert set(state.masks(tokens, parents).rows) == {UNKNOWN_MASK}


@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_what_is_not_allowed_becomes_minus_infinity(vocab: int, seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    allowed = np.zeros(-(-vocab // 32) * 32, np.bool_)
    allowed[:vocab] = random.random(vocab) < share
    scores = random.standard_normal(vocab).astype(np.float32)
    expected = np.where(allowed[:vocab], scores, np.float32(-np.inf))
    forbid(np.packbits(allowed, bitorder="little").tobytes(), scores)
    assert scores.tolist() == expected.tolist()
