"""Answers as OpenAI's API shows them: whole, or as the chunks of a stream."""

from __future__ import annotations

import codecs
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from draftwood_client import Completion, Delta, FinishReason, Sample, TokenDetail
from draftwood_service.gateway.reading import ParsedRequest


class Shape(Protocol):
    """Shapes the answers of one request as an API shows them: whole, or as the events of a stream, each of which has
    the name in its field `type`, if it has that.

    Attributes:
        done: data that ends a stream; "" for none.
    """

    done: str
    id: str

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]: ...
    def first(self) -> list[dict[str, Any]]: ...
    def delta(self, prompt: int, delta: Delta) -> list[dict[str, Any]]: ...
    def finished(self, prompt: int, sample: int, reason: FinishReason) -> list[dict[str, Any]]: ...
    def last(self, completions: Sequence[Completion]) -> list[dict[str, Any]]: ...
    def failed(self, body: dict[str, Any]) -> list[dict[str, Any]]: ...


class Answers:
    """A `Shape` of chat and completions.

    Args:
        model: as the answer names it.
    """

    done = "[DONE]"

    def __init__(self, parsed: ParsedRequest, model: str) -> None:
        self._parsed = parsed
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
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "choices": choices, **totals(completions)}

    def first(self) -> list[dict[str, Any]]:
        """Chunks before the first tokens: chat says the role."""
        if not self._parsed.chat:
            return []
        indexes = range(len(self._parsed.prompts) * self._parsed.samples)
        return [self._chunk(index, {"delta": {"role": "assistant", "content": ""}}) for index in indexes]

    def delta(self, prompt: int, delta: Delta) -> list[dict[str, Any]]:
        """The chunk of some tokens; none if they complete no character or piece of a call, and nothing else is asked
        for."""
        if not (delta.token_ids or delta.message.parts):
            return []
        details, index = self._details(delta), prompt * self._parsed.samples + delta.sample
        content = self._content(delta)
        if not (content or self._parsed.logprobs is not None or any(details.values())):
            return []
        choice: dict[str, Any] = {"delta": content or {"content": ""}} if self._parsed.chat else {"text": delta.text}
        if self._parsed.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, delta.details)
        chunk = self._chunk(index, choice)
        if details:
            chunk["draftwood"] = details
        return [chunk]

    def _content(self, delta: Delta) -> dict[str, Any]:
        """The fields that a delta adds to the message of its sample; may be empty."""
        content = {"content": delta.text, "reasoning_content": delta.reasoning}
        shown: dict[str, Any] = {name: text for name, text in content.items() if text}
        calls: list[dict[str, Any]] = []
        for piece in delta.tool_calls:
            if piece.index and not self._parallel:
                continue
            if calls and calls[-1]["index"] == piece.index:
                calls[-1]["function"]["arguments"] += piece.arguments
            elif piece.name:
                function = {"name": piece.name, "arguments": piece.arguments}
                calls.append({"index": piece.index, "id": piece.id, "type": "function", "function": function})
            else:
                calls.append({"index": piece.index, "function": {"arguments": piece.arguments}})
        return {**shown, "tool_calls": calls} if calls else shown

    @property
    def _parallel(self) -> bool:
        """The answer may have several calls."""
        return self._parsed.tools is None or self._parsed.tools.parallel

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

    def finished(self, prompt: int, sample: int, reason: FinishReason) -> list[dict[str, Any]]:
        """The chunk that ends a sample, without content. None the second time."""
        index = prompt * self._parsed.samples + sample
        if index in self._ended:
            return []
        self._ended.add(index)
        empty: dict[str, Any] = {"delta": {}} if self._parsed.chat else {"text": ""}
        return [self._chunk(index, empty, _reason(reason))]

    def last(self, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """The chunk with the usage, if it was asked for: without choices."""
        if not self._parsed.include_usage:
            return []
        return [{**self._chunk_head, "choices": [], **totals(completions)}]

    def failed(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """What ends a stream with an error, given as `body_of` has it."""
        return [body]

    def _chunk(self, index: int, content: Mapping[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **content, "finish_reason": reason}
        no_usage = {"usage": None} if self._parsed.include_usage else {}
        return {**self._chunk_head, "choices": [choice], **no_usage}

    def _choice(self, index: int, answer: Completion | Sample) -> dict[str, Any]:
        content: dict[str, Any] = {"text": answer.text}
        if self._parsed.chat:
            content = {"message": {"role": "assistant", "content": None, "refusal": None, **self._message(answer)}}
        logprobs = None if self._parsed.logprobs is None else self._logprobs(index, answer.details)
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": _reason(answer.finish_reason)}
        if self._parsed.options.get("token_details"):
            choice["draftwood"] = {"tokens": _tokens(answer.details)}
        return choice

    def _message(self, answer: Completion | Sample) -> dict[str, Any]:
        calls = answer.tool_calls if self._parallel else answer.tool_calls[:1]
        message: dict[str, Any] = {"content": answer.text if answer.text or not calls else None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message

    def _logprobs(self, index: int, details: Sequence[TokenDetail]) -> dict[str, Any]:
        if self._parsed.chat:
            return {
                "content": [
                    {
                        **_chat_token(detail.bytes, detail.logprob),
                        "top_logprobs": [_chat_token(other.bytes, other.logprob) for other in detail.top_logprobs],
                    }
                    for detail in details
                ],
                "refusal": None,
            }
        offsets, read = [], self._read[index]
        for detail in details:
            offsets.append(read.characters)
            if not detail.special:
                read.push(detail.bytes)
        return {
            "tokens": [_token_text(detail.bytes) for detail in details],
            "token_logprobs": [detail.logprob for detail in details],
            "top_logprobs": [_by_text(detail) for detail in details],
            "text_offset": offsets,
        }


class _ReadText:
    """How many characters the tokens so far have completed."""

    def __init__(self) -> None:
        self.characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, written: bytes) -> None:
        self.characters += len(self._decoder.decode(written))


def _reason(reason: FinishReason) -> str:
    """OpenAI's API has no answers that the server ended; vLLM calls them so."""
    return "abort" if reason is FinishReason.CANCELLED else reason.value


def _chat_token(token: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": _token_text(token), "logprob": logprob, "bytes": [*token]}


def _token_text(token: bytes) -> str:
    """As OpenAI writes a token that is part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _by_text(detail: TokenDetail) -> dict[str, float | None]:
    """The alternatives by their text, the token itself among them. Of several with the same text all but the first have
    their ids in its place."""
    logprobs: dict[str, float | None] = {}
    for logprob in detail.top_logprobs:
        text = _token_text(logprob.bytes)
        logprobs[f"token_id:{logprob.token_id}" if text in logprobs else text] = logprob.logprob
    logprobs.setdefault(_token_text(detail.bytes), detail.logprob)
    return logprobs


def _tokens(details: Sequence[TokenDetail]) -> list[dict[str, Any]]:
    return [{"text": detail.text, "drafted": detail.drafted} for detail in details]


def totals(completions: Sequence[Completion]) -> dict[str, Any]:
    """Usage, and what drafting did, over all prompts."""
    prompt = sum(completion.usage.prompt_tokens for completion in completions)
    written = sum(completion.usage.completion_tokens for completion in completions)
    drafting = [completion.drafting for completion in completions]
    steps = sum(statistics.steps for statistics in drafting)
    drafted = sum(statistics.draft_tokens for statistics in drafting)
    accepted = sum(statistics.accepted_tokens for statistics in drafting)
    by_steps = sum(statistics.mean_acceptance_length * statistics.steps for statistics in drafting)
    return {
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {
                "cached_tokens": sum(completion.usage.cached_prompt_tokens for completion in completions)
            },
            "completion_tokens_details": {
                "reasoning_tokens": sum(completion.usage.reasoning_tokens for completion in completions),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        },
        "metrics": {
            "speculative_decoding": {
                "strategy": drafting[0].strategy,
                "steps": steps,
                "draft_tokens": drafted,
                "accepted_tokens": accepted,
                "mean_acceptance_length": round(by_steps / steps, 3) if steps else 0.0,
                "disabled_reason": next(
                    (statistics.disabled_reason for statistics in drafting if statistics.disabled_reason), ""
                ),
            }
        },
    }
