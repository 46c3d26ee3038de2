"""Output: exact text to a pipe; to a terminal, text with colours and without control characters."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

import typer

from draftwood.v1.generation_pb2 import TokenDetail, ToolCallDelta
from draftwood_client.convert import plain
from draftwood_client.errors import ArgumentValueError
from draftwood_client.messages import ToolCall
from draftwood_client.results import Completion, Delta, Sample

_DRAFTED, _THOUGHT, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"

VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Control characters in an answer would be terminal commands; they are shown as escapes."""


def has_colours(stream: TextIO) -> bool:
    """Whether to colour `stream`: NO_COLOR and FORCE_COLOR decide, else whether it is a capable terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class AnswerWriter:
    """Writes an answer to stdout as it arrives: its text, and each call of a tool as a line. Reasoning is written to a
    terminal alone.

    Args:
        show_drafts: colour the tokens that were accepted from drafts, if stdout has colours.

    Attributes:
        needs_details: the request must ask for details of tokens and for raw text.
    """

    def __init__(self, show_drafts: bool = False) -> None:
        self._stream = sys.stdout
        self._is_terminal = self._stream.isatty()
        self._last = ""
        self._is_call = self._is_thought = False
        self.needs_details = show_drafts and has_colours(self._stream)

    def write(self, delta: Delta) -> None:
        if self.needs_details and "".join(detail.text for detail in delta.details) == delta.text:
            self._last = delta.text[-1:] or self._last  # first: Ctrl-C may interrupt the writing
            for detail in delta.details:
                text = self._shown(detail.text)
                self._stream.write(f"{_DRAFTED}{text}{_PLAIN}" if detail.drafted and text else text)
            self._stream.flush()
            return
        for part in delta.message.parts:
            if part.HasField("tool_call"):
                self._write_call(part.tool_call)
            elif part.HasField("reasoning"):
                self._write_thought(part.reasoning)
            else:
                self._end_part()
                self.write_text(part.text)

    def _write_call(self, call: ToolCallDelta) -> None:
        if call.name:
            self._end_part()
            self.begin_line()
            self.write_text(f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": ')
            self._is_call = True
        self.write_text(_on_one_line(call.arguments))

    def _write_thought(self, text: str) -> None:
        if self._is_terminal:
            dim = has_colours(self._stream)
            self._stream.write(f"{_THOUGHT}{self._shown(text)}{_PLAIN}" if dim else self._shown(text))
            self._stream.flush()
            self._last, self._is_thought = text[-1:] or self._last, True

    def _end_part(self) -> None:
        """Ends the line of a call, or separates reasoning from what follows it."""
        if self._is_call:
            self.write_text("}\n")
        elif self._is_thought:
            self.begin_line()
            self.write_text("\n")
        self._is_call = self._is_thought = False

    def write_text(self, text: str) -> None:
        self._last = text[-1:] or self._last
        self._stream.write(self._shown(text))
        self._stream.flush()

    def begin_line(self) -> None:
        """Ends an unfinished line."""
        if self._last not in ("", "\n"):
            self.write_text("\n")

    def end_line(self) -> None:
        """Ends a call, and an unfinished line on a terminal; a pipe gets the answer only."""
        if self._is_call:
            self._end_part()
        if self._is_terminal and self._last not in ("", "\n"):
            self.new_line()

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Writes several answers, numbered; they arrive interleaved, so they are written when complete."""
        for number, sample in enumerate(samples, 1):
            lines = [sample.text.rstrip("\n")] if sample.text or not sample.tool_calls else []
            shown = "\n".join([*lines, *map(_line, sample.tool_calls)]) if sample.tool_calls else sample.text
            self._stream.write(f"[{number}] {self._shown(shown)}\n")
        self._stream.flush()

    def new_line(self) -> None:
        """Ends the line; the answers of a conversation are separated by lines."""
        self._stream.write("\n")
        self._stream.flush()

    def _shown(self, text: str) -> str:
        return text.replace("\r\n", "\n").translate(VISIBLE) if self._is_terminal else text


def _line(call: ToolCall) -> str:
    """A call as JSON, with the arguments as the model wrote them."""
    name = json.dumps(call.name, ensure_ascii=False)
    return f'{{"name": {name}, "arguments": {_on_one_line(call.arguments)}}}'


def _on_one_line(arguments: str) -> str:
    """JSON has line ends between its parts only."""
    return arguments.replace("\r", " ").replace("\n", " ")


def print_stats(completion: Completion) -> None:
    """One line of drafting statistics on stderr."""
    usage, timings, drafting = completion.usage, completion.timings, completion.drafting
    arm = f" (arm {completion.arm} of {completion.experiment})" if completion.experiment else ""
    parts = [
        f"{usage.completion_tokens} tokens in {drafting.steps} steps, {drafting.mean_acceptance_length:.2f} per step",
        f"{drafting.strategy}{arm}: {drafting.accepted_tokens} of {drafting.draft_tokens} draft tokens accepted"
        f" ({drafting.acceptance_rate:.0%})",
        f"first token after {timings.queue + timings.prefill:.3f} s",
    ]
    if timings.decode > 0 and usage.completion_tokens > 1:
        parts.append(f"then {(usage.completion_tokens - 1) / timings.decode:.1f} tokens/s")
    if drafting.disabled_reason:
        parts.append(f"drafting switched off: {drafting.disabled_reason}")
    typer.echo("; ".join(parts), err=True)


def print_json(value: object) -> None:
    """One JSON object on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def completion_as_json(completion: Completion) -> dict[str, Any]:
    """All fields; samples, details and log-probabilities only if the request had the options."""
    values = asdict(completion) | {"usage": plain(completion.usage)}
    sources = completion.drafting.by_source.items()
    values["drafting"]["by_source"] = {source: plain(counts) for source, counts in sources}
    if not completion.samples:
        del values["samples"]
    for part in (values, *values.get("samples", ())):
        for empty in ("reasoning", "tool_calls"):
            if not part[empty]:
                del part[empty]
        if part is not values:
            part["usage"] = plain(part["usage"])
        if not part["details"]:
            del part["details"]
        else:
            part["details"] = [*map(_detail_as_json, part["details"])]
    return values


def _detail_as_json(detail: TokenDetail) -> dict[str, Any]:
    values = plain(detail)
    for token in (values, *values["top_logprobs"]):
        token["bytes"] = [*token["bytes"]]
    if values["logprob"] is None:
        del values["logprob"], values["top_logprobs"]
    return values


def read_text(argument: str | None, name: str) -> str:
    """The argument, or stdin (UTF-8, without its final newline) if it is "-" or None.

    Raises:
        typer.BadParameter: no argument, and stdin is a terminal.
        ArgumentValueError: stdin is not UTF-8.
    """
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise typer.BadParameter(f"give it as an argument, or on stdin with {name} '-'", param_hint=name)
    return decode(sys.stdin.buffer.read(), name).removesuffix("\n")


def decode(data: bytes, name: str) -> str:
    """UTF-8. Raises `ArgumentValueError`."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ArgumentValueError(name, f"byte {error.start} of stdin is not UTF-8") from None
