"""What goes to the terminal or the pipe: exact text to a pipe, safe and coloured text to a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TextIO

import typer

from draftwood_client.errors import ArgumentValueError
from draftwood_client.results import Completion, Delta, Sample

_DRAFTED, _PLAIN = "\x1b[32m", "\x1b[0m"

_VISIBLE = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""A model's control characters would be the terminal's commands: show them instead."""


def has_colours(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: NO_COLOR and FORCE_COLOR decide, otherwise what it is."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class AnswerWriter:
    """Writes an answer to stdout as it comes.

    Args:
        show_drafts: colour the tokens that were accepted from a draft, where there are colours.
    """

    def __init__(self, show_drafts: bool = False) -> None:
        self._stream = sys.stdout
        self._is_terminal = self._stream.isatty()
        self._last = ""
        self.needs_details = show_drafts and has_colours(self._stream)

    def write(self, delta: Delta) -> None:
        self._last = delta.text[-1:] or self._last  # first, for Ctrl-C can come at any point
        if self.needs_details and "".join(detail.text for detail in delta.details) == delta.text:
            for detail in delta.details:
                text = self._shown(detail.text)
                self._stream.write(f"{_DRAFTED}{text}{_PLAIN}" if detail.drafted and text else text)
        else:
            self._stream.write(self._shown(delta.text))
        self._stream.flush()

    def end_line(self) -> None:
        """Ends the line on a terminal, where it is not ended; a pipe gets nothing that is not the answer's."""
        if self._is_terminal and self._last not in ("", "\n"):
            self.new_line()

    def write_samples(self, samples: Sequence[Sample]) -> None:
        """Several answers, numbered: they come at the same time, so they are shown when they are whole."""
        for number, sample in enumerate(samples, 1):
            self._stream.write(f"[{number}] {self._shown(sample.text)}\n")
        self._stream.flush()

    def new_line(self) -> None:
        """Ends the line, as lines separate the answers of a conversation."""
        self._stream.write("\n")
        self._stream.flush()

    def _shown(self, text: str) -> str:
        return text.replace("\r\n", "\n").translate(_VISIBLE) if self._is_terminal else text


def print_stats(completion: Completion) -> None:
    """One line on stderr: what drafting did for the answer."""
    usage, timings, drafting = completion.usage, completion.timings, completion.drafting
    parts = [
        f"{usage.completion_tokens} tokens in {drafting.steps} steps, {drafting.mean_acceptance_length:.2f} a step",
        f"{drafting.strategy}: {drafting.accepted_tokens} of {drafting.draft_tokens} draft tokens accepted"
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
    """All fields; samples, details and log-probabilities where they were asked for."""
    values = asdict(completion)
    if not completion.samples:
        del values["samples"]
    for part in (values, *values.get("samples", ())):
        if not part["details"]:
            del part["details"]
        for detail in part.get("details", ()):
            if detail["logprob"] is None:
                del detail["logprob"], detail["top_logprobs"]
    return values


def read_text(argument: str | None, name: str) -> str:
    """The argument, or stdin for "-" or none: UTF-8, without its final newline.

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
