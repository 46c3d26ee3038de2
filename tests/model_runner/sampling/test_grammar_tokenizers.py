"""Structured output on tokenizers of other kinds than the bundled one's, and on other families of models."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from tokenizers.normalizers import Prepend, Replace, Sequence
from transformers import PreTrainedTokenizerFast

from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.loading.model import LoadedModel, adopt
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.output import Answer, Finish, FinishReason
from draftwood_model_runner.request import GrammarKind, StopParams
from draftwood_strategies import create
from tests.model_runner.families import tiny, with_runners
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sampling.held import allowed_by, drafted_answer, held_answer
from tests.model_runner.sequences import engine_of, finish_of, make_sequence, run

CITIES = ["Zürich", "東京", "New York"]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": CITIES},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "open": {"type": "boolean"},
    },
    "required": ["city", "stars", "open"],
    "additionalProperties": False,
}
GRAMMARS = {
    GrammarKind.JSON_SCHEMA: json.dumps(SCHEMA),
    GrammarKind.REGEX: r"(naïve|café|\d{3})( [a-z]{2,5}){2}!",
    GrammarKind.LARK: 'start: "[" item ("," item)* "]"\nitem: /[0-9]{1,2}/',
}
MARKED = {
    GrammarKind.JSON_SCHEMA: '{"enum": ["<tool_call> or 3", "in </tool_call>"]}',
    GrammarKind.REGEX: r"(<tool_call>\d{3}</tool_call>){2}",
    GrammarKind.LARK: 'start: "<tool_call>" /[0-9]{1,2}/ "</tool_call>" TEXT\nTEXT: /(.|\\n){0,20}/',
}
"""Texts with added tokens in them."""
TEXT = [
    '{"city": "Zürich", "stars": 3, "open": true}',
    "naïve café 東京 New York is open",
    "where is my order, please?",
]
LONGEST = 60


def byte_level() -> Backend:
    """As GPT-2, Llama 3 and Qwen: merges over bytes, a space stands before the word it precedes."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=["<pad>", "</s>"], initial_alphabet=alphabet)
    backend.train_from_iterator(TEXT * 3, trainer)
    return backend


def byte_fallback() -> Backend:
    """As Llama 2, Mistral and Gemma: merges over characters, bytes as tokens of their own for those it lacks."""
    pieces = sorted({character for text in TEXT[2:] for character in text.replace(" ", "▁")} | set('▁{}":,[]'))
    tokens = ["<pad>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "is", "▁is", '":']
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[("i", "s"), ("▁", "is"), ('"', ":")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    backend = Backend(model)
    backend.normalizer = Sequence([Prepend("▁"), Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<pad>", "</s>"])
    return backend


BACKENDS = {"byte-level": byte_level, "byte-fallback": byte_fallback}


@functools.cache
def served(
    tokenizer: str, family: str = "llama", runner: str = "torch", missing: int = -7, end: int | None = 1
) -> tuple[LoadedModel, Any]:
    """A tiny random model with such a tokenizer, as we run it and as transformers does.

    Two added tokens are not special, as Qwen's; <other> is.

    Args:
        missing: how many tokens the tokenizer has beyond the model's logits; many models have fewer tokens than logits.
        end: the token that ends an answer; None for a model without one.
    """
    backend = BACKENDS[tokenizer]()
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    backend.add_special_tokens(["<other>"])
    eos_token = None if end is None else "</s>"
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token=eos_token)
    plain, ours = (tiny(family, vocab_size=len(fast) - missing, eos_token_id=end) for _ in range(2))
    return adopt(ours, Tokenizer(fast), name=family, runner=runner), plain


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize(
    ("family", "runner", "grammars"),
    [
        *((*pair, GRAMMARS) for pair in with_runners(["llama", "gemma2", "gpt-neox", "qwen3"], ["qwen3"])),
        ("llama", "torch", MARKED),
    ],
)
@pytest.mark.parametrize("tokenizer", BACKENDS)
def test_the_answer_is_plain_decodings_with_any_draft(
    tokenizer: str, family: str, runner: str, grammars: dict[GrammarKind, str], kind: GrammarKind
) -> None:
    """Added tokens are text unless they are special."""
    model, plain = served(tokenizer, family, runner)
    prompt = tuple(model.tokenizer.encode("where is my order?").tolist())
    answer = held_answer(model, plain, kind, grammars[kind], prompt, LONGEST)
    engine = engine_of(model, 24)
    oracle = OracleStrategy({prompt: answer}, model.vocab_size, seed=1)
    for strategy in (None, oracle, *(create(name) for name in ("trie", "hybrid"))):
        one, text = drafted_answer(engine, kind, grammars[kind], prompt, LONGEST, strategy, 24)
        assert one.output == answer
    if grammars is MARKED:
        ids = model.tokenizer.token_ids()
        assert {ids["<tool_call>"], ids["</tool_call>"]} & {*answer}
        assert "tool_call>" in text
    elif kind is GrammarKind.JSON_SCHEMA and answer[-1] == 1:
        assert json.loads(text)["city"] in CITIES


@pytest.mark.parametrize("tokenizer", BACKENDS)
def test_free_text_may_have_added_tokens_and_no_special_ones(tokenizer: str) -> None:
    model, _ = served(tokenizer)
    ids = model.tokenizer.token_ids()
    state = model.grammars.compile(GrammarKind.JSON_SCHEMA, '{"type": "string"}')
    for token in model.tokenizer.encode('"a').tolist()[-2:]:
        state.accept(token)
    allowed = allowed_by(state, model.vocab_size)
    assert all(allowed[ids[text]] for text in ("<tool_call>", "</tool_call>"))
    assert not any(allowed[ids[text]] for text in ("<other>", "<pad>"))
    state.accept(ids["<tool_call>"])
    assert state.allows(ids["</tool_call>"])


def test_special_tokens_of_a_grammar_are_named_in_brackets() -> None:
    model, _ = served("byte-level")
    state = model.grammars.compile(GrammarKind.LARK, 'start: "<tool_call>" <other>')
    for text in ("<tool_call>", "<other>"):
        assert state.allows(model.tokenizer.token_ids()[text])
        state.accept(model.tokenizer.token_ids()[text])
    with pytest.raises(InvalidInputError, match="unknown special token"):
        model.grammars.compile(GrammarKind.LARK, "start: <tool_call>")


@pytest.mark.parametrize("end", [1, None])
@pytest.mark.parametrize("missing", [1, 3, 9])
@pytest.mark.parametrize("tokenizer", BACKENDS)
def test_a_tokenizer_may_have_more_tokens_than_the_model(tokenizer: str, missing: int, end: int | None) -> None:
    """The added ones alone, as Gemma 3's, or those learned last as well."""
    model, _ = served(tokenizer, missing=missing, end=end)
    prompt, engine = tuple(model.tokenizer.encode("is order").tolist()), engine_of(model, 24)
    prompt = tuple(token for token in prompt if token < model.vocab_size)
    for kind, grammar in GRAMMARS.items():
        alone, text = drafted_answer(engine, kind, grammar, prompt, LONGEST, None, 24)
        for strategy in (OracleStrategy({prompt: alone.output}, model.vocab_size, seed=1), create("hybrid")):
            assert drafted_answer(engine, kind, grammar, prompt, LONGEST, strategy, 24)[0].output == alone.output
        assert max(alone.output) < model.vocab_size
        if kind is GrammarKind.JSON_SCHEMA:
            assert json.loads(text)["city"] in CITIES
    state = model.grammars.compile(GrammarKind.REGEX, "<tool_call>.?")
    while forced := state.forced():  # written as its characters, where the model lacks the token
        assert max(forced) < model.vocab_size
        state.accept(forced[0])


@pytest.mark.parametrize("held_back", [(), ('"}',)])
@pytest.mark.parametrize("tokenizer", BACKENDS)
def test_without_an_end_token_an_answer_ends_where_its_grammar_does(tokenizer: str, held_back: tuple[str, ...]) -> None:
    """Also if it ends with what may be the beginning of a stop string, or with a draft; an audit ends there too."""
    model, _ = served(tokenizer, missing=3, end=None)
    assert not model.eos_token_ids
    prompt, engine = tuple(model.tokenizer.encode("order").tolist()), engine_of(model, 24)
    kind, stop, written = GrammarKind.JSON_SCHEMA, StopParams(LONGEST, strings=held_back), list[int]()
    for strategy in (None, OracleStrategy({prompt: written}, model.vocab_size, seed=1)):
        grammar = model.grammars.compile(kind, GRAMMARS[kind])
        copy = grammar.copy()
        sequence = make_sequence("r", prompt, stop, strategy=strategy, max_draft_nodes=24, grammar=copy)
        outputs = run(engine, sequence)
        assert finish_of(outputs) == Finish(FinishReason.STOP)
        assert json.loads("".join("".join(output.texts) for output in outputs))["city"]
        assert written in ([], sequence.output)
        written[:] = sequence.output
        redecoding = engine.redecode(Answer(sequence.request, (*sequence.output,), finish_of(outputs), grammar))
        while not redecoding.done:
            redecoding.step()
        assert redecoding.difference is None


@pytest.mark.parametrize("ids", [[-1, 1], [1, 10_000], [-1], 99_999])
def test_end_tokens_that_the_model_does_not_have_are_left_out(
    ids: list[int] | int, caplog: pytest.LogCaptureFixture
) -> None:
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level(), pad_token="<pad>", eos_token="</s>")
    module = tiny("llama", vocab_size=len(fast))
    module.generation_config.eos_token_id = ids
    module.generation_config.suppress_tokens = [-1]  # as of Whisper
    model = adopt(module, Tokenizer(fast), name="ends", runner="torch")
    assert model.eos_token_ids == ({1} if isinstance(ids, list) and 1 in ids else set())
    assert re.search(
        r"eos_token_id of the model's config: left out (-1|10000|99999), as its vocabulary is", caplog.text
    )
    prompt, engine = model.tokenizer.encode("order").tolist(), engine_of(model, 8)
    for grammar in (None, model.grammars.compile(GrammarKind.REGEX, "[a-z]{5}")):
        sequence = make_sequence("r", prompt, StopParams(9, min_tokens=0 if grammar else 5), grammar=grammar)
        reason = finish_of(run(engine, sequence)).reason
        assert reason is (FinishReason.LENGTH if grammar is None else FinishReason.STOP)
