"""The text of an answer is that of its tokens, whatever the tokenizer."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from draftwood_model_runner.loading.tokenizer import TokenBytes, TokenDecoder
from tests.model_runner.families import served

_PIECES = ["▁", "▁a", "a", "b", "▁world", "world", ".", "é", "▁€", "n't", "##ing"]
_SPECIAL, _ADDED = "<s>", "<tool_call>"


@cache
def backend(kind: str) -> Backend:
    """A tokenizer of each kind that models have."""
    if kind == "byte-level":
        found: Backend = served("bundled").tokenizer._tokenizer.backend_tokenizer
        return found
    pieces = [_SPECIAL, "[UNK]", *_PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    if kind == "WordPiece":
        made = Backend(models.WordPiece(vocabulary))
        made.decoder = decoders.WordPiece()
    elif kind == "words":
        made = Backend(models.WordLevel(vocabulary))
    else:
        made = Backend(models.BPE(vocabulary, [], byte_fallback=True, unk_token="[UNK]"))
        made.normalizer = normalizers.Replace(" ", "▁")
        steps: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
        if kind == "Llama 2":
            made.decoder = decoders.Sequence([decoders.Replace("▁", " "), *steps, decoders.Strip(" ", 1, 0)])
        elif kind == "Gemma":
            made.decoder = decoders.Sequence([decoders.Replace("▁", " "), *steps])
        else:
            made.pre_tokenizer = pre_tokenizers.Metaspace()
            made.decoder = decoders.Metaspace()
    made.add_special_tokens([_SPECIAL])
    made.add_tokens([_ADDED])
    return made


_BYTE_FALLBACK = ["Llama 2", "Gemma"]
_KINDS = ["byte-level", *_BYTE_FALLBACK, "Metaspace", "WordPiece", "words"]


def id_of(backend: Backend, token: str) -> int:
    found: int | None = backend.token_to_id(token)
    assert found is not None
    return found


def streamed(backend: Backend, tokens: list[int], include_special_tokens: bool = False) -> list[str]:
    """What each token completes, and what is left at the end."""
    decoder = TokenDecoder(TokenBytes(backend), include_special_tokens)
    return [*map(decoder.push, tokens), decoder.close()]


@pytest.mark.parametrize("kind", _KINDS)
@given(numbers=st.lists(st.integers(0, 4095), max_size=30), include_special_tokens=st.booleans())
def test_random_tokens_have_the_text_that_they_have_behind_another_one(
    kind: str, numbers: list[int], include_special_tokens: bool
) -> None:
    tokenizer = backend(kind)
    tokens = [number % tokenizer.get_vocab_size() for number in numbers]
    first = id_of(tokenizer, "a")
    text = "".join(streamed(tokenizer, tokens, include_special_tokens))
    decoded = tokenizer.decode([first, *tokens], skip_special_tokens=not include_special_tokens)
    if kind == "byte-level" or "\ufffd" not in decoded:  # the others replace whole characters beside broken ones
        assert "a" + text == decoded
    else:
        assert "\ufffd" in text


@pytest.mark.parametrize("kind", ["byte-level", *_BYTE_FALLBACK])
@given(text=st.text(max_size=40))
@example(text=" a\ufffd")
@example(text="an é, a 🙂 and 家")
def test_text_is_streamed_in_whole_characters(kind: str, text: str) -> None:
    tokenizer = backend(kind)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    if kind != "byte-level" and ("▁" in text or _SPECIAL in text):  # the one is a space to them, the other no text
        return
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize("kind", _BYTE_FALLBACK)
def test_bytes_that_form_no_character_do_not_touch_their_neighbours(kind: str) -> None:
    tokenizer = backend(kind)
    half, letter = id_of(tokenizer, "<0xE2>"), id_of(tokenizer, "▁a")
    whole = [id_of(tokenizer, f"<0x{byte:02X}>") for byte in "€".encode()]
    assert streamed(tokenizer, [half, letter, *whole, half]) == ["", "\ufffd a", "", "", "€", "", "\ufffd"]


def test_many_bytes_of_no_character_take_no_longer_each() -> None:
    """Else this takes hours, and not a tenth of a second."""
    tokenizer = backend("Gemma")
    broken = [id_of(tokenizer, "<0xE2>")] * 100_000
    assert "".join(streamed(tokenizer, broken)) == "\ufffd" * 100_000


def test_a_token_that_the_tokenizer_does_not_have_has_no_bytes() -> None:
    token_bytes = TokenBytes(backend("Gemma"))
    assert token_bytes(1 << 20) == b""
    assert (token_bytes.text(id_of(backend("Gemma"), "<0xE2>")), token_bytes.special_ids) == ("\ufffd", {"<s>": 0})
