"""Structured output on tokenizers of other kinds than the bundled one's, and on other families of models."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from tokenizers.normalizers import Prepend, Replace, Sequence
from transformers import PreTrainedTokenizerFast

from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.loading.model import LoadedModel, adopt
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.request import GrammarKind, SamplingParams, StopParams
from draftwood_model_runner.sequence import Sequence as EngineSequence
from draftwood_strategies import Strategy, create
from tests.model_runner.families import as_prompt, tiny, with_runners
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import make_sequence

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "東京", "New York"]},
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
def served(family: str, runner: str, kind: str) -> tuple[LoadedModel, Any]:
    """A tiny random model with such a tokenizer, as we run it and as transformers does."""
    torch.set_num_threads(1)
    fast = PreTrainedTokenizerFast(tokenizer_object=BACKENDS[kind](), pad_token="<pad>", eos_token="</s>")
    # More columns than tokens, as many models have.
    plain, ours = (tiny(family, vocab_size=len(fast) + 7, eos_token_id=1) for _ in range(2))
    return adopt(ours, Tokenizer(fast), name=family, runner=runner), plain


def expected(model: LoadedModel, plain: Any, kind: GrammarKind, prompt: tuple[int, ...]) -> list[int]:
    """What transformers' `generate` writes when every step is held to the grammar, read from its beginning."""

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        state = model.grammars.compile(kind, GRAMMARS[kind])
        for token in ids[len(prompt) :].tolist():
            state.accept(token)
        scores = np.zeros(model.vocab_size, np.float32)
        state.mask(scores)
        return np.flatnonzero(np.isfinite(scores)).tolist()

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LONGEST,
            do_sample=False,
            pad_token_id=0,
            prefix_allowed_tokens_fn=allowed,
        )
    written: list[int] = out[0, len(prompt) :].tolist()
    return written


def write(
    engine: Engine, kind: GrammarKind, prompt: tuple[int, ...], strategy: Strategy | None, **sampling: Any
) -> tuple[EngineSequence, str]:
    one = make_sequence(
        "r",
        as_prompt(prompt),
        StopParams(LONGEST),
        SamplingParams(**sampling),
        strategy=strategy,
        max_draft_nodes=24,
        grammar=engine.model.grammars.compile(kind, GRAMMARS[kind]),
    )
    engine.add(one)
    text = ""
    while engine.has_work:
        for output in engine.step():
            assert output.finish is None or output.finish.error is None
            text += "".join(output.texts)
    assert one.stats.drafting_disabled_reason == ""
    return one, text


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize(("family", "runner"), with_runners(["llama", "gemma2", "gpt-neox", "qwen3"], ["qwen3"]))
@pytest.mark.parametrize("tokenizer", BACKENDS)
def test_the_answer_is_plain_decodings_with_any_draft(
    tokenizer: str, family: str, runner: str, kind: GrammarKind
) -> None:
    model, plain = served(family, runner, tokenizer)
    prompt = tuple(model.tokenizer.encode("where is my order?").tolist())
    answer = expected(model, plain, kind, prompt)
    engine = Engine(model, EngineConfig(max_draft_nodes=24, adaptive_budget=False))
    oracle = OracleStrategy({prompt: answer}, model.vocab_size, seed=1)
    for strategy in (None, oracle, *(create(name) for name in ("trie", "hybrid"))):
        one, text = write(engine, kind, prompt, strategy)
        assert one.output == answer
    if kind is GrammarKind.JSON_SCHEMA and answer[-1] == 1:
        assert json.loads(text)["city"] in SCHEMA["properties"]["city"]["enum"]  # type: ignore[index]


@pytest.mark.parametrize("tokenizer", BACKENDS)
def test_sampled_answers_follow_the_schema_and_do_not_depend_on_drafts(tokenizer: str) -> None:
    model, _ = served("llama", "torch", tokenizer)
    prompt = tuple(model.tokenizer.encode("please").tolist())
    engine = Engine(model, EngineConfig(max_draft_nodes=24, adaptive_budget=False))
    cities = set()
    for seed in range(8):
        alone, text = write(engine, GrammarKind.JSON_SCHEMA, prompt, None, temperature=1.5, seed=seed)
        drafted, same = write(
            engine,
            GrammarKind.JSON_SCHEMA,
            prompt,
            create("recycling"),
            temperature=1.5,
            seed=seed,
        )
        assert drafted.output == alone.output
        assert same == text
        value = json.loads(text)
        assert 1 <= value["stars"] <= 5
        cities.add(value["city"])
    assert len(cities) > 1
    assert cities <= {"Zürich", "東京", "New York"}
