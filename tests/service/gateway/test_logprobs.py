"""Log-probabilities in OpenAI's forms: each token's own text and bytes."""

from __future__ import annotations

from typing import Any

from draftwood.v1 import generation_pb2 as pb
from draftwood_client import Delta, TokenDetail, TokenLogprob
from draftwood_service.gateway.answers import Answers
from draftwood_service.gateway.reading import read_chat, read_completion

_HALVES = "🙂".encode()[:2], "🙂".encode()[2:]
_TOKENS = [b"that", b" is", *_HALVES, b"!", b"<end>"]
_SENT = ["", "", "that is🙂", "", "!", ""]
"""What came with each token, where a stop string holds text back."""


def details() -> tuple[TokenDetail, ...]:
    """Each token is the second best, and the alternatives differ in nothing but their ids or their bytes."""
    return tuple(
        TokenDetail(
            text=text,
            logprob=-0.5,
            top_logprobs=[
                TokenLogprob(token_id=token_id, logprob=logprob, bytes=token_bytes)
                for token_id, logprob, token_bytes in (
                    *((1, -0.25, b"\xe2"), (2, -0.5, token)),
                    *((3, -0.625, b"\xe3"), (4, -0.75, token)),
                )
            ],
            bytes=token,
            special=token == b"<end>",
        )
        for text, token in zip(_SENT, _TOKENS, strict=True)
    )


def delta(text: str, *details: TokenDetail) -> Delta:
    return Delta(pb.Delta(parts=[pb.Part(text=text)], token_ids=[2] * len(details), details=details))


def choices(parsed: Any, parts: int) -> list[dict[str, Any]]:
    """The log-probabilities of an answer whose tokens come in so many deltas."""
    answers, found, size = Answers(parsed, "m"), [], -(-len(_TOKENS) // parts)
    for start in range(0, len(_TOKENS), size):
        part = details()[start : start + size]
        text = "".join(detail.text for detail in part)
        [chunk] = answers.delta(0, delta(text, *part))
        found.append(chunk["choices"][0]["logprobs"])
    return found


def test_a_completion_has_the_offset_of_each_token_in_its_text() -> None:
    for parts in (1, 2, 6):
        found = choices(read_completion({"prompt": "x", "logprobs": 4, "stream": True}), parts)
        joined = {name: [value for one in found for value in one[name]] for name in found[0]}
        assert joined["tokens"] == ["that", " is", r"bytes:\xf0\x9f", r"bytes:\x99\x82", "!", "<end>"]
        assert joined["text_offset"] == [0, 4, 7, 7, 8, 9]
        assert joined["token_logprobs"] == [-0.5] * 6


def test_alternatives_with_the_same_text_do_not_hide_each_other() -> None:
    [found] = choices(read_completion({"prompt": "x", "logprobs": 4, "stream": True}), 1)
    assert found["top_logprobs"][0] == {r"bytes:\xe2": -0.25, "that": -0.5, r"bytes:\xe3": -0.625, "token_id:4": -0.75}


def test_the_token_itself_is_among_the_alternatives_of_a_completion() -> None:
    parsed = read_completion({"prompt": "x", "logprobs": 1, "stream": True})
    other = TokenLogprob(token_id=1, logprob=-0.125, bytes=b"a")
    detail = TokenDetail(text="b", logprob=-3.0, top_logprobs=[other], bytes=b"b")
    [chunk] = Answers(parsed, "m").delta(0, delta("b", detail))
    assert chunk["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.125, "b": -3.0}]


def test_a_chat_has_the_bytes_of_each_token() -> None:
    messages = [{"role": "user", "content": "x"}]
    [found] = choices(read_chat({"messages": messages, "logprobs": True, "top_logprobs": 4, "stream": True}), 1)
    assert bytes(byte for one in found["content"][:-1] for byte in one["bytes"]).decode() == "that is🙂!"
    assert [one["token"] for one in found["content"][:2]] == ["that", " is"]
    alternatives = [one["bytes"] for one in found["content"][2]["top_logprobs"]]
    assert alternatives == [[0xE2], [0xF0, 0x9F], [0xE3], [0xF0, 0x9F]]
