"""Answers as OpenAI's API shows them: whole, or as the chunks of a stream."""

from __future__ import annotations

import codecs
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from draftwood_client import (
    Completion,
    Delta,
    Sample,
    TokenDetail,
    ToolCall,
    ToolCallReader,
    ToolFormat,
)
from draftwood_service.gateway.reading import ParsedRequest
from draftwood_service.gateway.tools import ParsedTools


class Answers:
    """Shapes the answers of one request.

    Args:
        model: as the answer names it.
        form: how the model writes calls of tools, where it may.
    """

    def __init__(self, parsed: ParsedRequest, model: str, form: ToolFormat | None = None) -> None:
        self._parsed = parsed
        self._form = form
        self._contents: dict[int, _Content] = {}
        kind = "chat.completion" if parsed.chat else "text_completion"
        prefix = "chatcmpl" if parsed.chat else "cmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}
        self._chunk_head = {**self._head, "object": "chat.completion.chunk" if parsed.chat else "text_completion"}
        self._read: dict[int, _ReadText] = defaultdict(_ReadText)
        self._ended = set[int]()

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The answer to all prompts together."""
        answers: list[Completion | Sample] = []
        for completion in completions:
            answers += completion.samples or (completion,)
        choices = [
            self._choice(index, answer.text, answer.details, answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        return {**self._head, "choices": choices, **_totals(completions)}

    def first(self) -> list[dict[str, Any]]:
        """Chunks before the first tokens: chat says the role."""
        if not self._parsed.chat:
            return []
        indexes = range(len(self._parsed.prompts) * self._parsed.samples)
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) for index in indexes]

    def delta(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        """The chunk of some tokens; none if they complete no character or call, and nothing else is asked for."""
        if not (delta.token_ids or delta.text):
            return []
        details, index = self._details(delta), prompt * self._parsed.samples + delta.sample
        content = self._content_of(index).pushed(delta.text)
        if not (content or self._parsed.logprobs is not None or any(details.values())):
            return []
        choice: dict[str, Any] = {"delta": content or {"content": ""}} if self._parsed.chat else {"text": delta.text}
        if self._parsed.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, delta.details)
        chunk = self._chunk(index, choice)
        if details:
            chunk["draftwood"] = details
        return [chunk]

    def _content_of(self, index: int) -> _Content:
        if index not in self._contents:
            self._contents[index] = _Content(self._form, self._parsed.tools)
        return self._contents[index]

    def _details(self, delta: Delta) -> dict[str, list[dict[str, Any]]]:
        """Fields of a delta that OpenAI's API does not have."""
        details: dict[str, list[dict[str, Any]]] = {}
        if self._parsed.options.get("token_details"):
            details["tokens"] = _tokens(delta.details)
        if self._parsed.options.get("draft_trees"):
            details["trees"] = [
                {"tokens": [*tree.tokens], "parents": [*tree.parents], "accepted": [*tree.accepted]}
                for tree in delta.draft_trees
            ]
        return details

    def finished(self, prompt: int, sample: int, reason: str) -> list[dict[str, Any]]:
        """The chunks that end a sample: without content, but for text that looked like a call. None the second time."""
        index = prompt * self._parsed.samples + sample
        if index in self._ended:
            return []
        self._ended.add(index)
        content, chunks = self._content_of(index), []
        if rest := content.closed():
            chunks.append(self._chunk(index, {"delta": rest}))
        empty: dict[str, Any] = {"delta": {}} if self._parsed.chat else {"text": ""}
        return [*chunks, self._chunk(index, empty, content.reason(reason))]

    def last(self, completions: Sequence[Completion]) -> dict[str, Any] | None:
        """The chunk with the usage, if it was asked for: without choices."""
        if not self._parsed.include_usage:
            return None
        return {**self._chunk_head, "choices": [], **_totals(completions)}

    def _chunk(self, index: int, content: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **content, "finish_reason": reason}
        return {**self._chunk_head, "choices": [choice]}

    def _choice(self, index: int, text: str, details: Sequence[TokenDetail], reason: str) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self._parsed.chat:
            read = self._content_of(index)
            message = _joined(read.pushed(text), read.closed())
            content = {"message": {"role": "assistant", "content": None, "refusal": None, **message}}
            reason = read.reason(reason)
        logprobs = None if self._parsed.logprobs is None else self._logprobs(index, details)
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        if self._parsed.options.get("token_details"):
            choice["draftwood"] = {"tokens": _tokens(details)}
        return choice

    def _logprobs(self, index: int, details: Sequence[TokenDetail]) -> dict[str, Any]:
        if self._parsed.chat:
            return {
                "content": [
                    {
                        **_chat_token(detail.token_bytes, detail.logprob),
                        "top_logprobs": [
                            _chat_token(other.token_bytes, other.logprob) for other in detail.top_logprobs
                        ],
                    }
                    for detail in details
                ],
                "refusal": None,
            }
        offsets, read = [], self._read[index]
        for detail in details:
            offsets.append(read.characters)
            if not detail.left_out:
                read.push(detail.token_bytes)
        return {
            "tokens": [_token_text(detail.token_bytes) for detail in details],
            "token_logprobs": [detail.logprob for detail in details],
            "top_logprobs": [_by_text(detail) for detail in details],
            "text_offset": offsets,
        }


class _ReadText:
    """How many characters the tokens so far have completed."""

    def __init__(self) -> None:
        self.characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_bytes: bytes) -> None:
        self.characters += len(self._decoder.decode(token_bytes))


class _Content:
    """The content of a sample's message: its text, and its tool calls if the request has tools."""

    def __init__(self, form: ToolFormat | None, tools: ParsedTools | None) -> None:
        names = () if tools is None else (tool.name for tool in tools.tools)
        self._reader = None if form is None else ToolCallReader(form, names)
        self._parallel = tools is None or tools.parallel
        self._calls = 0

    def pushed(self, text: str) -> dict[str, Any]:
        """The fields that more text adds to the message; may be empty."""
        if self._reader is None:
            return {"content": text} if text else {}
        return self._shown(self._reader.push(text))

    def closed(self) -> dict[str, Any]:
        """The fields that the end of the answer adds."""
        return {} if self._reader is None else self._shown(self._reader.close())

    def reason(self, reason: str) -> str:
        """Why it ended."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _shown(self, pieces: Sequence[str | ToolCall]) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        if text := "".join(piece for piece in pieces if isinstance(piece, str)):
            shown["content"] = text
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)][
            : None if self._parallel else 1 - self._calls
        ]
        if calls:
            shown["tool_calls"] = [
                {
                    "index": self._calls + at,
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for at, call in enumerate(calls)
            ]
            self._calls += len(calls)
        return shown


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The message of an answer as a whole."""
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    text = first.get("content", "") + second.get("content", "")
    message: dict[str, Any] = {"content": text if text or not calls else None}
    if calls:
        message["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
    return message


def _chat_token(token_bytes: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _token_text(token_bytes), "logprob": logprob, "bytes": [*token_bytes]}


def _token_text(token_bytes: bytes) -> str:
    """As OpenAI writes a token that is part of a character."""
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _by_text(detail: TokenDetail) -> dict[str, float | None]:
    """The alternatives by their text, the token itself among them. Of several with the same text all but the first have
    their ids in its place."""
    logprobs: dict[str, float | None] = {}
    for logprob in detail.top_logprobs:
        text = _token_text(logprob.token_bytes)
        logprobs[f"token_id:{logprob.token_id}" if text in logprobs else text] = logprob.logprob
    logprobs.setdefault(_token_text(detail.token_bytes), detail.logprob)
    return logprobs


def _tokens(details: Sequence[TokenDetail]) -> list[dict[str, Any]]:
    return [{"text": detail.text, "drafted": detail.drafted} for detail in details]


def _totals(completions: Sequence[Completion]) -> dict[str, Any]:
    """Usage, and what drafting did, over all prompts."""
    prompt = sum(completion.usage.prompt_tokens for completion in completions)
    written = sum(completion.usage.completion_tokens for completion in completions)
    drafting = [completion.drafting for completion in completions]
    steps = sum(statistics.steps for statistics in drafting)
    by_steps = sum(statistics.mean_acceptance_length * statistics.steps for statistics in drafting)
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {
                "cached_tokens": sum(completion.usage.cached_prompt_tokens for completion in completions)
            },
        },
        "metrics": {
            "speculative_decoding": {
                "strategy": drafting[0].strategy,
                "steps": steps,
                "draft_tokens": sum(statistics.draft_tokens for statistics in drafting),
                "accepted_tokens": sum(statistics.accepted_tokens for statistics in drafting),
                "mean_acceptance_length": round(by_steps / steps, 3) if steps else 0.0,
                "disabled_reason": next(
                    (statistics.disabled_reason for statistics in drafting if statistics.disabled_reason), ""
                ),
            }
        },
    }
