from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.output import Finish, FinishReason, OutputText
from draftwood_model_runner.request import StopParams
from tests.model_runner.families import served


def push_all(text: OutputText, tokens: list[int]) -> tuple[list[str], Finish | None]:
    texts, finish = [], None
    for token in tokens:
        piece, finish = text.push(token)
        texts.append(piece)
        if finish:
            break
    return texts, finish


@given(st.text(max_size=60))
def test_streams_whole_characters_that_join_to_the_text(text: str) -> None:
    tokenizer = served("bundled").tokenizer
    tokens = tokenizer.encode(text).tolist()
    output = OutputText(tokenizer.stream(), StopParams(10_000), frozenset())
    pieces, _ = push_all(output, tokens)
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces if "\ufffd" not in text)


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=40))
def test_any_tokens_at_all_stream_as_they_are_decoded_together(tokens: list[int]) -> None:
    tokenizer = served("bundled").tokenizer
    pieces, finish = push_all(OutputText(tokenizer.stream(), StopParams(len(tokens)), frozenset()), tokens)
    assert finish == Finish(FinishReason.LENGTH)
    assert "".join(pieces) == tokenizer.decode(tokens)


@given(st.text("ab .", min_size=1, max_size=40), st.lists(st.text("ab .", min_size=1, max_size=5), max_size=3))
def test_a_stop_string_ends_the_text_just_before_it(text: str, stops: list[str]) -> None:
    tokenizer = served("bundled").tokenizer
    output = OutputText(tokenizer.stream(), StopParams(10_000, strings=tuple(stops)), frozenset({3}))
    pieces, finish = push_all(output, [*tokenizer.encode(text).tolist(), 3])
    found = [(at, s) for s in stops if (at := text.find(s)) >= 0]
    assert finish is not None
    if found:
        assert finish.stop_string in stops
        written = "".join(pieces)
        assert text.startswith(written + finish.stop_string)
        assert not any(s in written for s in stops)
    else:
        assert finish == Finish(FinishReason.STOP, stop_token_id=3)
        assert "".join(pieces) == text


def test_a_tokenizer_without_a_fast_backend_is_refused() -> None:
    class Slow:
        is_fast = False
        chat_template = None

    with pytest.raises(UnsupportedModelError, match="Slow has no fast backend"):
        Tokenizer(Slow())
